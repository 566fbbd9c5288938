//! Natural compression (Horváth et al. 2019, definition 1): each value becomes one of the two powers of two next to it, with
//! its sign, drawn so that the mean is x; 0 stays 0. 9 bits per value; E ‖C(x) − x‖² ≤ ‖x‖² / 8.
//!
//! Adding random bits to the mantissa carries into the exponent with just that chance. Below 2^-126 the neighbours are 0
//! and 2^-126, so that all has an exponent of 8 bits; above 2^127, where the upper neighbour is no f32, it is the lower
//! one, always: only there it is biased.
//!
//! Payload: signs; n exponents of binary32 (biased by 127; 0 means 0, at most 254) in a byte each.

use super::levels::{BLOCK, Words, add_squares, check_padding, each, total};
use crate::codec::{Codec, Context, EncodeError, ReadError, Size, Target};
use crate::entry::Entry;
use crate::kernels::{Pack, Rounded, Squares, Work};
use crate::wire::{Reader, Writer, packed_bytes};
use crate::{Energy, Kernel};
use flexcomm_domain::spec::compressors;

pub(super) const ENTRY: Entry = Entry {
    info: &compressors::NATURAL,
    code: 27,
    examples: &[""],
    build: |_, shape| Box::new(Natural::new(shape.values())),
};

#[derive(Debug)]
struct Natural {
    n: usize,
    words: Box<Words>,
    /// A block's.
    exponents: Box<[u8; BLOCK]>,
}

impl Natural {
    fn new(n: usize) -> Self {
        Self { n, words: Box::new(Words::NONE), exponents: Box::new([0; BLOCK]) }
    }
}

impl Codec for Natural {
    fn encode(&mut self, x: &[f32], context: &Context, out: &mut Writer) -> Result<Energy, EncodeError> {
        let stats = context.approximate_stats(x)?;
        let (scale, random, mut sent) = (scale(stats.max), context.own(0), 0.0);
        let (mut at, mut signs) = (out.len(), [0; BLOCK / 8]);
        out.reserve(self.size().most());
        out.room(packed_bytes(x.len(), 1));
        for (i, x) in x.chunks(BLOCK).enumerate() {
            let (signs, exponents) = (&mut signs[..packed_bytes(x.len(), 1)], &mut self.exponents[..x.len()]);
            let values =
                Rounded { random, x, first: (i * BLOCK) as u32, width: 8, codes: exponents, words: &mut self.words };
            sent += block(values, signs, (context.kernel, scale));
            // What is appended needs no room that is zeroed first.
            out.set(at, signs);
            out.raw(exponents);
            at += signs.len();
        }
        let unit = 1.0 / f64::from(scale);
        Ok(Energy { sent: sent * unit * unit, compensated: stats.energy })
    }

    fn decode(&mut self, from: &mut Reader<'_>, context: &Context, target: Target<'_>) -> Result<(), ReadError> {
        let Target { scale, out, fresh } = target;
        let signs = from.take("signs", packed_bytes(out.len(), 1))?;
        check_padding("signs", signs, out.len())?;
        let exponents = from.take("exponents", out.len())?;
        let most = context.kernel.run(Most(exponents));
        if !(f32::from_bits(u32::from(most) << 23) * scale).is_finite() {
            return Err(ReadError::field("exponent", most, "the value must be finite"));
        }
        let blocks = out.chunks_mut(BLOCK).zip(exponents.chunks(BLOCK)).zip(signs.chunks(BLOCK / 8));
        for ((out, exponents), signs) in blocks {
            // Block by block, while they are in the first-level cache.
            if fresh {
                out.fill(0.0);
            }
            let done = context.kernel.add_powers(exponents, signs, (scale, &mut *out));
            if done < out.len() {
                let (signs, exponents, out) = (&signs[done / 8..], &exponents[done..], &mut out[done..]);
                context.kernel.run(Add { signs, exponents, scale, out });
            }
        }
        Ok(())
    }

    fn size(&self) -> Size {
        Size::Exact(packed_bytes(self.n, 1) + self.n)
    }
}

/// A power of two that brings values of at most `max` below 2^59, and so rounded ones to 2^59 at most: 64 of their squares stay
/// within f32.
fn scale(max: f32) -> f32 {
    let exponent = (max.to_bits() >> 23) as i32 - 127;
    2f32.powi((58 - exponent).min(127))
}

/// Of values of 2^127 and more.
const LEAST_SCALE: f32 = 1.0 / (1u128 << 69) as f32;

/// Signs and exponents of a block: at once as far as the kernel can, and the rest one after the other; answers Σ (scale C(x))².
fn block(mut values: Rounded<'_>, signs: &mut [u8], (kernel, scale): (Kernel, f32)) -> f64 {
    let mut squares = [0.0; 64];
    // Vectors leave it to others to keep exponents below that of infinity.
    let done = match scale > LEAST_SCALE {
        true => kernel.round_to_powers(values.part(0), signs, (scale, &mut squares)),
        false => 0,
    };
    if done < values.x.len() {
        let values = values.part(done);
        kernel.run(Round { values, signs: &mut signs[done / 8..], scale, squares: &mut squares });
    }
    total(&squares)
}

/// Signs and exponents, and squares of what these stand for times `scale`.
struct Round<'a> {
    values: Rounded<'a>,
    signs: &'a mut [u8],
    scale: f32,
    squares: &'a mut Squares,
}

impl Work for Round<'_> {
    #[inline(always)]
    fn run(self) {
        let Rounded { random, x, first, codes: exponents, words, .. } = self.values;
        each(x, first, ((&mut *exponents, words), random), |x, word| {
            ((x.to_bits() & 0x7fff_ffff).wrapping_add(word & 0x7f_ffff) >> 23).min(254) as u8
        });
        add_squares(exponents, self.squares, |exponent| f32::from_bits(u32::from(exponent) << 23) * self.scale);
        let mut negative = [0; BLOCK];
        let negative = &mut negative[..x.len()];
        negative.iter_mut().zip(x).for_each(|(bit, x)| *bit = (x.to_bits() >> 31) as u8);
        Pack { codes: negative, width: 1, out: self.signs }.run();
    }
}

/// The largest byte.
struct Most<'a>(&'a [u8]);

impl Work<u8> for Most<'_> {
    #[inline(always)]
    fn run(self) -> u8 {
        self.0.iter().fold(0, |most, byte| most.max(*byte))
    }
}

struct Add<'a> {
    signs: &'a [u8],
    exponents: &'a [u8],
    scale: f32,
    out: &'a mut [f32],
}

impl Work for Add<'_> {
    #[inline(always)]
    fn run(self) {
        let scale = self.scale;
        let value = |sign: u8, lane: usize, exponent: u8| {
            f32::from_bits(u32::from(exponent) << 23 | u32::from(sign) >> lane << 31) * scale
        };
        let (groups, rest) = self.out.as_chunks_mut::<8>();
        let (exponents, last) = self.exponents.as_chunks::<8>();
        for ((out, sign), exponents) in groups.iter_mut().zip(self.signs).zip(exponents) {
            for (lane, (to, exponent)) in out.iter_mut().zip(exponents).enumerate() {
                *to += value(*sign, lane, *exponent);
            }
        }
        let sign = self.signs.last().copied().unwrap_or(0);
        for (lane, (to, exponent)) in rest.iter_mut().zip(last).enumerate() {
            *to += value(sign, lane, *exponent);
        }
    }
}
