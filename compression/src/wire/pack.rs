//! Whole numbers of w bits each, packed without gaps.

use super::{Reader, Writer};
use crate::Kernel;
use crate::codec::ReadError;
use crate::kernels::{Pack, Unpack};

/// Bytes that `count` numbers of `width` bits take.
pub const fn packed_bytes(count: usize, width: u32) -> usize {
    (count * width as usize).div_ceil(8)
}

/// Bits for `levels` different numbers: ⌈log2(levels)⌉.
pub const fn levels_width(levels: u64) -> u32 {
    if levels <= 1 { 0 } else { (levels - 1).ilog2() + 1 }
}

/// Appends numbers below 2^width; width from 1 to 8.
pub fn pack(values: &[u8], width: u32, out: &mut Writer) {
    debug_assert!((1..=8).contains(&width), "width {width}");
    Pack { codes: values, width, out: out.room(packed_bytes(values.len(), width)) }.on(Kernel::Portable);
}

/// Fills `out` with numbers of `width` bits; width from 1 to 8. Padding must be 0.
pub fn unpack(from: &mut Reader<'_>, what: &'static str, width: u32, out: &mut [u8]) -> Result<(), ReadError> {
    debug_assert!((1..=8).contains(&width), "width {width}");
    let packed = from.take(what, packed_bytes(out.len(), width))?;
    let used = out.len() % 8 * width as usize % 8;
    Unpack { packed, width, codes: out }.on(Kernel::Portable);
    let padding = packed.last().map_or(0, |byte| if used == 0 { 0 } else { byte >> used });
    if padding == 0 { Ok(()) } else { Err(ReadError::field(what, padding, "padding must be 0")) }
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
