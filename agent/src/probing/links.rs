//! What is known of the links to the peers.

use super::due::due;
use flexcomm_domain::{NodeName, Timestamp};
use flexcomm_probes::echo::Loss;
use flexcomm_probes::estimate::{Estimate, EstimatorConfig, LinkEstimator};
use flexcomm_probes::trace::PathWatch;
use flexcomm_wire::{EchoPeer, LinkReport};
use std::collections::{BTreeMap, BTreeSet};
use std::net::{IpAddr, SocketAddr};
use std::time::{Duration, Instant};

/// A peer's way as the echoes know it.
#[derive(Debug, Clone, Copy)]
pub struct Way {
    /// Seconds, there and back; 0 when unknown.
    pub round_trip_s: f64,
    /// Of the peer's throughput server: its tests are no job.
    pub throughput_port: u16,
}

struct Link {
    peer: EchoPeer,
    estimator: LinkEstimator,
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
        if let Err(error) = self.estimator.echo(at, rtt_s) {
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
                estimator: LinkEstimator::new(EstimatorConfig::default()),
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

    /// What is known of the way to each peer's address; addresses of several peers are left out.
    pub fn ways(&self, now: Instant) -> BTreeMap<IpAddr, Way> {
        let (at, mut ways, mut shared) = (self.at(now), BTreeMap::new(), BTreeSet::new());
        for link in self.links.values() {
            let addr = link.peer.addr.to_canonical();
            let round_trip_s = link.estimator.alpha(at).map_or(0.0, |alpha| 2.0 * alpha);
            let way = Way { round_trip_s, throughput_port: link.peer.throughput_port };
            if ways.insert(addr, way).is_some() {
                shared.insert(addr);
            }
        }
        ways.retain(|addr, _| !shared.contains(addr));
        ways
    }

    /// The node behind an address; none when it is not a peer's or that of several.
    fn by_addr(&mut self, addr: IpAddr) -> Option<&mut Link> {
        let mut found = self.links.values_mut().filter(|link| link.peer.addr.to_canonical() == addr);
        found.next().filter(|_| found.next().is_none())
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

    /// A throughput test begins to share the link with the job.
    pub fn test_begins(&mut self, node: &NodeName, now: Instant) {
        let at = self.at(now);
        if let Some(link) = self.links.get_mut(node) {
            link.estimator.test_begins(at);
        }
    }

    /// It is over without a finding; [`Self::throughput`] says so by itself.
    pub fn test_ends(&mut self, node: &NodeName, now: Instant) {
        let at = self.at(now);
        if let Some(link) = self.links.get_mut(node) {
            link.estimator.test_ends(at);
        }
    }

    /// Whether the link to a peer is known to be clearly faster.
    pub fn is_faster_than(&self, node: &NodeName, bps: f64, now: Instant) -> bool {
        const CLEARLY: f64 = 1.5;
        const LEAST_CONFIDENCE: f64 = 0.2;
        let known = self.links.get(node).map(|link| link.estimator.estimate(self.at(now)));
        let sure = known.filter(|known| known.bandwidth_confidence >= LEAST_CONFIDENCE);
        sure.and_then(|known| known.bandwidth).is_some_and(|bandwidth| bandwidth.get() > CLEARLY * bps)
    }

    /// A throughput test's finding, towards the peer.
    pub fn throughput(&mut self, node: &NodeName, bps: f64, now: Instant) {
        let at = self.at(now);
        if let Some(link) = self.links.get_mut(node)
            && let Err(error) = link.estimator.throughput(at, bps)
        {
            tracing::warn!(peer = %node, "throughput rejected: {error}");
        }
    }

    /// Pieces of real streams. Returns how many were taken in; the others are impossible or from nobody we know.
    pub fn transfers(&mut self, peer: IpAddr, samples: &[(u64, f64)], now: Instant) -> usize {
        let at = self.at(now);
        let Some(link) = self.by_addr(peer) else { return 0 };
        let taken = samples
            .iter()
            .filter(|(bytes, seconds)| link.estimator.transfer_rounds(at, *bytes as f64, *seconds, 0.0).is_ok());
        taken.count()
    }

    /// The largest bandwidth known to any peer: this node's capacity as far as it was seen, in bit/s.
    pub fn capacity_bps(&self, now: Instant) -> f64 {
        let at = self.at(now);
        let known = self.links.values().filter_map(|link| link.estimator.estimate(at).bandwidth);
        known.map(|b| b.get()).fold(0.0, f64::max)
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
            let (estimate, by_icmp) = (link.estimator.estimate(at), pings.is_some());
            let Some(report) = report(&link.peer.node, &estimate, (loss, by_icmp)) else { continue };
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

/// None before the first round trip: there is nothing to say.
fn report(peer: &NodeName, estimate: &Estimate, (loss, by_icmp): (&Loss, bool)) -> Option<LinkReport> {
    let share = |x: f64| if x.is_finite() { x.clamp(0.0, 1.0) } else { 0.0 };
    Some(LinkReport {
        peer: peer.clone(),
        latency_us: estimate.alpha?.get() * 1e6,
        latency_confidence: share(estimate.alpha_confidence),
        latency_age_ms: estimate.alpha_age.map_or(0.0, |age| age.get() * 1e3),
        bandwidth_bps: estimate.bandwidth.map(|b| b.get()),
        bandwidth_confidence: share(estimate.bandwidth_confidence),
        bandwidth_age_ms: estimate.bandwidth_age.map_or(0.0, |age| age.get() * 1e3),
        jitter_us: estimate.jitter.get() * 1e6,
        // With too few answers to tell the ways apart, a request without an answer counts as lost on the way out.
        loss_out: share(loss.out.unwrap_or(loss.share())),
        loss_back: share(loss.back.unwrap_or(0.0)),
        by_icmp,
    })
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
    fn the_way_to_an_address_is_known_when_it_is_one_peers() {
        let began = Instant::now();
        let mut links = Links::new(began);
        links.set_peers((&[peer("b", 1), peer("c", 2), peer("d", 2)], SECOND), began);
        let now = began + Duration::from_secs(1);
        (0..20).for_each(|_| links.echo("10.0.0.1:7071".parse().unwrap(), 0.004, now));
        let ways = links.ways(now);
        assert_eq!(ways.keys().copied().collect::<Vec<IpAddr>>(), vec![IpAddr::from([10, 0, 0, 1])]);
        let way = ways[&IpAddr::from([10, 0, 0, 1])];
        assert!((way.round_trip_s - 0.004).abs() < 1e-4 && way.throughput_port == 7072, "{way:?}");
    }

    #[test]
    fn samples_find_their_peer_and_strangers_are_rejected() {
        let began = Instant::now();
        let mut links = Links::new(began);
        links.set_peers((&[peer("b", 1), peer("c", 2), peer("d", 2)], SECOND), began);
        let now = began + Duration::from_secs(1);
        let samples = [(1_000_000, 0.01), (0, 1.0), (1, -1.0), (1, f64::INFINITY)];
        assert_eq!(links.transfers([10, 0, 0, 1].into(), &samples, now), 1);
        assert_eq!(links.transfers([10, 0, 0, 9].into(), &samples, now), 0);
        assert_eq!(links.transfers([10, 0, 0, 2].into(), &samples, now), 0, "two nodes have this address");
        links.throughput(&"b".parse().unwrap(), 1e9, now);
        assert!((links.capacity_bps(now) / 1e9 - 1.0).abs() < 0.3);
        links.set_peers((&[peer("b", 1)], SECOND), began);
        assert!(links.capacity_bps(now) > 0.0, "a peer that stays keeps its estimate");
        links.set_peers((&[peer("b", 3)], SECOND), began);
        assert_eq!(links.capacity_bps(now), 0.0, "another address is another link");
    }
}
