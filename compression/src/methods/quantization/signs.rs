//! What methods of one bit per value share: signs without a scale, and the majority vote.
//!
//! sign(0) = sign(−0) = +1: GRACE (section 3.1) turns negative values into −1 and the others into +1, and votes that are
//! equal on both sides also mean +1. Leaving either undefined is a known mistake.

use super::levels::{BLOCK, check_padding};
use super::onebit::{AddSigns, Signs};
use crate::Energy;
use crate::codec::{Context, EncodeError, ReadError, not_finite};
use crate::kernels::{NOT_FINITE, Work};
use crate::wire::{Reader, Writer, packed_bytes};

/// Appends signs; refuses what is not finite.
pub(super) fn encode(x: &[f32], context: &Context, out: &mut Writer) -> Result<Energy, EncodeError> {
    let start = out.len();
    let sums = context.kernel.run(Signs { x, bits: out.room(packed_bytes(x.len(), 1)) });
    if sums.max_key >= NOT_FINITE {
        out.truncate(start);
        return Err(not_finite(x));
    }
    Ok(Energy { sent: x.len() as f64, fed: sums.energy })
}

/// `out += scale * ±1`.
pub(super) fn decode_add(
    from: &mut Reader<'_>,
    context: &Context,
    (value, out): (f32, &mut [f32]),
) -> Result<(), ReadError> {
    let bits = from.take("signs", packed_bytes(out.len(), 1))?;
    check_padding("signs", bits, out.len())?;
    context.kernel.run(AddSigns { bits, value, out });
    Ok(())
}

/// The sign that most ranks sent, value by value, as ±1.
pub(super) fn majority(from: &mut [Reader<'_>], context: &Context, out: &mut [f32]) -> Result<(), ReadError> {
    let ranks = from.len() as u32;
    let mut negatives = [0; BLOCK];
    for block in out.chunks_mut(BLOCK) {
        let negatives = &mut negatives[..block.len()];
        negatives.fill(0);
        for reader in from.iter_mut() {
            let bits = reader.take("signs", packed_bytes(block.len(), 1))?;
            check_padding("signs", bits, block.len())?;
            context.kernel.run(Count { bits, negatives });
        }
        for (to, count) in block.iter_mut().zip(negatives) {
            *to = if *count > ranks - *count { -1.0 } else { 1.0 };
        }
    }
    Ok(())
}

/// Adds one rank's votes. In 32 bits: counts of 8 bits overflow above 127 ranks, a known mistake.
struct Count<'a> {
    bits: &'a [u8],
    negatives: &'a mut [u32],
}

impl Work for Count<'_> {
    type Output = ();

    #[inline(always)]
    fn run(self) {
        for (group, byte) in self.negatives.chunks_mut(8).zip(self.bits) {
            for (lane, count) in group.iter_mut().enumerate() {
                *count += u32::from(byte >> lane & 1);
            }
        }
    }
}
