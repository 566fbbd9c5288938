//! Times of the kernels on a GPU, by events, beside a copy within the device in the same run: what `flexcomm bench gpu` shows.

use crate::{
    Allocation, Cache, DType, Device, Feed, Fit, Gpu, LaunchError, LoadError, MemoryError, Norm, OnStream, Quantizer,
    Random, Selected, Span, Stream, Threshold, gains, quantize, threshold, topk, workspace_bytes,
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
}

/// A method for k values.
type OfK = fn(u64) -> Threshold;

/// What is measured.
#[derive(Debug, Clone, Copy)]
enum Work {
    TopK(f64),
    Gains,
    Quantize(Quantizer),
    Threshold(OfK),
}

/// Every step uses the same numbers: their cost does not depend on them.
const RANDOM: Random = Random { seed: 1, step: 0, tensor: 0, rank: Some(0) };

/// The ratios whose gains one pass answers.
const CANDIDATES: [f64; 5] = [0.1, 0.033, 0.011, 0.004, 0.001];

fn works() -> Vec<(String, Work)> {
    let topk = [0.1, 0.01, 0.001].map(|c| (format!("topk(k={c})"), Work::TopK(c)));
    let quantizers = [
        ("signsgd", Quantizer::Signs),
        ("efsignsgd", Quantizer::ScaledSigns),
        ("ssdm", Quantizer::Ssdm),
        ("terngrad", Quantizer::TernGrad { clip: 0.0 }),
        ("qsgd(s=4)", Quantizer::Qsgd { s: 4, bucket: 512, norm: Norm::L2 }),
        ("dithering(k=4)", Quantizer::Dithering { k: 4, natural: false, norm: Norm::Max }),
        ("natural", Quantizer::Natural),
        ("eightbit", Quantizer::EightBit { fixed: false }),
        ("fp16", Quantizer::F16 { world: 8 }),
        ("bf16", Quantizer::Bf16 { world: 8 }),
    ];
    let thresholds: [(&str, OfK); 3] = [
        ("mstopk(k=0.01)", |k| Threshold::MsTopK { k, random: RANDOM }),
        ("dgc(k=0.01)", |k| Threshold::Dgc { k, sample: 0.01, most: 1.3, random: RANDOM }),
        ("sidco(k=0.01)", |k| Threshold::Sidco { k, fit: Fit::Exponential, first: 0.25, stages: 3 }),
    ];
    let named = |(name, work): (&str, Work)| (name.to_owned(), work);
    let quantizers = quantizers.map(|(name, method)| named((name, Work::Quantize(method))));
    let thresholds = thresholds.map(|(name, method)| named((name, Work::Threshold(method))));
    let gains = [named(("gains of 5 ratios", Work::Gains))];
    topk.into_iter().chain(gains).chain(quantizers).chain(thresholds).collect()
}

/// k for a share of n.
fn kept(n: u64, share: f64) -> u64 {
    ((n as f64 * share) as u64).clamp(1.min(n), n)
}

impl Work {
    /// Gradient and memory are read and the new memory written; then the message.
    fn bytes(self, n: u64) -> u64 {
        match self {
            Self::TopK(share) => 12 * n + 8 * kept(n, share),
            Self::Gains => 8 * n,
            Self::Quantize(method) => 12 * n + method.payload_bytes(n),
            Self::Threshold(_) => 12 * n + 8 * kept(n, 0.01),
        }
    }
}

/// Memory on the device for one size.
struct Buffers<'a> {
    n: u64,
    gradient: Allocation<'a>,
    memory: Allocation<'a>,
    fed: Allocation<'a>,
    payload: Allocation<'a>,
    indices: Allocation<'a>,
    values: Allocation<'a>,
    candidates: Allocation<'a>,
    workspace: Allocation<'a>,
}

impl<'a> Buffers<'a> {
    fn new(gpu: &'a Gpu, values: &[f32]) -> Result<Self, MemoryError> {
        let n = values.len() as u64;
        let bytes: Vec<u8> = values.iter().flat_map(|x| x.to_le_bytes()).collect();
        let full = || gpu.allocate(4 * n);
        let buffers = Self {
            n,
            gradient: full()?,
            memory: full()?,
            fed: full()?,
            payload: gpu.allocate(4 * n + 4096)?,
            indices: full()?,
            values: full()?,
            candidates: gpu.allocate(4096)?,
            workspace: gpu.allocate(workspace_bytes(n))?,
        };
        buffers.gradient.write(&bytes)?;
        // What was held back looks like the gradient, turned around.
        let turned: Vec<u8> = values.iter().rev().flat_map(|x| (0.5 * x).to_le_bytes()).collect();
        buffers.memory.write(&turned)?;
        let mut candidates: Vec<u8> =
            CANDIDATES.iter().flat_map(|share| (kept(n, *share) as u32).to_le_bytes()).collect();
        candidates.resize(4096, 0);
        buffers.candidates.write(&candidates)?;
        Ok(buffers)
    }

    fn feed(&self) -> Feed {
        let [gradient, memory, fed] = [&self.gradient, &self.memory, &self.fed].map(Allocation::span);
        Feed { n: self.n, dtype: DType::F32, gradient, memory, fed, beta: 1.0, gamma: 1.0 }
    }

    fn run(&self, work: Work, device: &OnStream<'_>) -> Result<(), LaunchError> {
        let (feed, workspace) = (self.feed(), self.workspace.span());
        let to = |room| Selected { indices: self.indices.span(), values: self.values.span(), room };
        match work {
            Work::TopK(share) => {
                let k = kept(self.n, share);
                topk(device, &feed, (k, &to(k)), workspace)
            }
            Work::Gains => {
                let ks = self.candidates.span();
                gains(device, &feed, (ks, CANDIDATES.len() as u64, self.gains()), workspace)
            }
            Work::Quantize(method) => quantize(device, &feed, (method, RANDOM), self.payload.span(), workspace),
            Work::Threshold(method) => threshold(device, &feed, (method(kept(self.n, 0.01)), &to(self.n)), workspace),
        }
    }

    /// Behind the candidates.
    fn gains(&self) -> Span {
        self.candidates.span().part(1024, 16 * CANDIDATES.len() as u64)
    }
}

/// Before the first is counted: clocks rise, modules load.
const WARM_UP: usize = 3;
const REPEATS: usize = 15;

fn median(mut once: impl FnMut() -> Result<f64, BenchError>) -> Result<f64, BenchError> {
    for _ in 0..WARM_UP {
        once()?;
    }
    let mut times = (0..REPEATS).map(|_| once()).collect::<Result<Vec<f64>, _>>()?;
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

    /// Every method on this gradient, and first a copy of as many values, at 8 bytes each.
    pub fn rows(&self, values: &[f32]) -> Result<Vec<Row>, BenchError> {
        let (buffers, stream) = (Buffers::new(&self.gpu, values)?, self.gpu.stream()?);
        let n = buffers.n;
        let copy = median(|| copy(&stream, &buffers))?;
        let rate = 8.0 * n as f64 / copy;
        let mut rows = vec![Row { method: "copy".into(), n, seconds: copy, bytes: 8 * n, of_copy: 1.0 }];
        for (method, work) in works() {
            let once = || stream.seconds(|device| buffers.run(work, device).map_err(BenchError::from));
            let (seconds, bytes) = (median(once)?, work.bytes(n));
            rows.push(Row { method, n, seconds, bytes, of_copy: bytes as f64 / seconds / rate });
        }
        Ok(rows)
    }
}

fn copy(stream: &Stream<'_>, buffers: &Buffers<'_>) -> Result<f64, BenchError> {
    let (to, from) = (buffers.fed.span(), buffers.gradient.span());
    stream.seconds(|device| Ok(device.copy(to, from)?))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bytes_that_must_move() {
        let n = 1000;
        assert_eq!(Work::TopK(0.01).bytes(n), 12_000 + 80);
        assert_eq!(Work::Gains.bytes(n), 8000);
        assert_eq!(Work::Quantize(Quantizer::Signs).bytes(n), 12_000 + 125);
        assert_eq!([kept(10, 0.001), kept(0, 0.1), kept(100, 1.0)], [1, 0, 100]);
    }

    /// A table where there is a GPU; elsewhere an error that says what is missing and what helps.
    #[test]
    fn it_measures_or_says_why_not() {
        match Bench::new(0) {
            Ok(bench) => {
                let values: Vec<f32> = (0..100_000).map(|i| (i % 997) as f32 - 498.0).collect();
                let rows = bench.rows(&values).unwrap();
                assert_eq!(rows.len(), works().len() + 1);
                assert!(rows.iter().all(|row| row.seconds > 0.0 && row.of_copy > 0.0), "{rows:?}");
            }
            Err(error) => {
                let text = error.to_string();
                assert!(text.contains("install") || text.contains("nvidia-smi"), "{text}");
            }
        }
    }
}
