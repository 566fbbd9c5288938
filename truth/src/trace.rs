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

    /// The value at a moment.
    pub fn at(&self, seconds: f64) -> f64 {
        let after = self.steps.partition_point(|step| step.from <= seconds);
        self.steps[after.saturating_sub(1)].value
    }

    /// When it changes next.
    pub fn next_change(&self, seconds: f64) -> Option<f64> {
        let after = self.steps.partition_point(|step| step.from <= seconds);
        self.steps.get(after).map(|step| step.from)
    }
}
