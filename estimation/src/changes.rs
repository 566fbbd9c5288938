//! How often a job's network changes.

use flexcomm_domain::Timestamp;
use serde::{Deserialize, Serialize};

/// Prior: one change in so many seconds, as if that had been seen once. Networks of clusters and clouds rarely hold for longer than
/// some minutes under load.
const PRIOR_S: f64 = 120.0;
/// What is seen of a change within so many seconds is one change: latencies, bandwidths and steps show it one after the other.
pub(crate) const SAME_S: f64 = 10.0;

/// Changes of a network that were seen, as a Poisson process whose rate is gamma-distributed.
#[derive(Debug, Clone, Copy, PartialEq, Default, Serialize, Deserialize)]
#[serde(default)]
pub struct Changes {
    seen: f64,
    watched_s: f64,
    last: Option<Timestamp>,
    /// When the change was noted first that was counted last.
    counted: Option<Timestamp>,
}

impl Changes {
    /// It was watched for so many seconds more.
    pub fn watch(&mut self, seconds: f64) {
        self.watched_s += seconds;
    }

    /// It shows a change.
    pub fn note(&mut self, now: Timestamp) {
        if self.counted.is_none_or(|at| now.since(at).get() > SAME_S) {
            self.seen += 1.0;
            self.counted = Some(now);
        }
        self.last = Some(now);
    }

    /// Seconds that were watched.
    pub fn watched_s(&self) -> f64 {
        self.watched_s
    }

    /// When a change was seen last.
    pub fn last(&self) -> Option<Timestamp> {
        self.last
    }

    /// Brings what lies in the future to the present: the clock jumped back.
    pub fn clamp_times(&mut self, now: Timestamp) {
        self.last = self.last.map(|at| at.min(now));
        self.counted = self.counted.map(|at| at.min(now));
    }

    /// Seconds to the next change, as expected.
    pub fn next_in_s(&self) -> f64 {
        (PRIOR_S + self.watched_s) / (1.0 + self.seen)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_rate_is_learnt_and_one_change_counts_once() {
        let mut changes = Changes::default();
        assert_eq!(changes.next_in_s(), PRIOR_S);
        for second in (0..600u64).step_by(30) {
            changes.watch(30.0);
            for later in [0, 2, 9] {
                changes.note(Timestamp((second + later) * 1_000_000));
            }
        }
        assert!((30.0..40.0).contains(&changes.next_in_s()), "{}", changes.next_in_s());
        let mut flapping = Changes::default();
        for second in (0..600u64).step_by(8) {
            flapping.watch(8.0);
            flapping.note(Timestamp(second * 1_000_000));
        }
        assert!(flapping.next_in_s() < 30.0, "{}", flapping.next_in_s());
        changes.watch(1e5);
        assert!(changes.next_in_s() > 4000.0, "a network that has come to rest");
    }

    #[test]
    fn a_clock_that_jumps_back_leaves_no_change_in_the_future() {
        let mut changes = Changes::default();
        changes.note(Timestamp(9_000_000));
        changes.clamp_times(Timestamp(1_000_000));
        assert_eq!(changes.last(), Some(Timestamp(1_000_000)));
    }
}
