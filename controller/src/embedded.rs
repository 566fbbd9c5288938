//! A controller without sockets, under a clock that its caller moves: for simulations and tests.
//!
//! It is the shipped one: requests go through the functions that the handlers of the API call, passes through the loop's,
//! at the times at which the loop would make them. What it stores is in memory. The same requests at the same times give
//! the same orders and decisions, byte for byte.

use flexcomm_domain::{JobId, NodeName, Plan, Strategy, Timestamp, Version};
use flexcomm_wire::{Heartbeat, Register, Registered, Report, ReportAck, ReportBatch};
use futures_util::FutureExt;
use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;
use tokio::runtime::Runtime;

use crate::ServeError;
use crate::api::{ApiError, agents, auth::Token};
use crate::app::{App, JobStatus};
use crate::clock::{Clock, GivenTime};
use crate::config::Config;
use crate::cycle::{self, CycleError, Pacing};
use crate::limits::{DECISIONS, TRIALS};
use crate::publish::Published;
use crate::store::{HistoryRow, Store, TrialRow};

/// A controller without sockets. Not to be used inside of an async runtime: it has its own.
#[derive(Debug)]
pub struct Embedded {
    runtime: Runtime,
    app: Arc<App>,
    time: Arc<GivenTime>,
    pacing: Pacing,
    looks: BTreeMap<JobId, Vec<Look>>,
}

/// A decision that was made.
#[derive(Debug, Clone, PartialEq)]
pub struct MadeDecision {
    /// Only grows within the job.
    pub version: Version,
    /// What to do.
    pub plan: Plan,
    /// Since the controller's start.
    pub at: Duration,
    /// One sentence why.
    pub reason: String,
    /// The first step under it, once every rank reported.
    pub applied_at_step: Option<u64>,
    /// What was predicted of its strategy, where that was among the candidates.
    pub predicted: Option<Predicted>,
    /// The planner's report as JSON ([`flexcomm_planner::Report`]).
    pub report: String,
}

/// What a decision promised.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Predicted {
    /// Compress and decompress, seconds.
    pub t_comp_s: f64,
    /// The collective, seconds.
    pub t_sync_s: f64,
    /// The whole step, seconds.
    pub t_step_s: f64,
    /// Share of the gradient's energy that is kept, 0 to 1.
    pub gain: f64,
}

/// A trial that was asked for.
#[derive(Debug, Clone, PartialEq)]
pub struct AskedTrial {
    /// Only grows within the job.
    pub id: u64,
    /// Since the controller's start.
    pub at: Duration,
    /// What is to be tried.
    pub candidates: Vec<Strategy>,
    /// Iterations per candidate.
    pub iterations: u32,
    /// One sentence why.
    pub why: String,
    /// When it was done or aborted, since the controller's start.
    pub ended: Option<Duration>,
    /// Why it did not run all candidates.
    pub aborted: Option<String>,
}

/// What a look at a job found. Looks that find the same verdict, waiting for the same, are one, while what they predict of the strategy
/// in force differs by less than one percent.
#[derive(Debug, Clone, PartialEq)]
pub struct Look {
    /// The first such look, since the controller's start.
    pub at: Duration,
    /// `change`, or the name of a [`flexcomm_planner::Keep`].
    pub verdict: String,
    /// One sentence why, of the first such look.
    pub why: String,
    /// What the job waits for; empty when it waits for nothing.
    pub waiting: Vec<String>,
    /// The strategy in force at that time, with the collective as it was predicted then, seconds; none before the first prediction.
    pub in_force: Option<(Plan, f64)>,
}

impl Look {
    fn is_as(&self, next: &Self) -> bool {
        let near = |(a, was): &(Plan, f64), (b, is): &(Plan, f64)| a == b && (is - was).abs() <= 0.01 * was;
        let predicts_as = match (&self.in_force, &next.in_force) {
            (Some(was), Some(is)) => near(was, is),
            (was, is) => was == is,
        };
        predicts_as && self.verdict == next.verdict && self.waiting == next.waiting
    }
}

impl Embedded {
    /// Begins at time 0, with an empty store and the loop's first pass over it. Addresses and files of the configuration are not used.
    pub fn open(config: Config) -> Result<Self, ServeError> {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_time().build();
        let runtime = runtime.map_err(ServeError::Runtime)?;
        let (time, pacing) = (Arc::<GivenTime>::default(), Pacing::new(&config));
        let clock = Clock::Given(time.clone());
        // Nobody can show it: nothing listens.
        let token = |_: &std::path::Path| Token::new("of a controller without sockets");
        let app = runtime.block_on(async { App::with(config, Store::in_memory().await?, clock, token).await })?;
        let mut embedded = Self { runtime, app: Arc::new(app), time, pacing, looks: BTreeMap::new() };
        embedded.pass_now()?;
        Ok(embedded)
    }

    /// Moves the clock on; an earlier time than the newest changes nothing.
    pub fn set_time(&mut self, since_start: Duration) {
        self.time.set(since_start);
    }

    /// As `POST /api/v1/agents/register`.
    pub fn register(&mut self, request: &Register) -> Result<Registered, String> {
        let answer = self.runtime.block_on(agents::admit(&self.app, request));
        self.answer(answer)
    }

    /// As `POST /api/v1/agents/{node}/heartbeat`.
    pub fn heartbeat(&mut self, node: &NodeName, beat: &Heartbeat) -> Result<(), String> {
        let answer = agents::alive(&self.app, node, beat);
        self.answer(answer)
    }

    /// As `POST /api/v1/agents/{node}/reports`: the reports are read from their JSON as those of a real agent.
    pub fn reports(&mut self, node: &NodeName, instance: u64, reports: Vec<Report>) -> Result<ReportAck, String> {
        let json = serde_json::to_vec(&ReportBatch { instance, reports });
        let json = json.map_err(|e| format!("the reports cannot be written as JSON: {e}"))?;
        let answer = agents::batch(&json).and_then(|batch| self.runtime.block_on(agents::take(&self.app, node, batch)));
        self.answer(answer)
    }

    /// When the loop passes next, since the start; news bring it forward. Now, where a pass is overdue.
    pub fn next_pass(&self) -> Duration {
        self.pacing.next().max(self.time.passed())
    }

    /// A pass of the loop, at the time that is set.
    pub fn pass(&mut self) -> Result<(), String> {
        self.pass_now().map_err(|error| format!("failed to {error}"))
    }

    fn pass_now(&mut self) -> Result<(), CycleError> {
        let now = self.time.passed();
        let due = self.pacing.begin(now);
        let app = &self.app;
        let outcome = self.runtime.block_on(async {
            if due.trim {
                app.store.trim().await?;
            }
            cycle::pass(app).await
        });
        self.pacing.end(now);
        self.notice();
        self.keep_looks();
        outcome
    }

    /// The newest orders of a node; a higher `orders.epoch` tells that they are new.
    pub fn orders(&self, node: &NodeName) -> Option<Arc<Published>> {
        self.app.publisher.follow(node).borrow().clone()
    }

    /// The decisions of a job, oldest first; none for one that is not known.
    pub fn decisions(&self, job: &JobId) -> Result<Vec<MadeDecision>, String> {
        let limit = DECISIONS as u32;
        let rows = self.runtime.block_on(self.app.store.history(job, u64::MAX, limit));
        let rows = rows.map_err(|error| format!("failed to {error}"))?;
        rows.into_iter().rev().map(made).collect()
    }

    /// The trials of a job, oldest first; none for one that is not known.
    pub fn trials(&self, job: &JobId) -> Result<Vec<AskedTrial>, String> {
        let rows = self.runtime.block_on(self.app.store.trials(job, TRIALS as u32));
        let rows = rows.map_err(|error| format!("failed to {error}"))?;
        Ok(rows.iter().rev().map(asked).collect())
    }

    /// What the passes found of a job, oldest first.
    pub fn looks(&self, job: &JobId) -> &[Look] {
        self.looks.get(job).map_or(&[], Vec::as_slice)
    }

    /// Ends a request.
    fn answer<T>(&mut self, answer: Result<T, ApiError>) -> Result<T, String> {
        self.notice();
        answer.map_err(ApiError::words)
    }

    /// Does what the loop does when it is woken; news during its debounce stay for the pass after.
    fn notice(&mut self) {
        if !self.pacing.is_woken() && self.app.wake.notified().now_or_never().is_some() {
            self.pacing.wake(self.time.passed());
        }
    }

    fn keep_looks(&mut self) {
        for (job, status) in &*self.app.statuses.lock() {
            let known = self.looks.entry(job.clone()).or_default();
            let new = look(status);
            if !known.last().is_some_and(|last| last.is_as(&new)) {
                known.push(new);
            }
        }
    }
}

fn look(status: &JobStatus) -> Look {
    let report = status.report.as_deref();
    Look {
        at: since_start(status.at),
        verdict: report.map_or(String::new(), |report| report.verdict.clone()),
        why: report.map_or(String::new(), |report| report.why.clone()),
        waiting: status.waiting.clone(),
        in_force: report.and_then(|report| report.in_force.as_ref()).map(|now| (now.plan.clone(), now.t_sync_s)),
    }
}

fn since_start(at: Timestamp) -> Duration {
    GivenTime::since_start(at)
}

fn made(row: HistoryRow) -> Result<MadeDecision, String> {
    let HistoryRow { row, report, .. } = row;
    let (decision, applied_at_step) = (row.decision, row.applied_at_step);
    let read: flexcomm_planner::Report = serde_json::from_str(&report)
        .map_err(|e| format!("failed to read the report of decision {}: {e}", decision.version))?;
    let chosen = read.alternatives.iter().find(|a| a.plan == decision.plan);
    let predicted = chosen.map(|a| Predicted {
        t_comp_s: a.t_comp_s,
        t_sync_s: a.t_sync_s,
        t_step_s: a.t_step_s,
        gain: a.gain.get(),
    });
    Ok(MadeDecision {
        version: decision.version,
        plan: decision.plan,
        at: since_start(decision.decided_at),
        reason: decision.reason,
        applied_at_step,
        predicted,
        report,
    })
}

fn asked(row: &TrialRow) -> AskedTrial {
    AskedTrial {
        id: row.id,
        at: since_start(row.asked),
        candidates: row.candidates.clone(),
        iterations: row.iterations,
        why: row.why.clone(),
        ended: row.ended.map(since_start),
        aborted: row.aborted.clone(),
    }
}
