//! How long one decision takes: enumeration of 5 ratios + dense over 5 collectives, and a search over buckets.

#![allow(missing_docs)] // the macro's function has none

use criterion::{Criterion, criterion_group, criterion_main};
use flexcomm_domain::{Family, Link, LinkMatrix, Seconds};
use flexcomm_optimizer::nsga::{Settings, search};
use flexcomm_optimizer::{Bucket, BucketProblem, PolicyConfig, Problem, Profile, Space, solve};
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

fn searches(c: &mut Criterion) {
    let problem = problem(unequal(8));
    let bucket = |i: u64| Bucket { values: 100_000 * (i + 1), energy: 1.0 + (i % 7) as f64, profile: None };
    let buckets: Vec<Bucket> = (0..60).map(bucket).collect();
    let large = BucketProblem::new(&problem, &buckets, &Space::default(), "topk".parse().expect("a name"))
        .expect("valid buckets");
    let mut group = c.benchmark_group("60 buckets");
    group.sample_size(10);
    for generations in [0, 10, 50] {
        let settings = Settings { generations, ..Settings::default() };
        group.bench_function(format!("{generations} generations"), |b| {
            b.iter(|| search(&large, &settings, black_box(7)).expect("valid settings"));
        });
    }
    group.finish();
}

criterion_group!(benches, decisions, searches);
criterion_main!(benches);
