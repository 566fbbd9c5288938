//! The controller's own time. Ages and versions never depend on an agent's clock.

use flexcomm_domain::Timestamp;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

/// What the time is.
#[derive(Debug)]
pub enum Clock {
    /// Wall-clock time at the start, moved on by the monotonic clock: a wall clock that is set while the controller runs
    /// moves nothing.
    Running {
        /// At the start.
        base: Timestamp,
        /// The same moment.
        start: Instant,
    },
    /// As somebody sets it.
    Given(Arc<GivenTime>),
}

/// A time that its holder moves. It begins at [`FIRST_PLAUSIBLE`], so that nothing depends on today.
#[derive(Debug, Default)]
pub struct GivenTime {
    since_start_us: AtomicU64,
}

impl GivenTime {
    /// Moves it on; an earlier time changes nothing.
    pub fn set(&self, since_start: Duration) {
        let us = u64::try_from(since_start.as_micros()).unwrap_or(u64::MAX);
        self.since_start_us.fetch_max(us, Ordering::Relaxed);
    }

    /// Since the start.
    pub fn passed(&self) -> Duration {
        Duration::from_micros(self.since_start_us.load(Ordering::Relaxed))
    }

    /// How long after the start a timestamp of this clock is.
    pub fn since_start(at: Timestamp) -> Duration {
        Duration::from_micros(at.0.saturating_sub(FIRST_PLAUSIBLE.0))
    }
}

/// 2026-01-01: a wall clock before it is wrong (a machine without a battery begins in 1970), whatever the database says.
const FIRST_PLAUSIBLE: Timestamp = Timestamp(1_767_225_600_000_000);

/// By how much stored times may be ahead of the wall clock for the clock to wait for it. A wall clock that was set back by
/// less (a step of NTP, a time zone taken for UTC) catches up by itself.
const MOST_AHEAD: u64 = 24 * 3_600_000_000;

/// The wall clock's time.
pub fn wall() -> Timestamp {
    let wall = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    Timestamp(u64::try_from(wall.as_micros()).unwrap_or(u64::MAX))
}

/// Whether stored times up to `newest` come from a wall clock that was wrong, and the one that says `wall` is right.
pub fn stored_ahead(newest: Timestamp, wall: Timestamp) -> bool {
    wall >= FIRST_PLAUSIBLE && newest.0.saturating_sub(wall.0) > MOST_AHEAD
}

impl Clock {
    /// Starts at the wall clock's time, or right after `floor`, the newest time that is stored, when the wall
    /// clock was set back between two runs.
    pub fn start(floor: Timestamp) -> Self {
        Self::Running { base: wall().max(floor), start: Instant::now() }
    }

    /// Now.
    pub fn now(&self) -> Timestamp {
        let (base, passed) = match self {
            Self::Running { base, start } => (base, start.elapsed()),
            Self::Given(time) => (&FIRST_PLAUSIBLE, time.passed()),
        };
        let passed = u64::try_from(passed.as_micros()).unwrap_or(u64::MAX);
        Timestamp(base.0.saturating_add(passed))
    }

    /// Whether somebody sets it: nothing may then depend on how threads are scheduled.
    pub fn is_given(&self) -> bool {
        matches!(self, Self::Given(_))
    }
}

/// RFC 3339 in UTC with microseconds, for example `2026-11-21T08:30:00.000001Z`.
pub fn rfc3339(at: Timestamp) -> String {
    let (seconds, micros) = (at.0 / 1_000_000, at.0 % 1_000_000);
    let (days, rest) = (seconds / 86_400, seconds % 86_400);
    let Date { year, month, day } = civil(days);
    format!("{year:04}-{month:02}-{day:02}T{:02}:{:02}:{:02}.{micros:06}Z", rest / 3600, rest / 60 % 60, rest % 60)
}

/// In the Gregorian calendar.
struct Date {
    year: u64,
    /// From 1.
    month: u64,
    /// From 1.
    day: u64,
}

/// The date of a count of days since 1970-01-01: a year is counted
/// from March, so that the leap day is its last.
fn civil(days: u64) -> Date {
    let z = days + 719_468;
    let (era, of_era) = (z / 146_097, z % 146_097);
    let year_of_era = (of_era - of_era / 1460 + of_era / 36_524 - of_era / 146_096) / 365;
    let of_year = of_era - (365 * year_of_era + year_of_era / 4 - year_of_era / 100);
    let shifted = (5 * of_year + 2) / 153;
    let day = of_year - (153 * shifted + 2) / 5 + 1;
    let month = if shifted < 10 { shifted + 3 } else { shifted - 9 };
    Date { year: year_of_era + era * 400 + u64::from(month <= 2), month, day }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times_read_as_people_write_them() {
        for (us, text) in [
            (0, "1970-01-01T00:00:00.000000Z"),
            (951_782_400_000_000, "2000-02-29T00:00:00.000000Z"),
            (951_868_800_000_001, "2000-03-01T00:00:00.000001Z"),
            (1_795_251_599_123_456, "2026-11-21T08:59:59.123456Z"),
            (4_107_542_399_000_000, "2100-02-28T23:59:59.000000Z"),
            (4_107_542_400_000_000, "2100-03-01T00:00:00.000000Z"),
        ] {
            assert_eq!(rfc3339(Timestamp(us)), text);
        }
    }

    #[test]
    fn only_a_plausible_wall_clock_overrules_what_is_stored() {
        let (today, decade) = (Timestamp(1_795_251_599_000_000), 315_576_000_000_000);
        assert!(stored_ahead(Timestamp(today.0 + decade), today));
        assert!(!stored_ahead(Timestamp(today.0 + 3_600_000_000), today) && !stored_ahead(Timestamp(5), today));
        assert!(!stored_ahead(today, Timestamp(7)), "1970 is never right");
    }

    #[test]
    fn a_clock_set_back_between_runs_does_not_go_back() {
        let future = Timestamp(u64::MAX / 2);
        assert!(Clock::start(future).now() >= future);
        assert!(Clock::start(Timestamp(0)).now().0 > 1_600_000_000_000_000);
    }
}
