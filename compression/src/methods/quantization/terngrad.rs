//! TernGrad (Wen et al. 2017): max |x| sign(x) b with b = 1 at a chance of |x| / max |x|, else 0 (equation 2), per layer
//! (section 4, layer-wise ternarizing).
//!
//! Without clipping it is unbiased. `clip=c` first brings values beyond c standard deviations to ±cσ (section 4,
//! gradient clipping; the paper takes c = 2.5): the variance falls, but the mean of what is sent is then the clipped
//! value, not x. That bias is a known mistake of implementations that clip unasked.
//!
//! Payload: max |x| after clipping, f32; −1, 0, 1 as 0, 1, 2 in `levels(2)`, or sparse
//! ([`Coding::Least`](super::levels::Coding)).

use super::levels::Bucketed;
use super::linear::Linear;
use super::scheme::{Norm, Scheme};
use crate::entry::Entry;
use flexcomm_domain::spec::compressors;

pub(super) const ENTRY: Entry = Entry {
    info: &compressors::TERNGRAD,
    code: 29,
    examples: &["", "clip=2.5", "clip=0.5"],
    build: |values, shape| {
        let norm = if values.number(0) == 0.0 { Norm::Max(1.0) } else { Norm::Clipped(values.number(0)) };
        Box::new(Bucketed::new(Scheme::<Linear>::symmetric(norm, 1), shape.values(), 0))
    },
};
