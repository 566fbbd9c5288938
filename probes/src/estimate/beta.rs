//! Seconds per byte from throughput tests and real transfers.

use super::Known;
use super::cluster::{Cluster, Rule, lowest};
use super::steps::{Kind, Point, Rules, present};
use crate::passive::{Transfer, theil_sen};
use flexcomm_domain::BANDWIDTH_CONFIDENCE_AGE_S;
use std::cell::Cell;
use std::collections::VecDeque;

/// Most real transfers kept. Few on purpose: the regression looks at all pairs.
const MAX_REAL: usize = 48;
/// Most tests kept. They have a place of their own: a busy job must not push them out.
const MAX_TESTS: usize = 16;
/// Assumed duration of a test whose begin was not reported, seconds.
const TEST_S: f64 = 1.0;
/// Longest assumed duration of a test whose end was not reported, seconds.
const LONGEST_TEST_S: f64 = 30.0;
/// The newest are kept however old they are.
const KEEP: usize = 4;
/// A sixth must agree. The spread is between that of tests on a busy machine and the wish not to count what was
/// slowed down: the answer is the middle of it.
pub(super) const RULE: Rule = Rule { share: 0.17, spread: 0.15, grain: 0.0 };
/// Fewer tests than this do not outvote the transfers.
const LEAST_TESTS: usize = 3;
/// Support at which the number of samples no longer limits confidence.
const FULL_SUPPORT: f64 = 4.0;
#[derive(Debug, Clone, Copy)]
enum Sample {
    Test(f64),
    /// With the latency known at that time.
    Real(Transfer, Option<f64>),
}

impl Sample {
    fn is_test(&self) -> bool {
        matches!(self, Self::Test(_))
    }
}

#[derive(Debug, Clone)]
pub(super) struct BetaEstimator {
    window_s: f64,
    step: f64,
    samples: VecDeque<(f64, Sample)>,
    /// Begin and end of the last tests; the end of one that runs is far ahead.
    tests: VecDeque<(f64, f64)>,
    /// The last evaluation: it is asked for ten times a second, and samples and tests seldom change.
    evaluated: Cell<Option<Evaluation>>,
}

/// What samples and tests give with a latency.
#[derive(Debug, Clone, Copy)]
struct Evaluation {
    alpha: Option<f64>,
    /// When the newest sample came; none without samples.
    newest: Option<f64>,
    /// The cluster that gives the estimate, and among how many samples it was sought.
    cluster: Option<(Cluster, usize)>,
}

impl BetaEstimator {
    pub(super) fn new(window_s: f64, step: f64) -> Self {
        let (samples, tests, evaluated) = Default::default();
        Self { window_s: window_s.max(1.0), step: step.max(0.05), samples, tests, evaluated }
    }

    /// A test begins to use the link.
    pub(super) fn test_begins(&mut self, at: f64) {
        self.evaluated.set(None);
        self.tests.push_back((at, at + LONGEST_TEST_S));
        if self.tests.len() > MAX_TESTS {
            self.tests.pop_front();
        }
    }

    /// It is over, with a result or without.
    pub(super) fn test_ends(&mut self, at: f64) {
        self.evaluated.set(None);
        if let Some(test) = self.tests.back_mut().filter(|(_, end)| *end > at) {
            test.1 = at;
        }
    }

    /// `alpha` is what is known of the latency now.
    pub(super) fn throughput(&mut self, at: f64, beta: f64, alpha: Option<f64>) {
        if self.tests.back().is_none_or(|(_, end)| *end < at) {
            self.test_begins(at - TEST_S);
        }
        self.test_ends(at);
        self.push(at, Sample::Test(beta), MAX_TESTS);
        self.forget_past(at, alpha);
    }

    /// `alpha` is what is known of the latency now.
    pub(super) fn transfer(&mut self, at: f64, transfer: Transfer, alpha: Option<f64>) {
        self.push(at, Sample::Real(transfer, alpha), MAX_REAL);
        self.forget_past(at, alpha);
    }

    /// Drops the samples from before the newest step of the bandwidth. They would be judged again with every sample, and those
    /// that showed the step leave the window first: the estimate would go back to what it was before the step.
    fn forget_past(&mut self, now: f64, alpha: Option<f64>) {
        self.evaluated.set(None);
        let points = self.points(alpha);
        let tests: Vec<(f64, f64)> = self.tests.iter().copied().collect();
        let rules = Rules { step: 1.0 + self.step, tests: &tests };
        let since = points.get(present(&points, rules)).map_or(now, |point| point.at);
        while self.samples.front().is_some_and(|(at, _)| *at < since) {
            self.samples.pop_front();
        }
    }

    /// At most `most` of the sample's kind stay.
    fn push(&mut self, at: f64, sample: Sample, most: usize) {
        self.samples.push_back((at, sample));
        let same = |other: &Sample| other.is_test() == sample.is_test();
        if self.samples.iter().filter(|(_, other)| same(other)).count() > most
            && let Some(oldest) = self.samples.iter().position(|(_, other)| same(other))
        {
            self.samples.remove(oldest);
        }
        while self.samples.len() > KEEP && self.samples.front().is_some_and(|(t, _)| at - t > self.window_s) {
            self.samples.pop_front();
        }
    }

    /// Every usable sample in the order of time.
    fn points(&self, alpha: Option<f64>) -> Vec<Point> {
        let real: Vec<Transfer> = self.samples.iter().filter_map(|(_, s)| as_real(s)).collect();
        // Without a measured latency, transfers of different sizes separate it from the bandwidth.
        let alpha = alpha.or_else(|| theil_sen(&real).map(|(_, rest)| rest.max(0.0))).unwrap_or(0.0);
        let usable = self.samples.iter().filter_map(|(at, sample)| match sample {
            Sample::Test(beta) => Some(Point { at: *at, beta: *beta, kind: Kind::Test }),
            Sample::Real(transfer, then) => {
                // A latency that rose since was not in it, and one that fell since was a queue: the lower counts.
                let alpha = then.map_or(alpha, |then| then.min(alpha));
                let (bytes, seconds) = (transfer.bytes(), transfer.seconds());
                let kind = if transfer.is_stream() { Kind::Stream { seconds } } else { Kind::Real { bytes, seconds } };
                transfer.beta(alpha).map(|beta| Point { at: *at, beta, kind })
            }
        });
        usable.collect()
    }

    pub(super) fn estimate(&self, at: f64, alpha: Option<f64>) -> Option<Known> {
        let evaluation = self.evaluate(alpha);
        let age_s = (at - evaluation.newest?).max(0.0);
        let (cluster, among) = evaluation.cluster?;
        let support = (cluster.support as f64 / FULL_SUPPORT).min(1.0);
        let share = (2.0 * cluster.support as f64 / among as f64).min(1.0);
        let confidence = support * share.sqrt() * (-age_s / BANDWIDTH_CONFIDENCE_AGE_S).exp();
        Some(Known { value: cluster.value, confidence, age_s })
    }

    fn evaluate(&self, alpha: Option<f64>) -> Evaluation {
        let same = |known: &Evaluation| known.alpha.map(f64::to_bits) == alpha.map(f64::to_bits);
        if let Some(known) = self.evaluated.get().filter(same) {
            return known;
        }
        let points = self.points(alpha);
        let tests: Vec<(f64, f64)> = self.tests.iter().copied().collect();
        let rules = Rules { step: 1.0 + self.step, tests: &tests };
        let cluster = lowest_cluster(&points[present(&points, rules)..]);
        let evaluation = Evaluation { alpha, newest: points.last().map(|point| point.at), cluster };
        self.evaluated.set(Some(evaluation));
        evaluation
    }
}

/// The lowest cluster among all samples, or that among the tests alone when it is lower: a job that does not fill
/// the link shows less than the link has, however often it does. Returns how many samples it was sought in, too.
fn lowest_cluster(present: &[Point]) -> Option<(Cluster, usize)> {
    let betas = |points: &mut dyn Iterator<Item = &Point>| points.map(|p| p.beta).collect::<Vec<f64>>();
    let tests = betas(&mut present.iter().filter(|p| p.kind == Kind::Test));
    let all = betas(&mut present.iter());
    let joint = lowest(&all, RULE)?;
    let tested = lowest(&tests, RULE).filter(|found| tests.len() >= LEAST_TESTS && found.value < joint.value);
    Some(tested.map_or((joint, all.len()), |found| (found, tests.len())))
}

fn as_real(sample: &Sample) -> Option<Transfer> {
    match sample {
        Sample::Real(transfer, _) => Some(*transfer),
        Sample::Test(_) => None,
    }
}
