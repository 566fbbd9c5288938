//! The quantizer of LPC-SVRG (Yu et al. 2019): a grid of step delta with w bits per value, {−2^(w−1) delta, …, −delta, 0, delta,
//! …, (2^(w−1) − 1) delta}; x in [eps, eps + delta] becomes eps with chance (eps + delta − x) / delta, else eps + delta
//! (GRACE, equation 4). Values beyond the grid are clipped to its ends.
//!
//! delta = lambda max |x| / (2^(w−1) − 1). With lambda = 1 nothing lies beyond the grid and it is unbiased; a smaller lambda
//! clips, for less variance.
//!
//! Payload: lambda max |x|, f32; grid points from the lowest on as `levels(w)`, or sparse
//! ([`Coding::Least`](super::levels::Coding)).

use super::levels::Bucketed;
use super::linear::Linear;
use super::scheme::{Norm, Scheme};
use crate::entry::Entry;
use flexcomm_domain::spec::compressors;

pub(super) const ENTRY: Entry = Entry {
    info: &compressors::LPCSVRG,
    code: 26,
    examples: &["bits=2", "bits=4", "bits=8", "bits=4,lambda=0.5"],
    build: |values, shape| {
        let highest = (1 << (values.whole(0) - 1)) - 1;
        // The lowest grid point lies one step beyond the highest: keep it finite too.
        let norm = (Norm::Max(values.number(1)), f32::MAX / 2.0);
        Box::new(Bucketed::new(Scheme::<Linear>::new(norm, [highest + 1, highest]), shape.values(), 0))
    },
};
