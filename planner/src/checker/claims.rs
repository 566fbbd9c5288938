//! Whether the report's numbers are numbers, follow from the inputs, and justify the change.

use super::{Findings, TOLERANCE, costs};
use crate::{Alternative, MAX_TRIAL_CANDIDATES, Measured, Outcome, PolicyConfig, Snapshot};
use flexcomm_domain::Decision;

pub(super) fn finite(outcome: &Outcome, found: &mut Findings) {
    let r = &outcome.report;
    let all = r.alternatives.iter().chain(&r.in_force).chain(&r.best);
    for a in all {
        let numbers = [a.t_comp_s, a.t_sync_s, a.t_step_s, a.gain.get(), a.terms.alpha_s, a.terms.beta_s];
        let ok = numbers.iter().chain(&a.score).all(|v| v.is_finite() && *v >= 0.0);
        found.expect(ok, "finite", || format!("{}: {numbers:?}, score {:?}", a.strategy, a.score));
    }
    found.expect(!r.why.is_empty(), "report", || "no reason is given".into());
    let held = outcome.memory.held_back.as_ref().map(|h| h.margin);
    let remembered = [outcome.memory.predicted_step_s, outcome.memory.link_noise, held];
    let ok = remembered.iter().flatten().all(|v| v.is_finite());
    found.expect(ok, "finite", || format!("remembered {remembered:?}"));
}

pub(super) fn trial(s: &Snapshot, outcome: &Outcome, found: &mut Findings) {
    let Some(trial) = &outcome.trial else { return };
    let count = trial.candidates.len();
    found.expect((1..=MAX_TRIAL_CANDIDATES).contains(&count), "trial", || format!("{count} candidates"));
    for c in &trial.candidates {
        let offered = s.offer.codecs.contains_key(&c.compressor()) && s.offer.collectives.contains(&c.collective());
        found.expect(offered && !c.is_dense(), "trial", || format!("{c} is not offered or needs no trial"));
    }
    let within = trial.budget <= s.config.trial_budget_s && trial.iterations == s.config.trial_iterations;
    found.expect(within, "trial", || format!("{} iterations in {}", trial.iterations, trial.budget));
}

/// The chosen strategy's predicted times, recomputed.
pub(super) fn times(s: &Snapshot, outcome: &Outcome, d: &Decision, found: &mut Findings) {
    let Some(links) = &s.links else { return };
    let r = &outcome.report;
    found.expect(r.chosen == d.strategy, "report", || format!("reports {} but decides {}", r.chosen, d.strategy));
    let Some(a) = r.alternatives.iter().find(|a| a.strategy == d.strategy) else {
        return found.expect(false, "time", || format!("no predicted times for {}", d.strategy));
    };
    for a in [a].into_iter().chain(&r.in_force) {
        let t = costs::sync(s, &a.strategy, &links.matrix);
        found.expect(t.holds(a.t_sync_s), "time", || {
            format!("{}: t_sync {} s, recomputed {} to {} s", a.strategy, a.t_sync_s, t.low, t.high)
        });
        let step = costs::step(s.compute.map_or(0.0, |c| c.get()), a.t_comp_s + a.t_sync_s, s.overlap);
        found.expect((a.t_step_s - step).abs() <= TOLERANCE * step + 1e-12, "time", || {
            format!("{}: t_step {} s, recomputed {step} s", a.strategy, a.t_step_s)
        });
        profile(s, a, found);
    }
}

/// Compression time and gain against the measured points: equal where the ratio was measured and the
/// points rise as they must, else between the extremes.
fn profile(s: &Snapshot, a: &Alternative, found: &mut Findings) {
    let (t, gain) = (a.t_comp_s, a.gain.get());
    if a.strategy.is_dense() {
        return found.expect(t == 0.0 && gain == 1.0, "time", || format!("dense takes {t} s and keeps {gain}"));
    }
    let Some(profile) = s.profiles.by_compressor.get(&a.strategy.compressor()) else { return };
    let points = profile.points();
    let least = points.iter().map(|p| p.t_comp_s).fold(f64::INFINITY, f64::min);
    let most = points.iter().map(|p| p.t_comp_s).fold(0.0, f64::max);
    let between = t >= least * (1.0 - TOLERANCE) && t <= most * (1.0 + TOLERANCE);
    found.expect(between, "time", || format!("{}: t_comp {t} s, measured {least} to {most} s", a.strategy));
    let rising = points.windows(2).all(|w| w[0].gain <= w[1].gain);
    let exact = points.iter().find(|p| p.cr == a.strategy.cr()).filter(|_| rising);
    if let Some(p) = exact {
        let expected = corrected(s, p.gain.get());
        let same = (expected - gain).abs() <= TOLERANCE;
        found.expect(same, "time", || format!("{}: gain {gain}, expected {expected}", a.strategy));
    }
}

/// A trial's gain, to the power by which the gain in force has left what the trial said of it.
fn corrected(s: &Snapshot, gain: f64) -> f64 {
    let Some(current) = s.in_force.as_ref().map(|f| &f.decision) else { return gain };
    let fits = |m: &&Measured| m.version == current.version && m.steps >= s.config.least_steps;
    let (Some(m), Some(profile)) =
        (s.measured.as_ref().filter(fits), s.profiles.by_compressor.get(&current.strategy.compressor()))
    else {
        return gain;
    };
    let (said, is) = (profile.gain(current.strategy.cr()).get(), m.gain.get());
    let apart = said.max(is) / said.min(is) - 1.0 >= s.config.gain_change;
    if !apart || said >= 1.0 || is >= 1.0 {
        return gain;
    }
    gain.powf((is.ln() / said.ln()).clamp(0.1, 10.0))
}

/// A change must not be worse than what it replaces, nor than dense.
pub(super) fn worth(s: &Snapshot, outcome: &Outcome, d: &Decision, found: &mut Findings) {
    let r = &outcome.report;
    let chosen = r.alternatives.iter().find(|a| a.strategy == d.strategy);
    let (Some(chosen), false) = (chosen, r.rollback) else { return };
    let dense = r.alternatives.iter().filter(|a| a.strategy.is_dense() && !a.blocked);
    let dense = dense.map(|a| a.t_step_s).fold(f64::INFINITY, f64::min);
    let limit = dense * (1.0 + s.config.guard_dense_margin);
    found.expect(chosen.t_step_s <= limit, "dense", || {
        format!("{} takes {} s per step, dense {dense} s and loses nothing", d.strategy, chosen.t_step_s)
    });
    let Some(before) = r.in_force.as_ref().filter(|_| s.in_force.is_some()) else { return };
    let withdrawn = !r.alternatives.iter().any(|a| a.strategy == before.strategy);
    let (PolicyConfig::TimeToQuality(policy), false) = (&s.config.policy, withdrawn) else { return };
    if before.gain.get() < policy.gain_floor {
        return;
    }
    let per_gain = |a: &Alternative| a.t_step_s / a.gain.get();
    found.expect(per_gain(chosen) < per_gain(before), "worse", || {
        format!("{} s per unit of gain, the one in force {} s", per_gain(chosen), per_gain(before))
    });
}
