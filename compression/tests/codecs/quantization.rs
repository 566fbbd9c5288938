//! Tests of single quantization methods beyond what `all.rs` asks of every one: definitions, known values,
//! enumeration, and known mistakes of others.

mod definitions;
mod levels;
mod signs;

use crate::harness::*;
use flexcomm_compression::Build;
use flexcomm_compression::codec::{Codec, Context};
use flexcomm_compression::wire::{Reader, Writer};
use flexcomm_domain::spec::CompressorSpec;

/// A strategy's codec for a vector.
fn codec(strategy: &CompressorSpec, n: usize) -> Box<dyn Codec> {
    strategy.codec(flexcomm_compression::codec::Shape::vector(n))
}

/// The payload of a fresh codec.
fn payload(text: &str, x: &[f32], seed: u64) -> Vec<u8> {
    let mut out = Writer::new();
    codec(&parse(text), x.len()).encode(x, &Context::new(seed), &mut out).unwrap();
    out.into_vec()
}

/// What the payloads of several ranks mean together.
fn aggregate(text: &str, payloads: &[Vec<u8>], n: usize) -> Vec<f32> {
    let mut readers: Vec<Reader<'_>> = payloads.iter().map(|bytes| Reader::new(bytes)).collect();
    let mut out = vec![9.0; n];
    codec(&parse(text), n).aggregate(&mut readers, &Context::new(0), &mut out).unwrap();
    assert!(readers.iter().all(|reader| reader.left() == 0), "bytes are left over");
    out
}

/// How often each value of C(x)\[0\] is drawn.
fn draws(text: &str, x: &[f32], count: u64) -> Vec<(f32, f64)> {
    let mut seen: Vec<(f32, f64)> = Vec::new();
    for seed in 0..count {
        let value = compressed(&parse(text), x, seed)[0];
        match seen.iter_mut().find(|(v, _)| *v == value) {
            Some((_, times)) => *times += 1.0 / count as f64,
            None => seen.push((value, 1.0 / count as f64)),
        }
    }
    seen.sort_by(|a, b| a.0.total_cmp(&b.0));
    seen
}

/// Each value as often as it should be, within 6 standard deviations.
fn assert_drawn(text: &str, x: &[f32], want: &[(f32, f64)]) {
    const COUNT: u64 = 20_000;
    let got = draws(text, x, COUNT);
    assert_eq!(got.iter().map(|g| g.0).collect::<Vec<_>>(), want.iter().map(|w| w.0).collect::<Vec<_>>(), "{text}");
    for ((value, share), (_, chance)) in got.iter().zip(want) {
        let sigma = (chance * (1.0 - chance) / COUNT as f64).sqrt();
        assert!((share - chance).abs() <= 6.0 * sigma + 1e-9, "{text}: {value} at {share} instead of {chance}");
    }
}
