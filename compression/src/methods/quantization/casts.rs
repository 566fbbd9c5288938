//! fp16 and bf16: each value rounded to half precision (nearest, ties to even). The payloads are added in flight, in half
//! precision, as NCCL adds halves.
//!
//! Values beyond the largest half would become infinite, alone or in the sum (torch's `fp16_compress_hook` divides by the number of
//! ranks first, and sends an infinity for what is beyond even so). Here they are clipped to a bound that lets `world` of them be
//! added, with all roundings upwards, below the largest half: 65504 / `world` and less for fp16. Error feedback keeps
//! what is cut off and sends it in later steps; without a memory it is lost, as the gain below 1 shows. Gradients that
//! a loss scale multiplies may come there: unscale them first, or take bf16.
//!
//! Payload: n halves.

use crate::Energy;
use crate::codec::{Codec, Context, EncodeError, ReadError, Size, Target, not_finite};
use crate::entry::Entry;
use crate::kernels::{Half, NARROWED, NOT_FINITE};
use crate::wire::{Reader, Writer};
use flexcomm_domain::spec::compressors;

pub(super) const FP16: Entry = Entry {
    info: &compressors::FP16,
    code: 17,
    examples: &[""],
    build: |_, shape| Box::new(Cast { n: shape.values(), limits: F16 }),
};

pub(super) const BF16: Entry = Entry {
    info: &compressors::BF16,
    code: 18,
    build: |_, shape| Box::new(Cast { n: shape.values(), limits: BF }),
    ..FP16
};

/// What clipping asks of a type.
#[derive(Debug, Clone, Copy)]
struct Limits {
    half: Half,
    /// Largest finite value.
    most: f64,
    /// Largest relative rounding error of a sum.
    rounding: f64,
}

const F16: Limits = Limits { half: Half::F16, most: 65_504.0, rounding: 1.0 / 2048.0 };
const BF: Limits =
    Limits { half: Half::Bf16, most: 338_953_138_925_153_547_590_470_800_371_487_866_880.0, rounding: 1.0 / 256.0 };

#[derive(Debug)]
struct Cast {
    n: usize,
    limits: Limits,
}

impl Limits {
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
        let (start, limit, mut energy) = (out.len(), self.limits.limit(context.world), Energy::default());
        out.reserve(2 * x.len());
        // Not into the message at once: room there would have to be zeroed first.
        let mut halves = [0; 2 * NARROWED];
        for block in x.chunks(NARROWED) {
            let halves = &mut halves[..2 * block.len()];
            let seen = context.kernel.narrow(self.limits.half, (block, limit), halves);
            energy = energy + Energy { sent: seen.sent, compensated: seen.compensated };
            out.raw(halves);
        }
        if !energy.compensated.is_finite() {
            out.truncate(start);
            return Err(not_finite(x));
        }
        Ok(Energy { compensated: context.known.map_or(energy.compensated, |known| known.energy), ..energy })
    }

    fn decode(&mut self, from: &mut Reader<'_>, context: &Context, target: Target<'_>) -> Result<(), ReadError> {
        let bytes = from.take("halves", 2 * target.out.len())?;
        let (half, values) = (self.limits.half, (target.scale, target.out));
        let max = match target.fresh {
            true => context.kernel.widen::<true>(half, bytes, values),
            false => context.kernel.widen::<false>(half, bytes, values),
        };
        let error = ReadError::number("half", f32::from_bits(max), "it must be finite");
        if max < NOT_FINITE { Ok(()) } else { Err(error) }
    }

    fn size(&self) -> Size {
        Size::Exact(2 * self.n)
    }
}
