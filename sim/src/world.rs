//! The true network and job, and the noisy view of them that a controller has.

use crate::model::{Hidden, Model};
use flexcomm_domain::{
    CodecBytes, Collective, Gain, IndexBytes, Link, LinkMatrix, Seconds, Selector, Strategy, Timestamp, Version,
};
use flexcomm_optimizer::{CoefficientBook, Delay, LAB_BACKEND, Load, Profile, ProfilePoint, Quality, Sample, terms};
use flexcomm_planner::{Links, Measured, Profiles, Scatter, TrialRequest, TrialWaits};
use rand::Rng;
use rand_chacha::ChaCha8Rng;
use serde::Deserialize;

/// How far observations are off, each as the half-width of a uniform share.
#[derive(Debug, Clone, Copy, PartialEq, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Noise {
    /// Of estimated latencies and bandwidths.
    pub links: f64,
    /// Of measured gains, also in trials.
    pub gain: f64,
    /// Of measured medians of times.
    pub times: f64,
    /// How much a fresh residual overrates: gain(c) then shows as gain^(1 - fresh·log10(1/c)/3), in trials wholly, in
    /// force less and less over the first 1/c steps. 0: not at all.
    pub fresh: f64,
}

impl Default for Noise {
    fn default() -> Self {
        Self { links: 0.03, gain: 0.02, times: 0.05, fresh: 0.0 }
    }
}

/// A rank whose links differ from the trace's.
#[derive(Debug, Clone, Copy, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Oddity {
    /// Which rank.
    pub rank: usize,
    /// Its links' latency is multiplied by this.
    #[serde(default = "one")]
    pub latency_factor: f64,
    /// Its links' bandwidth is multiplied by this.
    #[serde(default = "one")]
    pub bandwidth_factor: f64,
}

fn one() -> f64 {
    1.0
}

/// The true costs of a strategy at a moment.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Truth {
    /// Compress and decompress, seconds.
    pub t_comp: f64,
    /// The collective, seconds.
    pub t_sync: f64,
    /// The step, seconds.
    pub t_step: f64,
    /// What it leaves of the gradient.
    pub quality: Quality,
    /// What delay costs under error feedback.
    pub delay: Delay,
}

impl Truth {
    /// Seconds for the progress of a dense step.
    pub fn for_dense_step(&self) -> f64 {
        self.t_step * self.quality.steps(self.delay)
    }
}

/// Job and network.
#[derive(Debug, Clone)]
pub struct World {
    /// The job.
    pub model: Model,
    /// N.
    pub ranks: usize,
    /// Ranks with links of their own.
    pub oddities: Vec<Oddity>,
    /// Observation noise.
    pub noise: Noise,
    /// What delay costs under error feedback.
    pub delay: Delay,
}

impl World {
    /// The codec of every simulated compressor: indices as messages have them. Their headers, 40 bytes, do not count.
    pub fn codec() -> CodecBytes {
        CodecBytes { indices: IndexBytes::Least, ..CodecBytes::PAPER }
    }

    /// The true links when the trace says `link`.
    pub fn matrix(&self, link: Link) -> Option<LinkMatrix> {
        LinkMatrix::from_fn(self.ranks, |from, to| self.odd(link, from, to)).ok()
    }

    fn odd(&self, link: Link, from: usize, to: usize) -> Link {
        let here = self.oddities.iter().filter(|o| o.rank == from || o.rank == to);
        here.fold(link, |l, o| {
            Link::new(l.alpha.get() * o.latency_factor, l.bandwidth.get() * o.bandwidth_factor).unwrap_or(l)
        })
    }

    /// What a step under `strategy` really costs and keeps.
    pub fn truth(&self, strategy: &Strategy, matrix: &LinkMatrix, progress: f64) -> Truth {
        let load = Load { values: self.model.values, codec: Self::codec() };
        let path = terms(strategy, &load, matrix);
        let hidden = self.model.hidden.get(&strategy.collective()).copied().unwrap_or(Hidden::NONE);
        let t_sync = hidden.fixed_s + hidden.latency * path.alpha_s + hidden.bandwidth * path.beta_s;
        let t_comp = self.model.t_comp(strategy);
        let t_step = self.model.compute_s + t_comp + t_sync;
        let unbiased = strategy.spec().typical_variance(self.model.values).map(|variance| 1.0 / (1.0 + variance));
        let gain = unbiased.unwrap_or_else(|| self.model.gain(strategy, progress));
        let quality = Quality::of(strategy, Gain::new(gain).unwrap_or(Gain::FULL), self.ranks);
        Truth { t_comp, t_sync, t_step, quality, delay: self.delay }
    }

    /// A fresh estimate of the links: all off together by up to 7/10 of the noise, each by up to 3/10 more.
    pub fn estimate(&self, matrix: &LinkMatrix, rng: &mut ChaCha8Rng) -> Links {
        let noise = self.noise.links;
        let (alpha, bandwidth) = (off(0.7 * noise, rng), off(0.7 * noise, rng));
        let matrix = matrix.clone().with(|_, _, l| {
            let alpha = l.alpha.get() * (alpha + off(0.3 * noise, rng) - 1.0);
            let bandwidth = l.bandwidth.get() * (bandwidth + off(0.3 * noise, rng) - 1.0);
            Link::new(alpha, bandwidth).unwrap_or(l)
        });
        let zero = Seconds::ZERO;
        Links { matrix, age: zero, oldest: zero, confidence: 0.9, tests: Vec::new() }
    }

    /// What telemetry shows of `strategy` when `steps` steps have run under it.
    pub fn measure(
        &self,
        (strategy, t): (&Strategy, &Truth),
        version: Version,
        steps: u64,
        rng: &mut ChaCha8Rng,
    ) -> Option<Measured> {
        let noise = self.noise.times;
        let (t_comp, t_sync) = (t.t_comp * off(noise, rng), t.t_sync * off(noise, rng));
        let gain = t.quality.gain.get();
        let spread = if gain < 1.0 { self.noise.gain } else { 0.0 };
        Some(Measured {
            version,
            steps: steps.min(MEASURED_STEPS),
            t_step: Seconds::new(self.model.compute_s + t_comp + t_sync).ok()?,
            t_comp: Seconds::new(t_comp).ok()?,
            t_sync: Seconds::new(t_sync).ok()?,
            gain: Gain::new((self.with_trial_bias(strategy, gain, steps) * off(spread, rng)).min(1.0)).ok()?,
            gain_spread: spread,
            scatter: Some(Scatter {
                step_low: Seconds::new(self.model.compute_s + (t.t_comp + t.t_sync) * (1.0 - noise)).ok()?,
                step_high: Seconds::new(self.model.compute_s + (t.t_comp + t.t_sync) * (1.0 + noise)).ok()?,
                sync_low: Seconds::new(t.t_sync * (1.0 - noise)).ok()?,
                sync_high: Seconds::new(t.t_sync * (1.0 + noise)).ok()?,
            }),
        })
    }

    /// The gain that `steps` steps after a fresh start show.
    fn with_trial_bias(&self, strategy: &Strategy, gain: f64, steps: u64) -> f64 {
        let c = strategy.cr().get();
        let fresh = self.noise.fresh * -c.log10() / 3.0 * (-(steps as f64) * c).exp();
        gain.powf(1.0 - fresh)
    }

    /// Runs a trial: what it finds, and how long training stood still for it.
    pub fn trial(&self, r: &TrialRequest, matrix: &LinkMatrix, progress: f64, rng: &mut ChaCha8Rng) -> (Found, f64) {
        let mut cost = TRIAL_OVERHEAD_S;
        let mut found = Found::default();
        for strategy in &r.candidates {
            let t = self.truth(strategy, matrix, progress);
            cost += t.t_step * f64::from(r.iterations);
            if cost > r.budget.get() {
                return (found, r.budget.get());
            }
            let gain = self.with_trial_bias(strategy, t.quality.gain.get(), 0);
            let Ok(gain) = Gain::new((gain * off(self.noise.gain, rng)).min(1.0)) else { continue };
            let t_comp_s = t.t_comp * off(self.noise.times, rng);
            let weight = f64::from(r.iterations);
            found.points.push((strategy.selector(), ProfilePoint { cr: strategy.cr(), gain, t_comp_s, weight }));
            let Ok(waited) = Seconds::new(t.t_sync * off(self.noise.times, rng)) else { continue };
            found.sync.push((*strategy, waited));
        }
        (found, cost)
    }
}

/// What a trial found.
#[derive(Debug, Clone, Default)]
pub struct Found {
    /// Of compressors.
    pub points: Vec<(Selector, ProfilePoint)>,
    /// What iterations of each strategy waited for their collective.
    pub sync: Vec<(Strategy, Seconds)>,
}

/// Steps behind a median of telemetry, at most.
const MEASURED_STEPS: u64 = 40;

/// Snapshot and restore around a trial, seconds.
const TRIAL_OVERHEAD_S: f64 = 0.3;

/// 1, off by up to `half` in either direction.
fn off(half: f64, rng: &mut ChaCha8Rng) -> f64 {
    if half > 0.0 { 1.0 + rng.random_range(-half..=half) } else { 1.0 }
}

/// What a controller keeps of a job between two looks.
#[derive(Debug, Clone, Default)]
pub struct Store {
    /// Fitted to what was measured.
    pub coefficients: CoefficientBook,
    /// From trials.
    pub profiles: Profiles,
    /// What the newest of them waited for.
    pub trial: Option<TrialWaits>,
}

impl Store {
    /// Takes in a measured collective, against the links as estimated at the time.
    pub fn observe(&mut self, world: &World, strategy: &Strategy, links: &LinkMatrix, t_sync: Seconds) {
        let load = Load { values: world.model.values, codec: World::codec() };
        let sample = Sample { terms: terms(strategy, &load, links), measured_s: t_sync.get() };
        let collective: Collective = strategy.collective();
        self.coefficients.observe(collective, LAB_BACKEND, sample);
    }

    /// Takes in what a trial found that was asked for then, with so many iterations of each candidate. Ratios that were not reached keep
    /// their older points.
    pub fn learn(&mut self, found: &Found, (asked, iterations): (Timestamp, u32), at: Timestamp) {
        for (selector, point) in &found.points {
            let old = self.profiles.by_selector.get(selector);
            let mut points: Vec<ProfilePoint> = old.map_or_else(Vec::new, |p| p.points().to_vec());
            points.retain(|p| p.cr != point.cr);
            points.push(*point);
            if let Ok(profile) = Profile::new(points) {
                self.profiles.by_selector.insert(*selector, profile);
            }
        }
        if !found.points.is_empty() {
            let id = self.trial.as_ref().map_or(1, |trial| trial.id + 1);
            self.trial = Some(TrialWaits { id, asked, ended: at, iterations, sync: found.sync.clone() });
            let p = &mut self.profiles;
            (p.measured_at, p.tried_at, p.ended_at) = (Some(at), Some(at), Some(at));
        }
    }
}
