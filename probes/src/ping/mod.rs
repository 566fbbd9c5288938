//! ICMP echo to many targets at once: packets and the state of a run. Pure.

mod packet;

pub use packet::{EchoReply, encode_request, parse_reply};

use crate::stats::Summary;
use crate::{Nanos, within};
use flexcomm_domain::Invalid;
use serde::Serialize;
use std::collections::HashMap;
use std::net::IpAddr;

/// Most targets of one run.
pub const MAX_TARGETS: usize = 4096;
/// Most echoes to one target: their numbers have 16 bits.
pub const MAX_COUNT: u64 = 60_000;
/// Bytes of random payload that a reply must return: nobody guesses them off the path.
pub const COOKIE: usize = 16;
/// Longest payload: fits an Ethernet frame over IPv6.
pub const MAX_PAYLOAD: usize = 1400;

/// How to ping.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct PingPlan {
    /// Echoes to each target.
    pub count: u64,
    /// Seconds between two echoes to the same target; the targets are spread over it.
    pub interval_s: f64,
    /// An echo without a reply after this is lost, seconds.
    pub timeout_s: f64,
}

/// One reply.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct PingReply {
    /// From whom.
    pub target: IpAddr,
    /// Its number, from 1.
    pub seq: u16,
    /// Round trip in seconds.
    pub rtt_s: f64,
}

/// What a run found about one target.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct PingStats {
    /// Whom.
    pub target: IpAddr,
    /// Echoes that were answered or given up.
    pub sent: u64,
    /// Of those, answered.
    pub answered: u64,
    /// Replies that came a second time.
    pub duplicates: u64,
    /// Share without an answer, 0 to 1.
    pub loss: f64,
    /// Round trips; absent when none came back.
    #[serde(flatten, serialize_with = "crate::stats::or_nulls")]
    pub rtt: Option<Summary>,
    /// Why the last echo could not be sent, if it could not.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub error: Option<String>,
}

struct Target {
    addr: IpAddr,
    next_at: Nanos,
    /// (sent, round trip) by number - 1.
    echoes: Vec<(Nanos, Option<f64>)>,
    duplicates: u64,
    error: Option<String>,
}

/// A run over many targets. Echoes carry a cookie, so replies to others and forgeries off the path do not count.
pub struct PingRun {
    plan: PingPlan,
    cookie: [u8; COOKIE],
    targets: Vec<Target>,
    index: HashMap<IpAddr, usize>,
}

/// What to send now.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Due {
    /// To whom.
    pub target: IpAddr,
    /// Its number.
    pub seq: u16,
}

impl PingRun {
    /// Begins at `now`; a target named twice is taken once. `cookie` must be random.
    pub fn new(now: Nanos, targets: &[IpAddr], plan: PingPlan, cookie: [u8; COOKIE]) -> Result<Self, Invalid> {
        within("number of targets", targets.len() as f64, 1.0..=MAX_TARGETS as f64)?;
        within("number of echoes", plan.count as f64, 1.0..=MAX_COUNT as f64)?;
        within("interval in seconds", plan.interval_s, 0.001..=3600.0)?;
        within("timeout in seconds", plan.timeout_s, 0.001..=60.0)?;
        let mut run = Self { plan, cookie, targets: Vec::new(), index: HashMap::new() };
        for addr in targets {
            let slot = run.targets.len();
            if *run.index.entry(*addr).or_insert(slot) == slot {
                let next_at = now.plus(plan.interval_s * slot as f64 / targets.len() as f64);
                run.targets.push(Target { addr: *addr, next_at, echoes: Vec::new(), duplicates: 0, error: None });
            }
        }
        Ok(run)
    }

    /// The cookie that every echo carries.
    pub fn cookie(&self) -> &[u8; COOKIE] {
        &self.cookie
    }

    /// An echo that is due at `now`, counted as sent at `now`.
    pub fn due(&mut self, now: Nanos) -> Option<Due> {
        let (count, interval) = (self.plan.count, self.plan.interval_s);
        let ready = |t: &&mut Target| t.next_at <= now && (t.echoes.len() as u64) < count;
        let target = self.targets.iter_mut().find(ready)?;
        target.echoes.push((now, None));
        // Late echoes are not caught up in a burst.
        target.next_at = target.next_at.plus(interval).max(now.plus(interval / 2.0));
        Some(Due { target: target.addr, seq: target.echoes.len() as u16 })
    }

    /// The echo left at `now`: the clock is read again just before sending.
    pub fn sent_at(&mut self, due: Due, now: Nanos) {
        if let Some(echo) = self.echo(due.target, due.seq) {
            echo.0 = now;
        }
    }

    /// The echo could not be sent.
    pub fn failed(&mut self, due: Due, error: String) {
        if let Some(target) = self.index.get(&due.target).map(|i| &mut self.targets[*i]) {
            target.error = Some(error);
        }
    }

    fn echo(&mut self, target: IpAddr, seq: u16) -> Option<&mut (Nanos, Option<f64>)> {
        let slot = usize::from(seq.checked_sub(1)?);
        let i = *self.index.get(&target)?;
        self.targets[i].echoes.get_mut(slot)
    }

    /// A reply that arrived at `now`; `None` when it answers nothing of this run or came too late.
    pub fn reply(&mut self, now: Nanos, from: IpAddr, reply: &EchoReply<'_>) -> Option<PingReply> {
        if reply.payload.get(..COOKIE) != Some(&self.cookie[..]) {
            return None;
        }
        let timeout = self.plan.timeout_s;
        let echo = self.echo(from, reply.seq)?;
        if echo.1.is_some() {
            let i = *self.index.get(&from)?;
            self.targets[i].duplicates += 1;
            return None;
        }
        let rtt_s = now.since(echo.0);
        if rtt_s > timeout {
            return None;
        }
        echo.1 = Some(rtt_s);
        Some(PingReply { target: from, seq: reply.seq, rtt_s })
    }

    /// When something is due next: an echo, or the end of the last wait. `None` when the run is over.
    pub fn next_at(&self, now: Nanos) -> Option<Nanos> {
        let next = |t: &Target| {
            if (t.echoes.len() as u64) < self.plan.count {
                return Some(t.next_at);
            }
            let open = t.echoes.iter().filter(|(_, rtt)| rtt.is_none());
            open.map(|(sent, _)| sent.plus(self.plan.timeout_s)).filter(|end| *end > now).max()
        };
        self.targets.iter().filter_map(next).min()
    }

    /// What was found; echoes that still wait at `now` are left out.
    pub fn stats(&self, now: Nanos) -> Vec<PingStats> {
        self.targets.iter().map(|target| self.stats_of(target, now)).collect()
    }

    fn stats_of(&self, target: &Target, now: Nanos) -> PingStats {
        let over = |(sent, rtt): &&(Nanos, Option<f64>)| rtt.is_some() || now.since(*sent) >= self.plan.timeout_s;
        let done: Vec<Option<f64>> = target.echoes.iter().filter(over).map(|(_, rtt)| *rtt).collect();
        let rtts: Vec<f64> = done.iter().flatten().copied().collect();
        let (sent, answered) = (done.len() as u64, rtts.len() as u64);
        PingStats {
            target: target.addr,
            sent,
            answered,
            duplicates: target.duplicates,
            loss: if sent == 0 { 0.0 } else { (sent - answered) as f64 / sent as f64 },
            rtt: Summary::of(&rtts),
            error: target.error.clone(),
        }
    }
}

#[cfg(test)]
mod tests;
