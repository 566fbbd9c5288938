//! What messages really weigh: the codec's header and index width, not the paper's "two floats per value".

use flexcomm_domain::Invalid;
use serde::{Deserialize, Serialize};

/// Widest index or value a codec may claim, in bytes: catches a unit mistake, not a real format.
const MAX_BYTES_PER_VALUE: f64 = 64.0;

/// Bytes of a codec's messages, linear in the kept values k: by allgather a message has
/// `header_bytes + k * (index_bytes + value_bytes)`; AR-Topk broadcasts `header_bytes + k * index_bytes`
/// and reduces `k * value_bytes`.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct CodecBytes {
    /// Fixed part of a message, bytes.
    pub header_bytes: u64,
    /// Bytes of index per kept value.
    pub index_bytes: f64,
    /// Bytes of value per kept value.
    pub value_bytes: f64,
}

impl CodecBytes {
    /// What the paper charges: 4 bytes of index and 4 of value, no header.
    pub const PAPER: Self = Self { header_bytes: 0, index_bytes: 4.0, value_bytes: 4.0 };

    /// Refuses negative, infinite or absurd widths.
    pub fn new(header_bytes: u64, index_bytes: f64, value_bytes: f64) -> Result<Self, Invalid> {
        for (what, value) in
            [("codec's index bytes per value", index_bytes), ("codec's value bytes per value", value_bytes)]
        {
            if !(0.0..=MAX_BYTES_PER_VALUE).contains(&value) {
                return Err(Invalid::Range { what, value, allowed: "0 to 64" });
            }
        }
        Ok(Self { header_bytes, index_bytes, value_bytes })
    }

    /// Bytes each rank contributes to an allgather of its k pairs.
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
