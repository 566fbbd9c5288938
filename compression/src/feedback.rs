//! Error feedback: what was not sent is added to the next gradient.
//!
//! Two buffers of n values. A step writes `fed = gradient + residual` and leaves `residual` alone; only when the values
//! to send are known and taken does `fed`, with those places zeroed, become the residual (by swapping). A step that
//! fails or is abandoned in between has changed nothing.

use crate::selection::{SelectionError, check_indices};
use crate::{Energy, Selection};

/// Failed to compress a gradient. The residual is as it was.
#[derive(Debug, Clone, Copy, PartialEq, thiserror::Error)]
pub enum CompressError {
    /// A buffer of another length than the layers add up to.
    #[error("compress a gradient of {expected} values: {what} has {got}")]
    Length {
        /// Which buffer.
        what: &'static str,
        /// n.
        expected: usize,
        /// As given.
        got: usize,
    },
    /// NaN or infinity, in the gradient or in its sum with the residual.
    #[error("compress value {index}: gradient {gradient} + residual {residual} is not finite")]
    NonFinite {
        /// The first such place.
        index: usize,
        /// The gradient there.
        gradient: f32,
        /// The residual there.
        residual: f32,
    },
    /// Values are taken before a gradient was fed.
    #[error("take values of a gradient: none was fed since the last were taken")]
    NotFed,
    /// Indices that do not belong to this gradient.
    #[error("take values of a gradient: failed to {0}")]
    Indices(#[from] SelectionError),
}

/// A copy of the residual, for trials and checkpoints.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct Memory {
    residual: Vec<f32>,
}

impl Memory {
    /// From a checkpoint; every value must be finite (checked by [`crate::GradientCompressor::restore`]).
    pub fn from_values(residual: Vec<f32>) -> Self {
        Self { residual }
    }

    /// The residual.
    pub fn values(&self) -> &[f32] {
        &self.residual
    }
}

/// The two buffers and whether `fed` holds a gradient.
#[derive(Debug)]
pub(crate) struct ErrorFeedback {
    pub(crate) residual: Vec<f32>,
    pub(crate) fed: Vec<f32>,
    /// ‖g_e‖² of what is in `fed`, None when nothing is.
    pending: Option<f64>,
}

impl ErrorFeedback {
    pub(crate) fn new(n: usize) -> Self {
        Self { residual: vec![0.0; n], fed: vec![0.0; n], pending: None }
    }

    /// Forgets a gradient that was fed and not taken.
    pub(crate) fn abandon(&mut self) {
        self.pending = None;
    }

    /// `fed` now holds gradient + residual, all finite, of this energy.
    pub(crate) fn arm(&mut self, energy: f64) {
        self.pending = Some(energy);
    }

    /// Takes the values at the selection's indices, which were read from `fed`.
    pub(crate) fn take_selected(&mut self, selection: &Selection) -> Result<(), CompressError> {
        self.pending.take().ok_or(CompressError::NotFed)?;
        for index in &selection.indices {
            self.fed[*index as usize] = 0.0;
        }
        std::mem::swap(&mut self.fed, &mut self.residual);
        Ok(())
    }

    /// Takes the values at any indices.
    pub(crate) fn take_at(&mut self, indices: &[u32], values: &mut Vec<f32>) -> Result<Energy, CompressError> {
        let fed = self.pending.ok_or(CompressError::NotFed)?;
        check_indices(indices, self.fed.len())?;
        values.clear();
        let mut sent = 0.0;
        for index in indices {
            let value = std::mem::take(&mut self.fed[*index as usize]);
            sent += f64::from(value) * f64::from(value);
            values.push(value);
        }
        self.pending = None;
        std::mem::swap(&mut self.fed, &mut self.residual);
        Ok(Energy { sent, fed })
    }

    /// Takes everything; the residual is zero afterwards.
    pub(crate) fn take_all(&mut self, out: &mut [f32]) -> Result<Energy, CompressError> {
        check_length("the output", self.fed.len(), out.len())?;
        let fed = self.pending.take().ok_or(CompressError::NotFed)?;
        out.copy_from_slice(&self.fed);
        self.residual.fill(0.0);
        Ok(Energy { sent: fed, fed })
    }

    pub(crate) fn save_into(&self, memory: &mut Memory) {
        memory.residual.clear();
        memory.residual.extend_from_slice(&self.residual);
    }

    pub(crate) fn restore(&mut self, memory: &Memory) -> Result<(), CompressError> {
        check_length("the saved memory", self.residual.len(), memory.residual.len())?;
        if let Some(index) = memory.residual.iter().position(|v| !v.is_finite()) {
            return Err(CompressError::NonFinite { index, gradient: 0.0, residual: memory.residual[index] });
        }
        self.residual.copy_from_slice(&memory.residual);
        self.pending = None;
        Ok(())
    }
}

pub(crate) fn check_length(what: &'static str, expected: usize, got: usize) -> Result<(), CompressError> {
    if expected == got { Ok(()) } else { Err(CompressError::Length { what, expected, got }) }
}
