//! Natural compression (Horváth et al. 2019, definition 1): each value becomes one of the two powers of two next to it, with
//! its sign, drawn so that the mean is x; 0 stays 0. 9 bits per value; E ‖C(x) − x‖² ≤ ‖x‖² / 8.
//!
//! Adding random bits to the mantissa carries into the exponent with just that chance. Below 2^-126 the neighbours are 0
//! and 2^-126, so that all has an exponent of 8 bits; above 2^127, where the upper neighbour is no f32, it is the lower
//! one, always: only there it is biased.
//!
//! Payload: signs; n exponents of binary32 (biased by 127; 0 means 0, at most 254) in a byte each.

use super::levels::{BLOCK, NO_WORDS, check_padding, each};
use super::packing::Pack;
use crate::Energy;
use crate::codec::{Codec, Context, EncodeError, ReadError, Scope, Size, Travels};
use crate::kernels::Work;
use crate::random::Stream;
use crate::strategy::{Class, Entry, Nature};
use crate::wire::{Reader, Writer, packed_bytes};

pub(super) const ENTRY: Entry = Entry {
    name: "natural",
    code: 27,
    class: Class::Quantization,
    about: "rounds at random to powers of two",
    source: "Horváth et al. 2019, Natural Compression, definition 1 and theorem 1",
    params: &[],
    travels: |_| Travels::Gathers,
    scope: Scope::Bucket,
    nature: |_| Nature::Unbiased,
    examples: &[""],
    build: |_, shape| Box::new(Natural { n: shape.values() }),
};

#[derive(Debug)]
struct Natural {
    n: usize,
}

impl Codec for Natural {
    fn encode(&mut self, x: &[f32], context: &Context, out: &mut Writer) -> Result<Energy, EncodeError> {
        let fed = context.stats(x)?.energy;
        let signs = packed_bytes(x.len(), 1);
        let (signs, exponents) = out.room(signs + x.len()).split_at_mut(signs);
        let sent = context.kernel.run(Round { x, random: context.own(0), signs, exponents });
        Ok(Energy { sent, fed })
    }

    fn decode_add(
        &mut self,
        from: &mut Reader<'_>,
        context: &Context,
        (scale, out): (f32, &mut [f32]),
    ) -> Result<(), ReadError> {
        let signs = from.take("signs", packed_bytes(out.len(), 1))?;
        check_padding("signs", signs, out.len())?;
        let exponents = from.take("exponents", out.len())?;
        let most = context.kernel.run(Most(exponents));
        if !(f32::from_bits(u32::from(most) << 23) * scale).is_finite() {
            let value = u64::from(most);
            return Err(ReadError::Field { what: "exponent", value, rule: "the value must be finite" });
        }
        context.kernel.run(Add { signs, exponents, scale, out });
        Ok(())
    }

    fn size(&self) -> Size {
        Size::Exact(packed_bytes(self.n, 1) + self.n)
    }
}

/// Signs and exponents; answers ‖C(x)‖².
struct Round<'a> {
    x: &'a [f32],
    random: Stream,
    signs: &'a mut [u8],
    exponents: &'a mut [u8],
}

impl Work for Round<'_> {
    type Output = f64;

    #[inline(always)]
    fn run(self) -> f64 {
        let (mut negative, mut words, mut energy) = ([0; BLOCK], NO_WORDS, 0.0);
        let blocks = self.x.chunks(BLOCK).zip(self.signs.chunks_mut(BLOCK / 8)).zip(self.exponents.chunks_mut(BLOCK));
        for (i, ((x, signs), exponents)) in blocks.enumerate() {
            let first = (i * BLOCK) as u32;
            each(x, first, ((&mut *exponents, &mut words), self.random), |x, word| {
                ((x.to_bits() & 0x7fff_ffff).wrapping_add(word >> 9) >> 23).min(254) as u8
            });
            let negative = &mut negative[..x.len()];
            negative.iter_mut().zip(x).for_each(|(bit, x)| *bit = (x.to_bits() >> 31) as u8);
            Pack { codes: negative, width: 1, out: signs }.run();
            energy += squares(exponents);
        }
        energy
    }
}

/// Σ 4^(exponent − 127), in so many sums that compilers keep the loop over them, which becomes vectors.
#[inline(always)]
fn squares(exponents: &[u8]) -> f64 {
    let mut sums = [0.0f64; 64];
    for group in exponents.chunks(64) {
        for (sum, exponent) in sums.iter_mut().zip(group) {
            let bits = (2 * u64::from(*exponent) + 769) << 52;
            *sum += if *exponent == 0 { 0.0 } else { f64::from_bits(bits) };
        }
    }
    sums.iter().sum()
}

/// The largest byte.
struct Most<'a>(&'a [u8]);

impl Work for Most<'_> {
    type Output = u8;

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
    type Output = ();

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
