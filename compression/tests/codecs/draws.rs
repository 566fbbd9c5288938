//! Who draws which random numbers, and what receivers notice when others drew.

use crate::harness::*;
use flexcomm_compression::Build;
use flexcomm_compression::Layers;
use flexcomm_compression::codec::{Context, Element, ReadError, Scope};
use flexcomm_compression::pipeline::{Gradient, Member, Pipeline, Step, add_messages};
use flexcomm_compression::wire::Writer;
use flexcomm_domain::spec::CompressorSpec;

fn each(check: impl Fn(&CompressorSpec)) {
    every_strategy().iter().for_each(check);
}

/// Methods that draw numbers draw others in each step, and on each rank where ranks need not draw alike: rounding that all
/// ranks share would not average out. Methods that draw none send the same everywhere, but for those that take turns by step: they
/// must say that ranks draw together, since receivers refuse another step of these alone.
#[test]
fn ranks_and_steps_draw_their_own() {
    let random = std::cell::Cell::new(0);
    each(|strategy| {
        let x = laplace(777, 9);
        let sent = |seed, step, rank| {
            let mut run = Run::new(strategy, shape(x.len()), seed);
            run.context = Context { step, rank, world: 10, ..run.context };
            run.transmit(&x).unwrap().1
        };
        let codec = strategy.codec(shape(x.len()));
        // In rounds, ranks and steps take turns.
        if codec.rounds() > 1 {
            return;
        }
        // Of few atoms several draws take the same.
        let here = sent(1, 0, 0);
        let draws = (2..10).any(|seed| sent(seed, 0, 0) != here);
        random.set(random.get() + usize::from(draws));
        let turns = (1..10).any(|step| sent(1, step, 0) != here);
        assert!(turns == draws || turns && codec.draws_together(), "{strategy}: other steps");
        if codec.draws_together() {
            return;
        }
        assert_eq!((1..10).any(|rank| sent(1, 0, rank) != here), draws, "{strategy}: other ranks");
    });
    assert!(random.get() >= 10, "{} strategies draw numbers", random.get());
}

/// A receiver in another scope, and of methods whose ranks must draw alike one with another seed or in another step, refuses
/// the message by name; others read it. Messages that do not say (of an older sender) are read by all.
#[test]
fn receivers_refuse_what_was_drawn_otherwise() {
    let (n, index) = (240, 5);
    each(|strategy| {
        let receiver = |text: &str, seed, tensor| {
            let member = Member { seed, rank: 0, world: 1, tensor };
            Pipeline::new(&parse(text), Layers::matrices(&[shape(n)]).unwrap(), member)
        };
        let text = strategy.to_string();
        let mut sender = receiver(&text, 1, 0);
        let (mut out, mut mean, step) = (Writer::new(), vec![0.0; n], Step { index, learning_rate: 0.1 });
        let mut more = sender.compress(Gradient::F32(&laplace(n, 4)), step, &mut out).unwrap().more;
        while more {
            let sum = out.bytes().to_vec();
            more = sender.advance(&sum, &mut out).unwrap().more;
        }
        sender.decompress(out.bytes(), index, &mut mean).unwrap();
        let other = if strategy.scope() == Scope::Bucket { "tensor" } else { "bucket" };
        let error = receiver(&format!("{text}+scope({other})"), 1, 0).decompress(out.bytes(), index, &mut mean);
        assert!(matches!(error, Err(ReadError::Scope { expected, .. }) if expected == other), "{text}: {error:?}");
        let together = strategy.codec(shape(n)).draws_together();
        for (seed, tensor, index) in [(2, 0, 5), (1, 1, 5), (1, 0, 6), (1, 0, 4), (1, 0, 5 + 64)] {
            let got = receiver(&text, seed, tensor).decompress(out.bytes(), index, &mut mean);
            let named = match got {
                Err(ReadError::Step { expected, got }) => index % 64 != 5 && (expected, got) == (index, 5),
                Err(ReadError::Draws { seed: s, step, tensor: t }) => (s, t, step) == (seed, tensor, index),
                Ok(()) => false,
                Err(_) => panic!("{text}: {got:?}"),
            };
            assert_eq!(named, together, "{text}, seed {seed}, tensor {tensor}, step {index}: {got:?}");
        }
        if strategy.codec(shape(n)).rounds() == 1 {
            let mut unsaid = out.bytes().to_vec();
            unsaid[26..28].fill(0);
            receiver(&text, 1, 0).decompress(&unsaid, index, &mut mean).unwrap();
        }
    });
}

/// Parts of a sum from different steps, scopes or seeds are not added.
#[test]
fn sums_of_different_draws_are_refused() {
    let message = |text: &str, seed, index| {
        let (mut out, x) = (Writer::new(), laplace(60, 1));
        let layers = Layers::matrices(&[shape(60)]).unwrap();
        let mut rank = Pipeline::new(&parse(text), layers, Member { seed, rank: 0, world: 2, tensor: 0 });
        rank.compress(Gradient::F32(&x), Step { index, learning_rate: 0.1 }, &mut out).unwrap();
        out.into_vec()
    };
    let text = "randomk(k=6)";
    let add = |other: &[u8]| add_messages(Element::F32, &mut message(text, 1, 3), other);
    add(&message(text, 1, 3)).unwrap();
    assert_eq!(add(&message(text, 1, 4)), Err(ReadError::Step { expected: 3, got: 4 }));
    assert!(matches!(add(&message(text, 2, 3)), Err(ReadError::Field { what, .. }) if what.starts_with("draw")));
    assert!(matches!(add(&message("randomk(k=6)+scope(tensor)", 1, 3)), Err(ReadError::Scope { .. })));
    assert!(matches!(add(&message("randomk(k=7)", 1, 3)), Err(ReadError::Strategy { .. })));
}

/// Nobody's random numbers but the context's: ranks differ where the method is of its own, steps differ.
#[test]
fn contexts_tell_streams_apart() {
    let context = Context::new(1);
    assert_eq!(context.shared(0), Context { rank: 5, ..context }.shared(0));
    assert_ne!(context.own(0), Context { rank: 5, ..context }.own(0));
    assert_ne!(context.own(0), context.own(1));
    assert_ne!(context.shared(0), Context { step: 1, ..context }.shared(0));
    assert_ne!(context.shared(0), Context { tensor: 1, ..context }.shared(0));
    assert_ne!(context.shared(0), context.own(0));
}
