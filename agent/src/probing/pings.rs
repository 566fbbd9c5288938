//! ICMP echo: to peers that answer no UDP echo, which may be filtered on the way to them, and to hosts that are no nodes, by which a
//! network that is down is distinguished from a peer that is.

use super::links::{Links, Pinged};
use super::lock;
use crate::config::Config;
use crate::metrics::Metrics;
use flexcomm_probes::edge::{PingError, PingSettings, ping_many};
use flexcomm_probes::ping::PingPlan;
use flexcomm_wire::HostSeen;
use std::collections::{BTreeSet, VecDeque};
use std::net::{IpAddr, Ipv4Addr, ToSocketAddrs};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

/// How often a peer that answers no UDP echo is pinged.
const PEERS_EVERY: Duration = Duration::from_secs(1);
/// How often other hosts are.
const HOSTS_EVERY: Duration = Duration::from_secs(5);
/// When hosts are pinged for the first time after they were looked up for the first time.
const FIRST_AFTER: Duration = Duration::from_millis(200);
/// After an error of the system.
const RETRY_AFTER: Duration = Duration::from_secs(10);
/// Echoes to each host whose share of losses counts.
const WINDOW: usize = 12;
/// The address of a host is looked up again when so many echoes in a row were lost.
const LOST_IN_A_ROW: usize = 3;
/// One echo; what has no answer by then is lost.
const SETTINGS: PingSettings =
    PingSettings { plan: PingPlan { count: 1, interval_s: 1.0, timeout_s: 1.0 }, payload: 56 };

/// The name that stands for the gateway of the default route.
pub(crate) const GATEWAY: &str = "gateway";

/// Hosts that are no nodes, and what their answers showed.
#[derive(Debug, Default)]
pub(crate) struct Hosts(Vec<Host>);

#[derive(Debug)]
struct Host {
    name: String,
    addr: Option<IpAddr>,
    /// Round trips of the newest echoes, seconds.
    round_trips: VecDeque<Option<f64>>,
}

impl Hosts {
    /// Those of a configuration. A node on a loopback address needs no gateway.
    pub(crate) fn of(config: &Config) -> Self {
        let host = |name: &String| Host { name: name.clone(), addr: None, round_trips: VecDeque::new() };
        let is_wanted = |name: &&String| *name != GATEWAY || !config.is_on_loopback();
        Self(config.ping_hosts.iter().filter(is_wanted).map(host).collect())
    }

    /// What was seen of each, as heartbeats tell it.
    pub(crate) fn seen(&self) -> Vec<HostSeen> {
        self.0.iter().map(Host::seen).collect()
    }

    /// Those whose address is not known or does not answer.
    fn to_resolve(&self) -> Vec<String> {
        let all = self.0.iter().filter(|host| host.addr.is_none() || host.is_lost());
        all.map(|host| host.name.clone()).collect()
    }

    fn resolved(&mut self, name: &str, addr: IpAddr) {
        self.0.iter_mut().filter(|host| host.name == name).for_each(|host| host.addr = Some(addr));
    }

    fn addresses(&self) -> impl Iterator<Item = IpAddr> {
        self.0.iter().filter_map(|host| host.addr)
    }

    fn pinged(&mut self, addr: IpAddr, round_trip_s: Option<f64>) {
        for host in self.0.iter_mut().filter(|host| host.addr == Some(addr)) {
            if host.round_trips.len() == WINDOW {
                host.round_trips.pop_front();
            }
            host.round_trips.push_back(round_trip_s);
        }
    }
}

impl Host {
    fn is_lost(&self) -> bool {
        let newest = self.round_trips.iter().rev().take(LOST_IN_A_ROW);
        self.round_trips.len() >= LOST_IN_A_ROW && newest.flatten().count() == 0
    }

    fn seen(&self) -> HostSeen {
        let (sent, answered) = (self.round_trips.len(), self.round_trips.iter().flatten().count());
        HostSeen {
            host: self.name.clone(),
            addr: self.addr,
            round_trip_us: self.round_trips.back().copied().flatten().map(|seconds| seconds * 1e6),
            loss: (sent > 0).then(|| (sent - answered) as f64 / sent as f64),
        }
    }
}

fn resolve(name: &str) -> Option<IpAddr> {
    if name == GATEWAY {
        return gateway(&std::fs::read_to_string("/proc/thread-self/net/route").ok()?);
    }
    let found = (name, 0).to_socket_addrs().ok()?.next()?;
    Some(found.ip().to_canonical())
}

/// Looks names up in a thread that is not joined: it may take minutes while the network is down.
fn resolving(hosts: &Arc<Mutex<Hosts>>) -> Option<JoinHandle<()>> {
    let (names, hosts) = (lock(hosts).to_resolve(), hosts.clone());
    if names.is_empty() {
        return None;
    }
    let look_up = move || {
        for name in names {
            if let Some(addr) = resolve(&name) {
                lock(&hosts).resolved(&name, addr);
            }
        }
    };
    std::thread::Builder::new().name("resolve".into()).spawn(look_up).ok()
}

/// The gateway of the IPv4 default route, by the kernel's table of routes (proc_net(5)): addresses in hexadecimal digits as they lie in
/// memory. A tunnel's 0.0.0.0/1 is none.
fn gateway(routes: &str) -> Option<IpAddr> {
    let of = |line: &str| {
        let fields: Vec<&str> = line.split_whitespace().collect();
        let [_, to, gateway, _, _, _, _, mask, ..] = fields[..] else { return None };
        let is_default = to == "00000000" && mask == "00000000";
        let addr = u32::from_str_radix(gateway, 16).ok().filter(|addr| is_default && *addr != 0)?;
        Some(IpAddr::from(Ipv4Addr::from(addr.to_ne_bytes())))
    };
    routes.lines().skip(1).find_map(of)
}

/// Pings what is due until `quit`. Where the system allows no ICMP sockets it logs that once and ends, and no hosts are reported.
pub(super) fn watch(links: &Mutex<Links>, hosts: &Arc<Mutex<Hosts>>, metrics: &Metrics, quit: &AtomicBool) {
    let (mut hosts_at, mut peers_at, mut resolver) = (Instant::now(), Instant::now(), None::<JoinHandle<()>>);
    let mut is_first = true;
    while !quit.load(Ordering::Relaxed) {
        let now = Instant::now();
        let mut targets = BTreeSet::new();
        if now >= hosts_at {
            hosts_at = now + if is_first { FIRST_AFTER } else { HOSTS_EVERY };
            is_first = false;
            if resolver.as_ref().is_none_or(JoinHandle::is_finished) {
                resolver = resolving(hosts);
            }
            targets.extend(lock(hosts).addresses());
        }
        if now >= peers_at {
            targets.extend(lock(links).silent(now));
            peers_at = now + PEERS_EVERY;
        }
        match ping(&targets, quit) {
            Ok(found) => found.into_iter().for_each(|(addr, rtt_s)| {
                tell(lock(links).pinged(addr, rtt_s, Instant::now()), metrics);
                lock(hosts).pinged(addr, rtt_s);
            }),
            Err(error @ PingError::Permission(_)) => {
                tracing::warn!("neither hosts nor peers that answer no UDP echo are pinged: failed to {error}");
                lock(hosts).0.clear();
                return;
            }
            Err(error) => {
                tracing::debug!("failed to {error}");
                (hosts_at, peers_at) = (now + RETRY_AFTER, now + RETRY_AFTER);
            }
        }
        std::thread::park_timeout(hosts_at.min(peers_at).saturating_duration_since(Instant::now()));
    }
}

/// One echo to each: round trips in seconds, and none of what was lost. A system without IPv6 still pings what has an IPv4 address.
fn ping(targets: &BTreeSet<IpAddr>, quit: &AtomicBool) -> Result<Vec<(IpAddr, Option<f64>)>, PingError> {
    let mut all = Vec::new();
    for v6 in [false, true] {
        let of_kind: Vec<IpAddr> = targets.iter().copied().filter(|addr| addr.is_ipv6() == v6).collect();
        if of_kind.is_empty() {
            continue;
        }
        let found = match ping_many(&of_kind, &SETTINGS, quit, &mut |_| {}) {
            Err(error) if v6 => {
                tracing::debug!("failed to ping over IPv6: {error}");
                continue;
            }
            found => found?,
        };
        let sent = found.targets.into_iter().filter(|target| target.sent > 0);
        all.extend(sent.map(|target| (target.target, target.rtt.map(|rtt| rtt.median_s))));
    }
    Ok(all)
}

fn tell(pinged: Vec<Pinged>, metrics: &Metrics) {
    metrics.peers_pinged_total.inc_by(pinged.len() as u64);
    for Pinged { peer, .. } in pinged.iter().filter(|pinged| pinged.is_first_answer) {
        let (node, port) = (&peer.node, peer.echo_port);
        tracing::warn!(
            peer = %node,
            "answers ICMP and no UDP echo on port {port}: the port is filtered on the way, or its agent is down; ICMP measures the \
             latency meanwhile"
        );
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_gateway_is_that_of_the_default_route() {
        let routes = "Iface\tDestination\tGateway \tFlags\tRefCnt\tUse\tMetric\tMask\n\
            eth0\t0000FEA9\t00000000\t0001\t0\t0\t0\t0000FFFF\n\
            tun0\t00000000\t0100080A\t0003\t0\t0\t0\t00000080\n\
            eth0\t00000000\t010011AC\t0003\t0\t0\t0\t00000000\n";
        if cfg!(target_endian = "little") {
            assert_eq!(gateway(routes), Some("172.17.0.1".parse().unwrap()));
        }
        assert_eq!(gateway(&routes.replace("010011AC", "00000000")), None, "a route without one");
        assert_eq!(gateway(""), None);
        assert_eq!(gateway("Iface\nnonsense\n"), None);
    }

    #[test]
    fn losses_are_those_of_the_newest_echoes() {
        let addr: IpAddr = [127, 0, 0, 1].into();
        let mut hosts = Hosts(vec![Host { name: "localhost".into(), addr: Some(addr), round_trips: VecDeque::new() }]);
        assert_eq!((hosts.seen()[0].loss, hosts.seen()[0].round_trip_us), (None, None), "nothing was sent");
        (0..WINDOW).for_each(|_| hosts.pinged(addr, Some(1e-3)));
        (0..2).for_each(|_| hosts.pinged(addr, None));
        assert!(hosts.to_resolve().is_empty());
        hosts.pinged(addr, None);
        assert_eq!(hosts.to_resolve(), ["localhost"], "it may have moved");
        let seen = hosts.seen().remove(0);
        assert_eq!((seen.loss, seen.round_trip_us), (Some(0.25), None), "the newest one was lost");
        hosts.pinged(addr, Some(2e-3));
        assert_eq!(hosts.seen()[0].round_trip_us, Some(2e3));
        assert!(hosts.to_resolve().is_empty());
        hosts.pinged([127, 0, 0, 9].into(), None);
        assert_eq!(hosts.0[0].round_trips.len(), WINDOW, "another host's");
    }
}
