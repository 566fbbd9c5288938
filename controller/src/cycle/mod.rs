//! The decision loop: gather, decide, check, apply, record; for every job, again and again.
//!
//! One task that keeps nothing: each pass reads everything anew, so that a restart or a missed wake-up costs
//! nothing. A job that fails does not stop the others.

mod apply;
mod check;
mod decide;
mod gather;
mod grants;
mod record;
mod trials;

pub use gather::{Gathered, gather, recent_steps};

use futures_util::StreamExt;
use std::sync::Arc;

use crate::app::App;
use crate::limits::LOST_AFTER_S;
use crate::publish::publish;
use crate::store::{JobRow, StoreError};

/// Jobs that are worked on at once: solving is a matter of a core, storing one of a single writer.
const JOBS_AT_ONCE: usize = 4;

/// Why a pass over a job ended early. Completes "failed to ...".
#[derive(Debug, thiserror::Error)]
pub enum CycleError {
    /// The store.
    #[error(transparent)]
    Store(#[from] StoreError),
    /// The solver's thread panicked.
    #[error("decide for job {job}: {why}")]
    Solver {
        /// Which job.
        job: String,
        /// What the panic said.
        why: String,
    },
    /// A value cannot be written as JSON.
    #[error("write the report of job {job}: {why}")]
    Json {
        /// Which job.
        job: String,
        /// Why.
        why: String,
    },
}

/// Runs until the app stops.
pub async fn run(app: Arc<App>) {
    let mut stopping = app.stopping.subscribe();
    let mut tick = tokio::time::interval(app.config.tick);
    tick.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
    loop {
        let woken = tokio::select! {
            _ = tick.tick() => false,
            () = app.wake.notified() => true,
            _ = stopping.changed() => return,
        };
        if woken {
            tokio::time::sleep(app.config.debounce).await;
        }
        let begun = std::time::Instant::now();
        let outcome = pass(&app).await;
        app.counters.pass_seconds.observe(begun.elapsed().as_secs_f64());
        if let Err(error) = outcome {
            app.counters.pass_failures.inc();
            tracing::warn!(%error, "a pass of the loop failed; the next looks again");
        }
    }
}

/// Whether every agent that runs ranks of a job has been silent for long.
async fn lost(app: &App, job: &JobRow) -> Result<bool, CycleError> {
    let now = app.clock.now();
    let silent = |node: &flexcomm_domain::NodeName| match app.presence.get(node, now) {
        Some((seen, _)) => now.since(seen.last).get() >= LOST_AFTER_S,
        None => true,
    };
    let ranks = app.store.ranks(&job.job).await?;
    Ok(ranks.iter().filter(|r| r.left.is_none()).all(|r| silent(&r.node)))
}

/// One pass over everything.
pub async fn pass(app: &Arc<App>) -> Result<(), CycleError> {
    let jobs: Vec<JobRow> = app.store.jobs().await?.into_iter().filter(|j| j.ended.is_none()).collect();
    app.boards().retain(|job, _| jobs.iter().any(|j| j.job == *job));
    let each = futures_util::stream::iter(jobs).map(|job| one_job(app, job));
    let failed: Vec<CycleError> =
        each.buffer_unordered(JOBS_AT_ONCE).filter_map(|r| std::future::ready(r.err())).collect().await;
    grants::tick(app).await?;
    publish(app).await?;
    failed.into_iter().next().map_or(Ok(()), Err)
}

async fn one_job(app: &Arc<App>, job: JobRow) -> Result<(), CycleError> {
    if lost(app, &job).await? {
        tracing::info!(job = %job.job, "ended: its agents have been gone for long");
        return Ok(app.store.end_lost(&job.job, app.clock.now()).await?);
    }
    trials::settle(app, &job).await?;
    let gathered = gather(app, &job).await?;
    let decided = decide::decide(&gathered).await?;
    let checked = check::check(&gathered, decided);
    if checked.refused.is_some() {
        app.counters.refused_decisions.inc();
    }
    let applied = apply::apply(app, &gathered, checked).await?;
    record::record(app, &gathered, applied).await
}
