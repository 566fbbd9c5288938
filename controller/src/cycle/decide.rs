//! Phase 2: the planner, on a thread where it may take its time: under a clock that stands still meanwhile, on this one.

use flexcomm_domain::{JobId, Timestamp, Version};
use flexcomm_planner::{Outcome, Snapshot};
use rand_chacha::ChaCha8Rng;
use rand_chacha::rand_core::SeedableRng;
use std::any::Any;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;

use super::{CycleError, Gathered};
use crate::app::App;
use crate::doubts::Doubt;
use crate::links::differing;

/// An outcome and the seed that makes it again.
#[derive(Debug, Clone)]
pub struct Decided {
    /// The planner's answer.
    pub outcome: Outcome,
    /// Seed of its random numbers.
    pub seed: u64,
}

/// The seed of a job's next decision after a version: the same state gives the same decision.
pub fn seed(job: &JobId, version: Version) -> u64 {
    flexcomm_domain::Digest::of(&format!("{job}/{version}")).0
}

/// What the planner answers: the same whenever it is asked again.
pub fn seeded(snapshot: &Snapshot, now: Timestamp, seed: u64) -> Outcome {
    flexcomm_planner::decide(snapshot, now, &mut ChaCha8Rng::seed_from_u64(seed))
}

/// Decides. Where the newest steps contradict the links, and would not without what one node says of them, it is decided
/// without that: `gathered` then has those links, and the node among its doubts.
pub async fn decide(app: &App, gathered: &mut Gathered) -> Result<Decided, CycleError> {
    let decided = solve(app, &gathered.snapshot, gathered.now).await?;
    let Some(claimed_s) = decided.outcome.report.contradicted_s else { return Ok(decided) };
    let claims = &gathered.claims;
    for node in differing(&claims.merged(gathered.now), &claims.tests, &gathered.nodes) {
        let others = claims.without(&node);
        let Ok(links) = others.matrix(&others.merged(gathered.now), &gathered.nodes) else { continue };
        let snapshot = Arc::new(Snapshot { links: Some(links), ..Snapshot::clone(&gathered.snapshot) });
        // Most often a test beside the job found less than the link has: that is looked at before all candidates are priced again.
        if flexcomm_planner::contradicted(&snapshot).is_none() {
            let without = solve(app, &snapshot, gathered.now).await?;
            let what = format!(
                "node {node} reports links on which a step would take {claimed_s:.3} s, of which the newest steps show nothing: \
                 its links count as the other nodes report them"
            );
            gathered.doubts.push(Doubt { node: Some(node), what });
            gathered.snapshot = snapshot;
            return Ok(without);
        }
    }
    Ok(decided)
}

fn panicked(job: &JobId, panic: &(dyn Any + Send)) -> CycleError {
    let said = panic.downcast_ref::<String>().map(String::as_str).or(panic.downcast_ref::<&str>().copied());
    CycleError::Solver { job: job.to_string(), why: format!("it panicked: {}", said.unwrap_or("without a message")) }
}

async fn solve(app: &App, snapshot: &Arc<Snapshot>, now: Timestamp) -> Result<Decided, CycleError> {
    let seed = seed(&snapshot.job, snapshot.version());
    if app.clock.is_given() {
        let outcome = catch_unwind(AssertUnwindSafe(|| seeded(snapshot, now, seed)));
        return outcome.map(|outcome| Decided { outcome, seed }).map_err(|panic| panicked(&snapshot.job, &*panic));
    }
    let snapshot = Arc::clone(snapshot);
    let job = snapshot.job.to_string();
    let outcome = tokio::task::spawn_blocking(move || seeded(&snapshot, now, seed)).await;
    let outcome = outcome.map_err(|e| CycleError::Solver { job, why: e.to_string() })?;
    Ok(Decided { outcome, seed })
}
