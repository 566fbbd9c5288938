//! What throughput tests tell.

use super::{BANDWIDTH_SD, OF_NIC};

/// What is faster than believed may be faster still, where a test is a lower bound.
const LOWER_BOUND_SD: f64 = 0.5;
/// Of a test that a shaper's token bucket may have let pass: one of 64 KiB makes a test of 64 KiB look up to 30 times as fast.
pub(super) const SHORT_SD: f64 = 1.5;

/// What a throughput test tells of a bandwidth.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum TestKind {
    /// What it is, but for the test's error.
    Whole,
    /// What it is at least.
    LowerBound,
    /// Hardly anything where it is fast: it was over so soon that a shaper's token bucket may have let all of it pass.
    Short,
}

impl TestKind {
    /// By how much it is off, in logarithms.
    pub(super) fn sd(self) -> f64 {
        match self {
            Self::Whole => BANDWIDTH_SD,
            Self::LowerBound => LOWER_BOUND_SD,
            Self::Short => SHORT_SD,
        }
    }
}

/// By how much so many throughput tests are off about what all NICs have in common: each by its own error, and by half of what its two NICs
/// differ by, of so many pairs of nodes.
pub fn test_sd(kind: TestKind, tests: f64, pairs: f64) -> f64 {
    (kind.sd() / tests.sqrt()).hypot(OF_NIC.sd / (2.0 * tests.min(pairs)).sqrt())
}
