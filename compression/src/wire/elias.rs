//! Elias' gamma and delta codes of whole numbers from 1 on (Elias 1975), as QSGD uses them for its levels.
//!
//! The bits come in the order in which the literature writes them: the number's own bits with the highest first.

use super::{BitReader, BitWriter};
use crate::codec::ReadError;

/// Bits of the gamma code.
pub const fn gamma_bits(value: u64) -> u32 {
    2 * value.ilog2() + 1
}

/// Bits of the delta code.
pub const fn delta_bits(value: u64) -> u32 {
    let length = value.ilog2();
    gamma_bits(length as u64 + 1) + length
}

/// The lowest `width` bits of `value`, highest first.
const fn high_first(value: u64, width: u32) -> u64 {
    if width == 0 { 0 } else { value.reverse_bits() >> (64 - width) }
}

/// Bits to [`BitWriter::put`], and how many.
#[derive(Debug, Clone, Copy, Default)]
pub struct Code {
    /// The first bit lowest.
    pub bits: u64,
    /// At most 64.
    pub width: u32,
}

impl Code {
    /// Gamma: as many zeros as the number has bits after its first, then the number. From 1 to 2^32 − 1.
    pub const fn gamma(value: u64) -> Self {
        let length = value.ilog2();
        Self { bits: high_first(value, length + 1) << length, width: 2 * length + 1 }
    }

    /// Delta: the gamma code of the number of bits, then the bits after the first. From 1 to 2^49 − 1.
    pub const fn delta(value: u64) -> Self {
        let length = value.ilog2();
        Self::gamma(length as u64 + 1).then(Self { bits: high_first(value, length), width: length })
    }

    /// Both, one after the other, where they take no more than 64 bits.
    pub const fn then(self, other: Self) -> Self {
        Self { bits: self.bits | other.bits << self.width, width: self.width + other.width }
    }
}

fn get_high_first(bits: &mut BitReader<'_>, what: &'static str, width: u32) -> Result<u64, ReadError> {
    let read = bits.get(what, width)?;
    Ok(if width == 0 { 0 } else { read.reverse_bits() >> (64 - width) })
}

/// Longest number that is read back: below 2^49, far above any level or gap.
const MOST_BITS: u32 = 48;

/// The number whose gamma code these bits begin with, and its width: above 64 where it may be a longer one.
#[inline(always)]
pub const fn first_gamma(bits: u64) -> (u64, u32) {
    let zeros = if bits.trailing_zeros() < 32 { bits.trailing_zeros() } else { 32 };
    ((bits >> zeros).reverse_bits() >> (63 - zeros), 2 * zeros + 1)
}

/// The same of a delta code.
#[inline(always)]
pub fn first_delta(bits: u64) -> (u64, u32) {
    let [length, width] = LENGTHS[bits as usize & 127].map(u32::from);
    // A one in front of the bits after the first is that first one.
    // They are fewer than 16: a reversal of 32 bits takes fewer constants than one of 64.
    let reversed = (bits.wrapping_shr(width) as u32) << 1 | 1;
    (u64::from(reversed.reverse_bits() >> (31 - length)), width + length)
}

/// The number of bits that a delta code gives first, less 1, and the width of that: by the next seven bits. With more than
/// three zeros in front it is a longer one, of which the width leaves none for others.
static LENGTHS: [[u8; 2]; 128] = {
    let (mut lengths, mut bits) = ([[0, 65]; 128], 1);
    while bits < 128 {
        let (length, width) = first_gamma(bits as u64);
        if width <= 7 {
            lengths[bits] = [length as u8 - 1, width as u8];
        }
        bits += 1;
    }
    lengths
};

impl BitWriter<'_> {
    /// Gamma: as many zeros as the number has bits after its first, then the number. From 1 to 2^49 − 1.
    pub fn gamma(&mut self, value: u64) {
        debug_assert!(value > 0 && value.ilog2() <= MOST_BITS, "{value}");
        let length = value.max(1).ilog2();
        self.zeros(length);
        self.put(high_first(value, length + 1), length + 1);
    }

    /// Delta: the gamma code of the number of bits, then the bits after the first. From 1 to 2^49 − 1.
    pub fn delta(&mut self, value: u64) {
        let Code { bits, width } = Code::delta(value.max(1));
        self.put(bits, width);
    }
}

impl BitReader<'_> {
    /// A gamma code.
    pub fn gamma(&mut self, what: &'static str) -> Result<u64, ReadError> {
        let (bits, count) = self.peek();
        let (value, width) = first_gamma(bits);
        if width < count {
            self.skip(width);
            return Ok(value);
        }
        self.long_gamma(what)
    }

    /// One that takes more bits than are peeked at.
    #[cold]
    fn long_gamma(&mut self, what: &'static str) -> Result<u64, ReadError> {
        // The first one has been read with the zeros.
        let length = self.zeros(what, MOST_BITS)?;
        Ok(1 << length | get_high_first(self, what, length)?)
    }

    /// A delta code.
    pub fn delta(&mut self, what: &'static str) -> Result<u64, ReadError> {
        let length = self.gamma(what)? - 1;
        if length > u64::from(MOST_BITS) {
            return Err(ReadError::field(what, length, "too long a number"));
        }
        Ok(1 << length | get_high_first(self, what, length as u32)?)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::wire::Writer;
    use proptest::prelude::*;

    fn text(write: impl Fn(&mut BitWriter<'_>), width: u32) -> String {
        let mut out = Writer::new();
        let mut bits = out.bits();
        write(&mut bits);
        bits.finish();
        let mut reader = BitReader::new(out.bytes());
        (0..width).map(|_| if reader.get("bit", 1).unwrap() == 1 { '1' } else { '0' }).collect()
    }

    #[test]
    fn known_values() {
        let delta = [
            (1, "1"),
            (2, "0100"),
            (3, "0101"),
            (4, "01100"),
            (5, "01101"),
            (8, "00100000"),
            (10, "00100010"),
            (17, "001010001"),
            (100, "00111100100"),
        ];
        for (value, code) in delta {
            assert_eq!(delta_bits(value) as usize, code.len(), "{value}");
            assert_eq!(text(|bits| bits.delta(value), delta_bits(value)), code, "{value}");
        }
        for (value, code) in [(1, "1"), (2, "010"), (3, "011"), (4, "00100"), (9, "0001001")] {
            assert_eq!(text(|bits| bits.gamma(value), gamma_bits(value)), code, "{value}");
        }
    }

    proptest! {
        #[test]
        fn numbers_come_back(values in prop::collection::vec(prop_oneof![1u64..20, 1u64..1 << 33, Just((1 << 49) - 1)], 0..60)) {
            let mut out = Writer::new();
            let mut bits = out.bits();
            for value in &values {
                bits.gamma(*value);
                bits.delta(*value);
            }
            bits.finish();
            let mut reader = BitReader::new(out.bytes());
            for value in &values {
                prop_assert_eq!(reader.gamma("it").unwrap(), *value);
                prop_assert_eq!(reader.delta("it").unwrap(), *value);
            }
            reader.finish("it").unwrap();
        }

        #[test]
        fn any_bits_are_read_or_refused(bytes in prop::collection::vec(any::<u8>(), 0..40)) {
            let mut reader = BitReader::new(&bytes);
            while reader.delta("it").is_ok() {}
            let mut reader = BitReader::new(&bytes);
            while reader.gamma("it").is_ok() {}
        }
    }
}
