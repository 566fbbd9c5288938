//! One controller per database: a lock on a file beside it, held for the process's life. The kernel lets go of it
//! with the process, SIGKILL included.

use std::fs::{File, TryLockError};
use std::io::{Read, Seek, Write};
use std::path::{Path, PathBuf};

use super::{StoreError, private};

/// Holds the lock until it is dropped. The file stays; it says who holds the lock, or held it last.
#[derive(Debug)]
pub(super) struct Lock(File);

impl Lock {
    /// Takes the lock of a database; refused with the holder's process id while another has it.
    pub(super) fn take(db: &Path) -> Result<Self, StoreError> {
        let path = beside(db);
        let failed = |source| StoreError::Lock { path: path.clone(), source };
        let mut file = private::open(&path).map_err(failed)?;
        match file.try_lock() {
            Ok(()) => {}
            Err(TryLockError::WouldBlock) => {
                return Err(StoreError::Held { db: db.to_owned(), pid: holder(&mut file) });
            }
            Err(TryLockError::Error(source)) => return Err(failed(source)),
        }
        let note = file.set_len(0).and_then(|()| file.rewind()).and_then(|()| writeln!(file, "{}", std::process::id()));
        note.map_err(failed)?;
        Ok(Self(file))
    }
}

/// By name: a child that another thread has just forked holds a copy of the descriptor until it is its own program.
impl Drop for Lock {
    fn drop(&mut self) {
        let _ = self.0.unlock();
    }
}

/// The same file for every name of a database.
fn beside(db: &Path) -> PathBuf {
    let real = std::fs::canonicalize(db).unwrap_or_else(|_| db.to_owned());
    let mut name = real.into_os_string();
    name.push(".lock");
    name.into()
}

/// As the holder wrote it; it may be about to.
fn holder(file: &mut File) -> String {
    let mut text = String::new();
    let read = Read::take(file, 20).read_to_string(&mut text);
    match text.trim() {
        pid if read.is_ok() && !pid.is_empty() && pid.bytes().all(|b| b.is_ascii_digit()) => pid.to_owned(),
        _ => "unknown".to_owned(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_database_has_one_holder_under_all_its_names() {
        let dir = tempfile::tempdir().unwrap();
        let (db, link) = (dir.path().join("a.db"), dir.path().join("b.db"));
        std::fs::write(&db, "").unwrap();
        std::os::unix::fs::symlink(&db, &link).unwrap();
        let lock = Lock::take(&db).unwrap();
        let refused = Lock::take(&link).unwrap_err().to_string();
        assert!(refused.contains(&format!("process {}", std::process::id())), "{refused}");
        assert!(refused.contains("b.db") && refused.contains("--db"), "{refused}");
        drop(lock);
        Lock::take(&link).unwrap();
        assert!(Lock::take(&dir.path().join("no/such/folder.db")).is_err());
    }
}
