//! What is measured, and the memory for it.

use super::*;
use crate::bucket::{Method, Plan, Room};
use crate::three_lc;
use flexcomm_compression::Layers;
use flexcomm_compression::pipeline::Member;

/// What is measured.
#[derive(Debug, Clone, Copy)]
pub(super) enum Work {
    /// A step of a bucket, up to the lists of what selects.
    Compress(Method),
    /// AR-Topk of a rank that does not lead: error feedback, and values at indices that lie there already.
    Agreed,
    Read,
    Gains,
}

/// Every step uses the same numbers: their cost does not depend on them.
pub(super) const RANDOM: Random = Random { seed: 1, step: 0, tensor: 0, rank: Some(0) };

/// The ratios whose gains one pass answers.
const CANDIDATES: [f64; 5] = [0.1, 0.033, 0.011, 0.004, 0.001];

/// Of methods that have one row.
const SHARE: f64 = 0.01;

/// Ranks whose sums in halves must stay finite.
const WORLD: u32 = 8;

/// Compressors that have kernels; a threshold of values of about 1e-3.
const SPECS: [&str; 25] = [
    "topk(k=0.1)",
    "topk(k=0.01)",
    "topk(k=0.001)",
    "randomk(k=0.01)",
    "hardthreshold(tau=0.0025)",
    "qsparse(k=0.01)",
    "qsparse(k=0.01,quantize=sign)",
    "threelc(s=1)",
    "signsgd",
    "efsignsgd",
    "onebitsgd",
    "ssdm",
    "terngrad",
    "qsgd(s=4)",
    "lpcsvrg(bits=4)",
    "dithering(k=4)",
    "dithering(k=4,partition=natural)",
    "natural",
    "eightbit",
    "minmax8",
    "inceptionn",
    "fp16",
    "bf16",
    "mstopk(k=0.01)",
    "dgc(k=0.01)",
];

/// Of a compressor for n values; none where it has no kernels.
pub(super) fn method(spec: &str, n: u64) -> Option<Method> {
    let member = Member { world: WORLD, ..Member::alone(RANDOM.seed) };
    Plan::new(&spec.parse().ok()?, &Layers::fused(n as usize).ok()?, member)?.methods(RANDOM.step)?.pop()
}

/// All that is measured of n values, by its name. The gains follow top-k, whose gradient they read; what is agreed follows
/// random-k, whose indices it takes.
pub(super) fn works(n: u64) -> Vec<(String, Work)> {
    let compress = |spec: &str| method(spec, n).map(|method| (spec.to_owned(), Work::Compress(method)));
    let mut works = Vec::new();
    for spec in SPECS {
        works.extend(compress(spec));
        match spec {
            "topk(k=0.001)" => {
                works.extend([("read".into(), Work::Read), ("gains of 5 ratios".into(), Work::Gains)]);
            }
            "randomk(k=0.01)" => works.push(("agreed(k=0.01)".into(), Work::Agreed)),
            _ => {}
        }
    }
    let sidco = Threshold::Sidco { k: kept(n, SHARE), fit: Fit::Exponential, first: 0.25, stages: 3 };
    works.push(("sidco(k=0.01)".into(), Work::Compress(Method::Threshold(sidco))));
    works
}

/// k for a share of n.
pub(super) fn kept(n: u64, share: f64) -> u64 {
    ((n as f64 * share) as u64).clamp(1.min(n), n)
}

impl Work {
    /// Gradient and memory are read and the new memory written; then the message. Both are read twice where a norm of the
    /// whole tensor comes first: no cache of a GPU holds long ones.
    pub(super) fn bytes(self, n: u64) -> u64 {
        match self {
            Self::Read | Self::Gains => 8 * n,
            Self::Agreed => 12 * n + 8 * kept(n, SHARE),
            Self::Compress(Method::Quantize(quantizer, _)) => {
                (if quantizer.reads_twice(n) { 20 } else { 12 }) * n + quantizer.payload_bytes(n)
            }
            Self::Compress(Method::ThreeLc(_)) => 20 * n + three_lc::payload_bytes(n),
            Self::Compress(method) => 12 * n + 8 * method.selected().unwrap_or(kept(n, SHARE)),
        }
    }

    /// Ranks that the method was told of.
    pub(super) fn world(self) -> u32 {
        match self {
            Self::Compress(Method::Quantize(Quantizer::F16 { world } | Quantizer::Bf16 { world }, _)) => world,
            _ => 1,
        }
    }
}

/// What a method sends.
#[derive(Debug, Clone, Copy)]
pub(super) struct Sent {
    pub(super) bytes: u64,
    pub(super) gain: f64,
    /// Seconds to add it into a gradient.
    pub(super) decompress: f64,
}

/// Memory on the device for one size.
pub(super) struct Buffers<'a> {
    pub(super) n: u64,
    pub(super) gradient: Allocation<'a>,
    memory: Allocation<'a>,
    pub(super) compensated: Allocation<'a>,
    payload: Allocation<'a>,
    indices: Allocation<'a>,
    pub(super) values: Allocation<'a>,
    candidates: Allocation<'a>,
    scratch: Allocation<'a>,
    outcome: Allocation<'a>,
    pub(super) workspace: Allocation<'a>,
}

impl<'a> Buffers<'a> {
    pub(super) fn new(gpu: &'a Gpu, values: &[f32]) -> Result<Self, MemoryError> {
        let n = values.len() as u64;
        let bytes: Vec<u8> = values.iter().flat_map(|x| x.to_le_bytes()).collect();
        let full = || gpu.allocate(4 * n);
        let buffers = Self {
            n,
            gradient: full()?,
            memory: full()?,
            compensated: full()?,
            payload: gpu.allocate(5 * n + 4096)?,
            indices: full()?,
            values: full()?,
            candidates: gpu.allocate(4096)?,
            scratch: gpu.allocate(subset_scratch(n))?,
            outcome: gpu.allocate(OUTCOME_BYTES)?,
            workspace: gpu.allocate(workspace_bytes(n))?,
        };
        buffers.gradient.write(&bytes)?;
        // The residual looks like the gradient, turned around.
        let turned: Vec<u8> = values.iter().rev().flat_map(|x| (0.5 * x).to_le_bytes()).collect();
        buffers.memory.write(&turned)?;
        let mut candidates: Vec<u8> =
            CANDIDATES.iter().flat_map(|share| (kept(n, *share) as u32).to_le_bytes()).collect();
        candidates.resize(4096, 0);
        buffers.candidates.write(&candidates)?;
        Ok(buffers)
    }

    pub(super) fn feedback(&self) -> ErrorFeedback {
        let [gradient, memory, compensated] = [&self.gradient, &self.memory, &self.compensated].map(Allocation::span);
        ErrorFeedback { n: self.n, dtype: DType::F32, gradient, memory, compensated, beta: 1.0, gamma: 1.0 }
    }

    fn room(&self) -> Room {
        let [indices, values, workspace, scratch] =
            [&self.indices, &self.values, &self.workspace, &self.scratch].map(Allocation::span);
        Room { indices, values, workspace, scratch }
    }

    fn at(&self, k: u64) -> Selection {
        Selection { len: k, indices: self.indices.span(), values: self.values.span() }
    }

    /// What compresses: selections are left as lists.
    pub(super) fn run(&self, work: Work, device: &OnStream<'_>) -> Result<(), LaunchError> {
        let (n, call, workspace) = (self.n, self.feedback(), self.workspace.span());
        match work {
            Work::Compress(method) => self.room().compress(device, &call, method, self.payload.span()).map(drop),
            Work::Agreed => {
                compensate(device, &call, workspace)?;
                gather(device, &call, &self.at(kept(n, SHARE)), 1.0, workspace)
            }
            Work::Gains => {
                let ks = self.candidates.span();
                gains(device, &call, ks, CANDIDATES.len() as u64, self.gains(), workspace)
            }
            Work::Read => largest(device, &call, self.gains()),
        }
    }

    /// What one rank sends with no residual before, where anything is sent.
    pub(super) fn message(&self, work: Work, stream: &Stream<'_>, to: Span) -> Result<Option<Vec<u8>>, BenchError> {
        let (n, payload, workspace) = (self.n, self.payload.span(), self.workspace.span());
        let mut from = payload;
        stream.seconds::<BenchError>(|device| {
            let (list, form) = match work {
                Work::Read | Work::Gains => return Ok(()),
                // Values alone, at the indices that lie there already: those of random-k, which comes before.
                Work::Agreed => {
                    self.run(work, device)?;
                    let form = Form { set: Set::Known, gaps: false, tail: Tail::Values };
                    (self.at(kept(n, SHARE)), Some(form))
                }
                Work::Compress(mut method) => {
                    if let Method::Threshold(Threshold::Sidco { stages, .. }) = &mut method {
                        // Of a first step.
                        *stages = 1;
                    }
                    let form = self.room().compress(device, &self.feedback(), method, payload)?;
                    (self.room().list(method, n), form)
                }
            };
            let Some(form) = form else { return Ok(()) };
            from = to;
            Ok(pack(device, &list, n, to, form, workspace)?)
        })?;
        if matches!(work, Work::Read | Work::Gains) {
            return Ok(None);
        }
        let sent = self.outcome(stream)?.bytes as usize;
        let mut bytes = vec![0; sent];
        stream.device().download(from.part(0, sent as u64), &mut bytes)?;
        Ok(Some(bytes))
    }

    /// There is no residual yet.
    pub(super) fn forget(&self) -> Result<(), MemoryError> {
        self.memory.write(&vec![0; 4 * self.n as usize])
    }

    /// The residual now.
    pub(super) fn residual(&self) -> Result<Vec<f32>, MemoryError> {
        let mut bytes = vec![0; 4 * self.n as usize];
        self.compensated.read(&mut bytes)?;
        Ok(bytes.as_chunks::<4>().0.iter().map(|bytes| f32::from_le_bytes(*bytes)).collect())
    }

    pub(super) fn gains_of_candidates(&self, stream: &Stream<'_>) -> Result<Vec<GainOfK>, BenchError> {
        self.run(Work::Gains, &stream.device())?;
        let mut bytes = vec![0; 16 * CANDIDATES.len()];
        stream.device().download(self.gains(), &mut bytes)?;
        let of = |(share, pair): (&f64, &[[u8; 8]])| {
            let [gain, error] = [pair[0], pair[1]].map(f64::from_le_bytes);
            GainOfK { k: kept(self.n, *share), gain, error }
        };
        Ok(CANDIDATES.iter().zip(bytes.as_chunks::<8>().0.chunks_exact(2)).map(of).collect())
    }

    /// Of what ran last.
    pub(super) fn outcome(&self, stream: &Stream<'_>) -> Result<Outcome, BenchError> {
        stream.seconds::<BenchError>(|device| {
            Ok(device.copy(self.outcome.span(), self.workspace.span().part(0, OUTCOME_BYTES))?)
        })?;
        let mut bytes = [0; OUTCOME_BYTES as usize];
        self.outcome.read(&mut bytes)?;
        Ok(Outcome::read(&bytes))
    }

    /// Of what ran last: it is decompressed into memory that it does not use.
    pub(super) fn sent(&self, work: Work, stream: &Stream<'_>) -> Result<Option<Sent>, BenchError> {
        let outcome = self.outcome(stream)?;
        let n = self.n;
        let time = |of: &dyn Fn(&OnStream<'_>) -> Result<(), LaunchError>| -> Result<f64, BenchError> {
            median(|| stream.seconds(|device| Ok(of(device)?)))
        };
        let (bytes, decompress) = match work {
            Work::Read | Work::Gains => return Ok(None),
            Work::Compress(method @ (Method::Quantize(..) | Method::ThreeLc(_))) => {
                // Its own workspace: the outcome was read.
                let (out, workspace) = (self.values.span(), self.workspace.span());
                let payload = self.payload.span().part(0, outcome.bytes);
                let add = |device: &OnStream<'_>| {
                    method.add(device, payload, n, Target { scale: 1.0, out }, workspace).map(drop)
                };
                (outcome.bytes, time(&add)?)
            }
            _ => {
                let k = u64::from(outcome.kept);
                let [lists, payload] = [self.values.span(), self.payload.span()];
                // Values at indices that all ranks draw are a payload by themselves.
                let drawn = matches!(work, Work::Compress(Method::RandomK(_)));
                let (values, out) = if drawn { (payload, lists) } else { (lists, payload) };
                let at = Selection { values, ..self.at(k) };
                (8 * k, time(&|device| scatter(device, &at, n, Target { scale: 1.0, out }))?)
            }
        };
        Ok(Some(Sent { bytes, gain: outcome.gain(), decompress }))
    }

    /// Behind the candidates.
    fn gains(&self) -> Span {
        self.candidates.span().part(1024, 16 * CANDIDATES.len() as u64)
    }
}
