//! When to speak to the controller: pure.

use flexcomm_wire::Registered;
use std::time::Duration;

/// Time from one delivery to the next, in which reports gather.
const GATHER: Duration = Duration::from_millis(200);
/// What is reported of the same moment is there within this time.
const TOGETHER: Duration = Duration::from_millis(20);
/// Heartbeats are held within these, whatever the controller asks for.
const HEARTBEAT: (Duration, Duration) = (Duration::from_millis(100), Duration::from_secs(60));

/// How long the first new report waits for others, so long after the last delivery: one that comes alone goes at once, those that
/// come in a stream together.
pub fn gather(since_delivery: Duration) -> Duration {
    GATHER.saturating_sub(since_delivery).max(TOGETHER)
}

/// While reports are delivered at most so many heartbeats in a row are left out.
const LEFT_OUT: u32 = 3;

/// Whether a heartbeat is to be sent, so long after the last one and after the newest delivery began, where one is due `every` so often: a
/// delivery within half of that is a sign of life, too, and what else a heartbeat says is for operators alone.
pub fn is_beat_due(since_beat: Option<Duration>, since_delivery: Option<Duration>, every: Duration) -> bool {
    let is_recent = since_delivery.is_some_and(|since| since < every / 2);
    // Timers are late by some milliseconds.
    !is_recent || since_beat.is_none_or(|since| since >= (LEFT_OUT * every).mul_f64(1.1))
}

/// Time between two heartbeats.
pub fn heartbeat(registered: &Registered) -> Duration {
    Duration::from_millis(registered.heartbeat_ms).clamp(HEARTBEAT.0, HEARTBEAT.1)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn deliveries_stand_for_heartbeats_but_not_for_long() {
        let (ms, every) = (Duration::from_millis, Duration::from_secs(1));
        assert!(is_beat_due(None, Some(ms(100)), every), "the first");
        assert!(is_beat_due(Some(ms(1000)), None, every) && is_beat_due(Some(ms(1000)), Some(ms(500)), every));
        let after = [1000, 2001, 3002, 4003].map(|beat| is_beat_due(Some(ms(beat)), Some(ms(100)), every));
        assert_eq!(after, [false, false, false, true]);
    }
}
