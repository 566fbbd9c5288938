//! What plans cost by samples of what their strategies cost and keep.

use super::{LONGEST_S, Priced, compute, is_known, is_noisy, mean, median, quality};
use crate::{PolicyConfig, Snapshot};
use flexcomm_domain::{Gain, Plan, Seconds};
use flexcomm_estimation::{DRAWS, Quality};
use flexcomm_optimizer::Evaluated;
use std::borrow::Cow;

/// Samples of kinds of strategies.
pub(super) struct Sampled {
    /// One of each.
    of: Vec<Evaluated>,
    /// Seconds of forward and backward.
    compute_s: Vec<f64>,
    /// Seconds of compressing a whole gradient.
    comp: Samples,
    gains: Samples,
    /// Logarithm of the steps that make the progress of a dense one.
    log_steps: Samples,
    /// Those steps.
    steps: Vec<Vec<f64>>,
    /// Whether it adds more noise than [`MOST_VARIANCE`].
    noisy: Vec<bool>,
}

/// Samples of each kind, and their medians.
struct Samples {
    of: Vec<Vec<f64>>,
    medians: Vec<f64>,
}

impl Samples {
    fn new(of: Vec<Vec<f64>>) -> Self {
        let medians = of.iter().map(|samples| median(samples)).collect();
        Self { of, medians }
    }

    /// Those of a mixture of kinds by weight, and their median.
    fn mixed(&self, weights: &[f64]) -> (Cow<'_, [f64]>, f64) {
        if let Some(alone) = alone(weights) {
            return (Cow::Borrowed(&self.of[alone]), self.medians[alone]);
        }
        let mut all = vec![0.0; DRAWS];
        for (samples, weight) in self.of.iter().zip(weights).filter(|(_, weight)| **weight > 0.0) {
            all.iter_mut().zip(samples).for_each(|(sum, x)| *sum += weight * x);
        }
        let median = median(&all);
        (Cow::Owned(all), median)
    }
}

/// The kind that is all of a mixture.
fn alone(weights: &[f64]) -> Option<usize> {
    weights.iter().position(|weight| *weight >= 1.0)
}

impl Sampled {
    pub(super) fn new(
        s: &Snapshot,
        of: Vec<Evaluated>,
        (compute_s, comp): (Vec<f64>, Vec<Vec<f64>>),
        mut gains: Vec<Vec<f64>>,
    ) -> Self {
        let law = s.delay();
        let log_steps = |(e, gains): (&Evaluated, &mut Vec<f64>)| -> Vec<f64> {
            if is_known(&e.strategy) {
                gains.fill(e.gain.get());
                return vec![e.quality().log_steps(law); DRAWS];
            }
            let quality = quality(s, e);
            let by_factors = e.strategy.spec().rank().is_some();
            let steps = |gain: &f64| {
                let steps = quality(*gain).log_steps(law);
                // Factors of a matrix keep little of the gradient, most of which is noise. What they keep less than is usual is not
                // noise: a residual that another compressor has left, above all.
                match by_factors {
                    true => steps + law.log_steps((e.gain.get() / gain.clamp(1e-6, 1.0)).max(1.0).ln()),
                    false => steps,
                }
            };
            gains.iter().map(steps).collect()
        };
        let log_steps: Vec<Vec<f64>> = of.iter().zip(&mut gains).map(log_steps).collect();
        let steps = log_steps.iter().map(|all| all.iter().map(|log| log.exp()).collect()).collect();
        let [comp, gains, log_steps] = [comp, gains, log_steps].map(Samples::new);
        let noisy = of.iter().zip(&gains.medians).map(|(e, gain)| is_noisy(s, e, || *gain)).collect();
        Self { of, compute_s, comp, gains, log_steps, steps, noisy }
    }

    /// A plan, of which `last` is the last bucket's strategy, by the kinds' shares of the gradient's values and of its energy, whose
    /// steps wait for so long, in samples.
    pub(super) fn priced(
        &self,
        s: &Snapshot,
        (plan, last): (&Plan, &Evaluated),
        (values, energies): (&[f64], &[f64]),
        sync: &[f64],
    ) -> Priced {
        let compute_s = compute(s).median_s;
        let ((comp, comp_s), (gains, gain)) = (self.comp.mixed(values), self.gains.mixed(energies));
        let (logs, log_steps) = self.log_steps.mixed(energies);
        let steps: Cow<'_, [f64]> = match alone(energies) {
            Some(alone) => Cow::Borrowed(&self.steps[alone]),
            None => logs.iter().map(|log| log.exp()).collect(),
        };
        let seconds = |v: f64| Seconds::new(v.min(LONGEST_S)).unwrap_or(Seconds::ZERO);
        let quality = quality(s, last);
        let at = |compute_s: f64, comp: f64, sync: f64, gain: f64| {
            let t_step = seconds(compute_s + comp + sync);
            let what = Evaluated { t_comp: seconds(comp), t_sync: seconds(sync), t_step, ..last.clone() };
            match plan.alike() {
                Some(strategy) if is_known(strategy) => what,
                Some(_) => {
                    let Quality { gain, variance, .. } = quality(gain);
                    Evaluated { gain, variance, ..what }
                }
                None => {
                    Evaluated { gain: Gain::new(gain.clamp(1e-6, 1.0)).unwrap_or(Gain::FULL), variance: 0.0, ..what }
                }
            }
        };
        // Times that are hardly known are log-normal, and their mean is that of the tail.
        let what = at(compute_s, comp_s, median(sync), gain);
        // A bucket that keeps next to nothing is not made up for by those that keep all: policies judge by the mean in logarithms.
        let judged = |what: Evaluated, gain: &dyn Fn(usize) -> f64| match plan.alike() {
            Some(_) => what,
            None => Evaluated { gain: what.quality().least(-self.lost(s, energies, gain)), ..what },
        };
        // The median of a sum is about that of its parts.
        let expected = judged(what.clone(), &|kind| self.gains.medians[kind]);
        let noisy = self.noisy.iter().zip(energies).any(|(noisy, weight)| *noisy && *weight > 0.0);
        let limits = plan.is_dense()
            || !noisy && s.policy.admits(expected.quality().effective_gain(), [what.t_comp.get(), what.t_step.get()]);
        let policy = s.config.policy.policy();
        let admitted = limits && policy.score(&expected, seconds(compute_s)).is_some_and(f64::is_finite);
        let score = |k: usize| match &s.config.policy {
            // By far the most calls.
            PolicyConfig::TimeToQuality(_) => (self.compute_s[k] + comp[k] + sync[k]) * steps[k],
            _ => {
                let what = judged(at(self.compute_s[k], comp[k], sync[k], gains[k]), &|kind| self.gains.of[kind][k]);
                policy.score(&what, seconds(self.compute_s[k])).unwrap_or(f64::INFINITY)
            }
        };
        let scores: Vec<f64> = if admitted { (0..DRAWS).map(score).collect() } else { Vec::new() };
        let mean = if admitted { mean(&scores) } else { f64::INFINITY };
        Priced { plan: plan.clone(), objectives: expected.objectives(), mean, scores, what, log_steps }
    }

    /// Logarithm of 1/gain as policies see it, over kinds of these shares of the energy; `gain` says what a kind keeps.
    fn lost(&self, s: &Snapshot, energies: &[f64], gain: &dyn Fn(usize) -> f64) -> f64 {
        let of = |(kind, e): (usize, &Evaluated)| match is_known(&e.strategy) {
            true => e.quality().log_inverse_gain(),
            false => quality(s, e)(gain(kind)).log_inverse_gain(),
        };
        let kinds = self.of.iter().enumerate().zip(energies).filter(|(_, weight)| **weight > 0.0);
        kinds.map(|(kind, weight)| weight * of(kind)).sum()
    }
}
