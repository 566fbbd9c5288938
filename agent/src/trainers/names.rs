//! How many new job names one user brings to the controller: it keeps so many jobs, and each new one is somebody's old one.

use flexcomm_domain::JobId;
use std::collections::BTreeMap;
use std::time::{Duration, Instant};

/// A name is new when its user has not brought it within this time.
const WINDOW: Duration = Duration::from_secs(3600);
/// Most new names of one user in [`WINDOW`]: a job every quarter of a minute, and a part of what the controller keeps.
pub(super) const MAX_NEW_NAMES: usize = 256;

/// By user, when they brought each name.
#[derive(Debug, Default)]
pub(super) struct Names(BTreeMap<u32, BTreeMap<JobId, Instant>>);

impl Names {
    /// Counts a name, or the reason why there may be no further one.
    pub(super) fn take(&mut self, uid: u32, job: &JobId, now: Instant) -> Result<(), String> {
        self.0.retain(|_, names| {
            names.retain(|_, since| now.saturating_duration_since(*since) < WINDOW);
            !names.is_empty()
        });
        let names = self.0.entry(uid).or_default();
        if names.len() >= MAX_NEW_NAMES && !names.contains_key(job) {
            return Err(format!(
                "user {uid} has brought {MAX_NEW_NAMES} new job names to this node within an hour: start {job} later, or \
                 under a name that was used (FLEXCOMM_JOB)"
            ));
        }
        names.entry(job.clone()).or_insert(now);
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn new_names_of_a_user_are_bounded_within_an_hour() {
        let (mut names, now) = (Names::default(), Instant::now());
        let job = |i: usize| format!("job{i}").parse().unwrap();
        for i in (0..MAX_NEW_NAMES).chain(0..MAX_NEW_NAMES) {
            names.take(1000, &job(i), now + Duration::from_secs(1)).unwrap();
        }
        let further = job(MAX_NEW_NAMES);
        let refused = names.take(1000, &further, now + WINDOW).unwrap_err();
        assert!(refused.contains("user 1000 has brought 256 new job names"), "{refused}");
        names.take(1001, &further, now + WINDOW).expect("another user's");
        names.take(1000, &further, now + WINDOW + Duration::from_secs(1)).expect("the hour is over");
        assert_eq!(names.0.values().map(BTreeMap::len).sum::<usize>(), 2, "what is over is forgotten");
    }
}
