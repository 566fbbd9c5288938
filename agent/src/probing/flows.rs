//! Watching the job's own connections to the peers: samples of links for no bytes.

use super::{Passive, lock};
use flexcomm_probes::edge::{FlowSocket, monotonic};
use flexcomm_probes::flows::FlowWatch;
use std::collections::BTreeMap;
use std::net::IpAddr;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

/// While a stream runs, its pieces need looks this often.
const SOON: Duration = Duration::from_millis(10);
/// While none runs, and after a piece: a list of connections costs the kernel some 0.1 ms.
const LATER: Duration = Duration::from_millis(100);

/// A peer's way as the echoes know it.
#[derive(Debug, Clone, Copy)]
pub(super) struct Way {
    /// Seconds, there and back; 0 when unknown.
    pub(super) round_trip_s: f64,
    pub(super) throughput_port: u16,
}

/// Looks until `quit`. `own_port` is this agent's throughput server: its tests are no job.
pub(super) fn watch(passive: &Passive, own_port: u16, quit: &AtomicBool) {
    let mut socket = match FlowSocket::open() {
        Ok(socket) => socket,
        Err(error) => return tracing::warn!("links are known from tests alone: failed to open sock_diag: {error}"),
    };
    let mut watch = FlowWatch::default();
    let mut ways = (Instant::now(), lock(&passive.links).ways(Instant::now()));
    while !quit.load(Ordering::Relaxed) {
        if ways.0.elapsed() >= LATER {
            ways = (Instant::now(), lock(&passive.links).ways(Instant::now()));
        }
        let taken = match look(&mut socket, &mut watch, &ways.1, own_port) {
            Ok(pieces) => pieces,
            Err(error) => {
                return tracing::warn!(
                    "links are known from tests alone: failed to list TCP connections: {error} (the kernel's tcp_diag)"
                );
            }
        };
        let pause = if taken.is_empty() && watch.is_streaming() { SOON } else { LATER };
        for (peer, bytes, seconds) in taken {
            passive.take(peer, &[(bytes, seconds)]);
        }
        std::thread::sleep(pause);
    }
}

type Taken = Vec<(IpAddr, u64, f64)>;

fn look(
    socket: &mut FlowSocket,
    watch: &mut FlowWatch,
    ways: &BTreeMap<IpAddr, Way>,
    own_port: u16,
) -> std::io::Result<Taken> {
    let is_job = |port: u16, peer: IpAddr, there: u16| {
        port != own_port && ways.get(&peer).is_some_and(|way| way.throughput_port != there)
    };
    let mut flows = socket.flows(is_job)?;
    for flow in &mut flows {
        // TCP remembers the least round trip for minutes: after a rise it would take the new latency for a queue.
        let known = ways.get(&flow.peer).map_or(0.0, |way| way.round_trip_s);
        flow.path_s = flow.path_s.max(known);
    }
    let pieces = watch.look(monotonic(), &flows);
    Ok(pieces.into_iter().map(|piece| (piece.peer, piece.bytes, piece.seconds)).collect())
}
