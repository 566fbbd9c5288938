//! Whole numbers of w bits each, packed without gaps: 8 numbers fill exactly w bytes, so that groups of 8 are worked on
//! in one word and loops over groups become vectors.

use super::{Reader, Writer};
use crate::codec::ReadError;

/// Bytes that `count` numbers of `width` bits take.
pub const fn packed_bytes(count: usize, width: u32) -> usize {
    (count * width as usize).div_ceil(8)
}

/// Bits for `levels` different numbers: ⌈log2(levels)⌉.
pub const fn levels_width(levels: u64) -> u32 {
    if levels <= 1 { 0 } else { (levels - 1).ilog2() + 1 }
}

/// Eight numbers in one word.
#[inline(always)]
fn word(group: &[u8; 8], width: u32) -> u64 {
    let mut word = 0;
    for (lane, value) in group.iter().enumerate() {
        word |= u64::from(*value) << (lane as u32 * width);
    }
    word
}

/// Appends numbers below 2^width; width from 1 to 8.
pub fn pack(values: &[u8], width: u32, out: &mut Writer) {
    debug_assert!((1..=8).contains(&width), "width {width}");
    let bytes = width as usize;
    let (groups, rest) = values.as_chunks::<8>();
    let room = out.room(packed_bytes(values.len(), width));
    for (group, to) in groups.iter().zip(room.chunks_mut(bytes)) {
        to.copy_from_slice(&word(group, width).to_le_bytes()[..bytes]);
    }
    if !rest.is_empty() {
        let mut last = [0; 8];
        last[..rest.len()].copy_from_slice(rest);
        let to = &mut room[groups.len() * bytes..];
        to.copy_from_slice(&word(&last, width).to_le_bytes()[..to.len()]);
    }
}

/// Fills `out` with numbers of `width` bits; width from 1 to 8. Padding must be 0.
pub fn unpack(from: &mut Reader<'_>, what: &'static str, width: u32, out: &mut [u8]) -> Result<(), ReadError> {
    debug_assert!((1..=8).contains(&width), "width {width}");
    let bytes = width as usize;
    let packed = from.take(what, packed_bytes(out.len(), width))?;
    let mask = ((1u32 << width) - 1) as u8;
    let (groups, rest) = out.as_chunks_mut::<8>();
    let whole = groups.len() * bytes;
    for (group, from) in groups.iter_mut().zip(packed[..whole].chunks(bytes)) {
        spread(from, width, mask, group);
    }
    if rest.is_empty() {
        return Ok(());
    }
    let mut last = [0; 8];
    spread(&packed[whole..], width, mask, &mut last);
    rest.copy_from_slice(&last[..rest.len()]);
    let used = rest.len() as u32 * width;
    let padding = packed.last().map_or(0, |b| if used.is_multiple_of(8) { 0 } else { b >> (used % 8) });
    if padding == 0 { Ok(()) } else { Err(ReadError::field(what, padding, "padding must be 0")) }
}

#[inline(always)]
fn spread(from: &[u8], width: u32, mask: u8, group: &mut [u8; 8]) {
    let mut word = [0; 8];
    word[..from.len()].copy_from_slice(from);
    let word = u64::from_le_bytes(word);
    for (lane, value) in group.iter_mut().enumerate() {
        *value = (word >> (lane as u32 * width)) as u8 & mask;
    }
}

/// As [`unpack`], and every number must be below `levels`.
pub fn unpack_checked(from: &mut Reader<'_>, what: &'static str, levels: u64, out: &mut [u8]) -> Result<(), ReadError> {
    unpack(from, what, levels_width(levels), out)?;
    match out.iter().find(|v| u64::from(**v) >= levels) {
        Some(value) => Err(ReadError::field(what, *value, "no such level")),
        None => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn numbers_come_back(width in 1u32..=8, values in prop::collection::vec(any::<u8>(), 0..200)) {
            let values: Vec<u8> = values.iter().map(|v| (u32::from(*v) & ((1 << width) - 1)) as u8).collect();
            let mut out = Writer::new();
            pack(&values, width, &mut out);
            prop_assert_eq!(out.len(), packed_bytes(values.len(), width));
            // The same bits one by one.
            let mut slow = Writer::new();
            let mut bits = slow.bits();
            values.iter().for_each(|v| bits.put(u64::from(*v), width));
            bits.finish();
            prop_assert_eq!(&out, &slow);
            let mut back = vec![7; values.len()];
            let mut reader = Reader::new(out.bytes());
            unpack(&mut reader, "it", width, &mut back).unwrap();
            prop_assert_eq!((back, reader.left()), (values, 0));
        }
    }

    #[test]
    fn widths() {
        assert_eq!([1, 2, 3, 4, 5, 9, 255, 256, 257].map(levels_width), [0, 1, 2, 2, 3, 4, 8, 8, 9]);
    }

    #[test]
    fn padding_and_levels_are_checked() {
        let mut back = [0; 3];
        assert!(unpack(&mut Reader::new(&[0b0011_1001]), "it", 2, &mut back).is_ok());
        assert_eq!(back, [1, 2, 3]);
        assert!(unpack(&mut Reader::new(&[0b0111_1001]), "it", 2, &mut back).is_err());
        assert!(unpack_checked(&mut Reader::new(&[0b0011_1001]), "it", 3, &mut back).is_err());
        assert!(unpack_checked(&mut Reader::new(&[0b0010_1001]), "it", 3, &mut back).is_ok());
        assert!(unpack(&mut Reader::new(&[]), "it", 2, &mut back).is_err());
    }
}
