//! The bytes of an echo packet. All numbers are little-endian.
//!
//! | bytes | field |
//! |---|---|
//! | 0..4 | `FCE1` |
//! | 4 | 1 request, 2 reply, 3 hello |
//! | 5..8 | zero |
//! | 8..16 | session, random per prober and peer |
//! | 16..24 | sequence number, from 1 |
//! | 24..32 | cookie: in a request the newest one known (0: none), in an answer the one to use next |
//! | 32..40 | reply: requests of this session that arrived, this one included |
//! | 40..48 | reply: the responder's clock when the request arrived, ns |
//! | 48..56 | reply: ns between arrival and answer |
//! | 56..88 | keyed hash of bytes 0..56 |

use crate::auth::{Key, same};

/// Bytes of every echo packet.
pub const LEN: usize = 88;
const SIGNED: usize = 56;
const MAGIC: [u8; 4] = *b"FCE1";

/// What kind of packet it is, with what only that kind says.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Body {
    /// Asks for an answer.
    Request,
    /// The answer to a request with a valid cookie.
    Reply {
        /// Requests of this session that arrived so far, this one included.
        received: u64,
        /// The responder's clock at arrival, ns since an origin of its own.
        arrived_ns: u64,
        /// Nanoseconds between arrival and answer.
        hold_ns: u64,
    },
    /// The answer to an authentic request whose cookie is missing or stale: take this one.
    Hello,
}

/// One echo packet.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Packet {
    /// Random per prober and peer.
    pub session: u64,
    /// From 1, per session.
    pub seq: u64,
    /// See [`crate::echo`].
    pub cookie: u64,
    /// Kind.
    pub body: Body,
}

/// Bytes that are no echo packet of this cluster.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum Malformed {
    /// Wrong length.
    #[error("the packet has {0} bytes, an echo packet has {LEN}")]
    Length(usize),
    /// Not our magic, an unknown kind or bytes that must be zero.
    #[error("the packet is no echo packet of version 1")]
    Format,
    /// The keyed hash is wrong.
    #[error("the packet was not made with this cluster's token")]
    Forged,
}

impl Packet {
    /// Encodes and signs.
    pub fn encode(&self, key: &Key) -> [u8; LEN] {
        let (kind, numbers) = match self.body {
            Body::Request => (1, [0; 3]),
            Body::Reply { received, arrived_ns, hold_ns } => (2, [received, arrived_ns, hold_ns]),
            Body::Hello => (3, [0; 3]),
        };
        let mut bytes = [0; LEN];
        bytes[..4].copy_from_slice(&MAGIC);
        bytes[4] = kind;
        let words = [self.session, self.seq, self.cookie, numbers[0], numbers[1], numbers[2]];
        for (slot, word) in bytes[8..SIGNED].chunks_exact_mut(8).zip(words) {
            slot.copy_from_slice(&word.to_le_bytes());
        }
        let mac = key.mac(&[&bytes[..SIGNED]]);
        bytes[SIGNED..].copy_from_slice(&mac);
        bytes
    }

    /// Decodes and verifies; the format is checked first because it is cheaper than the hash.
    pub fn decode(bytes: &[u8], key: &Key) -> Result<Self, Malformed> {
        if bytes.len() != LEN {
            return Err(Malformed::Length(bytes.len()));
        }
        if bytes[..4] != MAGIC || bytes[5..8] != [0; 3] || !(1..=3).contains(&bytes[4]) {
            return Err(Malformed::Format);
        }
        if !same(&key.mac(&[&bytes[..SIGNED]]), &bytes[SIGNED..]) {
            return Err(Malformed::Forged);
        }
        let word = |i: usize| {
            let mut raw = [0; 8];
            raw.copy_from_slice(&bytes[8 + 8 * i..16 + 8 * i]);
            u64::from_le_bytes(raw)
        };
        let body = match bytes[4] {
            1 => Body::Request,
            2 => Body::Reply { received: word(3), arrived_ns: word(4), hold_ns: word(5) },
            _ => Body::Hello,
        };
        Ok(Self { session: word(0), seq: word(1), cookie: word(2), body })
    }
}
