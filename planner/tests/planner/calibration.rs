//! What a job has measured itself outweighs what was fitted elsewhere, and what links claim.

use crate::common::{Job, learn, seconds};
use flexcomm_domain::{CodecBytes, CompressionRatio, Gain, Link, LinkMatrix, Strategy};
use flexcomm_optimizer::{CoefficientBook, Profile, ProfilePoint, Sample, Terms};
use flexcomm_planner::{Links, PolicyConfig, Scatter, Trigger, Verdict};

const BACKEND: &str = "mesh";

/// Two ranks on a fast network: 1.2 million values, dense steps of 2.76 ms of which 0.9 are the collective.
fn fast_pair() -> Job {
    let mut job = Job::new();
    job.s.config = flexcomm_planner::Config {
        links_settle_s: seconds(0.0),
        selections: vec![flexcomm_domain::Selection::Star],
        ..Default::default()
    };
    job.s.config.policy = PolicyConfig::default();
    (job.s.ranks, job.s.gradient_values) = (2, 1_200_000);
    job.s.compute = Some(seconds(1.86e-3));
    job.s.backend = BACKEND.into();
    job.s.offer.codecs.insert("mstopk".parse().unwrap(), CodecBytes::PAPER);
    job.network(18.5e-6, 17.5e9);
    job.measure(2.76e-3, 0.0, 0.9e-3, 1.0);
    job
}

/// Fitted over earlier jobs of the backend: a dense ring that takes twenty times what the links explain.
fn fitted_elsewhere() -> CoefficientBook {
    let mut book = CoefficientBook::default();
    for i in 0..40 {
        let terms = Terms { alpha_s: 2e-3, beta_s: 1e-3 * f64::from(1 + i % 4) };
        let measured_s = if i % 3 == 0 { 60e-3 } else { 17e-3 };
        assert!(book.observe("dense-ring".parse().unwrap(), BACKEND, Sample { terms, measured_s }));
    }
    book
}

/// Trials of ten iterations, which overrate small ratios.
fn overrating() -> Profile {
    let point = |(c, gain): (f64, f64)| ProfilePoint {
        cr: CompressionRatio::new(c).unwrap(),
        gain: Gain::new(gain).unwrap(),
        t_comp_s: 0.4e-3,
        weight: 10.0,
    };
    Profile::new([(0.1, 0.9), (0.033, 0.8), (0.011, 0.7), (0.004, 0.5), (0.001, 0.335)].map(point).to_vec()).unwrap()
}

fn learn_all(job: &mut Job) {
    learn(&mut job.s, overrating());
    for selector in ["mstopk", "mstopk:star"] {
        job.s.profiles.by_selector.insert(selector.parse().unwrap(), overrating());
    }
}

#[test]
fn coefficients_of_earlier_jobs_do_not_outweigh_the_jobs_own_steps() {
    let mut job = fast_pair();
    job.s.coefficients = fitted_elsewhere();
    learn_all(&mut job);
    let outcome = job.call();
    let decision = outcome.decision().expect("a first decision");
    assert!(decision.strategy.is_dense(), "{}", decision.reason);
    let dense = outcome.report.alternatives.iter().find(|a| a.strategy == Strategy::DENSE_RING).unwrap();
    assert!((dense.t_step_s / 2.76e-3 - 1.0).abs() < 0.05, "dense is believed to take {} s", dense.t_step_s);
    assert!(dense.model_sync_s > 14e-3, "what the cost model alone says is reported: {} s", dense.model_sync_s);
}

/// Dense is remembered when something else is in force, and follows the links from there.
#[test]
fn what_dense_was_measured_to_take_is_remembered() {
    let mut job = fast_pair();
    job.s.coefficients = fitted_elsewhere();
    learn_all(&mut job);
    job.call();
    let topk: Strategy = "topk@0.01/allgather".parse().unwrap();
    job.s.in_force.as_mut().unwrap().decision.strategy = topk;
    job.measure(3.4e-3, 0.5e-3, 1e-3, 0.3);
    job.wait(20.0);
    let believed = |job: &mut Job| {
        let outcome = job.call();
        let dense = outcome.report.alternatives.iter().find(|a| a.strategy == Strategy::DENSE_RING).unwrap().clone();
        dense.t_sync_s
    };
    let same = believed(&mut job);
    assert!((same / 0.9e-3 - 1.0).abs() < 0.01, "{same}");
    job.network(18.5e-6, 17.5e8);
    let slower = believed(&mut job);
    assert!(slower > 1.5 * same, "the links are ten times slower: {slower} s");
}

#[test]
fn a_prediction_is_never_further_from_the_newest_steps_than_these_scatter() {
    for (alpha, bandwidth) in [(18.5e-6, 17.5e9), (18.5e-6, 2e9), (5e-3, 1e8), (1e-6, 9e10)] {
        let mut job = fast_pair();
        learn_all(&mut job);
        job.call();
        job.measure(2.76e-3, 0.0, 0.9e-3, 1.0);
        job.s.measured.as_mut().unwrap().scatter = Some(Scatter {
            step_low: seconds(2.6e-3),
            step_high: seconds(3.1e-3),
            sync_low: seconds(0.8e-3),
            sync_high: seconds(1.2e-3),
        });
        job.wait(30.0);
        job.call();
        job.network(alpha, bandwidth);
        job.wait(1.0);
        let in_force = job.call().report.in_force.unwrap();
        assert!((2.6e-3..=3.1e-3).contains(&in_force.t_step_s), "{in_force:?}");
        assert!((0.8e-3..=1.2e-3).contains(&in_force.t_sync_s), "{in_force:?}");
    }
}

/// One node claims a latency of an hour, in one report or in all: its steps go on as they were.
#[test]
fn links_that_steps_contradict_do_not_move_a_working_strategy() {
    let mut job = Job::new();
    job.s.config.policy = PolicyConfig::default();
    job.network(1e-3, 1e9);
    job.call();
    let working = job.strategy();
    let p = job.call().report.in_force.unwrap();
    job.measure(p.t_step_s, p.t_comp_s, p.t_sync_s, p.gain.get());
    let around = |t: f64, by: f64| seconds(t * by);
    job.s.measured.as_mut().unwrap().scatter = Some(Scatter {
        step_low: around(p.t_step_s, 0.9),
        step_high: around(p.t_step_s, 1.2),
        sync_low: around(p.t_sync_s, 0.8),
        sync_high: around(p.t_sync_s, 1.4),
    });
    job.wait(60.0);
    job.call();
    let honest = Link::new(1e-3, 1e9).unwrap();
    for claimed in [Link::new(3600.0, 1e9).unwrap(), Link::new(1e-3, 2e3).unwrap(), Link::new(1e-6, 1e13).unwrap()] {
        let matrix = LinkMatrix::from_fn(8, |from, to| if from == 3 || to == 3 { claimed } else { honest }).unwrap();
        job.s.links = Some(Links { matrix, age: seconds(0.1), oldest: seconds(0.1), confidence: 0.9 });
        for _ in 0..120 {
            job.wait(1.0);
            let outcome = job.call();
            assert!(outcome.decision().is_none(), "{claimed:?}: {}", outcome.report.why);
            assert_eq!(job.strategy(), working);
        }
        job.network(1e-3, 1e9);
        for _ in 0..60 {
            job.wait(1.0);
            assert!(job.call().decision().is_none());
        }
    }
}

/// The claim is true: the steps show it, and the strategy is left as before.
#[test]
fn links_that_steps_confirm_are_followed() {
    let mut job = Job::new();
    job.network(1e-3, 25e9);
    job.call();
    let before = job.strategy();
    job.wait(60.0);
    job.network(1e-3, 0.25e9);
    let (t_step, t_comp, t_sync, gain) = job.truth(1e-3, 0.25e9);
    job.measure(t_step, t_comp, t_sync, gain);
    job.s.measured.as_mut().unwrap().scatter = Some(Scatter {
        step_low: seconds(0.1 * t_step),
        step_high: seconds(t_step),
        sync_low: seconds(0.1 * t_sync),
        sync_high: seconds(t_sync),
    });
    let outcome = job.call();
    let decision = outcome.decision().expect("a hundred times slower, and its steps say so");
    assert!(decision.strategy.cr() < before.cr());
}

#[test]
fn what_keeps_less_than_it_was_chosen_for_is_left() {
    let mut job = fast_pair();
    // Slow enough that compressing pays at the gain that the trial promised.
    job.s.compute = Some(seconds(2e-3));
    job.network(18.5e-6, 2e9);
    job.measure(22e-3, 0.0, 20e-3, 1.0);
    learn_all(&mut job);
    let outcome = job.call();
    let chosen = outcome.decision().unwrap().strategy;
    assert!(!chosen.is_dense(), "{}", outcome.report.why);
    let believed = outcome.report.alternatives.iter().find(|a| a.strategy == chosen).unwrap().clone();
    assert!(believed.gain.get() > 0.3);
    // The steps take what was predicted, and keep a hundredth.
    job.wait(30.0);
    let kept = 0.004;
    let outcome = job.suffers(believed.t_step_s, believed.t_comp_s, believed.t_sync_s, kept);
    assert_ne!(job.strategy(), chosen, "{}", outcome.report.why);
    let left = outcome.report.alternatives.iter().find(|a| a.strategy == job.strategy()).unwrap();
    assert!(left.gain.get() > 10.0 * kept, "for what keeps more: {left:?}");
}

/// Also where nothing else is wrong: no dense measurement is remembered, and time is as predicted.
#[test]
fn a_gain_below_what_was_promised_is_a_regression_of_its_own() {
    let mut job = Job::new();
    job.s.config.policy = PolicyConfig::default();
    job.network(1e-3, 1e9);
    job.call();
    let chosen = job.strategy();
    let p = job.call().report.in_force.unwrap();
    assert!(p.gain.get() > 0.3, "{p:?}");
    let mut spoke = None;
    job.measure(p.t_step_s, p.t_comp_s, p.t_sync_s, 0.06);
    for _ in 0..60 {
        job.wait(1.0);
        let outcome = job.call();
        let guard = |t: &Trigger| matches!(t, Trigger::Guard { what } if what.contains("chosen for"));
        if outcome.report.triggers.iter().any(guard) {
            spoke = Some(outcome.report.why.clone());
            break;
        }
        if let Verdict::Change(d) = &outcome.verdict {
            panic!("left without the guard: {}", d.reason);
        }
    }
    let why = spoke.expect("the guard says nothing");
    assert!(why.contains("0.06"), "{why}");
    assert!(job.strategy() == chosen || job.strategy().cr() > chosen.cr(), "{why}");
}

/// A ratio in force that keeps nearly all says nothing of smaller ones: they keep what was measured for them.
#[test]
fn no_ratio_is_believed_to_keep_more_than_was_measured_for_it() {
    let mut job = Job::new();
    job.network(1e-3, 1e9);
    job.call();
    let measured = job.call().report.alternatives;
    let chosen = job.strategy();
    let p = measured.iter().find(|a| a.strategy == chosen).unwrap();
    for kept in [p.gain.get(), 0.97, 1.0] {
        job.measure(p.t_step_s, p.t_comp_s, p.t_sync_s, kept);
        job.wait(400.0);
        let outcome = job.call();
        for now in &outcome.report.alternatives {
            let then = measured.iter().find(|a| a.strategy == now.strategy).unwrap();
            assert!(now.gain <= then.gain, "{} at {kept}: {} after {}", now.strategy, now.gain.get(), then.gain.get());
        }
    }
}
