//! Throughput over TCP with few bytes. Pure: frames, the two sides of a phase, and the estimator.
//!
//! A session has one control connection and one or several streams, each of which begins with a challenge by the
//! server, an answer made with the cluster's token, and a proof by the server in return. Then come one or two
//! phases (out: client to server; back: the other way). In a phase one side sends up to a budget; the other stamps
//! what arrives, estimates the rate as it goes and says *stop* as soon as the estimate is steady. The first part
//! (slow start, a shaper's full token bucket) is left out.

mod curve;
mod frame;
mod phase;

pub use curve::{Curve, Rate};
pub(crate) use frame::proves;
pub use frame::{BadFrame, Frame, FrameReader, Proof, Purpose, Refusal, client_proof, server_proof};
pub use phase::{Receiving, Sending};

use crate::{within, within_or};
use flexcomm_domain::Invalid;
use serde::{Deserialize, Serialize};

/// Most streams of one session.
pub const MAX_STREAMS: u8 = 16;
/// Most bytes of one session, both directions together: 100 Gbit/s for a third of a second.
pub const MAX_BUDGET: u64 = 4 << 30;
/// Fewest bytes per direction: below this TCP has not left its initial window.
pub const MIN_BUDGET: u64 = 64 << 10;
/// Longest time of one direction in seconds.
pub const MAX_TIME_S: f64 = 30.0;

/// Windows of a stream that the link bounds are so many times what is under way where nothing queues.
const QUEUED: f64 = 1.3;

/// Which way the bytes of a test go.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Direction {
    /// From here to the server.
    Out,
    /// From the server to here.
    Back,
    /// One after the other, half of the budget each.
    Both,
}

/// What to measure and at what cost.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct Plan {
    streams: u8,
    budget_bytes: u64,
    time_limit_s: f64,
    direction: Direction,
    pace_bps: Option<u64>,
}

impl Plan {
    /// `budget_bytes` is for both directions together and never exceeded; a direction that is not steady when
    /// `time_limit_s` is over ends with what it has.
    pub fn new(streams: u8, budget_bytes: u64, time_limit_s: f64, direction: Direction) -> Result<Self, Invalid> {
        let (least, of) = match direction {
            Direction::Both => (2 * MIN_BUDGET, " for both directions"),
            Direction::Out | Direction::Back => (MIN_BUDGET, ""),
        };
        within("number of streams", f64::from(streams), 1.0..=f64::from(MAX_STREAMS))?;
        let bytes = || format!("{least} to {MAX_BUDGET}{of}");
        within_or("byte budget", budget_bytes as f64, least as f64..=MAX_BUDGET as f64, bytes)?;
        within("time limit in seconds", time_limit_s, 0.1..=MAX_TIME_S)?;
        Ok(Self { streams, budget_bytes, time_limit_s, direction, pace_bps: None })
    }

    /// Lets the kernel pace all streams together at `bps` bit/s, so that the test never fills a queue by more than
    /// the rate it looks for: give it a little more than the last estimate.
    pub fn paced(mut self, bps: u64) -> Self {
        self.pace_bps = Some(bps);
        self
    }

    /// Streams.
    pub fn streams(&self) -> u8 {
        self.streams
    }

    /// Most bytes, both directions together.
    pub fn budget_bytes(&self) -> u64 {
        self.budget_bytes
    }

    /// Longest time of one direction, seconds.
    pub fn time_limit_s(&self) -> f64 {
        self.time_limit_s
    }

    /// Which way.
    pub fn direction(&self) -> Direction {
        self.direction
    }

    /// bit/s of all streams together, if paced.
    pub fn pace_bps(&self) -> Option<u64> {
        self.pace_bps
    }

    /// Bytes for the way (out, back).
    pub fn shares(&self) -> (u64, u64) {
        match self.direction {
            Direction::Out => (self.budget_bytes, 0),
            Direction::Back => (0, self.budget_bytes),
            Direction::Both => (self.budget_bytes / 2, self.budget_bytes / 2),
        }
    }
}

impl Default for Plan {
    /// Four streams (their initial windows together find a long link's rate sooner), 64 MB at most (a steady
    /// estimate of 500 Mbit/s takes about 20), 10 s per direction, both directions.
    fn default() -> Self {
        Self { streams: 4, budget_bytes: 64_000_000, time_limit_s: 10.0, direction: Direction::Both, pace_bps: None }
    }
}

/// What the sender's kernel says about its streams: the worst where one number must stand for several, sums where
/// they add up.
#[derive(Debug, Clone, Copy, Default, PartialEq, Serialize, Deserialize)]
pub struct TcpSummary {
    /// Smoothed round trip, the largest, µs. Queueing included.
    pub rtt_us: u32,
    /// Least round trip seen, the smallest, µs.
    pub min_rtt_us: u32,
    /// Segments sent again, sum.
    pub retransmits: u32,
    /// Congestion window in segments, sum.
    pub cwnd: u32,
    /// Segment payload, bytes.
    pub mss: u32,
    /// The kernel's own delivery rate, sum, bit/s. A burst figure where the sender was limited.
    pub delivery_bps: f64,
}

impl TcpSummary {
    /// Whether so many bit/s are as much as the windows allow where no packet waits in a queue, and none was lost: a link that passes no
    /// more keeps or drops what is sent beyond it.
    fn is_window_limited(&self, bps: f64) -> bool {
        let windows = 8.0 * f64::from(self.cwnd) * f64::from(self.mss);
        self.retransmits == 0 && windows < QUEUED * bps * f64::from(self.min_rtt_us) * 1e-6
    }

    /// Adds another stream.
    pub fn join(self, other: Self) -> Self {
        let least = |a: u32, b: u32| if a == 0 { b } else { a.min(b) };
        Self {
            rtt_us: self.rtt_us.max(other.rtt_us),
            min_rtt_us: least(self.min_rtt_us, other.min_rtt_us),
            retransmits: self.retransmits.saturating_add(other.retransmits),
            cwnd: self.cwnd.saturating_add(other.cwnd),
            mss: least(self.mss, other.mss),
            delivery_bps: self.delivery_bps + other.delivery_bps,
        }
    }
}

/// One direction's result.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct DirectionResult {
    /// The rate at which payload arrived.
    #[serde(flatten)]
    pub rate: Rate,
    /// Payload bytes sent.
    pub sent_bytes: u64,
    /// The sender's TCP.
    pub tcp: TcpSummary,
}

impl DirectionResult {
    /// Whether the link may be faster: the test was over within a few round trips, or its windows bounded it and not the link. A receive
    /// window or a send buffer that is too small is not seen.
    pub fn is_lower_bound(&self) -> bool {
        let few = self.rate.used_s < curve::TRUSTED_RTTS * f64::from(self.tcp.min_rtt_us) * 1e-6;
        let plenty = self.rate.steady && self.rate.used_bytes >= phase::PLENTY_BYTES;
        few && !plenty || self.tcp.is_window_limited(self.rate.bps)
    }
}

/// Result of a session.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct ThroughputResult {
    /// From here to the server; absent when not asked for.
    pub out: Option<DirectionResult>,
    /// From the server to here.
    pub back: Option<DirectionResult>,
    /// Streams used.
    pub streams: u8,
}

impl ThroughputResult {
    /// Payload bit/s from here to the server.
    pub fn out_bps(&self) -> Option<f64> {
        self.out.map(|d| d.rate.bps)
    }

    /// Payload bit/s from the server to here.
    pub fn back_bps(&self) -> Option<f64> {
        self.back.map(|d| d.rate.bps)
    }

    /// Payload bytes spent, both directions together.
    pub fn bytes(&self) -> u64 {
        self.out.iter().chain(&self.back).map(|d| d.sent_bytes).sum()
    }
}

#[cfg(test)]
mod tests;
