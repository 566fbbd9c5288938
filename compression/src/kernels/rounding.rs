//! Rounding at random that kernels with vectors do at once: words drawn, levels, codes and squares, all in vectors. By
//! definition it is what the rules of `methods/quantization` do with one value after the other; they do what is left.

use super::Kernel;
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
    Steps {
        /// Parts of a step per unit, 2^bits in each step.
        scale: f32,
        /// In parts.
        low: f32,
        high: f32,
        bits: u32,
        offset: i32,
    },
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

/// Values, the number of the first in the tensor, where their codes go, and room for words.
pub(crate) struct Rounded<'a> {
    pub(crate) random: Stream,
    pub(crate) x: &'a [f32],
    pub(crate) first: u32,
    pub(crate) codes: &'a mut [u8],
    pub(crate) words: &'a mut Words,
}

/// How many values vectors can look up at once.
pub(crate) const TABLED: usize = 32;

/// Random words that were drawn: a buffer that is kept, since clearing one would cost as much as some values. Vectors of it
/// lie in one line of the cache each.
#[derive(Debug, Clone, Copy)]
#[repr(align(64))]
pub(crate) struct Words([[u32; 32]; 16]);

impl Words {
    /// Before any was drawn.
    pub(crate) const NONE: Self = Self([[0; 32]; 16]);

    /// How many there is room for, of those from number `first` on.
    #[inline(always)]
    pub(crate) fn room(first: u32) -> usize {
        512 - first as usize % 32
    }

    /// Words of numbers from `first` on, at least `count` of them, drawn by a function that fills groups of 32 from group
    /// `first` / 32 on. At most [`Self::room`].
    #[inline(always)]
    pub(crate) fn draw(&mut self, first: u32, count: usize, fill: impl FnOnce(u32, &mut [[u32; 32]])) -> &[u32] {
        let skipped = first as usize % 32;
        let groups = &mut self.0[..(skipped + count).div_ceil(32)];
        fill(first / 32, groups);
        &groups.as_flattened()[skipped..]
    }
}

impl Rounded<'_> {
    /// The values from `done` on.
    pub(crate) fn part(&mut self, done: usize) -> Rounded<'_> {
        let Self { random, x, first, codes, words } = self;
        let first = first.wrapping_add(done as u32);
        Rounded { random: *random, x: &x[done..], first, codes: &mut codes[done..], words }
    }
}

impl Kernel {
    /// Codes of the first values and their squares in steps or norms; answers of how many, a multiple of 64. None where this kernel
    /// has no such vectors.
    pub(crate) fn round(self, rounding: Rounding, values: Rounded<'_>, squares: &mut Squares) -> usize {
        match self {
            #[cfg(target_arch = "x86_64")]
            Self::Avx512 => super::x86::round_avx512(rounding, values, squares),
            _ => {
                let _ = (rounding, values, squares);
                0
            }
        }
    }

    /// Natural compression (`natural.rs`) of the first values: exponents into [`Rounded::codes`], signs, and squares of what they
    /// stand for times `scale`; answers of how many, a multiple of 64.
    pub(crate) fn round_to_powers(
        self,
        values: Rounded<'_>,
        signs: &mut [u8],
        (scale, squares): (f32, &mut Squares),
    ) -> usize {
        match self {
            #[cfg(target_arch = "x86_64")]
            Self::Avx512 => super::x86::round_to_powers_avx512(values, signs, (scale, squares)),
            _ => {
                let _ = (values, signs, scale, squares);
                0
            }
        }
    }

    /// `out += scale * ±2^(exponent − 127)` of the first values; answers how many, a multiple of 8.
    pub(crate) fn add_powers(self, exponents: &[u8], signs: &[u8], target: (f32, &mut [f32])) -> usize {
        match self {
            #[cfg(target_arch = "x86_64")]
            Self::Avx512 => super::x86::add_powers_avx512(exponents, signs, target),
            _ => {
                let _ = (exponents, signs, target);
                0
            }
        }
    }

    /// `out += values[code]`, where it is FRESH to zeros, of the first codes, all below [`TABLED`]; answers of how many.
    pub(crate) fn add_codes<const FRESH: bool>(self, codes: &[u8], values: &[f32; TABLED], out: &mut [f32]) -> usize {
        match self {
            #[cfg(target_arch = "x86_64")]
            Self::Avx512 => super::x86::add_codes_avx512::<FRESH>(codes, values, out),
            _ => {
                let _ = (codes, values, out);
                0
            }
        }
    }

    /// Packs the first codes below 2^width; answers how many, a multiple of 64.
    pub(crate) fn pack_first(self, codes: &[u8], width: u32, out: &mut [u8]) -> usize {
        match self {
            #[cfg(target_arch = "x86_64")]
            Self::Avx512 => super::x86::pack_avx512(codes, width, out),
            _ => 0,
        }
    }

    /// Unpacks the first codes; answers how many, a multiple of 64, and the largest.
    pub(crate) fn unpack_first(self, packed: &[u8], width: u32, codes: &mut [u8]) -> (usize, u8) {
        match self {
            #[cfg(target_arch = "x86_64")]
            Self::Avx512 => super::x86::unpack_avx512(packed, width, codes),
            _ => (0, 0),
        }
    }
}
