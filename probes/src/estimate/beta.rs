//! Seconds per byte from throughput tests and real transfers.

use super::Known;
use super::cluster::{Rule, lowest};
use crate::passive::{Transfer, theil_sen};
use std::collections::VecDeque;

/// Most samples kept. Few on purpose: the regression looks at all pairs.
const MAX_SAMPLES: usize = 64;
/// The newest are kept however old they are.
const KEEP: usize = 4;
/// A sixth must agree; the spread is that of tests on a busy machine.
const RULE: Rule = Rule { share: 0.17, spread: 0.25, grain: 0.0 };
/// So many newest samples that agree with each other end the past.
const AGREEING: usize = 3;
/// So many suffice when they are this many times faster than the past: nothing speeds a transfer up that much.
const FAR_FASTER: usize = 2;
const FAR: f64 = 2.5;
/// They agree when they are all faster than the past, or when the largest is at most this much above the smallest.
const AGREE_SPREAD: f64 = 0.15;
/// So many newest samples all above the past end it even when they do not agree with each other.
const ABOVE: usize = 7;
/// Support at which the number of samples no longer limits confidence.
const FULL_SUPPORT: f64 = 4.0;
/// Age in seconds at which confidence has fallen to 1/e.
const CONFIDENCE_AGE_S: f64 = 120.0;

#[derive(Debug, Clone, Copy)]
enum Sample {
    Test(f64),
    Real(Transfer),
}

#[derive(Debug, Clone)]
pub(super) struct BetaEstimator {
    window_s: f64,
    step: f64,
    samples: VecDeque<(f64, Sample)>,
}

impl BetaEstimator {
    pub(super) fn new(window_s: f64, step: f64) -> Self {
        Self { window_s: window_s.max(1.0), step: step.max(0.05), samples: VecDeque::new() }
    }

    pub(super) fn throughput(&mut self, at: f64, beta: f64) {
        self.push(at, Sample::Test(beta));
    }

    pub(super) fn transfer(&mut self, at: f64, transfer: Transfer) {
        self.push(at, Sample::Real(transfer));
    }

    fn push(&mut self, at: f64, sample: Sample) {
        self.samples.push_back((at, sample));
        let window = self.window_s;
        while self.samples.len() > MAX_SAMPLES
            || self.samples.len() > KEEP && self.samples.front().is_some_and(|(t, _)| at - t > window)
        {
            self.samples.pop_front();
        }
    }

    /// Seconds per byte of every usable sample in the order of time.
    fn betas(&self, alpha: Option<f64>) -> Vec<(f64, f64)> {
        let real: Vec<Transfer> = self.samples.iter().filter_map(|(_, s)| as_real(s)).collect();
        // Without a measured latency, sizes that differ tell it from the bandwidth.
        let alpha = alpha.or_else(|| theil_sen(&real).map(|(_, rest)| rest.max(0.0))).unwrap_or(0.0);
        let usable = self.samples.iter().filter_map(|(t, sample)| match sample {
            Sample::Test(beta) => Some((*t, *beta)),
            Sample::Real(transfer) => transfer.beta(alpha).map(|beta| (*t, beta)),
        });
        usable.collect()
    }

    pub(super) fn estimate(&self, at: f64, alpha: Option<f64>) -> Option<Known> {
        let betas = self.betas(alpha);
        let newest = betas.last()?.0;
        let values: Vec<f64> = betas.iter().map(|(_, beta)| *beta).collect();
        let present = &values[self.present(&values)..];
        let cluster = lowest(present, RULE)?;
        let age_s = (at - newest).max(0.0);
        let support = (cluster.support as f64 / FULL_SUPPORT).min(1.0);
        let share = (2.0 * cluster.support as f64 / present.len() as f64).min(1.0);
        let confidence = support * share.sqrt() * (-age_s / CONFIDENCE_AGE_S).exp();
        Some(Known { value: cluster.value, confidence, age_s })
    }

    /// Index of the first sample that still belongs to the present. Walks through time as it happened, so that a
    /// step that was recognised stays recognised.
    fn present(&self, values: &[f64]) -> usize {
        let mut start = 0;
        for end in FAR_FASTER + 1..=values.len() {
            if let Some(cut) = self.cut(&values[start..end]) {
                start += cut;
            }
        }
        start
    }

    /// Where the past ends within `values`, if its newest show a step.
    fn cut(&self, values: &[f64]) -> Option<usize> {
        let faster = |count, times| newest(values, count).filter(|n| n.high * times < n.before).map(|n| n.cut);
        let step = 1.0 + self.step;
        // Much can slow a transfer down, nothing speeds it up: only slower ones need to agree with each other.
        let slower = newest(values, AGREEING)
            .filter(|n| n.low > n.before * step && n.high <= n.low * (1.0 + AGREE_SPREAD))
            .map(|n| n.cut);
        if let Some(cut) = slower.or_else(|| faster(AGREEING, step)).or_else(|| faster(FAR_FASTER, FAR)) {
            return Some(cut);
        }
        let cut = values.len().checked_sub(ABOVE).filter(|cut| *cut > 0)?;
        let (past, newest) = values.split_at(cut);
        (range(newest).0 > lowest(past, RULE)?.value * (1.0 + self.step)).then_some(cut)
    }
}

/// The newest samples against what was before them.
struct Newest {
    cut: usize,
    low: f64,
    high: f64,
    before: f64,
}

fn newest(values: &[f64], count: usize) -> Option<Newest> {
    let cut = values.len().checked_sub(count).filter(|cut| *cut > 0)?;
    let (past, newest) = values.split_at(cut);
    let (low, high) = range(newest);
    Some(Newest { cut, low, high, before: lowest(past, RULE)?.value })
}

fn as_real(sample: &Sample) -> Option<Transfer> {
    match sample {
        Sample::Real(transfer) => Some(*transfer),
        Sample::Test(_) => None,
    }
}

fn range(values: &[f64]) -> (f64, f64) {
    values.iter().fold((f64::INFINITY, 0.0), |(low, high), v| (v.min(low), v.max(high)))
}
