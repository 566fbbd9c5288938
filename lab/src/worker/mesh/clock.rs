//! The clock by which ranks of one machine tell when the last of them entered an exchange.
//!
//! CLOCK_MONOTONIC is one clock for all processes of a running kernel. Ranks compare the kernel's boot
//! identity when they meet; only when it is the same everywhere do their stamps mean anything to each other.

use nix::time::{ClockId, clock_gettime};

/// Identity of the clock that [`now_us`] reads: a digest of the kernel's boot id, 0 when it cannot be read.
pub(super) fn identity() -> u64 {
    let boot = std::fs::read_to_string("/proc/sys/kernel/random/boot_id");
    boot.map_or(0, |id| flexcomm_domain::Digest::of(id.trim()).0)
}

/// Microseconds of CLOCK_MONOTONIC.
pub(super) fn now_us() -> u64 {
    // Linux always has this clock.
    clock_gettime(ClockId::CLOCK_MONOTONIC).map_or(0, |t| t.tv_sec() as u64 * 1_000_000 + t.tv_nsec() as u64 / 1000)
}
