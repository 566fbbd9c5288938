//! Times of one compressor, and of a plain copy: in turns, on buffers that were written before, and the median of several.

use super::data::{DType, Distribution};
use anyhow::{Result, anyhow};
use flexcomm_compression::codec::{Shape, Travels};
use flexcomm_compression::pipeline::{Gradient, Member, Outcome, Pipeline, Step};
use flexcomm_compression::wire::Writer;
use flexcomm_compression::{Energy, Layers};
use flexcomm_domain::spec::CompressorSpec;
use serde::{Deserialize, Serialize};
use std::hint::black_box;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

/// Repetitions whose median counts: at least so many where the time allows,
const LEAST_REPEATS: usize = 7;
/// and more until so much time is spent,
const SPEND: Duration = Duration::from_millis(300);
/// but no more than these.
const MOST_REPEATS: usize = 201;

/// Messages that are decompressed and added up: the first replaces what was there, and costs less than the others.
const ADDED: usize = 2;

/// A first step that takes so many times the longest time of a method is not repeated.
const SLOW: f64 = 10.0;

/// Steps that a method whose decisions wait for several gradients gets before any counts.
pub const LESSONS: usize = 12;

/// Step by step a gradient begins elsewhere in the values: another one each time, and the same bytes in the caches. Values that
/// a gradient needs beyond its own.
pub const MORE: usize = SHIFT * SHIFTS;
/// A line of 64 bytes, for 16-bit values too.
const SHIFT: usize = 32;
const SHIFTS: usize = 31;

/// The n values of a step, of n + [`MORE`].
pub fn shifted<T>(values: &[T], n: usize, step: u64) -> &[T] {
    let from = SHIFT * (step as usize * 7 % SHIFTS);
    &values[from..from + n]
}

/// What is the same for all methods.
#[derive(Debug, Clone, Copy)]
pub struct Case<'a> {
    /// As the method sees them, [`MORE`] than the gradient has.
    pub values: &'a [f32],
    /// As it is given.
    pub dtype: DType,
    /// Each with an equal part.
    pub threads: usize,
    /// No repetition begins later.
    pub max_time: Duration,
}

/// One line of the table; the names of `--json`.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct Row {
    /// The strategy with its parameters.
    pub method: String,
    /// Values.
    pub n: usize,
    /// Of the gradient.
    pub dtype: String,
    /// Of the values.
    pub distribution: String,
    /// 1e9 bytes of the gradient per second of compressing.
    pub gb_per_s: f64,
    /// Of one rank, all exchanges together, in the mean of the steps.
    pub bytes_out: usize,
    /// `bytes_out` over k, where k values are kept.
    pub bytes_per_kept: Option<f64>,
    /// ‖C(x)‖² / ‖x‖²; above 1 for unbiased methods, which scale up what they send.
    pub gain: f64,
    /// Time to compress over that of a copy.
    pub ratio_to_copy: f64,
    /// Time to compress over that of torch.topk.
    pub ratio_to_torch: Option<f64>,
    /// Time to decompress and add a message, in the mean of two, over that of a copy.
    pub decompress_ratio_to_copy: f64,
    /// Seconds.
    pub compress_s: f64,
    /// Seconds.
    pub decompress_s: f64,
    /// Seconds.
    pub copy_s: f64,
    /// How many worked.
    pub threads: usize,
    /// Whether k is above n, so that all values are kept.
    pub keeps_all: bool,
    /// Whether parameters were chosen from the values, so that about 1 % of them are sent.
    pub fitted: bool,
}

/// One thread's part.
struct Part<'a> {
    n: usize,
    /// [`MORE`] than n.
    values: &'a [f32],
    halves: Vec<u16>,
    dtype: DType,
    pipeline: Pipeline,
    out: Writer,
    /// What is decompressed into.
    mean: Vec<f32>,
    /// What the gradient is copied into, which, like the memory that compressing writes, nothing else touches in a step.
    copied: Copied,
    step: u64,
}

/// As many values as the gradient has, of its type.
enum Copied {
    Singles(Vec<f32>),
    Halves(Vec<u16>),
}

/// What a step of a part gave.
#[derive(Default, Clone, Copy)]
struct Took {
    compress: f64,
    decompress: f64,
    copy: f64,
    bytes: usize,
    energy: Energy,
}

/// Where threads wait for each other, so that all copy, compress or decompress at once.
struct Lines {
    arrived: [AtomicUsize; 3],
    threads: usize,
}

impl Lines {
    fn new(threads: usize) -> Self {
        Self { arrived: Default::default(), threads }
    }

    /// Waits at a line for all threads. It does not sleep: waking up takes as long as a small copy.
    fn wait(&self, line: usize) {
        self.arrived[line].fetch_add(1, Ordering::AcqRel);
        while self.arrived[line].load(Ordering::Acquire) < self.threads {
            std::thread::yield_now();
        }
    }
}

/// Takes a thread that panics past all lines, so that the others need not wait for it.
struct Passing<'a>(&'a Lines);

impl Drop for Passing<'_> {
    fn drop(&mut self) {
        if std::thread::panicking() {
            self.0.arrived.iter().for_each(|line| _ = line.fetch_add(self.0.threads, Ordering::AcqRel));
        }
    }
}

/// What compressing one step took and sent.
struct Sent {
    seconds: f64,
    bytes: usize,
    energy: Energy,
}

/// The most nearly square matrix of n values.
fn shape(n: usize) -> Shape {
    let cols = (1..=n.isqrt()).rev().find(|cols| n.is_multiple_of(*cols)).unwrap_or(1);
    Shape { rows: n / cols, cols }
}

/// Runs, and answers seconds too.
fn timed<T>(work: impl FnOnce() -> T) -> (f64, T) {
    let start = Instant::now();
    let out = work();
    (start.elapsed().as_secs_f64(), out)
}

impl<'a> Part<'a> {
    fn new(strategy: &CompressorSpec, values: &'a [f32], dtype: DType) -> Result<Self> {
        let n = values.len() - MORE;
        let layers = Layers::matrices(&[shape(n)])?;
        let halves = dtype.halves(values);
        Ok(Self {
            n,
            values,
            dtype,
            pipeline: Pipeline::new(strategy, layers, Member::alone(1)),
            out: Writer::new(),
            mean: vec![0.0; n],
            copied: match dtype {
                DType::Fp32 => Copied::Singles(vec![0.0; n]),
                DType::Fp16 | DType::Bf16 => Copied::Halves(vec![0; n]),
            },
            halves,
            step: 0,
        })
    }

    /// A plain copy of the gradient's bytes.
    fn copy(&mut self) -> f64 {
        let (seconds, ()) = timed(|| match &mut self.copied {
            Copied::Singles(to) => copy(shifted(self.values, self.n, self.step), to),
            Copied::Halves(to) => copy(shifted(&self.halves, self.n, self.step), to),
        });
        seconds
    }

    /// All exchanges of one step, alone in the world: what is sent is also the sum.
    fn compress(&mut self) -> Result<Sent> {
        let step = Step { index: self.step, learning_rate: 0.1 };
        let gradient = match self.dtype {
            DType::Fp32 => Gradient::F32(black_box(shifted(self.values, self.n, self.step))),
            DType::Fp16 => Gradient::F16(black_box(shifted(&self.halves, self.n, self.step))),
            DType::Bf16 => Gradient::Bf16(black_box(shifted(&self.halves, self.n, self.step))),
        };
        let (mut seconds, outcome) = timed(|| self.pipeline.compress(gradient, step, &mut self.out));
        let (mut outcome, mut bytes): (Outcome, usize) = (outcome?, self.out.len());
        while outcome.more {
            let sum = self.out.bytes().to_vec();
            let (more, next) = timed(|| self.pipeline.advance(&sum, &mut self.out));
            (seconds, outcome, bytes) = (seconds + more, next?, bytes + self.out.len());
        }
        Ok(Sent { seconds, bytes, energy: outcome.energy })
    }

    /// Of one message: half of two that are added up, or of what travels as a sum the one that arrives.
    fn decompress(&mut self) -> Result<f64> {
        let (seconds, done) = match self.pipeline.travels() {
            Travels::Sums(_) => timed(|| self.pipeline.mean(self.out.bytes(), self.step, &mut self.mean)),
            _ => {
                let messages = [self.out.bytes(); ADDED];
                let (seconds, done) = timed(|| self.pipeline.aggregate(&messages, self.step, &mut self.mean));
                (seconds / ADDED as f64, done)
            }
        };
        black_box(&self.mean);
        self.step += 1;
        done.map(|()| seconds).map_err(Into::into)
    }

    /// Copies, compresses and decompresses. It passes every line whatever fails: the others wait there.
    fn step(&mut self, lines: &Lines) -> Result<Took> {
        let _passing = Passing(lines);
        lines.wait(0);
        let copy = self.copy();
        lines.wait(1);
        let compressed = self.compress();
        lines.wait(2);
        let decompressed = self.decompress();
        let Sent { seconds, bytes, energy } = compressed?;
        Ok(Took { compress: seconds, decompress: decompressed?, copy, bytes, energy })
    }
}

fn copy<T: Copy>(from: &[T], to: &mut [T]) {
    to.copy_from_slice(black_box(from));
    black_box(to);
}

/// All parts at once; times are those of the slowest.
fn together(parts: &mut [Part<'_>]) -> Result<Took> {
    let lines = Lines::new(parts.len());
    let all: Vec<Result<Took>> = match parts {
        [one] => vec![one.step(&lines)],
        several => std::thread::scope(|scope| {
            let threads: Vec<_> = several.iter_mut().map(|part| scope.spawn(|| part.step(&lines))).collect();
            threads.into_iter().map(|thread| thread.join().unwrap_or_else(|_| Err(anyhow!("a thread died")))).collect()
        }),
    };
    all.into_iter().try_fold(Took::default(), |sum, took| {
        let took = took?;
        Ok(Took {
            compress: sum.compress.max(took.compress),
            decompress: sum.decompress.max(took.decompress),
            copy: sum.copy.max(took.copy),
            bytes: sum.bytes + took.bytes,
            energy: sum.energy + took.energy,
        })
    })
}

/// The median times of some steps, after those that teach the method and those that fill buffers: two, since many methods keep
/// a pair that they swap, and memory that is new costs more than the work. Of a method to which that is nothing, the last of its
/// lessons counts.
fn medians(parts: &mut [Part<'_>], lessons: usize, max_time: Duration) -> Result<Took> {
    for _ in 1..lessons {
        together(parts)?;
    }
    let (seconds, first) = timed(|| together(parts));
    if seconds > SLOW * max_time.as_secs_f64() {
        return first;
    }
    first.and_then(|_| together(parts))?;
    let begun = Instant::now();
    let mut all = vec![together(parts)?];
    while begun.elapsed() < max_time
        && (all.len() < LEAST_REPEATS || (all.len() < MOST_REPEATS && begun.elapsed() < SPEND))
    {
        all.push(together(parts)?);
    }
    let median = |of: fn(&Took) -> f64| {
        let mut times: Vec<f64> = all.iter().map(of).collect();
        *times.select_nth_unstable_by(all.len() / 2, f64::total_cmp).1
    };
    let (compress, decompress) = (median(|took| took.compress), median(|took| took.decompress));
    // Of some methods sizes and energies differ from step to step: these are means.
    let bytes = all.iter().map(|took| took.bytes).sum::<usize>().div_ceil(all.len());
    let energy = all.iter().fold(Energy::default(), |sum, took| sum + took.energy);
    Ok(Took { compress, decompress, copy: median(|took| took.copy), bytes, energy })
}

/// Measures one strategy.
pub fn row(strategy: &CompressorSpec, case: &Case<'_>, distribution: Distribution) -> Result<Row> {
    let n = case.values.len() - MORE;
    let each = n.div_ceil(case.threads);
    let ends = (0..n).step_by(each).map(|from| (from, n.min(from + each)));
    let part = |(from, to): (usize, usize)| Part::new(strategy, &case.values[from..to + MORE], case.dtype);
    let mut parts = ends.map(part).collect::<Result<Vec<_>>>()?;
    let lessons = if strategy.compressor().name == "variance" { LESSONS } else { 1 };
    let took = medians(&mut parts, lessons, case.max_time)?;
    let per = |seconds: f64| seconds / took.copy.max(1e-9);
    Ok(Row {
        method: strategy.to_string(),
        n,
        dtype: case.dtype.name().into(),
        distribution: distribution.name().into(),
        gb_per_s: (n * case.dtype.bytes()) as f64 / took.compress.max(1e-9) / 1e9,
        bytes_out: took.bytes,
        bytes_per_kept: strategy.ratio().map(|ratio| took.bytes as f64 / ratio.keep(n) as f64),
        gain: took.energy.ratio(),
        ratio_to_copy: per(took.compress),
        ratio_to_torch: None,
        decompress_ratio_to_copy: per(took.decompress),
        compress_s: took.compress,
        decompress_s: took.decompress,
        copy_s: took.copy,
        threads: parts.len(),
        keeps_all: strategy.k_above(n).is_some(),
        fitted: false,
    })
}
