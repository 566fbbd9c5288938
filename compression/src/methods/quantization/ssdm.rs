//! SSDM's stochastic sign (Safaryan and Richtárik 2021): +1 with chance 1/2 + x / (2 ‖x‖₂), else −1, times ‖x‖₂ of the
//! tensor, so that the mean is x. (Marsit's text leaves the second 2 out; its appendix, with E sign = x / ‖x‖, needs it.)
//!
//! Payload: ‖x‖₂, f32; signs. A tensor of zeros has norm 0, and zeros are what is decoded.

use super::levels::{Bucketed, Rule, Words, each};
use super::linear::{Divide, smaller};
use super::scheme::{Norm, Scheme};
use crate::entry::Entry;
use crate::kernels::Rounding;
use crate::random::Stream;
use flexcomm_domain::spec::compressors;

pub(super) const ENTRY: Entry = Entry {
    info: &compressors::SSDM,
    code: 24,
    examples: &[""],
    build: |_, shape| {
        // A residual x − C(x) of the other sign must be finite. Beyond that norm a sign is sure.
        let norm = (Norm::Euclidean, f32::MAX / 2.0);
        Box::new(Bucketed::new(Scheme::<Draw>::new(norm, [0, 1]), shape.values(), 0))
    },
};

/// Parts of a norm.
const WHOLE: f32 = 2_147_483_648.0;

#[derive(Debug, Clone, Copy)]
struct Draw {
    divide: Divide,
    random: Stream,
}

impl Draw {
    #[inline(always)]
    fn sign<const PLAIN: bool>(self, x: f32, word: u32) -> u8 {
        // A number in [−1, 1): below t with chance (1 + t) / 2. Rounding may reach 1; at t = 1 the sign must be sure.
        // All of it times 2^31.
        u8::from(smaller(word as i32 as f32, 0.999_999_9 * WHOLE) >= self.divide.quotient::<PLAIN>(x))
    }
}

impl Rule for Draw {
    const IS_EVEN: bool = false;

    #[inline(always)]
    fn new(norm: f32, _: [u32; 2], random: Stream) -> Self {
        Self { divide: Divide::by(norm).in_parts(WHOLE), random }
    }

    #[inline(always)]
    fn codes(self, x: &[f32], first: u32, to: (&mut [u8], &mut Words)) {
        match self.divide.is_plain() {
            true => each(x, first, (to, self.random), |x, word| self.sign::<true>(x, word)),
            false => each(x, first, (to, self.random), |x, word| self.sign::<false>(x, word)),
        }
    }

    #[inline(always)]
    fn relative(self, code: u8) -> f32 {
        1.0 - 2.0 * f32::from(code)
    }

    fn rounding(self) -> Option<Rounding> {
        self.divide.plain().map(|scale| Rounding::Signs { scale })
    }
}
