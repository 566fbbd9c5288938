//! Order statistics over a window of samples.

use serde::{Deserialize, Serialize};

/// What a window of durations looks like, in seconds.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct Summary {
    /// Samples in the window.
    pub count: usize,
    /// The smallest.
    pub min_s: f64,
    /// Half lie below.
    pub median_s: f64,
    /// 95 % lie at or below.
    pub p95_s: f64,
    /// 99 % lie at or below.
    pub p99_s: f64,
    /// The largest.
    pub max_s: f64,
    /// Mean absolute difference of successive samples.
    pub jitter_s: f64,
}

impl Summary {
    /// Summarises samples in the order in which they were taken; values that are not finite are left out.
    /// `None` when nothing remains.
    pub fn of(samples: &[f64]) -> Option<Self> {
        let samples: Vec<f64> = samples.iter().copied().filter(|v| v.is_finite()).collect();
        let mut sorted = samples.clone();
        sorted.sort_by(f64::total_cmp);
        Some(Self {
            count: sorted.len(),
            min_s: *sorted.first()?,
            median_s: median_sorted(&sorted)?,
            p95_s: nearest_rank(&sorted, 0.95)?,
            p99_s: nearest_rank(&sorted, 0.99)?,
            max_s: *sorted.last()?,
            jitter_s: jitter(&samples),
        })
    }
}

/// Writes a window's columns; `null` where there is nothing to say: 0 would be a claim.
pub(crate) fn or_nulls<S: serde::Serializer>(summary: &Option<Summary>, serializer: S) -> Result<S::Ok, S::Error> {
    #[derive(Serialize)]
    struct Columns {
        count: usize,
        min_s: Option<f64>,
        median_s: Option<f64>,
        p95_s: Option<f64>,
        p99_s: Option<f64>,
        max_s: Option<f64>,
        jitter_s: Option<f64>,
    }
    let column = |pick: fn(&Summary) -> f64| summary.as_ref().map(pick);
    let columns = Columns {
        count: summary.map_or(0, |s| s.count),
        min_s: column(|s| s.min_s),
        median_s: column(|s| s.median_s),
        p95_s: column(|s| s.p95_s),
        p99_s: column(|s| s.p99_s),
        max_s: column(|s| s.max_s),
        jitter_s: summary.filter(|s| s.count > 1).map(|s| s.jitter_s),
    };
    columns.serialize(serializer)
}

/// Mean absolute difference of successive samples; 0 for fewer than two.
pub fn jitter(samples: &[f64]) -> f64 {
    if samples.len() < 2 {
        return 0.0;
    }
    let sum: f64 = samples.windows(2).map(|pair| (pair[1] - pair[0]).abs()).sum();
    sum / (samples.len() - 1) as f64
}

/// Median of unsorted values; `None` when there are none.
pub fn median(values: &[f64]) -> Option<f64> {
    let mut sorted = values.to_vec();
    sorted.sort_by(f64::total_cmp);
    median_sorted(&sorted)
}

fn median_sorted(sorted: &[f64]) -> Option<f64> {
    let middle = sorted.len() / 2;
    match sorted.len() {
        0 => None,
        n if n % 2 == 1 => Some(sorted[middle]),
        _ => Some((sorted[middle - 1] + sorted[middle]) / 2.0),
    }
}

/// The nearest-rank quantile of ascending values, `q` in 0 to 1; `None` when there are none.
pub fn nearest_rank(sorted: &[f64], q: f64) -> Option<f64> {
    let rank = (q.clamp(0.0, 1.0) * sorted.len() as f64).ceil() as usize;
    sorted.get(rank.max(1) - 1).copied()
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn known_values() {
        let samples: Vec<f64> = (1..=100).map(f64::from).collect();
        let s = Summary::of(&samples).unwrap();
        assert_eq!((s.min_s, s.median_s, s.p95_s, s.p99_s, s.max_s, s.jitter_s), (1.0, 50.5, 95.0, 99.0, 100.0, 1.0));
        assert_eq!(Summary::of(&[]), None);
        assert_eq!(Summary::of(&[f64::NAN]), None);
    }

    proptest! {
        #[test]
        fn quantiles_are_ordered(samples in prop::collection::vec(any::<f64>(), 0..200)) {
            if let Some(s) = Summary::of(&samples) {
                prop_assert!(s.min_s <= s.median_s || (s.median_s.is_infinite()));
                prop_assert!(s.p95_s <= s.p99_s && s.p99_s <= s.max_s);
            }
        }
    }
}
