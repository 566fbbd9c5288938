//! What is known of the links to the peers.

use super::due::due;
use flexcomm_domain::{NodeName, Timestamp};
use flexcomm_probes::echo::Loss;
use flexcomm_probes::estimate::{Estimate, LatencyEstimator};
use flexcomm_probes::trace::PathWatch;
use flexcomm_wire::{EchoPeer, LinkReport};
use std::collections::BTreeMap;
use std::net::{IpAddr, SocketAddr};
use std::time::{Duration, Instant};

struct Link {
    peer: EchoPeer,
    latency: LatencyEstimator,
    /// What the newest throughput test towards it found, bit/s.
    tested_bps: Option<f64>,
    path: PathWatch,
    reported: Option<(Instant, LinkReport)>,
    /// When it answered a UDP echo last, or came into the plan.
    answered: Instant,
    /// ICMP echoes since then.
    pings: Option<Loss>,
}

/// Beyond so many ICMP echoes older ones count half.
const MOST_PINGS: u64 = 64;
/// A peer that has answered no UDP echo for so long, and for so many of their intervals, is pinged.
const SILENT: Duration = Duration::from_secs(3);
const SILENT_INTERVALS: u32 = 4;

/// What an ICMP echo showed of a peer that answers no UDP echo.
#[derive(Debug, Clone, PartialEq)]
pub struct Pinged {
    /// Which.
    pub peer: EchoPeer,
    /// Whether it is the first answer since then.
    pub is_first_answer: bool,
}

impl Link {
    /// Whether it has answered no UDP echo for so long.
    fn is_silent(&self, silent_after: Duration, now: Instant) -> bool {
        now.duration_since(self.answered) >= silent_after
    }

    fn round_trip(&mut self, at: Timestamp, rtt_s: f64) {
        if let Err(error) = self.latency.echo(at, rtt_s) {
            tracing::debug!(peer = %self.peer.node, "echo rejected: {error}");
        }
    }
}

/// One estimator per peer of the probe plan. Times are those of the monotonic clock.
pub struct Links {
    began: Instant,
    silent_after: Duration,
    links: BTreeMap<NodeName, Link>,
}

impl Links {
    /// Without peers.
    pub fn new(began: Instant) -> Self {
        Self { began, silent_after: SILENT, links: BTreeMap::new() }
    }

    fn at(&self, now: Instant) -> Timestamp {
        Timestamp(now.duration_since(self.began).as_micros() as u64)
    }

    /// Follows another plan; peers that stay where they are keep what is known.
    pub fn set_peers(&mut self, (peers, echo_interval): (&[EchoPeer], Duration), now: Instant) {
        self.silent_after = SILENT.max(SILENT_INTERVALS * echo_interval);
        let mut old = std::mem::take(&mut self.links);
        for peer in peers {
            let kept = old.remove(&peer.node).filter(|link| link.peer == *peer);
            let link = kept.unwrap_or_else(|| Link {
                peer: peer.clone(),
                latency: LatencyEstimator::default(),
                tested_bps: None,
                path: PathWatch::default(),
                reported: None,
                answered: now,
                pings: None,
            });
            self.links.insert(peer.node.clone(), link);
        }
    }

    /// Those of the plan.
    pub fn peers(&self) -> Vec<EchoPeer> {
        self.links.values().map(|link| link.peer.clone()).collect()
    }

    /// One of them.
    pub fn peer(&self, node: &NodeName) -> Option<EchoPeer> {
        self.links.get(node).map(|link| link.peer.clone())
    }

    /// A round trip. Samples that the estimator refuses are counted by it and change nothing.
    pub fn echo(&mut self, from: SocketAddr, rtt_s: f64, now: Instant) {
        let at = self.at(now);
        let Some(link) = self.links.values_mut().find(|link| echo_addr(&link.peer) == from) else { return };
        (link.answered, link.pings) = (now, None);
        link.round_trip(at, rtt_s);
    }

    /// Addresses of peers that answer no UDP echo.
    pub fn silent(&self, now: Instant) -> Vec<IpAddr> {
        let silent = self.links.values().filter(|link| link.is_silent(self.silent_after, now));
        silent.map(|link| link.peer.addr.to_canonical()).collect()
    }

    /// The round trip of an ICMP echo, or that it was lost: counts for peers that answer no UDP echo, of whom it tells.
    pub fn pinged(&mut self, addr: IpAddr, rtt_s: Option<f64>, now: Instant) -> Vec<Pinged> {
        let (at, silent_after) = (self.at(now), self.silent_after);
        let at_addr = self.links.values_mut().filter(|link| link.peer.addr.to_canonical() == addr);
        let silent = at_addr.filter(|link| link.is_silent(silent_after, now));
        let take = |link: &mut Link| {
            let pings = link.pings.get_or_insert_default();
            let is_first_answer = pings.answered == 0 && rtt_s.is_some();
            (pings.sent, pings.answered) = (pings.sent + 1, pings.answered + u64::from(rtt_s.is_some()));
            if pings.sent > MOST_PINGS {
                (pings.sent, pings.answered) = (pings.sent / 2, pings.answered / 2);
            }
            rtt_s.into_iter().for_each(|rtt_s| link.round_trip(at, rtt_s));
            Pinged { peer: link.peer.clone(), is_first_answer }
        };
        silent.map(take).collect()
    }

    /// A throughput test's finding, towards the peer.
    pub fn throughput(&mut self, node: &NodeName, bps: f64, is_lower_bound: bool) {
        if let Some(link) = self.links.get_mut(node) {
            let least = link.tested_bps.filter(|_| is_lower_bound).unwrap_or_default();
            link.tested_bps = Some(bps.max(least));
        }
    }

    /// The largest bandwidth that a test found towards any peer: this node's capacity as far as it was seen, in bit/s.
    pub fn capacity_bps(&self) -> f64 {
        self.links.values().filter_map(|link| link.tested_bps).fold(0.0, f64::max)
    }

    /// A finished trace; the hops when they are news.
    pub fn path(&mut self, node: &NodeName, hops: Vec<Option<IpAddr>>) -> Option<Vec<Option<IpAddr>>> {
        self.links.get_mut(node)?.path.observe(hops)
    }

    /// The reports that are due. When one is due by time alone, those that soon will be go along: each delivery costs
    /// agent and controller more than what is in it.
    pub fn reports(
        &mut self,
        losses: &BTreeMap<SocketAddr, Loss>,
        now: Instant,
        interval: Duration,
    ) -> Vec<LinkReport> {
        let at = self.at(now);
        let waited = |link: &Link| link.reported.as_ref().map_or(Duration::MAX, |(when, _)| now.duration_since(*when));
        let is_reported = |link: &Link| link.reported.is_some() && losses.contains_key(&echo_addr(&link.peer));
        let round = self.links.values().any(|link| is_reported(link) && waited(link) >= interval);
        let interval = if round { interval / 2 } else { interval };
        let mut due_now = Vec::new();
        for link in self.links.values_mut() {
            // All of the UDP echoes are lost then.
            let pings = link.pings.filter(|pings| pings.answered > 0);
            let Some(loss) = pings.as_ref().or(losses.get(&echo_addr(&link.peer))) else { continue };
            // Before the first round trip there is nothing to say.
            let Some(estimate) = link.latency.estimate(at) else { continue };
            let report = report(&link.peer.node, &estimate, (loss, pings.is_some()));
            if due(link.reported.as_ref().map(|(_, last)| last), &report, waited(link), interval) {
                link.reported = Some((now, report.clone()));
                due_now.push(report);
            }
        }
        due_now
    }
}

/// Where a peer answers echoes.
pub fn echo_addr(peer: &EchoPeer) -> SocketAddr {
    SocketAddr::new(peer.addr, peer.echo_port)
}

fn report(peer: &NodeName, estimate: &Estimate, (loss, by_icmp): (&Loss, bool)) -> LinkReport {
    let share = |x: f64| if x.is_finite() { x.clamp(0.0, 1.0) } else { 0.0 };
    LinkReport {
        peer: peer.clone(),
        latency_us: estimate.alpha.get() * 1e6,
        latency_confidence: share(estimate.confidence),
        latency_age_ms: estimate.age.get() * 1e3,
        jitter_us: estimate.jitter.get() * 1e6,
        // With too few answers to tell the ways apart, a request without an answer counts as lost on the way out.
        loss_out: share(loss.out.unwrap_or(loss.share())),
        loss_back: share(loss.back.unwrap_or(0.0)),
        by_icmp,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn peer(name: &str, last: u8) -> EchoPeer {
        EchoPeer { node: name.parse().unwrap(), addr: [10, 0, 0, last].into(), echo_port: 7071, throughput_port: 7072 }
    }

    const SECOND: Duration = Duration::from_secs(1);

    #[test]
    fn a_peer_is_silent_after_several_intervals_of_its_echoes() {
        let began = Instant::now();
        let mut links = Links::new(began);
        let at = |s: u64| began + Duration::from_secs(s);
        for (interval, silent_from) in [(Duration::from_millis(100), 3), (Duration::from_secs(10), 40)] {
            links.set_peers((&[peer("b", 1)], interval), began);
            assert!(links.silent(at(silent_from - 1)).is_empty() && links.silent(at(silent_from)).len() == 1);
        }
        let addr = IpAddr::from([10, 0, 0, 1]);
        let mut first = |rtt_s| links.pinged(addr, rtt_s, at(41)).iter().map(|p| p.is_first_answer).collect::<Vec<_>>();
        assert_eq!([first(None), first(Some(1e-3)), first(Some(1e-3))], [[false], [true], [false]]);
        let losses = BTreeMap::from([(echo_addr(&peer("b", 1)), Loss { sent: 9, ..Loss::default() })]);
        let report = links.reports(&losses, at(42), SECOND).remove(0);
        assert!(report.by_icmp && (report.loss_out - 1.0 / 3.0).abs() < 1e-9, "{report:?}");
        links.echo(echo_addr(&peer("b", 1)), 1e-3, at(43));
        assert!(links.pinged(addr, Some(1e-3), at(44)).is_empty(), "UDP echoes are better");
    }

    #[test]
    fn reports_that_wait_go_in_one_round() {
        let began = Instant::now();
        let mut links = Links::new(began);
        links.set_peers((&[peer("b", 1), peer("c", 2)], SECOND), began);
        let second = Duration::from_secs(1);
        let mut round = |ms: u64, heard: &[EchoPeer]| {
            let now = began + Duration::from_millis(ms);
            heard.iter().for_each(|p| links.echo(echo_addr(p), 0.004, now));
            let losses = heard.iter().map(|peer| (echo_addr(peer), Loss::default())).collect();
            links.reports(&losses, now, second).into_iter().map(|r| r.peer.to_string()).collect::<String>()
        };
        assert_eq!(round(100, &[peer("b", 1)]), "b");
        let both = [peer("b", 1), peer("c", 2)];
        assert_eq!(round(500, &both), "c", "the other was told just now");
        assert_eq!(round(1000, &both), "");
        assert_eq!(round(1100, &both), "bc");
        assert_eq!(round(2000, &both), "");
        assert_eq!(round(2100, &both), "bc");
    }

    #[test]
    fn the_capacity_is_the_most_that_tests_found() {
        let began = Instant::now();
        let mut links = Links::new(began);
        links.set_peers((&[peer("b", 1), peer("c", 2)], SECOND), began);
        let (b, c) = ("b".parse().unwrap(), "c".parse().unwrap());
        assert_eq!(links.capacity_bps(), 0.0);
        links.throughput(&b, 1e9, false);
        links.throughput(&c, 1e8, false);
        links.throughput(&"absent".parse().unwrap(), 1e12, false);
        assert_eq!(links.capacity_bps(), 1e9);
        links.throughput(&b, 2e8, true);
        assert_eq!(links.capacity_bps(), 1e9, "a lower bound below what is known says nothing");
        links.throughput(&b, 5e8, false);
        assert_eq!(links.capacity_bps(), 5e8);
        links.set_peers((&[peer("b", 1)], SECOND), began);
        assert_eq!(links.capacity_bps(), 5e8, "a peer that stays keeps what is known");
        links.set_peers((&[peer("b", 3)], SECOND), began);
        assert_eq!(links.capacity_bps(), 0.0, "another address is another link");
    }
}
