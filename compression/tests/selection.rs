//! Every compressor on every kernel against the oracle that follows the definition.
#![allow(clippy::unwrap_used)] // helpers of tests are tests

use flexcomm_compression::Compressor;
use flexcomm_compression::{CompressError, GradientCompressor, Kernel, Layers, Method, naive};
use flexcomm_domain::CompressionRatio;
use proptest::prelude::*;
use rand::{Rng, SeedableRng};
use rand_chacha::ChaCha8Rng;

fn method(compressor: Compressor, cr: f64) -> Method {
    Method::new(compressor, CompressionRatio::new(cr).unwrap())
}

/// Kernels of this machine; says which are absent.
fn kernels() -> Vec<Kernel> {
    for kernel in Kernel::ALL.iter().filter(|k| !k.is_available()) {
        eprintln!("skipped on this machine: {kernel:?}");
    }
    Kernel::available().collect()
}

fn oracle(method: Method, layers: &Layers, values: &[f32], seed: u64) -> Vec<u32> {
    let keep = |n| method.cr.keep(n);
    match method.compressor {
        Compressor::None => (0..values.len() as u32).collect(),
        Compressor::TopK => naive::topk(values, keep(values.len())),
        Compressor::LwTopK => {
            let layers: Vec<_> = layers.ranges().map(|r| (r.len(), keep(r.len()))).collect();
            naive::lwtopk(values, &layers)
        }
        Compressor::MsTopK => naive::mstopk(values, keep(values.len()), seed),
    }
}

/// All that a step promises, for one input with an empty memory.
fn check(method: Method, layers: &Layers, gradient: &[f32], seed: u64) {
    let want = oracle(method, layers, gradient, seed);
    for kernel in kernels() {
        let label = || format!("{method:?} on {kernel:?}, n = {}", gradient.len());
        let mut rank = GradientCompressor::with_kernel(layers.clone(), kernel);
        let sent = rank.compress(method, gradient, seed).unwrap();
        let (selection, energy) = (sent.selection.clone(), sent.energy);
        assert_eq!(selection.indices(), want, "{}", label());
        assert_eq!(selection.len(), method.kept(layers), "{}", label());
        assert_eq!(selection.n(), gradient.len());
        let mut residual = gradient.to_vec();
        for (i, v) in selection.indices().iter().zip(selection.values()) {
            // Error feedback adds +0, which turns -0 into +0.
            assert_eq!(*v, gradient[*i as usize]);
            residual[*i as usize] = 0.0;
        }
        assert_eq!(rank.residual(), residual, "{}", label());
        let norm = |values: &mut dyn Iterator<Item = f32>| values.map(|v| f64::from(v).powi(2)).sum::<f64>();
        let fed = norm(&mut gradient.iter().copied());
        assert!((energy.fed - fed).abs() <= 1e-12 * fed, "{}", label());
        let kept = norm(&mut selection.values().iter().copied());
        assert!((energy.sent - kept).abs() <= 1e-12 * kept, "{}", label());
        assert!((0.0..=1.0).contains(&energy.gain()), "{}", label());
    }
}

fn check_all(cr: f64, layers: &Layers, gradient: &[f32], seed: u64) {
    for compressor in Compressor::ALL {
        check(method(*compressor, cr), layers, gradient, seed);
    }
}

/// Values of every sort: ties, zeros of both signs, denormals, extremes.
fn value() -> impl Strategy<Value = f32> {
    prop_oneof![
        4 => -1.0f32..1.0,
        2 => prop::sample::select(vec![0.0f32, -0.0, 1.0, -1.0, 0.5, -0.5]),
        1 => prop::sample::select(vec![f32::MAX, f32::MIN, f32::MIN_POSITIVE, 1e-45, -1e-45, 1e-40]),
    ]
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(400))]

    #[test]
    fn short_gradients(gradient in prop::collection::vec(value(), 0..300), cr in 0.001..=1.0f64, cut in any::<prop::sample::Index>(), seed: u64) {
        let cut = cut.index(gradient.len() + 1);
        let layers = Layers::new(&[cut, 0, gradient.len() - cut]).unwrap();
        check_all(cr, &layers, &gradient, seed);
    }

    /// Few distinct values: the cut falls into a tie nearly always.
    #[test]
    fn ties(gradient in prop::collection::vec(-2i8..=2, 1..300), cr in 0.001..=1.0f64, seed: u64) {
        let gradient: Vec<f32> = gradient.into_iter().map(f32::from).collect();
        check_all(cr, &Layers::fused(gradient.len()).unwrap(), &gradient, seed);
    }
}

fn normal(rng: &mut ChaCha8Rng) -> f32 {
    let (u, v): (f64, f64) = (1.0 - rng.random::<f64>(), rng.random());
    ((-2.0 * u.ln()).sqrt() * (std::f64::consts::TAU * v).cos()) as f32
}

type Shape = (&'static str, fn(usize, &mut ChaCha8Rng) -> f32);

/// Distributions that are kind and unkind to a sample: heavy tails, periods, one loud corner, plateaus.
const SHAPES: &[Shape] = &[
    ("normal", |_, rng| normal(rng)),
    ("laplace", |_, rng| {
        let u: f64 = rng.random::<f64>() - 0.5;
        (-u.signum() * (1.0 - 2.0 * u.abs()).ln()) as f32
    }),
    ("cubed", |_, rng| normal(rng).powi(9)),
    ("constant", |_, _| -3.5),
    ("zero", |_, _| 0.0),
    ("denormal", |_, rng| f32::from_bits(rng.random_range(0..0x0080_0000))),
    ("ascending", |i, _| i as f32),
    ("descending", |i, _| -1e6 + i as f32),
    ("one loud corner", |i, rng| if i < 700 { 1e3 * normal(rng) } else { 1e-3 * normal(rng) }),
    ("period of the sample", |i, rng| if i % 64 == 0 { 5.0 } else { normal(rng) }),
    ("plateaus", |_, rng| rng.random_range(-3i32..=3) as f32),
    ("one spike", |i, _| if i == 12_345 { 1.0 } else { 0.0 }),
    ("half zero", |i, rng| if i % 2 == 0 { 0.0 } else { normal(rng) }),
];

/// Long gradients take the sampled path; lengths straddle every boundary in the code.
#[test]
fn long_gradients() {
    for (name, shape) in SHAPES {
        for n in [2047, 2048, 2049, 16_383, 16_384, 40_001] {
            let mut rng = ChaCha8Rng::seed_from_u64(n as u64);
            let gradient: Vec<f32> = (0..n).map(|i| shape(i, &mut rng)).collect();
            let layers = Layers::new(&[n / 3, n - n / 3 - 5, 5]).unwrap();
            for cr in [1e-9, 0.001, 0.01, 0.1, 0.5, 0.9999, 1.0] {
                eprintln!("{name}, n = {n}, CR {cr}");
                check_all(cr, &layers, &gradient, 7);
            }
        }
    }
}

/// The floor is sampled from gradient + residual: with a residual of another shape it must still be exact.
#[test]
fn a_residual_of_another_shape() {
    let n = 50_000;
    let layers = Layers::fused(n).unwrap();
    let mut rng = ChaCha8Rng::seed_from_u64(5);
    for kernel in kernels() {
        let mut rank = GradientCompressor::with_kernel(layers.clone(), kernel);
        let mut sum = vec![0.0f32; n];
        for step in 0..10 {
            let gradient: Vec<f32> = (0..n).map(|i| normal(&mut rng) * (1 + i / 1000 * step) as f32).collect();
            sum.iter_mut().zip(&gradient).for_each(|(s, g)| *s += g);
            let method = method(Compressor::TopK, [0.001, 0.05][step % 2]);
            let want = naive::topk(&sum, method.kept(&layers));
            let sent = rank.compress(method, &gradient, 0).unwrap();
            assert_eq!(sent.selection.indices(), want);
            want.iter().for_each(|i| sum[*i as usize] = 0.0);
            assert_eq!(rank.residual(), sum);
        }
    }
}

#[test]
fn tiny_and_empty() {
    for lengths in [&[][..], &[0], &[0, 0], &[1], &[1, 0, 1]] {
        let layers = Layers::new(lengths).unwrap();
        let gradient = vec![-2.0; layers.values()];
        for cr in [0.001, 1.0] {
            check_all(cr, &layers, &gradient, 0);
        }
    }
}

#[test]
fn a_gradient_of_zeros_loses_nothing() {
    let mut rank = GradientCompressor::new(Layers::fused(100).unwrap());
    let sent = rank.compress(method(Compressor::TopK, 0.1), &[0.0; 100], 0).unwrap();
    assert_eq!(sent.selection.indices(), [0, 1, 2, 3, 4, 5, 6, 7, 8, 9]);
    assert_eq!(sent.energy.gain(), 1.0);
}

#[test]
fn energies_of_extremes_do_not_overflow_or_vanish() {
    for value in [f32::MAX, 1e-45] {
        let mut rank = GradientCompressor::new(Layers::fused(20_000).unwrap());
        let sent = rank.compress(method(Compressor::TopK, 0.25), &vec![value; 20_000], 0).unwrap();
        assert!((sent.energy.gain() - 0.25).abs() < 1e-12, "{value}: {}", sent.energy.gain());
    }
}

/// MSTopk's run starts at every place that it can, and only there.
#[test]
fn mstopk_fills_from_a_random_place() {
    // Mean 1, max 1: all values are in the band.
    let starts = |seed| naive::mstopk(&[1.0; 10], 4, seed)[0];
    let seen: std::collections::BTreeSet<u32> = (0..200).map(starts).collect();
    assert_eq!(seen.into_iter().collect::<Vec<_>>(), [0, 1, 2, 3, 4, 5, 6]);
    assert!((0..200).all(|seed| naive::mstopk(&[1.0; 10], 4, seed).windows(2).all(|w| w[1] == w[0] + 1)));
}

/// Before k values stand out, MSTopk takes every value that stands out.
#[test]
fn mstopk_takes_what_stands_out() {
    let mut gradient = vec![0.01f32; 1000];
    (0..5).for_each(|i| gradient[i * 200] = -9.0 + i as f32);
    for seed in 0..50 {
        let picked = naive::mstopk(&gradient, 8, seed);
        assert!((0..5).all(|i| picked.contains(&(i * 200))), "{picked:?}");
        check(method(Compressor::MsTopK, 0.008), &Layers::fused(1000).unwrap(), &gradient, seed);
    }
}

#[test]
fn not_finite_is_named_and_the_memory_stays() {
    for n in [10, 1000, 5000, 40_000] {
        let layers = Layers::new(&[n / 2, n - n / 2]).unwrap();
        for bad in [f32::NAN, -f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
            for at in [0, n / 2, n - 1] {
                for compressor in Compressor::ALL {
                    refuses(&layers, method(*compressor, 0.1), bad, at);
                }
            }
        }
    }
}

fn refuses(layers: &Layers, method: Method, bad: f32, at: usize) {
    let n = layers.values();
    let good: Vec<f32> = (0..n).map(|i| (i as f32).sin()).collect();
    for kernel in kernels() {
        let mut rank = GradientCompressor::with_kernel(layers.clone(), kernel);
        rank.compress(method, &good, 1).unwrap();
        let before = rank.save();
        let mut gradient = good.clone();
        gradient[at] = bad;
        let residual = rank.residual()[at];
        let same = |e: CompressError| match e {
            CompressError::NonFinite { index, gradient, residual: r } => {
                index == at && gradient.to_bits() == bad.to_bits() && r == residual
            }
            _ => false,
        };
        assert!(same(rank.compress(method, &gradient, 2).unwrap_err()));
        assert!(same(rank.select(method, &gradient, 2).unwrap_err()));
        assert!(same(rank.feed(&gradient).unwrap_err()));
        let mut out = vec![0.5; n];
        assert!(same(rank.take_all(&gradient, &mut out).unwrap_err()));
        assert_eq!(out, vec![0.5; n]);
        assert_eq!(rank.take_at(&[0], &mut Vec::new()), Err(CompressError::NotFed));
        assert_eq!(rank.save(), before);
        // And the next step is as if nothing had been.
        let mut twin = GradientCompressor::with_kernel(layers.clone(), kernel);
        twin.restore(&before).unwrap();
        let again = rank.compress(method, &good, 3).unwrap().selection.clone();
        assert_eq!(twin.compress(method, &good, 3).unwrap().selection, &again);
        assert_eq!(twin.save(), rank.save());
    }
}

#[test]
fn a_sum_that_overflows_is_named() {
    let mut rank = GradientCompressor::new(Layers::fused(2).unwrap());
    rank.compress(method(Compressor::TopK, 0.5), &[3e38, 3.1e38], 0).unwrap();
    let error = rank.compress(method(Compressor::TopK, 0.5), &[1e38, 0.0], 0).unwrap_err();
    assert_eq!(error, CompressError::NonFinite { index: 0, gradient: 1e38, residual: 3e38 });
    assert_eq!(rank.residual(), [3e38, 0.0]);
}

#[test]
fn a_wrong_length_is_named() {
    let mut rank = GradientCompressor::new(Layers::fused(3).unwrap());
    let error = rank.compress(method(Compressor::TopK, 0.5), &[0.0; 4], 0).unwrap_err();
    assert_eq!(error, CompressError::Length { what: "it", expected: 3, got: 4 });
    assert_eq!(error.to_string(), "compress a gradient of 3 values: it has 4");
    assert!(rank.take_all(&[0.0; 3], &mut [0.0; 2]).is_err());
}
