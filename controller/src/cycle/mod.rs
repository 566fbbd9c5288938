//! The decision loop: gather, decide, check, apply, record; for every job, again and again.
//!
//! Each pass asks the store for everything that it needs, but for what the planner remembers (`memories.rs`): a restart or a missed wake-up
//! costs nothing. The store answers from memory what it has read before, and never with stale values: all writes are its own, and
//! each discards what was read of the tables that it changes (`store/read_cache.rs`); of a job's steps it reads those that are new
//! (`store/steps.rs`). A job that fails does not stop the others.

mod apply;
mod check;
mod decide;
mod gather;
mod grants;
mod pacing;
mod profiles;
mod record;
mod trials;

pub use decide::{seed, seeded};
pub use gather::{Gathered, gather};
pub use pacing::Pacing;

use futures_util::StreamExt;
use std::sync::Arc;

use crate::app::App;
use crate::limits::{LEFT_BEHIND_S, LOST_AFTER_S};
use crate::publish::publish;
use crate::store::{JobRow, RankRow, StoreError};

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
    let start = tokio::time::Instant::now();
    let mut pacing = Pacing::new(&app.config);
    loop {
        tokio::select! {
            () = tokio::time::sleep_until(start + pacing.next()) => {}
            () = app.wake.notified(), if !pacing.is_woken() => {
                pacing.wake(start.elapsed());
                continue;
            }
            _ = stopping.changed() => {
                apply::remember_ended(&app, &[]).await;
                return;
            }
        }
        if pacing.begin(start.elapsed()).trim
            && let Err(error) = app.store.trim().await
        {
            tracing::warn!(%error, "old data was not forgotten; tried again later");
        }
        let begun = std::time::Instant::now();
        let outcome = pass(&app).await;
        app.counters.pass_seconds.observe(begun.elapsed().as_secs_f64());
        if let Err(error) = outcome {
            app.counters.pass_failures.inc();
            tracing::warn!(%error, "a pass of the loop failed; the next looks again");
        }
        pacing.end(start.elapsed());
    }
}

/// Whether every agent that runs ranks of a job has been silent for long; for less long when a rank has left, since the
/// others cannot train without it.
fn lost(app: &App, ranks: &[RankRow]) -> bool {
    let now = app.clock.now();
    let limit_s = if ranks.iter().any(|r| r.left.is_some()) { LEFT_BEHIND_S } else { LOST_AFTER_S };
    let silent = |node: &flexcomm_domain::NodeName| match app.presence.get(node, now) {
        Some((seen, _)) => now.since(seen.last).get() >= limit_s,
        None => true,
    };
    ranks.iter().filter(|r| r.left.is_none()).all(|r| silent(&r.node))
}

/// One pass over everything.
pub async fn pass(app: &Arc<App>) -> Result<(), CycleError> {
    let _passing = app.passing.lock().await;
    let jobs = app.store.running_jobs().await?;
    let runs = |job: &flexcomm_domain::JobId| jobs.iter().any(|j| j.job == *job);
    app.statuses.lock().retain(|job, _| runs(job));
    app.missing.lock().retain(runs);
    app.doubts.lock().retain(runs);
    app.reported.lock().retain(&jobs);
    apply::remember_ended(app, &jobs).await;
    let each = futures_util::stream::iter(jobs.iter().cloned()).map(|job| one_job(app, job));
    let at_once = if app.clock.is_given() { 1 } else { JOBS_AT_ONCE };
    let failed: Vec<CycleError> =
        each.buffer_unordered(at_once).filter_map(|r| std::future::ready(r.err())).collect().await;
    grants::tick(app).await?;
    publish(app).await?;
    failed.into_iter().next().map_or(Ok(()), Err)
}

/// Logs which nodes went missing or are back. A decision that all ranks follow whose agents live is in force: they switch
/// together, and those of a missing node cannot say so.
async fn look_for_missing(app: &App, job: &JobRow, ranks: &[RankRow]) -> Result<(), CycleError> {
    let sight = app.sight(job, ranks);
    app.missing.lock().note(&job.job, &sight.missing, app.clock.now());
    if sight.missing.is_empty() {
        return Ok(());
    }
    let is_on_its_way = app.store.decision(&job.job).await?.is_some_and(|row| row.applied_at_step.is_none());
    if is_on_its_way {
        app.store.confirm_applied(&job.job, &sight.expected).await?;
    }
    Ok(())
}

/// One pass over a run. Where another one has its name before it ends, what was worked out is dropped: the next pass has
/// that one.
async fn one_job(app: &Arc<App>, job: JobRow) -> Result<(), CycleError> {
    match one_run(app, &job).await {
        Err(CycleError::Store(error @ StoreError::Replaced { .. })) => {
            tracing::debug!(%error, "dropped");
            Ok(())
        }
        outcome => outcome,
    }
}

async fn one_run(app: &Arc<App>, job: &JobRow) -> Result<(), CycleError> {
    let ranks = app.store.ranks(&job.job).await?;
    if lost(app, &ranks) {
        tracing::info!(job = %job.job, "ended: the agents of its ranks have been silent for long");
        return Ok(app.store.end_lost(job, app.clock.now()).await?);
    }
    look_for_missing(app, job, &ranks).await?;
    trials::settle(app, job).await?;
    let mut gathered = gather(app, job, &ranks).await?;
    let decided = decide::decide(app, &mut gathered).await?;
    let refused = check::check(&gathered, &decided.outcome);
    match refused {
        None => apply::apply(app, &gathered, &decided).await?,
        Some(_) => app.counters.refused_decisions.inc(),
    }
    record::record(app, gathered, decided.outcome, refused).await
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::RawConfig;
    use crate::store::Incoming;
    use crate::store::tests::register;
    use flexcomm_domain::{CodecBytes, CodecCost, JobId, NodeName, Strategy};
    use flexcomm_wire::{CodecInfo, Hello, LinkReport, ReportBody, StepRecord, StepsReport};

    fn node(name: &str) -> NodeName {
        NodeName::new(name).unwrap()
    }

    fn job() -> JobId {
        JobId::new("j").unwrap()
    }

    async fn app(dir: &std::path::Path) -> Arc<App> {
        let raw = RawConfig { db: dir.join("db"), token_file: dir.join("token"), ..RawConfig::default() };
        Arc::new(App::open(raw.validate().unwrap()).await.unwrap())
    }

    fn hello(rank: u32) -> ReportBody {
        ReportBody::JobSeen(seen(rank, vec![]))
    }

    fn seen(rank: u32, codecs: Vec<CodecInfo>) -> Hello {
        let collectives = vec!["dense-ring".into(), "dense-tree".into()];
        Hello { codecs, collectives, ..Hello::new(job(), (rank, 2), 1_000_000, "x") }
    }

    fn link(peer: &str) -> ReportBody {
        ReportBody::Link(LinkReport {
            peer: node(peer),
            latency_us: 100.0,
            latency_confidence: 0.9,
            latency_age_ms: 1.0,
            jitter_us: 1.0,
            loss_out: 0.0,
            loss_back: 0.0,
            by_icmp: false,
        })
    }

    fn steps(rank: u32, from: u64) -> ReportBody {
        let record = |step| StepRecord {
            step,
            compute_us: 1e5,
            sync_us: 2e5,
            step_us: 3e5,
            bytes_sent: 1,
            gain: 1.0,
            ..StepRecord::default()
        };
        let steps = (from..from + 10).map(record).collect();
        let strategy = Strategy::DENSE_RING.into();
        ReportBody::Steps(StepsReport { job: job(), rank, version: 0, strategy, steps })
    }

    async fn report(app: &App, name: &str, seq: u64, body: ReportBody) {
        let (live, now) = ([node("a"), node("b")], app.clock.now());
        let batch = vec![Incoming { seq, body: Ok(body) }];
        app.store.ingest((&node(name), 1), batch, &live, now).await.unwrap();
    }

    /// Two nodes with a rank each.
    async fn running_job(app: &App) {
        for name in ["a", "b"] {
            app.store.register(&register(name), app.clock.now()).await.unwrap();
            app.presence.claim(&node(name), (1, &[]), app.clock.now()).unwrap();
        }
        for (rank, (name, peer)) in [("a", "b"), ("b", "a")].into_iter().enumerate() {
            report(app, name, 1, link(peer)).await;
            report(app, name, 2, hello(rank as u32)).await;
        }
    }

    /// What rank 0 has measured counts before the table, that of others does not; what nobody measured is the table's.
    #[tokio::test]
    async fn compression_takes_what_rank_0_has_measured() {
        let dir = tempfile::tempdir().unwrap();
        let app = app(dir.path()).await;
        running_job(&app).await;
        let measured = |value_s: f64| {
            let codec = |text: &str| CodecInfo::new(text.parse().unwrap(), CodecBytes::PAPER);
            let costs = [CodecCost { value_s, kept_s: 1e-11 }, CodecCost { value_s: 0.0, kept_s: 2e-11 }];
            vec![CodecInfo { times: Some(costs.into()), ..codec("topk") }, codec("fp16")]
        };
        let t_comp = async |text: &str| {
            let row = app.store.job(&job()).await.unwrap().unwrap();
            let ranks = app.store.ranks(&job()).await.unwrap();
            let (gathered, strategy) = (gather(&app, &row, &ranks).await.unwrap(), text.parse::<Strategy>().unwrap());
            gathered.snapshot.times.t_comp(strategy.selector(), strategy.cr(), (1_000_000, 2))
        };
        let (topk, fp16) = ("topk@0.1/allgather", "fp16/dense-ring");
        let table = [t_comp(topk).await, t_comp(fp16).await];
        report(&app, "b", 3, ReportBody::JobSeen(seen(1, measured(1e-4)))).await;
        assert_eq!([t_comp(topk).await, t_comp(fp16).await], table);
        report(&app, "a", 3, ReportBody::JobSeen(seen(0, measured(1e-12)))).await;
        let expected = 1e-6 + 1e-6 + 2.0 * 2e-6;
        assert!((t_comp(topk).await / expected - 1.0).abs() < 1e-9, "{} is not {expected}", t_comp(topk).await);
        assert_eq!(t_comp(fp16).await, table[1]);
    }

    /// A start under a wall clock that is ten years ahead, then one under the right one: time is today's again, nothing that
    /// is stored is of the future, and what was decided is still there.
    #[tokio::test]
    async fn a_start_with_a_clock_ten_years_ahead_heals_at_the_next() {
        use crate::store::{NewDecision, NewTrial};
        use flexcomm_domain::{Decision, Version};
        let dir = tempfile::tempdir().unwrap();
        let ten_years = 315_576_000_000_000;
        let raw = RawConfig { db: dir.path().join("db"), token_file: dir.path().join("token"), ..RawConfig::default() };
        let mut ahead = App::open(raw.validate().unwrap()).await.unwrap();
        let today = ahead.clock.now();
        ahead.clock = crate::clock::Clock::start(flexcomm_domain::Timestamp(today.0 + ten_years));
        let ahead = Arc::new(ahead);
        running_job(&ahead).await;
        for (rank, name) in ["a", "b"].into_iter().enumerate() {
            report(&ahead, name, 3, steps(rank as u32, 0)).await;
        }
        pass(&ahead).await.unwrap();
        let before = ahead.store.decision(&job()).await.unwrap().map_or(0, |row| row.decision.version.0);
        let decision = Decision {
            job: job(),
            version: Version(before + 1),
            parent: Version(before),
            plan: flexcomm_domain::Plan::DENSE_RING,
            decided_at: ahead.clock.now(),
            reason: "because".into(),
        };
        let new = NewDecision { decision: &decision, seed: 1, report: "{}", memory: "{}", snapshot: "{}" };
        let run = ahead.store.job(&job()).await.unwrap().unwrap();
        ahead.store.put_decision(&run, &new).await.unwrap();
        let trial = NewTrial { candidates: &[Strategy::DENSE_RING], iterations: 1, budget_ms: 1, why: "to see" };
        ahead.store.ask_trial(&run, &trial, ahead.clock.now()).await.unwrap();
        assert!(ahead.store.newest_time().await.unwrap().0 > today.0 + ten_years);
        ahead.store.close().await;
        drop(ahead);

        let app = app(dir.path()).await;
        let now = app.clock.now();
        assert!(now.0.abs_diff(today.0) < 600_000_000, "now is {}", crate::clock::rfc3339(now));
        assert!(app.store.newest_time().await.unwrap() <= now);
        let row = app.store.decision(&job()).await.unwrap().unwrap();
        assert_eq!((row.decision.version, row.decision.reason.as_str()), (decision.version, "because"));
        assert!(row.decision.decided_at <= now && app.store.trials(&job(), 1).await.unwrap()[0].asked <= now);
        assert_eq!((app.store.damaged_rows(), app.store.planner_memory(&job()).await.unwrap()), (0, None));
        assert!(app.store.links().await.unwrap().iter().all(|link| link.received <= now));
        for row in app.store.ranks(&job()).await.unwrap().iter() {
            assert!(row.seen <= now);
        }
        // The loop goes on with it, and the next decision is of today.
        running_job(&app).await;
        pass(&app).await.unwrap();
        assert!(app.store.newest_time().await.unwrap() <= app.clock.now());
    }
}
