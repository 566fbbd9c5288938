//! What is done in one pass is what several would do.

use crate::harness::*;
use flexcomm_compression::codec::{EncodeError, Target};
use flexcomm_compression::pipeline::{Gradient, Member, Pipeline, Step};
use flexcomm_compression::wire::{Reader, Writer};
use flexcomm_compression::{Kernel, Layers, naive};
use flexcomm_domain::spec::{Class, CompressorSpec};

fn pipeline(text: &str, lengths: &[usize]) -> Pipeline {
    Pipeline::new(&parse(text), Layers::new(lengths).unwrap(), Member::alone(3))
}

fn step(index: u64) -> Step {
    Step { index, learning_rate: 0.1 }
}

fn saved(rank: &Pipeline) -> Writer {
    let mut out = Writer::new();
    rank.save(&mut out);
    out
}

/// Candidates that the memory's pass collects give the message of a top-k that reads the sum itself.
#[test]
fn top_k_in_the_pass_of_the_memory() {
    for (n, k) in [(20_000, "0.01"), (20_000, "0.9"), (5000, "1"), (100, "0.1")] {
        for kernel in Kernel::available() {
            let mut compensated = pipeline(&format!("topk(k={k})+ef(vanilla)"), &[n]).with_kernel(kernel);
            let mut plain = pipeline(&format!("topk(k={k})"), &[n]).with_kernel(kernel);
            let (mut one, mut other) = (Writer::new(), Writer::new());
            for index in 0..5 {
                let gradient = laplace(n, index);
                let sum: Vec<f32> =
                    compensated.residual().iter().zip(&gradient).map(|(residual, g)| residual + g).collect();
                let a = compensated.compress(Gradient::F32(&gradient), step(index), &mut one).unwrap();
                let b = plain.compress(Gradient::F32(&sum), step(index), &mut other).unwrap();
                assert_eq!((&one, a.energy), (&other, b.energy), "k = {k} of {n}, step {index}, {kernel:?}");
            }
        }
    }
}

/// What one step teaches of the next never changes what is selected: not when the scale leaps, or nearly all is equal, or zero.
#[test]
fn top_k_of_gradients_that_change() {
    let (n, text) = (30_000, "topk(k=0.02)");
    for kernel in Kernel::available() {
        let mut compensated = pipeline(&format!("{text}+ef(vanilla)"), &[n]).with_kernel(kernel);
        let mut long = pipeline(text, &[n]).with_kernel(kernel);
        let scales = [1.0, 1.0, 1.1, 1e-3, 1e-3, 1e4, 0.0, 1.0, 0.97, 1.03, 1e-30, 1e-30];
        let mut out = [(); 3].map(|()| Writer::new());
        for (index, scale) in (0u64..).zip(scales) {
            let mut gradient: Vec<f32> = laplace(n, index).into_iter().map(|x| scale * x).collect();
            if index % 4 == 3 {
                gradient[700..].fill(scale);
            }
            let sum: Vec<f32> =
                compensated.residual().iter().zip(&gradient).map(|(residual, g)| residual + g).collect();
            compensated.compress(Gradient::F32(&gradient), step(index), &mut out[0]).unwrap();
            // One that has learned from the steps before, and one that has not.
            long.compress(Gradient::F32(&sum), step(index), &mut out[1]).unwrap();
            let mut fresh = pipeline(text, &[n]).with_kernel(kernel);
            fresh.compress(Gradient::F32(&sum), step(index), &mut out[2]).unwrap();
            let mut kept = vec![0.0; n];
            fresh.decompress(out[2].bytes(), index, &mut kept).unwrap();
            let mut want = vec![0.0; n];
            naive::topk(&sum, n / 50).into_iter().for_each(|i| want[i as usize] = sum[i as usize]);
            assert_eq!(kept, want, "step {index}, {kernel:?}");
            assert!(out[0] == out[2] && out[1] == out[2], "step {index}, {kernel:?}");
        }
    }
}

/// Without anything to add, too, a refused gradient moves no codec, whichever tensor it is refused for.
#[test]
fn gradients_that_are_read_where_they_lie() {
    for codec in every_strategy() {
        for scope in ["bucket", "tensor"] {
            let text = format!("{codec}+scope({scope})");
            let mut rank = pipeline(&text, &[30, 20]);
            let mut out = Writer::new();
            rank.compress(Gradient::F32(&normal(50, 1)), step(0), &mut out).unwrap();
            let mut bad = normal(50, 2);
            bad[41] = f32::NAN;
            let before = saved(&rank);
            let error = rank.compress(Gradient::F32(&bad), step(1), &mut out).unwrap_err();
            assert!(matches!(error, EncodeError::NonFinite { index: 41, .. }), "{text}: {error}");
            assert_eq!(saved(&rank), before, "{text}");
            let mut skipping = pipeline(&format!("{text}+nonfinite(skip)"), &[30, 20]);
            let mut zeros = pipeline(&text, &[30, 20]);
            let mut twin = Writer::new();
            assert!(skipping.compress(Gradient::F32(&bad), step(0), &mut out).unwrap().skipped, "{text}");
            zeros.compress(Gradient::Zeros, step(0), &mut twin).unwrap();
            assert_eq!(out, twin, "{text}: skipped is not zeros");
        }
    }
}

/// Decoding into what held something else gives the bits of adding to zeros.
#[test]
fn decoding_forgets_what_was_there() {
    for strategy in every_strategy() {
        for n in [1, 100, 5003] {
            let mut run = Run::new(&strategy, shape(n), 5);
            if run.transmit(&laplace(n, 7)).is_err() || run.codec.rounds() > 1 {
                continue;
            }
            let (mut fresh, mut added) = (vec![f32::NAN; n], vec![0.0; n]);
            run.codec
                .decode(&mut Reader::new(run.payload.bytes()), &run.context, Target::replace(0.3, &mut fresh))
                .unwrap();
            run.codec
                .decode(&mut Reader::new(run.payload.bytes()), &run.context, Target::add(0.3, &mut added))
                .unwrap();
            let bits = |x: &[f32]| x.iter().map(|x| x.to_bits()).collect::<Vec<_>>();
            assert_eq!(bits(&fresh), bits(&added), "{strategy}, n = {n}");
        }
    }
}

/// The same bytes, values and energies, bit for bit.
fn assert_kernels_agree(strategy: &CompressorSpec, x: &[f32]) {
    let mut reference = None;
    for kernel in Kernel::available() {
        let mut run = Run::new(strategy, shape(x.len()), 7);
        run.context.kernel = kernel;
        let (energy, sent) = run.transmit(x).unwrap();
        let sent: Vec<u32> = sent.iter().map(|value| value.to_bits()).collect();
        let got = (run.payload, energy.compensated.to_bits(), energy.sent.to_bits(), sent);
        assert!(reference.get_or_insert(got.clone()) == &got, "{strategy}, n = {}, {kernel:?}", x.len());
    }
}

/// Long enough for vectors, pieces, blocks and what is left behind each; across a multiple of 2^16, where counters carry; and
/// scaled so that divisions take two products.
#[test]
fn kernels_agree_on_long_tensors() {
    for strategy in every_strategy().into_iter().filter(|s| s.compressor().class == Class::Quantization) {
        for (n, scale) in [(63, 1.0), (600, 1.0), (5003, 1.0), (5003, 1e-36), (5003, 1e30), (70_001, 1.0)] {
            let x: Vec<f32> = laplace(n, 9).into_iter().map(|x| scale * x).collect();
            assert_kernels_agree(&strategy, &x);
        }
    }
}

/// Codes of every width, and buckets of every length that vectors do several at once of, or nearly; one all zeros, one whose
/// step is so small that division takes two products.
#[test]
fn kernels_agree_on_every_width_and_bucket() {
    let mut x = laplace(9999, 3);
    x[2048..3072].fill(0.0);
    x[6144..7168].iter_mut().for_each(|x| *x *= 1e-36);
    let check = |text: String| [512, 8192, 9999].map(|n| assert_kernels_agree(&parse(&text), &x[..n]));
    for s in [1, 3, 4, 7, 15, 31, 63, 127] {
        for bucket in [0, 64, 100, 128, 192, 512, 1024, 2048, 4096] {
            check(format!("qsgd(s={s},bucket={bucket})"));
        }
        check(format!("qsgd(s={s},bucket=128,norm=max)"));
    }
    (1..=10).chain([15, 31, 50, 51, 63, 127]).for_each(|k| _ = check(format!("dithering(k={k},partition=natural)")));
    (2..=8).for_each(|bits| _ = check(format!("lpcsvrg(bits={bits})")));
}
