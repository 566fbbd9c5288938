//! `time-to-quality`: least time for the progress of a dense step, with gain at or above a floor.

use super::Policy;
use crate::Evaluated;
use flexcomm_domain::Seconds;
use flexcomm_estimation::{Delay, Quality};
use serde::{Deserialize, Serialize};

/// Least step time times the steps it takes, see [`Quality::steps`].
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct TimeToQuality {
    /// Candidates whose [`Quality::effective_gain`] is below are not eligible.
    pub gain_floor: f64,
    /// Exponent p of gain^-p, the steps that make the progress of a dense one under error feedback; 0 to 1. 1: a step that keeps
    /// half the gradient's energy is worth half a step. 0: nothing is lost by sending later. Default: by the law of the job's momentum
    /// and of the steps to come, see [`Delay::of_training`].
    pub exponent: Option<f64>,
    /// Of the job's optimizer, at least 0 and below 1. Default: as the trainers say.
    pub momentum: Option<f64>,
    /// Steps of the whole training, 1 or more: the more are to come, the less delay costs. Default: as many are expected to come as were taken,
    /// at least [`crate::DELAY_STEPS`].
    pub steps: Option<f64>,
}

impl Default for TimeToQuality {
    /// No floor: what little is kept costs is in the steps it takes.
    fn default() -> Self {
        Self { gain_floor: 0.0, exponent: None, momentum: None, steps: None }
    }
}

impl TimeToQuality {
    /// What delay costs in the whole training.
    pub fn delay(&self) -> Delay {
        self.delay_in(self.steps)
    }

    /// What delay costs where so many steps are to come.
    pub fn delay_in(&self, to_come: Option<f64>) -> Delay {
        self.exponent.map_or_else(|| Delay::of_training(self.momentum, to_come), Delay::of_exponent)
    }

    /// Seconds for the progress of one dense step, by steps of `t_step` seconds.
    pub fn seconds(&self, t_step: f64, quality: &Quality) -> f64 {
        t_step * quality.steps(self.delay())
    }

    /// The least gain at which a step of `t_step` seconds, otherwise of this quality, is worth as much as a dense one of
    /// `dense` seconds; none when it takes longer.
    pub fn break_even(&self, t_step: f64, quality: &Quality, dense: f64) -> Option<f64> {
        if quality.variance > 0.0 {
            let draws = (1.0 / quality.gain.get() - 1.0) / quality.variance;
            return (t_step <= dense).then(|| 1.0 / (1.0 + (dense / t_step - 1.0) * draws));
        }
        let worth = (0.0 < t_step && t_step <= dense).then(|| dense / t_step)?;
        // Where delay is free any gain will do.
        Some(quality.gain_of(worth, self.delay()).unwrap_or(0.0))
    }

    /// Seconds of computing from which on a dense step is the better one, for a step that communicates for `t` seconds at
    /// this quality where a dense one does for `dense`; `overlap` as in [`crate::Problem`]. Both take the same computing, so
    /// what the shorter communication saves is a share that falls as computing grows. Infinite where nothing is lost.
    pub fn dense_from(&self, t: f64, quality: &Quality, dense: f64, overlap: f64) -> f64 {
        let worth = self.seconds(t, quality);
        if worth >= dense {
            return 0.0;
        }
        // Both sides in units of the dense step, so that tiny times do not underflow.
        let saved = 1.0 - (worth / dense).powf(overlap);
        dense * (saved / (quality.steps(self.delay()).powf(overlap) - 1.0)).powf(1.0 / overlap)
    }
}

impl Policy for TimeToQuality {
    fn name(&self) -> &'static str {
        "time-to-quality"
    }

    fn score(&self, candidate: &Evaluated, _compute: Seconds) -> Option<f64> {
        let quality = candidate.quality();
        (quality.effective_gain() >= self.gain_floor).then(|| self.seconds(candidate.t_step.get(), &quality))
    }

    fn describe(&self, score: f64) -> String {
        format!("{:.3} ms for the progress of a dense step", score * 1e3)
    }
}
