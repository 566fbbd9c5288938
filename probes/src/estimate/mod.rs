//! alpha and beta of a link from samples that are late, queued, wrong or missing. Pure.
//!
//! - **alpha** is half the *lowest supported cluster* of the round trips of the last seconds: the smallest value
//!   that enough other samples agree with. Queueing only ever adds, so the job's own bursts lift most samples but
//!   not those that fell into its gaps; a single sample that is too low (a clock's fault) finds no support. A
//!   real rise is believed as soon as no low cluster is left in the window (4 s by default), or in four of them where
//!   samples scatter as in a queue and have no sharp floor. Samples
//!   outside of all known transfers may form the cluster by themselves, and no passive transfer can have been
//!   faster than the latency: its time bounds alpha from above.
//! - **beta** is the lowest supported cluster of seconds per byte over throughput tests and passive transfers,
//!   alpha taken off; tests count by themselves, too. When the newest samples show a step, the past is dropped, from
//!   passive transfers alone if need be; `steps` tells a step from a job that does something else.
//! - Confidence is 0 (nothing or long ago) to 1 (many samples, agreeing, fresh).

mod alpha;
mod beta;
mod cluster;
mod steps;

use crate::above_zero;
use crate::passive::Transfer;
use alpha::AlphaEstimator;
use beta::BetaEstimator;
use flexcomm_domain::{Bandwidth, Invalid, Seconds, Timestamp};

/// How long samples count.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct EstimatorConfig {
    /// Window of round trips in seconds. Longer than a training step, so that it spans a gap; a rise of latency
    /// is believed after this long.
    pub alpha_window_s: f64,
    /// Window of bandwidth samples in seconds.
    pub beta_window_s: f64,
    /// Samples of the past this much apart from the newest (as a share) are dropped when the newest agree.
    pub beta_step: f64,
}

impl Default for EstimatorConfig {
    fn default() -> Self {
        Self { alpha_window_s: 4.0, beta_window_s: 120.0, beta_step: 0.25 }
    }
}

/// Longest believable round trip, seconds: above it is a lost packet, not a latency.
const MAX_RTT_S: f64 = 60.0;

/// What is known of a link at a moment.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Estimate {
    /// One-way latency; absent before the first round trip.
    pub alpha: Option<Seconds>,
    /// 0 to 1.
    pub alpha_confidence: f64,
    /// Age of the newest round trip; absent with alpha.
    pub alpha_age: Option<Seconds>,
    /// 8 / beta; absent before the first sample.
    pub bandwidth: Option<Bandwidth>,
    /// 0 to 1.
    pub bandwidth_confidence: f64,
    /// Age of the newest bandwidth sample.
    pub bandwidth_age: Option<Seconds>,
    /// Mean absolute difference of successive round trips in the window.
    pub jitter: Seconds,
}

/// Both estimators of one directed link. Times may come from a wall clock: when it goes back, it is taken to
/// stand still; when it leaps ahead, samples age, confidence falls and heals with the next samples.
#[derive(Debug, Clone)]
pub struct LinkEstimator {
    alpha: AlphaEstimator,
    beta: BetaEstimator,
    clock: Clock,
}

/// Turns the caller's time into seconds that never go back.
#[derive(Debug, Clone, Default)]
struct Clock {
    last_given: Option<Timestamp>,
    elapsed_s: f64,
}

impl Clock {
    fn read(&mut self, now: Timestamp) -> f64 {
        if let Some(last) = self.last_given {
            self.elapsed_s += now.since(last).get();
        }
        self.last_given = Some(now);
        self.elapsed_s
    }

    fn peek(&self, now: Timestamp) -> f64 {
        self.elapsed_s + self.last_given.map_or(0.0, |last| now.since(last).get())
    }
}

impl LinkEstimator {
    /// Knows nothing yet.
    pub fn new(config: EstimatorConfig) -> Self {
        Self {
            alpha: AlphaEstimator::new(config.alpha_window_s),
            beta: BetaEstimator::new(config.beta_window_s, config.beta_step),
            clock: Clock::default(),
        }
    }

    /// A round trip of `rtt_s` seconds.
    pub fn echo(&mut self, now: Timestamp, rtt_s: f64) -> Result<(), Invalid> {
        above_zero("round trip in seconds", rtt_s, MAX_RTT_S)?;
        let at = self.clock.read(now);
        self.alpha.echo(at, rtt_s);
        Ok(())
    }

    /// A throughput test begins to use the link: what transfers it slows down from now on is not taken for a fall.
    /// Without this word a test counts as having lasted a second.
    pub fn test_begins(&mut self, now: Timestamp) {
        let at = self.clock.read(now);
        self.beta.test_begins(at);
    }

    /// The test is over without a result; a result says so by itself.
    pub fn test_ends(&mut self, now: Timestamp) {
        let at = self.clock.read(now);
        self.beta.test_ends(at);
    }

    /// A throughput test found `bps` bit/s.
    pub fn throughput(&mut self, now: Timestamp, bps: f64) -> Result<(), Invalid> {
        let bandwidth = Bandwidth::new(bps)?;
        let at = self.clock.read(now);
        self.beta.throughput(at, bandwidth.beta(), self.alpha.estimate(at).map(|alpha| alpha.value));
        Ok(())
    }

    /// A real transfer of `bytes` bytes took `seconds` and ended at `now`.
    pub fn transfer(&mut self, now: Timestamp, bytes: f64, seconds: f64) -> Result<(), Invalid> {
        self.transfer_rounds(now, bytes, seconds, 1.0)
    }

    /// A real transfer that contained `rounds` latencies one after the other (2(N-1) for a ring's allreduce,
    /// whose `bytes` are those that this link carried; 0 for a piece in the midst of a stream).
    pub fn transfer_rounds(&mut self, now: Timestamp, bytes: f64, seconds: f64, rounds: f64) -> Result<(), Invalid> {
        let transfer = Transfer::new(bytes, seconds, rounds)?;
        let at = self.clock.read(now);
        self.alpha.transfer(at, &transfer);
        self.beta.transfer(at, transfer, self.alpha.estimate(at).map(|alpha| alpha.value));
        Ok(())
    }

    /// Seconds of one way at `now`, where they are known.
    pub fn alpha(&self, now: Timestamp) -> Option<f64> {
        self.alpha.estimate(self.clock.peek(now)).map(|alpha| alpha.value)
    }

    /// What is known at `now`.
    pub fn estimate(&self, now: Timestamp) -> Estimate {
        let at = self.clock.peek(now);
        let alpha = self.alpha.estimate(at);
        let beta = self.beta.estimate(at, alpha.map(|a| a.value));
        let seconds = |s: f64| Seconds::new(s.min(31_536_000.0)).ok();
        Estimate {
            alpha: alpha.and_then(|a| seconds(a.value)),
            alpha_confidence: alpha.map_or(0.0, |a| a.confidence),
            alpha_age: alpha.and_then(|a| seconds(a.age_s)),
            bandwidth: beta.and_then(|b| Bandwidth::from_beta(b.value).ok()),
            bandwidth_confidence: beta.map_or(0.0, |b| b.confidence),
            bandwidth_age: beta.and_then(|b| seconds(b.age_s)),
            jitter: seconds(self.alpha.jitter(at)).unwrap_or(Seconds::ZERO),
        }
    }
}

/// One quantity with what it is worth.
#[derive(Debug, Clone, Copy, PartialEq)]
struct Known {
    value: f64,
    confidence: f64,
    age_s: f64,
}

#[cfg(test)]
mod flaps;
#[cfg(test)]
mod tests;
