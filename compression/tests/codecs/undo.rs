//! A mark and a step taken back: the state is what it was, bit for bit, and so is everything that comes after it.

use crate::harness::*;
use flexcomm_compression::Layers;
use flexcomm_compression::codec::Shape;
use flexcomm_compression::pipeline::{Gradient, Pipeline, StateError, Step};
use flexcomm_compression::wire::Writer;

const WORLD: u32 = 2;

fn layers() -> Layers {
    Layers::matrices(&[Shape { rows: 8, cols: 6 }, Shape { rows: 5, cols: 1 }, Shape { rows: 4, cols: 12 }]).unwrap()
}

fn gradients(seed: u64) -> Vec<Vec<f32>> {
    let n = layers().values();
    (0..u64::from(WORLD))
        .map(|rank| if seed.is_multiple_of(2) { normal(n, 31 * seed + rank) } else { laplace(n, seed + rank) })
        .collect()
}

fn states(ranks: &Ranks) -> Vec<Vec<u8>> {
    let state = |pipeline: &Pipeline| {
        let mut out = Writer::new();
        pipeline.save(&mut out);
        out.into_vec()
    };
    ranks.pipelines.iter().map(state).collect()
}

/// What can become of a step.
const ENDS: [&str; 4] = ["nothing", "refused", "sent", "done"];

fn go(ranks: &mut Ranks, end: &str, index: u64) {
    let step = Step { index, learning_rate: 0.05 };
    let mut out = Writer::new();
    match end {
        "nothing" => {}
        "refused" => {
            let mut bad = gradients(index);
            bad.iter_mut().for_each(|gradient| gradient[7] = f32::INFINITY);
            for (pipeline, bad) in ranks.pipelines.iter_mut().zip(&bad) {
                pipeline.compress(Gradient::F32(bad), step, &mut out).unwrap_err();
                // Its part of a sum, which all ranks then throw away.
                pipeline.compress(Gradient::Zeros, step, &mut out).unwrap();
            }
        }
        "sent" => {
            for (pipeline, gradient) in ranks.pipelines.iter_mut().zip(&gradients(index)) {
                pipeline.compress(Gradient::F32(gradient), step, &mut out).unwrap();
            }
        }
        _ => drop(ranks.step(&gradients(index), index)),
    }
}

fn every_pipeline() -> impl Iterator<Item = String> {
    let decaying = every_momentum().into_iter().map(|momentum| format!("+ef(vanilla,beta=0.5){momentum}"));
    let around: Vec<String> = around_a_codec().into_iter().chain(decaying).collect();
    every_strategy()
        .into_iter()
        .flat_map(move |strategy| around.clone().into_iter().map(move |around| format!("{strategy}{around}")))
}

#[test]
fn whatever_became_of_a_step_it_can_be_taken_back() {
    for text in every_pipeline() {
        let [mut ranks, mut twins] = [(); 2].map(|()| Ranks::with_layers(&text, &layers(), WORLD));
        for round in 0..2 {
            for (number, end) in ENDS.iter().enumerate() {
                let index = round * ENDS.len() as u64 + number as u64;
                let before = states(&ranks);
                ranks.pipelines.iter_mut().for_each(Pipeline::mark);
                // As often as one likes.
                for _ in 0..2 {
                    go(&mut ranks, end, index + 100);
                    ranks.pipelines.iter_mut().for_each(|pipeline| pipeline.undo().unwrap());
                    assert!(states(&ranks) == before, "{text}: {end}");
                }
                let same = ranks.step(&gradients(index), index) == twins.step(&gradients(index), index);
                assert!(same && states(&ranks) == states(&twins), "{text}: after {end}");
            }
        }
    }
}

/// A change of the strategy between: an old memory's residual goes out with the step, and comes back with it.
#[test]
fn what_is_left_over_of_an_old_memory_comes_back() {
    let mut ranks = Ranks::with_layers("topk(k=0.1)+ef(vanilla)", &layers(), WORLD);
    (0..3).for_each(|index| drop(ranks.step(&gradients(index), index)));
    ranks.pipelines.iter_mut().for_each(|pipeline| pipeline.change(&parse("qsgd(s=4)")));
    let (before, residual) = (states(&ranks), ranks.pipelines[0].residual());
    ranks.pipelines.iter_mut().for_each(Pipeline::mark);
    for end in ENDS {
        go(&mut ranks, end, 3);
        ranks.pipelines.iter_mut().for_each(|pipeline| pipeline.undo().unwrap());
        assert!(states(&ranks) == before && ranks.pipelines[0].residual() == residual, "{end}");
    }
    assert!(residual.iter().any(|value| *value != 0.0));
}

#[test]
fn without_a_mark_or_after_a_second_step_nothing_is_undone() {
    let mut ranks = Ranks::with_layers("topk(k=0.1)+ef(vanilla)", &layers(), WORLD);
    let refused = |ranks: &mut Ranks| {
        let before = states(ranks);
        assert_eq!(ranks.pipelines[0].undo(), Err(StateError::NoMark));
        assert!(states(ranks) == before);
    };
    refused(&mut ranks);
    let begins: [fn(&mut Ranks); 5] = [
        |ranks| (0..2).for_each(|index| drop(ranks.step(&gradients(index), index))),
        // The second one is refused, and has used the buffers.
        |ranks| {
            drop(ranks.step(&gradients(0), 0));
            let bad = vec![f32::NAN; layers().values()];
            let step = Step { index: 1, learning_rate: 0.1 };
            ranks.pipelines[0].compress(Gradient::F32(&bad), step, &mut Writer::new()).unwrap_err();
        },
        |ranks| ranks.pipelines[0].change(&parse("topk(k=0.2)+ef(vanilla)")),
        |ranks| ranks.pipelines[0].rebase(0.3),
        |ranks| {
            ranks.pipelines[0].change(&parse("topk(k=0.1)+ef(vanilla)"));
            let state = states(ranks).remove(0);
            ranks.pipelines[0].restore(&state).unwrap();
        },
    ];
    for begin in begins {
        ranks.pipelines.iter_mut().for_each(Pipeline::mark);
        begin(&mut ranks);
        refused(&mut ranks);
    }
}
