//! MSTopk (Shi et al., 2021): a threshold is searched by bisection between mean |x| and max |x| in 25 rounds.
//! Two thresholds remain: the lowest tried that at most k values reach, and the highest tried that more than k
//! reach. All values that reach the first are taken, and the rest, up to exactly k, is a run of neighbours
//! at a random place among those that reach only the second.
//!
//! As published, each round counts the values that reach its threshold, and asks whether they are more than k. They
//! are exactly when the threshold is at most the (k+1)-th largest magnitude, so one exact cut answers all 25
//! rounds. The selection is the same; [`super::naive::mstopk`] counts.

use crate::Selection;
use crate::kernels::key;

/// Rounds of bisection, as published.
const ROUNDS: u32 = 25;

/// What the bisection leaves.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) struct Thresholds {
    /// At most k values reach it; infinite when every threshold tried was reached by more.
    pub(crate) upper: f32,
    /// More than k values reach it; 0 when every threshold tried was reached by at most k.
    pub(crate) lower: f32,
}

/// The published search. `more_than_k(t)`: whether more than k magnitudes are t or larger.
pub(crate) fn bisect(mean: f64, max: f32, more_than_k: impl Fn(f32) -> bool) -> Thresholds {
    let (mut left, mut right) = (0.0f64, 1.0f64);
    let mut found = Thresholds { upper: f32::INFINITY, lower: 0.0 };
    for _ in 0..ROUNDS {
        let ratio = left + (right - left) / 2.0;
        let threshold = (mean + ratio * (f64::from(max) - mean)) as f32;
        if more_than_k(threshold) {
            (left, found.lower) = (ratio, threshold);
        } else {
            (right, found.upper) = (ratio, threshold);
        }
    }
    found
}

/// Mean |x|, summed in an order that every kernel and machine shares.
pub(crate) fn mean_magnitude(values: &[f32]) -> f64 {
    const LANES: usize = 8;
    let (groups, rest) = values.as_chunks::<LANES>();
    let mut sums = [0.0f64; LANES];
    for group in groups {
        for (sum, x) in sums.iter_mut().zip(group) {
            *sum += f64::from(x.abs());
        }
    }
    let sum: f64 = sums.iter().sum::<f64>() + rest.iter().map(|x| f64::from(x.abs())).sum::<f64>();
    sum / values.len() as f64
}

/// Where a run of `length` out of `band` places starts.
pub(super) fn random_start(seed: u64, band: usize, length: usize) -> usize {
    // SplitMix64's finisher: neighbouring seeds give unrelated places.
    let mut z = seed.wrapping_add(0x9e37_79b9_7f4a_7c15);
    z = (z ^ z >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    z = (z ^ z >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^= z >> 31;
    let places = (band - length) as u128 + 1;
    ((u128::from(z) * places) >> 64) as usize
}

/// Takes all that reach the upper threshold, and a run of those that reach only the lower. `values` are in order
/// of position and hold at least those that reach the lower.
pub(crate) fn pick(
    selection: &mut Selection,
    values: impl Iterator<Item = (u32, f32)> + Clone,
    k: usize,
    (thresholds, seed): (Thresholds, u64),
) {
    let (upper, lower) = (key(thresholds.upper), key(thresholds.lower));
    let count = |floor: u32| values.clone().filter(|(_, x)| key(*x) >= floor).count();
    let above = count(upper);
    let band = count(lower) - above;
    let start = random_start(seed, band, k - above);
    let Selection { indices, values: kept, .. } = selection;
    let mut len = indices.len();
    // One place more, and every value is stored: near the thresholds a branch would be guessed wrong too often.
    indices.resize(len + k + 1, 0);
    kept.resize(len + k + 1, 0.0);
    let mut in_band = 0usize;
    for (index, value) in values {
        (indices[len], kept[len]) = (index, value);
        let key = key(value);
        let in_run = (key >= lower) & (in_band.wrapping_sub(start) < k - above);
        len += usize::from((key >= upper) | in_run);
        in_band += usize::from((key >= lower) & (key < upper));
    }
    indices.truncate(len);
    kept.truncate(len);
}
