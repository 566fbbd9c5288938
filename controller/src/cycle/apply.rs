//! Phase 4: trial, then decision and memory, into the store. What is stored is published at the pass's end.

use flexcomm_domain::{Decision, JobId};
use flexcomm_planner::{Memory, Outcome, TrialRequest};

use super::decide::Decided;
use super::{CycleError, Gathered};
use crate::app::App;
use crate::store::{JobRow, NewDecision, NewTrial, StoreError};

/// Stores what the outcome asks for.
pub async fn apply(app: &App, gathered: &Gathered, Decided { outcome, seed }: &Decided) -> Result<(), CycleError> {
    if let Some(trial) = &outcome.trial {
        ask(app, gathered, trial).await?;
    }
    match outcome.decision() {
        Some(decision) => put(app, gathered, (decision, *seed), outcome).await,
        None => remember(app, gathered, &outcome.memory, outcome.trial.is_some()).await,
    }
}

fn json<T: serde::Serialize>(job: &JobId, value: &T) -> Result<String, CycleError> {
    serde_json::to_string(value).map_err(|e| CycleError::Json { job: job.to_string(), why: e.to_string() })
}

async fn put(
    app: &App,
    gathered: &Gathered,
    (decision, seed): (&Decision, u64),
    outcome: &Outcome,
) -> Result<(), CycleError> {
    let report = json(&decision.job, &outcome.report)?;
    let memory = json(&decision.job, &outcome.memory)?;
    let snapshot = json(&decision.job, &*gathered.snapshot)?;
    let new = NewDecision { decision, seed, report: &report, memory: &memory, snapshot: &snapshot };
    app.store.put_decision(&gathered.job, &new).await?;
    app.memories.lock().keep(&gathered.job, outcome.memory.clone(), gathered.now, true);
    let (job, version, plan) = (&decision.job, decision.version, &decision.plan);
    tracing::info!(%job, %version, strategy = %plan, reason = decision.reason, "decided");
    Ok(())
}

/// Keeps the memory, and stores it where it must be on disk or has not been for long.
async fn remember(app: &App, gathered: &Gathered, memory: &Memory, must: bool) -> Result<(), CycleError> {
    let Gathered { job, now, .. } = gathered;
    let is_due = must || app.memories.lock().is_due(job, *now);
    if is_due {
        app.store.put_planner_memory(job, &json(&job.job, memory)?).await?;
    }
    app.memories.lock().keep(job, memory.clone(), *now, is_due);
    Ok(())
}

/// Stores what is remembered of all but these runs, for those that come after them.
pub async fn remember_ended(app: &App, runs: &[JobRow]) {
    let ended = app.memories.lock().forget_others(runs);
    for (run, memory) in ended {
        let stored =
            async { Ok::<_, CycleError>(app.store.put_planner_memory(&run, &json(&run.job, &memory)?).await?) };
        match stored.await {
            Ok(()) => {}
            Err(CycleError::Store(error @ StoreError::Replaced { .. })) => {
                tracing::debug!(%error, "what the planner remembers since it was stored last is dropped");
            }
            Err(error) => {
                tracing::warn!(job = %run.job, %error, "what the planner remembers is not stored; the next look tries again");
                app.memories.lock().keep(&run, memory, app.clock.now(), false);
            }
        }
    }
}

async fn ask(app: &App, gathered: &Gathered, trial: &TrialRequest) -> Result<(), CycleError> {
    let new = NewTrial {
        candidates: &trial.candidates,
        iterations: trial.iterations,
        budget_ms: (trial.budget.get() * 1e3) as u64,
        why: &trial.why,
    };
    let job = &gathered.job.job;
    match app.store.ask_trial(&gathered.job, &new, gathered.now).await? {
        Some(id) => tracing::info!(%job, id, why = trial.why, "asked for a trial"),
        None => tracing::debug!(%job, "a trial is pending already"),
    }
    Ok(())
}
