use super::*;
use crate::{ProfilePoint, Sample, cost};
use flexcomm_domain::{Collective, CompressionRatio, Link};
use proptest::prelude::{prop_assert, proptest};

fn problem(n: usize) -> Problem {
    Problem::new(25_560_000, LinkMatrix::uniform(n, Link::new(1e-3, 1e10).unwrap()).unwrap())
}

#[test]
fn without_measurements_it_is_the_papers_model() {
    let problem = problem(8);
    let net = cost::Net::new(1e-3, 1e10, 8);
    let m = 4.0 * 25.56e6;
    for (strategy, expected) in [
        ("none@1/dense-ring", cost::ring(net, m)),
        ("none@1/dense-tree", cost::tree(net, m)),
        ("topk@0.1/allgather", cost::compressed_allgather(net, 0.1 * m)),
        ("topk@0.1/art-ring:star", cost::art_ring(net, 0.1 * m)),
        ("topk@0.1/art-tree:star", cost::art_tree(net, 0.1 * m)),
    ] {
        let found = problem.evaluate(&strategy.parse().unwrap()).unwrap();
        assert!((found.t_sync.get() / expected - 1.0).abs() < 1e-9, "{strategy}: {found:?}");
    }
}

#[test]
fn codecs_coefficients_and_profiles_count() {
    let strategy: Strategy = "topk@0.01/allgather".parse().unwrap();
    let plain = problem(8).evaluate(&strategy).unwrap();
    let mut with = problem(8);
    with.codecs.insert(Compressor::TopK, CodecBytes::new(0, 8.0, 4.0).unwrap());
    let found = with.evaluate(&strategy).unwrap();
    assert!((found.terms.beta_s / plain.terms.beta_s - 1.5).abs() < 1e-9, "12 bytes instead of 8");

    let sample = Sample { terms: plain.terms, measured_s: 2.0 * plain.terms.total() };
    (0..20).for_each(|_| assert!(with.coefficients.observe(Collective::Allgather, "", sample)));
    let fitted = with.evaluate(&strategy).unwrap();
    assert!((fitted.t_sync.get() / found.t_sync.get() - 2.0).abs() < 0.05, "{fitted:?}");
    assert_eq!(fitted.terms, found.terms, "the terms are those before the fit");
    with.backend = "other".into();
    assert_eq!(with.evaluate(&strategy).unwrap().t_sync, found.t_sync, "another backend's fit does not count");

    let cr = CompressionRatio::new(0.01).unwrap();
    let point = ProfilePoint { cr, gain: Gain::new(0.4).unwrap(), t_comp_s: 0.007, weight: 1.0 };
    with.profiles.insert(Compressor::TopK, Profile::new(vec![point]).unwrap());
    let profiled = with.evaluate(&strategy).unwrap();
    assert_eq!((profiled.gain.get(), profiled.t_comp.get()), (0.4, 0.007));
}

#[test]
fn impossible_problems_are_named() {
    let mut p = problem(8);
    p.overlap = f64::NAN;
    let text = p.evaluate(&Strategy::DENSE_RING).unwrap_err().to_string();
    assert!(text.contains("overlap exponent is NaN"), "{text}");
    p.overlap = 1.0;
    p.values = u64::MAX;
    p.links = LinkMatrix::uniform(64, Link::new(0.0, 1e3).unwrap()).unwrap();
    let text = p.evaluate(&"none@1/dense-tree".parse().unwrap()).unwrap_err().to_string();
    assert!(text.contains("predicted t_sync is"), "{text}");
    p.values = 0;
    assert_eq!(p.evaluate(&Strategy::DENSE_RING), Err(ProblemError::Empty(Strategy::DENSE_RING)));
}

#[test]
fn a_problem_survives_json() {
    let mut p = problem(4);
    p.profiles.insert(Compressor::TopK, Profile::prior(1000));
    p.coefficients.observe(
        Collective::ArtRing,
        "tcp",
        Sample { terms: Terms { alpha_s: 0.1, beta_s: 0.2 }, measured_s: 0.4 },
    );
    let json = serde_json::to_string(&p).unwrap();
    assert_eq!(serde_json::from_str::<Problem>(&json).unwrap(), p);
}

proptest! {
    #[test]
    fn overlap_lies_between_the_longer_and_the_sum(a in 0.0..10.0f64, b in 0.0..10.0f64, g in 1.0..10.0f64) {
        let t = overlapped(a, b, g);
        prop_assert!(t >= a.max(b) * (1.0 - 1e-12) && t <= (a + b) * (1.0 + 1e-12), "{t}");
    }

    #[test]
    fn more_kept_values_never_cost_less_or_gain_less(n in 2usize..20, a in 1e-4..0.99f64, b in 1e-4..0.99f64) {
        let problem = problem(n);
        let at = |c: f64| {
            let text = format!("topk@{c}/allgather");
            problem.evaluate(&text.parse().unwrap()).unwrap()
        };
        let (low, high) = (at(a.min(b)), at(a.max(b)));
        prop_assert!(low.t_sync <= high.t_sync && low.gain <= high.gain);
    }
}
