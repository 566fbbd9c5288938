//! Where the past ends: steps of the bandwidth among samples in the order of time.
//!
//! Much can slow a transfer down, nothing speeds it up. So a **rise** is believed from two or three newest samples
//! that are faster than all that was supported before, of whatever kind. A **fall** must be told from a job that
//! does something else and from a test that had to share the link:
//!
//! - like is compared with like: tests with tests, transfers with transfers that had no advantage of size (pieces of
//!   streams, which contain no latency, have none). A job that never filled the link has not slowed down when it goes
//!   on as before;
//! - three newest must agree (or seven all be slower). They may be of both kinds;
//! - a faster sample of the other kind since then contradicts;
//! - a transfer during which a test ran is a witness only when it was slower than sharing explains.

use super::beta::RULE;
use super::cluster::lowest;

/// So many newest samples that agree with each other end the past.
const AGREEING: usize = 3;
/// So many suffice when they are this many times faster than the past: nothing speeds a transfer up that much.
const FAR_FASTER: usize = 2;
/// Nor do a test beside it, or another kind of transfer, slow one down that much.
const FAR: f64 = 2.5;
/// Tests that are so many times slower than those before need to agree less: a job that shares the link takes a part of
/// it that changes, but not almost all.
const FAR_SLOWER: f64 = 6.0;
const FAR_SPREAD: f64 = 0.5;
/// They agree when the largest of a kind is at most this much above the smallest.
const AGREE_SPREAD: f64 = 0.15;
/// So many newest samples all above the past end it even when they do not agree with each other.
const ABOVE: usize = 7;
/// A past transfer of at most this many times the bytes had no advantage of size.
const LIKE_SIZE: f64 = 1.5;
/// What a sample was.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) enum Kind {
    /// A throughput test.
    Test,
    /// A transfer of the job.
    Real { bytes: f64, seconds: f64 },
    /// A piece of a stream of the job.
    Stream { seconds: f64 },
}

/// A sample: when it ended, seconds per byte.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) struct Point {
    pub(super) at: f64,
    pub(super) beta: f64,
    pub(super) kind: Kind,
}

impl Point {
    fn is_test(&self) -> bool {
        self.kind == Kind::Test
    }

    /// Whether `past` says what this one should have been.
    fn is_like(&self, past: &Point) -> bool {
        match (self.kind, past.kind) {
            (Kind::Test, Kind::Test) | (Kind::Stream { .. }, Kind::Stream { .. }) => true,
            (Kind::Real { bytes, .. }, Kind::Real { bytes: before, .. }) => before <= bytes * LIKE_SIZE,
            _ => false,
        }
    }

    /// Whether one of the tests ran during this transfer.
    fn is_disturbed(&self, tests: &[(f64, f64)]) -> bool {
        let (Kind::Real { seconds, .. } | Kind::Stream { seconds }) = self.kind else { return false };
        tests.iter().any(|(begin, end)| self.at - seconds < *end && *begin < self.at)
    }
}

/// What a step is, and when tests were on the link.
#[derive(Debug, Clone, Copy)]
pub(super) struct Rules<'a> {
    /// The bandwidth has changed by at least this factor.
    pub(super) step: f64,
    /// Begin and end of each test.
    pub(super) tests: &'a [(f64, f64)],
}

/// Which samples may speak for a fall.
#[derive(Debug, Clone, Copy, PartialEq)]
enum Witnesses {
    Tests,
    Transfers,
    Both,
}

impl Witnesses {
    fn has(self, point: &Point) -> bool {
        match self {
            Self::Tests => point.is_test(),
            Self::Transfers => !point.is_test(),
            Self::Both => true,
        }
    }
}

/// Index of the first sample that still belongs to the present. Walks through time as it happened, so that a step
/// that was recognised stays recognised.
pub(super) fn present(points: &[Point], rules: Rules<'_>) -> usize {
    let mut start = 0;
    for end in FAR_FASTER + 1..=points.len() {
        if let Some(cut) = cut(&points[start..end], rules) {
            start += cut;
        }
    }
    start
}

/// Where the past ends within `points`, if its newest show a step.
fn cut(points: &[Point], rules: Rules<'_>) -> Option<usize> {
    rise(points, AGREEING, rules.step)
        .or_else(|| rise(points, FAR_FASTER, FAR))
        .or_else(|| fall(points, Witnesses::Tests, AGREEING, Rules { step: FAR_SLOWER, ..rules }))
        .or_else(|| fall(points, Witnesses::Tests, AGREEING, rules))
        .or_else(|| fall(points, Witnesses::Transfers, AGREEING, rules))
        .or_else(|| fall(points, Witnesses::Both, AGREEING, rules))
        .or_else(|| fall(points, Witnesses::Tests, ABOVE, rules))
        .or_else(|| fall(points, Witnesses::Transfers, ABOVE, rules))
}

/// The newest are `times` faster than what the past supports.
fn rise(points: &[Point], count: usize, times: f64) -> Option<usize> {
    let cut = points.len().checked_sub(count).filter(|cut| *cut > 0)?;
    let (past, newest) = points.split_at(cut);
    let slowest = newest.iter().map(|p| p.beta).fold(0.0, f64::max);
    (slowest * times < supported(past.iter())?).then_some(cut)
}

/// The newest `count` witnesses are slower than the like of them were.
fn fall(points: &[Point], witnesses: Witnesses, count: usize, rules: Rules<'_>) -> Option<usize> {
    let seen = |i: &usize| witnesses.has(&points[*i]);
    let newest: Vec<usize> = (0..points.len()).rev().filter(seen).take(count).collect();
    let cut = *newest.last().filter(|cut| newest.len() == count && **cut > 0)?;
    let (past, since) = points.split_at(cut);
    let of = |test: bool| newest.iter().map(|i| &points[*i]).filter(move |p| p.is_test() == test);
    let spread = if rules.step < FAR_SLOWER { AGREE_SPREAD } else { FAR_SPREAD };
    if count < ABOVE && !(agree(of(true), spread) && agree(of(false), spread)) {
        return None;
    }
    let slow = |point: &Point| Some(point.beta > limit(point, past, rules)?);
    if !newest.iter().all(|i| slow(&points[*i]) == Some(true)) {
        return None;
    }
    let least = newest.iter().map(|i| points[*i].beta).fold(f64::INFINITY, f64::min);
    let contradicted = since.iter().any(|p| !witnesses.has(p) && p.beta * rules.step < least);
    (!contradicted).then_some(cut)
}

/// Above this, a sample is slower than it would have been in the past.
fn limit(point: &Point, past: &[Point], rules: Rules<'_>) -> Option<f64> {
    match supported(past.iter().filter(|p| point.is_like(p))) {
        Some(before) if point.is_disturbed(rules.tests) => Some(before * FAR),
        Some(before) => Some(before * rules.step),
        None => supported(past.iter()).map(|before| before * FAR),
    }
}

fn supported<'a>(points: impl Iterator<Item = &'a Point>) -> Option<f64> {
    lowest(&points.map(|p| p.beta).collect::<Vec<f64>>(), RULE).map(|found| found.value)
}

fn agree<'a>(points: impl Iterator<Item = &'a Point>, spread: f64) -> bool {
    let (low, high) =
        points.fold((f64::INFINITY, 0.0), |(low, high): (f64, f64), p| (low.min(p.beta), high.max(p.beta)));
    high <= low * (1.0 + spread)
}
