//! What the planner remembers of running jobs. Every look changes it; it is stored with decisions and trials, and else now and then, since a
//! start that finds an older one learns the rest again.

use flexcomm_domain::{JobId, Timestamp};
use flexcomm_planner::Memory;
use std::collections::BTreeMap;

use crate::store::JobRow;

/// What is lost at most where the process is killed, in seconds of looks.
const STORE_EVERY_S: f64 = 10.0;

/// By job, of its run.
#[derive(Debug, Default)]
pub(crate) struct Memories(BTreeMap<JobId, Kept>);

#[derive(Debug)]
struct Kept {
    run: JobRow,
    memory: Memory,
    stored: Timestamp,
    /// Whether it is on disk as it is.
    is_stored: bool,
}

impl Memories {
    /// That of a run; none before its first look in this process.
    pub(crate) fn get(&self, run: &JobRow) -> Option<&Memory> {
        self.0.get(&run.job).filter(|kept| kept.run.created == run.created).map(|kept| &kept.memory)
    }

    /// Whether the memory that comes next is to be stored.
    pub(crate) fn is_due(&self, run: &JobRow, now: Timestamp) -> bool {
        let kept = self.0.get(&run.job).filter(|kept| kept.run.created == run.created);
        kept.is_none_or(|kept| now.since(kept.stored).get() >= STORE_EVERY_S)
    }

    /// Takes the newest.
    pub(crate) fn keep(&mut self, run: &JobRow, memory: Memory, now: Timestamp, is_stored: bool) {
        let before = self.0.get(&run.job).map(|kept| kept.stored);
        let stored = if is_stored { now } else { before.unwrap_or(now) };
        self.0.insert(run.job.clone(), Kept { run: run.clone(), memory, stored, is_stored });
    }

    /// Forgets jobs that do not run; answers what of them is not on disk as it is.
    pub(crate) fn forget_others(&mut self, runs: impl Fn(&JobId) -> bool) -> Vec<(JobRow, Memory)> {
        let over = self.0.extract_if(.., |job, _| !runs(job));
        over.filter(|(_, kept)| !kept.is_stored).map(|(_, kept)| (kept.run, kept.memory)).collect()
    }
}
