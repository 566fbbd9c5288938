//! A checksum in each row that decisions are made of, so that a bit that flipped on disk is seen when the row is
//! read. SQLite's own check looks at the structure of its pages, not at the values in them.

use parking_lot::Mutex;
use sqlx::AssertSqlSafe;
use std::collections::BTreeSet;

use super::statement::{Statement, ToValue, Value};
use super::{Result, StoreError};

/// Damaged rows that are remembered to be counted and logged once; beyond it they are still refused.
const MOST_REMEMBERED: usize = 1024;

/// The checksum of a row: every value with its type and length, so that no two rows are the same bytes.
pub(super) fn checksum(table: &'static str, row: &[Value]) -> i64 {
    let mut hasher = blake3::Hasher::new();
    let mut part = |kind: u8, bytes: &[u8]| {
        hasher.update(&[kind]).update(&(bytes.len() as u64).to_le_bytes()).update(bytes);
    };
    part(0, table.as_bytes());
    for value in row {
        match value {
            Value::Null => part(1, &[]),
            Value::Text(text) => part(2, text.as_bytes()),
            Value::Number(number) => part(3, &number.to_le_bytes()),
            Value::Real(real) => part(4, &real.to_bits().to_le_bytes()),
        }
    }
    let mut first = [0; 8];
    hasher.finalize_xof().fill(&mut first);
    i64::from_le_bytes(first)
}

/// A stored row that bears a checksum in the column `seal`; rows of older versions bear none. Its types read back whatever
/// is stored, so that damage is found before a value is refused.
pub(super) trait Sealed {
    /// Of which table.
    const TABLE: &'static str;

    /// The other columns.
    const COLUMNS: &'static [&'static str];

    /// Their values.
    fn values(&self) -> Vec<Value>;

    /// As stored.
    fn seal(&self) -> Option<i64>;

    /// As it has to be.
    fn checksum(&self) -> i64 {
        checksum(Self::TABLE, &self.values())
    }

    /// Whether it is what was written.
    fn is_intact(&self) -> bool {
        self.seal().is_none_or(|seal| seal == self.checksum())
    }

    /// Changes values; answers the checksum to store with them. A damaged row keeps its own: it stays damaged.
    fn change(&mut self, change: impl FnOnce(&mut Self)) -> Option<i64> {
        let intact = self.is_intact();
        change(self);
        if intact { self.seal().map(|_| self.checksum()) } else { self.seal() }
    }

    /// Stores the row with this checksum by `INSERT` or a variant of it.
    fn write(&self, insert: &'static str, operation: &'static str, seal: Option<i64>) -> Statement {
        let (table, columns) = (Self::TABLE, Self::COLUMNS.join(", "));
        let mut values = self.values();
        values.push(seal.to_value());
        let places = vec!["?"; values.len()].join(", ");
        let text = format!("{insert} INTO {table} ({columns}, seal) VALUES ({places})");
        Statement::new(operation, AssertSqlSafe(text), values)
    }

    /// Stores a row that was changed, in the place of what it was. All of a table's columns are among [`Self::COLUMNS`],
    /// so no value of it is lost.
    fn put_changed(&self, operation: &'static str, seal: Option<i64>) -> Statement {
        self.write("INSERT OR REPLACE", operation, seal)
    }

    /// Stores a row with its checksum, in the place of one with the same key.
    fn put(&self, operation: &'static str) -> Statement {
        self.write("INSERT OR REPLACE", operation, Some(self.checksum()))
    }

    /// Stores a new row with its checksum; an error where there is one with the same key.
    fn put_new(&self, operation: &'static str) -> Statement {
        self.write("INSERT", operation, Some(self.checksum()))
    }
}

/// Declares a row of a table with checksums.
macro_rules! sealed {
    ($(#[$doc:meta])* $name:ident of $table:literal { $($column:ident: $type:ty),+ $(,)? }) => {
        $(#[$doc])*
        struct $name {
            $($column: $type,)+
            seal: Option<i64>,
        }

        super::statement::row!($name { $($column),+, seal });

        impl super::checksum::Sealed for $name {
            const TABLE: &'static str = $table;
            const COLUMNS: &'static [&'static str] = &[$(stringify!($column)),+];

            fn values(&self) -> Vec<super::statement::Value> {
                vec![$(super::statement::ToValue::to_value(&self.$column)),+]
            }

            fn seal(&self) -> Option<i64> {
                self.seal
            }
        }
    };
}
pub(super) use sealed;

/// Rows that were found damaged since the start.
#[derive(Debug, Default)]
pub(super) struct Damaged(Mutex<BTreeSet<String>>);

impl Damaged {
    /// Refuses a row that is not what was written, and remembers it. `name` names it within its table.
    pub(super) fn check<R: Sealed>(&self, row: &R, name: impl FnOnce() -> String) -> Result<()> {
        if row.is_intact() {
            return Ok(());
        }
        let row = name();
        let error = StoreError::Damaged { table: R::TABLE, row: row.clone() };
        let mut known = self.0.lock();
        let named = error.to_string();
        if known.len() < MOST_REMEMBERED && known.insert(named) {
            tracing::error!(row, "failed to {error}");
        }
        Err(error)
    }

    /// How many.
    pub(super) fn count(&self) -> usize {
        self.0.lock().len()
    }
}

/// What was read, or nothing where the row is damaged: for rows that can be done without.
pub(super) fn intact<T>(row: Result<T>) -> Option<Result<T>> {
    match row {
        Err(StoreError::Damaged { .. }) => None,
        row => Some(row),
    }
}

#[cfg(test)]
pub(super) mod tests {
    use super::super::statement::Row;
    use super::super::tests::{begun, scratch};
    use super::super::{NewDecision, NewTrial, Store};
    use super::*;
    use flexcomm_domain::{Decision, JobId, Strategy, Timestamp, Version};
    use flexcomm_wire::{AppliedReport, TrialReport};

    /// A row that is written in the place of another keeps every value.
    pub(in super::super) async fn holds_every_column<R: Sealed>(store: &Store) {
        let text = "SELECT name FROM pragma_table_info($1) ORDER BY name";
        let query = crate::store::statement::sql!("read a table's columns", text, R::TABLE);
        let columns: Vec<String> = query.fetch_all(&store.read).await.unwrap();
        let mut known: Vec<&str> = R::COLUMNS.iter().copied().chain(["seal"]).collect();
        known.sort_unstable();
        assert_eq!(columns, known, "{}", R::TABLE);
    }

    /// An error, and the row that was there stays as it was.
    pub(in super::super) async fn is_written_once<R: Sealed + Row + Send + Unpin>(store: &Store) {
        let mut db = store.write.connection().await;
        let read = format!("SELECT * FROM {}", R::TABLE);
        let rows: Vec<R> =
            Statement::new("read", AssertSqlSafe(read.clone()), vec![]).fetch_all(&mut *db).await.unwrap();
        let row = rows.first().unwrap();
        let error = row.put_new("write twice").execute(&mut *db).await.unwrap_err().to_string();
        assert!(error.starts_with("write twice: ") && error.contains("UNIQUE"), "{error}");
        let kept: Vec<R> = Statement::new("read", AssertSqlSafe(read), vec![]).fetch_all(&mut *db).await.unwrap();
        assert!(kept.iter().map(Sealed::values).eq(rows.iter().map(Sealed::values)));
    }

    #[test]
    fn every_value_its_place_its_type_and_its_table_count() {
        let checksums = [
            checksum("t", &["a".to_value(), "b".to_value()]),
            checksum("t", &["b".to_value(), "a".to_value()]),
            checksum("t", &["ab".to_value(), "".to_value()]),
            checksum("t", &["ab".to_value()]),
            checksum("u", &["ab".to_value()]),
            checksum("t", &["ab".to_value(), Value::Null]),
            checksum("t", &[Value::Number(1)]),
            checksum("t", &[f64::from_bits(1).to_value()]),
            checksum("t", &[0.0.to_value()]),
            checksum("t", &[(-0.0).to_value()]),
        ];
        let different: BTreeSet<i64> = checksums.into_iter().collect();
        assert_eq!(different.len(), checksums.len());
    }

    pub(in super::super) async fn filled(store: &Store) {
        let decision = Decision {
            job: job(),
            version: Version(1),
            parent: Version(0),
            plan: "topk@0.01/art-ring:star".parse().unwrap(),
            decided_at: Timestamp(5),
            reason: "because".into(),
        };
        let new =
            NewDecision { decision: &decision, seed: 7, report: "{\"a\":1}", memory: "{}", snapshot: "{\"b\":2}" };
        let run = begun(store, Timestamp(0)).await;
        store.put_decision(&run, &new).await.unwrap();
        let trial = NewTrial { candidates: &[Strategy::DENSE_RING], iterations: 10, budget_ms: 9, why: "to see" };
        store.ask_trial(&run, &trial, Timestamp(6)).await.unwrap().unwrap();
        assert!(store.end_trial(&job(), 1, Some("no time"), Timestamp(7)).await.unwrap());
        let report = TrialReport {
            job: job(),
            rank: 0,
            id: 1,
            outcomes: vec![],
            aborted: Some("no time".into()),
            cost_us: 1.5,
            bytes: None,
            cpu_us: None,
            shadow_us: None,
        };
        let mut db = store.write.connection().await;
        super::super::trials::put_report(&mut db, &report, Timestamp(8)).await.unwrap();
        let applied = AppliedReport { job: job(), rank: 0, version: 1, digest: decision.digest().0, step: 3 };
        super::super::decisions::put_applied(&mut db, &applied, 1, Timestamp(9)).await.unwrap();
        drop(db);
    }

    fn job() -> JobId {
        JobId::new("j").unwrap()
    }

    /// Whether the store gives a table's row.
    async fn read(dir: &std::path::Path, table: &str) -> std::result::Result<bool, String> {
        let store = Store::open(&dir.join("test.db")).await.unwrap();
        let found = match table {
            "decisions" => store.decision(&job()).await.map(|row| row.is_some()),
            "decision_reports" => store.history(&job(), u64::MAX, 9).await.map(|rows| !rows.is_empty()),
            "decision_snapshots" => store.snapshots(&job(), u64::MAX, 9).await.map(|rows| rows[0].kept.is_ok()),
            "trials" => store.trials(&job(), 9).await.map(|rows| !rows.is_empty()),
            "trial_reports" => store.trial_reports(&job(), 9).await.map(|rows| !rows.is_empty()),
            _ => store.planner_memory(&job()).await.map(|row| row.is_some()),
        };
        let damaged = store.damaged_rows();
        store.close().await;
        assert_eq!(damaged == 0, matches!(found, Ok(true)), "{table}: {found:?}, {damaged} counted");
        found.map_err(|error| error.to_string())
    }

    /// Every value of every table with checksums: one that is not what was written is never used.
    #[tokio::test]
    async fn no_changed_value_is_used() {
        let (store, dir) = scratch().await;
        filled(&store).await;
        store.close().await;
        let changes = [
            (
                "decisions",
                "parent = 1;strategy = 'topk@0.02/art-ring:star';digest = digest + 1;decided_us = 4;reason = 'Because';applied_at_step = 4;applied_at_step = NULL;seal = seal + 1",
            ),
            ("decision_reports", "seed = 8;report = '{\"a\":3}';seal = seal + 1"),
            ("decision_snapshots", "software = '0';snapshot = '{\"b\":3}';seal = seal + 1"),
            (
                "trials",
                "asked_us = 5;why = 'to sea';state = 'done';candidates = '[]';iterations = 11;budget_ms = 8;ended_us = 6;aborted = NULL;seal = seal + 1",
            ),
            (
                "trial_reports",
                "rank = 1;outcomes = '[ ]';aborted = 'no tame';cost_us = 1.25;received_us = 7;seal = seal + 1",
            ),
            ("planner_memory", "memory = '{ }';seal = seal + 1"),
        ];
        for (table, sets) in changes {
            assert_eq!(read(dir.path(), table).await, Ok(true), "{table} as written");
            for set in sets.split(';') {
                let file = dir.path().join("test.db");
                let whole = std::fs::read(&file).unwrap();
                let store = Store::open(&file).await.unwrap();
                let update = sqlx::AssertSqlSafe(format!("UPDATE {table} SET {set}"));
                sqlx::query(update).execute(&mut *store.write.connection().await).await.unwrap();
                store.close().await;
                let found = read(dir.path(), table).await;
                assert_eq!(found, Ok(false), "{table} with {set}");
                std::fs::write(&file, whole).unwrap();
            }
        }
    }

    /// The newest decision keeps its version, so that the next one has a higher one; the others are still there.
    #[tokio::test]
    async fn a_damaged_decision_counts_as_none_and_hides_no_other() {
        let (store, _dir) = scratch().await;
        filled(&store).await;
        let decision = |version: u64| Decision {
            job: job(),
            version: Version(version),
            parent: Version(version - 1),
            plan: flexcomm_domain::Plan::DENSE_RING,
            decided_at: Timestamp(version),
            reason: "because".into(),
        };
        let run = store.job(&job()).await.unwrap().unwrap();
        let put = async |decision: Decision| {
            let new = NewDecision { decision: &decision, seed: 7, report: "{}", memory: "{}", snapshot: "{}" };
            store.put_decision(&run, &new).await.unwrap();
        };
        put(decision(2)).await;
        let update = "UPDATE decisions SET reason = 'Because' WHERE version = 2";
        sqlx::query(update).execute(&mut *store.write.connection().await).await.unwrap();
        let versions = async || {
            let rows = store.history(&job(), u64::MAX, 9).await.unwrap();
            rows.iter().map(|entry| entry.row.decision.version.0).collect::<Vec<_>>()
        };
        assert_eq!(store.decision(&job()).await.unwrap(), None);
        assert_eq!((versions().await, store.newest_version(&job()).await.unwrap()), (vec![1], Version(2)));
        put(decision(3)).await;
        assert_eq!(store.decision(&job()).await.unwrap().unwrap().decision, decision(3));
        assert_eq!((versions().await, store.damaged_rows()), (vec![3, 1], 1));
    }

    /// Rows of before there were checksums.
    #[tokio::test]
    async fn rows_without_a_checksum_are_read() {
        let (store, dir) = scratch().await;
        filled(&store).await;
        for table in ["decisions", "decision_reports", "trials", "trial_reports", "planner_memory"] {
            let update = sqlx::AssertSqlSafe(format!("UPDATE {table} SET seal = NULL"));
            sqlx::query(update).execute(&mut *store.write.connection().await).await.unwrap();
        }
        store.close().await;
        for table in ["decisions", "decision_reports", "trials", "trial_reports", "planner_memory"] {
            assert_eq!(read(dir.path(), table).await, Ok(true), "{table}");
        }
    }
}
