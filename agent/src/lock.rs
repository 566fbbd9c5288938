//! The lock of a file, one holder at a time on this machine.

use crate::files;
use std::fs::{File, TryLockError};
use std::io;
use std::path::Path;

/// Held until it is dropped. The file stays.
#[derive(Debug)]
pub(crate) struct Lock(File);

impl Lock {
    /// Takes it, or fails at once when somebody else has it.
    pub(crate) fn try_take(path: &Path) -> Result<Self, TryLockError> {
        let file = files::open(path).map_err(TryLockError::Error)?;
        file.try_lock()?;
        Ok(Self(file))
    }

    /// Waits for it.
    pub(crate) fn take(path: &Path) -> io::Result<Self> {
        let file = files::open(path)?;
        file.lock()?;
        Ok(Self(file))
    }
}

/// Lets go by name. A child that another thread has forked, and that has not yet become its program, holds a copy of
/// the descriptor: closing ours alone would leave the lock with it.
impl Drop for Lock {
    fn drop(&mut self) {
        let _ = self.0.unlock();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_copy_of_the_descriptor_does_not_keep_it() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("lock");
        let lock = Lock::try_take(&path).unwrap();
        assert!(matches!(Lock::try_take(&path), Err(TryLockError::WouldBlock)));
        let copy = lock.0.try_clone().unwrap();
        drop(lock);
        drop(Lock::try_take(&path).unwrap());
        drop((Lock::take(&path).unwrap(), copy));
    }
}
