//! The one place of this crate that reads the wall clock.

use std::time::{SystemTime, UNIX_EPOCH};

/// Microseconds since the epoch; 0 when the clock stands before it.
pub(crate) fn now_us() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |d| d.as_micros() as u64)
}
