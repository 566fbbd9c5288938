//! Times of the kernels on a GPU, by events, beside a copy within the device in the same run: what `flexcomm bench gpu` shows.

use crate::device::{Copies, Device};
use crate::low_rank::{self, Factors, Layer, LowRank};
use crate::{
    Allocation, BLAS_WORKSPACE, Blas, BlasError, Cache, Cublas, DType, ErrorFeedback, Fit, Form, Gpu, LaunchError,
    LoadError, MemoryError, OUTCOME_BYTES, OnStream, Outcome, Quantizer, Random, Selection, Set, Span, Stream, Tail,
    Target, Threshold, compensate, gains, gather, largest, pack, payload_room, scatter, subset_scratch,
    workspace_bytes,
};

/// Failed to measure.
#[derive(Debug, thiserror::Error)]
pub enum BenchError {
    /// There are no kernels.
    #[error(transparent)]
    Load(#[from] LoadError),
    /// Memory or clocks.
    #[error(transparent)]
    Memory(#[from] MemoryError),
    /// A call.
    #[error(transparent)]
    Launch(#[from] LaunchError),
    /// cuBLAS.
    #[error(transparent)]
    Blas(#[from] BlasError),
}

/// One method at one size.
#[derive(Debug, Clone, PartialEq)]
pub struct Row {
    /// As strategies name it, with its parameters.
    pub method: String,
    /// Values, f32.
    pub n: u64,
    /// The median, in seconds.
    pub seconds: f64,
    /// Least bytes that the method must read and write.
    pub bytes: u64,
    /// Their rate over that of the copy: 1 is as fast as memory allows.
    pub of_copy: f64,
    /// One rank's payload; none where nothing is sent.
    pub bytes_out: Option<u64>,
    /// Share of the energy that is sent.
    pub gain: Option<f64>,
    /// To add the payload into a gradient, the median in seconds.
    pub decompress: Option<f64>,
}

/// What one rank sends of a gradient, with no residual before: version 2 of the format, without its header.
#[derive(Debug, Clone, PartialEq)]
pub struct Message {
    /// As strategies name it, with its parameters.
    pub method: String,
    /// Ranks that the method was told of.
    pub world: u32,
    /// The payload.
    pub bytes: Vec<u8>,
    /// What stays for the next step.
    pub residual: Vec<f32>,
}

/// The gain of top-k as one pass over a gradient estimates it.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct GainOfK {
    /// Values that are kept.
    pub k: u64,
    /// Share of the energy that is sent.
    pub gain: f64,
    /// By how much it may be off.
    pub error: f64,
}

mod work;

use work::{Buffers, RANDOM, Sent, works};

/// Before the first is counted: clocks rise, modules load.
const WARM_UP: usize = 3;
const REPEATS: usize = 15;
/// Of [`median`].
pub const RUNS: usize = WARM_UP + REPEATS;

/// The median of several runs after a warm-up.
pub fn median<E>(mut once: impl FnMut() -> Result<f64, E>) -> Result<f64, E> {
    for _ in 0..WARM_UP {
        once()?;
    }
    let mut times = (0..REPEATS).map(|_| once()).collect::<Result<Vec<f64>, E>>()?;
    times.sort_by(f64::total_cmp);
    Ok(times[REPEATS / 2])
}

/// A device with its kernels.
#[derive(Debug)]
pub struct Bench {
    gpu: Gpu,
}

impl Bench {
    /// On a device, with the user's cache of kernels.
    pub fn new(ordinal: u32) -> Result<Self, BenchError> {
        Ok(Self { gpu: Gpu::load(ordinal, Cache::from_environment().as_ref())? })
    }

    /// Name and architecture.
    pub fn device(&self) -> Result<String, BenchError> {
        Ok(format!("{} ({})", self.gpu.name()?, self.gpu.arch().sm()))
    }

    /// cuBLAS, which PowerSGD's rows need; or why there is none.
    pub fn blas(&self) -> Result<Blas<'_>, BenchError> {
        Ok(self.gpu.blas(Cublas::find()?)?)
    }

    /// What every method sends whose message a CPU can make too: seed 1, rank 0, step 0.
    pub fn messages(&self, values: &[f32]) -> Result<Vec<Message>, BenchError> {
        let (buffers, stream) = (Buffers::new(&self.gpu, values)?, self.gpu.stream()?);
        buffers.forget()?;
        let room = self.gpu.allocate(payload_room(buffers.n, buffers.n))?;
        let mut messages = Vec::new();
        for (method, work) in works(buffers.n) {
            if let Some(bytes) = buffers.message(work, &stream, room.span())? {
                let residual = buffers.residual()?;
                messages.push(Message { method, world: work.world(), bytes, residual });
            }
        }
        Ok(messages)
    }

    /// Gains of top-k for some k, with no residual before.
    pub fn gains(&self, values: &[f32]) -> Result<Vec<GainOfK>, BenchError> {
        let (buffers, stream) = (Buffers::new(&self.gpu, values)?, self.gpu.stream()?);
        buffers.forget()?;
        buffers.gains_of_candidates(&stream)
    }

    /// Every method on this gradient, and first a copy of as many values, at 8 bytes each. Without cuBLAS, without PowerSGD.
    pub fn rows(&self, values: &[f32], blas: Option<&Blas<'_>>) -> Result<Vec<Row>, BenchError> {
        let (buffers, stream) = (Buffers::new(&self.gpu, values)?, self.gpu.stream()?);
        let n = buffers.n;
        let copy = median(|| copy(&stream, &buffers))?;
        let rate = 8.0 * n as f64 / copy;
        let row = |method: String, seconds: f64, bytes: u64, sent: Option<Sent>| Row {
            method,
            n,
            seconds,
            bytes,
            of_copy: bytes as f64 / seconds / rate,
            bytes_out: sent.map(|sent| sent.bytes),
            gain: sent.map(|sent| sent.gain),
            decompress: sent.map(|sent| sent.decompress),
        };
        let mut rows = vec![row("copy".into(), copy, 8 * n, None)];
        for (method, work) in works(buffers.n) {
            let seconds = median(|| stream.seconds(|device| buffers.run(work, device).map_err(BenchError::from)))?;
            let sent = buffers.sent(work, &stream)?;
            rows.push(row(method, seconds, work.bytes(n), sent));
        }
        if let Some((power, blas)) = Power::of(&self.gpu, n)?.zip(blas) {
            let seconds = median(|| stream.seconds(|_| power.run(&buffers, blas, &stream).map_err(BenchError::from)))?;
            let outcome = buffers.outcome(&stream)?;
            let decompress = power.decompress(&buffers, &stream)?;
            let sent = Sent { bytes: outcome.bytes, gain: outcome.gain(), decompress };
            rows.push(row(format!("powersgd(rank={RANK})"), seconds, 28 * n, Some(sent)));
        }
        Ok(rows)
    }
}

fn copy(stream: &Stream<'_>, buffers: &Buffers<'_>) -> Result<f64, BenchError> {
    let (to, from) = (buffers.compensated.span(), buffers.gradient.span());
    stream.seconds(|device| Ok(device.copy(to, from)?))
}

/// Columns of PowerSGD's factors.
const RANK: u64 = 4;

/// A gradient as one matrix, as near to a square as its length allows, and the factors' memory.
struct Power<'a> {
    shape: LowRank,
    values: u64,
    memory: [Allocation<'a>; 3],
    sent: [Allocation<'a>; 2],
    workspace: Allocation<'a>,
}

impl<'a> Power<'a> {
    fn of(gpu: &'a Gpu, n: u64) -> Result<Option<Self>, BenchError> {
        let rows = (n as f64).sqrt() as u64;
        let cols = n.checked_div(rows).unwrap_or(0);
        let Some(shape) = LowRank::new(rows, cols, RANK)? else { return Ok(None) };
        let [warm, left, scratch] = shape.bytes();
        let memory = [gpu.allocate(warm)?, gpu.allocate(left)?, gpu.allocate(scratch)?];
        memory[0].write(&vec![0; warm as usize])?;
        let [p, q] = shape.counts();
        let sent = [gpu.allocate(4 * p)?, gpu.allocate(4 * q)?];
        Ok(Some(Self { shape, values: rows * cols, memory, sent, workspace: gpu.allocate(BLAS_WORKSPACE)? }))
    }

    /// Both rounds of one rank alone.
    fn run(&self, buffers: &Buffers<'_>, blas: &Blas<'_>, stream: &Stream<'_>) -> Result<(), LaunchError> {
        let device = stream.blas(blas, self.workspace.span());
        let [warm, left, scratch] = self.memory.each_ref().map(Allocation::span);
        let [p, q] = self.sent.each_ref().map(Allocation::span);
        let feedback = buffers.feedback();
        let step = low_rank::Step { n: buffers.n, workspace: buffers.workspace.span() };
        let (matrix, factors) = (feedback.compensated.part(0, 4 * self.values), Factors { warm, left, scratch });
        let layer = Layer { shape: self.shape, matrix, factors };
        low_rank::begin(&device, &feedback, step.workspace)?;
        low_rank::left(&device, &layer, RANDOM, p, &step)?;
        low_rank::right(&device, &layer, p, 1.0, q, &step)?;
        low_rank::keep_warm(&device, &layer, q, 1.0, &step)
    }

    fn decompress(&self, buffers: &Buffers<'_>, stream: &Stream<'_>) -> Result<f64, BenchError> {
        let (left, right) = (self.memory[1].span(), self.sent[1].span());
        let out = buffers.values.span();
        median(|| {
            stream.seconds(|device| Ok(low_rank::add(device, self.shape, left, right, Target { scale: 1.0, out })?))
        })
    }
}

#[cfg(test)]
mod tests {
    use super::work::{Work, kept, method};
    use super::*;

    #[test]
    fn bytes_that_must_move() {
        let n = 1000;
        let bytes = |spec| Work::Compress(method(spec, n).unwrap()).bytes(n);
        assert_eq!(bytes("topk(k=0.01)"), 12_000 + 80);
        assert_eq!(Work::Gains.bytes(n), 8000);
        assert_eq!(bytes("signsgd"), 12_000 + 125);
        // Its norm first: all is read again, but the new memory is written once.
        assert_eq!(bytes("eightbit"), 20_000 + 1004);
        assert_eq!(bytes("efsignsgd"), 20_000 + 129);
        assert_eq!(bytes("qsgd(s=4,bucket=500)"), 12_000 + 8 + 500, "norms of buckets are known as they are read");
        assert_eq!(bytes("qsgd(s=4,bucket=0)"), 20_000 + 4 + 500);
        assert_eq!(works(n).len(), 29, "each has kernels");
        assert_eq!([kept(10, 0.001), kept(0, 0.1), kept(100, 1.0)], [1, 0, 100]);
    }

    /// A table where there is a GPU; elsewhere an error that says what is missing and what helps.
    #[test]
    fn it_measures_or_says_why_not() {
        match Bench::new(0) {
            Ok(bench) => {
                let values: Vec<f32> = (0..100_000).map(|i| (i % 997) as f32 - 498.0).collect();
                let blas = bench.blas().ok();
                let rows = bench.rows(&values, blas.as_ref()).unwrap();
                assert_eq!(rows.len(), works(values.len() as u64).len() + 1 + usize::from(blas.is_some()));
                assert!(rows.iter().all(|row| row.seconds > 0.0 && row.of_copy > 0.0), "{rows:?}");
                let sent = rows.iter().filter(|row| row.bytes_out.is_some());
                assert!(sent.clone().count() >= works(values.len() as u64).len() - 2);
                assert!(sent.clone().all(|row| row.gain.is_some() && row.decompress.is_some()), "{rows:?}");
            }
            Err(error) => {
                let text = error.to_string();
                let expected = std::env::var("FLEXCOMM_TEST_GPU").is_ok_and(|value| value == "1");
                assert!(!expected, "FLEXCOMM_TEST_GPU=1 says that there is a GPU: {text}");
                assert!(text.contains("install") || text.contains("nvidia-smi"), "{text}");
            }
        }
    }
}
