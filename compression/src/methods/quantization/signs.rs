//! What methods of one bit per value share: signs without a scale, and the majority vote.
//!
//! sign(0) = sign(−0) = +1: GRACE (section 3.1) turns negative values into −1 and the others into +1, and votes that are
//! equal on both sides also mean +1. Leaving either undefined is a known mistake.

use super::levels::{BLOCK, check_padding};
use crate::Energy;
use crate::codec::{Context, EncodeError, ReadError, not_finite};
use crate::kernels::{NOT_FINITE, Work};
use crate::wire::{Reader, Writer, packed_bytes};

/// Appends signs; refuses what is not finite.
pub(super) fn encode(x: &[f32], context: &Context, out: &mut Writer) -> Result<Energy, EncodeError> {
    let start = out.len();
    let sums = context.kernel.signs::<false>(x, out.room(packed_bytes(x.len(), 1)));
    if sums.max_key >= NOT_FINITE {
        out.truncate(start);
        return Err(not_finite(x));
    }
    Ok(Energy { sent: x.len() as f64, fed: sums.energy() })
}

/// The bits of n signs.
pub(super) fn read<'a>(from: &mut Reader<'a>, n: usize) -> Result<&'a [u8], ReadError> {
    let bits = from.take("signs", packed_bytes(n, 1))?;
    check_padding("signs", bits, n)?;
    Ok(bits)
}

/// `out += ±value`, or, where it is FRESH, `out = ±value`: from zeros, block by block, while they are in the first-level
/// cache.
pub(super) fn add<const FRESH: bool>(bits: &[u8], context: &Context, (value, out): (f32, &mut [f32])) {
    for (block, bits) in out.chunks_mut(BLOCK).zip(bits.chunks(BLOCK / 8)) {
        if FRESH {
            block.fill(0.0);
        }
        context.kernel.add_signs(bits, value, block);
    }
}

/// Of a codec whose payload is signs: decoding.
macro_rules! decode_signs {
    () => {
        fn decode_add(
            &mut self,
            from: &mut Reader<'_>,
            context: &Context,
            (scale, out): (f32, &mut [f32]),
        ) -> Result<(), ReadError> {
            signs::add::<false>(signs::read(from, out.len())?, context, (scale, out));
            Ok(())
        }

        fn decode(
            &mut self,
            from: &mut Reader<'_>,
            context: &Context,
            (scale, out): (f32, &mut [f32]),
        ) -> Result<(), ReadError> {
            signs::add::<true>(signs::read(from, out.len())?, context, (scale, out));
            Ok(())
        }
    };
}
pub(super) use decode_signs;

/// The sign that most ranks sent, value by value, as ±1.
pub(super) fn majority(from: &mut [Reader<'_>], context: &Context, out: &mut [f32]) -> Result<(), ReadError> {
    let ranks = from.len() as u32;
    let mut negatives = [0; BLOCK];
    for block in out.chunks_mut(BLOCK) {
        let negatives = &mut negatives[..block.len()];
        negatives.fill(0);
        for reader in from.iter_mut() {
            context.kernel.run(Count { bits: read(reader, block.len())?, negatives });
        }
        context.kernel.run(Vote { negatives, ranks, out: block });
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
        let (groups, rest) = self.negatives.as_chunks_mut::<8>();
        for (group, byte) in groups.iter_mut().zip(self.bits) {
            for (lane, count) in group.iter_mut().enumerate() {
                *count += u32::from(*byte) >> lane & 1;
            }
        }
        let last = u32::from(self.bits.last().copied().unwrap_or(0));
        rest.iter_mut().enumerate().for_each(|(lane, count)| *count += last >> lane & 1);
    }
}

/// What most ranks voted for.
struct Vote<'a> {
    negatives: &'a [u32],
    ranks: u32,
    out: &'a mut [f32],
}

impl Work for Vote<'_> {
    type Output = ();

    #[inline(always)]
    fn run(self) {
        for (to, count) in self.out.iter_mut().zip(self.negatives) {
            *to = if *count > self.ranks.wrapping_sub(*count) { -1.0 } else { 1.0 };
        }
    }
}
