/// A point in time: nanoseconds of a monotonic clock since any fixed origin. Microseconds
/// ([`flexcomm_domain::Timestamp`]) are too coarse for a round trip inside a rack.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default)]
pub struct Nanos(pub u64);

impl Nanos {
    /// Seconds passed since `earlier`; 0 when `earlier` is later.
    pub fn since(self, earlier: Nanos) -> f64 {
        self.0.saturating_sub(earlier.0) as f64 * 1e-9
    }

    /// This point moved by `seconds` (negative and NaN count as 0); saturates at the end of time.
    pub fn plus(self, seconds: f64) -> Nanos {
        Nanos(self.0.saturating_add((seconds.max(0.0) * 1e9) as u64))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn never_underflows() {
        assert_eq!(Nanos(5).since(Nanos(9)), 0.0);
        assert_eq!(Nanos(u64::MAX).plus(1.0), Nanos(u64::MAX));
        assert_eq!(Nanos(7).plus(f64::NAN), Nanos(7));
    }
}
