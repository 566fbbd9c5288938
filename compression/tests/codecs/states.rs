//! Saved states: only what they belong to reads them, and what cannot read one is as it was.

use crate::harness::*;
use flexcomm_compression::Layers;
use flexcomm_compression::codec::{ReadError, Shape};
use flexcomm_compression::pipeline::{Member, Pipeline, StateError};
use flexcomm_compression::wire::Writer;

const TEXT: &str = "powersgd(rank=2)+ef(vanilla)+nesterov(mu=0.5)";

fn layers(shapes: &[[usize; 2]]) -> Layers {
    Layers::matrices(&shapes.iter().map(|[rows, cols]| Shape { rows: *rows, cols: *cols }).collect::<Vec<_>>()).unwrap()
}

fn pipeline(text: &str, shapes: &[[usize; 2]], seed: u64) -> Pipeline {
    Pipeline::new(&parse(text), layers(shapes), Member::alone(seed))
}

/// After three steps.
fn used(text: &str, shapes: &[[usize; 2]], seed: u64) -> Pipeline {
    let mut ranks = Ranks::with_layers(text, &layers(shapes), 1);
    ranks.pipelines = vec![pipeline(text, shapes, seed)];
    let n = ranks.pipelines[0].layers().values();
    (0..3).for_each(|step| drop(ranks.step(&[normal(n, step)], step)));
    ranks.pipelines.remove(0)
}

fn saved(pipeline: &Pipeline) -> Vec<u8> {
    let mut out = Writer::new();
    pipeline.save(&mut out);
    out.into_vec()
}

const SHAPES: [[usize; 2]; 3] = [[8, 6], [5, 1], [4, 12]];

#[test]
fn a_state_of_something_else_is_refused_by_name_and_changes_nothing() {
    let state = saved(&used(TEXT, &SHAPES, 3));
    let refused = |text: &str, shapes: &[[usize; 2]], seed| {
        let mut rank = used(text, shapes, seed);
        let (before, residual) = (saved(&rank), rank.residual());
        let error = rank.restore(&state).unwrap_err();
        assert!(saved(&rank) == before && rank.residual() == residual, "{error}: the state moved");
        error
    };
    let other = refused("powersgd(rank=3)+ef(vanilla)+nesterov(mu=0.5)", &SHAPES, 3);
    assert!(matches!(other, StateError::Strategy { .. }), "{other}");
    assert_eq!(refused(TEXT, &SHAPES, 4), StateError::Seed { saved: 3, here: 4 });
    // As many values, otherwise cut.
    assert_eq!(refused(TEXT, &[[101, 1]], 3), StateError::Layers { saved: 3, here: 1 });
    let turned = refused(TEXT, &[[8, 6], [5, 1], [12, 4]], 3);
    assert_eq!(turned, StateError::Layer { layer: 2, saved: [4, 12], here: [12, 4] });
    assert_eq!(turned.to_string(), "restore a saved state whose layer 2 is 4 x 12: here it is 12 x 4");
}

/// Also where strategies have no state of their own that would not fit.
#[test]
fn shapes_and_seeds_are_checked_around_every_codec() {
    for strategy in every_strategy() {
        for memory in every_memory() {
            let text = format!("{strategy}{memory}");
            let state = saved(&used(&text, &[[6, 4], [1, 16]], 3));
            let read = |shapes: &[[usize; 2]], seed| pipeline(&text, shapes, seed).restore(&state);
            assert_eq!(read(&[[6, 4], [1, 16]], 3), Ok(()), "{text}");
            assert!(matches!(read(&[[4, 6], [1, 16]], 3), Err(StateError::Layer { layer: 0, .. })), "{text}");
            assert!(matches!(read(&[[6, 4], [1, 16]], 2), Err(StateError::Seed { saved: 3, here: 2 })), "{text}");
        }
    }
    // The strategy's own seed comes first.
    let text = "qsgd(s=4)+seed(9)";
    let state = saved(&used(text, &SHAPES, 3));
    assert_eq!(pipeline(text, &SHAPES, 4).restore(&state), Ok(()));
}

/// Every cut, and every byte changed: what is refused leaves memory, momentum and warm start as they were.
#[test]
fn a_broken_state_changes_nothing() {
    let (mut rank, state) = (used(TEXT, &SHAPES, 3), saved(&used(TEXT, &SHAPES, 3)));
    let before = saved(&rank);
    for end in 0..state.len() {
        rank.restore(&state[..end]).unwrap_err();
        assert!(saved(&rank) == before, "cut at {end}");
    }
    for at in 0..state.len() {
        let mut other = state.clone();
        other[at] ^= 0xff;
        match rank.restore(&other) {
            Ok(()) => {
                assert!(saved(&rank) == other, "byte {at}");
                rank.restore(&state).unwrap();
            }
            Err(_) => assert!(saved(&rank) == before, "byte {at}"),
        }
    }
    let mut old = state;
    old[4] = 1;
    let refused = rank.restore(&old).unwrap_err();
    assert!(matches!(refused, StateError::Read(ReadError::Field { what: "version", value: 1, .. })), "{refused}");
}

#[test]
fn the_last_step_goes_along() {
    let mut new = pipeline(TEXT, &SHAPES, 3);
    assert_eq!(new.last_step(), None);
    let fresh = saved(&new);
    new.restore(&saved(&used(TEXT, &SHAPES, 3))).unwrap();
    assert_eq!((new.last_step(), new.learning_rate()), (Some(2), 0.1));
    new.restore(&fresh).unwrap();
    assert_eq!(new.last_step(), None);
}
