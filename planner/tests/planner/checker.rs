//! The checker must refuse what is wrong: each case spoils a good outcome in one way.

use crate::common::{Job, seconds};
use flexcomm_domain::{CodecBytes, Decision, Gain, JobId, Plan, Strategy, Timestamp, Version};
use flexcomm_planner::{Alternative, Losses, MeanLoss, Outcome, Snapshot, Verdict, check, decide};

/// A second decision, made because the network became slower, with the snapshot it was made on.
fn good() -> (Snapshot, Outcome, Timestamp) {
    let mut job = Job::new();
    job.call();
    job.wait(60.0);
    job.network(0.001, 0.25e9);
    let outcome = decide(&job.s, job.now, &mut job.rng);
    assert!(outcome.decision().is_some_and(|d| !d.plan.is_dense()), "{}", outcome.report.why);
    (job.s, outcome, job.now)
}

fn rules(s: &Snapshot, outcome: &Outcome, now: Timestamp) -> Vec<&'static str> {
    check(s, outcome, now).into_iter().map(|v| v.rule).collect()
}

fn decision(outcome: &mut Outcome) -> &mut Decision {
    match &mut outcome.verdict {
        Verdict::Change(decision) => decision,
        Verdict::Keep(_) => panic!("no decision"),
    }
}

/// Decides `to` and reports it, with the numbers that belong to it.
fn choose(outcome: &mut Outcome, to: &str) {
    let plan: Plan = to.parse().unwrap();
    decision(outcome).plan = plan.clone();
    outcome.report.chosen = plan;
}

fn spoilt(expected: &str, spoil: impl FnOnce(&mut Snapshot, &mut Outcome)) {
    let (mut s, mut outcome, now) = good();
    assert_eq!(rules(&s, &outcome, now), Vec::<&str>::new());
    spoil(&mut s, &mut outcome);
    let found = rules(&s, &outcome, now);
    assert!(found.contains(&expected), "{expected} expected, found {found:?}");
}

#[test]
fn versions_and_names() {
    spoilt("version", |_, o| decision(o).version = Version(5));
    spoilt("version", |_, o| decision(o).version = Version(1));
    spoilt("parent", |_, o| decision(o).parent = Version(0));
    spoilt("job", |_, o| decision(o).job = JobId::new("other").unwrap());
    spoilt("report", |_, o| decision(o).decided_at = Timestamp(7));
    spoilt("report", |_, o| decision(o).reason.clear());
    spoilt("no-change", |s, o| {
        let current = *s.plan().last();
        choose(o, &current.to_string());
    });
}

#[test]
fn plans_by_bucket_that_the_job_cannot_run() {
    let rules_of = |plan: &str, buckets: Vec<u64>| {
        let (mut s, mut outcome, now) = good();
        s.buckets = buckets;
        // Offered, so that nothing but where it is used is wrong.
        s.offer.codecs.insert("topk(k=*)+ef(dgc,mu=0.9)".parse().unwrap(), CodecBytes::PAPER);
        choose(&mut outcome, plan);
        outcome.report.alternatives[0].plan = outcome.report.chosen.clone();
        rules(&s, &outcome, now)
    };
    let (third, sparse) = (8_520_000, "topk(k=0.02)+ef(vanilla)/allgather");
    let good = format!("2x none/dense-ring | {sparse}");
    assert_eq!(rules_of(&good, vec![third; 3]), Vec::<&str>::new(), "any ratio between the candidates'");
    assert_eq!(rules_of(&good, vec![2 * third, third]), ["offered"], "more buckets than the job has");
    assert_eq!(rules_of(&format!("none/dense-ring | {}", sparse.replace("0.02", "0.5")), vec![third; 3]), ["offered"]);
    let mixed = format!("topk(k=0.01)+ef(dgc,mu=0.9)/allgather | {sparse}");
    assert_eq!(rules_of(&mixed, vec![third; 3]), ["offered"], "the optimizer's momentum is one for all buckets");
}

#[test]
fn what_the_job_cannot_run() {
    spoilt("offered", |_, o| choose(o, "mstopk@0.01/allgather"));
    spoilt("offered", |_, o| choose(o, "topk@0.02/allgather"));
    spoilt("offered", |s, o| {
        let collective = o.report.chosen.last().collective();
        s.offer.collectives.retain(|c| *c != collective);
    });
    spoilt("offered", |s, _| s.config.compressors = Some(vec!["none".parse().unwrap()]));
}

#[test]
fn when_it_may_not_change() {
    let ago = |s: &mut Snapshot, seconds: u64| {
        let (_, _, now) = good();
        s.in_force.as_mut().unwrap().decision.decided_at = Timestamp(now.0 - seconds * 1_000_000);
    };
    spoilt("dwell", |s, _| ago(s, 2));
    spoilt("applied", |s, _| {
        ago(s, 20);
        s.in_force.as_mut().unwrap().applied_at_step = None;
    });
    spoilt("links", |s, _| s.links = None);
    // Back to dense at any time, and after a clock that jumped back.
    let (mut s, mut outcome, now) = good();
    ago(&mut s, 1);
    choose(&mut outcome, "none/dense-ring");
    assert_eq!(rules(&s, &outcome, now), Vec::<&str>::new());
    let (mut s, outcome, now) = good();
    s.in_force.as_mut().unwrap().decision.decided_at = Timestamp(now.0 + 1);
    assert_eq!(rules(&s, &outcome, now), Vec::<&str>::new());
}

#[test]
fn numbers_that_do_not_follow() {
    let chosen = |o: &mut Outcome, f: &dyn Fn(&mut Alternative)| {
        let plan = o.report.chosen.clone();
        f(o.report.alternatives.iter_mut().find(|a| a.plan == plan).unwrap());
    };
    spoilt("report", |_, o| chosen(o, &|a| a.t_sync_s *= 1.1));
    spoilt("report", |_, o| chosen(o, &|a| a.t_step_s *= 0.99));
    spoilt("finite", |_, o| chosen(o, &|a| a.t_comp_s = f64::NAN));
    spoilt("finite", |_, o| chosen(o, &|a| a.score = Some(f64::INFINITY)));
    spoilt("finite", |_, o| chosen(o, &|a| a.sure = Some(1.5)));
    spoilt("finite", |_, o| chosen(o, &|a| a.saves = Some(f64::NAN)));
    spoilt("finite", |_, o| o.report.horizon_s = -1.0);
    spoilt("finite", |_, o| o.report.test_worth_s = f64::NAN);
    spoilt("finite", |_, o| {
        let dense = o.report.alternatives.iter_mut().find(|a| a.plan.is_dense()).unwrap();
        dense.gain = Gain::new(0.9).unwrap();
    });
    spoilt("report", |_, o| o.report.why.clear());
    spoilt("report", |_, o| o.report.chosen = Plan::DENSE_RING);
    spoilt("report", |_, o| {
        let plan = o.report.chosen.clone();
        o.report.alternatives.retain(|a| a.plan != plan);
    });
}

#[test]
fn trials_that_were_not_asked_for_properly() {
    let mut job = Job::new();
    job.s.profiles = Default::default();
    job.network(0.001, 1e9);
    let good = decide(&job.s, job.now, &mut job.rng);
    assert!(good.trial.is_some() && check(&job.s, &good, job.now).is_empty());
    let spoil = |f: &dyn Fn(&mut flexcomm_planner::TrialRequest)| {
        let mut outcome = good.clone();
        f(outcome.trial.as_mut().unwrap());
        assert_eq!(rules(&job.s, &outcome, job.now), vec!["trial"]);
    };
    spoil(&|t| t.candidates.clear());
    spoil(&|t| t.candidates = vec![t.candidates[0]; 17]);
    spoil(&|t| t.budget = seconds(31.0));
    spoil(&|t| t.iterations = 0);
    spoil(&|t| t.candidates[0] = Strategy::DENSE_RING);
}

#[test]
fn what_follows_a_loss_that_rose_is_dense() {
    spoilt("loss", |s, _| {
        let in_force = s.in_force.as_mut().unwrap();
        in_force.decision.plan = "topk(k=0.001)+ef(vanilla)/allgather".parse().unwrap();
        let loss = |mean: f64| MeanLoss { mean, sd: 0.05, first_step: 0, last_step: 23 };
        s.losses = Some(Losses {
            version: in_force.decision.version,
            began: None,
            before: Some(loss(1.0)),
            newest: loss(1.5),
        });
    });
}
