//! The true network and job, and the noisy view of them that a controller has.

use crate::model::{Hidden, Model};
use flexcomm_domain::{
    CodecBytes, Gain, IndexBytes, Link, LinkMatrix, Plan, Seconds, Selector, Strategy, Timestamp, Version,
};
use flexcomm_estimation::{Delay, Profile, ProfilePoint, Quality};
use flexcomm_optimizer::{Load, terms};
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

/// The true costs of a plan at a moment.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Truth {
    /// Compress and decompress, seconds.
    pub t_comp: f64,
    /// What a step waits for its exchange, seconds.
    pub t_sync: f64,
    /// The step, seconds.
    pub t_step: f64,
    /// The share of the gradient's energy that is sent.
    pub gain: Gain,
    /// Logarithm of the steps that make the progress of a dense one.
    pub log_steps: f64,
}

impl Truth {
    /// Steps that make the progress of a dense one.
    pub fn steps(&self) -> f64 {
        self.log_steps.exp()
    }

    /// Seconds for the progress of a dense step.
    pub fn for_dense_step(&self) -> f64 {
        self.t_step * self.steps()
    }
}

/// What a strategy takes of a whole gradient, and what it leaves of it.
#[derive(Debug, Clone, Copy)]
struct Whole {
    t_comp: f64,
    /// With nothing hidden: of every exchange,
    each_s: f64,
    /// and of one by its bytes.
    all_s: f64,
    gain: Gain,
    log_steps: f64,
}

/// The share of computing in which backward has the buckets ready: it takes about twice as long as forward.
const BACKWARD: f64 = 2.0 / 3.0;

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

    /// What a step under `plan` really costs and keeps.
    pub fn truth(&self, plan: &Plan, matrix: &LinkMatrix, progress: f64) -> Truth {
        if !self.model.buckets.is_empty() {
            return self.in_buckets(plan, matrix, progress);
        }
        let Whole { t_comp, each_s, all_s, gain, log_steps } = self.whole(plan.last(), matrix, progress);
        let t_sync = each_s + all_s;
        Truth { t_comp, t_sync, t_step: self.model.compute_s + t_comp + t_sync, gain, log_steps }
    }

    /// A bucket takes its share of what its strategy takes of a whole gradient, and all of its latencies. Its exchange begins when backward has it ready, it is
    /// compressed, and the one before has ended; a step waits for what is left when backward has ended.
    ///
    /// The planner's own account of that (`Shape::exposed`) is not used here: it merges neighbours where there are more than eight
    /// buckets, and a mistake in it has to show.
    fn in_buckets(&self, plan: &Plan, matrix: &LinkMatrix, progress: f64) -> Truth {
        let (mut ready_s, mut end_s) = (0.0, 0.0_f64);
        let (mut t_comp, mut kept, mut log_steps) = (0.0, 0.0_f64, 0.0);
        let mut of = (plan.of(0), self.whole(plan.of(0), matrix, progress));
        for (bucket, (share, energy)) in self.model.shares().enumerate() {
            let strategy = plan.of(bucket);
            if strategy != of.0 {
                of = (strategy, self.whole(strategy, matrix, progress));
            }
            let whole = of.1;
            ready_s += share * (BACKWARD * self.model.compute_s + whole.t_comp);
            end_s = end_s.max(ready_s) + whole.each_s + share * whole.all_s;
            t_comp += share * whole.t_comp;
            kept += energy * whole.gain.get();
            log_steps += energy * whole.log_steps;
        }
        let (t_sync, t_step) = (end_s - ready_s, self.model.compute_s + t_comp + end_s - ready_s);
        // Shares add up to 1 but for rounding.
        let gain = if plan.is_dense() { Gain::FULL } else { Gain::new(kept.min(1.0)).unwrap_or(Gain::FULL) };
        Truth { t_comp, t_sync, t_step, gain, log_steps }
    }

    fn whole(&self, strategy: &Strategy, matrix: &LinkMatrix, progress: f64) -> Whole {
        let load = Load { values: self.model.values, codec: Self::codec() };
        let path = terms(strategy, &load, matrix);
        let hidden = self.model.hidden.get(&strategy.collective()).copied().unwrap_or(Hidden::NONE);
        let (each_s, all_s) = (hidden.fixed_s + hidden.latency * path.alpha_s, hidden.bandwidth * path.beta_s);
        let unbiased = strategy.spec().typical_variance(self.model.values).map(|variance| 1.0 / (1.0 + variance));
        let gain = unbiased.unwrap_or_else(|| self.model.gain(strategy, progress));
        let quality = Quality::of(strategy, Gain::new(gain).unwrap_or(Gain::FULL), self.ranks);
        let log_steps = quality.log_steps(self.delay);
        Whole { t_comp: self.model.t_comp(strategy), each_s, all_s, gain: quality.gain, log_steps }
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

    /// What telemetry shows of `plan` when `steps` steps have run under it.
    pub fn measure(
        &self,
        (plan, t): (&Plan, &Truth),
        version: Version,
        steps: u64,
        rng: &mut ChaCha8Rng,
    ) -> Option<Measured> {
        let noise = self.noise.times;
        let (t_comp, t_sync) = (t.t_comp * off(noise, rng), t.t_sync * off(noise, rng));
        let gain = t.gain.get();
        let spread = if gain < 1.0 { self.noise.gain } else { 0.0 };
        Some(Measured {
            version,
            steps: steps.min(MEASURED_STEPS),
            t_step: Seconds::new(self.model.compute_s + t_comp + t_sync).ok()?,
            t_comp: Seconds::new(t_comp).ok()?,
            t_sync: Seconds::new(t_sync).ok()?,
            gain: Gain::new((self.with_trial_bias(plan.last(), gain, steps) * off(spread, rng)).min(1.0)).ok()?,
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
            let t = self.truth(&Plan::from(*strategy), matrix, progress);
            cost += t.t_step * f64::from(r.iterations);
            if cost > r.budget.get() {
                return (found, r.budget.get());
            }
            let gain = self.with_trial_bias(strategy, t.gain.get(), 0);
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
    /// From trials.
    pub profiles: Profiles,
    /// What the newest of them waited for.
    pub trial: Option<TrialWaits>,
}

impl Store {
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
            self.trial = Some(TrialWaits { id, asked, ended: at, cost: None, iterations, sync: found.sync.clone() });
            let p = &mut self.profiles;
            (p.measured_at, p.tried_at, p.ended_at) = (Some(at), Some(at), Some(at));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use rand::SeedableRng;

    const SPARSE: &str = "topk(k=0.01)+ef(vanilla)/allgather";

    /// Dense, the exchange takes longer than backward.
    fn truth(buckets: usize, plan: &str) -> Truth {
        let model = Model::paper("vit").unwrap();
        let model = if buckets > 1 { model.in_buckets(buckets, &mut ChaCha8Rng::seed_from_u64(1)) } else { model };
        let delay = Delay::of_exponent(0.2);
        let world = World { model, ranks: 8, oddities: Vec::new(), noise: Noise::default(), delay };
        let matrix = world.matrix(Link::new(1e-4, 25e9).unwrap()).unwrap();
        world.truth(&plan.parse().unwrap(), &matrix, 0.5)
    }

    #[test]
    fn backward_hides_a_part_of_an_exchange_in_buckets_and_nothing_else_changes() {
        for plan in ["none/dense-ring", SPARSE] {
            let (one, ten) = (truth(1, plan), truth(10, plan));
            assert!(ten.t_sync > 0.0 && ten.t_sync < one.t_sync, "{ten:?} {one:?}");
            let same = [(one.t_comp, ten.t_comp), (one.gain.get(), ten.gain.get()), (one.log_steps, ten.log_steps)];
            assert!(same.iter().all(|(a, b)| (a - b).abs() < 1e-9), "{same:?}");
            assert!((ten.t_step - (one.t_step - one.t_sync + ten.t_sync)).abs() < 1e-9);
        }
        assert_eq!(truth(10, "none/dense-ring").gain, Gain::FULL);
    }

    #[test]
    fn each_bucket_takes_and_keeps_its_share_of_what_its_strategy_does() {
        let mixed = truth(10, &format!("9x none/dense-ring | {SPARSE}"));
        let (dense, sparse) = (truth(10, "none/dense-ring"), truth(10, SPARSE));
        assert!(mixed.t_sync < dense.t_sync && sparse.gain < mixed.gain && mixed.gain < dense.gain);
        assert!(0.0 < mixed.t_comp && mixed.t_comp < sparse.t_comp);
        assert!(0.0 < mixed.log_steps && mixed.log_steps < sparse.log_steps);
    }
}
