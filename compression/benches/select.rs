//! A whole step (error feedback, selection, gain, residual update, message) against a plain copy of the gradient and
//! against `select_nth_unstable` over all magnitudes. `cargo bench -p flexcomm-compression`.
#![allow(clippy::unwrap_used, missing_docs)]

use criterion::{BenchmarkId, Criterion, Throughput, criterion_group, criterion_main};
use flexcomm_compression::pipeline::{Gradient, Member, Pipeline, Step};
use flexcomm_compression::wire::Writer;
use flexcomm_compression::{Kernel, Layers};
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

fn rank(spec: &str, layers: Layers, kernel: Kernel) -> Pipeline {
    Pipeline::new(&spec.parse().unwrap(), layers, Member::alone(1)).with_kernel(kernel)
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
            for name in ["topk", "lwtopk", "mstopk"] {
                for kernel in Kernel::available().filter(|kernel| name == "topk" || *kernel == Kernel::best()) {
                    let mut own = rank(&format!("{name}(k={cr})+ef(vanilla)"), layers(n), kernel);
                    let (mut out, mut index) = (Writer::new(), 0);
                    group.bench_function(BenchmarkId::new(format!("{name} {kernel:?}"), cr), |b| {
                        b.iter(|| {
                            index += 1;
                            let step = Step { index, learning_rate: 0.1 };
                            own.compress(Gradient::F32(black_box(&gradient)), step, &mut out).unwrap().energy
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
    let mut group = c.benchmark_group("message n=1000000 c=0.01");
    for checksum in ["", "+checksum(crc32c)"] {
        let mut own = rank(&format!("topk(k=0.01){checksum}"), Layers::fused(n).unwrap(), Kernel::best());
        let (mut out, mut mean) = (Writer::new(), vec![0.0; n]);
        own.compress(Gradient::F32(&gradient), Step { index: 0, learning_rate: 0.1 }, &mut out).unwrap();
        group.bench_function(format!("aggregate 8{checksum}"), |b| {
            b.iter(|| own.aggregate(black_box(&[out.bytes(); 8]), 0, &mut mean).unwrap());
        });
    }
    group.finish();
}

criterion_group!(benches, methods, messages);
criterion_main!(benches);
