//! Steps of a job against what can be worked out by hand.
#![allow(clippy::unwrap_used, missing_docs)]

use flexcomm_truth::coefficients::Tcp;
use flexcomm_truth::job::{Mesh, Piece, Program, Round, Send, Software, Stage, Step, Stuck, Token, run};
use flexcomm_truth::network::{Network, Port};
use flexcomm_truth::trace::Trace;
use rand::SeedableRng;
use rand_chacha::ChaCha8Rng;
use std::sync::Arc;

const NO_SOFTWARE: Software = Software::plain(0.0, 0.0, 0.0);

fn job(n: usize, rate: f64, latency: f64) -> (Network<Token<()>>, Mesh) {
    let tcp = Tcp { stack_s: 0.0, initial_segments: 1e9, window_bytes: 1e15, ..Tcp::default() };
    let port = Port { rate: Trace::constant(rate), competitors: Trace::constant(0.0), buffer: 1e12, burst: None };
    let mut network = Network::new(tcp, vec![port; 2 * n], ChaCha8Rng::seed_from_u64(1));
    let mut connect = |from: usize, to: usize| {
        (from != to).then(|| network.connect(vec![from, n + to], Trace::constant(latency), Trace::constant(latency)))
    };
    let mut each = || (0..n).map(|from| (0..n).map(|to| connect(from, to)).collect()).collect();
    let (to, control) = (each(), each());
    (network, Mesh { to, control })
}

/// A ring of `rounds` rounds in which every rank hands `bytes` to the next.
fn ring(n: usize, rounds: u32, bytes: f64) -> Program {
    let round = |rank: usize, index| Round {
        index,
        sends: vec![Send { to: (rank + 1) % n, bytes }],
        senders: vec![(rank + n - 1) % n],
        received_bytes: bytes,
    };
    let ranks = (0..n).map(|rank| (0..rounds).map(|index| round(rank, index)).collect()).collect();
    Program { ranks, segmented: true }
}

fn step(n: usize, buckets: &[f64], exchange: &[Stage]) -> Step {
    let pieces = |_| buckets.iter().enumerate().map(|(b, &seconds)| Piece { seconds, begins: Some(b) }).collect();
    Step {
        compute: (0..n).map(pieces).collect(),
        exchanges: buckets.iter().map(|_| exchange.to_vec()).collect(),
        after: vec![0.5; n],
        control: Vec::new(),
    }
}

#[test]
fn a_ring_takes_its_rounds() {
    let (n, bytes, rate, latency) = (4, 1e5, 1e6, 0.01);
    let (mut network, mesh) = job(n, rate, latency);
    let program = Stage::Collective(Arc::new(ring(n, 6, bytes)));
    let times = run(&mut network, &mesh, NO_SOFTWARE, &step(n, &[1.0], &[program]), &[0.0; 4], &mut |_, _| ()).unwrap();
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
    let times =
        run(&mut network, &mesh, NO_SOFTWARE, &step(2, &[1.0, 1.0, 2.0], &stages), &[0.0; 2], &mut |_, _| ()).unwrap();
    let ends: Vec<f64> = times.ranks[0].exchanges.iter().map(|span| span.to).collect();
    for (end, expected) in ends.iter().zip([2.5, 4.0, 5.5]) {
        assert!((end - expected).abs() < 1e-6, "{ends:?}");
    }
    assert!((times.ranks[0].computed - 4.0).abs() < 1e-9);
}

#[test]
fn a_late_rank_holds_all_and_software_adds_up() {
    let (mut network, mesh) = job(3, 1e6, 0.0);
    let software = Software::plain(0.1, 0.01, 1e-7);
    let mut late = step(3, &[1.0], &[Stage::Collective(Arc::new(ring(3, 2, 1e5)))]);
    late.compute[1][0].seconds = 3.0;
    let times = run(&mut network, &mesh, software, &late, &[0.0; 3], &mut |_, _| ()).unwrap();
    // Rank 1 finds both messages there; rank 2 gets them from rank 1 at 3.2 and 3.3 s; rank 0 gets the second from rank 2.
    for (rank, after) in [(1, 0.14), (2, 0.32), (0, 0.34)] {
        assert!((times.ranks[rank].exchanges[0].to - 3.0 - after).abs() < 1e-6, "{times:?}");
    }
    assert!((times.ranks[0].exchanges[0].from - 1.0).abs() < 1e-9);
}

/// What Gloo was seen to take on links of 20 ms: rounds of latency there and back, two collectives at once.
#[test]
fn a_receiver_is_waited_for_and_collectives_run_beside_one_another() {
    let (n, latency) = (4, 0.02);
    let small = |software: Software, exchanges: usize| {
        let (mut network, mesh) = job(n, 1e9, latency);
        let program = Stage::Collective(Arc::new(ring(n, 6, 64.0)));
        let step = step(n, &vec![0.0; exchanges], &[program]);
        let times = run(&mut network, &mesh, software, &step, &[0.0; 4], &mut |_, _| ()).unwrap();
        times.ranks[0].ended - 0.5
    };
    let gloo = Software { rendezvous: true, at_once: 2, segments: 2, ..NO_SOFTWARE };
    let near = |seconds: f64, rounds: f64| assert!((seconds / latency - rounds).abs() < 1e-3, "{seconds} {rounds}");
    near(small(NO_SOFTWARE, 1), 6.0);
    near(small(Software { rendezvous: true, ..NO_SOFTWARE }, 1), 12.0);
    for (exchanges, rounds) in [(1, 12.0), (2, 12.0), (3, 24.0)] {
        near(small(gloo, exchanges), rounds);
    }
    near(small(Software { at_once: 2, ..NO_SOFTWARE }, 4), 12.0);
}

#[test]
fn a_control_group_runs_beside_the_exchanges_and_is_waited_for_at_the_end() {
    let run = |rounds: u32| {
        let (mut network, mesh) = job(4, 1e9, 0.01);
        let stage = |rounds| Stage::Collective(Arc::new(ring(4, rounds, 64.0)));
        let control = if rounds > 0 { vec![stage(rounds)] } else { Vec::new() };
        let step = Step { control, ..step(4, &[1.0, 0.2], &[stage(6)]) };
        let times = run(&mut network, &mesh, NO_SOFTWARE, &step, &[0.0; 4], &mut |_, _| ()).unwrap();
        assert!(times.ranks.iter().all(|rank| (rank.ended - times.ranks[0].ended).abs() < 1e-6), "{times:?}");
        (times.ranks[0].exchanges.clone(), times.ranks[0].ended)
    };
    let near = |a: f64, b: f64| assert!((a - b).abs() < 1e-4, "{a} {b}");
    let (alone, ended) = run(0);
    near(ended, 1.2 + 0.06 + 0.5);
    // It begins at 1 s, with the first bucket; 70 rounds end before the optimizer does, 90 after it.
    for (rounds, expected) in [(70, ended), (90, 1.9)] {
        let (spans, ended) = run(rounds);
        near(ended, expected);
        for (span, alone) in spans.iter().zip(&alone) {
            near(span.from, alone.from);
            near(span.to, alone.to);
        }
    }
}

#[test]
fn segments_fill_the_time_in_which_the_other_waits() {
    let (n, bytes, rate, latency) = (4, 1e5, 1e6, 0.01);
    let ended = |segments| {
        let (mut network, mesh) = job(n, rate, latency);
        let program = Stage::Collective(Arc::new(ring(n, 6, bytes)));
        let software = Software { rendezvous: true, segments, ..NO_SOFTWARE };
        let times =
            run(&mut network, &mesh, software, &step(n, &[0.0], &[program]), &[0.0; 4], &mut |_, _| ()).unwrap();
        times.ranks[0].ended - 0.5
    };
    assert!((ended(1) - 6.0 * (2.0 * latency + bytes / rate)).abs() < 1e-3, "{}", ended(1));
    // The link is never idle but before the first and after the last message.
    assert!((ended(2) - (2.0 * latency + 6.0 * bytes / rate)).abs() < 1e-3, "{}", ended(2));
}

#[test]
fn software_of_exchanges_under_way_at_once_takes_turns() {
    let (mut network, mesh) = job(2, 1e9, 0.0);
    let software = Software { at_once: 2, ..Software::plain(0.1, 0.0, 0.0) };
    let program = Stage::Collective(Arc::new(ring(2, 1, 1.0)));
    let times = run(&mut network, &mesh, software, &step(2, &[0.0; 2], &[program]), &[0.0; 2], &mut |_, _| ()).unwrap();
    assert!((times.ranks[0].exchanges[1].to - 0.2).abs() < 1e-6, "{times:?}");
}

#[test]
fn a_step_that_cannot_end_is_an_error() {
    let (mut network, mesh) = job(2, 1e6, 0.01);
    let mut program = ring(2, 1, 10.0);
    program.ranks[1][0].sends.clear();
    let program = Stage::Collective(Arc::new(program));
    let ended = run(&mut network, &mesh, NO_SOFTWARE, &step(2, &[1.0], &[program]), &[0.0; 2], &mut |_, _| ());
    assert_eq!(ended, Err(Stuck { rank: 0, exchange: 0 }));
}
