//! gain(c) and t_comp(c) of one compressor: monotone in log c through measured points. Of a compressor that keeps no share of
//! the values all points are at c = 1, and their means are its gain and time.
//!
//! - **gain** never falls as c grows; noisy measurements that say otherwise are pooled (pool adjacent
//!   violators, weighted by samples). gain(1) = 1 is a fact and always a point. Between points the
//!   interpolation is Fritsch and Carlson's monotone cubic. Below the smallest measured c the gain is taken
//!   to fall in proportion to c, the steepest that top-k can lose: what was not tried is not trusted.
//! - **t_comp** may rise or fall with c. It is linear in log c between points and constant outside.
//!   Dense costs nothing, but that says nothing about c just below 1, so it is no point.

use crate::times::top_k_s;
use flexcomm_domain::{CompressionRatio, Gain};
use serde::{Deserialize, Serialize};

/// Most points a profile keeps: bounds interpolation and what is stored.
pub const MAX_POINTS: usize = 256;

/// Gain never goes below this: 1/gain stays finite.
pub(crate) const LEAST_GAIN: f64 = 1e-9;

/// One measured ratio.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct ProfilePoint {
    /// c.
    pub cr: CompressionRatio,
    /// Mean gain at c.
    pub gain: Gain,
    /// Mean time to compress and decompress at c, in seconds.
    pub t_comp_s: f64,
    /// How many measurements stand behind it; weighs it when points contradict each other.
    pub weight: f64,
}

/// Why points make no profile.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
pub enum ProfileError {
    /// Nothing to interpolate.
    #[error("failed to build a profile: no points")]
    Empty,
    /// More than [`MAX_POINTS`].
    #[error("failed to build a profile: {0} points, at most {MAX_POINTS} are allowed")]
    TooMany(usize),
    /// A time or weight that is negative or not a number.
    #[error("failed to build a profile: {what} at CR {cr} is {value}, allowed is {allowed}")]
    Value {
        /// Which quantity.
        what: &'static str,
        /// At which ratio.
        cr: f64,
        /// As given.
        value: f64,
        /// In words.
        allowed: &'static str,
    },
}

/// gain(c) and t_comp(c), see the module.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(try_from = "RawProfile")]
pub struct Profile {
    points: Vec<ProfilePoint>,
    assumed: bool,
    #[serde(skip_serializing)]
    gain: Curve,
    #[serde(skip_serializing)]
    t_comp: Vec<(f64, f64)>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct RawProfile {
    points: Vec<ProfilePoint>,
    #[serde(default)]
    assumed: bool,
}

impl TryFrom<RawProfile> for Profile {
    type Error = ProfileError;
    fn try_from(raw: RawProfile) -> Result<Self, ProfileError> {
        Self::build(raw.points, raw.assumed)
    }
}

impl Profile {
    /// Through measured points, in any order; points of one ratio are averaged by weight.
    pub fn new(points: Vec<ProfilePoint>) -> Result<Self, ProfileError> {
        Self::build(points, false)
    }

    /// What is assumed when nothing was measured, for a gradient of `values`: gain(c) = c^0.6 (0.25 at
    /// 0.1, 0.063 at 0.01, 0.016 at 0.001; top-k with error feedback on Fashion-MNIST was measured at 0.51, 0.072 and 0.009,
    /// so that the assumption does not promise what trials then take back) and the t_comp of top-k by the table that ships. What
    /// a compressor takes where it is known which is [`crate::Times`]' to say.
    pub fn prior(values: u64) -> Self {
        let point = |c: f64| {
            Some(ProfilePoint {
                cr: CompressionRatio::new(c).ok()?,
                gain: Gain::new(c.powf(PRIOR_GAIN_EXPONENT)).ok()?,
                t_comp_s: top_k_s(values, c),
                weight: 1.0,
            })
        };
        let points = (0..=12).filter_map(|i| point(10f64.powf(-4.0 + f64::from(i) / 3.0))).collect();
        Self::build(points, true).expect("the prior's points are valid for every size")
    }

    /// Whether this is [`Profile::prior`]: nothing was measured.
    pub fn is_assumed(&self) -> bool {
        self.assumed
    }

    /// The points as merged, by rising c.
    pub fn points(&self) -> &[ProfilePoint] {
        &self.points
    }

    /// The profile through what `of` makes of each point; the same where that makes none.
    pub fn map(&self, of: impl Fn(&ProfilePoint) -> ProfilePoint) -> Self {
        let mapped = Self::build(self.points.iter().map(of).collect(), self.assumed);
        mapped.unwrap_or_else(|_| self.clone())
    }

    /// The only point of a compressor that has one ratio.
    fn only(&self, c: CompressionRatio) -> Option<&ProfilePoint> {
        self.points.first().filter(|_| self.t_comp.is_empty() && c.is_dense())
    }

    /// Predicted gain at c.
    pub fn gain(&self, c: CompressionRatio) -> Gain {
        if let Some(only) = self.only(c) {
            return only.gain;
        }
        let x = c.get().ln();
        let low = self.gain.knots[0];
        let y = if x < low.0 { low.1 * (x - low.0).exp() } else { self.gain.at(x) };
        Gain::new(y.clamp(LEAST_GAIN, 1.0)).unwrap_or(Gain::FULL)
    }

    /// Predicted seconds to compress and decompress at c; 0 when c = 1 of a compressor that has other ratios.
    pub fn t_comp(&self, c: CompressionRatio) -> f64 {
        if let Some(only) = self.only(c) {
            return only.t_comp_s;
        }
        if c.is_dense() { 0.0 } else { linear(&self.t_comp, c.get().ln()) }
    }

    fn build(points: Vec<ProfilePoint>, assumed: bool) -> Result<Self, ProfileError> {
        if points.is_empty() {
            return Err(ProfileError::Empty);
        }
        if points.len() > MAX_POINTS {
            return Err(ProfileError::TooMany(points.len()));
        }
        points.iter().try_for_each(check)?;
        let points = merged(points);
        let gain = Curve::through(pooled(&points));
        let t_comp = points.iter().filter(|p| !p.cr.is_dense()).map(|p| (p.cr.get().ln(), p.t_comp_s)).collect();
        Ok(Self { points, assumed, gain, t_comp })
    }
}

/// Exponent of the assumed gain.
const PRIOR_GAIN_EXPONENT: f64 = 0.6;

fn check(p: &ProfilePoint) -> Result<(), ProfileError> {
    let cr = p.cr.get();
    if !(0.0..=31_536_000.0).contains(&p.t_comp_s) {
        return Err(ProfileError::Value { what: "t_comp", cr, value: p.t_comp_s, allowed: "0 to 31,536,000 s" });
    }
    if !(p.weight.is_finite() && p.weight > 0.0) {
        return Err(ProfileError::Value { what: "weight", cr, value: p.weight, allowed: "above 0" });
    }
    Ok(())
}

/// Sorted by ratio, those of one ratio averaged by weight.
fn merged(mut points: Vec<ProfilePoint>) -> Vec<ProfilePoint> {
    points.sort_by(|a, b| a.cr.get().total_cmp(&b.cr.get()));
    let mut out: Vec<ProfilePoint> = Vec::with_capacity(points.len());
    for p in points {
        match out.last_mut() {
            Some(last) if last.cr == p.cr => {
                let weight = last.weight + p.weight;
                let mean = |a: f64, b: f64| (a * last.weight + b * p.weight) / weight;
                let gain = mean(last.gain.get(), p.gain.get());
                *last = ProfilePoint {
                    cr: p.cr,
                    gain: Gain::new(gain).unwrap_or(p.gain),
                    t_comp_s: mean(last.t_comp_s, p.t_comp_s),
                    weight,
                };
            }
            _ => out.push(p),
        }
    }
    out
}

/// Neighbours whose gains contradicted each other, as one.
#[derive(Clone, Copy)]
struct Block {
    mean: f64,
    weight: f64,
    count: usize,
}

/// (ln c, gain) that never falls, by pooling adjacent violators; ends in (0, 1).
fn pooled(points: &[ProfilePoint]) -> Vec<(f64, f64)> {
    let mut blocks: Vec<Block> = Vec::new();
    let below_one = points.iter().filter(|p| !p.cr.is_dense());
    for p in below_one.clone() {
        blocks.push(Block { mean: p.gain.get(), weight: p.weight, count: 1 });
        while let [.., a, b] = blocks[..] {
            if a.mean <= b.mean {
                break;
            }
            blocks.truncate(blocks.len() - 2);
            let weight = a.weight + b.weight;
            let mean = (a.mean * a.weight + b.mean * b.weight) / weight;
            blocks.push(Block { mean, weight, count: a.count + b.count });
        }
    }
    let levels = blocks.into_iter().flat_map(|block| std::iter::repeat_n(block.mean, block.count));
    below_one.map(|p| p.cr.get().ln()).zip(levels).chain([(0.0, 1.0)]).collect()
}

/// A monotone cubic through knots of rising x and never falling y.
#[derive(Debug, Clone, PartialEq)]
struct Curve {
    knots: Vec<(f64, f64)>,
    slopes: Vec<f64>,
}

impl Curve {
    fn through(knots: Vec<(f64, f64)>) -> Self {
        let slopes = monotone_slopes(&knots);
        Self { knots, slopes }
    }

    /// Held at the ends outside the knots.
    fn at(&self, x: f64) -> f64 {
        let right = self.knots.partition_point(|k| k.0 <= x);
        if right == 0 {
            return self.knots[0].1;
        }
        if right == self.knots.len() {
            return self.knots[right - 1].1;
        }
        let ((x0, y0), (x1, y1)) = (self.knots[right - 1], self.knots[right]);
        let (h, t) = (x1 - x0, (x - x0) / (x1 - x0));
        let (m0, m1) = (self.slopes[right - 1] * h, self.slopes[right] * h);
        let (t2, t3) = (t * t, t * t * t);
        let y =
            (2.0 * t3 - 3.0 * t2 + 1.0) * y0 + (t3 - 2.0 * t2 + t) * m0 + (3.0 * t2 - 2.0 * t3) * y1 + (t3 - t2) * m1;
        // Rounding must not step outside the neighbours.
        y.clamp(y0, y1)
    }
}

/// Tangents by Fritsch and Carlson (1980) with Brodlie's weighted harmonic mean inside; one-sided at the ends.
fn monotone_slopes(knots: &[(f64, f64)]) -> Vec<f64> {
    let steps: Vec<(f64, f64)> =
        knots.windows(2).map(|w| (w[1].0 - w[0].0, (w[1].1 - w[0].1) / (w[1].0 - w[0].0))).collect();
    let inner = |i: usize| {
        let ((h0, d0), (h1, d1)) = (steps[i - 1], steps[i]);
        if d0 <= 0.0 || d1 <= 0.0 {
            return 0.0;
        }
        let (w0, w1) = (2.0 * h1 + h0, h1 + 2.0 * h0);
        (w0 + w1) / (w0 / d0 + w1 / d1)
    };
    (0..knots.len())
        .map(|i| match i {
            0 => steps.first().map_or(0.0, |s| s.1),
            _ if i == steps.len() => steps[i - 1].1,
            _ => inner(i),
        })
        .collect()
}

fn linear(knots: &[(f64, f64)], x: f64) -> f64 {
    let right = knots.partition_point(|k| k.0 <= x);
    match (right.checked_sub(1).map(|i| knots[i]), knots.get(right)) {
        (Some((x0, y0)), Some(&(x1, y1))) => y0 + (y1 - y0) * (x - x0) / (x1 - x0),
        (Some((_, y)), None) | (None, Some(&(_, y))) => y,
        (None, None) => 0.0,
    }
}

#[cfg(test)]
mod tests;
