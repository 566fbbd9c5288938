//! Codes of w bits packed without gaps, compiled for every kernel: 8 codes fill exactly w bytes, so that groups of 8 are
//! worked on in one word and loops over groups become vectors.

use super::{Kernel, Work};

/// Packs codes below 2^width, 8 at a time in one word.
pub(crate) struct Pack<'a> {
    pub(crate) codes: &'a [u8],
    pub(crate) width: u32,
    pub(crate) out: &'a mut [u8],
}

impl Pack<'_> {
    /// At once as far as the kernel can, then 8 by 8.
    pub(crate) fn on(self, kernel: Kernel) {
        let Self { codes, width, out } = self;
        let done = kernel.pack_first(codes, width, out);
        if done < codes.len() {
            kernel.run(Pack { codes: &codes[done..], width, out: &mut out[done / 8 * width as usize..] });
        }
    }
}

/// Calls a function with the width as its first constant.
macro_rules! by_width {
    ($width:expr, $function:ident $([$constant:tt])? ($($argument:expr),*)) => {
        match $width {
            1 => $function::<1 $(, $constant)?>($($argument),*),
            2 => $function::<2 $(, $constant)?>($($argument),*),
            3 => $function::<3 $(, $constant)?>($($argument),*),
            4 => $function::<4 $(, $constant)?>($($argument),*),
            5 => $function::<5 $(, $constant)?>($($argument),*),
            6 => $function::<6 $(, $constant)?>($($argument),*),
            7 => $function::<7 $(, $constant)?>($($argument),*),
            _ => $function::<8 $(, $constant)?>($($argument),*),
        }
    };
}
pub(crate) use by_width;

impl Work for Pack<'_> {
    #[inline(always)]
    fn run(self) {
        by_width!(self.width, pack(self.codes, self.out));
    }
}

#[inline(always)]
fn pack<const W: usize>(codes: &[u8], out: &mut [u8]) {
    let (groups, rest) = codes.as_chunks::<8>();
    let (rooms, last) = out.as_chunks_mut::<W>();
    for (group, room) in groups.iter().zip(rooms.iter_mut()) {
        let word = merge::<W>(u64::from_le_bytes(*group)).to_le_bytes();
        room.copy_from_slice(&word[..W]);
    }
    if !rest.is_empty() {
        let mut group = [0; 8];
        group[..rest.len()].copy_from_slice(rest);
        let word = merge::<W>(u64::from_le_bytes(group)).to_le_bytes();
        // The last group may fill a whole room, when its bits do.
        let room = rooms.get_mut(groups.len()).map_or(last, |room| &mut room[..]);
        room.copy_from_slice(&word[..room.len()]);
    }
}

/// The low W bits of 8 bytes, side by side: neighbours in three rounds.
#[inline(always)]
fn merge<const W: usize>(x: u64) -> u64 {
    let pairs = x & 0x00ff_00ff_00ff_00ff | (x & 0xff00_ff00_ff00_ff00) >> (8 - W);
    let fours = pairs & 0x0000_ffff_0000_ffff | (pairs & 0xffff_0000_ffff_0000) >> (16 - 2 * W);
    fours & 0xffff_ffff | fours >> 32 << (4 * W)
}

/// The inverse of [`Pack`]; answers the largest code.
pub(crate) struct Unpack<'a> {
    pub(crate) packed: &'a [u8],
    pub(crate) width: u32,
    pub(crate) codes: &'a mut [u8],
}

impl Work<u8> for Unpack<'_> {
    #[inline(always)]
    fn run(self) -> u8 {
        by_width!(self.width, unpack(self.packed, self.codes));
        self.codes.iter().fold(0, |most, code| most.max(*code))
    }
}

impl Unpack<'_> {
    /// At once as far as the kernel can, then 8 by 8.
    pub(crate) fn on(self, kernel: Kernel) -> u8 {
        let Self { packed, width, codes } = self;
        let (done, most) = kernel.unpack_first(packed, width, codes);
        if done == codes.len() {
            return most;
        }
        let rest = Unpack { packed: &packed[done / 8 * width as usize..], width, codes: &mut codes[done..] };
        most.max(kernel.run(rest))
    }
}

#[inline(always)]
fn unpack<const W: usize>(packed: &[u8], codes: &mut [u8]) {
    let (groups, rest) = codes.as_chunks_mut::<8>();
    for (group, from) in groups.iter_mut().zip(packed.chunks_exact(W)) {
        let mut word = [0; 8];
        word[..W].copy_from_slice(from);
        *group = spread::<W>(u64::from_le_bytes(word)).to_le_bytes();
    }
    if !rest.is_empty() {
        let from = &packed[groups.len() * W..];
        let mut word = [0; 8];
        word[..from.len()].copy_from_slice(from);
        let group = spread::<W>(u64::from_le_bytes(word)).to_le_bytes();
        rest.copy_from_slice(&group[..rest.len()]);
    }
}

/// One shift per lane: a single instruction for all 8.
#[inline(always)]
fn spread<const W: usize>(x: u64) -> u64 {
    let mut group = [0; 8];
    for (lane, code) in group.iter_mut().enumerate() {
        *code = (x >> (lane * W)) as u8 & (u8::MAX >> (8 - W));
    }
    u64::from_le_bytes(group)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::wire::Writer;
    use proptest::prelude::*;

    proptest! {
        /// The same bits as one by one, on every kernel.
        #[test]
        fn packing_is_that_of_the_format(width in 1u32..=8, values in prop::collection::vec(any::<u8>(), 0..500)) {
            let codes: Vec<u8> = values.iter().map(|v| (u32::from(*v) & ((1 << width) - 1)) as u8).collect();
            let mut want = Writer::new();
            let mut bits = want.bits();
            codes.iter().for_each(|code| bits.put(u64::from(*code), width));
            bits.finish();
            for kernel in Kernel::available() {
                let mut out = vec![0; want.len()];
                Pack { codes: &codes, width, out: &mut out }.on(kernel);
                prop_assert_eq!(&out[..], want.bytes());
                let mut back = vec![9; codes.len()];
                let most = Unpack { packed: &out, width, codes: &mut back }.on(kernel);
                prop_assert_eq!(most, codes.iter().copied().max().unwrap_or(0));
                prop_assert_eq!(&back, &codes);
            }
        }
    }
}
