//! Gains of shadow trials: residuals that have grown.

use crate::common::{Job, learn, profile};
use flexcomm_domain::{Decision, Strategy, Timestamp, Version};
use flexcomm_planner::InForce;

/// In force under a live trial's profile that keeps far less than it said.
fn biased() -> Job {
    let mut job = Job::new();
    job.call();
    let said = job.s.profiles.by_selector[&job.strategy().selector()].gain(job.strategy().cr()).get();
    job.wait(600.0);
    job.measure(0.03, 0.004, 0.002, said * said);
    job.call();
    assert!(!job.s.memory.bias.is_empty());
    job
}

#[test]
fn what_a_trial_flattered_is_not_taken_off_twice() {
    let mut job = biased();
    // The shadows say what the steps in force have shown.
    learn(&mut job.s, profile(0.24, 0.004));
    job.s.profiles.measured_at = Some(Timestamp(2));
    job.s.profiles.long_run = true;
    let measured = job.s.measured.take();
    job.call();
    assert!(job.s.memory.bias.iter().all(|b| (b.power - 1.0).abs() < 0.1), "{:?}", job.s.memory.bias);
    job.s.measured = measured;
    job.call();
    assert!(job.s.memory.bias.iter().all(|b| (b.power - 1.0).abs() < 0.1), "{:?}", job.s.memory.bias);
}

/// Shadows of some steps overrate too, where a residual takes longer to grow: what the settled steps showed stays known.
#[test]
fn what_settled_steps_have_shown_outlives_shadows_that_still_flatter() {
    let mut job = biased();
    let (selector, cr) = (job.strategy().selector(), job.strategy().cr());
    let shown = job.s.memory.bias[0].shown.get();
    job.s.measured = None;
    learn(&mut job.s, profile(0.18, 0.004));
    job.s.profiles.measured_at = Some(Timestamp(2));
    job.s.profiles.long_run = true;
    job.call();
    let bias = job.s.memory.bias.iter().find(|b| b.selector == selector && b.cr == cr).unwrap();
    let said = job.s.profiles.by_selector[&selector].gain(cr).get();
    assert!((said.powf(bias.power) / shown - 1.0).abs() < 1e-6, "{bias:?}: said {said}, shown {shown}");
}

/// Only rank 0's shadows answer there, and AR-Topk has none.
#[test]
fn a_job_without_live_trials_is_not_asked_for_what_only_they_can_tell() {
    for tried_at in [None, Some(Timestamp(1))] {
        let mut job = Job::new();
        job.s.profiles.by_selector.remove(&"topk:star".parse().unwrap());
        job.s.profiles.tried_at = tried_at;
        assert_eq!(job.call().trial.is_some(), tried_at.is_some());
    }
}

#[test]
fn a_gain_that_drifts_asks_for_no_trial_once_shadows_have_spoken() {
    for long_run in [false, true] {
        let mut job = Job::new();
        job.s.profiles.long_run = long_run;
        job.call();
        let said = job.s.profiles.by_selector[&job.strategy().selector()].gain(job.strategy().cr()).get();
        job.wait(100.0);
        job.measure(0.03, 0.004, 0.002, said);
        job.call();
        job.wait(100.0);
        job.measure(0.03, 0.004, 0.002, said * 0.7);
        assert_eq!(job.call().trial.is_some(), !long_run);
    }
}

/// What the steps in force have shown of all ratios is still known when another one takes over, whose residual is fresh.
#[test]
fn a_change_forgets_no_drift() {
    let mut job = Job::new();
    job.call();
    let said = job.s.profiles.by_selector[&job.strategy().selector()].gain(job.strategy().cr()).get();
    for shown in [said, said.powi(2)] {
        job.wait(600.0);
        job.measure(0.03, 0.004, 0.002, shown);
        job.call();
    }
    job.wait(600.0);
    job.network(0.001, 0.1e9);
    let change = job.call();
    assert!(change.decision().is_some(), "{}", change.report.why);
    let after = job.call();
    let gains = |o: &flexcomm_planner::Outcome| -> Vec<(String, f64)> {
        let all = o.report.alternatives.iter().map(|a| (a.strategy.to_string(), a.gain.get()));
        std::collections::BTreeMap::from_iter(all).into_iter().collect()
    };
    for ((name, before), (_, after)) in gains(&change).into_iter().zip(gains(&after)) {
        assert!((before / after - 1.0).abs() < 1e-9, "{name}: {before}, then {after}");
    }
}

fn gain_of(outcome: &flexcomm_planner::Outcome, strategy: &Strategy) -> f64 {
    outcome.report.alternatives.iter().find(|a| a.strategy == *strategy).unwrap().gain.get()
}

/// What is left before its residual has settled, since it keeps less than a trial measured, is not priced by that trial again.
#[test]
fn what_steps_show_before_they_settle_is_remembered_and_only_more_raises_it() {
    let mut job = Job::new();
    job.network(0.001, 0.6e9);
    job.call();
    let left = job.strategy();
    let p = job.call().report.in_force.unwrap();
    let kept = |power: f64| p.gain.get().powf(power);
    job.s.memory.dwell_from = Some(job.now);
    for (shown, known) in [(1.4, 1.4), (2.2, 2.2), (1.8, 2.2)] {
        job.wait(0.2);
        job.measure(p.t_step_s, p.t_comp_s, p.t_sync_s, kept(shown));
        let gain = gain_of(&job.call(), &left);
        assert!((gain / kept(known) - 1.0).abs() < 1e-9, "{gain} after {shown}, expected {}", kept(known));
    }
    job.s.measured = None;
    job.network(0.001, 25e9);
    job.wait(60.0);
    job.call();
    assert_ne!(job.strategy(), left);
    assert!((gain_of(&job.call(), &left) / kept(2.2) - 1.0).abs() < 1e-9);
    // Back, what its first settled steps show counts.
    job.s.in_force.as_mut().unwrap().decision.strategy = left;
    job.wait(600.0);
    job.measure(p.t_step_s, p.t_comp_s, p.t_sync_s, kept(1.6));
    let gain = gain_of(&job.call(), &left);
    assert!((gain / kept(1.6) - 1.0).abs() < 1e-9, "{gain}, expected {}", kept(1.6));
}

/// One rank that selects for all is assumed to keep less than ranks for themselves; its own steps know better.
#[test]
fn what_steps_keep_of_what_no_trial_has_measured_is_known() {
    let mut job = Job::new();
    job.s.profiles.by_selector.remove(&"topk:star".parse().unwrap());
    let outcome = job.call();
    let of_star = |s: &Strategy| s.selector() == "topk:star".parse().unwrap() && s.cr().get() == 0.011;
    let ran = outcome.report.alternatives.iter().map(|a| a.strategy).find(of_star).expect("it is assumed");
    let assumed = gain_of(&outcome, &ran);
    let (version, parent, decided_at) = (Version(1), Version(0), job.now);
    let decision =
        Decision { job: job.s.job.clone(), version, parent, strategy: ran, decided_at, reason: "to see".into() };
    job.s.in_force = Some(InForce { decision, applied_at_step: Some(1) });
    let in_force = job.s.in_force.clone();
    let p = job.call().report.in_force.unwrap();
    for (shown, known) in [(assumed.powf(1.5), assumed.powf(1.5)), (assumed.powf(0.5), assumed)] {
        job.wait(600.0);
        job.s.in_force.clone_from(&in_force);
        job.measure(p.t_step_s, p.t_comp_s, p.t_sync_s, shown);
        let gain = gain_of(&job.call(), &ran);
        assert!((gain / known - 1.0).abs() < 1e-9, "{gain}, expected {known}");
    }
}
