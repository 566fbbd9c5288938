//! `time-to-quality`: least t_step/gain with gain at or above a floor.

use super::Policy;
use crate::Evaluated;
use flexcomm_domain::Seconds;
use serde::{Deserialize, Serialize};

/// Least step time per unit of gain: a step that keeps half the gradient's energy is worth half a step.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct TimeToQuality {
    /// Candidates that keep less are not eligible.
    pub gain_floor: f64,
}

impl Default for TimeToQuality {
    /// A floor of 0.05: below it, one step in twenty does a dense step's work and noise dominates.
    fn default() -> Self {
        Self { gain_floor: 0.05 }
    }
}

impl Policy for TimeToQuality {
    fn name(&self) -> &'static str {
        "time-to-quality"
    }

    fn score(&self, candidate: &Evaluated, _compute: Seconds) -> Option<f64> {
        (candidate.gain.get() >= self.gain_floor).then(|| candidate.time_per_gain())
    }

    fn describe(&self, score: f64) -> String {
        format!("{:.3} ms of step per unit of gain", score * 1e3)
    }
}
