//! A link's latency from round trips that are late, queued, wrong or missing. Pure.
//!
//! **alpha** is half the *lowest supported cluster* of the round trips of the last seconds: the smallest value that enough other samples
//! agree with. Queueing only ever adds, so the job's own bursts lift most samples but not those that fell into its gaps; a single sample
//! that is too low (a clock's fault) finds no support. A real rise is believed as soon as no low cluster is left in the window (4 s), or in four of them where samples scatter as in a queue and have no sharp floor. Confidence is 0 (nothing or long ago) to 1
//! (many samples, agreeing, fresh).

mod alpha;
mod cluster;

use crate::above_zero;
use alpha::AlphaEstimator;
use flexcomm_domain::{Invalid, Seconds, Timestamp};

/// Window of round trips in seconds. Longer than a training step, so that it spans a gap; a rise of latency is believed after this long.
const WINDOW_S: f64 = 4.0;

/// Longest believable round trip, seconds: above it is a lost packet, not a latency.
const MAX_RTT_S: f64 = 60.0;

/// What is known of a link's latency at a moment.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Estimate {
    /// One way.
    pub alpha: Seconds,
    /// 0 to 1.
    pub confidence: f64,
    /// Age of the newest round trip.
    pub age: Seconds,
    /// Mean absolute difference of successive round trips in the window.
    pub jitter: Seconds,
}

/// Estimates the latency of one link. Times may come from a wall clock: when it goes back, it is taken to stand still; when it leaps
/// ahead, samples age, confidence falls and heals with the next samples.
#[derive(Debug, Clone)]
pub struct LatencyEstimator {
    alpha: AlphaEstimator,
    clock: Clock,
}

impl Default for LatencyEstimator {
    /// Knows nothing yet.
    fn default() -> Self {
        Self { alpha: AlphaEstimator::new(WINDOW_S), clock: Clock::default() }
    }
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

impl LatencyEstimator {
    /// A round trip of `rtt_s` seconds.
    pub fn echo(&mut self, now: Timestamp, rtt_s: f64) -> Result<(), Invalid> {
        above_zero("round trip in seconds", rtt_s, MAX_RTT_S)?;
        let at = self.clock.read(now);
        self.alpha.echo(at, rtt_s);
        Ok(())
    }

    /// What is known at `now`; nothing before the first round trip.
    pub fn estimate(&self, now: Timestamp) -> Option<Estimate> {
        self.alpha.estimate(self.clock.peek(now))
    }
}

#[cfg(test)]
mod tests;
