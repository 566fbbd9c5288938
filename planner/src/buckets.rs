//! The larger problem: a ratio for each bucket of the gradient.

use crate::solve::Costs;
use crate::{BucketReport, Snapshot};
use flexcomm_domain::{Family, Gain};
use flexcomm_optimizer::{Bucket, BucketProblem, BucketSolution, Profile, ProfilePoint, Space, solve_buckets};
use rand::RngCore;

/// The best plan over all compressors that may be chosen; absent for a fused gradient, for a single rank, or when
/// nothing can be predicted. What is blocked after a rollback is not left out: this is advice.
pub(crate) fn solve(s: &Snapshot, costs: &Costs, rng: &mut (impl RngCore + ?Sized)) -> Option<BucketReport> {
    if s.buckets.len() < 2 || s.ranks < 2 {
        return None;
    }
    let (space, seed) = (s.space(), rng.next_u64());
    let score = |x: &BucketSolution| s.config.policy.policy().score(x.evaluated(), costs.problem.compute);
    // Ratios are solved for: what has none has no plan of its own.
    let solved = space
        .compressors
        .iter()
        .filter(|family| family.has_ratio())
        .filter_map(|c| Some((*c, one(s, costs, (*c, &space), seed)?)));
    let cost = |(_, x): &(Family, BucketSolution)| score(x).filter(|v| v.is_finite());
    let order = |x: &(Family, BucketSolution)| cost(x).unwrap_or(f64::INFINITY);
    let best = solved.min_by(|a, b| order(a).total_cmp(&order(b)))?;
    Some(report(cost(&best), best.0, &best.1, seed))
}

fn one(s: &Snapshot, costs: &Costs, (compressor, space): (Family, &Space), seed: u64) -> Option<BucketSolution> {
    let whole = costs.problem.profiles.get(&compressor.into());
    let buckets: Vec<Bucket> = s.buckets.iter().map(|b| with_profile(b, whole, s.gradient_values)).collect();
    let large = BucketProblem::new(&costs.problem, &buckets, space, compressor).ok()?;
    solve_buckets(&costs.problem, large, &s.config.policy, seed).ok()
}

/// A bucket that no trial has looked at keeps what the whole gradient keeps, and takes its share of the time.
fn with_profile(bucket: &Bucket, whole: Option<&Profile>, all: u64) -> Bucket {
    let share = bucket.values as f64 / all as f64;
    let scaled = || Some(whole?.map(|p| ProfilePoint { t_comp_s: p.t_comp_s * share, ..*p }));
    Bucket { profile: bucket.profile.clone().or_else(scaled), ..bucket.clone() }
}

fn report(score: Option<f64>, compressor: Family, best: &BucketSolution, seed: u64) -> BucketReport {
    let (plan, what) = (&best.chosen().plan, best.evaluated());
    BucketReport {
        solver: best.solver,
        seed,
        front: best.front.len(),
        compressor: if plan.collective.is_allreduce() { Family::NONE } else { compressor },
        collective: plan.collective,
        crs: plan.crs.clone(),
        t_comp_s: what.t_comp.get(),
        t_sync_s: what.t_sync.get(),
        t_step_s: what.t_step.get(),
        gain: if plan.collective.is_allreduce() { Gain::FULL } else { what.gain },
        score,
    }
}
