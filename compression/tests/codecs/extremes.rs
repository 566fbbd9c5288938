//! Parameters at the ends of their ranges, one and two at a time: what the examples of the registry never are.

use crate::all::assert_goes_through;
use crate::harness::*;
use flexcomm_compression::entry::Entry;
use flexcomm_compression::methods;
use flexcomm_domain::spec::{CompressorSpec, Kind};
use std::ops::Bound;

/// The ends of what a parameter may be, their neighbours, and something between.
fn values(kind: Kind) -> Vec<f64> {
    let mut all: Vec<f64> = match kind {
        Kind::Kept => vec![1e-300, 1e-9, 0.5, 0.999_999, 1.0, 33.0, 4_294_967_295.0],
        Kind::Number(low, high) => {
            let end = |bound: Bound<f64>, none: f64| match bound {
                Bound::Included(end) | Bound::Excluded(end) => end,
                Bound::Unbounded => none,
            };
            let (low, high) = (end(low, -1e30), end(high, 1e30));
            vec![low, low + 1e-40, low + 1e-12, low + 1e-6, 0.1, 1.0, 2.5, high * 0.999_999, high - 1e-12, high]
        }
        Kind::Whole(low, high) => [low, low + 1, 7, 8, 9, high - 1, high].map(|whole| whole as f64).to_vec(),
        Kind::Choice(words) => (0..words.len()).map(|at| at as f64).collect(),
        Kind::Switch => vec![0.0, 1.0],
    };
    all.retain(|value| kind.admits(*value));
    all
}

/// Parameters of the first example with each one, and each two of them, at every value.
fn strategies(entry: &'static Entry) -> Vec<CompressorSpec> {
    let first = parse(&format!("{}({})", entry.info.name, entry.examples[0]));
    let numbers = first.values().all();
    let mut sets = vec![numbers.to_vec()];
    for (i, param) in entry.info.params.iter().enumerate() {
        for value in values(param.kind) {
            let mut one = numbers.to_vec();
            one[i] = value;
            for (j, other) in entry.info.params[..i].iter().enumerate() {
                for value in values(other.kind) {
                    let mut two = one.clone();
                    two[j] = value;
                    sets.push(two);
                }
            }
            sets.push(one);
        }
    }
    sets.iter().filter_map(|set| CompressorSpec::from_numbers(entry.info, set)).collect()
}

#[test]
fn every_parameter_may_be_extreme() {
    let short = |x: &[f32]| x.len() <= 256;
    let mut tensors = edge_tensors();
    tensors.retain(|(_, x)| short(x));
    tensors.push(("all largest", vec![f32::MAX; 64]));
    tensors.push(("all least", vec![-f32::MAX; 48]));
    tensors.push(("laplace", laplace(240, 1)));
    tensors
        .push(("largest among denormal", (0..70).map(|i| if i == 3 { f32::MAX } else { f32::from_bits(1) }).collect()));
    for entry in methods::all() {
        for strategy in strategies(entry) {
            tensors.iter().for_each(|(name, x)| assert_goes_through(&strategy, (name, x)));
        }
    }
}
