//! The answering side.

use super::packet::{Body, LEN, Malformed, Packet};
use crate::Nanos;
use crate::auth::{Key, same};
use std::collections::HashMap;
use std::net::IpAddr;

/// Most sessions kept at once: one per peer and prober, with room for restarts. About 100 bytes each.
pub const MAX_SESSIONS: usize = 4096;
/// A cookie is accepted in the period in which it was made and in the next.
pub const COOKIE_PERIOD_S: u64 = 64;
/// Hellos per second, and most at once: a whole cluster may start together, a flood of replays may not.
const HELLO_RATE: f64 = 1000.0;
/// Sequence numbers remembered below the highest; anything older is refused.
const WINDOW: u64 = 256;

/// Why a packet got no answer.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum Refused {
    /// Not an echo packet of this cluster.
    #[error(transparent)]
    Malformed(#[from] Malformed),
    /// An answer, not a request.
    #[error("the packet is an answer, a responder takes requests")]
    NotRequest,
    /// Seen before, or too old to tell.
    #[error("request {0} was answered before")]
    Replayed(u64),
    /// The table is full of live sessions.
    #[error("{MAX_SESSIONS} sessions are open, no more are taken")]
    Full,
    /// More hellos were asked for than the limit allows.
    #[error("too many requests without a valid cookie")]
    HelloLimit,
}

/// Counts since the start.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct ResponderStats {
    /// Replies.
    pub replies: u64,
    /// Hellos.
    pub hellos: u64,
    /// Packets that got no answer because they were malformed or forged.
    pub malformed: u64,
    /// Packets that got no answer because they were replayed.
    pub replayed: u64,
    /// Packets that got no answer because of a limit.
    pub limited: u64,
}

struct Session {
    highest: u64,
    /// Bit i of word j: number `highest - (64 j + i)` was seen.
    seen: [u64; (WINDOW / 64) as usize],
    received: u64,
    last: Nanos,
}

impl Session {
    /// Marks `seq` as seen; false when it was seen before or lies below the window.
    fn mark(&mut self, seq: u64) -> bool {
        if seq > self.highest {
            self.shift(seq - self.highest);
            self.highest = seq;
        }
        let back = self.highest - seq;
        if back >= WINDOW {
            return false;
        }
        let (word, bit) = ((back / 64) as usize, 1u64 << (back % 64));
        let fresh = self.seen[word] & bit == 0;
        self.seen[word] |= bit;
        fresh
    }

    fn shift(&mut self, by: u64) {
        if by >= WINDOW {
            self.seen = Default::default();
            return;
        }
        let old = self.seen;
        let (words, bits) = ((by / 64) as usize, by % 64);
        for i in (0..old.len()).rev() {
            let low = if i >= words { old[i - words] } else { 0 };
            let carry = if bits > 0 && i > words { old[i - words - 1] >> (64 - bits) } else { 0 };
            self.seen[i] = (low << bits) | carry;
        }
    }
}

/// An answer that is not signed yet: it says how long it was held, which is known only when it is sent.
#[derive(Debug, Clone, Copy)]
pub struct Answer {
    packet: Packet,
    arrived: Nanos,
}

impl Answer {
    /// Signs; `now` is the moment just before sending.
    pub fn seal(mut self, now: Nanos, key: &Key) -> [u8; LEN] {
        if let Body::Reply { hold_ns, .. } = &mut self.packet.body {
            *hold_ns = now.0.saturating_sub(self.arrived.0);
        }
        self.packet.encode(key)
    }

    /// Whether it is a full reply rather than a hello.
    pub fn is_reply(&self) -> bool {
        matches!(self.packet.body, Body::Reply { .. })
    }
}

/// Answers requests; one per socket.
pub struct Responder {
    key: Key,
    cookie_key: Key,
    sessions: HashMap<(u64, IpAddr), Session>,
    hellos_left: f64,
    hellos_at: Nanos,
    stats: ResponderStats,
}

impl Responder {
    /// `random` makes the cookies of this process and must be fresh.
    pub fn new(key: Key, random: [u8; 32]) -> Self {
        Self {
            key,
            cookie_key: Key::from_random(random),
            sessions: HashMap::new(),
            hellos_left: HELLO_RATE,
            hellos_at: Nanos(0),
            stats: ResponderStats::default(),
        }
    }

    /// The key with which to [`Answer::seal`].
    pub fn key(&self) -> &Key {
        &self.key
    }

    /// Counts since the start.
    pub fn stats(&self) -> ResponderStats {
        self.stats
    }

    /// Takes a packet that arrived at `now` from `from`; says what to answer, or why nothing.
    pub fn handle(&mut self, now: Nanos, from: IpAddr, bytes: &[u8]) -> Result<Answer, Refused> {
        let outcome = self.answer(now, from, bytes);
        match &outcome {
            Ok(answer) if answer.is_reply() => self.stats.replies += 1,
            Ok(_) => self.stats.hellos += 1,
            Err(Refused::Malformed(_) | Refused::NotRequest) => self.stats.malformed += 1,
            Err(Refused::Replayed(_)) => self.stats.replayed += 1,
            Err(Refused::Full | Refused::HelloLimit) => self.stats.limited += 1,
        }
        outcome
    }

    fn answer(&mut self, now: Nanos, from: IpAddr, bytes: &[u8]) -> Result<Answer, Refused> {
        let request = Packet::decode(bytes, &self.key)?;
        if request.body != Body::Request {
            return Err(Refused::NotRequest);
        }
        let period = now.0 / (COOKIE_PERIOD_S * 1_000_000_000);
        let fresh = self.cookie(request.session, from, period);
        let known = [Some(period), period.checked_sub(1)].into_iter().flatten().any(|p| {
            let cookie = self.cookie(request.session, from, p);
            same(&cookie.to_le_bytes(), &request.cookie.to_le_bytes())
        });
        let body = if known { self.reply(now, from, &request)? } else { self.hello(now)? };
        Ok(Answer { packet: Packet { cookie: fresh, body, ..request }, arrived: now })
    }

    fn reply(&mut self, now: Nanos, from: IpAddr, request: &Packet) -> Result<Body, Refused> {
        let key = (request.session, from);
        if !self.sessions.contains_key(&key) && self.sessions.len() >= MAX_SESSIONS {
            self.forget_stale(now);
            if self.sessions.len() >= MAX_SESSIONS {
                return Err(Refused::Full);
            }
        }
        let session = self.sessions.entry(key).or_insert(Session {
            highest: 0,
            seen: Default::default(),
            received: 0,
            last: now,
        });
        if request.seq == 0 || !session.mark(request.seq) {
            return Err(Refused::Replayed(request.seq));
        }
        session.received += 1;
        session.last = session.last.max(now);
        Ok(Body::Reply { received: session.received, arrived_ns: now.0, hold_ns: 0 })
    }

    fn hello(&mut self, now: Nanos) -> Result<Body, Refused> {
        self.hellos_left = (self.hellos_left + now.since(self.hellos_at) * HELLO_RATE).min(HELLO_RATE);
        self.hellos_at = self.hellos_at.max(now);
        if self.hellos_left < 1.0 {
            return Err(Refused::HelloLimit);
        }
        self.hellos_left -= 1.0;
        Ok(Body::Hello)
    }

    /// A session may only go when no cookie of it can be valid any more: else its packets could be replayed.
    fn forget_stale(&mut self, now: Nanos) {
        self.sessions.retain(|_, session| now.since(session.last) < 2.0 * COOKIE_PERIOD_S as f64);
    }

    fn cookie(&self, session: u64, from: IpAddr, period: u64) -> u64 {
        let address = match from {
            IpAddr::V4(v4) => v4.to_ipv6_mapped().octets(),
            IpAddr::V6(v6) => v6.octets(),
        };
        let mac = self.cookie_key.mac(&[&session.to_le_bytes(), &address, &period.to_le_bytes()]);
        let mut raw = [0; 8];
        raw.copy_from_slice(&mac[..8]);
        u64::from_le_bytes(raw)
    }
}
