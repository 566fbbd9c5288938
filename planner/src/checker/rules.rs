//! Who may follow whom, what may be chosen, when, and whether a rollback has a reason.

use super::{Findings, TOLERANCE, costs};
use crate::memory::Blocked;
use crate::{Measured, Outcome, PolicyConfig, Snapshot};
use flexcomm_domain::{Decision, Digest, Selection, Strategy, Timestamp};

/// Longest reason: it is a sentence.
const MAX_REASON: usize = 2000;

pub(super) fn identity(s: &Snapshot, d: &Decision, now: Timestamp, found: &mut Findings) {
    let current = s.in_force.as_ref().map_or(0, |f| f.decision.version.0).max(s.earlier.0);
    found.expect(d.job == s.job, "job", || format!("decision of job {} for job {}", d.job, s.job));
    found.expect(d.parent.0 == current, "parent", || format!("parent {} but {current} is in force", d.parent));
    found.expect(d.version.0 == d.parent.0.saturating_add(1) && d.version.0 > current, "version", || {
        format!("version {} after parent {} and current {current}", d.version, d.parent)
    });
    let digest = Digest::of(&canonical(&d.strategy));
    found.expect(d.digest() == digest, "digest", || format!("{} is not the digest of {}", d.digest(), d.strategy));
    found.expect(d.decided_at == now, "report", || format!("decided at {} but now is {}", d.decided_at.0, now.0));
    let sentence = (1..=MAX_REASON).contains(&d.reason.len());
    found.expect(sentence, "report", || format!("a reason of {} characters", d.reason.len()));
    let same = s.in_force.as_ref().is_some_and(|f| f.decision.strategy == d.strategy);
    found.expect(!same, "no-change", || format!("{} is in force already", d.strategy));
}

/// The text that ranks hash, written from the parts.
fn canonical(s: &Strategy) -> String {
    let selection = match s.selection() {
        Some(Selection::Star) => ":star",
        Some(Selection::Var) => ":var",
        None => "",
    };
    format!("{}/{}{selection}", s.spec(), s.collective().as_str())
}

pub(super) fn offered(s: &Snapshot, d: &Decision, found: &mut Findings) {
    let x = &d.strategy;
    let has_dense = s.offer.collectives.iter().any(|c| c.is_allreduce());
    // Every job can fall back to dense-ring when it names no dense collective.
    let known = s.offer.collectives.contains(&x.collective()) || (x.is_dense() && !has_dense);
    found.expect(known, "offered", || format!("the job cannot run {}", x.collective()));
    if x.is_dense() {
        return;
    }
    found.expect(may_run(s, x), "offered", || format!("the job has no {}, or it is not allowed", x.family()));
    let ratio = x.spec().ratio().is_none_or(|cr| s.config.crs.contains(&cr));
    found.expect(ratio, "offered", || format!("CR {} is not a candidate", x.cr()));
    found.expect(s.ranks >= 2, "offered", || format!("{x} with a single rank"));
}

/// Whether the job has the compressor, and policy and settings allow it.
pub(super) fn may_run(s: &Snapshot, x: &Strategy) -> bool {
    let (family, spec) = (x.family(), x.spec());
    let enabled = s.config.compressors.as_ref().is_none_or(|only| only.iter().any(|x| x.covers(&family)));
    let kind = s.kinds.as_ref().is_none_or(|only| only.iter().any(|kind| kind.name() == family.name()));
    let sound = spec.memory().is_some() || !spec.is_biased_without_memory() || s.config.biased_without_memory;
    let named = s.kinds.is_some() || s.config.compressors.is_some() || !s.offer.on_request.contains(&family);
    s.offer.codecs.contains_key(&family) && enabled && kind && sound && named
}

pub(super) fn timing(s: &Snapshot, outcome: &Outcome, now: Timestamp, found: &mut Findings) {
    let Some(links) = &s.links else {
        return found.expect(false, "links", || "decided without links".into());
    };
    let most = s.config.max_link_age_s.get();
    let tried = s.profiles.measured_at.map_or(f64::INFINITY, |at| now.since(at).get());
    let sure = links.confidence >= s.config.least_confidence || s.in_force.is_none() && tried <= most;
    let fresh = links.age.get() <= most && sure;
    found.expect(fresh || outcome.report.rollback, "links", || {
        format!("links {} old with confidence {}", links.age, links.confidence)
    });
    if outcome.report.rollback {
        return;
    }
    let chosen = outcome.report.chosen;
    let may_end = |b: &&Blocked| moved_since(s, b, now);
    let blocked = s.memory.blocked.iter().any(|b| b.until > now && b.covers(&chosen) && !may_end(&b));
    found.expect(!blocked, "blocked", || format!("{chosen} was rolled back and may not return yet"));
    let Some(current) = &s.in_force else { return };
    let from = s.memory.dwell_from.unwrap_or(current.decision.decided_at);
    let passed = now.0.saturating_sub(from.0) as f64 * 1e-6;
    let dwell = s.config.dwell_s.get();
    let last = s.memory.blocked.iter().find(|b| b.at == from);
    let version = Some(current.decision.version);
    let measured = s.memory.assumed == version && s.profiles.measured_at.is_some();
    let waived = s.memory.dwell_waived == version || measured || last.as_ref().is_some_and(may_end);
    found.expect(passed >= dwell || waived, "dwell", || {
        format!("{passed} s after the last decision, least is {dwell} s")
    });
    let Some(moving) = &outcome.memory.moving else { return };
    let since = |then: Timestamp| now.0.saturating_sub(then.0) as f64 * 1e-6;
    let (ago, settle) = (since(moving.until), s.config.links_settle_s.get());
    let steady = ago >= settle || since(moving.since) >= 5.0 * settle;
    found.expect(steady, "steady", || format!("links moved {ago} s ago, least is {settle} s"));
}

/// Whether the links have moved since a strategy was rolled back, so that its block may end before its time: by a factor of
/// two, or by what counts as a change for as long as news of the links may come late.
fn moved_since(s: &Snapshot, b: &Blocked, now: Timestamp) -> bool {
    let (Some(before), Some(links)) = (b.evidence.map(|e| e.links), &s.links) else { return false };
    let late = now.0.saturating_sub(b.at.0) as f64 * 1e-6 <= s.config.max_link_age_s.get();
    let least = if late { (1.0 + s.config.link_change).min(2.0) } else { 2.0 } * (1.0 - TOLERANCE);
    let factor = |a: f64, b: f64| a.max(b) / a.min(b);
    let latency = |a: f64, b: f64| factor(a, b) >= least && (a - b).abs() >= s.config.latency_floor_s.get();
    let (alpha, beta) = costs::means(&links.matrix);
    let ((_, worst_alpha), (_, worst_beta)) = costs::extremes(&links.matrix);
    latency(before.alpha_mean_s, alpha)
        || latency(before.alpha_worst_s, worst_alpha)
        || factor(8.0 / before.bandwidth_mean_bps, beta) >= least
        || factor(8.0 / before.bandwidth_worst_bps, worst_beta) >= least
}

/// A rollback needs measured steps that are worse than the model, than dense or than what they were chosen for.
pub(super) fn evidence(s: &Snapshot, outcome: &Outcome, found: &mut Findings) {
    if !outcome.report.rollback {
        return;
    }
    let Some(current) = &s.in_force else {
        return found.expect(false, "rollback", || "nothing to roll back from".into());
    };
    let measured = s.measured.filter(|m| m.version == current.decision.version && m.steps >= s.config.least_steps);
    let Some(m) = measured.filter(|_| current.applied_at_step.is_some()) else {
        return found.expect(false, "rollback", || "without enough measured steps under the decision in force".into());
    };
    let strategy = &current.decision.strategy;
    let holds = slower_than_model(s, strategy, &m)
        || worse_than_dense(s, outcome, (strategy, &m))
        || keeps_less_than_promised(s, strategy, &m);
    let what = || format!("{} per step at gain {} is no reason to roll back", m.t_step, m.gain.get());
    found.expect(holds, "rollback", what);
}

fn slower_than_model(s: &Snapshot, strategy: &Strategy, m: &Measured) -> bool {
    let Some(links) = &s.links else { return false };
    let t_sync = costs::sync(s, strategy, &links.matrix);
    // At the optimistic end of the model, so that no doubt remains only where links are equal.
    let compute = s.compute.map_or(0.0, |c| c.get());
    m.t_step.get() > costs::step(compute, t_sync.low, s.overlap) * (1.0 + s.config.guard_margin)
}

fn worse_than_dense(s: &Snapshot, outcome: &Outcome, (strategy, m): (&Strategy, &Measured)) -> bool {
    let dense = outcome.report.alternatives.iter().filter(|a| a.strategy.is_dense());
    let seen = s.memory.seen.iter().filter(|x| x.strategy.is_dense()).map(|x| x.cost.t_step.get());
    let fastest = dense.map(|a| a.t_step_s).chain(seen).fold(f64::INFINITY, f64::min);
    costs::worth(s, strategy, (m.t_step.get(), m.gain.get()), exponent(s)) > fastest
}

fn keeps_less_than_promised(s: &Snapshot, strategy: &Strategy, m: &Measured) -> bool {
    let Some(promise) = s.memory.promise.filter(|p| p.version == m.version) else { return false };
    let worth = |gain: f64| costs::worth(s, strategy, (m.t_step.get(), gain), exponent(s));
    worth(m.gain.get()) > worth(promise.gain.get()) * (1.0 + s.config.guard_dense_margin - TOLERANCE)
}

/// p of gain^-p by which the guard counts what compression delays.
fn exponent(s: &Snapshot) -> f64 {
    match &s.config.policy {
        PolicyConfig::TimeToQuality(policy) => policy.exponent(),
        // That of an optimizer whose momentum is not known.
        PolicyConfig::Knee(_) | PolicyConfig::Weights(_) => 0.24,
    }
}
