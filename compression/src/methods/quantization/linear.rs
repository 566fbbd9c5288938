//! Stochastic rounding to whole multiples of a step, without bias: what QSGD, TernGrad, LPC-SVRG and linear dithering
//! do, each with a step of its own.

use super::levels::{Rule, Words, each};
use crate::kernels::{Rounding, Steps};
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
            0.0 => return Self { first: 1.0, second: 0.0 },
            step if step < small => 2f32.powi(100),
            step if step > large => 2f32.powi(-100),
            _ => 1.0,
        };
        Self { first, second: (1.0 / (f64::from(step) * f64::from(first))) as f32 }
    }

    /// So many parts in each of what is divided by.
    pub(super) fn in_parts(self, parts: f32) -> Self {
        Self { second: self.second * parts, ..self }
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

/// The larger, likewise.
#[inline(always)]
pub(super) fn larger(a: f32, b: f32) -> f32 {
    if a > b { a } else { b }
}

/// x becomes l steps with l = ⌊x/step⌋ or one more, in the mean x/step; its code is offset + l. Beyond `low` steps below
/// and `high` steps above 0 it is clipped.
///
/// A step has 2^24 parts. x is cut to whole parts, a number from 0 to 2^24 − 1 is drawn and added, and whole steps are what is
/// left: x/step in the mean, but for what was cut off, less than 2^-24 of a step. All parts of all levels, and one step of
/// them more, fit an i32.
#[derive(Debug, Clone, Copy)]
pub(super) struct Linear {
    divide: Divide,
    /// In parts.
    low: f32,
    high: f32,
    offset: i32,
    random: Stream,
}

/// In each step.
const PARTS: u32 = 1 << 24;

impl Linear {
    #[inline(always)]
    fn level<const PLAIN: bool>(self, x: f32, word: u32) -> u8 {
        let parts = larger(smaller(self.divide.quotient::<PLAIN>(x), self.high), -self.low) as i32;
        let drawn = (word & (PARTS - 1)) as i32;
        (parts.wrapping_add(drawn) >> PARTS.trailing_zeros()).wrapping_add(self.offset) as u8
    }
}

impl Rule for Linear {
    const IS_EVEN: bool = true;

    /// `high` is at most 127, and `low` at most one more.
    #[inline(always)]
    fn new(step: f32, [low, high]: [u32; 2], random: Stream) -> Self {
        let (divide, offset) = (Divide::by(step).in_parts(PARTS as f32), low as i32);
        Self { divide, low: low as f32 * PARTS as f32, high: high as f32 * PARTS as f32, offset, random }
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
        i32::from(code).wrapping_sub(self.offset) as f32
    }

    fn rounding(self) -> Option<Rounding> {
        let Self { divide, low, high, offset, .. } = self;
        divide.plain().map(|scale| Rounding::Steps(Steps { scale, low, high, offset }))
    }
}
