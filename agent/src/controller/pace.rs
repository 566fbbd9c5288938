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

/// Time between two heartbeats.
pub fn heartbeat(registered: &Registered) -> Duration {
    Duration::from_millis(registered.heartbeat_ms).clamp(HEARTBEAT.0, HEARTBEAT.1)
}
