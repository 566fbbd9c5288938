//! Methods of one bit per value.

use super::*;

/// Every combination of votes of up to 6 ranks: the sign of the sum of signs, 0 when votes are equal.
#[test]
fn majority_vote_by_enumeration() {
    for text in ["signsgd", "signum(delta=0)", "signum"] {
        for ranks in 1..=6u32 {
            // Value number i of rank r is negative if bit r of i is set.
            let n = 1usize << ranks;
            let value = |r: u32, i: usize| if i >> r & 1 == 1 { -0.5 - i as f32 } else { 0.25 + r as f32 };
            let payloads: Vec<Vec<u8>> =
                (0..ranks).map(|r| payload(text, &(0..n).map(|i| value(r, i)).collect::<Vec<_>>(), 0)).collect();
            for (i, vote) in aggregate(text, &payloads, n).iter().enumerate() {
                let sum: i32 = (0..ranks).map(|r| if i >> r & 1 == 1 { -1 } else { 1 }).sum();
                assert_eq!(*vote, sum.signum() as f32, "{text}, {ranks} ranks, votes {i:06b}");
            }
        }
    }
}

/// More ranks than an int8 or a uint8 counts.
#[test]
fn votes_of_many_ranks_do_not_overflow() {
    for ranks in [127i32, 128, 129, 200, 255, 256, 257, 400] {
        for negative in [0, ranks / 2, ranks / 2 + 1, ranks] {
            let payloads: Vec<Vec<u8>> =
                (0..ranks).map(|r| payload("signsgd", &[if r < negative { -1.0 } else { 1.0 }; 11], 0)).collect();
            let want = (ranks - 2 * negative).signum() as f32;
            assert_eq!(aggregate("signsgd", &payloads, 11), [want; 11], "{negative} of {ranks}");
        }
    }
}

/// Over several blocks, with another number of ranks than a vote has lanes, against a plain count.
#[test]
fn votes_of_long_tensors() {
    let gradients: Vec<Vec<f32>> = (0..5).map(|seed| laplace(9_001, seed)).collect();
    let payloads: Vec<Vec<u8>> = gradients.iter().map(|g| payload("signsgd", g, 0)).collect();
    for (i, vote) in aggregate("signsgd", &payloads, 9_001).iter().enumerate() {
        let sum: f32 = gradients.iter().map(|g| g[i].signum()).sum();
        assert_eq!(*vote, sum.signum(), "value {i}");
    }
}

/// sign(0) = sign(−0) = +1, everywhere: left undefined by others.
#[test]
fn zero_has_a_sign() {
    let x = [0.0, -0.0, -1.0, 1.0, 0.0, 0.0, 0.0, 0.0, -0.0];
    let want = [1.0, 1.0, -1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0];
    for text in ["signsgd", "signum", "signum(delta=0)", "onebit(scaling=false)"] {
        assert_eq!(compressed(&parse(text), &x, 0), want, "{text}");
    }
    let ninths = want.map(|v| v * (2.0f32 / 9.0));
    assert_eq!(compressed(&parse("efsignsgd"), &x, 0), ninths);
}

/// A set bit is negative, the first value in the lowest bit; no bit or byte is negated on the way.
#[test]
fn signs_are_one_bit_each() {
    let x = [1.0, -2.0, 3.0, 4.0, -5.0, -6.0, 7.0, 8.0, -9.0];
    assert_eq!(payload("signsgd", &x, 0), [0b0011_0010, 1]);
    assert_eq!(payload("efsignsgd", &x, 0), [&[0b0011_0010, 1][..], &5f32.to_le_bytes()].concat());
}

/// z = (1 − delta) g + delta z from 0 on, against the plain recurrence; the state is z.
#[test]
fn signum_sends_the_sign_of_its_momentum() {
    let (n, delta) = (50, 0.75f32);
    let mut run = Run::new(&parse("signum(delta=0.75)"), shape(n), 0);
    let mut z = vec![0.0f32; n];
    for step in 0..30 {
        let g = laplace(n, step);
        let (measured, sent) = run.transmit(&g).unwrap();
        z.iter_mut().zip(&g).for_each(|(z, g)| *z = (1.0 - delta) * g + delta * *z);
        let want: Vec<f32> = z.iter().map(|z| if *z < 0.0 { -1.0 } else { 1.0 }).collect();
        assert_eq!(sent, want, "step {step}");
        assert_eq!((measured.sent, measured.compensated), (n as f64, measured.compensated));
    }
    let against = laplace(n, 29).iter().zip(&z).filter(|(g, z)| g.signum() != z.signum()).count();
    assert!(against > 0, "the momentum never differed from the gradient: nothing was tested");
}

/// The first update is lr ‖g‖₁/n sign(g), not ten (1/lr) times that; the residual is the rest.
#[test]
fn the_first_step_of_efsign_is_not_too_large() {
    // Ranks::step has a learning rate of 0.1.
    let mut ranks = Ranks::new("efsignsgd+ef(efsign)", 4, 1);
    let mean = ranks.step(&[vec![1.0, -2.0, 3.0, -6.0]], 0);
    for (got, want) in mean.iter().zip([3.0, -3.0, 3.0, -3.0]) {
        assert!((got - want).abs() < 1e-6, "{mean:?}");
    }
    let residual = ranks.pipelines[0].residual();
    for (got, want) in residual.iter().zip([-2.0, 1.0, 0.0, -3.0]) {
        assert!((got - want).abs() < 1e-5, "{residual:?}");
    }
}

/// Two means: of the values below the threshold and of the others.
#[test]
fn one_bit_sgd_decodes_to_means() {
    let x = [1.0, -2.0, 3.0, -6.0, 0.0, 4.0];
    assert_eq!(compressed(&parse("onebitsgd"), &x, 0), [2.0, -4.0, 2.0, -4.0, 2.0, 2.0]);
    assert_eq!(compressed(&parse("onebitsgd(threshold=2)"), &x, 0), [-1.75, -1.75, 3.5, -1.75, -1.75, 3.5]);
    // A side without values.
    assert_eq!(compressed(&parse("onebitsgd"), &[1.0, 3.0], 0), [2.0, 2.0]);
    assert_eq!(compressed(&parse("onebitsgd"), &[-1.0, -3.0], 0), [-2.0, -2.0]);
}

/// Per column, against plain means, with decoded values in the range of the tensor: bits negated as bytes give hundreds.
#[test]
fn one_bit_sgd_per_column() {
    for (rows, cols) in [(40, 6), (3, 50), (97, 3), (1000, 17)] {
        let x = laplace(rows * cols, 3);
        for threshold in [0.0f32, 0.5] {
            let strategy = parse(&format!("onebitsgd(threshold={threshold},per=column)"));
            let mut run = Run::new(&strategy, flexcomm_compression::codec::Shape { rows, cols }, 0);
            let (_, sent) = run.transmit(&x).unwrap();
            for (i, got) in sent.iter().enumerate() {
                let side = |v: f32| v < threshold;
                let same = (i % cols..x.len()).step_by(cols).map(|j| x[j]).filter(|v| side(*v) == side(x[i]));
                let (sum, count) = same.fold((0.0, 0.0), |(sum, count), v| (sum + f64::from(v), count + 1.0));
                assert!((f64::from(*got) - sum / count).abs() < 1e-5, "{rows} x {cols}, value {i}");
            }
            assert_eq!(run.payload.len(), 8 * cols + (rows * cols).div_ceil(8));
        }
    }
}

#[test]
fn error_feedback_conserves() {
    for codec in ["onebitsgd", "onebitsgd(per=column)", "efsignsgd", "eightbit", "minmax8", "inceptionn", "natural"] {
        assert_error_feedback_conserves(codec);
    }
}
