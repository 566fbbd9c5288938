//! What messages really weigh: the codec's header and index width, not the paper's "two floats per value".

use flexcomm_domain::Invalid;
use serde::{Deserialize, Serialize};

/// Widest index or value a codec may claim, in bytes: catches a unit mistake, not a real format.
const MAX_BYTES_PER_VALUE: f64 = 64.0;

/// Bytes of a codec's messages in one step, linear in the kept values k (all n where the codec leaves none out): a message that
/// is gathered, or adds up, has `header_bytes + k * (index_bytes + value_bytes)`; AR-Topk broadcasts
/// `header_bytes + k * index_bytes` and reduces `k * value_bytes`.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct CodecBytes {
    /// Fixed part of a message, bytes.
    pub header_bytes: u64,
    /// Bytes of index per kept value.
    pub index_bytes: f64,
    /// Bytes of value per kept value.
    pub value_bytes: f64,
    /// Collectives in a step, one after the other, that together move these bytes: 2 for PowerSGD's two factors.
    #[serde(default = "one")]
    pub rounds: u32,
}

fn one() -> u32 {
    1
}

/// Most collectives of one codec in a step: catches nonsense, not a real method.
const MAX_ROUNDS: u32 = 16;

impl CodecBytes {
    /// What the paper charges: 4 bytes of index and 4 of value, no header.
    pub const PAPER: Self = Self { header_bytes: 0, index_bytes: 4.0, value_bytes: 4.0, rounds: 1 };

    /// Refuses negative, infinite or absurd widths.
    pub fn new(header_bytes: u64, index_bytes: f64, value_bytes: f64) -> Result<Self, Invalid> {
        for (what, value) in
            [("codec's index bytes per value", index_bytes), ("codec's value bytes per value", value_bytes)]
        {
            if !(0.0..=MAX_BYTES_PER_VALUE).contains(&value) {
                return Err(Invalid::Range { what, value, allowed: "0 to 64" });
            }
        }
        Ok(Self { header_bytes, index_bytes, value_bytes, rounds: 1 })
    }

    /// With so many collectives in a step. Refuses 0 and more than any method has.
    pub fn in_rounds(self, rounds: u32) -> Result<Self, Invalid> {
        if !(1..=MAX_ROUNDS).contains(&rounds) {
            let value = f64::from(rounds);
            return Err(Invalid::Range { what: "codec's number of rounds", value, allowed: "1 to 16" });
        }
        Ok(Self { rounds, ..self })
    }

    /// What travels densely, as it is: 4 bytes a value.
    pub const DENSE: Self = Self { header_bytes: 0, index_bytes: 0.0, value_bytes: 4.0, rounds: 1 };

    /// Bytes each rank contributes to a collective that moves its k values with all that belongs to them.
    pub fn pairs(&self, k: u64) -> f64 {
        self.header_bytes as f64 + k as f64 * (self.index_bytes + self.value_bytes)
    }

    /// Bytes of the indices that AR-Topk broadcasts.
    pub fn indices(&self, k: u64) -> f64 {
        self.header_bytes as f64 + k as f64 * self.index_bytes
    }

    /// Bytes of the k values that AR-Topk reduces.
    pub fn values(&self, k: u64) -> f64 {
        k as f64 * self.value_bytes
    }
}

/// Bytes of a dense gradient of `values` fp32 values.
pub fn dense_bytes(values: u64) -> f64 {
    4.0 * values as f64
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_follow_the_codec() {
        let codec = CodecBytes::new(16, 3.0, 4.0).unwrap();
        assert_eq!(codec.pairs(100), 716.0);
        assert_eq!(codec.indices(100), 316.0);
        assert_eq!(codec.values(100), 400.0);
        assert_eq!(dense_bytes(1_000), 4_000.0);
    }

    #[test]
    fn absurd_codecs_are_refused() {
        for bad in [-1.0, f64::NAN, f64::INFINITY, 65.0] {
            assert!(CodecBytes::new(0, bad, 4.0).is_err(), "{bad}");
            assert!(CodecBytes::new(0, 4.0, bad).is_err(), "{bad}");
        }
    }
}
