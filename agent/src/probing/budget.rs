//! This node's own limit on bytes for throughput tests, whatever the controller grants. It outlives restarts: a test
//! is paid with the most that it can cost, and that is on disk, before the first byte leaves.

use crate::files;
use flexcomm_domain::{Need, ShareAccount, ShareRules};
use flexcomm_wire::MAX_TEST_S;
use std::io;
use std::path::PathBuf;

/// An account in seconds' worth of the share of the link's capacity. Times are seconds of any clock that only grows.
#[derive(Debug, Clone)]
pub struct Account {
    rules: ShareRules,
    account: ShareAccount,
}

impl Account {
    /// With what was left of it. `share` of the capacity, above 0.
    pub fn restored(level_s: f64, share: f64, now_s: f64) -> Self {
        Self { rules: ShareRules::new(share, MAX_TEST_S), account: ShareAccount::restored(level_s, now_s) }
    }

    /// Pays for a test of `bytes` of payload in each direction with the most that it can cost; if it cannot, after
    /// how many seconds.
    pub fn hold(&mut self, now_s: f64, bytes: u64) -> Result<Held, f64> {
        let most_s = self.rules.most_s(bytes as f64);
        self.account.grow(&self.rules, now_s, 0.0);
        if !self.account.may_pay(&self.rules, (0.0, most_s), Need::Urgent) {
            return Err(self.account.wait_s(&self.rules, most_s));
        }
        self.account.charge(most_s);
        Ok(Held(most_s))
    }

    /// Gives back what a test did not cost. `bytes` is its payload in the direction that had more of it.
    pub fn settle(&mut self, held: Held, bytes: u64, capacity_bps: f64) {
        let cost_s = match bytes {
            0 => 0.0,
            _ if capacity_bps > 0.0 => self.rules.cost_s(bytes as f64, capacity_bps),
            _ => held.0,
        };
        self.account.charge(cost_s - held.0);
    }
}

/// What is reserved for a test that runs, in seconds' worth.
#[derive(Debug)]
pub struct Held(f64);

/// An account in a file of its own.
#[derive(Debug, Clone)]
pub(crate) struct Budget {
    pub(crate) account: Account,
    path: PathBuf,
}

impl Budget {
    /// Takes up what the file says; empty when there is none or it cannot be read.
    pub(crate) fn open(path: PathBuf, share: f64, now_s: f64) -> Self {
        let stored = std::fs::read_to_string(&path).ok().and_then(|text| text.trim().parse().ok());
        Self { account: Account::restored(stored.unwrap_or(0.0), share, now_s), path }
    }

    /// Brings the account to disk.
    pub(crate) fn store(&self) -> io::Result<()> {
        files::replace(&self.path, format!("{}\n", self.account.account.level_s()).as_bytes())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    /// More than a slow link carries in a test's time.
    const LONG: u64 = 1 << 20;

    proptest! {
        /// However often tests are asked for, the capacity changes and the agent is killed: the time that the tests
        /// filled the link, in each direction, stays within the share over every hour.
        #[test]
        fn the_share_holds_over_restarts(
            tests in prop::collection::vec((0.0f64..60.0, 1u64..5_000_000, 1e6f64..1e9, 0u8..3), 1..200),
        ) {
            let dir = tempfile::tempdir().unwrap();
            let path = dir.path().join("budget");
            let mut budget = Budget::open(path.clone(), 0.01, 0.0);
            let (mut now, mut begun, mut busy) = (0.0, 0.0, Vec::new());
            for (wait, bytes, capacity, end) in tests {
                now += wait;
                let Ok(held) = budget.account.hold(now - begun, bytes) else { continue };
                budget.store().unwrap();
                let seconds = (bytes as f64 * 8.0 / capacity).min(MAX_TEST_S);
                busy.push((now, seconds));
                match end {
                    // Killed in the middle of the test, or right after it.
                    0 => {}
                    1 => {
                        budget.account.settle(held, (seconds * capacity / 8.0) as u64, capacity);
                        continue;
                    }
                    _ => {
                        budget.account.settle(held, (seconds * capacity / 8.0) as u64, capacity);
                        budget.store().unwrap();
                    }
                }
                budget = Budget::open(path.clone(), 0.01, 0.0);
                begun = now;
            }
            for (i, (begin, _)) in busy.iter().enumerate() {
                let hour: f64 = busy[i..].iter().take_while(|(at, _)| at - begin <= 3600.0).map(|(_, s)| s).sum();
                prop_assert!(hour <= 36.0, "{hour} s busy in an hour");
            }
        }
    }

    #[test]
    fn a_deep_debt_names_the_wait_and_survives() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("budget");
        let mut budget = Budget::open(path.clone(), 0.01, 0.0);
        // Nothing on disk: an empty account. 4 s of a link in each direction are 400 s of its share.
        assert!(budget.account.hold(0.0, LONG).is_ok());
        let wait = budget.account.hold(0.0, LONG).unwrap_err();
        assert!(wait > 200.0, "{wait}");
        budget.store().unwrap();
        let mut later = Budget::open(path.clone(), 0.01, 0.0);
        assert!((later.account.hold(0.0, LONG).unwrap_err() - wait).abs() < 1e-6);
        let held = later.account.hold(wait + 1.0, LONG).unwrap();
        later.account.settle(held, 0, 1e9);
        assert!(later.account.hold(wait + 1.0, LONG).is_ok(), "a test that could not connect cost nothing");
        std::fs::write(&path, "nonsense").unwrap();
        assert!(Budget::open(path, 0.01, 0.0).account.hold(0.0, LONG).is_ok());
    }

    #[test]
    fn what_is_unknown_costs_all_that_was_held() {
        let dir = tempfile::tempdir().unwrap();
        let mut budget = Budget::open(dir.path().join("budget"), 0.01, 0.0);
        let held = budget.account.hold(0.0, LONG).unwrap();
        budget.account.settle(held, 1000, 0.0);
        assert!(budget.account.hold(0.0, LONG).is_err());
    }
}
