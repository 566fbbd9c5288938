//! Opens the file, or says what is wrong with it and what helps. Nothing is repaired or deleted here.

use sqlx::sqlite::{SqliteConnectOptions, SqliteJournalMode, SqlitePool, SqlitePoolOptions, SqliteSynchronous};
use std::path::Path;

use super::write::Writer;
use super::{READERS, Result, StoreError, TIMEOUT};

/// What sqlite calls the causes that a user can do something about (sqlite.org/rescode.html).
const READ_ONLY: i32 = 8;
const CORRUPT: i32 = 11;
const FULL: i32 = 13;
const CANNOT_OPEN: i32 = 14;
const NOT_A_DATABASE: i32 = 26;

/// What sqlx calls a database in memory; each that is opened by it is another one.
const MEMORY: &str = "sqlite::memory:";

/// One connection that writes and a few that read.
pub(super) async fn open(path: &Path) -> Result<(Writer, SqlitePool)> {
    let options = SqliteConnectOptions::new()
        .filename(path)
        .create_if_missing(true)
        .journal_mode(SqliteJournalMode::Wal)
        .synchronous(SqliteSynchronous::Full)
        .foreign_keys(true)
        .busy_timeout(TIMEOUT);
    let reading = options.clone().read_only(true);
    connect(path, options, reading).await
}

/// The same, to a database that no other process sees and that is gone with its connections.
pub(super) async fn in_memory() -> Result<(Writer, SqlitePool)> {
    let path = Path::new(MEMORY);
    let options = MEMORY.parse::<SqliteConnectOptions>().map_err(|e| explain(path, &e))?;
    connect(path, options.clone(), options).await
}

async fn connect(
    path: &Path,
    options: SqliteConnectOptions,
    reading: SqliteConnectOptions,
) -> Result<(Writer, SqlitePool)> {
    let unusable = |error: &sqlx::Error| explain(path, error);
    // A connection to a file does not age. One that reads stays open, so that the log and its index stay as well: on a
    // full disk they could not be made again.
    let pool = |connections| {
        let pool = SqlitePoolOptions::new().max_connections(connections).acquire_timeout(TIMEOUT);
        // A connection is asked whether it works when it comes back to the pool: asking again before each use is one more
        // round trip to its thread for each statement.
        pool.idle_timeout(None).max_lifetime(None).test_before_acquire(false)
    };
    let write = pool(1).connect_with(options.clone()).await.map_err(|e| unusable(&e))?;
    check(path, &write).await?;
    sqlx::migrate!("../migrations").run(&write).await.map_err(|e| explain_migration(path, e))?;
    let read = pool(READERS).connect_with(reading).await.map_err(|e| unusable(&e))?;
    Ok((Writer::new(write, options), read))
}

/// Before a lock is put beside it.
pub(super) fn refuse_folder(path: &Path) -> Result<()> {
    let remedy = || "name the file in it (--db FILE)".to_owned();
    if path.is_dir() { Err(unusable(path, "it is a folder".into(), remedy())) } else { Ok(()) }
}

/// Looks at every page: damage in the midst of a file would otherwise show up days later, in a decision.
async fn check(path: &Path, pool: &SqlitePool) -> Result<()> {
    let found: std::result::Result<String, sqlx::Error> =
        sqlx::query_scalar("PRAGMA quick_check(1)").fetch_one(pool).await;
    match found {
        Ok(found) if found == "ok" => Ok(()),
        Ok(found) => Err(unusable(path, format!("it is damaged ({})", found.replace('\n', " ")), damaged(path))),
        Err(error) => Err(explain(path, &error)),
    }
}

fn unusable(path: &Path, why: String, remedy: String) -> StoreError {
    StoreError::Unusable { db: path.to_owned(), why, remedy }
}

/// Cause and remedy of what sqlite answered.
fn explain(path: &Path, error: &sqlx::Error) -> StoreError {
    let (code, said) = match error {
        sqlx::Error::Database(inner) => {
            (inner.code().and_then(|code| code.parse::<i32>().ok()), inner.message().to_owned())
        }
        _ => (None, error.to_string()),
    };
    // The low byte is the cause, the rest says more about it.
    match code.map(|code| code & 0xff) {
        Some(NOT_A_DATABASE) => unusable(path, "it is no SQLite database, or damaged".into(), damaged(path)),
        Some(CORRUPT) => unusable(path, format!("it is damaged ({said})"), damaged(path)),
        Some(CANNOT_OPEN | READ_ONLY) => {
            let remedy = "this user must be able to write it and the folder that it is in";
            unusable(path, said, remedy.into())
        }
        Some(FULL) => unusable(path, said, "make room on its disk".into()),
        _ => unusable(path, said, "nothing in it was changed".into()),
    }
}

/// What helps against damage. What is lost with the file is what the controller learned; agents and jobs go on.
fn damaged(path: &Path) -> String {
    let path = path.display();
    format!(
        "nothing in it was changed; restore a backup, or move it aside (mv {path} {path}.damaged, likewise {path}-wal \
         and {path}-shm where they are) and start again: agents and jobs come back by themselves, past decisions and \
         what trials found do not; `sqlite3 {path}.damaged .recover` saves what can be read"
    )
}

fn explain_migration(path: &Path, error: sqlx::migrate::MigrateError) -> StoreError {
    use sqlx::migrate::MigrateError;
    match &error {
        MigrateError::Execute(inner) | MigrateError::ExecuteMigration(inner, _) => explain(path, inner),
        MigrateError::VersionMissing(_) | MigrateError::VersionMismatch(_) | MigrateError::VersionTooNew(..) => {
            let why = format!("another version of flexcomm made it ({error})");
            unusable(path, why, "start that version, or give this one a file of its own (--db FILE)".into())
        }
        _ => unusable(path, format!("it cannot be brought to this version ({error})"), "nothing was deleted".into()),
    }
}

#[cfg(test)]
mod tests {
    use super::super::Store;

    async fn refused(path: &std::path::Path) -> String {
        let before = std::fs::read(path).ok();
        let error = Store::open(path).await.unwrap_err().to_string();
        assert_eq!(std::fs::read(path).ok(), before, "the file was touched");
        assert!(error.starts_with(&format!("open the database {}: ", path.display())), "{error}");
        error
    }

    /// A database with a few hundred rows, closed.
    async fn filled(path: &std::path::Path) {
        let store = Store::open(path).await.unwrap();
        for i in 0..400 {
            let insert = sqlx::query("INSERT INTO counters (name, value) VALUES ($1, $2)");
            insert.bind(format!("{i:0>100}")).bind(i).execute(&mut *store.write.connection().await).await.unwrap();
        }
        store.close().await;
    }

    #[tokio::test]
    async fn damage_is_named_with_file_cause_and_remedy() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("x.db");
        std::fs::write(&path, "this is not a database, it only has its name".repeat(100)).unwrap();
        let error = refused(&path).await;
        assert!(
            error.contains("no SQLite database") && error.contains("x.db-wal") && error.contains(".recover"),
            "{error}"
        );
        // The header is whole, pages behind it are not.
        let path = folder.path().join("y.db");
        filled(&path).await;
        let mut bytes = std::fs::read(&path).unwrap();
        let middle = bytes.len() / 2;
        bytes[middle..].fill(0x5a);
        std::fs::write(&path, bytes).unwrap();
        let error = refused(&path).await;
        assert!(error.contains("it is damaged") && error.contains("restore a backup"), "{error}");
    }

    /// What a release before checksums and runs stored is read, and goes on.
    #[tokio::test]
    async fn an_old_database_is_brought_to_this_version() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("old.db");
        let options = sqlx::sqlite::SqliteConnectOptions::new().filename(&path).create_if_missing(true);
        let pool = sqlx::SqlitePool::connect_with(options).await.unwrap();
        let mut old = sqlx::migrate!("../migrations");
        old.migrations = old.iter().filter(|migration| migration.version < 9).cloned().collect();
        assert!(old.iter().count() >= 7);
        old.run(&pool).await.unwrap();
        let rows = "INSERT INTO jobs VALUES ('j', 1, 10, 'x', 1, NULL, NULL, NULL);
            INSERT INTO ranks VALUES ('j', 0, 'a', '[]', '[]', 1, NULL);
            INSERT INTO decisions VALUES ('j', 3, 0, 'none@1/dense-ring', 1, 5, 'because', NULL);
            INSERT INTO trials VALUES ('j', 4, 6, 'to see', 'pending', '[]', 1, 1, NULL, NULL)";
        sqlx::raw_sql(rows).execute(&pool).await.unwrap();
        pool.close().await;
        let store = Store::open(&path).await.unwrap();
        let job = "j".parse().unwrap();
        assert_eq!((store.jobs().await.unwrap().len(), store.ranks(&job).await.unwrap().len()), (1, 1));
        let decision = store.decision(&job).await.unwrap().unwrap();
        assert_eq!((decision.decision.version.0, decision.applied_at_step), (3, None));
        assert!(store.end_trial(&job, 4, None, flexcomm_domain::Timestamp(7)).await.unwrap());
        let trials = store.trials(&job, 9).await.unwrap();
        assert_eq!((trials.len(), trials[0].state.as_str(), store.damaged_rows()), (1, "done", 0));
        assert!(store.runs(&job).await.unwrap().is_empty());
        store.close().await;
    }

    #[tokio::test]
    async fn a_newer_version_and_a_folder_are_named() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("new.db");
        let store = Store::open(&path).await.unwrap();
        let newer = "INSERT INTO _sqlx_migrations (version, description, success, checksum, execution_time)
                     VALUES (99999999999999, 'later', 1, x'00', 0)";
        sqlx::query(newer).execute(&mut *store.write.connection().await).await.unwrap();
        store.close().await;
        let error = Store::open(&path).await.unwrap_err().to_string();
        assert!(error.contains("another version of flexcomm") && error.contains("--db"), "{error}");
        let error = Store::open(folder.path()).await.unwrap_err().to_string();
        assert!(error.contains("it is a folder; name the file in it"), "{error}");
        assert!(!folder.path().with_extension("lock").exists());
    }
}
