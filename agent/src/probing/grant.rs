//! What becomes of a grant: pure.

use super::budget::{Account, Held};
use super::links::Links;
use flexcomm_probes::throughput::{Direction, Plan, ThroughputResult};
use flexcomm_wire::{EchoPeer, MAX_TEST_S, ThroughputGrant, ThroughputReport};
use std::time::Duration;

/// Part of a grant's validity that is left for connecting and reporting, in seconds.
const MARGIN_S: f64 = 0.5;

/// A test that may begin.
#[derive(Debug)]
pub struct Prepared {
    /// Towards whom.
    pub peer: EchoPeer,
    /// How.
    pub plan: Plan,
    /// Of the budget.
    pub held: Held,
}

/// A test that brought nothing, and how many bytes it spent at most.
#[derive(Debug, Clone, PartialEq)]
pub struct Failed {
    /// The reason, for people.
    pub why: String,
    /// Both directions together.
    pub bytes: u64,
}

impl Failed {
    /// Nothing was sent.
    pub fn before(why: impl ToString) -> Self {
        Self { why: why.to_string(), bytes: 0 }
    }
}

/// What a test took at this end.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Took {
    /// From its beginning to its end.
    pub wall: Duration,
    /// Of a processor.
    pub cpu: Duration,
}

/// Whether and how a grant is used that was received so long ago. `now_s` is the account's.
pub fn prepare(
    grant: &ThroughputGrant,
    waited: Duration,
    links: &Links,
    account: &mut Account,
    now_s: f64,
) -> Result<Prepared, Failed> {
    let peer = links.peer(&grant.peer).ok_or_else(|| Failed::before("the peer is not in the probe plan"))?;
    let left_s = grant.valid_ms as f64 * 1e-3 - waited.as_secs_f64() - MARGIN_S;
    if left_s <= 0.2 {
        return Err(Failed::before("the grant has expired"));
    }
    let time_limit_s = (left_s / 2.0).clamp(0.1, MAX_TEST_S);
    let plan = Plan::new(1, grant.budget_bytes, time_limit_s, Direction::Both).map_err(Failed::before)?;
    let held = account.hold(now_s, grant.budget_bytes / 2);
    let held = held.map_err(|wait| Failed::before(format!("probe_share is used up for {wait:.0} s")))?;
    Ok(Prepared { peer, plan, held })
}

/// A test ended: the link learns what it found, the account what it cost.
pub fn settle(report: &ThroughputReport, held: Held, links: &mut Links, account: &mut Account) {
    if let Some(bps) = report.out_bps {
        links.throughput(&report.peer, bps, report.out_is_lower_bound);
    }
    let out = report.out_bytes.unwrap_or(report.bytes);
    // A test that failed counts with all that it may have sent.
    let dearer = out.max(report.bytes.saturating_sub(out));
    account.settle(held, dearer, links.capacity_bps());
}

/// What the controller gets.
pub fn report(
    grant: &ThroughputGrant,
    outcome: &Result<ThroughputResult, Failed>,
    took: Option<Took>,
) -> ThroughputReport {
    let believable = |bps: Option<f64>| bps.filter(|bps| bps.is_finite() && *bps > 0.0);
    let (grant, peer) = (grant.id, grant.peer.clone());
    let us = |of: fn(Took) -> Duration| took.map(|took| of(took).as_secs_f64() * 1e6);
    let (took_us, cpu_us) = (us(|took| took.wall), us(|took| took.cpu));
    match outcome {
        Ok(result) => ThroughputReport {
            grant,
            peer,
            out_bps: believable(result.out_bps()),
            back_bps: believable(result.back_bps()),
            out_is_lower_bound: result.out.is_some_and(|way| way.is_lower_bound()),
            back_is_lower_bound: result.back.is_some_and(|way| way.is_lower_bound()),
            bytes: result.bytes(),
            out_bytes: Some(result.out.map_or(0, |way| way.sent_bytes)),
            took_us,
            cpu_us,
            error: None,
        },
        Err(failed) => ThroughputReport {
            grant,
            peer,
            out_bps: None,
            back_bps: None,
            out_is_lower_bound: false,
            back_is_lower_bound: false,
            bytes: failed.bytes,
            out_bytes: None,
            took_us,
            cpu_us,
            error: Some(failed.why.clone()),
        },
    }
}
