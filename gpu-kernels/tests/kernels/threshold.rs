//! MSTopk, DGC, SIDCo and plain thresholds against `compression`.

use crate::data::{gradients, lengths};
use crate::emulated::{Emulated, Memory};
use crate::topk::{Step1, bits, check_energy_of, reference};
use flexcomm_compression::Layers;
use flexcomm_compression::pipeline::{Gradient, Member, Pipeline, Step};
use flexcomm_compression::wire::Writer;
use flexcomm_gpu_kernels::{DType, Fit, Form, Random, Threshold, pack, threshold};

pub fn random(step: u64) -> Random {
    // As of `Member::alone(1)`.
    Random { seed: 1, step, tensor: 0, rank: Some(0) }
}

fn run(device: &Emulated, method: Threshold, gradient: &Memory, memory: Option<&Memory>, form: Form) -> Step1 {
    let n = gradient.span().bytes() / 4;
    let step = Step1::new(n, n);
    let feedback = step.feedback((n, DType::F32), gradient, memory);
    threshold(device, &feedback, method, &step.to(n), step.workspace.span()).unwrap();
    pack(device, &step.to(n), n, step.payload.span(), form, step.workspace.span()).unwrap();
    step
}

/// Two steps with error feedback.
pub fn check(device: &Emulated, strategy: &str, form: Form, gradient: &[f32], method: impl Fn(u64) -> Threshold) {
    let n = gradient.len();
    let source = Memory::of(gradient);
    let mut memory = Memory::of(&vec![0.0f32; n]);
    let want = reference(&format!("{strategy}+ef(vanilla)"), Gradient::F32(gradient), n);
    for (index, (payload, residual, _, sent)) in want.into_iter().enumerate() {
        let step = run(device, method(index as u64), &source, Some(&memory), form);
        assert_eq!(step.payload(), payload, "{strategy} of {n}, step {index}");
        assert_eq!(bits(&step.compensated.f32s()), bits(&residual), "{strategy} of {n}, step {index}");
        assert!((step.outcome().sent - sent).abs() <= 1e-12 * sent && !step.outcome().over);
        check_energy_of(&residual, &step.outcome());
        memory = step.compensated;
    }
}

#[test]
fn mstopk_is_the_cpus() {
    for (at, n) in lengths().into_iter().enumerate() {
        for (what, gradient) in gradients(n) {
            let Some(device) = Emulated::new(at as u64) else { return };
            for k in [n.min(1), n / 100, n / 3, n].into_iter().filter(|k| *k > 0 || n == 0) {
                println!("{what}, {k} of {n}");
                let method = |step| Threshold::MsTopK { k: k as u64, random: random(step) };
                check(&device, &format!("mstopk(k={})", k.max(1)), Form::FIXED, &gradient, method);
            }
        }
    }
}

#[test]
fn dgc_is_the_cpus() {
    for (at, n) in lengths().into_iter().enumerate() {
        for (what, gradient) in gradients(n) {
            let Some(device) = Emulated::new(at as u64) else { return };
            for (k, sample, most) in [(n.min(2), 0.01, 1.3), (n / 50, 0.05, 1.0), (n / 5, 0.01, 4.0), (n, 0.02, 2.0)] {
                if k < 2 && n > 0 {
                    continue;
                }
                println!("{what}, {k} of {n}");
                let text = format!("dgc(k={},sample={sample},most={most})", k.max(2));
                let method = |step| Threshold::Dgc { k: k as u64, sample, most, random: random(step) };
                check(&device, &text, Form::VARYING, &gradient, method);
            }
        }
    }
}

#[test]
fn thresholds_are_the_cpus() {
    for (at, n) in lengths().into_iter().enumerate() {
        for (_, gradient) in gradients(n) {
            let Some(device) = Emulated::new(at as u64) else { return };
            for v in [0.25, 0.5, 3.0, 1e6] {
                let text = format!("threshold(v={v})");
                check(&device, &text, Form::VARYING, &gradient, |_| Threshold::Above { v: v as f32 });
            }
        }
    }
}

/// Where the fit has room: of equal values only the exponential's is more than rounding.
#[test]
fn sidco_is_the_cpus_with_all_fits_and_stages() {
    let mut deepest = 0;
    for (at, n) in [33usize, 1023, 4097, 10_000].into_iter().enumerate() {
        for (what, gradient) in gradients(n).into_iter().filter(|(what, _)| *what != "zeros" && *what != "all alike") {
            let source = Memory::of(&gradient);
            for (fit, name) in [(Fit::Exponential, "exponential"), (Fit::Gamma, "gamma"), (Fit::Pareto, "pareto")] {
                for k in [n / 4, n / 30, n] {
                    if k < 2 {
                        continue;
                    }
                    let Some(device) = Emulated::new(at as u64) else { return };
                    let strategy = format!("sidco(k={k},fit={name},every=1)").parse().unwrap();
                    let mut rank = Pipeline::new(&strategy, Layers::fused(n).unwrap(), Member::alone(1));
                    let (mut stages, share) = (1u32, k as f64 / n as f64);
                    let most = (share.ln() / 0.25f64.ln()).ceil().clamp(1.0, 64.0) as u32;
                    for index in 0..4 {
                        let mut message = Writer::new();
                        let step = Step { index, learning_rate: 0.1 };
                        rank.compress(Gradient::F32(&gradient), step, &mut message).unwrap();
                        let method = Threshold::Sidco { k: k as u64, fit, first: 0.25, stages };
                        let step = run(&device, method, &source, None, Form::VARYING);
                        let header = 32 + 8 * usize::from(message.bytes()[7]);
                        assert_eq!(step.payload(), message.bytes()[header..], "{what}: {name}, {k} of {n}, {stages}");
                        deepest = deepest.max(stages);
                        let kept = f64::from(step.outcome().kept);
                        stages = match kept {
                            _ if kept > k as f64 * 1.2 => stages.saturating_sub(1).max(1),
                            _ if kept < k as f64 * 0.8 => (stages + 1).min(most),
                            _ => stages,
                        };
                    }
                }
            }
        }
    }
    assert!(deepest >= 2, "no case had more than one stage");
}

/// With less room than values that reach the threshold, the rest stays in the memory.
#[test]
fn what_finds_no_room_stays() {
    let Some(device) = Emulated::new(3) else { return };
    let gradient: Vec<f32> = (0..5000).map(|i| 1.0 + i as f32).collect();
    let (source, step) = (Memory::of(&gradient), Step1::new(5000, 700));
    let feedback = step.feedback((5000, DType::F32), &source, None);
    threshold(&device, &feedback, Threshold::Above { v: 10.0 }, &step.to(700), step.workspace.span()).unwrap();
    assert!(step.outcome().over && step.outcome().kept == 700);
    let mut left = gradient;
    left[10..710].fill(0.0);
    assert_eq!(step.compensated.f32s(), left);
}

#[test]
fn what_is_not_finite_leaves_the_memory() {
    let n = 3000;
    let (_, before) = gradients(n).swap_remove(0);
    let mut gradient = before.clone();
    gradient[7] = f32::INFINITY;
    let (source, memory) = (Memory::of(&gradient), Memory::of(&before));
    for method in [
        Threshold::Above { v: 0.5 },
        Threshold::MsTopK { k: 20, random: random(0) },
        Threshold::Dgc { k: 20, sample: 0.1, most: 1.3, random: random(0) },
        Threshold::Sidco { k: 20, fit: Fit::Gamma, first: 0.25, stages: 2 },
    ] {
        let Some(device) = Emulated::new(1) else { return };
        let step = run(&device, method, &source, Some(&memory), Form::VARYING);
        assert!(step.outcome().refused, "{method:?}");
        assert_eq!(step.compensated.bytes(), memory.bytes(), "{method:?}");
        let kept = step.outcome().kept as usize;
        assert!(step.values.f32s()[..kept].iter().all(|x| *x == 0.0), "{method:?}");
    }
}
