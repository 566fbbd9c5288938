//! One-way latency from round trips.

use super::Estimate;
use super::cluster::{Cluster, Rule, ends_sharply, lowest};
use crate::stats::jitter;
use flexcomm_domain::Seconds;
use std::cell::Cell;
use std::collections::VecDeque;

/// Most round trips kept: 16 s at one every four milliseconds.
const MAX_SAMPLES: usize = 4096;
/// The newest are kept however old they are: an old latency with low confidence beats none.
const KEEP: usize = 8;
/// 8 % of the window must agree: the idle gaps of a training step that is nine tenths communication.
const RULE: Rule = Rule { share: 0.08, spread: 0.1, grain: 15e-6 };
/// A rise of which fewer samples of the window are sure, and whose floor is not sharp, may be a queue, which scatters:
/// it is believed only when no lower cluster is left in [`WINDOWS`] windows.
const SURE: f64 = 0.5;
const WINDOWS: f64 = 4.0;
/// In that time fewer must agree: the gaps between the steps of a job that all but fills the link.
const LONG_RULE: Rule = Rule { share: 0.04, ..RULE };
/// As near to the floor lie the round trips that met no queue.
const SHARP: Rule = Rule { spread: 0.01, ..RULE };
/// Support at which the number of samples no longer limits confidence.
const FULL_SUPPORT: f64 = 8.0;
/// Age in seconds at which confidence has fallen to 1/e.
const CONFIDENCE_AGE_S: f64 = 15.0;
/// A year: what is older is reported as this.
const MAX_AGE_S: f64 = 31_536_000.0;

#[derive(Debug, Clone)]
pub(super) struct AlphaEstimator {
    window_s: f64,
    samples: VecDeque<(f64, f64)>,
    /// The last evaluation: it is asked for ten times a second, and samples seldom come or leave the window.
    evaluated: Cell<Option<Evaluation>>,
}

/// What the samples say, but for the time since.
#[derive(Debug, Clone, Copy)]
struct Evaluation {
    /// So many of the oldest samples are outside of the window.
    outside: usize,
    jitter: f64,
    /// The lowest cluster of the window; none without samples.
    cluster: Option<Cluster>,
    /// A lower one of all samples, where that of the window may be a queue.
    before: Option<Before>,
}

/// A cluster from before the window.
#[derive(Debug, Clone, Copy)]
struct Before {
    cluster: Cluster,
    /// When such a round trip was seen last.
    seen: f64,
    /// Whether the window's round trips end sharply, as those of a wire.
    sharp: bool,
}

impl AlphaEstimator {
    pub(super) fn new(window_s: f64) -> Self {
        Self { window_s: window_s.max(0.1), samples: VecDeque::new(), evaluated: Cell::new(None) }
    }

    pub(super) fn echo(&mut self, at: f64, rtt_s: f64) {
        self.evaluated.set(None);
        self.samples.push_back((at, rtt_s));
        let window = WINDOWS * self.window_s;
        while self.samples.len() > MAX_SAMPLES
            || self.samples.len() > KEEP && self.samples.front().is_some_and(|(t, _)| at - t > window)
        {
            self.samples.pop_front();
        }
    }

    pub(super) fn estimate(&self, at: f64) -> Option<Estimate> {
        let mut newest = self.samples.back()?.0;
        let Evaluation { cluster, before, jitter, .. } = self.evaluate(at);
        let mut cluster = cluster?;
        // A queue may stay at one level, too; but under a queue some echo still finds the old latency.
        if let Some(before) = before.filter(|before| !(before.sharp && at - before.seen > self.window_s)) {
            (cluster, newest) = (before.cluster, before.seen);
        }
        let age_s = (at - newest).max(0.0);
        let support = (cluster.support as f64 / FULL_SUPPORT).min(1.0);
        let confidence = support * (-age_s / CONFIDENCE_AGE_S).exp();
        let seconds = |s: f64| Seconds::new(s.min(MAX_AGE_S)).ok();
        let jitter = seconds(jitter).unwrap_or(Seconds::ZERO);
        Some(Estimate { alpha: seconds(cluster.value / 2.0)?, confidence, age: seconds(age_s)?, jitter })
    }

    fn evaluate(&self, at: f64) -> Evaluation {
        let outside = self.samples.iter().take_while(|(t, _)| at - t > self.window_s).count();
        if let Some(known) = self.evaluated.get().filter(|known| known.outside == outside) {
            return known;
        }
        // Those inside, else the newest few.
        let first = if outside == self.samples.len() { outside.saturating_sub(KEEP) } else { outside };
        let all: Vec<f64> = self.samples.iter().skip(first).map(|(_, rtt)| *rtt).collect();
        let found = lowest(&all, RULE).map(|cluster| (cluster, self.before(&all, cluster)));
        let (cluster, before) = found.map_or((None, None), |(cluster, before)| (Some(cluster), before));
        let evaluation = Evaluation { outside, jitter: jitter(&all), cluster, before };
        self.evaluated.set(Some(evaluation));
        evaluation
    }

    /// A lower cluster from before the window, where that of the window may be a queue.
    fn before(&self, window: &[f64], cluster: Cluster) -> Option<Before> {
        if cluster.support as f64 >= SURE * window.len() as f64 {
            return None;
        }
        let longer: Vec<f64> = self.samples.iter().map(|(_, rtt)| *rtt).collect();
        let before = lowest(&longer, LONG_RULE).filter(|before| before.value < cluster.value)?;
        Some(Before { cluster: before, seen: self.newest_near(before.value)?, sharp: ends_sharply(window, SHARP) })
    }

    /// When a round trip of about this value, or a shorter one, was seen last.
    fn newest_near(&self, rtt_s: f64) -> Option<f64> {
        let most = rtt_s * (1.0 + LONG_RULE.spread) + LONG_RULE.grain;
        self.samples.iter().rev().find(|(_, rtt)| *rtt <= most).map(|(at, _)| *at)
    }
}
