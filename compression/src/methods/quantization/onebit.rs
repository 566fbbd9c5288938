//! onebit (BytePS): the sign of each value in one bit, with scaling times mean |x| of the tensor, without times 1.
//!
//! Payload: ⌈n/8⌉ bytes of signs, a set bit for x < 0, then with scaling the scale in 4 bytes. sign(0) = sign(−0) = +1,
//! defined here since leaving it undefined is a known mistake.
//!
//! With scaling it is contractive with delta = ‖x‖₁² / (n ‖x‖₂²) ≥ 1/n (Karimireddy et al. 2019, remark 6).

use crate::Energy;
use crate::codec::{Codec, Context, EncodeError, ReadError, Scope, Shape, Size, Travels, not_finite};
use crate::kernels::{NOT_FINITE, Work, key};
use crate::strategy::{Class, Entry, Kind, Nature, Param};
use crate::wire::{Reader, Writer, packed_bytes};

pub(super) const ENTRY: Entry = Entry {
    name: "onebit",
    code: 16,
    class: Class::Quantization,
    about: "signs, times mean |x| if scaling is on",
    source: "BytePS, gradient compression design, onebit",
    params: &[Param::optional("scaling", Kind::Switch, 0.0, "whether signs are multiplied by mean |x|")],
    travels: |_| Travels::Gathers,
    scope: Scope::Tensor,
    nature: |values| match values.is_on(0) {
        true => Nature::Contractive(|_, n| 1.0 / n.max(1) as f64),
        false => Nature::Biased("a sign says nothing of the magnitude"),
    },
    examples: &["scaling=true", "scaling=false"],
    build: |values, shape| Box::new(OneBit::new(values.is_on(0), shape)),
};

#[derive(Debug)]
pub(super) struct OneBit {
    n: usize,
    scaling: bool,
}

impl OneBit {
    pub(super) fn new(scaling: bool, shape: Shape) -> Self {
        Self { n: shape.values(), scaling }
    }
}

impl Codec for OneBit {
    fn encode(&mut self, x: &[f32], context: &Context, out: &mut Writer) -> Result<Energy, EncodeError> {
        let start = out.len();
        let bits = out.room(packed_bytes(x.len(), 1));
        let sums = context.kernel.run(Signs { x, bits });
        if sums.max_key >= NOT_FINITE {
            out.truncate(start);
            return Err(not_finite(x));
        }
        let mut scale = 1.0;
        if self.scaling {
            scale = (sums.magnitude / x.len().max(1) as f64) as f32;
            out.f32(scale);
        }
        Ok(Energy { sent: x.len() as f64 * f64::from(scale) * f64::from(scale), fed: sums.energy })
    }

    fn decode_add(
        &mut self,
        from: &mut Reader<'_>,
        context: &Context,
        (scale, out): (f32, &mut [f32]),
    ) -> Result<(), ReadError> {
        let bits = from.take("signs", packed_bytes(out.len(), 1))?;
        let last = bits.last().map_or(0, |byte| if out.len().is_multiple_of(8) { 0 } else { byte >> (out.len() % 8) });
        if last != 0 {
            return Err(ReadError::Field { what: "padding", value: u64::from(last), rule: "it must be 0" });
        }
        let own = if self.scaling { from.scale("scale")? } else { 1.0 };
        context.kernel.run(AddSigns { bits, value: scale * own, out });
        Ok(())
    }

    fn size(&self) -> Size {
        Size::Exact(packed_bytes(self.n, 1) + if self.scaling { 4 } else { 0 })
    }
}

/// Packs signs and adds up, in one read.
pub(super) struct Signs<'a> {
    pub(super) x: &'a [f32],
    pub(super) bits: &'a mut [u8],
}

/// Σ |x|, Σ x² and the largest key.
#[derive(Default)]
pub(super) struct Sums {
    magnitude: f64,
    pub(super) energy: f64,
    pub(super) max_key: u32,
}

impl Work for Signs<'_> {
    type Output = Sums;

    #[inline(always)]
    fn run(self) -> Sums {
        // Eight sums: a fixed order, the same on every kernel.
        let (mut magnitude, mut energy, mut max) = ([0.0f64; 8], [0.0f64; 8], [0u32; 8]);
        for (chunk, byte) in self.x.chunks(8).zip(self.bits) {
            let mut group = [0.0; 8];
            // A whole chunk is copied with one load.
            match chunk.first_chunk::<8>() {
                Some(whole) => group = *whole,
                None => group[..chunk.len()].copy_from_slice(chunk),
            }
            let mut bits = 0;
            for lane in 0..8 {
                let value = group[lane];
                let wide = f64::from(value.abs());
                magnitude[lane] += wide;
                energy[lane] += wide * wide;
                max[lane] = max[lane].max(key(value));
                bits |= u8::from(value < 0.0) << lane;
            }
            *byte = bits;
        }
        let max_key = max.into_iter().fold(0, u32::max);
        Sums { magnitude: magnitude.iter().sum(), energy: energy.iter().sum(), max_key }
    }
}

/// Adds ±value.
pub(super) struct AddSigns<'a> {
    pub(super) bits: &'a [u8],
    pub(super) value: f32,
    pub(super) out: &'a mut [f32],
}

impl Work for AddSigns<'_> {
    type Output = ();

    #[inline(always)]
    fn run(self) {
        let value = self.value.to_bits();
        for (group, byte) in self.out.chunks_mut(8).zip(self.bits) {
            for (lane, to) in group.iter_mut().enumerate() {
                let sign = u32::from(byte >> lane & 1) << 31;
                *to += f32::from_bits(value ^ sign);
            }
        }
    }
}
