//! What decide() does with compressors that keep no share of the values.
#![allow(clippy::unwrap_used)]

mod common;

use common::{Job, learn, profile};
use flexcomm_domain::{CodecBytes, CompressionRatio, Family, Gain};
use flexcomm_optimizer::{Profile, ProfilePoint};

/// What a job offers besides top-k, with what shadows told of it: nothing of bf16, whose rounding is known.
fn with_quantizers() -> Job {
    let mut job = Job::new();
    learn(&mut job.s, profile(0.6, 0.004));
    let bytes = |value, rounds| CodecBytes { value_bytes: value, ..CodecBytes::DENSE }.in_rounds(rounds).unwrap();
    let point = |gain, t_comp_s| {
        let cr = CompressionRatio::DENSE;
        Profile::new(vec![ProfilePoint { cr, gain: Gain::new(gain).unwrap(), t_comp_s, weight: 50.0 }]).unwrap()
    };
    for (text, value, rounds, known) in [
        ("bf16", 2.0, 1, None),
        ("qsgd(s=7,norm=max)+ef(vanilla)", 0.51, 1, Some(point(0.96, 0.02))),
        ("powersgd(rank=2)+ef(vanilla)", 0.03, 2, Some(point(0.3, 0.03))),
    ] {
        let family: Family = text.parse().unwrap();
        job.s.offer.codecs.insert(family, bytes(value, rounds));
        known.map(|known| job.s.profiles.by_selector.insert(family.into(), known));
    }
    job
}

#[test]
fn halves_quantizers_and_sparse_messages_compete() {
    let chosen = |alpha: f64, bandwidth: f64| {
        let mut job = with_quantizers();
        job.network(alpha, bandwidth);
        job.call();
        job.strategy()
    };
    // Half the bytes cost a pass over the values; where the network is faster than that, nothing is compressed.
    assert!(chosen(50e-6, 400e9).is_dense());
    let medium = chosen(0.001, 10e9);
    assert!(["bf16", "qsgd"].contains(&medium.family().name()), "{medium}");
    let slow = chosen(0.001, 100e6);
    assert!(slow.spec().ratio().is_some() || slow.family().name() == "powersgd", "{slow}");
}

#[test]
fn what_is_not_measured_of_a_quantizer_is_asked_for_and_rounding_is_not() {
    let mut job = with_quantizers();
    job.s.profiles.by_selector.retain(|selector, _| selector.family.name() != "qsgd");
    job.network(0.001, 1e9);
    job.wait(100.0);
    let asked = job.call().trial.expect("qsgd is not measured").candidates;
    let names: Vec<_> = asked.iter().map(|candidate| candidate.family().name()).collect();
    assert!(names.contains(&"qsgd") && !names.contains(&"bf16"), "{asked:?}");
}

#[test]
fn a_trial_leaves_out_ratios_and_no_compressor() {
    let mut job = Job::new();
    job.s.profiles = Default::default();
    for family in flexcomm_domain::default_compressors() {
        job.s.offer.codecs.insert(family, flexcomm_optimizer::assumed_bytes(family));
    }
    job.network(0.0001, 100e9);
    let candidates = job.call().trial.expect("nothing is measured").candidates;
    assert!(candidates.len() <= 16, "{candidates:?}");
    for family in flexcomm_domain::default_compressors().into_iter().filter(|f| f.name() != "bf16") {
        assert!(candidates.iter().any(|x| x.family() == family), "{family} is missing in {candidates:?}");
    }
}

/// Two rounds wait for each other, and bytes are the codec's own.
#[test]
fn rounds_and_bytes_of_a_codec_are_charged() {
    let mut job = with_quantizers();
    job.network(0.01, 1e9);
    let report = job.call().report;
    let sync = |text: &str| {
        let found = report.alternatives.iter().find(|a| a.strategy == text.parse().unwrap());
        found.unwrap_or_else(|| panic!("no {text}")).t_sync_s
    };
    let ring = |bytes: f64, rounds: f64| rounds * 14.0 * 0.01 + 14.0 / 8.0 * bytes * 8.0 / 1e9;
    let n = 25_560_000.0;
    for (text, bytes, rounds) in [
        ("none/dense-ring", 4.0, 1.0),
        ("bf16/dense-ring", 2.0, 1.0),
        ("powersgd(rank=2)+ef(vanilla)/dense-ring", 0.03, 2.0),
    ] {
        let expected = ring(bytes * n, rounds);
        assert!((sync(text) / expected - 1.0).abs() < 1e-6, "{text}: {} for {expected}", sync(text));
    }
}

/// A residual of what has no ratio grows for as long as any: what its first steps keep flatters, and moves nobody else's gains.
#[test]
fn a_quantizer_s_steps_say_nothing_of_ratios() {
    let mut job = with_quantizers();
    job.s.config.selections = vec![flexcomm_domain::Selection::Star];
    job.network(0.001, 10e9);
    job.call();
    let chosen = job.strategy();
    assert_eq!(chosen.family().name(), "qsgd");
    let gain_of_topk = |job: &mut Job| {
        let report = job.call().report;
        let found = report.alternatives.iter().find(|a| a.strategy == "topk@0.1/allgather".parse().unwrap());
        found.unwrap().gain.get()
    };
    let before = gain_of_topk(&mut job);
    let p = job.call().report.in_force.unwrap();
    job.wait(300.0);
    job.measure(p.t_step_s, p.t_comp_s, p.t_sync_s, 0.8);
    let after = gain_of_topk(&mut job);
    assert_eq!(job.strategy(), chosen);
    assert!((before - after).abs() < 1e-12, "{before} {after}");
}
