//! Steps of a job against what can be worked out by hand.
#![allow(clippy::unwrap_used, missing_docs)]

use flexcomm_truth::coefficients::Tcp;
use flexcomm_truth::job::{Mesh, Piece, Program, Round, Send, Software, Stage, Step, Token, run};
use flexcomm_truth::network::{Network, Port};
use flexcomm_truth::trace::Trace;
use rand::SeedableRng;
use rand_chacha::ChaCha8Rng;
use std::sync::Arc;

const NO_SOFTWARE: Software = Software { collective_s: 0.0, round_s: 0.0, byte_s: 0.0 };

fn job(n: usize, rate: f64, latency: f64) -> (Network<Token<()>>, Mesh) {
    let tcp = Tcp { stack_s: 0.0, initial_segments: 1e9, window_bytes: 1e15, ..Tcp::default() };
    let port = Port { rate: Trace::constant(rate), competitors: Trace::constant(0.0), buffer: 1e12, burst: None };
    let mut network = Network::new(tcp, vec![port; 2 * n], ChaCha8Rng::seed_from_u64(1));
    let mut connect = |from: usize, to: usize| {
        (from != to).then(|| network.connect(vec![from, n + to], Trace::constant(latency), Trace::constant(latency)))
    };
    let to = (0..n).map(|from| (0..n).map(|to| connect(from, to)).collect()).collect();
    (network, Mesh { to })
}

/// A ring of `rounds` rounds in which every rank hands `bytes` to the next.
fn ring(n: usize, rounds: u32, bytes: f64) -> Program {
    let round = |rank: usize, index| Round {
        index,
        sends: vec![Send { to: (rank + 1) % n, bytes }],
        receives: 1,
        received_bytes: bytes,
    };
    Program { ranks: (0..n).map(|rank| (0..rounds).map(|index| round(rank, index)).collect()).collect() }
}

fn step(n: usize, buckets: &[f64], exchange: &[Stage]) -> Step {
    let pieces = |_| buckets.iter().enumerate().map(|(b, &seconds)| Piece { seconds, begins: Some(b) }).collect();
    Step {
        compute: (0..n).map(pieces).collect(),
        exchanges: buckets.iter().map(|_| exchange.to_vec()).collect(),
        after: vec![0.5; n],
    }
}

#[test]
fn a_ring_takes_its_rounds() {
    let (n, bytes, rate, latency) = (4, 1e5, 1e6, 0.01);
    let (mut network, mesh) = job(n, rate, latency);
    let program = Stage::Collective(Arc::new(ring(n, 6, bytes)));
    let times = run(&mut network, &mesh, NO_SOFTWARE, &step(n, &[1.0], &[program]), &[0.0; 4], &mut |_, _| ());
    for rank in &times.ranks {
        let span = rank.exchanges[0];
        assert!((span.from - 1.0).abs() < 1e-9, "{rank:?}");
        assert!((span.to - span.from - 6.0 * (latency + bytes / rate)).abs() < 1e-6, "{rank:?}");
        assert!((rank.ended - span.to - 0.5).abs() < 1e-6, "{rank:?}");
    }
}

#[test]
fn exchanges_overlap_with_computing_and_wait_for_one_another() {
    let (mut network, mesh) = job(2, 1e6, 0.0);
    let program = Stage::Collective(Arc::new(ring(2, 1, 1e6)));
    // Buckets are ready at 1, 2 and 4 s; each exchange takes 1 s, decompressing 0.5 s.
    let stages = [program, Stage::Compute(vec![0.5; 2])];
    let times = run(&mut network, &mesh, NO_SOFTWARE, &step(2, &[1.0, 1.0, 2.0], &stages), &[0.0; 2], &mut |_, _| ());
    let ends: Vec<f64> = times.ranks[0].exchanges.iter().map(|span| span.to).collect();
    for (end, expected) in ends.iter().zip([2.5, 4.0, 5.5]) {
        assert!((end - expected).abs() < 1e-6, "{ends:?}");
    }
    assert!((times.ranks[0].computed - 4.0).abs() < 1e-9);
}

#[test]
fn a_late_rank_holds_all_and_software_adds_up() {
    let (mut network, mesh) = job(3, 1e6, 0.0);
    let software = Software { collective_s: 0.1, round_s: 0.01, byte_s: 1e-7 };
    let mut late = step(3, &[1.0], &[Stage::Collective(Arc::new(ring(3, 2, 1e5)))]);
    late.compute[1][0].seconds = 3.0;
    let times = run(&mut network, &mesh, software, &late, &[0.0; 3], &mut |_, _| ());
    // Rank 1 finds both messages there; rank 2 gets them from rank 1 at 3.2 and 3.3 s; rank 0 gets the second from rank 2.
    for (rank, after) in [(1, 0.14), (2, 0.32), (0, 0.34)] {
        assert!((times.ranks[rank].exchanges[0].to - 3.0 - after).abs() < 1e-6, "{times:?}");
    }
    assert!((times.ranks[0].exchanges[0].from - 1.0).abs() < 1e-9);
}
