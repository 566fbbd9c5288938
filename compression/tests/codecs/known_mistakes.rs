//! Mistakes that other libraries made, one test each. Those of a single method are beside its other tests.

use crate::harness::*;
use flexcomm_compression::pipeline::{Gradient, Member, Pipeline, Step};
use flexcomm_compression::wire::Writer;
use flexcomm_compression::{Layers, methods};

/// Every registered codec of this name, with its examples; a name that is not there fails.
fn of(name: &str) -> Vec<flexcomm_domain::spec::CompressorSpec> {
    let found: Vec<_> = every_strategy().into_iter().filter(|s| s.compressor().name == name).collect();
    assert!(!found.is_empty(), "{name} is not registered");
    found
}

/// sign(0) undefined: zero of either sign is +, everywhere the same.
#[test]
fn the_sign_of_zero_is_defined() {
    for strategy in of("onebit") {
        let sent = compressed(&strategy, &[0.0, -0.0, 2.0, -2.0], 1);
        assert!(sent[0] == sent[1] && sent[0] == sent[2] && sent[3] == -sent[2], "{strategy}: {sent:?}");
    }
}

/// One bit decoded through a bitwise not of a byte: every decoded value is plus or minus one scale.
#[test]
fn one_bit_is_one_magnitude() {
    let x = laplace(1001, 4);
    for strategy in of("onebit") {
        let sent = compressed(&strategy, &x, 1);
        assert!(sent.iter().all(|v| v.abs() == sent[0].abs()), "{strategy}");
        assert!(sent.iter().zip(&x).all(|(s, x)| (*s < 0.0) == (*x < 0.0)), "{strategy}");
        assert!(sent[0].abs() <= 1.0f32.max(x.iter().fold(0.0, |max, v| v.abs().max(max))), "{strategy}");
    }
}

/// Signs sent as one byte each: eight to the byte.
#[test]
fn signs_are_packed() {
    for strategy in of("onebit") {
        let mut run = Run::new(&strategy, shape(8000), 1);
        run.transmit(&laplace(8000, 1)).unwrap();
        assert!(run.payload.len() <= 1004, "{strategy}: {} bytes", run.payload.len());
    }
}

/// An uninitialised residual: the first step of a new pipeline, and the first after a change, see zeros. Buffers of an
/// earlier pipeline with other content have just been freed.
#[test]
fn a_new_residual_is_zero() {
    for _ in 0..20 {
        let n = 4096;
        drop(std::hint::black_box(vec![f32::NAN; n]));
        drop(std::hint::black_box(vec![7.5f32; n]));
        let layers = Layers::fused(n).unwrap();
        let mut rank = Pipeline::new(&parse("topk(k=1)+ef(vanilla)+nesterov(mu=0.9)"), layers, Member::alone(1));
        let mut out = Writer::new();
        rank.compress(Gradient::Zeros, Step { index: 0, learning_rate: 1.0 }, &mut out).unwrap();
        assert!(rank.residual().iter().all(|v| v.to_bits() == 0));
    }
}

/// A NaN norm: a tensor of zeros, and one of denormals whose squares vanish in f32, are sent as numbers by every codec.
#[test]
fn no_norm_is_nan() {
    for strategy in every_strategy() {
        for x in [vec![0.0f32; 64], vec![1e-30; 64], vec![f32::from_bits(1); 64], vec![1e30; 64]] {
            let sent = compressed(&strategy, &x, 1);
            assert!(sent.iter().all(|v| v.is_finite()), "{strategy} of {}: {sent:?}", x[0]);
        }
    }
}

/// The caller's random numbers reseeded: nothing here reads or writes any but its own. Two runs in one thread, with and
/// without another codec between, are alike.
#[test]
fn codecs_do_not_meet_in_hidden_state() {
    let x = normal(200, 3);
    for strategy in every_strategy() {
        let alone = compressed(&strategy, &x, 7);
        for other in methods::all().map(|entry| format!("{}({})", entry.info.name, entry.examples[0])) {
            compressed(&parse(&other), &x, 9);
        }
        assert_eq!(compressed(&strategy, &x, 7), alone, "{strategy}");
    }
}

/// A residual that is reset when a checkpoint is loaded: after a restore it is there.
#[test]
fn a_restored_residual_is_the_saved_one() {
    let layers = Layers::fused(100).unwrap();
    let mut rank = Pipeline::new(&parse("topk(k=1)+ef(vanilla)"), layers.clone(), Member::alone(1));
    let (mut out, gradient) = (Writer::new(), normal(100, 5));
    rank.compress(Gradient::F32(&gradient), Step { index: 0, learning_rate: 1.0 }, &mut out).unwrap();
    let residual = rank.residual();
    assert_eq!(residual.iter().filter(|v| **v != 0.0).count(), 99);
    rank.save(&mut out);
    let mut other = Pipeline::new(&parse("topk(k=1)+ef(vanilla)"), layers, Member::alone(1));
    other.restore(out.bytes()).unwrap();
    assert_eq!(other.residual(), residual);
}

/// Votes in a byte overflow above 127 ranks: 300 ranks of one mind are of that mind. For every codec whose messages are
/// gathered, the aggregate of equal messages is what one of them means.
#[test]
fn three_hundred_equal_messages_mean_one() {
    let n = 24;
    for strategy in every_strategy() {
        if strategy.travels() != flexcomm_compression::codec::Travels::Gathers {
            continue;
        }
        let layers = Layers::matrices(&[shape(n)]).unwrap();
        let mut rank = Pipeline::new(&strategy, layers, Member { seed: 3, rank: 0, world: 300, tensor: 0 });
        let (mut out, x) = (Writer::new(), laplace(n, 8));
        rank.compress(Gradient::F32(&x), Step { index: 0, learning_rate: 1.0 }, &mut out).unwrap();
        let (mut one, mut all) = (vec![0.0; n], vec![0.0; n]);
        rank.decompress(out.bytes(), 0, &mut one).unwrap();
        rank.aggregate(&[out.bytes(); 300], 0, &mut all).unwrap();
        for (one, all) in one.iter().zip(&all) {
            assert!((one - all).abs() <= 1e-4 * one.abs(), "{strategy}: {one} became {all}");
        }
    }
}
