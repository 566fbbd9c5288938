//! Network probes: echo, ping, traceroute, throughput as state machines; sockets only in [`edge`];
//! the estimator of alpha.
//!
//! Everything outside [`edge`] is pure: packets and the time are arguments. The agent uses
//! [`edge::EchoResponder`], [`edge::EchoProber`], [`edge::ThroughputServer`], [`edge::measure_throughput`],
//! [`edge::trace_route`] and one [`estimate::LinkEstimator`] per peer. `docs.md` beside this crate says how
//! echo packets are marked, so that a shaper can keep them out of the job's own queue.

pub mod auth;
pub mod echo;
pub mod edge;
pub mod estimate;
mod nanos;
pub mod ping;
pub mod stats;
pub mod throughput;
pub mod trace;

pub use auth::Token;
pub use nanos::Nanos;

use flexcomm_domain::{Invalid, short};
use std::ops::RangeInclusive;

/// Refuses a value of a plan or a sample outside its range.
fn within(what: &'static str, value: f64, range: RangeInclusive<f64>) -> Result<(), Invalid> {
    within_or(what, value, range.clone(), || format!("{} to {}", short(*range.start()), short(*range.end())))
}

/// Refuses a value outside its range, which is told in these words.
fn within_or(
    what: &'static str,
    value: f64,
    range: RangeInclusive<f64>,
    allowed: impl FnOnce() -> String,
) -> Result<(), Invalid> {
    if range.contains(&value) { Ok(()) } else { Err(Invalid::Range { what, value, allowed: allowed() }) }
}

/// Refuses a value that is not above 0 or is larger than `most`.
fn above_zero(what: &'static str, value: f64, most: f64) -> Result<(), Invalid> {
    within_or(what, value, f64::MIN_POSITIVE..=most, || format!("above 0 and at most {}", short(most)))
}

/// UDP port of the echo responder unless the configuration says otherwise.
pub const ECHO_PORT: u16 = 7071;
/// TCP port of the throughput server unless the configuration says otherwise.
pub const THROUGHPUT_PORT: u16 = 7072;
/// IP TOS / IPv6 traffic class of every echo packet, request and reply: DSCP 46 (expedited forwarding). A
/// shaper that gives this class its own leaf measures the link instead of the job's queue.
pub const ECHO_TOS: u8 = 0xb8;
/// IP TOS / IPv6 traffic class of a throughput session's handshakes and words of control: DSCP 48 (network
/// control), as routers mark their own. The test's bytes are not marked: they queue as the job's do.
pub const CONTROL_TOS: u8 = 0xc0;
/// `SO_PRIORITY` of every echo packet: the highest that needs no capability; `pfifo_fast` and `prio` put it in
/// their first band.
pub const ECHO_PRIORITY: u32 = 6;
