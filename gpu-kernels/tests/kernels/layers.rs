//! A bucket of several layers, at any places, against the CPU side's pipeline: methods whose scope is the tensor.

use crate::bucket::read;
use crate::data::gradients;
use crate::emulated::{Emulated, Memory};
use flexcomm_compression::pipeline::{Gradient as CpuGradient, Member, Pipeline, Step};
use flexcomm_compression::wire::Writer;
use flexcomm_compression::{Energy, Layers as CpuLayers};
use flexcomm_gpu_kernels::bucket::{Gradient, Layers, Method};
use flexcomm_gpu_kernels::{DType, Device, LaunchError, Norm, Outcome, Quantizer, Random, RandomK, Span};
use half::f16;

const SEED: u64 = 12;

/// Lengths of which no layer but the first begins at a multiple of 16 bytes.
const LENGTHS: [u64; 4] = [301, 4096, 1, 2999];

type Make = fn(u64, Random) -> Method;

/// Of `k=0.1`.
fn kept(n: u64) -> u64 {
    ((n as f64 * 0.1).round() as u64).max(1)
}

/// Of a layer of n values with these random numbers.
fn by_layer() -> Vec<(&'static str, Make)> {
    let quantized: Vec<(&'static str, Make)> = vec![
        ("qsgd(s=4)", |_, r| Method::Quantize(Quantizer::Qsgd { s: 4, bucket: 512, norm: Norm::L2 }, r)),
        ("terngrad", |_, r| Method::Quantize(Quantizer::TernGrad { clip: 0.0 }, r)),
        ("efsignsgd", |_, r| Method::Quantize(Quantizer::ScaledSigns, r)),
        ("eightbit", |_, r| Method::Quantize(Quantizer::EightBit { fixed: false }, r)),
        ("minmax8", |_, r| Method::Quantize(Quantizer::MinMax8, r)),
        ("natural+scope(tensor)", |_, r| Method::Quantize(Quantizer::Natural, r)),
        ("inceptionn+scope(tensor)", |_, r| Method::Quantize(Quantizer::Inceptionn { bound: 10 }, r)),
    ];
    let others: [(&'static str, Make); 4] = [
        ("threelc(s=1)", |_, _| Method::ThreeLc(1.0)),
        ("lwtopk(k=0.1)", |n, _| Method::TopK(kept(n))),
        ("randomk(k=0.1)+scope(tensor)", |n, r| {
            let random = Random { rank: None, ..r };
            Method::RandomK(RandomK { k: kept(n), scaled: false, random })
        }),
        ("randomk(k=0.1,shared=false)+scope(tensor)", |n, random| {
            Method::RandomK(RandomK { k: kept(n), scaled: false, random })
        }),
    ];
    quantized.into_iter().chain(others).collect()
}

/// With error feedback, behind the compressor's name.
fn fed_back(text: &str) -> String {
    match text.split_once("+scope") {
        Some((name, scope)) => format!("{name}+ef(vanilla)+scope{scope}"),
        None => format!("{text}+ef(vanilla)"),
    }
}

/// A step of a single layer, whose payload goes where all ranks' are gathered.
pub fn step_to(device: &Emulated, layers: &mut Layers, gradient: Gradient, (method, to): (Method, Span)) {
    layers.step(device, gradient, true, &[method]).unwrap();
    device.copy(to, layers.payloads().part(0, to.bytes())).unwrap();
}

fn outcomes(device: &Emulated, layers: &Layers) -> Vec<Outcome> {
    let all = read(device, layers.outcomes());
    let each = all.chunks_exact(Layers::OUTCOME as usize).take(LENGTHS.len());
    each.map(|bytes| Outcome::read(bytes[..48].try_into().unwrap())).collect()
}

#[test]
fn every_layer_is_compressed_by_itself_as_on_the_cpu() {
    let n: u64 = LENGTHS.iter().sum();
    for (seed, (text, make)) in (0..).zip(by_layer()) {
        let Some(device) = Emulated::new(seed) else { return };
        for keeps in [true, false] {
            let text = if keeps { fed_back(text) } else { text.to_owned() };
            let member = Member { tensor: 7, ..Member::alone(SEED) };
            let shapes = CpuLayers::new(&LENGTHS.map(|n| n as usize)).unwrap();
            let mut cpu = Pipeline::new(&text.parse().unwrap(), shapes, member).as_on_device();
            let methods = |step| -> Vec<Method> {
                let random = |tensor| Random { seed: SEED, step, tensor, rank: Some(0) };
                (7..).zip(LENGTHS).map(|(tensor, n)| make(n, random(tensor))).collect()
            };
            let borrowed = Memory::new(Layers::bytes(&LENGTHS, &methods(0)).unwrap());
            let mut layers = Layers::new(&device, &LENGTHS, &methods(0), borrowed.span()).unwrap();
            for index in 0..3 {
                let (_, values) = gradients(n as usize).swap_remove(index as usize % 2);
                let mut message = Writer::new();
                let want = cpu.compress(CpuGradient::F32(&values), Step { index, learning_rate: 0.1 }, &mut message);
                let source = Memory::of(&values);
                let gradient = Gradient { at: source.span(), dtype: DType::F32, weights: (1.0, 1.0) };
                layers.step(&device, gradient, keeps, &methods(index)).unwrap();
                let (mut sent, mut energy) = (Vec::new(), Energy::default());
                let payloads = read(&device, layers.payloads());
                for (outcome, (at, room)) in outcomes(&device, &layers).iter().zip(layers.places()) {
                    assert!(outcome.bytes <= room);
                    sent.extend_from_slice(&payloads[at as usize..(at + outcome.bytes) as usize]);
                    energy = energy + Energy { sent: outcome.sent, compensated: outcome.compensated };
                }
                let header = 32 + 8 * usize::from(message.bytes()[7]);
                assert_eq!(sent, message.bytes()[header..], "{text}, step {index}");
                let want = want.unwrap().energy;
                assert!((energy.sent - want.sent).abs() <= 1e-6 * want.sent, "{text}: {energy:?} {want:?}");
                let residual: Vec<u8> = layers.residual().flat_map(|span| read(&device, span)).collect();
                let residual_there: Vec<u8> = cpu.residual().iter().flat_map(|x| x.to_le_bytes()).collect();
                assert!(residual == residual_there || !keeps, "{text}, step {index}");
                layers.put_back();
                layers.put_back();
            }
            drop(borrowed.bytes());
        }
    }
}

/// Payloads whose length is known go where they are sent from, whatever byte that is, and as long as they said.
#[test]
fn a_layers_payload_goes_to_any_byte_of_a_block() {
    let n = 2999u64;
    for (seed, (text, make)) in (0..).zip(by_layer()) {
        let Some(device) = Emulated::new(seed) else { return };
        let method = |step| make(n, Random { seed: SEED, step, tensor: 0, rank: Some(0) });
        let borrowed = Memory::new(Layers::bytes(&[n], &[method(0)]).unwrap());
        let mut layers = Layers::new(&device, &[n], &[method(0)], borrowed.span()).unwrap();
        let mut cpu = Pipeline::new(
            &fed_back(text).parse().unwrap(),
            CpuLayers::new(&[n as usize]).unwrap(),
            Member::alone(SEED),
        )
        .as_on_device();
        let (_, values) = gradients(n as usize).swap_remove(0);
        let source = Memory::of(&values);
        let gradient = Gradient { at: source.span(), dtype: DType::F32, weights: (1.0, 1.0) };
        for index in 0..3u64 {
            let Some(bytes) = method(index).sent_bytes(n) else { continue };
            let mut message = Writer::new();
            cpu.compress(CpuGradient::F32(&values), Step { index, learning_rate: 0.1 }, &mut message).unwrap();
            let (front, header) = (3 * index + seed, 32 + 8 * usize::from(message.bytes()[7]));
            let block = Memory::new(front + bytes + 2);
            let to = block.span().part(front, bytes);
            step_to(&device, &mut layers, gradient, (method(index), to));
            let there = block.bytes();
            assert_eq!(there[front as usize..(front + bytes) as usize], message.bytes()[header..], "{text}, {index}");
            let around = there[..front as usize].iter().chain(&there[(front + bytes) as usize..]);
            assert!(around.copied().all(|byte| byte == 0xa5), "{text}");
            assert_eq!(outcomes(&device, &layers)[0].bytes, bytes, "{text}");
            let residual: Vec<u8> = layers.residual().flat_map(|span| read(&device, span)).collect();
            assert!(residual == cpu.residual().iter().flat_map(|x| x.to_le_bytes()).collect::<Vec<u8>>(), "{text}");
        }
        drop(borrowed.bytes());
    }
}

/// Its message says so, and its payload is as long as any.
#[test]
fn a_refused_gradient_is_marked_and_sends_a_payload_of_the_same_length() {
    let Some(device) = Emulated::new(4) else { return };
    let (n, method) = (500u64, Method::TopK(20));
    let borrowed = Memory::new(Layers::bytes(&[n], &[method]).unwrap());
    let mut layers = Layers::new(&device, &[n], &[method], borrowed.span()).unwrap();
    let bytes = method.sent_bytes(n).unwrap();
    let mut values = vec![1.5f32; n as usize];
    for (bad, marked) in [(false, 1), (true, 3)] {
        values[9] = if bad { f32::NAN } else { 4.0 };
        let (source, block) = (Memory::of(&values), Memory::of(&vec![1u8; 8 + bytes as usize]));
        let gradient = Gradient { at: source.span(), dtype: DType::F32, weights: (1.0, 1.0) };
        let before = layers.residual().flat_map(|span| read(&device, span)).collect::<Vec<u8>>();
        step_to(&device, &mut layers, gradient, (method, block.span().part(8, bytes)));
        layers.mark(&device, block.span().part(4, 1), 2).unwrap();
        assert_eq!(block.bytes()[..8], [1, 1, 1, 1, marked, 1, 1, 1]);
        assert_eq!(block.bytes()[8..12], 20u32.to_le_bytes());
        let after = layers.residual().flat_map(|span| read(&device, span)).collect::<Vec<u8>>();
        assert_eq!(before == after, bad);
        assert_eq!(outcomes(&device, &layers)[0].refused, bad);
    }
}

/// Halves too may begin at any place.
#[test]
fn halves_at_odd_places_are_read_as_they_are() {
    let n: u64 = LENGTHS.iter().sum();
    let Some(device) = Emulated::new(6) else { return };
    let halves: Vec<u16> = (0..n).map(|i| f16::from_f32((i * 37 % 997) as f32 / 50.0 - 9.0).to_bits()).collect();
    let methods = LENGTHS.map(|n| Method::TopK(kept(n)));
    let borrowed = Memory::new(Layers::bytes(&LENGTHS, &methods).unwrap());
    let mut layers = Layers::new(&device, &LENGTHS, &methods, borrowed.span()).unwrap();
    let strategy = "lwtopk(k=0.1)+ef(vanilla)".parse().unwrap();
    let shapes = CpuLayers::new(&LENGTHS.map(|n| n as usize)).unwrap();
    let mut cpu = Pipeline::new(&strategy, shapes, Member::alone(SEED));
    let mut message = Writer::new();
    cpu.compress(CpuGradient::F16(&halves), Step { index: 0, learning_rate: 0.1 }, &mut message).unwrap();
    let source = Memory::of(&halves);
    let gradient = Gradient { at: source.span(), dtype: DType::F16, weights: (1.0, 1.0) };
    layers.step(&device, gradient, true, &methods).unwrap();
    let residual: Vec<u8> = layers.residual().flat_map(|span| read(&device, span)).collect();
    assert!(residual == cpu.residual().iter().flat_map(|x| x.to_le_bytes()).collect::<Vec<u8>>());
}

#[test]
fn a_layer_that_fails_leaves_all_memories() {
    let Some(device) = Emulated::new(3) else { return };
    let methods = [Method::TopK(5), Method::TopK(5)];
    let borrowed = Memory::new(Layers::bytes(&[50, 60], &methods).unwrap());
    let mut layers = Layers::new(&device, &[50, 60], &methods, borrowed.span()).unwrap();
    let source = Memory::of(&[1.0f32; 110]);
    let gradient = Gradient { at: source.span(), dtype: DType::F32, weights: (1.0, 1.0) };
    layers.step(&device, gradient, true, &methods).unwrap();
    let residual = |layers: &Layers| layers.residual().map(|span| read(&device, span)).collect::<Vec<_>>();
    let before = residual(&layers);
    let bad = [Method::TopK(5), Method::TopK(61)];
    assert!(layers.step(&device, gradient, true, &bad).is_err());
    assert!(layers.step(&device, gradient, true, &bad[..1]).is_err());
    assert_eq!(residual(&layers), before);
    assert!(matches!(Layers::bytes(&[1 << 30, 1 << 30], &methods), Err(LaunchError::TooLong(_))));
    assert!(matches!(Layers::bytes(&[u64::MAX, 2], &methods), Err(LaunchError::TooLong(_))));
    // Nothing at all.
    let none = Layers::new(&device, &[0], &[Method::ThreeLc(1.0)], borrowed.span())
        .map(|mut layers| layers.step(&device, Gradient { at: Span::NONE, ..gradient }, true, &[Method::ThreeLc(1.0)]));
    assert_eq!(none.unwrap(), Ok(()));
}
