//! Which ranks were here when the agent last ran: those that do not come back have left.

use flexcomm_domain::JobId;
use std::collections::BTreeSet;
use std::path::{Path, PathBuf};

/// Largest roster that is read.
const MAX_FILE: u64 = 1024 * 1024;

/// Ranks on this node.
pub(crate) type Ranks = BTreeSet<(JobId, u32)>;

/// The list on disk.
#[derive(Debug)]
pub(crate) struct Roster {
    path: PathBuf,
}

impl Roster {
    /// The list and what an earlier agent left in it. One that cannot be read is as good as none: the controller
    /// then learns of a rank that left only when the job starts again.
    pub(crate) fn open(state_dir: &Path) -> (Self, Ranks) {
        let path = state_dir.join("ranks.json");
        let small = std::fs::metadata(&path).is_ok_and(|meta| meta.len() <= MAX_FILE);
        let bytes = if small { std::fs::read(&path).unwrap_or_default() } else { Vec::new() };
        let ranks = serde_json::from_slice(&bytes).unwrap_or_default();
        (Self { path }, ranks)
    }

    /// Replaces the list.
    pub(crate) fn write(&self, ranks: &Ranks) {
        let bytes = serde_json::to_vec(ranks).unwrap_or_default();
        if let Err(error) = crate::files::replace(&self.path, &bytes) {
            tracing::warn!("failed to write {}: {error}", self.path.display());
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn is_kept_and_garbage_is_none() {
        let dir = tempfile::tempdir().unwrap();
        let (roster, ranks) = Roster::open(dir.path());
        assert!(ranks.is_empty());
        let here: Ranks = [("j".parse().unwrap(), 3), ("k".parse().unwrap(), 0)].into();
        roster.write(&here);
        assert_eq!(Roster::open(dir.path()).1, here);
        std::fs::write(dir.path().join("ranks.json"), "[[").unwrap();
        assert!(Roster::open(dir.path()).1.is_empty());
    }
}
