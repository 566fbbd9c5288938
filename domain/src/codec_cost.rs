//! How long codecs take.

use crate::Invalid;
use serde::{Deserialize, Serialize};

/// What compressing, or decompressing one message, takes: seconds per value of the gradient, and per kept one on top.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct CodecCost {
    /// Per value.
    pub value_s: f64,
    /// Per kept value.
    pub kept_s: f64,
}

impl CodecCost {
    /// Longest time per value that is believed, in seconds: catches a wrong unit.
    pub const MOST_S: f64 = 1e-3;

    /// Refuses negative, infinite or absurd times.
    pub fn new(value_s: f64, kept_s: f64) -> Result<Self, Invalid> {
        for (what, value) in [("codec's time per value", value_s), ("codec's time per kept value", kept_s)] {
            if !(0.0..=Self::MOST_S).contains(&value) {
                return Err(Invalid::Range { what, value, allowed: "0 to 0.001 s".into() });
            }
        }
        Ok(Self { value_s, kept_s })
    }

    /// Through two points (share of kept values, seconds per value), of the smaller share first; of one alone kept values cost no more
    /// than others.
    pub fn through(low: (f64, f64), high: (f64, f64)) -> Self {
        let kept_s = ((high.1 - low.1) / (high.0 - low.0)).max(0.0);
        Self { value_s: (low.1 - kept_s * low.0).max(0.0), kept_s }
    }

    /// Seconds for so many values, of which this share is kept.
    pub fn of(self, values: f64, ratio: f64) -> f64 {
        self.value_s * values + self.kept_s * ratio * values
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn absurd_times_are_refused_by_name() {
        for bad in [-1e-12, f64::NAN, f64::INFINITY, 1.1e-3] {
            let error = |made: Result<CodecCost, Invalid>| made.unwrap_err().to_string();
            assert!(error(CodecCost::new(bad, 0.0)).starts_with("codec's time per value is "));
            assert!(error(CodecCost::new(0.0, bad)).starts_with("codec's time per kept value is "));
        }
        assert!(CodecCost::new(0.0, CodecCost::MOST_S).is_ok());
    }

    #[test]
    fn a_line_goes_through_both_points_and_is_never_negative() {
        let line = CodecCost::through((0.001, 3e-9), (0.1, 12.9e-9));
        assert!((line.kept_s - 1e-7).abs() < 1e-18 && (line.of(1.0, 0.1) - 12.9e-9).abs() < 1e-18);
        assert_eq!(CodecCost::through((0.001, 3e-9), (0.1, 2e-9)), CodecCost { value_s: 3e-9, kept_s: 0.0 });
        assert_eq!(CodecCost::through((0.5, 1e-9), (1.0, 9e-9)).value_s, 0.0);
        assert_eq!(CodecCost::through((1.0, 4e-9), (1.0, 4e-9)), CodecCost { value_s: 4e-9, kept_s: 0.0 });
    }
}
