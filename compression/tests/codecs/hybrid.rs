//! Tests of single hybrid methods beyond what `all.rs` asks of every one: each against its definition.

use crate::harness::*;
use flexcomm_compression::pipeline::{Gradient, Member, Pipeline, Step};
use flexcomm_compression::wire::Writer;
use flexcomm_compression::{Layers, naive};

fn indices(values: &[f32]) -> Vec<u32> {
    (0..).zip(values).filter(|(_, v)| **v != 0.0).map(|(i, _)| i).collect()
}

/// Kept values lie on levels of the norm of what is kept, next to where they are; what is not kept is zero.
#[test]
fn qsparse_levels_are_qsgd_of_the_top_k() {
    let (x, k, s) = (laplace(500, 1), 25usize, 7.0f64);
    let at = naive::topk(&x, k);
    let norm = at.iter().map(|i| f64::from(x[*i as usize]).powi(2)).sum::<f64>().sqrt();
    let beta = (k as f64 / (s * s)).min((k as f64).sqrt() / s);
    for (scaled, divisor) in [(true, 1.0 + beta), (false, 1.0)] {
        let sent = compressed(&parse(&format!("qsparse(k={k},s=7,scaled={scaled})")), &x, 3);
        assert!(indices(&sent).iter().all(|i| at.contains(i)));
        for i in at.iter().map(|i| *i as usize) {
            let level = f64::from(sent[i]) * divisor * s / norm;
            assert!((level - level.round()).abs() < 1e-4, "value {i} on level {level}");
            let want = f64::from(x[i]) * s / norm;
            assert!((level - want).abs() < 1.0 + 1e-4, "value {i}: level {level} of {want}");
        }
    }
}

/// The quantiser alone is unbiased: over seeds the mean of what is sent for the top k is x, where it is not scaled.
#[test]
fn qsparse_levels_are_unbiased_on_what_is_kept() {
    let (x, draws) = (laplace(50, 2), 4000);
    let at = naive::topk(&x, 10);
    let (mut sum, mut squares) = (vec![0.0f64; 50], vec![0.0f64; 50]);
    for seed in 0..draws {
        for (i, v) in compressed(&parse("qsparse(k=10,s=3,scaled=false)"), &x, seed).iter().enumerate() {
            sum[i] += f64::from(*v);
            squares[i] += f64::from(*v).powi(2);
        }
    }
    for i in at.iter().map(|i| *i as usize) {
        let mean = sum[i] / draws as f64;
        let spread = ((squares[i] / draws as f64 - mean * mean) / draws as f64).sqrt();
        assert!((mean - f64::from(x[i])).abs() < 7.0 * spread + 1e-6, "value {i}: {mean} of {}", x[i]);
    }
}

/// Of 40 layers whose scales lie a thousandfold apart: a bucket as one tensor is divided by 1 + beta of all that is kept and sends of
/// the largest layers alone, a layer is divided by its own. What reaches the model of the gradients' sum, in the mean over layers.
#[test]
fn qsparse_keeps_what_it_sends_of_many_layers() {
    let (layers, n) = (40usize, 5000usize);
    let arrived = |text: &str| {
        let mut rank = Pipeline::new(&parse(text), Layers::new(&vec![n; layers]).unwrap(), Member::alone(1));
        let (signal, mut sum, mut out) = (normal(layers * n, 99), vec![0.0f32; layers * n], Writer::new());
        for index in 0..60 {
            let mut x = normal(layers * n, index);
            let scale = |i: usize| 10f32.powf((i / n % 4) as f32 - 3.0);
            x.iter_mut().enumerate().for_each(|(i, x)| *x = scale(i) * (*x + signal[i]));
            sum.iter_mut().zip(&x).for_each(|(sum, x)| *sum += x);
            rank.compress(Gradient::F32(&x), Step { index, learning_rate: 0.1 }, &mut out).unwrap();
        }
        let left = rank.residual();
        let of = |(left, sum): (&[f32], &[f32])| 1.0 - energy(left) / energy(sum);
        left.chunks(n).zip(sum.chunks(n)).map(of).sum::<f64>() / layers as f64
    };
    let [own, bucket, most] = ["qsparse(k=0.05)", "qsparse(k=0.05)+scope(bucket)", "lwtopk(k=0.05)"]
        .map(|text| arrived(&format!("{text}+ef(vanilla)")));
    assert!(own > 0.7 * most && own > 2.0 * bucket, "{own} by layer, {bucket} by bucket, lwtopk {most}");
}

#[test]
fn qsparse_signs_carry_the_mean_magnitude() {
    let sent = compressed(&parse("qsparse(k=3,quantize=sign)"), &[1.0, -5.0, 0.5, 3.0, -4.0], 1);
    assert_eq!(sent, [0.0, -4.0, 0.0, 4.0, -4.0]);
    let random = compressed(&parse("qsparse(k=50,select=random,quantize=sign)"), &[-2.0; 200], 1);
    assert_eq!(indices(&random).len(), 50);
    assert!(random.iter().all(|v| *v == 0.0 || *v == -2.0));
}

#[test]
fn qsparse_random_indices_do_not_travel() {
    let x = laplace(4000, 1);
    let bytes = |text: &str| {
        let mut run = Run::new(&parse(text), shape(4000), 1);
        run.transmit(&x).unwrap();
        run.payload.len()
    };
    // 400 signs and a mean.
    assert_eq!(bytes("qsparse(k=400,select=random,quantize=sign)"), 54);
    // 400 levels of 5 bits, and a norm.
    assert_eq!(bytes("qsparse(k=400,select=random)"), 254);
    assert!(bytes("qsparse(k=400)") > 254);
}

#[test]
fn hard_threshold_sends_tau_beyond_tau() {
    let sent = |tau: &str, x: &[f32]| compressed(&parse(&format!("hardthreshold(tau={tau})")), x, 1);
    assert_eq!(sent("2", &[2.0, -2.0, 2.5, -7.5, 0.0]), [0.0, 0.0, 2.0, -2.0, 0.0]);
    // The known mistake: a threshold above the maximum sends an all-negative tensor whole.
    assert_eq!(sent("10", &[-1.0, -2.0, -9.0, -3.0]), [0.0; 4]);
    // What is beyond is sent over several steps.
    let mut ranks = Ranks::new("hardthreshold(tau=2)+ef(vanilla)", 1, 1);
    let sent: Vec<f32> = (0..4).map(|step| ranks.step(&[vec![if step == 0 { -5.0 } else { 0.0 }]], step)[0]).collect();
    assert_eq!(sent, [-2.0, -2.0, 0.0, 0.0]);
}

/// By hand: of 4 positive and 4 negative values half of each, and their means.
#[test]
fn adaptive_threshold_takes_the_same_share_of_each_sign() {
    let x = [1.0, 4.0, 2.0, 3.0, -10.0, -40.0, -20.0, -30.0];
    let sent = compressed(&parse("adaptivethreshold(k=0.5)"), &x, 1);
    assert_eq!(sent, [0.0, 3.5, 0.0, 3.5, 0.0, -35.0, 0.0, -35.0]);
    // One sign alone, and zeros, which are of neither.
    let sent = compressed(&parse("adaptivethreshold(k=0.5)"), &[-1.0, -3.0, 0.0, -0.0], 1);
    assert_eq!(sent, [0.0, -3.0, 0.0, 0.0]);
}

/// A sample of a hundredth gives about k of each sign, the largest, and exactly their means.
#[test]
fn adaptive_threshold_estimates_from_a_sample() {
    let x = laplace(200_000, 1);
    let sent = compressed(&parse("adaptivethreshold(k=0.05)"), &x, 1);
    for negative in [false, true] {
        let side: Vec<f32> = x.iter().map(|v| if (*v < 0.0) == negative { *v } else { 0.0 }).collect();
        let at: Vec<u32> = indices(&sent).into_iter().filter(|i| (sent[*i as usize] < 0.0) == negative).collect();
        assert_eq!(at, naive::topk(&side, at.len()));
        // A share of 5 % of 1000 samples: 50, with a deviation of 7; six of them.
        assert!(at.len() > 1000 && at.len() < 10_000, "{}", at.len());
        let mean = at.iter().map(|i| f64::from(x[*i as usize])).sum::<f64>() / at.len() as f64;
        assert!(at.iter().all(|i| (f64::from(sent[*i as usize]) - mean).abs() < 1e-6));
    }
}

/// round(x / M) with M = s max |x|, value by value.
#[test]
fn threelc_rounds_to_three_values() {
    for s in [1.0, 1.5, 1.99] {
        for x in [laplace(1003, 1), normal(64, 2), vec![-3.0; 7]] {
            let m = s * x.iter().fold(0.0f64, |max, v| max.max(f64::from(v.abs())));
            let sent = compressed(&parse(&format!("threelc(s={s})")), &x, 1);
            for (x, sent) in x.iter().zip(&sent) {
                let want = (f64::from(*x) / m).round() * m;
                assert!((f64::from(*sent) - want).abs() < 1e-6 * m, "{x}: {sent} of {want}");
            }
        }
    }
}

/// Sparse tensors shrink far below a fifth of a byte per value.
#[test]
fn threelc_shortens_runs_of_zeros() {
    let mut x = vec![0.0; 70_000];
    x[0] = 1.0;
    let mut run = Run::new(&parse("threelc(s=1)"), shape(70_000), 1);
    run.transmit(&x).unwrap();
    // 14,000 quartic bytes: one with the value, 13,999 of zeros in runs of 14, the last of 13.
    assert_eq!(run.payload.len(), 4 + 1 + 1000);
}

/// Without a sketch every value becomes the mean of its own quantile bucket, which holds about n/q values of its sign.
#[test]
fn sketchml_buckets_are_quantiles() {
    let (x, q) = (laplace(10_000, 1), 16);
    let sent = compressed(&parse("sketchml(buckets=16,rows=0)"), &x, 1);
    for sign in [1.0f32, -1.0] {
        let mut side: Vec<(f32, f32)> =
            x.iter().zip(&sent).filter(|(x, _)| **x * sign > 0.0).map(|(x, s)| (x * sign, s * sign)).collect();
        side.sort_unstable_by(|a, b| a.0.total_cmp(&b.0));
        let buckets: Vec<&[(f32, f32)]> = side.chunk_by(|a, b| a.1 == b.1).collect();
        assert_eq!(buckets.len(), q);
        for bucket in buckets {
            let share = bucket.len() as f64 * q as f64 / side.len() as f64;
            assert!((share - 1.0).abs() < 0.05, "{share}");
            let mean = bucket.iter().map(|(x, _)| f64::from(*x)).sum::<f64>() / bucket.len() as f64;
            assert!((f64::from(bucket[0].1) - mean).abs() < 1e-6 * mean, "{} of {mean}", bucket[0].1);
        }
    }
}

/// Of a heavy tail the middle of the last bucket is farther from most of its values than 0 is.
#[test]
fn sketchml_sends_means() {
    let x: Vec<f32> = laplace(10_000, 4).iter().map(|x| x.powi(5)).collect();
    for text in ["sketchml(buckets=16,rows=0)", "sketchml(rows=0)"] {
        let sent = compressed(&parse(text), &x, 1);
        let lost = distance(&x, &sent) / energy(&x);
        // As the middles of the same buckets had it.
        let mut ends: Vec<(f32, [f32; 2])> = Vec::new();
        for (x, sent) in x.iter().zip(&sent) {
            match ends.iter_mut().find(|(mean, _)| mean == sent) {
                Some((_, [low, high])) => (*low, *high) = (low.min(*x), high.max(*x)),
                None => ends.push((*sent, [*x; 2])),
            }
        }
        let middle =
            |sent: &f32| ends.iter().find(|(mean, _)| mean == sent).map(|(_, [low, high])| 0.5 * (low + high)).unwrap();
        let middles: Vec<f32> = sent.iter().map(middle).collect();
        let before = distance(&x, &middles) / energy(&x);
        assert!(lost < 1.0 && before > 1.0, "{text}: {before} for {lost}");
    }
}

/// A MinMaxSketch makes magnitudes smaller or leaves them, by less than a group of buckets, and keeps signs and zeros.
#[test]
fn sketchml_collisions_make_values_smaller_only() {
    let mut x = laplace(5000, 2);
    x.iter_mut().step_by(3).for_each(|v| *v = 0.0);
    let exact = compressed(&parse("sketchml(buckets=32,rows=0,groups=4)"), &x, 1);
    let sketched = compressed(&parse("sketchml(buckets=32,rows=2,columns=0.3,groups=4)"), &x, 1);
    let mut levels: Vec<f32> = exact.iter().filter(|v| **v > 0.0).copied().collect();
    levels.sort_unstable_by(f32::total_cmp);
    levels.dedup();
    assert_eq!(levels.len(), 32);
    let bucket = |v: f32| levels.iter().position(|level| *level == v).unwrap();
    let mut smaller = 0;
    for (i, (exact, sketched)) in exact.iter().zip(&sketched).enumerate() {
        assert_eq!((x[i] == 0.0, *exact == 0.0), (*sketched == 0.0, *sketched == 0.0), "value {i}");
        assert!(exact.signum() == sketched.signum() && sketched.abs() <= exact.abs(), "value {i}");
        if *exact > 0.0 {
            assert_eq!(bucket(*exact) / 8, bucket(*sketched) / 8, "value {i} left its group");
        }
        smaller += usize::from(exact != sketched);
    }
    assert!(smaller > 100, "a sketch this small has collisions: {smaller}");
}
