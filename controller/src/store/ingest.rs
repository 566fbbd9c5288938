//! One batch of reports: stored and acknowledged in one transaction, each report once.

use flexcomm_domain::{JobId, NodeName, Plan, RunId, Timestamp};
use flexcomm_wire::{
    AppliedReport, BadValue, Hello, LinkReport, MAX_SEQ_STEP, PathReport, RefusedRun, ReportBody, StepsReport,
    ThroughputReport, TrialReport,
};
use sqlx::SqliteConnection;

use super::jobs::End;
use super::links::LinkRow;
use super::read_cache::Tables;
use super::statement::sql;
use super::{Result, Store, StoreError, decisions, jobs, links, scenario, steps as windows, trials};
use crate::grants::Spent;
use crate::limits::MAX_JOBS;
use crate::reports::{Reason, Rejected};
use std::sync::Arc;

/// A report on its way in: its number, and what it is when it could be read.
#[derive(Debug, Clone)]
pub struct Incoming {
    /// Per node, ascending.
    pub seq: u64,
    /// Checked, or why it is rejected.
    pub body: std::result::Result<ReportBody, Rejected>,
}

/// What changed, for whoever looks next.
#[derive(Debug, Clone, PartialEq)]
pub enum News {
    /// A granted test has ended.
    GrantDone(Spent),
    /// Something that decisions depend on.
    Job,
    /// Steps of a rank.
    Steps {
        /// Of which job.
        job: JobId,
        /// Which rank.
        rank: u32,
        /// How many.
        steps: u64,
        /// The newest.
        last: u64,
    },
}

/// What became of a batch.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct Ingested {
    /// Everything up to here is on disk or was rejected.
    pub acked_seq: u64,
    /// Rejected from this batch.
    pub rejected: u64,
    /// The first reason that is no refusal of a run.
    pub first_reason: Option<String>,
    /// Reports that were stored before and are dropped.
    pub repeated: u64,
    /// What changed.
    pub news: Vec<News>,
    /// Runs that may not join, each once.
    pub refused: Vec<RefusedRun>,
}

/// Whether a batch was stored.
#[derive(Debug, Clone, PartialEq)]
pub enum Ingest {
    /// Stored or rejected, report by report.
    Done(Ingested),
    /// The node is unknown, or another instance owns its name now.
    Stranger,
    /// The numbers make a step that no agent makes: nothing was stored, so that later reports are not taken for
    /// repeated ones.
    Jump {
        /// The number before.
        from: u64,
        /// The number after.
        to: u64,
    },
}

/// Who reports, and when.
struct Sender<'a> {
    node: &'a NodeName,
    live: &'a [NodeName],
    now: Timestamp,
}

/// Why a report is not stored.
enum Refusal {
    /// The store failed: the whole batch is left.
    Store(StoreError),
    Rejected(Rejected),
    Run(RefusedRun),
}

impl From<StoreError> for Refusal {
    fn from(error: StoreError) -> Self {
        Self::Store(error)
    }
}

impl From<Rejected> for Refusal {
    fn from(rejected: Rejected) -> Self {
        Self::Rejected(rejected)
    }
}

/// What a stored report changed.
type Stored = std::result::Result<Option<News>, Refusal>;

fn rejected<T>(reason: Reason, detail: String) -> std::result::Result<T, Refusal> {
    Err(Rejected::new(reason, detail).into())
}

const JOB: Stored = Ok(Some(News::Job));

impl Store {
    /// Stores a batch of a node, whole or not at all.
    pub async fn ingest(
        &self,
        (node, instance): (&NodeName, u64),
        batch: Vec<Incoming>,
        live: &[NodeName],
        now: Timestamp,
    ) -> Result<Ingest> {
        let mut tx = self.write.take("store reports").await?;
        let text = "BEGIN IMMEDIATE; SELECT instance, acked_seq FROM nodes WHERE node = $1";
        let query = sql!(tx.operation, text, node);
        let owner: Option<(u64, u64)> = query.fetch_optional(&mut *tx).await?;
        let Some((_, acked_seq)) = owner.filter(|(owner, _)| *owner == instance) else {
            tx.roll_back().await;
            return Ok(Ingest::Stranger);
        };
        let mut done = Ingested { acked_seq, ..Ingested::default() };
        tx.tables = Tables::NONE;
        // Links that came one after the other are stored together; all else waits for them.
        let (mut links, mut put) = (Vec::new(), Vec::new());
        for report in batch {
            if report.seq <= done.acked_seq {
                done.repeated += 1;
                continue;
            }
            if report.seq - done.acked_seq > MAX_SEQ_STEP {
                tx.roll_back().await;
                return Ok(Ingest::Jump { from: done.acked_seq, to: report.seq });
            }
            done.acked_seq = report.seq;
            let body = report.body.and_then(|body| valid(body, node));
            if !matches!(body, Ok(ReportBody::Link(_))) {
                put.extend(put_links(&mut tx, (node, now), std::mem::take(&mut links), &mut done).await?);
            }
            tx.tables = tx.tables.and(body.as_ref().map_or(Tables::NONE, tables));
            let rejected = match store(&mut tx, &Sender { node, live, now }, body, &mut links).await {
                Ok(news) => {
                    done.news.extend(news.filter(|n| !done.news.contains(n)));
                    continue;
                }
                Err(Refusal::Store(error)) => return Err(error),
                Err(Refusal::Run(run)) => {
                    let rejected = Rejected::new(Reason::JobConflict, run.reason.clone());
                    if !done.refused.contains(&run) {
                        done.refused.push(run);
                    }
                    rejected
                }
                Err(Refusal::Rejected(rejected)) => {
                    done.note(&rejected);
                    rejected
                }
            };
            scenario::count_rejected(&rejected, now).execute(&mut *tx).await?;
            done.rejected += 1;
        }
        put.extend(put_links(&mut tx, (node, now), links, &mut done).await?);
        let text = "UPDATE nodes SET acked_seq = $2 WHERE node = $1; COMMIT";
        let last = sql!(tx.operation, text, node, done.acked_seq);
        let (counters, cached) = (self.write.counters(), &self.reads.links);
        let before = counters.stamp(cached.tables());
        // Reports that only confirm what is known wait for the loop's next tick.
        let mut news = !put.is_empty();
        let take = || {
            cached.change(counters, before, |values| {
                if let Some(rows) = values.get_mut(&()).map(Arc::make_mut) {
                    news = put.into_iter().fold(false, |news, row| news | links::take(rows, row));
                }
            });
        };
        tx.commit_by(last, take).await?;
        done.news.extend((news && !done.news.contains(&News::Job)).then_some(News::Job));
        Ok(Ingest::Done(done))
    }
}

impl Ingested {
    fn note(&mut self, rejected: &Rejected) {
        self.first_reason.get_or_insert_with(|| format!("{}: {}", rejected.reason.as_str(), rejected.detail));
    }
}

/// Tables that storing a report writes at most.
fn tables(body: &ReportBody) -> Tables {
    match body {
        ReportBody::Link(_) => Tables::LINKS,
        ReportBody::Steps(_) => Tables::STEPS,
        ReportBody::Throughput(_) => Tables::TESTS,
        ReportBody::Path(_) | ReportBody::Shape(_) => Tables::NONE,
        _ => Tables::ALL,
    }
}

/// Stores links that may be stored but for their peers; answers those that were.
async fn put_links(
    db: &mut SqliteConnection,
    (node, now): (&NodeName, Timestamp),
    new: Vec<LinkReport>,
    done: &mut Ingested,
) -> Result<Vec<LinkRow>> {
    let mut rows: Vec<LinkRow> = Vec::with_capacity(new.len());
    if new.is_empty() {
        return Ok(rows);
    }
    let all = links::put(db, node, &new, now).await? == new.len();
    for report in new {
        let known = if all { Ok(()) } else { known_peer(db, &report.peer).await };
        match known {
            Ok(()) => rows.push(LinkRow { src: node.clone(), dst: report.peer.clone(), report, received: now }),
            Err(Refusal::Store(error)) => return Err(error),
            Err(Refusal::Run(_)) => {}
            Err(Refusal::Rejected(rejected)) => {
                done.note(&rejected);
                scenario::count_rejected(&rejected, now).execute(&mut *db).await?;
                done.rejected += 1;
            }
        }
    }
    Ok(rows)
}

/// A report of a node whose values are possible ones.
fn valid(body: ReportBody, node: &NodeName) -> std::result::Result<ReportBody, Rejected> {
    body.check()?;
    match &body {
        ReportBody::Link(LinkReport { peer, .. })
        | ReportBody::Throughput(ThroughputReport { peer, .. })
        | ReportBody::Path(PathReport { peer, .. })
            if peer == node =>
        {
            Err(Rejected::new(Reason::BadValue, format!("a link from {node} to itself")))
        }
        _ => Ok(body),
    }
}

/// Stores a [`valid`] report; a link is left to [`put_links`].
async fn store(
    db: &mut SqliteConnection,
    from: &Sender<'_>,
    body: std::result::Result<ReportBody, Rejected>,
    links: &mut Vec<LinkReport>,
) -> Stored {
    let (node, now) = (from.node, from.now);
    match body? {
        ReportBody::Link(r) => {
            links.push(r);
            Ok(None)
        }
        ReportBody::Throughput(r) => throughput(db, node, &r, now).await,
        ReportBody::Path(r) => {
            known_peer(db, &r.peer).await?;
            links::put_path(db, node, &r, now).await?;
            Ok(None)
        }
        ReportBody::JobSeen(r) => job_seen(db, from, &r).await,
        ReportBody::JobLeft { job, rank, run, connection_lost } => {
            let how = if connection_lost { End::ConnectionLost } else { End::Left };
            job_left(db, from, Left { job, rank, run, how }).await
        }
        ReportBody::Steps(r) => steps(db, node, r, now).await,
        ReportBody::Applied(r) => applied(db, node, &r, now).await,
        ReportBody::Trial(r) => trial(db, node, r, now).await,
        ReportBody::Shape(r) => {
            scenario::put_shape(db, node, &r, now).await?;
            Ok(None)
        }
    }
}

async fn known_peer(db: &mut SqliteConnection, peer: &NodeName) -> std::result::Result<(), Refusal> {
    let query = sql!("look up a node", "SELECT EXISTS (SELECT 1 FROM nodes WHERE node = $1)", peer);
    if query.fetch_one(db).await? {
        return Ok(());
    }
    rejected(Reason::UnknownNode, format!("node {peer} never registered"))
}

async fn throughput(db: &mut SqliteConnection, node: &NodeName, r: &ThroughputReport, now: Timestamp) -> Stored {
    known_peer(db, &r.peer).await?;
    links::put_tests(db, node, r, now).await?;
    Ok(Some(News::GrantDone(r.into())))
}

async fn job_seen(db: &mut SqliteConnection, from: &Sender<'_>, r: &Hello) -> Stored {
    match jobs::known(db, &r.job).await? {
        None if jobs::running(db).await? >= MAX_JOBS as u64 => {
            return rejected(Reason::Full, format!("job {}: {MAX_JOBS} jobs run already", r.job));
        }
        Some(known) if continues(&known, r) => {
            let owner = jobs::node_of(db, &r.job, r.rank).await?;
            if let Some(owner) = owner.filter(|owner| owner != from.node && from.live.contains(owner)) {
                return Err(owned_by_another(from.node, r, &owner));
            }
        }
        Some(known) => match in_the_way(db, from, &known, r).await? {
            Some(node) => return Err(refusal(&known, r, &node)),
            None => jobs::begin(db, r, from.now).await?,
        },
        None => jobs::begin(db, r, from.now).await?,
    }
    jobs::join(db, from.node, r, from.now).await?;
    // Nothing is decided for some of a job's ranks, and a look at the first would delay the look at all by the debounce.
    let here = jobs::present(db, &r.job).await?;
    Ok((here >= r.world.into()).then_some(News::Job))
}

/// Whether a rank is of the run that has the job's name: an ended one goes on when its trainers are back. Without run ids a
/// run is one while any of its ranks is there.
fn continues(known: &jobs::Known, r: &Hello) -> bool {
    let same_size = known.world == r.world && known.gradient_values == r.gradient_values;
    known.run == r.run && same_size && (r.run.is_some() || known.live > 0)
}

/// Another run may not take the name while a rank of the one that has it lives: on which node. Those of this node have
/// left: an agent welcomes one run of a job at a time, and after a restart waits for its ranks before another one.
async fn in_the_way(
    db: &mut SqliteConnection,
    from: &Sender<'_>,
    known: &jobs::Known,
    r: &Hello,
) -> Result<Option<NodeName>> {
    let here = jobs::present_ranks(db, &r.job).await?;
    let gone = |rank: u32, owner: &NodeName| owner == from.node && (rank == r.rank || known.run != r.run);
    let stays = |(rank, owner): &(u32, NodeName)| from.live.contains(owner) && !gone(*rank, owner);
    Ok(here.into_iter().find(stays).map(|(_, owner)| owner))
}

/// A rank lives on another node, whose agent is alive and has not said that it left: whoever has the token knows the run's id.
fn owned_by_another(from: &NodeName, r: &Hello, owner: &NodeName) -> Refusal {
    let (job, rank) = (r.job.clone(), r.rank);
    let reason = format!(
        "node {from} announces rank {rank} of job {job}, which runs on node {owner}: it is taken over when that agent says that \
         the rank has left, or is silent"
    );
    match r.run {
        Some(run) => Refusal::Run(RefusedRun { job, run, reason }),
        None => Rejected::new(Reason::JobConflict, reason).into(),
    }
}

fn refusal(known: &jobs::Known, r: &Hello, node: &NodeName) -> Refusal {
    let job = &r.job;
    let Some(run) = r.run.filter(|_| known.run != r.run) else {
        let detail = format!(
            "job {job} runs with {} ranks and {} values; rank {} says {} and {}",
            known.world, known.gradient_values, r.rank, r.world, r.gradient_values
        );
        return Rejected::new(Reason::JobConflict, detail).into();
    };
    let other = known.run.map_or("one without an id".to_owned(), |run| run.to_string());
    let reason = format!(
        "another run ({other}, on node {node} among others) trains under the name {job} already, and this one ({run}) is \
         not steered until that has ended: give each training a name of its own, by FLEXCOMM_JOB or attach(job=...)"
    );
    Refusal::Run(RefusedRun { job: job.clone(), run, reason })
}

/// The job, when it is known and this rank of it runs on this node.
async fn on_its_node(
    db: &mut SqliteConnection,
    node: &NodeName,
    (job, rank): (&JobId, u32),
) -> std::result::Result<jobs::Known, Refusal> {
    let Some(known) = jobs::known(db, job).await? else {
        return rejected(Reason::UnknownJob, format!("no trainer announced job {job}"));
    };
    match jobs::node_of(db, job, rank).await? {
        Some(owner) if owner == *node => Ok(known),
        Some(owner) => {
            rejected(Reason::UnknownRank, format!("rank {rank} of job {job} runs on {owner}, not on {node}"))
        }
        None => rejected(Reason::UnknownRank, format!("rank {rank} of job {job} is not there")),
    }
}

/// A trainer that is gone.
struct Left {
    job: JobId,
    rank: u32,
    run: Option<RunId>,
    how: End,
}

async fn job_left(db: &mut SqliteConnection, from: &Sender<'_>, left: Left) -> Stored {
    let Left { job, rank, run, how } = left;
    let known = on_its_node(db, from.node, (&job, rank)).await?;
    if run.is_some() && run != known.run {
        let detail = format!("rank {rank} of job {job} left a run that no longer has the job's name");
        return rejected(Reason::UnknownRank, detail);
    }
    jobs::leave(db, (&job, rank), how, from.now).await?;
    JOB
}

async fn steps(db: &mut SqliteConnection, node: &NodeName, mut r: StepsReport, now: Timestamp) -> Stored {
    on_its_node(db, node, (&r.job, r.rank)).await?;
    let ran = Plan::try_from(&r.strategy).map_err(|error| Rejected::from(BadValue::from(error)))?;
    let newest = decisions::newest_version(db, &r.job).await?.0;
    if r.version > newest {
        let detail = format!("steps of job {} under decision {}, the newest is {newest}", r.job, r.version);
        return rejected(Reason::UnknownVersion, detail);
    }
    r.steps.iter_mut().for_each(|s| s.gain = s.gain.min(1.0));
    windows::put_steps(db, &r, &ran, now).await?;
    let (steps, last) = (r.steps.len() as u64, r.steps.last().map_or(0, |last| last.step));
    Ok(Some(News::Steps { job: r.job, rank: r.rank, steps, last }))
}

async fn applied(db: &mut SqliteConnection, node: &NodeName, r: &AppliedReport, now: Timestamp) -> Stored {
    let known = on_its_node(db, node, (&r.job, r.rank)).await?;
    let (job, version) = (&r.job, r.version);
    let Some(digest) = decisions::digest_of(db, job, version).await? else {
        return rejected(Reason::UnknownVersion, format!("decision {version} of job {job} was never made"));
    };
    if digest != r.digest {
        let detail = format!("decision {version} of job {job} has digest {digest:014x}, not {:014x}", r.digest);
        return rejected(Reason::Digest, detail);
    }
    let newest = decisions::newest_applied(db, job, r.rank).await?;
    if version < newest {
        return rejected(Reason::OldVersion, format!("rank {} of job {job} applied {version} after {newest}", r.rank));
    }
    decisions::put_applied(db, r, known.world, now).await?;
    JOB
}

async fn trial(db: &mut SqliteConnection, node: &NodeName, mut r: TrialReport, now: Timestamp) -> Stored {
    on_its_node(db, node, (&r.job, r.rank)).await?;
    if !trials::exists(db, &r.job, r.id).await? {
        return rejected(Reason::UnknownTrial, format!("trial {} of job {} was never asked for", r.id, r.job));
    }
    for outcome in &mut r.outcomes {
        outcome.gain = outcome.gain.min(1.0);
        outcome.shadow_gain = outcome.shadow_gain.map(|gain| gain.min(1.0));
    }
    trials::put_report(db, &r, now).await?;
    JOB
}

#[cfg(test)]
mod tests;
