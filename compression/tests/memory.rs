//! Nothing that is held back is lost: across steps, changes of method, refusals, save and restore.
#![allow(clippy::unwrap_used)] // helpers of tests are tests

use flexcomm_compression::Compressor;
use flexcomm_compression::{
    Checksum, CompressError, GradientCompressor, Layers, Memory, Message, Method, Part, aggregate, encode,
    encode_dense, scatter_mean,
};
use flexcomm_domain::CompressionRatio;
use proptest::prelude::*;
use rand::{Rng, SeedableRng};
use rand_chacha::ChaCha8Rng;

fn method(compressor: Compressor, cr: f64) -> Method {
    Method::new(compressor, CompressionRatio::new(cr).unwrap())
}

/// What one step of a strategy does on one rank.
#[derive(Debug, Clone)]
enum Step {
    /// Allgather with this method.
    Compress(Method),
    /// AR-Topk: this rank selects, and these places are broadcast.
    TakeAt { select: bool, every: usize },
    /// Dense.
    TakeAll,
    /// A gradient that is fed and then given up.
    Abandon,
    /// NaN.
    Refused,
}

fn step() -> impl Strategy<Value = Step> {
    let sparse = prop::sample::select(vec![Compressor::TopK, Compressor::LwTopK, Compressor::MsTopK]);
    prop_oneof![
        6 => (sparse, 0.001..0.5f64).prop_map(|(c, cr)| Step::Compress(method(c, cr))),
        2 => (any::<bool>(), 1usize..50).prop_map(|(select, every)| Step::TakeAt { select, every }),
        1 => Just(Step::TakeAll),
        1 => Just(Step::Abandon),
        1 => Just(Step::Refused),
    ]
}

/// Adds what the step sent to `sent`; answers whether the gradient counts as an input.
fn run(rank: &mut GradientCompressor, step: &Step, gradient: &mut [f32], seed: u64, sent: &mut [f64]) -> bool {
    match step {
        Step::Compress(method) => {
            let selection = rank.compress(*method, gradient, seed).unwrap().selection;
            for (i, v) in selection.indices().iter().zip(selection.values()) {
                sent[*i as usize] += f64::from(*v);
            }
        }
        Step::TakeAt { select, every } => {
            if *select {
                rank.select(method(Compressor::TopK, 0.1), gradient, seed).unwrap();
            } else {
                rank.feed(gradient).unwrap();
            }
            let indices: Vec<u32> = (0..gradient.len() as u32).step_by(*every).collect();
            let mut values = Vec::new();
            rank.take_at(&indices, &mut values).unwrap();
            indices.iter().zip(&values).for_each(|(i, v)| sent[*i as usize] += f64::from(*v));
        }
        Step::TakeAll => {
            let mut out = vec![0.0; gradient.len()];
            assert_eq!(rank.take_all(gradient, &mut out).unwrap().gain(), 1.0);
            sent.iter_mut().zip(&out).for_each(|(s, v)| *s += f64::from(*v));
            assert!(rank.residual().iter().all(|r| r.to_bits() == 0));
        }
        Step::Abandon => {
            rank.select(method(Compressor::TopK, 0.1), gradient, seed).unwrap();
            rank.abandon();
            assert_eq!(rank.take_at(&[0], &mut Vec::new()), Err(CompressError::NotFed));
            return false;
        }
        Step::Refused => {
            gradient[seed as usize % gradient.len()] = f32::NAN;
            rank.feed(gradient).unwrap_err();
            return false;
        }
    }
    true
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(40))]

    /// Sum of sent + residual = sum of inputs, to rounding, over 100 steps of changing methods.
    #[test]
    fn nothing_is_lost(steps in prop::collection::vec(step(), 100), n in 1usize..3000, seed: u64) {
        let layers = Layers::new(&[n / 2, n - n / 2]).unwrap();
        let mut rank = GradientCompressor::new(layers);
        let mut rng = ChaCha8Rng::seed_from_u64(seed);
        let (mut inputs, mut sent) = (vec![0.0f64; n], vec![0.0f64; n]);
        for (i, step) in steps.iter().enumerate() {
            let mut gradient: Vec<f32> = (0..n).map(|_| rng.random_range(-1.0f32..1.0).powi(3)).collect();
            let before = gradient.clone();
            if run(&mut rank, step, &mut gradient, i as u64, &mut sent) {
                inputs.iter_mut().zip(&before).for_each(|(s, g)| *s += f64::from(*g));
            }
        }
        for i in 0..n {
            let got = sent[i] + f64::from(rank.residual()[i]);
            // 100 additions of f32 below 100, each rounded once.
            prop_assert!((got - inputs[i]).abs() < 1e-3, "value {i}: {got} of {}", inputs[i]);
        }
    }

    /// On numbers that add without rounding, nothing is lost exactly.
    #[test]
    fn nothing_is_lost_exactly(steps in prop::collection::vec(step(), 100), n in 1usize..500, seed: u64) {
        let mut rank = GradientCompressor::new(Layers::fused(n).unwrap());
        let mut rng = ChaCha8Rng::seed_from_u64(seed);
        let (mut inputs, mut sent) = (vec![0.0f64; n], vec![0.0f64; n]);
        for (i, step) in steps.iter().enumerate() {
            let mut gradient: Vec<f32> = (0..n).map(|_| rng.random_range(-999i32..=999) as f32).collect();
            let before = gradient.clone();
            if run(&mut rank, step, &mut gradient, i as u64, &mut sent) {
                inputs.iter_mut().zip(&before).for_each(|(s, g)| *s += f64::from(*g));
            }
        }
        sent.iter_mut().zip(rank.residual()).for_each(|(s, r)| *s += f64::from(*r));
        prop_assert_eq!(sent, inputs);
    }

    /// A trial leaves no trace: save, run anything, restore, and every later step has the same bits.
    #[test]
    fn restore_is_exact(before in prop::collection::vec(step(), 5), trial in prop::collection::vec(step(), 5), after in prop::collection::vec(step(), 5)) {
        let n = 700;
        let mut rng = ChaCha8Rng::seed_from_u64(9);
        let play = |rank: &mut GradientCompressor, steps: &[Step], rng: &mut ChaCha8Rng| {
            let mut sent = vec![0.0; n];
            for (i, step) in steps.iter().enumerate() {
                let mut gradient: Vec<f32> = (0..n).map(|_| rng.random_range(-1.0..1.0)).collect();
                run(rank, step, &mut gradient, i as u64, &mut sent);
            }
            (sent, rank.save())
        };
        let mut rank = GradientCompressor::new(Layers::fused(n).unwrap());
        play(&mut rank, &before, &mut rng);
        let mut twin = GradientCompressor::new(Layers::fused(n).unwrap());
        twin.restore(&rank.save()).unwrap();
        let mut memory = Memory::default();
        rank.save_into(&mut memory);
        play(&mut rank, &trial, &mut rng.clone());
        rank.select(method(Compressor::TopK, 0.1), &vec![1.0; n], 0).unwrap();
        rank.restore(&memory).unwrap();
        prop_assert_eq!(rank.take_at(&[0], &mut Vec::new()), Err(CompressError::NotFed));
        prop_assert_eq!(play(&mut rank, &after, &mut rng.clone()), play(&mut twin, &after, &mut rng));
    }
}

#[test]
fn a_memory_that_does_not_fit_is_refused() {
    let mut rank = GradientCompressor::new(Layers::fused(3).unwrap());
    rank.compress(method(Compressor::TopK, 0.1), &[1.0, 2.0, 3.0], 0).unwrap();
    let before = rank.save();
    let refused = rank.restore(&Memory::from_values(vec![0.0; 2])).unwrap_err();
    assert_eq!(refused, CompressError::Length { what: "the saved memory", expected: 3, got: 2 });
    let poison = Memory::from_values(vec![0.0, f32::NAN, 0.0]);
    assert!(matches!(rank.restore(&poison), Err(CompressError::NonFinite { index: 1, .. })));
    assert_eq!(rank.save(), before);
    assert_eq!(Memory::from_values(before.values().to_vec()), before);
}

/// Indices from another rank are not trusted; after a refusal the right ones can still be taken.
#[test]
fn indices_from_outside_are_checked() {
    let mut rank = GradientCompressor::new(Layers::fused(4).unwrap());
    let mut values = vec![9.0];
    assert_eq!(rank.take_at(&[0], &mut values), Err(CompressError::NotFed));
    rank.feed(&[1.0, 2.0, 3.0, 4.0]).unwrap();
    for bad in [&[4u32][..], &[1, 1], &[2, 0]] {
        assert!(matches!(rank.take_at(bad, &mut values), Err(CompressError::Indices(_))));
    }
    assert_eq!(values, [9.0]);
    let energy = rank.take_at(&[1, 3], &mut values).unwrap();
    assert_eq!((values.as_slice(), rank.residual()), (&[2.0, 4.0][..], &[1.0, 0.0, 3.0, 0.0][..]));
    assert_eq!((energy.sent, energy.fed), (20.0, 30.0));
    assert_eq!(rank.take_at(&[1], &mut values), Err(CompressError::NotFed));
}

/// Four ranks, by allgather: every rank computes the same mean, and it is the mean of what was sent.
#[test]
fn aggregate_is_the_mean_of_what_was_sent() {
    let (n, world) = (5000, 4);
    let mut rng = ChaCha8Rng::seed_from_u64(2);
    let mut want = vec![0.0f64; n];
    let mut messages = Vec::new();
    for r in 0..world {
        let mut rank = GradientCompressor::new(Layers::fused(n).unwrap());
        let gradient: Vec<f32> = (0..n).map(|_| rng.random_range(-1.0..1.0)).collect();
        let compressor = [Compressor::TopK, Compressor::LwTopK, Compressor::MsTopK, Compressor::None][r];
        let selection = rank.compress(method(compressor, 0.2), &gradient, r as u64).unwrap().selection;
        for (i, v) in selection.indices().iter().zip(selection.values()) {
            want[*i as usize] += f64::from(*v) / world as f64;
        }
        let mut bytes = Vec::new();
        if compressor == Compressor::None {
            encode_dense(selection.values(), Checksum::None, &mut bytes);
        } else {
            encode(compressor, selection, Part::Whole, Checksum::Crc32c, &mut bytes);
        }
        messages.push(bytes);
    }
    let parsed: Vec<_> = messages.iter().map(|b| Message::parse(b).unwrap()).collect();
    let mut mean = vec![7.0; n];
    aggregate(&parsed, world, &mut mean).unwrap();
    assert!(mean.iter().zip(&want).all(|(m, w)| (f64::from(*m) - w).abs() < 1e-6));
    let mut again = vec![-1.0; n];
    aggregate(&parsed, world, &mut again).unwrap();
    assert_eq!(
        mean.iter().map(|v| v.to_bits()).collect::<Vec<_>>(),
        again.iter().map(|v| v.to_bits()).collect::<Vec<_>>()
    );
}

#[test]
fn aggregate_refuses_what_does_not_fit() {
    let mut rank = GradientCompressor::new(Layers::fused(4).unwrap());
    let selection = rank.compress(method(Compressor::TopK, 0.5), &[1.0, 2.0, 3.0, 4.0], 0).unwrap().selection;
    let (mut whole, mut indices) = (Vec::new(), Vec::new());
    encode(Compressor::TopK, selection, Part::Whole, Checksum::None, &mut whole);
    encode(Compressor::TopK, selection, Part::Indices, Checksum::None, &mut indices);
    let (whole, indices) = (Message::parse(&whole).unwrap(), Message::parse(&indices).unwrap());
    let error = aggregate(&[whole], 1, &mut [0.0; 5]).unwrap_err();
    assert_eq!(error.to_string(), "add message 0 of a gradient of 4 values to one of 5");
    assert!(aggregate(&[whole, indices], 2, &mut [0.0; 4]).is_err());
    assert!(aggregate(&[whole], 0, &mut [0.0; 4]).is_err());
    let mut out = [9.0; 4];
    scatter_mean(&[1, 3], &[4.0, 8.0], 4, &mut out).unwrap();
    assert_eq!(out, [0.0, 1.0, 0.0, 2.0]);
    assert!(scatter_mean(&[1], &[], 4, &mut out).is_err());
    assert!(scatter_mean(&[4], &[1.0], 4, &mut out).is_err());
    assert!(scatter_mean(&[1], &[1.0], 0, &mut out).is_err());
}

/// After a step that was refused the gradient of the step before cannot be taken any more: its buffer was overwritten.
#[test]
fn a_refused_gradient_takes_the_one_before_with_it() {
    let mut rank = GradientCompressor::new(Layers::fused(3).unwrap());
    rank.compress(method(Compressor::TopK, 0.1), &[1.0, 2.0, 3.0], 0).unwrap();
    for refused in [&[1.0, f32::NAN, 1.0][..], &[1.0; 4]] {
        rank.feed(&[5.0; 3]).unwrap();
        rank.feed(refused).unwrap_err();
        assert_eq!(rank.take_at(&[0], &mut Vec::new()), Err(CompressError::NotFed));
        assert_eq!(rank.residual(), [1.0, 2.0, 0.0]);
    }
}
