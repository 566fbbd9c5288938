//! ICMP echo over sockets, by two backends.
//!
//! - `kernel` (the default): a thread's own loop with the kernel's receive stamps.
//! - `surge`: the `surge-ping` crate. It reads the clock after sending and again when its task gets to run. On a
//!   link inside a rack a third to a half of its round trips are exactly zero, and on a busy runtime its mean was
//!   off by a millisecond; from a millisecond of latency up, on an idle runtime, both agree. That is why it is not
//!   the default.

use super::fd::{Interest, wait};
use super::udp::Stamped;
use super::{SystemError, monotonic, system};
use crate::ping::{COOKIE, Due, MAX_PAYLOAD, PingPlan, PingReply, PingRun, PingStats, encode_request, parse_reply};
use crate::within;
use flexcomm_domain::Invalid;
use serde::Serialize;
use socket2::{Domain, Protocol, Type};
use std::io;
use std::net::{IpAddr, SocketAddr};
use std::sync::atomic::{AtomicBool, Ordering};

/// Longest wait before the stop flag is looked at again, seconds.
const LOOK_S: f64 = 0.1;

/// Who does the work.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum PingBackend {
    /// Kernel receive stamps on a thread of its own.
    #[default]
    Kernel,
    /// The surge-ping crate.
    Surge,
}

/// What kind of socket the system allowed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum SocketKind {
    /// Unprivileged ICMP socket (`net.ipv4.ping_group_range`).
    Datagram,
    /// Raw socket (root or `CAP_NET_RAW`).
    Raw,
}

/// How to ping.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct PingSettings {
    /// Echoes, interval and timeout.
    pub plan: PingPlan,
    /// Bytes of payload, 16 to 1400; `ping` sends 56.
    pub payload: usize,
}

impl Default for PingSettings {
    fn default() -> Self {
        Self { plan: PingPlan { count: 10, interval_s: 0.2, timeout_s: 2.0 }, payload: 56 }
    }
}

/// What a run found.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct PingReport {
    /// Who did the work.
    pub backend: PingBackend,
    /// Socket for IPv4 targets; absent when there was none.
    pub socket_v4: Option<SocketKind>,
    /// Socket for IPv6 targets.
    pub socket_v6: Option<SocketKind>,
    /// Each target.
    pub targets: Vec<PingStats>,
}

/// Why pinging failed. The text completes "failed to ping".
#[derive(Debug, thiserror::Error)]
pub enum PingError {
    /// Neither kind of socket is allowed.
    #[error(
        "open an ICMP socket: {0}; allow unprivileged ones with `sysctl -w net.ipv4.ping_group_range=\"0 2147483647\"` \
         (for IPv6 too) or raw ones with `setcap cap_net_raw+ep $(command -v flexcomm)`, or run as root; \
         `flexcomm probe echo` needs neither"
    )]
    Permission(io::Error),
    /// The system lacks something else.
    #[error(transparent)]
    System(#[from] SystemError),
    /// The plan is out of range.
    #[error(transparent)]
    Plan(#[from] Invalid),
}

fn not_opened(error: io::Error) -> PingError {
    match error.kind() {
        io::ErrorKind::PermissionDenied => PingError::Permission(error),
        _ => system("open an ICMP socket")(error).into(),
    }
}

struct IcmpSocket {
    socket: Stamped,
    kind: SocketKind,
    v6: bool,
    id: u16,
}

impl IcmpSocket {
    /// An unprivileged socket where the system allows it, else a raw one.
    fn open(v6: bool, id: u16) -> Result<Self, PingError> {
        let (domain, protocol) = if v6 { (Domain::IPV6, Protocol::ICMPV6) } else { (Domain::IPV4, Protocol::ICMPV4) };
        let open = |kind| Stamped::new(domain, kind, protocol);
        let (socket, kind) = match open(Type::DGRAM) {
            Ok(socket) => (socket, SocketKind::Datagram),
            Err(_) => match open(Type::RAW) {
                Ok(socket) => (socket, SocketKind::Raw),
                Err(error) => return Err(not_opened(error)),
            },
        };
        Ok(Self { socket, kind, v6, id })
    }

    fn receive(&self, run: &mut PingRun, on_reply: &mut dyn FnMut(&PingReply)) {
        self.socket.receive_all("ICMP socket", |packet, bytes| {
            let with_ip_header = self.kind == SocketKind::Raw && !self.v6;
            let reply = parse_reply(bytes, self.v6, with_ip_header);
            // The kernel rewrites the identifier on its unprivileged sockets, and filters by it.
            let reply = reply.filter(|reply| self.kind == SocketKind::Datagram || reply.id == self.id);
            if let Some(reply) = reply.and_then(|reply| run.reply(packet.at, packet.from.ip(), &reply)) {
                on_reply(&reply);
            }
        });
    }
}

/// Pings all targets at once by the `kernel` backend, in the calling thread and its network namespace, until the
/// plan is carried out or `stop` is set; then says what was found so far.
pub fn ping_many(
    targets: &[IpAddr],
    settings: &PingSettings,
    stop: &AtomicBool,
    on_reply: &mut dyn FnMut(&PingReply),
) -> Result<PingReport, PingError> {
    within("payload in bytes", settings.payload as f64, COOKIE as f64..=MAX_PAYLOAD as f64)?;
    let id = rand::random();
    let open = |v6: bool| targets.iter().any(|t| t.is_ipv6() == v6).then(|| IcmpSocket::open(v6, id)).transpose();
    let (v4, v6) = (open(false)?, open(true)?);
    let mut run = PingRun::new(monotonic(), targets, settings.plan, rand::random())?;
    let mut payload = vec![0; settings.payload];
    payload[..COOKIE].copy_from_slice(run.cookie());
    while !stop.load(Ordering::Relaxed) {
        while let Some(due) = run.due(monotonic()) {
            let socket = if due.target.is_ipv6() { &v6 } else { &v4 };
            send(&mut run, socket.as_ref(), due, &payload);
        }
        let Some(next) = run.next_at(monotonic()) else { break };
        let sockets: Vec<&IcmpSocket> = v4.iter().chain(&v6).collect();
        let interests: Vec<Interest<'_>> =
            sockets.iter().map(|s| Interest { fd: s.socket.fd(), write: false }).collect();
        let until = next.min(monotonic().plus(LOOK_S));
        wait(&interests, until).map_err(system("wait for replies"))?;
        for socket in sockets {
            socket.receive(&mut run, on_reply);
        }
    }
    let kind = |socket: &Option<IcmpSocket>| socket.as_ref().map(|s| s.kind);
    let (socket_v4, socket_v6) = (kind(&v4), kind(&v6));
    Ok(PingReport { backend: PingBackend::Kernel, socket_v4, socket_v6, targets: run.stats(monotonic()) })
}

fn send(run: &mut PingRun, socket: Option<&IcmpSocket>, due: Due, payload: &[u8]) {
    let Some(socket) = socket else { return };
    let bytes = encode_request(socket.v6, socket.id, due.seq, payload);
    run.sent_at(due, monotonic());
    if let Err(error) = socket.socket.send(&bytes, SocketAddr::new(due.target, 0)) {
        run.failed(due, error.to_string());
    }
}

/// The same by the `surge` backend. Must run inside a tokio runtime with time and IO.
pub async fn ping_many_surge(
    targets: &[IpAddr],
    settings: &PingSettings,
    stop: &AtomicBool,
) -> Result<PingReport, PingError> {
    let mut run = PingRun::new(monotonic(), targets, settings.plan, rand::random())?;
    let clients = [surge_client(targets, false)?, surge_client(targets, true)?];
    let mut payload = vec![0; settings.payload.clamp(COOKIE, MAX_PAYLOAD)];
    payload[..COOKIE].copy_from_slice(run.cookie());
    let mut replies = tokio::task::JoinSet::new();
    let timeout = std::time::Duration::from_secs_f64(settings.plan.timeout_s);
    while let Some(next) = run.next_at(monotonic()).filter(|_| !stop.load(Ordering::Relaxed)) {
        while let Some(due) = run.due(monotonic()) {
            let Some(client) = &clients[usize::from(due.target.is_ipv6())] else { continue };
            let (client, payload) = (client.clone(), payload.clone());
            replies.spawn(async move {
                let id = surge_ping::PingIdentifier(rand::random());
                let mut pinger = client.pinger(due.target, id).await;
                pinger.timeout(timeout);
                (due, pinger.ping(surge_ping::PingSequence(due.seq), &payload).await)
            });
        }
        let until = std::time::Duration::from_nanos(next.0.saturating_sub(monotonic().0).clamp(100_000, 100_000_000));
        if let Ok(Some(Ok((due, outcome)))) = tokio::time::timeout(until, replies.join_next()).await {
            take_surge(&mut run, due, outcome);
        } else if replies.is_empty() {
            tokio::time::sleep(until).await;
        }
    }
    let kind = |client: &Option<surge_ping::Client>| {
        client
            .as_ref()
            .map(|c| if c.get_socket().get_type() == Type::RAW { SocketKind::Raw } else { SocketKind::Datagram })
    };
    let (socket_v4, socket_v6) = (kind(&clients[0]), kind(&clients[1]));
    Ok(PingReport { backend: PingBackend::Surge, socket_v4, socket_v6, targets: run.stats(monotonic()) })
}

type SurgeOutcome = Result<(surge_ping::IcmpPacket, std::time::Duration), surge_ping::SurgeError>;

/// Counts surge-ping's own figure, whatever the run's clock says.
fn take_surge(run: &mut PingRun, due: Due, outcome: SurgeOutcome) {
    match outcome {
        Ok((_, rtt)) => {
            let cookie = *run.cookie();
            let now = monotonic();
            run.sent_at(due, crate::Nanos(now.0.saturating_sub(rtt.as_nanos() as u64)));
            run.reply(now, due.target, &crate::ping::EchoReply { id: 0, seq: due.seq, payload: &cookie });
        }
        Err(surge_ping::SurgeError::Timeout { .. }) => {}
        Err(error) => run.failed(due, error.to_string()),
    }
}

fn surge_client(targets: &[IpAddr], v6: bool) -> Result<Option<surge_ping::Client>, PingError> {
    if !targets.iter().any(|t| t.is_ipv6() == v6) {
        return Ok(None);
    }
    let kind = if v6 { surge_ping::ICMP::V6 } else { surge_ping::ICMP::V4 };
    let config = surge_ping::Config::builder().kind(kind).build();
    surge_ping::Client::new(&config).map(Some).map_err(not_opened)
}
