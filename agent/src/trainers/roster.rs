//! Which ranks were here when the agent last ran: those that do not come back have left.

use flexcomm_domain::{JobId, RunId};
use flexcomm_wire::Hello;
use serde::{Deserialize, Serialize};
use std::collections::BTreeSet;
use std::path::{Path, PathBuf};

/// Largest roster that is read.
const MAX_FILE: u64 = 1024 * 1024;

/// A rank on this node. Rosters of agents older than run ids are lists of `[job, rank]`, which reads as this, too.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub(crate) struct Rank {
    pub(crate) job: JobId,
    pub(crate) rank: u32,
    #[serde(default)]
    pub(crate) run: Option<RunId>,
}

impl From<&Hello> for Rank {
    fn from(seen: &Hello) -> Self {
        Self { job: seen.job.clone(), rank: seen.rank, run: seen.run }
    }
}

/// Ranks on this node.
pub(crate) type Ranks = BTreeSet<Rank>;

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
        let of = |job: &str, rank, run| Rank { job: job.parse().unwrap(), rank, run };
        let here: Ranks = [of("j", 3, Some(RunId(7))), of("k", 0, None)].into();
        roster.write(&here);
        assert_eq!(Roster::open(dir.path()).1, here);
        let write = |text| std::fs::write(dir.path().join("ranks.json"), text).unwrap();
        write(r#"[["j",3],["k",0]]"#);
        assert_eq!(Roster::open(dir.path()).1, [of("j", 3, None), of("k", 0, None)].into(), "of an older agent");
        write("[[");
        assert!(Roster::open(dir.path()).1.is_empty());
    }
}
