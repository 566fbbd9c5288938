//! A bucket that is compressed as one layer over many steps, against the CPU side's pipeline.

use crate::data::gradients;
use crate::emulated::{Emulated, Memory};
use flexcomm_compression::pipeline::{Gradient as CpuGradient, Member, Pipeline, Step};
use flexcomm_compression::wire::Writer;
use flexcomm_compression::{Layers as CpuLayers, naive};
use flexcomm_gpu_kernels::bucket::{Gradient, Layers, Method};
use flexcomm_gpu_kernels::hybrid::Qsparse;
use flexcomm_gpu_kernels::{
    Copies, DType, Device, LaunchError, Norm, Outcome, Quantizer, Random, RandomK, Span, Threshold,
};
use half::bf16;

const SEED: u64 = 12;

fn random(step: u64) -> Random {
    Random { seed: SEED, step, tensor: 0, rank: Some(0) }
}

fn methods(step: u64) -> Vec<(&'static str, Method)> {
    let random = random(step);
    let (shared, levels) = (Random { rank: None, ..random }, Qsparse::Levels { s: 15, scaled: true, random });
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
        ("randomk(k=66)", Method::RandomK(RandomK { k: 66, scaled: false, random: shared })),
        ("threelc(s=1.75)", Method::ThreeLc(1.75)),
        ("randomk(k=2900,scaled=true)", Method::RandomK(RandomK { k: 2900, scaled: true, random: shared })),
        ("randomk(k=33,shared=false)", Method::RandomK(RandomK { k: 33, scaled: false, random })),
        (
            "qsparse(k=44,select=random)",
            Method::QsparseRandom(levels, RandomK { k: 44, scaled: false, random: shared }),
        ),
    ]
}

/// What lies there, through a copy of its own.
pub fn read(device: &Emulated, from: Span) -> Vec<u8> {
    let to = Memory::new(from.bytes());
    device.copy(to.span(), from).unwrap();
    to.bytes()
}

/// One layer of n values with its memory.
fn bucket(device: &Emulated, n: u64, method: Method) -> (Memory, Layers) {
    let borrowed = Memory::new(Layers::bytes(&[n], &[method]).unwrap());
    let layers = Layers::new(device, &[n], &[method], borrowed.span()).unwrap();
    (borrowed, layers)
}

fn residual(layers: &Layers) -> Span {
    layers.residual().next().unwrap()
}

fn outcome(device: &Emulated, layers: &Layers) -> Outcome {
    Outcome::read(read(device, layers.outcomes())[..48].try_into().unwrap())
}

/// Each method begins with the residual that the one before has left on the host, and keeps its own over its steps.
#[test]
fn the_residual_is_the_hosts_over_the_steps_of_every_method() {
    for n in [3001usize, 4096] {
        let Some(device) = Emulated::new(n as u64) else { return };
        let first = "topk(k=70)+ef(vanilla)".parse().unwrap();
        let mut cpu = Pipeline::new(&first, CpuLayers::fused(n).unwrap(), Member::alone(SEED)).as_on_device();
        let (_, values) = gradients(n).swap_remove(0);
        let halves: Vec<u16> = values.iter().map(|x| bf16::from_f32(*x).to_bits()).collect();
        let mut before = vec![0u8; 4 * n];
        for number in 0..methods(0).len() {
            let (name, method) = methods(0)[number];
            cpu.change(&format!("{name}+ef(vanilla)").parse().unwrap());
            let (borrowed, mut bucket) = bucket(&device, n as u64, method);
            device.upload(residual(&bucket), &before).unwrap();
            for index in 0..3 {
                let mut message = Writer::new();
                let step = Step { index, learning_rate: 0.1 };
                // Gradients of both types, in turns.
                let (source, dtype, given) = match index % 2 {
                    0 => (Memory::of(&values), DType::F32, CpuGradient::F32(&values)),
                    _ => (Memory::of(&halves), DType::Bf16, CpuGradient::Bf16(&halves)),
                };
                cpu.compress(given, step, &mut message).unwrap();
                let gradient = Gradient { at: source.span(), dtype, weights: (1.0, 1.0) };
                bucket.step(&device, gradient, true, &[methods(index)[number].1]).unwrap();
                let sent = read(&device, bucket.payloads().part(0, outcome(&device, &bucket).bytes));
                let header = 32 + 8 * usize::from(message.bytes()[7]);
                assert_eq!(sent, message.bytes()[header..], "step {index}: {name} of {n}");
                before = cpu.residual().iter().flat_map(|x| x.to_le_bytes()).collect();
                assert_eq!(read(&device, residual(&bucket)), before, "step {index}: {name} of {n}");
            }
            // Guards around what was borrowed.
            drop(borrowed.bytes());
        }
    }
}

/// Without error feedback nothing is added, the residual stays, and zeros keep their signs.
#[test]
fn a_strategy_without_a_memory_sends_the_gradient_alone() {
    let n = 3001usize;
    let Some(device) = Emulated::new(5) else { return };
    let before = gradients(n).swap_remove(0).1.iter().flat_map(|x| x.to_le_bytes()).collect::<Vec<u8>>();
    for (index, (name, method)) in (0..).zip(methods(0)).map(|(i, _)| (i as u64, methods(i as u64).swap_remove(i))) {
        let mut values = gradients(n).swap_remove(index as usize % 2).1;
        values[..9].fill(-0.0);
        let mut cpu = Pipeline::new(&name.parse().unwrap(), CpuLayers::fused(n).unwrap(), Member::alone(SEED));
        let mut message = Writer::new();
        cpu.compress(CpuGradient::F32(&values), Step { index, learning_rate: 0.1 }, &mut message).unwrap();
        let source = Memory::of(&values);
        let gradient = Gradient { at: source.span(), dtype: DType::F32, weights: (1.0, 1.0) };
        let (borrowed, mut bucket) = bucket(&device, n as u64, method);
        device.upload(residual(&bucket), &before).unwrap();
        bucket.step(&device, gradient, false, &[method]).unwrap();
        let sent = read(&device, bucket.payloads().part(0, outcome(&device, &bucket).bytes));
        let header = 32 + 8 * usize::from(message.bytes()[7]);
        assert_eq!(sent, message.bytes()[header..], "{name}");
        assert_eq!(read(&device, residual(&bucket)), before, "{name}");
        drop(borrowed.bytes());
    }
}

/// AR-Topk, whose leader changes and bids change hands: values, memories and energies are the CPU's, bit for bit; a step
/// that does not count leaves the residual.
#[test]
fn agreed_indices_take_what_the_cpu_takes() {
    let (n, k, world) = (3001usize, 150u64, 3usize);
    let Some(device) = Emulated::new(n as u64) else { return };
    let (borrowed, mut ranks): (Vec<Memory>, Vec<Layers>) =
        (0..world).map(|_| bucket(&device, n as u64, Method::TopK(k))).unzip();
    let strategy = format!("topk(k={k})+ef(vanilla)").parse().unwrap();
    let member = |rank| Member { rank, world: world as u32, ..Member::alone(SEED) };
    let mut cpus: Vec<Pipeline> =
        (0..world as u32).map(|rank| Pipeline::new(&strategy, CpuLayers::fused(n).unwrap(), member(rank))).collect();
    for step in 0..6usize {
        // Ranks take turns, as on the CPU side.
        let leader = step % world;
        // In half of the steps all ranks select, as when they bid.
        let bid = step % 2 == 0;
        let mut gradients: Vec<Vec<f32>> =
            (0..world).map(|rank| gradients(n).swap_remove((rank + step) % 2).1).collect();
        // Values that nobody takes keep the sign of zero.
        gradients.iter_mut().for_each(|gradient| gradient[40..50].fill(-0.0));
        let mut proposed = Writer::new();
        for (rank, (cpu, gradient)) in cpus.iter_mut().zip(&gradients).enumerate() {
            let at = Step { index: step as u64, learning_rate: 0.1 };
            cpu.select(CpuGradient::F32(gradient), at, bid || rank == leader).unwrap();
            if rank == leader {
                cpu.write_indices(&mut proposed).unwrap();
            }
        }
        let chosen = cpus[leader].selected().to_vec();
        for rank in 0..world {
            let source = Memory::of(&gradients[rank]);
            let gradient = Gradient { at: source.span(), dtype: DType::F32, weights: (1.0, 1.0) };
            let before = read(&device, residual(&ranks[rank]));
            let chooses = bid || rank == leader;
            ranks[rank].choose(&device, gradient, chooses.then_some(k)).unwrap();
            if chooses {
                let residual = before.as_chunks::<4>().0.iter().map(|bytes| f32::from_le_bytes(*bytes));
                let compensated: Vec<f32> =
                    residual.zip(&gradients[rank]).map(|(residual, own)| residual + own).collect();
                let selected = naive::topk(&compensated, k as usize);
                let energy: f64 = selected.iter().map(|i| f64::from(compensated[*i as usize]).powi(2)).sum();
                assert!((outcome(&device, &ranks[rank]).sent - energy).abs() <= 1e-12 * energy);
                let bytes: Vec<u8> = selected.iter().flat_map(|i| i.to_le_bytes()).collect();
                assert_eq!(read(&device, ranks[rank].lists(k).unwrap().indices), bytes);
                assert!(rank != leader || selected == chosen);
            }
            assert_eq!(read(&device, residual(&ranks[rank])), before, "nothing counts as sent");
        }
        let agreed: Vec<u8> = chosen.iter().flat_map(|index| index.to_le_bytes()).collect();
        for rank in 0..world {
            let (before, lists) = (read(&device, residual(&ranks[rank])), ranks[rank].lists(k).unwrap());
            device.upload(lists.indices, &agreed).unwrap();
            ranks[rank].take_at(&device, k).unwrap();
            let mut own = Vec::new();
            cpus[rank].agree(proposed.bytes(), step as u64).unwrap();
            let energy = cpus[rank].take(&mut own).unwrap();
            let own: Vec<u8> = own.iter().flat_map(|x| x.to_le_bytes()).collect();
            assert_eq!(read(&device, lists.values), own, "rank {rank}, step {step}");
            let left: Vec<u8> = cpus[rank].residual().iter().flat_map(|x| x.to_le_bytes()).collect();
            assert_eq!(read(&device, residual(&ranks[rank])), left, "rank {rank}, step {step}");
            let outcome = outcome(&device, &ranks[rank]);
            let close = |a: f64, b: f64| (a - b).abs() <= 1e-12 * b;
            assert!(
                close(outcome.sent, energy.sent) && close(outcome.compensated, energy.compensated),
                "{outcome:?} {energy:?}"
            );
            ranks[rank].put_back();
            assert_eq!(read(&device, residual(&ranks[rank])), before);
            ranks[rank].put_back();
            assert_eq!(ranks[rank].take_at(&device, k), Err(LaunchError::Order("gather")));
        }
    }
    borrowed.iter().for_each(|borrowed| drop(borrowed.bytes()));
}

/// One that was refused takes part with zeros and keeps its residual, whether it was to lead or not.
#[test]
fn a_refused_gradient_takes_zeros_at_agreed_indices() {
    let Some(device) = Emulated::new(2) else { return };
    let n = 1000u64;
    let (_borrowed, mut bucket) = bucket(&device, n, Method::TopK(10));
    let (_, mut values) = gradients(n as usize).swap_remove(0);
    let before: Vec<u8> = values.iter().flat_map(|x| x.to_le_bytes()).collect();
    device.upload(residual(&bucket), &before).unwrap();
    values[999] = f32::INFINITY;
    let (source, lists) = (Memory::of(&values), bucket.lists(3).unwrap());
    let gradient = Gradient { at: source.span(), dtype: DType::F32, weights: (1.0, 1.0) };
    for lead in [Some(10), None] {
        bucket.choose(&device, gradient, lead).unwrap();
        device.upload(lists.indices, [5u32, 6, 999].map(u32::to_le_bytes).as_flattened()).unwrap();
        bucket.take_at(&device, 3).unwrap();
        assert_eq!((read(&device, lists.values), read(&device, residual(&bucket))), (vec![0; 12], before.clone()));
        assert!(outcome(&device, &bucket).refused);
    }
}

/// A device whose copies fail.
struct Uncopied<'a>(&'a Emulated);

impl Device for Uncopied<'_> {
    fn launch(&self, kernel: &'static str, blocks: u32, arguments: &[u64]) -> Result<(), LaunchError> {
        self.0.launch(kernel, blocks, arguments)
    }

    fn zero(&self, span: Span) -> Result<(), LaunchError> {
        self.0.zero(span)
    }

    fn copy(&self, _: Span, _: Span) -> Result<(), LaunchError> {
        Err(LaunchError::Driver { kernel: "memcpy", code: "refused".into() })
    }

    fn blocks(&self, kernel: &'static str) -> u32 {
        self.0.blocks(kernel)
    }
}

#[test]
fn a_copy_that_fails_leaves_the_residual_of_the_step_before() {
    let Some(device) = Emulated::new(2) else { return };
    let (n, k) = (1000u64, 10);
    let (_borrowed, mut bucket) = bucket(&device, n, Method::TopK(k));
    let (_, values) = gradients(n as usize).swap_remove(0);
    let before: Vec<u8> = values.iter().flat_map(|x| x.to_le_bytes()).collect();
    device.upload(residual(&bucket), &before).unwrap();
    let source = Memory::of(&values);
    let gradient = Gradient { at: source.span(), dtype: DType::F32, weights: (1.0, 1.0) };
    bucket.choose(&Uncopied(&device), gradient, Some(k)).unwrap_err();
    assert_eq!(bucket.take_at(&device, k), Err(LaunchError::Order("gather")), "nothing was chosen");
    bucket.choose(&device, gradient, Some(k)).unwrap();
    bucket.take_at(&Uncopied(&device), k).unwrap_err();
    assert_eq!(read(&device, residual(&bucket)), before);
}

#[test]
fn what_fails_leaves_the_memory_of_the_step_before() {
    let Some(device) = Emulated::new(1) else { return };
    let n = 1000u64;
    let methods = [Method::TopK(10)];
    let short = Memory::new(1000);
    let error = Layers::new(&device, &[n], &methods, short.span()).unwrap_err().to_string();
    assert!(error.contains("the bucket's memory of 1000 bytes") && error.contains("are needed"), "{error}");
    let (_borrowed, mut bucket) = bucket(&device, n, methods[0]);
    let (_, values) = gradients(n as usize).swap_remove(0);
    let source = Memory::of(&values);
    let gradient = Gradient { at: source.span(), dtype: DType::F32, weights: (1.0, 1.0) };
    bucket.step(&device, gradient, true, &methods).unwrap();
    let before = (residual(&bucket), read(&device, residual(&bucket)));
    // More than it was made for, a k of nothing, a gradient that is too short.
    let wide = Method::Quantize(Quantizer::F16 { world: 1 }, random(1));
    let wide = bucket.step(&device, gradient, true, &[wide]).unwrap_err();
    assert!(matches!(wide, LaunchError::TooSmall { what: "the payload", .. }), "{wide}");
    assert!(bucket.step(&device, gradient, true, &[Method::TopK(0)]).is_err());
    let few = Gradient { at: source.span().part(0, 400), ..gradient };
    assert!(bucket.step(&device, few, true, &methods).is_err());
    assert_eq!((residual(&bucket), read(&device, residual(&bucket))), before);
    assert!(matches!(Layers::bytes(&[1 << 31], &methods), Err(LaunchError::TooLong(_))));
}
