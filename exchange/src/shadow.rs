//! Shadow trials: what would a candidate gain, on the gradients that are there anyway.
//!
//! Each candidate has error feedback of its own over a fixed random sample of each bucket, beginning
//! with training's residual. Training is not touched, and nothing is sent. Time is not measured: the
//! sample is smaller than the bucket. AR-Topk's gain depends on another rank's indices: `leader.rs`.
//!
//! The gain is the share of the compensated gradient's energy that leaves the residual, 1 - ‖e - T‖²/‖e‖².
//!
//! What is sampled means something for the method (`sample.rs`): random coordinates for what selects values, contiguous blocks
//! for quantizers, whole matrices for what factors them.

mod device;
mod leader;
mod sample;

use crate::bucket::{Bucket, Host, How, Param, Ran};
use crate::error::ExchangeError;
use crate::head::{Arrived, Status};
use device::OnDevice;
use flexcomm_compression::Energy;
use flexcomm_compression::pipeline::{Member, Step};
use flexcomm_domain::CompressorSpec;
pub use leader::LeaderShadows;
use sample::{Sample, Sampling, samples};

/// Steps that [`ShadowGain::recent`] remembers: weights fall to 1/e over them.
const RECENT_STEPS: f64 = 10.0;

/// A candidate's gain.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct ShadowGain {
    /// Of all buckets together, averaged over the steps that have ended, as live trials do it.
    pub gain: f64,
    /// Of the newest steps most: what a residual that has grown leaves to be kept.
    pub recent: Energy,
    /// Steps that have ended.
    pub steps: u64,
}

/// A sample of a bucket that a candidate compresses as it would in training, by itself.
#[derive(Debug)]
struct Part {
    sample: Sample,
    bucket: Box<Bucket>,
    gradient: Vec<f32>,
    buffer: Vec<u8>,
}

impl Part {
    fn new(spec: &CompressorSpec, sample: Sample, residual: &[f32], member: Member) -> Result<Self, ExchangeError> {
        let param = Param { id: 0, len: sample.places.len(), cols: sample.cols };
        let residual = sample.places.of(residual);
        let residual = residual.iter().any(|value| *value != 0.0).then_some(&residual[..]);
        let mut bucket = Bucket::new(0, vec![param], member, residual)?;
        bucket.prepare(spec, None)?;
        Ok(Self { sample, bucket: Box::new(bucket), gradient: Vec::new(), buffer: Vec::new() })
    }

    /// What left the residual of what; nothing of a gradient that is not finite.
    fn step(&mut self, gradient: &[f32], index: u64) -> Result<Energy, ExchangeError> {
        let Self { sample, bucket, gradient: own, buffer } = self;
        sample.places.copy(gradient, own);
        let Ok(mut round) = bucket.begin(&Host, own, Step { index, learning_rate: 1.0 }, None);
        loop {
            let refused = bucket.status() != Status::Ready;
            if round.last && round.how == How::Gather && !refused {
                return Ok(bucket.commit());
            }
            buffer.clear();
            buffer.resize(round.bytes, 0);
            bucket.write(buffer);
            let arrived = Arrived { refused, parts: vec![buffer] };
            if round.last {
                let ran = bucket.finish(&Host, &arrived, own)?;
                return Ok(if ran == Ran::Good { bucket.energy() } else { Energy::default() });
            }
            round = bucket.next(&Host, &arrived)?;
        }
    }
}

/// A candidate's energies, step by step.
#[derive(Debug, Default)]
pub(crate) struct Tally {
    /// Of the step under way.
    energy: Energy,
    /// Sum over the steps that have ended.
    gains: f64,
    /// Energies of the steps that have ended, the newest first in weight.
    recent: Energy,
    steps: u64,
}

impl Tally {
    pub(crate) fn add(&mut self, weight: f64, energy: Energy) {
        self.energy.sent += weight * energy.sent;
        self.energy.compensated += weight * energy.compensated;
    }

    /// The step under way is over.
    pub(crate) fn end_step(&mut self) {
        if self.energy.compensated > 0.0 {
            self.gains += self.energy.gain();
            let keep = (-1.0 / RECENT_STEPS).exp();
            self.recent =
                Energy { sent: keep * self.recent.sent, compensated: keep * self.recent.compensated } + self.energy;
            self.steps += 1;
        }
        self.energy = Energy::default();
    }

    pub(crate) fn gain(&self) -> ShadowGain {
        match self.steps {
            0 => ShadowGain { gain: 1.0, recent: Energy::default(), steps: 0 },
            steps => ShadowGain { gain: self.gains / steps as f64, recent: self.recent, steps },
        }
    }
}

#[derive(Debug)]
struct Candidate {
    spec: CompressorSpec,
    /// By bucket.
    parts: Vec<Vec<Part>>,
    tally: Tally,
}

impl Candidate {
    fn new(spec: &CompressorSpec) -> Self {
        Self { spec: *spec, parts: Vec::new(), tally: Tally::default() }
    }
}

/// The candidates of one trial on one rank.
#[derive(Debug)]
pub struct Shadow {
    candidates: Vec<Candidate>,
    share: f64,
    seed: u64,
    /// By bucket, where gradients lie on a device.
    on_device: Vec<OnDevice>,
}

impl Shadow {
    /// `share` of each bucket's coordinates, in (0, 1].
    pub fn new(specs: &[CompressorSpec], share: f64, seed: u64) -> Self {
        let candidates = specs.iter().map(Candidate::new).collect();
        Self { candidates, share: share.clamp(0.0, 1.0), seed, on_device: Vec::new() }
    }

    /// Whether the bucket's samples are to be drawn: then [`Self::observe`] looks at the residual, and else not.
    pub fn begins(&self, bucket: usize) -> bool {
        self.candidates.iter().any(|candidate| candidate.parts.len() <= bucket)
    }

    /// Draws a bucket's samples, which begin with training's residual, empty where there is none. Buckets come in order.
    pub fn begin(&mut self, bucket: usize, params: &[Param], residual: &[f32]) -> Result<(), ExchangeError> {
        let expected = params.iter().map(|param| param.len).sum();
        if !residual.is_empty() && residual.len() != expected {
            let (bucket, what) = (bucket as u32, "the residual");
            return Err(ExchangeError::Buffer { bucket, what, got: residual.len(), expected });
        }
        let sampling = Sampling { share: self.share, seed: seed_of(self.seed, bucket) };
        for candidate in self.candidates.iter_mut().filter(|candidate| candidate.parts.len() == bucket) {
            let drawn = samples(&candidate.spec, params, sampling);
            let part = |(number, sample): (u32, Sample)| {
                let member = Member { tensor: number, ..Member::alone(self.seed) };
                Part::new(&candidate.spec, sample, residual, member)
            };
            candidate.parts.push((0..).zip(drawn).map(part).collect::<Result<_, _>>()?);
        }
        Ok(())
    }

    /// Takes in a bucket's gradient, before it is exchanged, and training's residual, which counts where [`Self::begins`]. Every
    /// step alike. A gradient that is not finite is passed over.
    pub fn observe(
        &mut self,
        bucket: usize,
        params: &[Param],
        residual: &[f32],
        gradient: &[f32],
    ) -> Result<(), ExchangeError> {
        let expected = params.iter().map(|param| param.len).sum();
        if gradient.len() != expected {
            let (bucket, what) = (bucket as u32, "the gradient");
            return Err(ExchangeError::Buffer { bucket, what, got: gradient.len(), expected });
        }
        if self.begins(bucket) {
            self.begin(bucket, params, residual)?;
        }
        for candidate in &mut self.candidates {
            let mut parts = candidate.parts.get_mut(bucket).map(std::mem::take).unwrap_or_default();
            for part in &mut parts {
                candidate.tally.add(part.sample.weight, part.step(gradient, candidate.tally.steps)?);
            }
            candidate.parts.get_mut(bucket).into_iter().for_each(|own| std::mem::swap(own, &mut parts));
        }
        Ok(())
    }

    /// Ends a step, after its last bucket.
    pub fn end_step(&mut self) {
        self.candidates.iter_mut().for_each(|candidate| candidate.tally.end_step());
    }

    /// No step follows: frees everything but the gains.
    pub fn rest(&mut self) {
        self.candidates.iter_mut().for_each(|c| c.parts = Vec::new());
        self.on_device = Vec::new();
    }

    /// Steps that have ended.
    pub fn steps(&self) -> u64 {
        self.candidates.iter().map(|c| c.tally.steps).max().unwrap_or(0)
    }

    /// One per candidate, in order.
    pub fn gains(&self) -> Vec<ShadowGain> {
        self.candidates.iter().map(|candidate| candidate.tally.gain()).collect()
    }
}

fn seed_of(seed: u64, bucket: usize) -> u64 {
    seed ^ (bucket as u64) << 32
}

#[cfg(test)]
mod tests {
    use super::*;
    use flexcomm_compression::pipeline::{Gradient, Pipeline};
    use flexcomm_compression::wire::Writer;
    use rand::{Rng, SeedableRng};
    use rand_chacha::ChaCha8Rng;

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

    /// The training itself, by the same spec.
    struct Real(Pipeline, Writer);

    impl Real {
        fn new(spec: &str, layers: &[usize]) -> Self {
            let layers = crate::bucket::layers(&params(layers)).unwrap();
            Self(Pipeline::new(&spec.parse().unwrap(), layers, Member::alone(5)), Writer::new())
        }

        fn gain(&mut self, gradient: &[f32], index: u64) -> f64 {
            let step = Step { index, learning_rate: 1.0 };
            self.0.compress(Gradient::F32(gradient), step, &mut self.1).unwrap().energy.gain()
        }
    }

    #[test]
    fn a_quarter_of_the_coordinates_tells_the_gain_within_5_percent() {
        let layers = [500, 300_000, 60, 100_000, 10];
        for name in ["topk", "lwtopk"] {
            let specs = ["0.1", "0.01", "0.001"].map(|k| format!("{name}(k={k})+ef(vanilla)"));
            let mut shadow = Shadow::new(&specs.each_ref().map(|spec| spec.parse().unwrap()), 0.25, 7);
            let mut real = specs.each_ref().map(|spec| (Real::new(spec, &layers), 0.0));
            let mut rng = ChaCha8Rng::seed_from_u64(3);
            for step in 0..10 {
                let gradient = gradient(&layers, &mut rng);
                shadow.observe(0, &params(&layers), &[], &gradient).unwrap();
                shadow.end_step();
                real.iter_mut().for_each(|(real, gain)| *gain += real.gain(&gradient, step) / 10.0);
            }
            for ((gain, (_, real)), spec) in shadow.gains().iter().zip(&real).zip(&specs) {
                assert!((gain.gain / real - 1.0).abs() < 0.05, "{spec}: {} for {real}", gain.gain);
                assert_eq!(gain.steps, 10);
            }
        }
    }

    /// The residual of a small ratio grows for many steps, and what is kept of the compensated gradient falls.
    #[test]
    fn the_recent_gain_is_that_of_the_grown_residual() {
        let spec = "topk(k=0.01)+ef(vanilla)";
        let mut shadow = Shadow::new(&[spec.parse().unwrap()], 1.0, 1);
        let mut real = Real::new(spec, &[20_000]);
        let mut rng = ChaCha8Rng::seed_from_u64(3);
        let mut last = 0.0;
        for step in 0..60 {
            let gradient = gradient(&[20_000], &mut rng);
            shadow.observe(0, &params(&[20_000]), &[0.0; 20_000], &gradient).unwrap();
            shadow.end_step();
            last = real.gain(&gradient, step);
        }
        let seen = shadow.gains()[0];
        assert!((seen.recent.gain() / last - 1.0).abs() < 0.05, "{seen:?} for {last}");
        assert!(seen.gain > 1.1 * last, "{seen:?} for {last}");
    }

    #[test]
    fn not_finite_gradients_are_passed_over() {
        let mut shadow = Shadow::new(&["topk(k=0.5)+ef(vanilla)".parse().unwrap()], 1.0, 1);
        shadow.observe(0, &params(&[2]), &[], &[3.0, 4.0]).unwrap();
        shadow.end_step();
        let before = shadow.gains()[0];
        shadow.observe(0, &params(&[2]), &[], &[f32::NAN, 4.0]).unwrap();
        shadow.end_step();
        assert_eq!(shadow.gains()[0], before);
        assert!(shadow.observe(0, &params(&[2]), &[], &[1.0]).is_err());
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
                    shadow.observe(0, &params, &[], &gradient).unwrap();
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
