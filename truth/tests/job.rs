//! Steps of a job against what can be worked out by hand.
#![allow(clippy::unwrap_used, missing_docs)]

use flexcomm_truth::coefficients::{Coefficients, Tcp};
use flexcomm_truth::job::{Collective, Do, Mesh, Program, Round, Send, Software, Step, Stuck, Token, run};
use flexcomm_truth::network::{Network, Port};
use flexcomm_truth::trace::Trace;
use rand::SeedableRng;
use rand_chacha::ChaCha8Rng;
use std::sync::Arc;

const NO_SOFTWARE: Software = Software::plain(0.0, 0.0, 0.0);

fn job(n: usize, rate: f64, latency: f64) -> (Network<Token<()>>, Mesh) {
    let tcp = Tcp {
        stack_s: 0.0,
        overhead_bytes: 0.0,
        initial_segments: 1e9,
        window_bytes: 1e15,
        ..Coefficients::frozen().tcp
    };
    let port = Port { rate: Trace::constant(rate), competitors: Trace::constant(0.0), buffer: 1e12, burst: None };
    let mut network = Network::new(tcp, vec![port; 2 * n], ChaCha8Rng::seed_from_u64(1));
    let mut connect = |from: usize, to: usize| {
        (from != to).then(|| network.connect(vec![from, n + to], Trace::constant(latency), Trace::constant(latency)))
    };
    let to = (0..n).map(|from| (0..n).map(|to| connect(from, to)).collect()).collect();
    (network, Mesh { groups: vec![to] })
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

/// Each bucket's collective is launched when backward has it; all are waited for in order, half a second of work after each.
fn step(n: usize, buckets: &[f64], program: Program) -> Step {
    let program = Arc::new(program);
    let backward = buckets.iter().enumerate().flat_map(|(b, &seconds)| [Do::Compute(seconds), Do::Launch(b)]);
    let then = (0..buckets.len()).flat_map(|b| [Do::Wait(b), Do::Compute(0.5)]);
    let collective = |_| Collective { group: 0, program: program.clone() };
    Step { ranks: vec![backward.chain(then).collect(); n], collectives: (0..buckets.len()).map(collective).collect() }
}

#[test]
fn a_ring_takes_its_rounds() {
    let (n, bytes, rate, latency) = (4, 1e5, 1e6, 0.01);
    let (mut network, mesh) = job(n, rate, latency);
    let step = step(n, &[1.0], ring(n, 6, bytes));
    let times = run(&mut network, &mesh, NO_SOFTWARE, &step, &[0.0; 4], &mut |_, _| ()).unwrap();
    for rank in &times.ranks {
        let span = rank.collectives[0];
        assert!((span.from - 1.0).abs() < 1e-9, "{rank:?}");
        assert!((span.to - span.from - 6.0 * (latency + bytes / rate)).abs() < 1e-6, "{rank:?}");
        assert_eq!(rank.done, [1.0, 1.0, span.to, rank.ended]);
        assert!((rank.ended - span.to - 0.5).abs() < 1e-6, "{rank:?}");
    }
}

#[test]
fn collectives_overlap_with_computing_and_wait_for_one_another() {
    let (mut network, mesh) = job(2, 1e6, 0.0);
    // Buckets are ready at 1, 2 and 4 s; each collective takes 1.5 s.
    let step = step(2, &[1.0, 1.0, 2.0], ring(2, 1, 1.5e6));
    let times = run(&mut network, &mesh, NO_SOFTWARE, &step, &[0.0; 2], &mut |_, _| ()).unwrap();
    let near = |found: f64, expected: f64| assert!((found - expected).abs() < 1e-6, "{times:?}");
    for (span, end) in times.ranks[0].collectives.iter().zip([2.5, 4.0, 5.5]) {
        near(span.to, end);
    }
    // The work after the first two fits beside the last one.
    near(times.ranks[0].ended, 6.0);
}

#[test]
fn a_late_rank_holds_all_and_software_adds_up() {
    let (mut network, mesh) = job(3, 1e6, 0.0);
    let software = Software::plain(0.1, 0.01, 1e-7);
    let mut late = step(3, &[1.0], ring(3, 2, 1e5));
    late.ranks[1][0] = Do::Compute(3.0);
    let times = run(&mut network, &mesh, software, &late, &[0.0; 3], &mut |_, _| ()).unwrap();
    // Rank 1 finds both messages there; rank 2 gets them from rank 1 at 3.2 and 3.3 s; rank 0 gets the second from rank 2.
    for (rank, after) in [(1, 0.14), (2, 0.32), (0, 0.34)] {
        assert!((times.ranks[rank].collectives[0].to - 3.0 - after).abs() < 1e-6, "{times:?}");
    }
    assert!((times.ranks[0].collectives[0].from - 1.0).abs() < 1e-9);
}

/// Rounds of latency until the last of so many small rings ended.
fn latencies(software: Software, collectives: usize) -> f64 {
    let (n, latency) = (4, 0.02);
    let (mut network, mesh) = job(n, 1e9, latency);
    let step = step(n, &vec![0.0; collectives], ring(n, 6, 64.0));
    let times = run(&mut network, &mesh, software, &step, &[0.0; 4], &mut |_, _| ()).unwrap();
    times.ranks[0].collectives.last().unwrap().to / latency
}

/// What Gloo was seen to take on links of 20 ms: rounds of latency there and back, two collectives at once.
#[test]
fn a_receiver_is_waited_for_and_collectives_run_beside_one_another() {
    let gloo = Software { rendezvous: true, at_once: 2, segments: 2, ..NO_SOFTWARE };
    let near = |found: f64, rounds: f64| assert!((found - rounds).abs() < 1e-3, "{found} {rounds}");
    near(latencies(NO_SOFTWARE, 1), 6.0);
    near(latencies(Software { rendezvous: true, ..NO_SOFTWARE }, 1), 12.0);
    for (collectives, rounds) in [(1, 12.0), (2, 12.0), (3, 24.0)] {
        near(latencies(gloo, collectives), rounds);
    }
    near(latencies(Software { at_once: 2, ..NO_SOFTWARE }, 4), 12.0);
}

#[test]
fn segments_fill_the_time_in_which_the_other_waits() {
    let (n, bytes, rate, latency) = (4, 1e5, 1e6, 0.01);
    let ended = |segments| {
        let (mut network, mesh) = job(n, rate, latency);
        let step = step(n, &[0.0], ring(n, 6, bytes));
        let software = Software { rendezvous: true, segments, ..NO_SOFTWARE };
        let times = run(&mut network, &mesh, software, &step, &[0.0; 4], &mut |_, _| ()).unwrap();
        times.ranks[0].collectives[0].to
    };
    assert!((ended(1) - 6.0 * (2.0 * latency + bytes / rate)).abs() < 1e-3, "{}", ended(1));
    // The link is never idle but before the first and after the last message.
    assert!((ended(2) - (2.0 * latency + 6.0 * bytes / rate)).abs() < 1e-3, "{}", ended(2));
}

#[test]
fn software_of_collectives_under_way_at_once_takes_turns() {
    let (mut network, mesh) = job(2, 1e9, 0.0);
    let software = Software { at_once: 2, ..Software::plain(0.1, 0.0, 0.0) };
    let times =
        run(&mut network, &mesh, software, &step(2, &[0.0; 2], ring(2, 1, 1.0)), &[0.0; 2], &mut |_, _| ()).unwrap();
    assert!((times.ranks[0].collectives[1].to - 0.2).abs() < 1e-6, "{times:?}");
}

#[test]
fn ranks_on_one_processor_take_turns() {
    let (mut network, mesh) = job(2, 1e9, 0.0);
    let software = Software { one_processor: true, ..Software::plain(0.1, 0.0, 0.0) };
    let times =
        run(&mut network, &mesh, software, &step(2, &[1.0], ring(2, 1, 1.0)), &[0.0; 2], &mut |_, _| ()).unwrap();
    let [first, second] = &times.ranks[..] else { unreachable!() };
    // The second computes after the first; what begins the first's collective waits for that, and takes in its message after the
    // second's own work.
    assert!((first.done[0] - 1.0).abs() < 1e-9 && (second.done[0] - 2.0).abs() < 1e-9, "{times:?}");
    assert!((second.collectives[0].to - 2.2).abs() < 1e-6 && (second.ended - 2.7).abs() < 1e-6, "{times:?}");
    assert!((first.collectives[0].to - 2.7).abs() < 1e-6 && (first.ended - 3.2).abs() < 1e-6, "{times:?}");
}

#[test]
fn groups_do_not_wait_for_one_another() {
    let (mut network, mut mesh) = job(2, 1e6, 0.0);
    mesh.groups.push(mesh.groups[0].clone());
    let mut step = step(2, &[0.0, 0.0], ring(2, 1, 1e6));
    let to = |step: &Step, network: &mut Network<Token<()>>| {
        let times = run(network, &mesh, NO_SOFTWARE, step, &[network.now(); 2], &mut |_, _| ()).unwrap();
        times.ranks[0].collectives[1].from - times.ranks[0].began
    };
    assert!((to(&step, &mut network) - 1.0).abs() < 1e-6);
    step.collectives[1].group = 1;
    assert_eq!(to(&step, &mut network), 0.0);
}

#[test]
fn a_step_that_cannot_end_is_an_error() {
    let (mut network, mesh) = job(2, 1e6, 0.01);
    let mut program = ring(2, 1, 10.0);
    program.ranks[1][0].sends.clear();
    let step = step(2, &[1.0], program);
    let ended = run(&mut network, &mesh, NO_SOFTWARE, &step, &[0.0; 2], &mut |_, _| ());
    assert_eq!(ended, Err(Stuck { rank: 0, collective: 0 }));
    // Whatever else goes on for ever.
    let others = &mut |network: &mut Network<Token<()>>, _| network.timer(network.now() + 1.0, Token::Other(()));
    network.timer(0.0, Token::Other(()));
    let starts = [network.now(); 2];
    assert_eq!(run(&mut network, &mesh, NO_SOFTWARE, &step, &starts, others), Err(Stuck { rank: 0, collective: 0 }));
}
