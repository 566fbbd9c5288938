//! Jobs, their decisions, trials and intervals.

use axum::Json;
use axum::extract::{FromRequestParts, State};
use axum::http::StatusCode;
use axum::http::request::Parts;
use flexcomm_domain::{JobId, Strategy};
use flexcomm_planner::{JobPolicy, TRIAL_ITERATIONS, one_of_each, thinned};
use flexcomm_wire::api::{
    DecisionView, ExperimentView, HistoryEntry, IntervalView, JobView, PolicySet, PolicyView, RunView, SnapshotEntry,
    TrialView,
};
use flexcomm_wire::{MAX_CANDIDATES, StrategyWire};
use serde::de::Error as _;
use serde::{Deserialize, Deserializer};
use serde_json::Value;
use std::collections::BTreeSet;
use std::sync::Arc;

use super::body::Body;
use super::problem::{ApiError, Path, Query};
use super::{Answer, Shared, views};
use crate::app::App;
use crate::cycle::gather;
use crate::limits::{INTERVALS, LIST_ENDED, PAGE_DEFAULT, PAGE_MOST, SNAPSHOT_PAGE};
use crate::measure::{self, RecentSteps};
use crate::missing::Sight;
use crate::policy::{self, PolicyError};
use crate::store::{Deletion, JobRow, NewTrial};

fn unknown(job: &JobId) -> ApiError {
    ApiError::NotFound(format!("job {job}: no trainer has announced it"))
}

fn not_started(job: &JobId) -> ApiError {
    ApiError::NotFound(format!(
        "job {job}: no trainer has announced it yet. Set its policy in its script (`policy=` of attach), which counts \
         from its start on, or by PUT once it has started"
    ))
}

fn undecided(job: &JobId) -> ApiError {
    ApiError::NotFound(format!(
        "job {job} has ended, and nothing was decided for it: of its looks none is stored; what its steps took is in \
         /api/v1/jobs/{job}/intervals"
    ))
}

/// The job that a path names; others are not found.
pub(super) struct Job(pub JobRow);

impl FromRequestParts<Arc<App>> for Job {
    type Rejection = ApiError;

    async fn from_request_parts(parts: &mut Parts, app: &Arc<App>) -> Result<Self, ApiError> {
        let Path(job) = Path::<JobId>::from_request_parts(parts, app).await?;
        app.store.job(&job).await?.map(Self).ok_or_else(|| unknown(&job))
    }
}

/// `?limit=` and, for the history and the snapshots, `?before=` a version.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Page {
    #[serde(default, deserialize_with = "entries")]
    limit: Option<u32>,
    before: Option<u64>,
}

/// How many entries are asked for: one or more. Who asks for more than come at once pages anyway, so that is no error.
pub(super) fn entries<'de, D: Deserializer<'de>>(from: D) -> Result<Option<u32>, D::Error> {
    match Option::<u32>::deserialize(from)? {
        Some(0) => Err(D::Error::custom(format!("it is 0, allowed are 1 to {PAGE_MOST}"))),
        limit => Ok(limit),
    }
}

impl Page {
    pub(super) fn limit(&self, default: u32) -> u32 {
        self.limit.unwrap_or(default).min(PAGE_MOST)
    }
}

async fn view(app: &App, row: JobRow) -> Result<JobView, ApiError> {
    let ranks = app.store.ranks(&row.job).await?;
    let running = row.ended.is_none();
    let sight = if running { app.sight(&row, &ranks) } else { Sight::default() };
    let steps = if running {
        app.store.recent_steps(&row.job, &sight.expected).await?
    } else {
        let spans = app.store.step_spans(&row.job).await?;
        Arc::new(RecentSteps { newest: measure::job_step(&spans), ..RecentSteps::default() })
    };
    let version = app.store.decision(&row.job).await?.map(|d| d.decision.version).unwrap_or_default();
    // Before the newest decision is in force, the steps under the one before it are what runs.
    let ran = steps.whole.last().map(|s| s.version).unwrap_or_default();
    let measured = |version| measure::measured(&steps.whole, version, app.clock.now());
    let parts = views::JobParts {
        now: app.clock.now(),
        ranks: &ranks,
        live: &app.presence.live(app.clock.now()),
        step: steps.newest.unwrap_or_default(),
        measured: measured(version).or_else(|| measured(ran)),
        compute_us: measure::compute(&steps.whole).map(|s| s.get() * 1e6),
        status: app.statuses.lock().get(&row.job).cloned(),
        missing: &sight.missing,
    };
    Ok(views::job(row, &parts))
}

/// Every job that runs and the newest that ended, newest first.
pub(super) async fn all(app: &App) -> Result<Vec<JobView>, ApiError> {
    let mut views = Vec::new();
    let mut ended = 0;
    for row in app.store.jobs().await? {
        ended += usize::from(row.ended.is_some());
        if row.ended.is_none() || ended <= LIST_ENDED {
            views.push(view(app, row).await?);
        }
    }
    Ok(views)
}

pub(super) async fn list(State(app): Shared) -> Answer<Vec<JobView>> {
    Ok(Json(all(&app).await?))
}

pub(super) async fn one(State(app): Shared, Job(row): Job) -> Answer<JobView> {
    Ok(Json(view(&app, row).await?))
}

pub(super) async fn decision(State(app): Shared, Job(JobRow { job, .. }): Job) -> Answer<DecisionView> {
    let row = app.store.decision(&job).await?;
    let none = || ApiError::NotFound(format!("nothing has been decided for job {job} yet; see its report"));
    Ok(Json(views::decision(&row.ok_or_else(none)?)))
}

pub(super) async fn history(State(app): Shared, Query(page): Query<Page>, Job(row): Job) -> Answer<Vec<HistoryEntry>> {
    let rows = app.store.history(&row.job, page.before.unwrap_or(u64::MAX), page.limit(PAGE_DEFAULT)).await?;
    Ok(Json(rows.iter().map(views::history).collect()))
}

/// What decisions were made from; the first page begins with the newest look where that decided nothing.
pub(super) async fn snapshots(
    State(app): Shared,
    Query(page): Query<Page>,
    Job(JobRow { job, .. }): Job,
) -> Answer<Vec<SnapshotEntry>> {
    let limit = page.limit(SNAPSHOT_PAGE).min(SNAPSHOT_PAGE);
    let rows = app.store.snapshots(&job, page.before.unwrap_or(u64::MAX), limit).await?;
    let status = app.statuses.lock().get(&job).filter(|_| page.before.is_none()).cloned();
    let look = status.and_then(|status| views::look(&status));
    Ok(Json(look.into_iter().chain(rows.into_iter().map(views::snapshot)).collect()))
}

/// The last look at the job, also when it changed nothing; of a job that has ended, the look that made its newest decision.
pub(super) async fn report(State(app): Shared, Job(row): Job) -> Answer<Value> {
    let status = app.statuses.lock().get(&row.job).cloned();
    if status.is_none() && row.ended.is_some() {
        let newest = app.store.history(&row.job, u64::MAX, 1).await?.pop().ok_or_else(|| undecided(&row.job))?;
        let HistoryEntry { decision, report } = views::history(&newest);
        return Ok(Json(serde_json::json!({ "at_us": decision.since_us, "waiting": [], "report": report })));
    }
    let status = status.unwrap_or_default();
    Ok(Json(serde_json::json!({ "at_us": status.at.0, "waiting": status.waiting, "report": status.report })))
}

pub(super) async fn trials(State(app): Shared, Query(page): Query<Page>, Job(row): Job) -> Answer<Vec<TrialView>> {
    let limit = page.limit(PAGE_DEFAULT);
    let reports = app.store.trial_reports(&row.job, limit).await?;
    let rows = app.store.trials(&row.job, limit).await?;
    Ok(Json(rows.iter().map(|row| views::trial(row, &reports)).collect()))
}

/// What a job's experiments took.
pub(super) async fn experiments(State(app): Shared, Job(row): Job) -> Answer<Vec<ExperimentView>> {
    let run_s = row.ended.unwrap_or_else(|| app.clock.now()).since(row.created).get();
    let ranks = app.store.ranks(&row.job).await?;
    let nodes = ranks.iter().map(|rank| &rank.node).collect::<BTreeSet<_>>().len();
    let rows = app.store.experiments(&row.job).await?;
    Ok(Json(rows.into_iter().map(|row| views::experiment(row, run_s, nodes)).collect()))
}

pub(super) async fn intervals(
    State(app): Shared,
    Query(page): Query<Page>,
    Job(row): Job,
) -> Answer<Vec<IntervalView>> {
    Ok(Json(app.store.intervals(&row.job, page.limit(INTERVALS as u32)).await?))
}

/// The runs before the one that has the job's name now, newest first.
pub(super) async fn runs(State(app): Shared, Job(row): Job) -> Answer<Vec<RunView>> {
    Ok(Json(app.store.runs(&row.job).await?.into_iter().map(views::run).collect()))
}

/// Deletes a job that has ended, or whose agents are all silent, with everything that bears its name.
pub(super) async fn delete(State(app): Shared, Path(job): Path<JobId>) -> Result<StatusCode, ApiError> {
    let _passing = app.passing.lock().await;
    match app.store.delete_job(&job, &app.presence.live(app.clock.now())).await? {
        Deletion::Unknown => Err(unknown(&job)),
        Deletion::Running => {
            Err(ApiError::Conflict(format!("job {job} runs, and an agent of it is alive; end its training first")))
        }
        Deletion::Done => {
            app.statuses.lock().remove(&job);
            app.wake.notify_one();
            Ok(StatusCode::NO_CONTENT)
        }
    }
}

/// What is set for a job, and by whom.
pub(super) async fn policy(State(app): Shared, Job(row): Job) -> Answer<PolicyView> {
    Ok(Json(policy::view(&row, &app.store.ranks(&row.job).await?, app.clock.now(), &app.config.planner)))
}

/// Sets what counts for a job, from the next look on; it stays for later runs under the name.
pub(super) async fn set_policy(
    State(app): Shared,
    Path(job): Path<JobId>,
    Body(asked): Body<Value>,
) -> Answer<PolicySet> {
    let row = app.store.job(&job).await?.ok_or_else(|| not_started(&job))?;
    let refused = |e: PolicyError| ApiError::Unprocessable(e.to_string());
    let policy = JobPolicy::read(&asked).map_err(|e| refused(e.into()))?;
    let answer = policy::check_against(&policy, snapshot(&app, &row).await?, app.clock.now()).map_err(refused)?;
    put_policy(&app, &row, Some(&policy)).await?;
    Ok(Json(answer))
}

/// Takes back what an operator set; answers what counts from then on.
pub(super) async fn reset_policy(State(app): Shared, Job(row): Job) -> Answer<PolicyView> {
    put_policy(&app, &row, None).await?;
    let ranks = app.store.ranks(&row.job).await?;
    Ok(Json(policy::view(&JobRow { policy: None, ..row }, &ranks, app.clock.now(), &app.config.planner)))
}

async fn put_policy(app: &App, row: &JobRow, policy: Option<&JobPolicy>) -> Result<(), ApiError> {
    let job = &row.job;
    if !app.store.put_policy(job, policy).await? {
        return Err(unknown(job));
    }
    let text = |policy: Option<&JobPolicy>| policy.and_then(|policy| serde_json::to_string(policy).ok());
    let (before, now) = (text(row.policy.as_ref()), text(policy));
    tracing::info!(%job, ?before, ?now, "an operator changed the job's policy");
    app.wake.notify_one();
    Ok(())
}

/// Body of a request for a trial: `{}` for the default candidates.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct AskTrial {
    #[serde(default)]
    candidates: Vec<Candidate>,
}

/// A strategy's text; what is none is told the form.
struct Candidate(StrategyWire);

impl<'de> Deserialize<'de> for Candidate {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let written = Value::deserialize(deserializer)?;
        let form = |_| {
            D::Error::custom(format!(
                "{written} is no strategy: expected a text COMPRESSOR/COLLECTIVE[:SELECTION], such as \
                 \"topk(k=0.01)+ef(vanilla)/allgather\""
            ))
        };
        StrategyWire::deserialize(&written).map(Self).map_err(form)
    }
}

pub(super) async fn ask_trial(
    State(app): Shared,
    Job(row): Job,
    Body(ask): Body<AskTrial>,
) -> Result<(StatusCode, Json<Value>), ApiError> {
    let job = &row.job;
    if row.ended.is_some() {
        return Err(ApiError::Conflict(format!("job {job} has ended")));
    }
    let given = ask.candidates.iter().map(|Candidate(wire)| Strategy::try_from(wire)).collect::<Result<Vec<_>, _>>();
    let mut candidates = given.map_err(|e| ApiError::Unprocessable(e.to_string()))?;
    if !candidates.is_empty() {
        runnable(&snapshot(&app, &row).await?, &candidates)?;
    }
    if candidates.is_empty() {
        candidates = default_candidates(&app, &row).await?;
    }
    if candidates.is_empty() || candidates.len() > MAX_CANDIDATES {
        let count = candidates.len();
        return Err(ApiError::Unprocessable(format!("{count} candidates, allowed are 1 to {MAX_CANDIDATES}")));
    }
    let new = NewTrial {
        candidates: &candidates,
        iterations: TRIAL_ITERATIONS,
        budget_ms: (trial_budget_s(&app.config.planner) * 1e3) as u64,
        why: "asked for by an operator",
    };
    let id = app.store.ask_trial(&row, &new, app.clock.now()).await?;
    let id = id.ok_or_else(|| ApiError::Conflict(format!("a trial of job {job} is pending already")))?;
    app.wake.notify_one();
    Ok((StatusCode::ACCEPTED, Json(serde_json::json!({ "id": id }))))
}

/// Most time that a trial may take for which an operator asks. Where the planner is to ask for none, his own takes the default.
fn trial_budget_s(config: &flexcomm_planner::Config) -> f64 {
    let set_s = config.trial_budget_s.get();
    if set_s > 0.0 { set_s } else { flexcomm_planner::Config::default().trial_budget_s.get() }
}

/// Refuses what the job's trainers do not have, since they would leave it out without a word, and what is not allowed.
fn runnable(snapshot: &flexcomm_planner::Snapshot, candidates: &[Strategy]) -> Result<(), ApiError> {
    let offer = &snapshot.offer;
    let left_out = |s: &Strategy| snapshot.left_out(&s.family()).filter(|_| !s.is_dense());
    if let Some((strategy, why)) = candidates.iter().find_map(|s| Some((s, left_out(s)?))) {
        return Err(ApiError::Unprocessable(format!("job {} does not try {strategy}: {why}", snapshot.job)));
    }
    let has = |s: &Strategy| s.is_dense() || offer.codecs.contains_key(&s.family());
    let lacks = |s: &&Strategy| !has(s) || !offer.collectives.contains(&s.collective());
    let Some(lacking) = candidates.iter().find(lacks) else { return Ok(()) };
    Err(ApiError::Unprocessable(format!(
        "the trainers of job {} cannot run {lacking}: they have {}",
        snapshot.job,
        policy::offered(snapshot)
    )))
}

/// What the next look at a job would decide on.
async fn snapshot(app: &App, job: &JobRow) -> Result<flexcomm_planner::Snapshot, ApiError> {
    Ok(Arc::unwrap_or_clone(gather(app, job, &app.store.ranks(&job.job).await?).await?.snapshot))
}

/// One candidate per way of selecting and ratio, by the collective that the last look found fastest for it; of ratios as many as fit
/// a trial.
async fn default_candidates(app: &App, job: &JobRow) -> Result<Vec<Strategy>, ApiError> {
    let space = snapshot(app, job).await?.space();
    let report = app.statuses.lock().get(&job.job).and_then(|status| status.report.clone());
    let times = report.as_ref().map_or(&[][..], |report| &report.alternatives);
    let time = |s: &Strategy| times.iter().find(|a| a.plan == *s).map_or(f64::MAX, |a| a.t_sync_s);
    Ok(thinned(one_of_each(&space, time)))
}
