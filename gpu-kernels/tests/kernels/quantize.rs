//! Quantizers: payload, memory, energies and decoding against `compression`.

use crate::data::{gradients, lengths};
use crate::emulated::{Emulated, Memory};
use flexcomm_compression::codec::Shape;
use flexcomm_compression::pipeline::{Gradient, Member, Pipeline, Step};
use flexcomm_compression::wire::Writer;
use flexcomm_compression::{Energy, Layers};
use flexcomm_gpu_kernels::{
    DType, Device, ErrorFeedback, Norm, Quantizer, Random, Span, Target, add, add_sized, majority, quantize,
    workspace_bytes,
};
use half::{bf16, f16};

const SEED: u64 = 99;

pub fn methods() -> Vec<(Quantizer, &'static str)> {
    let qsgd = |s, bucket, norm| Quantizer::Qsgd { s, bucket, norm };
    let dithering = |k, natural, norm| Quantizer::Dithering { k, natural, norm };
    vec![
        (Quantizer::Signs, "signsgd"),
        (Quantizer::Signs, "onebit(scaling=false)"),
        (Quantizer::ScaledSigns, "onebit(scaling=true)"),
        (Quantizer::ScaledSigns, "efsignsgd"),
        (Quantizer::Ssdm, "ssdm"),
        (qsgd(4, 512, Norm::L2), "qsgd(s=4)"),
        (qsgd(1, 0, Norm::L2), "qsgd(s=1,bucket=0)"),
        (qsgd(127, 512, Norm::Max), "qsgd(s=127,norm=max)"),
        (qsgd(15, 7, Norm::Max), "qsgd(s=15,bucket=7,norm=max)"),
        (qsgd(60, 3000, Norm::L2), "qsgd(s=60,bucket=3000)"),
        (dithering(4, false, Norm::Max), "dithering(k=4)"),
        (dithering(7, false, Norm::L2), "dithering(k=7,normalize=l2)"),
        (dithering(3, true, Norm::Max), "dithering(k=3,partition=natural)"),
        (dithering(127, true, Norm::L2), "dithering(k=127,partition=natural,normalize=l2)"),
        (Quantizer::TernGrad { clip: 0.0 }, "terngrad"),
        (Quantizer::TernGrad { clip: 2.5 }, "terngrad(clip=2.5)"),
        (Quantizer::LpcSvrg { bits: 2, lambda: 1.0 }, "lpcsvrg(bits=2)"),
        (Quantizer::LpcSvrg { bits: 5, lambda: 0.5 }, "lpcsvrg(bits=5,lambda=0.5)"),
        (Quantizer::LpcSvrg { bits: 8, lambda: 1.0 }, "lpcsvrg(bits=8)"),
        (Quantizer::OneBitSgd { threshold: 0.0, columns: 1 }, "onebitsgd"),
        (Quantizer::OneBitSgd { threshold: -0.25, columns: 1 }, "onebitsgd(threshold=-0.25)"),
        (Quantizer::MinMax8, "minmax8"),
        (Quantizer::Inceptionn { bound: 10 }, "inceptionn"),
        (Quantizer::Inceptionn { bound: 1 }, "inceptionn(bound=1)"),
        (Quantizer::Inceptionn { bound: 14 }, "inceptionn(bound=14)"),
        (Quantizer::Natural, "natural"),
        (Quantizer::EightBit { fixed: false }, "eightbit"),
        (Quantizer::EightBit { fixed: true }, "eightbit(type=static)"),
        (Quantizer::F16 { world: 1 }, "fp16"),
        (Quantizer::Bf16 { world: 1 }, "bf16"),
    ]
}

fn bits(values: &[f32]) -> Vec<u32> {
    values.iter().map(|v| v.to_bits()).collect()
}

fn feedback((n, dtype): (usize, DType), gradient: &Memory, memory: Span, compensated: &Memory) -> ErrorFeedback {
    ErrorFeedback {
        n: n as u64,
        dtype,
        gradient: gradient.span(),
        memory,
        compensated: compensated.span(),
        beta: 1.0,
        gamma: 1.0,
    }
}

/// Of a payload that lies `offset` bytes behind a word.
fn decode(device: &Emulated, (method, n): (Quantizer, usize), (payload, offset): (Span, usize), out: &Memory) {
    let there = Memory::new(payload.bytes() + offset as u64);
    let at = there.span().part(offset as u64, payload.bytes());
    device.copy(at, payload).unwrap();
    let payload = at;
    let Quantizer::Inceptionn { bound } = method else {
        return add(device, method, n as u64, payload, Target { scale: 1.0, out: out.span() }).unwrap();
    };
    let workspace = Memory::new(workspace_bytes(n as u64));
    add_sized(device, bound, n as u64, payload, Target { scale: 1.0, out: out.span() }, workspace.span()).unwrap();
    // One byte less than it says: nothing.
    let (short, zeros) = (payload.part(0, payload.bytes().saturating_sub(1)), Memory::of(&vec![0.0f32; n]));
    let called = add_sized(device, bound, n as u64, short, Target { scale: 1.0, out: zeros.span() }, workspace.span());
    assert!(n == 0 || called.is_err() || zeros.f32s().iter().all(|x| *x == 0.0));
}

/// Two steps with error feedback, and the first one's message decoded.
pub fn check(
    device: &Emulated,
    (method, name): (Quantizer, &str),
    (dtype, source): (DType, &Memory),
    cpu: Gradient<'_>,
    n: usize,
) {
    let strategy = format!("{name}+ef(vanilla)").parse().unwrap();
    let mut rank = Pipeline::new(&strategy, Layers::fused(n).unwrap(), Member::alone(SEED)).as_on_device();
    let mut memory = Memory::of(&vec![0.0f32; n]);
    for step in 0..2 {
        let mut message = Writer::new();
        let want = rank.compress(cpu, Step { index: step, learning_rate: 0.1 }, &mut message).unwrap();
        let header = 32 + 8 * usize::from(message.bytes()[7]);
        let (compensated, payload) = (Memory::new(4 * n as u64), Memory::new(method.payload_bytes(n as u64)));
        let workspace = Memory::new(workspace_bytes(n as u64));
        let random = Random { seed: SEED, step, tensor: 0, rank: Some(0) };
        let feedback = feedback((n, dtype), source, memory.span(), &compensated);
        quantize(device, &feedback, method, random, payload.span(), workspace.span()).unwrap();
        let sent = message.bytes().len() - header;
        assert_eq!(payload.bytes()[..sent], message.bytes()[header..], "{name} of {n}, step {step}");
        assert_eq!(bits(&compensated.f32s()), bits(&rank.residual().to_vec()), "{name} of {n}, step {step}");
        let outcome = workspace.outcome();
        assert_eq!((outcome.bytes, outcome.refused), (sent as u64, false), "{name} of {n}");
        let close = |a: f64, b: f64| (a - b).abs() <= 1e-6 * b.abs() + 1e-300;
        assert!(
            (outcome.compensated - want.energy.compensated).abs() <= 1e-12 * want.energy.compensated,
            "{name}: {outcome:?}"
        );
        assert!(close(outcome.sent, want.energy.sent), "{name} of {n}: {outcome:?}, {want:?}");
        let counted = Energy { sent: (outcome.compensated - outcome.residual).max(0.0), ..outcome.energy() };
        let gain = rank.counted(want.energy).gain();
        assert!((counted.gain() - gain).abs() < 1e-6, "{name} of {n}: {outcome:?}, {gain}");
        let (out, mut mean) = (Memory::of(&vec![0.0f32; n]), vec![0.0; n]);
        let offset = step as usize * (1 + n % 7);
        decode(device, (method, n), (payload.span().part(0, sent as u64), offset), &out);
        if !name.starts_with("signsgd") {
            rank.aggregate(&[message.bytes()], step, &mut mean).unwrap();
            assert_eq!(bits(&out.f32s()), bits(&mean), "{name} of {n}");
        }
        memory = compensated;
    }
}

#[test]
fn two_steps_are_the_cpus_bit_for_bit() {
    for (at, n) in lengths().into_iter().enumerate().filter(|(_, n)| *n < 20_000) {
        for (what, gradient) in gradients(n) {
            // Squares of the largest magnitudes are not what is looked at here.
            println!("{what} of {n}");
            for method in methods() {
                let Some(device) = Emulated::new(at as u64) else { return };
                check(&device, method, (DType::F32, &Memory::of(&gradient)), Gradient::F32(&gradient), n);
            }
        }
    }
}

/// Means of columns are sums in the CPU's order.
#[test]
fn columns_have_means_of_their_own() {
    for (at, (rows, cols)) in [(1usize, 7usize), (300, 33), (5, 1000), (40, 256)].into_iter().enumerate() {
        let Some(device) = Emulated::new(at as u64) else { return };
        for (what, gradient) in gradients(rows * cols) {
            let strategy = "onebitsgd(per=column)+ef(vanilla)".parse().unwrap();
            let layers = Layers::matrices(&[Shape { rows, cols }]).unwrap();
            let mut rank = Pipeline::new(&strategy, layers, Member::alone(SEED));
            let mut message = Writer::new();
            let step = Step { index: 0, learning_rate: 0.1 };
            rank.compress(Gradient::F32(&gradient), step, &mut message).unwrap();
            let header = 32 + 8 * usize::from(message.bytes()[7]);
            let n = rows * cols;
            let method = Quantizer::OneBitSgd { threshold: 0.0, columns: cols as u32 };
            let (source, zeros) = (Memory::of(&gradient), Memory::of(&vec![0.0f32; n]));
            let (compensated, payload) = (Memory::new(4 * n as u64), Memory::new(method.payload_bytes(n as u64)));
            let workspace = Memory::new(workspace_bytes(n as u64));
            let random = Random { seed: SEED, step: 0, tensor: 0, rank: Some(0) };
            let feedback = feedback((n, DType::F32), &source, zeros.span(), &compensated);
            quantize(&device, &feedback, method, random, payload.span(), workspace.span()).unwrap();
            assert_eq!(payload.bytes(), message.bytes()[header..], "{what}: {rows} x {cols}");
            assert_eq!(bits(&compensated.f32s()), bits(&rank.residual().to_vec()), "{what}: {rows} x {cols}");
        }
    }
}

#[test]
fn halves_are_widened_as_on_the_cpu() {
    let n = 3001;
    for (at, (_, gradient)) in gradients(n).into_iter().enumerate() {
        let Some(device) = Emulated::new(at as u64) else { return };
        let small: Vec<u16> = gradient.iter().map(|x| f16::from_f32(x.clamp(-65504.0, 65504.0)).to_bits()).collect();
        let brain: Vec<u16> = gradient.iter().map(|x| bf16::from_f32(*x * 0.5).to_bits()).collect();
        for method in methods() {
            check(&device, method, (DType::F16, &Memory::of(&small)), Gradient::F16(&small), n);
            check(&device, method, (DType::Bf16, &Memory::of(&brain)), Gradient::Bf16(&brain), n);
        }
    }
}

/// Every pattern of a half, and every f32 next to the middle between two halves.
#[test]
fn halves_are_rounded_as_on_the_cpu() {
    let middles = (0..=0x7bffu16).flat_map(|i| {
        let (low, high) = (f16::from_bits(i).to_f32(), f16::from_bits(i + 1).to_f32().min(65504.0));
        let middle = (low + high) / 2.0;
        [low, middle, f32::from_bits(middle.to_bits().wrapping_sub(1)), f32::from_bits(middle.to_bits() + 1)]
    });
    let gradient: Vec<f32> = middles.flat_map(|x| [x.max(0.0), -x]).collect();
    for world in [1, 3, 1000] {
        let Some(device) = Emulated::new(3) else { return };
        for (method, name) in [(Quantizer::F16 { world }, "fp16"), (Quantizer::Bf16 { world }, "bf16")] {
            let strategy = format!("{name}+ef(vanilla)").parse().unwrap();
            let member = Member { world, ..Member::alone(SEED) };
            let mut rank = Pipeline::new(&strategy, Layers::fused(gradient.len()).unwrap(), member);
            let mut message = Writer::new();
            rank.compress(Gradient::F32(&gradient), Step { index: 0, learning_rate: 0.1 }, &mut message).unwrap();
            let (source, n) = (Memory::of(&gradient), gradient.len());
            let (compensated, payload) = (Memory::new(4 * n as u64), Memory::new(2 * n as u64));
            let (workspace, zeros) = (Memory::new(workspace_bytes(n as u64)), Memory::of(&vec![0.0f32; n]));
            let random = Random { seed: SEED, step: 0, tensor: 0, rank: Some(0) };
            let feedback = feedback((n, DType::F32), &source, zeros.span(), &compensated);
            quantize(&device, &feedback, method, random, payload.span(), workspace.span()).unwrap();
            assert!(payload.bytes() == message.bytes()[32..], "{name} for {world}");
            assert_eq!(bits(&compensated.f32s()), bits(&rank.residual().to_vec()));
        }
    }
}

#[test]
fn what_is_not_finite_leaves_the_memory_and_sends_zeros() {
    let n = 2500;
    let (_, before) = gradients(n).swap_remove(0);
    let mut gradient = before.clone();
    gradient[2222] = f32::NAN;
    for (at, (method, name)) in methods().into_iter().enumerate() {
        let Some(device) = Emulated::new(at as u64) else { return };
        let (source, memory, compensated) = (Memory::of(&gradient), Memory::of(&before), Memory::new(4 * n as u64));
        let (payload, workspace) =
            (Memory::new(method.payload_bytes(n as u64)), Memory::new(workspace_bytes(n as u64)));
        let random = Random { seed: SEED, step: 0, tensor: 0, rank: Some(0) };
        let feedback = feedback((n, DType::F32), &source, memory.span(), &compensated);
        quantize(&device, &feedback, method, random, payload.span(), workspace.span()).unwrap();
        assert!(workspace.outcome().refused, "{name}");
        assert_eq!(compensated.bytes(), memory.bytes(), "{name}");
        if method == Quantizer::Signs {
            continue;
        }
        let out = Memory::of(&vec![0.0f32; n]);
        decode(&device, (method, n), (payload.span(), 0), &out);
        assert!(out.f32s().iter().all(|x| *x == 0.0), "{name}");
    }
}

#[test]
fn votes_are_the_cpus() {
    for (at, n) in lengths().into_iter().enumerate() {
        for ranks in [1usize, 2, 5] {
            let Some(device) = Emulated::new(at as u64) else { return };
            let strategy = "signsgd".parse().unwrap();
            let messages: Vec<Vec<u8>> = (0..ranks)
                .map(|r| {
                    let (_, gradient) = gradients(n).swap_remove(r);
                    let mut rank = Pipeline::new(&strategy, Layers::fused(n).unwrap(), Member::alone(1));
                    let mut message = Writer::new();
                    let step = Step { index: 0, learning_rate: 0.1 };
                    rank.compress(Gradient::F32(&gradient), step, &mut message).unwrap();
                    message.bytes().to_vec()
                })
                .collect();
            let mut want = vec![0.0; n];
            let mut rank = Pipeline::new(&strategy, Layers::fused(n).unwrap(), Member::alone(1));
            rank.aggregate(&messages.iter().map(Vec::as_slice).collect::<Vec<_>>(), 0, &mut want).unwrap();
            // Messages as they were gathered: the votes lie behind the headers.
            let (stride, all) = (messages[0].len() as u64, Memory::of(&messages.concat()));
            // SAFETY: a part of the buffer above.
            let votes = unsafe { Span::new(all.span().address() + 32, all.span().bytes() - 32) };
            let out = Memory::new(4 * n as u64);
            majority(&device, n as u64, votes, stride, ranks as u32, out.span()).unwrap();
            assert_eq!(out.f32s(), want);
        }
    }
}
