//! Phase 2: the planner, on a thread where it may take its time.

use flexcomm_domain::{JobId, Version};
use flexcomm_planner::Outcome;
use rand_chacha::ChaCha8Rng;
use rand_chacha::rand_core::SeedableRng;

use super::{CycleError, Gathered};

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

/// Decides.
pub async fn decide(gathered: &Gathered) -> Result<Decided, CycleError> {
    let (snapshot, now) = (gathered.snapshot.clone(), gathered.now);
    let seed = seed(&snapshot.job, snapshot.version());
    let job = snapshot.job.to_string();
    let solve = move || flexcomm_planner::decide(&snapshot, now, &mut ChaCha8Rng::seed_from_u64(seed));
    let outcome = tokio::task::spawn_blocking(solve).await;
    let outcome = outcome.map_err(|e| CycleError::Solver { job, why: e.to_string() })?;
    Ok(Decided { outcome, seed })
}
