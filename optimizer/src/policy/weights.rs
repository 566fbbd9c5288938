//! `weights`: least weighted sum, everything expressed in seconds.

use super::Policy;
use crate::Evaluated;
use flexcomm_domain::Seconds;
use serde::{Deserialize, Serialize};

/// comp * t_comp + sync * t_sync + inverse_gain_s * (1/gain - 1).
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Weights {
    /// Weight of a second of compressing.
    pub comp: f64,
    /// Weight of a second of communicating.
    pub sync: f64,
    /// Seconds that one unit of 1/gain is worth.
    pub inverse_gain_s: f64,
}

impl Default for Weights {
    /// Seconds count alike; losing half the energy (1/gain = 2) is worth 100 ms.
    fn default() -> Self {
        Self { comp: 1.0, sync: 1.0, inverse_gain_s: 0.1 }
    }
}

impl Policy for Weights {
    fn name(&self) -> &'static str {
        "weights"
    }

    fn score(&self, candidate: &Evaluated, _compute: Seconds) -> Option<f64> {
        let [t_comp, t_sync, inverse_gain] = candidate.objectives();
        Some(self.comp * t_comp + self.sync * t_sync + self.inverse_gain_s * (inverse_gain - 1.0))
    }

    fn describe(&self, score: f64) -> String {
        format!("a weighted sum of {:.3} ms", score * 1e3)
    }
}
