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
    /// `reference`; none where nothing changes. Counts as done.
    pub(super) fn factors(&mut self, reference: f64) -> Option<Vec<f32>> {
        if self.now.is_empty() {
            return None;
        }
        self.known.resize(self.now.len(), 0.0);
        let before = std::mem::replace(&mut self.reference, reference);
        let factor = |(now, known): (&f64, &mut f64)| {
            let last = *known;
            if now.is_finite() && *now > 0.0 {
                *known = *now;
            }
            // The relation in the same order of operations: what did not change gives 1 exactly.
            if last > 0.0 { ((last / before) / (*known / reference)) as f32 } else { 1.0 }
        };
        let factors: Vec<f32> = self.now.iter().zip(&mut self.known).map(factor).collect();
        let changes = |factor: &f32| (factor - 1.0).abs() > ROUNDING;
        factors.iter().any(changes).then_some(factors)
    }
}

/// Schedulers that multiply every group's rate round each product: a relation that differs by less did not change.
const ROUNDING: f32 = 1e-6;
