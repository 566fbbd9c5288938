//! Policies as operators may set them, drawn at random.

use flexcomm_domain::{Plan, Seconds, Strategy, Timestamp};
use flexcomm_planner::{JobPolicy, Pin, PolicyConfig, Snapshot};
use rand::Rng;
use rand::seq::IndexedRandom;
use rand_chacha::ChaCha8Rng;

/// What no simulated job offers.
const NOT_OFFERED: &str = "mstopk(k=0.01)+ef(vanilla)/allgather";
/// Longest that a pin lasts, seconds.
const LONGEST_PIN_S: f64 = 120.0;

/// Each key with a chance of its own; what a pin names the job can mostly run, and it mostly is not over.
pub(crate) fn random(s: &Snapshot, now: Timestamp, rng: &mut ChaCha8Rng) -> JobPolicy {
    let mut often = |share: f64| rng.random_bool(share);
    let (observe, pins) = (often(0.2), often(0.3));
    let limits = [often(0.2), often(0.2), often(0.2), often(0.2)];
    let kinds = ["none", "topk"].choose(rng).and_then(|kind| kind.parse().ok());
    let objective = PolicyConfig::NAMES.choose(rng).and_then(|name| PolicyConfig::by_name(name).ok());
    JobPolicy {
        kinds: kinds.filter(|_| limits[0]).map(|kind| [kind].into()),
        objective: objective.filter(|_| limits[1]),
        least_gain: limits[2].then(|| rng.random_range(0.0..=1.0)),
        most_overhead: limits[3].then(|| 10f64.powf(rng.random_range(-3.0..=0.0))),
        observe,
        pin: (pins && !observe).then(|| pin(s, now, rng)).flatten(),
    }
}

fn pin(s: &Snapshot, now: Timestamp, rng: &mut ChaCha8Rng) -> Option<Pin> {
    let offered = s.space().strategies();
    let known = rng.random_bool(0.9);
    let plan = if known { pinned(s, &offered, rng) } else { NOT_OFFERED.parse().ok() };
    let ends = now.plus(Seconds::new(rng.random_range(0.0..LONGEST_PIN_S)).unwrap_or(Seconds::ZERO));
    let until = [None, Some(now), Some(ends), Some(ends)].choose(rng).copied().flatten();
    Some(Pin { plan: plan?, until })
}

/// One strategy for all buckets or, where there are several, mostly one for the first of them and one for the rest.
fn pinned(s: &Snapshot, offered: &[Strategy], rng: &mut ChaCha8Rng) -> Option<Plan> {
    let (first, buckets) = (offered.choose(rng).copied()?, s.buckets.len());
    if buckets < 2 || rng.random_bool(0.3) {
        return Some(Plan::from(first));
    }
    let (rest, from) = (offered.choose(rng).copied()?, rng.random_range(1..buckets));
    let each: Vec<Strategy> = (0..buckets).map(|bucket| if bucket < from { first } else { rest }).collect();
    Plan::by_bucket(&each).ok()
}
