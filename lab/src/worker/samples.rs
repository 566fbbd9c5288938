//! Passive samples of links: what the job's own rings tell about the network.

use super::mesh::Incoming;
use flexcomm_domain::Rank;
use std::time::{Duration, Instant};

/// Frames below this many bytes are all latency and say little about a link's bandwidth.
const LEAST_BYTES: usize = 32 * 1024;

/// Fewest rounds that make a sample: a rank that is late by some of a round errs by that part of all of them.
const LEAST_ROUNDS: u32 = 3;

/// Share of the time during which bytes must have been arriving. Less, and the rounds waited for something else
/// than this link: its latency, or a slower link further up.
const LEAST_SHARE: f64 = 0.5;

/// Watches one exchange.
///
/// A sample is the mean over the rounds of a ring in which this rank sends and receives at once. The first
/// round is left out, because it includes waiting for late ranks; after it the ranks go in step, and a round
/// takes alpha + bytes * beta of the slowest link, which is the one on which bytes arrive for most of the time.
#[derive(Debug)]
pub struct Watch {
    peer: Rank,
    begun: Instant,
    ended: Instant,
    busy: Duration,
    bytes: u64,
    rounds: u32,
}

impl Watch {
    /// From the end of the first round, which received `first`.
    pub fn begin(first: &[Incoming]) -> Option<Self> {
        let [frame] = first else { return None };
        let (_, last) = frame.arrived()?;
        Some(Self { peer: frame.peer, begun: last, ended: last, busy: Duration::ZERO, bytes: 0, rounds: 0 })
    }

    /// Takes a further round in; none when the exchange is not of a kind that can be judged.
    pub fn round(mut self, sends: usize, received: &[Incoming]) -> Option<Self> {
        let [frame] = received else { return None };
        let (first, last) = frame.arrived()?;
        if sends != 1 || frame.peer != self.peer || frame.frame_bytes() < LEAST_BYTES {
            return None;
        }
        self.busy += last - first;
        self.ended = last;
        self.bytes += frame.frame_bytes() as u64;
        self.rounds += 1;
        Some(self)
    }

    /// The peer whose link to here was seen, the mean bytes and the mean seconds of a round.
    pub fn finish(self) -> Option<(Rank, u64, f64)> {
        let total = self.ended - self.begun;
        let judged = self.rounds >= LEAST_ROUNDS && self.busy.as_secs_f64() >= LEAST_SHARE * total.as_secs_f64();
        let rounds = u64::from(self.rounds.max(1));
        judged.then(|| (self.peer, self.bytes / rounds, total.as_secs_f64() / rounds as f64))
    }
}
