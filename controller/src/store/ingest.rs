//! One batch of reports: stored and acknowledged in one transaction, each report once.

use flexcomm_domain::{JobId, NodeName, Plan, RunId, Timestamp};
use flexcomm_wire::{
    AppliedReport, BadValue, JobSeen, LinkReport, MAX_SEQ_STEP, PathReport, RefusedRun, ReportBody, StepsReport,
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
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum News {
    /// A granted test has ended.
    GrantDone(Spent),
    /// Something that decisions depend on.
    Job,
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

async fn job_seen(db: &mut SqliteConnection, from: &Sender<'_>, r: &JobSeen) -> Stored {
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
    JOB
}

/// Whether a rank is of the run that has the job's name: an ended one goes on when its trainers are back. Without run ids a
/// run is one while any of its ranks is there.
fn continues(known: &jobs::Known, r: &JobSeen) -> bool {
    let same_size = known.world == r.world && known.gradient_values == r.gradient_values;
    known.run == r.run && same_size && (r.run.is_some() || known.live > 0)
}

/// Another run may not take the name while a rank of the one that has it lives: on which node. Those of this node have
/// left: an agent welcomes one run of a job at a time, and after a restart waits for its ranks before another one.
async fn in_the_way(
    db: &mut SqliteConnection,
    from: &Sender<'_>,
    known: &jobs::Known,
    r: &JobSeen,
) -> Result<Option<NodeName>> {
    let here = jobs::present_ranks(db, &r.job).await?;
    let gone = |rank: u32, owner: &NodeName| owner == from.node && (rank == r.rank || known.run != r.run);
    let stays = |(rank, owner): &(u32, NodeName)| from.live.contains(owner) && !gone(*rank, owner);
    Ok(here.into_iter().find(stays).map(|(_, owner)| owner))
}

/// A rank lives on another node, whose agent is alive and has not said that it left: whoever has the token knows the run's id.
fn owned_by_another(from: &NodeName, r: &JobSeen, owner: &NodeName) -> Refusal {
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

fn refusal(known: &jobs::Known, r: &JobSeen, node: &NodeName) -> Refusal {
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
    JOB
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
mod tests {
    use super::super::tests::{register, scratch};
    use super::super::{Deletion, NewDecision, NewTrial, Registration, TestRow};
    use super::*;
    use flexcomm_domain::{Decision, Strategy, Version};

    fn node(name: &str) -> NodeName {
        NodeName::new(name).unwrap()
    }

    fn job() -> JobId {
        JobId::new("j").unwrap()
    }

    async fn registered(store: &Store, name: &str) {
        assert_eq!(store.register(&register(name), Timestamp(0)).await.unwrap(), Registration::Done(0));
    }

    fn hello(rank: u32, world: u32) -> ReportBody {
        ReportBody::JobSeen(JobSeen {
            job: job(),
            run: None,
            rank,
            world,
            gradient_values: 10,
            buckets: Vec::new(),
            momentum: None,
            policy: None,
            backend: "x".into(),
            codecs: vec![],
            collectives: vec!["dense-ring".into()],
        })
    }

    async fn send(store: &Store, (name, seq): (&str, u64), body: ReportBody, live: &[&str]) -> Ingested {
        let live: Vec<NodeName> = live.iter().map(|n| node(n)).collect();
        let batch = vec![Incoming { seq, body: Ok(body) }];
        match store.ingest((&node(name), 1), batch, &live, Timestamp(seq)).await.unwrap() {
            Ingest::Done(done) => done,
            other => panic!("{other:?}"),
        }
    }

    /// Also by whoever has read the job before.
    #[tokio::test]
    async fn buckets_that_a_rank_says_later_are_the_jobs() {
        let (store, _dir) = scratch().await;
        registered(&store, "a").await;
        let says = |rank, buckets: &[u64]| {
            let ReportBody::JobSeen(seen) = hello(rank, 2) else { unreachable!() };
            ReportBody::JobSeen(JobSeen { buckets: buckets.to_vec(), ..seen })
        };
        let said: [(u32, &[u64], &[u64]); 6] = [
            (0, &[], &[]),
            (1, &[], &[]),
            (0, &[4, 6], &[4, 6]),
            (1, &[4, 6], &[4, 6]),
            (1, &[], &[4, 6]),
            (0, &[3, 3, 4], &[3, 3, 4]),
        ];
        for (seq, (rank, buckets, known)) in (1..).zip(said) {
            let done = send(&store, ("a", seq), says(rank, buckets), &["a"]).await;
            assert_eq!((done.rejected, done.news), (0, vec![News::Job]));
            let jobs = store.running_jobs().await.unwrap();
            assert_eq!((jobs.len(), &jobs[0].buckets[..], jobs[0].created), (1, known, Timestamp(1)));
        }
        // Another run of the name has its own.
        for (seq, rank) in [(7, 0), (8, 1)] {
            let left = ReportBody::JobLeft { job: job(), rank, run: None, connection_lost: false };
            send(&store, ("a", seq), left, &["a"]).await;
        }
        send(&store, ("a", 9), says(0, &[]), &["a"]).await;
        assert!(store.running_jobs().await.unwrap()[0].buckets.is_empty());
    }

    #[tokio::test]
    async fn the_last_two_tests_of_a_link_are_known_whoever_made_them() {
        let (store, _dir) = scratch().await;
        for name in ["a", "b"] {
            registered(&store, name).await;
        }
        let test = |peer: &str, out, back, out_is_lower_bound| {
            ReportBody::Throughput(ThroughputReport {
                grant: 1,
                peer: node(peer),
                out_bps: Some(out),
                back_bps: Some(back),
                out_is_lower_bound,
                back_is_lower_bound: false,
                bytes: 200_000,
                out_bytes: Some(100_000),
                took_us: None,
                cpu_us: None,
                error: None,
            })
        };
        send(&store, ("a", 1), test("b", 9e7, 8e7, false), &["a", "b"]).await;
        send(&store, ("b", 1), test("a", 3e6, 4e6, true), &["a", "b"]).await;
        let found = |t: &TestRow| (t.bandwidth_bps, t.is_lower_bound, t.previous_bps);
        assert_eq!(found(&store.link_tests().await.unwrap()[0]), (4e6, false, Some(9e7)), "a to b");
        assert_eq!(found(&store.link_tests().await.unwrap()[1]), (3e6, true, Some(8e7)), "b to a");
        send(&store, ("b", 2), test("a", 2e6, 1e6, false), &["a", "b"]).await;
        assert_eq!(found(&store.link_tests().await.unwrap()[1]), (2e6, false, None), "a bound outweighs nothing");
    }

    /// Links of a batch are stored together, and what is kept in memory of them is what is stored; one whose peer nobody knows
    /// does not hold up the others.
    #[tokio::test]
    async fn links_that_are_kept_are_those_that_are_stored() {
        let (store, _dir) = scratch().await;
        for name in ["a", "b", "c"] {
            registered(&store, name).await;
        }
        let link = |peer: &str, latency_us: f64| LinkReport {
            peer: node(peer),
            latency_us,
            latency_confidence: 1.0 / 3.0,
            latency_age_ms: 0.1,
            bandwidth_bps: (latency_us > 150.0).then_some(1e9 / 3.0),
            bandwidth_confidence: 0.7,
            bandwidth_age_ms: 1e-3,
            jitter_us: 0.0,
            loss_out: 0.0,
            loss_back: 0.1,
            by_icmp: false,
        };
        let put = async |name: &str, first: u64, links: &[(&str, f64)]| {
            let numbered = (first..).zip(links);
            let batch = numbered.map(|(seq, (peer, us))| Incoming { seq, body: Ok(ReportBody::Link(link(peer, *us))) });
            match store.ingest((&node(name), 1), batch.collect(), &[], Timestamp(first)).await.unwrap() {
                Ingest::Done(done) => (done.acked_seq, done.rejected, done.news, done.first_reason.unwrap_or_default()),
                other => panic!("{other:?}"),
            }
        };
        let same = async || {
            let kept = store.links().await.unwrap();
            let stored: Vec<LinkRow> =
                sql!("read", "SELECT * FROM links ORDER BY src, dst").fetch_all(&store.read).await.unwrap();
            assert_eq!(*kept, stored);
            kept.iter().map(|row| (row.src.to_string() + row.dst.as_str(), row.report.latency_us)).collect::<Vec<_>>()
        };
        assert_eq!(same().await, []);
        let all_new = put("a", 1, &[("c", 100.0), ("b", 200.0)]).await;
        assert_eq!(all_new, (2, 0, vec![News::Job], String::new()));
        assert_eq!(same().await, [("ab".to_owned(), 200.0), ("ac".to_owned(), 100.0)]);
        let (acked, rejected, news, why) = put("a", 3, &[("b", 300.1), ("x", 1.0), ("a", 2.0), ("c", 100.1)]).await;
        assert_eq!((acked, rejected, news), (6, 2, vec![News::Job]));
        assert!(why.contains("node x never registered"), "{why}");
        assert_eq!(same().await, [("ab".to_owned(), 300.1), ("ac".to_owned(), 100.1)]);
        assert_eq!(put("a", 7, &[("b", 301.0)]).await.2, [], "what only confirms is no news");
        assert_eq!(same().await[0], ("ab".to_owned(), 301.0));
        assert_eq!(put("b", 1, &[("x", 1.0)]).await.2, []);
        put("b", 2, &[("a", 4.0), ("a", 5.0)]).await;
        assert_eq!(same().await.last(), Some(&("ba".to_owned(), 5.0)));
        assert_eq!(store.link_history(&node("b"), &node("a"), 9).await.unwrap().len(), 2);
        store.forget_node(&node("c")).await.unwrap();
        assert_eq!(same().await.len(), 2);
    }

    #[tokio::test]
    async fn a_report_is_stored_once_and_another_instance_is_refused() {
        let (store, _dir) = scratch().await;
        registered(&store, "a").await;
        assert_eq!(send(&store, ("a", 5), hello(0, 2), &["a"]).await.acked_seq, 5);
        let again = send(&store, ("a", 5), hello(0, 2), &["a"]).await;
        assert_eq!((again.acked_seq, again.repeated, again.news.len()), (5, 1, 0));
        let other = store.ingest((&node("a"), 2), vec![], &[], Timestamp(0)).await.unwrap();
        assert_eq!(other, Ingest::Stranger);
        let reports = [6, 7 + MAX_SEQ_STEP].map(|seq| Incoming { seq, body: Ok(hello(0, 2)) });
        let jump = store.ingest((&node("a"), 1), reports.to_vec(), &[], Timestamp(0)).await.unwrap();
        assert_eq!(jump, Ingest::Jump { from: 6, to: 7 + MAX_SEQ_STEP });
        assert_eq!(store.node(&node("a")).await.unwrap().unwrap().acked_seq, 5);
    }

    #[tokio::test]
    async fn a_job_keeps_its_size_while_anybody_alive_runs_it() {
        let (store, _dir) = scratch().await;
        registered(&store, "a").await;
        registered(&store, "b").await;
        send(&store, ("a", 1), hello(0, 2), &["a", "b"]).await;
        send(&store, ("b", 1), hello(1, 2), &["a", "b"]).await;
        let refused = send(&store, ("b", 2), hello(1, 4), &["a", "b"]).await;
        assert!(refused.first_reason.unwrap().starts_with("job-conflict"));
        assert_eq!(send(&store, ("b", 3), hello(1, 4), &["b"]).await.rejected, 0, "a is dead");
        assert_eq!(store.job(&job()).await.unwrap().unwrap().world, 4);
        assert_eq!(store.ranks(&job()).await.unwrap().len(), 1, "ranks of the run before are gone");
    }

    /// Agents and trainers without run ids refuse a version or a trial older than what they know of a name.
    #[tokio::test]
    async fn a_name_goes_on_counting_after_it_was_deleted() {
        let (store, _dir) = scratch().await;
        registered(&store, "a").await;
        send(&store, ("a", 1), hello(0, 1), &["a"]).await;
        let run = store.job(&job()).await.unwrap().unwrap();
        let decision = Decision {
            job: job(),
            version: Version(1),
            parent: Version(0),
            plan: flexcomm_domain::Plan::DENSE_RING,
            decided_at: Timestamp(1),
            reason: "r".into(),
        };
        store
            .put_decision(
                &run,
                &NewDecision { decision: &decision, seed: 0, report: "{}", memory: "{}", snapshot: "{}" },
            )
            .await
            .unwrap();
        let new = NewTrial { candidates: &[Strategy::DENSE_RING], iterations: 1, budget_ms: 1, why: "w" };
        assert_eq!(store.ask_trial(&run, &new, Timestamp(1)).await.unwrap(), Some(1));
        for seq in [2, 4] {
            let left = ReportBody::JobLeft { job: job(), rank: 0, run: None, connection_lost: false };
            send(&store, ("a", seq), left, &["a"]).await;
            assert_eq!(store.delete_job(&job(), &[]).await.unwrap(), Deletion::Done);
            send(&store, ("a", seq + 1), hello(0, 1), &["a"]).await;
            assert_eq!(store.job(&job()).await.unwrap().unwrap().earlier, Version(1));
        }
        let run = store.job(&job()).await.unwrap().unwrap();
        assert_eq!(store.ask_trial(&run, &new, Timestamp(1)).await.unwrap(), Some(2));
    }

    #[tokio::test]
    async fn a_rank_that_left_another_run_is_still_in_this_one() {
        let (store, _dir) = scratch().await;
        registered(&store, "a").await;
        let ReportBody::JobSeen(seen) = hello(0, 1) else { unreachable!() };
        let joins = ReportBody::JobSeen(JobSeen { run: Some(RunId(2)), ..seen });
        send(&store, ("a", 1), joins, &["a"]).await;
        let left = |run| ReportBody::JobLeft { job: job(), rank: 0, run, connection_lost: true };
        let ignored = send(&store, ("a", 2), left(Some(RunId(1))), &["a"]).await;
        assert!(ignored.first_reason.unwrap().contains("no longer has the job's name"));
        assert_eq!(store.running_jobs().await.unwrap().len(), 1);
        // From an agent that does not name the run.
        send(&store, ("a", 3), left(None), &["a"]).await;
        assert_eq!(store.running_jobs().await.unwrap().len(), 0);
    }

    /// Whoever has the token reads a job's run id: that a rank is somewhere is believed of another node only once it has
    /// left its own, or that one is silent.
    #[tokio::test]
    async fn a_rank_moves_only_when_its_node_is_silent_or_it_has_left() {
        let (store, _dir) = scratch().await;
        for name in ["a", "b", "c"] {
            registered(&store, name).await;
        }
        let everyone = ["a", "b", "c"];
        let of_run = |rank| match hello(rank, 2) {
            ReportBody::JobSeen(seen) => ReportBody::JobSeen(JobSeen { run: Some(flexcomm_domain::RunId(7)), ..seen }),
            other => other,
        };
        let places = async || {
            let ranks = store.ranks(&job()).await.unwrap();
            ranks.iter().map(|r| (r.node.to_string(), r.left.is_some())).collect::<Vec<_>>()
        };
        let at = |node: &str, left| (node.to_owned(), left);
        send(&store, ("a", 1), of_run(0), &everyone).await;
        send(&store, ("b", 1), of_run(1), &everyone).await;
        let refused = send(&store, ("c", 1), of_run(0), &everyone).await;
        assert_eq!(refused.refused.len(), 1, "{refused:?}");
        let why = &refused.refused[0].reason;
        assert!(why.contains("node c") && why.contains("on node a"), "{why}");
        assert_eq!(places().await, [at("a", false), at("b", false)]);
        let left = || ReportBody::JobLeft { job: job(), rank: 0, run: None, connection_lost: false };
        send(&store, ("c", 2), left(), &everyone).await;
        assert_eq!(places().await, [at("a", false), at("b", false)]);

        assert_eq!(send(&store, ("a", 2), of_run(0), &everyone).await.rejected, 0, "it announces itself again");
        assert_eq!(send(&store, ("c", 3), of_run(1), &["a", "c"]).await.rejected, 0, "b is silent");
        send(&store, ("a", 3), left(), &everyone).await;
        assert_eq!(send(&store, ("c", 4), of_run(0), &everyone).await.rejected, 0, "it has left a");
        assert_eq!(places().await, [at("c", false), at("c", false)]);
    }

    /// How a run of an older release ended is not known, and one rank's claim is not the run's newest step.
    #[tokio::test]
    async fn a_run_is_kept_with_what_is_known_of_its_end() {
        let (store, _dir) = scratch().await;
        for name in ["a", "b", "c"] {
            registered(&store, name).await;
        }
        let live = ["a", "b", "c"];
        let steps = |rank: u32, step| {
            let record = flexcomm_wire::StepRecord {
                step,
                compute_us: 1.0,
                comp_us: 0.0,
                sync_us: 1.0,
                wait_us: None,
                step_us: 2.0,
                bytes_sent: 1,
                gain: 1.0,
                energy: (rank > 0).then_some(0.25),
                bucket_energies: [1.0, 3.0].repeat(rank.min(1) as usize),
                loss: None,
                accuracy: None,
            };
            let strategy = Strategy::DENSE_RING.into();
            ReportBody::Steps(StepsReport { job: job(), rank, version: 0, strategy, steps: vec![record] })
        };
        for (rank, (name, step)) in [("a", 7), ("b", 1_000_000_000_000), ("c", 8)].into_iter().enumerate() {
            send(&store, (name, 1), hello(rank as u32, 3), &live).await;
            assert_eq!(send(&store, (name, 2), steps(rank as u32, step), &live).await.rejected, 0);
        }
        // Of a trainer that does not tell its gradient's energy none is known.
        let energies = |row: super::super::StepRow| (row.step, row.energy, row.bucket_energies);
        let stored: Vec<_> = store.steps(&job(), 0, 100).await.unwrap().into_iter().map(energies).collect();
        assert_eq!(stored, [(7, None, None), (8, Some(0.25), Some(vec![1.0, 3.0]))]);
        let update = "UPDATE jobs SET ended_us = 5, ended_how = NULL; UPDATE ranks SET left_us = 5";
        sqlx::query(update).execute(&mut *store.write.connection().await).await.unwrap();
        send(&store, ("a", 3), hello(0, 1), &live).await;
        let runs = store.runs(&job()).await.unwrap();
        assert_eq!((runs.len(), runs[0].how, runs[0].step), (1, None, Some(8)));

        use super::super::Deletion;
        let delete = async |live: &[&str]| {
            let live: Vec<NodeName> = live.iter().map(|n| node(n)).collect();
            store.delete_job(&job(), &live).await.unwrap()
        };
        assert_eq!(delete(&["a"]).await, Deletion::Running);
        assert_eq!(delete(&["b"]).await, Deletion::Done, "no agent of it is alive");
    }

    #[tokio::test]
    async fn applied_reports_must_not_go_back() {
        let (store, _dir) = scratch().await;
        registered(&store, "a").await;
        send(&store, ("a", 1), hello(0, 1), &["a"]).await;
        let run = store.job(&job()).await.unwrap().unwrap();
        let mut digest = 0;
        for version in 1..=2 {
            let decision = Decision {
                job: job(),
                version: Version(version),
                parent: Version(version - 1),
                plan: flexcomm_domain::Plan::DENSE_RING,
                decided_at: Timestamp(version),
                reason: "r".into(),
            };
            digest = decision.digest().0;
            let new = NewDecision { decision: &decision, seed: 0, report: "{}", memory: "{}", snapshot: "{}" };
            store.put_decision(&run, &new).await.unwrap();
        }
        let applied =
            |version, digest| ReportBody::Applied(AppliedReport { job: job(), rank: 0, version, digest, step: 7 });
        let reason = |done: Ingested| done.first_reason.unwrap_or_default();
        assert!(reason(send(&store, ("a", 2), applied(2, digest ^ 1), &[]).await).starts_with("digest"));
        assert_eq!(reason(send(&store, ("a", 3), applied(2, digest), &[]).await), "");
        assert_eq!(store.decision(&job()).await.unwrap().unwrap().applied_at_step, Some(7));
        assert!(reason(send(&store, ("a", 4), applied(1, digest), &[]).await).starts_with("old-version"));
        assert!(reason(send(&store, ("a", 5), applied(3, digest), &[]).await).starts_with("unknown-version"));
        let counts: Vec<_> = store.rejected().await.unwrap().into_iter().map(|r| (r.reason, r.count)).collect();
        let expected = [("digest", 1), ("old-version", 1), ("unknown-version", 1)];
        assert_eq!(counts, expected.map(|(reason, count)| (reason.to_owned(), count)));
    }
}
