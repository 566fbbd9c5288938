//! Phase 4: trial, then decision and memory, into the store. What is stored is published at the pass's end.

use flexcomm_domain::Decision;
use flexcomm_planner::{Memory, Outcome, TrialRequest};

use super::decide::Decided;
use super::{CycleError, Gathered};
use crate::app::App;
use crate::store::{NewDecision, NewTrial};

/// Stores what the outcome asks for.
pub async fn apply(app: &App, gathered: &Gathered, Decided { outcome, seed }: &Decided) -> Result<(), CycleError> {
    if let Some(trial) = &outcome.trial {
        ask(app, gathered, trial).await?;
    }
    match outcome.decision() {
        Some(decision) => put(app, gathered, (decision, *seed), outcome).await,
        None => remember(app, gathered, &outcome.memory).await,
    }
}

fn json<T: serde::Serialize>(job: &flexcomm_domain::JobId, value: &T) -> Result<String, CycleError> {
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
    let (job, version, plan) = (&decision.job, decision.version, &decision.plan);
    tracing::info!(%job, %version, strategy = %plan, reason = decision.reason, "decided");
    Ok(())
}

/// Stores the memory, which every look changes.
async fn remember(app: &App, gathered: &Gathered, memory: &Memory) -> Result<(), CycleError> {
    Ok(app.store.put_planner_memory(&gathered.job, &json(&gathered.job.job, memory)?).await?)
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
