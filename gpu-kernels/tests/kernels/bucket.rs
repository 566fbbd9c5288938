//! A bucket over many steps, its method changing, against the CPU side's pipeline.

use crate::data::gradients;
use crate::emulated::{Emulated, Memory};
use flexcomm_compression::pipeline::{Gradient as CpuGradient, Member, Pipeline, Step};
use flexcomm_compression::wire::Writer;
use flexcomm_compression::{
    Checksum, GradientCompressor, Layers, Message, Method as CpuMethod, Part, aggregate, encode,
};
use flexcomm_domain::{CompressionRatio, Compressor};
use flexcomm_gpu_kernels::bucket::{Bucket, Gradient, Method};
use flexcomm_gpu_kernels::hybrid::Qsparse;
use flexcomm_gpu_kernels::{
    At, DType, Device, LaunchError, Norm, Outcome, Quantizer, Random, Selected, Span, Threshold, add_mean,
};
use half::bf16;

const SEED: u64 = 12;

fn random(step: u64) -> Random {
    Random { seed: SEED, step, tensor: 0, rank: Some(0) }
}

fn methods(step: u64) -> Vec<(&'static str, Method)> {
    let random = random(step);
    vec![
        ("topk(k=70)", Method::TopK(70)),
        ("signsgd", Method::Quantize(Quantizer::Signs, random)),
        ("qsgd(s=4)", Method::Quantize(Quantizer::Qsgd { s: 4, bucket: 512, norm: Norm::L2 }, random)),
        ("mstopk(k=40)", Method::Threshold(Threshold::MsTopK { k: 40, random })),
        ("hardthreshold(tau=0.5)", Method::HardThreshold(0.5)),
        ("qsparse(k=55)", Method::Qsparse(55, Qsparse::Levels { s: 15, scaled: true, random })),
        ("inceptionn", Method::Quantize(Quantizer::Inceptionn { bound: 10 }, random)),
        ("threshold(v=0.5)", Method::Threshold(Threshold::Above { v: 0.5 })),
        ("dgc(k=30)", Method::Threshold(Threshold::Dgc { k: 30, sample: 0.01, most: 1.3, random })),
    ]
}

/// What lies there, through a copy of its own.
fn read(device: &Emulated, from: Span) -> Vec<u8> {
    let to = Memory::new(from.bytes());
    device.copy(to.span(), from).unwrap();
    to.bytes()
}

#[test]
fn what_is_held_back_goes_on_through_every_method() {
    for n in [3001usize, 4096] {
        let Some(device) = Emulated::new(n as u64) else { return };
        let all: Vec<Method> = methods(0).into_iter().map(|(_, method)| method).collect();
        let lent = Memory::new(Bucket::bytes(n as u64, &all).unwrap());
        let mut bucket = Bucket::new(&device, (n as u64, &all), lent.span()).unwrap();
        let first = "topk(k=70)+ef(vanilla)".parse().unwrap();
        let mut cpu = Pipeline::new(&first, Layers::fused(n).unwrap(), Member::alone(SEED));
        let (_, values) = gradients(n).swap_remove(0);
        let halves: Vec<u16> = values.iter().map(|x| bf16::from_f32(*x).to_bits()).collect();
        for index in 0..18u64 {
            let (name, method) = methods(index)[index as usize % 9];
            let mut message = Writer::new();
            let step = Step { index, learning_rate: 0.1 };
            cpu.change(&format!("{name}+ef(vanilla)").parse().unwrap());
            // Gradients of both types, in turns.
            let (source, dtype, given) = match index % 2 {
                0 => (Memory::of(&values), DType::F32, CpuGradient::F32(&values)),
                _ => (Memory::of(&halves), DType::Bf16, CpuGradient::Bf16(&halves)),
            };
            cpu.compress(given, step, &mut message).unwrap();
            let gradient = Gradient { at: source.span(), dtype, weights: (1.0, 1.0) };
            let payload = bucket.step(&device, gradient, method).unwrap();
            let outcome = Outcome::read(read(&device, bucket.outcome())[..].try_into().unwrap());
            let sent = read(&device, payload.part(0, outcome.bytes));
            let header = 32 + 8 * usize::from(message.bytes()[7]);
            assert_eq!(sent, message.bytes()[header..], "step {index}: {name} of {n}");
            let held: Vec<u8> = cpu.held_back().iter().flat_map(|x| x.to_le_bytes()).collect();
            assert_eq!(read(&device, bucket.held_back()), held, "step {index}: {name} of {n}");
        }
        // Guards around what was lent.
        drop(lent.bytes());
    }
}

#[test]
fn what_fails_leaves_the_memory_of_the_step_before() {
    let Some(device) = Emulated::new(1) else { return };
    let n = 1000u64;
    let methods = [Method::TopK(10)];
    let short = Memory::new(1000);
    let error = Bucket::new(&device, (n, &methods), short.span()).unwrap_err().to_string();
    assert!(error.contains("the bucket's memory of 1000 bytes") && error.contains("are needed"), "{error}");
    let lent = Memory::new(Bucket::bytes(n, &methods).unwrap());
    let mut bucket = Bucket::new(&device, (n, &methods), lent.span()).unwrap();
    let (_, values) = gradients(n as usize).swap_remove(0);
    let source = Memory::of(&values);
    let gradient = Gradient { at: source.span(), dtype: DType::F32, weights: (1.0, 1.0) };
    bucket.step(&device, gradient, Method::TopK(10)).unwrap();
    let before = (bucket.held_back(), read(&device, bucket.held_back()));
    // More than it was made for, a k of nothing, a gradient that is too short.
    let wide = bucket.step(&device, gradient, Method::Quantize(Quantizer::F16 { world: 1 }, random(1))).unwrap_err();
    assert!(matches!(wide, LaunchError::TooSmall { what: "the payload", .. }), "{wide}");
    assert!(bucket.step(&device, gradient, Method::TopK(0)).is_err());
    let few = Gradient { at: source.span().part(0, 400), ..gradient };
    assert!(bucket.step(&device, few, Method::TopK(10)).is_err());
    assert_eq!((bucket.held_back(), read(&device, bucket.held_back())), before);
    assert!(matches!(Bucket::bytes(1 << 31, &methods), Err(LaunchError::TooLong(_))));
}

/// Messages of version 1 are made in the caller's block, at any word, and their mean is the CPU's; a step that does not count
/// leaves what was held back.
#[test]
fn selected_values_are_messages_and_add_up_to_the_cpus_mean() {
    let (n, world) = (3001usize, 3u32);
    let Some(device) = Emulated::new(n as u64) else { return };
    let method = CpuMethod::new(Compressor::TopK, CompressionRatio::new(0.05).unwrap());
    let k = method.kept(&Layers::fused(n).unwrap()) as u64;
    let front = 40;
    let (mut sent, mut messages) = (Memory::of(&[0u8; 0]), Vec::new());
    let blocks: Vec<Memory> = (0..world).map(|_| Memory::of(&vec![0u8; front + 8 * k as usize])).collect();
    for (rank, block) in blocks.iter().enumerate() {
        let lent = Memory::new(Bucket::bytes(n as u64, &[]).unwrap());
        let mut bucket = Bucket::new(&device, (n as u64, &[]), lent.span()).unwrap();
        let mut cpu = GradientCompressor::new(Layers::fused(n).unwrap());
        let lists = block.span().part(front as u64, 8 * k);
        let to = Selected { indices: lists.part(0, 4 * k), values: lists.part(4 * k, 4 * k), room: k };
        for step in 0..3 {
            let (_, values) = gradients(n).swap_remove((rank + step) % 2);
            let source = Memory::of(&values);
            let gradient = Gradient { at: source.span(), dtype: DType::F32, weights: (1.0, 1.0) };
            let before = read(&device, bucket.held_back());
            bucket.select(&device, gradient, (Method::TopK(k), &to)).unwrap();
            bucket.put_back();
            assert_eq!(read(&device, bucket.held_back()), before);
            bucket.select(&device, gradient, (Method::TopK(k), &to)).unwrap();
            bucket.mark(&device, block.span().part(4, 1), 2).unwrap();
            let picked = cpu.compress(method, &values, 0).unwrap();
            let mut message = Vec::new();
            encode(Compressor::TopK, picked.selection, Part::Whole, Checksum::None, &mut message);
            assert_eq!(block.bytes()[front..], message[32..]);
            let held: Vec<u8> = cpu.residual().iter().flat_map(|x| x.to_le_bytes()).collect();
            assert_eq!(read(&device, bucket.held_back()), held);
            sent = Memory::of(&message);
        }
        assert_eq!(block.bytes()[4], 0);
        messages.push(sent.bytes());
    }
    let out = Memory::of(&vec![0f32; n]);
    for block in &blocks {
        let lists = block.span().part(front as u64, 8 * k);
        let at = At { k, indices: lists.part(0, 4 * k), values: lists.part(4 * k, 4 * k) };
        add_mean(&device, &at, (n as u64, out.span()), world).unwrap();
    }
    let parsed: Vec<Message<'_>> = messages.iter().map(|m| Message::parse(m).unwrap()).collect();
    let mut want = vec![0f32; n];
    aggregate(&parsed, world as usize, &mut want).unwrap();
    assert_eq!(
        out.f32s().iter().map(|x| x.to_bits()).collect::<Vec<_>>(),
        want.iter().map(|x| x.to_bits()).collect::<Vec<_>>()
    );
}

#[test]
fn a_refused_gradient_says_so_in_its_message() {
    let Some(device) = Emulated::new(2) else { return };
    let lent = Memory::new(Bucket::bytes(100, &[]).unwrap());
    let mut bucket = Bucket::new(&device, (100, &[]), lent.span()).unwrap();
    let (block, mut values) = (Memory::of(&[1u8; 48]), vec![1f32; 100]);
    let to = Selected { indices: block.span().part(8, 20), values: block.span().part(28, 20), room: 5 };
    values[7] = f32::NAN;
    let source = Memory::of(&values);
    let gradient = Gradient { at: source.span(), dtype: DType::F32, weights: (1.0, 1.0) };
    bucket.select(&device, gradient, (Method::TopK(5), &to)).unwrap();
    bucket.mark(&device, block.span().part(4, 1), 2).unwrap();
    assert_eq!(block.bytes()[..8], [1, 1, 1, 1, 3, 1, 1, 1]);
    let packed = bucket.select(&device, gradient, (Method::Quantize(Quantizer::Signs, random(0)), &to)).unwrap_err();
    assert!(packed.to_string().contains("send values as they are"), "{packed}");
}
