//! A bucket of gradients of a training process, step by step: what an engine calls for a tensor on the device. All memory
//! is one piece that is borrowed from the caller for the bucket's life (of PyTorch, `torch.empty(bytes, dtype=torch.uint8,
//! device="cuda")`), so that PyTorch's allocator knows of it; a step takes (address, dtype, n) of the gradient and the
//! stream, launches, and waits for nothing.
//!
//! Payloads are those of the format; the header in front of them is the host's
//! (`flexcomm_compression::wire`). The residual stays on the device and goes on into the next step.

mod agreed;
mod layers;
mod plan;

pub use layers::Layers;
pub use plan::{Decoding, Plan};

use crate::hybrid::{self, Qsparse};
use crate::indices::{self, subset_scratch};
use crate::lists::list_bytes;
use crate::random::RandomK;
use crate::select::{Form, Selection, payload_room};
use crate::workspace::workspace_bytes;
use crate::{
    DType, Device, ErrorFeedback, LaunchError, OUTCOME_BYTES, Quantizer, Random, Span, Target, Threshold, add,
    add_sized, quantize, three_lc, threshold, topk,
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
    /// Values at indices that all ranks draw, quantized.
    QsparseRandom(Qsparse, RandomK),
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
            Self::TopK(k) | Self::Qsparse(k, _) | Self::Threshold(Threshold::MsTopK { k, .. }) => k,
            Self::RandomK(RandomK { k, .. }) | Self::QsparseRandom(_, RandomK { k, .. }) => k,
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
            Self::QsparseRandom(how, drawn) => Some(4 + (drawn.k * u64::from(how.bits())).div_ceil(8)),
            Self::Threshold(_) | Self::HardThreshold(_) | Self::ThreeLc(_) => None,
        }
    }
}

impl Method {
    /// `out += scale * ` what a payload of n values means that a kernel reads as it is; false where it has lists, or values that the
    /// caller has to look at.
    pub fn add(
        self,
        device: &impl Device,
        payload: Span,
        n: u64,
        to: Target,
        workspace: Span,
    ) -> Result<bool, LaunchError> {
        match self {
            Self::ThreeLc(_) => three_lc::add(device, payload, n, to, workspace),
            Self::Quantize(Quantizer::Inceptionn { bound }, _) => add_sized(device, bound, n, payload, to, workspace),
            Self::Quantize(quantizer, _) => add(device, quantizer, n, payload, to),
            _ => return Ok(false),
        }
        .map(|()| true)
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

/// Memory that only lasts for a step of a layer, whichever it is.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Room {
    pub(crate) indices: Span,
    pub(crate) values: Span,
    pub(crate) workspace: Span,
    pub(crate) scratch: Span,
}

const ALIGN: u64 = 256;

impl Room {
    /// Of lists, workspace and scratch, for n values by a method.
    fn sizes(n: u64, method: Method) -> [u64; 4] {
        let list = 4 * method.most(n);
        [list, list, workspace_bytes(n), method.scratch_bytes(n)].map(|bytes| bytes.next_multiple_of(ALIGN))
    }

    fn new([indices, values, workspace, scratch]: [Span; 4]) -> Self {
        Self { indices, values, workspace, scratch }
    }

    /// [`crate::Outcome`] of the last step.
    fn outcome(&self) -> Span {
        self.workspace.part(0, OUTCOME_BYTES)
    }

    /// What a method selects of n values.
    pub(crate) fn list(&self, method: Method, n: u64) -> Selection {
        Selection { indices: self.indices, values: self.values, len: method.most(n) }
    }

    /// Launches error feedback and what a method sends: to the payload, or to [`Self::list`], which [`crate::pack`] then makes a payload of
    /// in the form that is answered.
    pub(crate) fn compress(
        &self,
        device: &impl Device,
        feedback: &ErrorFeedback,
        method: Method,
        payload: Span,
    ) -> Result<Option<Form>, LaunchError> {
        let (to, Self { indices, values, workspace, scratch }) = (self.list(method, feedback.n), *self);
        match method {
            Method::TopK(k) => topk(device, feedback, k, &to, workspace).map(|()| Some(Form::FIXED)),
            Method::Threshold(how) => {
                let form = if matches!(how, Threshold::MsTopK { .. }) { Form::FIXED } else { Form::VARYING };
                threshold(device, feedback, how, &to, workspace).map(|()| Some(form))
            }
            Method::HardThreshold(tau) => hybrid::hard_threshold(device, feedback, tau, &to, workspace).map(Some),
            Method::Qsparse(k, how) => hybrid::qsparse(device, feedback, k, how, &to, workspace).map(Some),
            Method::QsparseRandom(how, drawn) => {
                hybrid::qsparse_random(device, feedback, drawn, how, &to, scratch, workspace).map(Some)
            }
            Method::RandomK(how) => {
                let values = if how.is_shared() { payload } else { values };
                let at = Selection { len: how.k, indices, values: values.part(0, 4 * how.k) };
                indices::random_k(device, feedback, how, &at, scratch, workspace)?;
                Ok((!how.is_shared()).then_some(Form::FIXED))
            }
            Method::Quantize(quantizer, random) => {
                quantize(device, feedback, quantizer, random, payload, workspace).map(|()| None)
            }
            Method::ThreeLc(s) => three_lc::compress(device, feedback, s, payload, workspace).map(|()| None),
        }
    }
}
