//! Strom's hard threshold and Qsparse against `compression`.

use crate::data::{gradients, lengths};
use crate::emulated::{Emulated, Memory};
use crate::topk::{Step1, bits, check_energy_of, reference};
use flexcomm_compression::pipeline::Gradient;
use flexcomm_gpu_kernels::hybrid::{Qsparse, hard_threshold, qsparse, qsparse_random};
use flexcomm_gpu_kernels::{
    DType, ErrorFeedback, Form, LaunchError, Random, RandomK, Selection, Span, pack, subset_scratch,
};

/// Two steps with error feedback.
pub fn check(
    device: &Emulated,
    strategy: &str,
    gradient: &[f32],
    call: impl Fn(&ErrorFeedback, &Selection, Span, u64) -> Result<Form, LaunchError>,
) {
    let n = gradient.len();
    let source = Memory::of(gradient);
    let mut memory = Memory::of(&vec![0.0f32; n]);
    let want = reference(&format!("{strategy}+ef(vanilla)"), Gradient::F32(gradient), n);
    for (index, (payload, residual, compensated, sent)) in want.into_iter().enumerate() {
        let step = Step1::new(n as u64, n as u64);
        let (feedback, to) = (step.feedback((n as u64, DType::F32), &source, Some(&memory)), step.to(n as u64));
        let form = call(&feedback, &to, step.workspace.span(), index as u64).unwrap();
        pack(device, &to, n as u64, step.payload.span(), form, step.workspace.span()).unwrap();
        assert_eq!(step.payload(), payload, "{strategy} of {n}, step {index}");
        assert_eq!(bits(&step.compensated.f32s()), bits(&residual), "{strategy} of {n}, step {index}");
        let outcome = step.outcome();
        check_energy_of(&residual, &outcome);
        assert!((outcome.compensated - compensated).abs() <= 1e-12 * compensated, "{strategy}: {outcome:?}");
        assert!((outcome.sent - sent).abs() <= 1e-6 * sent + 1e-300, "{strategy} of {n}: {outcome:?}, {sent}");
        memory = step.compensated;
    }
}

#[test]
fn hard_thresholds_are_the_cpus() {
    for (at, n) in lengths().into_iter().enumerate() {
        for (_, gradient) in gradients(n) {
            let Some(device) = Emulated::new(at as u64) else { return };
            for tau in [0.25f32, 0.5, 3.0, 1e6] {
                check(&device, &format!("hardthreshold(tau={tau})"), &gradient, |feedback, to, workspace, _| {
                    hard_threshold(&device, feedback, tau, to, workspace)
                });
            }
        }
    }
}

#[test]
fn qsparse_is_the_cpus() {
    for (at, n) in lengths().into_iter().enumerate().filter(|(_, n)| *n > 30) {
        for (what, gradient) in gradients(n) {
            let Some(device) = Emulated::new(at as u64) else { return };
            for k in [2, n / 20 + 2, n / 3] {
                println!("{what}, {k} of {n}");
                let k64 = k as u64;
                for (s, scaled) in [(15, true), (3, false), (127, true)] {
                    let text = format!("qsparse(k={k},s={s},scaled={scaled})");
                    check(&device, &text, &gradient, |feedback, to, workspace, step| {
                        let random = Random { seed: 1, step, tensor: 0, rank: Some(0) };
                        qsparse(&device, feedback, k64, Qsparse::Levels { s, scaled, random }, to, workspace)
                    });
                }
                let text = format!("qsparse(k={k},quantize=sign)");
                check(&device, &text, &gradient, |feedback, to, workspace, _| {
                    qsparse(&device, feedback, k64, Qsparse::Signs, to, workspace)
                });
            }
        }
    }
}

#[test]
fn qsparse_with_random_indices_is_the_cpus() {
    for (at, n) in lengths().into_iter().enumerate().filter(|(_, n)| *n > 30) {
        for (_, gradient) in gradients(n) {
            let Some(device) = Emulated::new(at as u64) else { return };
            for k in [2, n / 20 + 2, n - n / 3] {
                let scratch = Memory::new(subset_scratch(n as u64));
                for (text, s) in [("s=15", Some(15)), ("s=2", Some(2)), ("quantize=sign", None)] {
                    let text = format!("qsparse(k={k},select=random,{text})");
                    check(&device, &text, &gradient, |feedback, to, workspace, step| {
                        let random = Random { seed: 1, step, tensor: 0, rank: Some(0) };
                        let method = s.map_or(Qsparse::Signs, |s| Qsparse::Levels { s, scaled: true, random });
                        let drawn = RandomK { k: k as u64, scaled: false, random };
                        qsparse_random(&device, feedback, drawn, method, to, scratch.span(), workspace)
                    });
                }
            }
        }
    }
}

#[test]
fn what_is_not_finite_leaves_the_memory_and_means_zeros() {
    let n = 3000;
    let (_, before) = gradients(n).swap_remove(0);
    let mut gradient = before.clone();
    gradient[1234] = f32::INFINITY;
    let Some(device) = Emulated::new(2) else { return };
    let (source, memory) = (Memory::of(&gradient), Memory::of(&before));
    for which in 0..3 {
        let step = Step1::new(n as u64, n as u64);
        let (feedback, to) = (step.feedback((n as u64, DType::F32), &source, Some(&memory)), step.to(n as u64));
        let random = Random { seed: 1, step: 0, tensor: 0, rank: Some(0) };
        let workspace = step.workspace.span();
        let form = match which {
            0 => hard_threshold(&device, &feedback, 0.5, &to, workspace),
            1 => qsparse(&device, &feedback, 50, Qsparse::Signs, &to, workspace),
            _ => qsparse(&device, &feedback, 50, Qsparse::Levels { s: 4, scaled: true, random }, &to, workspace),
        };
        pack(&device, &to, n as u64, step.payload.span(), form.unwrap(), workspace).unwrap();
        let outcome = step.outcome();
        assert!(outcome.refused && outcome.norm == 0.0, "{outcome:?}");
        assert_eq!(outcome.kept, if which == 0 { 0 } else { 50 });
        assert_eq!(step.compensated.bytes(), memory.bytes());
    }
}
