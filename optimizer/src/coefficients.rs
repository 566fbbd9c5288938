//! What collectives really take: per (collective, backend) coefficients fitted to measured times.
//!
//! t = fixed + a * alpha_term + b * beta_term, never negative, with the unfitted model (fixed = 0, a = 1,
//! b = 1) as prior, which also holds for what is beyond the largest bandwidth term measured if b is less: a token
//! bucket lets short messages pass at once, and that says nothing of long ones. Fitted by iteratively reweighted
//! least squares in relative error over a bounded window: Huber weights first, then Tukey's, blunt outliers; ridge
//! terms hold to the prior what the data does not show; older samples weigh less.

mod solve;

use crate::Terms;
use flexcomm_domain::Collective;
use serde::{Deserialize, Serialize};
use std::collections::{BTreeMap, VecDeque};

/// Samples a fit keeps per (collective, backend): about a minute of one sample per second. When the network changes,
/// the newest half of them decides.
pub const WINDOW: usize = 64;

/// Most backends a book keeps; samples of more are refused.
pub const MAX_BACKENDS: usize = 32;

/// Smaller factors count as this one when factors are averaged.
const LEAST_FACTOR: f64 = 0.01;

/// One measured collective.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct Sample {
    /// The model's terms at the time, from the links of the time.
    pub terms: Terms,
    /// What it took, in seconds.
    pub measured_s: f64,
}

impl Sample {
    fn is_valid(&self) -> bool {
        let ok = |v: f64| v.is_finite() && v >= 0.0;
        ok(self.terms.alpha_s) && ok(self.terms.beta_s) && ok(self.measured_s) && self.measured_s > 0.0
    }
}

/// Weights of the model's terms.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct Coefficients {
    /// Seconds that every call takes.
    pub fixed_s: f64,
    /// Weight of the latency term.
    pub a: f64,
    /// Weight of the bandwidth term.
    pub b: f64,
    /// The largest bandwidth term among the samples, in seconds. What is beyond it weighs at least 1.
    pub beta_seen_s: f64,
    /// 0: nothing measured, the prior; towards 1: many samples that the fit explains.
    pub confidence: f64,
    /// Median of |predicted - measured| / measured over the window; 0 without samples.
    pub median_error: f64,
    /// Samples behind the fit.
    pub samples: usize,
}

impl Default for Coefficients {
    /// The prior: the model as it is.
    fn default() -> Self {
        Self { fixed_s: 0.0, a: 1.0, b: 1.0, beta_seen_s: 0.0, confidence: 0.0, median_error: 0.0, samples: 0 }
    }
}

impl Coefficients {
    /// Predicted seconds. With no terms at all (one rank) nothing is sent, and nothing is predicted.
    pub fn predict(&self, terms: Terms) -> f64 {
        if terms == Terms::default() {
            return 0.0;
        }
        let beyond = (terms.beta_s - self.beta_seen_s).max(0.0);
        self.fixed_s + self.a * terms.alpha_s + self.b * (terms.beta_s - beyond) + self.b.max(1.0) * beyond
    }
}

/// A window of samples and the coefficients fitted to it. Stored as its samples; fitted again when read.
#[derive(Debug, Clone, PartialEq, Default, Serialize, Deserialize)]
#[serde(from = "Stored")]
pub struct Fit {
    samples: VecDeque<Sample>,
    #[serde(skip_serializing)]
    coefficients: Coefficients,
}

#[derive(Deserialize)]
struct Stored {
    samples: VecDeque<Sample>,
}

impl From<Stored> for Fit {
    /// Drops what [`Fit::observe`] would have refused and all but the newest [`WINDOW`].
    fn from(stored: Stored) -> Self {
        let valid: Vec<Sample> = stored.samples.into_iter().filter(Sample::is_valid).collect();
        let samples: VecDeque<Sample> = valid[valid.len().saturating_sub(WINDOW)..].iter().copied().collect();
        let coefficients = solve::fit(&samples);
        Self { samples, coefficients }
    }
}

impl Fit {
    /// Takes a sample in and fits again. False, and nothing changes, when a number is negative or not
    /// finite, or the measured time is zero.
    pub fn observe(&mut self, sample: Sample) -> bool {
        if !sample.is_valid() {
            return false;
        }
        if self.samples.len() >= WINDOW {
            self.samples.pop_front();
        }
        self.samples.push_back(sample);
        self.coefficients = solve::fit(&self.samples);
        true
    }

    /// As fitted; the prior without samples.
    pub fn coefficients(&self) -> Coefficients {
        self.coefficients
    }
}

/// Fits per (backend, collective).
#[derive(Debug, Clone, PartialEq, Default, Serialize, Deserialize)]
pub struct CoefficientBook {
    fits: BTreeMap<String, BTreeMap<Collective, Fit>>,
}

impl CoefficientBook {
    /// The fitted coefficients. Of a collective that was never measured: the mean of the backend's other ones,
    /// with no confidence, since what slows one collective (protocol, CPU) slows the others too, and without that
    /// the unknown would always look better than the known. Of an unknown backend: the prior.
    pub fn get(&self, collective: Collective, backend: &str) -> Coefficients {
        match self.fit(collective, backend).map(Fit::coefficients) {
            Some(fitted) if fitted.samples > 0 => fitted,
            _ => self.pooled(backend),
        }
    }

    fn pooled(&self, backend: &str) -> Coefficients {
        let fits = self.fits.get(backend).into_iter().flat_map(BTreeMap::values).map(Fit::coefficients);
        let known: Vec<Coefficients> = fits.filter(|c| c.samples > 0).collect();
        let weight: f64 = known.iter().map(|c| c.confidence).sum();
        if weight <= 0.0 {
            return Coefficients::default();
        }
        let mean = |of: fn(&Coefficients) -> f64| known.iter().map(|c| c.confidence * of(c)).sum::<f64>() / weight;
        // Factors are averaged as factors.
        let a = mean(|c| c.a.max(LEAST_FACTOR).ln()).exp();
        let b = mean(|c| c.b.max(LEAST_FACTOR).ln()).exp();
        Coefficients { fixed_s: mean(|c| c.fixed_s), a, b, ..Coefficients::default() }
    }

    /// The fit, when there is one.
    pub fn fit(&self, collective: Collective, backend: &str) -> Option<&Fit> {
        self.fits.get(backend)?.get(&collective)
    }

    /// Takes a sample in; false when it, or one backend more than [`MAX_BACKENDS`], is refused.
    pub fn observe(&mut self, collective: Collective, backend: &str, sample: Sample) -> bool {
        let full = !self.fits.contains_key(backend) && self.fits.len() >= MAX_BACKENDS;
        if full || !sample.is_valid() {
            return false;
        }
        self.fits.entry(backend.to_owned()).or_default().entry(collective).or_default().observe(sample)
    }

    /// Every (backend, collective) with a fit.
    pub fn entries(&self) -> impl Iterator<Item = (&str, Collective, &Fit)> {
        self.fits.iter().flat_map(|(backend, fits)| fits.iter().map(|(c, fit)| (backend.as_str(), *c, fit)))
    }
}

#[cfg(test)]
mod tests;
