//! A step: what of its exchanges backward does not hide.

/// How a job computes and what it sends.
#[derive(Debug, Clone, PartialEq)]
pub struct Shape {
    /// Share of the gradient in each bucket, in the order in which backward has them ready; they add up to 1.
    pub buckets: Vec<f64>,
    /// Seconds of forward, backward and update.
    pub compute_s: f64,
}

/// Most buckets that are reckoned with; small ones count as one.
const MOST_BUCKETS: usize = 8;

impl Shape {
    /// Of the values of each bucket; of none: one.
    pub fn new(values: &[u64], compute_s: f64) -> Self {
        let all: f64 = values.iter().map(|n| *n as f64).sum();
        let mut buckets: Vec<f64> = values.iter().map(|n| *n as f64 / all).filter(|share| *share > 0.0).collect();
        while buckets.len() > MOST_BUCKETS {
            let pair = |i: &usize| buckets[*i] + buckets[i + 1];
            let least = (0..buckets.len() - 1).min_by(|a, b| pair(a).total_cmp(&pair(b))).unwrap_or(0);
            let next = buckets.remove(least + 1);
            buckets[least] += next;
        }
        if buckets.is_empty() {
            buckets.push(1.0);
        }
        Self { buckets, compute_s }
    }

    /// Seconds that a step waits for exchanges after backward has ended. A bucket's exchange takes `each_s` and its share of `all_s`, and
    /// starts when the bucket is ready and the one before has ended. Buckets become ready during the last `backward_s` of computing, each
    /// after as much of it as it has of the gradient, and are compressed there, `compress_s` in all.
    pub fn exposed(&self, each_s: f64, all_s: f64, (backward_s, compress_s): (f64, f64)) -> f64 {
        let (mut ready, mut end) = (0.0, 0.0_f64);
        for share in &self.buckets {
            ready += share * (backward_s + compress_s);
            end = end.max(ready) + each_s + share * all_s;
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
        assert_eq!(Shape::new(&[], 1.0).buckets, [1.0]);
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
    fn small_buckets_count_as_one() {
        let shape = Shape::new(&[1; 60], 1.0);
        assert_eq!(shape.buckets.len(), MOST_BUCKETS);
        assert!((shape.buckets.iter().sum::<f64>() - 1.0).abs() < 1e-12);
    }

    proptest! {
        #[test]
        fn more_is_hidden_where_backward_is_longer_and_never_the_last_bucket(
            values in prop::collection::vec(1u64..1000, 1..20), each in 0.0..0.1f64, all in 0.0..10.0f64, backward in 0.0..5.0f64
        ) {
            let shape = Shape::new(&values, 10.0);
            let [longer, shorter] = [backward + 1.0, backward].map(|b| shape.exposed(each, all, (b, 0.0)));
            let last = each + all * shape.buckets.last().unwrap();
            prop_assert!(longer <= shorter + 1e-9 && longer >= last - 1e-9, "{longer} {shorter} {last}");
        }
    }
}
