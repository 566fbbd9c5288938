//! Traceroute by UDP: the state of a run, and the detection of a changed path. Pure.
//!
//! Every probe goes to a port of its own, which names it in the answer. The port of (hop, query) is the same in
//! every run, so routers that spread flows over several paths treat it alike from run to run: a path that differs
//! has changed.

mod watch;

pub use watch::PathWatch;

use crate::stats::median;
use crate::{Nanos, within};
use flexcomm_domain::Invalid;
use serde::Serialize;
use std::collections::BTreeMap;
use std::net::IpAddr;

/// First port, as traceroute uses it: hosts expect nobody there.
pub const BASE_PORT: u16 = 33_434;
/// Most hops.
pub const MAX_HOPS: u8 = 64;
/// Most probes per hop.
pub const MAX_QUERIES: u8 = 10;
/// Probes are this far apart, seconds: routers limit how many errors they send.
const SPACING_S: f64 = 0.002;
/// Hops probed beyond the farthest that answered, before waiting for more answers.
const AHEAD: u8 = 8;
/// This many silent hops in a row, after all their timeouts, end the run.
const MAX_SILENT: u8 = 16;

/// How to trace.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct TracePlan {
    /// Farthest hop.
    pub max_hops: u8,
    /// Probes per hop.
    pub queries: u8,
    /// A probe without an answer after this is lost, seconds.
    pub timeout_s: f64,
}

impl Default for TracePlan {
    fn default() -> Self {
        Self { max_hops: 30, queries: 3, timeout_s: 1.0 }
    }
}

/// What an answer says.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Answer {
    /// A router on the way.
    TimeExceeded,
    /// The target itself: nobody listens on that port.
    Reached,
    /// Somebody refuses to pass it on.
    Unreachable,
}

/// One hop.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Hop {
    /// Distance, from 1.
    pub ttl: u8,
    /// Who answered first there; absent when nobody did.
    pub addr: Option<IpAddr>,
    /// Others that answered at the same distance: the path is spread.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub others: Vec<IpAddr>,
    /// Round trips in seconds, in the order of the probes; absent where none came back.
    pub rtts_s: Vec<Option<f64>>,
    /// Median round trip in seconds.
    pub median_s: Option<f64>,
}

/// The hops to a target.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Path {
    /// Whom.
    pub target: IpAddr,
    /// From the nearest to the farthest that matters.
    pub hops: Vec<Hop>,
    /// Whether the last hop is the target.
    pub reached: bool,
    /// The address that refused to pass packets on, if one did.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub refused_by: Option<IpAddr>,
}

impl Path {
    /// The addresses alone, hop by hop.
    pub fn addresses(&self) -> Vec<Option<IpAddr>> {
        self.hops.iter().map(|hop| hop.addr).collect()
    }
}

/// What to do next.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Step {
    /// Send a probe with this distance to this port.
    Send {
        /// Time to live.
        ttl: u8,
        /// Destination port.
        port: u16,
    },
    /// Wait for answers until then.
    Wait(Nanos),
    /// The path is known as far as it can be.
    Finished,
}

struct Probe {
    sent: Nanos,
    answer: Option<(f64, IpAddr)>,
}

/// One run towards one target.
pub struct TraceRun {
    target: IpAddr,
    plan: TracePlan,
    probes: BTreeMap<(u8, u8), Probe>,
    /// Distance of the target, or of who refuses.
    end: Option<u8>,
    refused_by: Option<IpAddr>,
    reached: bool,
    next_at: Nanos,
}

impl TraceRun {
    /// Begins at `now`.
    pub fn new(now: Nanos, target: IpAddr, plan: TracePlan) -> Result<Self, Invalid> {
        within("farthest hop", f64::from(plan.max_hops), 1.0..=f64::from(MAX_HOPS))?;
        within("number of probes per hop", f64::from(plan.queries), 1.0..=f64::from(MAX_QUERIES))?;
        within("timeout in seconds", plan.timeout_s, 0.01..=10.0)?;
        let probes = BTreeMap::new();
        Ok(Self { target, plan, probes, end: None, refused_by: None, reached: false, next_at: now })
    }

    fn port(ttl: u8, query: u8) -> u16 {
        BASE_PORT + (u16::from(ttl) - 1) * u16::from(MAX_QUERIES) + u16::from(query)
    }

    fn probe_of(port: u16) -> Option<(u8, u8)> {
        let offset = port.checked_sub(BASE_PORT)?;
        let queries = u16::from(MAX_QUERIES);
        let ttl = u8::try_from(offset / queries + 1).ok().filter(|ttl| *ttl <= MAX_HOPS)?;
        Some((ttl, (offset % queries) as u8))
    }

    /// What to do at `now`. A probe counts as sent at `now`.
    pub fn step(&mut self, now: Nanos) -> Step {
        let Some((ttl, query)) = self.next_probe(now) else {
            let open = self.probes.values().filter(|p| p.answer.is_none() && now.since(p.sent) < self.plan.timeout_s);
            let wait = open.map(|p| p.sent.plus(self.plan.timeout_s)).min();
            return wait.map_or(Step::Finished, |until| Step::Wait(until.max(Nanos(now.0 + 1))));
        };
        if now < self.next_at {
            return Step::Wait(self.next_at);
        }
        self.next_at = now.plus(SPACING_S);
        self.probes.insert((ttl, query), Probe { sent: now, answer: None });
        Step::Send { ttl, port: Self::port(ttl, query) }
    }

    /// The probe to this port left at `now`: the clock is read again just before sending.
    pub fn sent_at(&mut self, port: u16, now: Nanos) {
        if let Some(probe) = Self::probe_of(port).and_then(|key| self.probes.get_mut(&key)) {
            probe.sent = now;
        }
    }

    /// The first round finds the distance of the target, the others repeat what lies before it.
    fn next_probe(&self, now: Nanos) -> Option<(u8, u8)> {
        let last = self.end.unwrap_or(self.plan.max_hops).min(self.plan.max_hops);
        let farthest = self.answered().map(|(ttl, _)| ttl).max().unwrap_or(0);
        for query in 0..self.plan.queries {
            let missing = (1..=last).find(|ttl| !self.probes.contains_key(&(*ttl, query)));
            let Some(ttl) = missing else { continue };
            if self.end.is_some() || ttl <= farthest.saturating_add(AHEAD) {
                return Some((ttl, query));
            }
            if query > 0 {
                continue;
            }
            // Nobody answered for a while: go on only when those before had their time.
            let waiting = self.probes.values().any(|p| p.answer.is_none() && now.since(p.sent) < self.plan.timeout_s);
            if !waiting && ttl <= farthest.saturating_add(MAX_SILENT) {
                return Some((ttl, query));
            }
            if waiting {
                return None;
            }
        }
        None
    }

    fn answered(&self) -> impl Iterator<Item = (u8, IpAddr)> {
        self.probes.iter().filter_map(|((ttl, _), probe)| probe.answer.map(|(_, addr)| (*ttl, addr)))
    }

    /// An answer from `from` that arrived at `now` and names `port`. False when it answers nothing of this run.
    /// Only the target itself can say that it was reached: the same words from another are a refusal (a firewall's).
    pub fn answer(&mut self, now: Nanos, port: u16, from: IpAddr, kind: Answer) -> bool {
        let Some(key) = Self::probe_of(port) else { return false };
        let Some(probe) = self.probes.get_mut(&key).filter(|probe| probe.answer.is_none()) else { return false };
        let rtt_s = now.since(probe.sent);
        if rtt_s > self.plan.timeout_s {
            return false;
        }
        probe.answer = Some((rtt_s, from));
        let stranger = from.to_canonical() != self.target.to_canonical();
        let kind = if kind == Answer::Reached && stranger { Answer::Unreachable } else { kind };
        if kind != Answer::TimeExceeded {
            self.reached |= kind == Answer::Reached;
            self.refused_by = self.refused_by.or((kind == Answer::Unreachable).then_some(from));
            self.end = Some(self.end.map_or(key.0, |end| end.min(key.0)));
        }
        true
    }

    /// The path as far as it is known.
    pub fn path(&self) -> Path {
        let farthest = self.answered().map(|(ttl, _)| ttl).max().unwrap_or(0);
        let hops = (1..=self.end.unwrap_or(farthest)).map(|ttl| self.hop(ttl)).collect();
        let refused_by = self.refused_by.filter(|_| !self.reached);
        Path { target: self.target, hops, reached: self.reached, refused_by }
    }

    fn hop(&self, ttl: u8) -> Hop {
        let probes: Vec<&Probe> = self.probes.range((ttl, 0)..=(ttl, u8::MAX)).map(|(_, probe)| probe).collect();
        let rtts_s: Vec<Option<f64>> = probes.iter().map(|p| p.answer.map(|(rtt, _)| rtt)).collect();
        let mut addrs: Vec<IpAddr> = Vec::new();
        for (_, addr) in probes.iter().filter_map(|p| p.answer) {
            if !addrs.contains(&addr) {
                addrs.push(addr);
            }
        }
        let known: Vec<f64> = rtts_s.iter().flatten().copied().collect();
        let addr = addrs.first().copied();
        Hop { ttl, addr, others: addrs.split_off(addrs.len().min(1)), rtts_s, median_s: median(&known) }
    }
}

#[cfg(test)]
mod tests;
