//! Our side of the race against pymoo; `pymoo_compare.py` runs both and prints the table.
//!
//! `pymoo_race problem FILE` writes the 60-bucket problem's tables as JSON. `pymoo_race run TARGET X Y Z SEED`
//! prints as JSON how long our search needs until the hypervolume (reference point X Y Z) reaches TARGET.
#![allow(clippy::print_stdout)]

use flexcomm_domain::{CompressionRatio, Gain, Link, LinkMatrix};
use flexcomm_optimizer::nsga::{Settings, Start, search};
use flexcomm_optimizer::{Bucket, BucketProblem, Problem, Profile, ProfilePoint, Space, pareto::hypervolume};
use rand::{Rng, SeedableRng};
use rand_chacha::ChaCha8Rng;
use std::time::Instant;

type Outcome<T> = Result<T, Box<dyn std::error::Error>>;

/// 60 buckets of a 25 M parameter model with profiles of their own, over 8 ranks with unequal links.
fn problem() -> Outcome<BucketProblem> {
    let mut rng = ChaCha8Rng::seed_from_u64(2026);
    let links: Result<Vec<Link>, _> =
        (0..64).map(|_| Link::new(rng.random_range(5e-4..2e-3), rng.random_range(5e8..2e9))).collect();
    let links = links?;
    let links = LinkMatrix::from_fn(8, |i, j| links[i * 8 + j])?;
    let buckets: Outcome<Vec<Bucket>> = (0..60).map(|_| bucket(&mut rng)).collect();
    Ok(BucketProblem::new(&Problem::new(1, links), &buckets?, &Space::default(), "topk".parse()?)?)
}

fn bucket(rng: &mut ChaCha8Rng) -> Outcome<Bucket> {
    let values = rng.random_range(50_000..800_000);
    let (exponent, ns) = (rng.random_range(0.05..0.6), rng.random_range(1.0..6.0));
    let point = |c: &CompressionRatio| {
        let t_comp_s = values as f64 * 1e-9 * (ns + 20.0 * c.get());
        Ok(ProfilePoint { cr: *c, gain: Gain::new(c.get().powf(exponent))?, t_comp_s, weight: 1.0 })
    };
    let points: Outcome<Vec<ProfilePoint>> = Space::default().crs.iter().map(point).collect();
    Ok(Bucket { values, energy: rng.random_range(0.1..10.0), profile: Some(Profile::new(points?)?) })
}

fn tables(problem: &BucketProblem) -> serde_json::Value {
    let table: Vec<Vec<Vec<(f64, f64, f64)>>> = (0..problem.collectives().len())
        .map(|c| (0..problem.buckets()).map(|b| problem.row(c, b).collect()).collect())
        .collect();
    serde_json::json!({ "cells": table })
}

/// One whole search: its seconds and the volume of its sparse plans. The dense plans are ours by right, but
/// pymoo does not see them: they do not count.
fn measure(problem: &BucketProblem, settings: &Settings, reference: [f64; 3], seed: u64) -> Outcome<serde_json::Value> {
    let begin = Instant::now();
    let front = search(problem, settings, seed)?;
    let seconds = begin.elapsed().as_secs_f64();
    let points: Vec<[f64; 3]> =
        front.iter().filter(|p| !p.plan.collective.is_allreduce()).map(|p| p.objectives).collect();
    let volume = hypervolume(&points, reference);
    Ok(serde_json::json!({ "seconds": seconds, "generations": settings.generations, "hypervolume": volume }))
}

fn settings(start: Start, generations: usize) -> Settings {
    Settings { generations, archive: 0, start, ..Settings::default() }
}

/// The first of growing numbers of generations at which the volume is reached; each is a whole search.
fn race(
    problem: &BucketProblem,
    start: Start,
    target: f64,
    reference: [f64; 3],
    seed: u64,
) -> Outcome<serde_json::Value> {
    for generations in [1, 2, 5, 10, 20, 50, 100, 200, 500, 1000] {
        let run = measure(problem, &settings(start, generations), reference, seed)?;
        if run["hypervolume"].as_f64() >= Some(target) {
            return Ok(run);
        }
    }
    Ok(serde_json::Value::Null)
}

fn main() -> Outcome<()> {
    let args: Vec<String> = std::env::args().skip(1).collect();
    let problem = problem()?;
    match args.iter().map(String::as_str).collect::<Vec<_>>()[..] {
        ["problem", file] => std::fs::write(file, tables(&problem).to_string())?,
        ["run", target, x, y, z, seed] => {
            let (target, reference) = (target.parse()?, [x.parse()?, y.parse()?, z.parse()?]);
            let seed = seed.parse()?;
            let all = serde_json::json!({
                "first": measure(&problem, &settings(Start::Exact, 0), reference, seed)?,
                "exact": race(&problem, Start::Exact, target, reference, seed)?,
                "random": race(&problem, Start::Random, target, reference, seed)?,
                "full": measure(&problem, &settings(Start::Exact, 100), reference, seed)?,
            });
            println!("{all}");
        }
        _ => return Err("usage: pymoo_race problem FILE | run TARGET X Y Z SEED".into()),
    }
    Ok(())
}
