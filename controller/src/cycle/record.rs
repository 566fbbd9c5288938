//! Phase 5: predicted against measured time, and the status for whoever looks.

use flexcomm_planner::{Outcome, Report};
use std::sync::Arc;

use super::{CycleError, Gathered};
use crate::app::{App, JobStatus};
use crate::intervals::{self, Prediction, Surroundings};
use crate::store::{IntervalRow, OpenInterval};

/// Keeps what was seen, and why the outcome was not applied.
pub async fn record(
    app: &App,
    gathered: Gathered,
    outcome: Outcome,
    refused: Option<String>,
) -> Result<(), CycleError> {
    let prediction = prediction(&gathered, &outcome.report);
    let (newest, open) = measure(app, &gathered, prediction).await?;
    let report = &outcome.report;
    tracing::debug!(job = %gathered.job.job, verdict = report.verdict, why = report.why, "looked");
    let undecided = (refused.is_some() || outcome.decision().is_none()).then_some(gathered.snapshot);
    let refused = refused.map(|why| format!("the checker refused a decision: {why}"));
    let doubts = app.doubts.lock().lasting(&gathered.job.job, &gathered.doubts, gathered.now);
    let mut statuses = app.statuses.lock();
    let deviates = match &newest {
        Some(interval) => deviates(interval, app.config.probes.suspect_change),
        None => statuses.get(&gathered.job.job).is_some_and(|before| before.deviates),
    };
    // What is predicted once its steps are known is none of them.
    let predicted = match &open {
        Some(open) => (open.predicted_sync_us, open.predicted_step_us),
        None => (prediction.map(|p| p.sync_us), prediction.map(|p| p.step_us)),
    };
    let status = JobStatus {
        at: gathered.now,
        waiting: gathered.waiting.iter().cloned().chain(refused).collect(),
        doubts,
        report: Some(Arc::new(outcome.report)),
        undecided,
        predicted_sync_us: predicted.0,
        predicted_step_us: predicted.1,
        deviates,
    };
    statuses.insert(gathered.job.job.clone(), status);
    Ok(())
}

/// What is believed of the strategy in force when the call was made. Nothing is predicted over links that the steps contradict.
fn prediction(gathered: &Gathered, report: &Report) -> Option<Prediction> {
    let now = report.in_force.as_ref().filter(|_| report.contradicted_s.is_none())?;
    let version = gathered.snapshot.version();
    Some(Prediction { version, sync_us: now.t_sync_s * 1e6, step_us: now.t_step_s * 1e6 })
}

/// Closes intervals; returns the newest that was closed, and the one that is open.
async fn measure(
    app: &App,
    gathered: &Gathered,
    prediction: Option<Prediction>,
) -> Result<(Option<IntervalRow>, Option<OpenInterval>), CycleError> {
    let job = &gathered.job.job;
    if gathered.recent.whole.is_empty() {
        return Ok((None, None));
    }
    let in_force = gathered.snapshot.in_force.as_ref().map(|f| (f.decision.version, &f.decision.plan));
    let around = Surroundings { prediction, in_force, now: gathered.now };
    let open = app.store.open_interval(job).await?;
    let cut = intervals::cut(open.clone(), &gathered.recent.whole, &around);
    if open.as_ref() != Some(&cut.open) || !cut.closed.is_empty() {
        app.store.put_intervals(&gathered.job, &cut.closed, &cut.open).await?;
    }
    Ok((cut.closed.into_iter().next_back(), Some(cut.open)))
}

/// Noise of computing in a measured wait, as a share of the step.
const UNEVEN: f64 = 0.02;

/// Whether the collective takes another time than predicted before its steps.
fn deviates(interval: &IntervalRow, share: f64) -> bool {
    let (measured, noise) = (interval.measured_sync_us, UNEVEN * interval.measured_step_us);
    let far = |predicted: f64| (predicted - measured).abs() > noise.max(share * predicted.min(measured));
    interval.predicted_sync_us.is_some_and(far)
}
