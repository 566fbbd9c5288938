//! Every compressor that selects a share of the values, on every kernel, against the oracle that follows the definition.
#![allow(clippy::unwrap_used)] // helpers of tests are tests

use flexcomm_compression::codec::EncodeError;
use flexcomm_compression::pipeline::{Gradient, Member, Pipeline, Step};
use flexcomm_compression::random::Stream;
use flexcomm_compression::wire::Writer;
use flexcomm_compression::{Kernel, Layers, naive};
use flexcomm_domain::CompressionRatio;
use proptest::prelude::*;
use rand::{Rng, SeedableRng};
use rand_chacha::ChaCha8Rng;

const NAMES: [&str; 3] = ["topk", "lwtopk", "mstopk"];

/// Kernels of this machine; says which are absent.
fn kernels() -> Vec<Kernel> {
    for kernel in Kernel::ALL.iter().filter(|k| !k.is_available()) {
        eprintln!("skipped on this machine: {kernel:?}");
    }
    Kernel::available().collect()
}

fn rank((name, cr): (&str, f64), layers: &Layers, (seed, kernel): (u64, Kernel)) -> Pipeline {
    let family: flexcomm_domain::Family = name.parse().unwrap();
    let spec = family.at(CompressionRatio::new(cr).unwrap()).unwrap();
    Pipeline::new(&spec, layers.clone(), Member::alone(seed)).with_kernel(kernel)
}

fn at(index: u64) -> Step {
    Step { index, learning_rate: 1.0 }
}

fn oracle((name, cr): (&str, f64), layers: &Layers, values: &[f32], (seed, step): (u64, u64)) -> Vec<u32> {
    let keep = |n| CompressionRatio::new(cr).unwrap().keep(n);
    match name {
        "topk" => naive::topk(values, keep(values.len())),
        "lwtopk" => {
            let layers: Vec<_> = layers.ranges().map(|r| (r.len(), keep(r.len()))).collect();
            naive::lwtopk(values, &layers)
        }
        _ => {
            let [a, b, ..] = Stream::new(seed, [step, 0, 0, 0]).block(0);
            naive::mstopk(values, keep(values.len()), u64::from(a) << 32 | u64::from(b))
        }
    }
}

/// All that a step promises, for one input with an empty memory: the indices of AR-Topk, and message, residual and energies.
fn check(method: (&str, f64), layers: &Layers, gradient: &[f32], seed: u64) {
    let want = oracle(method, layers, gradient, (seed, 0));
    for kernel in kernels() {
        let label = || format!("{method:?} on {kernel:?}, n = {}", gradient.len());
        let mut own = rank(method, layers, (seed, kernel));
        own.select(Gradient::F32(gradient), at(0), true).unwrap();
        assert_eq!(own.selected(), want, "{}", label());
        let (mut out, mut sent) = (Writer::new(), vec![0.0; gradient.len()]);
        let energy = own.compress(Gradient::F32(gradient), at(0), &mut out).unwrap().energy;
        own.aggregate(&[out.bytes()], 0, &mut sent).unwrap();
        let (mut residual, mut chosen) = (gradient.to_vec(), vec![0.0; gradient.len()]);
        for i in want.iter().map(|i| *i as usize) {
            // Error feedback adds +0, which turns -0 into +0.
            (chosen[i], residual[i]) = (gradient[i], 0.0);
        }
        assert_eq!((own.residual(), sent), (residual, chosen.clone()), "{}", label());
        let norm = |values: &[f32]| values.iter().map(|v| f64::from(*v).powi(2)).sum::<f64>();
        let (compensated, kept) = (norm(gradient), norm(&chosen));
        assert!((energy.compensated - compensated).abs() <= 1e-12 * compensated, "{}", label());
        assert!((energy.sent - kept).abs() <= 1e-12 * kept, "{}", label());
        assert!((0.0..=1.0).contains(&energy.gain()), "{}", label());
    }
}

fn check_all(cr: f64, layers: &Layers, gradient: &[f32], seed: u64) {
    NAMES.iter().for_each(|name| check((name, cr), layers, gradient, seed));
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
    fn short_gradients(gradient in prop::collection::vec(value(), 0..300), cr in 0.001..0.999f64, cut in any::<prop::sample::Index>(), seed: u64) {
        let cut = cut.index(gradient.len() + 1);
        let layers = Layers::new(&[cut, 0, gradient.len() - cut]).unwrap();
        check_all(cr, &layers, &gradient, seed);
    }

    /// Few distinct values: the cut falls into a tie nearly always.
    #[test]
    fn ties(gradient in prop::collection::vec(-2i8..=2, 1..300), cr in 0.001..0.999f64, seed: u64) {
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
        for n in [4095, 4096, 4097, 16_383, 16_384, 40_001] {
            let mut rng = ChaCha8Rng::seed_from_u64(n as u64);
            let gradient: Vec<f32> = (0..n).map(|i| shape(i, &mut rng)).collect();
            let layers = Layers::new(&[n / 3, n - n / 3 - 5, 5]).unwrap();
            for cr in [1e-9, 0.001, 0.01, 0.1, 0.5, 0.9999] {
                eprintln!("{name}, n = {n}, CR {cr}");
                check_all(cr, &layers, &gradient, 7);
            }
        }
    }
}

/// The floor is guessed from the step before, or sampled from gradient + residual: with a residual of another shape it must
/// still be exact, of the whole bucket and of its layers.
#[test]
fn a_residual_of_another_shape() {
    let n = 50_000;
    let layers = Layers::new(&[20_000, 100, n - 20_100]).unwrap();
    for (name, kernel) in NAMES.iter().flat_map(|name| kernels().into_iter().map(move |kernel| (name, kernel))) {
        let mut rng = ChaCha8Rng::seed_from_u64(5);
        let (mut own, mut sum) = (rank((name, 0.001), &layers, (0, kernel)), vec![0.0f32; n]);
        for step in 0..10 {
            let gradient: Vec<f32> = (0..n).map(|i| normal(&mut rng) * (1 + i / 1000 * step) as f32).collect();
            sum.iter_mut().zip(&gradient).for_each(|(s, g)| *s += g);
            let method = (*name, [0.001, 0.001, 0.05][step % 3]);
            own.change(rank(method, &layers, (0, kernel)).spec());
            let want = oracle(method, &layers, &sum, (0, step as u64));
            own.compress(Gradient::F32(&gradient), at(step as u64), &mut Writer::new()).unwrap();
            want.iter().for_each(|i| sum[*i as usize] = 0.0);
            assert_eq!(own.residual(), sum, "{name}, step {step}");
        }
    }
}

#[test]
fn tiny_and_empty() {
    for lengths in [&[][..], &[0], &[0, 0], &[1], &[1, 0, 1]] {
        let layers = Layers::new(lengths).unwrap();
        check_all(0.001, &layers, &vec![-2.0; layers.values()], 0);
    }
}

#[test]
fn energies_of_zeros_and_extremes() {
    for (value, gain) in [(0.0, 1.0), (f32::MAX, 0.25), (1e-45, 0.25)] {
        let layers = Layers::fused(20_000).unwrap();
        let mut own = rank(("topk", 0.25), &layers, (0, Kernel::best()));
        let energy = own.compress(Gradient::F32(&vec![value; 20_000]), at(0), &mut Writer::new()).unwrap().energy;
        assert!((energy.gain() - gain).abs() < 1e-12, "{value}: {}", energy.gain());
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
        check(("mstopk", 0.008), &Layers::fused(1000).unwrap(), &gradient, seed);
    }
}

#[test]
fn not_finite_is_named_and_the_memory_stays() {
    for n in [10, 1000, 5000, 40_000] {
        let layers = Layers::new(&[n / 2, n - n / 2]).unwrap();
        for bad in [f32::NAN, -f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
            for place in [0, n / 2, n - 1] {
                NAMES.iter().for_each(|name| refuses(&layers, name, bad, place));
            }
        }
    }
}

fn refuses(layers: &Layers, name: &str, bad: f32, place: usize) {
    let n = layers.values();
    let good: Vec<f32> = (0..n).map(|i| (i as f32).sin()).collect();
    for kernel in kernels() {
        let [mut own, mut twin] = [(); 2].map(|()| rank((name, 0.1), layers, (3, kernel)));
        let mut out = Writer::new();
        for rank in [&mut own, &mut twin] {
            rank.compress(Gradient::F32(&good), at(1), &mut Writer::new()).unwrap();
        }
        let before = own.residual();
        let mut gradient = good.clone();
        gradient[place] = bad;
        let same = |error| matches!(error, EncodeError::NonFinite { index, .. } if index == place);
        assert!(same(own.compress(Gradient::F32(&gradient), at(2), &mut out).unwrap_err()));
        assert!(same(own.select(Gradient::F32(&gradient), at(2), true).unwrap_err()));
        assert!(own.take(&mut Vec::new()).is_err());
        assert_eq!(own.residual(), before);
        // And the next step is as if nothing had been.
        own.compress(Gradient::F32(&good), at(3), &mut out).unwrap();
        let mut other = Writer::new();
        twin.compress(Gradient::F32(&good), at(3), &mut other).unwrap();
        assert!(out.bytes() == other.bytes() && own.residual() == twin.residual());
    }
}

#[test]
fn a_sum_that_overflows_and_a_wrong_length_are_named() {
    let mut own = rank(("topk", 0.5), &Layers::fused(2).unwrap(), (0, Kernel::best()));
    let mut out = Writer::new();
    own.compress(Gradient::F32(&[3e38, 3.1e38]), at(0), &mut out).unwrap();
    let error = own.compress(Gradient::F32(&[1e38, 0.0]), at(1), &mut out).unwrap_err();
    assert!(matches!(error, EncodeError::Residual { index: 0, .. }), "{error}");
    assert_eq!(own.residual(), [3e38, 0.0]);
    let error = own.compress(Gradient::F32(&[0.0; 4]), at(1), &mut out).unwrap_err();
    assert_eq!(error.to_string(), "compress a gradient of 2 values: it has 4");
}
