//! onebit (BytePS): the sign of each value in one bit, with scaling times mean |x| of the tensor, without times 1.
//!
//! Payload: ⌈n/8⌉ bytes of signs, a set bit for x < 0, then with scaling the scale in 4 bytes. sign(0) = sign(−0) = +1,
//! defined here since leaving it undefined is a known mistake.
//!
//! With scaling it is contractive with delta = ‖x‖₁² / (n ‖x‖₂²) ≥ 1/n (Karimireddy et al. 2019, remark 6).

use super::signs;
use crate::Energy;
use crate::codec::{Codec, Context, EncodeError, ReadError, Shape, Size, not_finite};
use crate::entry::Entry;
use crate::kernels::NOT_FINITE;
use crate::wire::{Reader, Writer, packed_bytes};
use flexcomm_domain::spec::compressors;

pub(super) const ENTRY: Entry = Entry {
    info: &compressors::ONEBIT,
    code: 16,
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

    /// Signs and scale.
    fn read<'a>(&self, from: &mut Reader<'a>, n: usize) -> Result<(&'a [u8], f32), ReadError> {
        Ok((signs::read(from, n)?, if self.scaling { from.scale("scale")? } else { 1.0 }))
    }
}

impl Codec for OneBit {
    fn encode(&mut self, x: &[f32], context: &Context, out: &mut Writer) -> Result<Energy, EncodeError> {
        let start = out.len();
        let bits = out.room(packed_bytes(x.len(), 1));
        let sums = match self.scaling {
            true => context.kernel.signs::<true>(x, bits),
            false => context.kernel.signs::<false>(x, bits),
        };
        if sums.max_key >= NOT_FINITE {
            out.truncate(start);
            return Err(not_finite(x));
        }
        let mut scale = 1.0;
        if self.scaling {
            scale = (sums.magnitude() / x.len().max(1) as f64) as f32;
            out.f32(scale);
        }
        Ok(Energy { sent: x.len() as f64 * f64::from(scale) * f64::from(scale), compensated: sums.energy() })
    }

    fn decode_add(
        &mut self,
        from: &mut Reader<'_>,
        context: &Context,
        (scale, out): (f32, &mut [f32]),
    ) -> Result<(), ReadError> {
        let (bits, own) = self.read(from, out.len())?;
        signs::add::<false>(bits, context, (scale * own, out));
        Ok(())
    }

    fn decode(
        &mut self,
        from: &mut Reader<'_>,
        context: &Context,
        (scale, out): (f32, &mut [f32]),
    ) -> Result<(), ReadError> {
        let (bits, own) = self.read(from, out.len())?;
        signs::add::<true>(bits, context, (scale * own, out));
        Ok(())
    }

    fn size(&self) -> Size {
        Size::Exact(packed_bytes(self.n, 1) + if self.scaling { 4 } else { 0 })
    }
}
