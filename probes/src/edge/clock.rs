//! The monotonic clock, and the kernel's wall-clock stamps brought onto it.

use crate::Nanos;
use nix::time::{ClockId, clock_gettime};
use std::sync::atomic::{AtomicU64, Ordering};

/// A kernel stamp that claims a packet waited longer than this in the socket, or arrived so long after the clocks were read, is not
/// believed: the wall clock was set meanwhile.
const MAX_WAIT_NS: u64 = 5_000_000_000;

/// Readings of the clocks this close together were not interrupted.
const CLOSE_NS: u64 = 2_000;
/// What the quickest readings so far took. Where a reading is a system call they take longer than [`CLOSE_NS`]: then those that take at
/// most half again as long as these count as not interrupted.
static QUICKEST_NS: AtomicU64 = AtomicU64::new(u64::MAX);
/// By how much clocks run apart within a second at most: the wall clock is slewed by 500 ppm.
const SLEWED_NS: u64 = 1_000_000;
/// Tries to find such a pair; then the closest counts.
const TRIES: u32 = 5;

fn read(clock: ClockId) -> u64 {
    // CLOCK_MONOTONIC and CLOCK_REALTIME exist on every Linux; a clock that stands still loses samples only.
    clock_gettime(clock).map_or(0, |t| (t.tv_sec() as u64).wrapping_mul(1_000_000_000).wrapping_add(t.tv_nsec() as u64))
}

/// Now, by the clock that never jumps.
pub fn monotonic() -> Nanos {
    Nanos(read(ClockId::CLOCK_MONOTONIC))
}

/// The monotonic and the wall clock at one moment.
#[derive(Debug, Clone, Copy)]
pub(super) struct Clocks {
    now: Nanos,
    wall: u64,
}

impl Clocks {
    /// Whoever is interrupted between two readings would take the interruption for age of a packet, so the wall clock is read between
    /// two looks at the other one, which must lie close together.
    pub(super) fn read() -> Self {
        let mut best = (u64::MAX, Self { now: Nanos(0), wall: 0 });
        for _ in 0..TRIES {
            let (before, wall, after) = (monotonic(), read(ClockId::CLOCK_REALTIME), monotonic());
            let gap = after.0.saturating_sub(before.0);
            if gap < best.0 {
                best = (gap, Self { now: Nanos(before.0 + gap / 2), wall });
            }
            // The first reading of all has none to be compared with.
            let quickest = QUICKEST_NS.fetch_min(gap, Ordering::Relaxed);
            let usual = if quickest == u64::MAX { 0 } else { quickest + quickest / 2 };
            if gap <= CLOSE_NS.max(usual) {
                break;
            }
        }
        best.1
    }

    /// Whether the wall clock was set between these readings and later ones, at most a second apart.
    pub(super) fn was_set(self, later: Self) -> bool {
        later.now.0.wrapping_sub(self.now.0).abs_diff(later.wall.wrapping_sub(self.wall)) > SLEWED_NS
    }

    /// When a packet came that the kernel stamped by the wall clock, which is right unless somebody set that in between; then, and
    /// without a stamp, the moment of reading counts.
    pub(super) fn place(self, stamp_ns: Option<u64>) -> Nanos {
        let Some(stamp) = stamp_ns else { return self.now };
        match stamp.abs_diff(self.wall) {
            away if away > MAX_WAIT_NS => self.now,
            away if stamp > self.wall => Nanos(self.now.0.saturating_add(away)),
            away => Nanos(self.now.0.saturating_sub(away)),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const WALL: u64 = 90_000_000_000;
    const CLOCKS: Clocks = Clocks { now: Nanos(7_000_000_000), wall: WALL };

    #[test]
    fn absurd_stamps_fall_back_to_now() {
        for stamp in [None, Some(0), Some(u64::MAX), Some(WALL + MAX_WAIT_NS + 1), Some(WALL - MAX_WAIT_NS - 1)] {
            assert_eq!(CLOCKS.place(stamp), CLOCKS.now, "{stamp:?}");
        }
    }

    #[test]
    fn a_stamp_is_as_far_from_now_as_from_the_wall_clocks_reading() {
        assert_eq!(CLOCKS.place(Some(WALL - 1_000_000_000)), Nanos(6_000_000_000));
        assert_eq!(CLOCKS.place(Some(WALL + 1_000)), Nanos(7_000_001_000), "it came after the clocks were read");
        assert_eq!(Clocks { now: Nanos(5), wall: WALL }.place(Some(WALL - 1_000_000_000)), Nanos(0));
    }

    #[test]
    fn a_wall_clock_that_was_set_is_noticed() {
        let later = |now: u64, wall: u64| Clocks { now: Nanos(CLOCKS.now.0 + now), wall: WALL.wrapping_add(wall) };
        assert!(!CLOCKS.was_set(later(200_000_000, 200_100_000)), "slewed");
        assert!(CLOCKS.was_set(later(200_000_000, 1_200_000_000)));
        assert!(CLOCKS.was_set(later(200_000_000, 0u64.wrapping_sub(3_000_000_000))), "backwards");
    }

    #[test]
    fn the_moment_of_both_clocks_lies_between_its_readings() {
        let before = monotonic();
        let now = Clocks::read().now;
        assert!(before <= now && now <= monotonic());
    }
}
