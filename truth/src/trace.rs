//! A quantity that changes in steps.

/// A value over time: each holds from its moment until the next one.
#[derive(Debug, Clone, PartialEq)]
pub struct Trace {
    steps: Vec<Step>,
}

/// From when which value holds.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Step {
    /// Seconds since the start.
    pub from: f64,
    /// The value.
    pub value: f64,
}

impl Trace {
    /// The same value for ever.
    pub fn constant(value: f64) -> Self {
        Self { steps: vec![Step { from: 0.0, value }] }
    }

    /// Steps in the order of time, the first at 0; none where they are not.
    pub fn new(steps: Vec<Step>) -> Option<Self> {
        let ordered = steps.windows(2).all(|pair| pair[0].from < pair[1].from);
        let begins = steps.first().is_some_and(|first| first.from == 0.0);
        let finite = steps.iter().all(|step| step.from.is_finite() && step.value.is_finite());
        (ordered && begins && finite).then_some(Self { steps })
    }

    /// The value at a moment; before the start it is the first.
    pub fn at(&self, seconds: f64) -> f64 {
        self.steps[self.after(seconds) - 1].value
    }

    /// When it changes next.
    pub fn next_change(&self, seconds: f64) -> Option<f64> {
        self.steps.get(self.after(seconds)).map(|step| step.from)
    }

    /// The first step after a moment. Runs end long before their traces do, so it is looked for from the front in growing strides.
    fn after(&self, seconds: f64) -> usize {
        let mut end = 1;
        while self.steps.get(end).is_some_and(|step| step.from <= seconds) {
            end *= 2;
        }
        let begin = end / 2;
        let after = begin + self.steps[begin..end.min(self.steps.len())].partition_point(|step| step.from <= seconds);
        // The first value holds before its moment, too: it does not change there.
        after.max(1)
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
}
