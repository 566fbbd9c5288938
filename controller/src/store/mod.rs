//! What must survive. The only folder with SQL in it.
//!
//! SQLite in WAL mode with `synchronous = FULL`: what a commit returned for is on disk, also when power
//! fails. One connection writes (`write`), a few read. Every method is one transaction.

mod checksum;
mod decisions;
mod experiments;
mod ingest;
mod intervals;
mod jobs;
mod links;
mod lock;
mod nodes;
mod open;
mod private;
mod read_cache;
mod scenario;
mod shift;
mod statement;
mod steps;
mod trials;
mod trim;
mod write;

pub use decisions::{DecisionRow, HistoryRow, Likeness, NewDecision, Recorded, SnapshotRow};
pub use experiments::ExperimentRow;
pub use ingest::{Incoming, Ingest, News};
pub use intervals::{IntervalRow, OpenInterval};
#[cfg(test)]
pub use jobs::RankCodec;
pub use jobs::{Deletion, End, JobRow, RankRow, RunRow};
pub use links::{LinkPoint, LinkRow, TestRow};
pub use nodes::{NodeRow, Registration};
use steps::LossPoints;
pub use steps::StepRow;
pub use trials::{NewTrial, TrialReportRow, TrialRow};

use crate::measure::{RecentSteps, StepSpan};
use flexcomm_domain::{JobId, Timestamp, Version};
use lock::Lock;
use parking_lot::Mutex;
use read_cache::{ReadCache, Tables};
use sqlx::sqlite::SqlitePool;
use statement::sql;
use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};
use write::Writer;

/// Connections that read: the page, the API and the loop at once.
const READERS: u32 = 4;

/// Longest wait for a connection or a lock: shorter than a request's limit, so that the client hears why.
const TIMEOUT: Duration = Duration::from_secs(5);

/// For so long it is known whether the store is ready.
const READY_FOR: Duration = Duration::from_secs(1);

/// What a look at the store found, and when.
type Look = (Instant, std::result::Result<(), Arc<StoreError>>);

/// Reads that are cached.
#[derive(Debug)]
struct Reads {
    links: ReadCache<(), Arc<Vec<LinkRow>>>,
    link_tests: ReadCache<(), Arc<Vec<TestRow>>>,
    nodes: ReadCache<(), Arc<Vec<NodeRow>>>,
    running_jobs: ReadCache<(), Arc<Vec<JobRow>>>,
    ranks: ReadCache<JobId, Arc<Vec<RankRow>>>,
    step_spans: ReadCache<JobId, Arc<BTreeMap<u32, StepSpan>>>,
    recent_steps: ReadCache<(JobId, BTreeSet<u32>), Arc<RecentSteps>>,
    losses: ReadCache<JobId, LossPoints>,
    decision: ReadCache<JobId, Option<DecisionRow>>,
    newest_version: ReadCache<JobId, Version>,
    trials: ReadCache<(JobId, u32), Arc<Vec<TrialRow>>>,
    trial_reports: ReadCache<(JobId, u32), Arc<Vec<TrialReportRow>>>,
    planner_memory: ReadCache<JobId, Option<Arc<str>>>,
    open_interval: ReadCache<JobId, Option<OpenInterval>>,
}

impl Default for Reads {
    fn default() -> Self {
        let rest = Tables::REST;
        Self {
            links: ReadCache::of(rest.and(Tables::LINKS)),
            link_tests: ReadCache::of(rest.and(Tables::TESTS)),
            nodes: ReadCache::of(rest),
            running_jobs: ReadCache::of(rest.and(Tables::STEPS)),
            ranks: ReadCache::of(rest),
            step_spans: ReadCache::of(rest.and(Tables::STEPS)),
            recent_steps: ReadCache::of(rest.and(Tables::STEPS)),
            losses: ReadCache::of(rest.and(Tables::STEPS)),
            decision: ReadCache::of(rest),
            newest_version: ReadCache::of(rest),
            trials: ReadCache::of(rest),
            trial_reports: ReadCache::of(rest),
            planner_memory: ReadCache::of(rest.and(Tables::MEMORY)),
            open_interval: ReadCache::of(rest.and(Tables::MEMORY)),
        }
    }
}

/// Why the store did not do something. Completes "failed to ...".
#[derive(Debug, thiserror::Error)]
pub enum StoreError {
    /// The database refused; nothing was changed.
    #[error("{operation}: {source}")]
    Sql {
        /// What was tried.
        operation: &'static str,
        /// What it said.
        source: sqlx::Error,
    },
    /// Another controller works with the same file.
    #[error(
        "open the database {db}: the controller with process {pid} works with it; stop that one (kill {pid}), or give \
         this one a file of its own (--db FILE)"
    )]
    Held {
        /// Which file.
        db: PathBuf,
        /// Of the other controller.
        pid: String,
    },
    /// The lock beside the database cannot be made.
    #[error("lock {path}: {source}; the database's folder must be there and writable (--db FILE)")]
    Lock {
        /// The lock's file.
        path: PathBuf,
        /// Why.
        source: std::io::Error,
    },
    /// The file is damaged, of another version, or out of reach.
    #[error("open the database {db}: {why}; {remedy}")]
    Unusable {
        /// Which file.
        db: PathBuf,
        /// What is wrong with it.
        why: String,
        /// What helps.
        remedy: String,
    },
    /// Something stored does not read back.
    #[error("{operation}: stored {what} is not valid: {why}")]
    Stored {
        /// What was tried.
        operation: &'static str,
        /// Which value.
        what: String,
        /// Why it is refused.
        why: String,
    },
    /// A row is not what was written: its checksum does not fit.
    #[error(
        "read {row} from the table {table}: it is damaged, its checksum does not fit what is stored, and it is not used; \
         restore a backup of the database, or stop the controller, move the database aside and start again: agents and \
         jobs come back by themselves, past decisions and what trials found do not"
    )]
    Damaged {
        /// Which table.
        table: &'static str,
        /// Which row, in words.
        row: String,
    },
    /// What was worked out for a run whose job's name another run has since, or nobody.
    #[error("{operation}: job {job} is no longer the run that this is for")]
    Replaced {
        /// What was tried.
        operation: &'static str,
        /// Which job.
        job: String,
    },
    /// A decision whose version is not the next, or whose parent is not the newest: another writer was first.
    #[error("store decision {version} of job {job}: the newest is {newest}")]
    Fenced {
        /// Which job.
        job: String,
        /// As offered.
        version: u64,
        /// As stored.
        newest: u64,
    },
}

/// Shorthand.
pub type Result<T> = std::result::Result<T, StoreError>;

/// The database.
#[derive(Debug)]
pub struct Store {
    write: Writer,
    read: SqlitePool,
    damaged: checksum::Damaged,
    /// Steps as they were read last.
    windows: Mutex<BTreeMap<JobId, steps::Window>>,
    reads: Reads,
    looked: tokio::sync::Mutex<Option<Look>>,
    lock: Mutex<Option<Lock>>,
}

fn stored<T, E: std::fmt::Display>(
    operation: &'static str,
    what: &'static str,
    value: std::result::Result<T, E>,
) -> Result<T> {
    value.map_err(|e| StoreError::Stored { operation, what: what.to_owned(), why: e.to_string() })
}

/// Writes a value of ours as JSON; such values hold nothing that JSON cannot say.
fn json<T: serde::Serialize>(operation: &'static str, value: &T) -> Result<String> {
    stored(operation, "value", serde_json::to_string(value))
}

impl Store {
    /// Opens the file, makes it when absent, brings it to this version. No other process may have it open.
    pub async fn open(path: &Path) -> Result<Self> {
        open::refuse_folder(path)?;
        let lock = Lock::take(path)?;
        private::prepare(path);
        let (write, read) = open::open(path).await?;
        decisions::rewrite(&write).await?;
        Ok(Self::new(write, read, Some(lock)))
    }

    /// A store that is gone with this process, and leaves no file.
    pub async fn in_memory() -> Result<Self> {
        let (write, read) = open::in_memory().await?;
        Ok(Self::new(write, read, None))
    }

    fn new(write: Writer, read: SqlitePool, lock: Option<Lock>) -> Self {
        let (damaged, windows, reads, looked) = Default::default();
        Self { write, read, damaged, windows, reads, looked, lock: Mutex::new(lock) }
    }

    /// Closes the file in an orderly way.
    pub async fn close(&self) {
        self.read.close().await;
        self.write.close().await;
        drop(self.lock.lock().take());
    }

    /// Whether reading and writing works now, by a look that is at most [`READY_FOR`] old: whoever may ask needs no token, and
    /// a look commits a write of one page.
    pub async fn ready(&self) -> std::result::Result<(), Arc<StoreError>> {
        let mut last = self.looked.lock().await;
        // A write that failed since is news.
        let holds = |look: &&Look| look.0.elapsed() < READY_FOR && (look.1.is_err() || self.write.commits());
        if let Some((_, found)) = last.as_ref().filter(holds) {
            return found.clone();
        }
        let found = self.look_now().await.map_err(Arc::new);
        *last = Some((Instant::now(), found.clone()));
        found
    }

    async fn look_now(&self) -> Result<()> {
        self.write.probe().await?;
        sql!("read the database", "SELECT 1 FROM counters").execute(&self.read).await
    }

    /// Looks whether the connection that writes is stuck; costs nothing while writes succeed.
    pub async fn look(&self) {
        self.write.look().await;
    }

    /// Whether the newest looks found that writing fails although a fresh connection could write: a restart helps.
    pub fn is_stuck(&self) -> bool {
        self.write.is_stuck()
    }

    /// Rows that were found damaged since the start; none of them is used.
    pub fn damaged_rows(&self) -> usize {
        self.damaged.count()
    }

    /// Raises a counter by `by`, and at least to `floor`; returns its new value.
    pub async fn raise(&self, name: &'static str, by: u64, floor: u64) -> Result<u64> {
        let mut tx = self.write.begin("raise a counter").await?;
        let text = "INSERT INTO counters (name, value) VALUES ($1, max($2, $3))
            ON CONFLICT (name) DO UPDATE SET value = max(value + $2, $3) RETURNING value";
        let value = sql!(tx.operation, text, name, by, floor).fetch_one(&mut *tx).await?;
        tx.commit().await?;
        Ok(value)
    }

    /// The newest time that anything stored bears: time may not go back behind it.
    pub async fn newest_time(&self) -> Result<Timestamp> {
        let text = "SELECT max(t) FROM (
            SELECT max(decided_us) AS t FROM decisions UNION ALL SELECT max(received_us) FROM links
            UNION ALL SELECT max(asked_us) FROM trials UNION ALL SELECT max(registered_us) FROM nodes
            UNION ALL SELECT max(at_us) FROM intervals UNION ALL SELECT max(seen_us) FROM ranks
            UNION ALL SELECT max(received_us) FROM applied UNION ALL SELECT max(set_us) FROM scenario)";
        let newest: Option<Timestamp> = sql!("read the newest time", text).fetch_one(&self.read).await?;
        Ok(newest.unwrap_or_default())
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;

    /// A store in a folder that lives as long as the test.
    pub(crate) async fn scratch() -> (Store, tempfile::TempDir) {
        let dir = tempfile::tempdir().unwrap();
        let store = Store::open(&dir.path().join("test.db")).await.unwrap();
        (store, dir)
    }

    /// An agent's request to register.
    pub(crate) fn register(name: &str) -> flexcomm_wire::Register {
        flexcomm_wire::Register {
            protocol: flexcomm_wire::PROTOCOL,
            node: name.parse().unwrap(),
            instance: 1,
            previous: vec![],
            addr: [10, 0, 0, 1].into(),
            echo_port: 1,
            throughput_port: 2,
            may_shape: false,
            software: String::new(),
        }
    }

    /// The hello of the only rank of a job.
    pub(crate) fn alone(job: flexcomm_domain::JobId) -> flexcomm_wire::Hello {
        flexcomm_wire::Hello::new(job, (0, 1), 1, "x")
    }

    /// Job `j` of one rank, begun now.
    pub(crate) async fn begun(store: &Store, now: Timestamp) -> JobRow {
        let job: flexcomm_domain::JobId = "j".parse().unwrap();
        let mut tx = store.write.begin("begin a job").await.unwrap();
        jobs::begin(&mut tx, &alone(job.clone()), now).await.unwrap();
        tx.commit().await.unwrap();
        store.job(&job).await.unwrap().unwrap()
    }

    #[tokio::test]
    async fn counters_survive_and_grow() {
        let (store, dir) = scratch().await;
        assert_eq!(store.raise("orders_epoch", 5, 0).await.unwrap(), 5);
        assert_eq!(store.raise("orders_epoch", 2, 0).await.unwrap(), 7);
        store.ready().await.unwrap();
        store.close().await;
        let again = Store::open(&dir.path().join("test.db")).await.unwrap();
        assert_eq!(again.raise("orders_epoch", 1, 100).await.unwrap(), 100);
        assert_eq!(again.newest_time().await.unwrap(), Timestamp(0));
    }

    /// Anybody may ask, also for the metrics.
    #[tokio::test]
    async fn many_who_ask_whether_it_is_ready_cost_one_write() {
        let (store, _dir) = scratch().await;
        let all = futures_util::future::join_all((0..500).map(|_| store.ready())).await;
        assert!(all.iter().all(|found| found.is_ok()));
        let (probes,): (i64,) =
            sqlx::query_as("SELECT value FROM counters WHERE name = 'probes'").fetch_one(&store.read).await.unwrap();
        assert!(probes <= 60, "{probes} writes, one a second");
    }

    #[tokio::test]
    async fn a_closed_database_is_an_error_and_not_ready() {
        let (store, _dir) = scratch().await;
        store.close().await;
        assert!(store.ready().await.is_err());
    }
}
