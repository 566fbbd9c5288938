//! UDP echo between agents: sequence numbers, authentication, loss told apart by direction. Pure.
//!
//! A packet has 88 bytes, request and reply alike, so nothing is amplified. Every packet carries a keyed hash.
//! A responder answers a request in full only when it carries a *cookie* that the responder made itself for
//! this session, this source address and the current period of its own clock; any other authentic request gets
//! a *hello* with the cookie (rate limited). A recorded packet is therefore worthless once its cookie is stale,
//! and until then the session's window of seen numbers refuses it. No clocks need to agree for that.

mod packet;
mod prober;
mod responder;
mod turns;

pub use packet::{Body, LEN, Malformed, Packet};
pub use prober::{EchoSample, EchoSummary, Loss, Prober, ProberLimits, ReceiveError, Received};
pub use responder::{Answer, COOKIE_PERIOD_S, MAX_SESSIONS, Refused, Responder, ResponderStats};
pub use turns::{next_turn, turn};

#[cfg(test)]
mod tests;
