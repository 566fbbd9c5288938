//! Stochastic rounding to whole multiples of a step, without bias: what QSGD, TernGrad, LPC-SVRG and linear dithering
//! do, each with a step of its own.

use super::levels::{Rule, Words, each};
use crate::kernels::Rounding;
use crate::random::Stream;

/// Division by a number as two products, of which neither overflows nor loses bits where the quotient matters.
#[derive(Debug, Clone, Copy)]
pub(super) struct Divide {
    first: f32,
    second: f32,
}

impl Divide {
    /// By 0, everything becomes 0.
    pub(super) fn by(step: f32) -> Self {
        let (small, large) = (2f32.powi(-90), 2f32.powi(90));
        let first = match step {
            0.0 => return Self { first: 0.0, second: 0.0 },
            step if step < small => 2f32.powi(100),
            step if step > large => 2f32.powi(-100),
            _ => 1.0,
        };
        Self { first, second: (1.0 / (f64::from(step) * f64::from(first))) as f32 }
    }

    /// Whether the first product changes nothing: so for all steps but the smallest and the largest.
    pub(super) fn is_plain(self) -> bool {
        self.first == 1.0
    }

    /// What alone it multiplies with, if it is plain.
    pub(super) fn plain(self) -> Option<f32> {
        self.is_plain().then_some(self.second)
    }

    /// PLAIN: [`Self::is_plain`] was asked.
    #[inline(always)]
    pub(super) fn quotient<const PLAIN: bool>(self, x: f32) -> f32 {
        if PLAIN { x * self.second } else { x * self.first * self.second }
    }
}

/// Of two that are no NaN, for which `f32::min` would take two instructions more.
#[inline(always)]
pub(super) fn smaller(a: f32, b: f32) -> f32 {
    if a < b { a } else { b }
}

/// Whether something of this chance, below 1, happens, by a random word: a number in [0, 1] of 24 bits is below it.
#[inline(always)]
pub(super) fn happens(chance: f32, word: u32) -> bool {
    // Times 2^31 on both sides, which rounds neither: the product is not what the comparison waits for.
    ((word >> 1) as i32 as f32) < chance * 2_147_483_648.0
}

/// x becomes l steps with l = ⌊x/step⌋ or one more, in the mean x/step; its code is offset + l. Beyond `low` steps below
/// and `high` steps above 0 it is clipped.
#[derive(Debug, Clone, Copy)]
pub(super) struct Linear {
    divide: Divide,
    low: f32,
    high: f32,
    offset: i32,
    random: Stream,
}

impl Linear {
    /// Levels −s to s, codes 0 to 2s.
    pub(super) fn symmetric(step: f32, s: u32, random: Stream) -> Self {
        Self { divide: Divide::by(step), low: s as f32, high: s as f32, offset: s as i32, random }
    }

    /// Levels −2^(w−1) to 2^(w−1) − 1, codes 0 to 2^w − 1.
    pub(super) fn of_bits(step: f32, w: u32, random: Stream) -> Self {
        let half = 1 << (w - 1);
        Self { divide: Divide::by(step), low: half as f32, high: (half - 1) as f32, offset: half, random }
    }
}

impl Linear {
    /// PLAIN: the division is, and both sides are clipped alike.
    #[inline(always)]
    fn level<const PLAIN: bool>(self, x: f32, word: u32) -> u8 {
        // Adding 1.5 * 2^23 leaves a whole number in the low bits.
        const WHOLE: f32 = 12_582_912.0;
        let limit = if PLAIN || x >= 0.0 { self.high } else { self.low };
        let steps = smaller(self.divide.quotient::<PLAIN>(x.abs()), limit);
        let below = steps.floor();
        let level = if happens(steps - below, word) { below + 1.0 } else { below };
        let signed = f32::from_bits(level.to_bits() | x.to_bits() & 0x8000_0000);
        // Cut off to 8 bits.
        (signed + (WHOLE + self.offset as f32)).to_bits() as u8
    }
}

impl Rule for Linear {
    #[inline(always)]
    fn codes(self, x: &[f32], first: u32, to: (&mut [u8], &mut Words)) {
        match self.divide.is_plain() && self.low == self.high {
            true => each(x, first, (to, self.random), |x, word| self.level::<true>(x, word)),
            false => each(x, first, (to, self.random), |x, word| self.level::<false>(x, word)),
        }
    }

    #[inline(always)]
    fn relative(self, code: u8) -> f32 {
        i32::from(code).wrapping_sub(self.offset) as f32
    }

    fn rounding(self) -> Option<Rounding> {
        let Self { divide, low, high, offset, .. } = self;
        divide.plain().map(|scale| Rounding::Steps { scale, low, high, offset })
    }
}
