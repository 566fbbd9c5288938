//! What decide() answers in the situations of a job's life.

use crate::common::{Job, learn, profile, seconds};
use flexcomm_domain::{
    Collective, CompressionRatio, Family, Gain, Link, LinkMatrix, Selector, Strategy, Timestamp, Version,
};
use flexcomm_planner::memory::{LinkSummary, Seen};
use flexcomm_planner::{Keep, Measured, PolicyConfig, Trigger, Verdict};

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
    assert_eq!(job.keeps(), Keep::NothingMoved);
}

#[test]
fn a_job_without_a_profile_tries_first_and_follows_the_network_meanwhile() {
    let mut job = Job::new();
    job.s.profiles.by_selector.clear();
    job.s.profiles.measured_at = None;
    let outcome = job.call();
    assert_eq!(outcome.verdict, Verdict::Keep(Keep::AwaitingTrial));
    let trial = outcome.trial.expect("a trial");
    // Each rank for itself, and one for all.
    assert_eq!((trial.candidates.len(), trial.iterations), (10, 10));
    assert!(trial.why.contains("topk"), "{}", trial.why);
    job.wait(1.0);
    let again = job.call();
    assert!(again.trial.is_none(), "asked twice");
    job.wait(1.0);
    job.network(0.001, 15e9);
    assert_eq!(job.keeps(), Keep::AwaitingTrial, "a job that fills its links makes them look slower");
    job.wait(1.0);
    job.network(0.001, 1e9);
    let followed = job.call();
    assert!(followed.decision().is_some(), "{}", followed.report.why);
    assert!(followed.report.why.contains("assumed"), "{}", followed.report.why);
}

/// Links that move before the first trial has answered are followed on assumed gains: only until they are measured.
#[test]
fn what_was_decided_on_assumed_gains_need_not_dwell_once_they_are_measured() {
    let mut job = Job::new();
    job.s.profiles = Default::default();
    job.call();
    job.wait(1.0);
    job.network(0.001, 1e9);
    let assumed = job.call().decision().expect("the links moved").strategy;
    job.wait(1.0);
    job.answer(profile(0.01, 0.004));
    let measured = job.call();
    assert_ne!(measured.decision().expect("little is lost").strategy, assumed);
    job.wait(1.0);
    job.answer(profile(0.9, 0.004));
    assert_eq!(job.keeps(), Keep::Dwell);
}

#[test]
fn what_one_rank_that_selects_for_all_keeps_is_known_apart_and_never_assumed_to_be_more() {
    let gains = |job: &mut Job| {
        let report = job.call().report;
        let gain = |strategy: &str| {
            let found = report.alternatives.iter().find(|a| a.strategy == strategy.parse().unwrap());
            found.expect("an alternative").gain.get()
        };
        (gain("topk@0.1/allgather"), gain("topk@0.1/art-ring:star"), report)
    };
    let mut job = Job::new();
    let for_all: Selector = "topk:star".parse().unwrap();
    job.s.profiles.by_selector.insert(for_all, profile(0.4, 0.004));
    let (own, shared, _) = gains(&mut job);
    assert!((own - 0.1f64.powf(0.12)).abs() < 1e-9 && (shared - 0.1f64.powf(0.4)).abs() < 1e-9);

    let mut job = Job::new();
    job.s.profiles.by_selector.remove(&for_all);
    let (own, shared, report) = gains(&mut job);
    // All that it keeps beyond chance on its own turn, a third of it on the seven others'.
    assert!((shared - (0.1 + (own - 0.1) * (1.0 / 8.0 + 7.0 / 24.0))).abs() < 1e-9, "{shared}, for itself {own}");
    assert!(report.trial.expect("a trial").contains("topk(k=*)+ef(vanilla):star"));
}

#[test]
fn a_trial_that_never_answers_does_not_hold_up_the_job() {
    let mut job = Job::new();
    job.s.profiles.by_selector.clear();
    job.s.profiles.measured_at = None;
    assert_eq!(job.keeps(), Keep::AwaitingTrial);
    job.wait(61.0);
    assert!(job.call().decision().is_some());
    let mut trials = 0;
    for _ in 0..300 {
        job.wait(1.0);
        trials += usize::from(job.call().trial.is_some());
    }
    assert!((1..=4).contains(&trials), "{trials} trials in 300 s");
}

/// Where the next trial may be asked for as soon as the last was given up.
#[test]
fn the_first_decision_waits_for_one_trial_only() {
    let mut job = Job::new();
    job.s.profiles = Default::default();
    job.s.config.trial_interval_s = seconds(5.0);
    assert_eq!(job.keeps(), Keep::AwaitingTrial);
    job.wait(61.0);
    let outcome = job.call();
    assert!(outcome.trial.is_some(), "asked again");
    assert!(outcome.decision().is_some(), "{}", outcome.report.why);
}

#[test]
fn untrusted_links_are_not_acted_on() {
    let mut job = Job::new();
    job.call();
    job.wait(20.0);
    job.network(0.05, 1e8);
    job.s.links.as_mut().unwrap().confidence = 0.1;
    let outcome = job.call();
    assert_eq!(outcome.verdict, Verdict::Keep(Keep::UntrustedLinks));
    assert!(outcome.report.why.contains("confidence 0.1"), "{}", outcome.report.why);
    job.network(0.05, 1e8);
    job.s.links.as_mut().unwrap().age = seconds(500.0);
    assert_eq!(job.keeps(), Keep::UntrustedLinks);
    job.network(0.05, 1e8);
    assert!(job.call().decision().is_some());
}

/// Four ranks whose ring is known as it was while all other links have fallen: a dense ring looks cheap and is not.
#[test]
fn what_sends_more_waits_until_every_link_is_measured_after_a_fall() {
    let mut job = Job::new();
    job.s.ranks = 4;
    job.network(0.001, 1e8);
    job.call();
    let before = job.strategy();
    assert!(!before.is_dense());
    job.wait(60.0);
    job.call();
    let ring = |i: usize, j: usize| j == (i + 1) % 4;
    let partly = |i, j| Link::new(0.001, if ring(i, j) { 25e9 } else { 4e6 }).unwrap();
    job.wait(5.0);
    job.s.links.as_mut().unwrap().matrix = LinkMatrix::from_fn(4, partly).unwrap();
    job.s.links.as_mut().unwrap().oldest = seconds(4.0);
    let outcome = job.call();
    assert!(outcome.report.best.as_ref().unwrap().strategy.cr() > before.cr(), "{:?}", outcome.report.best);
    assert_eq!(outcome.verdict, Verdict::Keep(Keep::LinksMoving), "{}", outcome.report.why);
    job.wait(3.0);
    assert_eq!(job.keeps(), Keep::LinksMoving);
    // Now everything is measured since, and it is true.
    job.s.links.as_mut().unwrap().oldest = seconds(1.0);
    let outcome = job.call();
    assert!(outcome.decision().is_some_and(|d| d.strategy.cr() > before.cr()), "{}", outcome.report.why);
}

/// Latency has risen on all links, and bandwidth fallen on those that are measured: many small messages are slow there however
/// fast the others may still be.
#[test]
fn what_sends_more_need_not_wait_where_it_wins_on_the_slowest_link_too() {
    let mut job = Job::new();
    job.s.ranks = 4;
    job.network(0.0001, 2e8);
    job.call();
    let before = job.strategy();
    assert_eq!(before.collective(), flexcomm_domain::Collective::ArtRing, "{before}");
    job.wait(60.0);
    job.network(0.2, 1.5e8);
    job.s.links.as_mut().unwrap().oldest = seconds(90.0);
    let outcome = job.call();
    let after = outcome.decision().unwrap_or_else(|| panic!("{}", outcome.report.why)).strategy;
    assert_eq!((after.collective(), after.cr()), (flexcomm_domain::Collective::Allgather, before.cr()));
}

/// Links that go on falling and rising below what they once were: there is always one not measured since.
#[test]
fn what_sends_more_does_not_wait_for_ever_on_links_that_flap() {
    let mut job = at_the_floor(0.39);
    job.s.config.links_settle_s = seconds(2.0);
    job.call();
    job.wait(60.0);
    let before = job.strategy();
    // What it keeps is not what is looked at here.
    job.s.memory.promise = None;
    let mut waited = None;
    for look in 0..60u32 {
        job.wait(5.0);
        job.network(0.001, if look % 4 < 2 { 1e7 } else { 5e6 });
        job.s.links.as_mut().unwrap().oldest = seconds(30.0);
        let p = job.s.in_force.as_ref().map(|f| f.decision.strategy.cr().get().powf(0.44)).unwrap();
        job.measure(0.2, 0.01, 0.1, p);
        let outcome = job.call();
        if let Some(d) = outcome.decision() {
            assert!(d.strategy.cr() > before.cr(), "its gain is below the floor: {}", d.reason);
            waited = Some(5.0 * f64::from(look));
            break;
        }
        assert_eq!(outcome.verdict, Verdict::Keep(Keep::LinksMoving), "{}", outcome.report.why);
    }
    let waited = waited.expect("the hold never ends");
    let most = job.s.config.max_link_age_s.get();
    assert!((most - 20.0..most + 20.0).contains(&waited), "after {waited} s");
}

/// A job that fills its links leaves tests little to find out, but a trial has just measured what its candidates take.
#[test]
fn a_first_decision_rests_on_a_fresh_trial_when_links_are_not_trusted() {
    let mut job = Job::new();
    job.s.links.as_mut().unwrap().confidence = 0.1;
    (job.s.profiles.measured_at, job.s.profiles.tried_at) = (Some(job.now), Some(job.now));
    let mut waited = Job { s: job.s.clone(), ..Job::new() };
    assert!(job.call().decision().is_some());
    // It is left when it is measured to be worse than dense was, trusted or not.
    let compressed = job.strategy();
    assert!(!compressed.is_dense());
    job.s.memory.seen = vec![];
    assert_eq!(job.suffers(9.0, 0.0, 8.9, 0.6).verdict, Verdict::Keep(Keep::UntrustedLinks), "only predicted");
    let links = LinkSummary::of(&job.s.links.as_ref().unwrap().matrix);
    let cost = Measured { version: Version(0), gain: Gain::FULL, t_step: seconds(1.0), ..job.s.measured.unwrap() };
    job.s.memory.seen.push(Seen {
        strategy: Strategy::DENSE_RING,
        cost,
        links,
        terms: None,
        at: job.now,
        doubted: false,
    });
    job.wait(30.0);
    let outcome = job.call();
    assert!(outcome.report.rollback && job.strategy().is_dense(), "{}", outcome.report.why);
    waited.wait(200.0);
    assert_eq!(waited.keeps(), Keep::UntrustedLinks);
}

#[test]
fn a_network_that_moves_is_followed_and_explained() {
    let mut job = Job::new();
    job.call();
    let before = job.strategy();
    job.wait(60.0);
    job.network(0.001, 0.25e9);
    let outcome = job.call();
    let decision = outcome.decision().expect("the network is a hundred times slower");
    assert_eq!(decision.version, Version(2));
    assert!(decision.strategy.cr() < before.cr(), "{before} to {}", decision.strategy);
    assert!(decision.reason.contains("bandwidth fell from 25 Gbit/s to 250 Mbit/s"), "{}", decision.reason);
    // The sentence that the crate's walk-through shows.
    let said = "bandwidth fell from 25 Gbit/s to 250 Mbit/s; topk at CR 0.001 by art-ring (star) predicted 61.5 ms per \
                step at gain 0.437 against 536 ms per step at gain 0.582 for the one in force, topk at CR 0.011 by \
                allgather (84.7 % better by time-to-quality)";
    assert_eq!(decision.reason, said);
    job.wait(60.0);
    job.network(0.001, 25e9);
    assert_eq!(job.call().decision().expect("back").strategy, before);
}

#[test]
fn nothing_changes_within_the_dwell_time_and_then_it_does() {
    let mut job = Job::new();
    job.call();
    job.wait(2.0);
    job.network(0.001, 0.25e9);
    assert_eq!(job.keeps(), Keep::Dwell);
    job.wait(2.0);
    assert_eq!(job.keeps(), Keep::Dwell);
    job.wait(7.0);
    let outcome = job.call();
    assert!(outcome.decision().is_some(), "{}", outcome.report.why);
    assert!(outcome.report.triggers.iter().any(|t| matches!(t, Trigger::Deferred { .. })));
    assert!(outcome.report.why.starts_with("bandwidth fell from 25 Gbit/s to 250 Mbit/s; "), "{}", outcome.report.why);
}

/// Estimates follow a change of the network link by link: what stands in between is no network to decide for.
#[test]
fn links_that_are_moving_are_waited_for_but_not_for_ever() {
    let mut job = Job::new();
    job.s.config.links_settle_s = seconds(2.0);
    job.call();
    job.wait(60.0);
    for bandwidth in [5e9, 1e9, 0.25e9] {
        job.network(0.001, bandwidth);
        let outcome = job.call();
        assert_eq!(outcome.verdict, Verdict::Keep(Keep::LinksMoving), "{}", outcome.report.why);
        job.wait(1.5);
    }
    job.wait(0.6);
    let outcome = job.call();
    assert!(outcome.decision().is_some(), "{}", outcome.report.why);
    assert!(outcome.report.why.starts_with("bandwidth fell from 25 Gbit/s to 250 Mbit/s; "), "{}", outcome.report.why);
    let mut waited = 0.0;
    job.wait(60.0);
    while waited < 20.0 && job.call().decision().is_none() {
        job.network(0.001, if job.s.links.as_ref().unwrap().matrix.worst().bandwidth.get() > 1e9 { 1e8 } else { 25e9 });
        job.wait(1.0);
        waited += 1.0;
    }
    assert!((10.0..14.0).contains(&waited), "a network that never is steady: {waited} s");
}

#[test]
fn an_announced_decision_is_waited_for_but_not_for_ever() {
    let mut job = Job::new();
    job.call();
    job.s.in_force.as_mut().unwrap().applied_at_step = None;
    job.wait(15.0);
    job.network(0.001, 0.25e9);
    assert_eq!(job.keeps(), Keep::NotApplied);
    job.wait(20.0);
    assert!(job.call().decision().is_some());
}

#[test]
fn gain_that_moves_asks_for_a_trial_and_its_profile_is_solved_for() {
    let mut job = Job::new();
    job.s.config.policy = "{\"name\":\"time-to-quality\",\"gain_floor\":0.05,\"exponent\":1.0}".parse_policy();
    job.network(0.001, 1e9);
    job.call();
    let chosen = job.strategy();
    assert!(!chosen.is_dense());
    let gain = chosen.cr().get().powf(0.12);
    let p = job.call().report.in_force.unwrap();
    job.wait(61.0);
    job.measure(p.t_step_s, p.t_comp_s, p.t_sync_s, gain);
    assert!(job.call().trial.is_none());
    job.wait(5.0);
    job.measure(p.t_step_s, p.t_comp_s, p.t_sync_s, gain * 0.95);
    assert!(job.call().trial.is_none(), "5 % is no change");
    job.measure(p.t_step_s, p.t_comp_s, p.t_sync_s, gain * 0.6);
    let outcome = job.call();
    let trial = outcome.trial.expect("the gain fell by 40 %");
    assert!(trial.why.contains("gain in force moved"), "{}", trial.why);
    job.wait(10.0);
    // Strong compression now loses nearly everything.
    job.answer(profile(0.8, 0.004));
    job.measure(p.t_step_s, p.t_comp_s, p.t_sync_s, chosen.cr().get().powf(0.8));
    let outcome = job.call();
    let decision = outcome.decision().expect("a new profile");
    assert!(decision.strategy.cr() > chosen.cr(), "{} after {chosen}", decision.strategy);
    assert!(decision.reason.contains("trial"), "{}", decision.reason);
}

trait ParsePolicy {
    fn parse_policy(&self) -> flexcomm_planner::PolicyConfig;
}

impl ParsePolicy for str {
    fn parse_policy(&self) -> flexcomm_planner::PolicyConfig {
        serde_json::from_str(self).unwrap()
    }
}

#[test]
fn gains_follow_the_measured_one_until_the_next_trial() {
    let mut job = Job::new();
    job.network(0.001, 1e9);
    job.call();
    let chosen = job.strategy();
    let p = job.call().report.in_force.unwrap();
    job.wait(60.0);
    let measured = p.gain.get().powf(2.0);
    job.measure(p.t_step_s, p.t_comp_s, p.t_sync_s, measured);
    let report = job.call().report;
    assert!((report.seen.gain_correction.unwrap() - 2.0).abs() < 1e-9);
    for a in report.alternatives.iter().filter(|a| !a.strategy.is_dense()) {
        // A power of 2 at the ratio in force and at smaller ones, falling to 1 at dense, where there is no residual.
        let (c, at) = (a.strategy.cr().get(), chosen.cr().get());
        let power = if c <= at { 2.0 } else { 1.0 + c.ln() / at.ln() };
        assert!((a.gain.get() - c.powf(0.12 * power)).abs() < 1e-9, "{}", a.strategy);
    }
    assert!(job.strategy() == chosen);
    job.measure(p.t_step_s, p.t_comp_s, p.t_sync_s, p.gain.get() * 0.95);
    assert_eq!(job.call().report.seen.gain_correction, None);
}

/// Settled steps at 0.001 keep less than the trial, which began with a fresh residual, said.
#[test]
fn what_a_trial_flattered_is_remembered_and_not_chosen_again() {
    let mut job = Job::new();
    job.network(0.001, 0.6e9);
    job.call();
    let biased = job.strategy();
    let p = job.call().report.in_force.unwrap();
    let (said, kept) = (p.gain.get(), p.gain.get().powf(2.2));
    job.wait(1.0);
    job.measure(p.t_step_s, p.t_comp_s, p.t_sync_s, said);
    assert_eq!(job.call().report.seen.gain_correction, None, "nothing has settled");
    job.wait(60.0);
    job.measure(p.t_step_s, p.t_comp_s, p.t_sync_s, kept);
    let seen = job.call().report.seen.gain_correction.unwrap();
    assert!((seen - 2.2).abs() < 1e-9, "{seen}");
    // Back on a fast network another ratio runs; what was learned of the first one stays.
    job.network(0.001, 25e9);
    job.wait(60.0);
    job.call();
    assert_ne!(job.strategy(), biased);
    let q = job.call().report.in_force.unwrap();
    job.wait(60.0);
    let fresh = profile(0.12, 0.004).gain(job.strategy().cr()).get();
    job.s.profiles.measured_at = Some(job.now);
    job.measure(q.t_step_s, q.t_comp_s, q.t_sync_s, fresh);
    let report = job.call().report;
    let again = report.alternatives.iter().find(|a| a.strategy == biased).unwrap();
    assert!((again.gain.get() - kept).abs() < 1e-9, "{} expected, {kept}", again.gain.get());
}

#[test]
fn a_gain_of_a_residual_that_has_not_settled_asks_for_no_trial_and_moves_nothing() {
    let mut job = Job::new();
    job.network(0.001, 0.6e9);
    job.call();
    let p = job.call().report.in_force.unwrap();
    job.wait(61.0);
    job.s.memory.dwell_from = Some(job.now);
    for gain in [1.0, 0.97, 0.9, 0.8, 0.7] {
        // Higher than the trial said, and falling: the residual fills.
        job.measure(p.t_step_s, p.t_comp_s, p.t_sync_s, (p.gain.get() * 1.5 * gain).min(0.99));
        let outcome = job.call();
        assert!(outcome.trial.is_none() && outcome.decision().is_none(), "{}", outcome.report.why);
        assert_eq!(outcome.report.seen.gain_correction, None);
        job.wait(0.5);
    }
}

#[test]
fn while_dense_runs_an_old_profile_is_measured_again_only_where_compressing_could_win() {
    let trials = |bandwidth| {
        let mut job = Job::new();
        // So lossy that dense is best, whatever the network.
        learn(&mut job.s, profile(1.5, 0.001));
        job.s.profiles.measured_at = Some(job.now);
        job.network(0.0001, bandwidth);
        job.call();
        assert!(job.strategy().is_dense());
        job.wait(60.0);
        assert!(job.call().trial.is_none());
        job.wait(70.0);
        job.call().trial.map(|t| t.why)
    };
    assert!(trials(10e9).unwrap().contains("130 s ago"));
    assert_eq!(trials(1e13), None);
}

#[test]
fn a_ratio_for_each_bucket_is_solved_for_and_reported() {
    let bucket = |values, (energy, exponent)| flexcomm_planner::Bucket {
        values,
        energy,
        profile: Some(profile(exponent, 1e-4)),
    };
    let mut job = Job::new();
    job.network(0.00001, 10e9);
    let before = job.call().report;
    assert_eq!(before.buckets, None, "a fused gradient");
    let mut job = Job::new();
    job.network(0.00001, 10e9);
    let each = job.s.gradient_values / 24;
    job.s.buckets = (0..24).map(|i| bucket(each, if i < 6 { (5.0, 0.6) } else { (1.0, 0.05) })).collect();
    job.s.buckets[0].values += job.s.gradient_values % 24;
    let report = job.call().report;
    assert_eq!(report.chosen, before.chosen, "buckets are advice: the decision is the one without them");
    let found = report.buckets.expect("solved with the first decision");
    assert_eq!((found.solver, found.crs.len()), (flexcomm_planner::Solver::NsgaII, 24));
    let mean = |range: std::ops::Range<usize>| {
        range.clone().map(|i| found.crs[i].get().ln()).sum::<f64>() / range.len() as f64
    };
    assert!(mean(0..6) > mean(6..24), "buckets that lose more keep more: {:?}", found.crs);
    job.wait(1.0);
    assert_eq!(job.call().report.buckets, None, "nothing moved, nothing is solved");
    job.s.buckets.truncate(3);
    let outcome = job.call();
    assert_eq!(outcome.verdict, Verdict::Keep(Keep::InvalidSnapshot));
    assert!(outcome.report.why.contains("sum of the buckets' values"), "{}", outcome.report.why);
}

#[test]
fn few_buckets_are_enumerated_and_the_seed_counts_only_in_a_search() {
    let mut job = Job::new();
    let half = job.s.gradient_values / 2;
    let bucket = |values| flexcomm_planner::Bucket { values, energy: values as f64, profile: None };
    job.s.buckets = vec![bucket(half), bucket(job.s.gradient_values - half)];
    let found = job.call().report.buckets.unwrap();
    assert_eq!(found.solver, flexcomm_planner::Solver::Enumeration);
    assert!(found.score.is_some() && found.gain.get() > 0.0);
}

#[test]
fn a_gain_below_the_floor_is_left_at_once() {
    let mut job = Job::new();
    job.network(0.001, 5e7);
    job.call();
    let lossy = job.strategy();
    assert!(lossy.cr().get() < 0.01, "{lossy}");
    let p = job.call().report.in_force.unwrap();
    job.wait(11.0);
    job.measure(p.t_step_s, p.t_comp_s, p.t_sync_s, 0.01);
    let outcome = job.call();
    let decision = outcome.decision().expect("a gain of 0.01 is below the floor of 0.05");
    assert!(decision.strategy.cr() > lossy.cr() && !outcome.report.rollback, "{}", decision.reason);
    assert!(decision.reason.contains("keeps 0.01 of the gradient"), "{}", decision.reason);
}

/// Steps keep `gain` at the ratio in force; what that says of the others follows. The answer of a regular review.
fn keeping(job: &mut Job, gain: f64) -> flexcomm_planner::Outcome {
    let p = job.call().report.in_force.unwrap();
    job.measure(p.t_step_s, p.t_comp_s, p.t_sync_s, gain);
    job.wait(61.0);
    job.call()
}

/// On a network where the smallest ratio is the best that the floor admits.
fn at_the_floor(exponent: f64) -> Job {
    let mut job = Job::new();
    job.s.config.policy = PolicyConfig::default();
    job.network(0.001, 5e7);
    learn(&mut job.s, profile(exponent, 0.004));
    job
}

#[test]
fn what_is_not_in_force_must_clear_the_floor_by_the_margin() {
    // 0.001^0.42 is 0.055, a tenth above the floor.
    let mut job = at_the_floor(0.42);
    job.call();
    assert_eq!(job.strategy().cr().get(), 0.004, "0.055 is too near to be chosen");
    let mut job = at_the_floor(0.39);
    job.call();
    assert_eq!(job.strategy().cr().get(), 0.001, "0.068 is not");
    assert!(keeping(&mut job, 0.055).decision().is_none(), "and 0.055 may stay");
    let left = keeping(&mut job, 0.049);
    assert!(left.decision().is_some_and(|d| d.strategy.cr().get() == 0.004), "{}", left.report.why);
    // Once its residual has settled the one in force keeps more again, and so the ratio that was left would: 0.06.
    job.wait(600.0);
    assert!(keeping(&mut job, 0.004f64.powf(0.46)).decision().is_none());
    let stays = keeping(&mut job, 0.004f64.powf(0.43));
    assert!(stays.decision().is_none(), "{}", stays.report.why);
    let of_smallest = |o: &flexcomm_planner::Outcome| {
        let found = o.report.alternatives.iter().find(|a| a.strategy.cr().get() == 0.001);
        found.map(|a| (a.gain.get() > 0.05, a.score))
    };
    assert_eq!(of_smallest(&stays), Some((true, None)));
    // Steps that keep more than the trial said are no measurement of another ratio; a new trial is.
    assert!(keeping(&mut job, 0.004f64.powf(0.35)).decision().is_none());
    job.answer(profile(0.35, 0.004));
    let back = keeping(&mut job, 0.004f64.powf(0.35));
    assert_eq!(job.strategy().cr().get(), 0.001, "{}", back.report.why);
}

#[test]
fn at_the_floor_another_collective_is_no_new_gain() {
    let mut job = at_the_floor(0.39);
    job.s.offer.collectives.retain(|c| matches!(c, Collective::DenseRing | Collective::ArtRing | Collective::ArtTree));
    job.call();
    let ring = job.strategy();
    assert_eq!((ring.collective(), ring.cr().get()), (Collective::ArtRing, 0.001));
    assert!(keeping(&mut job, 0.055).decision().is_none());
    job.network(0.03, 5e7);
    let moved = job.call();
    let to = moved.decision().expect("a tree pays latency less often").strategy;
    assert_eq!((to.collective(), to.cr()), (Collective::ArtTree, ring.cr()));
}

#[test]
fn the_guard_does_not_go_back_to_what_was_left_for_its_gain() {
    let mut job = at_the_floor(0.39);
    job.call();
    assert!(keeping(&mut job, 0.049).decision().is_some());
    let p = job.call().report.in_force.unwrap();
    let gain = p.gain.get();
    let outcome = job.suffers_in_doubt(4.0 * p.t_step_s, p.t_comp_s, 4.0 * p.t_sync_s, gain);
    let went = outcome.decision().map(|d| d.strategy);
    assert!(!outcome.report.rollback || went.is_some_and(|s| s.is_dense()), "{}", outcome.report.why);
    assert_ne!(job.strategy().cr().get(), 0.001);
}

#[test]
fn a_trial_on_a_slow_network_asks_for_what_fits_its_budget() {
    let mut job = Job::new();
    job.s.profiles = Default::default();
    job.network(0.001, 2e7);
    let trial = job.call().trial.unwrap();
    let crs: Vec<f64> = trial.candidates.iter().map(|c| c.cr().get()).collect();
    assert!(crs.contains(&0.001) && !crs.contains(&0.1), "{crs:?}");
    assert!(trial.budget.get() <= 30.0);
}

/// Shadows of the last trial go on telling while the next one runs.
#[test]
fn news_of_an_older_trial_are_no_answer_of_the_newer_one() {
    let mut job = Job::new();
    job.answer(profile(0.12, 0.004));
    job.call();
    job.wait(1900.0);
    assert!(job.call().trial.is_some(), "the profile is old");
    job.wait(1.0);
    job.s.profiles.measured_at = Some(job.now);
    assert_eq!(job.call().report.trial.as_deref(), Some("under way"));
    job.wait(1.0);
    job.answer(profile(0.12, 0.004));
    assert_eq!(job.call().report.trial, None);
}

/// Asked again and again, it would try others instead each time.
#[test]
fn what_no_trial_can_afford_now_is_not_asked_for() {
    let star = "topk:star".parse().unwrap();
    let mut job = Job::new();
    job.s.profiles.by_selector.remove(&star);
    job.s.config.trial_budget_s = seconds(3.0);
    job.network(0.5, 2e7);
    for _ in 0..3 {
        assert_eq!(job.call().trial, None);
        job.wait(100.0);
    }
    job.network(0.001, 25e9);
    let trial = job.call().trial.unwrap();
    assert!(trial.candidates.iter().any(|c| c.selector() == star), "{trial:?}");
}

#[test]
fn where_compression_does_not_help_the_decision_is_dense() {
    let mut job = Job::new();
    learn(&mut job.s, profile(0.3, 0.5));
    let outcome = job.call();
    assert!(outcome.decision().unwrap().strategy.is_dense());
    assert!(outcome.report.why.contains("no compression is better"), "{}", outcome.report.why);
}

#[test]
fn a_single_rank_is_dense_and_asks_for_nothing() {
    let mut job = Job::new();
    job.s.ranks = 1;
    job.s.profiles = Default::default();
    job.network(0.001, 1e9);
    let outcome = job.call();
    assert_eq!(outcome.decision().unwrap().strategy, Strategy::DENSE_RING);
    assert!(outcome.trial.is_none());
}

#[test]
fn small_wins_and_costly_switches_are_left_alone() {
    let mut job = Job::new();
    job.s.config.hysteresis = 0.8;
    job.call();
    job.wait(60.0);
    job.network(0.001, 12e9);
    assert!(matches!(job.keeps(), Keep::Hysteresis | Keep::AlreadyBest));
    let mut job = Job::new();
    job.call();
    job.wait(60.0);
    job.network(0.001, 0.25e9);
    job.s.remaining = Some(seconds(0.2));
    let outcome = job.call();
    assert_eq!(outcome.verdict, Verdict::Keep(Keep::SwitchCost), "{}", outcome.report.why);
    assert!(outcome.report.why.contains("a switch costs 500 ms"), "{}", outcome.report.why);
}

#[test]
fn a_withdrawn_strategy_is_replaced() {
    let mut job = Job::new();
    job.network(0.001, 1e9);
    job.call();
    let gone = job.strategy().collective();
    job.s.offer.collectives.retain(|c| *c != gone);
    job.wait(20.0);
    let outcome = job.call();
    assert_ne!(outcome.decision().expect("must change").strategy.collective(), gone);
    assert!(outcome.report.why.contains("no longer offered"), "{}", outcome.report.why);
}

#[test]
fn a_clock_that_jumps_back_costs_one_dwell_time_at_most() {
    let mut job = Job::new();
    job.wait(100_000.0);
    job.call();
    job.now = Timestamp(5_000_000);
    assert_eq!(job.keeps(), Keep::NothingMoved);
    job.wait(11.0);
    job.network(0.001, 0.25e9);
    let outcome = job.call();
    assert!(outcome.decision().is_some(), "{}", outcome.report.why);
}

#[test]
fn lost_memory_is_no_disaster() {
    let mut job = Job::new();
    job.call();
    let strategy = job.strategy();
    job.wait(30.0);
    job.s.memory = Default::default();
    assert_eq!(job.keeps(), Keep::AlreadyBest);
    assert_eq!(job.strategy(), strategy);
    let version = job.version();
    job.wait(30.0);
    job.s.memory = Default::default();
    job.network(0.001, 0.25e9);
    assert_eq!(job.call().decision().unwrap().version, version.next());
}

#[test]
fn snapshots_that_do_not_fit_are_named_and_change_nothing() {
    let mut job = Job::new();
    job.s.ranks = 4;
    let outcome = job.call();
    assert_eq!(outcome.verdict, Verdict::Keep(Keep::InvalidSnapshot));
    assert!(outcome.report.why.contains("spans 8 ranks, the job has 4"), "{}", outcome.report.why);
    let mut job = Job::new();
    job.s.config.hysteresis = f64::NAN;
    let outcome = job.call();
    assert!(outcome.report.why.contains("planner.hysteresis is NaN"), "{}", outcome.report.why);
}

#[test]
fn more_compressors_than_fit_a_trial_keep_the_whole_range() {
    let mut job = Job::new();
    job.s.profiles = Default::default();
    for c in ["lwtopk", "mstopk"].map(|c| c.parse::<Family>().unwrap()) {
        job.s.offer.codecs.insert(c, flexcomm_domain::CodecBytes::PAPER);
    }
    job.s.config.crs = (1..=10).map(|i| CompressionRatio::new(0.5 / f64::from(i * i)).unwrap()).collect();
    let trial = job.call().trial.unwrap();
    assert!((6..=16).contains(&trial.candidates.len()), "{:?}", trial.candidates);
    let within = |low, high| trial.candidates.iter().any(|x| (low..=high).contains(&x.cr().get()));
    assert!(within(0.005, 0.01) && within(0.1, 0.5), "{:?}", trial.candidates);
    for c in ["topk", "lwtopk", "mstopk"].map(|c| c.parse::<Family>().unwrap()) {
        assert!(trial.candidates.iter().any(|x| x.family() == c), "{c} is missing");
    }
}

/// The newest steps' median is still that of the network before when the links have just moved.
#[test]
fn what_steps_took_before_the_links_moved_is_not_remembered_of_the_links_after() {
    let mut job = Job::new();
    job.call();
    let p = job.call().report.in_force.unwrap();
    job.wait(60.0);
    job.measure(p.t_step_s, p.t_comp_s, p.t_sync_s, p.gain.get());
    let of_links = |job: &mut Job| {
        let strategy = job.strategy();
        let memory = job.call().memory;
        memory.seen.iter().find(|x| x.strategy == strategy).map(|x| x.links.bandwidth_mean_bps)
    };
    let fast = of_links(&mut job).expect("remembered");
    job.wait(1.0);
    job.network(0.001, 1e7);
    job.s.config.dwell_s = seconds(1000.0);
    assert_eq!(of_links(&mut job), Some(fast));
    job.wait(3600.0);
    job.network(0.001, 1.01e7);
    assert!(of_links(&mut job).unwrap() < fast / 100.0);
}
