//! Points in time as data. This crate never reads a clock.

use crate::Seconds;
use serde::{Deserialize, Serialize};

/// Microseconds since the Unix epoch (or since any fixed origin, in simulations).
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default, Serialize, Deserialize)]
#[serde(transparent)]
pub struct Timestamp(pub u64);

impl Timestamp {
    /// Time passed since `earlier`; zero when the clock jumped back.
    pub fn since(self, earlier: Timestamp) -> Seconds {
        let micros = self.0.saturating_sub(earlier.0);
        Seconds::new(micros as f64 * 1e-6).unwrap_or_else(|_| Seconds::new(31_536_000.0).unwrap_or(Seconds::ZERO))
    }

    /// Seconds since the origin, as a plain number for arithmetic: [`Self::since`] says a year at most.
    pub fn seconds(self) -> f64 {
        self.0 as f64 * 1e-6
    }

    /// This point moved forward; saturates at the end of time.
    pub fn plus(self, by: Seconds) -> Timestamp {
        Timestamp(self.0.saturating_add((by.get() * 1e6) as u64))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn clock_jumps_do_not_underflow() {
        assert_eq!(Timestamp(5).since(Timestamp(10)), Seconds::ZERO);
        assert_eq!(Timestamp(u64::MAX).since(Timestamp(0)).get(), 31_536_000.0);
        assert_eq!(Timestamp(1_795_000_000_500_000).seconds(), 1_795_000_000.5);
        assert_eq!(Timestamp(1).plus(Seconds::new(2.0).unwrap()), Timestamp(2_000_001));
    }
}
