//! The two sides of a phase, fed with bytes and time.

use super::{Curve, Rate};
use crate::Nanos;

/// How often the estimate is looked at while bytes arrive, seconds.
const CHECK_S: f64 = 0.01;
/// A steady part this long is enough, seconds.
const ENOUGH_S: f64 = 0.12;
/// And it spans this many round trips: what happens within one is the sender's burst.
const ENOUGH_RTTS: f64 = 4.0;
/// And this many bytes, so that a packet more or less is two percent. More would serve nobody: on a slow link a job's messages
/// stand in the same queue.
const ENOUGH_BYTES: f64 = 64_000.0;
/// On fast links this many bytes are enough even when they took less time.
pub(super) const PLENTY_BYTES: f64 = 32_000_000.0;
/// Bytes that were sent may still be in a queue on the way when the sender is done, seconds.
const LINGER_S: f64 = 3.0;

/// The side that sends.
#[derive(Debug, Clone)]
pub struct Sending {
    budget: u64,
    sent: u64,
    deadline: Nanos,
    stopped: bool,
}

impl Sending {
    /// At most `budget` bytes and `time_limit_s` seconds from `now` on.
    pub fn new(now: Nanos, budget: u64, time_limit_s: f64) -> Self {
        Self { budget, sent: 0, deadline: now.plus(time_limit_s), stopped: false }
    }

    /// Bytes that may be written now; 0 ends the phase.
    pub fn allowance(&self, now: Nanos) -> u64 {
        if self.stopped || now >= self.deadline { 0 } else { self.budget - self.sent }
    }

    /// `bytes` were written.
    pub fn wrote(&mut self, bytes: u64) {
        self.sent = self.sent.saturating_add(bytes).min(self.budget);
    }

    /// The receiver has enough.
    pub fn stop(&mut self) {
        self.stopped = true;
    }

    /// Bytes written so far.
    pub fn sent(&self) -> u64 {
        self.sent
    }

    /// When it ends at the latest.
    pub fn deadline(&self) -> Nanos {
        self.deadline
    }
}

/// The side that receives.
#[derive(Debug, Clone)]
pub struct Receiving {
    curve: Curve,
    rtt_s: f64,
    deadline: Nanos,
    next_check: Nanos,
    expected: Option<u64>,
    stop_sent: bool,
}

impl Receiving {
    /// Waits for bytes until `time_limit_s` seconds from `now` and a little longer for those on the way.
    pub fn new(now: Nanos, time_limit_s: f64, rtt_s: f64) -> Self {
        let deadline = now.plus(time_limit_s + LINGER_S + 2.0 * rtt_s);
        Self { curve: Curve::new(now), rtt_s, deadline, next_check: now, expected: None, stop_sent: false }
    }

    /// What all streams had when the reader looked: of each, when its newest byte arrived and how many there were. The
    /// others arrived at some time before, so that the stamps of one look say nothing of the time between them.
    pub fn data(&mut self, reads: impl IntoIterator<Item = (Nanos, u64)>) {
        let look = reads.into_iter().reduce(|a, b| (a.0.max(b.0), a.1.saturating_add(b.1)));
        if let Some((newest, bytes)) = look {
            self.curve.add(newest, bytes);
        }
    }

    /// The sender is done after `bytes`.
    pub fn done(&mut self, bytes: u64) {
        self.expected = Some(bytes);
    }

    /// True once, when the estimate has become good enough to end the phase.
    pub fn wants_stop(&mut self, now: Nanos) -> bool {
        if self.stop_sent || now < self.next_check {
            return false;
        }
        self.next_check = now.plus(CHECK_S);
        let enough = |rate: Rate| {
            let long = rate.used_s >= ENOUGH_S.max(ENOUGH_RTTS * self.rtt_s) && rate.used_bytes >= ENOUGH_BYTES;
            rate.steady && (long || rate.used_bytes >= PLENTY_BYTES && rate.used_s >= 2.0 * self.rtt_s)
        };
        self.stop_sent = self.curve.rate(self.rtt_s).is_some_and(enough);
        self.stop_sent
    }

    /// Whether everything arrived, or the time is over.
    pub fn finished(&self, now: Nanos) -> bool {
        now >= self.deadline || self.expected.is_some_and(|bytes| self.curve.total() >= bytes)
    }

    /// When it ends at the latest.
    pub fn deadline(&self) -> Nanos {
        self.deadline
    }

    /// Bytes that arrived.
    pub fn received(&self) -> u64 {
        self.curve.total()
    }

    /// The estimate.
    pub fn rate(&self) -> Option<Rate> {
        self.curve.rate(self.rtt_s)
    }
}
