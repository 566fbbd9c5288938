//! Quantizers: payloads of `compression/FORMAT.md`, byte for byte.
//!
//! Norms of whole tensors are rounded from sums in f64 whose order is not the CPU side's: about one in 10^8 of ‖x‖₂, mean |x|
//! and clipping bounds is the neighbouring f32. Norms of buckets and largest magnitudes are the same always.

use crate::feedback::{ErrorFeedback, WORD};
use crate::launch::{Words, start};
use crate::random::Random;
use crate::ranges;
use crate::workspace::{Target, Workspace, check, check_apart, check_count, require};
use crate::{Device, LaunchError, Span};

/// Which norm a level is a part of.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Norm {
    /// ‖x‖₂.
    L2,
    /// max |x|.
    Max,
}

/// A quantizer and its parameters, as in the strategies' text.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Quantizer {
    /// `signsgd`, `signum`, `onebit(scaling=false)`: signs. A refused gradient cannot say so in the payload.
    Signs,
    /// Signs that leave the compensated gradient as it is: Marsit's.
    SignsAlone,
    /// `onebit(scaling=true)`, `efsignsgd`: signs and mean |x|.
    ScaledSigns,
    /// `ssdm`.
    Ssdm,
    /// `qsgd`, packed, as all codes here; a bucket of 0 is the whole tensor.
    Qsgd {
        /// Levels above 0, to 127.
        s: u32,
        /// Values per norm.
        bucket: u32,
        /// Of a bucket.
        norm: Norm,
    },
    /// `dithering`.
    Dithering {
        /// Levels above 0, to 127.
        k: u32,
        /// Levels are powers of two, not equal parts.
        natural: bool,
        /// Of the tensor.
        norm: Norm,
    },
    /// `terngrad`; a clip of 0 does not clip.
    TernGrad {
        /// In standard deviations.
        clip: f64,
    },
    /// `lpcsvrg`.
    LpcSvrg {
        /// Of a value, from 2 to 8.
        bits: u32,
        /// Share of max |x| that the grid reaches, above 0 and up to 1.
        lambda: f64,
    },
    /// `onebitsgd`.
    OneBitSgd {
        /// Values below it are one side.
        threshold: f32,
        /// `per=column`: columns of the layer's matrix, by rows; 1 for `per=tensor`.
        columns: u32,
    },
    /// `minmax8`.
    MinMax8,
    /// `inceptionn`. Its payload's length depends on the values: it is in the outcome.
    Inceptionn {
        /// Errors stay below 2^-bound; from 1 to 14.
        bound: u32,
    },
    /// `natural`.
    Natural,
    /// `eightbit`.
    EightBit {
        /// `type=static`, not the dynamic tree.
        fixed: bool,
    },
    /// `fp16`, for sums over so many ranks.
    F16 {
        /// Ranks.
        world: u32,
    },
    /// `bf16`.
    Bf16 {
        /// Ranks.
        world: u32,
    },
}

/// Kinds of norms in `cuda/quantize.cu`.
mod kind {
    pub(super) const NONE: u32 = 0;
    pub(super) const MAX: u32 = 1;
    pub(super) const L2: u32 = 2;
    pub(super) const CLIPPED: u32 = 3;
    pub(super) const MEAN: u32 = 4;
    pub(super) const ONE: u32 = 5;
    pub(super) const HALF_L2: u32 = 6;
    pub(super) const SHARE: u32 = 7;
    pub(super) const SIDES: u32 = 8;
    pub(super) const RANGE: u32 = 9;
}

/// What the codes of a method are made of.
#[derive(Debug, Clone, Copy)]
struct Codes {
    kernels: [&'static str; 2],
    bucket: u64,
    width: u64,
    levels: u64,
    divide: u64,
}

impl Codes {
    fn words(self) -> [u64; 4] {
        [self.bucket, self.width, self.levels, self.divide]
    }
}

/// Bits for `levels` different numbers.
fn width(levels: u64) -> u64 {
    u64::from(u64::BITS - (levels - 1).leading_zeros())
}

const LINEAR: [&str; 2] = ["quantize_linear", "dequantize_linear"];
const POWERS: [&str; 2] = ["quantize_powers", "dequantize_powers"];
const GRID: [&str; 2] = ["quantize_grid", "dequantize_grid"];
const DRAW: [&str; 2] = ["quantize_draw", "dequantize_draw"];

impl Quantizer {
    fn codes(self, n: u64) -> Option<Codes> {
        let whole = n.max(1);
        let linear = |bucket, s: u32| {
            let levels = u64::from(s);
            Codes { kernels: LINEAR, bucket, width: width(2 * levels + 1), levels, divide: levels }
        };
        match self {
            Self::Qsgd { s, bucket: 0, .. } => Some(linear(whole, s)),
            Self::Qsgd { s, bucket, .. } => Some(linear(u64::from(bucket), s)),
            Self::Dithering { k, natural: false, .. } => Some(linear(whole, k)),
            Self::Dithering { k, .. } => Some(Codes { kernels: POWERS, divide: 1, ..linear(whole, k) }),
            Self::TernGrad { .. } => Some(linear(whole, 1)),
            Self::Ssdm => Some(Codes { kernels: DRAW, bucket: whole, width: 1, levels: 1, divide: 1 }),
            Self::LpcSvrg { bits, .. } => {
                let half = 1 << bits.saturating_sub(1).min(7);
                Some(Codes { kernels: GRID, bucket: whole, width: u64::from(bits), levels: half, divide: half - 1 })
            }
            _ => None,
        }
    }

    /// The kind of norm that comes first, and its parameter.
    fn norm(self) -> (u32, f64) {
        let of = |norm| if norm == Norm::L2 { kind::L2 } else { kind::MAX };
        match self {
            Self::Signs => (kind::ONE, 0.0),
            Self::ScaledSigns => (kind::MEAN, 0.0),
            Self::Ssdm => (kind::HALF_L2, 0.0),
            Self::Qsgd { norm, .. } | Self::Dithering { norm, .. } => (of(norm), 0.0),
            Self::LpcSvrg { lambda, .. } => (kind::SHARE, lambda),
            Self::OneBitSgd { threshold, columns: 1 } => (kind::SIDES, f64::from(threshold)),
            Self::MinMax8 => (kind::RANGE, 0.0),
            Self::OneBitSgd { .. } | Self::Inceptionn { .. } => (kind::NONE, 0.0),
            Self::TernGrad { clip } if clip > 0.0 => (kind::CLIPPED, clip),
            Self::TernGrad { .. } | Self::EightBit { .. } => (kind::MAX, 0.0),
            Self::SignsAlone | Self::Natural | Self::F16 { .. } | Self::Bf16 { .. } => (kind::NONE, 0.0),
        }
    }

    /// Whether a number of the whole tensor must be known before the first code: then it is read twice.
    pub(crate) fn reads_twice(self, n: u64) -> bool {
        let whole = self.codes(n).is_none_or(|codes| codes.bucket >= n);
        whole && !matches!(self.norm().0, kind::NONE | kind::ONE)
    }

    /// Whether a payload that begins like this has Elias' codes, which the host writes where they are shorter than packed ones and
    /// no kernel reads: the sign bit of the first norm says so.
    pub fn is_elias(self, payload: &[u8]) -> bool {
        let may_be =
            matches!(self, Self::Qsgd { .. } | Self::Dithering { .. } | Self::TernGrad { .. } | Self::LpcSvrg { .. });
        may_be && payload.get(3).is_some_and(|byte| byte & 0x80 != 0)
    }

    /// Bytes of a payload of n values; for `inceptionn` the most that they can be.
    pub fn payload_bytes(self, n: u64) -> u64 {
        let signs = n.div_ceil(8);
        match (self.codes(n), self) {
            (Some(codes), _) => 4 * n.div_ceil(codes.bucket) + (n * codes.width).div_ceil(8),
            (None, Self::ScaledSigns) => signs + 4,
            (None, Self::Natural) => signs + n,
            (None, Self::EightBit { .. }) => 4 + n,
            (None, Self::MinMax8) => 8 + n,
            (None, Self::OneBitSgd { columns, .. }) => 8 * u64::from(columns) + signs,
            (None, Self::Inceptionn { .. }) => n.div_ceil(4) + 4 * n,
            (None, Self::F16 { .. } | Self::Bf16 { .. }) => 2 * n,
            (None, _) => signs,
        }
    }

    pub(crate) fn check(self, n: u64) -> Result<(), LaunchError> {
        let levels = match self {
            Self::Qsgd { s, .. } => s,
            Self::Dithering { k, .. } => k,
            _ => 1,
        };
        require((1..=127).contains(&levels), "levels", levels.into(), "from 1 to 127")?;
        match self {
            Self::TernGrad { clip } => {
                require(clip >= 0.0 && clip.is_finite(), "clip", clip, "finite, and not negative")
            }
            Self::LpcSvrg { bits, lambda } => {
                require((2..=8).contains(&bits), "bits", bits.into(), "from 2 to 8")?;
                require(lambda > 0.0 && lambda <= 1.0, "lambda", lambda, "above 0, and at most 1")
            }
            Self::OneBitSgd { threshold, columns } => {
                require(threshold.is_finite(), "threshold", threshold.into(), "it must be finite")?;
                let divides = columns > 0 && n.is_multiple_of(u64::from(columns));
                require(divides, "columns", columns.into(), "at least 1, and a divisor of n")
            }
            Self::Inceptionn { bound } => require((1..=14).contains(&bound), "bound", bound.into(), "from 1 to 14"),
            _ => Ok(()),
        }
    }
}

/// A half precision.
struct Half {
    /// Largest finite value.
    largest: f64,
    /// Largest relative error of a sum.
    rounding: f64,
}

const F16: Half = Half { largest: 65_504.0, rounding: 1.0 / 2048.0 };
const BF16: Half = Half { largest: 338_953_138_925_153_547_590_470_800_371_487_866_880.0, rounding: 1.0 / 256.0 };

impl Half {
    /// The largest magnitude of which `world` may be added up, all roundings upwards.
    fn limit(&self, world: u32) -> f32 {
        let ranks = f64::from(world);
        if world <= 1 {
            return self.largest as f32;
        }
        (self.largest / ranks * (1.0 + self.rounding).powf(-ranks)) as f32
    }
}

/// Error feedback, the payload, and what it stands for taken out of the memory. Two launches, three where buckets have norms
/// of their own; nothing waits, and a CUDA graph can capture them (with a step's random numbers fixed in it).
pub fn quantize(
    device: &impl Device,
    feedback: &ErrorFeedback,
    method: Quantizer,
    random: Random,
    payload: Span,
    workspace: Span,
) -> Result<(), LaunchError> {
    feedback.check()?;
    method.check(feedback.n)?;
    feedback.check_payload(payload, method.payload_bytes(feedback.n))?;
    let call = Call { device, feedback, parts: Workspace::new(workspace, feedback.n)?, payload };
    device.zero(call.parts.zeroed)?;
    if let Quantizer::Signs | Quantizer::SignsAlone = method {
        return call.signs(if method == Quantizer::Signs { 1.0 } else { 0.0 });
    }
    let (n, codes) = (feedback.n, method.codes(feedback.n));
    // A tensor of one bucket has its norm in front; EightBit's lies there too.
    let in_front = match codes {
        Some(codes) => codes.bucket >= n && n > 0,
        None => match method {
            Quantizer::OneBitSgd { columns, .. } => columns == 1,
            _ => matches!(method, Quantizer::EightBit { .. } | Quantizer::MinMax8),
        },
    };
    let (kind, parameter) = method.norm();
    feedback.compensate(device, kind, parameter, if in_front { payload } else { Span::NONE }, &call.parts)?;
    if let Some(codes) = codes {
        return call.codes(method, codes, random);
    }
    match method {
        Quantizer::OneBitSgd { threshold, columns } => ranges::sides(&call, threshold, columns),
        Quantizer::MinMax8 => call.take("minmax", n, ()),
        Quantizer::Inceptionn { bound } => ranges::inceptionn(&call, bound),
        Quantizer::Natural => call.take("natural", n, random.stream(0)),
        Quantizer::EightBit { fixed } => call.take("eightbit", n, fixed),
        Quantizer::F16 { world } => call.take("cast_f16", n, F16.limit(world)),
        Quantizer::Bf16 { world } => call.take("cast_bf16", n, BF16.limit(world)),
        _ => call.take("signs", n, true),
    }
}

/// Error feedback and its sign bits, with nothing taken out: signs times a norm of 0.
pub(crate) fn signs_alone(
    device: &impl Device,
    feedback: &ErrorFeedback,
    payload: Span,
    workspace: Span,
) -> Result<(), LaunchError> {
    let random = Random { seed: 0, step: 0, tensor: 0, rank: None };
    quantize(device, feedback, Quantizer::SignsAlone, random, payload, workspace)
}

/// What all launches of a call share.
pub(crate) struct Call<'a, D> {
    pub(crate) device: &'a D,
    pub(crate) feedback: &'a ErrorFeedback,
    pub(crate) parts: Workspace,
    pub(crate) payload: Span,
}

impl<D: Device> Call<'_, D> {
    /// Launches a kernel that writes the payload and takes what it stands for out of the compensated gradient.
    pub(crate) fn take(&self, kernel: &'static str, threads: u64, arguments: impl Words) -> Result<(), LaunchError> {
        let all = (self.feedback.residual(), self.payload, arguments, self.parts.ends());
        start(self.device, kernel, threads, all)
    }

    /// Signs that stand for `norm` each: all in one pass, and another that does nothing but for a refused gradient.
    fn signs(&self, norm: f32) -> Result<(), LaunchError> {
        let (feedback, kernel) = (self.feedback, self.feedback.dtype.of(["signs_f32", "signs_f16", "signs_bf16"]));
        // A warp works on 1024 values at a time.
        start(self.device, kernel, feedback.n.div_ceil(32), (feedback.words(), norm, self.payload, self.parts.ends()))?;
        let undone = (feedback.memory, feedback.compensated, feedback.n, self.payload, self.parts.outcome);
        start(self.device, "signs_undo", feedback.n.div_ceil(8), undone)
    }

    fn codes(&self, method: Quantizer, codes: Codes, random: Random) -> Result<(), LaunchError> {
        let (Codes { kernels, bucket, .. }, ErrorFeedback { compensated, n, .. }) = (codes, *self.feedback);
        if bucket < n {
            let arguments = (compensated, n, bucket, method.norm().0, self.payload, self.parts.outcome);
            start(self.device, "norms", 8 * n.div_ceil(bucket), arguments)?;
        }
        self.take(kernels[0], n.div_ceil(8), (codes.words(), random.stream(0)))
    }
}

/// `out += scale * C(x)` of a payload of this method, which may begin at any byte, as it does in a gathered block. It is not
/// checked: its bytes came through `Reader` checks on the CPU side, or from a rank that is trusted. No payload makes a kernel
/// read beyond `payload_bytes`.
pub fn add(
    device: &impl Device,
    method: Quantizer,
    n: u64,
    payload: Span,
    Target { scale, out }: Target,
) -> Result<(), LaunchError> {
    check_count(n)?;
    method.check(n)?;
    check("the payload", payload, method.payload_bytes(n), 1)?;
    check("out", out, 4 * n, WORD)?;
    check_apart(("out", out), ("the payload", payload))?;
    if let Some(codes) = method.codes(n) {
        return start(device, codes.kernels[1], n, (out, n, payload, codes.words(), scale));
    }
    let (kernel, parameter) = match method {
        Quantizer::OneBitSgd { columns, .. } => ("add_sides", Some(columns)),
        Quantizer::MinMax8 => ("add_minmax", None),
        Quantizer::Inceptionn { .. } => {
            return require(false, "method", 0.0, "its payload has values of several sizes: add_sized reads it");
        }
        Quantizer::Natural => ("add_natural", None),
        Quantizer::EightBit { fixed } => ("add_eightbit", Some(fixed.into())),
        Quantizer::F16 { .. } => ("add_f16", None),
        Quantizer::Bf16 { .. } => ("add_bf16", None),
        _ => ("add_signs", Some((method == Quantizer::ScaledSigns).into())),
    };
    start(device, kernel, n, (out, n, payload, parameter, scale))
}

/// ±1 by the vote of `ranks` payloads of signs, of which rank r's begins at r * stride, at any byte; 0 where votes are equal.
pub fn majority(
    device: &impl Device,
    n: u64,
    payloads: Span,
    stride: u64,
    ranks: u32,
    out: Span,
) -> Result<(), LaunchError> {
    check_count(n)?;
    let last = u64::from(ranks.saturating_sub(1)).saturating_mul(stride);
    let rule = "at least 1 rank, and a stride of at least n/8 bytes";
    require(ranks > 0 && stride >= n.div_ceil(8), "stride", stride as f64, rule)?;
    check("the payloads", payloads, last.saturating_add(n.div_ceil(8)), 1)?;
    check("out", out, 4 * n, WORD)?;
    check_apart(("out", out), ("the payloads", payloads))?;
    start(device, "majority", n, (out, n, payloads, stride, ranks))
}
