//! What is measured, and the memory for it.

use super::*;
use crate::three_lc;

/// A method for k values.
type OfK = fn(u64) -> Threshold;

/// What is measured.
#[derive(Debug, Clone, Copy)]
pub(super) enum Work {
    TopK(f64),
    RandomK(f64),
    Agreed(f64),
    Read,
    Gains,
    Quantize(Quantizer),
    Threshold(OfK),
    HardThreshold(f32),
    Qsparse(Qsparse),
    ThreeLc(f64),
}

/// Every step uses the same numbers: their cost does not depend on them.
pub(super) const RANDOM: Random = Random { seed: 1, step: 0, tensor: 0, rank: Some(0) };

/// The ratios whose gains one pass answers.
const CANDIDATES: [f64; 5] = [0.1, 0.033, 0.011, 0.004, 0.001];

/// Of methods that have one row.
const SHARE: f64 = 0.01;

/// Every method that has kernels, as strategies name it.
pub(super) fn works() -> Vec<(String, Work)> {
    let topk = [0.1, 0.01, 0.001].map(|c| (format!("topk(k={c})"), Work::TopK(c)));
    let qsgd = Quantizer::Qsgd { s: 4, bucket: 512, norm: Norm::L2 };
    let dithering = |natural| Quantizer::Dithering { k: 4, natural, norm: Norm::Max };
    let quantizers = [
        ("signsgd", Quantizer::Signs),
        ("efsignsgd", Quantizer::ScaledSigns),
        ("onebitsgd", Quantizer::OneBitSgd { threshold: 0.0, columns: 1 }),
        ("ssdm", Quantizer::Ssdm),
        ("terngrad", Quantizer::TernGrad { clip: 0.0 }),
        ("qsgd(s=4)", qsgd),
        ("lpcsvrg(bits=4)", Quantizer::LpcSvrg { bits: 4, lambda: 1.0 }),
        ("dithering(k=4)", dithering(false)),
        ("dithering(k=4,partition=natural)", dithering(true)),
        ("natural", Quantizer::Natural),
        ("eightbit", Quantizer::EightBit { fixed: false }),
        ("minmax8", Quantizer::MinMax8),
        ("inceptionn", Quantizer::Inceptionn { bound: 10 }),
        ("fp16", Quantizer::F16 { world: 8 }),
        ("bf16", Quantizer::Bf16 { world: 8 }),
    ];
    let thresholds: [(&str, OfK); 3] = [
        ("mstopk(k=0.01)", |k| Threshold::MsTopK { k, random: RANDOM }),
        ("dgc(k=0.01)", |k| Threshold::Dgc { k, sample: 0.01, most: 1.3, random: RANDOM }),
        ("sidco(k=0.01)", |k| Threshold::Sidco { k, fit: Fit::Exponential, first: 0.25, stages: 3 }),
    ];
    let others = [
        ("read", Work::Read),
        ("gains of 5 ratios", Work::Gains),
        ("randomk(k=0.01)", Work::RandomK(SHARE)),
        // AR-Topk of a rank that does not lead: error feedback, and values at indices that lie there already.
        ("agreed(k=0.01)", Work::Agreed(SHARE)),
        // Of values of about 1e-3.
        ("hardthreshold(tau=0.0025)", Work::HardThreshold(0.0025)),
        ("qsparse(k=0.01)", Work::Qsparse(Qsparse::Levels { s: 15, scaled: true, random: RANDOM })),
        ("qsparse(k=0.01,quantize=sign)", Work::Qsparse(Qsparse::Signs)),
        ("threelc(s=1)", Work::ThreeLc(1.0)),
    ];
    let named = |(name, work): (&str, Work)| (name.to_owned(), work);
    let quantizers = quantizers.map(|(name, method)| named((name, Work::Quantize(method))));
    let thresholds = thresholds.map(|(name, method)| named((name, Work::Threshold(method))));
    topk.into_iter().chain(others.map(named)).chain(quantizers).chain(thresholds).collect()
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
            Self::TopK(share) | Self::RandomK(share) | Self::Agreed(share) => 12 * n + 8 * kept(n, share),
            Self::Read | Self::Gains => 8 * n,
            Self::Quantize(method) => (if method.reads_twice(n) { 20 } else { 12 }) * n + method.payload_bytes(n),
            Self::ThreeLc(_) => 20 * n + three_lc::payload_bytes(n),
            Self::Threshold(_) | Self::Qsparse(_) | Self::HardThreshold(_) => 12 * n + 8 * kept(n, SHARE),
        }
    }
}

impl Work {
    /// Ranks whose sums must stay finite.
    pub(super) fn world(self) -> u32 {
        match self {
            Self::Quantize(Quantizer::F16 { world } | Quantizer::Bf16 { world }) => world,
            _ => 1,
        }
    }
}

/// Bytes that are sent, gain, seconds to decompress.
type Sent = (Option<u64>, Option<f64>, Option<f64>);

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

    pub(super) fn feed(&self) -> Feed {
        let [gradient, memory, compensated] = [&self.gradient, &self.memory, &self.compensated].map(Allocation::span);
        Feed { n: self.n, dtype: DType::F32, gradient, memory, compensated, beta: 1.0, gamma: 1.0 }
    }

    fn to(&self, room: u64) -> Selected {
        Selected { indices: self.indices.span(), values: self.values.span(), room }
    }

    fn at(&self, k: u64) -> At {
        At { k, indices: self.indices.span(), values: self.values.span() }
    }

    /// What compresses: selections are left as lists.
    pub(super) fn run(&self, work: Work, device: &OnStream<'_>) -> Result<(), LaunchError> {
        let (n, call, workspace) = (self.n, self.feed(), self.workspace.span());
        let k = kept(n, SHARE);
        match work {
            Work::TopK(share) => {
                let k = kept(n, share);
                topk(device, &call, (k, &self.to(k)), workspace)
            }
            Work::RandomK(share) => {
                let (k, random) = (kept(n, share), Random { rank: None, ..RANDOM });
                let how = RandomK { k, scaled: false, random };
                random_k(device, &call, (how, &self.at(k)), (self.scratch.span(), workspace))
            }
            // The indices are random-k's, whose row is the one before.
            Work::Agreed(share) => {
                feed(device, &call, workspace)?;
                gather(device, &call, (&self.at(kept(n, share)), 1.0), workspace)
            }
            Work::Read => largest(device, &call, self.gains()),
            Work::Gains => {
                let ks = self.candidates.span();
                gains(device, &call, (ks, CANDIDATES.len() as u64, self.gains()), workspace)
            }
            Work::Quantize(method) => quantize(device, &call, (method, RANDOM), self.payload.span(), workspace),
            Work::Threshold(method) => threshold(device, &call, (method(k), &self.to(n)), workspace),
            Work::HardThreshold(tau) => hybrid::hard_threshold(device, &call, (tau, &self.to(n)), workspace).map(drop),
            Work::ThreeLc(s) => three_lc::compress(device, &call, (s, self.payload.span()), workspace),
            Work::Qsparse(method) => hybrid::qsparse(device, &call, (k, method, &self.to(k)), workspace).map(drop),
        }
    }

    /// What one rank sends with no residual before, where anything is sent.
    pub(super) fn message(&self, work: Work, stream: &Stream<'_>, to: Span) -> Result<Option<Vec<u8>>, BenchError> {
        let n = self.n;
        let work = match work {
            Work::Threshold(method) => match method(kept(n, SHARE)) {
                // Of a first step.
                Threshold::Sidco { .. } => {
                    Work::Threshold(|k| Threshold::Sidco { k, fit: Fit::Exponential, first: 0.25, stages: 1 })
                }
                _ => work,
            },
            _ => work,
        };
        let none = Form { set: Set::Known, gaps: false, tail: Tail::Values };
        let (room, form) = match work {
            Work::Read | Work::Gains => return Ok(None),
            Work::Quantize(_) | Work::ThreeLc(_) => (0, None),
            Work::TopK(share) => (kept(n, share), Some(Form::FIXED)),
            // At the indices that lie there already: those of random-k, which comes before.
            Work::RandomK(share) | Work::Agreed(share) => (kept(n, share), Some(none)),
            Work::Threshold(method) => match method(kept(n, SHARE)) {
                Threshold::MsTopK { .. } => (n, Some(Form::FIXED)),
                _ => (n, Some(Form::VARYING)),
            },
            Work::HardThreshold(_) => (n, None),
            Work::Qsparse(_) => (kept(n, SHARE), None),
        };
        let workspace = self.workspace.span();
        stream.seconds::<BenchError>(|device| {
            let (k, own) = (kept(n, SHARE), self.feed());
            let form = match work {
                Work::HardThreshold(tau) => Some(hybrid::hard_threshold(device, &own, (tau, &self.to(n)), workspace)?),
                Work::Qsparse(method) => Some(hybrid::qsparse(device, &own, (k, method, &self.to(k)), workspace)?),
                _ => {
                    self.run(work, device)?;
                    form
                }
            };
            match form {
                Some(form) => Ok(pack(device, (&self.to(room), n), (to, form), workspace)?),
                None => Ok(()),
            }
        })?;
        let sent = self.outcome(stream)?.bytes as usize;
        let from = if matches!(work, Work::Quantize(_) | Work::ThreeLc(_)) { self.payload.span() } else { to };
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

    /// k, its gain, and by how much that may be off.
    pub(super) fn gains_of_candidates(&self, stream: &Stream<'_>) -> Result<Vec<(u64, f64, f64)>, BenchError> {
        self.run(Work::Gains, &stream.device())?;
        let mut bytes = vec![0; 16 * CANDIDATES.len()];
        stream.device().download(self.gains(), &mut bytes)?;
        let pairs = bytes.as_chunks::<16>().0.iter().map(|pair| {
            let (gain, off) = (pair[..8].try_into().unwrap_or_default(), pair[8..].try_into().unwrap_or_default());
            (f64::from_le_bytes(gain), f64::from_le_bytes(off))
        });
        Ok(CANDIDATES.iter().zip(pairs).map(|(share, (gain, off))| (kept(self.n, *share), gain, off)).collect())
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
    pub(super) fn sent(&self, work: Work, stream: &Stream<'_>) -> Result<Sent, BenchError> {
        let outcome = self.outcome(stream)?;
        let n = self.n;
        let time = |of: &dyn Fn(&OnStream<'_>) -> Result<(), LaunchError>| -> Result<f64, BenchError> {
            median(|| stream.seconds(|device| Ok(of(device)?)))
        };
        let (bytes, seconds) = match work {
            Work::Read | Work::Gains => return Ok((None, None, None)),
            Work::Quantize(Quantizer::Inceptionn { bound }) => {
                let (payload, out) = (self.payload.span().part(0, outcome.bytes), self.values.span());
                // Its own workspace: the outcome was read.
                let to = (1.0, out, self.workspace.span());
                (outcome.bytes, time(&|device| add_sized(device, (bound, n), payload, to))?)
            }
            Work::ThreeLc(_) => {
                let (payload, out) = (self.payload.span().part(0, outcome.bytes), self.values.span());
                let workspace = self.workspace.span();
                (outcome.bytes, time(&|device| three_lc::add(device, (payload, n), (1.0, out), workspace))?)
            }
            Work::Quantize(method) => {
                let (payload, out) = (self.payload.span(), self.values.span());
                (outcome.bytes, time(&|device| add(device, (method, n), payload, (1.0, out)))?)
            }
            _ => {
                let at = self.at(u64::from(outcome.kept));
                let out = self.payload.span();
                (8 * u64::from(outcome.kept), time(&|device| scatter(device, &at, (n, out), 1.0))?)
            }
        };
        Ok((Some(bytes), Some(outcome.gain()), Some(seconds)))
    }

    /// Behind the candidates.
    fn gains(&self) -> Span {
        self.candidates.span().part(1024, 16 * CANDIDATES.len() as u64)
    }
}
