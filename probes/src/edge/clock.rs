//! The monotonic clock, and the kernel's wall-clock stamps brought onto it.

use crate::Nanos;
use nix::time::{ClockId, clock_gettime};

/// A kernel stamp that claims a packet waited longer than this in the socket is not believed: the wall clock
/// was set meanwhile.
const MAX_WAIT_NS: u64 = 5_000_000_000;

/// Two readings of the monotonic clock this close together were not interrupted.
const CLOSE_NS: u64 = 2_000;
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

/// Both clocks at the same moment. Whoever is interrupted between the two readings would take the interruption for
/// age of a packet, so the wall clock is read between two looks at the other one, which must lie close together.
fn both() -> (Nanos, u64) {
    let mut best = (u64::MAX, Nanos(0), 0);
    for _ in 0..TRIES {
        let (before, wall, after) = (monotonic(), read(ClockId::CLOCK_REALTIME), monotonic());
        let gap = after.0.saturating_sub(before.0);
        if gap < best.0 {
            best = (gap, Nanos(before.0 + gap / 2), wall);
        }
        if gap <= CLOSE_NS {
            break;
        }
    }
    (best.1, best.2)
}

/// The kernel stamps packets by the wall clock. The age of the stamp is what the wall clock has moved since,
/// which is right unless somebody set it in these microseconds; then the moment of reading counts.
pub(super) fn from_stamp(stamp_ns: Option<u64>) -> Nanos {
    let (now, wall) = both();
    placed(now, wall, stamp_ns)
}

/// A wall-clock stamp on the monotonic clock, given both clocks at one moment.
fn placed(now: Nanos, wall: u64, stamp_ns: Option<u64>) -> Nanos {
    match stamp_ns.map(|stamp| wall.wrapping_sub(stamp)) {
        Some(age) if age <= MAX_WAIT_NS => Nanos(now.0.saturating_sub(age)),
        _ => now,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const NOW: Nanos = Nanos(7_000_000_000);
    const WALL: u64 = 90_000_000_000;

    #[test]
    fn absurd_stamps_fall_back_to_now() {
        for stamp in [None, Some(0), Some(u64::MAX), Some(WALL + 1), Some(WALL - MAX_WAIT_NS - 1)] {
            assert_eq!(placed(NOW, WALL, stamp), NOW, "{stamp:?}");
        }
    }

    #[test]
    fn a_stamp_moves_back_by_its_age() {
        assert_eq!(placed(NOW, WALL, Some(WALL - 1_000_000_000)), Nanos(6_000_000_000));
        assert_eq!(placed(Nanos(5), WALL, Some(WALL - 1_000_000_000)), Nanos(0));
    }

    #[test]
    fn the_moment_of_both_clocks_lies_between_its_readings() {
        let before = monotonic();
        let (now, _) = both();
        assert!(before <= now && now <= monotonic());
    }
}
