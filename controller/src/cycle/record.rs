//! Phase 5: predicted against measured time, coefficients fitted to it, and the status for whoever looks.

use flexcomm_domain::{Plan, Strategy, Timestamp};
use flexcomm_optimizer::{Evaluator, Problem, Sample};
use flexcomm_planner::{Outcome, Report, Snapshot};
use std::collections::BTreeMap;
use std::sync::Arc;

use super::{CycleError, Gathered};
use crate::app::{App, JobStatus};
use crate::intervals::{self, FIT_AFTER_S, Prediction, Surroundings};
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
    fit(app, &gathered).await?;
    let fitted_trial = fit_trial(app, &gathered, &outcome).await?;
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
        fitted_trial,
        deviates,
    };
    statuses.insert(gathered.job.job.clone(), status);
    Ok(())
}

/// What is believed of the strategy in force when the call was made, and what the cost model says of it. Nothing is predicted over links
/// that the steps contradict: an interval that begins then is never fitted to.
fn prediction(gathered: &Gathered, report: &Report) -> Option<Prediction> {
    let now = report.in_force.as_ref().filter(|_| report.contradicted_s.is_none())?;
    // Of a plan by bucket the terms are those of the last bucket's strategy: they tell when links move.
    let model = Evaluator::new(&measured_problem(&gathered.snapshot)?).evaluate(now.plan.last()).ok()?;
    let model_sync_s = if now.plan.alike().is_some() { model.t_sync.get() } else { now.model_sync_s };
    Some(Prediction {
        version: gathered.snapshot.version(),
        sync_us: now.t_sync_s * 1e6,
        step_us: now.t_step_s * 1e6,
        model_sync_us: model_sync_s * 1e6,
        terms: model.terms,
    })
}

/// Of the links as they are measured. What the planner believes of them follows the steps, so a model over that would neither move with
/// the links nor deviate from steps that show a change before the links do.
fn measured_problem(snapshot: &Snapshot) -> Option<Problem> {
    snapshot.links.as_ref().map(|links| snapshot.problem(&links.matrix, BTreeMap::new()))
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
    if let Some(since) = cut.unsettled_since {
        app.store.unsettle(job, since).await?;
    }
    Ok((cut.closed.into_iter().next_back(), Some(cut.open)))
}

/// Whether the collective takes another time than predicted before its steps.
fn deviates(interval: &IntervalRow, share: f64) -> bool {
    let measured = interval.measured_sync_us;
    interval.predicted_sync_us.is_some_and(|predicted| (predicted - measured).abs() > share * predicted.min(measured))
}

/// Fits the coefficients to intervals that are old enough for a change of the network to have been seen.
async fn fit(app: &App, gathered: &Gathered) -> Result<(), CycleError> {
    let job = &gathered.job.job;
    let before = Timestamp(gathered.now.0.saturating_sub((FIT_AFTER_S * 1e6) as u64));
    let known = app.store.coefficients().await?;
    let oldest = gathered.snapshot.links.as_ref().map_or(f64::INFINITY, |links| links.oldest.get());
    let links_since = Timestamp(gathered.now.0.saturating_sub((oldest * 1e6) as u64));
    let mut new = app.store.unfitted(job, before).await?;
    // Of a plan by bucket it is not known what of a step's wait is which collective's.
    let collective = |plan: &Plan| plan.alike().map(Strategy::collective);
    new.retain(|row| {
        let Some(collective) = collective(&row.strategy) else { return false };
        let fitted = known.get(collective, &gathered.job.backend);
        intervals::ripe(&fitted, (row.at, &row.sample), links_since, gathered.now)
    });
    if new.is_empty() {
        return Ok(());
    }
    let mut book = (*known).clone();
    app.counters.fitted.inc_by(new.len() as u64);
    for row in &new {
        let fitted = collective(&row.strategy)
            .is_some_and(|collective| book.observe(collective, &gathered.job.backend, row.sample));
        if !fitted {
            tracing::debug!(%job, ?row, "not fitted");
        }
    }
    Ok(app.store.put_fit(job, &new, &book).await?)
}

/// Fits the coefficients to a trial that has just ended: it ran collectives that the job does not. Answers the newest
/// trial that is taken care of; one that ended before this process began is, and so is one whose links may be others than those
/// that are known now: they have moved since the last decision, or the newest steps contradict them.
async fn fit_trial(app: &App, gathered: &Gathered, outcome: &Outcome) -> Result<u64, CycleError> {
    let job = &gathered.job.job;
    let Some(trial) = &gathered.snapshot.trial else { return Ok(0) };
    let known = app.statuses.lock().get(job).map(|status| status.fitted_trial);
    let moved = outcome.report.changed.is_some() || outcome.report.contradicted_s.is_some();
    if moved || known.is_none_or(|id| id >= trial.id) {
        return Ok(trial.id);
    }
    let mut book = (*app.store.coefficients().await?).clone();
    let Some(problem) = measured_problem(&gathered.snapshot) else { return Ok(trial.id) };
    let terms: Vec<_> = {
        let evaluator = Evaluator::new(&problem);
        trial.sync.iter().map(|(strategy, _)| evaluator.evaluate(strategy).ok().map(|model| model.terms)).collect()
    };
    for ((strategy, measured), terms) in trial.sync.iter().zip(terms) {
        let Some(terms) = terms else { continue };
        let sample = Sample { terms, measured_s: measured.get() };
        if book.observe(strategy.collective(), &gathered.job.backend, sample) {
            app.counters.fitted.inc();
        }
    }
    app.store.put_fit(job, &[], &book).await?;
    Ok(trial.id)
}
