//! onebit (BytePS): the sign of each value in one bit, with scaling times mean |x| of the tensor, without times 1.
//!
//! Payload: ⌈n/8⌉ bytes of signs, a set bit for x < 0, then with scaling the scale in 4 bytes. sign(0) = sign(−0) = +1,
//! defined here since leaving it undefined is a known mistake.
//!
//! With scaling it is contractive with delta = ‖x‖₁² / (n ‖x‖₂²) ≥ 1/n (Karimireddy et al. 2019, remark 6).

use super::signs;
use crate::Energy;
use crate::codec::{Codec, Context, EncodeError, ReadError, Shape, Size, Target, mean, not_finite};
use crate::entry::Entry;
use crate::kernels::NOT_FINITE;
use crate::wire::{Reader, Writer, packed_bytes};
use flexcomm_domain::spec::compressors;

pub(super) const ENTRY: Entry = Entry {
    info: &compressors::ONEBIT,
    code: 16,
    examples: &["scaling=true", "scaling=false"],
    build: |values, shape| Box::new(OneBit::new(if values.is_on(0) { Sign::Mean } else { Sign::One }, shape)),
};

/// What a sign stands for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Sign {
    /// ±1.
    One,
    /// ± mean |x|, which travels behind the signs.
    Mean,
    /// A vote: together they mean the sign that most ranks sent.
    Vote,
}

#[derive(Debug)]
pub(super) struct OneBit {
    n: usize,
    sign: Sign,
}

impl OneBit {
    pub(super) fn new(sign: Sign, shape: Shape) -> Self {
        Self { n: shape.values(), sign }
    }
}

impl Codec for OneBit {
    fn encode(&mut self, x: &[f32], context: &Context, out: &mut Writer) -> Result<Energy, EncodeError> {
        let start = out.len();
        let bits = out.room(packed_bytes(x.len(), 1));
        let sums = match self.sign {
            Sign::Mean => context.kernel.signs::<true>(x, bits),
            Sign::One | Sign::Vote => context.kernel.signs::<false>(x, bits),
        };
        if sums.max_key >= NOT_FINITE {
            out.truncate(start);
            return Err(not_finite(x));
        }
        let mut scale = 1.0;
        if self.sign == Sign::Mean {
            scale = (sums.magnitude() / x.len().max(1) as f64) as f32;
            out.f32(scale);
        }
        Ok(Energy { sent: x.len() as f64 * f64::from(scale) * f64::from(scale), compensated: sums.energy() })
    }

    fn decode(&mut self, from: &mut Reader<'_>, context: &Context, target: Target<'_>) -> Result<(), ReadError> {
        let bits = signs::read(from, target.out.len())?;
        let worth = if self.sign == Sign::Mean { from.scale("scale")? } else { 1.0 };
        signs::add(bits, context, Target { scale: target.scale * worth, ..target });
        Ok(())
    }

    fn aggregate(&mut self, from: &mut [Reader<'_>], context: &Context, out: &mut [f32]) -> Result<(), ReadError> {
        match self.sign {
            Sign::Vote => signs::majority(from, context, out),
            Sign::One | Sign::Mean => mean(self, from, context, out),
        }
    }

    fn size(&self) -> Size {
        Size::Exact(packed_bytes(self.n, 1) + if self.sign == Sign::Mean { 4 } else { 0 })
    }
}
