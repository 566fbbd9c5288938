//! Room on the disk for reports that may not be dropped: blocks of a file of zeros, given back to the file system when
//! it has no others.

use super::{SpoolError, io};
use nix::fcntl::posix_fallocate;
use std::fs::File;
use std::io::ErrorKind;
use std::path::{Path, PathBuf};

/// Room is released in steps of a few blocks: a record, and what the file system needs to note where it is.
const STEP: u64 = 16 * 1024;

/// The file, as long as it could be made.
#[derive(Debug)]
pub(super) struct Reserve {
    path: PathBuf,
    file: File,
    /// As long as it should be.
    wanted: u64,
    /// As long as it is.
    bytes: u64,
}

impl Reserve {
    pub(super) fn open(folder: &Path, wanted: u64) -> Result<Self, SpoolError> {
        let path = folder.join("reserve");
        let file = crate::files::open(&path).map_err(io("open", &path))?;
        let bytes = file.metadata().map_err(io("read", &path))?.len();
        let mut reserve = Self { path, file, wanted, bytes };
        if bytes > wanted {
            reserve.cut(wanted)?;
        }
        reserve.refill();
        Ok(reserve)
    }

    /// Takes back what was released, as soon as the file system has it.
    pub(super) fn refill(&mut self) {
        if self.bytes < self.wanted && posix_fallocate(&self.file, 0, self.wanted as i64).is_ok() {
            self.bytes = self.wanted;
        }
    }

    /// Makes room for so many bytes; whether there was any.
    pub(super) fn release(&mut self, bytes: u64) -> Result<bool, SpoolError> {
        if self.bytes == 0 {
            return Ok(false);
        }
        self.cut(self.bytes.saturating_sub(bytes.next_multiple_of(STEP)))?;
        Ok(true)
    }

    fn cut(&mut self, bytes: u64) -> Result<(), SpoolError> {
        self.file.set_len(bytes).map_err(io("shorten", &self.path))?;
        self.bytes = bytes;
        Ok(())
    }
}

/// Whether the file system refused for want of room.
pub(super) fn is_full(error: &SpoolError) -> bool {
    let SpoolError::Io { source, .. } = error else { return false };
    matches!(source.kind(), ErrorKind::StorageFull | ErrorKind::QuotaExceeded)
}
