//! AR-Topk's gather and scatter, and random-k, against `compression`.

use crate::data::{gradients, lengths};
use crate::emulated::{Emulated, Memory};
use crate::topk::{Step1, bits, check_energy_of, reference};
use flexcomm_compression::naive;
use flexcomm_compression::pipeline::Gradient;
use flexcomm_gpu_kernels::{
    DType, ErrorFeedback, Random, Selection, Span, Target, compensate, gather, scatter, subset, subset_scratch,
};

pub struct Run {
    step: Step1,
    feedback: ErrorFeedback,
}

pub fn fed_back(device: &Emulated, gradient: &Memory, memory: &Memory, k: u64) -> Run {
    let n = gradient.span().bytes() / 4;
    let step = Step1::new(n, k);
    let given = step.feedback((n, DType::F32), gradient, Some(memory));
    compensate(device, &given, step.workspace.span()).unwrap();
    Run { step, feedback: given }
}

/// Two steps with error feedback.
pub fn check_random_k(device: &Emulated, (gradient, source): (&[f32], &Memory), k: usize, scaled: bool) {
    let n = gradient.len();
    let strategy = format!("randomk(k={},scaled={scaled})+ef(vanilla)", k.max(2));
    let factor = if scaled && k > 0 { (n as f64 / k as f64) as f32 } else { 1.0 };
    let mut memory = Memory::of(&vec![0.0f32; n]);
    let want = reference(&strategy, Gradient::F32(gradient), n);
    for (index, (payload, residual, energy, sent)) in want.into_iter().enumerate() {
        let Run { step, feedback } = fed_back(device, source, &memory, k as u64);
        let random = Random { seed: 1, step: index as u64, tensor: 0, rank: None };
        let scratch = Memory::new(subset_scratch(n as u64));
        subset(device, n as u64, k as u64, random, scratch.span(), step.indices.span()).unwrap();
        assert!(step.indices.u32s().is_sorted_by(|a, b| a < b));
        let at = Selection { len: k as u64, indices: step.indices.span(), values: step.values.span() };
        gather(device, &feedback, &at, factor, step.workspace.span()).unwrap();
        assert_eq!(step.values.bytes(), payload, "{k} of {n}");
        assert_eq!(bits(&step.compensated.f32s()), bits(&residual));
        let outcome = step.outcome();
        check_energy_of(&residual, &outcome);
        assert!((outcome.compensated - energy).abs() <= 1e-12 * energy && (outcome.sent - sent).abs() <= 1e-12 * sent);
        memory = step.compensated;
    }
}

#[test]
fn random_k_is_the_cpus() {
    for (at, n) in lengths().into_iter().enumerate() {
        let (_, gradient) = gradients(n).swap_remove(0);
        let source = Memory::of(&gradient);
        for k in [2, n / 10, n / 2, n - n / 8, n].into_iter().filter(|k| *k <= n && (*k > 1 || n == 0)) {
            let Some(device) = Emulated::new(at as u64) else { return };
            for scaled in [false, true] {
                check_random_k(&device, (&gradient, &source), k, scaled);
            }
        }
    }
}

/// One rank's indices, everybody's values, and their mean, by their definitions.
#[test]
fn ar_topk_takes_and_scatters_as_it_is_defined() {
    for (at, n) in lengths().into_iter().enumerate().filter(|(_, n)| *n > 0) {
        let Some(device) = Emulated::new(at as u64) else { return };
        let all = gradients(n);
        let (chosen, own) = (&all[0].1, &all[1].1);
        let k = n.div_ceil(7);
        let indices = naive::topk(chosen, k);
        // A memory that is not empty.
        let [(_, residual, ..), _] =
            reference(&format!("topk(k={})+ef(vanilla)", n.div_ceil(2)), Gradient::F32(own), n);
        let memory = Memory::of(&residual);
        let mut left: Vec<f32> = residual.iter().zip(own).map(|(residual, own)| residual + own).collect();
        let values: Vec<f32> = indices.iter().map(|i| left[*i as usize]).collect();
        let energy = |values: &[f32]| values.iter().map(|x| f64::from(*x).powi(2)).sum::<f64>();
        let (compensated, sent) = (energy(&left), energy(&values));
        indices.iter().for_each(|i| left[*i as usize] = 0.0);

        let Run { step, feedback } = fed_back(&device, &Memory::of(own), &memory, k as u64);
        let given = Memory::of(&indices);
        let at = Selection { len: k as u64, indices: given.span(), values: step.values.span() };
        gather(&device, &feedback, &at, 1.0, step.workspace.span()).unwrap();
        assert_eq!(bits(&step.values.f32s()), bits(&values));
        assert_eq!(bits(&step.compensated.f32s()), bits(&left));
        let outcome = step.outcome();
        assert!(
            (outcome.compensated - compensated).abs() <= 1e-12 * compensated
                && (outcome.sent - sent).abs() <= 1e-12 * sent
        );

        // Halves and quarters are exact: so is the mean over two ranks.
        let (out, mut want) = (Memory::of(&vec![0.0f32; n]), vec![0.0; n]);
        scatter(&device, &at, n as u64, Target { out: out.span(), scale: 0.5 }).unwrap();
        indices.iter().zip(&values).for_each(|(i, value)| want[*i as usize] = value / 2.0);
        assert_eq!(out.f32s(), want);
    }
}

/// Indices come from another machine.
#[test]
fn indices_beyond_the_end_touch_nothing() {
    let Some(device) = Emulated::new(1) else { return };
    let source = Memory::of(&[1.0f32, 2.0, 3.0]);
    let Run { step, feedback } = fed_back(&device, &source, &Memory::of(&[0.0f32; 3]), 3);
    let given = Memory::of(&[1u32, 3, u32::MAX]);
    let at = Selection { len: 3, indices: given.span(), values: step.values.span() };
    gather(&device, &feedback, &at, 1.0, step.workspace.span()).unwrap();
    assert_eq!((step.values.f32s(), step.compensated.f32s()), (vec![2.0, 0.0, 0.0], vec![1.0, 0.0, 3.0]));
    assert!(step.outcome().over);
    let out = Memory::of(&[0.0f32; 3]);
    scatter(&device, &Selection { values: given.span(), ..at }, 3, Target { out: out.span(), scale: 1.0 }).unwrap();
    assert_eq!(out.f32s()[0], 0.0);
}

#[test]
fn what_is_not_finite_leaves_the_memory_and_gathers_zeros() {
    let Some(device) = Emulated::new(2) else { return };
    let (source, memory) = (Memory::of(&[1.0f32, f32::NAN, 3.0]), Memory::of(&[4.0f32, 5.0, 6.0]));
    let Run { step, feedback } = fed_back(&device, &source, &memory, 2);
    let given = Memory::of(&[0u32, 1]);
    let at = Selection { len: 2, indices: given.span(), values: step.values.span() };
    gather(&device, &feedback, &at, 1.0, step.workspace.span()).unwrap();
    assert_eq!((step.values.f32s(), step.compensated.f32s()), (vec![0.0, 0.0], vec![4.0, 5.0, 6.0]));
    assert!(step.outcome().refused);
    let none = ErrorFeedback { n: 0, gradient: Span::NONE, memory: Span::NONE, compensated: Span::NONE, ..feedback };
    assert!(flexcomm_gpu_kernels::compensate(&device, &none, step.workspace.span()).is_ok());
}
