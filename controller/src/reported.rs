//! Which reports of steps are worth a look: those after which steps are known of all ranks that were not before.

use flexcomm_domain::{JobId, Timestamp};
use std::collections::BTreeMap;

use crate::store::JobRow;

/// The newest step that each rank has reported, by job.
#[derive(Debug, Default)]
pub(crate) struct Reported {
    newest: BTreeMap<JobId, BTreeMap<u32, u64>>,
    /// When the runs began that were looked at last.
    begun: BTreeMap<JobId, Timestamp>,
}

impl Reported {
    /// Takes in that a rank has reported up to a step. Answers whether the step up to which all ranks have is another now. While one of them
    /// is silent it stays the same, and the loop's tick finds what there is.
    pub(crate) fn note(&mut self, job: &JobId, rank: u32, step: u64) -> bool {
        let of_job = self.newest.entry(job.clone()).or_default();
        let before = of_job.values().min().copied();
        of_job.insert(rank, step).is_none() || of_job.values().min().copied() != before
    }

    /// Forgets all but these runs: of a run that has another's name now it begins anew.
    pub(crate) fn retain(&mut self, runs: &[JobRow]) {
        let begun: BTreeMap<JobId, Timestamp> = runs.iter().map(|run| (run.job.clone(), run.created)).collect();
        let before = std::mem::replace(&mut self.begun, begun);
        let is_same = |job: &JobId| before.get(job).is_none_or(|at| self.begun.get(job) == Some(at));
        self.newest.retain(|job, _| self.begun.contains_key(job) && is_same(job));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_report_is_worth_a_look_where_it_completes_steps() {
        let (mut reported, job) = (Reported::default(), "j".parse().unwrap());
        let mut note = |rank, step| reported.note(&job, rank, step);
        assert_eq!([note(0, 9), note(1, 5)], [true; 2], "ranks that are new");
        assert_eq!([note(0, 19), note(1, 15), note(1, 25), note(0, 20)], [false, true, true, true]);
        assert!(note(0, 3), "it has started again");
        assert!(!note(1, 40));
    }
}
