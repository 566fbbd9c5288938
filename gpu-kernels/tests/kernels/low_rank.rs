//! PowerSGD against `compression`, rank by rank and round by round. Products are cuBLAS's on a GPU only; elsewhere a
//! stand-in multiplies in f64 by BLAS's own conventions, so that layouts and transpositions are tested, and the algebra
//! around them, but not cuBLAS.

use crate::emulated::{Emulated, Memory};
use flexcomm_compression::Layers;
use flexcomm_compression::codec::{Element, Shape};
use flexcomm_compression::pipeline::{Gradient, Member, Pipeline, Step as CpuStep, add_messages};
use flexcomm_compression::random::Stream;
use flexcomm_compression::wire::Writer;
use flexcomm_gpu_kernels::low_rank::{Factors, Layer, LowRank, Step, add, begin, keep_warm, left, right};
use flexcomm_gpu_kernels::{
    Cublas, DType, Device, ErrorFeedback, LaunchError, LoadError, Outcome, Random, Span, Target, workspace_bytes,
};
use std::path::Path;

const SEED: u64 = 41;
const WORLD: u32 = 3;

/// One process with a layer.
struct Process {
    shape: Shape,
    low_rank: LowRank,
    memory: Memory,
    compensated: Memory,
    factors: [Memory; 3],
    workspace: Memory,
}

impl Process {
    fn new(shape: Shape, rank: u64) -> Self {
        let n = shape.values();
        let low_rank = LowRank::new(shape.rows as u64, shape.cols as u64, rank).unwrap().unwrap();
        let [warm, left, scratch] = low_rank.bytes();
        let factors = [Memory::of(&vec![0.0f32; warm as usize / 4]), Memory::new(left), Memory::new(scratch)];
        let (memory, compensated) = (Memory::of(&vec![0.0f32; n]), Memory::new(4 * n as u64));
        Self { shape, low_rank, memory, compensated, factors, workspace: Memory::new(workspace_bytes(n as u64)) }
    }

    fn step(&self) -> Step {
        Step { n: self.shape.values() as u64, workspace: self.workspace.span() }
    }

    fn layer(&self) -> Layer {
        let [warm, left, scratch] = self.factors.each_ref().map(Memory::span);
        let factors = Factors { warm, left, scratch };
        Layer { shape: self.low_rank, matrix: self.compensated.span(), factors }
    }

    fn begin(&self, device: &Emulated, gradient: &Memory) {
        let (n, memory, compensated) = (self.shape.values() as u64, self.memory.span(), self.compensated.span());
        let (dtype, beta, gamma) = (DType::F32, 1.0, 1.0);
        let feedback = ErrorFeedback { n, dtype, gradient: gradient.span(), memory, compensated, beta, gamma };
        begin(device, &feedback, self.workspace.span()).unwrap();
    }

    /// P to send.
    fn left(&self, device: &Emulated) -> Memory {
        let to = Memory::new(4 * self.low_rank.counts()[0]);
        // Step and rank do not count.
        let random = Random { seed: SEED, step: 77, tensor: 0, rank: Some(5) };
        left(device, &self.layer(), random, to.span(), &self.step()).unwrap();
        to
    }

    fn right(&self, device: &Emulated, sum: &Memory, scale: f32) -> Memory {
        let to = Memory::new(4 * self.low_rank.counts()[1]);
        right(device, &self.layer(), sum.span(), scale, to.span(), &self.step()).unwrap();
        to
    }

    /// What the step's gradient is, and the memories for the next.
    fn end(&mut self, device: &Emulated, sum: &Memory, scale: f32) -> Vec<f32> {
        let out = Memory::of(&vec![0.0f32; self.shape.values()]);
        let layer = self.layer();
        add(device, layer.shape, layer.factors.left, sum.span(), Target { scale, out: out.span() }).unwrap();
        keep_warm(device, &layer, sum.span(), scale, &self.step()).unwrap();
        std::mem::swap(&mut self.memory, &mut self.compensated);
        out.f32s()
    }

    fn outcome(&self) -> Outcome {
        self.workspace.outcome()
    }
}

/// What an allreduce does.
fn sum(parts: &[Memory]) -> Memory {
    let mut all = vec![0.0f32; parts[0].f32s().len()];
    parts.iter().for_each(|part| all.iter_mut().zip(part.f32s()).for_each(|(sum, x)| *sum += x));
    Memory::of(&all)
}

/// A few directions, and noise.
fn gradient(shape: Shape, which: u64) -> Vec<f32> {
    let stream = Stream::new(which, [2; 4]);
    let value = |i: usize| stream.uniform(i as u32) - 0.5;
    let each = |at: usize| {
        let (i, j) = (at / shape.cols, at % shape.cols);
        let strong: f32 = (0..3).map(|k| value(1_000_000 * (k + 1) + i) * value(5_000_000 * (k + 1) + j)).sum();
        strong + 0.02 * value(at)
    };
    (0..shape.values()).map(each).collect()
}

fn norm(values: impl Iterator<Item = f64>) -> f64 {
    values.map(|x| x * x).sum::<f64>().sqrt()
}

/// As vectors, relative to the whole's norm: sums of f32 come in another order.
fn near(got: &[f32], want: &[f32], what: &str) {
    near_beside(got, want, (norm(want.iter().map(|x| f64::from(*x))), what));
}

/// The same for a difference of large vectors, which has their rounding.
fn near_beside(got: &[f32], want: &[f32], (whole, what): (f64, &str)) {
    assert_eq!(got.len(), want.len());
    let off = norm(got.iter().zip(want).map(|(a, b)| f64::from(*a) - f64::from(*b)));
    assert!(off <= 2e-4 * whole + 1e-30, "{what}: {off} of {whole}");
}

fn payload(message: &[u8]) -> Vec<f32> {
    let header = 32 + 8 * usize::from(message[7]);
    message[header..].as_chunks::<4>().0.iter().map(|bytes| f32::from_le_bytes(*bytes)).collect()
}

/// Three ranks of the CPU side.
struct Reference {
    ranks: Vec<Pipeline>,
}

/// A round's payloads, by rank, and what they add up to as a message.
type Round = (Vec<Vec<f32>>, Vec<u8>);

impl Reference {
    fn new(shape: Shape, rank: u64) -> Self {
        let strategy = format!("powersgd(rank={rank})+ef(vanilla)").parse().unwrap();
        let member = |rank| Member { seed: SEED, rank, world: WORLD, tensor: 0 };
        let pipeline = |rank| Pipeline::new(&strategy, Layers::matrices(&[shape]).unwrap(), member(rank));
        Self { ranks: (0..WORLD).map(pipeline).collect() }
    }

    fn round(&mut self, mut of: impl FnMut(&mut Pipeline, usize, &mut Writer)) -> Round {
        let mut messages: Vec<Vec<u8>> = Vec::new();
        for (rank, pipeline) in self.ranks.iter_mut().enumerate() {
            let mut message = Writer::new();
            of(pipeline, rank, &mut message);
            messages.push(message.bytes().to_vec());
        }
        let payloads = messages.iter().map(|message| payload(message)).collect();
        let mut sum = messages.swap_remove(0);
        messages.iter().for_each(|other| add_messages(Element::F32, &mut sum, other).unwrap());
        (payloads, sum)
    }
}

/// Four steps with warm starts and error feedback.
fn compare(shape: Shape, rank: u64, seed: u64) {
    let Some(device) = Emulated::new(seed) else { return };
    let mut cpu = Reference::new(shape, rank);
    let mut ranks: Vec<Process> = (0..WORLD).map(|_| Process::new(shape, rank)).collect();
    let scale = 1.0 / WORLD as f32;
    for step in 0..4u64 {
        let gradients: Vec<Vec<f32>> = (0..u64::from(WORLD)).map(|r| gradient(shape, 10 * step + r)).collect();
        let at = CpuStep { index: step, learning_rate: 0.1 };
        let (lefts, summed) = cpu.round(|pipeline, rank, to| {
            assert!(pipeline.compress(Gradient::F32(&gradients[rank]), at, to).unwrap().more);
        });
        let mut sent = Vec::new();
        let (rights, all) = cpu.round(|pipeline, _, to| sent.push(pipeline.advance(&summed, to).unwrap().energy));
        let got: Vec<Memory> = ranks
            .iter()
            .zip(&gradients)
            .map(|(process, gradient)| {
                process.begin(&device, &Memory::of(gradient));
                process.left(&device)
            })
            .collect();
        got.iter().zip(&lefts).for_each(|(got, want)| near(&got.f32s(), want, "P"));
        let total = sum(&got);
        let got: Vec<Memory> = ranks.iter().map(|process| process.right(&device, &total, scale)).collect();
        got.iter().zip(&rights).for_each(|(got, want)| near(&got.f32s(), want, "Q"));
        let total = sum(&got);
        for ((process, pipeline), sent) in ranks.iter_mut().zip(&mut cpu.ranks).zip(sent) {
            let outcome = process.outcome();
            assert!((outcome.compensated - sent.compensated).abs() <= 1e-6 * sent.compensated, "{outcome:?} {sent:?}");
            assert!((outcome.sent - sent.sent).abs() <= 1e-4 * sent.sent, "{outcome:?} {sent:?}");
            assert_eq!(outcome.bytes, 4 * process.low_rank.counts()[1]);
            let mean = process.end(&device, &total, scale);
            let mut want = vec![0.0; shape.values()];
            pipeline.mean(&all, step, &mut want).unwrap();
            near(&mean, &want, "the gradient");
            let residual = pipeline.residual();
            near_beside(&process.memory.f32s(), &residual, (sent.compensated.sqrt(), "the memory"));
        }
    }
}

#[test]
fn four_steps_of_three_ranks_are_the_cpus() {
    let shapes = [(40, 30, 2), (5, 700, 1), (301, 7, 3), (64, 64, 4), (33, 65, 16)];
    for (seed, (rows, cols, rank)) in shapes.into_iter().enumerate() {
        compare(Shape { rows, cols }, rank, seed as u64);
    }
}

/// In f64, without the CPU side: a matrix of rank 1 is its own product, and what is sent leaves nothing to the memory. And
/// what decoding adds is what the memory lost, bit for bit.
#[test]
fn a_matrix_of_low_rank_comes_back_whole() {
    let shape = Shape { rows: 90, cols: 51 };
    let Some(device) = Emulated::new(3) else { return };
    let stream = Stream::new(4, [0; 4]);
    let factor = |i: usize| stream.uniform(i as u32) - 0.5;
    let matrix: Vec<f32> = (0..shape.values()).map(|at| factor(at / 51) * factor(1000 + at % 51)).collect();
    let mut process = Process::new(shape, 2);
    process.begin(&device, &Memory::of(&matrix));
    let p = process.left(&device);
    let q = process.right(&device, &p, 1.0);
    let left: Vec<f32> = process.factors[1].f32s();
    // One direction is all there is: the second column says zero.
    assert!(left[90..].iter().all(|x| *x == 0.0));
    let norm: f64 = left[..90].iter().map(|x| f64::from(*x).powi(2)).sum();
    assert!((norm - 90.0).abs() < 1e-4, "{norm}");
    let outcome = process.outcome();
    assert!((outcome.gain() - 1.0).abs() < 1e-5, "{outcome:?}");
    let decoded = process.end(&device, &q, 1.0);
    near(&decoded, &matrix, "the matrix");
    let kept: Vec<u32> = matrix.iter().zip(&decoded).map(|(x, sent)| (x + -sent).to_bits()).collect();
    assert_eq!(process.memory.u32s(), kept);
}

/// The product beyond f32's range is its largest value, not infinity.
#[test]
fn products_beyond_f32_are_cut() {
    let Some(device) = Emulated::new(1) else { return };
    let layer = LowRank::new(6, 5, 2).unwrap().unwrap();
    let (left, right) = (Memory::of(&[1e30f32; 12]), Memory::of(&[[3e30f32; 5], [-1e30; 5]].concat()));
    let out = Memory::of(&[0.0f32; 30]);
    add(&device, layer, left.span(), right.span(), Target { scale: 0.5, out: out.span() }).unwrap();
    assert_eq!(out.f32s(), [f32::MAX / 2.0; 30]);
}

#[test]
fn what_is_not_finite_sends_zeros_and_leaves_the_memory() {
    let shape = Shape { rows: 20, cols: 30 };
    let Some(device) = Emulated::new(2) else { return };
    let mut process = Process::new(shape, 2);
    let residual: Vec<f32> = gradient(shape, 3);
    process.memory = Memory::of(&residual);
    process.factors[0] = Memory::of(&gradient(Shape { rows: 2, cols: 30 }, 6));
    let mut broken = gradient(shape, 4);
    broken[100] = f32::NAN;
    process.begin(&device, &Memory::of(&broken));
    let p = process.left(&device);
    assert!(p.f32s().iter().all(|x| *x == 0.0));
    // The others go on.
    let theirs = Memory::of(&gradient(Shape { rows: 20, cols: 2 }, 8));
    let q = process.right(&device, &theirs, 0.5);
    assert!(q.f32s().iter().all(|x| *x == 0.0) && process.outcome().refused);
    assert_eq!(process.compensated.f32s(), residual);
    // A step of zeros is no start for the next one.
    let warm = process.factors[0].f32s();
    process.end(&device, &q, 1.0);
    assert_eq!(process.factors[0].f32s(), warm);
}

#[test]
fn layers_that_gain_nothing_have_no_factors() {
    for (rows, cols, rank) in [(1, 100, 4), (100, 1, 4), (0, 0, 1), (6, 6, 3), (2, 2, 1000)] {
        assert_eq!(LowRank::new(rows, cols, rank).unwrap(), None);
    }
    assert!(matches!(LowRank::new(4, 4, 0).unwrap_err(), LaunchError::Parameter { what: "rank", .. }));
    assert!(matches!(LowRank::new(1 << 20, 1 << 12, 1).unwrap_err(), LaunchError::TooLong(_)));
}

/// A bucket of two layers: what is sent adds up.
#[test]
fn energies_of_layers_add_up() {
    let shape = Shape { rows: 16, cols: 24 };
    let Some(device) = Emulated::new(6) else { return };
    let process = Process::new(Shape { rows: 2, cols: shape.values() }, 1);
    let both = [gradient(shape, 1), gradient(shape, 2)].concat();
    process.begin(&device, &Memory::of(&both));
    let (low_rank, bytes) = (LowRank::new(16, 24, 1).unwrap().unwrap(), 4 * shape.values() as u64);
    let mut alone = 0.0;
    for part in 0..2u64 {
        let matrix = process.compensated.span().part(part * bytes, bytes);
        let buffers = low_rank.bytes().map(|bytes| Memory::of(&vec![0.0f32; bytes as usize / 4]));
        let [warm, scratch_left, scratch] = buffers.each_ref().map(Memory::span);
        let factors = Factors { warm, left: scratch_left, scratch };
        let layer = Layer { shape: low_rank, matrix, factors };
        let [p, q] = low_rank.counts().map(|count| Memory::new(4 * count));
        let random = Random { seed: SEED, step: 0, tensor: part as u32, rank: None };
        left(&device, &layer, random, p.span(), &process.step()).unwrap();
        right(&device, &layer, p.span(), 1.0, q.span(), &process.step()).unwrap();
        alone += 16.0 * q.f32s().iter().map(|x| f64::from(*x).powi(2)).sum::<f64>();
        keep_warm(&device, &layer, q.span(), 1.0, &process.step()).unwrap();
    }
    let outcome = process.outcome();
    assert!((outcome.sent - alone).abs() <= 1e-9 * alone, "{outcome:?}, {alone}");
    assert_eq!(outcome.bytes, 2 * 4 * 24);
}

#[test]
fn short_and_missing_buffers_are_named() {
    let Some(device) = Emulated::new(0) else { return };
    let process = Process::new(Shape { rows: 20, cols: 30 }, 2);
    let random = Random { seed: 0, step: 0, tensor: 0, rank: None };
    let (to, short) = (Memory::new(160), Memory::new(100));
    let call = |matrix: Span, to: Span| {
        let layer = Layer { matrix, ..process.layer() };
        left(&device, &layer, random, to, &process.step()).unwrap_err().to_string()
    };
    let text = call(process.compensated.span(), short.span());
    assert!(text.contains("the left factor to send of 100 bytes: 160 are needed"), "{text}");
    let text = call(to.span(), to.span());
    assert!(text.contains("the layer of 160 bytes: 2400 are needed"), "{text}");
    let uneven = device.copy(to.span(), short.span()).unwrap_err().to_string();
    assert!(uneven.contains("copy 100 bytes to 160"), "{uneven}");
}

/// No cuBLAS, a file that is none, a library of another kind, and, where torch's wheels are, the real one: found, asked
/// for its version, every function there. Nothing is multiplied: that needs a GPU.
#[test]
fn cublas_is_found_or_what_is_missing_is_named() {
    let folder = tempfile::tempdir().unwrap();
    let missing = Cublas::first_of(&[folder.path().join("libcublas.so.13")]).unwrap_err();
    assert!(matches!(&missing, LoadError::NoBlas { tried } if tried.contains("libcublas.so.13")), "{missing}");
    assert!(missing.to_string().contains("pip install nvidia-cublas"), "{missing}");
    let file = folder.path().join("libcublas.so.12");
    std::fs::write(&file, "no library").unwrap();
    let bad = Cublas::first_of(&[file]).unwrap_err();
    assert!(matches!(bad, LoadError::BadBlas { .. }), "{bad}");
    let other = Cublas::first_of(&["libc.so.6".into()]).unwrap_err().to_string();
    assert!(other.contains("use libc.so.6 as cuBLAS") && other.contains("cublasCreate_v2"), "{other}");
    let venv = Path::new(env!("CARGO_MANIFEST_DIR")).join("../target/venv-python");
    let Some(path) = Cublas::in_environment(&venv).pop() else {
        println!("no cuBLAS in {}: the real one was not looked at", venv.display());
        return;
    };
    let real = Cublas::first_of(&[path]).unwrap();
    assert!(real.version().major >= 12, "{}", real.version());
    println!("cuBLAS {} at {}", real.version(), real.path());
}
