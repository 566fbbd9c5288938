//! A quantity that changes in steps.

use std::cell::Cell;

/// A value over time: each holds from its moment until the next one.
#[derive(Debug, Clone)]
pub struct Trace {
    steps: Vec<Step>,
    /// Seconds after which it begins anew.
    period: Option<f64>,
    /// What it was asked for last: moments are asked for in turn, and many times.
    last: Cell<Held>,
}

/// A value, and the moments at which it is known to hold: at `from`, and up to `until` without it.
#[derive(Debug, Clone, Copy, PartialEq)]
struct Held {
    from: f64,
    until: f64,
    value: f64,
}

impl Held {
    /// At no moment.
    const NEVER: Cell<Self> = Cell::new(Self { from: f64::INFINITY, until: f64::NEG_INFINITY, value: 0.0 });
}

/// From when which value holds.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Step {
    /// Seconds since the start.
    pub from: f64,
    /// The value.
    pub value: f64,
}

impl PartialEq for Trace {
    fn eq(&self, other: &Self) -> bool {
        (&self.steps, self.period) == (&other.steps, other.period)
    }
}

impl Trace {
    /// The same value for ever.
    pub fn constant(value: f64) -> Self {
        Self { steps: vec![Step { from: 0.0, value }], period: None, last: Held::NEVER }
    }

    /// Steps in the order of time, the first at 0; none where they are not.
    pub fn new(steps: Vec<Step>) -> Option<Self> {
        let ordered = steps.windows(2).all(|pair| pair[0].from < pair[1].from);
        let begins = steps.first().is_some_and(|first| first.from == 0.0);
        let finite = steps.iter().all(|step| step.from.is_finite() && step.value.is_finite());
        (ordered && begins && finite).then_some(Self { steps, period: None, last: Held::NEVER })
    }

    /// The same, from the first step again every so many seconds; none, too, where the last step begins later than that.
    pub fn cyclic(steps: Vec<Step>, period: f64) -> Option<Self> {
        let trace = Self::new(steps)?;
        let fits = period.is_finite() && trace.steps.iter().all(|step| step.from < period);
        fits.then_some(Self { period: Some(period), ..trace })
    }

    /// The value at a moment; before the start it is the first.
    pub fn at(&self, seconds: f64) -> f64 {
        let last = self.last.get();
        if last.from <= seconds && seconds < last.until {
            return last.value;
        }
        let value = self.steps[self.after(self.cycles(seconds), seconds) - 1].value;
        self.last.set(Held { from: seconds, until: self.next_change(seconds).unwrap_or(f64::INFINITY), value });
        value
    }

    /// When it changes next.
    pub fn next_change(&self, seconds: f64) -> Option<f64> {
        let cycles = self.cycles(seconds);
        if let Some(step) = self.steps.get(self.after(cycles, seconds)) {
            return Some(self.begins(cycles) + step.from);
        }
        let (first, second, last) = (self.steps.first()?, self.steps.get(1)?, self.steps.last()?);
        self.period?;
        let next = if last.value == first.value { second } else { first };
        Some(self.begins(cycles + 1.0) + next.from)
    }

    /// When it has been gone through so many times.
    fn begins(&self, cycles: f64) -> f64 {
        self.period.map_or(0.0, |period| cycles * period)
    }

    /// How many times it has been gone through, such that [`Self::begins`] of it is at or before the moment: what division rounds would
    /// else make a change at that very moment come again and again.
    fn cycles(&self, seconds: f64) -> f64 {
        let Some(period) = self.period else { return 0.0 };
        let cycles = (seconds / period).floor().max(0.0);
        if self.begins(cycles + 1.0) <= seconds {
            cycles + 1.0
        } else if self.begins(cycles) > seconds {
            (cycles - 1.0).max(0.0)
        } else {
            cycles
        }
    }

    /// The first step after a moment that is so many cycles from the start; the second before it, since the first holds there, too.
    fn after(&self, cycles: f64, seconds: f64) -> usize {
        let begins = self.begins(cycles);
        self.steps.partition_point(|step| begins + step.from <= seconds).max(1)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_value_holds_from_its_moment_on() {
        for count in 1..40 {
            let step = |n: usize| Step { from: n as f64, value: 10.0 * n as f64 };
            let trace = Trace::new((0..count).map(step).collect()).unwrap();
            for at in 0..2 * count {
                let (begun, half) = (at.min(count - 1), at as f64 + 0.5);
                assert_eq!((trace.at(at as f64), trace.at(half)), (10.0 * begun as f64, 10.0 * begun as f64));
                let next = (at + 1 < count).then_some(at as f64 + 1.0);
                assert_eq!((trace.next_change(at as f64), trace.next_change(half)), (next, next));
            }
            assert_eq!((trace.at(-1.0), trace.next_change(-1.0)), (0.0, (count > 1).then_some(1.0)));
        }
    }

    #[test]
    fn a_cyclic_one_begins_anew_and_no_change_comes_twice() {
        let step = |(from, value): &(f64, f64)| Step { from: *from, value: *value };
        let cyclic = |steps: &[(f64, f64)], period| Trace::cyclic(steps.iter().map(step).collect(), period);
        assert_eq!(cyclic(&[(0.0, 1.0), (0.3, 2.0)], 0.3), None);
        for (period, last) in [(0.7, 3.0), (0.1 + 0.2 + 0.4, 1.0), (1.0 / 3.0 + 0.5, 3.0)] {
            let steps = [(0.0, 1.0), (0.1, 2.0), (0.3, last)];
            let trace = cyclic(&steps, period).unwrap();
            let (mut now, mut expected) = (0.0, Vec::new());
            for cycle in 0..5_000 {
                // Where a cycle ends with the value of the first step, nothing changes.
                let first = usize::from(cycle == 0 || last == 1.0);
                expected.extend(steps[first..].iter().map(|(from, value)| (f64::from(cycle) * period + from, *value)));
            }
            for (at, value) in expected {
                let next = trace.next_change(now).unwrap();
                assert!(next > now && (next - at).abs() < 1e-9, "{next} after {now}, not {at}");
                now = next;
                assert_eq!((trace.at(now), trace.at(now + 0.05)), (value, value));
            }
        }
        assert_eq!(cyclic(&[(0.0, 1.0)], 2.0).unwrap().next_change(5.0), None);
    }
}
