//! What quantizers with a norm per bucket differ in: how many levels there are on either side of 0, and what the norm is.

use super::levels::Rule;
use crate::Kernel;
use crate::codec::Stats;
use crate::kernels::Work;
use crate::random::Stream;
use std::marker::PhantomData;

/// The largest norm: a multiple of norm / s that rounds up must still be finite. What is larger is clipped to it.
pub(super) const LARGEST_NORM: f64 = 3.4e38;

/// How far, over its square, the mean of squares of a constant tensor may be from it; the kernels for GPUs have the same.
const ROUNDING: f64 = 1e-9;

/// max |x| as it is sent.
pub(super) fn max(stats: Stats) -> f32 {
    stats.max.min(LARGEST_NORM as f32)
}

/// What is sent of a bucket: at least 0, finite.
#[derive(Debug, Clone, Copy)]
pub(super) enum Norm {
    /// ‖x‖₂.
    Euclidean,
    /// This share of max |x|.
    Max(f64),
    /// max |x|, but at most so many standard deviations.
    Clipped(f64),
}

impl Norm {
    fn of(self, x: &[f32], stats: Stats, kernel: Kernel) -> f32 {
        let max = max(stats);
        match self {
            // Not below max |x|, although it is rounded.
            Self::Euclidean => (stats.norm().min(LARGEST_NORM) as f32).max(max),
            Self::Max(share) => (f64::from(max) * share) as f32,
            Self::Clipped(_) if x.is_empty() => max,
            Self::Clipped(deviations) => {
                let n = x.len() as f64;
                let mean = kernel.run(Sum(x)) / n;
                let variance = stats.energy / n - mean * mean;
                // A constant tensor has no deviation, and nothing of it stands out; what is left of one is the rounding of
                // two sums.
                match variance > ROUNDING * mean * mean {
                    true => max.min((deviations * variance.sqrt()).min(LARGEST_NORM) as f32),
                    false => max,
                }
            }
        }
    }
}

/// A quantizer with one norm per bucket, which rounds by R.
#[derive(Debug, Clone, Copy)]
pub(super) struct Scheme<R> {
    norm: Norm,
    /// The largest norm.
    limit: f32,
    /// Levels below 0, none where no code means 0; and above.
    below: u32,
    above: u32,
    rule: PhantomData<R>,
}

impl<R: Rule> Scheme<R> {
    pub(super) fn new((norm, limit): (Norm, f32), [below, above]: [u32; 2]) -> Self {
        Self { norm, limit, below, above, rule: PhantomData }
    }

    /// s levels on either side of 0.
    pub(super) fn symmetric(norm: Norm, s: u32) -> Self {
        Self::new((norm, f32::MAX), [s, s])
    }

    /// Different codes.
    pub(super) fn levels(&self) -> u64 {
        u64::from(self.below + self.above) + 1
    }

    /// What is sent of a bucket.
    pub(super) fn norm(&self, x: &[f32], stats: Stats, kernel: Kernel) -> f32 {
        self.norm.of(x, stats, kernel).min(self.limit)
    }

    /// Whether max |x| alone makes the norm.
    pub(super) fn is_of_max(&self) -> bool {
        matches!(self.norm, Norm::Max(_))
    }

    /// What relative values are multiples of.
    pub(super) fn step(&self, norm: f32) -> f32 {
        if R::IS_EVEN { norm / self.above as f32 } else { norm }
    }

    /// The largest magnitude of a relative value.
    pub(super) fn most(&self) -> f32 {
        if R::IS_EVEN { self.below as f32 } else { 1.0 }
    }

    /// The rule for a bucket of this norm.
    pub(super) fn rule(&self, norm: f32, random: Stream) -> R {
        R::new(self.step(norm), [self.below, self.above], random)
    }

    /// The code of 0, where there is one.
    pub(super) fn zero(&self) -> Option<u8> {
        (self.below > 0).then_some(self.below as u8)
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
