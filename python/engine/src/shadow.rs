//! Shadow trials: what would a candidate gain, on the gradients that are there anyway.
//!
//! Each candidate has error feedback of its own over a fixed random subset of each bucket's coordinates, beginning
//! with what training really holds back. Training is not touched, and nothing is sent. Time is not measured: the
//! subset is smaller than the bucket. AR-Topk's gain depends on another rank's indices, so its candidates have no
//! shadow.
//!
//! The gain is the share of the compensated gradient's energy that leaves the residual, 1 - ‖e - T‖²/‖e‖².
//!
//! Top-k over the fused bucket is estimated on a uniform subset. LWTopk keeps a share of every layer, so it is
//! estimated layer by layer, each weighted by how much of it was sampled.

mod block;
mod device;

use crate::bucket::Param;
use crate::error::EngineError;
use block::{Block, blocks};
use device::OnDevice;
use flexcomm_compression::Compressor;
use flexcomm_compression::{Energy, GradientCompressor, Layers, Memory, Method};
use flexcomm_domain::CompressorSpec;
use rand::SeedableRng;
use rand::seq::index::sample;
use rand_chacha::ChaCha8Rng;

/// Layers up to this many values are taken whole: a share of a few values is no estimate.
const WHOLE_LAYER: usize = 4096;

/// Least values that a subset should keep: the energy of so few large ones is known to a few percent.
const LEAST_KEPT: f64 = 1024.0;

/// Steps that [`ShadowGain::recent`] remembers: weights fall to 1/e over them.
const RECENT_STEPS: f64 = 10.0;

/// A candidate's gain.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct ShadowGain {
    /// ‖g_c‖² over ‖g_e‖² of all buckets together, averaged over the steps that have ended, as live trials do it.
    pub gain: f64,
    /// The same, but of the newest steps most: what a residual that has grown leaves to be kept.
    pub recent: f64,
    /// Steps that have ended.
    pub steps: u64,
}

/// A part of a bucket that one compressor runs over, and for how many values each of its values counts.
#[derive(Debug)]
struct Part {
    weight: f64,
    sample: Sample,
}

#[derive(Debug)]
enum Sample {
    Coordinates { indices: Vec<u32>, compressor: Box<GradientCompressor> },
    Block(Block),
}

/// What runs a candidate.
#[derive(Debug, Clone, Copy)]
#[expect(clippy::large_enum_variant, reason = "there is one per candidate")]
enum Runs {
    Selecting(Method),
    Pipeline(CompressorSpec),
}

#[derive(Debug)]
struct Candidate {
    runs: Runs,
    /// By bucket.
    parts: Vec<Vec<Part>>,
    /// Of the step under way.
    energy: Energy,
    /// Sum over the steps that have ended.
    gains: f64,
    /// Energies of the steps that have ended, the newest first in weight.
    recent: Energy,
    steps: u64,
}

impl Candidate {
    /// The step under way is over.
    fn end_step(&mut self) {
        if self.energy.fed > 0.0 {
            self.gains += self.energy.gain();
            let keep = (-1.0 / RECENT_STEPS).exp();
            self.recent = Energy { sent: keep * self.recent.sent, fed: keep * self.recent.fed } + self.energy;
            self.steps += 1;
        }
        self.energy = Energy::default();
    }
}

/// The candidates of one trial on one rank.
#[derive(Debug)]
pub struct Shadow {
    candidates: Vec<Candidate>,
    share: f64,
    seed: u64,
    scratch: Vec<f32>,
    /// By bucket, where gradients lie on a device.
    on_device: Vec<OnDevice>,
}

impl Shadow {
    /// `share` of each bucket's coordinates, in (0, 1].
    pub fn new(specs: &[CompressorSpec], share: f64, seed: u64) -> Self {
        let candidate = |spec: &CompressorSpec| Candidate {
            runs: Method::of_spec(spec).map_or(Runs::Pipeline(*spec), Runs::Selecting),
            parts: vec![],
            energy: Energy::default(),
            gains: 0.0,
            recent: Energy::default(),
            steps: 0,
        };
        let candidates = specs.iter().map(candidate).collect();
        Self { candidates, share: share.clamp(0.0, 1.0), seed, scratch: Vec::new(), on_device: Vec::new() }
    }

    /// Whether the bucket's parts are to be made: then [`Self::observe`] looks at what is held back, and else not.
    pub fn begins(&self, bucket: usize) -> bool {
        self.candidates.iter().any(|candidate| candidate.parts.len() <= bucket)
    }

    /// Takes in a bucket's gradient, before it is exchanged. Buckets come in order, every step alike. A gradient that
    /// is not finite is passed over.
    pub fn observe(
        &mut self,
        bucket: usize,
        params: &[Param],
        residual: &[f32],
        gradient: &[f32],
    ) -> Result<(), EngineError> {
        let expected = params.iter().map(|param| param.len).sum();
        if gradient.len() != expected || self.begins(bucket) && residual.len() != expected {
            let (bucket, what) = (bucket as u32, "the gradient");
            return Err(EngineError::Buffer { bucket, what, got: gradient.len(), expected });
        }
        for candidate in &mut self.candidates {
            if candidate.parts.len() == bucket {
                let seed = seed_of(self.seed, bucket);
                candidate.parts.push(parts(candidate.runs, params, residual, (self.share, seed))?);
            }
            let Some(parts) = candidate.parts.get_mut(bucket) else { continue };
            let seed = self.seed.wrapping_add(candidate.steps);
            for Part { weight, sample } in parts {
                let energy = match (sample, candidate.runs) {
                    (Sample::Block(block), _) => block.step(gradient, candidate.steps)?,
                    (Sample::Coordinates { indices, compressor }, Runs::Selecting(method)) => {
                        self.scratch.clear();
                        self.scratch.extend(indices.iter().map(|i| gradient[*i as usize]));
                        compressor.compress(method, &self.scratch, seed).map_or(Energy::default(), |sent| sent.energy)
                    }
                    (Sample::Coordinates { .. }, Runs::Pipeline(_)) => Energy::default(),
                };
                candidate.energy.sent += *weight * energy.sent;
                candidate.energy.fed += *weight * energy.fed;
            }
        }
        Ok(())
    }

    /// Ends a step, after its last bucket.
    pub fn end_step(&mut self) {
        self.candidates.iter_mut().for_each(Candidate::end_step);
    }

    /// No step follows: gives back all memory but the gains.
    pub fn rest(&mut self) {
        self.candidates.iter_mut().for_each(|c| c.parts = Vec::new());
        self.scratch = Vec::new();
        self.on_device = Vec::new();
    }

    /// Steps that have ended.
    pub fn steps(&self) -> u64 {
        self.candidates.iter().map(|c| c.steps).max().unwrap_or(0)
    }

    /// One per candidate, in order.
    pub fn gains(&self) -> Vec<ShadowGain> {
        let of = |c: &Candidate| match c.steps {
            0 => ShadowGain { gain: 1.0, recent: 1.0, steps: 0 },
            steps => ShadowGain { gain: c.gains / steps as f64, recent: c.recent.gain(), steps },
        };
        self.candidates.iter().map(of).collect()
    }
}

fn seed_of(seed: u64, bucket: usize) -> u64 {
    seed ^ (bucket as u64) << 32
}

/// Coordinates of a bucket that a compressor runs over, and for how many each counts.
struct Subset {
    indices: Vec<u32>,
    weight: f64,
}

/// One for the fused bucket, or for each of its layers.
fn subsets(method: Method, layers: &[usize], (share, seed): (f64, u64)) -> Vec<Subset> {
    let mut rng = ChaCha8Rng::seed_from_u64(seed);
    let whole = [layers.iter().sum()];
    let lengths = if method.compressor == Compressor::LwTopK { layers } else { &whole[..] };
    let mut start = 0;
    let mut subsets = Vec::with_capacity(lengths.len());
    for length in lengths {
        if *length > 0 {
            let least = ((LEAST_KEPT / method.cr.get()).ceil() as usize).max(WHOLE_LAYER);
            let wanted = ((*length as f64 * share).ceil() as usize).max(least).min(*length);
            let mut indices: Vec<u32> =
                sample(&mut rng, *length, wanted).into_iter().map(|i| (start + i) as u32).collect();
            indices.sort_unstable();
            subsets.push(Subset { indices, weight: *length as f64 / wanted as f64 });
        }
        start += length;
    }
    subsets
}

fn parts(runs: Runs, params: &[Param], residual: &[f32], sampled: (f64, u64)) -> Result<Vec<Part>, EngineError> {
    let method = match runs {
        Runs::Selecting(method) => method,
        Runs::Pipeline(spec) => {
            let part = |(weight, block)| Part { weight, sample: Sample::Block(block) };
            return Ok(blocks(&spec, params, residual, sampled)?.into_iter().map(part).collect());
        }
    };
    let layers: Vec<usize> = params.iter().map(|param| param.len).collect();
    let part = |Subset { indices, weight }: Subset| {
        let mut compressor = GradientCompressor::new(Layers::fused(indices.len())?);
        let held: Vec<f32> = indices.iter().map(|i| residual[*i as usize]).collect();
        compressor.restore(&Memory::from_values(held))?;
        let compressor = Box::new(compressor);
        Ok(Part { weight, sample: Sample::Coordinates { indices, compressor } })
    };
    subsets(method, &layers, sampled).into_iter().map(part).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use flexcomm_domain::CompressionRatio;
    use rand::Rng;

    fn spec(method: &Method) -> CompressorSpec {
        method.compressor.family().at(method.cr).unwrap()
    }

    fn params(layers: &[usize]) -> Vec<Param> {
        layers.iter().zip(0..).map(|(len, id)| Param { id, len: *len, cols: 1 }).collect()
    }

    /// Heavy tails, as gradients have: a product of two normal-like numbers, layers of different scale.
    fn gradient(layers: &[usize], rng: &mut ChaCha8Rng) -> Vec<f32> {
        let mut out = Vec::new();
        for (i, n) in layers.iter().enumerate() {
            let mut bell = || (0..6).map(|_| rng.random_range(-1.0f32..1.0)).sum::<f32>();
            out.extend((0..*n).map(|_| bell() * bell() * (i + 1) as f32));
        }
        out
    }

    #[test]
    fn a_quarter_of_the_coordinates_tells_the_gain_within_5_percent() {
        let layers = [500, 300_000, 60, 100_000, 10];
        let n: usize = layers.iter().sum();
        for compressor in [Compressor::TopK, Compressor::LwTopK] {
            let ratios = [0.1, 0.01, 0.001].map(|c| CompressionRatio::new(c).unwrap());
            let methods = ratios.map(|cr| Method::new(compressor, cr));
            let mut shadow = Shadow::new(&methods.map(|m| spec(&m)), 0.25, 7);
            let mut real = methods.map(|m| (m, GradientCompressor::new(Layers::new(&layers).unwrap()), 0.0));
            let mut rng = ChaCha8Rng::seed_from_u64(3);
            for step in 0..10 {
                let gradient = gradient(&layers, &mut rng);
                shadow.observe(0, &params(&layers), &vec![0.0; n], &gradient).unwrap();
                shadow.end_step();
                for (method, compressor, gain) in &mut real {
                    *gain += compressor.compress(*method, &gradient, step).unwrap().energy.gain() / 10.0;
                }
            }
            for (gain, (method, _, real)) in shadow.gains().iter().zip(&real) {
                let seen = gain.gain;
                assert!((seen / real - 1.0).abs() < 0.05, "{compressor} {}: {seen} for {real}", method.cr);
                assert_eq!(gain.steps, 10);
            }
        }
    }

    /// The residual of a small ratio grows for many steps, and what is kept of the error-fed gradient falls.
    #[test]
    fn the_recent_gain_is_that_of_the_grown_residual() {
        let method = Method::new(Compressor::TopK, CompressionRatio::new(0.01).unwrap());
        let mut shadow = Shadow::new(&[spec(&method)], 1.0, 1);
        let mut real = GradientCompressor::new(Layers::fused(20_000).unwrap());
        let mut rng = ChaCha8Rng::seed_from_u64(3);
        let mut last = 0.0;
        for step in 0..60 {
            let gradient = gradient(&[20_000], &mut rng);
            shadow.observe(0, &params(&[20_000]), &[0.0; 20_000], &gradient).unwrap();
            shadow.end_step();
            last = real.compress(method, &gradient, step).unwrap().energy.gain();
        }
        let seen = shadow.gains()[0];
        assert!((seen.recent / last - 1.0).abs() < 0.05, "{seen:?} for {last}");
        assert!(seen.gain > 1.1 * last, "{seen:?} for {last}");
    }

    #[test]
    fn not_finite_gradients_are_passed_over() {
        let method = Method::new(Compressor::TopK, CompressionRatio::new(0.5).unwrap());
        let mut shadow = Shadow::new(&[spec(&method)], 1.0, 1);
        shadow.observe(0, &params(&[2]), &[0.0; 2], &[3.0, 4.0]).unwrap();
        shadow.end_step();
        let before = shadow.gains()[0];
        shadow.observe(0, &params(&[2]), &[0.0; 2], &[f32::NAN, 4.0]).unwrap();
        shadow.end_step();
        assert_eq!(shadow.gains()[0], before);
        assert!(shadow.observe(0, &params(&[2]), &[0.0; 2], &[1.0]).is_err());
    }

    /// Of quantizers and of PowerSGD, against the same run over the whole bucket.
    #[test]
    fn a_quarter_of_the_blocks_tells_the_gain_of_a_pipeline() {
        let layers = [(60_000usize, 200usize), (300, 1), (60_000, 300), (60_000, 200), (60_000, 150)];
        let params: Vec<Param> =
            layers.iter().zip(0..).map(|((len, cols), id)| Param { id, len: *len, cols: *cols }).collect();
        let n: usize = layers.iter().map(|layer| layer.0).sum();
        for (text, least, most) in [
            ("qsgd(s=7,norm=max)+ef(vanilla)", 0.85, 0.995),
            ("eightbit+ef(vanilla)", 0.99, 1.0),
            ("powersgd(rank=2)+ef(vanilla)", 0.005, 0.2),
        ] {
            let specs = [text.parse().unwrap()];
            let (mut part, mut whole) = (Shadow::new(&specs, 0.25, 7), Shadow::new(&specs, 1.0, 9));
            let mut rng = ChaCha8Rng::seed_from_u64(3);
            for _ in 0..12 {
                // Alike in all layers: which matrix is taken by chance must not matter.
                let gradient = gradient(&[n], &mut rng);
                for shadow in [&mut part, &mut whole] {
                    shadow.observe(0, &params, &vec![0.0; n], &gradient).unwrap();
                    shadow.end_step();
                }
            }
            let (seen, real) = (part.gains()[0], whole.gains()[0]);
            assert!((seen.gain / real.gain - 1.0).abs() < 0.05, "{text}: {seen:?} for {real:?}");
            assert!((least..=most).contains(&real.gain), "{text}: {real:?}");
            assert_eq!((seen.steps, real.steps), (12, 12));
        }
    }
}
