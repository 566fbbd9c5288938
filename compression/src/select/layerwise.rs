//! LWTopk: exact top-k in each layer by itself.

use super::topk::top_k_of;
use super::{Pass, Select};
use crate::feedback::CompressError;
use flexcomm_domain::CompressionRatio;

pub(super) struct LayerwiseTopK;

impl Select for LayerwiseTopK {
    fn select(&self, cr: CompressionRatio, pass: &mut Pass<'_>) -> Result<f64, CompressError> {
        let layers = pass.layers;
        let mut energy = 0.0;
        for range in layers.ranges() {
            let k = cr.keep(range.len());
            energy += top_k_of(pass, range, k)?;
        }
        Ok(energy)
    }
}
