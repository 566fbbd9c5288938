//! Jobs and their ranks.

use flexcomm_domain::{CodecBytes, CodecCost, Family, JobId, NodeName, RunId, Timestamp, Version, words};
use flexcomm_planner::JobPolicy;
use flexcomm_wire::{CodecInfo, Hello};
use sqlx::SqliteConnection;
use sqlx::sqlite::SqliteRow;
use std::sync::Arc;

use super::read_cache::Tables;
use super::statement::{column, row, sql};
use super::write::Transaction;
use super::{Result, Store, StoreError, decisions, json, trials};
use crate::limits::{MAX_JOBS, RUNS};

pub(super) const RUNNING: &str = "SELECT * FROM jobs WHERE ended_us IS NULL ORDER BY created_us DESC";

/// A job.
#[derive(Debug, Clone, PartialEq)]
pub struct JobRow {
    /// Its name.
    pub job: JobId,
    /// Which run has the name now; `None` where the trainers have no run ids.
    pub run: Option<RunId>,
    /// N.
    pub world: u32,
    /// Values in the fused gradient.
    pub gradient_values: u64,
    /// Values in each of its buckets; empty where the trainers do not say.
    pub buckets: Vec<u64>,
    /// Of the optimizer; `None` where the trainers do not say.
    pub momentum: Option<f64>,
    /// What its trainers compute on, where they tell.
    pub machine: Option<String>,
    /// What moves the bytes.
    pub backend: String,
    /// When its first rank was seen.
    pub created: Timestamp,
    /// When its last rank left.
    pub ended: Option<Timestamp>,
    /// How, once it has ended.
    pub how: Option<End>,
    /// The newest version that earlier runs under the name had.
    pub earlier: Version,
    /// What its operator set; `None` where none did.
    pub policy: Option<JobPolicy>,
    /// Newest training loss.
    pub loss: Option<f64>,
    /// Newest held-out accuracy.
    pub accuracy: Option<f64>,
}

words! {
    /// How a run ended.
    pub enum End {
        /// Every rank said goodbye.
        Left = "left",
        /// The connection of a trainer ended without a goodbye.
        ConnectionLost = "connection-lost",
        /// Agents were silent for too long, and what became of their trainers is not known.
        AgentsSilent = "agents-silent",
        /// Another run began under its name.
        Replaced = "replaced",
    }
}

/// A run that another one has followed under the same name.
#[derive(Debug, Clone, PartialEq)]
pub struct RunRow {
    /// Which.
    pub run: Option<RunId>,
    /// N.
    pub world: u32,
    /// When its first rank was seen.
    pub began: Timestamp,
    /// When it ended.
    pub ended: Timestamp,
    /// How, where it is known.
    pub how: Option<End>,
    /// Its newest step.
    pub step: Option<u64>,
    /// Its newest decision's version; that of the run before where it had none.
    pub version: Version,
    /// Its newest training loss.
    pub loss: Option<f64>,
    /// Its newest held-out accuracy.
    pub accuracy: Option<f64>,
}

/// A rank of a job.
#[derive(Debug, Clone, PartialEq)]
pub struct RankRow {
    /// Its number.
    pub rank: u32,
    /// Where it runs.
    pub node: NodeName,
    /// Compressors it has, those that are known here.
    pub codecs: Vec<RankCodec>,
    /// Collectives it can run.
    pub collectives: Vec<String>,
    /// What its script set for the job.
    pub policy: Option<JobPolicy>,
    /// When its trainer said hello.
    pub seen: Timestamp,
    /// When it left.
    pub left: Option<Timestamp>,
}

/// A compressor that a rank has.
#[derive(Debug, Clone, PartialEq)]
pub struct RankCodec {
    /// Which.
    pub family: Family,
    /// Sizes of its messages, where they are known here.
    pub bytes: Option<CodecBytes>,
    /// What compressing and decompressing take on the rank's device, where that was measured.
    pub costs: Option<[CodecCost; 2]>,
    /// Whether it is a candidate only where it is named.
    pub on_request: bool,
}

impl RankCodec {
    /// As its trainer announced it; none where it is not known here.
    pub fn of(info: &CodecInfo) -> Option<Self> {
        let (bytes, costs) = (CodecBytes::try_from(info).ok(), info.costs().ok().flatten());
        Some(Self { family: info.compressor.parse().ok()?, bytes, costs, on_request: info.on_request })
    }
}

row! {
    JobRow {
        job, run, world, gradient_values, buckets, momentum, machine, backend, created: created_us, ended: ended_us, earlier: first_version,
        policy, loss, accuracy; how by ended_how
    }
}
row!(RunRow { run, world, began: began_us, ended: ended_us, step, version, loss, accuracy; how by ended_how });
row!(RankRow { rank, node, collectives, policy, seen: seen_us, left: left_us; codecs by codecs });

fn codecs(row: &SqliteRow) -> sqlx::Result<Vec<RankCodec>> {
    let infos: Vec<CodecInfo> = column(row, "codecs")?;
    Ok(infos.iter().filter_map(RankCodec::of).collect())
}

/// How a run ended that has: one that began again keeps nothing of an end before. How runs of older releases ended is not
/// known.
fn ended_how(row: &SqliteRow) -> sqlx::Result<Option<End>> {
    let (ended, how): (Option<Timestamp>, Option<String>) = (column(row, "ended_us")?, column(row, "ended_how")?);
    let known = |how: String| End::ALL.iter().copied().find(|end| how == end.as_str());
    Ok(ended.and(how).and_then(known))
}

impl Store {
    /// Begins a transaction for what was worked out for a run. Working it out takes time, and another run may begin
    /// under the name meanwhile: then nothing of it may be written, and [`StoreError::Replaced`] says so.
    pub(super) async fn begin_for(&self, run: &JobRow, operation: &'static str) -> Result<Transaction<'_>> {
        let mut tx = self.write.take(operation).await?;
        let text =
            "BEGIN IMMEDIATE; SELECT EXISTS (SELECT 1 FROM jobs WHERE job = $1 AND created_us = $2 AND run IS $3)";
        let holds = sql!(operation, text, run.job, run.created, run.run).fetch_one(&mut *tx).await?;
        if holds {
            return Ok(tx);
        }
        tx.roll_back().await;
        Err(StoreError::Replaced { operation, job: run.job.to_string() })
    }

    /// Ends a job whose agents have all been gone for long: its trainers can no longer say that they left.
    pub async fn end_lost(&self, run: &JobRow, now: Timestamp) -> Result<()> {
        let mut tx = self.begin_for(run, "end a lost job").await?;
        for (rank, _) in present_ranks(&mut tx, &run.job).await? {
            leave(&mut tx, (&run.job, rank), End::AgentsSilent, now).await?;
        }
        tx.commit().await
    }

    /// Stores what an operator set for a job; `None`: nothing any longer. False: there is no such job.
    pub async fn put_policy(&self, job: &JobId, policy: Option<&JobPolicy>) -> Result<bool> {
        let operation = "store a job's policy";
        let policy = policy.map(|policy| json(operation, policy)).transpose()?;
        let statement = sql!(operation, "UPDATE jobs SET policy = $2 WHERE job = $1", job, policy);
        Ok(self.write.execute(Tables::REST, statement).await? > 0)
    }

    /// The runs before the one that has the job's name now, newest first.
    pub async fn runs(&self, job: &JobId) -> Result<Vec<RunRow>> {
        let text = "SELECT * FROM runs WHERE job = $1 ORDER BY id DESC";
        sql!("read a job's runs", text, job).fetch_all(&self.read).await
    }

    /// Deletes an ended job, or one all of whose agents are silent, and everything that bears its name.
    pub async fn delete_job(&self, job: &JobId, live: &[NodeName]) -> Result<Deletion> {
        let mut tx = self.write.begin("delete a job").await?;
        let query = sql!(tx.operation, "SELECT ended_us IS NULL FROM jobs WHERE job = $1", job);
        let runs: Option<bool> = query.fetch_optional(&mut *tx).await?;
        let Some(runs) = runs else {
            tx.roll_back().await;
            return Ok(Deletion::Unknown);
        };
        if runs && present_ranks(&mut tx, job).await?.iter().any(|(_, node)| live.contains(node)) {
            tx.roll_back().await;
            return Ok(Deletion::Running);
        }
        forget(&mut tx, job).await?;
        tx.commit().await?;
        Ok(Deletion::Done)
    }

    /// All jobs, newest first.
    pub async fn jobs(&self) -> Result<Vec<JobRow>> {
        sql!("read the jobs", "SELECT * FROM jobs ORDER BY created_us DESC, job").fetch_all(&self.read).await
    }

    /// The jobs that run, newest first.
    pub async fn running_jobs(&self) -> Result<Arc<Vec<JobRow>>> {
        let read = async { sql!("read the jobs that run", RUNNING).fetch_all(&self.read).await.map(Arc::new) };
        self.reads.running_jobs.get(self.write.counters(), (), read).await
    }

    /// One job.
    pub async fn job(&self, job: &JobId) -> Result<Option<JobRow>> {
        sql!("read a job", "SELECT * FROM jobs WHERE job = $1", job).fetch_optional(&self.read).await
    }

    /// The ranks of a job that were ever seen, by number.
    pub async fn ranks(&self, job: &JobId) -> Result<Arc<Vec<RankRow>>> {
        let text = "SELECT * FROM ranks WHERE job = $1 ORDER BY rank";
        let read = async { sql!("read a job's ranks", text, job).fetch_all(&self.read).await.map(Arc::new) };
        self.reads.ranks.get(self.write.counters(), job.clone(), read).await
    }
}

/// What became of a request to delete a job.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Deletion {
    /// Nothing of it is left.
    Done,
    /// It runs, and stays.
    Running,
    /// There is no such job.
    Unknown,
}

/// The job, its world and whether any rank is there.
pub(super) struct Known {
    pub run: Option<RunId>,
    pub world: u32,
    pub gradient_values: u64,
    pub live: u32,
}

row!(Known { run, world, gradient_values, live });

/// Looks a job up.
pub(super) async fn known(db: &mut SqliteConnection, job: &JobId) -> Result<Option<Known>> {
    let text = "SELECT run, world, gradient_values,
        (SELECT count(*) FROM ranks WHERE ranks.job = jobs.job AND left_us IS NULL) AS live FROM jobs WHERE job = $1";
    sql!("look up a job", text, job).fetch_optional(db).await
}

/// Makes a job, or gives its name to a new run. What the run before had is gone but for one row of `runs`; versions and
/// trials go on counting from there, since agents and trainers refuse what is older than what they know.
pub(super) async fn begin(db: &mut SqliteConnection, seen: &Hello, now: Timestamp) -> Result<()> {
    let operation = "store a job";
    let job = &seen.job;
    let version = decisions::newest_version(db, job).await?.0.max(forgotten(db, FORGOTTEN_VERSION).await?);
    let trial = trials::newest(db, job).await?.max(forgotten(db, FORGOTTEN_TRIAL).await?);
    let text = "INSERT INTO runs (job, began_us, run, world, ended_us, ended_how, step, version, loss, accuracy)
        SELECT job, created_us, run, world, coalesce(ended_us, $2),
            CASE WHEN ended_us IS NULL THEN $3 ELSE coalesce(ended_how, 'unknown') END,
            (SELECT max(step) AS newest FROM steps WHERE job = $1 GROUP BY rank ORDER BY newest
                LIMIT 1 OFFSET (SELECT (count(DISTINCT rank) - 1) / 2 FROM steps WHERE job = $1)),
            $4, loss, accuracy FROM jobs WHERE job = $1";
    sql!(operation, text, job, now, End::Replaced.as_str(), version).execute(&mut *db).await?;
    let text = "DELETE FROM runs WHERE job = $1
        AND id <= (SELECT id FROM runs WHERE job = $1 ORDER BY id DESC LIMIT 1 OFFSET $2)";
    sql!(operation, text, job, RUNS).execute(&mut *db).await?;
    for text in FORGET_RUN {
        sql!(operation, text, job).execute(&mut *db).await?;
    }
    // What the planner remembers of a run tells of the next one of the same size.
    let text = "DELETE FROM planner_memory WHERE job = $1 AND NOT EXISTS (SELECT 1 FROM jobs
        WHERE job = $1 AND world = $2 AND gradient_values = $3 AND backend = $4 AND (machine IS $5 OR machine IS NULL))";
    sql!(operation, text, job, seen.world, seen.gradient_values, seen.backend, seen.machine).execute(&mut *db).await?;
    let text =
        "INSERT INTO jobs (job, world, gradient_values, backend, created_us, run, first_version, first_trial, momentum,
            buckets, machine)
        VALUES ($1, $2, $3, $4, $5, $6, $7, $8, $9, $10, $11)
        ON CONFLICT (job) DO UPDATE SET world = excluded.world, gradient_values = excluded.gradient_values,
            momentum = excluded.momentum, buckets = excluded.buckets, machine = excluded.machine, backend = excluded.backend,
            created_us = excluded.created_us, run = excluded.run, first_version = excluded.first_version,
            first_trial = excluded.first_trial, ended_us = NULL, ended_how = NULL, loss = NULL, accuracy = NULL";
    let (world, values, backend) = (seen.world, seen.gradient_values, &seen.backend);
    let buckets = json(operation, &seen.buckets)?;
    sql!(
        operation,
        text,
        job,
        world,
        values,
        backend,
        now,
        seen.run,
        version,
        trial,
        seen.momentum,
        buckets,
        seen.machine
    )
    .execute(&mut *db)
    .await?;
    forget_oldest(db).await
}

/// Everything of a job's run.
const FORGET_RUN: [&str; 12] = [
    "DELETE FROM experiments WHERE job = $1",
    "DELETE FROM progress WHERE job = $1",
    "DELETE FROM open_intervals WHERE job = $1",
    "DELETE FROM steps WHERE job = $1",
    "DELETE FROM ranks WHERE job = $1",
    "DELETE FROM decisions WHERE job = $1",
    "DELETE FROM decision_reports WHERE job = $1",
    "DELETE FROM decision_snapshots WHERE job = $1",
    "DELETE FROM applied WHERE job = $1",
    "DELETE FROM trials WHERE job = $1",
    "DELETE FROM trial_reports WHERE job = $1",
    "DELETE FROM intervals WHERE job = $1",
];

/// What is left of a job's name then.
const FORGET_NAME: [&str; 3] =
    ["DELETE FROM planner_memory WHERE job = $1", "DELETE FROM runs WHERE job = $1", "DELETE FROM jobs WHERE job = $1"];

/// Counters of [`forget`].
const FORGOTTEN_VERSION: &str = "forgotten-version";
const FORGOTTEN_TRIAL: &str = "forgotten-trial";

/// Beyond the limit an ended job goes: one that never had a step, which anybody can make many of, else the one that ended
/// first.
async fn forget_oldest(db: &mut SqliteConnection) -> Result<()> {
    let text = "SELECT job FROM jobs WHERE ended_us IS NOT NULL AND (SELECT count(*) FROM jobs) > $1
        ORDER BY EXISTS (SELECT 1 FROM steps WHERE steps.job = jobs.job), ended_us LIMIT 1";
    let gone = sql!("forget an ended job", text, MAX_JOBS as u64).fetch_optional(&mut *db).await?;
    if let Some(job) = gone { forget(db, &job).await } else { Ok(()) }
}

/// Deletes all of a name but how far its versions and trials counted: agents and trainers that know them refuse what is
/// older, so whatever begins later begins above.
async fn forget(db: &mut SqliteConnection, job: &JobId) -> Result<()> {
    let operation = "forget a job";
    let counted = [
        (FORGOTTEN_VERSION, decisions::newest_version(db, job).await?.0),
        (FORGOTTEN_TRIAL, trials::newest(db, job).await?),
    ];
    let text = "INSERT INTO counters (name, value) VALUES ($1, $2)
        ON CONFLICT (name) DO UPDATE SET value = max(value, excluded.value)";
    for (counter, newest) in counted {
        sql!(operation, text, counter, newest).execute(&mut *db).await?;
    }
    for text in FORGET_RUN.into_iter().chain(FORGET_NAME) {
        sql!(operation, text, job).execute(&mut *db).await?;
    }
    Ok(())
}

/// The largest number of any name that was deleted; 0 before the first. One for all names, so that none of them leaves
/// anything.
async fn forgotten(db: &mut SqliteConnection, counter: &str) -> Result<u64> {
    let text = "SELECT coalesce(max(value), 0) FROM counters WHERE name = $1";
    sql!("read how far deleted jobs counted", text, counter).fetch_one(db).await
}

/// How many jobs run.
pub(super) async fn running(db: &mut SqliteConnection) -> Result<u64> {
    sql!("count the jobs", "SELECT count(*) FROM jobs WHERE ended_us IS NULL").fetch_one(db).await
}

/// Stores that a rank is there. All ranks of a run have the same buckets; one that does not know them yet says none.
pub(super) async fn join(db: &mut SqliteConnection, node: &NodeName, seen: &Hello, now: Timestamp) -> Result<()> {
    let operation = "store a rank";
    let text = "INSERT OR REPLACE INTO ranks (job, rank, node, codecs, collectives, seen_us, left_us, policy)
        VALUES ($1, $2, $3, $4, $5, $6, NULL, $7)";
    let (codecs, collectives) = (json(operation, &seen.codecs)?, json(operation, &seen.collectives)?);
    let policy = seen.policy.as_ref().map(ToString::to_string);
    if let Some(Err(error)) = seen.policy.as_ref().map(JobPolicy::read) {
        tracing::warn!(job = %seen.job, rank = seen.rank, %error, "of the policy in the script counts only what is known here");
    }
    sql!(operation, text, seen.job, seen.rank, node, codecs, collectives, now, policy).execute(&mut *db).await?;
    let buckets = Some(&seen.buckets).filter(|buckets| !buckets.is_empty());
    let buckets = buckets.map(|buckets| json(operation, buckets)).transpose()?;
    let text = "UPDATE jobs SET ended_us = NULL, ended_how = NULL, buckets = coalesce($2, buckets) WHERE job = $1";
    sql!(operation, text, seen.job, buckets).execute(db).await
}

/// How many ranks are there.
pub(super) async fn present(db: &mut SqliteConnection, job: &JobId) -> Result<u64> {
    let text = "SELECT count(*) FROM ranks WHERE job = $1 AND left_us IS NULL";
    sql!("count a job's ranks", text, job).fetch_one(db).await
}

/// The ranks that are there and their nodes.
pub(super) async fn present_ranks(db: &mut SqliteConnection, job: &JobId) -> Result<Vec<(u32, NodeName)>> {
    let text = "SELECT rank, node FROM ranks WHERE job = $1 AND left_us IS NULL";
    sql!("look up a job's ranks", text, job).fetch_all(db).await
}

/// Which node a rank runs on, if it is there.
pub(super) async fn node_of(db: &mut SqliteConnection, job: &JobId, rank: u32) -> Result<Option<NodeName>> {
    let text = "SELECT node FROM ranks WHERE job = $1 AND rank = $2 AND left_us IS NULL";
    sql!("look up a rank", text, job, rank).fetch_optional(db).await
}

/// Stores how a rank left; the last one ends the job, by the worst that any rank came to.
pub(super) async fn leave(
    db: &mut SqliteConnection,
    (job, rank): (&JobId, u32),
    how: End,
    now: Timestamp,
) -> Result<()> {
    let operation = "store that a rank left";
    let text = "UPDATE ranks SET left_us = $3, lost = $4 WHERE job = $1 AND rank = $2";
    sql!(operation, text, job, rank, now, how == End::ConnectionLost).execute(&mut *db).await?;
    let text = "UPDATE jobs SET ended_us = $2, ended_how =
            CASE WHEN $3 = 'left' AND EXISTS (SELECT 1 FROM ranks WHERE job = $1 AND lost) THEN 'connection-lost' ELSE $3 END
        WHERE job = $1 AND NOT EXISTS (SELECT 1 FROM ranks WHERE job = $1 AND left_us IS NULL)";
    let ended = sql!(operation, text, job, now, how.as_str()).affected(&mut *db).await?;
    if ended > 0 { trials::abort(db, job, "the job ended", now).await } else { Ok(()) }
}

#[cfg(test)]
mod tests {
    use super::super::tests::{alone, begun, scratch};
    use super::*;
    use crate::store::Likeness;

    /// Of a job that runs no end is shown, whatever its row says of one.
    #[tokio::test]
    async fn only_a_run_that_has_ended_tells_how() {
        let (store, _dir) = scratch().await;
        let job = begun(&store, Timestamp(1)).await.job;
        for (ended, how, shown) in [
            (None, "left", None),
            (Some(Timestamp(2)), "left", Some(End::Left)),
            (Some(Timestamp(2)), "agents-silent", Some(End::AgentsSilent)),
            (Some(Timestamp(2)), "of an older release", None),
        ] {
            store
                .write
                .execute(Tables::ALL, sql!("write", "UPDATE jobs SET ended_us = $1, ended_how = $2", ended, how))
                .await
                .unwrap();
            let row = store.job(&job).await.unwrap().unwrap();
            assert_eq!((row.ended, row.how), (ended, shown), "{how}");
        }
    }

    #[tokio::test]
    async fn what_the_planner_remembers_is_for_later_runs_and_for_jobs_of_the_same_size() {
        let (store, _dir) = scratch().await;
        let begin_on = async |machine: Option<&str>, name: &str, world: u32, at: u64| {
            let mut tx = store.write.begin("begin a job").await.unwrap();
            let machine = machine.map(str::to_owned);
            let seen = Hello { world, machine, ..alone(name.parse().unwrap()) };
            super::begin(&mut tx, &seen, Timestamp(at)).await.unwrap();
            tx.commit().await.unwrap();
            store.job(&seen.job).await.unwrap().unwrap()
        };
        let begin = async |name: &str, world: u32, at: u64| begin_on(Some("a processor"), name, world, at).await;
        let remembered = async |row: &JobRow| {
            let (own, other) = (store.planner_memory(&row.job).await, store.memory_of_another(row).await);
            (
                own.unwrap().map(|text| text.to_string()),
                other.unwrap().map(|(text, likeness)| (text.to_string(), likeness)),
            )
        };
        let (first, none) = (begin("j", 2, 1).await, (None, None));
        assert_eq!(remembered(&first).await, none);
        store.put_planner_memory(&first, "[1]").await.unwrap();
        let some = || "[1]".to_owned();
        assert_eq!(remembered(&begin("j", 2, 2).await).await, (Some(some()), None), "the next run");
        assert_eq!(remembered(&begin("k", 2, 3).await).await, (None, Some((some(), Likeness::Same))), "another name");
        assert_eq!(
            remembered(&begin("l", 3, 4).await).await,
            (None, Some((some(), Likeness::SameMachine))),
            "another size"
        );
        let on_another = remembered(&begin_on(Some("a GPU"), "g", 2, 4).await).await;
        assert_eq!(on_another, (None, Some((some(), Likeness::SameBackend))), "of the same size on another machine");
        assert_eq!(
            remembered(&begin_on(Some("a GPU"), "j", 2, 5).await).await.0,
            None,
            "the next run on another machine"
        );
        store.put_planner_memory(&begin("j", 2, 5).await, "[1]").await.unwrap();
        assert_eq!(remembered(&begin("j", 3, 5).await).await, none, "a run of another size");
        assert_eq!(remembered(&begin("m", 2, 6).await).await, none, "and with it what was remembered");
        for (name, world) in [("a", 5), ("b", 5), ("c", 6), ("d", 6)] {
            let job = begin(name, world, 10 + u64::from(name.as_bytes()[0])).await;
            store.put_planner_memory(&job, &format!("[\"{name}\"]")).await.unwrap();
        }
        let other = async |name: &str, world: u32| remembered(&begin(name, world, 1000).await).await.1.unwrap();
        let is = |name: &str, same: bool| {
            (format!("[\"{name}\"]"), if same { Likeness::Same } else { Likeness::SameMachine })
        };
        assert_eq!(other("e", 5).await, is("b", true), "the newest that is like it");
        assert_eq!(other("f", 9).await, is("d", false), "the newest");
        let ran = "INSERT INTO intervals (job, version, strategy, from_step, to_step, at_us, measured_sync_us, measured_step_us)
            SELECT job, 0, 'none/dense-ring', 0, 9, 1, 1.0, 1.0 FROM jobs WHERE job = 'a' OR job = 'c'";
        store.write.execute(Tables::ALL, sql!("write", ran)).await.unwrap();
        assert_eq!(other("e", 5).await, is("a", true), "of those that have run");
        assert_eq!(other("f", 9).await, is("c", false));
    }

    /// The loop reads a run, works for a while, and writes: whatever began meanwhile keeps its own.
    #[tokio::test]
    async fn what_was_worked_out_for_a_run_is_not_written_to_the_next() {
        use super::super::{NewDecision, NewTrial, OpenInterval};
        use flexcomm_domain::{Decision, Strategy};
        let (store, _dir) = scratch().await;
        let first = begun(&store, Timestamp(1)).await;
        let decision = Decision {
            job: first.job.clone(),
            version: Version(1),
            parent: Version(0),
            plan: flexcomm_domain::Plan::DENSE_RING,
            decided_at: Timestamp(2),
            reason: "because".into(),
        };
        let open = OpenInterval {
            version: Version(0),
            from_step: 0,
            began: Timestamp(2),
            predicted_sync_us: None,
            predicted_step_us: None,
        };
        let trial = NewTrial { candidates: &[Strategy::DENSE_RING], iterations: 1, budget_ms: 1, why: "to see" };
        let new = NewDecision { decision: &decision, seed: 0, report: "{}", memory: "{}", snapshot: "{}" };
        let write_all = async |run: &JobRow| {
            [
                store.put_decision(run, &new).await,
                store.put_planner_memory(run, "{}").await,
                store.put_intervals(run, &[], &open).await,
                store.ask_trial(run, &trial, Timestamp(3)).await.map(|_| ()),
                store.end_lost(run, Timestamp(4)).await,
            ]
        };
        let second = begun(&store, Timestamp(3)).await;
        for refused in write_all(&first).await {
            assert!(matches!(refused, Err(StoreError::Replaced { .. })), "{refused:?}");
        }
        let job = &second.job;
        assert_eq!(store.job(job).await.unwrap(), Some(second.clone()), "it runs");
        assert_eq!(store.decision(job).await.unwrap(), None);
        assert_eq!((store.planner_memory(job).await.unwrap(), store.open_interval(job).await.unwrap()), (None, None));
        assert!(store.trials(job, 9).await.unwrap().is_empty());
        for written in write_all(&second).await {
            assert!(written.is_ok(), "{written:?}");
        }
        assert_eq!(store.delete_job(job, &[]).await.unwrap(), Deletion::Done);
        assert!(matches!(store.put_planner_memory(&second, "{}").await, Err(StoreError::Replaced { .. })));
    }

    #[tokio::test]
    async fn a_trial_that_ends_with_its_job_is_shown_as_aborted() {
        use super::super::NewTrial;
        let (store, _dir) = scratch().await;
        let run = begun(&store, Timestamp(1)).await;
        let mut tx = store.write.begin("join").await.unwrap();
        join(&mut tx, &"a".parse().unwrap(), &alone(run.job.clone()), Timestamp(2)).await.unwrap();
        tx.commit().await.unwrap();
        let new = NewTrial { candidates: &[], iterations: 1, budget_ms: 1, why: "to see" };
        store.ask_trial(&run, &new, Timestamp(3)).await.unwrap().unwrap();
        let mut tx = store.write.begin("leave").await.unwrap();
        leave(&mut tx, (&run.job, 0), End::Left, Timestamp(4)).await.unwrap();
        tx.commit().await.unwrap();
        let trials = store.trials(&run.job, 9).await.unwrap();
        assert_eq!((trials.len(), trials[0].state.as_str(), trials[0].ended), (1, "aborted", Some(Timestamp(4))));
        assert_eq!((trials[0].aborted.as_deref(), store.damaged_rows()), (Some("the job ended"), 0));
        assert_eq!(store.job(&run.job).await.unwrap().unwrap().how, Some(End::Left));
    }

    #[tokio::test]
    async fn a_policy_outlives_restarts_and_runs_and_goes_with_the_name() {
        let (store, dir) = scratch().await;
        let first = begun(&store, Timestamp(1)).await;
        assert_eq!(first.policy, None);
        let policy = |text: &str| JobPolicy::read(&serde_json::from_str(text).unwrap()).unwrap();
        let all = policy(
            r#"{"kinds": ["fp16"], "objective": "knee", "least_gain": 0.1, "most_overhead": 0.2,
                "pin": {"strategy": "fp16/dense-ring", "until": "2026-11-21T08:30:00.000001Z"}}"#,
        );
        for some in [policy(r#"{"observe": true}"#), all.clone()] {
            assert!(store.put_policy(&first.job, Some(&some)).await.unwrap());
            assert_eq!(store.job(&first.job).await.unwrap().unwrap().policy, Some(some));
        }
        assert!(!store.put_policy(&"other".parse().unwrap(), None).await.unwrap());
        store.close().await;
        let store = Store::open(&dir.path().join("test.db")).await.unwrap();
        assert_eq!(store.job(&first.job).await.unwrap().unwrap().policy.as_ref(), Some(&all));
        assert_eq!(begun(&store, Timestamp(2)).await.policy, Some(all), "another run");
        assert!(store.put_policy(&first.job, None).await.unwrap());
        assert_eq!(store.job(&first.job).await.unwrap().unwrap().policy, None);
        // Of a release that had more kinds, and an order of its own.
        let mut tx = store.write.begin("write").await.unwrap();
        sqlx::query(r#"UPDATE jobs SET policy = '{"kinds":["topk","later","fp16"]}'"#).execute(&mut *tx).await.unwrap();
        tx.commit().await.unwrap();
        let only = policy(r#"{"kinds": ["topk", "fp16"]}"#);
        assert_eq!(store.job(&first.job).await.unwrap().unwrap().policy, Some(only));
        assert_eq!(store.delete_job(&first.job, &[]).await.unwrap(), Deletion::Done);
        assert_eq!(begun(&store, Timestamp(3)).await.policy, None, "a new job");
    }

    #[tokio::test]
    async fn jobs_that_never_had_a_step_make_room_first_and_then_the_longest_ended() {
        let (store, _dir) = scratch().await;
        let mut tx = store.write.begin("write").await.unwrap();
        for text in [
            "INSERT INTO jobs (job, world, gradient_values, backend, created_us, ended_us)
                VALUES ('trained', 1, 1, 'x', 0, 1)",
            "INSERT INTO steps (job, rank, version, strategy, received_us, step, compute_us, comp_us, sync_us, wait_us,
                step_us, bytes_sent, gain) VALUES ('trained', 0, 0, 'x', 0, 1, 1, 1, 1, 1, 1, 1, 1)",
        ] {
            sqlx::query(text).execute(&mut *tx).await.unwrap();
        }
        for i in 0..MAX_JOBS as u64 {
            let job: JobId = format!("empty-{i}").parse().unwrap();
            begin(&mut tx, &alone(job.clone()), Timestamp(10 + i)).await.unwrap();
            leave(&mut tx, (&job, 0), End::Left, Timestamp(10 + i)).await.unwrap();
        }
        tx.commit().await.unwrap();
        let jobs = store.jobs().await.unwrap();
        let has = |name: &str| jobs.iter().any(|row| row.job.as_str() == name);
        assert_eq!(jobs.len(), MAX_JOBS);
        assert_eq!(["trained", "empty-0", "empty-1"].map(has), [true, false, true]);
    }
}
