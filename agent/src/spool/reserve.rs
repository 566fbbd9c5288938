//! Room on the disk for reports that may not be dropped: blocks of a file of zeros, given back to the file system when
//! it has no others.

use super::{SpoolError, io};
use nix::fcntl::posix_fallocate;
use nix::sys::statvfs::fstatvfs;
use std::fs::File;
use std::io::ErrorKind;
use std::path::{Path, PathBuf};

/// Room is released in steps of a few blocks: a record, and what the file system needs to note where it is.
const STEP: u64 = 16 * 1024;

/// What the reserve leaves free: a start of the agent writes some tens of small files.
const MARGIN: u64 = 256 * 1024;

/// The file, as long as it could be made.
#[derive(Debug)]
pub(super) struct Reserve {
    path: PathBuf,
    file: File,
    /// As long as it should be.
    wanted: u64,
    /// As long as it is.
    bytes: u64,
    /// That it is shorter was logged.
    warned: bool,
}

impl Reserve {
    /// With what an earlier agent left in it, shortened so that this start finds [`MARGIN`]; [`Self::refill`] is for its
    /// end.
    pub(super) fn open(folder: &Path, wanted: u64) -> Result<Self, SpoolError> {
        let path = folder.join("reserve");
        let file = crate::files::open(&path).map_err(io("open", &path))?;
        let bytes = file.metadata().map_err(io("read", &path))?.len();
        let mut reserve = Self { path, file, wanted, bytes, warned: false };
        reserve.cut(bytes.min(wanted))?;
        let missing = MARGIN.saturating_sub(reserve.free());
        reserve.release(missing)?;
        Ok(reserve)
    }

    /// Takes back what was released, as far as the file system has it and keeps [`MARGIN`].
    pub(super) fn refill(&mut self) {
        self.refill_by(|file, from, more| posix_fallocate(file, from as i64, more as i64));
        if let Some(bytes) = self.short() {
            let (path, wanted) = (self.path.display(), self.wanted);
            tracing::warn!(%path, wanted, bytes, "less room on the disk is reserved for results than wanted");
        }
    }

    /// How many bytes it has when they are fewer than wanted; once until they are enough.
    fn short(&mut self) -> Option<u64> {
        let is_short = self.bytes < self.wanted;
        let is_new = is_short && !self.warned;
        self.warned = is_short;
        is_new.then_some(self.bytes)
    }

    fn refill_by(&mut self, allocate: impl FnOnce(&File, u64, u64) -> nix::Result<()>) {
        if self.bytes == self.wanted {
            return;
        }
        let most = self.bytes + self.free().saturating_sub(MARGIN);
        let bytes = if most < self.wanted { most / STEP * STEP } else { self.wanted };
        if bytes <= self.bytes {
            return;
        }
        match allocate(&self.file, self.bytes, bytes - self.bytes) {
            Ok(()) => self.bytes = bytes,
            // Others were faster. ext4 keeps the blocks that it found before it had no more.
            Err(_) => drop(self.cut(self.bytes)),
        }
    }

    /// Bytes that others can write.
    fn free(&self) -> u64 {
        fstatvfs(&self.file).map_or(0, |disk| disk.blocks_available() * disk.fragment_size())
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

#[cfg(test)]
mod tests {
    use super::*;
    use nix::errno::Errno;

    /// As ext4 does: other file systems give back what they found before they had no more.
    #[test]
    fn blocks_of_a_refill_that_found_too_few_go_back() {
        let dir = tempfile::tempdir().unwrap();
        let mut reserve = Reserve::open(dir.path(), 8 * STEP).unwrap();
        reserve.refill_by(|file, from, more| {
            posix_fallocate(file, from as i64, more as i64 / 2)?;
            Err(Errno::ENOSPC)
        });
        let length = || std::fs::metadata(dir.path().join("reserve")).unwrap().len();
        assert_eq!((length(), reserve.bytes), (0, 0), "in the file, and what can be released");
        assert_eq!([reserve.short(), reserve.short()], [Some(0), None], "said once");
        reserve.refill();
        assert_eq!((length(), reserve.bytes, reserve.short()), (8 * STEP, 8 * STEP, None));
        assert!(reserve.release(1).unwrap());
        assert_eq!([reserve.short(), reserve.short()], [Some(7 * STEP), None]);
        assert_eq!(length(), 7 * STEP);
    }
}
