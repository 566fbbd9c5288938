//! fp16 and bf16: each value rounded to half precision (nearest, ties to even). The payloads are added in flight, in half
//! precision, as NCCL adds halves.
//!
//! Values beyond the largest half would become infinite, alone or in the sum: they are clipped to a bound that lets
//! `world` of them be added, with all roundings upwards, below the largest half. Gradients are far below it.
//!
//! Payload: n halves.

use crate::Energy;
use crate::codec::{Codec, Context, Element, EncodeError, ReadError, Scope, Size, Travels};
use crate::kernels::{NOT_FINITE, energy, key};
use crate::strategy::{Class, Entry, Nature};
use crate::wire::{Reader, Writer, bf16_to_f32, f16_to_f32, f32_to_bf16, f32_to_f16};

pub(super) const FP16: Entry = Entry {
    name: "fp16",
    code: 17,
    class: Class::Quantization,
    about: "IEEE 754 binary16",
    source: "IEEE 754; GRACE's release, fp16",
    params: &[],
    travels: |_| Travels::Sums(Element::F16),
    scope: Scope::Bucket,
    // Below 2^-25 a value becomes 0: no more can be said of all tensors.
    nature: |_| Nature::Contractive(|_, _| 0.0),
    examples: &[""],
    build: |_, shape| Box::new(Cast { n: shape.values(), half: F16 }),
};

pub(super) const BF16: Entry = Entry {
    name: "bf16",
    code: 18,
    class: Class::Quantization,
    about: "the upper half of binary32",
    source: "bfloat16, as in the gradients of issue 3",
    travels: |_| Travels::Sums(Element::Bf16),
    build: |_, shape| Box::new(Cast { n: shape.values(), half: BF }),
    ..FP16
};

/// A type of 16 bits.
#[derive(Debug, Clone, Copy)]
struct Half {
    narrow: fn(&[f32], &mut [u16]),
    widen: fn(&[u16], &mut [f32]),
    /// Largest finite value.
    most: f64,
    /// Largest relative rounding error of a sum.
    rounding: f64,
}

const F16: Half = Half { narrow: f32_to_f16, widen: f16_to_f32, most: 65_504.0, rounding: 1.0 / 2048.0 };
const BF: Half = Half {
    narrow: f32_to_bf16,
    widen: bf16_to_f32,
    most: 338_953_138_925_153_547_590_470_800_371_487_866_880.0,
    rounding: 1.0 / 256.0,
};

/// Values converted at a time.
const BLOCK: usize = 1024;

#[derive(Debug)]
struct Cast {
    n: usize,
    half: Half,
}

impl Half {
    fn limit(self, world: u32) -> f32 {
        if world <= 1 {
            return self.most as f32;
        }
        let world = f64::from(world);
        // One more rounding: that of the bound itself.
        (self.most / world * (1.0 + self.rounding).powf(-world)) as f32
    }
}

impl Codec for Cast {
    fn encode(&mut self, x: &[f32], context: &Context, out: &mut Writer) -> Result<Energy, EncodeError> {
        let stats = context.stats(x)?;
        let limit = self.half.limit(context.world);
        let (mut clipped, mut halves, mut sent) = ([0.0; BLOCK], [0; BLOCK], 0.0);
        for (block, room) in x.chunks(BLOCK).zip(out.room(2 * x.len()).chunks_mut(2 * BLOCK)) {
            let (clipped, halves) = (&mut clipped[..block.len()], &mut halves[..block.len()]);
            clipped.iter_mut().zip(block).for_each(|(to, x)| *to = x.clamp(-limit, limit));
            (self.half.narrow)(clipped, halves);
            (self.half.widen)(halves, clipped);
            sent += energy(clipped);
            room.as_chunks_mut::<2>().0.iter_mut().zip(halves).for_each(|(to, half)| *to = half.to_le_bytes());
        }
        Ok(Energy { sent, fed: stats.energy })
    }

    fn decode_add(
        &mut self,
        from: &mut Reader<'_>,
        _context: &Context,
        (scale, out): (f32, &mut [f32]),
    ) -> Result<(), ReadError> {
        let bytes = from.take("halves", 2 * out.len())?;
        let (mut wide, mut halves) = ([0.0f32; BLOCK], [0; BLOCK]);
        for (block, bytes) in out.chunks_mut(BLOCK).zip(bytes.chunks(2 * BLOCK)) {
            let (wide, halves) = (&mut wide[..block.len()], &mut halves[..block.len()]);
            halves.iter_mut().zip(bytes.as_chunks::<2>().0).for_each(|(to, from)| *to = u16::from_le_bytes(*from));
            (self.half.widen)(halves, wide);
            wide.iter_mut().for_each(|value| *value *= scale);
            if wide.iter().fold(0, |most, value| most.max(key(*value))) >= NOT_FINITE {
                let value = f64::from(wide.iter().find(|value| !value.is_finite()).copied().unwrap_or(f32::NAN));
                return Err(ReadError::Number { what: "half", value, rule: "it must be finite" });
            }
            block.iter_mut().zip(wide).for_each(|(to, value)| *to += *value);
        }
        Ok(())
    }

    fn size(&self) -> Size {
        Size::Exact(2 * self.n)
    }
}
