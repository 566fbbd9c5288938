//! Learning rates of a bucket's layers, which may belong to several parameter groups of the optimizer.
//!
//! A residual stands for an update that was not made: at another learning rate it is rescaled, by the pipeline for the whole
//! bucket and by the first group's rate. What is noted here is how the other groups' rates relate to it. Where that relation
//! stays, as under most schedulers, there is nothing to do; where it changes, each layer's residual is scaled by the rest.

/// Rates of the layers as they were when the residual was scaled last.
#[derive(Debug, Default)]
pub(super) struct LayerRates {
    /// Of the step to come; empty when all layers have the first group's.
    pub(super) now: Vec<f64>,
    /// Of each layer the last rate above 0; 0 before the first.
    known: Vec<f64>,
    /// The first group's at the time.
    reference: f64,
}

impl LayerRates {
    /// What each layer's residual is to be multiplied by, besides the ratio of the first group's rates, before a step at
    /// `reference`, which is none before the first rate above 0; none where nothing changes. Once it is done, [`Self::applied`].
    pub(super) fn factors(&self, reference: Option<f64>) -> Option<Vec<f32>> {
        let reference = reference?;
        let known = self.known.iter().copied().chain(std::iter::repeat(0.0));
        let factor = |(now, last): (&f64, f64)| {
            // The relation in the same order of operations: what did not change gives 1 exactly.
            if last > 0.0 { ((last / self.reference) / (counts(*now, last) / reference)) as f32 } else { 1.0 }
        };
        let factors: Vec<f32> = self.now.iter().zip(known).map(factor).collect();
        let changes = |factor: &f32| (factor - 1.0).abs() > ROUNDING;
        factors.iter().any(changes).then_some(factors)
    }

    /// Residuals are scaled for a step at `reference`.
    pub(super) fn applied(&mut self, reference: Option<f64>) {
        let Some(reference) = reference.filter(|_| !self.now.is_empty()) else { return };
        self.reference = reference;
        self.known.resize(self.now.len(), 0.0);
        self.known.iter_mut().zip(&self.now).for_each(|(known, now)| *known = counts(*now, *known));
    }
}

/// The last rate above 0.
fn counts(now: f64, last: f64) -> f64 {
    if now.is_finite() && now > 0.0 { now } else { last }
}

/// Schedulers that multiply every group's rate round each product: a relation that differs by less did not change.
const ROUNDING: f32 = 1e-6;
