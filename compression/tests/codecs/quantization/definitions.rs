//! Methods that round without chance, against their definitions.

use super::*;
use flexcomm_compression::codec::Travels;
use proptest::prelude::{Just, Strategy as _, any, prop, prop_assert, prop_assert_eq, prop_oneof, proptest};

/// Gradients as they are, and bit patterns of all sizes.
fn values() -> impl proptest::strategy::Strategy<Value = Vec<f32>> {
    let any = any::<f32>().prop_map(|v| if v.is_finite() { v } else { 1.5 });
    prop::collection::vec(prop_oneof![-2f32..2.0, -0.05f32..0.05, any, Just(0.0)], 0..300)
}

#[test]
fn what_is_not_compressed_travels_as_it_is() {
    let x = [1.5, -2.0, 0.0, f32::MIN_POSITIVE];
    assert_eq!(payload("none", &x, 1), x.map(f32::to_le_bytes).concat());
    assert_eq!(compressed(&parse("none"), &x, 1), x);
}

proptest! {
    /// INCEPTIONN keeps its bound, cuts towards 0, and sends what is 1 or more as it is.
    #[test]
    fn inceptionn_keeps_its_bound(x in values(), bound in 1i32..=14) {
        let sent = compressed(&parse(&format!("inceptionn(bound={bound})")), &x, 0);
        for (x, y) in x.iter().zip(&sent) {
            prop_assert!((x - y).abs() < 2f32.powi(-bound), "{x} became {y}");
            prop_assert!(y.abs() <= x.abs() && (*y == 0.0 || y.signum() == x.signum()), "{x} became {y}");
            prop_assert!(x.abs() < 1.0 || x == y, "{x} became {y}");
            prop_assert!(x.abs() >= 2f32.powi(-bound) || *y == 0.0, "{x} became {y}");
        }
        let bytes = |x: &f32| match x.abs() {
            a if a >= 1.0 => 4,
            a if a >= 2f32.powi(-(bound / 2)) => 2,
            a if a >= 2f32.powi(-bound) => 1,
            _ => 0,
        };
        let want = x.len().div_ceil(4) + x.iter().map(bytes).sum::<usize>();
        prop_assert_eq!(payload(&format!("inceptionn(bound={bound})"), &x, 0).len(), want);
    }

    /// Min-max: the nearest multiple of (max − min) / 255, to one step where the grid's end is in the way.
    #[test]
    fn minmax_is_within_its_steps(x in values()) {
        let sent = compressed(&parse("minmax8"), &x, 0);
        let (min, max) = x.iter().fold((f32::MAX, f32::MIN), |(a, b), v| (a.min(*v), b.max(*v)));
        let step = (f64::from(max) - f64::from(min)) / 255.0;
        for (x, y) in x.iter().zip(&sent) {
            let off = (f64::from(*x) - f64::from(*y)).abs();
            prop_assert!(off <= 1.001 * step + 1e-7 * f64::from(x.abs()) + 2e-45, "{x} became {y}, step {step}");
            prop_assert!((min..=max).contains(y), "{x} became {y}");
        }
    }

    /// Half the distance to a neighbour at most, in the range of normal numbers; above it, the bound.
    #[test]
    fn halves_round_to_nearest(x in values()) {
        for (text, share, least, most) in [("fp16", 1.0 / 2048.0, 2f64.powi(-25), 65_504.0), ("bf16", 1.0 / 256.0, 1e-40, 3.3895e38)] {
            for (x, y) in x.iter().zip(compressed(&parse(text), &x, 0)) {
                let (x, y) = (f64::from(*x), f64::from(y));
                let near = (x - y).abs() <= share * x.abs() + least;
                prop_assert!(near || x.abs() > most && y.abs() >= 0.999 * most && x.signum() == y.signum(), "{text}: {x} became {y}");
            }
        }
    }
}

/// Bagua's grid: step 1, points −100 to 155.
#[test]
fn minmax_known_values() {
    let x = [-100.0, 155.0, 0.0, 0.4, 0.6, 99.5, 100.5, -0.6];
    assert_eq!(compressed(&parse("minmax8"), &x, 0), [-100.0, 155.0, 0.0, 0.0, 1.0, 100.0, 100.0, -1.0]);
    let bytes = payload("minmax8", &x, 0);
    assert_eq!(bytes[..8], [(-100f32).to_le_bytes(), 155f32.to_le_bytes()].concat());
    assert_eq!(bytes[8..], [0, 255, 100, 100, 101, 200, 200, 99]);
}

/// Where 255 steps would begin above min, the value goes to the lowest point: not round the end to the highest.
#[test]
fn minmax_does_not_wrap() {
    // Steps of 1, max / step = 126.5 rounds to 126, so the grid begins at −129 while min rounds to −128: and the mirror.
    for x in [[126.5f32, -128.5, 0.0], [127.5, -127.5, 0.0], [0.5, -254.5, 0.0]] {
        let sent = compressed(&parse("minmax8"), &x, 0);
        assert!(x.iter().zip(&sent).all(|(x, y)| (x - y).abs() <= 1.0), "{x:?} became {sent:?}");
    }
    // Tensors whose range is far below 1e-7 do not vanish, and those far from 0 keep their differences.
    let tiny: Vec<f32> = (0..256).map(|i| i as f32 * 1e-12).collect();
    assert!(distance(&tiny, &compressed(&parse("minmax8"), &tiny, 0)) < 1e-5 * energy(&tiny));
    let far: Vec<f32> = (0..256).map(|i| 1e6 + i as f32).collect();
    assert_eq!(compressed(&parse("minmax8"), &far, 0), far);
    assert_eq!(compressed(&parse("minmax8"), &[0.1; 9], 0), [0.1; 9]);
}

/// What an allreduce adds up stays finite, however many ranks have however large values.
#[test]
fn sums_of_halves_stay_finite() {
    for text in ["fp16", "bf16"] {
        for world in [1u32, 2, 3, 50, 300] {
            let mut ranks = Ranks::new(text, 8, world);
            let x = vec![f32::MAX, -f32::MAX, 70_000.0, -70_000.0, 1.0, -1.0, 0.0, 0.5];
            let mean = ranks.step(&vec![x; world as usize], 0);
            assert!(mean.iter().all(|v| v.is_finite()), "{text}, {world} ranks: {mean:?}");
            assert!(mean[0] > 0.0 && mean[1] == -mean[0]);
            // Halves add with a relative error of their own each time.
            assert!((mean[4] - 1.0).abs() < if text == "fp16" { 0.01 } else { 0.2 }, "{text}, {world}: {mean:?}");
        }
    }
    let Travels::Sums(element) = parse("fp16").travels() else { panic!("fp16 travels as sums") };
    assert_eq!(element.bytes(), 2);
}

/// What is clipped is no infinity: error feedback sends it later, and without a memory the gain shows what is lost.
#[test]
fn what_halves_clip_stays_in_the_residual() {
    let x = [100_000.0f32, -70_000.0, 1.0, 0.5];
    let mut fed = Ranks::new("fp16+ef(vanilla)", 4, 1);
    let sent: Vec<Vec<f32>> =
        (0..2).map(|step| fed.step(&[if step == 0 { x.to_vec() } else { vec![0.0; 4] }], step)).collect();
    assert_eq!(sent, [vec![65504.0, -65504.0, 1.0, 0.5], vec![34496.0, -4496.0, 0.0, 0.0]]);
    let (mut codec, mut out) = (parse("fp16").codec(shape(4)), Writer::new());
    let lost = codec.encode(&x, &Context::new(1), &mut out).unwrap();
    assert!(lost.sent < 0.8 * lost.compensated, "{lost:?}");
}

/// Golden bytes of each layout, with which decoders of other builds must agree.
#[test]
fn known_payloads() {
    let x = [1.0, -0.5, 0.25, 0.0, 3.0];
    assert_eq!(payload("fp16", &x, 0), [0, 0x3c, 0, 0xb8, 0, 0x34, 0, 0, 0, 0x42]);
    assert_eq!(payload("bf16", &x, 0), [0x80, 0x3f, 0, 0xbf, 0x80, 0x3e, 0, 0, 0x40, 0x40]);
    // Tags 3, 2, 2, 0, 3: then −0.5 and 0.25 in 15 bits, then 1 and 3.
    let want = [&[0b0010_1011, 0b11, 0x00, 0xc0, 0x00, 0x20][..], &1f32.to_le_bytes(), &3f32.to_le_bytes()].concat();
    assert_eq!(payload("inceptionn", &x, 0), want);
    // Powers of two are certain: exponents 127, 126, 125 and 0.
    assert_eq!(payload("natural", &x[..4], 0), [0b0010, 127, 126, 125, 0]);
    // Levels −1, 0 and 1 of TernGrad that are certain.
    let sure = [2.0, -2.0, 0.0, 2.0, -2.0];
    assert_eq!(payload("terngrad", &sure, 0), [&2f32.to_le_bytes()[..], &[0b1001_0010, 0b00]].concat());
    // Below −1, −3 and −2 are 1 bits; means −2.5 and 1.
    let mut want = [(-2.5f32).to_le_bytes(), 1f32.to_le_bytes()].concat();
    want.push(0b101);
    assert_eq!(payload("onebitsgd", &[-3.0, 1.0, -2.0], 0), want);
}

/// Dettmers: 0 and max |x| are exact, the rest within a part's half width.
#[test]
fn eight_bits_are_near() {
    let x = laplace(5000, 1);
    let max = x.iter().fold(0.0f32, |max, v| max.max(v.abs()));
    for (text, exponents) in [("eightbit", 6), ("eightbit(type=static)", 7)] {
        for (x, y) in x.iter().zip(compressed(&parse(text), &x, 0)) {
            let t = f64::from(x.abs() / max);
            let decade = t.log10().ceil().clamp(-f64::from(exponents), 0.0);
            let parts = if text == "eightbit" { 2f64.powf(6.0 + decade) } else { 16.0 };
            let width = 0.9 * 10f64.powf(decade) / parts;
            // Between decades a gap is half of both widths.
            assert!(
                (f64::from(x - y) / f64::from(max)).abs() <= width / 2.0 * 1.001,
                "{text}: {x} became {y} of {max}"
            );
        }
    }
    assert_eq!(compressed(&parse("eightbit"), &[4.0, 0.0, -0.0], 0), [4.0, 0.0, 0.0]);
}
