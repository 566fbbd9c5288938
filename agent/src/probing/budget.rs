//! This node's own limit on bytes for throughput tests, whatever the controller grants: pure.

/// The account holds at most so many seconds' worth of the share: an idle night allows no burst in the morning.
const MOST_S: f64 = 60.0;
/// How deep it may be overdrawn, in seconds' worth: a link that changed must be measured at once, and later tests
/// wait for it. The share holds on average.
const DEEPEST_S: f64 = 300.0;

/// An account in seconds' worth of the share of the link's capacity: unlike one in bytes it needs no conversion when
/// the capacity changes.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Budget {
    share: f64,
    level_s: f64,
    at_s: f64,
}

impl Budget {
    /// Full at first. `share` of the capacity, above 0; times are seconds of any clock that only grows.
    pub(crate) fn new(share: f64, now_s: f64) -> Self {
        Self { share, level_s: MOST_S, at_s: now_s }
    }

    /// Whether another test may run; if not, after how many seconds.
    pub(crate) fn check(&mut self, now_s: f64) -> Result<(), f64> {
        let passed = (now_s - self.at_s).max(0.0);
        (self.level_s, self.at_s) = ((self.level_s + passed).min(MOST_S), now_s);
        if self.level_s > -DEEPEST_S { Ok(()) } else { Err(-DEEPEST_S - self.level_s) }
    }

    /// A test spent `bytes` on a link of `capacity_bps` (either direction counts by itself, so half of it each way).
    pub(crate) fn spend(&mut self, bytes: u64, capacity_bps: f64) {
        if capacity_bps > 0.0 {
            self.level_s -= bytes as f64 * 8.0 / 2.0 / (self.share * capacity_bps);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        /// However often tests are asked for and however the capacity changes: the time that the tests filled the
        /// link, in each direction, stays within the share plus the bounded debt.
        #[test]
        fn the_share_holds_on_average(tests in prop::collection::vec((0.0f64..20.0, 1u64..5_000_000, 1e6f64..1e9), 1..300)) {
            let share = 0.01;
            let mut budget = Budget::new(share, 0.0);
            let (mut now, mut busy_s, mut last) = (0.0, 0.0, 0.0f64);
            for (wait, bytes, capacity) in tests {
                now += wait;
                if budget.check(now).is_ok() {
                    budget.spend(bytes, capacity);
                    last = bytes as f64 * 4.0 / capacity;
                    busy_s += last;
                }
                let allowed = share * (now + MOST_S + DEEPEST_S) + last;
                prop_assert!(busy_s <= allowed + 1e-9, "{busy_s} s busy in {now} s");
            }
        }
    }

    #[test]
    fn a_deep_debt_names_the_wait() {
        let mut budget = Budget::new(0.01, 0.0);
        // 4 s of a link of 1 Mbit/s in each direction are 400 s of its share.
        budget.spend(1_000_000, 1e6);
        assert_eq!(budget.check(0.0), Err(40.0));
        assert_eq!(budget.check(40.5), Ok(()));
    }
}
