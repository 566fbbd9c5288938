//! The quantizer of LPC-SVRG (Yu et al. 2019): a grid of step delta with w bits per value, {−2^(w−1) delta, …, −delta, 0, delta,
//! …, (2^(w−1) − 1) delta}; x in [eps, eps + delta] becomes eps with chance (eps + delta − x) / delta, else eps + delta
//! (GRACE, equation 4). Values beyond the grid are clipped to its ends.
//!
//! delta = lambda max |x| / (2^(w−1) − 1). With lambda = 1 nothing lies beyond the grid and it is unbiased; a smaller lambda
//! clips, for less variance.
//!
//! Payload: lambda max |x|, f32; grid points from the lowest on as `levels(w)`, or sparse
//! ([`Coding::Least`](super::levels::Coding)).

use super::levels::{Bucketed, Scheme, max};
use super::linear::Linear;
use crate::Kernel;
use crate::codec::Stats;
use crate::entry::Entry;
use crate::random::Stream;
use flexcomm_domain::spec::compressors;

pub(super) const ENTRY: Entry = Entry {
    info: &compressors::LPCSVRG,
    code: 26,
    examples: &["bits=2", "bits=4", "bits=8", "bits=4,lambda=0.5"],
    build: |values, shape| {
        Box::new(Bucketed::new(Grid { bits: values.whole(0) as u32, lambda: values.number(1) }, shape.values(), 0))
    },
};

#[derive(Debug, Clone, Copy)]
struct Grid {
    bits: u32,
    lambda: f64,
}

impl Scheme for Grid {
    type Rule = Linear;

    fn levels(&self) -> u64 {
        1 << self.bits
    }

    fn norm(&self, _x: &[f32], stats: Stats, _kernel: Kernel) -> f32 {
        // The lowest grid point lies one step beyond the highest: keep it finite too.
        let most = f64::from(f32::MAX) / 2.0;
        (f64::from(max(stats)) * self.lambda).min(most) as f32
    }

    fn is_of_max(&self) -> bool {
        true
    }

    fn step(&self, norm: f32) -> f32 {
        norm / ((1 << (self.bits - 1)) - 1) as f32
    }

    fn most(&self) -> f32 {
        (1 << (self.bits - 1)) as f32
    }

    fn rule(&self, norm: f32, random: Stream) -> Linear {
        Linear::of_bits(self.step(norm), self.bits, random)
    }

    fn zero(&self) -> Option<u8> {
        Some(1 << (self.bits - 1))
    }
}
