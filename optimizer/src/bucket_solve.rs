//! A ratio per bucket, solved: every plan is listed while there are few, else NSGA-II searches; then a policy
//! picks one point of the front.

use crate::buckets::BucketError;
use crate::nsga::{self, NsgaError, Settings};
use crate::problem::ProblemError;
use crate::terms::Paths;
use crate::{BucketProblem, Choice, Evaluated, Load, PlanPoint, PolicyConfig, Problem, Quality, Terms};
use flexcomm_domain::{CodecBytes, Gain, Strategy};
use serde::{Deserialize, Serialize};

/// Who found a front.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum Solver {
    /// Every plan was listed: the front is exact.
    #[serde(rename = "enumeration")]
    Enumeration,
    /// There were too many: searched.
    #[serde(rename = "nsga-ii")]
    NsgaII,
}

impl Solver {
    /// Its name in reports.
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Enumeration => "enumeration",
            Self::NsgaII => "nsga-ii",
        }
    }
}

/// A solved bucket problem.
#[derive(Debug, Clone, PartialEq)]
pub struct BucketSolution {
    /// How the front was found.
    pub solver: Solver,
    /// The front, dense plans included, by rising t_sync.
    pub front: Vec<PlanPoint>,
    /// Its points as candidates, in the same order; their ratio is the kept share of all values.
    pub candidates: Vec<Evaluated>,
    /// What the policy picked; its index is into both.
    pub choice: Choice,
}

impl BucketSolution {
    /// The plan that was picked.
    pub fn chosen(&self) -> &PlanPoint {
        &self.front[self.choice.index]
    }

    /// The plan that was picked, as a candidate.
    pub fn evaluated(&self) -> &Evaluated {
        &self.candidates[self.choice.index]
    }
}

/// Solves `large`, which tabulates `problem` over its buckets. Plans below the policy's gain floor are not feasible.
/// `seed` counts only where NSGA-II searches; the same seed gives the same solution.
pub fn solve_buckets(
    problem: &Problem,
    large: BucketProblem,
    policy: &PolicyConfig,
    seed: u64,
) -> Result<BucketSolution, NsgaError> {
    let large = large.with_gain_floor(policy.gain_floor());
    let (solver, front) = if large.is_listable() {
        (Solver::Enumeration, large.exact_front()?)
    } else {
        (Solver::NsgaII, nsga::search(&large, &Settings::default(), seed)?)
    };
    let candidates = evaluate_plans(problem, &large, &front)?;
    let all: Vec<usize> = (0..candidates.len()).collect();
    let choice = policy.policy().choose(&candidates, &all, problem.compute);
    Ok(BucketSolution { solver, front, candidates, choice })
}

/// Plans as candidates: with the time of the whole step, and the kept share of all values as ratio.
pub fn evaluate_plans(
    problem: &Problem,
    large: &BucketProblem,
    points: &[PlanPoint],
) -> Result<Vec<Evaluated>, BucketError> {
    let candidates: Result<Vec<Evaluated>, ProblemError> = points.iter().map(|p| evaluate(problem, large, p)).collect();
    Ok(candidates?)
}

/// One strategy in all buckets, of these numbers of values: each pays its latency and sends what `codec` says of so many values.
/// Latency and bandwidth terms are not kept apart.
pub fn evaluate_alike(
    problem: &Problem,
    strategy: &Strategy,
    values: &[u64],
    codec: impl Fn(u64) -> CodecBytes,
) -> Result<Evaluated, ProblemError> {
    let whole = problem.evaluate(strategy)?;
    let paths = Paths::new(&problem.links);
    let coefficients = problem.coefficients.get(strategy.collective(), &problem.backend);
    let t_sync =
        |values: &u64| coefficients.predict(paths.terms(strategy, &Load { values: *values, codec: codec(*values) }));
    let times = [whole.t_comp.get(), values.iter().map(t_sync).sum()];
    problem.evaluated(strategy, times, whole.quality(), Terms::default())
}

/// Latency and bandwidth terms are not kept apart.
fn evaluate(problem: &Problem, large: &BucketProblem, point: &PlanPoint) -> Result<Evaluated, ProblemError> {
    let [t_comp, t_sync, inverse_gain] = point.objectives;
    // The sum over buckets may end a rounding above 1.
    let gain = Gain::new((1.0 / inverse_gain).min(1.0)).unwrap_or(Gain::FULL);
    let quality = Quality { gain, ..Quality::default() };
    problem.evaluated(&large.strategy(&point.plan), [t_comp, t_sync], quality, Terms::default())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::policy::TimeToQuality;
    use crate::{Bucket, Profile, ProfilePoint, Space};
    use flexcomm_domain::{CompressionRatio, Link, LinkMatrix, Seconds};

    /// Large late buckets that compress well, small early ones that do not, as in a convolutional network.
    fn buckets(n: u64) -> Vec<Bucket> {
        let one = |i: u64| {
            let (values, exponent) = (100_000 * (i + 1), 0.5 / (i + 1) as f64);
            let point = |c: &CompressionRatio| ProfilePoint {
                cr: *c,
                gain: Gain::new(c.get().powf(exponent)).unwrap(),
                t_comp_s: 1e-9 * values as f64,
                weight: 1.0,
            };
            let profile = Profile::new(Space::default().crs.iter().map(point).collect()).unwrap();
            Bucket { values, energy: 1.0, profile: Some(profile) }
        };
        (0..n).map(one).collect()
    }

    fn problem() -> Problem {
        let mut problem = Problem::new(1, LinkMatrix::uniform(8, Link::new(1e-4, 1e10).unwrap()).unwrap());
        problem.compute = Seconds::new(0.02).unwrap();
        problem
    }

    /// Without error feedback gains matter most, and the optimum is a ratio.
    const POLICY: PolicyConfig =
        PolicyConfig::TimeToQuality(TimeToQuality { gain_floor: 0.05, exponent: Some(1.0), momentum: None });

    fn solved(n: u64, seed: u64) -> BucketSolution {
        let large = BucketProblem::new(&problem(), &buckets(n), &Space::default(), "topk".parse().unwrap()).unwrap();
        solve_buckets(&problem(), large, &POLICY, seed).unwrap()
    }

    /// Step time per gain, without overlap.
    fn per_gain(o: [f64; 3]) -> f64 {
        (problem().compute.get() + o[0] + o[1]) * o[2]
    }

    /// The exact optimum of time per gain without overlap, by Dinkelbach's method: for the optimum's own price of
    /// gain, the weighted sum is zero.
    fn optimum(n: u64) -> f64 {
        let large = BucketProblem::new(&problem(), &buckets(n), &Space::default(), "topk".parse().unwrap()).unwrap();
        let dense = large.dense().iter().map(|p| per_gain(p.objectives)).fold(f64::MAX, f64::min);
        (0..large.collectives().len()).fold(dense, |best, collective| {
            let mut price = best;
            for _ in 0..50 {
                let levels = large.weighted(collective, 1.0, price);
                price = price.min(per_gain(large.objectives(collective, levels.into_iter())));
            }
            best.min(price)
        })
    }

    #[test]
    fn one_strategy_in_all_buckets_pays_a_latency_in_each() {
        let links = LinkMatrix::uniform(8, Link::new(1e-3, 1e10).unwrap()).unwrap();
        let problem = Problem::new(4_000_000, links);
        let strategy: Strategy = "none/dense-ring".parse().unwrap();
        let codec = problem.codec(strategy.family());
        let alike = |values: &[u64]| evaluate_alike(&problem, &strategy, values, |_| codec).unwrap().t_sync.get();
        let (one, four) = (alike(&[4_000_000]), alike(&[1_000_000; 4]));
        assert!((one - problem.evaluate(&strategy).unwrap().t_sync.get()).abs() < 1e-12);
        assert!((four - one - 3.0 * 14.0 * 1e-3).abs() < 1e-9, "{four} for {one}");
    }

    /// A compressor without a profile takes its own time, not top-k's.
    #[test]
    fn buckets_without_a_profile_take_what_their_compressor_takes() {
        let problem = Problem::new(3_000_000, problem().links);
        let bucket = |values| Bucket { values, energy: 1.0, profile: None };
        for text in ["adaptive(k=*)", "randomk(k=*,scaled=true,shared=false)", "mstopk"] {
            let family = text.parse().unwrap();
            let buckets = [bucket(1_000_000), bucket(2_000_000)];
            let large = BucketProblem::new(&problem, &buckets, &Space::default(), family).unwrap();
            assert!(large.has_sparse(), "{text}");
            for point in large.uniform().iter().filter(|point| !point.plan.collective.is_allreduce()) {
                let strategy = large.strategy(&point.plan);
                let (sum, whole) = (point.objectives[0], problem.t_comp(&strategy, problem.values));
                assert!(whole > 0.0 && (sum - whole).abs() < 1e-9 * whole, "{strategy}: {sum} for {whole}");
            }
        }
    }

    #[test]
    fn few_plans_are_listed_and_many_searched() {
        assert_eq!(solved(2, 1).solver, Solver::Enumeration);
        assert_eq!(solved(5, 1).solver, Solver::Enumeration);
        assert_eq!(solved(6, 1).solver, Solver::NsgaII);
        assert_eq!(solved(12, 7), solved(12, 7));
    }

    #[test]
    fn the_choice_is_the_optimum_of_the_policy() {
        for n in [1, 3, 5, 8, 20, 60] {
            let (found, best) = (solved(n, 3).choice.score, optimum(n));
            let slack = if n <= 5 { 1e-9 } else { 0.01 };
            assert!(found <= best * (1.0 + slack) && found >= best * (1.0 - 1e-9), "{n} buckets: {found}, best {best}");
        }
    }

    #[test]
    fn a_ratio_per_bucket_is_never_worse_than_one_for_all() {
        let large = BucketProblem::new(&problem(), &buckets(20), &Space::default(), "topk".parse().unwrap()).unwrap();
        let found = solved(20, 3);
        for collective in 0..large.collectives().len() {
            for level in 0..large.levels().len() {
                let o = large.objectives(collective, std::iter::repeat_n(level, 20));
                assert!(found.choice.score <= per_gain(o) * (1.0 + 1e-9), "{collective} {level}");
            }
        }
        let crs = &found.chosen().plan.crs;
        assert!(crs.iter().any(|c| c != &crs[0]), "buckets that differ this much deserve different ratios: {crs:?}");
        let kept: f64 = crs.iter().zip(buckets(20)).map(|(c, b)| c.keep(b.values as usize) as f64).sum();
        let all: u64 = buckets(20).iter().map(|b| b.values).sum();
        assert!((found.evaluated().strategy.cr().get() - kept / all as f64).abs() < 1e-12);
    }

    #[test]
    fn the_floor_of_the_policy_holds() {
        let policy = PolicyConfig::TimeToQuality(TimeToQuality { gain_floor: 0.9, ..TimeToQuality::default() });
        let large = BucketProblem::new(&problem(), &buckets(20), &Space::default(), "topk".parse().unwrap()).unwrap();
        let found = solve_buckets(&problem(), large, &policy, 3).unwrap();
        assert!(found.candidates.iter().all(|c| c.gain.get() >= 0.9 - 1e-9), "{:?}", found.evaluated());
    }
}
