//! The journal: what stood under an interface before the first change, on disk before that change is made.
//!
//! `STATE_DIR/tc-journal-IFACE.json`, written to a temporary file, fsynced, renamed, and the directory fsynced.
//! Version 1:
//!
//! ```json
//! {"version":1,"iface":"eth1","ifindex":7,"queue_length":1000,"namespace":4026531840,"boot":"8d4e...",
//!  "owner":"1f0c...","before":{"default":{"kind":"mq"}}}
//! ```
//!
//! `before` is either `default` (the kernel makes it again by itself) or `fifo` with `kind`, `handle` and `options`
//! (hexadecimal). `namespace` is the inode of the network namespace, `boot` the kernel's boot id, `owner` the shaper
//! whose guardian may put it back.

use super::error::ShapeError;
use serde::{Deserialize, Serialize};
use std::fs::{self, File};
use std::io;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

/// The format this code writes and reads.
const VERSION: u32 = 1;
/// A journal is a few hundred bytes.
const MOST_BYTES: u64 = 64 * 1024;
const PREFIX: &str = "tc-journal-";
const SUFFIX: &str = ".json";

/// What stood at the root before.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum Before {
    /// The kernel's own choice: comes back when ours is deleted.
    Default {
        /// Its name, for people.
        kind: String,
    },
    /// A pfifo or bfifo that somebody set: one number, put back exactly.
    Fifo {
        /// `pfifo` or `bfifo`.
        kind: String,
        /// Its handle.
        handle: u32,
        /// Its `TCA_OPTIONS`, hexadecimal.
        options: String,
    },
}

/// One interface's journal.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Journal {
    pub(crate) version: u32,
    pub(crate) iface: String,
    pub(crate) ifindex: u32,
    pub(crate) queue_length: u32,
    pub(crate) namespace: u64,
    pub(crate) boot: String,
    pub(crate) owner: String,
    pub(crate) before: Before,
}

/// Where and when this process runs: a journal of another machine names other interfaces.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Place {
    pub(crate) namespace: u64,
    pub(crate) boot: String,
}

impl Place {
    /// Of this thread.
    pub(crate) fn here() -> Result<Self, ShapeError> {
        let namespace =
            fs::metadata("/proc/thread-self/ns/net").map_err(ShapeError::io("read /proc/thread-self/ns/net"))?;
        let boot = "/proc/sys/kernel/random/boot_id";
        let boot = fs::read_to_string(boot).map_err(ShapeError::io(format!("read {boot}")))?;
        Ok(Self { namespace: namespace.ino(), boot: boot.trim().to_owned() })
    }
}

impl Journal {
    pub(crate) fn new(place: Place, link: super::kernel::Link, iface: &str, owner: &str, before: Before) -> Self {
        Self {
            version: VERSION,
            iface: iface.to_owned(),
            ifindex: link.ifindex,
            queue_length: link.queue_length,
            namespace: place.namespace,
            boot: place.boot,
            owner: owner.to_owned(),
            before,
        }
    }

    /// Whether it names interfaces that this process sees.
    pub(crate) fn place(&self) -> Place {
        Place { namespace: self.namespace, boot: self.boot.clone() }
    }

    /// Reads the text of a journal; the error says what is wrong and what to do.
    pub(crate) fn parse(text: &str) -> Result<Self, String> {
        #[derive(Deserialize)]
        struct Versioned {
            version: u32,
        }
        let broken = |error: serde_json::Error| {
            format!("it is not a journal ({error}); look at the interface with `tc qdisc show`, then delete the file")
        };
        let Versioned { version } = serde_json::from_str(text).map_err(broken)?;
        if version != VERSION {
            return Err(format!(
                "it has version {version}, this flexcomm knows {VERSION}; start the flexcomm that wrote it"
            ));
        }
        let journal: Self = serde_json::from_str(text).map_err(broken)?;
        if let Before::Fifo { options, .. } = &journal.before
            && hex::decode(options).is_err()
        {
            return Err(format!("its options {options:?} are not hexadecimal; look at it, then delete the file"));
        }
        Ok(journal)
    }
}

/// The file of an interface.
pub(crate) fn path(state_dir: &Path, iface: &str) -> PathBuf {
    state_dir.join(format!("{PREFIX}{iface}{SUFFIX}"))
}

/// Writes durably, under the lock: after this returns, the journal survives the loss of power.
pub(crate) fn write(state_dir: &Path, journal: &Journal) -> Result<(), ShapeError> {
    let path = path(state_dir, &journal.iface);
    let text = serde_json::to_vec(journal).map_err(io::Error::other);
    text.and_then(|text| crate::files::replace(&path, &text))
        .map_err(ShapeError::io(format!("write {}", path.display())))
}

/// Reads one journal; `None` when there is none.
pub(crate) fn read(path: &Path) -> Result<Option<Journal>, ShapeError> {
    let text = match fs::metadata(path) {
        Ok(meta) if meta.len() > MOST_BYTES => {
            let why = format!("it has {} bytes, a journal has at most {MOST_BYTES}; delete the file", meta.len());
            return Err(ShapeError::Journal { path: path.to_owned(), why });
        }
        _ => fs::read_to_string(path),
    };
    match text {
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
        Err(error) => Err(ShapeError::io(format!("read {}", path.display()))(error)),
        Ok(text) => match Journal::parse(&text) {
            Ok(journal) => Ok(Some(journal)),
            Err(why) => Err(ShapeError::Journal { path: path.to_owned(), why }),
        },
    }
}

/// Removes a journal durably. Absent is fine.
pub(crate) fn remove(state_dir: &Path, path: &Path) -> Result<(), ShapeError> {
    let remove = || match fs::remove_file(path) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => Err(error),
        _ => sync(state_dir),
    };
    remove().map_err(ShapeError::io(format!("remove {}", path.display())))
}

/// All journals of a state directory, sorted; none when there is no such directory.
pub(crate) fn list(state_dir: &Path) -> Result<Vec<PathBuf>, ShapeError> {
    let entries = match fs::read_dir(state_dir) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Vec::new()),
        other => other.map_err(ShapeError::io(format!("read {}", state_dir.display())))?,
    };
    let named = |entry: &fs::DirEntry| {
        let name = entry.file_name();
        name.to_str().is_some_and(|name| name.starts_with(PREFIX) && name.ends_with(SUFFIX))
    };
    let mut found: Vec<PathBuf> = entries.flatten().filter(named).map(|entry| entry.path()).collect();
    found.sort();
    Ok(found)
}

fn sync(state_dir: &Path) -> io::Result<()> {
    File::open(state_dir)?.sync_all()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn journal() -> Journal {
        Journal {
            version: 1,
            iface: "eth1".into(),
            ifindex: 7,
            queue_length: 1000,
            namespace: 4_026_531_840,
            boot: "b".into(),
            owner: "o".into(),
            before: Before::Fifo { kind: "pfifo".into(), handle: 0x10000, options: hex::encode([0, 16, 255]) },
        }
    }

    #[test]
    fn comes_back_from_disk() {
        let dir = tempfile::tempdir().unwrap();
        write(dir.path(), &journal()).unwrap();
        let files = list(dir.path()).unwrap();
        assert_eq!(files, [path(dir.path(), "eth1")]);
        assert_eq!(read(&files[0]).unwrap(), Some(journal()));
        remove(dir.path(), &files[0]).unwrap();
        remove(dir.path(), &files[0]).unwrap();
        assert_eq!(read(&files[0]).unwrap(), None);
        assert!(list(&dir.path().join("absent")).unwrap().is_empty());
    }

    /// Version 1 as it was first written: later code must go on reading it.
    #[test]
    fn golden_version_1() {
        let text = r#"{"version":1,"iface":"eth1","ifindex":7,"queue_length":1000,"namespace":4026531840,"boot":"b",
            "owner":"o","before":{"fifo":{"kind":"pfifo","handle":65536,"options":"0010ff"}}}"#;
        assert_eq!(Journal::parse(text).unwrap(), journal());
        let text = text
            .replace(r#"{"fifo":{"kind":"pfifo","handle":65536,"options":"0010ff"}}"#, r#"{"default":{"kind":"mq"}}"#);
        assert_eq!(Journal::parse(&text).unwrap().before, Before::Default { kind: "mq".into() });
    }

    #[test]
    fn what_is_no_journal_is_refused_with_a_remedy() {
        let whole = serde_json::to_string(&journal()).unwrap();
        for cut in 0..whole.len() {
            assert!(Journal::parse(&whole[..cut]).unwrap_err().contains("delete the file"), "cut at {cut}");
        }
        let newer = whole.replace("\"version\":1", "\"version\":2");
        assert!(Journal::parse(&newer).unwrap_err().contains("it has version 2"));
        let odd = whole.replace("0010ff", "0010f");
        assert!(Journal::parse(&odd).unwrap_err().contains("not hexadecimal"));
    }
}
