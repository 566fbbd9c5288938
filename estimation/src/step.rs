//! A step: what of its exchanges backward does not hide.

use crate::draws::DRAWS;
use flexcomm_domain::{MAX_BUCKETS, Plan, Strategy};

/// How a job computes and what it sends.
#[derive(Debug, Clone, PartialEq)]
pub struct Shape {
    /// In the order in which backward has them ready.
    groups: Vec<Group>,
    /// Forward, backward and update.
    pub compute: Compute,
}

/// What forward, backward and update of a step take.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Compute {
    /// Their median, seconds.
    pub median_s: f64,
    /// Their standard deviation, in logarithms.
    sd: f64,
}

impl Compute {
    /// Before the first step: 15 ms to 6 s with 95 %, as steps of one GPU take.
    pub const UNKNOWN: Self = Self { median_s: 0.3, sd: 1.5 };

    /// As measured.
    pub fn measured(seconds: f64) -> Self {
        Self { median_s: seconds, sd: 0.0 }
    }

    /// Seconds, by a row of draws.
    pub fn samples(self, row: &[f64]) -> Vec<f64> {
        row.iter().map(|draw| self.median_s * (self.sd * draw).exp()).collect()
    }
}

/// Buckets that are exchanged one after the other.
#[derive(Debug, Clone, Copy, PartialEq)]
struct Group {
    /// Share of the gradient's values; those of all add up to 1.
    share: f64,
    /// Share of its energy, likewise.
    energy: f64,
    /// How many buckets.
    count: usize,
}

/// What the exchange of a whole gradient takes by one strategy, seconds.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub struct Cost {
    /// In each bucket.
    pub each_s: f64,
    /// Shared among the buckets by their values.
    pub all_s: f64,
    /// Compressing and decompressing, shared likewise.
    pub compress_s: f64,
}

/// [`DRAWS`] samples of [`Cost`].
#[derive(Debug, Clone, PartialEq)]
pub struct Costs<'a> {
    /// In each bucket.
    pub each_s: Vec<f64>,
    /// Shared among the buckets by their values.
    pub all_s: Vec<f64>,
    /// Compressing and decompressing, shared likewise.
    pub compress_s: &'a [f64],
}

impl Group {
    /// From when the group is ready and its exchange ends, given when those of the one before were.
    fn exchange(&self, (ready, end): (&mut f64, &mut f64), backward_s: f64, cost: Cost) {
        *ready += self.share * (backward_s + cost.compress_s);
        // Not f64::max, whose care for NaN keeps loops over samples from being vectorised.
        let begins = if *end > *ready { *end } else { *ready };
        *end = begins + self.count as f64 * cost.each_s + self.share * cost.all_s;
    }
}

/// Most groups of buckets: small neighbours count as ready when the last of them is.
const MOST_GROUPS: usize = 8;

impl Shape {
    /// Of the values of each bucket; of none: one. `energies` are the buckets' shares in the gradient's energy; where there are not as many,
    /// they are those of the values.
    pub fn new(values: &[u64], energies: &[f32], compute: Compute) -> Self {
        let all: f64 = values.iter().map(|n| *n as f64).sum();
        let energy: f64 = energies.iter().map(|share| f64::from(*share)).sum();
        let known = energies.len() == values.len() && energy > 0.0;
        let group = |(at, n): (usize, &u64)| {
            let share = *n as f64 / all;
            Group { share, energy: if known { f64::from(energies[at]) / energy } else { share }, count: 1 }
        };
        let mut groups: Vec<Group> = values.iter().enumerate().filter(|(_, n)| **n > 0).map(group).collect();
        while groups.len() > MOST_GROUPS {
            let pair = |i: &usize| groups[*i].share + groups[i + 1].share;
            let least = (0..groups.len() - 1).min_by(|a, b| pair(a).total_cmp(&pair(b))).unwrap_or(0);
            let next = groups.remove(least + 1);
            let Group { share, energy, count } = groups[least];
            groups[least] =
                Group { share: share + next.share, energy: energy + next.energy, count: count + next.count };
        }
        if groups.is_empty() {
            groups.push(Group { share: 1.0, energy: 1.0, count: 1 });
        }
        Self { groups, compute }
    }

    /// The groups' shares of the gradient's values: of what is sent and compressed.
    pub fn shares(&self) -> impl ExactSizeIterator<Item = f64> {
        self.groups.iter().map(|group| group.share)
    }

    /// The groups' shares of its energy: of what is kept.
    pub fn energies(&self) -> impl ExactSizeIterator<Item = f64> {
        self.groups.iter().map(|group| group.energy)
    }

    /// The strategy of each group under a plan: that of its last bucket.
    pub fn by_group<'a>(&self, plan: &'a Plan) -> Vec<&'a Strategy> {
        let mut buckets = 0;
        let last = |group: &Group| {
            buckets += group.count;
            plan.of(buckets - 1)
        };
        self.groups.iter().map(last).collect()
    }

    /// Whether a plan can tell a group from those behind it.
    pub fn tells_apart(&self, group: usize) -> bool {
        self.groups[..=group].iter().map(|group| group.count).sum::<usize>() < MAX_BUCKETS
    }

    /// The plan of a strategy for each group; none where there are more buckets than a plan tells apart.
    pub fn plan<'a>(&self, by_group: impl IntoIterator<Item = &'a Strategy>) -> Option<Plan> {
        let each = self.groups.iter().zip(by_group);
        let buckets: Vec<_> = each.flat_map(|(group, of)| std::iter::repeat_n(*of, group.count)).collect();
        Plan::by_bucket(&buckets).ok()
    }

    /// Seconds that a step waits for exchanges after backward has ended; `of` is the cost of each group's strategy. A bucket's exchange
    /// starts when the bucket is ready and the one before has ended. Buckets become ready during the last `backward_s` of computing, each
    /// after as much of it as it has of the gradient, and are compressed there.
    pub fn exposed(&self, backward_s: f64, of: impl Fn(usize) -> Cost) -> f64 {
        let (mut ready, mut end) = (0.0, 0.0);
        for (at, group) in self.groups.iter().enumerate() {
            group.exchange((&mut ready, &mut end), backward_s, of(at));
        }
        end - ready
    }

    /// The same of [`DRAWS`] samples of each.
    pub fn exposed_samples<'a>(&self, backward_s: &[f64], of: impl Fn(usize) -> &'a Costs<'a>) -> Vec<f64> {
        let (mut ready, mut end) = ([0.0; DRAWS], [0.0; DRAWS]);
        for (at, group) in self.groups.iter().enumerate() {
            let costs = of(at);
            let (each_s, all_s, compress_s) =
                (&costs.each_s[..DRAWS], &costs.all_s[..DRAWS], &costs.compress_s[..DRAWS]);
            for (k, backward_s) in backward_s[..DRAWS].iter().enumerate() {
                let cost = Cost { each_s: each_s[k], all_s: all_s[k], compress_s: compress_s[k] };
                group.exchange((&mut ready[k], &mut end[k]), *backward_s, cost);
            }
        }
        end.iter().zip(ready).map(|(end, ready)| end - ready).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::{prop, prop_assert, proptest};

    fn job(values: &[u64], energies: &[f32], compute_s: f64) -> Shape {
        Shape::new(values, energies, Compute::measured(compute_s))
    }

    #[test]
    fn one_bucket_waits_for_all_of_its_exchange() {
        assert!(
            (job(&[], &[], 1.0).exposed(0.6, |_| Cost { each_s: 0.1, all_s: 2.0, compress_s: 0.3 }) - 2.1).abs()
                < 1e-12
        );
    }

    #[test]
    fn what_is_ready_early_is_hidden_and_the_last_bucket_is_not() {
        let shape = job(&[300, 100], &[], 1.0);
        // Ready at 0.6 and 0.8 s; 0.15 s and 0.05 s to send.
        assert!((shape.exposed(0.8, |_| Cost { each_s: 0.0, all_s: 0.2, compress_s: 0.0 }) - 0.05).abs() < 1e-12);
        // Of 1.5 s and 0.5 s the first is ready at 0.6 s, the second begins at 2.1 s.
        assert!(
            (shape.exposed(0.8, |_| Cost { each_s: 0.0, all_s: 2.0, compress_s: 0.0 }) - (0.6 + 2.0 - 0.8)).abs()
                < 1e-12
        );
    }

    #[test]
    fn small_buckets_count_as_ready_together() {
        let shape = job(&[1; 60], &[], 1.0);
        assert_eq!(shape.groups.len(), MOST_GROUPS);
        // All of them are sent, each with what it takes by itself.
        assert!((shape.exposed(0.0, |_| Cost { each_s: 0.1, all_s: 2.0, compress_s: 0.0 }) - 8.0).abs() < 1e-9);
    }

    #[test]
    fn what_is_hidden_may_be_dense_and_what_is_exposed_is_not() {
        let shape = job(&[300, 100], &[], 1.0);
        let (dense, sparse) = (Cost { all_s: 0.8, ..Cost::default() }, Cost { all_s: 0.08, ..Cost::default() });
        // The first is sent from 0.6 s to 1.2 s, the second takes 8 ms behind it; all sparse: 0.02 s behind 0.8 s.
        assert!((shape.exposed(0.8, |at| [dense, sparse][at]) - 0.42).abs() < 1e-12);
        assert!((shape.exposed(0.8, |_| sparse) - 0.02).abs() < 1e-12);
    }

    #[test]
    fn energies_are_as_measured_and_those_of_the_values_until_then() {
        let energies = |values: &[u64], energies: &[f32]| job(values, energies, 1.0).energies().collect::<Vec<_>>();
        assert_eq!(energies(&[300, 100], &[0.125, 0.375]), [0.25, 0.75], "shares, whatever they add up to");
        for unknown in [&[][..], &[1.0], &[0.0, 0.0]] {
            assert_eq!(energies(&[300, 100], unknown), [0.75, 0.25]);
        }
        let grouped = job(&[10, 1, 1, 10, 10, 10, 10, 10, 10, 10], &[0.1; 10], 1.0);
        assert_eq!(grouped.energies().len(), MOST_GROUPS);
        assert!((grouped.energies().sum::<f64>() - 1.0).abs() < 1e-6);
        assert!(grouped.energies().any(|share| (share - 0.3).abs() < 1e-6), "of all three neighbours");
    }

    #[test]
    fn plans_are_by_bucket_and_groups_are_of_neighbours() {
        let shape = job(&[10, 1, 1, 10, 10, 10, 10, 10, 10, 10], &[], 1.0);
        let [dense, sparse] = ["none/dense-ring", "topk(k=0.1)+ef(vanilla)/allgather"].map(|s| s.parse().unwrap());
        let by_group: Vec<&Strategy> = (0..8).map(|group| if group < 2 { &dense } else { &sparse }).collect();
        let plan = shape.plan(by_group.iter().copied()).unwrap();
        assert_eq!(shape.by_group(&plan), by_group);
        assert_eq!(shape.shares().len(), 8);
        assert!(job(&[1; 61], &[], 1.0).plan(vec![&dense; 8]).is_some(), "alike");
    }

    proptest! {
        #[test]
        fn more_is_hidden_where_backward_is_longer_and_never_the_last_bucket(
            values in prop::collection::vec(1u64..1000, 1..20), each in 0.0..0.1f64, all in 0.0..10.0f64, backward in 0.0..5.0f64
        ) {
            let shape = job(&values, &[], 10.0);
            let [longer, shorter] = [backward + 1.0, backward].map(|b| shape.exposed(b, |_| Cost { each_s: each, all_s: all, compress_s: 0.0 }));
            let last = shape.groups.last().unwrap();
            let last = last.count as f64 * each + last.share * all;
            prop_assert!(longer <= shorter + 1e-9 && longer >= last - 1e-9, "{longer} {shorter} {last}");
        }
    }
}
