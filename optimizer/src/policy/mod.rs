//! Picking one point of the Pareto front. One small trait, one file per policy with its configuration.
//!
//! All rank by absolute times. Scaling each objective to the front's own range would cancel alpha and
//! beta: a network ten times slower would then lead to the same choice.

mod knee;
mod time_to_quality;
mod weights;

pub use knee::Knee;
pub use time_to_quality::TimeToQuality;
pub use weights::Weights;

use crate::Evaluated;
use flexcomm_domain::{Invalid, Seconds};
use serde::{Deserialize, Serialize};

/// What a policy picked.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Choice {
    /// Index into the candidates.
    pub index: usize,
    /// What the policy minimised, for this candidate; its meaning is the policy's.
    pub score: f64,
    /// One sentence why.
    pub why: String,
}

/// A named rule that picks one candidate.
pub trait Policy: std::fmt::Debug {
    /// Its name in configuration and reports.
    fn name(&self) -> &'static str;

    /// What is minimised for this candidate; smaller is better. None: not eligible.
    /// `compute` is the step's forward and backward time.
    fn score(&self, candidate: &Evaluated, compute: Seconds) -> Option<f64>;

    /// How the score reads in a sentence, for example `0.120 ms for the progress of a dense step`.
    fn describe(&self, score: f64) -> String;

    /// Picks the least score among the candidates on `front` (indices into `candidates`). Ties and equal
    /// scores go to the higher gain, then to the shorter step, then to the earlier candidate; a score that
    /// is NaN loses to every number. When nothing is eligible, the candidate of the highest gain is picked
    /// (dense, which is always among the candidates). Panics only if `candidates` is empty.
    fn choose(&self, candidates: &[Evaluated], front: &[usize], compute: Seconds) -> Choice {
        let score = |i: usize| self.score(&candidates[i], compute).filter(|s| !s.is_nan());
        let eligible = front.iter().filter_map(|&i| Some((score(i)?, i)));
        let best = eligible.min_by(|a, b| a.0.total_cmp(&b.0).then_with(|| prefer(candidates, a.1, b.1)));
        let Some((score, index)) = best else { return fallback(self.name(), candidates) };
        let why = explain(self.name(), candidates, index, &self.describe(score));
        Choice { index, score, why }
    }
}

fn prefer(candidates: &[Evaluated], a: usize, b: usize) -> std::cmp::Ordering {
    let (x, y) = (&candidates[a], &candidates[b]);
    let by_gain = y.gain.get().total_cmp(&x.gain.get());
    by_gain.then(x.t_step.get().total_cmp(&y.t_step.get())).then(a.cmp(&b))
}

fn fallback(name: &str, candidates: &[Evaluated]) -> Choice {
    let index = (0..candidates.len()).min_by(|&a, &b| prefer(candidates, a, b)).expect("a space is never empty");
    let strategy = candidates[index].strategy;
    let why = format!("{name}: no candidate is eligible, so {strategy}, which keeps the most of the gradient");
    Choice { index, score: f64::MAX, why }
}

fn explain(name: &str, candidates: &[Evaluated], index: usize, score: &str) -> String {
    let chosen = &candidates[index];
    let dense =
        candidates.iter().filter(|c| c.strategy.is_dense()).min_by(|a, b| a.t_step.get().total_cmp(&b.t_step.get()));
    let head = format!("{name}: {} has the best score, {score}", chosen.strategy);
    match dense {
        _ if chosen.strategy.is_dense() => format!("{head}; dense is best: no compression pays for what it loses"),
        Some(dense) => format!(
            "{head}: a step of {} at gain {:.3} where dense ({}) takes {}",
            chosen.t_step,
            chosen.gain.get(),
            dense.strategy.collective(),
            dense.t_step
        ),
        None => head,
    }
}

/// A policy with its settings, as configuration and reports hold it.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(tag = "name", rename_all = "kebab-case", deny_unknown_fields)]
pub enum PolicyConfig {
    /// Least time for the progress of a dense step, gain at or above a floor.
    TimeToQuality(TimeToQuality),
    /// Closest to the ideal point in fixed units.
    Knee(Knee),
    /// Least weighted sum in seconds.
    Weights(Weights),
}

impl Default for PolicyConfig {
    fn default() -> Self {
        Self::TimeToQuality(TimeToQuality::default())
    }
}

impl PolicyConfig {
    /// Their names.
    pub const NAMES: [&str; 3] = ["time-to-quality", "knee", "weights"];

    /// The policy of this name with its default settings.
    pub fn by_name(name: &str) -> Result<Self, Invalid> {
        match name {
            "time-to-quality" => Ok(Self::TimeToQuality(TimeToQuality::default())),
            "knee" => Ok(Self::Knee(Knee::default())),
            "weights" => Ok(Self::Weights(Weights::default())),
            _ => Err(Invalid::Combination(format!("policy {name:?} is not one of {}", Self::NAMES.join(", ")))),
        }
    }

    /// The least gain that it admits; 0 when it has no floor.
    pub fn gain_floor(&self) -> f64 {
        match self {
            Self::TimeToQuality(p) => p.gain_floor,
            Self::Knee(_) | Self::Weights(_) => 0.0,
        }
    }

    /// How time and gain weigh against each other, whatever else the policy wants: its own rule, else the default one.
    pub fn time_to_quality(&self) -> TimeToQuality {
        match self {
            Self::TimeToQuality(p) => *p,
            Self::Knee(_) | Self::Weights(_) => TimeToQuality::default(),
        }
    }

    /// The same for a job whose optimizer has this momentum, where it does not say itself what delay costs.
    pub fn of_momentum(&self, momentum: Option<f64>) -> Self {
        match self {
            Self::TimeToQuality(p) => Self::TimeToQuality(TimeToQuality { momentum: p.momentum.or(momentum), ..*p }),
            other => other.clone(),
        }
    }

    /// The rule.
    pub fn policy(&self) -> &dyn Policy {
        match self {
            Self::TimeToQuality(p) => p,
            Self::Knee(p) => p,
            Self::Weights(p) => p,
        }
    }
}

#[cfg(test)]
mod tests;
