//! How often agents may echo: on slow links, or among many nodes, less often than the configuration says, so that
//! echoes and traces take at most a part of what probing may take, and a node sends few of them. Pure.

use flexcomm_domain::NodeName;
use std::collections::BTreeMap;

use crate::config::RawProbes;
use crate::grants::{Known, Pair};

/// The part of the share that echoes may take.
const ECHO_PART: f64 = 0.4;

/// The part of the share that traces may take; the rest is for throughput tests.
const TRACE_PART: f64 = 0.1;

/// Most echoes per second that a node sends: what they cost nodes and controller must not grow with all pairs of them.
const MOST_PER_S: f64 = 40.0;

/// An echo on the wire: 88 bytes in UDP over IPv6 over Ethernet with preamble and gap.
const ECHO_BITS: f64 = (88 + 8 + 40 + 38) as f64 * 8.0;

/// A trace over ten hops, three packets each, as they go out at either end.
const TRACE_BITS: f64 = (10 * 3 * 100) as f64 * 8.0;

/// Slower than this is no measurement, ms; agents hold to it, too.
const SLOWEST_MS: u64 = 60_000;

/// The same of traces, s.
const SLOWEST_TRACE_S: u64 = 86_400;

/// What the probe plan says, and what it takes.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Echoes {
    /// Time between two echoes to the same peer, ms.
    pub interval_ms: u64,
    /// Time between two traceroutes to the same peer, s; 0 = never.
    pub trace_s: u64,
    /// The part of the share that they take where they take most, 0 to 1.
    pub other_probes: f64,
}

impl Echoes {
    /// As configured.
    pub fn configured(config: &RawProbes) -> Self {
        Self { interval_ms: config.echo_interval_ms, trace_s: config.trace_interval_s, other_probes: 0.0 }
    }
}

/// Each node echoes to each other and answers each other: the most that any link or node has to carry counts. The
/// intervals are the configured ones, doubled as often as needed: small changes of an estimate change no plan.
pub fn plan(config: &RawProbes, live: &[NodeName], known: &BTreeMap<Pair, Known>) -> Echoes {
    let peers = live.len().saturating_sub(1) as f64;
    let few = |ms: u64| peers <= MOST_PER_S * ms as f64 * 1e-3;
    let capacity_bps = narrowest(peers, live, known);
    let allowed_bps = capacity_bps.map_or(f64::INFINITY, |capacity_bps| config.budget_share * capacity_bps);
    let echoes = |ms: u64| 2.0 * ECHO_BITS / (ms as f64 * 1e-3) / allowed_bps;
    let traces = |s: u64| if s == 0 { 0.0 } else { 2.0 * TRACE_BITS / s as f64 / allowed_bps };
    let interval_ms = stretched(config.echo_interval_ms, SLOWEST_MS, |ms| few(ms) && echoes(ms) <= ECHO_PART);
    let trace_s = stretched(config.trace_interval_s, SLOWEST_TRACE_S, |s| traces(s) <= TRACE_PART);
    Echoes { interval_ms, trace_s, other_probes: (echoes(interval_ms) + traces(trace_s)).min(1.0) }
}

/// Doubled until it fits.
fn stretched(mut interval: u64, most: u64, fits: impl Fn(u64) -> bool) -> u64 {
    while interval < most && !fits(interval) {
        interval = (2 * interval).min(most);
    }
    interval
}

/// What a link has to carry for one peer: its own bandwidth, or the part of a node's that each of its peers gets. A
/// node has the bandwidth of its best link. None while nothing is known.
fn narrowest(peers: f64, live: &[NodeName], known: &BTreeMap<Pair, Known>) -> Option<f64> {
    let links = || known.iter().filter_map(|(pair, link)| Some((pair, link.bandwidth_bps?)));
    let of_node = |node: &NodeName| {
        let own = links().filter(|(pair, _)| pair.has(node)).map(|(_, bps)| bps);
        own.reduce(f64::max).map(|bps| bps / peers)
    };
    let between = |pair: &Pair| live.iter().filter(|node| pair.has(node)).count() == 2;
    let of_links = links().filter(|(pair, _)| between(pair)).map(|(_, bps)| bps);
    live.iter().filter_map(of_node).chain(of_links).reduce(f64::min)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn cluster(nodes: usize, bps: f64) -> (Vec<NodeName>, BTreeMap<Pair, Known>) {
        let live: Vec<NodeName> = (0..nodes).map(|i| NodeName::new(&format!("n{i}")).unwrap()).collect();
        let link = Known { bandwidth_bps: Some(bps), latency_s: 0.001, ..Known::default() };
        let known = Pair::among(&live).map(|pair| (pair, link)).collect();
        (live, known)
    }

    #[test]
    fn fast_links_are_echoed_as_configured_and_slow_ones_within_the_share() {
        let config = RawProbes::default();
        let nothing = plan(&config, &cluster(4, 1e9).0, &BTreeMap::new());
        assert_eq!(nothing, Echoes { interval_ms: 200, trace_s: 60, other_probes: 0.0 });
        let (live, known) = cluster(4, 1e9);
        let fast = plan(&config, &live, &known);
        assert!(fast.interval_ms == 200 && fast.other_probes < 0.01, "{fast:?}");
        for (nodes, expected) in [(9, 200), (10, 400), (16, 400), (101, 3200)] {
            let (live, known) = cluster(nodes, 1e12);
            let intervals = [&known, &BTreeMap::new()].map(|known| plan(&config, &live, known).interval_ms);
            assert_eq!(intervals, [expected; 2], "{nodes} nodes");
        }
        for (nodes, bps) in [(2, 1e6), (4, 1e6), (8, 1e6), (64, 1e7), (512, 1e9)] {
            let (live, known) = cluster(nodes, bps);
            let echoes = plan(&config, &live, &known);
            let seconds = echoes.interval_ms as f64 * 1e-3;
            let sent_bps = (nodes - 1) as f64 * 2.0 * ECHO_BITS / seconds;
            assert!(sent_bps <= ECHO_PART * 0.01 * bps, "{nodes} nodes at {bps} bit/s: {echoes:?}");
            assert!(echoes.other_probes <= ECHO_PART + TRACE_PART, "{echoes:?}");
        }
    }

    #[test]
    fn the_slowest_link_or_node_decides() {
        let config = RawProbes::default();
        let (live, mut known) = cluster(3, 1e9);
        known.get_mut(&Pair::new(&live[0], &live[1])).unwrap().bandwidth_bps = Some(1e5);
        assert!(plan(&config, &live, &known).interval_ms > 2000);
        assert_eq!(plan(&config, &live[1..], &known).interval_ms, 200, "n0 is not there");
    }
}
