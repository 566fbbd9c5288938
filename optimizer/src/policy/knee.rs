//! `knee`: the bend of the front, where less time starts to cost much gain.

use super::Policy;
use crate::Evaluated;
use flexcomm_domain::Seconds;
use serde::{Deserialize, Serialize};

/// The point closest to the ideal (no communication, nothing lost), with communication measured in
/// units of the step's own compute time and loss as 1/gain - 1. Fixed units instead of the front's own
/// range: the front's range moves with alpha and beta and would cancel them.
#[derive(Debug, Clone, Copy, PartialEq, Default, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Knee {
    /// Seconds that count as one unit of time; 0: the compute time, or [`Knee::FALLBACK_UNIT_S`] when
    /// that is unknown.
    pub unit_s: f64,
}

impl Knee {
    /// One unit of time when neither configured nor measured: a step of 100 ms is common.
    pub const FALLBACK_UNIT_S: f64 = 0.1;

    fn unit(&self, compute: Seconds) -> f64 {
        [self.unit_s, compute.get(), Self::FALLBACK_UNIT_S].into_iter().find(|u| *u > 0.0).unwrap_or(1.0)
    }
}

impl Policy for Knee {
    fn name(&self) -> &'static str {
        "knee"
    }

    fn score(&self, candidate: &Evaluated, compute: Seconds) -> Option<f64> {
        let [t_comp, t_sync, inverse_gain] = candidate.objectives();
        Some(((t_comp + t_sync) / self.unit(compute)).hypot(inverse_gain - 1.0))
    }

    fn describe(&self, score: f64) -> String {
        format!("a distance of {score:.3} from the ideal")
    }
}
