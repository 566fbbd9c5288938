//! SIDCo (Abdelmoniem et al. 2021, "An efficient statistical-based gradient compression technique for distributed training
//! systems"): the threshold that a share delta of values exceeds is computed from moments of a sparsity-inducing
//! distribution fitted to |x|, without sorting or sampling.
//!
//! Far tails fit badly, so there are stages (section 2.4, algorithm 1): the first aims at the share `first`, each next one
//! fits what exceeds the threshold before it, and the last one aims at what is left of delta. Every `every` steps the number
//! of stages changes by one when the mean number of values sent is off by more than `tolerance`.
//!
//! Fits: `exponential` in all stages (SIDCo-E), `gamma` in the first and Pareto in the others (SIDCo-GP), `pareto` in all
//! (SIDCo-P). Where a fit has no answer (no spread), the exponential takes its place.

use super::sparse::{Choose, Pick, Sparse};
use crate::Selection;
use crate::codec::{Context, EncodeError, ReadError, Stats};
use crate::entry::Entry;
use crate::kernels::{Kernel, Work, key};
use crate::wire::{Reader, Writer};
use flexcomm_domain::spec::{Values, compressors};

pub(super) const ENTRY: Entry = Entry {
    info: &compressors::SIDCO,
    code: 71,
    examples: &["k=0.01", "k=0.1,fit=gamma", "k=0.001,fit=pareto,every=2", "k=3"],
    build: |values, shape| Box::new(Sparse::new(shape.values(), Sidco::new(values, shape.values()))),
};

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Fit {
    Exponential,
    Gamma,
    Pareto,
}

#[derive(Debug)]
struct Sidco {
    n: usize,
    k: usize,
    fit: Fit,
    first: f64,
    tolerance: f64,
    every: u32,
    /// M; more make no sense.
    most_stages: u32,
    stages: u32,
    /// Values sent, and steps, since the last look at the stages.
    sent: u64,
    steps: u32,
}

impl Sidco {
    fn new(values: &Values, n: usize) -> Self {
        let (k, first) = (values.kept(0, n), values.number(2));
        let share = k as f64 / n.max(1) as f64;
        // The last stage's share, delta / first^(M-1), must stay below 1.
        let most_stages = (share.ln() / first.ln()).ceil().clamp(1.0, 64.0) as u32;
        let fit = [Fit::Exponential, Fit::Gamma, Fit::Pareto][values.whole(1).min(2)];
        let (tolerance, every) = (values.number(3), values.whole(4) as u32);
        Self { n, k, fit, first, tolerance, every, most_stages, stages: 1, sent: 0, steps: 0 }
    }

    /// Share that a stage, from 1, aims at.
    fn share(&self, stage: u32) -> f64 {
        let delta = self.k as f64 / self.n.max(1) as f64;
        if stage < self.stages { self.first } else { delta / self.first.powi(self.stages as i32 - 1) }
    }

    /// Algorithm 1, Adapt_Stages.
    fn adapt(&mut self, sent: usize) {
        self.sent += sent as u64;
        self.steps += 1;
        if self.steps < self.every {
            return;
        }
        let (mean, k) = (self.sent as f64 / f64::from(self.steps), self.k as f64);
        if mean > k * (1.0 + self.tolerance) {
            self.stages = self.stages.saturating_sub(1).max(1);
        } else if mean < k * (1.0 - self.tolerance) {
            self.stages = (self.stages + 1).min(self.most_stages);
        }
        (self.sent, self.steps) = (0, 0);
    }
}

impl Choose for Sidco {
    const FIXED: bool = false;

    fn most(&self) -> usize {
        self.n
    }

    fn choose(&mut self, x: &[f32], context: &Context, selection: &mut Selection) -> Result<Stats, EncodeError> {
        let stats = context.stats(x)?;
        if x.is_empty() {
            return Ok(stats);
        }
        if self.k == self.n {
            selection.indices.extend(0..self.n as u32);
            selection.values.extend_from_slice(x);
            return Ok(stats);
        }
        let mut threshold = threshold(Moments::of(context.kernel, x, 0.0), self.fit, self.share(1)) as f32;
        let above = key(threshold);
        context.kernel.run(Pick { x, selection, admits: |_, x| key(x) > above });
        for stage in 2..=self.stages {
            if selection.is_empty() {
                break;
            }
            let fit = if self.fit == Fit::Gamma { Fit::Pareto } else { self.fit };
            let excess = Moments::of(context.kernel, &selection.values, threshold);
            threshold += self::threshold(excess, fit, self.share(stage)) as f32;
            keep_above(selection, threshold);
        }
        self.adapt(selection.len());
        Ok(stats)
    }

    fn save(&self, out: &mut Writer) {
        out.u32(self.stages);
        out.u64(self.sent);
        out.u32(self.steps);
    }

    fn restore(&mut self, from: &mut Reader<'_>) -> Result<(), ReadError> {
        let (stages, sent, steps) = (from.u32("stages")?, from.u64("values sent")?, from.u32("steps")?);
        if stages == 0 || stages > self.most_stages || steps >= self.every {
            return Err(ReadError::field("stages", stages, "not of this strategy"));
        }
        if sent > u64::from(steps) * self.n as u64 {
            return Err(ReadError::field("values sent", sent, "no more than its steps have values"));
        }
        (self.stages, self.sent, self.steps) = (stages, sent, steps);
        Ok(())
    }
}

fn keep_above(selection: &mut Selection, threshold: f32) {
    let above = key(threshold);
    let mut kept = 0;
    for i in 0..selection.len() {
        selection.indices[kept] = selection.indices[i];
        selection.values[kept] = selection.values[i];
        kept += usize::from(key(selection.values[i]) > above);
    }
    selection.indices.truncate(kept);
    selection.values.truncate(kept);
}

/// The value that a share of |x| exceeds under the fit: above 0 and finite unless all moments are 0.
fn threshold(moments: Moments, fit: Fit, share: f64) -> f64 {
    // Section 2.3, corollary 1.1: beta = mean, eta = beta ln(1/delta).
    let exponential = -moments.mean() * share.ln();
    let fitted = match fit {
        Fit::Exponential => exponential,
        Fit::Gamma => gamma(moments, share),
        Fit::Pareto => pareto(moments, share),
    };
    let most = f64::from(f32::MAX);
    if fitted.is_finite() && fitted > 0.0 { fitted.min(most) } else { exponential.min(most) }
}

/// Corollary 1.2: shape and scale by the closed form of Minka, and the tail's leading term. The share is of all values;
/// the fit, which knows no zero, is of the others.
fn gamma(moments: Moments, share: f64) -> f64 {
    let nonzero = moments.nonzero as f64;
    let (mean, share) = (moments.sum / nonzero, share * moments.count as f64 / nonzero);
    let s = mean.ln() - moments.logs / nonzero;
    let shape = (3.0 - s + ((s - 3.0).powi(2) + 24.0 * s).sqrt()) / (12.0 * s);
    // Values that are all alike have no spread: s is 0 or, rounded, below it, and no shape fits.
    if !(shape > 0.0 && shape.is_finite()) {
        return f64::NAN;
    }
    let scale = mean / shape;
    -scale * (share.ln() + ln_gamma(shape))
}

/// Corollary 1.3: generalised Pareto by moments.
fn pareto(moments: Moments, share: f64) -> f64 {
    let mean = moments.mean();
    let variance = moments.squares / moments.count as f64 - mean * mean;
    let ratio = mean * mean / variance;
    let (shape, scale) = (0.5 * (1.0 - ratio), 0.5 * mean * (ratio + 1.0));
    if shape.abs() < 1e-9 { -scale * share.ln() } else { scale / shape * ((-shape * share.ln()).exp() - 1.0) }
}

/// ln Γ(x) for x above 0: Stirling's series from 8 on, the recurrence below.
fn ln_gamma(mut x: f64) -> f64 {
    let mut below = 0.0;
    while x < 8.0 {
        below += x.ln();
        x += 1.0;
    }
    let (inverse, half_ln_tau) = (1.0 / x, 0.918_938_533_204_672_8);
    let square = inverse * inverse;
    let series = inverse * (1.0 / 12.0 - square * (1.0 / 360.0 - square * (1.0 / 1260.0 - square / 1680.0)));
    (x - 0.5) * x.ln() - x + half_ln_tau + series - below
}

/// Of |x| − shift.
#[derive(Debug, Clone, Copy, Default)]
struct Moments {
    count: usize,
    sum: f64,
    squares: f64,
    /// Values that are no zero (nor denormal), and Σ ln |x| over these.
    nonzero: u64,
    logs: f64,
}

impl Moments {
    fn of(kernel: Kernel, x: &[f32], shift: f32) -> Self {
        kernel.run(Gather { x, shift: f64::from(shift) })
    }

    fn mean(&self) -> f64 {
        if self.count == 0 { 0.0 } else { self.sum / self.count as f64 }
    }
}

const LANES: usize = 8;

/// Products of so many mantissas, each below 2, are below 2^1000.
const PRODUCTS: usize = 1000 * LANES;

/// All moments in one read. Logarithms are added as exponents and products of mantissas.
struct Gather<'a> {
    x: &'a [f32],
    shift: f64,
}

impl Work<Moments> for Gather<'_> {
    #[inline(always)]
    fn run(self) -> Moments {
        let mut out = Moments { count: self.x.len(), ..Moments::default() };
        let (mut sums, mut squares) = ([0.0f64; LANES], [0.0f64; LANES]);
        for block in self.x.chunks(PRODUCTS) {
            let (mut products, mut exponents, mut nonzero) = ([1.0f64; LANES], [0i32; LANES], [0u32; LANES]);
            for chunk in block.chunks(LANES) {
                for (lane, value) in chunk.iter().enumerate() {
                    let wide = f64::from(value.abs()) - self.shift;
                    sums[lane] += wide;
                    squares[lane] += wide * wide;
                    let normal = u32::from(key(*value) >= 0x0080_0000);
                    nonzero[lane] += normal;
                    exponents[lane] += ((key(*value) >> 23) as i32 - 127) * normal as i32;
                    let mantissa =
                        if normal == 1 { (value.to_bits() & 0x007f_ffff) | 0x3f80_0000 } else { 0x3f80_0000 };
                    products[lane] *= f64::from(f32::from_bits(mantissa));
                }
            }
            for lane in 0..LANES {
                out.nonzero += u64::from(nonzero[lane]);
                out.logs += products[lane].ln() + f64::from(exponents[lane]) * std::f64::consts::LN_2;
            }
        }
        out.sum = sums.iter().sum();
        out.squares = squares.iter().sum();
        out
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn draws(n: u64, of: impl Fn(f64) -> f64) -> Vec<f32> {
        let stream = crate::random::Stream::new(4, [0; 4]);
        (0..n).map(|i| of(1.0 - stream.unit(i)) as f32 * if i % 2 == 0 { 1.0 } else { -1.0 }).collect()
    }

    #[test]
    fn known_values_of_ln_gamma() {
        for (x, want) in
            [(1.0, 0.0), (2.0, 0.0), (0.5, 0.572_364_942_924_700_1), (5.0, 24f64.ln()), (0.1, 2.252_712_651_734_206)]
        {
            assert!((ln_gamma(x) - want).abs() < 1e-10, "{x}");
        }
    }

    #[test]
    fn moments_are_those_of_plain_loops() {
        let x = draws(20_003, |u| -u.ln());
        let want = |f: &dyn Fn(f64) -> f64| x.iter().map(|v| f(f64::from(v.abs()))).sum::<f64>();
        for kernel in Kernel::available() {
            let moments = Moments::of(kernel, &x, 0.25);
            let close = |a: f64, b: f64| (a - b).abs() < 1e-9 * b.abs();
            assert!(close(moments.sum, want(&|v| v - 0.25)) && close(moments.squares, want(&|v| (v - 0.25).powi(2))));
            assert!(close(moments.logs, want(&f64::ln)) && moments.nonzero == 20_003);
        }
    }

    /// Rounding takes the spread of equal values below 0, where the gamma fit has no shape.
    #[test]
    fn equal_values_have_a_threshold() {
        for value in [1e-37f32, 3e-20, 0.1, 0.7, 3.3, 1e9, 1e30] {
            for n in [1, 3, 7, 100, 1001] {
                let moments = Moments::of(Kernel::Portable, &vec![value; n], 0.0);
                for fit in [Fit::Exponential, Fit::Gamma, Fit::Pareto] {
                    let eta = threshold(moments, fit, 0.01);
                    assert!(eta.is_finite() && eta >= 0.0, "{fit:?} of {n} times {value}: {eta}");
                }
            }
        }
    }

    /// Each fit finds the quantile of its own distribution: the share that exceeds it is within a tenth.
    #[test]
    fn fits_find_their_own_quantiles() {
        let shape = 0.2;
        let cases: [(Fit, Vec<f32>); 3] = [
            (Fit::Exponential, draws(200_000, |u| -3.0 * u.ln())),
            (Fit::Gamma, draws(200_000, |u| -0.5 * u.ln())),
            (Fit::Pareto, draws(200_000, |u| (u.powf(-shape) - 1.0) / shape)),
        ];
        for (fit, x) in cases {
            for share in [0.25, 0.05, 0.01] {
                let eta = threshold(Moments::of(Kernel::Portable, &x, 0.0), fit, share);
                let got = x.iter().filter(|v| f64::from(v.abs()) > eta).count() as f64 / x.len() as f64;
                assert!((got / share - 1.0).abs() < 0.1, "{fit:?} at {share}: {got}");
            }
        }
    }
}
