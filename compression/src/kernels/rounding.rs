//! Rounding at random that kernels with vectors do at once: words drawn, levels, codes and squares, all in vectors. By
//! definition it is what the rules of `methods/quantization` do with one value after the other; they do what is left.

use crate::random::Stream;

/// Sums of squares side by side: value i of a piece is added to sum i modulo 64.
pub(crate) type Squares = [f32; 64];

/// Their sum, i modulo 8 first: a chain of 64 would take as long as rounding some values. Of whole numbers it is exact,
/// whatever the order: at most 4096 squares of at most 2^14.
pub(crate) fn total(squares: &Squares) -> f64 {
    let mut sums = [0.0; 8];
    for group in squares.as_chunks::<8>().0 {
        sums.iter_mut().zip(group).for_each(|(sum, square)| *sum += f64::from(*square));
    }
    sums.iter().sum()
}

/// A rule of `methods/quantization` with a division that one product does.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Rounding {
    /// To whole steps: from −low to high of them. A code is offset + steps.
    Steps(Steps),
    /// To 0 and powers of two of a norm, ± levels above k.
    Powers {
        /// Norms per unit.
        scale: f32,
        k: i32,
    },
    /// To ±1: a code is 1 for −1.
    Signs {
        /// 2^-31 of a norm per unit.
        scale: f32,
    },
}

/// Whole steps, of 2^24 parts each.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Steps {
    /// Parts per unit.
    pub(crate) scale: f32,
    /// In parts.
    pub(crate) low: f32,
    pub(crate) high: f32,
    pub(crate) offset: i32,
}

impl Steps {
    pub(crate) const NONE: Self = Self { scale: 0.0, low: 0.0, high: 0.0, offset: 0 };
}

/// Values, the number of the first in the tensor, where their codes go, and room for words.
pub(crate) struct Rounded<'a> {
    pub(crate) random: Stream,
    pub(crate) x: &'a [f32],
    pub(crate) first: u32,
    /// Bits of a code, which follow one another without gaps.
    pub(crate) width: u32,
    pub(crate) codes: &'a mut [u8],
    pub(crate) words: &'a mut Words,
}

/// How many values vectors can look up at once.
pub(crate) const TABLED: usize = 32;

/// Random words that were drawn: a buffer that is kept, since clearing one would cost as much as some values. Vectors of it
/// lie in one line of the cache each.
#[derive(Debug, Clone, Copy)]
#[repr(align(64))]
pub(crate) struct Words([[u32; 64]; 8]);

impl Words {
    /// Before any was drawn.
    pub(crate) const NONE: Self = Self([[0; 64]; 8]);

    /// How many there is room for, of those from number `first` on.
    #[inline(always)]
    pub(crate) fn room(first: u32) -> usize {
        512 - first as usize % 64
    }

    /// Words of numbers from `first` on, at least `count` of them, drawn by a function that fills groups of 64 from group
    /// `first` / 64 on. At most [`Self::room`].
    #[inline(always)]
    pub(crate) fn draw(&mut self, first: u32, count: usize, fill: impl FnOnce(u32, &mut [[u32; 64]])) -> &[u32] {
        let skipped = first as usize % 64;
        let groups = &mut self.0[..(skipped + count).div_ceil(64)];
        fill(first / 64, groups);
        &groups.as_flattened()[skipped..]
    }
}

impl Rounded<'_> {
    /// The values from `done` on.
    pub(crate) fn part(&mut self, done: usize) -> Rounded<'_> {
        let Self { random, x, first, width, codes, words } = self;
        let first = first.wrapping_add(done as u32);
        let codes = &mut codes[done / 8 * *width as usize..];
        Rounded { random: *random, x: &x[done..], first, width: *width, codes, words }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Kernel;
    use proptest::prelude::*;

    proptest! {
        /// Codes by the definition and what their squares add up to, from the lowest level that a byte holds to the highest.
        #[test]
        fn steps_and_their_squares_are_those_of_the_definition(
            x in prop::collection::vec(-2.0f32..2.0, 64..300),
            (low, high) in prop_oneof![Just((128u32, 127u32)), Just((127, 127)), Just((4, 4)), Just((8, 7))],
            group in 0u32..1 << 20,
        ) {
            let (parts, random, first) = (16_777_216.0f32, Stream::new(3, [0; 4]), 64 * group);
            let steps = Steps {
                scale: high as f32 * parts,
                low: low as f32 * parts,
                high: high as f32 * parts,
                offset: low as i32,
            };
            let level = |(i, x): (usize, &f32)| {
                let cut = (x * steps.scale).min(steps.high).max(-steps.low) as i64;
                (cut + i64::from(random.fourth(first + i as u32) & 0xff_ffff)) >> 24
            };
            let want: Vec<i64> = x.iter().enumerate().map(level).collect();
            for kernel in Kernel::available() {
                let (mut codes, mut words) = (vec![0; x.len()], Words::NONE);
                let values = Rounded { random, x: &x, first, width: 8, codes: &mut codes, words: &mut words };
                let (done, whole) = kernel.round(Rounding::Steps(steps), values, &mut [0.0; 64]);
                // Both kernels with vectors that are available have these: only the portable one leaves all to plain loops.
                let vectors = if kernel == Kernel::Portable { 0 } else { x.len() / 64 * 64 };
                prop_assert_eq!(done, vectors, "{:?}", kernel);
                let squares: i64 = want[..done].iter().map(|level| level * level).sum();
                prop_assert_eq!(whole.unwrap_or(0), squares as u64, "{:?}", kernel);
                let levels: Vec<i64> = codes[..done].iter().map(|code| i64::from(*code) - i64::from(low)).collect();
                prop_assert_eq!(&levels[..], &want[..done], "{:?}", kernel);
            }
        }
    }
}
