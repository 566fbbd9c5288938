//! What the planner remembers of running jobs. Every look changes it; it is stored with decisions and trials, when the job or the controller
//! ends, and else every ten seconds: a process that is killed loses so much of it, and so does a run whose name another takes at once.

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
        self.of(run).map(|kept| &kept.memory)
    }

    fn of(&self, run: &JobRow) -> Option<&Kept> {
        self.0.get(&run.job).filter(|kept| kept.run.created == run.created)
    }

    /// Whether the memory that comes next is to be stored.
    pub(crate) fn is_due(&self, run: &JobRow, now: Timestamp) -> bool {
        self.of(run).is_none_or(|kept| now.since(kept.stored).get() >= STORE_EVERY_S)
    }

    /// Takes the newest.
    pub(crate) fn keep(&mut self, run: &JobRow, memory: Memory, now: Timestamp, is_stored: bool) {
        let before = self.of(run).map(|kept| kept.stored);
        let stored = if is_stored { now } else { before.unwrap_or(now) };
        self.0.insert(run.job.clone(), Kept { run: run.clone(), memory, stored, is_stored });
    }

    /// Forgets runs that are over; answers what of them is not on disk as it is.
    pub(crate) fn forget_others(&mut self, runs: &[JobRow]) -> Vec<(JobRow, Memory)> {
        let is_over = |run: &JobRow| runs.iter().all(|other| (&other.job, other.created) != (&run.job, run.created));
        let over = self.0.extract_if(.., |_, kept| is_over(&kept.run));
        over.filter(|(_, kept)| !kept.is_stored).map(|(_, kept)| (kept.run, kept.memory)).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn run(created: u64) -> JobRow {
        JobRow {
            job: "j".parse().unwrap(),
            run: None,
            world: 1,
            gradient_values: 1,
            buckets: vec![],
            momentum: None,
            machine: None,
            backend: "x".into(),
            created: Timestamp(created),
            ended: None,
            how: None,
            earlier: flexcomm_domain::Version(0),
            policy: None,
            loss: None,
            accuracy: None,
        }
    }

    #[test]
    fn a_run_has_its_own_memory_which_is_due_every_ten_seconds() {
        let (mut memories, at) = (Memories::default(), |s: u64| Timestamp(s * 1_000_000));
        assert!(memories.is_due(&run(1), at(0)), "nothing of it is stored");
        memories.keep(&run(1), Memory::default(), at(0), true);
        assert_eq!((memories.is_due(&run(1), at(9)), memories.is_due(&run(1), at(10))), (false, true));
        memories.keep(&run(1), Memory::default(), at(9), false);
        assert!(memories.is_due(&run(1), at(10)), "it is as long since it was stored");
        assert!(memories.get(&run(1)).is_some() && memories.get(&run(2)).is_none());
        assert!(memories.is_due(&run(2), at(9)));
    }

    #[test]
    fn what_a_run_that_is_over_has_not_stored_is_answered_once() {
        let mut memories = Memories::default();
        memories.keep(&run(1), Memory::default(), Timestamp(0), false);
        assert_eq!(memories.forget_others(&[run(1)]), []);
        assert_eq!(memories.forget_others(&[run(2)]), [(run(1), Memory::default())]);
        assert_eq!(memories.forget_others(&[]), []);
        memories.keep(&run(1), Memory::default(), Timestamp(0), true);
        assert_eq!(memories.forget_others(&[]), [], "it is on disk");
    }
}
