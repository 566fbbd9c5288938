//! Error feedback: what every call begins with.

use crate::launch::{Words, start};
use crate::workspace::{Workspace, check, check_apart, check_count, require};
use crate::{Device, LaunchError, Span};

/// Type of a gradient's values. The memory, and all arithmetic, is f32.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum DType {
    /// IEEE 754 binary32.
    F32,
    /// IEEE 754 binary16.
    F16,
    /// bfloat16.
    Bf16,
}

impl DType {
    /// Of one value.
    pub const fn bytes(self) -> u64 {
        match self {
            Self::F32 => 4,
            Self::F16 | Self::Bf16 => 2,
        }
    }

    /// Which of three kernels.
    pub(crate) const fn of(self, kernels: [&'static str; 3]) -> &'static str {
        match self {
            Self::F32 => kernels[0],
            Self::F16 => kernels[1],
            Self::Bf16 => kernels[2],
        }
    }
}

/// A step's gradient and memory: g_e = beta m + gamma g.
///
/// Two buffers of f32 take turns: `memory` is the residual of the last step and is only read, `compensated` becomes g_e and, once
/// what is sent is taken out of it, the memory of the next step. A captured graph fixes addresses: capture two, one
/// for each order of the buffers.
#[derive(Debug, Clone, Copy)]
pub struct ErrorFeedback {
    /// Values.
    pub n: u64,
    /// Of the gradient.
    pub dtype: DType,
    /// n values of that type, at any place of a tensor; from a multiple of 16 bytes on it is read fastest.
    pub gradient: Span,
    /// n f32, or [`Span::NONE`] for a strategy without a memory (a memory that holds nothing yet is n zeros).
    pub memory: Span,
    /// n f32, apart from the others.
    pub compensated: Span,
    /// Weight of the memory: 1, unless it decays or the learning rate changed.
    pub beta: f32,
    /// Weight of the gradient.
    pub gamma: f32,
}

/// What vector loads need.
pub(crate) const ALIGN: u64 = 16;
/// Of lists, which are read and written word by word.
pub(crate) const WORD: u64 = 4;

impl ErrorFeedback {
    /// Of gradient and memory.
    pub(crate) fn check_inputs(&self) -> Result<(), LaunchError> {
        check_count(self.n)?;
        // It may be part of another tensor: kernels look at where it begins.
        check("the gradient", self.gradient, self.dtype.bytes() * self.n, self.dtype.bytes())?;
        if !self.memory.is_none() {
            check("the memory", self.memory, 4 * self.n, ALIGN)?;
        }
        for (what, value) in [("beta", self.beta), ("gamma", self.gamma)] {
            require(value.is_finite(), what, value.into(), "it must be finite")?;
        }
        Ok(())
    }

    pub(crate) fn check(&self) -> Result<(), LaunchError> {
        self.check_inputs()?;
        check("compensated", self.compensated, 4 * self.n, ALIGN)?;
        check_apart(("compensated", self.compensated), ("the gradient", self.gradient))?;
        check_apart(("compensated", self.compensated), ("the memory", self.memory))
    }

    /// Arguments of kernels that compensate.
    pub(crate) fn words(&self) -> impl Words {
        (self.gradient, self.memory, self.compensated, self.n, self.beta, self.gamma)
    }

    /// Of kernels that only look.
    pub(crate) fn inputs(&self) -> impl Words {
        (self.gradient, self.memory, self.n, self.beta, self.gamma)
    }

    /// Arguments of kernels that make the compensated gradient the residual.
    pub(crate) fn residual(&self) -> impl Words {
        (self.compensated, self.memory, self.n)
    }

    /// Launches what compensates and finds a norm of this kind (see [`crate::quantize`], with its parameter), which goes to `to`
    /// where that is given.
    pub(crate) fn compensate(
        &self,
        device: &impl Device,
        kind: u32,
        parameter: f64,
        to: Span,
        parts: &Workspace,
    ) -> Result<(), LaunchError> {
        let kernel = self.dtype.of(["stats_f32", "stats_f16", "stats_bf16"]);
        start(device, kernel, self.n.div_ceil(4), (self.words(), kind, parameter, to, parts.ends()))
    }

    /// Of a payload that is written while the others are read.
    pub(crate) fn check_payload(&self, payload: Span, bytes: u64) -> Result<(), LaunchError> {
        check("the payload", payload, bytes, ALIGN)?;
        let others = [("the gradient", self.gradient), ("the memory", self.memory), ("compensated", self.compensated)];
        others.into_iter().try_for_each(|other| check_apart(("the payload", payload), other))
    }
}
