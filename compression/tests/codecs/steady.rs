//! After the first step nothing is allocated, whatever the values become: several layers, either scope, halves, and values
//! that change their character from step to step.

use crate::allocations::allocations;
use crate::harness::*;
use flexcomm_compression::Layers;
use flexcomm_compression::codec::{Shape, Travels};
use flexcomm_compression::pipeline::{Gradient, Member, Pipeline, Step};
use flexcomm_compression::wire::{Writer, f32_to_f16};
use flexcomm_domain::spec::CompressorSpec;

const LAYERS: [Shape; 3] = [Shape { rows: 60, cols: 50 }, Shape::vector(1000), Shape::vector(8)];
const N: usize = 4008;

fn kinds() -> Vec<(&'static str, Vec<f32>)> {
    let scaled = |factor: f32, seed| laplace(N, seed).iter().map(|v| v * factor).collect();
    vec![
        ("laplace", laplace(N, 1)),
        ("normal", normal(N, 2)),
        ("loud", scaled(1000.0, 3)),
        ("zeros", vec![0.0; N]),
        ("constant", vec![0.5; N]),
        ("sparse", (0..N).map(|i| f32::from(i % 97 == 0)).collect()),
        ("tiny", scaled(1e-20, 4)),
        ("integers", (0..N).map(|i| (i % 3) as f32 - 1.0).collect()),
        ("loud again", scaled(1000.0, 5)),
    ]
}

/// Steps over all kinds of values, from the given one on; answers which allocated.
fn restless(strategy: &CompressorSpec, first: usize) -> Vec<String> {
    let mut kinds = kinds();
    kinds.rotate_left(first);
    let mut pipeline = Pipeline::new(strategy, Layers::matrices(&LAYERS).unwrap(), Member::alone(3));
    let (mut out, mut sum, mut mean) = (Writer::new(), Vec::with_capacity(1 << 20), vec![0.0; N]);
    let halves = kinds.iter().map(|(_, values)| {
        let mut halves = vec![0; N];
        f32_to_f16(values, &mut halves);
        halves
    });
    let halves: Vec<Vec<u16>> = halves.collect();
    let mut step = |gradient: Gradient<'_>, index: u64| {
        let now = Step { index, learning_rate: 0.1 };
        let mut more = pipeline.compress(gradient, now, &mut out).unwrap().more;
        while more {
            sum.clear();
            sum.extend_from_slice(out.bytes());
            more = pipeline.advance(&sum, &mut out).unwrap().more;
        }
        match pipeline.travels() {
            Travels::Sums(_) => pipeline.mean(out.bytes(), index, &mut mean).unwrap(),
            Travels::Gathers => pipeline.aggregate(&[out.bytes(); 3], index, &mut mean).unwrap(),
        }
    };
    step(Gradient::F32(&kinds[0].1), 0);
    let mut bad = Vec::new();
    for (i, (name, values)) in kinds.iter().enumerate() {
        let forms =
            [("", Gradient::F32(values)), (" as halves", Gradient::F16(&halves[i])), (" that none", Gradient::Zeros)];
        for (j, (form, gradient)) in forms.into_iter().enumerate() {
            let count = allocations(|| step(gradient, (1 + 3 * i + j) as u64));
            if count > 0 {
                bad.push(format!("{name}{form}: {count}"));
            }
        }
    }
    bad
}

#[test]
fn values_of_another_character_allocate_nothing() {
    let mut found = Vec::new();
    for strategy in every_strategy() {
        // beta keeps what diverges under error feedback in bounds.
        for with in ["", "+ef(vanilla,beta=0.001)", "+scope(tensor)", "+scope(bucket)+nesterov(mu=0.5)"] {
            let text = format!("{strategy}{with}");
            for first in [0, 3, 4] {
                let bad = restless(&parse(&text), first);
                if !bad.is_empty() {
                    found.push(format!("{text} from kind {first}: {}", bad.join(", ")));
                }
            }
        }
    }
    assert!(found.is_empty(), "{} allocate:\n{}", found.len(), found.join("\n"));
}
