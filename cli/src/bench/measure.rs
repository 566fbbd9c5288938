//! Times of one compressor.

use super::data::{DType, Distribution};
use anyhow::{Result, anyhow};
use flexcomm_compression::codec::{Shape, Travels};
use flexcomm_compression::pipeline::{Gradient, Member, Outcome, Pipeline, Step};
use flexcomm_compression::strategy::Strategy;
use flexcomm_compression::wire::Writer;
use flexcomm_compression::{Energy, Layers};
use serde::Serialize;
use std::hint::black_box;
use std::time::{Duration, Instant};

/// Most repetitions after the first; the least time counts.
const REPEATS: usize = 7;

/// What is the same for all methods.
#[derive(Debug, Clone, Copy)]
pub struct Case<'a> {
    /// As the method sees it.
    pub gradient: &'a [f32],
    /// As it is given.
    pub dtype: DType,
    /// Each with an equal part.
    pub threads: usize,
    /// No repetition begins later.
    pub patience: Duration,
}

/// One line of the table; the names of `--json`.
#[derive(Debug, Clone, Serialize)]
pub struct Row {
    /// The strategy with its parameters.
    pub method: String,
    /// Values.
    pub n: usize,
    /// Of the gradient.
    pub dtype: &'static str,
    /// Of the values.
    pub distribution: &'static str,
    /// 1e9 bytes of the gradient per second of compressing.
    pub gb_per_s: f64,
    /// Of one rank, all exchanges together.
    pub bytes_out: usize,
    /// ‖C(x)‖² / ‖x‖²; above 1 for unbiased methods, which scale up what they send.
    pub gain: f64,
    /// Time to compress over that of a copy.
    pub ratio_to_copy: f64,
    /// Time to compress over that of torch.topk.
    pub ratio_to_torch: Option<f64>,
    /// Time to decompress and add over that of a copy.
    pub decompress_ratio_to_copy: f64,
    /// Seconds.
    pub compress_s: f64,
    /// Seconds.
    pub decompress_s: f64,
    /// Seconds.
    pub copy_s: f64,
    /// How many worked.
    pub threads: usize,
}

/// One thread's part.
struct Part<'a> {
    gradient: &'a [f32],
    halves: Vec<u16>,
    dtype: DType,
    pipeline: Pipeline,
    out: Writer,
    mean: Vec<f32>,
    copy: Vec<u8>,
    step: u64,
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

/// The most nearly square matrix of n values.
fn shape(n: usize) -> Shape {
    let cols = (1..=n.isqrt()).rev().find(|cols| n.is_multiple_of(*cols)).unwrap_or(1);
    Shape { rows: n / cols, cols }
}

impl<'a> Part<'a> {
    fn new(strategy: &Strategy, gradient: &'a [f32], dtype: DType) -> Result<Self> {
        let layers = Layers::matrices(&[shape(gradient.len())])?;
        Ok(Self {
            gradient,
            halves: dtype.halves(gradient),
            dtype,
            pipeline: Pipeline::new(strategy, layers, Member::alone(1)),
            out: Writer::new(),
            mean: vec![0.0; gradient.len()],
            copy: vec![0; gradient.len() * dtype.bytes()],
            step: 0,
        })
    }

    /// A plain copy of the gradient's bytes.
    fn copy(&mut self) -> f64 {
        let start = Instant::now();
        match self.dtype {
            DType::Fp32 => copy_bytes(black_box(self.gradient), &mut self.mean),
            DType::Fp16 | DType::Bf16 => {
                let (to, _) = self.copy.as_chunks_mut::<2>();
                to.iter_mut().zip(black_box(&self.halves)).for_each(|(to, from)| *to = from.to_le_bytes());
                black_box(to);
            }
        }
        start.elapsed().as_secs_f64()
    }

    /// All exchanges of one step, alone in the world: what is sent is also the sum.
    fn step(&mut self) -> Result<Took> {
        let mut took = Took { copy: self.copy(), ..Took::default() };
        let step = Step { index: self.step, learning_rate: 0.1 };
        let gradient = match self.dtype {
            DType::Fp32 => Gradient::F32(black_box(self.gradient)),
            DType::Fp16 => Gradient::F16(black_box(&self.halves)),
            DType::Bf16 => Gradient::Bf16(black_box(&self.halves)),
        };
        let start = Instant::now();
        let mut outcome: Outcome = self.pipeline.compress(gradient, step, &mut self.out)?;
        took.compress += start.elapsed().as_secs_f64();
        took.bytes += self.out.len();
        while outcome.more {
            let sum = self.out.bytes().to_vec();
            let start = Instant::now();
            outcome = self.pipeline.advance(&sum, &mut self.out)?;
            took.compress += start.elapsed().as_secs_f64();
            took.bytes += self.out.len();
        }
        took.energy = outcome.energy;
        let start = Instant::now();
        match self.pipeline.travels() {
            Travels::Sums(_) => self.pipeline.mean(self.out.bytes(), self.step, &mut self.mean)?,
            _ => self.pipeline.aggregate(&[self.out.bytes()], self.step, &mut self.mean)?,
        }
        took.decompress = start.elapsed().as_secs_f64();
        black_box(&self.mean);
        self.step += 1;
        Ok(took)
    }
}

fn copy_bytes(from: &[f32], to: &mut [f32]) {
    to.copy_from_slice(from);
    black_box(to);
}

/// All parts at once; times are those of the slowest.
fn together(parts: &mut [Part<'_>]) -> Result<Took> {
    let all: Vec<Result<Took>> = match parts {
        [one] => vec![one.step()],
        several => std::thread::scope(|scope| {
            let threads: Vec<_> = several.iter_mut().map(|part| scope.spawn(|| part.step())).collect();
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

/// The least times over some steps, after one that fills buffers and, where the method learns, teaches it.
fn least(parts: &mut [Part<'_>], patience: Duration) -> Result<Took> {
    let begun = Instant::now();
    let mut least = together(parts)?;
    for _ in 0..REPEATS {
        if begun.elapsed() >= patience {
            break;
        }
        let took = together(parts)?;
        least = Took {
            compress: least.compress.min(took.compress),
            decompress: least.decompress.min(took.decompress),
            copy: least.copy.min(took.copy),
            ..took
        };
    }
    Ok(least)
}

/// Measures one strategy.
pub fn row(strategy: &Strategy, case: &Case<'_>, distribution: Distribution, torch: Option<f64>) -> Result<Row> {
    let n = case.gradient.len();
    let parts = case.gradient.chunks(n.div_ceil(case.threads));
    let mut parts = parts.map(|part| Part::new(strategy, part, case.dtype)).collect::<Result<Vec<_>>>()?;
    let took = least(&mut parts, case.patience)?;
    let per = |seconds: f64| seconds / took.copy.max(1e-9);
    Ok(Row {
        method: strategy.to_string(),
        n,
        dtype: case.dtype.name(),
        distribution: distribution.name(),
        gb_per_s: (n * case.dtype.bytes()) as f64 / took.compress.max(1e-9) / 1e9,
        bytes_out: took.bytes,
        gain: if took.energy.fed > 0.0 { took.energy.sent / took.energy.fed } else { 1.0 },
        ratio_to_copy: per(took.compress),
        ratio_to_torch: torch.map(|torch| took.compress / torch.max(1e-9)),
        decompress_ratio_to_copy: per(took.decompress),
        compress_s: took.compress,
        decompress_s: took.decompress,
        copy_s: took.copy,
        threads: parts.len(),
    })
}
