//! The asking side, one per peer.

use super::packet::{Body, LEN, Malformed, Packet};
use crate::Nanos;
use crate::auth::Key;
use crate::stats::{Summary, jitter, median};
use serde::Serialize;
use std::collections::VecDeque;

/// Most requests kept in the window: at the shortest interval of 1 ms, four seconds.
const MAX_WINDOW: usize = 4096;

/// How long things count.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct ProberLimits {
    /// A request without an answer after this many seconds is lost.
    pub timeout_s: f64,
    /// Requests older than this many seconds leave the window.
    pub window_s: f64,
}

impl Default for ProberLimits {
    fn default() -> Self {
        Self { timeout_s: 2.0, window_s: 30.0 }
    }
}

/// One round trip.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct EchoSample {
    /// Its number, from 1; requests that only fetched a cookie are not counted.
    pub seq: u64,
    /// Seconds from sending to the kernel's receive stamp, without the time the responder held it.
    pub rtt_s: f64,
    /// Way out by two clocks that do not agree: only differences between samples mean something.
    #[serde(skip)]
    pub out_offset_s: f64,
    /// Way back by two clocks that do not agree.
    #[serde(skip)]
    pub back_offset_s: f64,
}

/// What a received packet was.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Received {
    /// A round trip.
    Reply(EchoSample),
    /// The responder handed out a cookie; the next request carries it. Ask again at once.
    Hello,
}

/// Why a received packet counts for nothing.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum ReceiveError {
    /// Not an echo packet of this cluster.
    #[error(transparent)]
    Malformed(#[from] Malformed),
    /// Authentic, but no answer to anything this prober waits for: late, repeated or of another session.
    #[error("the answer {0} is not waited for")]
    Unexpected(u64),
}

/// Loss over the window.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct Loss {
    /// Requests that were answered or given up.
    pub sent: u64,
    /// Of those, answered.
    pub answered: u64,
    /// Share lost on the way out; absent while fewer than two answers allow to tell.
    pub out: Option<f64>,
    /// Share of the answers lost on the way back.
    pub back: Option<f64>,
}

impl Loss {
    /// Share of requests without an answer, 0 to 1.
    pub fn share(&self) -> f64 {
        if self.sent == 0 { 0.0 } else { (self.sent - self.answered) as f64 / self.sent as f64 }
    }
}

/// Latency, jitter and loss over the window.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct EchoSummary {
    /// Round trips; absent when none came back.
    #[serde(flatten, serialize_with = "crate::stats::or_nulls")]
    pub rtt: Option<Summary>,
    /// Requests that were answered or given up.
    pub sent: u64,
    /// Of those, answered.
    pub answered: u64,
    /// Share of requests without an answer, 0 to 1.
    pub loss: f64,
    /// Share lost on the way out; absent while fewer than two answers allow to tell.
    pub loss_out: Option<f64>,
    /// Share of the answers lost on the way back.
    pub loss_back: Option<f64>,
    /// Mean absolute difference of successive times of travel, way out; absent before two answers.
    pub jitter_out_s: Option<f64>,
    /// The same, way back.
    pub jitter_back_s: Option<f64>,
    /// Median of what the way out took above its own least: queueing there. Absent before two answers.
    pub excess_out_s: Option<f64>,
    /// The same, way back.
    pub excess_back_s: Option<f64>,
}

#[derive(Debug, Clone, Copy, PartialEq)]
enum State {
    Pending,
    Answered { sample: EchoSample, received: u64, epoch: u64 },
    Lost,
    Hello,
}

#[derive(Debug, Clone, Copy)]
struct Entry {
    seq: u64,
    sent: Nanos,
    state: State,
}

/// Sends numbered requests to one peer and makes sense of what comes back.
pub struct Prober {
    key: Key,
    session: u64,
    limits: ProberLimits,
    next_seq: u64,
    cookie: u64,
    /// Grows with every hello: the responder may have restarted, its count with it.
    epoch: u64,
    /// Whether a round trip has ever been measured.
    has_answered: bool,
    window: VecDeque<Entry>,
    /// How many of its entries are pending: the newest ones, as a rule, for which the others need not be looked at.
    pending: usize,
    /// What the window said of losses last, until something of it changes.
    loss: Option<Loss>,
}

impl Prober {
    /// `session` must be random: it tells this prober from all others.
    pub fn new(key: Key, session: u64, limits: ProberLimits) -> Self {
        let window = VecDeque::new();
        Self {
            key,
            session,
            limits,
            next_seq: 1,
            cookie: 0,
            epoch: 0,
            has_answered: false,
            window,
            pending: 0,
            loss: None,
        }
    }

    /// Whether a round trip has ever been measured.
    pub fn has_answered(&self) -> bool {
        self.has_answered
    }

    /// The number that tells this prober's answers from those of others.
    pub fn session(&self) -> u64 {
        self.session
    }

    /// The next request, to be sent at `now`.
    pub fn send(&mut self, now: Nanos) -> [u8; LEN] {
        let seq = self.next_seq;
        self.next_seq += 1;
        self.trim(now);
        self.loss = None;
        self.window.push_back(Entry { seq, sent: now, state: State::Pending });
        self.pending += 1;
        Packet { session: self.session, seq, cookie: self.cookie, body: Body::Request }.encode(&self.key)
    }

    /// Corrects the moment at which the newest request left (the clock is read again just before sending).
    pub fn sent_at(&mut self, now: Nanos) {
        if let Some(entry) = self.window.back_mut() {
            entry.sent = entry.sent.max(now);
        }
    }

    /// Takes back the newest request: it could not be sent.
    pub fn unsend(&mut self) {
        self.loss = None;
        if let Some(entry) = self.window.back_mut() {
            self.pending -= usize::from(entry.state == State::Pending);
            entry.state = State::Hello;
        }
    }

    /// Takes a packet that arrived at `now`.
    pub fn receive(&mut self, now: Nanos, bytes: &[u8]) -> Result<Received, ReceiveError> {
        let packet = Packet::decode(bytes, &self.key)?;
        let unexpected = ReceiveError::Unexpected(packet.seq);
        if packet.session != self.session || packet.body == Body::Request {
            return Err(unexpected);
        }
        let at = self.window.binary_search_by_key(&packet.seq, |entry| entry.seq).map_err(|_| unexpected)?;
        let entry = &mut self.window[at];
        if entry.state != State::Pending || now.since(entry.sent) > self.limits.timeout_s {
            return Err(unexpected);
        }
        self.cookie = packet.cookie;
        self.loss = None;
        self.pending -= 1;
        let Body::Reply { received, arrived_ns, hold_ns } = packet.body else {
            entry.state = State::Hello;
            self.epoch += 1;
            return Ok(Received::Hello);
        };
        let sample = sample_of(entry, now, arrived_ns, hold_ns);
        let sample = EchoSample { seq: sample.seq.saturating_sub(self.epoch), ..sample };
        if sample.rtt_s <= 0.0 {
            // No clock can have seen that: the answer arrived, but says nothing about time.
            entry.state = State::Hello;
            return Err(unexpected);
        }
        entry.state = State::Answered { sample, received, epoch: self.epoch };
        self.has_answered = true;
        Ok(Received::Reply(sample))
    }

    /// Gives up requests that are older than the timeout; returns how many were given up just now.
    pub fn expire(&mut self, now: Nanos) -> u64 {
        let pending = self.window.iter_mut().rev().filter(|entry| entry.state == State::Pending).take(self.pending);
        let mut lost = 0;
        for entry in pending.filter(|entry| now.since(entry.sent) > self.limits.timeout_s) {
            entry.state = State::Lost;
            lost += 1;
        }
        if lost > 0 {
            self.loss = None;
        }
        self.pending -= lost;
        lost as u64
    }

    /// Requests that still wait for an answer.
    pub fn pending(&self) -> usize {
        self.pending
    }

    fn trim(&mut self, now: Nanos) {
        let old = |entry: &Entry| now.since(entry.sent) > self.limits.window_s;
        while self.window.len() >= MAX_WINDOW || self.window.front().is_some_and(old) {
            let gone = self.window.pop_front();
            self.pending -= usize::from(gone.is_some_and(|entry| entry.state == State::Pending));
            self.loss = None;
        }
    }

    /// What the window says of losses at `now`: a part of [`Self::summary`] that costs little.
    pub fn loss(&mut self, now: Nanos) -> Loss {
        self.expire(now);
        self.trim(now);
        *self.loss.get_or_insert_with(|| losses(&self.window))
    }

    /// What the window says at `now`.
    pub fn summary(&mut self, now: Nanos) -> EchoSummary {
        let loss = self.loss(now);
        let samples: Vec<EchoSample> = self.window.iter().filter_map(answered).collect();
        let column = |pick: fn(&EchoSample) -> f64| samples.iter().map(pick).collect::<Vec<f64>>();
        let (out, back) = (column(|s| s.out_offset_s), column(|s| s.back_offset_s));
        EchoSummary {
            rtt: Summary::of(&column(|s| s.rtt_s)),
            sent: loss.sent,
            answered: loss.answered,
            loss: loss.share(),
            loss_out: loss.out,
            loss_back: loss.back,
            jitter_out_s: compared(&out, jitter),
            jitter_back_s: compared(&back, jitter),
            excess_out_s: compared(&out, excess),
            excess_back_s: compared(&back, excess),
        }
    }
}

/// Between two answers the responder's count tells how many requests arrived; the rest was lost on the way
/// out, and what arrived but was not answered here was lost on the way back.
fn losses(window: &VecDeque<Entry>) -> Loss {
    let (mut answered, mut lost) = (0u64, 0u64);
    let (mut sent, mut arrived, mut back) = (0u64, 0u64, 0u64);
    let mut previous: Option<(u64, u64)> = None;
    let mut since = 0u64;
    for entry in window {
        since += u64::from(entry.state != State::Hello);
        lost += u64::from(entry.state == State::Lost);
        let State::Answered { received, epoch, .. } = entry.state else { continue };
        answered += 1;
        if let Some((count, _)) = previous.filter(|(count, e)| *e == epoch && received > *count) {
            let got = (received - count).min(since);
            sent += since;
            arrived += got;
            back += got - 1;
        }
        previous = Some((received, epoch));
        since = 0;
    }
    let share = |part: u64, whole: u64| (whole > 0).then(|| part as f64 / whole as f64);
    Loss { sent: answered + lost, answered, out: share(sent - arrived, sent), back: share(back, arrived) }
}

fn answered(entry: &Entry) -> Option<EchoSample> {
    match entry.state {
        State::Answered { sample, .. } => Some(sample),
        _ => None,
    }
}

/// One answer alone says nothing about differences.
fn compared(offsets: &[f64], of: fn(&[f64]) -> f64) -> Option<f64> {
    (offsets.len() > 1).then(|| of(offsets))
}

fn excess(offsets: &[f64]) -> f64 {
    let least = offsets.iter().copied().fold(f64::INFINITY, f64::min);
    median(offsets).map_or(0.0, |middle| middle - least)
}

fn sample_of(entry: &Entry, now: Nanos, arrived_ns: u64, hold_ns: u64) -> EchoSample {
    let whole = now.0.saturating_sub(entry.sent.0);
    // A responder that claims to have held it longer than the whole trip is not believed.
    let hold = if hold_ns <= whole { hold_ns } else { 0 };
    let difference = |a: u64, b: u64| a.wrapping_sub(b) as i64 as f64 * 1e-9;
    EchoSample {
        seq: entry.seq,
        rtt_s: (whole - hold) as f64 * 1e-9,
        out_offset_s: difference(arrived_ns, entry.sent.0),
        back_offset_s: difference(now.0, arrived_ns.wrapping_add(hold)),
    }
}
