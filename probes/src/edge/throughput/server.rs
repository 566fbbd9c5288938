//! The server: threads for connections, one session at a time.

use super::pending::Pending;
use super::{Control, HANDSHAKE_S, MeasureError, mark_control, prepare, receive_phase, send_phase, system};
use crate::auth::Key;
use crate::edge::echo::{SpawnError, lock};
use crate::edge::fd::{FOREVER, Interest};
use crate::edge::monotonic;
use crate::edge::wake::{Bell, Owner};
use crate::throughput::{
    Frame, MAX_TIME_S, Plan, Purpose, Receiving, Refusal, Sending, client_proof, proves, server_proof,
};
use crate::{Nanos, Token};
use socket2::{Domain, Protocol, Socket, Type};
use std::io;
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::os::fd::AsFd;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};
use std::sync::{Arc, Mutex};
use std::time::Duration;

/// A connection that has not shown the token after this is closed, seconds: one round trip of the worst link.
const GREETING_S: f64 = 2.0;
/// Connections that the kernel holds for us: a crowd must not make others wait for TCP's second try.
const BACKLOG: i32 = 1024;
/// Two phases with their lingering, and the handshakes.
const MAX_SESSION_S: f64 = 2.0 * (MAX_TIME_S + 8.0);

/// The session that runs now.
struct Slot {
    session: u64,
    streams_left: u8,
    streams: SyncSender<TcpStream>,
    until: Nanos,
}

struct Server {
    key: Key,
    slot: Mutex<Option<Slot>>,
    pending: Pending,
    stop: AtomicBool,
}

/// Serves measurements to those who know the token, one session at a time, until dropped.
pub struct ThroughputServer {
    local: SocketAddr,
    server: Arc<Server>,
    _thread: Owner,
}

impl Drop for ThroughputServer {
    /// A session that runs ends with what it has.
    fn drop(&mut self) {
        self.server.stop.store(true, Ordering::Relaxed);
    }
}

impl ThroughputServer {
    /// Binds (port 0: any free one) in the calling thread's network namespace and serves on threads of its own.
    pub fn spawn(bind: SocketAddr, token: &Token) -> Result<Self, SpawnError> {
        let listener = listen(bind).map_err(|cause| SpawnError::Bind { addr: bind, cause })?;
        let local = listener.local_addr().map_err(system("read the listening address"))?;
        let key = token.throughput_key();
        let server =
            Arc::new(Server { key, slot: Mutex::new(None), pending: Pending::default(), stop: AtomicBool::new(false) });
        let shared = Arc::clone(&server);
        let thread = Owner::spawn("flexcomm-tput", move |mut bell| while accept(&listener, &server, &mut bell) {})
            .map_err(system("start the throughput server's thread"))?;
        Ok(Self { local, server: shared, _thread: thread })
    }

    /// Where it listens.
    pub fn local_addr(&self) -> SocketAddr {
        self.local
    }
}

fn listen(bind: SocketAddr) -> io::Result<TcpListener> {
    let socket = Socket::new(Domain::for_address(bind), Type::STREAM, Some(Protocol::TCP))?;
    if bind.is_ipv6() {
        socket.set_only_v6(!bind.ip().is_unspecified())?;
    }
    // A restarted agent must not wait for its old connections to time out.
    socket.set_reuse_address(true)?;
    // Accepted connections inherit it.
    mark_control(&socket, bind.is_ipv6());
    socket.bind(&bind.into())?;
    socket.listen(BACKLOG)?;
    socket.set_nonblocking(true)?;
    Ok(socket.into())
}

/// Waits for one round of connections; false when the handle is gone.
fn accept(listener: &TcpListener, server: &Arc<Server>, bell: &mut Bell) -> bool {
    let interest = Interest { fd: listener.as_fd(), write: false };
    let Some(ready) = bell.wait("throughput server", &[interest], FOREVER) else { return false };
    if !ready[0] {
        return true;
    }
    match listener.accept() {
        Ok((socket, peer)) => admit(server, socket, peer),
        Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
        Err(error) => {
            // Out of descriptors: the connection stays in the queue, so look again a little later.
            tracing::warn!(%error, "throughput server cannot accept");
            std::thread::sleep(Duration::from_millis(20));
        }
    }
    true
}

/// Gives a connection a place among the pending ones, and a thread.
fn admit(server: &Arc<Server>, socket: TcpStream, peer: SocketAddr) {
    let place = match socket.try_clone() {
        Ok(handle) => server.pending.enter(peer, handle),
        Err(error) => {
            tracing::warn!(%error, "throughput server has no descriptor left");
            return;
        }
    };
    let inside = Arc::clone(server);
    let serve = move || {
        if let Err(error) = serve(&inside, socket, place) {
            tracing::debug!(%peer, %error, "throughput connection ended");
        }
    };
    if let Err(error) = std::thread::Builder::new().name("flexcomm-tput-c".into()).spawn(serve) {
        server.pending.leave(place);
        tracing::warn!(%error, "throughput server cannot start a thread");
    }
}

/// One connection from its challenge on.
fn serve(server: &Server, socket: TcpStream, place: u64) -> Result<(), MeasureError> {
    let greeted = welcome(server, socket);
    server.pending.leave(place);
    let Some((mut control, opened, plan, rtt_s)) = greeted? else { return Ok(()) };
    let outcome = serve_session(&mut control, opened, (&plan, rtt_s), &server.stop);
    *lock(&server.slot) = None;
    outcome
}

struct Opened {
    streams: Receiver<TcpStream>,
}

type Session = (Control<'static>, Opened, Plan, f64);

/// The server's side of the handshake. `None`: it was a stream, and is where it belongs.
fn welcome(server: &Server, socket: TcpStream) -> Result<Option<Session>, MeasureError> {
    let mut control = Control::new(socket, None)?;
    let challenge: [u8; 32] = rand::random();
    control.send(&Frame::Challenge(challenge))?;
    let Frame::Hello { nonce, purpose, proof } = control.next_within(GREETING_S, "the client's answer")? else {
        return Err(MeasureError::OutOfTurn("the client's answer"));
    };
    if !proves(&proof, &client_proof(&server.key, &challenge, &nonce, &purpose)) {
        return refuse(&mut control, Refusal::Token);
    }
    match purpose {
        Purpose::Control { plan, rtt_us } => {
            let (session, opened) = match open_session(server, &plan) {
                Ok(opened) => opened,
                Err(refusal) => return refuse(&mut control, refusal),
            };
            let accept = Frame::Accept { session, proof: server_proof(&server.key, &challenge, &nonce, session) };
            if let Err(error) = control.send(&accept) {
                *lock(&server.slot) = None;
                return Err(error);
            }
            Ok(Some((control, opened, plan, f64::from(rtt_us.min(2_000_000)) * 1e-6)))
        }
        Purpose::Stream { session } => {
            let Some(sender) = claim_stream(server, session) else {
                return refuse(&mut control, Refusal::Request);
            };
            control.send(&Frame::Accept { session, proof: server_proof(&server.key, &challenge, &nonce, session) })?;
            // A session that is over by now has no use for it.
            let _ = sender.try_send(control.socket);
            Ok(None)
        }
    }
}

fn refuse<T>(control: &mut Control<'_>, refusal: Refusal) -> Result<T, MeasureError> {
    control.send(&Frame::Refuse(refusal))?;
    Err(refusal.into())
}

fn open_session(server: &Server, plan: &Plan) -> Result<(u64, Opened), Refusal> {
    let now = monotonic();
    let mut slot = lock(&server.slot);
    if let Some(running) = &*slot {
        return Err(Refusal::Busy((running.until.since(now) * 1e3) as u32));
    }
    let session = rand::random();
    let (sender, streams) = sync_channel(usize::from(plan.streams()));
    let until = now.plus((2.0 * (plan.time_limit_s() + HANDSHAKE_S) + HANDSHAKE_S).min(MAX_SESSION_S));
    *slot = Some(Slot { session, streams_left: plan.streams(), streams: sender, until });
    Ok((session, Opened { streams }))
}

fn claim_stream(server: &Server, session: u64) -> Option<SyncSender<TcpStream>> {
    let mut slot = lock(&server.slot);
    let running = slot.as_mut().filter(|running| running.session == session)?;
    running.streams_left = running.streams_left.checked_sub(1)?;
    Some(running.streams.clone())
}

fn serve_session(
    control: &mut Control<'_>,
    opened: Opened,
    (plan, rtt_s): (&Plan, f64),
    stop: &AtomicBool,
) -> Result<(), MeasureError> {
    let mut streams = Vec::new();
    let until = monotonic().plus(HANDSHAKE_S);
    for _ in 0..plan.streams() {
        let left = Duration::from_secs_f64(until.since(monotonic()));
        let stream = opened.streams.recv_timeout(left).map_err(|_| MeasureError::Silent("a stream"))?;
        prepare(&stream, plan).map_err(system("set up a stream"))?;
        streams.push(stream);
    }
    control.send(&Frame::Ready)?;
    let (out_bytes, back_bytes) = plan.shares();
    if out_bytes > 0 {
        let phase = Receiving::new(monotonic(), plan.time_limit_s(), rtt_s);
        let (rate, _) = receive_phase(control, &streams, phase, stop)?;
        control.send(&Frame::Report(rate))?;
    }
    if back_bytes > 0 {
        loop {
            match control.next_within(HANDSHAKE_S, "the client's go-ahead")? {
                Frame::Go => break,
                // The phase was over by itself before this word arrived.
                Frame::Stop => {}
                _ => return Err(MeasureError::OutOfTurn("the client's go-ahead")),
            }
        }
        send_phase(control, &streams, Sending::new(monotonic(), back_bytes, plan.time_limit_s()), stop)?;
        // The client closes when it has everything; until then the streams must stay open.
        while control.next_within(plan.time_limit_s() + HANDSHAKE_S, "the client's goodbye").is_ok() {}
    }
    Ok(())
}
