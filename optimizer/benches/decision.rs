//! How long one decision takes: enumeration of 5 ratios + dense over 5 collectives.

#![allow(missing_docs)] // the macro's function has none

use criterion::{Criterion, criterion_group, criterion_main};
use flexcomm_domain::{Family, Link, LinkMatrix, Seconds};
use flexcomm_estimation::Profile;
use flexcomm_optimizer::{PolicyConfig, Problem, Space, solve};
use std::hint::black_box;

fn problem(links: LinkMatrix) -> Problem {
    let mut problem = Problem::new(25_560_000, links);
    problem.compute = Seconds::new(0.05).expect("a valid duration");
    problem.profiles.insert("topk".parse::<Family>().expect("a name").into(), Profile::prior(problem.values));
    problem
}

fn link(alpha_s: f64, bandwidth_bps: f64) -> Link {
    Link::new(alpha_s, bandwidth_bps).expect("a valid link")
}

/// Links that differ from pair to pair, by up to 70 %.
fn unequal(n: usize) -> LinkMatrix {
    LinkMatrix::from_fn(n, |i, j| link(1e-3 * (1.0 + ((i * 7 + j * 3) % 8) as f64 / 10.0), 1e10)).expect("a valid size")
}

fn decisions(c: &mut Criterion) {
    let (space, policy) = (Space::default(), PolicyConfig::default());
    let mut decide = |name: &str, links: LinkMatrix| {
        let problem = problem(links);
        c.bench_function(name, |b| {
            b.iter(|| solve(black_box(&problem), black_box(&space), policy.policy()).expect("a valid problem"));
        });
    };
    decide("decision, 8 equal links", LinkMatrix::uniform(8, link(1e-3, 1e10)).expect("a valid size"));
    decide("decision, 4 ranks, unequal links", unequal(4));
    decide("decision, 8 ranks, unequal links", unequal(8));
    decide("decision, 32 ranks, unequal links", unequal(32));
}

criterion_group!(benches, decisions);
criterion_main!(benches);
