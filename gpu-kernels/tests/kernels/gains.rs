//! Gains of candidates from one histogram, against selections.

use crate::data::{gradients, lengths};
use crate::emulated::{Emulated, Memory};
use flexcomm_compression::naive;
use flexcomm_gpu_kernels::{DType, ErrorFeedback, LaunchError, Span, gains, largest, workspace_bytes};

const SHARES: [f64; 8] = [1.0, 0.5, 0.3, 0.1, 0.03, 0.01, 0.003, 0.001];

/// Share of the energy in the k largest.
pub fn exact(x: &[f32], k: usize) -> f64 {
    let square = |x: f32| f64::from(x) * f64::from(x);
    let all: f64 = x.iter().map(|x| square(*x)).sum();
    let sent: f64 = naive::topk(x, k).into_iter().map(|i| square(x[i as usize])).sum();
    if all > 0.0 { sent / all } else { 1.0 }
}

pub fn run(device: &Emulated, gradient: &[f32], ks: &[u32]) -> Vec<(f64, f64)> {
    let (n, source) = (gradient.len() as u64, Memory::of(gradient));
    let (candidates, to) = (Memory::of(ks), Memory::new(16 * ks.len() as u64));
    let workspace = Memory::new(workspace_bytes(n));
    let zeros = Memory::of(&vec![0.0f32; gradient.len()]);
    let feedback = ErrorFeedback {
        n,
        dtype: DType::F32,
        gradient: source.span(),
        memory: zeros.span(),
        compensated: Span::NONE,
        beta: 1.0,
        gamma: 1.0,
    };
    gains(device, &feedback, candidates.span(), ks.len() as u64, to.span(), workspace.span()).unwrap();
    let words: Vec<f64> = to.bytes().as_chunks::<8>().0.iter().map(|b| f64::from_le_bytes(*b)).collect();
    words.as_chunks::<2>().0.iter().map(|pair| (pair[0], pair[1])).collect()
}

#[test]
fn every_candidate_is_within_its_own_bound() {
    for (at, n) in lengths().into_iter().enumerate().filter(|(_, n)| *n > 0) {
        for (what, gradient) in gradients(n) {
            let Some(device) = Emulated::new(at as u64) else { return };
            let ks: Vec<u32> = SHARES.iter().map(|share| ((n as f64 * share) as u32).max(1)).collect();
            for (k, (gain, off)) in ks.iter().zip(run(&device, &gradient, &ks)) {
                let want = exact(&gradient, *k as usize);
                assert!((gain - want).abs() <= off, "{what}, {k} of {n}: {gain} ± {off}, exactly {want}");
                assert!((0.0..=1.0 + 1e-9).contains(&gain));
            }
        }
    }
}

/// What a decision needs: on a gradient like a network's, a hundredth.
#[test]
fn on_heavy_tails_they_are_good() {
    let Some(device) = Emulated::new(2) else { return };
    let (_, gradient) = gradients(50_000).swap_remove(0);
    let ks: Vec<u32> = SHARES.iter().map(|share| (50_000.0 * share) as u32).collect();
    for (k, (gain, off)) in ks.iter().zip(run(&device, &gradient, &ks)) {
        let want = exact(&gradient, *k as usize);
        assert!((gain - want).abs() < 1e-4 && off < 0.009, "{k}: {gain} ± {off}, exactly {want}");
    }
}

/// Where bins are wide: values below 2^-60 and above 2^68, and some of both.
#[test]
fn far_from_where_gradients_lie_the_bounds_hold() {
    let Some(device) = Emulated::new(1) else { return };
    let (_, near) = gradients(4000).swap_remove(0);
    let far = |scale: f32| near.iter().map(|x| x * scale).collect::<Vec<f32>>();
    let edge = |i: u32| f32::from_bits((66 + i % 3) << 23 | i.wrapping_mul(0x9e37_79b1) >> 9);
    let high = |i: u32| f32::from_bits((194 + i % 3) << 23 | i.wrapping_mul(0x9e37_79b1) >> 9);
    let (small, large) = ((0..4000).map(edge).collect(), (0..4000).map(high).collect());
    for gradient in [far(1e-27), far(1e24), small, large] {
        let ks = [1, 4, 40, 400, 1999, 3999];
        for (k, (gain, off)) in ks.iter().zip(run(&device, &gradient, &ks)) {
            let want = exact(&gradient, *k as usize);
            assert!((gain - want).abs() <= off && off < 0.1, "{k}: {gain} ± {off}, exactly {want}");
        }
    }
}

#[test]
fn no_order_and_no_number_of_blocks_changes_a_bit() {
    let (_, gradient) = gradients(30_000).swap_remove(0);
    let ks = [30, 300, 3000];
    let mut first = None;
    for seed in 0..8 {
        let Some(device) = Emulated::new(seed) else { return };
        let got = run(&device, &gradient, &ks);
        assert_eq!(first.get_or_insert_with(|| got.clone()), &got);
    }
}

#[test]
fn what_is_not_finite_and_what_is_empty() {
    let Some(device) = Emulated::new(0) else { return };
    assert_eq!(run(&device, &[1.0, f32::INFINITY], &[1]), [(0.0, 1.0)]);
    assert_eq!(run(&device, &[], &[1]), [(1.0, 0.0)]);
}

/// Of gradient and memory together, of every length.
#[test]
fn the_largest_magnitude_is_what_reading_finds() {
    for (at, n) in lengths().into_iter().enumerate() {
        for (what, gradient) in gradients(n) {
            let Some(device) = Emulated::new(at as u64) else { return };
            let (source, memory, to) = (Memory::of(&gradient), Memory::of(&vec![-1e-4f32; n]), Memory::new(16));
            let feedback = ErrorFeedback {
                n: n as u64,
                dtype: DType::F32,
                gradient: source.span(),
                memory: memory.span(),
                compensated: Span::NONE,
                beta: 1.0,
                gamma: 1.0,
            };
            largest(&device, &feedback, to.span()).unwrap();
            let want = gradient.iter().map(|x| (x - 1e-4).to_bits() & 0x7fff_ffff).max().unwrap_or(0);
            let got = to.bytes()[..4].try_into().map(u32::from_le_bytes).unwrap();
            assert_eq!(got, want, "{what}, n = {n}");
            let half = ErrorFeedback { dtype: DType::F16, ..feedback };
            assert!(matches!(largest(&device, &half, to.span()), Err(LaunchError::Parameter { .. })));
        }
    }
}
