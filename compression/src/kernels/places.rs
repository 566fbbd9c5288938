//! Where packed codes are others than that of 0: what is left of a sparse tensor.

use super::{Kernel, Work, by_width};

/// The most codes that are looked at together.
pub(crate) const SPAN: usize = 4096;

/// Places in a span: a buffer that is kept. Behind the last there is room for a whole group.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Places(pub(super) [u16; SPAN + GROUP]);

/// Codes whose places are stored together.
pub(super) const GROUP: usize = 64;

impl Places {
    /// Before any was found.
    pub(crate) const NONE: Self = Self([0; SPAN + GROUP]);

    /// Stores, behind `count` places, those of the set bits of 64 from `first` on; answers how many there are now.
    #[inline(always)]
    pub(super) fn push(&mut self, count: usize, first: usize, mut set: u64) -> usize {
        let end = count + set.count_ones() as usize;
        let room = &mut self.0[count..count + GROUP];
        // Fours without a branch between them: how many are set is guessed wrong too often.
        for four in room.as_chunks_mut::<4>().0 {
            for place in four {
                *place = first as u16 + set.trailing_zeros() as u16;
                set &= set.wrapping_sub(1);
            }
            if set == 0 {
                break;
            }
        }
        end
    }
}

/// `levels(w)` of n values.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Packed<'a> {
    pub(crate) bytes: &'a [u8],
    pub(crate) n: usize,
    /// Bits of a code.
    pub(crate) width: u32,
    /// What is 0.
    pub(crate) zero: u8,
}

impl Packed<'_> {
    /// Those from `first`, a multiple of 8, on, at most `most`.
    pub(crate) fn part(self, first: usize, most: usize) -> Self {
        let bytes = self.bytes.get(first / 8 * self.width as usize..).unwrap_or_default();
        Self { bytes, n: most.min(self.n.saturating_sub(first)), ..self }
    }
}

impl Kernel {
    /// Places of codes that are not that of 0, ascending. At most [`SPAN`] codes.
    pub(crate) fn places<'a>(self, packed: Packed<'_>, to: &'a mut Places) -> &'a [u16] {
        assert!(packed.n <= SPAN, "one span");
        let (done, count) = self.places_first(packed, to);
        let count = self.run(Rest { packed, to, done, count });
        &to.0[..count]
    }
}

impl Packed<'_> {
    /// How many codes are not that of 0.
    pub(crate) fn others(self, kernel: Kernel) -> usize {
        kernel.run(Count(self))
    }
}

struct Count<'a>(Packed<'a>);

impl Work<usize> for Count<'_> {
    #[inline(always)]
    fn run(self) -> usize {
        by_width!(self.0.width, count(self.0))
    }
}

#[inline(always)]
fn count<const W: u32>(packed: Packed<'_>) -> usize {
    let in_word = |at| {
        let others = others::<W>(packed, at);
        // A lane's lowest bit becomes whether any of its bits is set.
        let any = (1..W).fold(others, |any, bit| any | others >> bit);
        (any & lanes::<W>(1)).count_ones() as usize
    };
    (0..packed.n).step_by(group_len(W) as usize).map(in_word).sum()
}

/// What kernels leave: codes from a multiple of 64 on.
struct Rest<'a> {
    packed: Packed<'a>,
    to: &'a mut Places,
    done: usize,
    count: usize,
}

impl Work<usize> for Rest<'_> {
    #[inline(always)]
    fn run(self) -> usize {
        by_width!(self.packed.width, rest(self))
    }
}

/// Words that are looked at before places are taken from those that hold any: as branches of the same loop they would be
/// guessed wrong too often.
const WORDS: usize = 64;

#[inline(always)]
fn rest<const W: u32>(rest: Rest<'_>) -> usize {
    let Rest { packed, to, done, mut count } = rest;
    let (len, mask) = (group_len(W) as usize, u64::MAX >> (64 - W));
    for first in (done..packed.n).step_by(WORDS * len) {
        let (mut busy, mut words) = ([(0, 0); WORDS], 0);
        for at in (first..packed.n.min(first + WORDS * len)).step_by(len) {
            let others = others::<W>(packed, at);
            busy[words] = (at, others);
            words += usize::from(others != 0);
        }
        for (at, mut others) in busy[..words].iter().copied() {
            while others != 0 {
                let lane = others.trailing_zeros() / W;
                others &= !(mask << (lane * W));
                to.0[count] = (at + lane as usize) as u16;
                count += 1;
            }
        }
    }
    count
}

/// Bits of the word of codes from `at` on that differ from those of zeros.
#[inline(always)]
fn others<const W: u32>(packed: Packed<'_>, at: usize) -> u64 {
    let bytes = &packed.bytes[at / 8 * W as usize..];
    let word = bytes.first_chunk().copied().unwrap_or_else(|| {
        let mut last = [0; 8];
        last[..bytes.len()].copy_from_slice(bytes);
        last
    });
    let here = group_len(W).min((packed.n - at) as u32);
    (u64::from_le_bytes(word) ^ lanes::<W>(u64::from(packed.zero))) & (u64::MAX >> (64 - here * W))
}

/// Codes of W bits in a word: as many as it holds, or as fill bytes.
const fn group_len(width: u32) -> u32 {
    if 64 % width == 0 { 64 / width } else { 8 }
}

/// The same code in all lanes of a word.
const fn lanes<const W: u32>(code: u64) -> u64 {
    let (mut word, mut lane) = (0, 0);
    while lane < group_len(W) {
        word |= code << (lane * W);
        lane += 1;
    }
    word
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::kernels::Pack;
    use proptest::prelude::*;

    proptest! {
        /// One after the other, of rare and of frequent ones, and behind what was found before.
        #[test]
        fn all_kernels_find_the_same(
            width in 1u32..=8,
            zero: u8,
            rare in 1u32..200,
            drawn in prop::collection::vec(any::<(u32, u8)>(), 0..=SPAN),
        ) {
            let most = u8::MAX >> (8 - width);
            let zero = zero & most;
            let code = |(draw, code): &(u32, u8)| if draw % rare == 0 { code & most } else { zero };
            let codes: Vec<u8> = drawn.iter().map(code).collect();
            let mut bytes = vec![0; (codes.len() * width as usize).div_ceil(8)];
            Pack { codes: &codes, width, out: &mut bytes }.on(Kernel::Portable);
            let packed = Packed { bytes: &bytes, n: codes.len(), width, zero };
            let want: Vec<u16> = (0..).zip(&codes).filter(|(_, code)| **code != zero).map(|(place, _)| place).collect();
            for kernel in Kernel::available() {
                let mut places = Places([7; SPAN + GROUP]);
                prop_assert_eq!(kernel.places(packed, &mut places), &want[..], "{:?}", kernel);
                prop_assert_eq!(packed.others(kernel), want.len(), "{:?}", kernel);
            }
        }
    }
}
