//! Jobs and their ranks.

use flexcomm_domain::{JobId, NodeName, RunId, Timestamp, Version};
use flexcomm_wire::api::JobPolicy;
use flexcomm_wire::{CodecInfo, JobSeen};
use sqlx::SqliteConnection;

use super::write::Transaction;
use super::{Result, Store, StoreError, decisions, json, signed, sql, stored, time, trials, unsigned};
use crate::limits::{MAX_JOBS, RUNS};
use crate::policy::{self, Kinds};

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
    /// Kinds of compressors that its operator allows.
    pub kinds: Kinds,
    /// Newest training loss.
    pub loss: Option<f64>,
    /// Newest held-out accuracy.
    pub accuracy: Option<f64>,
}

/// How a run ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum End {
    /// Every rank said goodbye.
    Left,
    /// The connection of a trainer ended without a goodbye.
    ConnectionLost,
    /// Agents were silent for too long, and what became of their trainers is not known.
    AgentsSilent,
    /// Another run began under its name.
    Replaced,
}

impl End {
    const ALL: [Self; 4] = [Self::Left, Self::ConnectionLost, Self::AgentsSilent, Self::Replaced];

    /// As it is stored and shown.
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Left => "left",
            Self::ConnectionLost => "connection-lost",
            Self::AgentsSilent => "agents-silent",
            Self::Replaced => "replaced",
        }
    }

    fn read(text: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|end| end.as_str() == text)
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
    /// Compressors it has.
    pub codecs: Vec<CodecInfo>,
    /// Collectives it can run.
    pub collectives: Vec<String>,
    /// When its trainer said hello.
    pub seen: Timestamp,
    /// When it left.
    pub left: Option<Timestamp>,
}

#[derive(sqlx::FromRow)]
struct RawJob {
    job: String,
    run: Option<String>,
    world: i64,
    gradient_values: i64,
    backend: String,
    created_us: i64,
    ended_us: Option<i64>,
    ended_how: Option<String>,
    first_version: i64,
    policy: Option<String>,
    loss: Option<f64>,
    accuracy: Option<f64>,
}

impl RawJob {
    fn row(self) -> Result<JobRow> {
        let operation = "read the jobs";
        let policy: Option<JobPolicy> =
            stored(operation, "policy", self.policy.as_deref().map(serde_json::from_str).transpose())?;
        Ok(JobRow {
            job: stored(operation, "job id", self.job.parse())?,
            run: stored(operation, "run id", self.run.map(|run| run.parse()).transpose())?,
            world: stored(operation, "world", self.world.try_into())?,
            gradient_values: unsigned(self.gradient_values),
            backend: self.backend,
            created: time(self.created_us),
            ended: self.ended_us.map(time),
            how: self.ended_how.as_deref().and_then(End::read).filter(|_| self.ended_us.is_some()),
            earlier: Version(unsigned(self.first_version)),
            kinds: policy::stored(&policy.unwrap_or_default()),
            loss: self.loss,
            accuracy: self.accuracy,
        })
    }
}

impl Store {
    /// Begins a transaction for what was worked out for a run. Working it out takes time, and another run may begin
    /// under the name meanwhile: then nothing of it may be written, and [`StoreError::Replaced`] says so.
    pub(super) async fn begin_for(&self, run: &JobRow, operation: &'static str) -> Result<Transaction<'_>> {
        let on_error = sql(operation);
        let mut tx = self.write.begin().await.map_err(&on_error)?;
        let holds: bool =
            sqlx::query_scalar("SELECT EXISTS (SELECT 1 FROM jobs WHERE job = $1 AND created_us = $2 AND run IS $3)")
                .bind(run.job.as_str())
                .bind(signed(run.created.0))
                .bind(run.run.map(|run| run.to_string()))
                .fetch_one(&mut *tx)
                .await
                .map_err(&on_error)?;
        if holds { Ok(tx) } else { Err(StoreError::Replaced { operation, job: run.job.to_string() }) }
    }

    /// Ends a job whose agents have all been gone for long: its trainers can no longer say that they left.
    pub async fn end_lost(&self, run: &JobRow, now: Timestamp) -> Result<()> {
        let operation = "end a lost job";
        let mut tx = self.begin_for(run, operation).await?;
        for (rank, _) in homes(&mut tx, &run.job).await? {
            leave(&mut tx, (&run.job, rank), End::AgentsSilent, now).await?;
        }
        let on_error = sql(operation);
        tx.commit().await.map_err(&on_error)
    }

    /// Stores which kinds of compressors a job may use. False: there is no such job.
    pub async fn put_policy(&self, job: &JobId, kinds: &Kinds) -> Result<bool> {
        let operation = "store a job's policy";
        let on_error = sql(operation);
        let mut tx = self.write.begin().await.map_err(&on_error)?;
        let done = sqlx::query("UPDATE jobs SET policy = $2 WHERE job = $1")
            .bind(job.as_str())
            .bind(json(operation, &policy::shown(kinds))?)
            .execute(&mut *tx)
            .await
            .map_err(&on_error)?;
        tx.commit().await.map_err(&on_error)?;
        Ok(done.rows_affected() > 0)
    }

    /// The runs before the one that has the job's name now, newest first.
    pub async fn runs(&self, job: &JobId) -> Result<Vec<RunRow>> {
        let operation = "read a job's runs";
        let rows: Vec<RawRun> = sqlx::query_as("SELECT * FROM runs WHERE job = $1 ORDER BY id DESC")
            .bind(job.as_str())
            .fetch_all(&self.read)
            .await
            .map_err(sql(operation))?;
        rows.into_iter().map(RawRun::row).collect()
    }

    /// Deletes an ended job, or one all of whose agents are silent, and everything that bears its name.
    pub async fn delete_job(&self, job: &JobId, live: &[NodeName]) -> Result<Deletion> {
        let on_error = sql("delete a job");
        let mut tx = self.write.begin().await.map_err(&on_error)?;
        let row: Option<(Option<i64>,)> = sqlx::query_as("SELECT ended_us FROM jobs WHERE job = $1")
            .bind(job.as_str())
            .fetch_optional(&mut *tx)
            .await
            .map_err(&on_error)?;
        match row {
            None => return Ok(Deletion::Unknown),
            Some((None,)) if lives(&homes(&mut tx, job).await?, live) => return Ok(Deletion::Running),
            Some(_) => {}
        }
        forget(&mut tx, job).await?;
        tx.commit().await.map_err(&on_error)?;
        Ok(Deletion::Done)
    }

    /// All jobs, newest first.
    pub async fn jobs(&self) -> Result<Vec<JobRow>> {
        let rows: Vec<RawJob> = sqlx::query_as("SELECT * FROM jobs ORDER BY created_us DESC, job")
            .fetch_all(&self.read)
            .await
            .map_err(sql("read the jobs"))?;
        rows.into_iter().map(RawJob::row).collect()
    }

    /// The jobs that run, newest first.
    pub async fn running_jobs(&self) -> Result<Vec<JobRow>> {
        let rows: Vec<RawJob> =
            sqlx::query_as(RUNNING).fetch_all(&self.read).await.map_err(sql("read the jobs that run"))?;
        rows.into_iter().map(RawJob::row).collect()
    }

    /// One job.
    pub async fn job(&self, job: &JobId) -> Result<Option<JobRow>> {
        let row: Option<RawJob> = sqlx::query_as("SELECT * FROM jobs WHERE job = $1")
            .bind(job.as_str())
            .fetch_optional(&self.read)
            .await
            .map_err(sql("read a job"))?;
        row.map(RawJob::row).transpose()
    }

    /// The ranks of a job that were ever seen, by number.
    pub async fn ranks(&self, job: &JobId) -> Result<Vec<RankRow>> {
        let operation = "read a job's ranks";
        type Raw = (i64, String, String, String, i64, Option<i64>);
        let rows: Vec<Raw> = sqlx::query_as(
            "SELECT rank, node, codecs, collectives, seen_us, left_us FROM ranks WHERE job = $1 ORDER BY rank",
        )
        .bind(job.as_str())
        .fetch_all(&self.read)
        .await
        .map_err(sql(operation))?;
        let row = |(rank, node, codecs, collectives, seen, left): Raw| {
            Ok(RankRow {
                rank: stored(operation, "rank", rank.try_into())?,
                node: stored(operation, "node name", node.parse())?,
                codecs: stored(operation, "codecs", serde_json::from_str(&codecs))?,
                collectives: stored(operation, "collectives", serde_json::from_str(&collectives))?,
                seen: time(seen),
                left: left.map(time),
            })
        };
        rows.into_iter().map(row).collect()
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

#[derive(sqlx::FromRow)]
struct RawRun {
    run: Option<String>,
    world: i64,
    began_us: i64,
    ended_us: i64,
    ended_how: String,
    step: Option<i64>,
    version: i64,
    loss: Option<f64>,
    accuracy: Option<f64>,
}

impl RawRun {
    fn row(self) -> Result<RunRow> {
        let operation = "read a job's runs";
        Ok(RunRow {
            run: stored(operation, "run id", self.run.map(|run| run.parse()).transpose())?,
            world: stored(operation, "world", self.world.try_into())?,
            began: time(self.began_us),
            ended: time(self.ended_us),
            how: End::read(&self.ended_how),
            step: self.step.map(unsigned),
            version: Version(unsigned(self.version)),
            loss: self.loss,
            accuracy: self.accuracy,
        })
    }
}

/// The job, its world and whether any rank is there.
pub(super) struct Known {
    pub run: Option<RunId>,
    pub world: u32,
    pub gradient_values: u64,
    pub live: u32,
}

/// Looks a job up.
pub(super) async fn known(db: &mut SqliteConnection, job: &JobId) -> Result<Option<Known>> {
    let operation = "look up a job";
    let row: Option<(i64, i64, i64, Option<String>)> = sqlx::query_as(
        "SELECT world, gradient_values,
            (SELECT count(*) FROM ranks WHERE ranks.job = jobs.job AND left_us IS NULL), run FROM jobs WHERE job = $1",
    )
    .bind(job.as_str())
    .fetch_optional(db)
    .await
    .map_err(sql(operation))?;
    let known = |(world, values, live, run): (i64, i64, i64, Option<String>)| {
        Ok(Known {
            run: stored(operation, "run id", run.map(|run| run.parse()).transpose())?,
            world: world as u32,
            gradient_values: unsigned(values),
            live: live as u32,
        })
    };
    row.map(known).transpose()
}

/// Makes a job, or gives its name to a new run. What the run before had is gone but for one row of `runs`; versions and
/// trials go on counting from there, since agents and trainers refuse what is older than what they know.
pub(super) async fn begin(db: &mut SqliteConnection, seen: &JobSeen, now: Timestamp) -> Result<()> {
    let on_error = sql("store a job");
    let job = seen.job.as_str();
    let version = decisions::newest_version(db, &seen.job).await?.max(forgotten(db, FORGOTTEN_VERSION).await?);
    let trial = trials::newest(db, &seen.job).await?.max(forgotten(db, FORGOTTEN_TRIAL).await?);
    sqlx::query(
        "INSERT INTO runs (job, began_us, run, world, ended_us, ended_how, step, version, loss, accuracy)
         SELECT job, created_us, run, world, coalesce(ended_us, $2),
            CASE WHEN ended_us IS NULL THEN $3 ELSE coalesce(ended_how, 'unknown') END,
            (SELECT max(step) AS newest FROM steps WHERE job = $1 GROUP BY rank ORDER BY newest
                LIMIT 1 OFFSET (SELECT (count(DISTINCT rank) - 1) / 2 FROM steps WHERE job = $1)),
            $4, loss, accuracy FROM jobs WHERE job = $1",
    )
    .bind(job)
    .bind(signed(now.0))
    .bind(End::Replaced.as_str())
    .bind(signed(version))
    .execute(&mut *db)
    .await
    .map_err(&on_error)?;
    sqlx::query(
        "DELETE FROM runs WHERE job = $1
         AND id <= (SELECT id FROM runs WHERE job = $1 ORDER BY id DESC LIMIT 1 OFFSET $2)",
    )
    .bind(job)
    .bind(signed(RUNS))
    .execute(&mut *db)
    .await
    .map_err(&on_error)?;
    for text in FORGET_RUN {
        sqlx::query(text).bind(job).execute(&mut *db).await.map_err(&on_error)?;
    }
    sqlx::query(
        "INSERT INTO jobs (job, world, gradient_values, backend, created_us, run, first_version, first_trial)
         VALUES ($1, $2, $3, $4, $5, $6, $7, $8)
         ON CONFLICT (job) DO UPDATE SET world = excluded.world, gradient_values = excluded.gradient_values,
            backend = excluded.backend, created_us = excluded.created_us, run = excluded.run,
            first_version = excluded.first_version, first_trial = excluded.first_trial,
            ended_us = NULL, ended_how = NULL, loss = NULL, accuracy = NULL",
    )
    .bind(job)
    .bind(i64::from(seen.world))
    .bind(signed(seen.gradient_values))
    .bind(&seen.backend)
    .bind(signed(now.0))
    .bind(seen.run.map(|run| run.to_string()))
    .bind(signed(version))
    .bind(signed(trial))
    .execute(&mut *db)
    .await
    .map_err(&on_error)?;
    forget_oldest(db).await
}

/// Everything of a job's run.
const FORGET_RUN: [&str; 11] = [
    "DELETE FROM progress WHERE job = $1",
    "DELETE FROM open_intervals WHERE job = $1",
    "DELETE FROM steps WHERE job = $1",
    "DELETE FROM ranks WHERE job = $1",
    "DELETE FROM decisions WHERE job = $1",
    "DELETE FROM decision_reports WHERE job = $1",
    "DELETE FROM applied WHERE job = $1",
    "DELETE FROM trials WHERE job = $1",
    "DELETE FROM trial_reports WHERE job = $1",
    "DELETE FROM intervals WHERE job = $1",
    "DELETE FROM planner_memory WHERE job = $1",
];

/// What is left of a job's name then.
const FORGET_NAME: [&str; 2] = ["DELETE FROM runs WHERE job = $1", "DELETE FROM jobs WHERE job = $1"];

/// Counters of [`forget`].
const FORGOTTEN_VERSION: &str = "forgotten-version";
const FORGOTTEN_TRIAL: &str = "forgotten-trial";

/// Beyond the limit an ended job goes: one that never had a step, which anybody can make many of, else the one that ended
/// first.
async fn forget_oldest(db: &mut SqliteConnection) -> Result<()> {
    let on_error = sql("forget an ended job");
    let gone: Option<(String,)> = sqlx::query_as(
        "SELECT job FROM jobs WHERE ended_us IS NOT NULL AND (SELECT count(*) FROM jobs) > $1
         ORDER BY EXISTS (SELECT 1 FROM steps WHERE steps.job = jobs.job), ended_us LIMIT 1",
    )
    .bind(MAX_JOBS as i64)
    .fetch_optional(&mut *db)
    .await
    .map_err(&on_error)?;
    match gone {
        Some((job,)) => forget(db, &stored("forget an ended job", "job id", job.parse())?).await,
        None => Ok(()),
    }
}

/// Deletes all of a name but how far its versions and trials counted: agents and trainers that know them refuse what is
/// older, so whatever begins later begins above.
async fn forget(db: &mut SqliteConnection, job: &JobId) -> Result<()> {
    let on_error = sql("forget a job");
    let counted = [
        (FORGOTTEN_VERSION, decisions::newest_version(db, job).await?),
        (FORGOTTEN_TRIAL, trials::newest(db, job).await?),
    ];
    for (counter, newest) in counted {
        sqlx::query(
            "INSERT INTO counters (name, value) VALUES ($1, $2)
             ON CONFLICT (name) DO UPDATE SET value = max(value, excluded.value)",
        )
        .bind(counter)
        .bind(signed(newest))
        .execute(&mut *db)
        .await
        .map_err(&on_error)?;
    }
    for text in FORGET_RUN.into_iter().chain(FORGET_NAME) {
        sqlx::query(text).bind(job.as_str()).execute(&mut *db).await.map_err(&on_error)?;
    }
    Ok(())
}

/// The largest number of any name that was deleted; 0 before the first. One for all names, so that none of them leaves
/// anything.
async fn forgotten(db: &mut SqliteConnection, counter: &str) -> Result<u64> {
    let row: Option<(i64,)> = sqlx::query_as("SELECT value FROM counters WHERE name = $1")
        .bind(counter)
        .fetch_optional(db)
        .await
        .map_err(sql("read how far deleted jobs counted"))?;
    Ok(row.map_or(0, |(value,)| unsigned(value)))
}

/// How many jobs run.
pub(super) async fn running(db: &mut SqliteConnection) -> Result<usize> {
    let (count,): (i64,) = sqlx::query_as("SELECT count(*) FROM jobs WHERE ended_us IS NULL")
        .fetch_one(db)
        .await
        .map_err(sql("count the jobs"))?;
    Ok(count as usize)
}

/// Stores that a rank is there.
pub(super) async fn join(db: &mut SqliteConnection, node: &NodeName, seen: &JobSeen, now: Timestamp) -> Result<()> {
    let operation = "store a rank";
    sqlx::query(
        "INSERT OR REPLACE INTO ranks (job, rank, node, codecs, collectives, seen_us, left_us)
         VALUES ($1, $2, $3, $4, $5, $6, NULL)",
    )
    .bind(seen.job.as_str())
    .bind(i64::from(seen.rank))
    .bind(node.as_str())
    .bind(json(operation, &seen.codecs)?)
    .bind(json(operation, &seen.collectives)?)
    .bind(signed(now.0))
    .execute(&mut *db)
    .await
    .map_err(sql(operation))?;
    sqlx::query("UPDATE jobs SET ended_us = NULL, ended_how = NULL WHERE job = $1")
        .bind(seen.job.as_str())
        .execute(&mut *db)
        .await
        .map_err(sql(operation))?;
    Ok(())
}

/// Whether any rank is on a node whose agent is alive.
fn lives(ranks: &[(u32, String)], live: &[NodeName]) -> bool {
    ranks.iter().any(|(_, owner)| live.iter().any(|node| node.as_str() == owner))
}

/// The ranks that are there and their nodes.
pub(super) async fn homes(db: &mut SqliteConnection, job: &JobId) -> Result<Vec<(u32, String)>> {
    let rows: Vec<(i64, String)> = sqlx::query_as("SELECT rank, node FROM ranks WHERE job = $1 AND left_us IS NULL")
        .bind(job.as_str())
        .fetch_all(db)
        .await
        .map_err(sql("look up a job's ranks"))?;
    Ok(rows.into_iter().map(|(rank, node)| (rank as u32, node)).collect())
}

/// Which node a rank runs on, if it is there.
pub(super) async fn node_of(db: &mut SqliteConnection, job: &JobId, rank: u32) -> Result<Option<String>> {
    let row: Option<(String,)> =
        sqlx::query_as("SELECT node FROM ranks WHERE job = $1 AND rank = $2 AND left_us IS NULL")
            .bind(job.as_str())
            .bind(i64::from(rank))
            .fetch_optional(db)
            .await
            .map_err(sql("look up a rank"))?;
    Ok(row.map(|(node,)| node))
}

/// Stores how a rank left; the last one ends the job, by the worst that any rank came to.
pub(super) async fn leave(
    db: &mut SqliteConnection,
    (job, rank): (&JobId, u32),
    how: End,
    now: Timestamp,
) -> Result<()> {
    let on_error = sql("store that a rank left");
    sqlx::query("UPDATE ranks SET left_us = $3, lost = $4 WHERE job = $1 AND rank = $2")
        .bind(job.as_str())
        .bind(i64::from(rank))
        .bind(signed(now.0))
        .bind(how == End::ConnectionLost)
        .execute(&mut *db)
        .await
        .map_err(&on_error)?;
    sqlx::query(
        "UPDATE jobs SET ended_us = $2, ended_how =
            CASE WHEN $3 = 'left' AND EXISTS (SELECT 1 FROM ranks WHERE job = $1 AND lost) THEN 'connection-lost' ELSE $3 END
         WHERE job = $1 AND NOT EXISTS (SELECT 1 FROM ranks WHERE job = $1 AND left_us IS NULL)",
    )
    .bind(job.as_str())
    .bind(signed(now.0))
    .bind(how.as_str())
    .execute(&mut *db)
    .await
    .map_err(&on_error)?;
    sqlx::query(
        "UPDATE trials SET state = 'aborted', aborted = 'the job ended', ended_us = $2
         WHERE job = $1 AND state = 'pending' AND (SELECT ended_us FROM jobs WHERE job = $1) IS NOT NULL",
    )
    .bind(job.as_str())
    .bind(signed(now.0))
    .execute(&mut *db)
    .await
    .map_err(&on_error)?;
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::super::tests::{alone, begun, scratch};
    use super::*;

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
            strategy: Strategy::DENSE_RING,
            decided_at: Timestamp(2),
            reason: "because".into(),
        };
        let open = OpenInterval {
            version: Version(0),
            from_step: 0,
            began: Timestamp(2),
            predicted_sync_us: None,
            predicted_step_us: None,
            terms: None,
            model_sync_us: None,
            moved: Timestamp(2),
        };
        let trial = NewTrial { candidates: &[Strategy::DENSE_RING], iterations: 1, budget_ms: 1, why: "to see" };
        let new = NewDecision { decision: &decision, seed: 0, report: "{}", memory: "{}" };
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
    async fn a_policy_outlives_restarts_and_runs_and_goes_with_the_name() {
        let (store, dir) = scratch().await;
        let first = begun(&store, Timestamp(1)).await;
        assert_eq!(first.kinds, None);
        let only: Kinds = Some(["fp16".parse().unwrap(), "topk".parse().unwrap()].into());
        assert!(store.put_policy(&first.job, &only).await.unwrap());
        assert!(!store.put_policy(&"other".parse().unwrap(), &only).await.unwrap());
        store.close().await;
        let store = Store::open(&dir.path().join("test.db")).await.unwrap();
        assert_eq!(store.job(&first.job).await.unwrap().unwrap().kinds, only);
        assert_eq!(begun(&store, Timestamp(2)).await.kinds, only, "another run");
        // Of a release that had more kinds, and an order of its own.
        let mut tx = store.write.begin().await.unwrap();
        sqlx::query(r#"UPDATE jobs SET policy = '{"kinds":["topk","later","fp16"]}'"#).execute(&mut *tx).await.unwrap();
        tx.commit().await.unwrap();
        assert_eq!(store.job(&first.job).await.unwrap().unwrap().kinds, only);
        assert_eq!(store.delete_job(&first.job, &[]).await.unwrap(), Deletion::Done);
        assert_eq!(begun(&store, Timestamp(3)).await.kinds, None, "a new job");
    }

    #[tokio::test]
    async fn jobs_that_never_had_a_step_make_room_first_and_then_the_longest_ended() {
        let (store, _dir) = scratch().await;
        let mut tx = store.write.begin().await.unwrap();
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
