//! How long compressing takes on a job's machines: the job's speed against a table's, and what each compressor differs by.

use crate::draws::Draws;
use crate::joint::{Joint, Normal, Row};
use flexcomm_domain::{CompressionRatio, Family, Selector};
use serde::{Deserialize, Serialize};

const SPEED: Normal = Normal::new(0.0, 0.4);
const OF_FAMILY: Normal = Normal::new(0.0, 0.3);
/// What is left over for a compressor at one ratio.
const OF_ONE: Normal = Normal::new(0.0, 0.12);
/// Ratios whose own differences are remembered.
const MOST_KNOWN: usize = 24;
/// How a machine's speed moves: variance per second.
const DRIFT: f64 = 1e-6;
/// What is so many standard deviations off has changed,
const CHANGE: f64 = 4.0;
/// by about so much for that compressor, and for all.
const CHANGED_SD: f64 = 1.0;
const CHANGED_SPEED_SD: f64 = 0.3;

/// By how much the machines of an earlier run may be slower or faster: variance.
const ANOTHER_RUN: f64 = 0.04;

#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
enum Key {
    Speed,
    Family(Family),
    One(Selector, CompressionRatio),
}

/// What is believed of the times to compress and decompress, as logarithms of what they are over a table's.
#[derive(Debug, Clone, PartialEq, Default, Serialize, Deserialize)]
pub struct CompressTimes {
    joint: Joint<Key>,
}

impl CompressTimes {
    /// So many seconds have passed.
    pub fn widen(&mut self, seconds: f64) {
        (0..self.joint.len()).for_each(|at| self.joint.widen(at, DRIFT * seconds));
    }

    fn row(&mut self, of: Selector) -> Row {
        vec![(self.joint.place(&Key::Speed, SPEED), 1.0), (self.joint.place(&Key::Family(of.family), OF_FAMILY), 1.0)]
    }

    /// What it tells of a later run of the same job, whose machines may be others.
    #[must_use]
    pub fn carried_over(self) -> Self {
        let doubt = |key: &Key| Some(if *key == Key::Speed { ANOTHER_RUN } else { 0.0 });
        Self { joint: self.joint.carried_over(doubt) }
    }

    /// What it tells of a job of another size or model: how fast machines are, and what each compressor differs by.
    #[must_use]
    pub fn of_another_job(self) -> Self {
        Self { joint: self.joint.carried_over(|key| (!matches!(key, Key::One(..))).then_some(ANOTHER_RUN)) }
    }

    /// Takes in what compressing took, against the table's seconds; `noise` is a standard deviation, as a share. What is not above 0
    /// tells nothing.
    pub fn observe(&mut self, (of, cr): (Selector, CompressionRatio), seconds: f64, table_s: f64, noise: f64) {
        let ratio = seconds / table_s;
        if !(ratio > 0.0 && ratio.is_finite() && noise >= 0.0) {
            return;
        }
        let own = Key::One(of, cr);
        self.joint.place_among(&own, OF_ONE, |key| matches!(key, Key::One(..)), MOST_KNOWN);
        let mut row = self.row(of);
        row.extend(self.joint.find(&own).map(|at| (at, 1.0)));
        if self.joint.is_far(&row, Normal::new(ratio.ln(), noise), CHANGE) {
            let speed = self.joint.place(&Key::Speed, SPEED);
            self.joint.widen(speed, CHANGED_SPEED_SD * CHANGED_SPEED_SD);
            self.joint.find(&own).into_iter().for_each(|at| self.joint.forget(at, CHANGED_SD));
        }
        self.joint.observe(&row, Normal::new(ratio.ln(), noise));
    }

    /// Seconds over the table's, in samples, of each of some compressors.
    pub fn sampled(&mut self, of: &[(Selector, CompressionRatio)], draws: &Draws, from: usize) -> Vec<Vec<f64>> {
        let row = |(selector, cr): &(Selector, CompressionRatio)| {
            let row = self.row(*selector);
            self.joint.with_own(row, &Key::One(*selector, *cr), OF_ONE)
        };
        let rows: Vec<_> = of.iter().map(row).collect();
        let mut sums = self.joint.sums(&rows, draws, from);
        sums.iter_mut().flatten().for_each(|y| *y = y.exp());
        sums
    }

    /// Seconds over the table's, as expected.
    pub fn expected(&mut self, (of, cr): (Selector, CompressionRatio)) -> f64 {
        let row = self.row(of);
        let (row, _) = self.joint.with_own(row, &Key::One(of, cr), OF_ONE);
        self.joint.sum(&row).mean.exp()
    }

    /// Makes every number one of single precision, as it is stored.
    pub fn round(&mut self) {
        self.joint.round();
    }

    /// How many rows of draws [`Self::sampled`] takes for so many compressors.
    pub fn rows(&self, compressors: usize) -> usize {
        self.joint.len() + compressors
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of(text: &str, cr: f64) -> (Selector, CompressionRatio) {
        (text.parse::<Family>().unwrap().into(), CompressionRatio::new(cr).unwrap())
    }

    fn mean(samples: &[f64]) -> f64 {
        samples.iter().sum::<f64>() / samples.len() as f64
    }

    #[test]
    fn a_slow_machine_is_slow_with_all_compressors() {
        let mut times = CompressTimes::default();
        let [seen, other] = ["topk(k=*)+ef(vanilla)", "fp16"].map(|text| of(text, 0.01));
        for _ in 0..20 {
            times.observe(seen, 2e-3, 1e-3, 0.1);
        }
        let sampled = times.sampled(&[seen, other], Draws::shared(), 0);
        assert!((mean(&sampled[0]) - 2.0).abs() < 0.1, "{}", mean(&sampled[0]));
        assert!((1.4..2.2).contains(&mean(&sampled[1])), "{}", mean(&sampled[1]));
    }

    #[test]
    fn a_machine_that_has_become_slow_is_noticed_at_once() {
        let mut times = CompressTimes::default();
        let [seen, other] = ["topk(k=*)+ef(vanilla)", "fp16"].map(|text| of(text, 0.01));
        for _ in 0..50 {
            times.observe(seen, 1e-3, 1e-3, 0.1);
        }
        for _ in 0..3 {
            times.observe(seen, 20e-3, 1e-3, 0.1);
        }
        let sampled = times.sampled(&[seen, other], Draws::shared(), 0);
        assert!((mean(&sampled[0]) / 20.0 - 1.0).abs() < 0.1, "{}", mean(&sampled[0]));
        assert!(mean(&sampled[1]) > 1.2, "{}", mean(&sampled[1]));
    }

    #[test]
    fn what_is_no_time_tells_nothing() {
        let mut times = CompressTimes::default();
        times.observe(of("fp16", 1.0), 0.0, 1.0, 0.1);
        times.observe(of("fp16", 1.0), f64::NAN, 1.0, 0.1);
        times.observe(of("fp16", 1.0), f64::INFINITY, 1.0, 0.1);
        times.observe(of("fp16", 1.0), 1.0, 1.0, f64::NAN);
        assert_eq!(times, CompressTimes::default());
    }
}
