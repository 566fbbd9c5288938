//! Linear and natural dithering (BytePS; Horváth et al. 2019): |x| / norm is rounded at random to one of the two levels
//! next to it, so that the mean is x.
//!
//! `linear`: levels 0, 1/k, …, 1 (as QSGD). `natural`: levels 0, 2^(1−k), …, 1/2, 1. The norm is max |x| or ‖x‖₂ of the
//! tensor. Random numbers come from the counter, not from BytePS's generator.
//!
//! Payload: the norm, f32; k ± number of the level as `levels(⌈log2(2k+1)⌉)`, or sparse ([`Coding::Least`](super::levels::Coding)).

use super::levels::{Bucketed, Rule, Words, each};
use super::linear::{Divide, Linear, larger, smaller};
use super::scheme::{Norm, Scheme};
use crate::entry::Entry;
use crate::kernels::Rounding;
use crate::random::Stream;
use flexcomm_domain::spec::compressors;

pub(super) const ENTRY: Entry = Entry {
    info: &compressors::DITHERING,
    code: 28,
    examples: &[
        "k=4",
        "k=7,normalize=l2",
        "k=3,partition=natural",
        "k=15,partition=natural,normalize=l2",
        "k=127,partition=natural",
    ],
    build: |values, shape| {
        let norm = if values.whole(2) == 1 { Norm::Euclidean } else { Norm::Max(1.0) };
        let (k, n) = (values.whole(0) as u32, shape.values());
        match values.whole(1) {
            0 => Box::new(Bucketed::new(Scheme::<Linear>::symmetric(norm, k), n, 0)),
            _ => Box::new(Bucketed::new(Scheme::<Natural>::symmetric(norm, k), n, 0)),
        }
    },
};

/// Rounds t in [0, 1] to 0 or a power of two from 2^(1−k) to 1.
#[derive(Debug, Clone, Copy)]
struct Natural {
    divide: Divide,
    k: i32,
    lowest: i32,
    /// 2^k: what makes the lowest level 2.
    twice: f32,
    random: Stream,
}

impl Natural {
    #[inline(always)]
    fn level<const PLAIN: bool>(self, x: f32, word: u32) -> u8 {
        // Twice y, which counts lowest levels. From 1 on, adding random bits below the exponent carries into it with the
        // chance that the mantissa says; below 1, where the levels are 0 and 1, 1 + y has such a mantissa. It is the larger
        // there, and 2 y above; rounded by at most 2^-24, and its exponent is that of level 0.
        let y = smaller(self.divide.quotient::<PLAIN>(x.abs()), 1.0) * self.twice;
        let carried = larger(y, y * 0.5 + 1.0).to_bits().wrapping_add(word & 0x7f_ffff);
        let level = (carried >> 23) as i32 - 127;
        self.k.wrapping_add(if x < 0.0 { level.wrapping_neg() } else { level }) as u8
    }
}

impl Rule for Natural {
    const IS_EVEN: bool = false;

    #[inline(always)]
    fn new(norm: f32, [k, _]: [u32; 2], random: Stream) -> Self {
        let k = k as i32;
        // Exponent bits of the lowest level, 2^(1−k).
        Self { divide: Divide::by(norm), k, lowest: 128 - k, twice: 2f32.powi(k), random }
    }

    #[inline(always)]
    fn codes(self, x: &[f32], first: u32, to: (&mut [u8], &mut Words)) {
        match self.divide.is_plain() {
            true => each(x, first, (to, self.random), |x, word| self.level::<true>(x, word)),
            false => each(x, first, (to, self.random), |x, word| self.level::<false>(x, word)),
        }
    }

    #[inline(always)]
    fn relative(self, code: u8) -> f32 {
        let level = i32::from(code).wrapping_sub(self.k);
        let bits = (self.lowest.wrapping_add(level.wrapping_abs()).wrapping_sub(1) as u32) << 23;
        let magnitude = if level == 0 { 0 } else { bits };
        f32::from_bits(magnitude | (level as u32 & 0x8000_0000))
    }

    fn rounding(self) -> Option<Rounding> {
        let Self { divide, k, .. } = self;
        divide.plain().map(|scale| Rounding::Powers { scale, k })
    }
}
