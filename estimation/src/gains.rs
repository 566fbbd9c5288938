//! What share of the gradient's energy each compressor keeps.
//!
//! The gain of a compressor over ratios c is 1 - exp(-A c^q): ln(-ln(1 - gain)), the complementary log-log, is a line in ln c. Top-k with error feedback keeps
//! 0.013, 0.09 and 0.66 at 0.001, 0.01 and 0.1 once its residual has settled, which is q of 0.86 to 1.06
//! (docs/decisions/gains-left-early.md). All compressors of one kind share level and slope of the line, each has an offset, and so has
//! AR-Topk, where one rank selects for all, and every strategy that was observed.
//!
//! A fresh residual biases the gain upwards: over top-k's first five steps ln(-ln(1 - gain)) is higher by 0.14 |ln c|, which fades as the
//! residual fills, by exp(-2 c) a step. How much a job's do is learnt from what its settled steps keep.

use crate::draws::Draws;
use crate::joint::{Joint, Normal, Row};
use flexcomm_domain::{CompressionRatio, Family, Selection, Selector};
use serde::{Deserialize, Serialize};

/// ln c is counted from here: the middle of the usual ratios.
const CENTRE: f64 = 0.01;

const LEVEL: Normal = Normal::new(-2.4, 1.0);
const LEVEL_WITHOUT_MEMORY: Normal = Normal::new(-1.5, 1.0);
const SLOPE: Normal = Normal::new(0.95, 0.3);
const OF_FAMILY: Normal = Normal::new(0.0, 0.35);
/// About what one rank's indices keep of the others' gradients.
const OF_SELECTION_SD: f64 = 0.25;
/// What the laws leave over for one strategy.
const OF_ONE: Normal = Normal::new(0.0, 0.12);
/// What a compressor without ratios keeps, besides what is assumed of it.
const OF_FIXED_SD: f64 = 0.6;

/// [`freshness`] of one unit of |ln c|, and how much of it is one strategy's own.
const FRESH: Normal = Normal::new(0.14, 0.1);
const FRESH_OF_ONE: f64 = 0.25;

/// How what is kept moves while a job trains: variance per second.
const DRIFT: f64 = 4e-6;

/// By how much what an earlier run of a job kept may be another now, as training begins anew: variance.
const ANOTHER_RUN: f64 = 0.04;

/// What is so many standard deviations off has changed, and by about so much: a residual that another compressor has left, above all.
const CHANGE: f64 = 4.0;
const CHANGED_SD: f64 = 0.5;

/// Strategies whose own offsets are remembered.
const MOST_KNOWN: usize = 24;

/// No observation is better than so, in ln(-ln(1 - gain)).
const LEAST_SD: f64 = 0.02;

/// Least and most of ln(-ln(1 - gain)): gains of 5e-5 and 1 - 3e-9.
const RANGE: (f64, f64) = (-9.9, 2.975);

#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
enum Key {
    Level { memory: bool },
    Slope { memory: bool },
    Family(Family),
    Selection(Selection),
    Fresh,
    One(Selector, CompressionRatio),
}

/// What keeps a share: how values are selected, at which ratio.
pub type Strategy = (Selector, CompressionRatio);

/// What is believed of all gains of a job.
#[derive(Debug, Clone, PartialEq, Default, Serialize, Deserialize)]
pub struct Gains {
    joint: Joint<Key>,
}

/// What is assumed of a strategy that was not measured.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Assumed {
    /// The gain of a compressor without ratios; not looked at for others.
    pub fixed: f64,
    /// What AR-Topk keeps of what each rank's own selection keeps at [`CENTRE`], as a share.
    pub of_selection: f64,
}

/// ln(-ln(1 - gain)).
fn scale(gain: f64) -> f64 {
    (-(-gain).ln_1p()).ln().clamp(RANGE.0, RANGE.1)
}

/// The gain of it.
fn unscale(y: f64) -> f64 {
    -(-y.clamp(RANGE.0, RANGE.1).exp()).exp_m1()
}

/// How much of [`FRESH`] a residual that has filled for so many steps still has.
fn freshness(c: f64, steps: f64) -> f64 {
    -c.ln() * (-2.0 * c * steps).exp()
}

impl Gains {
    /// So many seconds have passed.
    pub fn widen(&mut self, seconds: f64) {
        for at in 0..self.joint.len() {
            let rate = match self.joint.keys()[at] {
                Key::Level { .. } => DRIFT,
                Key::Family(family) if !family.has_ratio() => DRIFT,
                Key::One(..) => DRIFT / 4.0,
                _ => continue,
            };
            self.joint.widen(at, rate * seconds);
        }
    }

    /// What it tells of a later run of the same job.
    #[must_use]
    pub fn carried_over(self) -> Self {
        let doubt = |key: &Key| match key {
            Key::Level { .. } => Some(ANOTHER_RUN),
            Key::Family(family) if !family.has_ratio() => Some(ANOTHER_RUN),
            _ => Some(0.0),
        };
        Self { joint: self.joint.carried_over(doubt) }
    }

    fn row(&mut self, (of, cr): Strategy, assumed: Assumed) -> Row {
        if !of.family.has_ratio() {
            return vec![(
                self.joint
                    .place(&Key::Family(of.family), Normal::new(scale(assumed.fixed.clamp(0.0, 1.0)), OF_FIXED_SD)),
                1.0,
            )];
        }
        let memory = of.family.any().memory().is_some();
        let level = if memory { LEVEL } else { LEVEL_WITHOUT_MEMORY };
        let mut row = vec![
            (self.joint.place(&Key::Level { memory }, level), 1.0),
            (self.joint.place(&Key::Slope { memory }, SLOPE), (cr.get() / CENTRE).ln()),
            (self.joint.place(&Key::Family(of.family), OF_FAMILY), 1.0),
        ];
        if let Some(selection) = of.selection {
            let lost = Normal::new(assumed.of_selection.clamp(1e-3, 1.0).ln(), OF_SELECTION_SD);
            row.push((self.joint.place(&Key::Selection(selection), lost), 1.0));
        }
        row
    }

    /// Takes in a gain that steps or a trial showed, of a residual that had filled for `steps`; `noise` is the standard deviation
    /// of it, as a share. Gains that are not between 0 and 1 tell nothing.
    pub fn observe(&mut self, of: Strategy, assumed: Assumed, gain: f64, steps: f64, noise: f64) {
        if !(gain > 0.0 && gain < 1.0 && steps >= 0.0 && noise >= 0.0) {
            return;
        }
        let (selector, cr) = of;
        let of_curve = selector.family.has_ratio();
        let own = Key::One(selector, cr);
        if of_curve {
            self.joint.place_among(&own, OF_ONE, |key| matches!(key, Key::One(..)), MOST_KNOWN);
        }
        let mut row = self.row(of, assumed);
        row.extend(self.joint.find(&own).map(|at| (at, 1.0)));
        let fills = of_curve && selector.family.any().memory().is_some();
        let fresh = if fills { freshness(cr.get(), steps) } else { 0.0 };
        if fresh > 0.0 {
            row.push((self.joint.place(&Key::Fresh, FRESH), fresh));
        }
        // By how much ln(-ln(1 - gain)) moves where gain does, as a share.
        let steep = gain / ((1.0 - gain) * -(-gain).ln_1p());
        let sd = (noise * steep).hypot(FRESH_OF_ONE * FRESH.mean * fresh).max(LEAST_SD);
        let seen = Normal::new(scale(gain), sd);
        if self.joint.is_far(&row, seen, CHANGE) {
            let own = if of_curve { own } else { Key::Family(selector.family) };
            self.joint.find(&own).into_iter().for_each(|at| self.joint.forget(at, CHANGED_SD));
        }
        self.joint.observe(&row, seen);
    }

    /// The row of a strategy with what is its own, and the standard deviation of that where it was not observed.
    fn own_row(&mut self, strategy: Strategy, assumed: Assumed) -> (Row, f64) {
        let row = self.row(strategy, assumed);
        let (selector, cr) = strategy;
        match selector.family.has_ratio() {
            true => self.joint.with_own(row, &Key::One(selector, cr), OF_ONE),
            false => (row, 0.0),
        }
    }

    /// What a settled residual keeps, as expected.
    pub fn expected(&mut self, strategy: Strategy, assumed: Assumed) -> f64 {
        let (row, _) = self.own_row(strategy, assumed);
        unscale(self.joint.sum(&row).mean)
    }

    /// What settled residuals keep, in samples, of each of some strategies; `from` is the first row of draws that is this one's.
    pub fn sampled(&mut self, of: &[(Strategy, Assumed)], draws: &Draws, from: usize) -> Vec<Vec<f64>> {
        let rows: Vec<_> = of.iter().map(|(strategy, assumed)| self.own_row(*strategy, *assumed)).collect();
        let mut sums = self.joint.sums(&rows, draws, from);
        sums.iter_mut().flatten().for_each(|y| *y = unscale(*y));
        sums
    }

    /// Makes every number one of single precision, as it is stored.
    pub fn round(&mut self) {
        self.joint.round();
    }

    /// How many rows of draws [`Self::sampled`] takes for so many strategies.
    pub fn rows(&self, strategies: usize) -> usize {
        self.joint.len() + strategies
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::{prop, prop_assert, proptest};

    const ASSUMED: Assumed = Assumed { fixed: 0.5, of_selection: 0.6 };
    const LONG: f64 = 1e6;

    fn of(cr: f64, selection: Option<Selection>) -> Strategy {
        let family: Family = "topk(k=*)+ef(vanilla)".parse().unwrap();
        (Selector { family, selection }, CompressionRatio::new(cr).unwrap())
    }

    fn mean(samples: &[f64]) -> f64 {
        samples.iter().sum::<f64>() / samples.len() as f64
    }

    fn believed(gains: &mut Gains, strategy: Strategy) -> f64 {
        mean(&gains.sampled(&[(strategy, ASSUMED)], Draws::shared(), 0)[0])
    }

    /// Top-k in its first five steps, and settled (docs/decisions/gains-left-early.md).
    const MEASURED: [(f64, f64, f64); 3] = [(0.001, 0.034, 0.013), (0.01, 0.15, 0.09), (0.1, 0.67, 0.66)];

    #[test]
    fn what_first_steps_keep_is_brought_to_what_settled_ones_do() {
        let mut gains = Gains::default();
        for (cr, first, _) in MEASURED {
            gains.observe(of(cr, None), ASSUMED, first, 5.0, 0.05);
        }
        for (cr, _, settled) in MEASURED {
            let is = believed(&mut gains, of(cr, None));
            assert!((is / settled).ln().abs() < 0.3, "at {cr}: {is}, settled {settled}");
        }
    }

    #[test]
    fn ratios_that_were_not_measured_lie_between_those_that_were() {
        let mut gains = Gains::default();
        for (cr, _, settled) in [MEASURED[0], MEASURED[2]] {
            gains.observe(of(cr, None), ASSUMED, settled, LONG, 0.02);
        }
        let is = believed(&mut gains, of(0.01, None));
        assert!((is / 0.09).ln().abs() < 0.25, "{is}");
    }

    #[test]
    fn one_rank_that_selects_for_all_keeps_less_until_it_is_measured() {
        let mut gains = Gains::default();
        let (each, star) = (of(0.01, None), of(0.01, Some(Selection::Star)));
        gains.observe(each, ASSUMED, 0.09, LONG, 0.02);
        let before = believed(&mut gains, star);
        assert!((before / (0.6 * 0.09)).ln().abs() < 0.2, "{before}");
        gains.observe(star, ASSUMED, 0.03, LONG, 0.02);
        assert!((believed(&mut gains, star) / 0.03).ln().abs() < 0.15);
        assert!((believed(&mut gains, each) / 0.09).ln().abs() < 0.15, "its own selection stays as it was measured");
    }

    #[test]
    fn a_later_run_begins_with_what_an_earlier_one_kept_and_learns_that_it_is_another() {
        let mut gains = Gains::default();
        let topk = of(0.01, None);
        gains.observe(topk, ASSUMED, 0.03, LONG, 0.02);
        let mut later = gains.clone().carried_over();
        assert!((later.expected(topk, ASSUMED) / 0.03).ln().abs() < 0.05);
        let width = |gains: &mut Gains| {
            let samples = &gains.sampled(&[(topk, ASSUMED)], Draws::shared(), 0)[0];
            samples.iter().fold(0.0, |most: f64, x| most.max(*x)) / mean(samples)
        };
        assert!(width(&mut later) > 1.2 * width(&mut gains), "with more doubt");
        (0..3).for_each(|_| later.observe(topk, ASSUMED, 0.12, LONG, 0.02));
        assert!((believed(&mut later, topk) / 0.12).ln().abs() < 0.15);
    }

    #[test]
    fn a_compressor_without_ratios_is_as_assumed_until_it_is_measured() {
        let mut gains = Gains::default();
        let family: Family = "powersgd(rank=4)+ef(vanilla)".parse().unwrap();
        let strategy = (family.into(), CompressionRatio::DENSE);
        let before = gains.sampled(&[(strategy, ASSUMED)], Draws::shared(), 0).remove(0);
        assert!((mean(&before) - 0.5).abs() < 0.05);
        gains.observe(strategy, ASSUMED, 0.2, 0.0, 0.05);
        assert!((believed(&mut gains, strategy) - 0.2).abs() < 0.02);
    }

    proptest! {
        #[test]
        fn gains_are_shares_whatever_was_seen(seen in prop::collection::vec((-4.0..0.0f64, 0.0..=1.0f64, 0.0..2000.0f64), 1..30)) {
            let mut gains = Gains::default();
            for (cr, gain, steps) in seen {
                gains.observe(of(10f64.powf(cr), None), ASSUMED, gain, steps, 0.05);
                gains.widen(10.0);
            }
            let all: Vec<_> = [0.001, 0.01, 0.1].map(|cr| (of(cr, None), ASSUMED)).to_vec();
            prop_assert!(gains.sampled(&all, Draws::shared(), 0).iter().flatten().all(|gain| (0.0..=1.0).contains(gain)));
        }
    }
}
