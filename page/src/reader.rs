//! A trainer's side.

use crate::layout::{
    CAPACITY, FILE_BYTES, LAYOUT, MAGIC, W_CAPACITY, W_COUNTER, W_HEARTBEAT, W_LAYOUT, W_LENGTH, W_MAGIC, W_PAYLOAD,
    W_RETIRED,
};
use crate::map::Words;
use std::fs::File;
use std::path::{Path, PathBuf};
use std::sync::atomic::{Ordering, fence};

/// Most attempts of one [`PageReader::read`]: a publication takes about a microsecond, so a reader that loses
/// this often has met a writer that was killed in the middle or one that does nothing but publish.
pub const READ_TRIES: usize = 64;

/// Why a page could not be opened.
#[derive(Debug, thiserror::Error)]
pub enum OpenError {
    /// The system refused.
    #[error("open page {path}: {source}")]
    Io {
        /// The file.
        path: PathBuf,
        /// Why.
        source: std::io::Error,
    },
    /// Not a page, or one of another layout.
    #[error("open page {path}: {what}")]
    Foreign {
        /// The file.
        path: PathBuf,
        /// What was found where something else was expected.
        what: String,
    },
}

/// Why a read brought no new value. The caller's buffer is as it was: keep using the last good value.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum ReadError {
    /// A publication was under way in each of [`READ_TRIES`] attempts.
    #[error("read page: a publication was under way in each of {READ_TRIES} attempts")]
    Busy,
    /// Nothing has been published yet.
    #[error("read page: nothing has been published yet")]
    Unpublished,
    /// The file was replaced or removed: open the path again.
    #[error("read page: it was replaced or removed, open it again")]
    Retired,
    /// The length word is out of range: something else wrote into the file.
    #[error("read page: its length says {bytes} bytes, at most {CAPACITY} fit")]
    Corrupt {
        /// As found.
        bytes: u64,
    },
}

/// A reader of a page. Never writes, never blocks, makes no system call after [`PageReader::open`].
#[derive(Debug)]
pub struct PageReader {
    words: Words,
    /// Where an attempt gathers its bytes, so that a failed one leaves the caller's buffer alone.
    scratch: Vec<u8>,
}

impl PageReader {
    /// Maps the page at `path`.
    pub fn open(path: &Path) -> Result<Self, OpenError> {
        let io = |source| OpenError::Io { path: path.to_owned(), source };
        let foreign = |what| OpenError::Foreign { path: path.to_owned(), what };
        let file = File::open(path).map_err(io)?;
        let meta = file.metadata().map_err(io)?;
        if !meta.is_file() || meta.len() != FILE_BYTES {
            return Err(foreign(format!("{} bytes, a page has {FILE_BYTES}", meta.len())));
        }
        let words = Words::read_only(&file).map_err(io)?;
        for (at, what, expected) in
            [(W_MAGIC, "magic", MAGIC), (W_LAYOUT, "layout", LAYOUT), (W_CAPACITY, "capacity", CAPACITY as u64)]
        {
            let found = words.words()[at].load(Ordering::Acquire);
            if found != expected {
                return Err(foreign(format!("{what} is {found:#x}, expected {expected:#x}")));
            }
        }
        Ok(Self { words, scratch: Vec::with_capacity(CAPACITY) })
    }

    /// Changes with every publication, and when the page is retired: one atomic load. Odd while a publication
    /// is under way. It only grows for as long as the file lives.
    #[inline]
    pub fn counter(&self) -> u64 {
        self.words.words()[W_COUNTER].load(Ordering::Acquire)
    }

    /// When the agent last said that it is alive, in microseconds since the epoch; 0 = never.
    pub fn heartbeat_us(&self) -> u64 {
        self.words.words()[W_HEARTBEAT].load(Ordering::Relaxed)
    }

    /// Replaces `out` by the payload in force and returns its counter. On an error `out` is left as it was.
    pub fn read(&mut self, out: &mut Vec<u8>) -> Result<u64, ReadError> {
        let words = self.words.words();
        for _ in 0..READ_TRIES {
            let before = words[W_COUNTER].load(Ordering::Acquire);
            if words[W_RETIRED].load(Ordering::Acquire) != 0 {
                return Err(ReadError::Retired);
            }
            if before == 0 {
                return Err(ReadError::Unpublished);
            }
            if before % 2 == 1 {
                std::hint::spin_loop();
                continue;
            }
            let length = words[W_LENGTH].load(Ordering::Relaxed);
            self.scratch.clear();
            // An absurd length may be a torn one: believed only once the counter has been seen again.
            let bytes = (length as usize).min(CAPACITY);
            for word in &words[W_PAYLOAD..W_PAYLOAD + bytes.div_ceil(8)] {
                self.scratch.extend_from_slice(&word.load(Ordering::Relaxed).to_ne_bytes());
            }
            // All words were loaded before the counter is looked at again.
            fence(Ordering::Acquire);
            if words[W_COUNTER].load(Ordering::Relaxed) != before {
                continue;
            }
            if length > CAPACITY as u64 {
                return Err(ReadError::Corrupt { bytes: length });
            }
            self.scratch.truncate(bytes);
            std::mem::swap(out, &mut self.scratch);
            return Ok(before);
        }
        Err(ReadError::Busy)
    }
}
