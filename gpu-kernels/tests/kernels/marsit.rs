//! Marsit's operator against equation 2 as it is written, and what it is for: the mean.

use crate::data::lengths;
use crate::emulated::{Emulated, Memory};
use flexcomm_compression::random::Stream;
use flexcomm_gpu_kernels::marsit::{Segment, combine, signs};
use flexcomm_gpu_kernels::{DType, ErrorFeedback, LaunchError, Quantizer, Random, Target, add, workspace_bytes};

const SEED: u64 = 5;

fn random(step: u64, rank: u32) -> Random {
    Random { seed: SEED, step, tensor: 3, rank: Some(rank) }
}

/// Sign bits of which a share of p is negative.
fn bits(n: usize, which: u64, p: f32) -> Vec<u8> {
    let stream = Stream::new(1000 + which, [0; 4]);
    let mut bytes = vec![0u8; n.div_ceil(8)];
    (0..n).filter(|i| stream.uniform(*i as u32) < p).for_each(|i| bytes[i / 8] |= 1 << (i % 8));
    bytes
}

fn bit(bytes: &[u8], i: usize) -> bool {
    bytes[i / 8] >> (i % 8) & 1 == 1
}

/// Equation 2: the transient bit is 1 with chance (m - 1)/m where the own bit is 0, else 1/m.
fn reference((received, own): (&[u8], &[u8]), (n, first): (usize, usize), workers: u64, stream: Stream) -> Vec<u8> {
    let mut out = vec![0u8; received.len()];
    for i in 0..n {
        let (v, w) = (bit(received, i), bit(own, i));
        // Of all 2^32 words, one in `workers`.
        let one_in_m = u64::from(stream.word((first + i) as u32)) * workers < 1 << 32;
        let transient = if w { one_in_m } else { !one_in_m };
        if (v && w) || ((v ^ w) && transient) {
            out[i / 8] |= 1 << (i % 8);
        }
    }
    out
}

#[test]
fn every_bit_is_that_of_the_definition() {
    for (at, n) in lengths().into_iter().enumerate() {
        for workers in [2u32, 3, 7, 1000] {
            let Some(device) = Emulated::new(at as u64) else { return };
            let (received, own, first) = (bits(n, 1, 0.5), bits(n, 2, 0.4), 96 * at);
            let stream = Stream::new(SEED, [9, 3, 0, 4]);
            let want = reference((&received, &own), (n, first), u64::from(workers), stream);
            let (theirs, ours) = (Memory::of(&received), Memory::of(&own));
            let segment = Segment { n: n as u64, first: first as u64 };
            combine(&device, segment, workers, theirs.span(), ours.span(), random(9, 4)).unwrap();
            assert_eq!(theirs.bytes(), want, "{n} bits of {workers} workers");
            assert_eq!(ours.bytes(), own, "what is its own stays");
        }
    }
}

/// After a chain of workers each bit is 1 as often as it is among them: within six standard deviations, by fixed seeds.
#[test]
fn the_mean_is_that_of_all_workers() {
    let (n, world) = (60_000usize, 5usize);
    let Some(device) = Emulated::new(2) else { return };
    // Worker w's bits are 1 below its own place: bit i is 1 on a known number of workers.
    let of = |w: usize| {
        let mut bytes = vec![0u8; n.div_ceil(8)];
        (0..n).filter(|i| i % (world + 1) > w).for_each(|i| bytes[i / 8] |= 1 << (i % 8));
        bytes
    };
    let passed_on = Memory::of(&of(0));
    for w in 1..world {
        let own = Memory::of(&of(w));
        let segment = Segment { n: n as u64, first: 0 };
        combine(&device, segment, w as u32 + 1, passed_on.span(), own.span(), random(1, w as u32)).unwrap();
    }
    let out = passed_on.bytes();
    for ones in 0..=world {
        let places = (0..n).filter(|i| i % (world + 1) == ones);
        let (count, total) = (places.clone().filter(|i| bit(&out, *i)).count() as f64, places.count() as f64);
        let (want, share) = (ones as f64 / world as f64, count / total);
        let sigma = (want * (1.0 - want) / total).sqrt();
        assert!((share - want).abs() <= 6.0 * sigma, "{ones} of {world}: {share}");
    }
}

/// Algorithm 1, lines 1, 5 and 10: signs leave the compensated gradient whole; the agreed update leaves the compensation.
#[test]
fn signs_and_compensation_of_a_step() {
    let (n, eta) = (5001usize, 0.125f32);
    let Some(device) = Emulated::new(1) else { return };
    let stream = Stream::new(7, [0; 4]);
    let gradient: Vec<f32> = (0..n as u32).map(|i| stream.uniform(i) - 0.5).collect();
    let compensation: Vec<f32> = (0..n as u32).map(|i| 0.25 * (stream.uniform(i + 1_000_000) - 0.5)).collect();
    let (source, memory, compensated) = (Memory::of(&gradient), Memory::of(&compensation), Memory::new(4 * n as u64));
    let (payload, workspace) = (Memory::new(n.div_ceil(8) as u64), Memory::new(workspace_bytes(n as u64)));
    let (dtype, beta, gamma) = (DType::F32, 1.0, 1.0);
    let (gradient_at, memory_at) = (source.span(), memory.span());
    let feedback = ErrorFeedback {
        n: n as u64,
        dtype,
        gradient: gradient_at,
        memory: memory_at,
        compensated: compensated.span(),
        beta,
        gamma,
    };
    signs(&device, &feedback, payload.span(), workspace.span()).unwrap();
    let sum: Vec<f32> = gradient.iter().zip(&compensation).map(|(g, c)| g + c).collect();
    assert_eq!(compensated.f32s(), sum);
    let sent = payload.bytes();
    assert!((0..n).all(|i| bit(&sent, i) == (sum[i] < 0.0)));
    let agreed = bits(n, 3, 0.5);
    let bits_there = Memory::of(&agreed);
    add(&device, Quantizer::Signs, n as u64, bits_there.span(), Target { scale: -eta, out: compensated.span() })
        .unwrap();
    let sign = |i: usize| if bit(&agreed, i) { -1.0f32 } else { 1.0 };
    assert!(compensated.f32s().iter().enumerate().all(|(i, c)| *c == sum[i] - eta * sign(i)));
}

#[test]
fn one_worker_alone_is_refused() {
    let Some(device) = Emulated::new(0) else { return };
    let (a, b) = (Memory::new(4), Memory::new(4));
    let call = |workers, n| {
        let segment = Segment { n, first: 0 };
        combine(&device, segment, workers, a.span(), b.span(), random(0, 0)).unwrap_err()
    };
    assert!(matches!(call(1, 32), LaunchError::Parameter { what: "workers", .. }));
    assert!(matches!(call(2, 33), LaunchError::TooSmall { need: 5, .. }));
    assert!(matches!(call(2, 1 << 31), LaunchError::TooLong(_)));
}
