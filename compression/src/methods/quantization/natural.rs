//! Natural compression (Horváth et al. 2019, definition 1): each value becomes one of the two powers of two next to it, with
//! its sign, drawn so that the mean is x; 0 stays 0. 9 bits per value; E ‖C(x) − x‖² ≤ ‖x‖² / 8.
//!
//! Adding random bits to the mantissa carries into the exponent with just that chance. Below 2^-126 the neighbours are 0
//! and 2^-126, so that all has an exponent of 8 bits; above 2^127, where the upper neighbour is no f32, it is the lower
//! one, always: only there it is biased.
//!
//! Payload: signs; n exponents of binary32 (biased by 127; 0 means 0, at most 254) in a byte each.

use super::levels::check_padding;
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
        let mut sums = [0.0f64; 8];
        let groups = self.x.chunks(8).zip(self.signs).zip(self.exponents.chunks_mut(8));
        for (g, ((x, sign), exponents)) in groups.enumerate() {
            let mut bits = [0u32; 8];
            match x.first_chunk::<8>() {
                Some(whole) => bits = whole.map(f32::to_bits),
                None => bits.iter_mut().zip(x).for_each(|(to, x)| *to = x.to_bits()),
            }
            let (mut negative, mut rounded) = (0, [0u8; 8]);
            for lane in 0..8 {
                let random = self.random.word((8 * g) as u32 | lane as u32) >> 9;
                let exponent = ((bits[lane] & 0x7fff_ffff).wrapping_add(random) >> 23).min(254);
                // Padding is 0 and has no sign.
                negative |= ((bits[lane] >> 31) as u8) << lane;
                rounded[lane] = exponent as u8;
                let value = f64::from(f32::from_bits(exponent << 23));
                sums[lane] += if bits[lane] & 0x7fff_ffff == 0 { 0.0 } else { value * value };
            }
            *sign = negative;
            exponents.copy_from_slice(&rounded[..exponents.len()]);
        }
        sums.iter().sum()
    }
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
        let groups = self.out.chunks_mut(8).zip(self.signs).zip(self.exponents.chunks(8));
        for ((out, sign), exponents) in groups {
            for (lane, (to, exponent)) in out.iter_mut().zip(exponents).enumerate() {
                let sign = u32::from(sign >> lane & 1) << 31;
                *to += f32::from_bits(u32::from(*exponent) << 23 | sign) * self.scale;
            }
        }
    }
}
