//! What methods of one bit per value share: reading signs, and the majority vote.
//!
//! sign(0) = sign(−0) = +1: GRACE (section 3.1) turns negative values into −1 and the others into +1. Votes that are equal
//! on both sides mean 0, the sign of the sum of signs: +1 moves every value on which half the ranks disagree in one
//! direction, which costs accuracy with few ranks. Leaving either undefined is a known mistake.

use super::levels::{BLOCK, check_padding};
use crate::codec::{Context, ReadError, Target};
use crate::kernels::Work;
use crate::wire::{Reader, packed_bytes};

/// The bits of n signs.
pub(super) fn read<'a>(from: &mut Reader<'a>, n: usize) -> Result<&'a [u8], ReadError> {
    let bits = from.take("signs", packed_bytes(n, 1))?;
    check_padding("signs", bits, n)?;
    Ok(bits)
}

/// ± the target's scale.
pub(super) fn add(bits: &[u8], context: &Context, Target { scale, out, fresh }: Target<'_>) {
    match fresh {
        true => context.kernel.add_signs::<true>(bits, scale, out),
        false => context.kernel.add_signs::<false>(bits, scale, out),
    }
}

/// The sign that most ranks sent, value by value, as ±1; 0 where as many sent one as the other.
///
/// It is the mean of two strict votes, of which the second counts a tie as negative: they differ only on a tie.
pub(super) fn majority(from: &mut [Reader<'_>], context: &Context, out: &mut [f32]) -> Result<(), ReadError> {
    let (ranks, mut tally) = (from.len() as u32, Tally { planes: [[0; WORDS]; PLANES], used: 0 });
    for block in out.chunks_mut(BLOCK) {
        tally.clear();
        for reader in from.iter_mut() {
            context.kernel.run(Vote { bits: read(reader, block.len())?, tally: &mut tally });
        }
        let (mut negative, mut tied_or_negative) = ([0; BLOCK / 8], [0; BLOCK / 8]);
        context.kernel.run(Count { tally: &tally, more_than: ranks / 2, bits: &mut negative });
        context.kernel.run(Count { tally: &tally, more_than: (ranks - 1) / 2, bits: &mut tied_or_negative });
        context.kernel.add_signs::<true>(&negative, 0.5, block);
        context.kernel.add_signs::<false>(&tied_or_negative, 0.5, block);
    }
    Ok(())
}

/// Words of a block's bits.
const WORDS: usize = BLOCK / 64;

/// Bits of a count. Counts of 8 bits overflow above 255 ranks, a known mistake.
const PLANES: usize = 32;

/// How many ranks sent a negative sign: bit i of each value's count in plane i.
struct Tally {
    planes: [[u64; WORDS]; PLANES],
    /// Planes that may hold other than zeros.
    used: usize,
}

impl Tally {
    fn clear(&mut self) {
        self.planes[..self.used].fill([0; WORDS]);
        self.used = 0;
    }
}

/// Adds one rank's votes, all of a word's at once.
struct Vote<'a> {
    bits: &'a [u8],
    tally: &'a mut Tally,
}

impl Work for Vote<'_> {
    #[inline(always)]
    fn run(self) {
        let mut bytes = [0; BLOCK / 8];
        bytes[..self.bits.len()].copy_from_slice(self.bits);
        let mut carries: [u64; WORDS] = std::array::from_fn(|i| u64::from_le_bytes(bytes.as_chunks().0[i]));
        let Tally { planes, used } = self.tally;
        for plane in &mut planes[..*used] {
            for (sum, carry) in plane.iter_mut().zip(&mut carries) {
                (*sum, *carry) = (*sum ^ *carry, *sum & *carry);
            }
        }
        if *used < PLANES && carries.iter().any(|carry| *carry != 0) {
            planes[*used] = carries;
            *used += 1;
        }
    }
}

/// A set bit for each value whose count is larger.
struct Count<'a> {
    tally: &'a Tally,
    more_than: u32,
    bits: &'a mut [u8; BLOCK / 8],
}

impl Work for Count<'_> {
    #[inline(always)]
    fn run(self) {
        // From the lowest bit up: a higher one overrules what those below say.
        let mut more = [0; WORDS];
        for (bit, plane) in self.tally.planes[..self.tally.used].iter().enumerate() {
            match self.more_than >> bit & 1 {
                0 => more.iter_mut().zip(plane).for_each(|(more, count)| *more |= count),
                _ => more.iter_mut().zip(plane).for_each(|(more, count)| *more &= count),
            }
        }
        if self.more_than.checked_shr(self.tally.used as u32).unwrap_or(0) != 0 {
            more = [0; WORDS];
        }
        self.bits.as_chunks_mut().0.iter_mut().zip(more).for_each(|(to, more)| *to = more.to_le_bytes());
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Kernel;
    use proptest::prelude::*;
    use std::cmp::Ordering;

    proptest! {
        /// Each value's votes counted one by one, with any number of ranks that agree more or less.
        #[test]
        fn most_ranks_decide(n in 1usize..100, ranks in 1usize..300, long: bool, share in 0.0f64..1.0, seed: u64) {
            let n = if long { n + BLOCK } else { n };
            let stream = crate::random::Stream::new(seed, [0; 4]);
            let negative = |rank: usize, i: usize| stream.unit((rank * n + i) as u64) < share;
            let messages: Vec<Vec<u8>> = (0..ranks)
                .map(|rank| {
                    let mut bits = vec![0u8; n.div_ceil(8)];
                    (0..n).for_each(|i| bits[i / 8] |= u8::from(negative(rank, i)) << (i % 8));
                    bits
                })
                .collect();
            let votes = |i: usize| (0..ranks).filter(|rank| negative(*rank, i)).count();
            let sign = |i| match ranks.cmp(&(2 * votes(i))) {
                Ordering::Less => -1.0,
                Ordering::Equal => 0.0,
                Ordering::Greater => 1.0f32,
            };
            let want: Vec<f32> = (0..n).map(sign).collect();
            for kernel in Kernel::available() {
                let mut from: Vec<Reader<'_>> = messages.iter().map(|bits| Reader::new(bits)).collect();
                let mut out = vec![7.0; n];
                majority(&mut from, &Context { kernel, ..Context::new(1) }, &mut out).unwrap();
                prop_assert_eq!(&out, &want, "{:?}", kernel);
            }
        }
    }
}
