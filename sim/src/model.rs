//! Jobs whose true costs the simulation knows and the planner does not.

use crate::loss::LossCourse;
use flexcomm_domain::{Collective, CompressionRatio, Strategy};
use flexcomm_estimation::Times;
use rand::{Rng, RngCore};
use std::collections::BTreeMap;

/// What a training job really costs and what compression really keeps.
#[derive(Debug, Clone, PartialEq)]
pub struct Model {
    /// Its name.
    pub name: String,
    /// Values in the gradient.
    pub values: u64,
    /// Values in each bucket of the gradient, in the order in which backward has them ready; empty: it is one bucket.
    pub buckets: Vec<u64>,
    /// The share of each bucket in the gradient's energy, as the job reports it; empty: that of its values, and none is reported.
    pub energies: Vec<f32>,
    /// Forward, backward and the rest of a step, seconds.
    pub compute_s: f64,
    /// Steps of an epoch at gain 1.
    pub steps_per_epoch: f64,
    /// Seconds to look at one value when compressing.
    pub scan_s: f64,
    /// Seconds per kept value.
    pub keep_s: f64,
    /// gain(c) = c^exponent; the exponent over the course of training.
    pub gain: GainCourse,
    /// What each collective takes besides its model.
    pub hidden: BTreeMap<Collective, Hidden>,
    /// What its training loss does.
    pub loss: LossCourse,
}

/// What a collective really takes, by the terms of the model.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Hidden {
    /// Seconds, whatever is sent.
    pub fixed_s: f64,
    /// Factor of the latency term.
    pub latency: f64,
    /// Factor of the bandwidth term.
    pub bandwidth: f64,
}

impl Hidden {
    /// As modelled.
    pub const NONE: Self = Self::new(0.0, 1.0, 1.0);

    const fn new(fixed_s: f64, latency: f64, bandwidth: f64) -> Self {
        Self { fixed_s, latency, bandwidth }
    }
}

/// How much compression loses over the course of training: much at first, less later, more again for a
/// while at each step-size decay (the critical regimes of the paper's Fig. 3).
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct GainCourse {
    /// Exponent at the start.
    pub early: f64,
    /// Exponent that it settles to.
    pub late: f64,
    /// Added at each decay.
    pub bump: f64,
}

/// Shares of training at which the step size decays (ResNet18 in the paper: epochs 15, 30, 45 of 50).
const DECAYS: [f64; 3] = [0.3, 0.6, 0.9];
/// How fast the start and the bumps fade, in shares of training.
const FADE: f64 = 0.05;

impl GainCourse {
    /// The exponent at `progress` of training, 0 to 1.
    pub fn exponent(&self, progress: f64) -> f64 {
        let start = (self.early - self.late) * (-progress / FADE).exp();
        let bumps = DECAYS.iter().filter(|d| progress >= **d).map(|d| (-(progress - d) / FADE).exp());
        self.late + start + self.bump * bumps.sum::<f64>()
    }
}

/// The paper's table of dense step times is from so many workers,
const PAPER_RANKS: f64 = 8.0;
/// ... at this latency, in seconds,
const PAPER_ALPHA_S: f64 = 0.004;
/// ... and this bandwidth, in bit/s.
const PAPER_BANDWIDTH_BPS: f64 = 20e9;

impl Model {
    /// One of the paper's four: `resnet18`, `resnet50`, `alexnet`, `vit`. The compute time is what the dense
    /// step time of its Table IV leaves beside the ring's closed form.
    pub fn paper(name: &str) -> Option<Self> {
        let (params, step_s) = match name {
            "resnet18" => (11.69e6, 0.0987),
            "resnet50" => (25.56e6, 0.1525),
            "alexnet" => (61.1e6, 0.2306),
            "vit" => (86.57e6, 0.475),
            _ => return None,
        };
        let (n, alpha, bandwidth) = (PAPER_RANKS, PAPER_ALPHA_S, PAPER_BANDWIDTH_BPS);
        let ring = 2.0 * (n - 1.0) * alpha + 2.0 * (n - 1.0) / n * 4.0 * params * 8.0 / bandwidth;
        Some(Self {
            name: name.to_owned(),
            values: params as u64,
            buckets: Vec::new(),
            energies: Vec::new(),
            compute_s: step_s - ring,
            steps_per_epoch: 200.0,
            scan_s: 0.2e-9,
            keep_s: 2e-9,
            gain: GainCourse { early: 0.20, late: 0.10, bump: 0.05 },
            hidden: BTreeMap::from([
                (Collective::DenseRing, Hidden::new(0.0003, 1.1, 1.05)),
                (Collective::DenseTree, Hidden::new(0.0003, 1.0, 1.15)),
                (Collective::Allgather, Hidden::new(0.0004, 1.2, 1.10)),
                (Collective::ArtRing, Hidden::new(0.0006, 1.1, 1.05)),
                (Collective::ArtTree, Hidden::new(0.0006, 1.05, 1.10)),
            ]),
            loss: LossCourse::Unreported,
        })
    }

    /// The gradient in so many buckets of random sizes.
    #[must_use]
    pub fn in_buckets(self, count: usize, rng: &mut (impl RngCore + ?Sized)) -> Self {
        let values = |share: &f64| (share * self.values as f64) as u64;
        let mut buckets: Vec<u64> = shares(count, rng).iter().map(values).collect();
        let rest = self.values - buckets.iter().sum::<u64>();
        if let Some(last) = buckets.last_mut() {
            *last += rest;
        }
        Self { buckets, ..self }
    }

    /// The buckets' energies are not those of their values, and the job reports them.
    #[must_use]
    pub fn with_energies(self, rng: &mut (impl RngCore + ?Sized)) -> Self {
        let energies = shares(self.buckets.len(), rng).iter().map(|share| *share as f32).collect();
        Self { energies, ..self }
    }

    /// Of each bucket: its share of the gradient's values, and of its energy.
    pub fn shares(&self) -> impl Iterator<Item = (f64, f64)> {
        let energy: f64 = self.energies.iter().map(|share| f64::from(*share)).sum();
        self.buckets.iter().enumerate().map(move |(at, values)| {
            let share = *values as f64 / self.values as f64;
            (share, self.energies.get(at).map_or(share, |own| f64::from(*own) / energy))
        })
    }

    /// Names of the paper's models.
    pub const PAPERS: [&'static str; 4] = ["resnet18", "resnet50", "alexnet", "vit"];

    /// Compressors whose true times and gains it knows.
    pub const COMPRESSORS: [&'static str; 3] = ["topk", "lwtopk", "mstopk"];

    /// True time to compress and decompress.
    pub fn t_comp(&self, strategy: &Strategy) -> f64 {
        if strategy.is_dense() {
            return 0.0;
        }
        // MSTopk estimates its threshold in 25 rounds.
        let slower = if strategy.family().name() == "mstopk" { 4.0 } else { 1.0 };
        self.values as f64 * (slower * self.scan_s + self.keep_s * strategy.cr().get())
    }

    /// What a bench of its compressors would say on the job's machines.
    pub fn times(&self) -> Times {
        let rows = Self::COMPRESSORS.iter().flat_map(|name| [0.1, 0.001].map(|ratio| (name, ratio)));
        let row = |(name, ratio): (&&str, f64)| {
            let method = format!("{name}(k={ratio})+ef(vanilla)");
            let strategy: Strategy = format!("{method}/allgather").parse().expect("each is a compressor");
            let (n, compress_s) = (self.values, self.t_comp(&strategy));
            serde_json::json!({ "method": method, "n": n, "compress_s": compress_s, "decompress_s": 0.0 })
        };
        let table = serde_json::Value::Array(rows.map(row).collect());
        Times::read(&table.to_string()).expect("its numbers are in range")
    }

    /// True gain.
    pub fn gain(&self, strategy: &Strategy, progress: f64) -> f64 {
        let layerwise = if strategy.family().name() == "lwtopk" { 1.2 } else { 1.0 };
        // One rank selects for all: not by what is large in the others.
        let for_all = if strategy.selection().is_some() { 1.3 } else { 1.0 };
        gain(strategy.cr(), layerwise * for_all * self.gain.exponent(progress))
    }
}

/// The largest share is at most so many times the smallest.
const UNEVEN: f64 = 30.0;

/// So many shares of something, log-uniform.
fn shares(count: usize, rng: &mut (impl RngCore + ?Sized)) -> Vec<f64> {
    let parts: Vec<f64> = (0..count).map(|_| rng.random_range(0.0..=UNEVEN.ln()).exp()).collect();
    let all: f64 = parts.iter().sum();
    parts.iter().map(|part| part / all).collect()
}

fn gain(c: CompressionRatio, exponent: f64) -> f64 {
    c.get().powf(exponent).clamp(1e-6, 1.0)
}

#[cfg(test)]
mod tests {
    use super::*;
    use rand::SeedableRng;
    use rand_chacha::ChaCha8Rng;

    #[test]
    fn buckets_are_the_whole_gradient() {
        for seed in 0..20 {
            let mut rng = ChaCha8Rng::seed_from_u64(seed);
            let model = Model::paper("resnet18").unwrap().in_buckets(2 + seed as usize % 11, &mut rng);
            assert_eq!(model.buckets.iter().sum::<u64>(), model.values);
            assert!(model.buckets.iter().all(|values| *values > 0), "{:?}", model.buckets);
            assert!(model.shares().all(|(values, energy)| values == energy));
            let uneven = model.clone().with_energies(&mut rng);
            assert_eq!(uneven.energies.len(), model.buckets.len());
            let (values, energy) = uneven.shares().fold((0.0, 0.0), |all, of| (all.0 + of.0, all.1 + of.1));
            assert!((values - 1.0).abs() < 1e-9 && (energy - 1.0).abs() < 1e-9, "{values} {energy}");
        }
    }

    #[test]
    fn the_papers_models_are_plausible() {
        for name in Model::PAPERS {
            let model = Model::paper(name).unwrap();
            assert!((0.001..0.3).contains(&model.compute_s), "{name}: {}", model.compute_s);
            assert!(model.gain.exponent(0.0) > model.gain.exponent(0.25));
            assert!(model.gain.exponent(0.31) > model.gain.exponent(0.29));
        }
        assert!(Model::paper("gpt").is_none());
    }
}
