//! The agent's side.

use crate::layout::{
    CAPACITY, FILE_BYTES, LAYOUT, MAGIC, W_CAPACITY, W_COUNTER, W_HEARTBEAT, W_LAYOUT, W_LENGTH, W_MAGIC, W_PAYLOAD,
    W_RETIRED, WORDS,
};
use crate::map::Words;
use std::fs::{File, OpenOptions, Permissions, TryLockError};
use std::io;
use std::os::unix::fs::{OpenOptionsExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering, fence};

/// Whatever the umask: trainers of all users read, only the agent writes.
const MODE: u32 = 0o644;

/// Why a page could not be made.
#[derive(Debug, thiserror::Error)]
pub enum CreateError {
    /// Another live writer holds the file.
    #[error("create page {path}: another agent is writing it (is a second agent running with this run_dir?)")]
    InUse {
        /// The file.
        path: PathBuf,
    },
    /// The system refused.
    #[error("create page {path}: {source}")]
    Io {
        /// The file.
        path: PathBuf,
        /// Why.
        source: io::Error,
    },
}

/// Why a payload could not be published; the page keeps what it had.
#[derive(Debug, thiserror::Error)]
pub enum PublishError {
    /// Longer than [`CAPACITY`].
    #[error("publish {bytes} bytes: a page holds at most {CAPACITY}")]
    TooLong {
        /// The payload's length.
        bytes: usize,
    },
}

/// The single writer of a page. Holds an exclusive lock on the file for as long as it lives.
#[derive(Debug)]
pub struct PageWriter {
    words: Words,
    path: PathBuf,
    /// Keeps the lock.
    file: File,
}

impl PageWriter {
    /// Takes over the page at `path`, or makes a new one (temporary file and rename, so that no reader meets
    /// half a header). Fails when another writer holds it.
    pub fn create(path: &Path) -> Result<Self, CreateError> {
        let io = |source| CreateError::Io { path: path.to_owned(), source };
        let old = open_existing(path).map_err(io)?;
        let Some(file) = old else {
            return Self::replace(path, None).map_err(io);
        };
        match file.try_lock() {
            Ok(()) => {}
            Err(TryLockError::WouldBlock) => return Err(CreateError::InUse { path: path.to_owned() }),
            Err(TryLockError::Error(source)) => return Err(io(source)),
        }
        file.set_permissions(Permissions::from_mode(MODE)).map_err(io)?;
        let words = old_words(&file).map_err(io)?;
        match words {
            Some(words) if is_ours(words.words()) => Ok(Self { words, path: path.to_owned(), file }),
            other => Self::replace(path, other).map_err(io),
        }
    }

    fn replace(path: &Path, old: Option<Words>) -> io::Result<Self> {
        let temporary = temporary_name(path);
        let file = OpenOptions::new().read(true).write(true).create_new(true).mode(MODE).open(&temporary)?;
        file.set_permissions(Permissions::from_mode(MODE))?;
        let made = Self::fill_and_rename(path, &temporary, file, old);
        if made.is_err() {
            let _ = std::fs::remove_file(&temporary);
        }
        made
    }

    fn fill_and_rename(path: &Path, temporary: &Path, file: File, old: Option<Words>) -> io::Result<Self> {
        file.set_len(FILE_BYTES)?;
        file.try_lock().map_err(io::Error::from)?;
        let words = Words::writable(&file)?;
        let header = words.words();
        header[W_LAYOUT].store(LAYOUT, Ordering::Relaxed);
        header[W_CAPACITY].store(CAPACITY as u64, Ordering::Relaxed);
        header[W_MAGIC].store(MAGIC, Ordering::Release);
        std::fs::rename(temporary, path)?;
        // Only now: a reader that sees the mark finds the new file under the name.
        if let Some(old) = old {
            mark_retired(old.words());
        }
        Ok(Self { words, path: path.to_owned(), file })
    }

    /// Publishes a payload. Never waits. Readers see the old or the new one, never a mixture.
    pub fn publish(&mut self, payload: &[u8]) -> Result<u64, PublishError> {
        if payload.len() > CAPACITY {
            return Err(PublishError::TooLong { bytes: payload.len() });
        }
        let words = self.words.words();
        // `| 1`: a writer that was killed within a publication has left the counter odd; readers have been
        // refusing the torn payload since, and this publication mends it.
        let odd = (words[W_COUNTER].load(Ordering::Relaxed) + 1) | 1;
        words[W_COUNTER].store(odd, Ordering::Relaxed);
        // The odd counter becomes visible before any word of the payload does.
        fence(Ordering::Release);
        words[W_LENGTH].store(payload.len() as u64, Ordering::Relaxed);
        for (word, chunk) in words[W_PAYLOAD..WORDS].iter().zip(payload.chunks(8)) {
            let mut bytes = [0; 8];
            bytes[..chunk.len()].copy_from_slice(chunk);
            word.store(u64::from_ne_bytes(bytes), Ordering::Relaxed);
        }
        words[W_COUNTER].store(odd + 1, Ordering::Release);
        Ok(odd + 1)
    }

    /// Says that the agent is alive; `now_us` in microseconds since the epoch.
    pub fn beat(&self, now_us: u64) {
        self.words.words()[W_HEARTBEAT].store(now_us, Ordering::Relaxed);
    }

    /// The counter of the last publication, 0 before the first.
    pub fn counter(&self) -> u64 {
        self.words.words()[W_COUNTER].load(Ordering::Relaxed)
    }

    /// Where the page is.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Removes the file and tells its readers that nothing more will come.
    pub fn retire(self) -> io::Result<()> {
        let removed = std::fs::remove_file(&self.path);
        mark_retired(self.words.words());
        removed
    }
}

/// Lets go of the lock by name: a child that another thread has just forked holds a copy of the descriptor until it is
/// its own program.
impl Drop for PageWriter {
    fn drop(&mut self) {
        let _ = self.file.unlock();
    }
}

fn open_existing(path: &Path) -> io::Result<Option<File>> {
    // O_NOFOLLOW: a symbolic link planted in the run directory must not make us write elsewhere.
    let opened = OpenOptions::new().read(true).write(true).custom_flags(libc::O_NOFOLLOW).open(path);
    match opened {
        Ok(file) => Ok(Some(file)),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
        Err(error) => Err(error),
    }
}

/// Maps what is there when it is large enough to hold a header; anything else has no readers to tell.
fn old_words(file: &File) -> io::Result<Option<Words>> {
    let meta = file.metadata()?;
    if !meta.is_file() || meta.len() < (W_PAYLOAD * 8) as u64 || meta.len() > FILE_BYTES * 64 {
        return Ok(None);
    }
    Words::writable(file).map(Some)
}

fn is_ours(words: &[AtomicU64]) -> bool {
    let get = |at: usize| words[at].load(Ordering::Acquire);
    words.len() == WORDS
        && get(W_MAGIC) == MAGIC
        && get(W_LAYOUT) == LAYOUT
        && get(W_CAPACITY) == CAPACITY as u64
        && get(W_RETIRED) == 0
}

/// Marks and moves the counter, so that a reader that only polls the counter looks and finds the mark.
fn mark_retired(words: &[AtomicU64]) {
    if words[W_MAGIC].load(Ordering::Acquire) == MAGIC {
        words[W_RETIRED].store(1, Ordering::Release);
        words[W_COUNTER].fetch_add(2, Ordering::Release);
    }
}

fn temporary_name(path: &Path) -> PathBuf {
    static NEXT: AtomicU64 = AtomicU64::new(0);
    let number = NEXT.fetch_add(1, Ordering::Relaxed);
    let name = path.file_name().unwrap_or_default().to_string_lossy();
    path.with_file_name(format!(".{name}.{}.{number}.tmp", std::process::id()))
}
