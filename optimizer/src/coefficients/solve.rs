//! The robust, regularised, non-negative least squares behind a fit.

use super::{Coefficients, Sample};
use std::collections::VecDeque;

/// Weight of a sample relative to the one after it: half is forgotten in about 23 samples.
const FORGET: f64 = 0.97;

/// How far from 1 a and b are likely: the closed form's shape is not always the one that runs (NCCL's tree, TCP's slow
/// start).
const SLOPE_SCALE: f64 = 0.3;

/// How long the fixed time may well be: messages, threads and schedulers cost up to some milliseconds, whatever the
/// network. This is what tells them from latency: a small exchange that takes 5 ms at 1 ms of latency does not take
/// 250 at 50.
const FIXED_SCALE_S: f64 = 3e-3;

/// Ridges, in samples' worth of relative error, of a coefficient that is off by its scale: at the start, and per
/// sample. The latter since alpha and bandwidth are measured too: least squares takes a scatter of the terms that the
/// times do not follow for a proof that the times do not depend on them, the more so the more samples there are, and
/// would predict at 4 Mbit/s what was measured at 100.
const RIDGE: f64 = 3e-4;
const RIDGE_SLOPE: f64 = 1e-4;
const RIDGE_FIXED: f64 = 3e-4;

/// So many newest samples say how far the fit is off now: their median stands two outliers.
const NEWEST: usize = 5;

/// The newest samples stretch or shrink the fit at most so much: what is off by more was measured in a network
/// whose change had not been seen yet, and counting that change twice would be worse.
const MOST_STRETCH: f64 = 2.0;

/// Weighting passes: the first ones with Huber's weights, which always lead to one minimum, the rest with
/// Tukey's, which ignore far outliers altogether.
const HUBER_PASSES: usize = 8;
const TUKEY_PASSES: usize = 6;

/// The usual constants for 95 % efficiency on normal errors.
const HUBER_K: f64 = 1.345;
const TUKEY_K: f64 = 4.685;

/// Least assumed relative noise: below it every sample counts fully. No network is more regular, and a smaller one lets
/// Tukey's weights throw out half of the samples for what the ridges leave.
const LEAST_NOISE: f64 = 0.05;

/// Predictions below this share of the median time are not divided by: nothing is known that precisely.
const LEAST_SHARE: f64 = 1e-3;

/// Samples at which confidence reaches one half, if all is explained.
const HALF_CONFIDENCE: f64 = 10.0;

/// Median relative error at which confidence is halved.
const HALF_ERROR: f64 = 0.2;

type Theta = [f64; 3];

struct Row {
    /// Unit of the fixed part, alpha term, beta term, in seconds.
    x: Theta,
    measured_s: f64,
    age_weight: f64,
}

impl Row {
    fn predict(&self, theta: &Theta) -> f64 {
        self.x.iter().zip(theta).map(|(x, t)| x * t).sum()
    }
}

pub(super) fn fit(samples: &VecDeque<Sample>) -> Coefficients {
    if samples.is_empty() {
        return Coefficients::default();
    }
    let unit = median(samples.iter().map(|s| s.measured_s).collect());
    let newest = samples.len() - 1;
    let row = |(i, s): (usize, &Sample)| Row {
        x: [unit, s.terms.alpha_s, s.terms.beta_s],
        measured_s: s.measured_s,
        age_weight: FORGET.powi((newest - i) as i32),
    };
    let rows: Vec<Row> = samples.iter().enumerate().map(row).collect();
    let theta = up_to_date(robust(&rows, unit), &rows);
    let median_error = median(rows.iter().map(|r| (r.predict(&theta) / r.measured_s - 1.0).abs()).collect());
    let n = samples.len() as f64;
    Coefficients {
        fixed_s: theta[0] * unit,
        a: theta[1],
        b: theta[2],
        beta_seen_s: samples.iter().map(|s| s.terms.beta_s).fold(0.0, f64::max),
        confidence: n / (n + HALF_CONFIDENCE) / (1.0 + (median_error / HALF_ERROR).powi(2)),
        median_error,
        samples: samples.len(),
    }
}

/// Stretches the fit by what the newest samples say: when the network changes they are the outliers of an older
/// majority, and yet they are what the next interval will be like.
fn up_to_date(theta: Theta, rows: &[Row]) -> Theta {
    let newest = &rows[rows.len().saturating_sub(NEWEST)..];
    let ratios = newest.iter().map(|r| r.measured_s / r.predict(&theta)).filter(|f| f.is_finite() && *f > 0.0);
    let ratios: Vec<f64> = ratios.collect();
    if ratios.len() < NEWEST {
        return theta;
    }
    let stretch = median(ratios).clamp(1.0 / MOST_STRETCH, MOST_STRETCH);
    theta.map(|t| t * stretch)
}

fn robust(rows: &[Row], unit: f64) -> Theta {
    // Where a single factor on the whole model would put the median: insensitive to any half of the samples.
    let ratios = rows.iter().map(|r| r.measured_s / (r.x[1] + r.x[2])).filter(|f| f.is_finite() && *f > 0.0).collect();
    let factor = Some(median(ratios)).filter(|f| *f > 0.0).unwrap_or(1.0);
    let mut theta = [0.0, factor, factor];
    for pass in 0..HUBER_PASSES + TUKEY_PASSES {
        // Errors relative to the prediction, not to the measurement: a far too small measurement must not
        // weigh more than a far too large one.
        let scales: Vec<f64> = rows.iter().map(|r| r.predict(&theta).max(LEAST_SHARE * unit)).collect();
        let errors = rows.iter().zip(&scales).map(|(r, scale)| (r.measured_s - r.predict(&theta)) / scale);
        let errors: Vec<f64> = errors.collect();
        let noise = (1.4826 * median(errors.iter().map(|e| e.abs()).collect())).max(LEAST_NOISE);
        let weight = if pass < HUBER_PASSES { huber } else { tukey };
        let weigh = |((row, e), scale): ((&Row, &f64), &f64)| (row.age_weight * weight(e / noise), *scale);
        let weights: Vec<(f64, f64)> = rows.iter().zip(&errors).zip(&scales).map(weigh).collect();
        theta = non_negative(rows, &weights, unit);
    }
    theta
}

fn huber(e: f64) -> f64 {
    if e.abs() <= HUBER_K { 1.0 } else { HUBER_K / e.abs() }
}

fn tukey(e: f64) -> f64 {
    if e.abs() >= TUKEY_K { 0.0 } else { (1.0 - (e / TUKEY_K).powi(2)).powi(2) }
}

/// Least squares with every coefficient at or above 0: the best of the eight ways to hold some at 0. A weight is
/// what a sample counts, and the time that its error is relative to.
fn non_negative(rows: &[Row], weights: &[(f64, f64)], unit: f64) -> Theta {
    let ridge = ridge(weights, unit);
    let mut a = [[ridge[0], 0.0, 0.0], [0.0, ridge[1], 0.0], [0.0, 0.0, ridge[2]]];
    let mut y = [0.0, ridge[1], ridge[2]];
    for (row, (count, scale)) in rows.iter().zip(weights) {
        let w = count / (scale * scale);
        for (i, xi) in row.x.iter().enumerate() {
            y[i] += w * xi * row.measured_s;
            a[i].iter_mut().zip(&row.x).for_each(|(cell, xj)| *cell += w * xi * xj);
        }
    }
    // The objective without its constant: theta' A theta - 2 y' theta.
    let cost =
        |t: &Theta| -> f64 { (0..3).map(|i| t[i] * ((0..3).map(|j| a[i][j] * t[j]).sum::<f64>() - 2.0 * y[i])).sum() };
    let candidates = (0u8..8).filter_map(|free| solve(&a, &y, free)).filter(|t| t.iter().all(|v| *v >= 0.0));
    candidates.min_by(|p, q| cost(p).total_cmp(&cost(q))).unwrap_or([0.0, 1.0, 1.0])
}

/// What holds fixed (in units of `unit` seconds) to 0, and a and b to 1.
fn ridge(weights: &[(f64, f64)], unit: f64) -> Theta {
    let counts: f64 = weights.iter().map(|(count, _)| count).sum();
    let slope = (RIDGE + RIDGE_SLOPE * counts) / (SLOPE_SCALE * SLOPE_SCALE);
    [(RIDGE + RIDGE_FIXED * counts) * (unit / FIXED_SCALE_S).powi(2), slope, slope]
}

/// Solves the equations of the coefficients whose bit is set in `free`, the others at 0.
fn solve(a: &[[f64; 3]; 3], y: &Theta, free: u8) -> Option<Theta> {
    let mut m = [[0.0; 4]; 3];
    for i in 0..3 {
        let on = |k: usize| free & (1 << k) != 0;
        for j in 0..3 {
            m[i][j] = if on(i) && on(j) { a[i][j] } else { f64::from(u8::from(i == j)) };
        }
        m[i][3] = if on(i) { y[i] } else { 0.0 };
    }
    for pivot in 0..3 {
        // Symmetric and positive definite by the ridge: no exchange of rows is needed.
        let p = m[pivot];
        if !(p[pivot].is_finite() && p[pivot] > 0.0) {
            return None;
        }
        for (_, row) in m.iter_mut().enumerate().filter(|(i, _)| *i != pivot) {
            let f = row[pivot] / p[pivot];
            (0..4).for_each(|k| row[k] -= f * p[k]);
        }
    }
    let theta = [0, 1, 2].map(|i| m[i][3] / m[i][i]);
    theta.iter().all(|t| t.is_finite()).then_some(theta)
}

/// The lower median; 0 of nothing.
fn median(mut values: Vec<f64>) -> f64 {
    if values.is_empty() {
        return 0.0;
    }
    let lower = (values.len() - 1) / 2;
    *values.select_nth_unstable_by(lower, f64::total_cmp).1
}
