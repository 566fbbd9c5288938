//! What tests of codecs share: tensors, runs of one codec, and the laws.

use flexcomm_compression::Build;
use flexcomm_compression::codec::{Codec, Context, EncodeError, Shape, Target, Travels};
use flexcomm_compression::entry::Entry;
use flexcomm_compression::pipeline::{Gradient, Member, Pipeline, Step, add_messages};
use flexcomm_compression::random::Stream;
use flexcomm_compression::wire::{Reader, Writer};
use flexcomm_compression::{Energy, Layers, methods};
use flexcomm_domain::spec::{CompressorSpec, MEMORIES, MOMENTA, Nature, Param, Values};

/// Every registered codec with each of its examples; with FLEXCOMM_CODECS="a b" only these, to work on them.
pub(crate) fn every_strategy() -> Vec<CompressorSpec> {
    let only = std::env::var_os("FLEXCOMM_CODECS").map(|only| only.into_string().unwrap());
    let wanted = named(only.as_deref()).unwrap_or_else(|error| panic!("{error}"));
    let texts =
        wanted.iter().flat_map(|entry| entry.examples.iter().map(|args| format!("{}({args})", entry.info.name)));
    texts.map(|text| parse(&text)).collect()
}

/// The codecs of a list of names, or all without one. A name that is none, or no name, would test nothing and pass.
fn named(only: Option<&str>) -> Result<Vec<&'static Entry>, String> {
    let Some(only) = only else { return Ok(methods::all().collect()) };
    let names: Vec<&str> = only.split_whitespace().collect();
    let known = |name: &str| methods::all().any(|entry| entry.info.name == name);
    match names.iter().find(|name| !known(name)) {
        None if !names.is_empty() => Ok(methods::all().filter(|entry| names.contains(&entry.info.name)).collect()),
        wrong => {
            let allowed: Vec<&str> = methods::all().map(|entry| entry.info.name).collect();
            let wrong = wrong.map_or("no name".into(), |name| format!("{name:?}"));
            Err(format!("FLEXCOMM_CODECS has {wrong}: allowed are some of {}, or unset it for all", allowed.join(" ")))
        }
    }
}

#[test]
fn codecs_to_test_are_named_or_refused() {
    let names = |only: &str| named(Some(only)).map(|all| all.iter().map(|entry| entry.info.name).collect::<Vec<_>>());
    assert_eq!(named(None).unwrap().len(), methods::all().count());
    assert_eq!(names(" topk  onebit ").unwrap().len(), 2);
    for (wrong, said) in [("topk onebitt", "\"onebitt\""), ("topk,onebit", "\"topk,onebit\""), ("", "no name")] {
        let error = names(wrong).unwrap_err();
        assert!(error.contains(said) && error.contains(" topk ") && error.contains(" powersgd "), "{error}");
    }
}

/// A strategy that must be right.
pub(crate) fn parse(text: &str) -> CompressorSpec {
    text.parse().unwrap_or_else(|e| panic!("failed to {e}"))
}

/// No memory and each that there is, as texts behind a codec. What must be given is 0.5.
pub(crate) fn every_memory() -> Vec<String> {
    let parts = MEMORIES.iter().map(|part| format!("+ef({}{})", part.name, given(part.params, ",")));
    std::iter::once(String::new()).chain(parts).collect()
}

/// No momentum and each that there is, as texts behind a codec and its memory. What must be given is 0.5.
pub(crate) fn every_momentum() -> Vec<String> {
    let parts = MOMENTA.iter().map(|part| format!("+{}({})", part.name, given(part.params, "")));
    std::iter::once(String::new()).chain(parts).collect()
}

/// Each memory, or none, with each momentum, or none.
pub(crate) fn around_a_codec() -> Vec<String> {
    let momenta = every_momentum();
    every_memory().iter().flat_map(|memory| momenta.iter().map(move |momentum| format!("{memory}{momentum}"))).collect()
}

/// The parameters without defaults, as 0.5, the first behind `before`.
fn given(params: &[Param], before: &str) -> String {
    let required = params.iter().filter(|param| param.default.is_none());
    let texts: Vec<String> = required.map(|param| format!("{}=0.5", param.name)).collect();
    if texts.is_empty() { String::new() } else { format!("{before}{}", texts.join(",")) }
}

/// A shape with many rows and columns where n allows, so that low-rank codecs see a matrix.
pub(crate) fn shape(n: usize) -> Shape {
    let cols = (1..=n.isqrt()).rev().find(|cols| n.is_multiple_of(*cols)).unwrap_or(1);
    Shape { rows: n / cols.max(1), cols }
}

/// Standard normal values from a seed.
pub(crate) fn normal(n: usize, seed: u64) -> Vec<f32> {
    let stream = Stream::new(seed, [77, 0, 0, 0]);
    let value = |i| {
        let (u, v) = (1.0 - stream.unit(2 * i), stream.unit(2 * i + 1));
        ((-2.0 * u.ln()).sqrt() * (std::f64::consts::TAU * v).cos()) as f32
    };
    (0..n as u64).map(value).collect()
}

/// Laplace values: heavy tails, as gradients have.
pub(crate) fn laplace(n: usize, seed: u64) -> Vec<f32> {
    let stream = Stream::new(seed, [78, 0, 0, 0]);
    let value = |i| {
        let u = stream.unit(i) - 0.5;
        (-u.signum() * (1.0 - 2.0 * u.abs()).max(1e-300).ln()) as f32
    };
    (0..n as u64).map(value).collect()
}

/// Named tensors that have broken compressors before.
pub(crate) fn edge_tensors() -> Vec<(&'static str, Vec<f32>)> {
    vec![
        ("empty", vec![]),
        ("one", vec![-2.5]),
        ("one zero", vec![0.0]),
        ("one negative zero", vec![-0.0]),
        ("zeros", vec![0.0; 100]),
        ("zeros of both signs", (0..37).map(|i| if i % 2 == 0 { 0.0 } else { -0.0 }).collect()),
        ("constant", vec![0.75; 65]),
        ("just below a power of two", vec![1.999_999_9; 4096]),
        ("all negative", (0..63).map(|i| -0.1 - i as f32).collect()),
        ("denormal", (0..129).map(|i| f32::from_bits(i * 1000 + 1)).collect()),
        ("denormal of both signs", (0..64).map(|i| f32::from_bits((i + 1) | ((i & 1) << 31))).collect()),
        ("huge", (0..40).map(|i| if i % 3 == 0 { f32::MAX } else { -f32::MAX / 2.0 }).collect()),
        ("one spike", (0..500).map(|i| if i == 123 { 1e6 } else { 1e-3 }).collect()),
        ("ties", (0..200).map(|i| [1.0, -1.0, 0.5, 0.0][i % 4]).collect()),
        ("wide range", (0..256).map(|i| 10f32.powi(i % 60 - 30) * if i % 2 == 0 { 1.0 } else { -1.0 }).collect()),
        ("normal", normal(1000, 1)),
        ("laplace of prime length", laplace(997, 2)),
        ("long", laplace(20_011, 3)),
    ]
}

/// A strategy's codec alone, on one tensor, with world 1: what it sends is also the sum.
#[derive(Debug)]
pub(crate) struct Run {
    pub(crate) codec: Box<dyn Codec>,
    pub(crate) context: Context,
    pub(crate) payload: Writer,
}

impl Run {
    pub(crate) fn new(strategy: &CompressorSpec, shape: Shape, seed: u64) -> Self {
        Self { codec: strategy.codec(shape), context: Context::new(seed), payload: Writer::new() }
    }

    /// All rounds; `x` becomes x − C(x). The payload of the last round stays in `payload`.
    pub(crate) fn take(&mut self, x: &mut [f32]) -> Result<Energy, EncodeError> {
        let Self { codec, context, payload } = self;
        for round in 0..codec.rounds() {
            context.round = round;
            payload.clear();
            if round + 1 == codec.rounds() {
                return codec.encode_taking(x, context, payload);
            }
            codec.encode(x, context, payload)?;
            codec.reply(&mut Reader::new(payload.bytes()), context, 1.0)?;
        }
        unreachable!("a codec has at least one round")
    }

    /// All rounds by `encode` alone, then C(x) decoded from the payload.
    pub(crate) fn transmit(&mut self, x: &[f32]) -> Result<(Energy, Vec<f32>), EncodeError> {
        let mut energy = Energy::default();
        for round in 0..self.codec.rounds() {
            self.context.round = round;
            self.payload.clear();
            energy = self.codec.encode(x, &self.context, &mut self.payload)?;
            if round + 1 < self.codec.rounds() {
                self.codec.reply(&mut Reader::new(self.payload.bytes()), &self.context, 1.0)?;
            }
        }
        let sent = self.decode(x.len());
        if self.codec.wants_reply() {
            self.codec.reply(&mut Reader::new(self.payload.bytes()), &self.context, 1.0)?;
        }
        Ok((energy, sent))
    }

    /// C(x) from the payload.
    pub(crate) fn decode(&mut self, n: usize) -> Vec<f32> {
        let mut out = vec![0.0; n];
        let mut from = Reader::new(self.payload.bytes());
        self.codec.decode(&mut from, &self.context, Target::add(1.0, &mut out)).unwrap();
        assert_eq!(from.left(), 0, "bytes are left over");
        out
    }
}

/// C(x) of a fresh codec.
pub(crate) fn compressed(strategy: &CompressorSpec, x: &[f32], seed: u64) -> Vec<f32> {
    Run::new(strategy, shape(x.len()), seed).transmit(x).unwrap().1
}

pub(crate) fn energy(x: &[f32]) -> f64 {
    x.iter().map(|v| f64::from(*v).powi(2)).sum()
}

/// ‖x − y‖².
pub(crate) fn distance(x: &[f32], y: &[f32]) -> f64 {
    x.iter().zip(y).map(|(x, y)| (f64::from(*x) - f64::from(*y)).powi(2)).sum()
}

/// E C(x) = x: over fixed seeds, each coordinate's mean lies within 7 of its own standard errors (and a rounding) of
/// x. `least` is a share of max |x| that the error may always have, for coordinates that are rarely sent.
pub(crate) fn assert_unbiased(strategy: &CompressorSpec, x: &[f32], draws: u32) {
    let (mut sum, mut squares) = (vec![0.0f64; x.len()], vec![0.0f64; x.len()]);
    for seed in 0..u64::from(draws) {
        for (i, value) in compressed(strategy, x, 1000 + seed).iter().enumerate() {
            sum[i] += f64::from(*value);
            squares[i] += f64::from(*value).powi(2);
        }
    }
    let draws = f64::from(draws);
    let norm = energy(x).sqrt();
    // The whole: the squared error of the mean is what its variance says, not more.
    let (mut error, mut variance) = (0.0, 0.0);
    for (i, x) in x.iter().enumerate() {
        let mean = sum[i] / draws;
        let spread = (squares[i] / draws - mean * mean).max(0.0) / draws;
        let rare = norm / draws;
        let off = (mean - f64::from(*x)).abs();
        assert!(off <= 7.0 * spread.sqrt() + 8.0 * rare + 1e-5 * norm, "{strategy}: value {i} = {x} has mean {mean}");
        error += off * off;
        variance += spread;
    }
    // Their ratio is 1 in the mean. Of atoms all values follow few draws, so that it scatters: with these seeds up to 3.9.
    let factor = if strategy.compressor().name == "atomo" { 4.5 } else { 2.0 };
    assert!(error <= factor * variance + (1e-4 * norm).powi(2), "{strategy}: error {error}, variance {variance}");
}

/// ‖x − C(x)‖² ≤ (1 − delta) ‖x‖² for every one of `draws` draws.
pub(crate) fn assert_contractive(strategy: &CompressorSpec, x: &[f32], delta: fn(&Values, usize) -> f64, draws: u64) {
    let delta = delta_of(strategy, x, delta);
    for seed in 0..draws {
        let (error, whole) = (distance(x, &compressed(strategy, x, seed)), energy(x));
        let most = (1.0 - delta) * whole + 1e-6 * whole + 1e-80;
        assert!(error <= most, "{strategy}, seed {seed}: {error} of {whole}, delta {delta}");
    }
}

/// The same in the mean of the draws.
pub(crate) fn assert_contractive_in_mean(
    strategy: &CompressorSpec,
    x: &[f32],
    delta: fn(&Values, usize) -> f64,
    draws: u64,
) {
    let delta = delta_of(strategy, x, delta);
    let errors: Vec<f64> = (0..draws).map(|seed| distance(x, &compressed(strategy, x, seed))).collect();
    let mean = errors.iter().sum::<f64>() / draws as f64;
    let spread = errors.iter().map(|e| (e - mean).powi(2)).sum::<f64>() / draws as f64;
    let slack = 7.0 * (spread / draws as f64).sqrt() + 1e-6 * energy(x) + 1e-80;
    assert!(mean <= (1.0 - delta) * energy(x) + slack, "{strategy}: {mean} of {}, delta {delta}", energy(x));
}

fn delta_of(strategy: &CompressorSpec, x: &[f32], delta: fn(&Values, usize) -> f64) -> f64 {
    let delta = delta(strategy.values(), x.len());
    assert!((0.0..=1.0).contains(&delta), "{strategy}: delta {delta}");
    delta
}

/// Error feedback around a codec over 100 steps: what was sent plus the residual is what came in, to rounding.
pub(crate) fn assert_error_feedback_conserves(codec: &str) {
    let n = 240;
    let text = format!("{codec}+ef(vanilla)");
    let mut ranks = Ranks::new(&text, n, 1);
    let (mut came, mut sent) = (vec![0.0f64; n], vec![0.0f64; n]);
    let mut largest = 0.0f64;
    for step in 0..100 {
        let gradient = laplace(n, step);
        came.iter_mut().zip(&gradient).for_each(|(sum, g)| *sum += f64::from(*g));
        let mean = ranks.step(&[gradient], step);
        sent.iter_mut().zip(&mean).for_each(|(sum, g)| *sum += f64::from(*g));
        let most = |values: &[f32]| values.iter().fold(0.0f64, |max, v| max.max(f64::from(v.abs())));
        largest = largest.max(most(&mean)).max(most(&ranks.pipelines[0].residual()));
        // Around a codec that is not contractive, error feedback may grow without bound: it conserves until then.
        if largest > 1e20 {
            let nature = parse(codec).nature();
            let grows = !parse(&text).is_scaled() && matches!(nature, Nature::Unbiased(_) | Nature::Biased(_));
            assert!(grows, "{text}: the residual grew to {largest} in {step} steps");
            break;
        }
    }
    let residual = ranks.pipelines[0].residual();
    for i in 0..n {
        let off = (sent[i] + f64::from(residual[i]) - came[i]).abs();
        // A hundred roundings of the largest number that took part.
        assert!(off <= 100.0 * largest * 1.2e-7 + 1e-30, "{text}: value {i} is off by {off} (largest {largest})");
    }
}

/// Several ranks with pipelines, exchanging by hand.
pub(crate) struct Ranks {
    pub(crate) pipelines: Vec<Pipeline>,
    pub(crate) messages: Vec<Writer>,
}

impl Ranks {
    pub(crate) fn new(text: &str, n: usize, world: u32) -> Self {
        let layers = Layers::matrices(&[shape(n)]).unwrap();
        Self::with_layers(text, &layers, world)
    }

    pub(crate) fn with_layers(text: &str, layers: &Layers, world: u32) -> Self {
        let member = |rank| Member { seed: 11, rank, world, tensor: 5 };
        let pipelines = (0..world).map(|rank| Pipeline::new(&parse(text), layers.clone(), member(rank))).collect();
        Self { pipelines, messages: vec![Writer::new(); world as usize] }
    }

    /// One step on all ranks; the mean, which is the same on all.
    pub(crate) fn step(&mut self, gradients: &[Vec<f32>], index: u64) -> Vec<f32> {
        let step = Step { index, learning_rate: 0.1 };
        for ((pipeline, gradient), out) in self.pipelines.iter_mut().zip(gradients).zip(&mut self.messages) {
            pipeline.compress(Gradient::F32(gradient), step, out).unwrap();
        }
        for _ in 1..self.pipelines[0].rounds() {
            let sum = self.sum();
            for (pipeline, out) in self.pipelines.iter_mut().zip(&mut self.messages) {
                pipeline.advance(&sum, out).unwrap();
            }
        }
        let mut means: Vec<Vec<f32>> = gradients.iter().map(|g| vec![0.0; g.len()]).collect();
        let sum = matches!(self.pipelines[0].travels(), Travels::Sums(_)).then(|| self.sum());
        let messages: Vec<&[u8]> = self.messages.iter().map(Writer::bytes).collect();
        for (pipeline, mean) in self.pipelines.iter_mut().zip(&mut means) {
            match &sum {
                Some(sum) => pipeline.mean(sum, index, mean).unwrap(),
                None => pipeline.aggregate(&messages, index, mean).unwrap(),
            }
        }
        let bits = |v: &[f32]| v.iter().map(|x| x.to_bits()).collect::<Vec<_>>();
        assert!(means.iter().all(|mean| bits(mean) == bits(&means[0])), "ranks differ");
        means.swap_remove(0)
    }

    fn sum(&self) -> Vec<u8> {
        let Travels::Sums(element) = self.pipelines[0].travels() else { panic!("only sums have rounds") };
        let mut sum = self.messages[0].bytes().to_vec();
        self.messages[1..].iter().for_each(|other| add_messages(element, &mut sum, other.bytes()).unwrap());
        sum
    }
}
