//! TernGrad (Wen et al. 2017): max |x| sign(x) b with b = 1 at a chance of |x| / max |x|, else 0 (equation 2), per layer
//! (section 4, layer-wise ternarizing).
//!
//! Without clipping it is unbiased. `clip=c` first brings values beyond c standard deviations to ±cσ (section 4,
//! gradient clipping; the paper takes c = 2.5): the variance falls, but the mean of what is sent is then the clipped
//! value, not x. That bias is a known mistake of implementations that clip unasked.
//!
//! Payload: max |x| after clipping, f32; −1, 0, 1 as 0, 1, 2 in `levels(2)`, or sparse
//! ([`Coding::Least`](super::levels::Coding)).

use super::levels::{Bucketed, LARGEST_NORM, Scheme, max};
use super::linear::Linear;
use crate::Kernel;
use crate::codec::Stats;
use crate::entry::Entry;
use crate::kernels::Work;
use crate::random::Stream;
use flexcomm_domain::spec::compressors;

pub(super) const ENTRY: Entry = Entry {
    info: &compressors::TERNGRAD,
    code: 29,
    examples: &["", "clip=2.5", "clip=0.5"],
    build: |values, shape| Box::new(Bucketed::new(Ternary { clip: values.number(0) }, shape.values(), 0)),
};

/// How far, over its square, the mean of squares of a constant tensor may be from it; the kernels for GPUs have the same.
const ROUNDING: f64 = 1e-9;

#[derive(Debug, Clone, Copy)]
struct Ternary {
    clip: f64,
}

impl Scheme for Ternary {
    type Rule = Linear;

    fn levels(&self) -> u64 {
        3
    }

    fn norm(&self, x: &[f32], stats: Stats, kernel: Kernel) -> f32 {
        if self.clip == 0.0 || x.is_empty() {
            return max(stats);
        }
        let n = x.len() as f64;
        let mean = kernel.run(Sum(x)) / n;
        let variance = stats.energy / n - mean * mean;
        // A constant tensor has no deviation, and nothing of it stands out; what is left of one is the rounding of two sums.
        match variance > ROUNDING * mean * mean {
            true => max(stats).min((self.clip * variance.sqrt()).min(LARGEST_NORM) as f32),
            false => max(stats),
        }
    }

    fn is_of_max(&self) -> bool {
        self.clip == 0.0
    }

    fn step(&self, norm: f32) -> f32 {
        norm
    }

    fn most(&self) -> f32 {
        1.0
    }

    fn rule(&self, norm: f32, random: Stream) -> Linear {
        Linear::symmetric(norm, 1, random)
    }

    fn zero(&self) -> Option<u8> {
        Some(1)
    }
}

/// Σ x in eight sums.
struct Sum<'a>(&'a [f32]);

impl Work<f64> for Sum<'_> {
    #[inline(always)]
    fn run(self) -> f64 {
        let (groups, rest) = self.0.as_chunks::<8>();
        let mut sums = [0.0f64; 8];
        for group in groups {
            sums.iter_mut().zip(group).for_each(|(sum, x)| *sum += f64::from(*x));
        }
        sums.iter().sum::<f64>() + rest.iter().map(|x| f64::from(*x)).sum::<f64>()
    }
}
