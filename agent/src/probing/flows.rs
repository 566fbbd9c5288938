//! Watching the job's own connections to the peers: samples of links for no bytes.

use super::links::Way;
use super::looks::{LATER, LIST_EVERY, Look, Looks};
use super::{Passive, lock};
use flexcomm_probes::edge::{Ends, FlowSocket, Listed, monotonic};
use std::collections::BTreeMap;
use std::io;
use std::net::IpAddr;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

/// A look may take this part of the time to the next.
const SHARE: u32 = 50;
/// Wait before the next try after an error that may pass.
const AGAIN: Duration = Duration::from_secs(10);

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
    let mut looks = Looks::default();
    while !quit.load(Ordering::Relaxed) {
        let begun = Instant::now();
        let ways = lock(&passive.links).ways(begun);
        let mut busy = Vec::new();
        if !ways.is_empty() {
            let is_job = |ends: Ends| {
                ends.port != own_port && ways.get(&ends.peer).is_some_and(|w| w.throughput_port != ends.there)
            };
            busy = socket.list(is_job)?;
            looks.list(&mut busy, |listed| &listed.flow);
        }
        while begun.elapsed() < LIST_EVERY && !quit.load(Ordering::Relaxed) {
            let pause = if busy.iter().any(|l| l.flow.job) {
                look(&mut socket, &mut looks, &busy, &ways, passive)?
            } else {
                LATER
            };
            std::thread::sleep(pause);
        }
    }
    Ok(())
}

/// One look at the busy connections; how long to wait for the next.
fn look(
    socket: &mut FlowSocket,
    looks: &mut Looks,
    busy: &[Listed],
    ways: &BTreeMap<IpAddr, Way>,
    passive: &Passive,
) -> io::Result<Duration> {
    let begun = Instant::now();
    let mut flows = socket.look(busy)?;
    let Look { pieces, pause } = looks.look(monotonic(), &mut flows, ways);
    for piece in &pieces {
        passive.take(piece.peer, &[(piece.bytes, piece.seconds)]);
    }
    Ok(pause.max(begun.elapsed() * SHARE))
}
