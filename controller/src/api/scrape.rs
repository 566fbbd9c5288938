//! `/metrics`: what the API would answer, as Prometheus reads it.

use axum::extract::State;
use axum::http::header::CONTENT_TYPE;
use axum::response::IntoResponse;
use flexcomm_domain::Timestamp;
use flexcomm_wire::api::JobView;

use super::problem::ApiError;
use super::{Shared, jobs, network};
use crate::app::App;
use crate::limits::MAX_STREAMS;
use crate::metrics::{self as m, Scrape};

impl From<prometheus::Error> for ApiError {
    fn from(error: prometheus::Error) -> Self {
        Self::Internal(format!("a metric cannot be written: {error}"))
    }
}

pub(super) async fn metrics(State(app): Shared) -> Result<impl IntoResponse, ApiError> {
    let mut scrape = Scrape::new(&app.counters)?;
    let ready = app.store.ready().await.is_ok();
    scrape.set(m::STORE_READY, &[], f64::from(u8::from(ready)))?;
    scrape.set(m::DAMAGED, &[], app.store.damaged_rows() as f64)?;
    scrape.set(m::STREAMS, &[], (MAX_STREAMS - app.streams.available_permits().min(MAX_STREAMS)) as f64)?;
    // A store that fails must not silence what is known without it.
    if ready {
        nodes(&app, &mut scrape).await?;
        links(&app, &mut scrape).await?;
        all_jobs(&app, &mut scrape).await?;
        rejected(&app, &mut scrape).await?;
    }
    Ok(([(CONTENT_TYPE, "text/plain; version=0.0.4; charset=utf-8")], scrape.text()?))
}

async fn nodes(app: &App, s: &mut Scrape) -> Result<(), ApiError> {
    for view in network::all_nodes(app).await? {
        let label = [view.node.as_str()];
        s.set(m::NODE_LIVE, &label, f64::from(u8::from(view.live)))?;
        s.set(m::NODE_HEARTBEAT_AGE, &label, view.heartbeat_age_ms as f64 * 1e-3)?;
        s.set(m::NODE_SPOOLED, &label, view.spooled as f64)?;
    }
    for row in app.store.nodes().await? {
        s.set(m::NODE_ACKED, &[row.node.as_str()], row.acked_seq as f64)?;
    }
    Ok(())
}

async fn links(app: &App, s: &mut Scrape) -> Result<(), ApiError> {
    for view in network::all_links(app).await? {
        let label = [view.from.as_str(), view.to.as_str()];
        s.set(m::LINK_LATENCY, &label, view.latency_us * 1e-6)?;
        s.maybe(m::LINK_BANDWIDTH, &label, view.bandwidth_bps)?;
        s.set(m::LINK_LATENCY_AGE, &label, view.latency_age_ms * 1e-3)?;
        s.maybe(m::LINK_BANDWIDTH_AGE, &label, view.bandwidth_age_ms.map(|ms| ms * 1e-3))?;
        s.set(m::LINK_LOSS, &label, view.loss_out)?;
    }
    Ok(())
}

async fn all_jobs(app: &App, s: &mut Scrape) -> Result<(), ApiError> {
    let running: Vec<_> = app.store.jobs().await?.into_iter().filter(|j| j.ended.is_none()).map(|j| j.job).collect();
    for view in jobs::all(app).await?.into_iter().filter(|v| running.contains(&v.job)) {
        times(&view, s)?;
        missing(&view, app.clock.now(), s)?;
        doubted(&view, s)?;
        decision(app, &view, s).await?;
    }
    Ok(())
}

fn times(view: &JobView, s: &mut Scrape) -> Result<(), ApiError> {
    let job = view.job.as_str();
    s.set(m::JOB_WORLD, &[job], f64::from(view.world))?;
    s.set(m::JOB_LIVE, &[job], f64::from(view.live_ranks))?;
    s.set(m::JOB_STEP, &[job], view.step as f64)?;
    s.maybe(m::JOB_LOSS, &[job], view.loss)?;
    s.maybe(m::JOB_ACCURACY, &[job], view.accuracy)?;
    s.maybe(m::JOB_GAIN, &[job], view.gain)?;
    let measured =
        [("compute", view.compute_us), ("compress", view.comp_us), ("sync", view.sync_us), ("step", view.step_us)];
    for (part, us) in measured {
        s.maybe(m::JOB_MEASURED, &[job, part], us.map(|us| us * 1e-6))?;
    }
    for (part, us) in [("sync", view.predicted_sync_us), ("step", view.predicted_step_us)] {
        s.maybe(m::JOB_PREDICTED, &[job, part], us.map(|us| us * 1e-6))?;
    }
    Ok(())
}

fn doubted(view: &JobView, s: &mut Scrape) -> Result<(), ApiError> {
    for doubt in &view.doubted {
        s.set(m::JOB_DOUBTED, &[view.job.as_str(), doubt.node.as_ref().map_or("", |n| n.as_str())], 1.0)?;
    }
    Ok(())
}

fn missing(view: &JobView, now: Timestamp, s: &mut Scrape) -> Result<(), ApiError> {
    let job = view.job.as_str();
    s.set(m::JOB_MISSING, &[job], view.missing.len() as f64)?;
    for missing in &view.missing {
        let node = missing.node.as_ref().map_or("", |n| n.as_str());
        s.set(m::JOB_MISSING_FOR, &[job, node], now.since(Timestamp(missing.since_us)).get())?;
    }
    Ok(())
}

async fn decision(app: &App, view: &JobView, s: &mut Scrape) -> Result<(), ApiError> {
    let job = view.job.as_str();
    if let Some(row) = app.store.decision(&view.job).await? {
        let strategy = row.decision.plan.last();
        s.set(m::JOB_CR, &[job], strategy.cr().get())?;
        s.set(m::JOB_VERSION, &[job], row.decision.version.0 as f64)?;
        let selection = strategy.selection().map_or("", |x| x.as_str());
        let labels = [job, strategy.spec().compressor().name, strategy.collective().as_str(), selection];
        s.set(m::JOB_STRATEGY, &labels, 1.0)?;
    }
    let report = app.statuses.lock().get(&view.job).and_then(|status| status.report.clone());
    if let Some(report) = report {
        s.set(m::JOB_VERDICT, &[job, &report.verdict], 1.0)?;
    }
    let trials = app.store.trials(&view.job, crate::limits::TRIALS as u32).await?;
    for state in ["pending", "done", "aborted"] {
        let count = trials.iter().filter(|t| t.state == state).count();
        s.set(m::JOB_TRIALS, &[job, state], count as f64)?;
    }
    Ok(())
}

async fn rejected(app: &App, s: &mut Scrape) -> Result<(), ApiError> {
    // Reasons that never occurred are 0, so that a rate over them exists from the first on.
    for reason in crate::reports::Reason::ALL {
        s.set(m::REJECTED_REPORTS, &[reason.as_str()], 0.0)?;
    }
    for row in app.store.rejected().await? {
        s.set(m::REJECTED_REPORTS, &[&row.reason], row.count as f64)?;
    }
    Ok(())
}
