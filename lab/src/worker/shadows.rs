//! Shadow trials of the usual candidates, fed with every step's gradient; they lend their gains to live trials.

use flexcomm_compression::Compressor;
use flexcomm_compression::{CompressError, Layers, LayersError, Method, SHADOW_VALUES, Shadow};
use flexcomm_domain::{CompressionRatio, Strategy};
use flexcomm_wire::TrialReport;

/// Candidates that run from the first step on: what the planner tries by default. Others start when a live trial
/// first names them.
const COMPRESSORS: [Compressor; 2] = [Compressor::TopK, Compressor::LwTopK];
const CRS: [f64; 5] = [0.1, 0.033, 0.011, 0.004, 0.001];

/// Steps from which on a shadow knows more than a live trial of ten iterations.
const ENOUGH_STEPS: u64 = 20;

/// A rank's shadow trials.
pub struct Shadows {
    shadow: Shadow,
}

impl Shadows {
    /// Over a subset of the coordinates that `seed` picks.
    pub fn new(layers: &Layers, seed: u64) -> Result<Self, LayersError> {
        let mut shadow = Shadow::new(layers, SHADOW_VALUES, seed)?;
        for compressor in COMPRESSORS {
            for cr in CRS.iter().filter_map(|cr| CompressionRatio::new(*cr).ok()) {
                shadow.add(Method::new(compressor, cr));
            }
        }
        Ok(Self { shadow })
    }

    /// Takes in the gradient of a step of the training itself.
    pub fn observe(&mut self, gradient: &[f32]) -> Result<(), CompressError> {
        self.shadow.observe(gradient)
    }

    /// Adds what the shadows know to a live trial's report. Dense loses nothing and has no shadow.
    pub fn complete(&mut self, report: &mut TrialReport) {
        for outcome in &mut report.outcomes {
            let Ok(strategy) = Strategy::try_from(&outcome.strategy) else { continue };
            if strategy.is_dense() {
                continue;
            }
            let Some(method) = Method::of(&strategy) else { continue };
            self.shadow.add(method);
            let known = self.shadow.gain(method).filter(|g| g.steps >= ENOUGH_STEPS);
            outcome.shadow_gain = known.map(|g| g.gain.clamp(super::report::LEAST_GAIN, 1.0));
        }
    }
}
