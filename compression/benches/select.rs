//! A whole step (error feedback, selection, gain, residual update) against a plain copy of the gradient and
//! against `select_nth_unstable` over all magnitudes. `cargo bench -p flexcomm-compression`.
#![allow(clippy::unwrap_used, missing_docs)]

use criterion::{BenchmarkId, Criterion, Throughput, criterion_group, criterion_main};
use flexcomm_compression::Compressor;
use flexcomm_compression::{Checksum, GradientCompressor, Kernel, Layers, Message, Method, Part, aggregate, encode};
use flexcomm_domain::CompressionRatio;
use rand::{Rng, SeedableRng};
use rand_chacha::ChaCha8Rng;
use std::hint::black_box;

const SIZES: [usize; 2] = [1_000_000, 25_000_000];
const RATIOS: [f64; 3] = [0.1, 0.01, 0.001];

/// Laplace: as heavy-tailed as gradients are at least.
fn gradient(n: usize) -> Vec<f32> {
    let mut rng = ChaCha8Rng::seed_from_u64(1);
    let laplace = |_| {
        let u: f32 = rng.random::<f32>() - 0.5;
        -u.signum() * (1.0 - 2.0 * u.abs()).max(f32::MIN_POSITIVE).ln()
    };
    (0..n).map(laplace).collect()
}

/// 50 layers, one of which holds half of the values, as in networks with a large last layer.
fn layers(n: usize) -> Layers {
    let mut lengths = vec![n / 100; 49];
    lengths.push(n - 49 * (n / 100));
    Layers::new(&lengths).unwrap()
}

fn methods(c: &mut Criterion) {
    for n in SIZES {
        let gradient = gradient(n);
        let mut group = c.benchmark_group(format!("n={n}"));
        group.throughput(Throughput::Bytes(4 * n as u64)).sample_size(10);
        let mut copy = vec![0.0f32; n];
        group.bench_function("copy", |b| b.iter(|| black_box(&mut copy).copy_from_slice(black_box(&gradient))));
        for cr in RATIOS {
            let k = (n as f64 * cr) as usize;
            let mut keys = vec![0u32; n];
            group.bench_function(BenchmarkId::new("select_nth_unstable", cr), |b| {
                b.iter(|| {
                    keys.iter_mut().zip(&gradient).for_each(|(k, x)| *k = x.to_bits() & 0x7fff_ffff);
                    *keys.select_nth_unstable_by(k, |a, b| b.cmp(a)).1
                });
            });
            for compressor in [Compressor::TopK, Compressor::LwTopK, Compressor::MsTopK] {
                for kernel in Kernel::available() {
                    if compressor != Compressor::TopK && kernel != Kernel::best() {
                        continue;
                    }
                    let method = Method::new(compressor, CompressionRatio::new(cr).unwrap());
                    let mut rank = GradientCompressor::with_kernel(layers(n), kernel);
                    let mut seed = 0;
                    let name = format!("{compressor} {kernel:?}");
                    group.bench_function(BenchmarkId::new(name, cr), |b| {
                        b.iter(|| {
                            seed += 1;
                            rank.compress(method, black_box(&gradient), seed).unwrap().energy
                        });
                    });
                }
            }
        }
        group.finish();
    }
}

fn messages(c: &mut Criterion) {
    let n = 1_000_000;
    let gradient = gradient(n);
    let mut rank = GradientCompressor::new(Layers::fused(n).unwrap());
    let method = Method::new(Compressor::TopK, CompressionRatio::new(0.01).unwrap());
    let selection = rank.compress(method, &gradient, 0).unwrap().selection;
    let mut bytes = Vec::new();
    let mut group = c.benchmark_group("message n=1000000 c=0.01");
    for checksum in [Checksum::None, Checksum::Crc32c] {
        group.bench_function(BenchmarkId::new("encode", format!("{checksum:?}")), |b| {
            b.iter(|| encode(Compressor::TopK, selection, Part::Whole, checksum, black_box(&mut bytes)));
        });
        group.bench_function(BenchmarkId::new("parse", format!("{checksum:?}")), |b| {
            b.iter(|| Message::parse(black_box(&bytes)).unwrap().k());
        });
    }
    let message = Message::parse(&bytes).unwrap();
    let mut mean = vec![0.0; n];
    group.bench_function("aggregate 8", |b| b.iter(|| aggregate(black_box(&[message; 8]), 8, &mut mean).unwrap()));
    group.finish();
}

criterion_group!(benches, methods, messages);
criterion_main!(benches);
