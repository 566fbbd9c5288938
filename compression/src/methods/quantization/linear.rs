//! Stochastic rounding to whole multiples of a step, without bias: what QSGD, TernGrad, LPC-SVRG and linear dithering
//! do, each with a step of its own.

use super::levels::Rule;
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

    #[inline(always)]
    pub(super) fn quotient(self, x: f32) -> f32 {
        x * self.first * self.second
    }
}

/// A number in [0, 1], whose chance to be below p is p, to 2^-31.
#[inline(always)]
pub(super) fn chance(random: Stream, i: u32) -> f32 {
    (random.word(i) >> 1) as i32 as f32 * (1.0 / 2_147_483_648.0)
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

impl Rule for Linear {
    #[inline(always)]
    fn code(self, x: f32, i: u32) -> u8 {
        // Adding 2^23 leaves the nearest whole number in the low bits, on every processor.
        const WHOLE: f32 = 8_388_608.0;
        let limit = if x < 0.0 { self.low } else { self.high };
        let steps = self.divide.quotient(x.abs()).min(limit);
        let shifted = steps + WHOLE;
        let nearest = shifted - WHOLE;
        let over = i32::from(nearest > steps);
        let part = steps - (nearest - over as f32);
        let up = i32::from(chance(self.random, i) < part);
        // Wrapping: a check for overflow, as debug builds have it, would keep the loop from becoming vectors.
        let level = ((shifted.to_bits() & 0xff) as i32).wrapping_sub(over).wrapping_add(up);
        self.offset.wrapping_add(if x < 0.0 { level.wrapping_neg() } else { level }) as u8
    }

    #[inline(always)]
    fn relative(self, code: u8) -> f32 {
        i32::from(code).wrapping_sub(self.offset) as f32
    }
}
