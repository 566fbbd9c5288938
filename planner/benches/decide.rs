//! How long one call takes, by how many candidates, ranks and buckets there are: of a job that has run for two minutes.

#![allow(missing_docs)] // the macro's function has none

use criterion::{Criterion, criterion_group, criterion_main};
use flexcomm_domain::spec::compressors::COMPRESSORS;
use flexcomm_domain::{CodecBytes, JobId, Link, LinkMatrix, Seconds, Selection, Timestamp};
use flexcomm_planner::{InForce, LinkTest, Links, Measured, Snapshot, decide};
use rand::SeedableRng;
use rand_chacha::ChaCha8Rng;
use std::hint::black_box;

fn seconds(s: f64) -> Seconds {
    Seconds::new(s).expect("a valid duration")
}

/// A job of ResNet50's size that has run for two minutes.
fn job((ranks, per_node): (u32, u32), buckets: u32, compressors: &[&str]) -> (Snapshot, Timestamp) {
    let mut s = Snapshot::new(JobId::new("bench").expect("a name"), ranks, 25_560_000);
    s.compute = Some(seconds(0.05));
    s.buckets = vec![s.gradient_values / u64::from(buckets); buckets as usize];
    s.config.selections = vec![Selection::Star];
    s.config.trial_budget_s = Seconds::ZERO;
    for text in compressors {
        s.offer.codecs.insert(text.parse().expect("a compressor"), CodecBytes::PAPER);
    }
    let link =
        |i: usize, j: usize| Link::new(1e-3 * (1.0 + ((i * 7 + j * 3) % 8) as f64 / 10.0), 1e9).expect("a valid link");
    let matrix = LinkMatrix::from_fn(ranks as usize, link).expect("a valid size");
    let matrix = matrix.on_nodes((0..ranks).map(|rank| rank / per_node).collect()).expect("a node of each");
    let (matrix, nodes) = (matrix.with_local_links(), ranks / per_node);
    let (mut now, mut rng) = (Timestamp(1_000_000_000), ChaCha8Rng::seed_from_u64(1));
    for look in 0..120u32 {
        now = now.plus(seconds(1.0));
        let (from, to) = (look % nodes, (look + 1) % nodes);
        let bandwidth = matrix.get((from * per_node) as usize, (to * per_node) as usize).bandwidth;
        let test = LinkTest { from, to, bandwidth, is_lower_bound: false, is_short: false, at: now };
        let age = seconds(0.5);
        s.links = Some(Links {
            matrix: matrix.clone(),
            age,
            oldest: age,
            confidence: 0.9,
            tests: if from == to { Vec::new() } else { vec![test] },
        });
        let outcome = decide(&s, now, &mut rng);
        s.memory = outcome.memory.clone();
        if let Some(decision) = outcome.decision() {
            s.in_force = Some(InForce { decision: decision.clone(), applied_at_step: Some(1) });
        }
        if let Some(is) = &outcome.report.in_force {
            s.measured = Some(Measured {
                version: s.version(),
                steps: 20,
                t_step: seconds(is.t_step_s),
                t_comp: seconds(is.t_comp_s),
                t_sync: seconds(is.t_sync_s * (1.0 + 1e-3 * f64::from(look % 3))),
                gain: is.gain,
                gain_spread: 0.05,
                scatter: None,
            });
        }
    }
    (s, now.plus(seconds(1.0)))
}

fn decisions(c: &mut Criterion) {
    let few = ["topk", "lwtopk"];
    let many =
        ["topk", "lwtopk", "mstopk", "fp16", "powersgd(rank=1)", "powersgd(rank=4)", "qsgd(s=7,norm=max)", "eightbit"];
    let named: Vec<&str> = COMPRESSORS.iter().flat_map(|compressor| compressor.candidates).copied().collect();
    // Of one bucket there is nothing to search.
    for (ranks, per_node, buckets, compressors) in [
        (8, 1, 1, &few[..]),
        (8, 1, 1, &many[..]),
        (8, 1, 10, &few[..]),
        (8, 1, 10, &many[..]),
        (32, 1, 10, &many[..]),
        (8, 1, 60, &named),
        (512, 8, 10, &many[..]),
    ] {
        let (s, now) = job((ranks, per_node), buckets, compressors);
        let candidates = s.space().strategies().len();
        c.bench_function(&format!("{candidates} candidates, {ranks} ranks, {buckets} buckets"), |b| {
            b.iter(|| decide(black_box(&s), now, &mut ChaCha8Rng::seed_from_u64(1)));
        });
    }
}

criterion_group!(benches, decisions);
criterion_main!(benches);
