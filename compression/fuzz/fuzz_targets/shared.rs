//! What targets share.
#![allow(dead_code)]

use flexcomm_compression::strategy::Strategy;
use flexcomm_compression::methods;
use std::sync::OnceLock;

/// Every registered codec with each of its examples.
pub fn strategies() -> &'static [Strategy] {
    static ALL: OnceLock<Vec<Strategy>> = OnceLock::new();
    ALL.get_or_init(|| {
        let texts = methods::all().flat_map(|e| e.examples.iter().map(|args| format!("{}({args})", e.name)));
        texts.map(|text| text.parse().expect("an example of the registry")).collect()
    })
}

/// The strategy that two bytes name: the first the codec, the second the layers (0 to 63 values each, up to three).
pub fn split(data: &[u8]) -> Option<(Strategy, Vec<usize>, &[u8])> {
    let ([which, a, b, c], rest) = data.split_first_chunk::<4>()?;
    let strategies = strategies();
    let strategy = strategies[usize::from(*which) % strategies.len()];
    let lengths = [a, b, c].map(|n| usize::from(*n) % 64);
    let used = 1 + usize::from(*which >> 6) % 3;
    Some((strategy, lengths[..used].to_vec(), rest))
}
