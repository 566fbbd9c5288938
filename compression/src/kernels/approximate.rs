//! The largest magnitude, and ‖x‖² where nothing that is sent hangs on it: squares are added in f32, which takes half of the
//! time of [`super::stats`].

use super::halves::TRUSTED;
use super::portable::energy;
use super::rounding::{Squares, total};
use super::{Kernel, Work, key};
use crate::codec::Stats;

/// Values whose squares are added in f32, 16 in each of 64 sums: off by at most 2^-20 of what they add up to.
const BLOCK: usize = 1024;

/// The largest magnitude, and ‖x‖² to within 2^-20, the same on every kernel. NaN and infinity show in both.
pub(crate) fn approximate_stats(kernel: Kernel, x: &[f32]) -> Stats {
    let (mut sum, mut largest) = (0.0, 0);
    for block in x.chunks(BLOCK) {
        let mut squares = [0.0; 64];
        let (done, max) = kernel.approximate_first(block, &mut squares);
        let max = match done < block.len() {
            true => kernel.run(Approximate { x: &block[done..], squares: &mut squares }).max(max),
            false => max,
        };
        let approximate = total(&squares);
        // Squares that left the range of f32 are taken again. Zeros are common.
        sum += if TRUSTED.contains(&approximate) || max == 0 { approximate } else { energy(block) };
        largest = max.max(largest);
    }
    Stats { energy: sum, max: f32::from_bits(largest) }
}

/// Adds squares of value i to sum i modulo 64; answers the largest key.
struct Approximate<'a> {
    x: &'a [f32],
    squares: &'a mut Squares,
}

impl Work<u32> for Approximate<'_> {
    #[inline(always)]
    fn run(self) -> u32 {
        // A copy of their own, so that the loop keeps them in registers.
        let mut sums = *self.squares;
        for group in self.x.chunks(64) {
            group.iter().zip(&mut sums).for_each(|(x, sum)| *sum += x * x);
        }
        *self.squares = sums;
        self.x.iter().fold(0, |max, x| key(*x).max(max))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn it_is_about_the_energy(
            x in super::super::values::of_all_classes(3000),
            scale in prop_oneof![Just(1.0f32), Just(1e-30), Just(0.0)],
        ) {
            let x: Vec<f32> = x.into_iter().map(|x| scale * x).collect();
            let (want, first) = (super::super::stats(Kernel::Portable, &x), approximate_stats(Kernel::Portable, &x));
            prop_assert_eq!(want.is_finite(), x.iter().all(|x| x.is_finite()));
            prop_assert_eq!(first.is_finite(), want.is_finite());
            prop_assert!(!want.is_finite() || first.max == want.max);
            let near = (first.energy - want.energy).abs() <= 1e-6 * want.energy;
            prop_assert!(!want.is_finite() || near, "{} {}", first.energy, want.energy);
            for kernel in Kernel::available() {
                let seen = approximate_stats(kernel, &x);
                // The bits of a NaN hang on the order of the sum.
                prop_assert!(seen.energy.to_bits() == first.energy.to_bits() || seen.energy.is_nan() && first.energy.is_nan());
                prop_assert_eq!(seen.max.to_bits(), first.max.to_bits());
            }
        }
    }
}
