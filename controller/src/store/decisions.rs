//! Decisions, their reports, and the planner's memory: written together or not at all.

use flexcomm_domain::{Decision, JobId, Strategy, Timestamp, Version};
use sqlx::SqliteConnection;
use std::collections::BTreeSet;
use std::sync::Arc;

use super::checksum::{Sealed, intact, sealed};
use super::read_cache::Tables;
use super::statement::{row, sql};
use super::write::{Transaction, Writer};
use super::{JobRow, Result, Store, StoreError, json, stored};
use crate::limits::{DECISIONS, SNAPSHOT_BYTES, SNAPSHOT_PAGE_BYTES};

/// A stored decision.
#[derive(Debug, Clone, PartialEq)]
pub struct DecisionRow {
    /// As published.
    pub decision: Decision,
    /// First step under it, once every rank reported.
    pub applied_at_step: Option<u64>,
}

/// A stored decision with what it was made of.
#[derive(Debug, Clone, PartialEq)]
pub struct HistoryRow {
    /// The decision.
    pub row: DecisionRow,
    /// Of the planner's randomness.
    pub seed: u64,
    /// The planner's report, as it was stored.
    pub report: String,
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
    /// What it was made from, as JSON.
    pub snapshot: &'a str,
}

/// A decision's snapshot, or why there is none, as a sentence.
#[derive(Debug, Clone, PartialEq)]
pub struct SnapshotRow {
    /// Of which decision.
    pub version: Version,
    /// What is stored of it.
    pub kept: std::result::Result<Recorded, String>,
}

/// All that a decision was made from and what came of it.
#[derive(Debug, Clone, PartialEq)]
pub struct Recorded {
    /// The decision, seed and report.
    pub entry: HistoryRow,
    /// The version of flexcomm that decided.
    pub software: String,
    /// As it was stored.
    pub snapshot: String,
}

sealed! {
    /// A decision as it is stored.
    Raw of "decisions" {
        job: String,
        version: Version,
        parent: Version,
        strategy: String,
        digest: u64,
        decided_us: Timestamp,
        reason: String,
        applied_at_step: Option<u64>,
    }
}

sealed! {
    /// What the planner reported with a decision.
    Report of "decision_reports" { job: String, version: Version, seed: u64, report: String }
}

sealed! {
    /// What a decision was made from.
    Snapshot of "decision_snapshots" { job: String, version: Version, software: String, snapshot: String }
}

sealed! {
    /// What the planner remembers of a job.
    Memory of "planner_memory" { job: String, memory: String }
}

/// A decision with its report.
struct Entry {
    seed: u64,
    report: String,
    report_checksum: Option<i64>,
    decision: Raw,
}

row!(Entry { seed, report, report_checksum; decision });

impl Raw {
    fn new(d: &Decision) -> Self {
        Self {
            job: d.job.to_string(),
            version: d.version,
            parent: d.parent,
            strategy: d.plan.to_string(),
            digest: d.digest().0,
            decided_us: d.decided_at,
            reason: d.reason.clone(),
            applied_at_step: None,
            seal: None,
        }
    }

    fn name(&self) -> String {
        format!("decision {} of job {}", self.version, self.job)
    }

    fn row(self, store: &Store) -> Result<DecisionRow> {
        let operation = "read decisions";
        store.damaged.check(&self, || self.name())?;
        Ok(DecisionRow {
            decision: Decision {
                job: stored(operation, "job id", self.job.parse())?,
                version: self.version,
                parent: self.parent,
                plan: stored(operation, "strategy", self.strategy.parse())?,
                decided_at: self.decided_us,
                reason: self.reason,
            },
            applied_at_step: self.applied_at_step,
        })
    }
}

impl Entry {
    fn row(self, store: &Store) -> Result<HistoryRow> {
        let Self { seed, report, report_checksum: seal, decision } = self;
        let report = Report { job: decision.job.clone(), version: decision.version, seed, report, seal };
        store.damaged.check(&report, || format!("the report of {}", decision.name()))?;
        Ok(HistoryRow { row: decision.row(store)?, seed, report: report.report })
    }
}

/// What another job has in common with one.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Likeness {
    /// Size, momentum, backend and kind of machine.
    Same,
    /// Backend and kind of machine.
    SameMachine,
    /// The backend.
    SameBackend,
}

impl Store {
    /// The newest decision of a job; none where that is damaged, and the next one then has a higher version.
    pub async fn decision(&self, job: &JobId) -> Result<Option<DecisionRow>> {
        let text = "SELECT * FROM decisions WHERE job = $1 ORDER BY version DESC LIMIT 1";
        let read = async {
            let row: Option<Raw> = sql!("read the decision in force", text, job).fetch_optional(&self.read).await?;
            row.and_then(|row| intact(row.row(self))).transpose()
        };
        self.reads.decision.get(self.write.counters(), job.clone(), read).await
    }

    /// The newest version that a job ever had, also of a damaged decision; 0 before the first.
    pub async fn newest_version(&self, job: &JobId) -> Result<Version> {
        let read = async { sql!("read the newest version", NEWEST, job).fetch_one(&self.read).await };
        self.reads.newest_version.get(self.write.counters(), job.clone(), read).await
    }

    /// The newest `limit` decisions older than version `before`, newest first, with seed and report, without what is
    /// damaged.
    pub async fn history(&self, job: &JobId, before: u64, limit: u32) -> Result<Vec<HistoryRow>> {
        let text = sqlx::AssertSqlSafe(format!("{ENTRIES} AND d.version < $2 ORDER BY d.version DESC LIMIT $3"));
        let query = sql!("read the history", text, job, before.min(i64::MAX as u64), limit);
        let rows: Vec<Entry> = query.fetch_all(&self.read).await?;
        rows.into_iter().filter_map(|row| intact(row.row(self))).collect()
    }

    /// The snapshots of the newest decisions older than version `before`, newest first: at most `limit`, and none after
    /// [`SNAPSHOT_PAGE_BYTES`].
    pub async fn snapshots(&self, job: &JobId, before: u64, limit: u32) -> Result<Vec<SnapshotRow>> {
        let text = "SELECT version FROM decisions WHERE job = $1 AND version < $2 ORDER BY version DESC LIMIT $3";
        let query = sql!("read the snapshots", text, job, before.min(i64::MAX as u64), limit);
        let versions: Vec<Version> = query.fetch_all(&self.read).await?;
        let (mut rows, mut bytes) = (Vec::new(), 0);
        for version in versions {
            let kept = match self.recorded(job, version).await {
                Ok(recorded) => recorded.ok_or_else(|| "its snapshot is not stored".to_owned()),
                Err(StoreError::Damaged { row, .. }) => Err(format!("{row} is damaged in the database")),
                Err(error) => return Err(error),
            };
            bytes += kept.as_ref().map_or(0, |recorded| recorded.snapshot.len());
            rows.push(SnapshotRow { version, kept });
            if bytes >= SNAPSHOT_PAGE_BYTES {
                break;
            }
        }
        Ok(rows)
    }

    async fn recorded(&self, job: &JobId, version: Version) -> Result<Option<Recorded>> {
        let operation = "read a snapshot";
        let text = "SELECT * FROM decision_snapshots WHERE job = $1 AND version = $2";
        let stored: Option<Snapshot> = sql!(operation, text, job, version).fetch_optional(&self.read).await?;
        let text = format!("{ENTRIES} AND d.version = $2");
        let entry: Option<Entry> =
            sql!(operation, sqlx::AssertSqlSafe(text), job, version).fetch_optional(&self.read).await?;
        let (Some(stored), Some(entry)) = (stored, entry) else { return Ok(None) };
        self.damaged.check(&stored, || format!("the snapshot of {}", entry.decision.name()))?;
        let Snapshot { software, snapshot, .. } = stored;
        Ok(Some(Recorded { entry: entry.row(self)?, software, snapshot }))
    }

    /// The newest decision is in force once all these ranks have reported it: those that can.
    pub async fn confirm_applied(&self, job: &JobId, ranks: &BTreeSet<u32>) -> Result<()> {
        let mut tx = self.write.begin("store that a decision is in force").await?;
        let newest = newest_version(&mut tx, job).await?;
        confirm(&mut tx, job, newest, ranks).await?;
        tx.commit().await
    }

    /// What the planner remembers of a job, as JSON. A damaged row is as good as none: the next look stores it anew.
    pub async fn planner_memory(&self, job: &JobId) -> Result<Option<Arc<str>>> {
        let read = async {
            let query = sql!("read the planner's memory", "SELECT * FROM planner_memory WHERE job = $1", job);
            let row: Option<Memory> = query.fetch_optional(&self.read).await?;
            let checked = |row: Memory| {
                let name = || format!("what the planner remembers of job {job}");
                self.damaged.check(&row, name).map(|()| row.memory.into())
            };
            row.and_then(|row| intact(checked(row))).transpose()
        };
        self.reads.planner_memory.get(self.write.counters(), job.clone(), read).await
    }

    /// What it remembers of another job on the same backend, if there is one: of those that have run for a while, else of all, the newest on
    /// the same kind of machine and of the same size and momentum, else the newest on such a machine, else the newest.
    pub async fn memory_of_another(&self, job: &JobRow) -> Result<Option<(Arc<str>, Likeness)>> {
        let text = "SELECT job, (machine IS $6 OR machine IS NULL)
            * (1 + (world = $2 AND gradient_values = $3 AND momentum IS $5)) AS in_common FROM jobs WHERE job <> $1 AND backend = $4
            AND EXISTS (SELECT 1 FROM planner_memory WHERE planner_memory.job = jobs.job)
            ORDER BY EXISTS (SELECT 1 FROM intervals WHERE intervals.job = jobs.job) DESC, in_common DESC,
            created_us DESC LIMIT 1";
        let query = sql!(
            "look for a job like this one",
            text,
            job.job,
            job.world,
            job.gradient_values,
            job.backend,
            job.momentum,
            job.machine
        );
        let other: Option<(JobId, u32)> = query.fetch_optional(&self.read).await?;
        let Some((other, in_common)) = other else { return Ok(None) };
        let likeness = [Likeness::SameBackend, Likeness::SameMachine, Likeness::Same][in_common.min(2) as usize];
        Ok(self.planner_memory(&other).await?.map(|memory| (memory, likeness)))
    }

    /// Stores the planner's memory when nothing was decided.
    pub async fn put_planner_memory(&self, run: &JobRow, memory: &str) -> Result<()> {
        let mut tx = self.begin_for(run, "store the planner's memory").await?;
        tx.tables = Tables::MEMORY;
        put_memory(&mut tx, &run.job, memory).await?;
        tx.commit().await
    }

    /// Stores a decision with its report and the memory. It must be the next version, made from the newest.
    pub async fn put_decision(&self, run: &JobRow, new: &NewDecision<'_>) -> Result<()> {
        let d = new.decision;
        let mut tx = self.begin_for(run, "store a decision").await?;
        let newest = newest_version(&mut tx, &d.job).await?;
        if d.version <= newest || d.parent != newest {
            tx.roll_back().await;
            let (job, newest) = (d.job.to_string(), newest.0);
            return Err(StoreError::Fenced { job, version: d.version.0, newest });
        }
        Raw::new(d).put_new(tx.operation).execute(&mut *tx).await?;
        let (job, report) = (d.job.to_string(), new.report.to_owned());
        let report = Report { job, version: d.version, seed: new.seed, report, seal: None };
        report.put_new(tx.operation).execute(&mut *tx).await?;
        let (job, software) = (report.job, env!("CARGO_PKG_VERSION").to_owned());
        let snapshot = Snapshot { job, version: d.version, software, snapshot: new.snapshot.to_owned(), seal: None };
        snapshot.put_new(tx.operation).execute(&mut *tx).await?;
        put_memory(&mut tx, &d.job, new.memory).await?;
        let oldest = d.version.0.saturating_sub(DECISIONS);
        for text in [
            "DELETE FROM decisions WHERE job = $1 AND version <= $2",
            "DELETE FROM decision_reports WHERE job = $1 AND version <= $2",
            "DELETE FROM decision_snapshots WHERE job = $1 AND version <= $2",
            "DELETE FROM applied WHERE job = $1 AND version <= $2",
        ] {
            sql!("forget old decisions", text, d.job, oldest).execute(&mut *tx).await?;
        }
        sql!("forget old snapshots", OLD_SNAPSHOTS, d.job, SNAPSHOT_BYTES).execute(&mut *tx).await?;
        tx.commit().await
    }
}

async fn put_memory(db: &mut SqliteConnection, job: &JobId, memory: &str) -> Result<()> {
    let row = Memory { job: job.to_string(), memory: memory.to_owned(), seal: None };
    row.put("store the planner's memory").execute(db).await
}

/// Decisions of a job with their reports.
const ENTRIES: &str = "SELECT d.*, r.seed, r.report, r.seal AS report_checksum
    FROM decisions d JOIN decision_reports r ON r.job = d.job AND r.version = d.version WHERE d.job = $1";

/// A job's snapshots beyond so many bytes of newer ones and itself.
const OLD_SNAPSHOTS: &str = "DELETE FROM decision_snapshots WHERE job = $1 AND version IN (SELECT version FROM
    (SELECT version, sum(octet_length(snapshot)) OVER (ORDER BY version DESC) AS bytes
        FROM decision_snapshots WHERE job = $1) WHERE bytes > $2)";

const NEWEST: &str = "SELECT max(coalesce((SELECT max(version) FROM decisions WHERE job = $1), 0),
    coalesce((SELECT first_version FROM jobs WHERE job = $1), 0))";

/// The newest version of a job, whichever of its runs had it; 0 before the first.
pub(super) async fn newest_version(db: &mut SqliteConnection, job: &JobId) -> Result<Version> {
    sql!("read the newest version", NEWEST, job).fetch_one(db).await
}

/// Brings strategies that an earlier build wrote (`topk@0.01/allgather`) to their canonical text, and with it their digest:
/// trainers compare that. A row that is damaged stays so, and what cannot be read stays as it is.
pub(super) async fn rewrite(writer: &Writer) -> Result<()> {
    let mut tx = writer.begin("bring stored decisions to this version").await?;
    let query = sql!(tx.operation, "SELECT * FROM decisions WHERE strategy LIKE '%@%/%'");
    let rows: Vec<Raw> = query.fetch_all(&mut *tx).await?;
    for mut row in rows {
        let Ok(strategy) = row.strategy.parse::<Strategy>() else { continue };
        let seal = row.change(|row| (row.strategy, row.digest) = (strategy.to_string(), strategy.digest().0));
        row.put_changed(tx.operation, seal).execute(&mut *tx).await?;
    }
    tx.commit().await
}

/// Sets decisions made after `now` to it. How many.
pub(super) async fn shift_back(tx: &mut Transaction<'_>, now: Timestamp) -> Result<u64> {
    let query = sql!(tx.operation, "SELECT * FROM decisions WHERE decided_us > $1", now);
    let rows: Vec<Raw> = query.fetch_all(&mut **tx).await?;
    let count = rows.len() as u64;
    for mut row in rows {
        let seal = row.change(|row| row.decided_us = now);
        row.put_changed(tx.operation, seal).execute(&mut **tx).await?;
    }
    Ok(count)
}

/// The digest of a stored decision's strategy.
pub(super) async fn digest_of(db: &mut SqliteConnection, job: &JobId, version: u64) -> Result<Option<u64>> {
    let text = "SELECT digest FROM decisions WHERE job = $1 AND version = $2";
    sql!("look up a decision", text, job, version).fetch_optional(db).await
}

/// The newest version that a rank reported as applied; 0 for none.
pub(super) async fn newest_applied(db: &mut SqliteConnection, job: &JobId, rank: u32) -> Result<u64> {
    let text = "SELECT coalesce(max(version), 0) FROM applied WHERE job = $1 AND rank = $2";
    sql!("look up what a rank applied", text, job, rank).fetch_one(db).await
}

/// Stores that a rank switched; when all `world` ranks have, the decision bears its first step.
pub(super) async fn put_applied(
    db: &mut SqliteConnection,
    r: &flexcomm_wire::AppliedReport,
    world: u32,
    now: Timestamp,
) -> Result<()> {
    let text = "INSERT OR REPLACE INTO applied (job, version, rank, step, received_us) VALUES ($1, $2, $3, $4, $5)";
    sql!("store that a rank switched", text, r.job, r.version, r.rank, r.step, now).execute(&mut *db).await?;
    confirm(db, &r.job, Version(r.version), &(0..world).collect()).await
}

/// Gives a decision its first step when all these ranks have reported it.
async fn confirm(db: &mut SqliteConnection, job: &JobId, version: Version, ranks: &BTreeSet<u32>) -> Result<()> {
    let operation = "store that a decision is in force";
    let text = "SELECT * FROM decisions WHERE job = $1 AND version = $2 AND applied_at_step IS NULL AND NOT EXISTS
        (SELECT value FROM json_each($3) EXCEPT SELECT rank FROM applied WHERE job = $1 AND version = $2)";
    let query = sql!(operation, text, job, version, json(operation, ranks)?);
    let Some(mut row): Option<Raw> = query.fetch_optional(&mut *db).await? else { return Ok(()) };
    let first = "SELECT max(step) FROM applied WHERE job = $1 AND version = $2";
    let step = sql!(operation, first, job, version).fetch_one(&mut *db).await?;
    let seal = row.change(|row| row.applied_at_step = step);
    row.put_changed(operation, seal).execute(db).await
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
            plan: "topk@0.01/art-ring:star".parse().unwrap(),
            decided_at: Timestamp(version),
            reason: "because".into(),
        }
    }

    fn new(decision: &Decision) -> NewDecision<'_> {
        NewDecision { decision, seed: u64::MAX, report: "{\"a\":1}", memory: "{}", snapshot: "{\"b\":2}" }
    }

    #[tokio::test]
    async fn a_version_is_written_once_and_a_changed_row_is_written_whole() {
        use super::super::checksum::tests::{filled, holds_every_column, is_written_once};
        let (store, _dir) = scratch().await;
        filled(&store).await;
        holds_every_column::<Raw>(&store).await;
        holds_every_column::<Report>(&store).await;
        holds_every_column::<Snapshot>(&store).await;
        holds_every_column::<Memory>(&store).await;
        is_written_once::<Raw>(&store).await;
        is_written_once::<Report>(&store).await;
        is_written_once::<Snapshot>(&store).await;
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
        let query = sql!("read", "SELECT * FROM decisions ORDER BY version");
        let mut rows: Vec<Raw> = query.fetch_all(&mut *db).await.unwrap();
        for (i, row) in rows.iter_mut().enumerate() {
            let old = (text.to_owned(), flexcomm_domain::Digest::of(text).0);
            let seal = row.change(|row| (row.strategy, row.digest) = old).map(|seal| seal ^ i64::from(i == 1));
            row.put_changed("write", seal).execute(&mut *db).await.unwrap();
        }
        drop(db);
        store.close().await;
        let store = Store::open(&path).await.unwrap();
        let newest = store.decision(&JobId::new("j").unwrap()).await.unwrap().unwrap();
        assert_eq!(newest.decision, decision(3, 2));
        let mut db = store.write.connection().await;
        let query = sql!("read", "SELECT strategy, digest FROM decisions ORDER BY version");
        let kept: Vec<(String, u64)> = query.fetch_all(&mut *db).await.unwrap();
        let now = (decision(3, 2).plan.to_string(), decision(3, 2).digest().0);
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
        let versions: Vec<u64> = history.iter().map(|entry| entry.row.decision.version.0).collect();
        assert_eq!(versions, [2, 1]);
        assert_eq!(history[0].row.decision, decision(2, 1));
        assert_eq!((history[0].seed, history[0].report.as_str()), (u64::MAX, "{\"a\":1}"));
        assert_eq!(store.decision(&job).await.unwrap().unwrap().decision.version, Version(2));
        assert_eq!(store.planner_memory(&job).await.unwrap().as_deref(), Some("{}"));
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
        assert_eq!(history.last().unwrap().row.decision.version, Version(4));
    }

    /// A database whose decisions 1 to `count` have snapshots of so many bytes.
    async fn with_snapshots(count: u64, bytes: usize) -> (Store, tempfile::TempDir, JobRow) {
        let (store, dir) = scratch().await;
        let run = begun(&store, Timestamp(0)).await;
        let snapshot = format!("\"{}\"", "x".repeat(bytes - 2));
        for version in 1..=count {
            let decision = decision(version, version - 1);
            store.put_decision(&run, &NewDecision { snapshot: &snapshot, ..new(&decision) }).await.unwrap();
        }
        (store, dir, run)
    }

    fn versions(rows: &[SnapshotRow]) -> Vec<u64> {
        rows.iter().map(|row| row.version.0).collect()
    }

    #[tokio::test]
    async fn a_page_of_snapshots_ends_after_its_entries_or_bytes() {
        let (store, _dir, run) = with_snapshots(5, SNAPSHOT_PAGE_BYTES / 2).await;
        let page = async |before, limit| versions(&store.snapshots(&run.job, before, limit).await.unwrap());
        assert_eq!(page(u64::MAX, 100).await, [5, 4]);
        assert_eq!(page(4, 100).await, [3, 2]);
        assert_eq!(page(2, 100).await, [1]);
        assert_eq!((page(1, 100).await, page(4, 1).await), (vec![], vec![3]));
        let all = store.snapshots(&run.job, 2, 1).await.unwrap();
        let recorded = all[0].kept.as_ref().unwrap();
        assert_eq!((&recorded.entry.row.decision, recorded.entry.seed), (&decision(1, 0), u64::MAX));
        assert_eq!((recorded.software.as_str(), recorded.snapshot.len()), ("0.1.0", SNAPSHOT_PAGE_BYTES / 2));
    }

    #[tokio::test]
    async fn snapshots_are_forgotten_beyond_their_bytes_and_with_their_job() {
        let each = SNAPSHOT_BYTES as usize / 3;
        let (store, _dir, run) = with_snapshots(5, each).await;
        let kept = async |before| store.snapshots(&run.job, before, 1).await.unwrap().remove(0).kept;
        assert!(kept(4).await.is_ok());
        assert_eq!(kept(3).await, Err("its snapshot is not stored".to_owned()));
        assert_eq!(store.history(&run.job, u64::MAX, 10).await.unwrap().len(), 5, "decisions stay");
        // One that is larger than all that is kept leaves nothing behind, and the decision is stored all the same.
        let (sixth, large) = (decision(6, 5), "x".repeat(SNAPSHOT_BYTES as usize + 1));
        store.put_decision(&run, &NewDecision { snapshot: &large, ..new(&sixth) }).await.unwrap();
        let count = async || -> i64 {
            let query = sql!("count", "SELECT count(*) FROM decision_snapshots");
            query.fetch_one(&store.read).await.unwrap()
        };
        assert_eq!((count().await, store.decision(&run.job).await.unwrap().unwrap().decision), (0, sixth));
        let seventh = decision(7, 6);
        store.put_decision(&run, &new(&seventh)).await.unwrap();
        assert_eq!(count().await, 1);
        store.delete_job(&run.job, &[]).await.unwrap();
        assert_eq!(count().await, 0);
    }

    #[tokio::test]
    async fn damaged_snapshots_are_named_and_hide_no_other() {
        let (store, _dir, run) = with_snapshots(3, 10).await;
        for update in [
            "UPDATE decision_snapshots SET snapshot = '{}' WHERE version = 3",
            "UPDATE decision_reports SET seed = 1 WHERE version = 2",
        ] {
            store.write.execute(Tables::ALL, sql!("damage", update)).await.unwrap();
        }
        let rows = store.snapshots(&run.job, u64::MAX, 10).await.unwrap();
        let said: Vec<Option<&str>> = rows.iter().map(|row| row.kept.as_ref().err().map(String::as_str)).collect();
        let damaged = |what: &str| format!("the {what} of job j is damaged in the database");
        let expected = [damaged("snapshot of decision 3"), damaged("report of decision 2")];
        assert_eq!(said, [Some(&*expected[0]), Some(&*expected[1]), None]);
        assert_eq!((versions(&rows), store.damaged_rows()), (vec![3, 2, 1], 2));
    }
}
