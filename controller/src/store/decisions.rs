//! Decisions, their reports, and the planner's memory: written together or not at all.

use flexcomm_domain::{Decision, JobId, Strategy, Timestamp, Version};
use sqlx::SqliteConnection;
use std::collections::BTreeSet;

use super::checksum::{Field, Row, checksum, intact};
use super::write::Writer;
use super::{JobRow, Result, Store, StoreError, json, signed, sql, stored, time, unsigned};
use crate::limits::DECISIONS;

/// A stored decision.
#[derive(Debug, Clone, PartialEq)]
pub struct DecisionRow {
    /// As published.
    pub decision: Decision,
    /// First step under it, once every rank reported.
    pub applied_at_step: Option<u64>,
}

/// What a cycle of the loop wants stored in one transaction.
#[derive(Debug, Clone)]
pub struct NewDecision<'a> {
    /// The decision, already checked.
    pub decision: &'a Decision,
    /// Seed of the random numbers it was made with.
    pub seed: u64,
    /// The planner's report as JSON.
    pub report: &'a str,
    /// The planner's memory after it, as JSON.
    pub memory: &'a str,
}

#[derive(sqlx::FromRow)]
struct Raw {
    job: String,
    version: i64,
    parent: i64,
    strategy: String,
    digest: i64,
    decided_us: i64,
    reason: String,
    applied_at_step: Option<i64>,
    #[sqlx(rename = "seal")]
    checksum: Option<i64>,
}

/// The columns of [`Raw`].
macro_rules! columns {
    () => {
        "job, version, parent, strategy, digest, decided_us, reason, applied_at_step, seal"
    };
}

const TABLE: &str = "decisions";

impl Raw {
    fn new(d: &Decision) -> Self {
        Self {
            job: d.job.to_string(),
            version: signed(d.version.0),
            parent: signed(d.parent.0),
            strategy: d.strategy.to_string(),
            digest: signed(d.digest().0),
            decided_us: signed(d.decided_at.0),
            reason: d.reason.clone(),
            applied_at_step: None,
            checksum: None,
        }
    }

    fn row(self, store: &Store) -> Result<DecisionRow> {
        let operation = "read decisions";
        store.damaged.check((TABLE, &self.fields()), self.checksum, || name(&self.job, self.version))?;
        Ok(DecisionRow {
            decision: Decision {
                job: stored(operation, "job id", self.job.parse())?,
                version: Version(unsigned(self.version)),
                parent: Version(unsigned(self.parent)),
                strategy: stored(operation, "strategy", self.strategy.parse())?,
                decided_at: time(self.decided_us),
                reason: self.reason,
            },
            applied_at_step: self.applied_at_step.map(unsigned),
        })
    }
}

impl Row for Raw {
    const TABLE: &'static str = TABLE;

    fn fields(&self) -> Vec<Field<'_>> {
        vec![
            (&self.job).into(),
            self.version.into(),
            self.parent.into(),
            (&self.strategy).into(),
            self.digest.into(),
            self.decided_us.into(),
            (&self.reason).into(),
            self.applied_at_step.into(),
        ]
    }

    fn stored(&self) -> Option<i64> {
        self.checksum
    }
}

fn name(job: &str, version: i64) -> String {
    format!("decision {} of job {job}", unsigned(version))
}

const REPORTS: &str = "decision_reports";

fn report_fields<'a>(job: &'a str, version: i64, (seed, report): (i64, &'a str)) -> [Field<'a>; 4] {
    [job.into(), version.into(), seed.into(), report.into()]
}

const MEMORIES: &str = "planner_memory";

impl Store {
    /// The newest decision of a job; none where that is damaged, and the next one then has a higher version.
    pub async fn decision(&self, job: &JobId) -> Result<Option<DecisionRow>> {
        let row: Option<Raw> = sqlx::query_as(concat!(
            "SELECT ",
            columns!(),
            " FROM decisions WHERE job = $1 ORDER BY version DESC LIMIT 1"
        ))
        .bind(job.as_str())
        .fetch_optional(&self.read)
        .await
        .map_err(sql("read the decision in force"))?;
        row.and_then(|row| intact(row.row(self))).transpose()
    }

    /// The newest version that a job ever had, also of a damaged decision; 0 before the first.
    pub async fn newest_version(&self, job: &JobId) -> Result<Version> {
        let mut db = self.read.acquire().await.map_err(sql("read the newest version"))?;
        Ok(Version(newest_version(&mut db, job).await?))
    }

    /// The newest `limit` decisions older than version `before`, newest first, with seed and report, without what is
    /// damaged.
    pub async fn history(&self, job: &JobId, before: u64, limit: u32) -> Result<Vec<(DecisionRow, u64, String)>> {
        #[derive(sqlx::FromRow)]
        struct Entry {
            #[sqlx(flatten)]
            raw: Raw,
            seed: i64,
            report: String,
            report_checksum: Option<i64>,
        }
        let rows: Vec<Entry> = sqlx::query_as(
            "SELECT d.job, d.version, d.parent, d.strategy, d.digest, d.decided_us, d.reason, d.applied_at_step, d.seal,
                r.seed, r.report, r.seal AS report_checksum
             FROM decisions d JOIN decision_reports r ON r.job = d.job AND r.version = d.version
             WHERE d.job = $1 AND d.version < $2 ORDER BY d.version DESC LIMIT $3",
        )
        .bind(job.as_str())
        .bind(signed(before.min(i64::MAX as u64)))
        .bind(limit)
        .fetch_all(&self.read)
        .await
        .map_err(sql("read the history"))?;
        let entry = |e: Entry| {
            let (job, version) = (e.raw.job.as_str(), e.raw.version);
            let fields = report_fields(job, version, (e.seed, &e.report));
            let named = || format!("the report of {}", name(job, version));
            self.damaged.check((REPORTS, &fields), e.report_checksum, named)?;
            Ok((e.raw.row(self)?, unsigned(e.seed), e.report))
        };
        rows.into_iter().filter_map(|e| intact(entry(e))).collect()
    }

    /// How many decisions each job has had: its newest version.
    pub async fn versions(&self) -> Result<Vec<(String, u64)>> {
        let rows: Vec<(String, i64)> = sqlx::query_as("SELECT job, max(version) FROM decisions GROUP BY job")
            .fetch_all(&self.read)
            .await
            .map_err(sql("read the versions"))?;
        Ok(rows.into_iter().map(|(job, v)| (job, unsigned(v))).collect())
    }

    /// The newest decision is in force once all these ranks have reported it: those that can.
    pub async fn confirm_applied(&self, job: &JobId, ranks: &BTreeSet<u32>) -> Result<()> {
        let on_error = sql("store that a decision is in force");
        let mut tx = self.write.begin().await.map_err(&on_error)?;
        let newest = newest_version(&mut tx, job).await?;
        confirm(&mut tx, job, newest, ranks).await?;
        tx.commit().await.map_err(&on_error)
    }

    /// What the planner remembers of a job, as JSON. A damaged row is as good as none: the next look stores it anew.
    pub async fn planner_memory(&self, job: &JobId) -> Result<Option<String>> {
        let row: Option<(String, Option<i64>)> =
            sqlx::query_as("SELECT memory, seal FROM planner_memory WHERE job = $1")
                .bind(job.as_str())
                .fetch_optional(&self.read)
                .await
                .map_err(sql("read the planner's memory"))?;
        let checked = |(memory, stored): (String, Option<i64>)| {
            let fields = [job.as_str().into(), (&memory).into()];
            let named = || format!("what the planner remembers of job {job}");
            self.damaged.check((MEMORIES, &fields), stored, named).map(|()| memory)
        };
        row.and_then(|row| intact(checked(row))).transpose()
    }

    /// Stores the planner's memory when nothing was decided.
    pub async fn put_planner_memory(&self, run: &JobRow, memory: &str) -> Result<()> {
        let operation = "store the planner's memory";
        let mut tx = self.begin_for(run, operation).await?;
        put_memory(&mut tx, &run.job, memory).await?;
        tx.commit().await.map_err(sql(operation))
    }

    /// Stores a decision with its report and the memory. It must be the next version, made from the newest.
    pub async fn put_decision(&self, run: &JobRow, new: &NewDecision<'_>) -> Result<()> {
        let operation = "store a decision";
        let on_error = sql(operation);
        let d = new.decision;
        let mut tx = self.begin_for(run, operation).await?;
        let newest = newest_version(&mut tx, &d.job).await?;
        if d.version.0 <= newest || d.parent.0 != newest {
            return Err(StoreError::Fenced { job: d.job.to_string(), version: d.version.0, newest });
        }
        let row = Raw::new(d);
        sqlx::query(
            "INSERT INTO decisions (job, version, parent, strategy, digest, decided_us, reason, seal)
             VALUES ($1, $2, $3, $4, $5, $6, $7, $8)",
        )
        .bind(&row.job)
        .bind(row.version)
        .bind(row.parent)
        .bind(&row.strategy)
        .bind(row.digest)
        .bind(row.decided_us)
        .bind(&row.reason)
        .bind(row.checksum())
        .execute(&mut *tx)
        .await
        .map_err(&on_error)?;
        let seed = signed(new.seed);
        sqlx::query("INSERT INTO decision_reports (job, version, seed, report, seal) VALUES ($1, $2, $3, $4, $5)")
            .bind(&row.job)
            .bind(row.version)
            .bind(seed)
            .bind(new.report)
            .bind(checksum(REPORTS, &report_fields(&row.job, row.version, (seed, new.report))))
            .execute(&mut *tx)
            .await
            .map_err(&on_error)?;
        put_memory(&mut tx, &d.job, new.memory).await?;
        forget_old(&mut tx, &d.job, d.version.0).await?;
        tx.commit().await.map_err(&on_error)
    }
}

async fn put_memory(db: &mut SqliteConnection, job: &JobId, memory: &str) -> Result<()> {
    sqlx::query("INSERT OR REPLACE INTO planner_memory (job, memory, seal) VALUES ($1, $2, $3)")
        .bind(job.as_str())
        .bind(memory)
        .bind(checksum(MEMORIES, &[job.as_str().into(), memory.into()]))
        .execute(db)
        .await
        .map_err(sql("store the planner's memory"))?;
    Ok(())
}

async fn forget_old(db: &mut SqliteConnection, job: &JobId, newest: u64) -> Result<()> {
    let oldest = newest.saturating_sub(DECISIONS);
    for text in [
        "DELETE FROM decisions WHERE job = $1 AND version <= $2",
        "DELETE FROM decision_reports WHERE job = $1 AND version <= $2",
        "DELETE FROM applied WHERE job = $1 AND version <= $2",
    ] {
        let query = sqlx::query(text).bind(job.as_str()).bind(signed(oldest));
        query.execute(&mut *db).await.map_err(sql("forget old decisions"))?;
    }
    Ok(())
}

/// The newest version of a job, whichever of its runs had it; 0 before the first.
pub(super) async fn newest_version(db: &mut SqliteConnection, job: &JobId) -> Result<u64> {
    let (version,): (i64,) = sqlx::query_as(
        "SELECT max(coalesce((SELECT max(version) FROM decisions WHERE job = $1), 0),
            coalesce((SELECT first_version FROM jobs WHERE job = $1), 0))",
    )
    .bind(job.as_str())
    .fetch_one(db)
    .await
    .map_err(sql("read the newest version"))?;
    Ok(unsigned(version))
}

/// Brings strategies that a release before 0.2 wrote (`topk@0.01/allgather`) to their canonical text, and with it their digest:
/// trainers compare that. A row that is damaged stays so, and what cannot be read stays as it is.
pub(super) async fn rewrite(writer: &Writer) -> Result<()> {
    let operation = "bring stored decisions to this version";
    let mut db = writer.begin().await.map_err(sql(operation))?;
    let rows: Vec<Raw> = sqlx::query_as(concat!("SELECT ", columns!(), " FROM decisions WHERE strategy LIKE '%@%/%'"))
        .fetch_all(&mut *db)
        .await
        .map_err(sql(operation))?;
    for mut row in rows {
        let Ok(strategy) = row.strategy.parse::<Strategy>() else { continue };
        let checksum =
            row.change(|row| (row.strategy, row.digest) = (strategy.to_string(), signed(strategy.digest().0)));
        sqlx::query("UPDATE decisions SET strategy = $3, digest = $4, seal = $5 WHERE job = $1 AND version = $2")
            .bind(&row.job)
            .bind(row.version)
            .bind(&row.strategy)
            .bind(row.digest)
            .bind(checksum)
            .execute(&mut *db)
            .await
            .map_err(sql(operation))?;
    }
    db.commit().await.map_err(sql(operation))
}

/// Sets decisions made after `now` to it. How many.
pub(super) async fn shift_back(db: &mut SqliteConnection, now: i64) -> std::result::Result<u64, sqlx::Error> {
    let rows: Vec<Raw> = sqlx::query_as(concat!("SELECT ", columns!(), " FROM decisions WHERE decided_us > $1"))
        .bind(now)
        .fetch_all(&mut *db)
        .await?;
    let count = rows.len() as u64;
    for mut row in rows {
        let checksum = row.change(|row| row.decided_us = now);
        sqlx::query("UPDATE decisions SET decided_us = $3, seal = $4 WHERE job = $1 AND version = $2")
            .bind(&row.job)
            .bind(row.version)
            .bind(now)
            .bind(checksum)
            .execute(&mut *db)
            .await?;
    }
    Ok(count)
}

/// The digest of a stored decision's strategy.
pub(super) async fn digest_of(db: &mut SqliteConnection, job: &JobId, version: u64) -> Result<Option<u64>> {
    let row: Option<(i64,)> = sqlx::query_as("SELECT digest FROM decisions WHERE job = $1 AND version = $2")
        .bind(job.as_str())
        .bind(signed(version))
        .fetch_optional(db)
        .await
        .map_err(sql("look up a decision"))?;
    Ok(row.map(|(digest,)| unsigned(digest)))
}

/// The newest version that a rank reported as applied; 0 for none.
pub(super) async fn newest_applied(db: &mut SqliteConnection, job: &JobId, rank: u32) -> Result<u64> {
    let (version,): (Option<i64>,) = sqlx::query_as("SELECT max(version) FROM applied WHERE job = $1 AND rank = $2")
        .bind(job.as_str())
        .bind(i64::from(rank))
        .fetch_one(db)
        .await
        .map_err(sql("look up what a rank applied"))?;
    Ok(version.map_or(0, unsigned))
}

/// Stores that a rank switched; when all `world` ranks have, the decision bears its first step.
pub(super) async fn put_applied(
    db: &mut SqliteConnection,
    r: &flexcomm_wire::AppliedReport,
    world: u32,
    now: Timestamp,
) -> Result<()> {
    let on_error = sql("store that a rank switched");
    sqlx::query("INSERT OR REPLACE INTO applied (job, version, rank, step, received_us) VALUES ($1, $2, $3, $4, $5)")
        .bind(r.job.as_str())
        .bind(signed(r.version))
        .bind(i64::from(r.rank))
        .bind(signed(r.step))
        .bind(signed(now.0))
        .execute(&mut *db)
        .await
        .map_err(&on_error)?;
    confirm(db, &r.job, r.version, &(0..world).collect()).await
}

/// Gives a decision its first step when all these ranks have reported it.
async fn confirm(db: &mut SqliteConnection, job: &JobId, version: u64, ranks: &BTreeSet<u32>) -> Result<()> {
    let operation = "store that a decision is in force";
    let row: Option<Raw> = sqlx::query_as(concat!(
        "SELECT ",
        columns!(),
        " FROM decisions WHERE job = $1 AND version = $2 AND applied_at_step IS NULL AND NOT EXISTS
            (SELECT value FROM json_each($3) EXCEPT SELECT rank FROM applied WHERE job = $1 AND version = $2)"
    ))
    .bind(job.as_str())
    .bind(signed(version))
    .bind(json(operation, ranks)?)
    .fetch_optional(&mut *db)
    .await
    .map_err(sql(operation))?;
    match row {
        Some(row) => applied_by_all(db, row).await.map_err(sql(operation)),
        None => Ok(()),
    }
}

/// Fills in the first step under a decision.
async fn applied_by_all(db: &mut SqliteConnection, mut row: Raw) -> std::result::Result<(), sqlx::Error> {
    let step: Option<i64> = sqlx::query_scalar("SELECT max(step) FROM applied WHERE job = $1 AND version = $2")
        .bind(&row.job)
        .bind(row.version)
        .fetch_one(&mut *db)
        .await?;
    let checksum = row.change(|row| row.applied_at_step = step);
    sqlx::query("UPDATE decisions SET applied_at_step = $3, seal = $4 WHERE job = $1 AND version = $2")
        .bind(&row.job)
        .bind(row.version)
        .bind(row.applied_at_step)
        .bind(checksum)
        .execute(db)
        .await?;
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::super::tests::{begun, scratch};
    use super::*;

    fn decision(version: u64, parent: u64) -> Decision {
        Decision {
            job: JobId::new("j").unwrap(),
            version: Version(version),
            parent: Version(parent),
            strategy: "topk@0.01/art-ring:star".parse().unwrap(),
            decided_at: Timestamp(version),
            reason: "because".into(),
        }
    }

    fn new(decision: &Decision) -> NewDecision<'_> {
        NewDecision { decision, seed: u64::MAX, report: "{\"a\":1}", memory: "{}" }
    }

    #[tokio::test]
    async fn decisions_of_a_release_before_are_brought_to_this_one_s_text() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("store.db");
        let store = Store::open(&path).await.unwrap();
        let run = begun(&store, Timestamp(0)).await;
        for version in 1..=3 {
            store.put_decision(&run, &new(&decision(version, version - 1))).await.unwrap();
        }
        let mut db = store.write.connection().await;
        let text = "topk@0.01/art-ring:star";
        let mut rows: Vec<Raw> = sqlx::query_as(concat!("SELECT ", columns!(), " FROM decisions ORDER BY version"))
            .fetch_all(&mut *db)
            .await
            .unwrap();
        for (i, row) in rows.iter_mut().enumerate() {
            let old = (text.to_owned(), signed(flexcomm_domain::Digest::of(text).0));
            let seal = row.change(|row| (row.strategy, row.digest) = old).map(|seal| seal ^ i64::from(i == 1));
            sqlx::query("UPDATE decisions SET strategy = $1, digest = $2, seal = $3 WHERE version = $4")
                .bind(text)
                .bind(row.digest)
                .bind(seal)
                .bind(row.version)
                .execute(&mut *db)
                .await
                .unwrap();
        }
        drop(db);
        store.close().await;
        let store = Store::open(&path).await.unwrap();
        let newest = store.decision(&JobId::new("j").unwrap()).await.unwrap().unwrap();
        assert_eq!(newest.decision, decision(3, 2));
        let mut db = store.write.connection().await;
        let kept: Vec<(String, i64)> = sqlx::query_as("SELECT strategy, digest FROM decisions ORDER BY version")
            .fetch_all(&mut *db)
            .await
            .unwrap();
        let now = (decision(3, 2).strategy.to_string(), signed(decision(3, 2).digest().0));
        assert_eq!(kept, [now.clone(), now.clone(), now]);
        drop(db);
        let history = store.history(&JobId::new("j").unwrap(), u64::MAX >> 1, 10).await.unwrap();
        assert_eq!(history.len(), 2, "the damaged one stays damaged: {history:?}");
    }

    #[tokio::test]
    async fn decisions_are_fenced_and_kept() {
        let (store, _dir) = scratch().await;
        let job = JobId::new("j").unwrap();
        let run = begun(&store, Timestamp(0)).await;
        store.put_decision(&run, &new(&decision(1, 0))).await.unwrap();
        store.put_decision(&run, &new(&decision(2, 1))).await.unwrap();
        for (version, parent) in [(2, 1), (1, 0), (3, 1), (2, 2), (4, 3)] {
            let refused = store.put_decision(&run, &new(&decision(version, parent))).await;
            assert!(matches!(refused, Err(StoreError::Fenced { newest: 2, .. })), "{version} on {parent}: {refused:?}");
        }
        let history = store.history(&job, u64::MAX, 10).await.unwrap();
        let versions: Vec<u64> = history.iter().map(|(row, ..)| row.decision.version.0).collect();
        assert_eq!(versions, [2, 1]);
        assert_eq!(history[0].0.decision, decision(2, 1));
        assert_eq!((history[0].1, history[0].2.as_str()), (u64::MAX, "{\"a\":1}"));
        assert_eq!(store.decision(&job).await.unwrap().unwrap().decision.version, Version(2));
        assert_eq!(store.planner_memory(&job).await.unwrap().unwrap(), "{}");
    }

    #[tokio::test]
    async fn old_decisions_are_forgotten() {
        let (store, _dir) = scratch().await;
        let run = begun(&store, Timestamp(0)).await;
        for version in 1..=DECISIONS + 3 {
            store.put_decision(&run, &new(&decision(version, version - 1))).await.unwrap();
        }
        let history = store.history(&JobId::new("j").unwrap(), u64::MAX, 10_000).await.unwrap();
        assert_eq!(history.len() as u64, DECISIONS);
        assert_eq!(history.last().unwrap().0.decision.version, Version(4));
    }
}
