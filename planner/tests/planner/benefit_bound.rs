//! While dense runs a trial is asked for only where its answer could lead to a change.

use crate::common::{Job, profile};
use flexcomm_planner::{Keep, PolicyConfig, Verdict};
use proptest::prelude::{prop_assert_eq, proptest};

const ALPHA: f64 = 1e-5;
const GOOD: f64 = 1e13;
const BAD: f64 = 1e9;

fn unmeasured(bandwidth: f64) -> Job {
    let mut job = Job::new();
    job.s.profiles = Default::default();
    job.s.config.policy = PolicyConfig::default();
    job.network(ALPHA, bandwidth);
    job
}

#[test]
fn on_a_good_network_nothing_is_tried_until_it_is_bad() {
    let mut job = unmeasured(GOOD);
    let first = job.call();
    assert!(first.decision().unwrap().strategy.is_dense() && first.trial.is_none(), "{}", first.report.why);
    for _ in 0..60 {
        job.wait(120.0);
        assert_eq!(job.call().trial, None);
    }
    job.network(ALPHA, BAD);
    let moved = job.call();
    assert!(moved.trial.as_ref().is_some_and(|t| t.why.contains("topk")), "{}", moved.report.why);
    let assumed = moved.decision().expect("little is assumed to be kept, and that is enough here").strategy;
    assert!(!assumed.is_dense());
    // It need not dwell when a trial has told more.
    job.wait(1.0);
    job.answer(profile(0.01, 0.004));
    assert_ne!(job.call().decision().expect("little is lost").strategy, assumed);
}

#[test]
fn on_a_good_network_an_old_profile_is_not_renewed() {
    let mut job = unmeasured(GOOD);
    job.answer(profile(0.12, 0.004));
    job.call();
    assert!(job.strategy().is_dense());
    job.wait(4000.0);
    assert_eq!(job.call().trial, None);
    job.network(ALPHA, BAD);
    assert!(job.call().trial.is_some(), "an old profile on a bad network");
}

/// Half of what links look like while they move never was.
#[test]
fn a_first_trial_waits_until_links_are_steady() {
    let mut job = unmeasured(GOOD);
    job.s.config.links_settle_s = crate::common::seconds(2.0);
    job.call();
    job.wait(60.0);
    job.network(ALPHA, BAD);
    assert_eq!(job.call().trial, None);
    job.wait(2.0);
    assert!(job.call().trial.is_some());
}

/// Before any estimate, steps alone tell.
#[test]
fn without_links_the_steps_tell_whether_to_try() {
    let asked = |t_sync: f64, steps: u64| {
        let mut job = unmeasured(GOOD);
        job.s.links = None;
        job.measure(0.025 + t_sync, 0.0, t_sync, 1.0);
        job.s.measured.as_mut().unwrap().steps = steps;
        job.call().trial.is_some()
    };
    assert!(!asked(0.002, 50), "a tenth of a step is not to be won");
    assert!(asked(0.005, 50));
    assert!(!asked(0.5, 3), "the first steps are slow anyway");
    assert!(asked(0.5, 4), "two seconds of them");
    let mut job = unmeasured(BAD);
    job.s.links = None;
    assert_eq!(job.call().trial, None, "nothing is known");
}

#[test]
fn estimates_that_are_not_trusted_count_less_than_steps() {
    let asked = |bandwidth: f64, confidence: f64, t_sync: f64| {
        let mut job = unmeasured(bandwidth);
        job.s.links.as_mut().unwrap().confidence = confidence;
        job.measure(0.025 + t_sync, 0.0, t_sync, 1.0);
        job.call().trial.is_some()
    };
    assert!(!asked(BAD, 0.1, 0.001));
    assert!(asked(GOOD, 0.1, 0.5));
    assert!(asked(GOOD, 0.9, 0.5), "links hide what the steps show");
    assert!(!asked(BAD, 0.9, 0.001), "what dense takes is what its steps take");
    assert!(!asked(GOOD, 0.9, 0.001));
}

proptest! {
    /// On links that are trusted: exactly where a candidate that is free and loses nothing wins by the hysteresis, and what
    /// is decided without a trial is dense.
    #[test]
    fn a_first_trial_is_asked_for_where_something_could_win(
        alpha in -5.5..-1.0f64, bandwidth in 7.0..13.0f64, compute in 0.0..1.0f64, hysteresis in 0.0..0.5f64
    ) {
        let mut job = unmeasured(GOOD);
        job.s.compute = Some(crate::common::seconds(compute));
        job.s.config.hysteresis = hysteresis;
        job.network(10f64.powf(alpha), 10f64.powf(bandwidth));
        let outcome = job.call();
        let (dense, others): (Vec<_>, Vec<_>) =
            outcome.report.alternatives.iter().partition(|a| a.strategy.is_dense());
        let least = |of: f64, a: &&flexcomm_planner::Alternative| of.min(a.t_step_s - a.t_comp_s);
        let (dense, best) = (dense.iter().fold(f64::INFINITY, least), others.iter().fold(f64::INFINITY, least));
        prop_assert_eq!(outcome.trial.is_some(), best < dense * (1.0 - hysteresis));
        if let Verdict::Change(d) = &outcome.verdict {
            prop_assert_eq!((d.strategy.is_dense(), outcome.trial.is_some()), (true, false));
        } else {
            prop_assert_eq!(outcome.verdict, Verdict::Keep(Keep::AwaitingTrial));
        }
    }
}
