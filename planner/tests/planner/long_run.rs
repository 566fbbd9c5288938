//! Gains of shadow trials: residuals that have grown.

use crate::common::{Job, learn, profile};
use flexcomm_domain::Timestamp;

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
