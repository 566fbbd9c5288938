//! Methods that round to levels at random.

use super::*;
use flexcomm_compression::codec::Target;
use flexcomm_compression::wire::{delta_bits, gamma_bits};

/// The definition's chances, for values whose quotients are exact.
#[test]
fn chances_are_those_of_the_definitions() {
    // ‖(3, 4)‖ = 5 and s = 2: 3 is 1.2 steps of 2.5.
    assert_drawn("qsgd(s=2,bucket=0)", &[3.0, 4.0], &[(2.5, 0.8), (5.0, 0.2)]);
    assert_drawn("qsgd(s=2,bucket=0)", &[-3.0, 4.0], &[(-5.0, 0.2), (-2.5, 0.8)]);
    assert_drawn("qsgd(s=2,bucket=0,coding=gamma)", &[-3.0, 4.0], &[(-5.0, 0.2), (-2.5, 0.8)]);
    // Buckets of one value have their own norm.
    assert_drawn("qsgd(s=2,bucket=1)", &[3.0, 4.0], &[(3.0, 1.0)]);
    assert_drawn("qsgd(s=4,norm=max)", &[3.0, -8.0], &[(2.0, 0.5), (4.0, 0.5)]);
    assert_drawn("dithering(k=2,normalize=l2)", &[3.0, 4.0], &[(2.5, 0.8), (5.0, 0.2)]);
    assert_drawn("dithering(k=4)", &[3.0, -8.0], &[(2.0, 0.5), (4.0, 0.5)]);
    // Levels 0, 1/4, 1/2 and 1 of 8: 3 lies between 2 and 4, 7 between 4 and 8, 0.5 between 0 and 2.
    assert_drawn("dithering(k=3,partition=natural)", &[3.0, -8.0], &[(2.0, 0.5), (4.0, 0.5)]);
    assert_drawn("dithering(k=3,partition=natural)", &[-7.0, -8.0], &[(-8.0, 0.75), (-4.0, 0.25)]);
    assert_drawn("dithering(k=3,partition=natural)", &[0.5, -8.0], &[(0.0, 0.75), (2.0, 0.25)]);
    assert_drawn("terngrad", &[1.0, 4.0], &[(0.0, 0.75), (4.0, 0.25)]);
    assert_drawn("terngrad", &[-1.0, 4.0], &[(-4.0, 0.25), (0.0, 0.75)]);
    // w = 3: steps of 6 / 3 from −8 to 6.
    assert_drawn("lpcsvrg(bits=3)", &[-1.5, 6.0], &[(-2.0, 0.75), (0.0, 0.25)]);
    assert_drawn("natural", &[5.0], &[(4.0, 0.75), (8.0, 0.25)]);
    assert_drawn("natural", &[-0.75], &[(-1.0, 0.5), (-0.5, 0.5)]);
    assert_drawn("natural", &[f32::MIN_POSITIVE / 4.0], &[(0.0, 0.75), (f32::MIN_POSITIVE, 0.25)]);
}

/// LPC-SVRG with lambda below 1 (Yu et al. 2019, section 3; GRACE, equation 4): delta = lambda max |x| / (2^(w−1) − 1), here
/// 0.5 · 12 / 3 = 2, the grid is −8, −6, …, 6; within it without bias, beyond it its ends.
#[test]
fn lpcsvrg_clips_to_its_grid() {
    let text = "lpcsvrg(bits=3,lambda=0.5)";
    assert_drawn(text, &[-1.5, 12.0], &[(-2.0, 0.75), (0.0, 0.25)]);
    assert_drawn(text, &[5.0, 12.0], &[(4.0, 0.5), (6.0, 0.5)]);
    assert_drawn(text, &[-7.0, 12.0], &[(-8.0, 0.5), (-6.0, 0.5)]);
    assert_drawn(text, &[7.0, 12.0], &[(6.0, 1.0)]);
    assert_drawn(text, &[12.0, 1.0], &[(6.0, 1.0)]);
    assert_drawn(text, &[-12.0, 1.0], &[(-8.0, 1.0)]);
}

/// Levels 0, 1/4, 1/2 and 1 of the Euclidean norm: of 5, and of 9.
#[test]
fn natural_dithering_takes_its_levels_from_the_euclidean_norm() {
    let text = "dithering(k=3,partition=natural,normalize=l2)";
    assert_drawn(text, &[3.0, 4.0], &[(2.5, 0.8), (5.0, 0.2)]);
    assert_drawn(text, &[-3.0, 4.0], &[(-5.0, 0.2), (-2.5, 0.8)]);
    assert_drawn(text, &[1.0, 4.0, 8.0], &[(0.0, 5.0 / 9.0), (2.25, 4.0 / 9.0)]);
    assert_drawn(text, &[-8.0, 4.0, 1.0], &[(-9.0, 7.0 / 9.0), (-4.5, 2.0 / 9.0)]);
}

/// SSDM by enumeration: all signs of three values, each at the product of its chances.
#[test]
fn ssdm_draws_each_pattern_as_often_as_defined() {
    const COUNT: u64 = 40_000;
    let x = [1.0f32, -2.0, 2.0];
    let mut seen = [0.0; 8];
    for seed in 0..COUNT {
        let signs = compressed(&parse("ssdm"), &x, seed);
        assert!(signs.iter().all(|v| v.abs() == 3.0), "{signs:?}");
        seen[(0..3).map(|i| usize::from(signs[i] > 0.0) << i).sum::<usize>()] += 1.0 / COUNT as f64;
    }
    for (pattern, share) in seen.iter().enumerate() {
        let plus = |i: usize| 0.5 + f64::from(x[i]) / 6.0;
        let chance: f64 = (0..3).map(|i| if pattern >> i & 1 == 1 { plus(i) } else { 1.0 - plus(i) }).product();
        let sigma = (chance * (1.0 - chance) / COUNT as f64).sqrt();
        assert!((share - chance).abs() <= 6.0 * sigma, "{pattern:03b}: {share} instead of {chance}");
    }
    // A value alone has no choice.
    assert_drawn("ssdm", &[0.25], &[(0.25, 1.0)]);
    assert_drawn("ssdm", &[-0.25], &[(-0.25, 1.0)]);
}

/// A norm of 0 divides nothing: no NaN, alone or beside others.
#[test]
fn buckets_of_zeros_stay_zero() {
    for text in ["qsgd(s=4,bucket=4)", "qsgd(s=4,bucket=4,norm=max)", "qsgd(s=4,bucket=4,coding=delta)"] {
        let sent = compressed(&parse(text), &[0.0, 0.0, -0.0, 0.0, 1.0, 1.0, 1.0, 1.0, 0.0], 1);
        assert_eq!(sent[..4], [0.0; 4], "{text}");
        assert!(sent.iter().all(|v| v.is_finite()) && sent[8] == 0.0, "{text}");
    }
    for text in ["ssdm", "terngrad", "terngrad(clip=2.5)", "dithering(k=3)", "lpcsvrg(bits=4)", "eightbit", "minmax8"] {
        assert_eq!(compressed(&parse(text), &[0.0; 50], 1), [0.0; 50], "{text}");
    }
}

/// Without clipping TernGrad's mean is x even for one large value among many; with it, it is the clipped value.
#[test]
fn terngrad_is_biased_only_where_it_is_told_to_clip() {
    let mut x = vec![0.5f32; 100];
    x.iter_mut().skip(1).step_by(2).for_each(|v| *v = -0.5);
    x[0] = 40.0;
    assert_drawn("terngrad", &x, &[(40.0, 1.0)]);
    let (n, mean) = (100.0, x.iter().sum::<f32>() / 100.0);
    let sigma = (x.iter().map(|v| (v - mean).powi(2)).sum::<f32>() / n).sqrt();
    let sent = compressed(&parse("terngrad(clip=2.5)"), &x, 3)[0];
    assert!((sent - 2.5 * sigma).abs() < 1e-4 * sent && sent < 15.0, "{sent}, sigma {sigma}");
}

/// Its deviation is what two sums in f64 round.
#[test]
fn terngrad_does_not_clip_a_constant_tensor_to_nothing() {
    for value in [0.1f32, 0.7, 3.3, -0.1, 1e-20, 1e20, 16_777_213.0] {
        for n in [3, 1000, 100_003, 1_000_003] {
            let sent = compressed(&parse("terngrad(clip=2.5)"), &vec![value; n], 1);
            assert!(sent.iter().all(|v| *v == value), "{value} x {n}: {}", sent[0]);
        }
    }
}

/// ⌈log2(2s+1)⌉ bits per QSGD level and 2 per ternary value, with a norm per bucket.
#[test]
fn payloads_are_packed() {
    let x = laplace(1000, 1);
    for (s, bits) in [(1, 2), (2, 3), (3, 3), (4, 4), (7, 4), (8, 5), (15, 5), (31, 6), (63, 7), (64, 8), (127, 8)] {
        assert_eq!(payload(&format!("qsgd(s={s},bucket=100)"), &x, 1).len(), 40 + 1000 * bits / 8, "s = {s}");
        assert_eq!(payload(&format!("dithering(k={s})"), &x, 1).len(), 4 + 1000 * bits / 8, "k = {s}");
    }
    assert_eq!(payload("terngrad", &x, 1).len(), 4 + 250);
    assert_eq!(payload("ssdm", &x, 1).len(), 4 + 125);
    assert_eq!(payload("natural", &x, 1).len(), 125 + 1000);
    assert_eq!(payload("lpcsvrg(bits=5)", &x, 1).len(), 4 + 625);
}

/// Elias' codes carry the same levels as the fixed width, in as many bits as the codes have.
#[test]
fn elias_coding_changes_the_bytes_only() {
    for (coding, code) in [("gamma", gamma_bits as fn(u64) -> u32), ("delta", delta_bits)] {
        for (s, bucket) in [(1, 0), (4, 64), (127, 7)] {
            let x = laplace(1500, 3);
            let text = format!("qsgd(s={s},bucket={bucket}");
            let plain = compressed(&parse(&format!("{text})")), &x, 5);
            let strategy = parse(&format!("{text},coding={coding})"));
            let mut run = Run::new(&strategy, shape(1500), 5);
            assert_eq!(run.transmit(&x).unwrap().1, plain, "{strategy}");
            let bucket = if bucket == 0 { x.len() } else { bucket };
            let norms = x.len().div_ceil(bucket);
            let (mut bits, mut before) = (0, 0);
            for (i, value) in plain.iter().enumerate().filter(|(_, v)| **v != 0.0) {
                let start = i / bucket * bucket;
                let at = start..x.len().min(start + bucket);
                let level = (f64::from(value.abs()) * f64::from(s) / energy(&x[at]).sqrt()).round() as u64;
                bits += code(i as u64 + 1 - before) + 1 + code(level);
                before = i as u64 + 1;
            }
            bits += code(1501 - before);
            assert_eq!(run.payload.len(), 4 * norms + 4 + bits.div_ceil(8) as usize, "{strategy}");
        }
    }
    // Of sparse levels, far less than the fixed width.
    let x = laplace(100_000, 4);
    let sizes = ["packed", "gamma"].map(|coding| payload(&format!("qsgd(s=1,bucket=0,coding={coding})"), &x, 1).len());
    assert!(5 * sizes[1] < sizes[0], "{sizes:?}");
}

/// Values of which few are large, as gradients have: cubes of Laplace's.
fn heavy_tailed(n: usize, seed: u64) -> Vec<f32> {
    laplace(n, seed).iter().map(|x| x * x * x).collect()
}

/// Elias' codes are chosen where they take a tenth of the fixed width's bytes, and then the shorter of both.
#[test]
fn sparse_coding_is_chosen_by_itself() {
    let mut chosen = 0;
    let inputs = [laplace(100_000, 1), normal(100_000, 2), heavy_tailed(300_000, 3), vec![0.0; 5000]];
    for args in [
        "s=4,bucket=0",
        "s=1,norm=max,bucket=0",
        "s=7,norm=max,bucket=5000",
        "s=1,bucket=20000",
        "s=4",
        "s=15,bucket=0",
    ] {
        for x in &inputs {
            let sent = |coding: &str| {
                let strategy = parse(&format!("qsgd({args}{coding})"));
                (payload(&strategy.to_string(), x, 1).len(), compressed(&strategy, x, 1))
            };
            let [least, packed, gamma, delta] = ["", ",coding=packed", ",coding=gamma", ",coding=delta"].map(sent);
            assert!([&packed, &gamma, &delta].iter().all(|other| other.1 == least.1), "{args} of {}", x.len());
            let shorter = gamma.0.min(delta.0);
            match least.0 == packed.0 {
                true => assert!(
                    args == "s=4" || args.starts_with("s=15") || 9 * shorter > packed.0,
                    "{args}: {packed:?} of {}, {shorter}",
                    x.len()
                ),
                false => {
                    chosen += 1;
                    assert!(10 * least.0 <= 11 * shorter + 10, "{args} of {}: {}, {shorter}", x.len(), least.0);
                }
            }
        }
    }
    assert!(chosen >= 8, "{chosen}");
}

/// Of 100,000 values with heavy tails: the fixed width takes 50 kB, Elias' codes what BytePS sends.
#[test]
fn heavy_tails_take_few_bytes() {
    let x = heavy_tailed(100_000, 3);
    for (text, packed, most) in [
        ("dithering(k=4)", 50_004, 3_000),
        ("dithering(k=4,normalize=l2)", 50_004, 4_000),
        ("dithering(k=4,partition=natural)", 50_004, 5_000),
        ("terngrad", 25_004, 1_500),
        ("lpcsvrg(bits=2)", 25_004, 1_500),
        ("qsgd(s=4,bucket=0)", 50_004, 4_000),
    ] {
        let bytes = payload(text, &x, 1).len();
        assert!(bytes < most, "{text}: {bytes}");
        // As kernels on a GPU write it: read by the same codec, to the same values.
        let (strategy, n) = (parse(text), x.len());
        let mut codec = strategy.codec(shape(n));
        codec.pack_codes();
        let (mut out, context) = (Writer::new(), Context::new(1));
        codec.encode(&x, &context, &mut out).unwrap();
        assert_eq!(out.len(), packed, "{text}");
        let mut values = vec![0.0; n];
        strategy
            .codec(shape(n))
            .decode(&mut Reader::new(out.bytes()), &context, Target::replace(1.0, &mut values))
            .unwrap();
        assert_eq!(values, compressed(&strategy, &x, 1), "{text}");
    }
}

/// The bytes by hand: 2 at place 0 and −2 at place 99 of 5000.
#[test]
fn sparse_codes_by_hand() {
    let mut x = vec![0.0; 5000];
    (x[0], x[99]) = (2.0, -2.0);
    let sent = payload("terngrad", &x, 1);
    // The largest magnitude with the sign bit set, delta, five bytes of codes: distance 1, positive, level 1; distance 99,
    // negative, level 1; 4901 to the end.
    let bits = "1 0 1 00111100011 1 1 0001101001100100101";
    let mut codes = vec![0u8; 5];
    bits.bytes().filter(|bit| *bit != b' ').enumerate().for_each(|(i, bit)| codes[i / 8] |= (bit - b'0') << (i % 8));
    assert_eq!(sent, [&(-2.0f32).to_le_bytes()[..], &[2], &5u32.to_le_bytes(), &codes].concat());
    let refused = |at: usize, byte: u8| {
        let (mut bytes, mut out) = (sent.clone(), vec![0.0; 5000]);
        bytes[at] = byte;
        let mut codec = parse("terngrad").codec(shape(5000));
        codec
            .decode(&mut Reader::new(&bytes), &Context::new(1), Target::replace(1.0, &mut out))
            .unwrap_err()
            .to_string()
    };
    assert_eq!(refused(4, 3), "read coding = 3: no such coding");
    assert_eq!(refused(5, 4), "read 2 bytes of distance: 1 are left");
    assert_eq!(refused(13, sent[13] | 2), "read distance = 5003: it leads beyond the end");
}

/// E ‖C(x) − x‖² ≤ ‖x‖² / 8 (theorem 1), to 6 standard errors over many values.
#[test]
fn natural_compression_has_its_variance() {
    let x = normal(200_000, 9);
    let error = distance(&x, &compressed(&parse("natural"), &x, 1));
    assert!(error <= 0.125 * energy(&x) && error >= 0.05 * energy(&x), "{}", error / energy(&x));
}

/// The variance that QSGD promises: min(n / s², √n / s) ‖x‖² (lemma 3.1).
#[test]
fn qsgd_has_its_variance() {
    let x = normal(1000, 9);
    for s in [1.0f64, 4.0, 32.0, 127.0] {
        let mean = (0..50)
            .map(|seed| distance(&x, &compressed(&parse(&format!("qsgd(s={s},bucket=0)")), &x, seed)))
            .sum::<f64>()
            / 50.0;
        let bound = (1000.0 / (s * s)).min(1000f64.sqrt() / s) * energy(&x);
        assert!(mean <= bound && mean > 0.0, "s = {s}: {mean} of {bound}");
    }
}
