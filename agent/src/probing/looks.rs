//! When the job's connections are looked at, and which: pure.

use super::links::Way;
use flexcomm_probes::Nanos;
use flexcomm_probes::flows::{Flow, FlowWatch, Piece};
use std::collections::BTreeMap;
use std::net::IpAddr;
use std::time::Duration;

/// How often all connections are listed, to see which are busy.
pub const LIST_EVERY: Duration = Duration::from_secs(1);
/// While a stream runs, its pieces need looks this often.
const SOON: Duration = Duration::from_millis(10);
/// While none runs, and after a piece.
pub const LATER: Duration = Duration::from_millis(100);
/// A connection that has moved so many bytes between two lists is busy.
const BUSY_BYTES: u64 = 32 * 1024;

/// Which connections are busy, and what looks at them show.
#[derive(Debug, Clone, Default)]
pub struct Looks {
    watch: FlowWatch,
    /// Of the newest list.
    acked: BTreeMap<u64, u64>,
}

/// What a look showed.
#[derive(Debug, Clone, PartialEq)]
pub struct Look {
    /// Pieces of streams that ended.
    pub pieces: Vec<Piece>,
    /// How long to wait for the next look.
    pub pause: Duration,
}

impl Looks {
    /// Takes a list of all connections; leaves those in it that are busy, over whatever link: what goes elsewhere takes a part of
    /// the way out, but what stays here.
    pub fn list<T>(&mut self, listed: &mut Vec<T>, flow: impl Fn(&T) -> &Flow) {
        let now = listed.iter().map(&flow).map(|flow| (flow.id, flow.acked)).collect();
        let before = std::mem::replace(&mut self.acked, now);
        let moved =
            |flow: &Flow| before.get(&flow.id).is_some_and(|acked| flow.acked.saturating_sub(*acked) >= BUSY_BYTES);
        listed.retain(|listed| moved(flow(listed)) && !flow(listed).peer.is_loopback());
    }

    /// The busy connections as they are at `now`.
    pub fn look(&mut self, now: Nanos, flows: &mut [Flow], ways: &BTreeMap<IpAddr, Way>) -> Look {
        for flow in &mut *flows {
            // TCP remembers the least round trip for minutes: after a rise it would take the new latency for a queue.
            flow.path_s = flow.path_s.max(ways.get(&flow.peer).map_or(0.0, |way| way.round_trip_s));
        }
        let pieces = self.watch.look(now, flows);
        let pause = if pieces.is_empty() && self.watch.is_streaming() { SOON } else { LATER };
        Look { pieces, pause }
    }
}
