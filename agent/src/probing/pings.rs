//! ICMP echo: to peers whose echo responders do not answer, since UDP may be filtered on the way to them, and to hosts that are no nodes,
//! by which a network that is down is told from a peer that is.

use super::links::Links;
use super::lock;
use crate::config::Config;
use crate::metrics::Metrics;
use flexcomm_probes::edge::{PingSettings, ping_many};
use flexcomm_probes::ping::PingPlan;
use flexcomm_wire::HostSeen;
use std::collections::{BTreeSet, VecDeque};
use std::net::{IpAddr, Ipv4Addr, ToSocketAddrs};
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

/// How often a peer that does not answer echoes is pinged.
const PEERS_EVERY: Duration = Duration::from_secs(1);
/// How often other hosts are.
const HOSTS_EVERY: Duration = Duration::from_secs(5);
/// How often it is looked whether something is due.
const LOOK_EVERY: Duration = Duration::from_millis(200);
/// Echoes to each host whose share of losses counts.
const WINDOW: usize = 12;
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
    /// Those of a configuration. A cluster on one machine needs no gateway.
    pub(crate) fn of(config: &Config) -> Self {
        let host = |name: &String| Host { name: name.clone(), addr: None, round_trips: VecDeque::new() };
        let is_wanted = |name: &&String| *name != GATEWAY || !config.is_on_loopback();
        Self(config.ping_hosts.iter().filter(is_wanted).map(host).collect())
    }

    /// What was seen of each, as heartbeats tell it.
    pub(crate) fn seen(&self) -> Vec<HostSeen> {
        self.0.iter().map(Host::seen).collect()
    }

    /// Those that do not answer: their addresses are looked up again.
    fn silent(&self) -> Vec<String> {
        self.0.iter().filter(|host| host.is_silent()).map(|host| host.name.clone()).collect()
    }

    fn found(&mut self, name: &str, addr: Option<IpAddr>) {
        for host in self.0.iter_mut().filter(|host| host.name == name) {
            host.addr = addr;
            if addr.is_none() {
                host.pinged(None);
            }
        }
    }

    fn addresses(&self) -> Vec<IpAddr> {
        self.0.iter().filter_map(|host| host.addr).collect()
    }

    fn pinged(&mut self, addr: IpAddr, round_trip_s: Option<f64>) {
        self.0.iter_mut().filter(|host| host.addr == Some(addr)).for_each(|host| host.pinged(round_trip_s));
    }
}

impl Host {
    fn is_silent(&self) -> bool {
        self.round_trips.iter().all(Option::is_none)
    }

    fn pinged(&mut self, round_trip_s: Option<f64>) {
        if self.round_trips.len() == WINDOW {
            self.round_trips.pop_front();
        }
        self.round_trips.push_back(round_trip_s);
    }

    fn seen(&self) -> HostSeen {
        let lost = self.round_trips.iter().filter(|round_trip| round_trip.is_none()).count();
        HostSeen {
            host: self.name.clone(),
            addr: self.addr,
            round_trip_us: self.round_trips.back().copied().flatten().map(|seconds| seconds * 1e6),
            loss: lost as f64 / self.round_trips.len().max(1) as f64,
        }
    }
}

fn resolve(name: &str) -> Option<IpAddr> {
    if name == GATEWAY {
        return gateway(&std::fs::read_to_string("/proc/net/route").ok()?);
    }
    let found = (name, 0).to_socket_addrs().ok()?.next()?;
    Some(found.ip())
}

/// The gateway of the IPv4 default route, by the kernel's table of routes (proc_net(5)): addresses in hexadecimal digits as they lie in
/// memory.
fn gateway(routes: &str) -> Option<IpAddr> {
    let of = |line: &str| {
        let mut fields = line.split_whitespace().skip(1);
        let (to, gateway) = (fields.next()?, fields.next()?);
        let addr = u32::from_str_radix(gateway, 16).ok().filter(|addr| to == "00000000" && *addr != 0)?;
        Some(IpAddr::from(Ipv4Addr::from(addr.to_ne_bytes())))
    };
    routes.lines().skip(1).find_map(of)
}

/// Pings what is due until `quit`. Where the system allows no ICMP sockets it says so once and ends.
pub(super) fn watch(links: &Mutex<Links>, hosts: &Mutex<Hosts>, metrics: &Metrics, quit: &AtomicBool) {
    let (mut hosts_at, mut peers_at) = (Instant::now(), Instant::now());
    while !quit.load(Ordering::Relaxed) {
        let now = Instant::now();
        let mut targets = BTreeSet::new();
        if now >= peers_at {
            targets.extend(lock(links).without_echoes(now));
            peers_at = now + PEERS_EVERY;
        }
        if now >= hosts_at {
            let silent = lock(hosts).silent();
            for name in silent {
                // Not with the lock held: looking a name up may take seconds.
                let addr = resolve(&name);
                lock(hosts).found(&name, addr);
            }
            targets.extend(lock(hosts).addresses());
            hosts_at = now + HOSTS_EVERY;
        }
        let targets: Vec<IpAddr> = targets.into_iter().collect();
        if targets.is_empty() {
            std::thread::sleep(LOOK_EVERY);
            continue;
        }
        match ping_many(&targets, &SETTINGS, quit, &mut |_| {}) {
            Ok(report) => {
                for found in report.targets.iter().filter(|found| found.sent > 0) {
                    let round_trip_s = found.rtt.map(|rtt| rtt.median_s);
                    let of_peers = lock(links).pinged(found.target, round_trip_s, Instant::now());
                    metrics.peers_pinged_total.inc_by(of_peers as u64);
                    lock(hosts).pinged(found.target, round_trip_s);
                }
            }
            Err(error) => {
                tracing::warn!("neither hosts nor peers that do not answer echoes are pinged: failed to {error}");
                return;
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_gateway_is_that_of_the_default_route() {
        let routes = "Iface\tDestination\tGateway \tFlags\tRefCnt\tUse\tMetric\tMask\n\
            eth0\t0000FEA9\t00000000\t0001\t0\t0\t0\t0000FFFF\n\
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
        assert_eq!((hosts.seen()[0].loss, hosts.seen()[0].round_trip_us), (0.0, None), "nothing was sent");
        (0..WINDOW).for_each(|_| hosts.pinged(addr, Some(1e-3)));
        (0..3).for_each(|_| hosts.pinged(addr, None));
        let seen = hosts.seen().remove(0);
        assert_eq!((seen.loss, seen.round_trip_us), (0.25, None), "the newest one was lost");
        hosts.pinged(addr, Some(2e-3));
        assert_eq!(hosts.seen()[0].round_trip_us, Some(2e3));
        hosts.pinged([127, 0, 0, 9].into(), None);
        assert_eq!(hosts.0[0].round_trips.len(), WINDOW, "another host's");
    }
}
