//! Time of each quantizer against a plain copy of the same bytes, on one thread:
//! `cargo run --release -p flexcomm-compression --example quantizers [n] [name] [kernel]`. With `known`, norm and energy of the tensor
//! are given, as from a pass before: what is left is rounding and packing. "Least" is the bound of it: a loop that only scales,
//! cuts and packs to 4 bits, without random numbers. What the times are made of: `SPEED.md`.
#![allow(clippy::unwrap_used, clippy::print_stdout, missing_docs)]

#[path = "shared/least.rs"]
mod least;
mod shared;

use flexcomm_compression::Build;
use flexcomm_compression::codec::{Context, Shape, Target};
use flexcomm_compression::entry::Entry;
use flexcomm_compression::random::Stream;
use flexcomm_compression::wire::{Reader, Writer};
use flexcomm_compression::{MAX_VALUES, methods};
use flexcomm_domain::spec::{Class, CompressorSpec};
use shared::{read, read_kernel};
use std::hint::black_box;
use std::time::Instant;

/// Least seconds of some runs.
fn time(mut work: impl FnMut()) -> f64 {
    work();
    let mut least = f64::MAX;
    for _ in 0..5 {
        let start = Instant::now();
        work();
        least = least.min(start.elapsed().as_secs_f64());
    }
    least
}

fn main() -> Result<(), String> {
    let mut arguments = std::env::args().skip(1);
    let n = read("n", arguments.next(), (25_000_000, |n: &usize| (1..=MAX_VALUES).contains(n)))?;
    let only = arguments.next().unwrap_or_default();
    let context = Context { kernel: read_kernel(arguments.next())?, ..Context::new(1) };
    let stream = Stream::new(1, [0; 4]);
    let laplace = |i| {
        let u = stream.uniform(i) - 0.5;
        -u.signum() * (1.0 - 2.0 * u.abs()).max(f32::MIN_POSITIVE).ln() * 1e-3
    };
    let x: Vec<f32> = (0..n as u32).map(laplace).collect();
    let mut to = vec![0.0f32; n];
    let gigabytes = 4.0 * n as f64 / 1e9;
    let copy = time(|| black_box(&mut to).copy_from_slice(black_box(&x)));
    let looked = time(|| _ = black_box(context.stats(black_box(&x)).unwrap()));
    println!("n = {n}, {:?}, copy {:.1} GB/s", context.kernel, gigabytes / copy);
    let per_16 = |seconds: f64| seconds * 1.6e10 / n as f64;
    println!("per 16 values: copy {:.2} ns, norm and energy alone {:.2} ns", per_16(copy), per_16(looked));
    let (most, mut codes) = (context.stats(&x).unwrap().max, vec![0; n.div_ceil(2)]);
    if least::least(&x, 4.0 / most, &mut codes) {
        let least = time(|| _ = least::least(black_box(&x), 4.0 / most, black_box(&mut codes)));
        let read = time(|| _ = black_box(black_box(&x).iter().fold(0, |bits, x| bits | x.to_bits())));
        println!("per 16 values, least: read {:.2} ns; scaled, cut and packed {:.2} ns", per_16(read), per_16(least));
    }
    println!("{:46} {:>9} {:>14} {:>11} {:>16}", "method", "bits", "compress/copy", "known/copy", "decode+sum/copy");
    let measured = |e: &&Entry| e.info.class == Class::Quantization || e.info.name == "threelc";
    for entry in methods::all().filter(measured) {
        for example in entry.examples {
            let strategy: CompressorSpec = format!("{}({example})", entry.info.name).parse().unwrap();
            if !strategy.to_string().contains(&only) {
                continue;
            }
            let side = n.isqrt();
            let shape = if n.is_multiple_of(side) { Shape { rows: n / side, cols: side } } else { Shape::vector(n) };
            let (mut codec, mut out) = (strategy.codec(shape), Writer::new());
            let known = Context { known: Some(context.stats(&x).unwrap()), ..context };
            let [encode, rest] = [&context, &known].map(|context| {
                time(|| {
                    out.clear();
                    codec.encode(black_box(&x), context, &mut out).unwrap();
                })
            });
            to.fill(0.0);
            let decode = time(|| {
                codec.decode(&mut Reader::new(out.bytes()), &context, Target::add(0.5, black_box(&mut to))).unwrap();
            });
            let bits = 8.0 * out.len() as f64 / n as f64;
            let [encode, rest, decode] = [encode, rest, decode].map(|seconds| seconds / copy);
            println!("{:46} {bits:9.3} {encode:14.2} {rest:11.2} {decode:16.2}", strategy.to_string());
        }
    }
    Ok(())
}
