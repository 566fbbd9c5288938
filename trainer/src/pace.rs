//! When steps are worth a report: pure.

use flexcomm_wire::StepRecord;
use std::time::Duration;

/// Steps wait for at most this long before they are handed on.
const LATEST: Duration = Duration::from_secs(1);

/// ... and for so long where they are news. Each report costs the node and the controller more than what is in it.
const SOONEST: Duration = Duration::from_millis(200);

/// The first steps of what runs are news: decisions rest on ten at the least.
const FRESH: usize = 20;

/// And steps that take so many times longer or shorter than those that were reported last.
const CHANGE: f64 = 1.5;

/// What was reported of the strategy that runs, by which the next steps are news or not.
#[derive(Debug, Default)]
pub struct Pace {
    /// Steps reported of what runs now.
    reported: usize,
    /// Mean time of those that were reported last.
    step_us: f64,
}

impl Pace {
    /// Whether steps that have waited for so long are to be reported now.
    pub fn is_due(&self, waited: Duration, pending: &[StepRecord]) -> bool {
        waited >= LATEST || (waited >= SOONEST && (self.reported < FRESH || self.has_changed(pending)))
    }

    fn has_changed(&self, pending: &[StepRecord]) -> bool {
        let now = mean_us(pending);
        now > CHANGE * self.step_us || now * CHANGE < self.step_us
    }

    /// These are reported.
    pub fn reported(&mut self, pending: &[StepRecord]) {
        self.reported += pending.len();
        self.step_us = mean_us(pending);
    }
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
        let (mut pace, soon, late) = (Pace::default(), SOONEST, LATEST);
        assert!(!pace.is_due(soon / 2, &steps(100.0, 1)));
        assert!(pace.is_due(soon, &steps(100.0, 1)), "the first of all");
        pace.reported(&steps(100.0, FRESH as u64));
        assert!(!pace.is_due(soon, &steps(120.0, 3)) && pace.is_due(late, &steps(120.0, 3)));
        assert!(pace.is_due(soon, &steps(160.0, 3)) && pace.is_due(soon, &steps(60.0, 3)));
        pace.reported(&steps(160.0, 3));
        assert!(!pace.is_due(soon, &steps(160.0, 3)), "reported already");
    }
}
