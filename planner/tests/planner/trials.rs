//! When a live trial is asked for, and of what.

use crate::common::{Job, of, profile, seconds};
use flexcomm_domain::Timestamp;
use flexcomm_planner::{Keep, TrialWaits, Verdict};

fn unmeasured() -> Job {
    let mut job = Job::new();
    job.s.profiles = Default::default();
    job.network(0.001, 1e9);
    job
}

#[test]
fn the_first_decision_waits_for_a_trial_that_is_worth_it() {
    let mut job = unmeasured();
    let outcome = job.call();
    assert_eq!(outcome.verdict, Verdict::Keep(Keep::AwaitingTrial), "{}", outcome.report.why);
    let trial = outcome.trial.expect("a trial");
    assert!(trial.candidates.len() >= 2 && trial.iterations == 10, "{trial:?}");
    assert!(trial.why.contains("knowing the best candidate is expected to save"), "{}", trial.why);
    job.wait(1.0);
    let again = job.call();
    assert!(again.trial.is_none() && again.report.trial.is_some(), "asked twice");
    job.wait(1.0);
    job.answer(profile(0.12, 0.004));
    let decided = job.call();
    assert!(decided.decision().is_some(), "{}", decided.report.why);
}

#[test]
fn ratios_of_one_trial_are_far_apart() {
    let trial = unmeasured().call().trial.unwrap();
    for selector in ["topk", "topk:star"] {
        let selector = selector.parse().unwrap();
        let mut crs: Vec<f64> =
            trial.candidates.iter().filter(|x| x.selector() == selector).map(|x| x.cr().get()).collect();
        crs.sort_by(f64::total_cmp);
        assert!((2..=3).contains(&crs.len()) && crs.windows(2).all(|w| w[1] / w[0] >= 5.0), "{crs:?}");
    }
}

#[test]
fn a_trial_that_never_answers_does_not_hold_up_the_job() {
    let mut job = unmeasured();
    assert_eq!(job.keeps(), Keep::AwaitingTrial);
    job.wait(61.0);
    assert!(job.call().decision().is_some());
    let mut trials = 0;
    for _ in 0..300 {
        job.wait(1.0);
        trials += usize::from(job.call().trial.is_some());
    }
    assert!(trials <= 4, "{trials} trials in 300 s");
}

#[test]
fn no_trial_is_asked_for_where_it_cannot_pay() {
    let asks = |change: &dyn Fn(&mut Job)| {
        let mut job = unmeasured();
        change(&mut job);
        job.call().trial.is_some()
    };
    assert!(asks(&|_| ()));
    assert!(!asks(&|job| job.s.config.trial_budget_s = seconds(0.0)), "the operator wants none");
    assert!(!asks(&|job| job.network(1e-6, 800e9)), "dense is best whatever compression keeps");
    assert!(!asks(&|job| job.has_steps(102.0, 100)), "the job ends before it would pay");
}

/// Only rank 0's shadows answer there, and AR-Topk has none.
#[test]
fn a_job_without_live_trials_is_not_asked_for_what_only_they_can_tell() {
    let asks = |tried_at: Option<Timestamp>| {
        let mut job = unmeasured();
        job.answer(profile(0.12, 0.004));
        job.s.profiles.by_selector.remove(&"topk:star".parse().unwrap());
        job.s.profiles.tried_at = tried_at;
        // Nothing else is worth a trial where links are known to hold for long.
        let compute = job.s.compute.take();
        for _ in 0..120 {
            job.wait(60.0);
            (job.s.profiles.measured_at, job.s.profiles.ended_at) = (Some(job.now), Some(job.now));
            job.call();
        }
        job.s.compute = compute;
        [2e9, 1e10, 4e10].into_iter().any(|bandwidth| {
            let mut job = Job { s: job.s.clone(), ..Job::new() };
            job.now = job.s.profiles.measured_at.unwrap();
            job.network(0.001, bandwidth);
            job.call().trial.is_some()
        })
    };
    assert!(!asks(None));
    assert!(asks(Some(Timestamp(1_000_000_000))));
}

#[test]
fn a_trial_is_expected_to_take_what_the_last_one_took() {
    let mut job = unmeasured();
    assert!(job.call().trial.is_some());
    let asked = job.now;
    job.wait(60.0);
    job.answer(profile(0.12, 0.004));
    let took = |cost| TrialWaits { id: 1, asked, ended: job.now, cost, iterations: 10, sync: Vec::new() };
    let (unknown, long) = (took(None), took(Some(seconds(60.0))));
    let of_another = TrialWaits { asked: Timestamp(asked.0 - 1), ..long.clone() };
    for says_nothing in [unknown, of_another] {
        let mut job = job.clone();
        job.s.trial = Some(says_nothing);
        job.call();
        assert_eq!(job.s.memory.trial.slowdown, None, "{:?}", job.s.trial);
    }
    job.s.trial = Some(long);
    job.call();
    let slowdown = job.s.memory.trial.slowdown;
    assert!(slowdown.is_some_and(|times| times > 5.0), "{slowdown:?}");
    let mut again = unmeasured();
    again.s.memory.trial.slowdown = slowdown;
    assert!(again.call().trial.is_none(), "it does not pay any more");
}

#[test]
fn what_is_measured_is_not_asked_for_again() {
    let mut job = unmeasured();
    job.call();
    job.wait(2.0);
    job.answer(profile(0.12, 0.004));
    job.call();
    job.wait(120.0);
    assert!(job.call().trial.is_none(), "all is measured");
}

/// What a trial found its collectives to take is believed, as far as its few iterations tell.
#[test]
fn what_a_trial_waited_for_is_an_observation() {
    let mut job = Job::new();
    job.network(0.001, 1e9);
    job.call();
    job.run(100, |_| 1.0);
    let other = "topk(k=0.1)+ef(vanilla)/allgather";
    let before = of(&job.call(), other).t_sync_s;
    let waits = |id: u64, job: &Job, factor: f64| TrialWaits {
        id,
        asked: job.now,
        ended: job.now,
        cost: None,
        iterations: 10,
        sync: vec![(other.parse().unwrap(), seconds(factor * before))],
    };
    let after = |trial: TrialWaits| {
        let mut job = job.clone();
        job.s.trial = Some(trial);
        job.wait(1.0);
        let first = of(&job.call(), other).t_sync_s;
        // The same again says nothing, whatever it says now.
        let again =
            TrialWaits { sync: vec![(other.parse().unwrap(), seconds(before))], ..job.s.trial.clone().unwrap() };
        job.s.trial = Some(again);
        job.wait(1.0);
        let second = of(&job.call(), other).t_sync_s;
        assert!((second / first - 1.0).abs() < 0.1, "{second} s, before {first} s");
        first
    };
    let slow = after(waits(1, &job, 20.0));
    assert!(slow > 2.0 * before, "{slow} s, before {before} s");
    let long_ago = TrialWaits { ended: Timestamp(job.now.0 - 90_000_000), ..waits(1, &job, 20.0) };
    let is = after(long_ago);
    assert!((is / before - 1.0).abs() < 0.1, "{is} s, before {before} s");
}
