//! What decide() answers in the situations of a job's life.

use crate::common::{Job, next, of, profile, seconds};
use flexcomm_domain::{CodecBytes, Collective, Plan, Strategy, Version};
use flexcomm_optimizer::Solver;
use flexcomm_optimizer::policy::TimeToQuality;
use flexcomm_planner::{Keep, LossWatch, Losses, MeanLoss, PolicyConfig, Verdict};

fn as_modelled(_: &Strategy) -> f64 {
    1.0
}

#[test]
fn the_first_decision_waits_for_what_it_needs() {
    let mut job = Job::new();
    let links = job.s.links.take();
    assert_eq!(job.keeps(), Keep::NoLinks);
    job.s.links = links;
    let compute = job.s.compute.take();
    assert_eq!(job.keeps(), Keep::NoCompute);
    job.s.compute = compute;
    let outcome = job.call();
    let decision = outcome.decision().expect("enough is known");
    assert_eq!((decision.version, decision.parent), (Version(1), Version(0)));
    assert!(decision.reason.starts_with("first decision for 8 ranks, 25 Gbit/s and 1 ms; "), "{}", decision.reason);
    let sums = Collective::ALL.iter().filter(|collective| collective.is_allreduce()).count();
    assert_eq!(outcome.report.alternatives.len(), sums + 5 * (Collective::ALL.len() - sums));
    assert!(!outcome.report.front.is_empty());
    job.run(120, as_modelled);
    job.wait(1.0);
    assert!([Keep::AlreadyBest, Keep::NotSure].contains(&job.keeps()));
}

#[test]
fn on_a_network_that_is_slow_whatever_computing_takes_the_first_step_is_not_waited_for() {
    let mut job = Job::new();
    job.network(0.005, 5e6);
    job.s.compute = None;
    let outcome = job.call();
    let decision = outcome.decision().expect("dense steps take minutes");
    assert!(!decision.plan.is_dense());
    assert!(decision.reason.contains("before the first step"), "{}", decision.reason);
    assert!(outcome.trial.is_none(), "what trials take is not known");
}

#[test]
fn a_network_that_falls_is_followed_and_explained_and_so_is_its_return() {
    let mut job = Job::new();
    job.call();
    job.run(60, as_modelled);
    let before = job.strategy();
    job.network(0.001, 0.25e9);
    let outcomes = job.run(20, as_modelled);
    let after = job.strategy();
    assert!(after.cr() < before.cr(), "{before} to {after}");
    let first = outcomes.iter().find_map(|o| o.decision()).expect("the network is a hundred times slower");
    assert!(first.reason.starts_with("bandwidth fell from 25 Gbit/s to 250 Mbit/s; "), "{}", first.reason);
    for part in [" instead of ", " less time to the same progress", " less time than dense, whose steps take "] {
        assert!(first.reason.contains(part), "{}", first.reason);
    }
    job.network(0.001, 25e9);
    job.run(60, as_modelled);
    assert!(job.strategy().cr() > after.cr(), "{after} to {}", job.strategy());
}

/// Probes follow a change of the network after seconds, steps at once.
#[test]
fn steps_far_off_are_the_network_until_it_is_measured_again() {
    let mut job = Job::new();
    job.call();
    job.run(60, as_modelled);
    let before = job.call();
    let (t_comp, t_sync, gain) = job.truth(&job.strategy());
    job.wait(1.0);
    job.measure(t_comp, 40.0 * t_sync, gain);
    let outcome = job.call();
    let is = outcome.report.in_force.as_ref().unwrap();
    assert!((is.t_sync_s / (40.0 * t_sync) - 1.0).abs() < 0.1, "{} s, measured {} s", is.t_sync_s, 40.0 * t_sync);
    let dense = |o| of(o, "none/dense-ring").t_sync_s;
    assert!(dense(&outcome) > 10.0 * dense(&before), "{} s, before {} s", dense(&outcome), dense(&before));
    // Tests say so, too.
    job.wait(2.0);
    job.network(0.001, 0.5e9);
    let outcomes = job.run(20, |_| 1.0);
    assert!(outcomes.iter().any(|o| o.decision().is_some()), "{}", outcomes[19].report.why);
}

/// On a network that tests find as it was, it is the collective that has become slow.
#[test]
fn a_collective_that_breaks_is_left_though_the_network_is_as_it_was() {
    let mut job = Job::new();
    job.network(0.001, 10e9);
    job.call();
    job.run(60, as_modelled);
    let before = job.strategy().collective();
    for _ in 0..20 {
        job.run(5, |x| if x.collective() == before { 20.0 } else { 1.0 });
        job.network(0.001, 10e9);
    }
    assert_ne!(job.strategy().collective(), before);
    let (_, t_sync, _) = job.truth(&job.strategy());
    let report = job.call().report;
    let is = report.in_force.unwrap().t_sync_s;
    assert!((is / t_sync - 1.0).abs() < 0.3, "{is} s, measured {t_sync} s: the network is known again");
}

#[test]
fn a_strategy_stays_for_the_dwell_time_and_an_announced_one_is_waited_for() {
    let mut job = Job::new();
    job.call();
    job.wait(2.0);
    job.network(0.001, 0.25e9);
    assert_eq!(job.keeps(), Keep::Dwell);
    job.s.in_force.as_mut().unwrap().applied_at_step = None;
    job.wait(10.0);
    assert_eq!(job.keeps(), Keep::NotApplied);
    job.wait(20.0);
    assert!(job.call().decision().is_some(), "a rank whose agent is gone never reports");
}

#[test]
fn steps_that_are_slower_than_dense_ones_are_left_within_the_dwell_time() {
    let mut job = Job::new();
    job.s.config.dwell_s = seconds(300.0);
    job.call();
    assert!(!job.strategy().is_dense());
    job.run(10, as_modelled);
    let (t_comp, t_sync, gain) = job.truth(&job.strategy());
    for _ in 0..10 {
        job.wait(1.0);
        // The machine compresses a hundred times slower than it did.
        job.measure(100.0 * t_comp, t_sync, gain);
        if let Some(decision) = job.call().decision() {
            assert!(decision.plan.is_dense(), "{}", decision.reason);
            assert!(decision.reason.contains("; dense ones are expected to take "), "{}", decision.reason);
            return;
        }
    }
    panic!("{} stays", job.strategy());
}

#[test]
fn what_the_job_no_longer_offers_is_left_for_the_best_that_it_does() {
    let mut job = Job::new();
    job.call();
    let before = job.strategy();
    job.wait(60.0);
    job.s.offer.collectives.retain(|c| *c != before.collective());
    let outcome = job.call();
    let decision = outcome.decision().expect("it cannot stay");
    assert!(decision.reason.contains("the best that the job still offers"), "{}", decision.reason);
    assert!(!outcome.report.alternatives.iter().any(|a| a.plan == before));
}

#[test]
fn a_least_gain_that_the_operator_sets_is_a_limit() {
    let mut job = Job::new();
    job.network(0.001, 0.25e9);
    job.call();
    let free = job.call().report.in_force.unwrap().gain.get();
    job.wait(60.0);
    let limited = TimeToQuality { gain_floor: 0.7, exponent: Some(1.0), momentum: None, steps: None };
    assert!(free < 0.7);
    job.s.config.policy = PolicyConfig::TimeToQuality(limited);
    let outcome = job.call();
    assert!(
        outcome.decision().expect("it is below").reason.contains("policy and settings admit"),
        "{}",
        outcome.report.why
    );
    assert!(of(&outcome, &job.strategy().to_string()).gain.get() >= 0.7);
    assert!(outcome.report.alternatives.iter().all(|a| a.score.is_none() || a.gain.get() >= 0.7));
}

#[test]
fn every_policy_decides_by_its_own_score() {
    for name in PolicyConfig::NAMES {
        let mut job = Job::new();
        job.s.config.policy = PolicyConfig::by_name(name).unwrap();
        job.network(0.001, 1e9);
        let first = job.call();
        assert!(first.decision().is_some() && !job.strategy().is_dense(), "{name}: {}", first.report.why);
        assert_eq!(first.report.policy, name);
        job.run(60, as_modelled);
        job.network(50e-6, 400e9);
        job.run(60, as_modelled);
        let report = job.call().report;
        let best = report.alternatives.iter().filter_map(|a| a.score).fold(f64::INFINITY, f64::min);
        let is = report.in_force.unwrap().score.unwrap();
        assert!(is <= 1.1 * best, "{name}: {} at {is}, best is {best}", job.strategy());
    }
}

#[test]
fn a_job_that_ends_soon_changes_nothing_more() {
    let mut job = Job::new();
    job.call();
    job.run(30, as_modelled);
    job.network(0.001, 0.25e9);
    job.has_steps(100.0, 99);
    job.wait(1.0);
    let mut longer = job.clone();
    let outcome = job.call();
    assert_eq!(outcome.verdict, Verdict::Keep(Keep::NotSure), "{}", outcome.report.why);
    // One that has taken more steps than its policy has goes on for as long as one whose policy has none.
    for (steps, taken) in [(1e4, 99), (100.0, 100)] {
        longer.has_steps(steps, taken);
        let mut job = longer.clone();
        assert!(job.call().decision().is_some(), "{taken} of {steps}");
    }
}

#[test]
fn links_that_newer_steps_contradict_are_told_of() {
    let mut job = Job::new();
    job.call();
    let claimed = job.run(10, as_modelled);
    assert_eq!(claimed[9].report.contradicted_s, None);
    let (t_comp, t_sync, gain) = job.truth(&job.strategy());
    job.latencies(0.001, 1e6);
    job.wait(1.0);
    job.measure(t_comp, t_sync, gain);
    let claimed_s = job.call().report.contradicted_s.expect("no step takes so long");
    assert!(claimed_s > 4.0 * (0.025 + t_comp + t_sync));
}

#[test]
fn a_single_rank_sends_nothing() {
    let mut job = Job::new();
    job.s.ranks = 1;
    job.s.profiles = Default::default();
    job.network(0.001, 1e6);
    let outcome = job.call();
    assert!(outcome.decision().is_some_and(|d| d.plan.is_dense()) && outcome.trial.is_none());
    assert!(outcome.report.why.starts_with("first decision for a single rank"), "{}", outcome.report.why);
    job.wait(600.0);
    assert_eq!(job.keeps(), Keep::AlreadyBest);
}

#[test]
fn versions_go_on_from_earlier_runs() {
    let mut job = Job::new();
    job.s.earlier = Version(7);
    assert_eq!(job.call().decision().unwrap().version, next(7));
}

#[test]
fn parts_that_do_not_fit_together_are_named() {
    let spoilt = |spoil: &dyn Fn(&mut Job), named: &str| {
        let mut job = Job::new();
        spoil(&mut job);
        let outcome = job.call();
        assert_eq!(outcome.verdict, Verdict::Keep(Keep::InvalidSnapshot));
        assert!(outcome.report.why.contains(named), "{}", outcome.report.why);
    };
    spoilt(&|job| job.s.ranks = 4, "the link matrix spans 8 ranks, the job has 4");
    spoilt(&|job| job.s.buckets = vec![25_559_999], "sum of the buckets' values is 25559999");
    spoilt(&|job| job.s.buckets = vec![25_560_000, 0], "none of them empty");
    spoilt(&|job| job.s.buckets = vec![1; 5000], "number of buckets is 5000, allowed is at most 4096");
    spoilt(&|job| job.s.config.confidence = f64::NAN, "planner.confidence is NaN");
    spoilt(&|job| job.s.links.as_mut().unwrap().confidence = 2.0, "confidence of the links is 2");
}

/// What backward hides costs nothing: less is compressed where the gradient is sent in buckets.
#[test]
fn what_backward_hides_is_not_compressed() {
    let exposed = |buckets: Vec<u64>| {
        let mut job = Job::new();
        job.s.compute = Some(seconds(0.4));
        job.s.buckets = buckets;
        job.network(0.0001, 10e9);
        of(&job.call(), "none/dense-ring").t_sync_s
    };
    let (whole, ten) = (exposed(vec![]), exposed(vec![2_556_000; 10]));
    assert!(ten < 0.3 * whole, "{ten} s in ten buckets, {whole} s in one");
}

/// Steps of a plan: buckets are ready one after the other in 0.6 of computing, and wait for the ones before.
fn by_bucket(job: &Job, plan: &Plan) -> (f64, f64, f64) {
    let buckets = job.s.buckets.len() as f64;
    let (mut ready, mut end, mut comp, mut kept) = (0.0, 0.0_f64, 0.0, 0.0);
    for bucket in 0..job.s.buckets.len() {
        let (t_comp, t_sync, gain) = job.truth(plan.of(bucket));
        ready += 0.6 * job.s.compute.unwrap().get() / buckets + t_comp / buckets;
        end = end.max(ready) + 4e-4 + t_sync / buckets;
        (comp, kept) = (comp + t_comp / buckets, kept + gain / buckets);
    }
    (comp, end - ready, kept)
}

#[test]
fn a_loss_that_rises_under_compression_is_answered_by_dense_until_it_is_back() {
    let mut job = Job::new();
    job.network(0.001, 1e9);
    job.run(10, |_| 1.0);
    assert!(!job.strategy().is_dense());
    let loss = |mean: f64| MeanLoss { mean, sd: 0.05, first_step: 0, last_step: 23 };
    let look = |job: &mut Job, before: f64, newest: f64| {
        job.s.losses =
            Some(Losses { version: job.s.version(), began: None, before: Some(loss(before)), newest: loss(newest) });
        job.run(1, |_| 1.0).remove(0)
    };
    let fell_less = look(&mut job, 1.0, 0.99);
    assert!(!job.strategy().is_dense(), "{}", fell_less.report.why);
    let noise = look(&mut job, 1.0, 1.2);
    assert!(!job.strategy().is_dense(), "{}", noise.report.why);
    let rose = look(&mut job, 1.0, 1.5);
    assert!(job.strategy().is_dense(), "{}", rose.report.why);
    assert!(rose.report.why.starts_with("the loss rose from 1.000 to 1.500 under "), "{}", rose.report.why);
    for _ in 0..60 {
        let kept = look(&mut job, 1.5, 1.3);
        assert_eq!(kept.verdict, Verdict::Keep(Keep::LossRose), "{}", kept.report.why);
    }
    let mut again = job.clone();
    let back = look(&mut job, 1.5, 0.98);
    assert!(!job.strategy().is_dense(), "{}", back.report.why);
    // What was before is too far back, or no loss is reported any more.
    for (losses, looks) in [(again.s.losses.map(|losses| Losses { before: None, ..losses }), 1), (None, 301)] {
        let mut job = again.clone();
        job.s.losses = losses;
        job.run(looks, |_| 1.0);
        assert!(!job.strategy().is_dense(), "{losses:?}");
    }
    // Where only observed nothing is remembered of a rise.
    again.s.policy.observe = true;
    again.s.in_force.as_mut().unwrap().decision.plan = "topk(k=0.01)+ef(vanilla)/allgather".parse().unwrap();
    again.s.memory.loss_limit = None;
    let observed = look(&mut again, 1.0, 1.5);
    assert_eq!((observed.verdict, again.s.memory.loss_limit), (Verdict::Keep(Keep::Observing), None));
}

#[test]
fn a_loss_that_falls_under_dense_steps_alone_refuses_what_takes_as_many_steps() {
    let mut job = Job::new();
    job.network(0.001, 1e9);
    job.run(60, |_| 1.0);
    let look = |job: &mut Job, step: u64, mean: f64| {
        let newest = MeanLoss { mean, sd: 0.05, first_step: step - 23, last_step: step };
        job.s.losses = Some(Losses { version: job.s.version(), began: Some(2.4), before: None, newest });
        job.run(1, |_| 1.0).remove(0)
    };
    look(&mut job, 30, 2.30);
    look(&mut job, 100, 2.25);
    let compressed = job.s.plan().clone();
    assert!(!compressed.is_dense());
    let flat = look(&mut job, 130, 2.31);
    assert!(job.strategy().is_dense(), "{}", flat.report.why);
    assert!(flat.report.why.starts_with("the loss has not fallen in 123 steps under "), "{}", flat.report.why);
    for step in 160..190 {
        let kept = look(&mut job, step, 2.2);
        assert_eq!(kept.verdict, Verdict::Keep(Keep::LossFlat), "{}", kept.report.why);
    }
    // Nor does it under dense steps: compression is not to blame.
    let mut neither = job.clone();
    for step in [270, 280] {
        look(&mut neither, step, 2.2);
    }
    assert!(!neither.strategy().is_dense());
    // What no loss tells of any more is not waited for; with steps of a second for a while.
    let mut unknown = job.clone();
    unknown.s.losses = None;
    unknown.run(301, |_| 1.0);
    assert!(!unknown.strategy().is_dense());
    for step in 190..300 {
        let outcome = look(&mut job, step, 1.5);
        assert_ne!(*job.s.plan(), compressed, "{}", outcome.report.why);
    }
    assert_eq!(*job.s.memory.loss_watch.refused().unwrap().0, compressed);
    // Where only observed nothing is tested.
    let mut observed = neither.clone();
    observed.s.policy.observe = true;
    observed.s.memory.loss_watch = LossWatch::default();
    for step in [30, 100, 130] {
        look(&mut observed, step, 2.3);
    }
    assert!(matches!(observed.s.memory.loss_watch, LossWatch::Watching { .. }));
}

#[test]
fn an_unbiased_compressor_whose_noise_exceeds_the_gradient_is_never_decided() {
    let chosen = |text: &str| {
        let mut job = Job::new();
        // Messages so small that each would be worth its steps.
        let bytes = CodecBytes { value_bytes: 0.04, ..CodecBytes::DENSE };
        job.s.offer.codecs = [(text.parse().unwrap(), bytes)].into();
        job.network(0.001, 1e8);
        job.run(60, |_| 1.0);
        job.s.plan().clone()
    };
    // A tenth of the values over eight ranks that draw apart: 1.1 of the gradient's energy. Seven levels of the largest value: a thirtieth.
    assert!(chosen("randomk(k=*,scaled=true,shared=false)").is_dense());
    assert!(!chosen("qsgd(s=7,norm=max)").is_dense());
}

/// A network that is nearly good enough: one ratio for all buckets costs more progress than it saves.
#[test]
fn buckets_that_backward_hides_stay_dense_and_the_last_ones_are_compressed() {
    let mut job = Job::new();
    job.s.compute = Some(seconds(0.12));
    job.s.buckets = vec![2_556_000; 10];
    job.network(0.0001, 12e9);
    for _ in 0..120 {
        job.wait(1.0);
        let (t_comp, t_sync, gain) = by_bucket(&job, job.s.plan());
        let noise = 1.0 + 1e-3 * (job.now.0 / 1_000_000 % 7) as f64;
        job.measure(t_comp, t_sync * noise, gain);
        job.call();
    }
    let (plan, outcome) = (job.s.plan().clone(), job.call());
    let price = |plan: &Plan| {
        let (t_comp, t_sync, _) = by_bucket(&job, plan);
        let steps: f64 = plan_gains(&job, plan).map(|gain: f64| -0.24 * gain.ln()).sum::<f64>() / 10.0;
        (0.12 + t_comp + t_sync) * steps.exp()
    };
    let alike = outcome.report.alternatives.iter().filter(|a| a.plan.alike().is_some());
    let best = alike.map(|a| price(&a.plan)).fold(f64::INFINITY, f64::min);
    assert!(plan.of(0).is_dense() && !plan.last().is_dense(), "{plan}: {}", outcome.report.why);
    assert!(price(&plan) < 0.985 * best, "{plan} at {}, the best alike at {best}", price(&plan));
    let parts = plan.to_string().split(" | ").count();
    assert_eq!(outcome.report.solver == Solver::NsgaII, parts > 2, "{plan}: splits in two are listed");
}

fn plan_gains<'a>(job: &'a Job, plan: &'a Plan) -> impl Iterator<Item = f64> + 'a {
    (0..job.s.buckets.len()).map(|bucket| job.truth(plan.of(bucket)).2)
}

/// A job without trials of which settled steps keep far less than is usual; and what it decides in so many seconds.
fn keeps_little() -> Job {
    let mut job = Job::new();
    job.s.profiles = Default::default();
    job.s.config.trial_budget_s = seconds(0.0);
    job.s.config.policy =
        PolicyConfig::TimeToQuality(TimeToQuality { exponent: Some(0.3), ..TimeToQuality::default() });
    job.network(0.001, 2e9);
    job
}

fn decided_in(job: &mut Job, steps: usize) -> Vec<Plan> {
    let mut decided: Vec<Plan> = job.call().decision().map(|d| d.plan.clone()).into_iter().collect();
    let poor = profile(1.2, 0.004);
    for _ in 0..steps {
        job.wait(1.0);
        let is = job.strategy();
        let (t_comp, t_sync, _) = job.truth(&is);
        job.measure(t_comp, t_sync, if is.is_dense() { 1.0 } else { poor.gain(is.cr()).get() });
        if let Some(decision) = job.call().decision() {
            decided.push(decision.plan.clone());
        }
    }
    decided
}

#[test]
fn what_is_not_known_is_tried_in_earnest_and_left_when_it_is_worse() {
    let mut job = keeps_little();
    let tried = decided_in(&mut job, 200);
    assert!(tried.iter().any(|x| !x.is_dense()), "nothing was tried: {}", job.call().report.why);
    assert!(job.strategy().is_dense(), "{} stays, tried {tried:?}", job.strategy());
    assert!(tried.len() < 12, "{tried:?}");
}

#[test]
fn a_later_run_does_not_try_again_what_an_earlier_one_found() {
    let mut first = keeps_little();
    let tried = |decided: Vec<Plan>| decided.iter().filter(|plan| !plan.is_dense()).count();
    let before = tried(decided_in(&mut first, 200));
    let mut second = Job { now: first.now, ..keeps_little() };
    second.network(0.001, 2e9);
    (second.s.begun, second.s.memory) = (first.now, first.s.memory.clone());
    let begins = second.clone().call();
    assert!(begins.decision().is_some(), "at its first look: {}", begins.report.why);
    let after = tried(decided_in(&mut second, 200));
    assert!(after < before && after <= 1, "{before} tried in the first run, {after} in the second");
    assert_eq!(second.s.memory.begun, second.s.begun);
}

#[test]
fn a_later_run_decides_at_its_first_look_what_the_first_run_waited_for_a_trial_for() {
    let unmeasured = || {
        let mut job = Job::new();
        job.s.profiles = Default::default();
        job
    };
    let mut first = unmeasured();
    first.network(0.001, 1e9);
    assert_eq!(first.keeps(), Keep::AwaitingTrial);
    first.wait(2.0);
    first.answer(profile(0.12, 0.004));
    first.run(100, as_modelled);
    assert!(!first.strategy().is_dense());
    let mut second = Job { now: first.now, ..unmeasured() };
    second.network(0.001, 1e9);
    (second.s.begun, second.s.memory) = (first.now, first.s.memory.clone());
    let outcome = second.call();
    let why = &outcome.report.why;
    assert_ne!(outcome.verdict, Verdict::Keep(Keep::AwaitingTrial), "{why}");
    assert!(outcome.decision().is_some() && outcome.trial.is_none(), "{why}");
    // Seconds for the progress of a dense step.
    let price = |of: &Strategy| {
        let (t_comp, t_sync, gain) = first.truth(of);
        (first.s.compute.unwrap().get() + t_comp + t_sync) / gain
    };
    let [is, steady] = [second.strategy(), first.strategy()].map(|of| price(&of));
    assert!(is < 1.25 * steady, "{is} s, what the first run came to {steady} s: {why}");
}

/// A change of the network makes tests worth much, the first tests make the next ones worth less, and what cannot change makes them worth nothing.
#[test]
fn a_test_is_worth_what_may_be_decided_by_it() {
    let mut job = Job::new();
    job.call();
    let known_s = job.run(40, as_modelled).last().unwrap().report.test_worth_s;
    job.latencies(0.01, 0.25e9);
    job.wait(1.0);
    let unknown = job.call();
    let unknown_s = unknown.report.test_worth_s;
    job.s.policy.observe = true;
    assert_eq!(job.call().report.test_worth_s, 0.0, "it only observes");
    job.s.policy.observe = false;
    job.network(0.01, 0.25e9);
    let tested_s = job.run(40, as_modelled).last().unwrap().report.test_worth_s;
    assert!(
        unknown_s > 1.0 && known_s < 0.2 * unknown_s && tested_s < 0.2 * unknown_s,
        "{known_s} {unknown_s} {tested_s}"
    );
}
