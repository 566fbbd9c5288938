//! 3LC against `compression`.

use crate::data::{gradients, lengths};
use crate::emulated::{Emulated, Memory};
use crate::topk::{Step1, bits, check_energy_of};
use flexcomm_compression::Layers;
use flexcomm_compression::pipeline::{Gradient, Member, Pipeline, Step};
use flexcomm_compression::random::Stream;
use flexcomm_compression::wire::Writer;
use flexcomm_gpu_kernels::three_lc::{add, compress, payload_bytes};
use flexcomm_gpu_kernels::{DType, Device, Target};

/// Two steps with error feedback, each decoded.
pub fn check(device: &Emulated, s: f64, gradient: &[f32]) {
    let n = gradient.len();
    let strategy = format!("threelc(s={s})+ef(vanilla)").parse().unwrap();
    let mut cpu = Pipeline::new(&strategy, Layers::fused(n).unwrap(), Member::alone(1));
    let (source, mut memory) = (Memory::of(gradient), Memory::of(&vec![0.0f32; n]));
    for index in 0..2 {
        let mut message = Writer::new();
        let want = cpu.compress(Gradient::F32(gradient), Step { index, learning_rate: 0.1 }, &mut message).unwrap();
        let step = Step1::new(n as u64, 1);
        let payload = Memory::new(payload_bytes(n as u64));
        let feedback = step.feedback((n as u64, DType::F32), &source, Some(&memory));
        compress(device, &feedback, s, payload.span(), step.workspace.span()).unwrap();
        let header = 32 + 8 * usize::from(message.bytes()[7]);
        let (outcome, sent) = (step.outcome(), message.bytes().len() - header);
        assert_eq!(outcome.bytes, sent as u64, "{n}, step {index}");
        assert_eq!(payload.bytes()[..sent], message.bytes()[header..], "{n}, step {index}");
        assert_eq!(bits(&step.compensated.f32s()), bits(&cpu.residual()), "{n}, step {index}");
        check_energy_of(&cpu.residual(), &outcome);
        assert!((outcome.sent - want.energy.sent).abs() <= 1e-9 * want.energy.sent);
        let (out, mut mean) = (Memory::of(&vec![0.0f32; n]), vec![0.0; n]);
        // A payload may begin at any byte.
        let offset = index as usize * (1 + n % 7);
        let there = Memory::new((offset + sent) as u64);
        let part = there.span().part(offset as u64, sent as u64);
        device.copy(part, payload.span().part(0, sent as u64)).unwrap();
        add(device, part, n as u64, Target { scale: 1.0, out: out.span() }, step.workspace.span()).unwrap();
        cpu.aggregate(&[message.bytes()], index, &mut mean).unwrap();
        // Adding zero to zero has either sign.
        assert_eq!(out.f32s(), mean, "{n}");
        // One byte short: another number of values.
        if sent > 4 {
            let (zeros, short) = (Memory::of(&vec![0.0f32; n]), payload.span().part(0, sent as u64 - 1));
            add(device, short, n as u64, Target { scale: 1.0, out: zeros.span() }, step.workspace.span()).unwrap();
            assert!(zeros.f32s().iter().all(|x| *x == 0.0));
        }
        memory = step.compensated;
    }
}

#[test]
fn two_steps_are_the_cpus_bit_for_bit() {
    for (at, n) in lengths().into_iter().enumerate() {
        for (what, gradient) in gradients(n) {
            println!("{what} of {n}");
            for s in [1.0, 1.75] {
                let Some(device) = Emulated::new(at as u64) else { return };
                check(&device, s, &gradient);
            }
        }
    }
}

/// Runs of every length, across rows and tiles.
#[test]
fn runs_go_on_over_tiles() {
    for (seed, every) in [3usize, 40, 75, 500, 6000, 40_000].into_iter().enumerate() {
        let Some(device) = Emulated::new(seed as u64) else { return };
        let (n, stream) = (30_011usize, Stream::new(seed as u64, [3; 4]));
        let large = |i: usize| (stream.word(i as u32) as usize).is_multiple_of(every);
        let gradient: Vec<f32> = (0..n).map(|i| if large(i) { 1.0 } else { 1e-3 }).collect();
        check(&device, 1.0, &gradient);
    }
}

#[test]
fn what_is_not_finite_leaves_the_memory_and_means_zeros() {
    let n = 2999;
    let (_, before) = gradients(n).swap_remove(0);
    let mut gradient = before.clone();
    gradient[7] = f32::NEG_INFINITY;
    let Some(device) = Emulated::new(3) else { return };
    let (source, memory, step) = (Memory::of(&gradient), Memory::of(&before), Step1::new(n as u64, 1));
    let payload = Memory::new(payload_bytes(n as u64));
    let feedback = step.feedback((n as u64, DType::F32), &source, Some(&memory));
    compress(&device, &feedback, 1.0, payload.span(), step.workspace.span()).unwrap();
    let outcome = step.outcome();
    assert!(outcome.refused && outcome.sent == 0.0, "{outcome:?}");
    assert_eq!(step.compensated.bytes(), memory.bytes());
    let out = Memory::of(&vec![0.0f32; n]);
    let sent = payload.span().part(0, outcome.bytes);
    add(&device, sent, n as u64, Target { scale: 1.0, out: out.span() }, step.workspace.span()).unwrap();
    assert!(out.f32s().iter().all(|x| *x == 0.0));
    assert!(compress(&device, &feedback, 2.0, payload.span(), step.workspace.span()).is_err());
}
