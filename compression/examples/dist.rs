//! scratch
#![allow(clippy::unwrap_used, clippy::print_stdout, missing_docs, unused)]
use flexcomm_compression::Layers;
use flexcomm_compression::pipeline::{Gradient, Member, Pipeline, Step};
use flexcomm_compression::random::Stream;
use flexcomm_compression::wire::{Writer, f16_to_f32};
use std::hint::black_box;
use std::time::Instant;
static RECORDED: &[u8] = include_bytes!("../benches/data/mlp-gradient.f16");
fn normal(a: f32, b: f32) -> f32 {
    1e-3 * (-2.0 * (1.0 - a).ln()).sqrt() * (std::f32::consts::TAU * b).cos()
}
fn laplace(u: f32) -> f32 {
    let u = u - 0.5;
    -1e-3 * u.signum() * (1.0 - 2.0 * u.abs()).max(f32::MIN_POSITIVE).ln()
}
fn recorded(n: usize) -> Vec<f32> {
    let halves: Vec<u16> = RECORDED.as_chunks::<2>().0.iter().map(|b| u16::from_le_bytes(*b)).collect();
    let mut once = vec![0.0; halves.len()];
    f16_to_f32(&halves, &mut once);
    let scale = |i: usize| (1.0 + 0.001 * (i / halves.len()) as f32) / 1024.0;
    (0..n).map(|i| once[i % halves.len()] * scale(i)).collect()
}
fn timed(work: impl FnOnce()) -> f64 {
    let s = Instant::now();
    work();
    s.elapsed().as_secs_f64()
}
fn main() {
    let mut args = std::env::args().skip(1);
    let n: usize = args.next().unwrap().parse().unwrap();
    let reps: u64 = args.next().unwrap().parse().unwrap();
    let specs: Vec<String> = args.collect();
    let stream = Stream::new(1, [0; 4]);
    const MORE: usize = 32 * 31;
    let m = n + MORE;
    let dists: [(&str, Vec<f32>); 3] = [
        ("normal", (0..m as u32).map(|i| normal(stream.uniform(i), stream.uniform(!i))).collect()),
        ("laplace", (0..m as u32).map(|i| laplace(stream.uniform(i))).collect()),
        ("recorded", recorded(m)),
    ];
    for spec in &specs {
        for (name, values) in &dists {
            let mut rank = Pipeline::new(&spec.parse().unwrap(), Layers::new(&[n]).unwrap(), Member::alone(1));
            let (mut out, mut mean, mut copied) = (Writer::new(), vec![0.0; n], vec![0.0f32; n]);
            let (mut e, mut d, mut c) = (Vec::new(), Vec::new(), Vec::new());
            for index in 0..reps {
                let from = 32 * (index as usize * 7 % 31);
                let x = &values[from..from + n];
                c.push(timed(|| black_box(&mut copied).copy_from_slice(black_box(x))));
                let step = Step { index, learning_rate: 0.1 };
                e.push(timed(|| _ = rank.compress(Gradient::F32(black_box(x)), step, &mut out).unwrap()));
                let bytes = out.bytes();
                d.push(timed(|| rank.aggregate(&[bytes, bytes], index, black_box(&mut mean)).unwrap()) / 2.0);
            }
            let least = |v: &[f64]| v.iter().copied().fold(f64::MAX, f64::min) * 1.6e10 / n as f64;
            println!(
                "{spec:24} {name:9} bits {:6.3}  enc {:.3} dec {:.3} sum {:.3} copy {:.3}",
                out.len() as f64 * 8.0 / n as f64,
                least(&e),
                least(&d),
                least(&e) + least(&d),
                least(&c)
            );
        }
    }
}
