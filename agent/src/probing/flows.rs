//! Watching the job's own connections to the peers: samples of links for no bytes.

use super::{Passive, lock};
use flexcomm_probes::edge::{Ends, FlowSocket, Listed, monotonic};
use flexcomm_probes::flows::FlowWatch;
use std::collections::BTreeMap;
use std::io;
use std::net::IpAddr;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

/// How often all connections are listed, to see which are busy.
const LIST_EVERY: Duration = Duration::from_secs(1);
/// While a stream runs, its pieces need looks this often.
const SOON: Duration = Duration::from_millis(10);
/// While none runs, and after a piece.
const LATER: Duration = Duration::from_millis(100);
/// A look may take this part of the time to the next.
const SHARE: u32 = 50;
/// A connection that has moved so many bytes between two lists is busy.
const BUSY_BYTES: u64 = 32 * 1024;
/// Wait before the next try after an error that may pass.
const AGAIN: Duration = Duration::from_secs(10);

/// A peer's way as the echoes know it.
#[derive(Debug, Clone, Copy)]
pub(super) struct Way {
    /// Seconds, there and back; 0 when unknown.
    pub(super) round_trip_s: f64,
    pub(super) throughput_port: u16,
}

/// Sets the word when it goes, also when the task that holds it panics: a thread that waits for it would outlive all.
pub(super) struct QuitOnDrop(pub(super) std::sync::Arc<AtomicBool>);

impl Drop for QuitOnDrop {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
    }
}

/// Watches until `quit`. `own_port` is this agent's throughput server: its tests are no job.
pub(super) fn watch(passive: &Passive, own_port: u16, quit: &AtomicBool) {
    let mut logged = false;
    while !quit.load(Ordering::Relaxed) {
        let Err(error) = FlowSocket::open().and_then(|socket| follow(socket, passive, own_port, quit)) else { return };
        if !logged {
            tracing::warn!("links are known from tests alone: failed to list TCP connections: {error}");
            logged = true;
        }
        if lasts(&error) {
            return;
        }
        let until = Instant::now() + AGAIN;
        while Instant::now() < until && !quit.load(Ordering::Relaxed) {
            std::thread::sleep(LATER);
        }
    }
}

/// Whether the kernel will say the same the next time: it has no `tcp_diag`, or counts too little (before 5.4).
fn lasts(error: &io::Error) -> bool {
    let codes = [libc::ENOENT, libc::EPERM, libc::EACCES, libc::EPROTONOSUPPORT, libc::EOPNOTSUPP];
    error.kind() == io::ErrorKind::Unsupported || error.raw_os_error().is_some_and(|code| codes.contains(&code))
}

fn follow(mut socket: FlowSocket, passive: &Passive, own_port: u16, quit: &AtomicBool) -> io::Result<()> {
    let mut watch = FlowWatch::default();
    let mut before: BTreeMap<u64, u64> = BTreeMap::new();
    while !quit.load(Ordering::Relaxed) {
        let begun = Instant::now();
        let ways = lock(&passive.links).ways(begun);
        let mut busy = Vec::new();
        if !ways.is_empty() {
            let is_job = |ends: Ends| {
                ends.port != own_port && ways.get(&ends.peer).is_some_and(|w| w.throughput_port != ends.there)
            };
            let listed = socket.list(is_job)?;
            let now = listed.iter().map(|l| (l.flow.id, l.flow.acked)).collect();
            busy = listed.into_iter().filter(|l| is_busy(l, &before)).collect();
            before = now;
        }
        while begun.elapsed() < LIST_EVERY && !quit.load(Ordering::Relaxed) {
            let pause = if busy.iter().any(|l| l.flow.job) {
                look(&mut socket, &mut watch, &busy, &ways, passive)?
            } else {
                LATER
            };
            std::thread::sleep(pause);
        }
    }
    Ok(())
}

/// Whether it moves, over whatever link: what goes elsewhere takes a part of the way out, but what stays here.
fn is_busy(listed: &Listed, before: &BTreeMap<u64, u64>) -> bool {
    let moved = before.get(&listed.flow.id).is_some_and(|acked| listed.flow.acked.saturating_sub(*acked) >= BUSY_BYTES);
    moved && !listed.ends.peer.is_loopback()
}

/// One look at the busy connections; how long to wait for the next.
fn look(
    socket: &mut FlowSocket,
    watch: &mut FlowWatch,
    busy: &[Listed],
    ways: &BTreeMap<IpAddr, Way>,
    passive: &Passive,
) -> io::Result<Duration> {
    let begun = Instant::now();
    let mut flows = socket.look(busy)?;
    for flow in &mut flows {
        // TCP remembers the least round trip for minutes: after a rise it would take the new latency for a queue.
        flow.path_s = flow.path_s.max(ways.get(&flow.peer).map_or(0.0, |way| way.round_trip_s));
    }
    let pieces = watch.look(monotonic(), &flows);
    for piece in &pieces {
        passive.take(piece.peer, &[(piece.bytes, piece.seconds)]);
    }
    let pause = if pieces.is_empty() && watch.is_streaming() { SOON } else { LATER };
    Ok(pause.max(begun.elapsed() * SHARE))
}
