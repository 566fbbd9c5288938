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

/// Code and example of the strategy, the lengths of up to three layers (below 128), how many they are, and the rest.
pub fn split(data: &[u8]) -> Option<(Strategy, Vec<usize>, &[u8])> {
    let ([code, example, a, b, c, used], rest) = data.split_first_chunk::<6>()?;
    let named: Vec<_> = strategies().iter().filter(|s| s.entry().code == *code).collect();
    let strategy = match named.len() {
        // A code that is free stands for any.
        0 => strategies()[usize::from(*code) * 7 % strategies().len()],
        count => *named[usize::from(*example) % count],
    };
    let lengths = [a, b, c].map(|n| usize::from(*n) % 128);
    Some((strategy, lengths[..1 + usize::from(*used) % 3].to_vec(), rest))
}
