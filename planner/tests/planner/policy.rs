//! What is set for one job.

use crate::common::{Job, of, seconds};
use flexcomm_domain::{Plan, Timestamp, Version};
use flexcomm_planner::{JobPolicy, Keep, Verdict, check, decide, rfc3339};
use serde_json::{Value, json};

const PINNED: &str = "topk(k=0.05)+ef(vanilla)/allgather";

/// A job that has decided something for a fast network, which then became slow: another decision is due.
fn due() -> Job {
    let mut job = Job::new();
    job.call();
    job.wait(60.0);
    job.network(0.001, 0.25e9);
    job
}

fn set(job: &mut Job, policy: Value) {
    job.s.policy = JobPolicy::read(&policy).unwrap();
}

fn pin(job: &mut Job, seconds_from_now: Option<f64>) {
    let until = seconds_from_now.map(|s| rfc3339(Timestamp(job.now.0.saturating_add_signed((s * 1e6) as i64))));
    set(job, json!({ "pin": { "strategy": PINNED, "until": until } }));
}

#[test]
fn a_pin_is_in_force_at_once_and_until_its_end() {
    let mut job = due();
    job.call();
    assert!(job.strategy().to_string() != PINNED);
    pin(&mut job, Some(100.0));
    job.wait(0.5);
    let outcome = job.call();
    assert_eq!(job.strategy().to_string(), PINNED, "without the dwell time, at a ratio that is no candidate");
    let reason = &outcome.decision().unwrap().reason;
    assert!(reason.contains("topk at CR 0.05 by allgather is pinned until 1970-01-01T00:19:20Z"), "{reason}");
    for looks in job.run(90, |_| 50.0) {
        assert_eq!(looks.verdict, Verdict::Keep(Keep::Pinned), "however slow it is");
        assert!(looks.trial.is_none() && looks.report.why.contains("is pinned until"), "{}", looks.report.why);
    }
    job.run(30, |_| 1.0);
    assert!(job.strategy().to_string() != PINNED, "it has ended");
}

#[test]
fn a_pin_waits_only_for_the_last_decision_to_be_in_force() {
    let mut job = due();
    job.call();
    job.s.in_force.as_mut().unwrap().applied_at_step = None;
    pin(&mut job, None);
    assert_eq!(job.keeps(), Keep::NotApplied);
    job.s.in_force.as_mut().unwrap().applied_at_step = Some(1);
    assert!(job.call().decision().unwrap().reason.contains("until its policy is changed"));
}

#[test]
fn a_pin_needs_neither_links_nor_steps() {
    let mut job = Job::new();
    (job.s.links, job.s.compute) = (None, None);
    assert_eq!(job.keeps(), Keep::NoLinks);
    pin(&mut job, None);
    assert_eq!(job.call().decision().unwrap().version, Version(1));
    assert_eq!(job.keeps(), Keep::Pinned);
}

#[test]
fn a_pin_that_has_ended_or_cannot_run_changes_nothing() {
    let mut with = due();
    let without = with.call();
    let mut ended = due();
    pin(&mut ended, Some(-1.0));
    assert_eq!(ended.call().decision(), without.decision());
    let mut other = due();
    set(&mut other, json!({ "pin": { "strategy": "mstopk(k=0.05)+ef(vanilla)/allgather" } }));
    let outcome = other.call();
    let decision = outcome.decision().unwrap();
    assert_eq!(decision.plan, without.decision().unwrap().plan);
    let named = "mstopk at CR 0.05 by allgather is pinned until its policy is changed and cannot run: no trainer of the job offers mstopk";
    assert!(decision.reason.contains(named), "{}", decision.reason);
}

#[test]
fn a_plan_by_bucket_is_pinned_where_the_gradient_has_buckets() {
    let mut job = due();
    job.s.buckets = vec![job.s.gradient_values / 4; 4];
    let plan = format!("2x none/dense-ring | {PINNED}");
    set(&mut job, json!({ "pin": { "strategy": plan } }));
    job.call();
    assert_eq!(job.s.plan().to_string(), plan);
    assert_eq!(job.keeps(), Keep::Pinned);
    let mut fused = due();
    fused.s.policy = job.s.policy;
    let why = fused.call().report.why;
    assert!(why.contains("the buckets of the job's gradient are not known"), "{why}");
}

#[test]
fn a_policy_that_observes_reports_what_it_would_change_and_changes_nothing() {
    let (mut job, mut without) = (due(), due());
    let would = without.call().decision().unwrap().plan.clone();
    let (before, version) = (job.s.plan().clone(), job.s.version());
    set(&mut job, json!({ "observe": true }));
    let outcome = job.call();
    assert_eq!(outcome.verdict, Verdict::Keep(Keep::Observing));
    assert_eq!((outcome.report.proposed, &outcome.report.chosen), (Some(would), &before));
    let why = &outcome.report.why;
    assert!(why.contains("only observes") && why.contains("bandwidth fell from 25 Gbit/s"), "{why}");
    assert_eq!((job.s.plan(), job.s.version()), (&before, version));
    set(&mut job, json!({}));
    assert!(job.call().decision().is_some(), "the same, once it no longer observes");
}

#[test]
fn before_the_first_decision_nothing_is_in_force_where_the_policy_observes() {
    let mut job = Job::new();
    job.s.profiles = Default::default();
    job.network(0.001, 1e9);
    assert!(decide(&job.s, job.now, &mut job.rng).trial.is_some(), "else it would ask for a trial");
    set(&mut job, json!({ "observe": true }));
    for outcome in job.run(30, |_| 1.0) {
        assert_eq!(outcome.verdict, Verdict::Keep(Keep::Observing), "{}", outcome.report.why);
        assert!(outcome.trial.is_none() && outcome.report.trial.is_none() && outcome.report.proposed.is_some());
    }
    assert_eq!((job.s.plan(), job.s.version()), (&Plan::DENSE_RING, Version(0)));
}

#[test]
fn what_a_user_named_is_what_a_first_decision_is_compared_with() {
    let mut job = Job::new();
    job.network(0.001, 1e9);
    let named: Plan = "topk(k=0.1)+ef(vanilla)/allgather".parse().unwrap();
    job.s.begun_with = Some(named.clone());
    set(&mut job, json!({ "observe": true }));
    for outcome in job.run(20, |_| 1.0) {
        let is = outcome.report.in_force.as_ref().unwrap();
        assert_eq!((&is.plan, &outcome.report.chosen), (&named, &named));
        assert_eq!(outcome.report.seen.measured.map(|m| m.gain), job.s.measured.map(|m| m.gain));
        assert_eq!((is.saves, is.sure), (Some(0.0), Some(0.0)), "against itself");
    }
    set(&mut job, json!({ "pin": { "strategy": "none/dense-ring" } }));
    assert!(job.call().decision().unwrap().plan.is_dense());
    assert!(job.s.plan().is_dense(), "what is decided takes its place");
}

#[test]
fn what_keeps_too_little_or_compresses_for_too_long_is_not_decided() {
    for name in ["time-to-quality", "knee", "weights"] {
        let objective = |job: &mut Job| {
            job.s.config.policy = flexcomm_planner::PolicyConfig::by_name(name).unwrap();
            job.network(0.001, 0.1e9);
        };
        let mut free = Job::new();
        objective(&mut free);
        let outcome = free.call();
        let is = of(&outcome, &free.strategy().to_string()).clone();
        assert!(!is.plan.is_dense(), "{name}");
        let least = (is.gain.get() + 0.05).min(0.99);
        let mut limited = Job::new();
        objective(&mut limited);
        set(&mut limited, json!({ "least_gain": least }));
        let outcome = limited.call();
        let kept = of(&outcome, &limited.strategy().to_string()).gain.get();
        assert!(kept >= least && limited.s.plan() != free.s.plan(), "{name}: {kept} of {least}");
        // Every ratio compresses for as long: nothing but dense is left.
        let share = is.t_comp_s / is.t_step_s;
        set(&mut limited, json!({ "most_overhead": share / 1e3 }));
        limited.wait(60.0);
        let outcome = limited.call();
        assert!(limited.s.plan().is_dense(), "{name}: {}", outcome.report.why);
        assert!(outcome.report.why.contains("is the best that policy and settings admit"), "{}", outcome.report.why);
        set(&mut limited, json!({ "least_gain": 1.0, "most_overhead": 0 }));
        assert!(matches!(limited.keeps(), Keep::AlreadyBest | Keep::NotSure), "{name}: dense always may");
    }
}

/// Backward hides early buckets, and the late ones are compressed: the limit holds for the whole plan.
#[test]
fn plans_by_bucket_obey_the_limits() {
    let mut job = Job::new();
    job.s.config.policy = Default::default();
    job.s.buckets = vec![2_130_000; 12];
    job.s.compute = Some(seconds(0.2));
    job.network(0.0001, 5e9);
    let found = |job: &mut Job| {
        let outcome = decide(&job.s, job.now, &mut job.rng);
        assert_eq!(check(&job.s, &outcome, job.now), []);
        let by_bucket = outcome.report.alternatives.into_iter().filter(|a| a.plan.alike().is_none());
        by_bucket.filter(|a| a.score.is_some()).collect::<Vec<_>>()
    };
    let free = found(&mut job);
    assert!(!free.is_empty(), "the search finds some");
    let overhead = |a: &flexcomm_planner::Alternative| a.t_comp_s / a.t_step_s;
    let most = free.iter().map(overhead).fold(0.0, f64::max) / 2.0;
    set(&mut job, json!({ "most_overhead": most }));
    let limited = found(&mut job);
    assert!(limited.iter().all(|a| overhead(a) <= most), "{most}: {limited:?}");
    let gain = |a: &flexcomm_planner::Alternative| a.inverse_gain.unwrap().recip();
    let mut gains: Vec<f64> = free.iter().map(gain).collect();
    gains.sort_by(f64::total_cmp);
    let least = gains[gains.len() / 2];
    set(&mut job, json!({ "least_gain": least }));
    let limited = found(&mut job);
    assert!(!limited.is_empty() && limited.iter().all(|a| gain(a) >= least * (1.0 - 1e-12)), "{least}: {limited:?}");
}

/// Each case spoils an outcome that follows the policy.
#[test]
fn the_checker_refuses_what_the_policy_forbids() {
    let mut job = due();
    let free = decide(&job.s, job.now, &mut job.rng);
    let rules = |job: &Job| -> Vec<&str> { check(&job.s, &free, job.now).iter().map(|v| v.rule).collect() };
    assert_eq!(rules(&job), Vec::<&str>::new());
    set(&mut job, json!({ "observe": true }));
    assert_eq!(rules(&job), ["observe"]);
    pin(&mut job, Some(1.0));
    assert_eq!(rules(&job), ["pin"]);
    pin(&mut job, Some(-1.0));
    assert_eq!(rules(&job), Vec::<&str>::new());
    let gain = of(&free, &free.decision().unwrap().plan.to_string()).gain.get();
    set(&mut job, json!({ "least_gain": gain + 1e-6 }));
    assert_eq!(rules(&job), ["limits"]);
    set(&mut job, json!({ "most_overhead": 1e-6 }));
    assert_eq!(rules(&job), ["limits"]);
    let mut asking = Job::new();
    asking.s.profiles = Default::default();
    asking.network(0.001, 1e9);
    let asks = decide(&asking.s, asking.now, &mut asking.rng);
    assert!(asks.trial.is_some() && asks.decision().is_none());
    for (policy, rule) in [(json!({ "observe": true }), "observe"), (json!({ "pin": { "strategy": PINNED } }), "pin")] {
        set(&mut asking, policy);
        assert_eq!(check(&asking.s, &asks, asking.now).iter().map(|v| v.rule).collect::<Vec<_>>(), [rule]);
    }
}

#[test]
fn a_policy_that_changed_is_named_and_not_the_network_or_the_watchdog() {
    let mut job = due();
    job.call();
    job.run(20, |_| 1.0);
    assert!(!job.strategy().is_dense());
    set(&mut job, json!({ "kinds": ["none"] }));
    job.wait(5.0);
    let (t_comp, t_sync, gain) = job.truth(&job.strategy());
    // Slower than dense ones, by compressing.
    job.measure(1e4 * t_comp, t_sync, gain);
    let outcome = job.call();
    let reason = &outcome.decision().expect("only dense is allowed").reason;
    assert!(reason.starts_with("the policy allows only none; dense by "), "{reason}");
    assert!(reason.contains(" is the best that policy and settings admit; topk "), "{reason}");
    assert!(reason.ends_with(" is no longer admitted"), "{reason}");
    pin(&mut job, Some(100.0));
    job.call();
    job.run(20, |_| 1.0);
    assert_eq!(job.strategy().to_string(), PINNED);
    set(&mut job, json!({}));
    let ended = job.run(30, |_| 1.0);
    let first = ended.iter().find_map(|outcome| outcome.decision()).expect("the pinned ratio is no candidate");
    assert!(first.reason.starts_with("the pin of topk at CR 0.05 by allgather has ended"), "{}", first.reason);
}

/// Shares of a score that is no time are not compared with seconds: what no trial has measured is measured once, and nothing else is tried.
#[test]
fn a_policy_that_does_not_minimise_time_asks_for_what_is_not_measured_alone() {
    let mut job = Job::new();
    job.s.profiles = Default::default();
    job.s.config.policy = flexcomm_planner::PolicyConfig::Knee(Default::default());
    job.network(0.001, 1e9);
    let first = job.call();
    assert!(first.trial.is_some() || first.decision().is_some(), "{}", first.report.why);
    job.wait(1.0);
    job.answer(crate::common::profile(0.12, 0.004));
    job.call();
    let looks = job.run(90, |_| 1.0);
    assert!(looks.iter().all(|look| look.trial.is_none() && look.report.test_worth_s == 0.0));
    assert!(looks.iter().filter(|look| look.decision().is_some()).count() <= 2, "one network");
}
