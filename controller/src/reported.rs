//! Which reports of steps are worth a look of the decision loop. Ranks report one after the other, so each report completes a few steps
//! of all ranks, and a look at each would see hardly anything new: the loop looks once about as many steps are complete as a report has.

use flexcomm_domain::{JobId, Timestamp};
use std::collections::BTreeMap;

use crate::store::JobRow;

/// How far the ranks of jobs have reported.
#[derive(Debug, Default)]
pub(crate) struct Reported {
    jobs: BTreeMap<JobId, OfJob>,
    /// When the runs began that were looked at last.
    begun: BTreeMap<JobId, Timestamp>,
}

#[derive(Debug, Default)]
struct OfJob {
    /// The newest step of each rank.
    newest: BTreeMap<u32, u64>,
    /// Up to where all ranks had reported when a look was asked for last.
    looked: u64,
}

impl Reported {
    /// Takes in that a rank has reported so many steps, up to one. Answers whether that is worth a look. While a rank is silent it is
    /// not, and the loop's tick finds what there is.
    pub(crate) fn note(&mut self, job: &JobId, rank: u32, (steps, last): (u64, u64)) -> bool {
        let of_job = self.jobs.entry(job.clone()).or_default();
        let is_new = of_job.newest.insert(rank, last).is_none();
        let whole = of_job.newest.values().copied().min().unwrap_or_default();
        // Reports are not of equally many steps.
        let is_worth = whole > of_job.looked && 4 * (whole - of_job.looked) >= 3 * steps;
        let looks = is_new || is_worth || whole < of_job.looked;
        if looks {
            of_job.looked = whole;
        }
        looks
    }

    /// Forgets all but these runs: of a run that has another's name now it begins anew.
    pub(crate) fn retain(&mut self, runs: &[JobRow]) {
        let begun: BTreeMap<JobId, Timestamp> = runs.iter().map(|run| (run.job.clone(), run.created)).collect();
        let before = std::mem::replace(&mut self.begun, begun);
        let is_same = |job: &JobId| before.get(job).is_none_or(|at| self.begun.get(job) == Some(at));
        self.jobs.retain(|job, _| self.begun.contains_key(job) && is_same(job));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_report_is_worth_a_look_where_it_completes_about_as_many_steps_as_it_has() {
        let (mut reported, job) = (Reported::default(), "j".parse().unwrap());
        let mut note = |rank, steps, last| reported.note(&job, rank, (steps, last));
        assert_eq!([note(0, 10, 9), note(1, 6, 5)], [true; 2], "ranks that are new");
        assert_eq!([note(0, 10, 19), note(1, 10, 15)], [false, true], "5 to 15");
        assert_eq!([note(1, 10, 25), note(0, 10, 29), note(1, 10, 35)], [false, true, false], "15 to 19, to 25, to 29");
        assert_eq!([note(0, 2, 31), note(1, 1, 36)], [true, false], "to 31");
        assert!(note(0, 1, 3), "it has started again");
        assert!(!note(1, 4, 40));
    }
}
