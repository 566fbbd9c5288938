//! What messages really weigh: header, indices and values of a codec.

use crate::Invalid;
use crate::spec::index_bytes;
use serde::{Deserialize, Serialize};

/// Widest index or value a codec may claim, in bytes: catches a unit mistake, not a real format.
const MAX_BYTES_PER_VALUE: f64 = 64.0;

/// Most collectives of one codec in a step: catches nonsense, not a real method.
const MAX_ROUNDS: u32 = 16;

/// What the indices of k values out of n weigh.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum IndexBytes {
    /// So many bytes each.
    Each(f64),
    /// The least of the codings whose size n and k tell: [`index_bytes`].
    Least,
}

impl IndexBytes {
    /// Bytes of k indices below n.
    pub fn of(self, n: u64, k: u64) -> f64 {
        match self {
            Self::Each(bytes) => k as f64 * bytes,
            Self::Least => index_bytes(n, k) as f64,
        }
    }
}

/// Bytes of a codec's messages in one step, by the gradient's n values and the kept ones k (all n where the codec leaves none
/// out): a message that is gathered, or adds up, has [`Self::pairs`]; AR-Topk broadcasts [`Self::indices`] and reduces
/// [`Self::values`].
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct CodecBytes {
    /// Fixed part of a message, bytes.
    pub header_bytes: u64,
    /// Of the kept values' indices.
    pub indices: IndexBytes,
    /// Bytes of value per kept value.
    pub value_bytes: f64,
    /// Collectives in a step, one after the other, that together move these bytes: 2 for PowerSGD's two factors.
    pub rounds: u32,
}

impl CodecBytes {
    /// What the paper charges: 4 bytes of index and 4 of value, no header.
    pub const PAPER: Self = Self { header_bytes: 0, indices: IndexBytes::Each(4.0), value_bytes: 4.0, rounds: 1 };

    /// What travels densely, as it is: 4 bytes a value.
    pub const DENSE: Self = Self { indices: IndexBytes::Each(0.0), ..Self::PAPER };

    /// Refuses negative, infinite or absurd widths.
    pub fn new(header_bytes: u64, indices: IndexBytes, value_bytes: f64) -> Result<Self, Invalid> {
        let each = match indices {
            IndexBytes::Each(bytes) => bytes,
            IndexBytes::Least => 0.0,
        };
        for (what, value) in [("codec's index bytes per value", each), ("codec's value bytes per value", value_bytes)] {
            if !(0.0..=MAX_BYTES_PER_VALUE).contains(&value) {
                return Err(Invalid::Range { what, value, allowed: "0 to 64".into() });
            }
        }
        Ok(Self { header_bytes, indices, value_bytes, rounds: 1 })
    }

    /// With so many collectives in a step. Refuses 0 and more than any method has.
    pub fn in_rounds(self, rounds: u32) -> Result<Self, Invalid> {
        if !(1..=MAX_ROUNDS).contains(&rounds) {
            let value = f64::from(rounds);
            return Err(Invalid::Range { what: "codec's number of rounds", value, allowed: "1 to 16".into() });
        }
        Ok(Self { rounds, ..self })
    }

    /// Bytes each rank contributes to a collective that moves k of its n values with all that belongs to them.
    pub fn pairs(&self, n: u64, k: u64) -> f64 {
        self.indices(n, k) + self.values(k)
    }

    /// Bytes of the indices of k of n values that AR-Topk broadcasts.
    pub fn indices(&self, n: u64, k: u64) -> f64 {
        self.header_bytes as f64 + self.indices.of(n, k)
    }

    /// Bytes of the k values that AR-Topk reduces.
    pub fn values(&self, k: u64) -> f64 {
        k as f64 * self.value_bytes
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_follow_the_codec() {
        let codec = CodecBytes::new(16, IndexBytes::Each(3.0), 4.0).unwrap();
        assert_eq!((codec.pairs(1000, 100), codec.indices(1000, 100), codec.values(100)), (716.0, 316.0, 400.0));
        let least = CodecBytes { indices: IndexBytes::Least, ..codec };
        // A bitmap of 1000 bits and the byte that names it, against Elias-Fano's 38 + 29 bytes.
        assert_eq!((least.indices(1000, 500), least.indices(1000, 100)), (142.0, 16.0 + 68.0));
        assert_eq!(least.pairs(1000, 100), 484.0);
    }

    #[test]
    fn absurd_codecs_are_refused() {
        for bad in [-1.0, f64::NAN, f64::INFINITY, 65.0] {
            assert!(CodecBytes::new(0, IndexBytes::Each(bad), 4.0).is_err(), "{bad}");
            assert!(CodecBytes::new(0, IndexBytes::Least, bad).is_err(), "{bad}");
        }
        assert!(CodecBytes::PAPER.in_rounds(0).is_err() && CodecBytes::PAPER.in_rounds(17).is_err());
    }
}
