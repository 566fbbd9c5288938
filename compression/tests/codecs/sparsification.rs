//! Tests of single sparsification methods beyond what `all.rs` asks of every one: each against its definition, by loops
//! that share no code with it.

use crate::harness::*;
use flexcomm_compression::Build;
use flexcomm_compression::Layers;
use flexcomm_compression::codec::{Context, Shape, Target};
use flexcomm_compression::naive;
use flexcomm_compression::pipeline::{Gradient, Member, Pipeline, Step};
use flexcomm_compression::wire::{Reader, Writer};

fn indices(values: &[f32]) -> Vec<u32> {
    (0..).zip(values).filter(|(_, v)| **v != 0.0).map(|(i, _)| i).collect()
}

/// What was sent is x there, and nothing elsewhere.
fn assert_sent_as_it_is(x: &[f32], sent: &[f32], at: &[u32]) {
    let mut want = vec![0.0; x.len()];
    at.iter().for_each(|i| want[*i as usize] = x[*i as usize]);
    assert_eq!(sent, want);
}

#[test]
fn topk_is_the_k_largest_and_ties_go_to_the_lowest_index() {
    for (x, k) in [(laplace(5000, 1), 50), (normal(30_000, 2), 3000), (vec![1.0, -2.0, 2.0, -2.0, 0.5], 2)] {
        for name in ["topk", "lwtopk"] {
            let sent = compressed(&parse(&format!("{name}(k={k})")), &x, 1);
            assert_sent_as_it_is(&x, &sent, &naive::topk(&x, k));
        }
    }
    assert_eq!(compressed(&parse("topk(k=2)"), &[1.0, -2.0, 2.0, -2.0], 1), [0.0, -2.0, 2.0, 0.0]);
}

/// The k largest of the whole would all lie in the first layer.
#[test]
fn lwtopk_takes_from_each_layer() {
    let layers = flexcomm_compression::Layers::new(&[4, 4]).unwrap();
    let mut ranks = Ranks::with_layers("lwtopk(k=0.5)", &layers, 1);
    let mean = ranks.step(&[vec![9.0, -8.0, 7.0, 6.0, 0.1, 0.2, -0.3, 0.0]], 0);
    assert_eq!(mean, [9.0, -8.0, 0.0, 0.0, 0.0, 0.2, -0.3, 0.0]);
}

#[test]
fn mstopk_is_25_rounds_of_counting() {
    for (x, k) in [(laplace(20_000, 1), 200), (normal(3000, 2), 900), (vec![1.0; 50], 7), (laplace(100, 3), 100)] {
        let seed = 9;
        let [a, b, ..] = Context::new(seed).own(0).block(0);
        let want = naive::mstopk(&x, k, u64::from(a) << 32 | u64::from(b));
        assert_eq!(want.len(), k);
        assert_sent_as_it_is(&x, &compressed(&parse(&format!("mstopk(k={k})")), &x, seed), &want);
    }
}

#[test]
fn randomk_takes_k_different_ones_new_in_each_step() {
    let x = vec![1.0; 1000];
    for args in ["k=100", "k=100,shared=false", "k=900"] {
        let mut run = Run::new(&parse(&format!("randomk({args})")), shape(1000), 5);
        let k = if args == "k=900" { 900 } else { 100 };
        let first = run.transmit(&x).unwrap().1;
        // Every one is exactly 1: an index that is drawn twice would show as 2, or as one value too few.
        assert_eq!(indices(&first).len(), k);
        assert!(first.iter().all(|v| *v == 0.0 || *v == 1.0));
        assert_eq!(run.transmit(&x).unwrap().1, first, "the same step");
        run.context.step = 1;
        assert_ne!(run.transmit(&x).unwrap().1, first, "another step");
    }
    let scaled = compressed(&parse("randomk(k=100,scaled=true)"), &x, 5);
    assert!(scaled.iter().all(|v| *v == 0.0 || *v == 10.0));
}

/// With a shared seed payloads are k values and no index, and the sum is the mean at the same places.
#[test]
fn randomk_shared_sums_in_flight() {
    let mut ranks = Ranks::new("randomk(k=6)", 60, 3);
    let gradients = [normal(60, 1), normal(60, 2), normal(60, 3)];
    let mean = ranks.step(&gradients, 4);
    assert_eq!(indices(&mean).len(), 6);
    for i in indices(&mean) {
        let want: f32 = gradients.iter().map(|g| g[i as usize]).sum::<f32>() / 3.0;
        assert!((mean[i as usize] - want).abs() < 1e-6);
    }
    let mut apart = Ranks::new("randomk(k=6,shared=false)", 600, 2);
    apart.step(&[vec![1.0; 600], vec![1.0; 600]], 4);
    assert_ne!(apart.messages[0], apart.messages[1], "ranks draw their own");
}

#[test]
fn threshold_is_strict_and_beyond_the_maximum_sends_nothing() {
    let sent = |v: &str, x: &[f32]| compressed(&parse(&format!("threshold(v={v})")), x, 1);
    assert_eq!(sent("2", &[2.0, -2.0, 2.5, -2.5, 0.0]), [0.0, 0.0, 2.5, -2.5, 0.0]);
    // The known mistake: an all-negative tensor is sent whole.
    assert_eq!(sent("10", &[-1.0, -2.0, -9.0, -3.0]), [0.0; 4]);
    assert_eq!(sent("3.4028235e38", &[-1.0, f32::MAX]), [0.0; 2]);
}

/// A random k, n: all that is sent is larger than all that is not; the number is near k and never above most * k.
#[test]
fn dgc_sends_the_largest_and_about_k() {
    for (x, k) in [(laplace(200_000, 1), 2000), (normal(200_000, 2), 20_000), (laplace(900, 3), 90)] {
        for name in ["dgc", "sgc"] {
            let sent = compressed(&parse(&format!("{name}(k={k})")), &x, 4);
            let at = indices(&sent);
            assert_sent_as_it_is(&x, &sent, &naive::topk(&x, at.len()));
            assert!(at.len() <= k * 13 / 10 && at.len() >= k / 2, "{} of {k}", at.len());
        }
    }
    // Far more than asked for reach the threshold (it is 1): a top-k among them follows, exactly k.
    let x: Vec<f32> = (0..2000).map(|i| if i % 2 == 0 { -1.0 } else { 0.5 }).collect();
    let sent = compressed(&parse("dgc(k=100)"), &x, 4);
    assert_sent_as_it_is(&x, &sent, &naive::topk(&x, 100));
}

/// Of heavy tails too, the share is met within the tolerance once the stages have settled.
#[test]
fn sidco_meets_its_share_on_the_fly() {
    let (n, k) = (50_000, 500.0);
    for fit in ["exponential", "gamma", "pareto"] {
        for make in [laplace, normal] {
            let mut run = Run::new(&parse(&format!("sidco(k=0.01,fit={fit})")), shape(n), 1);
            let counts: Vec<f64> =
                (0..60).map(|seed| indices(&run.transmit(&make(n, seed)).unwrap().1).len() as f64).collect();
            let late = counts[40..].iter().sum::<f64>() / 20.0;
            assert!(late > 0.5 * k && late < 2.0 * k, "{fit}: {late} after {:?}", &counts[..6]);
        }
    }
}

/// A saved count is added to: the largest of all numbers would overflow at the next step.
#[test]
fn sidco_refuses_a_count_that_its_steps_cannot_have() {
    let state = |sent: u64, steps: u32| [&1u32.to_le_bytes()[..], &sent.to_le_bytes(), &steps.to_le_bytes()].concat();
    let restored = |state: &[u8]| {
        let mut run = Run::new(&parse("sidco(k=0.01)"), shape(1000), 1);
        run.codec.restore(&mut Reader::new(state)).map(|()| run.transmit(&laplace(1000, 1)).unwrap())
    };
    assert!(restored(&state(2000, 2)).is_ok() && restored(&state(0, 0)).is_ok());
    for (sent, steps) in [(2001, 2), (1, 0), (u64::MAX, 4)] {
        let error = restored(&state(sent, steps)).unwrap_err().to_string();
        assert!(error.contains("values sent") && error.contains(&sent.to_string()), "{error}");
    }
}

/// Whatever the threshold, what is sent is the largest.
#[test]
fn sidco_sends_the_largest() {
    for fit in ["exponential", "gamma", "pareto"] {
        let x = laplace(30_000, 7);
        let sent = compressed(&parse(&format!("sidco(k=0.05,fit={fit})")), &x, 1);
        let at = indices(&sent);
        assert!(!at.is_empty());
        assert_sent_as_it_is(&x, &sent, &naive::topk(&x, at.len()));
    }
}

/// Algorithm 3 as written, value by value; each is sent with its p as x/p.
#[test]
fn adaptive_sends_with_the_published_probabilities() {
    let (x, k, draws) = (laplace(40, 3), 8.0, 4000u32);
    let sum: f64 = x.iter().map(|v| f64::from(v.abs())).sum();
    let mut p: Vec<f64> = x.iter().map(|v| (k * f64::from(v.abs()) / sum).min(1.0)).collect();
    for _ in 0..2 {
        let open: f64 = p.iter().filter(|p| **p < 1.0).sum();
        let c = (k - p.iter().filter(|p| **p >= 1.0).count() as f64) / open;
        if c > 1.0 {
            p.iter_mut().for_each(|p| *p = (c * *p).min(1.0));
        }
    }
    let mut counts = vec![0.0f64; x.len()];
    for seed in 0..u64::from(draws) {
        for (i, sent) in compressed(&parse("adaptive(k=8)"), &x, seed).iter().enumerate() {
            if *sent != 0.0 {
                counts[i] += 1.0;
                assert!((f64::from(*sent) - f64::from(x[i]) / p[i]).abs() < 1e-5 * f64::from(sent.abs()), "value {i}");
            }
        }
    }
    for (i, p) in p.iter().enumerate() {
        let sigma = (p * (1.0 - p) * f64::from(draws)).sqrt();
        assert!((counts[i] - p * f64::from(draws)).abs() <= 6.0 * sigma + 1e-9, "value {i}: {} of {p}", counts[i]);
    }
}

/// Algorithm 1 step by step, with the residual of error feedback as r.
#[test]
fn variance_follows_its_algorithm() {
    let (alpha, zeta, n) = (1.5f32, 0.9f32, 30);
    let mut ranks = Ranks::new("variance(alpha=1.5,zeta=0.9)+ef(vanilla)", n, 1);
    let (mut r, mut v) = (vec![0.0f32; n], vec![0.0f32; n]);
    let mut total = 0;
    for step in 0..40 {
        // A drift that some values have, in noise.
        let gradient: Vec<f32> = normal(n, step).iter().enumerate().map(|(i, g)| g + i as f32 * 0.05).collect();
        let sent = ranks.step(std::slice::from_ref(&gradient), step);
        for i in 0..n {
            r[i] += gradient[i];
            v[i] += gradient[i] * gradient[i];
            let (square, noise) = (r[i] * r[i], alpha * v[i]);
            // Rounding may decide where the two are equal.
            let doubtful = (square - noise).abs() < 1e-4 * noise;
            if doubtful || (square > noise) == (sent[i] != 0.0) {
                total += usize::from(sent[i] != 0.0);
                if sent[i] != 0.0 {
                    assert!((sent[i] - r[i]).abs() <= 1e-4 * r[i].abs());
                    (r[i], v[i]) = (0.0, 0.0);
                } else {
                    v[i] *= zeta;
                }
            } else {
                panic!("step {step}, value {i}: sent {} of {}, noise {}", sent[i], r[i], noise.sqrt());
            }
        }
    }
    assert!(total > n && total < 40 * n, "{total}");
}

/// The few large coordinates of the sum are found although no rank alone knows them; values are exact.
#[test]
fn sketches_find_what_is_large_in_the_sum() {
    let (n, world) = (2000, 4);
    let heavy = [3usize, 500, 777, 1999];
    let gradients: Vec<Vec<f32>> = (0..world)
        .map(|rank| {
            let mut g: Vec<f32> = normal(n, rank).iter().map(|v| 0.01 * v).collect();
            heavy.iter().for_each(|i| g[*i] += 1.0 + *i as f32 * 1e-3);
            g
        })
        .collect();
    for args in ["k=4,columns=200", "k=4,columns=300,rows=4"] {
        let mut ranks = Ranks::new(&format!("sketched({args})"), n, world as u32);
        let mean = ranks.step(&gradients, 1);
        assert_eq!(indices(&mean), heavy.map(|i| i as u32), "{args}");
        for i in heavy {
            let want: f64 = gradients.iter().map(|g| f64::from(g[i])).sum::<f64>() / world as f64;
            assert!((f64::from(mean[i]) - want).abs() < 1e-6);
        }
    }
    // Of 40, a 40th of the energy makes these four heavy; the others are random.
    let mix = |step| indices(&Ranks::new("sketched(k=40,columns=200,recover=heavymix)", n, 4).step(&gradients, step));
    let (first, second) = (mix(1), mix(2));
    assert!(heavy.iter().all(|i| first.contains(&(*i as u32)) && second.contains(&(*i as u32))));
    assert_eq!((first.len(), second.len()), (40, 40));
    assert_ne!(first, second);
    // Where nothing is heavy, heavymix takes others at random: k in any case.
    let flat = compressed(&parse("sketched(k=50,columns=100,recover=heavymix)"), &vec![1.0; 1000], 3);
    assert_eq!(indices(&flat).len(), 50);
}

/// A sketch as large as the gradient is not made: the gradient goes as it is, and both rounds together are never more.
#[test]
fn sketched_sends_no_more_than_the_gradient() {
    for (args, n) in [
        ("k=0.01,columns=0.2", 500),
        ("k=0.3,columns=0.2", 100),
        ("k=0.01,columns=0.198", 1000),
        ("k=9,columns=300,rows=4", 1000),
        ("k=0.9,rows=1", 64),
        ("k=1,rows=15", 13),
        ("k=0.01", 1),
        ("k=0.01", 0),
    ] {
        let x = laplace(n, 3);
        let strategy = parse(&format!("sketched({args})"));
        let mut codec = strategy.codec(Shape::vector(n));
        let charged: usize = (0..2).map(|round| codec.round_size(round).most()).sum();
        let (rows, columns, k) =
            (strategy.values().whole(1), strategy.values().kept(2, n), strategy.values().kept(0, n));
        let dense = rows * columns + k >= n;
        assert_eq!(charged, 4 * if dense { n } else { rows * columns + k }, "{args}, n = {n}");
        let (mut context, mut bytes) = (Context::new(1), 0);
        for round in 0..2 {
            let mut out = flexcomm_compression::wire::Writer::new();
            context.round = round;
            codec.encode(&x, &context, &mut out).unwrap();
            codec.reply(&mut Reader::new(out.bytes()), &context, 1.0).unwrap();
            bytes += out.len();
            if round == 1 {
                let mut sent = vec![0.0; n];
                codec.decode(&mut Reader::new(out.bytes()), &context, Target::replace(1.0, &mut sent)).unwrap();
                assert!(if dense { sent == x } else { indices(&sent).len() <= k }, "{args}, n = {n}");
            }
        }
        assert_eq!(bytes, charged, "{args}, n = {n}");
    }
}

/// Selected values in fewer bits: everything that holds of any codec, error feedback makes up for the rounding, and a receiver of
/// another type refuses.
#[test]
fn selected_values_travel_in_fewer_bits() {
    let examples = [
        "topk(k=0.1)",
        "topk(k=1)",
        "lwtopk(k=0.3)",
        "mstopk(k=0.1)",
        "dgc(k=0.2,sample=0.1)",
        "sgc(k=0.05)",
        "sidco(k=0.1)",
        "threshold(v=0.5)",
        "variance(alpha=1)",
    ];
    for codec in examples {
        for value_type in ["bf16", "int8"] {
            let text = format!("{codec}+values({value_type})");
            let strategy = parse(&text);
            edge_tensors().iter().for_each(|(name, x)| crate::all::assert_goes_through(&strategy, (name, x)));
            assert_error_feedback_conserves(&text);
            let gradients: Vec<Vec<f32>> = (0..3).map(|rank| laplace(240, rank)).collect();
            Ranks::new(&format!("{text}+ef(vanilla)"), 240, 3).step(&gradients, 0);
            let layers = Layers::new(&[240]).unwrap();
            let pipeline = |text: &str| Pipeline::new(&parse(text), layers.clone(), Member::alone(0));
            let (mut out, mut mean) = (Writer::new(), vec![0.0; 240]);
            let step = Step { index: 0, learning_rate: 1.0 };
            pipeline(&text).compress(Gradient::F32(&gradients[0]), step, &mut out).unwrap();
            let refused = pipeline(codec).aggregate(&[out.bytes()], 0, &mut mean).unwrap_err().to_string();
            assert!(refused.contains("type of values"), "{text}: {refused}");
        }
    }
}
