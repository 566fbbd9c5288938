//! Whether the report's numbers are numbers, follow from the inputs, and justify the change.

use super::{Findings, TOLERANCE, costs, rules};
use crate::memory::Drift;
use crate::{Alternative, MAX_TRIAL_CANDIDATES, Outcome, PolicyConfig, Scatter, Snapshot};
use flexcomm_domain::{CompressionRatio, Decision, Family, Selector, Strategy, Version};
use flexcomm_optimizer::ProfilePoint;

pub(super) fn finite(outcome: &Outcome, found: &mut Findings) {
    let r = &outcome.report;
    let all = r.alternatives.iter().chain(&r.in_force).chain(&r.best);
    for a in all {
        let numbers = [a.t_comp_s, a.t_sync_s, a.t_step_s, a.gain.get(), a.terms.alpha_s, a.terms.beta_s];
        let ok = numbers.iter().chain(&a.score).all(|v| v.is_finite() && *v >= 0.0);
        found.expect(ok, "finite", || format!("{}: {numbers:?}, score {:?}", a.strategy, a.score));
    }
    found.expect(!r.why.is_empty(), "report", || "no reason is given".into());
    let deferred = outcome.memory.deferred.as_ref().map(|h| h.margin);
    let remembered = [outcome.memory.predicted_step_s, outcome.memory.link_noise, deferred];
    let ok = remembered.iter().flatten().all(|v| v.is_finite());
    found.expect(ok, "finite", || format!("remembered {remembered:?}"));
}

pub(super) fn trial(s: &Snapshot, outcome: &Outcome, found: &mut Findings) {
    let Some(trial) = &outcome.trial else { return };
    let count = trial.candidates.len();
    found.expect((1..=MAX_TRIAL_CANDIDATES).contains(&count), "trial", || format!("{count} candidates"));
    for c in &trial.candidates {
        let offered = rules::may_run(s, c) && s.offer.collectives.contains(&c.collective());
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
        found.expect(t.holds(a.model_sync_s), "time", || {
            format!("{}: model's t_sync {} s, recomputed {} to {} s", a.strategy, a.model_sync_s, t.low, t.high)
        });
        let steps = scatter(s).filter(|_| a.strategy == in_force(s));
        let measured = |t: f64, low: f64, high: f64| t >= low * (1.0 - TOLERANCE) && t <= high * (1.0 + TOLERANCE);
        let by_steps = steps.is_some_and(|x| measured(a.t_sync_s, x.sync_low.get(), x.sync_high.get()));
        let (least, most) = costs::factors(s, outcome);
        found.expect(by_steps || measured(a.t_sync_s, least * a.model_sync_s, most * a.model_sync_s), "time", || {
            format!("{}: t_sync {} s, by the job's steps {least} to {most} of the model's", a.strategy, a.t_sync_s)
        });
        let step = costs::step(s.compute.map_or(0.0, |c| c.get()), a.t_comp_s + a.t_sync_s, s.overlap);
        let by_steps = steps.is_some_and(|x| measured(a.t_step_s, x.step_low.get(), x.step_high.get()));
        found.expect(by_steps || (a.t_step_s - step).abs() <= TOLERANCE * step + 1e-12, "time", || {
            format!("{}: t_step {} s, recomputed {step} s", a.strategy, a.t_step_s)
        });
        profile(s, outcome, a, found);
    }
}

fn in_force(s: &Snapshot) -> Strategy {
    s.in_force.as_ref().map_or(Strategy::DENSE_RING, |f| f.decision.strategy)
}

/// Between which times the newest steps of what is in force lie.
fn scatter(s: &Snapshot) -> Option<Scatter> {
    let version = s.in_force.as_ref().map_or(Version(0), |f| f.decision.version);
    s.measured.filter(|m| m.version == version).and_then(|m| m.scatter)
}

/// Between which times the measured points put a ratio: the extremes among them; beyond the outermost, where time grows with the
/// ratio and never faster than in proportion to it, from that point's time to so many times it.
fn bounds(points: &[ProfilePoint], ratio: f64) -> (f64, f64) {
    let (least, most) = (f64::INFINITY, 0.0);
    let tried = || points.iter().filter(|p| !p.cr.is_dense());
    let (low, high) = (tried().next(), tried().next_back());
    let beyond = low.filter(|p| ratio < p.cr.get()).or(high.filter(|p| ratio > p.cr.get()));
    match beyond {
        Some(p) => {
            let times = ratio / p.cr.get();
            (p.t_comp_s * times.min(1.0), p.t_comp_s * times.max(1.0))
        }
        None => points.iter().fold((least, most), |(l, m), p| (p.t_comp_s.min(l), p.t_comp_s.max(m))),
    }
}

/// Compression time and gain against the measured points: equal where the ratio was measured and the
/// points rise as they must, else between the extremes.
fn profile(s: &Snapshot, outcome: &Outcome, a: &Alternative, found: &mut Findings) {
    let (t, gain) = (a.t_comp_s, a.gain.get());
    if a.strategy.is_dense() {
        return found.expect(t == 0.0 && gain == 1.0, "time", || format!("dense takes {t} s and keeps {gain}"));
    }
    let noise = costs::noise(s, &a.strategy, gain);
    found
        .expect(a.variance == noise, "time", || format!("{}: variance {}, recomputed {noise}", a.strategy, a.variance));
    let own = outcome.memory.seen.iter().any(|x| x.strategy == a.strategy && x.cost.t_comp.get() == t);
    let Some(profile) = s.profiles.by_selector.get(&a.strategy.selector()) else { return };
    let points = profile.points();
    let (least, most) = bounds(points, a.strategy.cr().get());
    let between = t >= least * (1.0 - TOLERANCE) && t <= most * (1.0 + TOLERANCE);
    found.expect(own || between, "time", || {
        format!("{}: t_comp {t} s, by what was measured {least} to {most} s", a.strategy)
    });
    let expected: Vec<f64> = points.iter().map(|p| corrected(s, outcome, a, p)).collect();
    let rising = expected.windows(2).all(|w| w[0] <= w[1]);
    let exact = points.iter().position(|p| p.cr == a.strategy.cr()).filter(|_| rising);
    if let Some(expected) = exact.map(|i| expected[i]) {
        let same = (expected - gain).abs() <= TOLERANCE;
        found.expect(same, "time", || format!("{}: gain {gain}, expected {expected}", a.strategy));
    }
}

/// A trial's gain at a point, to the power that the remembered biases and the gain in force demand.
fn corrected(s: &Snapshot, outcome: &Outcome, a: &Alternative, p: &ProfilePoint) -> f64 {
    let current = in_force(s);
    let powers = known(outcome, [a.strategy.selector(), current.selector()]);
    let drift = match s.profiles.by_selector.contains_key(&current.selector()) {
        true if alike(a.strategy.selector(), current.selector()) => {
            let in_force = outcome.report.seen.gain_correction.unwrap_or(1.0);
            in_force / at(&known(outcome, [current.selector()]), current.cr().get().ln())
        }
        _ => remembered_drift(s, outcome, a.strategy.selector()),
    };
    p.gain.get().powf((at(&powers, p.cr.get().ln()) * drift).clamp(1.0, 10.0))
}

/// Ratios of selections lose alike; what keeps no share of the values is like itself alone.
fn alike(one: Selector, other: Selector) -> bool {
    let curve = |selector: Selector| selector.family.any().ratio().is_some();
    let memory = |selector: Selector| selector.family.any().memory().is_some();
    one == other || curve(one) && curve(other) && memory(one) == memory(other)
}

/// The book of the first selector of which something is remembered, or else of the one remembered last.
fn known<const N: usize>(outcome: &Outcome, wanted: [Selector; N]) -> Vec<(f64, f64)> {
    let last = outcome.memory.bias.last().map(|b| b.selector);
    let of = wanted.into_iter().chain(last).filter(|other| alike(wanted[0], *other));
    let books = of.map(|selector| book(outcome, selector));
    books.into_iter().find(|book| !book.is_empty()).unwrap_or_default()
}

/// How gains have moved under this profile, of which the strategy in force may show nothing yet.
fn remembered_drift(s: &Snapshot, outcome: &Outcome, selector: Selector) -> f64 {
    let same = |d: &Drift| d.profile_at == s.profiles.measured_at && alike(d.selector, selector);
    outcome.memory.drift.filter(same).map_or(1.0, |d| d.power)
}

/// (ln CR, power) as remembered of a selector, by rising ratio.
fn book(outcome: &Outcome, selector: Selector) -> Vec<(f64, f64)> {
    let of = outcome.memory.bias.iter().filter(|b| b.selector == selector);
    // At dense there is no residual and nothing to overrate.
    let mut known: Vec<(f64, f64)> = of.map(|b| (b.cr.get().ln(), b.power)).collect();
    if !known.is_empty() {
        known.push((0.0, 1.0));
    }
    known.sort_by(|a, b| a.0.total_cmp(&b.0));
    known
}

/// A broken line through points of rising x, flat beyond its ends; 1 without points.
fn at(points: &[(f64, f64)], x: f64) -> f64 {
    let after = points.partition_point(|p| p.0 < x);
    match (after.checked_sub(1).map(|i| points[i]), points.get(after)) {
        (None, None) => 1.0,
        (Some((_, y)), None) => y,
        (None, Some((_, y))) => *y,
        (Some((x0, y0)), Some((x1, y1))) => y0 + (y1 - y0) * (x - x0) / (x1 - x0),
    }
}

/// The power claimed for the ratio in force must be what its settled steps show of the trial, or what was remembered.
pub(super) fn power(s: &Snapshot, outcome: &Outcome, found: &mut Findings) {
    let (Some(claimed), Some(current)) = (outcome.report.seen.gain_correction, &s.in_force) else { return };
    let strategy = current.decision.strategy;
    let Some(profile) = s.profiles.by_selector.get(&strategy.selector()) else {
        return found.expect(false, "time", || format!("a power of {claimed} without a profile"));
    };
    let said = profile.gain(strategy.cr()).get();
    let measured = s.measured.filter(|m| m.version == current.decision.version && m.steps >= s.config.least_steps);
    let shown = measured.map(|m| (m.gain.get().ln() / said.ln()).clamp(1.0, 10.0));
    let close = |a: f64, b: f64| (a - b).abs() <= TOLERANCE * b.abs() + 1e-12;
    let remembered = at(&known(outcome, [strategy.selector()]), strategy.cr().get().ln());
    let drifted = (remembered * remembered_drift(s, outcome, strategy.selector())).clamp(1.0, 10.0);
    let holds = [shown, Some(remembered), Some(drifted)].into_iter().flatten().any(|power| close(claimed, power));
    found.expect(holds, "time", || format!("gains are taken to the power {claimed}, shown is {shown:?}"));
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
    if effective(before) < policy.gain_floor {
        return;
    }
    let worth = |a: &Alternative| costs::worth(s, &a.strategy, (a.t_step_s, a.gain.get()), policy.exponent());
    found.expect(worth(chosen) < worth(before), "worse", || {
        format!("{} s for a dense step's progress, the one in force {} s", worth(chosen), worth(before))
    });
}

/// What counts against a floor: of an unbiased compressor without error feedback its noise.
fn effective(a: &Alternative) -> f64 {
    match a.strategy.spec().memory() {
        _ if a.variance > 0.0 => 1.0 / (1.0 + a.variance),
        Some(_) => a.gain.get().powf(costs::kind(&a.strategy)),
        None => a.gain.get(),
    }
}

/// What is chosen anew keeps more than the floor by the margin, of the odds, as long as something else does.
pub(super) fn floor(s: &Snapshot, outcome: &Outcome, d: &Decision, found: &mut Findings) {
    let PolicyConfig::TimeToQuality(policy) = &s.config.policy else { return };
    let r = &outcome.report;
    let current = s.in_force.as_ref().map(|f| f.decision.strategy);
    let is_kept = current.is_some_and(|c| c.selector() == d.strategy.selector() && c.cr() == d.strategy.cr());
    let factor = if is_kept { 1.0 } else { 1.0 + s.config.gain_floor_margin };
    let clears = |a: &Alternative| {
        let (gain, least) = (effective(a), policy.gain_floor);
        gain * (1.0 - least) >= factor * least * (1.0 - gain) * (1.0 - TOLERANCE)
    };
    let chosen = r.alternatives.iter().find(|a| a.strategy == d.strategy);
    let otherwise = r.alternatives.iter().any(|a| !a.blocked && clears(a));
    let holds = !otherwise || chosen.is_some_and(clears);
    found.expect(holds, "floor", || format!("{} is too near to the floor of {}", d.strategy, policy.gain_floor));
}

/// A plan of buckets: one ratio each, all of them candidates, by what the job offers, with times that follow.
pub(super) fn buckets(s: &Snapshot, outcome: &Outcome, found: &mut Findings) {
    let Some(b) = &outcome.report.buckets else { return };
    let Some(links) = &s.links else {
        return found.expect(false, "links", || "a plan of buckets without links".into());
    };
    found.expect(b.crs.len() == s.buckets.len(), "buckets", || {
        format!("{} ratios for {}", b.crs.len(), s.buckets.len())
    });
    let dense = b.collective.is_allreduce();
    let known = |c: &CompressionRatio| if dense { c.get() == 1.0 } else { s.config.crs.contains(c) };
    found.expect(b.crs.iter().all(known), "buckets", || format!("ratios {:?} by {}", b.crs, b.collective));
    let offered = dense || s.offer.collectives.contains(&b.collective) && s.offer.codecs.contains_key(&b.compressor);
    found.expect(offered, "offered", || format!("the job cannot run {} by {}", b.compressor, b.collective));
    let selection = b.collective.is_art().then(|| s.config.selections[0]);
    let compressor = if dense { Family::NONE } else { b.compressor };
    let mut sum = costs::Range { low: 0.0, high: 0.0 };
    for (bucket, cr) in s.buckets.iter().zip(&b.crs) {
        let spec = compressor.at(*cr).ok();
        let Some(strategy) = spec.and_then(|spec| Strategy::new(spec, b.collective, selection).ok()) else {
            return found.expect(false, "buckets", || format!("{compressor} at {cr} by {}", b.collective));
        };
        let t = costs::sync_of(s, &strategy, bucket.values, &links.matrix);
        sum = costs::Range { low: sum.low + t.low, high: sum.high + t.high };
    }
    found.expect(sum.holds(b.t_sync_s), "time", || {
        format!("buckets: t_sync {} s, recomputed {} to {} s", b.t_sync_s, sum.low, sum.high)
    });
    let step = costs::step(s.compute.map_or(0.0, |c| c.get()), b.t_comp_s + b.t_sync_s, s.overlap);
    found.expect((b.t_step_s - step).abs() <= TOLERANCE * step + 1e-12, "time", || {
        format!("buckets: t_step {} s, recomputed {step} s", b.t_step_s)
    });
}
