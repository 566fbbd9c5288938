//! What targets share.
#![allow(dead_code)]

use flexcomm_compression::Build;
use flexcomm_compression::methods;
use flexcomm_domain::spec::{CompressorSpec, Kind};
use std::ops::Bound;
use std::sync::OnceLock;

/// Every registered codec with each of its examples.
pub fn strategies() -> &'static [CompressorSpec] {
    static ALL: OnceLock<Vec<CompressorSpec>> = OnceLock::new();
    ALL.get_or_init(|| {
        let texts = methods::all().flat_map(|e| e.examples.iter().map(|args| format!("{}({args})", e.info.name)));
        texts.map(|text| text.parse().expect("an example of the registry")).collect()
    })
}

/// Second bytes that ask for parameters of the input's own; any other is an example's number. Few kept seeds have one of these.
const DRAWN: std::ops::Range<u8> = 192..240;

/// Code and example of the strategy, the lengths of up to three layers (below 128), how many they are, and the rest. The
/// rest starts with the parameters where these are drawn.
pub fn split(data: &[u8]) -> Option<(CompressorSpec, Vec<usize>, &[u8])> {
    let ([code, example, a, b, c, used], rest) = data.split_first_chunk::<6>()?;
    let named: Vec<_> = strategies().iter().filter(|s| s.entry().code == *code).collect();
    let strategy = match named.len() {
        // A code that is free stands for any.
        0 => strategies()[usize::from(*code) * 7 % strategies().len()],
        count => *named[usize::from(*example) % count],
    };
    let (strategy, rest) = if DRAWN.contains(example) { drawn(strategy, rest) } else { (strategy, rest) };
    let lengths = [a, b, c].map(|n| usize::from(*n) % 128);
    Some((strategy, lengths[..1 + usize::from(*used) % 3].to_vec(), rest))
}

/// The compressor with parameters from the first bytes: a byte and four more for each. What is not admitted is the example's.
fn drawn(example: CompressorSpec, mut rest: &[u8]) -> (CompressorSpec, &[u8]) {
    let entry = example.entry();
    let mut numbers = example.values().all().to_vec();
    for (number, param) in numbers.iter_mut().zip(entry.info.params) {
        let Some(([form, a, b, c, d], after)) = rest.split_first_chunk::<5>() else { break };
        let value = value(param.kind, *form, u32::from_le_bytes([*a, *b, *c, *d]));
        if param.kind.admits(value) {
            *number = value;
        }
        rest = after;
    }
    (CompressorSpec::from_numbers(entry.info, &numbers).unwrap_or(example), rest)
}

/// An end of the range, something between, or a float by its bits.
fn value(kind: Kind, form: u8, bits: u32) -> f64 {
    let unit = f64::from(bits) / (f64::from(u32::MAX) + 1.0);
    match kind {
        Kind::Kept if form % 2 == 0 => unit,
        Kind::Kept => f64::from(bits >> (form / 2 % 32)),
        Kind::Number(..) if form % 4 == 0 => f64::from(f32::from_bits(bits)),
        Kind::Number(low, high) => {
            let end = |bound: Bound<f64>, none: f64| match bound {
                Bound::Included(end) | Bound::Excluded(end) => end,
                Bound::Unbounded => none,
            };
            let (low, high) = (end(low, -100.0), end(high, 100.0));
            let within = low + unit * (high - low);
            [low, within, high][usize::from(form / 4) % 3]
        }
        Kind::Whole(low, high) => match form % 4 {
            0 => low as f64,
            1 => high as f64,
            2 => (low + u64::from(bits) % 16).min(high) as f64,
            _ => (low + u64::from(bits) % (high - low + 1)) as f64,
        },
        Kind::Choice(words) => f64::from(bits % words.len() as u32),
        Kind::Switch => f64::from(bits % 2),
    }
}
