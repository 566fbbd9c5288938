//! Bytes of index sets and of kept values, from their numbers alone: what encoders write and cost models charge.

use super::ValueType;

/// How a set of k indices below n is written. The number is its code on the wire.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[repr(u8)]
pub enum IndexCoding {
    /// Four bytes each.
    U32 = 1,
    /// Elias-Fano: l = ⌊log2(n/k)⌋ low bits each, then the counts of each upper part in unary (Elias 1974, Fano 1971).
    EliasFano = 2,
    /// The distance to the one before less 1, each in the bits of the largest.
    Gaps = 3,
    /// One bit per value of the tensor.
    Bitmap = 4,
}

impl IndexCoding {
    /// Every one, in the order of their codes.
    pub const ALL: [Self; 4] = [Self::U32, Self::EliasFano, Self::Gaps, Self::Bitmap];

    /// The one of least size among those whose size k and n tell; of equals the first.
    pub fn least(n: u64, k: u64) -> Self {
        let size = |coding: &Self| coding.fixed_bytes(n, k).unwrap_or(u64::MAX);
        [Self::U32, Self::EliasFano, Self::Bitmap].into_iter().min_by_key(size).unwrap_or(Self::U32)
    }

    /// Bytes without the code, where k and n tell them.
    pub fn fixed_bytes(self, n: u64, k: u64) -> Option<u64> {
        match self {
            Self::U32 => Some(4 * k),
            Self::EliasFano => {
                let EliasFano { low_bits, upper_bits } = EliasFano::of(n, k);
                Some((k * u64::from(low_bits)).div_ceil(8) + upper_bits.div_ceil(8))
            }
            Self::Bitmap => Some(n.div_ceil(8)),
            Self::Gaps => None,
        }
    }
}

/// The two parts of an Elias-Fano coding.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct EliasFano {
    /// l: bits of an index that are written as they are.
    pub low_bits: u32,
    /// Bits of the unary part: a one per index and a zero per upper part.
    pub upper_bits: u64,
}

impl EliasFano {
    /// Of k indices below n.
    pub fn of(n: u64, k: u64) -> Self {
        let low_bits = n.checked_div(k).map_or(0, |share| share.max(1).ilog2());
        Self { low_bits, upper_bits: if k == 0 { 0 } else { k + (n >> low_bits) + 1 } }
    }
}

/// Bytes of a set of k indices below n in its least coding, the byte that names the coding included.
pub fn index_bytes(n: u64, k: u64) -> u64 {
    1 + IndexCoding::least(n, k).fixed_bytes(n, k).unwrap_or(u64::MAX - 1)
}

/// Bytes of k of n values with their indices: k in 4 bytes, the set, the values.
pub fn selection_bytes(n: u64, k: u64, values: ValueType) -> u64 {
    4 + index_bytes(n, k) + values.bytes(k)
}

impl ValueType {
    /// Values that share a step of [`Self::Int8`].
    pub const BLOCK: u64 = 256;

    /// Bytes of k values.
    pub const fn bytes(self, k: u64) -> u64 {
        match self {
            Self::F32 => 4 * k,
            Self::Bf16 => 2 * k,
            Self::Int8 => k + 4 * k.div_ceil(Self::BLOCK),
        }
    }

    /// Bytes of one value among many.
    pub fn bytes_each(self) -> f64 {
        self.bytes(Self::BLOCK) as f64 / Self::BLOCK as f64
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_least_coding_changes_with_k() {
        let n = 1_000_000;
        assert_eq!(IndexCoding::least(n, 1), IndexCoding::U32);
        assert_eq!(IndexCoding::least(n, n / 100), IndexCoding::EliasFano);
        assert_eq!(IndexCoding::least(n, n / 2), IndexCoding::Bitmap);
        // 8.6 bits per index instead of 32.
        assert!(index_bytes(n, n / 100) < 11_000);
        // l = 6: 6 bits each, and 10,000 + 15,625 + 1 bits.
        assert_eq!(index_bytes(n, n / 100), 1 + 7_500 + 3_204);
        assert_eq!((index_bytes(0, 0), index_bytes(n, 0), index_bytes(n, n)), (1, 1, 1 + n / 8));
    }

    #[test]
    fn kept_values_take_what_their_type_says() {
        assert_eq!([ValueType::F32, ValueType::Bf16, ValueType::Int8].map(|t| t.bytes(257)), [1028, 514, 265]);
        let each = [ValueType::F32, ValueType::Bf16, ValueType::Int8].map(ValueType::bytes_each);
        assert_eq!(each, [4.0, 2.0, 1.0 + 4.0 / 256.0]);
    }
}
