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

    #[test]
    fn widths() {
        assert_eq!([1, 2, 3, 4, 5, 9, 255, 256, 257].map(levels_width), [0, 1, 2, 2, 3, 4, 8, 8, 9]);
    }

    #[test]
    fn padding_and_levels_are_checked() {
        let (mut back, mut out) = ([0; 3], Writer::new());
        pack(&[1, 2, 3], 2, &mut out);
        assert_eq!((out.bytes(), out.len()), (&[0b0011_1001][..], packed_bytes(3, 2)));
        let mut reader = Reader::new(out.bytes());
        assert!(unpack(&mut reader, "it", 2, &mut back).is_ok());
        assert_eq!((back, reader.left()), ([1, 2, 3], 0));
        assert!(unpack(&mut Reader::new(&[0b0111_1001]), "it", 2, &mut back).is_err());
        assert!(unpack_checked(&mut Reader::new(&[0b0011_1001]), "it", 3, &mut back).is_err());
        assert!(unpack_checked(&mut Reader::new(&[0b0010_1001]), "it", 3, &mut back).is_ok());
        assert!(unpack(&mut Reader::new(&[]), "it", 2, &mut back).is_err());
    }
}
