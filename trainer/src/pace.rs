//! When steps are worth a report: pure.

use flexcomm_wire::StepRecord;
use std::time::Duration;

/// Steps that are news wait for so long before they are handed on: what comes together goes together.
const SOONEST: Duration = Duration::from_millis(200);

/// The newest steps are those of so long, and as many at the least: single ones vary by themselves.
const NEWEST: usize = 3;

/// The first steps of what runs are news: decisions rest on ten at the least.
const FRESH: usize = 20;

/// The newest steps are news where they take so many times longer or shorter than those that were reported last.
const CHANGE: f64 = 1.5;

/// All that wait together are news where they take so many times longer or shorter, once they have waited for [`LEAST_WAIT`].
const CHANGE_OF_ALL: f64 = 1.2;

/// Steps that are no news wait for this part of the time for which nothing was new. Each report costs node and controller far more than
/// what is in it.
const PART: u32 = 4;
/// They wait for so long at the least,
const LEAST_WAIT: Duration = Duration::from_secs(1);
/// and at the most.
const MOST_WAIT: Duration = Duration::from_secs(4);

/// What was reported of the strategy that runs, by which the next steps are news or not.
#[derive(Debug, Default)]
pub struct Pace {
    /// Steps reported of what runs now.
    reported: usize,
    /// Mean time of those that were reported last.
    step_us: f64,
    /// For how long what was reported was nothing new.
    steady: Duration,
}

impl Pace {
    /// Whether steps that have waited for so long are to be reported now.
    pub fn is_due(&self, waited: Duration, pending: &[StepRecord]) -> bool {
        let most = (self.steady / PART).clamp(LEAST_WAIT, MOST_WAIT);
        waited >= SOONEST && (waited >= most || self.is_news(waited, pending))
    }

    fn is_news(&self, waited: Duration, pending: &[StepRecord]) -> bool {
        let changed = |steps: &[StepRecord], most: f64| {
            let now_us = mean_us(steps);
            now_us > most * self.step_us || now_us * most < self.step_us
        };
        let of_all = || waited >= LEAST_WAIT && changed(pending, CHANGE_OF_ALL);
        self.reported < FRESH || changed(newest(pending), CHANGE) || of_all()
    }

    /// These are reported, after they have waited for so long.
    pub fn reported(&mut self, waited: Duration, pending: &[StepRecord]) {
        self.steady = if self.is_news(waited, pending) { Duration::ZERO } else { self.steady + waited };
        self.reported += pending.len();
        self.step_us = mean_us(pending);
    }
}

/// The newest of them.
fn newest(steps: &[StepRecord]) -> &[StepRecord] {
    let mut took_us = 0.0;
    let count = steps.iter().rev().take_while(|step| {
        let is_newest = took_us < SOONEST.as_secs_f64() * 1e6;
        took_us += step.step_us;
        is_newest
    });
    &steps[steps.len() - count.count().max(NEWEST).min(steps.len())..]
}

fn mean_us(steps: &[StepRecord]) -> f64 {
    steps.iter().map(|s| s.step_us).sum::<f64>() / steps.len().max(1) as f64
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;

    /// A step of a microsecond.
    pub(crate) fn record(step: u64) -> StepRecord {
        StepRecord { step, compute_us: 1.0, step_us: 1.0, gain: 1.0, ..StepRecord::default() }
    }

    fn steps(step_us: f64, count: u64) -> Vec<StepRecord> {
        (0..count).map(|step| StepRecord { step_us, ..record(step) }).collect()
    }

    #[test]
    fn first_steps_and_other_times_are_news_and_the_rest_waits() {
        let (mut pace, soon, later, latest) = (Pace::default(), SOONEST, LEAST_WAIT, MOST_WAIT);
        assert!(!pace.is_due(soon / 2, &steps(100.0, 1)));
        assert!(pace.is_due(soon, &steps(100.0, 1)), "the first of all");
        pace.reported(soon, &steps(100.0, FRESH as u64));
        assert!(!pace.is_due(soon, &steps(140.0, 3)) && pace.is_due(soon, &steps(160.0, 3)));
        assert!(pace.is_due(soon, &steps(60.0, 3)) && pace.is_due(later, &steps(100.0, 9)));
        // Nothing new for a quarter of a minute.
        (0..15).for_each(|_| pace.reported(later, &steps(100.0, 9)));
        assert!(!pace.is_due(3 * later, &steps(110.0, 9)) && pace.is_due(latest, &steps(110.0, 9)));
        assert!(pace.is_due(later, &steps(130.0, 9)) && pace.is_due(soon, &steps(160.0, 3)));
        pace.reported(later, &steps(130.0, 9));
        assert!(pace.is_due(later, &steps(130.0, 9)), "after a change as often as before");
        assert!(!pace.is_due(soon, &steps(130.0, 3)), "reported already");
    }

    #[test]
    fn a_change_is_news_however_many_steps_wait_before_it() {
        let mut pace = Pace::default();
        (0..20).for_each(|_| pace.reported(LEAST_WAIT, &steps(1e5, 10)));
        let changed = |of: u64| [steps(1e5, 20), steps(2e5, of)].concat();
        assert!(!pace.is_due(2 * LEAST_WAIT, &changed(1)) && pace.is_due(2 * LEAST_WAIT, &changed(3)));
    }
}
