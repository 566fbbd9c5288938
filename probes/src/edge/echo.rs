//! Echo over UDP sockets: a responder thread and a prober thread for many peers.

use super::clock::Clocks;
use super::fd::{FOREVER, Interest};
use super::udp::Stamped;
use super::wake::{Bell, Owner};
use super::{SystemError, monotonic, system};
use crate::auth::Key;
use crate::echo::{
    EchoSample, EchoSummary, LEN, Loss, Prober, ProberLimits, Received, Responder, ResponderStats, next_turn, turn,
};
use crate::{ECHO_PRIORITY, ECHO_TOS, Nanos, Token};
use std::collections::{BTreeMap, HashMap};
use std::io;
use std::net::{IpAddr, SocketAddr};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use tokio::sync::mpsc;

/// Most peers of one prober.
pub(super) const MAX_PEERS: usize = 4096;
/// Events that wait for a reader; when it does not read, newer ones are dropped.
const EVENT_QUEUE: usize = 4096;
/// Shortest time between two echoes to the same peer, seconds.
const MIN_INTERVAL_S: f64 = 0.001;
/// Longest that answers wait in the socket for the next requests, seconds.
const MOST_WAIT_S: f64 = 0.5;

/// Why a probe's thread could not start.
#[derive(Debug, thiserror::Error)]
pub enum SpawnError {
    /// The address cannot be bound.
    #[error("bind {addr}: {cause}")]
    Bind {
        /// The address.
        addr: SocketAddr,
        /// The system's reason.
        cause: io::Error,
    },
    /// Something else the system refused.
    #[error(transparent)]
    System(#[from] SystemError),
}

/// Nothing behind these locks can be left half-changed, so a panic elsewhere does not spoil them.
pub(super) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Answers echo requests until dropped.
pub struct EchoResponder {
    local: SocketAddr,
    stats: Arc<Mutex<ResponderStats>>,
    _thread: Owner,
}

impl EchoResponder {
    /// Binds (port 0: any free one) in the calling thread's network namespace and answers on a thread of its own.
    pub fn spawn(bind: SocketAddr, token: &Token) -> Result<Self, SpawnError> {
        let socket = Stamped::udp(bind).map_err(|cause| SpawnError::Bind { addr: bind, cause })?;
        socket.mark(bind.is_ipv6(), ECHO_TOS, ECHO_PRIORITY).map_err(system("mark the echo socket"))?;
        let local = socket.local().map_err(system("read the echo socket's address"))?;
        let stats = Arc::new(Mutex::new(ResponderStats::default()));
        let mut responder = Responder::new(token.echo_key(), rand::random());
        let shared = Arc::clone(&stats);
        let thread = Owner::spawn("flexcomm-echo", move |mut bell| {
            while respond(&socket, &mut responder, &mut bell) {
                *lock(&shared) = responder.stats();
            }
        })
        .map_err(system("start the echo responder's thread"))?;
        Ok(Self { local, stats, _thread: thread })
    }

    /// Where it listens.
    pub fn local_addr(&self) -> SocketAddr {
        self.local
    }

    /// Counts since the start.
    pub fn stats(&self) -> ResponderStats {
        *lock(&self.stats)
    }
}

/// One round of waiting and answering; false when the handle is gone.
fn respond(socket: &Stamped, responder: &mut Responder, bell: &mut Bell) -> bool {
    let interest = Interest { fd: socket.fd(), write: false };
    if bell.wait("echo responder", &[interest], FOREVER).is_none() {
        return false;
    }
    socket.receive_all("echo responder's socket", |packet, bytes| {
        if let Ok(answer) = responder.handle(packet.at, packet.from.ip().to_canonical(), bytes) {
            let bytes = answer.seal(monotonic(), responder.key());
            if let Err(error) = socket.send(&bytes, packet.from) {
                tracing::debug!(peer = %packet.from, %error, "cannot send an echo reply");
            }
        }
    });
    true
}

/// What a prober saw.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct EchoEvent {
    /// Which peer.
    pub peer: SocketAddr,
    /// The round trip; `None` when a request was given up.
    pub sample: Option<EchoSample>,
    /// When it was received, or given up.
    pub at: Nanos,
}

/// A peer's window.
#[derive(Debug, Clone, PartialEq)]
pub struct PeerSummary {
    /// Which peer.
    pub peer: SocketAddr,
    /// Its window.
    pub summary: EchoSummary,
    /// Why the last request could not be sent, if it could not.
    pub send_error: Option<String>,
}

/// How to probe.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct EchoSettings {
    /// Seconds between two requests to the same peer, at least 0.001.
    pub interval_s: f64,
    /// When a request is lost and how long the window is.
    pub limits: ProberLimits,
    /// Requests to each peer, those that only fetched a cookie not counted; `None` for ever.
    pub count: Option<u64>,
}

impl Default for EchoSettings {
    /// Ten a second: 1.3 kB/s each way, and a step of the network is seen within half a second.
    fn default() -> Self {
        Self { interval_s: 0.1, limits: ProberLimits::default(), count: None }
    }
}

struct Target {
    prober: Prober,
    /// When in each interval it has its turn, as a share of it.
    turn: f64,
    next: Nanos,
    /// Requests still to be sent.
    left: Option<u64>,
    send_error: Option<String>,
}

impl Target {
    /// Whether its requests go on for ever and are answered: no caller waits for the next answer.
    fn is_steady(&self) -> bool {
        self.left.is_none() && self.prober.has_answered()
    }
}

struct Shared {
    key: Key,
    settings: EchoSettings,
    targets: HashMap<SocketAddr, Target>,
    sessions: HashMap<u64, SocketAddr>,
}

/// Probes many peers from one thread; the sends are spread over the interval, a few at a time.
pub struct EchoProber {
    shared: Arc<Mutex<Shared>>,
    thread: Owner,
}

impl EchoProber {
    /// Starts without peers, in the calling thread's network namespace. The receiver gets every sample and every
    /// loss; who needs only windows may drop it.
    pub fn spawn(token: &Token, settings: EchoSettings) -> Result<(Self, mpsc::Receiver<EchoEvent>), SpawnError> {
        let sockets = Sockets::open()?;
        let shared = Arc::new(Mutex::new(Shared {
            key: token.echo_key(),
            settings: EchoSettings { interval_s: settings.interval_s.max(MIN_INTERVAL_S), ..settings },
            targets: HashMap::new(),
            sessions: HashMap::new(),
        }));
        let (events, receiver) = mpsc::channel(EVENT_QUEUE);
        let inside = Arc::clone(&shared);
        let thread =
            Owner::spawn("flexcomm-probe", move |mut bell| while probe(&sockets, &inside, &events, &mut bell) {})
                .map_err(system("start the echo prober's thread"))?;
        Ok((Self { shared, thread }, receiver))
    }

    /// Replaces the peers; those that stay keep their window. Beyond 4096 the rest is left out.
    pub fn set_peers(&self, peers: &[SocketAddr]) {
        let mut shared = lock(&self.shared);
        let wanted: Vec<SocketAddr> = peers.iter().copied().take(MAX_PEERS).collect();
        let Shared { key, settings, targets, sessions, .. } = &mut *shared;
        targets.retain(|peer, _| wanted.contains(peer));
        sessions.retain(|_, peer| targets.contains_key(peer));
        let now = monotonic();
        for (i, peer) in wanted.iter().enumerate() {
            let turn = turn(i, wanted.len());
            let target = targets.entry(*peer).or_insert_with(|| {
                let session = rand::random();
                sessions.insert(session, *peer);
                let next = now.plus(settings.interval_s * turn);
                let prober = Prober::new(key.clone(), session, settings.limits);
                Target { prober, turn, next, left: settings.count, send_error: None }
            });
            target.turn = turn;
        }
        drop(shared);
        self.thread.ring();
    }

    /// Seconds between two requests to the same peer from now on, at least 0.001.
    pub fn set_interval(&self, interval_s: f64) {
        lock(&self.shared).settings.interval_s = interval_s.max(MIN_INTERVAL_S);
        self.thread.ring();
    }

    /// Every peer's window, as it is now.
    pub fn summaries(&self) -> Vec<PeerSummary> {
        let now = monotonic();
        let mut shared = lock(&self.shared);
        let each = shared.targets.iter_mut().map(|(peer, target)| PeerSummary {
            peer: *peer,
            summary: target.prober.summary(now),
            send_error: target.send_error.clone(),
        });
        each.collect()
    }

    /// Every peer's losses, as they are now.
    pub fn losses(&self) -> BTreeMap<SocketAddr, Loss> {
        let now = monotonic();
        lock(&self.shared).targets.iter_mut().map(|(peer, target)| (*peer, target.prober.loss(now))).collect()
    }

    /// One peer's window.
    pub fn summary(&self, peer: SocketAddr) -> Option<EchoSummary> {
        lock(&self.shared).targets.get_mut(&peer).map(|target| target.prober.summary(monotonic()))
    }
}

struct Sockets {
    v4: Option<Stamped>,
    v6: Option<Stamped>,
}

impl Sockets {
    /// Both families, or the one that the system has.
    fn open() -> Result<Self, SpawnError> {
        let open = |v6: bool| -> io::Result<Stamped> {
            let socket = Stamped::udp_client(v6)?;
            socket.mark(v6, ECHO_TOS, ECHO_PRIORITY)?;
            Ok(socket)
        };
        match (open(false), open(true)) {
            (Err(cause), Err(_)) => Err(system("open a UDP socket")(cause).into()),
            (v4, v6) => Ok(Self { v4: v4.ok(), v6: v6.ok() }),
        }
    }

    fn of(&self, peer: IpAddr) -> io::Result<&Stamped> {
        let socket = if peer.is_ipv6() { &self.v6 } else { &self.v4 };
        socket.as_ref().ok_or_else(|| io::Error::new(io::ErrorKind::Unsupported, "this system lacks the IP family"))
    }

    fn all(&self) -> impl Iterator<Item = &Stamped> {
        self.v4.iter().chain(&self.v6)
    }
}

/// One round of sending what is due and taking what came; false when the handle is gone. An answer's time is the kernel's: answers
/// may wait for the next requests, and waking up for each costs more than they do. Those that waited while the wall clock was set are
/// dropped.
fn probe(sockets: &Sockets, shared: &Mutex<Shared>, events: &mpsc::Sender<EchoEvent>, bell: &mut Bell) -> bool {
    let (until, may_wait) = {
        let mut shared = lock(shared);
        let until = send_due(sockets, &mut shared, events);
        let most_s = MOST_WAIT_S.min(shared.settings.limits.timeout_s / 4.0);
        (until, until <= monotonic().plus(most_s) && shared.targets.values().all(Target::is_steady))
    };
    let before = may_wait.then(Clocks::read);
    let waited_for = sockets.all().filter(|_| !may_wait);
    let interests: Vec<_> = waited_for.map(|socket| Interest { fd: socket.fd(), write: false }).collect();
    if bell.wait("echo prober", &interests, until).is_none() {
        return false;
    }
    if before.is_some_and(|before| before.was_set(Clocks::read())) {
        sockets.all().for_each(|socket| socket.receive_all("echo prober's socket", |_, _| ()));
        return true;
    }
    for socket in sockets.all() {
        socket.receive_all("echo prober's socket", |packet, bytes| take(&mut lock(shared), packet.at, bytes, events));
    }
    true
}

fn send_due(sockets: &Sockets, shared: &mut Shared, events: &mpsc::Sender<EchoEvent>) -> Nanos {
    let (now, interval) = (monotonic(), shared.settings.interval_s);
    let mut until = FOREVER;
    for (peer, target) in &mut shared.targets {
        if target.next <= now {
            let given_up = target.prober.expire(now);
            (0..given_up).for_each(|_| emit(events, EchoEvent { peer: *peer, sample: None, at: now }));
            if target.left != Some(0) {
                send_one(sockets, *peer, target, now);
            }
            target.next = next_turn(now, target.turn, interval);
        }
        until = until.min(target.next);
    }
    until
}

fn send_one(sockets: &Sockets, peer: SocketAddr, target: &mut Target, now: Nanos) {
    let bytes = target.prober.send(now);
    target.prober.sent_at(monotonic());
    let outcome = sockets.of(peer.ip()).and_then(|socket| socket.send(&bytes, peer));
    target.left = target.left.map(|left| left - u64::from(outcome.is_ok()));
    target.send_error = outcome.err().map(|error| {
        target.prober.unsend();
        error.to_string()
    });
}

fn take(shared: &mut Shared, at: Nanos, bytes: &[u8], events: &mpsc::Sender<EchoEvent>) {
    if bytes.len() != LEN {
        return;
    }
    let mut session = [0; 8];
    session.copy_from_slice(&bytes[8..16]);
    let Some(peer) = shared.sessions.get(&u64::from_le_bytes(session)).copied() else { return };
    let Some(target) = shared.targets.get_mut(&peer) else { return };
    match target.prober.receive(at, bytes) {
        Ok(Received::Reply(sample)) => emit(events, EchoEvent { peer, sample: Some(sample), at }),
        Ok(Received::Hello) => {
            target.left = target.left.map(|left| left + 1);
            target.next = monotonic();
        }
        Err(error) => tracing::debug!(%peer, %error, "an echo answer was rejected"),
    }
}

fn emit(events: &mpsc::Sender<EchoEvent>, event: EchoEvent) {
    // A closed channel means that nobody wants events; a full one that somebody is late.
    let _ = events.try_send(event);
}
