//! What is refused leaves no trace: neither in what is saved nor in what a later step, strategy or rate makes of it.

use crate::harness::*;
use flexcomm_compression::Layers;
use flexcomm_compression::pipeline::{Gradient, Member, Pipeline, Step};
use flexcomm_compression::wire::Writer;

/// Long enough that a pass collects candidates for top-k.
const LONG: usize = 20_000;

fn pipeline(text: &str, n: usize) -> Pipeline {
    Pipeline::new(&parse(text), Layers::fused(n).unwrap(), Member::alone(3))
}

fn saved(pipeline: &Pipeline) -> Vec<u8> {
    let mut out = Writer::new();
    pipeline.save(&mut out);
    out.into_vec()
}

/// The message of a step, all rounds of it.
fn step(pipeline: &mut Pipeline, gradient: &[f32], (index, learning_rate): (u64, f64)) -> Vec<u8> {
    let mut out = Writer::new();
    let at = Step { index, learning_rate };
    let mut more = pipeline.compress(Gradient::F32(gradient), at, &mut out).unwrap().more;
    while more {
        let sum = out.bytes().to_vec();
        more = pipeline.advance(&sum, &mut out).unwrap().more;
    }
    out.into_vec()
}

/// One value that is not finite, or one value too few: both at another rate.
fn refuse(pipeline: &mut Pipeline, n: usize, index: u64) {
    let mut bad = laplace(n, 99);
    for at in [7, n / 2] {
        bad[at] = f32::NAN;
        let step = Step { index, learning_rate: 0.001 };
        pipeline.compress(Gradient::F32(&bad), step, &mut Writer::new()).unwrap_err();
    }
    let step = Step { index, learning_rate: 7.0 };
    pipeline.compress(Gradient::F32(&bad[1..]), step, &mut Writer::new()).unwrap_err();
}

/// Also the candidates that the pass over a refused gradient has collected are forgotten, whatever comes next.
#[test]
fn a_refused_step_is_forgotten_by_every_strategy_that_follows() {
    let codecs = ["topk(k=200)", "onebit(scaling=true)"];
    let rest = around_a_codec();
    for (from, to) in rest.iter().flat_map(|from| rest.iter().map(move |to| (from, to))) {
        for codec in codecs {
            let label = format!("{codec}{from} to {codec}{to}");
            let run = |refused: bool| {
                let mut rank = pipeline(&format!("{codec}{from}"), LONG);
                (0..2).for_each(|index| drop(step(&mut rank, &laplace(LONG, index), (index, 0.125))));
                if refused {
                    let (before, residual) = (saved(&rank), rank.residual());
                    refuse(&mut rank, LONG, 2);
                    assert!(saved(&rank) == before && rank.residual() == residual, "{label}: the state moved");
                }
                rank.change(&parse(&format!("{codec}{to}")));
                let sent = step(&mut rank, &laplace(LONG, 2), (2, 0.125));
                let mut mean = vec![0.0; LONG];
                rank.decompress(&sent, 2, &mut mean).unwrap_or_else(|e| panic!("{label}: failed to {e}"));
                (sent, saved(&rank))
            };
            assert!(run(true) == run(false), "{label}");
        }
    }
}

/// The residual at a rate weighs by that rate, not by one at which nothing was done.
#[test]
fn the_rate_of_a_refused_step_weighs_nothing() {
    for to in ["topk(k=3)+ef(dgc,mu=0)", "topk(k=3)+ef(sgc,alpha=0)"] {
        let mut rank = pipeline("topk(k=1)+ef(vanilla)", 3);
        step(&mut rank, &[1.0, 2.0, 3.0], (0, 0.1));
        let nan = Step { index: 1, learning_rate: 0.001 };
        rank.compress(Gradient::F32(&[f32::NAN; 3]), nan, &mut Writer::new()).unwrap_err();
        assert_eq!((rank.learning_rate(), rank.residual()), (0.1, vec![1.0, 2.0, 0.0]));
        rank.change(&parse(to));
        let sent = step(&mut rank, &[0.0; 3], (1, 0.1));
        let mut mean = [0.0; 3];
        rank.decompress(&sent, 1, &mut mean).unwrap();
        assert_eq!(mean, [1.0, 2.0, 0.0], "{to}");
    }
}

/// A step of several rounds that is given up in between has no rate either.
#[test]
fn a_step_that_is_given_up_moves_nothing() {
    for strategy in every_strategy() {
        let text = format!("{strategy}+ef(vanilla)");
        let mut rank = pipeline(&text, 60);
        step(&mut rank, &normal(60, 0), (0, 0.125));
        if rank.rounds() == 1 {
            continue;
        }
        let (before, residual) = (saved(&rank), rank.residual());
        let other = Step { index: 1, learning_rate: 0.001 };
        assert!(rank.compress(Gradient::F32(&normal(60, 1)), other, &mut Writer::new()).unwrap().more);
        assert!(saved(&rank) == before && rank.residual() == residual, "{text}: the state moved");
    }
}
