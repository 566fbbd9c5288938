//! By which rule a plan is chosen: the probability asked for, the policy's score, the search by bucket, the
//! watchdog.

use crate::common::{Job, of, seconds};
use flexcomm_planner::{Alternative, Keep, Outcome, PolicyConfig, decide};

const DENSE: &str = "none/dense-ring";

fn by(name: &str) -> PolicyConfig {
    PolicyConfig::by_name(name).unwrap()
}

/// A job that has decided nothing, on a network on which its best candidate is probably better than dense and
/// none is surely so; that candidate, and the highest probability of all.
fn in_doubt(policy: &PolicyConfig) -> (Job, Alternative, f64) {
    let at = |slower: i32| {
        let mut job = Job::new();
        job.s.config.policy = policy.clone();
        job.network(0.001, 80e9 / 1.1f64.powi(slower));
        let report = decide(&job.s, job.now, &mut job.rng.clone()).report;
        let surest = report.alternatives.iter().filter_map(|a| a.sure).fold(0.0, f64::max);
        let best = report.best?;
        let is_in_doubt = best.sure? > 0.65 && surest < 0.95 && best.saves? > 0.05;
        is_in_doubt.then_some((job, best, surest))
    };
    (0..25).find_map(at).expect("the slower the network, the surer is compression better")
}

#[test]
fn what_is_better_with_less_than_the_probability_asked_for_is_not_decided() {
    for policy in [Job::new().s.config.policy, by("weights")] {
        let (job, best, surest) = in_doubt(&policy);
        let at = |confidence: f64| {
            let mut job = job.clone();
            job.s.config.confidence = confidence;
            job.call()
        };
        for enough in [0.6, best.sure.unwrap()] {
            let outcome = at(enough);
            let decision = outcome.decision().expect("it is better with that probability");
            assert_eq!(decision.plan, best.plan, "{}", decision.reason);
            let is_tried = decision.reason.contains("worth trying");
            assert!(decision.reason.contains("with probability") && !is_tried, "{}", decision.reason);
        }
        let report = at(surest + 0.01).report;
        let is_tried = report.why.contains("worth trying, since it is better with probability");
        assert!(report.chosen.is_dense() || is_tried, "{}", report.why);
    }
}

#[test]
fn what_was_not_sure_enough_is_decided_once_less_is_asked_for() {
    // By a policy that is no time nothing is tried.
    let (mut job, ..) = in_doubt(&by("weights"));
    job.s.config.confidence = 0.97;
    let first = job.call();
    assert!(first.decision().is_some() && job.s.plan().is_dense(), "{}", first.report.why);
    job.wait(10.0);
    assert_eq!(job.keeps(), Keep::NotSure);
    job.s.config.confidence = 0.6;
    let outcome = job.call();
    assert!(outcome.decision().is_some_and(|d| !d.plan.is_dense()), "{}", outcome.report.why);
}

#[test]
fn a_job_of_ten_buckets_decides_what_scores_least_by_its_policy() {
    for (name, bandwidth) in ["knee", "weights"].into_iter().flat_map(|name| [0.25e9, 1e9, 5e9].map(|b| (name, b))) {
        let mut job = Job::new();
        job.s.config.policy = by(name);
        (job.s.compute, job.s.buckets) = (Some(seconds(0.12)), vec![2_556_000; 10]);
        job.network(0.001, bandwidth);
        let outcome = job.call();
        let (all, why) = (&outcome.report.alternatives, &outcome.report.why);
        let chosen = outcome.decision().unwrap_or_else(|| panic!("{name}: {why}")).plan.to_string();
        let score = of(&outcome, &chosen).score.unwrap();
        let least = all.iter().filter_map(|a| a.score).fold(f64::INFINITY, f64::min);
        // A change saves at least 2 %.
        assert!(0.98 * score <= least, "{name} at {bandwidth}: {chosen} at {score}, least is {least}: {why}");
        let own = |a: &Alternative| {
            let (time, lost) = (a.t_comp_s + a.t_sync_s, 1.0 / a.gain.get() - 1.0);
            if name == "knee" { (time / 0.12).hypot(lost) } else { time + 0.1 * lost }
        };
        // Best first; medians are not quite the mean of the samples.
        let alike: Vec<&Alternative> = all.iter().filter(|a| a.plan.alike().is_some()).collect();
        let least = alike.iter().map(|a| own(a)).fold(f64::INFINITY, f64::min);
        assert!(own(alike[0]) <= 1.1 * least, "{name} at {bandwidth}: {} at {}", alike[0].plan, own(alike[0]));
    }
}

#[test]
fn of_sixty_buckets_sixteen_plans_at_most_are_priced_and_the_front_has_what_is_fastest_alike() {
    let mut most = 0;
    for bandwidth in [5e9, 12e9, 25e9] {
        let mut job = Job::new();
        (job.s.compute, job.s.buckets) = (Some(seconds(0.2)), vec![426_000; 60]);
        job.network(1e-5, bandwidth);
        for _ in 0..2 {
            let before = job.s.plan().clone();
            let report = job.call().report;
            let (by_bucket, alike): (Vec<_>, Vec<_>) =
                report.alternatives.iter().partition(|a: &&Alternative| a.plan.alike().is_none());
            let found = by_bucket.iter().filter(|a| a.plan != before).count();
            assert!(found <= 16, "{found} at {bandwidth}");
            most = most.max(found);
            let fastest = alike.iter().min_by(|a, b| a.t_step_s.total_cmp(&b.t_step_s)).unwrap();
            let objectives = |a: &Alternative| [a.t_comp_s, a.t_sync_s, 1.0 / a.gain.get()];
            let is_as_good = |a: &Alternative| {
                let mut each = objectives(a).into_iter().zip(objectives(fastest));
                each.all(|(own, other)| own <= other * (1.0 + 1e-9))
            };
            let mut front = report.alternatives.iter().filter(|a| report.front.contains(&a.plan));
            assert!(front.any(is_as_good), "{}, front {:?}", fastest.plan, report.front);
            job.wait(10.0);
        }
    }
    assert!(most > 1, "the search finds some");
}

/// By knee, with some compressed plan in force that may not be left for minutes, unless for dense.
fn compressed_by_knee() -> Job {
    let mut job = Job::new();
    job.s.config.policy = by("knee");
    job.s.config.dwell_s = seconds(300.0);
    job.network(0.001, 1e9);
    job.call();
    assert!(!job.strategy().is_dense());
    job.run(10, |_| 1.0);
    job
}

/// What dense and what is in force score.
fn scores(outcome: &Outcome) -> (f64, f64) {
    let is = outcome.report.in_force.as_ref().unwrap();
    (of(outcome, DENSE).score.unwrap(), is.score.unwrap())
}

#[test]
fn by_knee_steps_that_compress_for_longer_than_dense_ones_take_are_left_within_the_dwell_time() {
    let mut job = compressed_by_knee();
    let dense_s = of(&job.call(), DENSE).t_step_s;
    let (_, t_sync, gain) = job.truth(&job.strategy());
    for look in 0..10 {
        job.wait(1.0);
        job.measure(3.0 * dense_s * (1.0 + 0.01 * f64::from(look)), t_sync, gain);
        let outcome = job.call();
        if let Some(decision) = outcome.decision() {
            assert!(decision.plan.is_dense(), "{}", decision.reason);
            assert!(decision.reason.contains("; dense ones are expected to take "), "{}", decision.reason);
            let (dense, is) = scores(&outcome);
            assert!(dense < is, "dense scores {dense}, what was in force {is}");
            return;
        }
    }
    panic!("{} stays", job.strategy());
}

/// Of steps that wait for data a smaller share is compressing and communicating than of dense ones.
#[test]
fn by_knee_steps_that_are_slower_than_dense_ones_and_score_better_stay() {
    let mut job = compressed_by_knee();
    let dense_s = of(&job.call(), DENSE).t_step_s;
    let (t_comp, t_sync, gain) = job.truth(&job.strategy());
    for look in 0..10 {
        job.wait(1.0);
        job.measure(t_comp, t_sync * (1.0 + 1e-3 * f64::from(look)), gain);
        let measured = job.s.measured.as_mut().unwrap();
        (measured.t_step, measured.scatter) = (seconds(3.0 * dense_s), None);
        let outcome = job.call();
        let (dense, is) = scores(&outcome);
        assert!(is < dense, "dense scores {dense}, what is in force {is}");
        assert!(of(&outcome, DENSE).t_step_s < 2.0 * dense_s && outcome.decision().is_none(), "{}", outcome.report.why);
    }
}
