//! Nothing is left out.

use super::{Pass, Select};
use crate::feedback::CompressError;
use flexcomm_domain::CompressionRatio;

pub(super) struct None;

impl Select for None {
    fn select(&self, _cr: CompressionRatio, pass: &mut Pass<'_>) -> Result<f64, CompressError> {
        let energy = pass.feed_all()?;
        push_range(pass, 0..pass.gradient.len());
        Ok(energy)
    }
}

/// Selects all of a part that was fed.
pub(super) fn push_range(pass: &mut Pass<'_>, range: std::ops::Range<usize>) {
    // Positions fit u32: Layers sees to it.
    pass.selection.indices.extend(range.start as u32..range.end as u32);
    pass.selection.values.extend_from_slice(&pass.fed[range]);
}
