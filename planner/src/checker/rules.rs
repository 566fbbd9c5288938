//! Who may follow whom, what may be chosen and tried, and when.

use super::Findings;
use crate::{MAX_TRIAL_CANDIDATES, Outcome, Snapshot};
use flexcomm_domain::spec::MemoryKind;
use flexcomm_domain::{Decision, Digest, Plan, Selection, Strategy, Timestamp};

/// Longest reason: it is a sentence.
const MAX_REASON: usize = 2000;

pub(super) fn identity(s: &Snapshot, d: &Decision, now: Timestamp, found: &mut Findings) {
    let current = s.in_force.as_ref().map_or(0, |f| f.decision.version.0).max(s.earlier.0);
    found.expect(d.job == s.job, "job", || format!("decision of job {} for job {}", d.job, s.job));
    found.expect(d.parent.0 == current, "parent", || format!("parent {} but {current} is in force", d.parent));
    found.expect(d.version.0 == d.parent.0.saturating_add(1) && d.version.0 > current, "version", || {
        format!("version {} after parent {} and current {current}", d.version, d.parent)
    });
    let digest = Digest::of(&canonical(&d.plan));
    found.expect(d.digest() == digest, "digest", || format!("{} is not the digest of {}", d.digest(), d.plan));
    found.expect(d.decided_at == now, "report", || format!("decided at {} but now is {}", d.decided_at.0, now.0));
    let sentence = (1..=MAX_REASON).contains(&d.reason.len());
    found.expect(sentence, "report", || format!("a reason of {} characters", d.reason.len()));
    let same = s.in_force.as_ref().is_some_and(|f| f.decision.plan == d.plan);
    found.expect(!same, "no-change", || format!("{} is in force already", d.plan));
}

/// The text that ranks hash, written from the parts.
fn canonical(plan: &Plan) -> String {
    let mut runs: Vec<(usize, String)> = Vec::new();
    for s in plan.strategies() {
        let selection = match s.selection() {
            Some(Selection::Star) => ":star",
            Some(Selection::Var) => ":var",
            None => "",
        };
        let text = format!("{}/{}{selection}", s.spec(), s.collective().as_str());
        match runs.last_mut() {
            Some((count, last)) if *last == text => *count += 1,
            _ => runs.push((1, text)),
        }
    }
    let run = |(count, text): (usize, String)| if count > 1 { format!("{count}x {text}") } else { text };
    runs.into_iter().map(run).collect::<Vec<_>>().join(" | ")
}

/// All buckets' strategies are offered. One for all buckets has a candidate's ratio; by bucket any between the least and the largest.
pub(super) fn offered(s: &Snapshot, d: &Decision, found: &mut Findings) {
    let ratios = || s.config.crs.iter().map(|cr| cr.get());
    let (least, most) = (ratios().fold(1.0, f64::min), ratios().fold(0.0, f64::max));
    let by_bucket = d.plan.alike().is_none();
    for x in d.plan.strategies() {
        let has_dense = s.offer.collectives.iter().any(|c| c.is_allreduce());
        // Every job can fall back to dense-ring when it names no dense collective.
        let known = s.offer.collectives.contains(&x.collective()) || (x.is_dense() && !has_dense);
        found.expect(known, "offered", || format!("the job cannot run {}", x.collective()));
        if x.is_dense() {
            continue;
        }
        found.expect(may_run(s, x), "offered", || format!("the job has no {}, or it is not allowed", x.family()));
        let within = |cr: f64| by_bucket && (least..=most).contains(&cr);
        let ratio = x.spec().ratio().is_none_or(|cr| s.config.crs.contains(&cr) || within(cr.get()));
        found.expect(ratio, "offered", || format!("CR {} is not a candidate", x.cr()));
        found.expect(s.ranks >= 2, "offered", || format!("{x} with a single rank"));
    }
    let (named, buckets) = (d.plan.strategies().len(), s.buckets.len().max(1));
    found.expect(named <= buckets, "offered", || format!("a plan of {named} buckets for a job of {buckets}"));
    let own = |x: &Strategy| x.spec().memory().is_some_and(|(kind, _)| kind == MemoryKind::Dgc);
    let mixes = d.plan.strategies().iter().any(|x| own(x) != own(d.plan.last()));
    found.expect(!mixes, "offered", || format!("{} has an optimizer's momentum in some buckets only", d.plan));
}

/// Whether the job has the compressor, and policy and settings allow it.
pub(super) fn may_run(s: &Snapshot, x: &Strategy) -> bool {
    let (family, spec) = (x.family(), x.spec());
    let enabled = s.config.compressors.as_ref().is_none_or(|only| only.iter().any(|x| x.covers(&family)));
    let kind = s.policy.kinds.as_ref().is_none_or(|only| only.iter().any(|kind| kind.name() == family.name()));
    let sound = spec.memory().is_some() || !spec.is_biased_without_memory() || s.config.biased_without_memory;
    let named = s.policy.kinds.is_some() || s.config.compressors.is_some() || !s.offer.on_request.contains(&family);
    s.offer.codecs.contains_key(&family) && enabled && kind && sound && named
}

/// A change comes after the dwell time, and where the links are known; back to dense a job may go at any time. Where the clock has jumped
/// back, nothing is known of when the last decision was made. What is pinned waits only for the last decision to be in force.
pub(super) fn timing(s: &Snapshot, d: &Decision, now: Timestamp, pinned: bool, found: &mut Findings) {
    found.expect(pinned || s.links.is_some(), "links", || "decided without links".into());
    let Some(current) = s.in_force.as_ref().filter(|_| pinned || !d.plan.is_dense()) else { return };
    let from = current.decision.decided_at;
    let (passed_s, dwell_s) = (now.0.saturating_sub(from.0) as f64 * 1e-6, s.config.dwell_s.get());
    found.expect(pinned || now < from || passed_s >= dwell_s, "dwell", || {
        format!("{passed_s} s after the last decision, least is {dwell_s} s")
    });
    let timeout_s = s.config.apply_timeout_s.get();
    let applied = current.applied_at_step.is_some() || now < from || passed_s >= timeout_s;
    found.expect(applied, "applied", || format!("version {} is not in force yet", current.decision.version));
}

/// What follows a compressed plan under which the loss rose far beyond its noise is dense.
pub(super) fn loss(s: &Snapshot, d: &Decision, pinned: bool, found: &mut Findings) {
    let Some(current) = s.in_force.as_ref().filter(|f| !f.decision.plan.is_dense() && !pinned) else { return };
    let losses = s.losses.filter(|losses| losses.version == current.decision.version);
    let Some((before, newest)) = losses.and_then(|losses| Some((losses.before?, losses.newest))) else { return };
    let error = (before.sd.powi(2) + newest.sd.powi(2)).sqrt().max(1e-6);
    let rose = newest.mean - before.mean > 7.0 * error;
    found.expect(!rose || d.plan.is_dense(), "loss", || format!("{} though the loss rose to {}", d.plan, newest.mean));
}

/// A trial of what the job can run, within its budget.
pub(super) fn trial(s: &Snapshot, outcome: &Outcome, found: &mut Findings) {
    let Some(trial) = &outcome.trial else { return };
    let count = trial.candidates.len();
    found.expect((1..=MAX_TRIAL_CANDIDATES).contains(&count), "trial", || format!("{count} candidates"));
    for c in &trial.candidates {
        let offered = may_run(s, c) && s.offer.collectives.contains(&c.collective());
        found.expect(offered && !c.is_dense(), "trial", || format!("{c} is not offered or needs no trial"));
    }
    let within = trial.budget <= s.config.trial_budget_s && trial.iterations > 0;
    found.expect(within, "trial", || format!("{} iterations in {}", trial.iterations, trial.budget));
}
