//! Putting links back: the same code for the agent, its guardian and the next start. Safe to run twice, and by
//! two processes at once.

use super::error::ShapeError;
use super::journal::{self, Before, Journal, Place};
use super::kernel::{Kernel, Link, Refusal};
use super::plan::{self, Root};
use crate::files;
use crate::lock::Lock;
use std::collections::BTreeSet;
use std::fs::{self, TryLockError};
use std::io;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

/// Held by a shaper for as long as it lives.
const OWNER_LOCK: &str = "tc-owner.lock";
/// Held while journals and qdiscs are made to agree.
const SECTION_LOCK: &str = "tc-section.lock";

/// What [`recover`] found.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Recovered {
    /// Interfaces put back (or found as they were before, or gone).
    pub restored: Vec<String>,
    /// Journals that could not be used, each with the reason.
    pub rejected: Vec<String>,
}

/// Puts back what an agent that died left behind; call it at start, before the first [`super::Shaper::apply`].
/// What belongs to a live agent is left alone ([`ShapeError::Owned`]).
pub fn recover(state_dir: &Path) -> Result<Recovered, ShapeError> {
    if journal::list(state_dir)?.is_empty() {
        return Ok(Recovered::default());
    }
    let _owner = own(state_dir)?;
    recover_owned(state_dir)
}

/// [`recover`] for a caller that holds the owner's lock.
pub(crate) fn recover_owned(state_dir: &Path) -> Result<Recovered, ShapeError> {
    let _section = enter(state_dir)?;
    let mut recovered = Recovered::default();
    let paths = journal::list(state_dir)?;
    if paths.is_empty() {
        return Ok(recovered);
    }
    let here = Place::here()?;
    let mut kernel = Kernel::open()?;
    for path in paths {
        match journal::read(&path) {
            Ok(None) => {}
            Ok(Some(journal)) if journal.boot == here.boot && journal.namespace != here.namespace => {
                recovered.rejected.extend(foreign(state_dir, &path, &journal)?);
            }
            Ok(Some(journal)) => {
                // Qdiscs do not outlive a boot; only the file is left of an earlier one.
                if journal.place() == here {
                    put_back(&mut kernel, &journal)?;
                }
                journal::remove(state_dir, &path)?;
                recovered.restored.push(journal.iface);
            }
            Err(ShapeError::Journal { path, why }) => recovered.rejected.push(format!("{}: {why}", path.display())),
            Err(error) => return Err(error),
        }
    }
    Ok(recovered)
}

/// A journal from another network namespace: kept under a name of its own while that namespace lives, so that an
/// agent there finds it and an interface of the same name here is free.
fn foreign(state_dir: &Path, path: &Path, journal: &Journal) -> Result<Option<String>, ShapeError> {
    if !live_namespaces().contains(&journal.namespace) {
        journal::remove(state_dir, path)?;
        return Ok(None);
    }
    let kept = journal::path(state_dir, &format!("{}.netns-{}", journal.iface, journal.namespace));
    fs::rename(path, &kept).map_err(ShapeError::io(format!("rename {}", path.display())))?;
    let why = "it belongs to another network namespace that is alive; start the agent there to put its link back";
    Ok(Some(format!("{}: {why}", kept.display())))
}

/// Inodes of the network namespaces that a process lives in or that have a name.
fn live_namespaces() -> BTreeSet<u64> {
    let entries = |folder: &str| fs::read_dir(folder).into_iter().flatten().flatten();
    let processes = entries("/proc").map(|entry| entry.path().join("ns/net"));
    let named = entries("/run/netns").map(|entry| entry.path());
    processes.chain(named).filter_map(|path| fs::metadata(path).ok()).map(|meta| meta.ino()).collect()
}

/// Puts back everything of one owner and removes its journals; says which interfaces. The caller is in the section.
pub(crate) fn put_back_of(state_dir: &Path, owner: &str, _section: &Lock) -> Result<Vec<String>, ShapeError> {
    let done = undo_of(state_dir, owner)?;
    for iface in &done {
        journal::remove(state_dir, &journal::path(state_dir, iface))?;
    }
    Ok(done)
}

/// The qdiscs only: for a guardian whose agent hangs inside the section. The journals stay for the second go.
pub(crate) fn undo_of(state_dir: &Path, owner: &str) -> Result<Vec<String>, ShapeError> {
    let mut kernel = Kernel::open()?;
    let mut done = Vec::new();
    for path in journal::list(state_dir)? {
        // An unreadable journal is none of this owner's: it wrote its own whole.
        if let Ok(Some(journal)) = journal::read(&path)
            && journal.owner == owner
        {
            put_back(&mut kernel, &journal)?;
            done.push(journal.iface);
        }
    }
    Ok(done)
}

/// Makes an interface as its journal says it was. Does nothing when the interface is gone, or when what stands at
/// its root is not ours.
pub(crate) fn put_back(kernel: &mut Kernel, journal: &Journal) -> Result<(), ShapeError> {
    let look = || ShapeError::io(format!("look at the qdiscs of {}", journal.iface));
    let Some(link) = kernel.link(journal.ifindex).map_err(look())? else { return Ok(()) };
    if kernel.tree(link.ifindex).map_err(look())?.root == Root::Ours {
        let message = match &journal.before {
            Before::Default { .. } => plan::remove(link.ifindex),
            Before::Fifo { kind, handle, options } => {
                let options = hex::decode(options).unwrap_or_default();
                plan::put_back(link.ifindex, kind, *handle, &options)
            }
        };
        if let Err(refusal) = kernel.execute(&[message]) {
            // Another process may have been first: what counts is that ours is gone.
            let gone = kernel.link(link.ifindex).map_err(look())?.is_none();
            if !gone && kernel.tree(link.ifindex).map_err(look())?.root == Root::Ours {
                return Err(refused(format!("put back the qdisc of {}", journal.iface), refusal));
            }
        }
    }
    // The kernel gives an interface without a queue one of 1000 packets when it gets a qdisc.
    if journal.queue_length == 0 && link.queue_length != 0 {
        let link = Link { queue_length: 0, ..link };
        kernel.set_queue_length(link).map_err(ShapeError::io(format!("reset the queue of {}", journal.iface)))?;
    }
    Ok(())
}

pub(crate) fn refused(operation: String, refusal: Refusal) -> ShapeError {
    ShapeError::Kernel { operation, source: refusal.source, words: refusal.words }
}

/// Takes the state directory.
pub(crate) fn own(state_dir: &Path) -> Result<Lock, ShapeError> {
    Lock::try_take(&lock_file(state_dir, OWNER_LOCK)?).map_err(|error| match error {
        TryLockError::WouldBlock => ShapeError::Owned { state_dir: state_dir.to_owned() },
        TryLockError::Error(error) => lock_failed(state_dir)(error),
    })
}

/// Enters the section in which journals and qdiscs are made to agree; left when the lock is dropped.
pub(crate) fn enter(state_dir: &Path) -> Result<Lock, ShapeError> {
    Lock::take(&lock_file(state_dir, SECTION_LOCK)?).map_err(lock_failed(state_dir))
}

/// [`enter`] for one who must not wait: `None` when somebody is in it, or when the lock does not work.
pub(crate) fn try_enter(state_dir: &Path) -> Result<Option<Lock>, ShapeError> {
    Ok(Lock::try_take(&lock_file(state_dir, SECTION_LOCK)?).ok())
}

fn lock_file(state_dir: &Path, name: &str) -> Result<PathBuf, ShapeError> {
    files::make_folder(state_dir, files::PRIVATE).map_err(ShapeError::io(format!("make {}", state_dir.display())))?;
    Ok(state_dir.join(name))
}

fn lock_failed(state_dir: &Path) -> impl FnOnce(io::Error) -> ShapeError {
    ShapeError::io(format!("lock {}", state_dir.display()))
}
