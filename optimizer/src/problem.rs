//! What a strategy would cost here and now: the objectives (t_comp, t_sync, 1/gain) and the step time.

use crate::terms::Paths;
use crate::{Load, Terms, dense_bytes};
use flexcomm_domain::{CodecBytes, CompressionRatio, Family, Gain, LinkMatrix, Seconds, Selector, Strategy};
use flexcomm_estimation::{Profile, Quality, Times, assumed_bytes, delay_of, prior_gain, selected_by_one};
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;

/// Everything a prediction needs: a job's size, its network, and what has been measured so far.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Problem {
    /// Values in the fused gradient.
    pub values: u64,
    /// Links between the job's ranks; its size is N.
    pub links: LinkMatrix,
    /// Forward and backward pass, per step.
    pub compute: Seconds,
    /// g in [1, 10]: t_step = (compute^g + (t_comp + t_sync)^g)^(1/g). 1: no overlap (AdaptDL's model).
    pub overlap: f64,
    /// What moves the bytes; the lab's collectives have other critical paths.
    pub backend: String,
    /// Message sizes; compressors without an entry weigh as [`assumed_bytes`] says.
    pub codecs: BTreeMap<Family, CodecBytes>,
    /// gain(c) and t_comp(c). A selector for all ranks without an entry is taken to keep what [`selected_by_one`] makes of what its
    /// compressor keeps when each selects for itself; anything else without one has the documented prior's gain, by
    /// its share of bytes where it keeps no share of values, and the time of `times`.
    pub profiles: BTreeMap<Selector, Profile>,
    /// What compressing takes where no profile tells it.
    #[serde(default)]
    pub times: Times,
}

/// One candidate with its predicted objectives.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Evaluated {
    /// What was evaluated.
    pub strategy: Strategy,
    /// Compress and decompress; 0 when dense.
    pub t_comp: Seconds,
    /// The collective.
    pub t_sync: Seconds,
    /// The whole step, with overlap.
    pub t_step: Seconds,
    /// Share of the gradient's energy that is kept; 1 when dense.
    pub gain: Gain,
    /// ω/N of an unbiased compressor without error feedback, else 0; see [`Quality::variance`].
    #[serde(default)]
    pub variance: f64,
    /// The model's latency and bandwidth terms behind `t_sync`.
    pub terms: Terms,
}

impl Evaluated {
    /// What the multi-objective problem minimises: (t_comp in s, t_sync in s, 1/gain).
    pub fn objectives(&self) -> [f64; 3] {
        [self.t_comp.get(), self.t_sync.get(), self.quality().inverse_gain()]
    }

    /// What it leaves of the gradient.
    pub fn quality(&self) -> Quality {
        Quality { gain: self.gain, variance: self.variance, delay: delay_of(&self.strategy) }
    }
}

/// Where a predicted gain comes from.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum GainSource {
    /// A profile that does not come from [`Profile::prior`].
    Profile,
    /// The curve that [`Profile::prior`] assumes.
    Curve,
    /// What the compressor's definition or its bits say of normally distributed values.
    Definition,
}

/// Why a prediction was impossible.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
pub enum ProblemError {
    /// The gradient is empty.
    #[error("failed to evaluate {0}: the gradient has no values")]
    Empty(Box<Strategy>),
    /// The overlap exponent is outside [1, 10].
    #[error("failed to evaluate {0}: overlap exponent is {1}, allowed is 1 to 10")]
    Overlap(Box<Strategy>, f64),
    /// The prediction left the range of a duration, for example on a matrix of absurd links.
    #[error("failed to evaluate {0}: predicted {1} is {2} s, allowed is 0 to 31,536,000")]
    OutOfRange(Box<Strategy>, &'static str, f64),
}

impl Problem {
    /// A job on a network with nothing measured yet: no compute time, no overlap, the paper's message
    /// sizes and prior profiles.
    pub fn new(values: u64, links: LinkMatrix) -> Self {
        Self {
            values,
            links,
            compute: Seconds::ZERO,
            overlap: 1.0,
            backend: String::new(),
            codecs: BTreeMap::new(),
            profiles: BTreeMap::new(),
            times: Times::default(),
        }
    }

    /// Seconds that a strategy takes to compress and decompress so many of the gradient's values.
    pub fn t_comp(&self, strategy: &Strategy, values: u64) -> f64 {
        match self.profiles.get(&strategy.selector()) {
            Some(profile) => profile.t_comp(strategy.cr()) * values as f64 / self.values as f64,
            None => self.times.t_comp(strategy.selector(), strategy.cr(), (values, self.links.ranks())),
        }
    }

    /// Message sizes of a compressor.
    pub fn codec(&self, family: Family) -> CodecBytes {
        self.codecs.get(&family).copied().unwrap_or_else(|| assumed_bytes(family))
    }

    /// What a strategy keeps where ranks that select for themselves keep `own`: the same unless one selects for all, of which
    /// the profiles tell, or else the prior.
    pub(crate) fn for_all(&self, strategy: &Strategy, own: Gain) -> Gain {
        if strategy.selection().is_none() {
            return own;
        }
        let gain = |selector: Selector| self.profiles.get(&selector).map(|p| p.gain(strategy.cr()).get());
        match gain(strategy.selector()).zip(gain(strategy.family().into())) {
            Some((all, each)) => Gain::new((own.get() * all / each).min(1.0)).unwrap_or(own),
            None => selected_by_one(own, strategy.cr(), self.links.ranks()),
        }
    }

    /// Where a strategy's predicted gain comes from.
    pub fn gain_source(&self, strategy: &Strategy) -> GainSource {
        let profile = |selector: Selector| self.profiles.get(&selector);
        match profile(strategy.selector()).or_else(|| profile(strategy.family().into())) {
            Some(profile) if profile.is_assumed() => GainSource::Curve,
            Some(_) => GainSource::Profile,
            None if strategy.is_dense() => GainSource::Definition,
            None => {
                let ratio = self.ratio_of_prior(strategy).get();
                let from = |gain: f64| {
                    prior_gain(strategy.spec(), (self.values, ratio), Gain::new(gain).unwrap_or(Gain::FULL))
                };
                // Some closed forms use what the curve says of top-k, some by their parameters alone: a second curve tells for all of
                // them, where each would have to say so of itself.
                match from(ratio.powf(0.5)) == from(ratio.powf(0.9)) {
                    true => GainSource::Definition,
                    false => GainSource::Curve,
                }
            }
        }
    }

    /// Where on the assumed curve a strategy lies: at its ratio, or at its bytes as a share of the dense gradient's, below 1.
    fn ratio_of_prior(&self, strategy: &Strategy) -> CompressionRatio {
        let family = strategy.family();
        if family.has_ratio() {
            return strategy.cr();
        }
        let n = self.values;
        let (sent, dense) = (self.codec(family).pairs(n, n), dense_bytes(n));
        let half = || CompressionRatio::new(0.5).unwrap_or(CompressionRatio::DENSE);
        CompressionRatio::new(sent / dense).ok().filter(|share| !share.is_dense()).unwrap_or_else(half)
    }

    /// What a strategy leaves of the gradient when it sends this share of the energy.
    pub fn quality(&self, strategy: &Strategy, gain: Gain) -> Quality {
        Quality::of(strategy, gain, self.links.ranks())
    }

    /// A strategy that takes so many seconds to compress and to communicate, as a candidate.
    pub(crate) fn evaluated(
        &self,
        strategy: &Strategy,
        [t_comp, t_sync]: [f64; 2],
        Quality { gain, variance, .. }: Quality,
        terms: Terms,
    ) -> Result<Evaluated, ProblemError> {
        let t_step = overlapped(self.compute.get(), t_comp + t_sync, self.overlap);
        let seconds = |what, v| Seconds::new(v).map_err(|_| ProblemError::OutOfRange((*strategy).into(), what, v));
        Ok(Evaluated {
            strategy: *strategy,
            t_comp: seconds("t_comp", t_comp)?,
            t_sync: seconds("t_sync", t_sync)?,
            t_step: seconds("t_step", t_step)?,
            gain,
            variance,
            terms,
        })
    }

    /// Predicts one strategy's objectives. For many, build an [`Evaluator`] once.
    pub fn evaluate(&self, strategy: &Strategy) -> Result<Evaluated, ProblemError> {
        Evaluator::new(self).evaluate(strategy)
    }
}

/// A problem with what all its candidates share, prepared: schedules over the links, prior profiles.
#[derive(Debug, Clone)]
pub struct Evaluator<'a> {
    problem: &'a Problem,
    paths: Paths<'a>,
    prior: Profile,
}

impl<'a> Evaluator<'a> {
    /// Prepares.
    pub fn new(problem: &'a Problem) -> Self {
        Self {
            problem,
            paths: Paths::of_backend(&problem.links, &problem.backend),
            prior: Profile::prior(problem.values),
        }
    }

    /// Predicts one strategy's objectives.
    pub fn evaluate(&self, strategy: &Strategy) -> Result<Evaluated, ProblemError> {
        let p = self.problem;
        if p.values == 0 {
            return Err(ProblemError::Empty((*strategy).into()));
        }
        if !(1.0..=10.0).contains(&p.overlap) {
            return Err(ProblemError::Overlap((*strategy).into(), p.overlap));
        }
        let load = Load { values: p.values, codec: p.codec(strategy.family()) };
        let terms = self.paths.terms(strategy, &load);
        let (gain, t_comp) = self.profiled(strategy);
        p.evaluated(strategy, [t_comp, terms.total()], p.quality(strategy, gain), terms)
    }

    fn profiled(&self, strategy: &Strategy) -> (Gain, f64) {
        if strategy.is_dense() {
            return (Gain::FULL, 0.0);
        }
        let (cr, family) = (strategy.cr(), strategy.family());
        if let Some(profile) = self.problem.profiles.get(&strategy.selector()) {
            return (profile.gain(cr), profile.t_comp(cr));
        }
        let (own, t_comp) = match self.problem.profiles.get(&family.into()) {
            Some(profile) => (profile.gain(cr), profile.t_comp(cr)),
            None => {
                let ratio = self.problem.ratio_of_prior(strategy);
                let sparse = self.prior.gain(ratio);
                let own = prior_gain(strategy.spec(), (self.problem.values, ratio.get()), sparse);
                (own, self.problem.t_comp(strategy, self.problem.values))
            }
        };
        (self.problem.for_all(strategy, own), t_comp)
    }
}

/// AdaptDL's overlap of two phases of `a` and `b` seconds: (a^g + b^g)^(1/g). g = 1 adds, large g tends
/// to the longer one.
pub fn overlapped(a: f64, b: f64, g: f64) -> f64 {
    let longer = a.max(b);
    if longer <= 0.0 || g == 1.0 {
        return a + b;
    }
    // Scaled by the longer phase, so that tiny times do not underflow.
    longer * ((a / longer).powf(g) + (b / longer).powf(g)).powf(1.0 / g)
}

#[cfg(test)]
mod tests;
