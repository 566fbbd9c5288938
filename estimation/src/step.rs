//! A step: what of its exchanges backward does not hide.

/// How a job computes and what it sends.
#[derive(Debug, Clone, PartialEq)]
pub struct Shape {
    /// In the order in which backward has them ready.
    groups: Vec<Group>,
    /// Seconds of forward, backward and update.
    pub compute_s: f64,
}

/// Buckets that are exchanged one after the other.
#[derive(Debug, Clone, Copy, PartialEq)]
struct Group {
    /// Share of the gradient; those of all add up to 1.
    share: f64,
    /// How many buckets.
    count: f64,
}

/// Most groups of buckets: small neighbours count as ready when the last of them is.
const MOST_GROUPS: usize = 8;

impl Shape {
    /// Of the values of each bucket; of none: one.
    pub fn new(values: &[u64], compute_s: f64) -> Self {
        let all: f64 = values.iter().map(|n| *n as f64).sum();
        let group = |n: &u64| Group { share: *n as f64 / all, count: 1.0 };
        let mut groups: Vec<Group> = values.iter().filter(|n| **n > 0).map(group).collect();
        while groups.len() > MOST_GROUPS {
            let pair = |i: &usize| groups[*i].share + groups[i + 1].share;
            let least = (0..groups.len() - 1).min_by(|a, b| pair(a).total_cmp(&pair(b))).unwrap_or(0);
            let next = groups.remove(least + 1);
            groups[least] = Group { share: groups[least].share + next.share, count: groups[least].count + next.count };
        }
        if groups.is_empty() {
            groups.push(Group { share: 1.0, count: 1.0 });
        }
        Self { groups, compute_s }
    }

    /// Seconds that a step waits for exchanges after backward has ended. A bucket's exchange takes `each_s` and its share of `all_s`, and
    /// starts when the bucket is ready and the one before has ended. Buckets become ready during the last `backward_s` of computing, each
    /// after as much of it as it has of the gradient, and are compressed there, `compress_s` in all.
    pub fn exposed(&self, each_s: f64, all_s: f64, (backward_s, compress_s): (f64, f64)) -> f64 {
        let (mut ready, mut end) = (0.0, 0.0_f64);
        for group in &self.groups {
            ready += group.share * (backward_s + compress_s);
            end = end.max(ready) + group.count * each_s + group.share * all_s;
        }
        end - (backward_s + compress_s)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::{prop, prop_assert, proptest};

    #[test]
    fn one_bucket_waits_for_all_of_its_exchange() {
        assert!((Shape::new(&[], 1.0).exposed(0.1, 2.0, (0.6, 0.3)) - 2.1).abs() < 1e-12);
    }

    #[test]
    fn what_is_ready_early_is_hidden_and_the_last_bucket_is_not() {
        let shape = Shape::new(&[300, 100], 1.0);
        // Ready at 0.6 and 0.8 s; 0.15 s and 0.05 s to send.
        assert!((shape.exposed(0.0, 0.2, (0.8, 0.0)) - 0.05).abs() < 1e-12);
        // Of 1.5 s and 0.5 s the first is ready at 0.6 s, the second begins at 2.1 s.
        assert!((shape.exposed(0.0, 2.0, (0.8, 0.0)) - (0.6 + 2.0 - 0.8)).abs() < 1e-12);
    }

    #[test]
    fn small_buckets_count_as_ready_together() {
        let shape = Shape::new(&[1; 60], 1.0);
        assert_eq!(shape.groups.len(), MOST_GROUPS);
        // All of them are sent, each with what it takes by itself.
        assert!((shape.exposed(0.1, 2.0, (0.0, 0.0)) - 8.0).abs() < 1e-9);
    }

    proptest! {
        #[test]
        fn more_is_hidden_where_backward_is_longer_and_never_the_last_bucket(
            values in prop::collection::vec(1u64..1000, 1..20), each in 0.0..0.1f64, all in 0.0..10.0f64, backward in 0.0..5.0f64
        ) {
            let shape = Shape::new(&values, 10.0);
            let [longer, shorter] = [backward + 1.0, backward].map(|b| shape.exposed(each, all, (b, 0.0)));
            let last = shape.groups.last().unwrap();
            let last = last.count * each + last.share * all;
            prop_assert!(longer <= shorter + 1e-9 && longer >= last - 1e-9, "{longer} {shorter} {last}");
        }
    }
}
