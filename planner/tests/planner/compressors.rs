//! What decide() does with compressors that keep no share of the values.

use crate::common::{Job, learn, of, profile};
use flexcomm_domain::{CodecBytes, CompressionRatio, Family, Gain};
use flexcomm_estimation::{Profile, ProfilePoint};

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
        ("qsgd(s=7,norm=max)+ef(vanilla)", 0.25, 1, Some(point(0.96, 0.02))),
        ("powersgd(rank=2)+ef(vanilla)", 0.03, 2, Some(point(0.01, 0.03))),
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

/// The candidates of the first trial that is asked for on slower and slower networks.
fn asked(job: impl Fn() -> Job) -> Vec<flexcomm_domain::Strategy> {
    let at = |bandwidth: f64| {
        let mut job = job();
        job.network(0.0001, bandwidth);
        // A network that has not changed for two hours will hold for long: much can be saved on it.
        let compute = job.s.compute.take();
        for _ in 0..120 {
            job.wait(60.0);
            job.call();
        }
        job.s.compute = compute;
        job.call().trial
    };
    [1e11, 4e10, 2e10, 1e10, 5e9, 2e9].into_iter().find_map(at).expect("it pays somewhere").candidates
}

#[test]
fn what_is_not_measured_of_a_quantizer_is_asked_for_and_rounding_is_not() {
    let candidates = asked(|| {
        let mut job = with_quantizers();
        job.s.profiles.by_selector.retain(|selector, _| selector.family.name() != "qsgd");
        job
    });
    let names: Vec<_> = candidates.iter().map(|candidate| candidate.family().name()).collect();
    assert!(names.contains(&"qsgd") && !names.contains(&"bf16"), "{candidates:?}");
}

#[test]
fn a_trial_leaves_out_ratios_rather_than_compressors() {
    let candidates = asked(|| {
        let mut job = Job::new();
        job.s.profiles = Default::default();
        for family in flexcomm_domain::default_compressors() {
            job.s.offer.codecs.insert(family, flexcomm_estimation::assumed_bytes(family));
        }
        job
    });
    assert!(candidates.len() <= 16, "{candidates:?}");
    let families: std::collections::BTreeSet<_> = candidates.iter().map(|x| x.family()).collect();
    // What takes longest to compress may not fit the budget.
    assert!(families.len() >= 6, "{families:?}");
}

/// Two rounds wait for each other, and bytes are the codec's own.
#[test]
fn rounds_and_bytes_of_a_codec_are_charged() {
    let mut job = with_quantizers();
    job.network(0.01, 1e9);
    let report = job.call();
    let ring = |bytes: f64, rounds: f64| rounds * 14.0 * 0.01 + 14.0 / 8.0 * bytes * 8.0 / 1e9;
    let n = 25_560_000.0;
    for (text, bytes, rounds) in [
        ("none/dense-ring", 4.0, 1.0),
        ("bf16/dense-ring", 2.0, 1.0),
        ("powersgd(rank=2)+ef(vanilla)/dense-ring", 0.03, 2.0),
    ] {
        let (expected, is) = (ring(bytes * n, rounds), of(&report, text).terms.total());
        assert!((is / expected - 1.0).abs() < 1e-3, "{text}: {is} for {expected}");
    }
}

/// What the steps of a compressor without ratios keep moves the gains of ratios by nothing.
#[test]
fn a_quantizer_s_steps_say_nothing_of_ratios() {
    let mut job = with_quantizers();
    job.network(0.001, 10e9);
    job.call();
    let chosen = job.strategy();
    assert_eq!(chosen.family().name(), "qsgd");
    let before = of(&job.call(), "topk@0.1/allgather").gain.get();
    let (t_comp, t_sync, _) = job.truth(&chosen);
    job.wait(1.0);
    job.measure(t_comp, t_sync, 0.8);
    let after = of(&job.call(), "topk@0.1/allgather").gain.get();
    assert!((before / after - 1.0).abs() < 1e-2, "{before} {after}");
}

/// A job that offers these, besides top-k with error feedback whose gains are known.
fn offering(texts: &[&str]) -> Job {
    let mut job = Job::new();
    for text in texts {
        let bytes = CodecBytes { value_bytes: 0.51, ..CodecBytes::DENSE };
        job.s.offer.codecs.insert(text.parse().unwrap(), bytes);
    }
    job.network(0.001, 1e9);
    job
}

fn is_candidate(job: &mut Job, family: &str) -> bool {
    let family: Family = family.parse().unwrap();
    job.call().report.alternatives.iter().any(|a| a.plan.last().family() == family)
}

#[test]
fn biased_compressors_without_memory_are_left_out_with_the_reason_unless_a_key_allows_them() {
    let texts = ["topk(k=*)", "eightbit", "fp16", "qsgd(s=7,norm=max)"];
    let mut job = offering(&texts);
    assert_eq!(texts.map(|text| is_candidate(&mut job, text)), [false, false, true, true]);
    let report = job.call().report;
    let names: Vec<String> = report.left_out.iter().map(|(family, _)| family.to_string()).collect();
    assert_eq!(names, ["eightbit", "topk(k=*)"]);
    let why = report.left_out[0].1.to_string();
    assert!(why.contains("+ef(vanilla)") && why.contains("planner.biased_without_memory = true"), "{why}");
    job.s.config.biased_without_memory = true;
    assert_eq!(texts.map(|text| is_candidate(&mut job, text)), [true; 4]);
    assert!(job.call().report.left_out.is_empty());
}

#[test]
fn what_is_offered_on_request_is_a_candidate_where_policy_or_settings_name_it() {
    let texts = ["topk", "terngrad", "dgc(k=*)+ef(vanilla)"];
    let mut job = offering(&texts);
    job.s.offer.on_request = ["terngrad", "dgc(k=*)+ef(vanilla)"].map(|text| text.parse().unwrap()).into();
    assert_eq!(texts.map(|text| is_candidate(&mut job, text)), [true, false, false]);
    assert!(job.call().report.left_out.is_empty(), "what was not requested is not listed");
    let why = job.s.left_out(&"terngrad".parse().unwrap()).unwrap().to_string();
    assert!(why.contains("policy") && why.contains("attach(candidates="), "{why}");
    job.s.offer.codecs.insert("signsgd".parse().unwrap(), CodecBytes { value_bytes: 0.04, ..CodecBytes::DENSE });
    job.s.offer.on_request.insert("signsgd".parse().unwrap());
    assert!(job.call().report.left_out.is_empty(), "nor that it would be biased");
    job.s.policy.kinds = Some(["topk", "signsgd"].map(|kind| kind.parse().unwrap()).into());
    let left_out = job.call().report.left_out;
    assert_eq!(left_out, [("signsgd".parse().unwrap(), flexcomm_planner::LeftOut::Biased)], "of what the policy names");
    job.s.policy.kinds = Some(["topk", "terngrad"].map(|kind| kind.parse().unwrap()).into());
    assert_eq!(texts.map(|text| is_candidate(&mut job, text)), [true, true, false]);
    job.s.policy.kinds = None;
    job.s.config.compressors = Some(["dgc(k=*)+ef(vanilla)".parse().unwrap()].into());
    assert_eq!(texts.map(|text| is_candidate(&mut job, text)), [false, false, true]);
}

/// Onebit, gradzip and the rest of the registry; signs without a magnitude where biased compressors are allowed.
#[test]
fn every_compressor_offered_on_request_is_decided_where_the_policy_names_it_and_costs_nothing_else() {
    let (all, mut chosen) = (flexcomm_domain::further_compressors(), 0);
    for family in all.clone() {
        let mut job = Job::new();
        job.s.config.biased_without_memory = family.name().starts_with("sign");
        job.s.profiles = Default::default();
        job.s.offer.codecs = [(family, CodecBytes { value_bytes: 0.02, ..CodecBytes::DENSE })].into();
        job.s.offer.on_request = [family].into();
        job.network(0.001, 40e6);
        let outcome = job.call();
        assert!(outcome.trial.is_none() && outcome.report.alternatives.iter().all(|a| a.plan.is_dense()), "{family}");
        job.s.policy.kinds = Some([(&family).into()].into());
        assert!(is_candidate(&mut job, &family.to_string()), "{family}");
        job.wait(1000.0);
        let outcome = job.call();
        chosen += usize::from(job.strategy().family() == family);
        let asked: Vec<_> = outcome.trial.into_iter().flat_map(|trial| trial.candidates).collect();
        assert!(asked.iter().all(|x| x.family() == family), "{family}: {asked:?}");
    }
    // Over such a network any pays that does not lose most of the gradient for good.
    assert!(2 * chosen > all.len(), "{chosen} of {}", all.len());
}

#[test]
fn a_job_runs_and_tries_only_the_kinds_that_its_policy_allows() {
    let mut job = with_quantizers();
    job.network(0.001, 1e9);
    let first = job.call();
    assert!(!job.strategy().is_dense(), "{}", first.report.why);
    let before = job.strategy().family().name();
    job.wait(1000.0);
    job.s.policy.kinds = Some(["bf16".parse().unwrap()].into());
    let outcome = job.call();
    assert!(before != "bf16" && job.strategy().family().name() == "bf16", "{}", outcome.report.why);
    let kinds = |outcome: &flexcomm_planner::Outcome| -> Vec<&str> {
        outcome.report.alternatives.iter().map(|a| a.plan.last().family().name()).collect()
    };
    assert!(kinds(&outcome).iter().all(|kind| ["none", "bf16"].contains(kind)), "{:?}", kinds(&outcome));
    let asked = outcome.trial.iter().flat_map(|trial| &trial.candidates).map(|x| x.family().name());
    assert!(asked.clone().all(|kind| kind == "bf16"), "{:?}", asked.collect::<Vec<_>>());
    job.wait(1000.0);
    job.s.policy.kinds = Some([].into());
    let outcome = job.call();
    assert!(job.strategy().is_dense() && kinds(&outcome).iter().all(|kind| *kind == "none"), "dense always may");
}

/// By what trials have measured, else by what it has on normally distributed values.
#[test]
fn an_unbiased_compressor_without_memory_pays_for_its_variance() {
    let mut job = offering(&["qsgd(s=4)", "qsgd(s=7,norm=max)"]);
    job.s.profiles.by_selector.clear();
    let coarse: Family = "qsgd(s=4)".parse().unwrap();
    let gain = Gain::new(0.2).unwrap();
    let point = ProfilePoint { cr: CompressionRatio::DENSE, gain, t_comp_s: 0.001, weight: 50.0 };
    job.s.profiles.by_selector.insert(coarse.into(), Profile::new(vec![point]).unwrap());
    let outcome = job.call();
    let (coarse, fine) = (of(&outcome, "qsgd(s=4)/allgather"), of(&outcome, "qsgd(s=7,norm=max)/allgather"));
    assert!((coarse.variance / (4.0 / 8.0) - 1.0).abs() < 0.1, "{}", coarse.variance);
    assert!((0.002..0.02).contains(&fine.variance), "{}", fine.variance);
    for a in [coarse, fine] {
        let expected = a.t_step_s * (1.0 + a.variance);
        assert!((a.score.unwrap() / expected - 1.0).abs() < 0.1, "{}: {:?} for {expected}", a.plan, a.score);
    }
}
