//! A bucket of gradients of a training process, step by step: what an engine calls for a tensor on the device. All memory
//! is one piece that is borrowed from the caller for the bucket's life (of PyTorch, `torch.empty(bytes, dtype=torch.uint8,
//! device="cuda")`), so that PyTorch's allocator knows of it; a step takes (address, dtype, n) of the gradient and the
//! stream, launches, and waits for nothing.
//!
//! Payloads are those of the format; the header in front of them is the host's
//! (`flexcomm_compression::wire`). The residual stays on the device and goes on into the next step, whatever its
//! method.

mod agreed;
mod layers;
mod plan;

pub use layers::Layers;
pub use plan::{Decoding, Plan};

use crate::hybrid::{self, Qsparse};
use crate::indices::{self, At, subset_scratch};
use crate::lists::list_bytes;
use crate::random::RandomK;
use crate::select::{Form, Selected, pack, payload_room};
use crate::workspace::{check, check_count, split, workspace_bytes};
use crate::{
    DType, Device, Feed, LaunchError, OUTCOME_BYTES, Quantizer, Random, Span, Threshold, quantize, three_lc, threshold,
    topk,
};

/// What a step does, with the random numbers of this step and rank where it has any.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Method {
    /// The k largest.
    TopK(u64),
    /// What a threshold selects.
    Threshold(Threshold),
    /// `hardthreshold` with this tau.
    HardThreshold(f32),
    /// k values, quantized.
    Qsparse(u64, Qsparse),
    /// k values at indices that all ranks draw, quantized.
    QsparseRandom(u64, Qsparse, Random),
    /// k values at random. With indices that all ranks draw the payload is nothing but values, which add up in flight.
    RandomK(RandomK),
    /// 3LC with this sparsity multiplier.
    ThreeLc(f64),
    /// Every value, in few bits.
    Quantize(Quantizer, Random),
}

impl Method {
    /// Most values that are selected of n.
    fn most(self, n: u64) -> u64 {
        let most = match self {
            Self::TopK(k) | Self::Qsparse(k, _) | Self::QsparseRandom(k, ..) => k,
            Self::Threshold(Threshold::MsTopK { k, .. }) | Self::RandomK(RandomK { k, .. }) => k,
            Self::Threshold(Threshold::Dgc { k, most, .. }) => ((k as f64 * most) as u64).max(k),
            Self::Threshold(_) | Self::HardThreshold(_) => n,
            Self::Quantize(..) | Self::ThreeLc(_) => 0,
        };
        most.min(n)
    }

    /// Of memory to draw indices in.
    fn scratch_bytes(self, n: u64) -> u64 {
        match self {
            Self::RandomK(_) | Self::QsparseRandom(..) => subset_scratch(n),
            _ => 0,
        }
    }

    /// Bytes of its payload at most.
    pub fn payload_bytes(self, n: u64) -> u64 {
        match self {
            Self::Quantize(quantizer, _) => quantizer.payload_bytes(n),
            Self::ThreeLc(_) => three_lc::payload_bytes(n),
            Self::RandomK(how) if how.is_shared() => 4 * how.k,
            _ => payload_room(n, self.most(n)),
        }
    }

    /// k, where its payload is a list of as many values whatever they are, see [`crate::Lists`].
    pub fn selected(self) -> Option<u64> {
        match self {
            Self::TopK(k) | Self::Threshold(Threshold::MsTopK { k, .. }) => Some(k),
            Self::RandomK(how) if !how.is_shared() => Some(how.k),
            _ => None,
        }
    }

    /// Bytes of its payload where n tells them, whatever the values are: then a block to gather can be laid out before the step
    /// is done, and nobody waits for the outcome.
    pub fn sent_bytes(self, n: u64) -> Option<u64> {
        match self {
            Self::RandomK(how) if how.is_shared() => Some(4 * how.k),
            Self::TopK(_) | Self::Threshold(Threshold::MsTopK { .. }) | Self::RandomK(_) => {
                self.selected().map(|k| list_bytes(n, k))
            }
            Self::Quantize(Quantizer::Inceptionn { .. }, _) => None,
            Self::Quantize(quantizer, _) => Some(quantizer.payload_bytes(n)),
            Self::Qsparse(k, how) => Some(list_bytes(n, k) - 4 * k + (k * u64::from(how.bits())).div_ceil(8)),
            Self::QsparseRandom(k, how, _) => Some(4 + (k * u64::from(how.bits())).div_ceil(8)),
            Self::Threshold(_) | Self::HardThreshold(_) | Self::ThreeLc(_) => None,
        }
    }
}

/// A step's gradient: n values on the device.
#[derive(Debug, Clone, Copy)]
pub struct Gradient {
    /// Where they are.
    pub at: Span,
    /// What they are.
    pub dtype: DType,
    /// Weights of the memory and of the gradient: 1 and 1 for `ef(vanilla)`.
    pub weights: (f32, f32),
}

/// A bucket and its memory.
#[derive(Debug)]
pub struct Bucket {
    n: u64,
    /// The residual of the last step, and that of the next one.
    memory: [Span; 2],
    payload: Span,
    room: Room,
    /// The compensated gradient, not taken yet, between the exchanges of a step that has several.
    open: Option<Feed>,
}

/// Memory that only lasts for a step.
#[derive(Debug, Clone, Copy)]
struct Room {
    indices: Span,
    values: Span,
    workspace: Span,
    scratch: Span,
}

const ALIGN: u64 = 256;

impl Room {
    /// Of lists, workspace and scratch, for n values and any of these methods.
    fn sizes(n: u64, methods: &[Method]) -> [u64; 4] {
        let most = |of: &dyn Fn(Method) -> u64| methods.iter().map(|method| of(*method)).max().unwrap_or(0);
        let list = 4 * most(&|method| method.most(n));
        let scratch = most(&|method| method.scratch_bytes(n));
        [list, list, workspace_bytes(n), scratch].map(|bytes| bytes.next_multiple_of(ALIGN))
    }

    fn new(spans: [Span; 4]) -> Self {
        let [indices, values, workspace, scratch] = spans;
        Self { indices, values, workspace, scratch }
    }
}

fn sizes(n: u64, methods: &[Method]) -> [u64; 7] {
    let payload = methods.iter().map(|method| method.payload_bytes(n)).max().unwrap_or(0);
    let [first, second, third, fourth] = Room::sizes(n, methods);
    [4 * n, 4 * n, payload, first, second, third, fourth].map(|bytes| bytes.next_multiple_of(ALIGN))
}

impl Bucket {
    /// Bytes to borrow for n values and any of these methods.
    pub fn bytes(n: u64, methods: &[Method]) -> Result<u64, LaunchError> {
        check_count(n)?;
        Ok(sizes(n, methods).iter().sum())
    }

    /// With no residual: clears the memory on the device's stream.
    pub fn new(device: &impl Device, (n, methods): (u64, &[Method]), borrowed: Span) -> Result<Self, LaunchError> {
        check(("the bucket's memory", borrowed, Self::bytes(n, methods)?), ALIGN)?;
        let [first, second, payload, indices, values, workspace, scratch] = split(borrowed, sizes(n, methods));
        device.zero(first)?;
        let room = Room::new([indices, values, workspace, scratch]);
        Ok(Self { n, memory: [first, second], payload, room, open: None })
    }

    /// The residual, n f32: for checkpoints, and to fill when one is restored.
    pub fn residual(&self) -> Span {
        self.memory[0].part(0, 4 * self.n)
    }

    /// [`crate::Outcome`] of the last step, to copy back when it is wanted.
    pub fn outcome(&self) -> Span {
        self.room.workspace.part(0, OUTCOME_BYTES)
    }

    fn feed(&self, gradient: &Gradient) -> Feed {
        let (n, (beta, gamma)) = (self.n, gradient.weights);
        let [memory, compensated] = self.memory.map(|span| span.part(0, 4 * n));
        Feed { n, dtype: gradient.dtype, gradient: gradient.at, memory, compensated, beta, gamma }
    }

    /// After a step that does not count (some rank could not do its part): the residual is as before it. Once a step.
    pub fn put_back(&mut self) {
        self.memory.swap(0, 1);
    }

    /// Sets `bits` of a byte where the last step refused its gradient: its message then says so itself.
    pub fn mark(&self, device: &impl Device, at: Span, bits: u8) -> Result<(), LaunchError> {
        indices::mark(device, (at, bits), self.outcome())
    }

    /// Launches a step: its payload will be in what is answered, whose length is the outcome's `bytes`. Where it fails
    /// nothing of the bucket has changed that counts: the memory is that of the step before.
    pub fn step(&mut self, device: &impl Device, gradient: Gradient, method: Method) -> Result<Span, LaunchError> {
        let payload = self.compress(device, &self.feed(&gradient), method)?;
        self.open = None;
        self.memory.swap(0, 1);
        Ok(payload)
    }

    /// As [`Self::step`] for a strategy without error feedback: nothing is added to the gradient, and the residual stays
    /// as it is.
    pub fn step_alone(
        &mut self,
        device: &impl Device,
        gradient: Gradient,
        method: Method,
    ) -> Result<Span, LaunchError> {
        self.open = None;
        self.compress(device, &Feed { memory: Span::NONE, ..self.feed(&gradient) }, method)
    }

    fn compress(&self, device: &impl Device, feed: &Feed, method: Method) -> Result<Span, LaunchError> {
        let (n, payload) = (self.n, self.payload);
        check(("the payload", payload, method.payload_bytes(n)), ALIGN)?;
        let Room { indices, values, workspace, scratch } = self.room;
        let to = Selected { indices, values, room: method.most(n) };
        let form = match method {
            Method::TopK(k) => topk(device, feed, (k, &to), workspace).map(|()| Some(Form::FIXED)),
            Method::Threshold(how) => {
                let form = if matches!(how, Threshold::MsTopK { .. }) { Form::FIXED } else { Form::VARYING };
                threshold(device, feed, (how, &to), workspace).map(|()| Some(form))
            }
            Method::HardThreshold(tau) => hybrid::hard_threshold(device, feed, (tau, &to), workspace).map(Some),
            Method::Qsparse(k, how) => hybrid::qsparse(device, feed, (k, how, &to), workspace).map(Some),
            Method::QsparseRandom(k, how, shared) => {
                hybrid::qsparse_random(device, feed, (k, how, shared), (&to, scratch, workspace)).map(Some)
            }
            Method::RandomK(how) => {
                let values = if how.is_shared() { payload } else { values };
                let at = At { k: how.k, indices, values: values.part(0, 4 * how.k) };
                indices::random_k(device, feed, (how, &at), (scratch, workspace))?;
                Ok((!how.is_shared()).then_some(Form::FIXED))
            }
            Method::Quantize(quantizer, random) => {
                quantize(device, feed, (quantizer, random), payload, workspace).map(|()| None)
            }
            Method::ThreeLc(s) => three_lc::compress(device, feed, (s, payload), workspace).map(|()| None),
        }?;
        if let Some(form) = form {
            pack(device, (&to, n), (payload, form), workspace)?;
        }
        Ok(payload.part(0, method.payload_bytes(n)))
    }
}
