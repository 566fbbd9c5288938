//! Time of error feedback, exact top-k, residual update and packing at c = 0.01 against a plain copy of the tensor, on one thread:
//! `cargo run --release -p flexcomm-compression --example topk [n] [seconds] [turns] [kernel]`. So many gradients take
//! turns; with one, more of it lies in the caches. (`flexcomm bench compressors` moves the one that it has by a few values with
//! every step.)
#![allow(clippy::unwrap_used, clippy::print_stdout, missing_docs)]

mod shared;

use flexcomm_compression::pipeline::{Gradient, Member, Pipeline, Step};
use flexcomm_compression::random::Stream;
use flexcomm_compression::wire::Writer;
use flexcomm_compression::{Layers, MAX_VALUES};
use shared::{read, read_kernel};
use std::hint::black_box;
use std::time::Instant;

fn timed(work: impl FnOnce()) -> f64 {
    let start = Instant::now();
    work();
    start.elapsed().as_secs_f64()
}

fn middle(mut times: Vec<f64>) -> f64 {
    let at = times.len() / 2;
    *times.select_nth_unstable_by(at, f64::total_cmp).1
}

fn gradient(n: usize, laplace: bool, turn: u64) -> Vec<f32> {
    let stream = Stream::new(turn, [0; 4]);
    let uniform = |i: u32| f64::from(stream.uniform(i)).max(1e-9);
    let value = |i: u32| match laplace {
        true => (uniform(2 * i) / uniform(2 * i + 1)).ln(),
        false => (-2.0 * uniform(2 * i).ln()).sqrt() * (std::f64::consts::TAU * uniform(2 * i + 1)).cos(),
    };
    (0..n as u32).map(|i| 1e-3 * value(i) as f32).collect()
}

fn main() -> Result<(), String> {
    let mut arguments = std::env::args().skip(1);
    let n = read("n", arguments.next(), (1_000_000, |n: &usize| (1..=MAX_VALUES / 2).contains(n)))?;
    let seconds = read("seconds", arguments.next(), (1.0, |seconds: &f64| *seconds >= 0.0))?;
    let turns = read("turns", arguments.next(), (1, |turns: &u64| *turns > 0))?;
    let kernel = read_kernel(arguments.next())?;
    for (name, laplace) in [("normal", false), ("laplace", true)] {
        let gradients: Vec<Vec<f32>> = (0..turns).map(|turn| gradient(n, laplace, turn)).collect();
        let strategy = "topk(k=0.01)+ef(vanilla)".parse().unwrap();
        let mut rank = Pipeline::new(&strategy, Layers::fused(n).unwrap(), Member::alone(1)).with_kernel(kernel);
        let (mut out, mut to) = (Writer::new(), vec![0.0f32; n]);
        let (mut copies, mut times, begun) = (Vec::new(), Vec::new(), Instant::now());
        for index in 0.. {
            let x = &gradients[(index % turns) as usize];
            let copied = timed(|| black_box(&mut to).copy_from_slice(black_box(x)));
            let step = Step { index, learning_rate: 0.1 };
            let took = timed(|| _ = rank.compress(Gradient::F32(black_box(x)), step, &mut out).unwrap());
            if index >= 5 {
                copies.push(copied);
                times.push(took);
            }
            if index > 20 && begun.elapsed().as_secs_f64() > seconds {
                break;
            }
        }
        let (copy, time) = (middle(copies), middle(times));
        println!(
            "{name:8} n = {n}: copy {:.1} us, compress {:.1} us, {:.2} copies",
            copy * 1e6,
            time * 1e6,
            time / copy
        );
    }
    Ok(())
}
