//! A strategy for each group of buckets: what NSGA-II searches.
//!
//! Backward hides the exchange of early buckets and never that of the last one: early buckets may stay dense, or nearly, where late
//! ones are compressed. One ratio for all cannot have both. The search is over what is expected; the best that it finds is improved one
//! group after the other, and what is found is then priced by the same samples as everything else.

use crate::{JobPolicy, PolicyConfig, Snapshot};
use flexcomm_domain::spec::MemoryKind;
use flexcomm_domain::{CompressionRatio, Gain, Plan, Seconds, Strategy};
use flexcomm_estimation::exchange::BACKWARD_SHARE;
use flexcomm_estimation::{Compute, Cost, Shape};
use flexcomm_optimizer::nsga::{self, Search, Settings, Start};
use flexcomm_optimizer::{Evaluated, Terms};
use std::cell::OnceCell;

/// Plans of a search that are priced,
const MOST_FOUND: usize = 16;
/// and that are improved before.
const IMPROVED: usize = 2;
/// By so much more, as a share, a plan may cost that has fewer strategies.
const SAME: f64 = 0.005;
/// Options that are listed behind another one for the first few groups: the best of those that are one for all.
const MOST_LISTED: usize = 128;
/// Bounded by counts and not by a clock, so that the same seed finds the same: some milliseconds, however many buckets and options there
/// are (`planner/benches/decide.rs`).
const SETTINGS: Settings = Settings { population: 60, generations: 10, archive: 200, start: Start::Given };

fn seconds(s: f64) -> Seconds {
    Seconds::new(s.max(0.0)).unwrap_or(Seconds::ZERO)
}

/// What a bucket may run: the candidates, and ratios between theirs. A memory with a momentum of its own takes the optimizer's place,
/// which is one for all buckets.
pub(crate) fn options(s: &Snapshot) -> Vec<Strategy> {
    let mut space = s.space();
    space.crs = finer(&space.crs);
    let mut options = space.strategies();
    options.retain(may_differ);
    options
}

fn may_differ(strategy: &Strategy) -> bool {
    strategy.spec().memory().is_none_or(|(kind, _)| kind != MemoryKind::Dgc)
}

/// By falling ratio, with one between each two.
fn finer(crs: &[CompressionRatio]) -> Vec<CompressionRatio> {
    let mut all = crs.to_vec();
    all.sort_by(|a, b| b.get().total_cmp(&a.get()));
    all.dedup();
    let between = |pair: &[CompressionRatio]| {
        let middle = (pair[0].get() * pair[1].get()).sqrt();
        // Two digits: as many as make a difference.
        let rounded: f64 = format!("{middle:.1e}").parse().ok()?;
        let between = pair[1].get() < rounded && rounded < pair[0].get();
        CompressionRatio::new(rounded).ok().filter(|_| between)
    };
    let middles: Vec<_> = all.windows(2).filter_map(between).collect();
    all.extend(middles);
    all.sort_by(|a, b| b.get().total_cmp(&a.get()));
    all
}

/// Whether the job can run a plan, and policy and settings allow it.
pub(crate) fn offers(s: &Snapshot, plan: &Plan) -> bool {
    match plan.alike() {
        Some(strategy) => s.space().strategies().contains(strategy),
        None => {
            let options = options(s);
            plan.strategies().iter().all(|x| options.contains(x))
        }
    }
}

/// What one option costs in all buckets, as expected.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Expected {
    pub(crate) cost: Cost,
    /// Logarithm of 1/gain.
    pub(crate) lost: f64,
    /// Logarithm of the steps that make the progress of a dense one.
    pub(crate) steps: f64,
}

/// A step of a job whose groups of buckets choose among options.
pub(crate) struct Groups<'a> {
    shape: &'a Shape,
    /// Seconds in which buckets become ready.
    backward_s: f64,
    options: &'a [Expected],
    /// What is minimised.
    policy: &'a PolicyConfig,
    /// What is searched from: the best of those with one option for all groups, and of those with one for the first few and another for the
    /// rest,
    listed: OnceCell<Vec<Vec<usize>>>,
    /// and what is in force, where that is among the options.
    in_force: Option<Vec<usize>>,
}

impl<'a> Groups<'a> {
    pub(crate) fn new(
        (shape, backward_s): (&'a Shape, f64),
        options: &'a [Expected],
        policy: &'a PolicyConfig,
        in_force: Option<Vec<usize>>,
    ) -> Self {
        Self { shape, backward_s, options, policy, listed: OnceCell::new(), in_force }
    }

    /// Seconds of compressing and of waiting that a step shows, beyond computing.
    fn exposed(&self, choice: &[usize]) -> [f64; 2] {
        let cost = |group: usize| self.options[choice[group]].cost;
        let waits_s = self.shape.exposed(self.backward_s, cost);
        let free_s = self.shape.exposed(self.backward_s, |group| Cost { compress_s: 0.0, ..cost(group) });
        let compress_s = self.by_values(choice, |option| option.cost.compress_s);
        // Compressing delays the exchange of what is behind it, and may hide what is sent meanwhile.
        [(compress_s + waits_s - free_s).max(0.0), waits_s]
    }

    /// The mean over the groups, by their values.
    fn by_values(&self, choice: &[usize], of: impl Fn(&Expected) -> f64) -> f64 {
        self.mean(self.shape.shares(), choice, of)
    }

    /// The mean over the groups, by the energy of their gradients.
    fn by_energy(&self, choice: &[usize], of: impl Fn(&Expected) -> f64) -> f64 {
        self.mean(self.shape.energies(), choice, of)
    }

    fn mean(&self, shares: impl Iterator<Item = f64>, choice: &[usize], of: impl Fn(&Expected) -> f64) -> f64 {
        shares.zip(choice).map(|(share, option)| share * of(&self.options[*option])).sum()
    }

    /// Seconds of compressing, and of the whole step.
    fn times(&self, choice: &[usize]) -> [f64; 2] {
        let waits_s = self.shape.exposed(self.backward_s, |group| self.options[choice[group]].cost);
        let compress_s = self.by_values(choice, |option| option.cost.compress_s);
        [compress_s, self.shape.compute.median_s + compress_s + waits_s]
    }

    /// What the policy minimises, as expected: by time-to-quality seconds for the progress of a dense step.
    fn price(&self, choice: &[usize]) -> f64 {
        let [compress_s, step_s] = self.times(choice);
        if matches!(self.policy, PolicyConfig::TimeToQuality(_)) {
            return step_s * self.by_energy(choice, |option| option.steps).exp();
        }
        let compute = seconds(self.shape.compute.median_s);
        // Other policies see three numbers, whatever the strategies.
        let what = Evaluated {
            strategy: Strategy::DENSE_RING,
            t_comp: seconds(compress_s),
            t_sync: seconds(step_s - compress_s - compute.get()),
            t_step: seconds(step_s),
            gain: Gain::new((-self.by_energy(choice, |option| option.lost)).exp()).unwrap_or(Gain::FULL),
            variance: 0.0,
            terms: Terms::default(),
        };
        self.policy.policy().score(&what, compute).unwrap_or(f64::INFINITY)
    }

    fn is_admitted(&self, choice: &[usize], policy: &JobPolicy) -> bool {
        policy.admits((-self.by_energy(choice, |option| option.lost)).exp(), self.times(choice))
    }

    /// With as few strategies as a price of [`SAME`] more allows: each one less is one residual less that another compressor takes over,
    /// and what steps keep tells more of those that are left.
    fn simplified(&self, mut choice: Vec<usize>, policy: &JobPolicy) -> Vec<usize> {
        let most = self.price(&choice) * (1.0 + SAME);
        loop {
            let mut used = choice.clone();
            used.sort_unstable();
            used.dedup();
            let pairs =
                used.iter().flat_map(|from| used.iter().map(move |to| (*from, *to))).filter(|(from, to)| from != to);
            let merged = pairs.map(|(from, to)| -> Vec<usize> {
                choice.iter().map(|option| if *option == from { to } else { *option }).collect()
            });
            let admitted = merged.filter(|choice| self.is_admitted(choice, policy));
            let priced = admitted.map(|choice| (self.price(&choice), choice)).filter(|(price, _)| *price <= most);
            match priced.min_by(|a, b| a.0.total_cmp(&b.0)) {
                Some((_, fewer)) => choice = fewer,
                None => return choice,
            }
        }
    }

    /// With one group after the other given the best option for it, until no other one is better for any.
    fn improved(&self, mut choice: Vec<usize>, policy: &JobPolicy) -> Vec<usize> {
        let (groups, options) = (self.genes(), self.cells());
        let mut price = self.price(&choice);
        // The last group is the least hidden.
        let (mut group, mut settled) = (groups - 1, 0);
        while settled < groups {
            settled += 1;
            for option in 0..options {
                let before = std::mem::replace(&mut choice[group], option);
                let with = self.price(&choice);
                if with < price && self.is_admitted(&choice, policy) {
                    (price, settled) = (with, 1);
                } else {
                    choice[group] = before;
                }
            }
            group = (group + groups - 1) % groups;
        }
        choice
    }

    /// The best plans by the price among those that NSGA-II finds and the job's limits admit, of which not all groups are alike; best
    /// first.
    pub(crate) fn found(&self, seed: u64, policy: &JobPolicy) -> Vec<Vec<usize>> {
        let mut found = nsga::choices(self, &SETTINGS, seed).unwrap_or_default();
        found.extend_from_slice(self.listed());
        found.retain(|choice| self.is_admitted(choice, policy));
        let improved: Vec<_> =
            self.best(found.clone(), IMPROVED).into_iter().map(|choice| self.improved(choice, policy)).collect();
        found.extend(improved);
        let differs = |choice: &Vec<usize>| {
            let last = choice.windows(2).rposition(|pair| pair[0] != pair[1]);
            last.is_some_and(|group| self.shape.tells_apart(group))
        };
        found.retain(differs);
        let best = self.best(found, MOST_FOUND).into_iter();
        let found = best.map(|choice| self.simplified(choice, policy)).filter(differs).collect();
        self.best(found, MOST_FOUND)
    }

    fn best(&self, choices: Vec<Vec<usize>>, count: usize) -> Vec<Vec<usize>> {
        let mut priced: Vec<(f64, Vec<usize>)> =
            choices.into_iter().map(|choice| (self.price(&choice), choice)).collect();
        priced.sort_by(|a, b| a.0.total_cmp(&b.0).then_with(|| a.1.cmp(&b.1)));
        priced.dedup();
        priced.into_iter().take(count).map(|(_, choice)| choice).collect()
    }
}

/// What steps of a job cost by what is known of it beforehand: by one strategy for all buckets, or by one for each.
#[derive(Debug)]
pub struct Buckets {
    shape: Shape,
    of: Vec<Evaluated>,
    options: Vec<Expected>,
    policy: PolicyConfig,
}

impl Buckets {
    /// Of so many values and, where they are as many, these shares of the gradient's energy, in the order of backward. Each of the
    /// strategies is evaluated for the whole gradient; plans are compared by the policy.
    pub fn new(
        (values, energies): (&[u64], &[f32]),
        compute: Seconds,
        of: Vec<Evaluated>,
        policy: PolicyConfig,
    ) -> Self {
        let law = policy.time_to_quality().delay();
        let expected = |e: &Evaluated| Expected {
            cost: Cost { each_s: e.terms.alpha_s, all_s: e.terms.beta_s, compress_s: e.t_comp.get() },
            lost: e.quality().log_inverse_gain(),
            steps: e.quality().log_steps(law),
        };
        let options = of.iter().map(expected).collect();
        let shape = Shape::new(values, energies, Compute::measured(compute.get()));
        Self { shape, of, options, policy }
    }

    fn groups<'a>(&'a self, options: &'a [Expected]) -> Groups<'a> {
        let backward_s = BACKWARD_SHARE * self.shape.compute.median_s;
        Groups::new((&self.shape, backward_s), options, &self.policy, None)
    }

    /// Each strategy in all buckets, in the same order.
    pub fn alike(&self) -> Vec<Evaluated> {
        let groups = self.groups(&self.options);
        let each = self.of.iter().enumerate();
        each.map(|(i, e)| self.timed(e, groups.times(&vec![i; groups.genes()]))).collect()
    }

    /// With these times of compressing and of the whole step.
    fn timed(&self, of: &Evaluated, [compress_s, step_s]: [f64; 2]) -> Evaluated {
        let t_sync = seconds(step_s - compress_s - self.shape.compute.median_s);
        Evaluated { t_comp: seconds(compress_s), t_sync, t_step: seconds(step_s), ..of.clone() }
    }

    /// The best plans that NSGA-II finds and the policy admits, of those with several strategies, best first. The same
    /// seed finds the same.
    pub fn by_bucket(&self, seed: u64, policy: &JobPolicy) -> Vec<ByBucket> {
        let may = |i: &usize| may_differ(&self.of[*i].strategy);
        let kept: Vec<usize> = (0..self.of.len()).filter(may).collect();
        let options: Vec<Expected> = kept.iter().map(|i| self.options[*i]).collect();
        let groups = self.groups(&options);
        if groups.genes() < 2 || kept.iter().all(|i| self.of[*i].strategy.is_dense()) {
            return Vec::new();
        }
        let priced = |choice: &Vec<usize>| {
            let each = choice.iter().map(|i| &self.of[kept[*i]].strategy);
            let (plan, last) = (self.shape.plan(each)?, &self.of[kept[*choice.last()?]]);
            let what = Evaluated { variance: 0.0, ..self.timed(last, groups.times(choice)) };
            let judged = what.quality().least(-groups.by_energy(choice, |option| option.lost));
            let kept = self.shape.energies().zip(choice).map(|(share, i)| share * self.of[kept[*i]].gain.get()).sum();
            Some(ByBucket {
                plan,
                judged: Evaluated { gain: judged, ..what.clone() },
                what: Evaluated { gain: Gain::new(f64::min(kept, 1.0)).unwrap_or(Gain::FULL), ..what },
                log_steps: groups.by_energy(choice, |option| option.steps),
            })
        };
        groups.found(seed, policy).iter().filter_map(priced).collect()
    }
}

/// A plan with several strategies.
#[derive(Debug, Clone)]
pub struct ByBucket {
    /// Which.
    pub plan: Plan,
    /// What it costs, and the share of the gradient's energy that is sent; the strategy is the last bucket's.
    pub what: Evaluated,
    /// The same as policies judge it: a bucket that keeps next to nothing is not made up for by those that keep all.
    pub judged: Evaluated,
    /// Logarithm of the steps that make the progress of a dense one.
    pub log_steps: f64,
}

impl Search for Groups<'_> {
    fn genes(&self) -> usize {
        self.shape.shares().len()
    }

    fn cells(&self) -> usize {
        self.options.len()
    }

    fn objectives(&self, choice: &[usize]) -> [f64; 3] {
        let [t_comp, t_sync] = self.exposed(choice);
        [t_comp, t_sync, self.by_energy(choice, |option| option.lost).exp()]
    }

    fn start(&self, count: usize) -> Vec<Vec<usize>> {
        let listed = self.listed();
        let in_force = self.in_force.iter().filter(|choice| !listed.contains(choice));
        in_force.chain(listed).take(count).cloned().collect()
    }
}

impl Groups<'_> {
    /// What is known without a search.
    pub(crate) fn listed(&self) -> &[Vec<usize>] {
        self.listed.get_or_init(|| self.list(SETTINGS.population))
    }

    fn list(&self, count: usize) -> Vec<Vec<usize>> {
        let (groups, options) = (self.genes(), self.cells());
        let two = |first: usize, rest: usize, from: usize| -> Vec<usize> {
            (0..groups).map(|group| if group < from { first } else { rest }).collect()
        };
        let alike = (0..options).map(|option| two(option, option, groups)).collect();
        let listed = self.best(alike, MOST_LISTED.max(count / 4));
        let each = || listed.iter().map(|choice| choice[0]);
        let firsts: Vec<usize> = each().take(4).chain([0]).collect();
        let split = firsts
            .iter()
            .flat_map(|first| each().flat_map(move |rest| (1..groups).map(move |from| two(*first, rest, from))));
        let split = self.best(split.collect(), count / 2);
        listed.iter().take(count / 4).cloned().chain(split).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::LazyLock;

    /// Dense, and two ratios, of a gradient that takes 0.4 s to send behind 0.1 s of backward.
    fn options() -> Vec<Expected> {
        let option = |share: f64, gain: f64, compress_s: f64| Expected {
            cost: Cost { each_s: 1e-3, all_s: 0.4 * share, compress_s },
            lost: -f64::ln(gain),
            steps: -0.24 * f64::ln(gain),
        };
        vec![option(1.0, 1.0, 0.0), option(0.2, 0.6, 4e-3), option(0.02, 0.09, 3e-3)]
    }

    fn all(groups: usize, options: usize) -> Vec<Vec<usize>> {
        (0..options.pow(groups as u32))
            .map(|code| (0..groups).map(|group| code / options.pow(group as u32) % options).collect())
            .collect()
    }

    fn groups<'a>(shape: &'a Shape, backward_s: f64, options: &'a [Expected]) -> Groups<'a> {
        static POLICY: LazyLock<PolicyConfig> = LazyLock::new(PolicyConfig::default);
        Groups::new((shape, backward_s), options, &POLICY, None)
    }

    #[test]
    fn what_is_searched_is_what_listing_all_plans_finds() {
        let options = options();
        let mut beyond_the_list = 0;
        for backward_s in [0.02, 0.1, 0.3, 1.0] {
            let shape = Shape::new(&[4, 1, 2, 6, 1, 3], &[], Compute::measured(backward_s / 0.6));
            let groups = groups(&shape, backward_s, &options);
            let listed = groups.best(all(6, 3), 1).remove(0);
            let searched = groups.best(nsga::choices(&groups, &SETTINGS, 7).unwrap(), 1).remove(0);
            let [best, found] = [&listed, &searched].map(|choice| groups.price(choice));
            assert!(found <= best * (1.0 + 1e-9), "{searched:?} at {found}, {listed:?} at {best}");
            let alike = (0..3).map(|option| groups.price(&[option; 6])).fold(f64::INFINITY, f64::min);
            assert!(best <= alike);
            beyond_the_list += u32::from(!groups.listed().contains(&searched));
        }
        assert!(beyond_the_list > 1, "the search finds what is not listed");
    }

    #[test]
    fn what_hides_behind_backward_stays_dense_and_the_last_bucket_is_compressed() {
        let options = options();
        let shape = Shape::new(&[6, 6, 6, 6, 6, 6], &[], Compute::measured(1.0));
        let groups = groups(&shape, 0.6, &options);
        let found = groups.found(1, &JobPolicy::default());
        assert!(found.len() > 1 && found[0][0] == 0 && found[0][5] != 0, "{found:?}");
        assert!(groups.price(&found[0]) < 0.98 * (0..3).map(|x| groups.price(&[x; 6])).fold(f64::INFINITY, f64::min));
        assert_eq!(found, groups.found(1, &JobPolicy::default()), "the same seed finds the same");
    }

    #[test]
    fn a_bucket_costs_progress_by_its_energy_and_time_by_its_values() {
        let options = options();
        let [much, little] = [[0.1f32, 0.9], [0.9, 0.1]].map(|energies| {
            let shape = Shape::new(&[6, 6], &energies, Compute::measured(0.1));
            let groups = groups(&shape, 0.05, &options);
            (groups.price(&[0, 2]), groups.times(&[0, 2]), groups.best(vec![vec![0, 2], vec![2, 0]], 1).remove(0))
        });
        assert!(little.0 < much.0 && little.1 == much.1, "{little:?} {much:?}");
        assert_eq!((little.2, much.2), (vec![0, 2], vec![2, 0]), "what has little of the energy is compressed");
    }

    #[test]
    fn plans_are_found_by_the_policy_that_compares_them() {
        let options = options();
        let shape = Shape::new(&[6, 6, 6, 6, 6, 6], &[], Compute::measured(0.2));
        let [knee, time] = ["knee", "time-to-quality"].map(|name| PolicyConfig::by_name(name).unwrap());
        let [by_knee, by_time] = [&knee, &time].map(|policy| Groups::new((&shape, 0.12), &options, policy, None));
        let differing = all(6, 3).into_iter().filter(|choice| choice.windows(2).any(|pair| pair[0] != pair[1]));
        let best = by_knee.best(differing.collect(), 1).remove(0);
        let [found, other] = [&by_knee, &by_time].map(|groups| groups.found(1, &JobPolicy::default()));
        assert!(by_knee.price(&found[0]) <= by_knee.price(&best) * (1.0 + SAME), "{found:?}, best {best:?}");
        assert!(!other.contains(&found[0]), "{other:?}");
    }

    #[test]
    fn what_is_in_force_is_searched_from() {
        let options = options();
        let shape = Shape::new(&[6, 6, 6], &[], Compute::measured(0.2));
        let odd = vec![1, 2, 0];
        let (policy, count) = (PolicyConfig::default(), SETTINGS.population);
        let first = |in_force| Groups::new((&shape, 0.12), &options, &policy, in_force).start(count);
        assert!(first(Some(odd.clone())).contains(&odd) && !first(None).contains(&odd));
    }

    #[test]
    fn strategies_that_make_no_difference_are_merged_and_those_that_do_are_not() {
        // The last two are all but the same.
        let mut options = options();
        options.push(Expected { steps: options[2].steps * 1.0001, ..options[2] });
        let shape = Shape::new(&[6, 6, 6, 6, 6, 6], &[], Compute::measured(0.03));
        let little = groups(&shape, 0.02, &options);
        let policy = JobPolicy::default();
        let mixed = [2, 3, 2, 3, 2, 3];
        let merged = little.simplified(mixed.into(), &policy);
        assert_eq!(merged, [2; 6]);
        assert!(little.price(&merged) <= little.price(&mixed) * (1.0 + SAME));
        let least_gain = Some(0.9999);
        let strict = little.simplified(mixed.into(), &JobPolicy { least_gain, ..policy.clone() });
        assert_eq!(strict, mixed, "no merge is admitted");
        let shape = Shape::new(&[6, 6, 6, 6, 6, 6], &[], Compute::measured(1.0));
        let groups = groups(&shape, 0.6, &options);
        assert_eq!(groups.simplified(vec![0, 0, 0, 0, 0, 1], &policy), [0, 0, 0, 0, 0, 1]);
    }

    #[test]
    fn no_other_option_of_one_group_is_better_than_what_is_found() {
        // Sixty options of eight groups, of which none is good for all: the search alone does not get there.
        let option = |k: usize| {
            let share = 0.9f64.powi(k as i32);
            let each_s = 1e-3 * (1.0 + (k * 7 % 5) as f64);
            let cost = Cost { each_s, all_s: 0.4 * share, compress_s: 1e-2 * (k * 3 % 4) as f64 };
            let lost = -share.ln() * (0.3 + 0.02 * (k * 11 % 7) as f64);
            Expected { cost, lost, steps: 0.24 * lost }
        };
        let options: Vec<Expected> = (0..60).map(option).collect();
        let energies = [0.02, 0.3, 0.05, 0.2, 0.03, 0.1, 0.25, 0.05];
        let shape = Shape::new(&[4, 1, 2, 6, 1, 3, 9, 2], &energies, Compute::measured(0.2));
        let groups = groups(&shape, 0.12, &options);
        let least_gain = Some(0.4);
        for policy in [JobPolicy::default(), JobPolicy { least_gain, ..JobPolicy::default() }] {
            let found = groups.found(1, &policy).remove(0);
            assert!(groups.is_admitted(&found, &policy));
            let price = groups.price(&found);
            for (group, option) in (0..8).flat_map(|group| (0..60).map(move |option| (group, option))) {
                let mut other = found.clone();
                other[group] = option;
                let better = groups.price(&other) * (1.0 + SAME) < price * (1.0 - 1e-9);
                assert!(!better || !groups.is_admitted(&other, &policy), "{other:?} is better than {found:?}");
            }
        }
    }

    #[test]
    fn ratios_lie_between_those_that_are_named() {
        let crs = [0.001, 0.1, 0.01].map(|c| CompressionRatio::new(c).unwrap());
        let finer: Vec<f64> = finer(&crs).iter().map(|c| c.get()).collect();
        assert_eq!(finer, [0.1, 0.032, 0.01, 0.0032, 0.001]);
    }
}
