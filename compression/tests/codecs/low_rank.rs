//! Tests of single low-rank methods beyond what `all.rs` asks of every one.

use crate::harness::*;
use flexcomm_compression::Build;
use flexcomm_compression::Layers;
use flexcomm_compression::codec::{Shape, Target};
use flexcomm_compression::wire::{Reader, Writer};

/// A matrix of rank r: sums of outer products with weights that fall.
fn of_rank(shape: Shape, r: usize, seed: u64) -> Vec<f32> {
    let (left, right) = (normal(shape.rows * r, seed), normal(shape.cols * r, seed + 1000));
    let at = |i: usize, j: usize| {
        (0..r).map(|k| left[k * shape.rows + i] * right[k * shape.cols + j] / (k + 1) as f32).sum()
    };
    (0..shape.values()).map(|place| at(place / shape.cols, place % shape.cols)).collect()
}

fn relative_error(x: &[f32], sent: &[f32]) -> f64 {
    (distance(x, sent) / energy(x)).sqrt()
}

const SHAPE: Shape = Shape { rows: 60, cols: 40 };

/// Rank r of rank r is the matrix itself, in the first step already, tall and wide.
#[test]
fn powersgd_reproduces_what_has_its_rank() {
    for shape in [SHAPE, Shape { rows: 30, cols: 90 }] {
        for r in 1..=4 {
            for seed in 0..10 {
                let x = of_rank(shape, r, seed);
                for rank in r..=4 {
                    let mut run = Run::new(&parse(&format!("powersgd(rank={rank})")), shape, seed);
                    let error = relative_error(&x, &run.transmit(&x).unwrap().1);
                    assert!(error < 1e-4, "rank {r} by {rank}: {error}");
                }
            }
        }
    }
}

/// On one matrix of full rank, each step starts from the last one's subspace and comes nearer to the best that its rank can
/// do; a codec that starts anew stays where the first step was. An overwritten warm start is a known mistake.
#[test]
fn the_warm_start_improves_powersgd() {
    let x: Vec<f32> = of_rank(SHAPE, 8, 3).iter().zip(normal(SHAPE.values(), 4)).map(|(a, b)| a + 0.05 * b).collect();
    for text in ["powersgd(rank=2)", "gradzip(rank=2,lambda=0.000001)"] {
        let mut run = Run::new(&parse(text), SHAPE, 1);
        let errors: Vec<f64> = (0..30).map(|_| relative_error(&x, &run.transmit(&x).unwrap().1)).collect();
        assert!(errors.windows(2).all(|pair| pair[1] <= pair[0] * 1.001), "{text}: {errors:?}");
        assert!(errors[29] < 0.95 * errors[0], "{text}: {errors:?}");
        // Another first step, as without a warm start, is no better than the first on average.
        let fresh = |seed| relative_error(&x, &Run::new(&parse(text), SHAPE, seed).transmit(&x).unwrap().1);
        let mean = (0..20).map(fresh).sum::<f64>() / 20.0;
        assert!(errors[29] < 0.97 * mean, "{text}: {} against {mean}", errors[29]);
    }
}

/// With full convergence the error is that of the best approximation of rank 1, known here by construction.
#[test]
fn powersgd_converges_to_the_leading_singular_vectors() {
    // Orthogonal vectors: rows of signs.
    let sign = |i: usize, bit: usize| if i >> bit & 1 == 0 { 1.0f32 } else { -1.0 };
    let shape = Shape { rows: 16, cols: 8 };
    let at = |i: usize, j: usize| 3.0 * sign(i, 0) * sign(j, 1) + 1.0 * sign(i, 2) * sign(j, 2) + 0.5 * sign(i, 3);
    let x: Vec<f32> = (0..128).map(|place| at(place / 8, place % 8)).collect();
    let mut run = Run::new(&parse("powersgd(rank=1)"), shape, 5);
    let sent = (0..20).map(|_| run.transmit(&x).unwrap().1).last().unwrap();
    assert!((distance(&x, &sent) - 128.0 * (1.0 + 0.25)).abs() < 1e-2);
    assert!((energy(&sent) - 128.0 * 9.0).abs() < 1e-2);
}

/// Two ranks together approximate the mean of their matrices: of rank 2 when each has rank 1.
#[test]
fn ranks_share_one_subspace() {
    let layers = Layers::matrices(&[SHAPE, Shape::vector(17)]).unwrap();
    let mut ranks = Ranks::with_layers("powersgd(rank=2)", &layers, 2);
    let gradients: Vec<Vec<f32>> = (0..2).map(|seed| [of_rank(SHAPE, 1, seed), normal(17, seed)].concat()).collect();
    let want: Vec<f32> = gradients[0].iter().zip(&gradients[1]).map(|(a, b)| (a + b) / 2.0).collect();
    for step in 0..3 {
        let mean = ranks.step(&gradients, step);
        assert!(relative_error(&want, &mean) < 1e-4);
        // Vectors travel as they are.
        assert_eq!(mean[SHAPE.values()..], want[SHAPE.values()..]);
    }
}

/// A gradient of zeros does not cool the warm start.
#[test]
fn zeros_keep_the_warm_start() {
    for text in ["powersgd(rank=2)", "gradzip(rank=2)"] {
        let mut run = Run::new(&parse(text), SHAPE, 1);
        run.transmit(&normal(SHAPE.values(), 1)).unwrap();
        let saved = |run: &Run| {
            let mut out = Writer::new();
            run.codec.save(&mut out);
            out
        };
        let before = saved(&run);
        assert_eq!(before.len(), 4 + 4 * 2 * SHAPE.cols);
        let sent = run.transmit(&vec![0.0; SHAPE.values()]).unwrap().1;
        assert!(sent.iter().all(|v| *v == 0.0));
        assert_eq!(saved(&run), before);
        // And it is put back as it was.
        let mut other = Run::new(&parse(text), SHAPE, 9);
        other.codec.restore(&mut Reader::new(before.bytes())).unwrap();
        assert_eq!(saved(&other), before);
    }
}

/// (rows + cols) * rank values, wherever that is less than the matrix.
#[test]
fn thin_factors_are_what_travels() {
    for (text, rank) in [("powersgd(rank=3)", 3), ("gradzip(rank=3)", 3), ("powersgd(rank=1000)", 40)] {
        let codec = parse(text).codec(SHAPE);
        let bytes = codec.round_size(0).most() + codec.round_size(1).most();
        let want = if rank * 100 < SHAPE.values() { rank * 100 } else { SHAPE.values() };
        assert_eq!((codec.rounds(), bytes), (2, 4 * want), "{text}");
    }
}

/// The ridge's minimum, in closed form for rank 1: P = M r / (1 + λ) for unit r, R = Mᵀ p / (1 + λ) for unit p.
#[test]
fn gradzip_shrinks_by_its_regulariser() {
    let x = of_rank(SHAPE, 1, 2);
    for lambda in [0.1, 0.5, 0.9] {
        let mut run = Run::new(&parse(&format!("gradzip(rank=1,lambda={lambda})")), SHAPE, 1);
        let sent = run.transmit(&x).unwrap().1;
        // The scale of P is moved to R, so that one of both shrinkages is left.
        for (x, sent) in x.iter().zip(&sent) {
            assert!((x / (1.0 + lambda as f32) - sent).abs() < 1e-4 * x.abs().max(0.1), "{x}: {sent}");
        }
    }
}

/// Two atoms on one matrix, by enumeration over many draws: each is there with its probability, whole.
#[test]
fn atomo_sends_whole_atoms() {
    let shape = Shape { rows: 4, cols: 3 };
    // Singular values 6 and 2 on coordinate vectors, and one 0.
    let mut x = vec![0.0f32; 12];
    (x[0], x[4]) = (6.0, 2.0);
    let strategy = parse("atomo(budget=1)");
    let mut counts = [0u32; 2];
    const DRAWS: u64 = 4000;
    for seed in 0..DRAWS {
        let sent = Run::new(&strategy, shape, seed).transmit(&x).unwrap().1;
        for (count, (place, whole)) in counts.iter_mut().zip([(0, 8.0), (4, 8.0)]) {
            let there = sent[place] != 0.0;
            assert!(!there || (sent[place] - whole).abs() < 1e-4, "{sent:?}");
            *count += u32::from(there);
        }
    }
    // p = 6/8 and 2/8, each over p is 8; 6 standard deviations.
    let sigma = (DRAWS as f64 * 0.75 * 0.25).sqrt();
    assert!((f64::from(counts[0]) - 3000.0).abs() < 6.0 * sigma, "{counts:?}");
    assert!((f64::from(counts[1]) - 1000.0).abs() < 6.0 * sigma, "{counts:?}");
}

/// Whatever the budget: no message is longer than the matrix with its one byte, and none than what was charged.
#[test]
fn atomo_sends_no_more_than_the_matrix() {
    let mut atoms = 0;
    for shape in [SHAPE, Shape { rows: 7, cols: 90 }, Shape { rows: 4, cols: 4 }, Shape::vector(50)] {
        let (x, whole) = (laplace(shape.values(), 6), 1 + 4 * shape.values());
        for budget in [0.3f64, 1.0, 1.5, 2.0, 3.7, 6.0, 12.5, 23.9, 24.0, 39.0, 1000.0] {
            let strategy = parse(&format!("atomo(budget={budget})"));
            for seed in 0..20 {
                let mut run = Run::new(&strategy, shape, seed);
                run.transmit(&x).unwrap();
                let sent = run.payload.len();
                assert!(sent <= whole && run.codec.size().admits(sent), "{strategy} of {shape:?}: {sent} bytes");
                let most = 5 + 4 * (budget.ceil() as usize) * (shape.rows + shape.cols);
                assert!(sent == whole || sent <= most, "{strategy} of {shape:?}: {sent} bytes");
                atoms += usize::from(sent != whole);
            }
        }
    }
    assert!(atoms > 200, "{atoms}");
}

/// Once there were as many atoms as a uniform number each let through, also where these are longer than the matrix: such
/// messages are read as ever, to the last atom that a matrix can have.
#[test]
fn atomo_reads_more_atoms_than_it_sends() {
    let read = |shape: Shape, count: u32| {
        let mut codec = parse("atomo(budget=3)").codec(shape);
        let mut payload = [&[0], &count.to_le_bytes()[..]].concat();
        for atom in 0..count {
            let (left, right) = (vec![1.0f32; shape.rows], vec![(atom + 1) as f32; shape.cols]);
            left.iter().chain(&right).for_each(|value| payload.extend(value.to_le_bytes()));
        }
        let mut out = vec![0.0; shape.values()];
        let (mut from, context) = (Reader::new(&payload), flexcomm_compression::codec::Context::new(1));
        codec.decode(&mut from, &context, Target::add(1.0, &mut out)).map(|()| (out, from.left()))
    };
    let square = Shape { rows: 4, cols: 4 };
    for (count, sum) in [(0, 0.0), (3, 6.0), (4, 10.0)] {
        assert_eq!(read(square, count).unwrap(), (vec![sum; 16], 0), "{count}");
    }
    assert!(read(square, 5).is_err());
    assert!(read(Shape::vector(50), 1).is_err());
}

/// A full budget is the matrix; the mean of a smaller one too, tall and wide.
#[test]
fn atomo_is_unbiased_on_long_matrices() {
    for shape in [Shape { rows: 12, cols: 5 }, Shape { rows: 5, cols: 12 }] {
        let x = laplace(60, 8);
        let mut mean = vec![0.0f64; 60];
        let mut variance = 0.0;
        const DRAWS: u64 = 3000;
        for seed in 0..DRAWS {
            let sent = Run::new(&parse("atomo(budget=2)"), shape, seed).transmit(&x).unwrap().1;
            mean.iter_mut().zip(&sent).for_each(|(mean, sent)| *mean += f64::from(*sent) / DRAWS as f64);
            variance += distance(&x, &sent) / DRAWS as f64;
        }
        let off: f64 = mean.iter().zip(&x).map(|(mean, x)| (mean - f64::from(*x)).powi(2)).sum();
        // In the mean `off` is variance / draws.
        assert!(off < 5.0 * variance / DRAWS as f64, "{off} of {variance}");
        let whole = Run::new(&parse("atomo(budget=4.999)"), shape, 1).transmit(&x).unwrap().1;
        assert!(relative_error(&x, &whole) < 0.3);
    }
}

/// Slices that lie in a plane: after one step to learn it, two components say all, mean included.
#[test]
fn gradiveq_learns_a_plane() {
    let (n, slice) = (800, 8);
    let gradient = |seed: u64| -> Vec<f32> {
        let weights = normal(2 * n / slice, seed);
        let (a, b, mean) = (normal(slice, 70), normal(slice, 71), normal(slice, 72));
        let at = |i: usize| {
            let (at, j) = (i / slice, i % slice);
            weights[2 * at] * a[j] + weights[2 * at + 1] * b[j] + mean[j]
        };
        (0..n).map(at).collect()
    };
    let layers = Layers::fused(n).unwrap();
    let mut ranks = Ranks::with_layers("gradiveq(d=2,slice=8,every=3)", &layers, 3);
    for step in 0..9 {
        let gradients: Vec<Vec<f32>> = (0..3).map(|rank| gradient(10 * step + rank)).collect();
        let want: Vec<f32> = (0..n).map(|i| gradients.iter().map(|g| g[i]).sum::<f32>() / 3.0).collect();
        let error = relative_error(&want, &ranks.step(&gradients, step));
        assert!(error < 1e-4, "step {step}: {error}");
        // One step as it is, then three small ones.
        let small = ranks.messages[0].len() < 2 * n;
        assert_eq!(small, step % 4 != 0, "step {step}");
    }
}

/// Of all projections on d directions the principal components lose least: less than the first d coordinates.
#[test]
fn gradiveq_loses_less_than_coordinates_do() {
    let (n, slice, kept) = (1600, 16, 4);
    let mix = normal(slice * slice, 5);
    let gradient = |seed: u64| -> Vec<f32> {
        let raw = normal(n, seed);
        let at = |i: usize| {
            let (start, j) = (i / slice * slice, i % slice);
            // Weights that fall: correlated values.
            (0..slice).map(|k| mix[k * slice + j] * raw[start + k] * 0.6f32.powi(k as i32)).sum()
        };
        (0..n).map(at).collect()
    };
    let shape = Shape::vector(n);
    let mut run = Run::new(&parse("gradiveq(d=4,slice=16,every=5)"), shape, 1);
    run.transmit(&gradient(1)).unwrap();
    for seed in 2..5 {
        run.context.step = seed;
        let x = gradient(seed);
        let (measured, sent) = run.transmit(&x).unwrap();
        let lost = distance(&x, &sent) / energy(&x);
        assert!(lost < 0.2, "lost {lost}; coordinates lose {}", 1.0 - kept as f64 / slice as f64);
        assert!((measured.gain() - energy(&sent) / energy(&x)).abs() < 1e-4);
        for end in 0..run.payload.len() {
            let mut from = Reader::new(&run.payload.bytes()[..end]);
            assert!(
                run.codec.decode(&mut from, &run.context, Target::add(1.0, &mut vec![0.0; n])).is_err(),
                "cut at {end}"
            );
        }
    }
}

/// Slices that are too few teach no basis: such layers travel as they are, on all ranks. Where slices have nothing in
/// common, no layer's error exceeds the layer.
#[test]
fn gradiveq_never_loses_more_than_the_layer() {
    let dense: [(&str, &[usize]); 3] = [
        ("d=16,slice=128", &[100, 127, 300, 512, 600, 1100, 2175]),
        ("d=1,slice=64", &[200, 640, 8063]),
        ("d=2", &[5120]),
    ];
    let compressed: [(&str, &[usize]); 2] =
        [("d=16,slice=128", &[2176, 2300, 20_000]), ("d=1,slice=64", &[8064, 12_900])];
    for (cases, small) in [(&dense[..], false), (&compressed[..], true)] {
        for (args, n) in cases.iter().flat_map(|(args, all)| all.iter().map(|n| (*args, *n))) {
            let mut ranks = Ranks::with_layers(&format!("gradiveq({args})"), &Layers::fused(n).unwrap(), 2);
            for step in 0..6 {
                let gradients = [normal(n, 2 * step), normal(n, 2 * step + 1)];
                let want: Vec<f32> = gradients[0].iter().zip(&gradients[1]).map(|(a, b)| (a + b) / 2.0).collect();
                let error = relative_error(&want, &ranks.step(&gradients, step));
                let most = if small && step > 0 { 1.0 } else { 1e-6 };
                assert!(error <= most, "{args}, n = {n}, step {step}: {error}");
                let shrunk = ranks.messages[0].len() < 4 * n;
                assert_eq!(shrunk, small && step > 0, "{args}, n = {n}, step {step}");
            }
        }
    }
}

/// Tensors that leave the factors without a second direction, or their products at the end of f32.
fn hard_matrices() -> Vec<(&'static str, Shape, Vec<f32>)> {
    let huge: Vec<f32> = (0..40).map(|i| if i % 3 == 0 { f32::MAX } else { -f32::MAX / 2.0 }).collect();
    let square = Shape { rows: 64, cols: 64 };
    let one = (0..square.values()).map(|i| if i == 5 { 1.0 } else { 0.0 }).collect();
    let signs = normal(40, 3).iter().map(|v| v.signum() * f32::MAX).collect();
    vec![
        ("huge", Shape { rows: 8, cols: 5 }, huge),
        ("largest of both signs", Shape { rows: 5, cols: 8 }, signs),
        ("spike", Shape { rows: 25, cols: 20 }, (0..500).map(|i| if i == 123 { 1e6 } else { 1e-3 }).collect()),
        ("ties", Shape { rows: 20, cols: 10 }, (0..200).map(|i| [1.0, -1.0, 0.5, 0.0][i % 4]).collect()),
        ("constant", square, vec![1.0; square.values()]),
        ("one that is not zero", square, one),
    ]
}

/// Five steps of 20 seeds on each: every message is read, none loses more than the tensor, and what is left is what was
/// not sent.
#[test]
fn factors_stay_finite_on_hard_matrices() {
    let texts =
        ["powersgd(rank=1)", "powersgd(rank=3)", "gradzip(rank=1,lambda=0.1)", "gradzip(rank=2)", "gradzip(rank=3)"];
    let least = ["gradzip(rank=2,lambda=1e-9)", "gradzip(rank=4,lambda=1e-9)", "gradzip(rank=16,lambda=1e-6)"];
    for (name, shape, x) in hard_matrices() {
        for text in texts.iter().chain(&least) {
            for seed in 0..20 {
                let mut run = Run::new(&parse(text), shape, seed);
                for step in 0..5 {
                    run.context.step = step;
                    let label = format!("{text} on {name}, seed {seed}, step {step}");
                    let mut rest = x.clone();
                    let measured = run.take(&mut rest).unwrap_or_else(|e| panic!("{label}: failed to {e}"));
                    let sent = run.decode(x.len());
                    assert!(sent.iter().chain(&rest).all(|v| v.is_finite()), "{label}");
                    assert!(distance(&x, &sent) <= (1.0 + 1e-6) * energy(&x), "{label}");
                    let (said, is) = (measured.sent, energy(&sent));
                    assert!((said - is).abs() <= 1e-3 * is.max(1e-6 * energy(&x)), "{label}: {said} is {is}");
                    run.context.round = 1;
                    run.codec.reply(&mut Reader::new(run.payload.bytes()), &run.context, 1.0).unwrap();
                }
            }
        }
    }
}

/// Right factors of several ranks at the end of f32 add up inside it.
#[test]
fn sums_of_huge_factors_stay_finite() {
    for text in ["powersgd(rank=1)", "gradzip(rank=2)"] {
        let gradients: Vec<Vec<f32>> = (0..3).map(|_| vec![f32::MAX; 240]).collect();
        let mean = Ranks::new(text, 240, 3).step(&gradients, 0);
        let kept = energy(&mean) / energy(&gradients[0]);
        assert!(kept > 0.0 && distance(&mean, &gradients[0]) <= energy(&gradients[0]), "{text}: {kept}");
    }
}

#[test]
fn regularisers_below_roundings_are_refused() {
    let error =
        "gradzip(rank=2,lambda=1e-10)".parse::<flexcomm_domain::spec::CompressorSpec>().unwrap_err().to_string();
    assert!(error.contains("set lambda of gradzip to \"1e-10\""), "{error}");
}
