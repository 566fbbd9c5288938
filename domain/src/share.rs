//! What probing may take of a link: an account in seconds' worth of its share, the same on both sides.

/// The least reserve, in seconds' worth: a cluster's links can be measured for the first time at once.
const LEAST_DEBT_S: f64 = 240.0;

/// Most that an account holds, in seconds' worth: an idle night does not allow a burst in the morning.
const MOST_S: f64 = 60.0;

/// The share holds over every window of this length, in seconds, or of [`WINDOW_DEBTS`] times the debt.
const WINDOW_S: f64 = 3600.0;

/// See [`WINDOW_S`].
const WINDOW_DEBTS: f64 = 6.0;

/// The slowest that a link is believed to be, bit/s: what bytes may cost before it was measured.
const SLOWEST_BPS: f64 = 1e6;

/// Frames, headers and the acknowledgements of the other direction, over TCP's payload.
const ON_THE_WIRE: f64 = 1.1;

/// How much a test matters, and so how far it may overdraw an account.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Need {
    /// It waits until it is paid.
    Routine,
    /// It is expected to save twice what it takes, or nothing has been measured for long: it may overdraw, but leaves room for what is
    /// urgent.
    Pressing,
    /// Something has changed: it may overdraw as far as anything may.
    Urgent,
}

/// How a [`ShareAccount`] grows and how far it may be overdrawn.
///
/// A link that changed must be measured at once, so that an account may be overdrawn by a bounded debt. It grows by
/// less than a second each second: by what is left of a window when the most that an account can hold and the
/// deepest debt are taken off. So the share holds not only on average but over every window of an hour.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct ShareRules {
    share: f64,
    longest_s: f64,
    deepest_s: f64,
    window_s: f64,
}

impl ShareRules {
    /// `share` of a link's capacity (above 0) for tests that fill a direction for at most `longest_s` seconds.
    pub fn new(share: f64, longest_s: f64) -> Self {
        let deepest_s = LEAST_DEBT_S.max(1.5 * longest_s / share);
        Self { share, longest_s, deepest_s, window_s: WINDOW_S.max(WINDOW_DEBTS * deepest_s) }
    }

    /// The deepest debt that a test may leave, in seconds' worth.
    pub fn deepest_s(&self) -> f64 {
        self.deepest_s
    }

    /// Over every window of this many seconds the share holds.
    pub fn window_s(&self) -> f64 {
        self.window_s
    }

    /// Seconds' worth that an account grows by in a second, when nothing else takes of the share.
    pub fn growth(&self) -> f64 {
        1.0 - (MOST_S + self.deepest_s) / self.window_s
    }

    /// What a test of `payload_bytes` in one direction costs at `bps` bit/s, in seconds' worth.
    pub fn cost_s(&self, payload_bytes: f64, bps: f64) -> f64 {
        ON_THE_WIRE * payload_bytes * 8.0 / bps / self.share
    }

    /// What it costs to fill a link for so many seconds, in seconds' worth: nothing can cost more in that time.
    pub fn fills_s(&self, seconds: f64) -> f64 {
        seconds / self.share
    }

    /// The deepest debt that a pressing test may leave: an urgent one must fit after it, and half of the reserve is its.
    fn pressing_s(&self) -> f64 {
        (self.deepest_s / 2.0).min(self.deepest_s - self.dearest_s())
    }

    /// What any test can cost at most, in seconds' worth: it fills its direction until its time is over.
    pub fn dearest_s(&self) -> f64 {
        self.fills_s(self.longest_s)
    }

    /// What a test of `payload_bytes` in one direction can cost at most, in seconds' worth, on whatever link: also
    /// one that was measured may have become slow since.
    pub fn most_s(&self, payload_bytes: f64) -> f64 {
        self.cost_s(payload_bytes, SLOWEST_BPS).min(self.dearest_s())
    }
}

/// An account in seconds' worth of the share of a link's capacity: unlike one in bytes it needs no conversion when
/// the capacity changes. Full at first; what is left of it must survive a restart.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct ShareAccount {
    level_s: f64,
    at_s: f64,
}

impl ShareAccount {
    /// A full one, at a time in seconds of any clock that only grows.
    pub fn full(now_s: f64) -> Self {
        Self { level_s: MOST_S, at_s: now_s }
    }

    /// One that survived; the time in between does not count, since no clock can be trusted over a restart. What is
    /// no number counts as nothing.
    pub fn restored(level_s: f64, now_s: f64) -> Self {
        let level_s = if level_s.is_finite() { level_s.min(MOST_S) } else { 0.0 };
        Self { level_s, at_s: now_s }
    }

    /// Grows up to now. `other_probes` is the part of the share (0 to 1) that other probes take all the time.
    pub fn grow(&mut self, rules: &ShareRules, now_s: f64, other_probes: f64) {
        let passed = (now_s - self.at_s).max(0.0);
        let growth = (rules.growth() - other_probes).max(0.0);
        (self.level_s, self.at_s) = ((self.level_s + growth * passed).min(MOST_S), self.at_s.max(now_s));
    }

    /// Whether a test fits that is planned to cost `cost_s` and may cost `most_s`. A routine one that is dearer than a
    /// full account waits until the account is full.
    pub fn may_pay(&self, rules: &ShareRules, (cost_s, most_s): (f64, f64), need: Need) -> bool {
        let least = match need {
            Need::Routine => cost_s.min(MOST_S),
            Need::Pressing => cost_s - rules.pressing_s(),
            Need::Urgent => f64::NEG_INFINITY,
        };
        self.level_s >= least && self.level_s - most_s >= -rules.deepest_s
    }

    /// Takes off what a test costs; a negative number gives back.
    pub fn charge(&mut self, cost_s: f64) {
        self.level_s -= cost_s;
    }

    /// What is left, in seconds' worth.
    pub fn level_s(&self) -> f64 {
        self.level_s
    }

    /// Whether there is nothing to remember.
    pub fn is_full(&self) -> bool {
        self.level_s >= MOST_S
    }

    /// After how many seconds a test that may cost `most_s` fits again.
    pub fn wait_s(&self, rules: &ShareRules, most_s: f64) -> f64 {
        ((most_s - rules.deepest_s - self.level_s) / rules.growth()).max(0.0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn need() -> impl Strategy<Value = Need> {
        prop_oneof![Just(Need::Routine), Just(Need::Pressing), Just(Need::Urgent)]
    }

    proptest! {
        /// However often tests are asked for, whatever they cost within their bounds: in every window the time that
        /// they filled the link stays within the share.
        #[test]
        fn the_share_holds_over_every_window(
            share in 0.0005f64..0.2,
            tests in prop::collection::vec((0.0f64..60.0, 0.0f64..=1.0, 0.0f64..=1.0, need()), 1..400),
        ) {
            let rules = ShareRules::new(share, 4.0);
            let mut account = ShareAccount::full(0.0);
            let (mut now, mut spent) = (0.0, Vec::new());
            for (wait, planned, part, need) in tests {
                now += wait;
                account.grow(&rules, now, 0.0);
                let most = rules.dearest_s();
                if account.may_pay(&rules, (planned * most, most), need) {
                    account.charge(part * most);
                    spent.push((now, part * most));
                }
            }
            for (i, (begin, _)) in spent.iter().enumerate() {
                let window = spent[i..].iter().take_while(|(at, _)| at - begin <= rules.window_s());
                let worth: f64 = window.map(|(_, cost)| cost).sum();
                prop_assert!(worth <= rules.window_s() + 1e-6, "{worth} s' worth in {} s", rules.window_s());
            }
        }
    }

    #[test]
    fn debts_are_bounded_and_worked_off() {
        let rules = ShareRules::new(0.01, 4.0);
        assert_eq!((rules.most_s(1e9), rules.most_s(0.0)), (400.0, 0.0));
        assert!((rules.most_s(12_500.0) - 11.0).abs() < 1e-9);
        assert_eq!((rules.deepest_s(), rules.window_s(), rules.dearest_s()), (600.0, 3600.0, 400.0));
        let mut account = ShareAccount::full(0.0);
        assert!(account.is_full() && account.may_pay(&rules, (400.0, 400.0), Need::Routine));
        account.charge(400.0);
        let may = |account: &ShareAccount, cost, need| account.may_pay(&rules, cost, need);
        assert!(!may(&account, (20.0, 20.0), Need::Routine) && may(&account, (20.0, 20.0), Need::Urgent));
        assert!(!may(&account, (20.0, 400.0), Need::Urgent));
        let wait = account.wait_s(&rules, 400.0);
        account.grow(&rules, wait, 0.0);
        assert!((account.level_s() + 200.0).abs() < 1e-9, "{account:?}");
        account.grow(&rules, wait + 1e6, 0.0);
        assert!(account.is_full());
    }

    /// A pressing test does not wait for what urgent ones overdrew, and one more urgent test fits after it.
    #[test]
    fn pressing_tests_leave_room_for_urgent_ones() {
        for (share, deepest_s) in [(0.01, 600.0), (0.3, 240.0)] {
            let rules = ShareRules::new(share, 4.0);
            let mut account = ShareAccount::full(0.0);
            let (cost, dearest) = ((5.0, 10.0), rules.dearest_s());
            account.charge(100.0);
            assert!(!account.may_pay(&rules, cost, Need::Routine));
            while account.may_pay(&rules, cost, Need::Pressing) {
                account.charge(cost.0);
            }
            assert_eq!(rules.deepest_s(), deepest_s);
            assert!(account.level_s() < -100.0, "{account:?}");
            assert!(account.may_pay(&rules, (dearest, dearest), Need::Urgent), "{account:?}");
        }
    }

    #[test]
    fn what_survives_is_neither_more_nor_forgotten() {
        assert_eq!(ShareAccount::restored(-300.0, 5.0).level_s(), -300.0);
        assert_eq!(ShareAccount::restored(1e9, 5.0), ShareAccount::full(5.0));
        assert_eq!(ShareAccount::restored(f64::NAN, 5.0).level_s(), 0.0);
        let rules = ShareRules::new(0.01, 4.0);
        let mut account = ShareAccount::restored(0.0, 5.0);
        account.grow(&rules, 1.0, 0.0);
        assert_eq!(account.level_s(), 0.0, "a clock that goes back");
        account.grow(&rules, 105.0, 0.5);
        assert!((account.level_s() - 100.0 * (rules.growth() - 0.5)).abs() < 1e-9);
    }
}
