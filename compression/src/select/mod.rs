//! How values are selected: one file per compressor. All answer exactly `Method::kept` indices, ascending.

pub(crate) mod cut;
mod layerwise;
pub(crate) mod mstopk;
pub mod naive;
mod none;
pub(crate) mod sieve;
pub(crate) mod topk;

use crate::Compressor;
use crate::feedback::CompressError;
use crate::kernels::{Added, Candidates, Feed, Kernel, NOT_FINITE};
use crate::{Layers, Selection};
use flexcomm_domain::CompressionRatio;
use std::ops::Range;

/// A compressor that selects values. It runs the pass over the gradient itself, since what it wants from it differs.
pub(crate) trait Select: Sync {
    /// Fills `pass.fed` and `pass.selection`; answers ‖g_e‖².
    fn select(&self, cr: CompressionRatio, pass: &mut Pass<'_>) -> Result<f64, CompressError>;
}

/// The selecting half of a compressor.
pub(crate) fn of(compressor: Compressor) -> &'static dyn Select {
    match compressor {
        Compressor::None => &none::None,
        Compressor::TopK => &topk::TopK,
        Compressor::LwTopK => &layerwise::LayerwiseTopK,
        Compressor::MsTopK => &mstopk::MsTopK,
    }
}

/// Buffers that selections share and keep.
#[derive(Debug, Default)]
pub(crate) struct Scratch {
    pub(crate) found: Candidates,
    pub(crate) sample: Vec<u32>,
    pub(crate) cutter: cut::Cutter,
}

/// One step's input and output.
pub(crate) struct Pass<'a> {
    pub(crate) kernel: Kernel,
    pub(crate) layers: &'a Layers,
    pub(crate) gradient: &'a [f32],
    pub(crate) residual: &'a [f32],
    /// Becomes gradient + residual.
    pub(crate) fed: &'a mut [f32],
    pub(crate) scratch: &'a mut Scratch,
    pub(crate) selection: &'a mut Selection,
    pub(crate) seed: u64,
}

/// What the pass over a part of the gradient found.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Part {
    pub(crate) energy: f64,
    pub(crate) max_key: u32,
}

impl Pass<'_> {
    /// Error feedback over the whole gradient; answers ‖g_e‖².
    pub(crate) fn feed_all(&mut self) -> Result<f64, CompressError> {
        Ok(self.feed(0..self.gradient.len(), None)?.energy)
    }

    /// Error feedback over a part; keys from `floor` on become candidates in `scratch.found`, by position in the part.
    pub(crate) fn feed(&mut self, range: Range<usize>, floor: Option<u32>) -> Result<Part, CompressError> {
        let (residual, fed) = (&self.residual[range.clone()], &mut self.fed[range.clone()]);
        let added = Some(Added { residual, beta: 1.0, gamma: 1.0, fed });
        let feed = Feed { gradient: &self.gradient[range.clone()], added, floor };
        let fed = self.kernel.feed(feed, &mut self.scratch.found);
        if fed.max_key >= NOT_FINITE {
            return Err(self.not_finite(range));
        }
        Ok(Part { energy: fed.energy, max_key: fed.max_key })
    }

    #[cold]
    fn not_finite(&self, range: Range<usize>) -> CompressError {
        let index = range.clone().find(|i| !self.fed[*i].is_finite()).unwrap_or(range.start);
        CompressError::NonFinite { index, gradient: self.gradient[index], residual: self.residual[index] }
    }
}
