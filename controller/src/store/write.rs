//! The one way to write: every change of the database is a transaction of [`Writer`].
//!
//! When the disk refuses (full, an I/O error), SQLite rolls the transaction back by itself. The ROLLBACK that sqlx sends
//! then fails, and sqlx counts the connection as inside a transaction for as long as it lives. A connection whose
//! transaction neither committed nor was rolled back on purpose is therefore closed, whatever the cause, and the pool opens a fresh
//! one.

use sqlx::pool::PoolConnection;
use sqlx::sqlite::{SqliteConnectOptions, SqliteConnection, SqlitePool};
use sqlx::{ConnectOptions, Connection, Sqlite};
use std::ops::{Deref, DerefMut};
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};

use super::Result;
use super::read_cache::{Tables, WriteCounters};
use super::statement::{Statement, failed, sql};

/// Looks in a row that must find the writer stuck: space that comes back between the two halves of a look makes one.
const STUCK_LOOKS: u32 = 3;

/// Changes a page: an update to the same value would write nothing.
const PROBE: &str = "INSERT INTO counters (name, value) VALUES ('probes', 1)
    ON CONFLICT (name) DO UPDATE SET value = value + 1";

/// The connection that writes.
#[derive(Debug)]
pub(super) struct Writer {
    pool: SqlitePool,
    options: SqliteConnectOptions,
    /// Whether the newest write committed.
    committed: AtomicBool,
    /// Whether a look found that no write commits, and none has since.
    failing: AtomicBool,
    /// Looks in a row that found it stuck.
    stuck: AtomicU32,
    counters: WriteCounters,
}

impl Writer {
    /// Writes through a pool of one connection; `options` open another.
    pub(super) fn new(pool: SqlitePool, options: SqliteConnectOptions) -> Self {
        Self {
            pool,
            options,
            committed: AtomicBool::new(true),
            failing: AtomicBool::new(false),
            stuck: AtomicU32::new(0),
            counters: WriteCounters::default(),
        }
    }

    /// Begins a transaction for an operation, which its errors name; what is not committed is rolled back.
    pub(super) async fn begin(&self, operation: &'static str) -> Result<Transaction<'_>> {
        let mut begun = self.take(operation).await?;
        sql!(operation, "BEGIN IMMEDIATE").execute(&mut *begun).await?;
        Ok(begun)
    }

    /// The same, but its first statement has to begin with `BEGIN IMMEDIATE;`: each query is a way to the database's thread and
    /// back.
    pub(super) async fn take(&self, operation: &'static str) -> Result<Transaction<'_>> {
        let connection = self.pool.acquire().await.inspect_err(|_| self.committed.store(false, Ordering::Relaxed));
        let connection = connection.map_err(failed(operation))?;
        Ok(Transaction { connection, outcome_known: false, writer: self, operation, tables: Tables::ALL })
    }

    /// Runs one statement, which is a transaction by itself; how many rows it changed. It writes no other tables than these.
    pub(super) async fn execute(&self, tables: Tables, statement: Statement) -> Result<u64> {
        let mut tx = self.take(statement.operation).await?;
        tx.tables = tables;
        let changed = statement.affected(&mut *tx).await?;
        tx.committed(|| ());
        Ok(changed)
    }

    /// How often each group of tables was written.
    pub(super) fn counters(&self) -> &WriteCounters {
        &self.counters
    }

    /// Whether the newest write committed.
    pub(super) fn commits(&self) -> bool {
        self.committed.load(Ordering::Relaxed)
    }

    /// Whether a write commits now.
    pub(super) async fn probe(&self) -> Result<()> {
        self.execute(Tables::NONE, sql!("write to the database", PROBE)).await.map(|_| ())
    }

    /// Whether a write would commit on a connection of its own.
    async fn probe_fresh(&self) -> sqlx::Result<()> {
        let mut fresh = self.options.connect().await?;
        let written = sqlx::query(PROBE).execute(&mut fresh).await;
        fresh.close().await?;
        written.map(|_| ())
    }

    /// Looks whether writing fails here that works on a fresh connection. Costs nothing while writes commit.
    pub(super) async fn look(&self) {
        let works = self.commits() || self.probe().await.is_ok();
        self.failing.fetch_or(!works, Ordering::Relaxed);
        if works || self.probe_fresh().await.is_err() {
            self.stuck.store(0, Ordering::Relaxed);
        } else {
            self.stuck.fetch_add(1, Ordering::Relaxed);
        }
    }

    /// Whether the newest looks all found it stuck.
    pub(super) fn is_stuck(&self) -> bool {
        self.stuck.load(Ordering::Relaxed) >= STUCK_LOOKS
    }

    /// Closes the connection.
    pub(super) async fn close(&self) {
        self.pool.close().await;
    }

    /// The connection outside of any transaction, so that a test can keep it or change its limits.
    #[cfg(test)]
    pub(crate) async fn connection(&self) -> PoolConnection<Sqlite> {
        self.counters.outcome_unknown();
        self.pool.acquire().await.unwrap()
    }
}

/// A write transaction. Dropped without [`Transaction::commit`] or [`Transaction::roll_back`] it is rolled back and its connection
/// is closed.
#[derive(Debug)]
pub(super) struct Transaction<'a> {
    connection: PoolConnection<Sqlite>,
    /// Whether it was committed or rolled back, and that succeeded.
    outcome_known: bool,
    writer: &'a Writer,
    /// What it is for.
    pub(super) operation: &'static str,
    /// What it writes at most.
    pub(super) tables: Tables,
}

impl Transaction<'_> {
    /// Returns when what was written is on disk.
    pub(super) async fn commit(self) -> Result<()> {
        let last = sql!(self.operation, "COMMIT");
        self.commit_by(last, || ()).await
    }

    /// The same by a last statement, which has to end with `; COMMIT`. `then` runs before anything else can be written.
    pub(super) async fn commit_by(mut self, last: Statement, then: impl FnOnce()) -> Result<()> {
        last.execute(&mut *self).await?;
        self.committed(then);
        Ok(())
    }

    fn committed(mut self, then: impl FnOnce()) {
        self.outcome_known = true;
        self.writer.counters.committed(self.tables);
        then();
        self.writer.committed.store(true, Ordering::Relaxed);
        if self.writer.failing.swap(false, Ordering::Relaxed) {
            tracing::info!("writes to the database commit again");
        }
    }

    /// Ends it without having written anything, because what it is for is refused: what was read before is still valid, and the
    /// connection goes on. Where this fails, it is as if the transaction was dropped.
    pub(super) async fn roll_back(mut self) {
        let last = sql!(self.operation, "ROLLBACK");
        self.outcome_known = last.execute(&mut *self).await.is_ok();
    }
}

impl Drop for Transaction<'_> {
    fn drop(&mut self) {
        if !self.outcome_known {
            self.writer.committed.store(false, Ordering::Relaxed);
            self.writer.counters.outcome_unknown();
            self.connection.close_on_drop();
        }
    }
}

impl Deref for Transaction<'_> {
    type Target = SqliteConnection;

    fn deref(&self) -> &SqliteConnection {
        &self.connection
    }
}

impl DerefMut for Transaction<'_> {
    fn deref_mut(&mut self) -> &mut SqliteConnection {
        &mut self.connection
    }
}

#[cfg(test)]
mod tests {
    use super::super::tests::scratch;
    use super::*;
    use sqlx::sqlite::SqlitePoolOptions;
    use std::time::Duration;

    const GROW: &str = "INSERT INTO counters (name, value) VALUES (hex(randomblob(8000)), 1)";

    async fn grow(writer: &Writer) -> Result<()> {
        writer.execute(Tables::ALL, sql!("grow", GROW)).await.map(|_| ())
    }

    #[tokio::test]
    async fn after_a_full_database_the_next_transaction_has_a_fresh_connection() {
        let (store, _dir) = scratch().await;
        let (pages,): (i64,) =
            sqlx::query_as("PRAGMA page_count").fetch_one(&mut *store.write.connection().await).await.unwrap();
        let limit = sqlx::AssertSqlSafe(format!("PRAGMA max_page_count = {}", pages + 8));
        sqlx::query(limit).execute(&mut *store.write.connection().await).await.unwrap();
        grow(&store.write).await.unwrap();
        let error = loop {
            if let Err(error) = grow(&store.write).await {
                break error.to_string();
            }
        };
        assert!(error.contains("full"), "{error}");
        // The limit went with the connection, as a full disk goes with what filled it.
        grow(&store.write).await.unwrap();
        store.ready().await.unwrap();
    }

    #[tokio::test]
    async fn what_is_not_committed_is_rolled_back() {
        let (store, _dir) = scratch().await;
        let mut tx = store.write.begin("write").await.unwrap();
        sqlx::query("INSERT INTO counters (name, value) VALUES ('x', 1)").execute(&mut *tx).await.unwrap();
        drop(tx);
        assert_eq!(store.raise("x", 0, 0).await.unwrap(), 0);
    }

    #[tokio::test]
    async fn it_is_stuck_only_while_a_fresh_connection_could_write() {
        let (store, _dir) = scratch().await;
        // Another writer of the same file, with a short timeout.
        let options = store.write.options.clone().busy_timeout(Duration::from_millis(1));
        let pool = SqlitePoolOptions::new().max_connections(1).acquire_timeout(Duration::from_millis(500));
        let writer = Writer::new(pool.connect_with(options.clone()).await.unwrap(), options);
        // Another process holds the lock: a restart would not help.
        let lock = store.write.begin("write").await.unwrap();
        for _ in 0..2 * STUCK_LOOKS {
            assert!(writer.probe().await.is_err());
            writer.look().await;
            assert!(!writer.is_stuck());
        }
        drop(lock);
        // The connection is in use for ever, without a lock: a restart helps.
        let used = writer.connection().await;
        assert!(writer.probe().await.is_err());
        for look in 0..=STUCK_LOOKS {
            assert_eq!(writer.is_stuck(), look >= STUCK_LOOKS, "after {look} looks");
            writer.look().await;
        }
        drop(used);
        writer.look().await;
        assert!(!writer.is_stuck());
    }
}
