//! The simulator equals the closed forms on equal links, and finds the critical path on unequal ones.
#![allow(clippy::unwrap_used)] // helpers of tests are tests

mod common;

use common::every_kind;
use flexcomm_collectives::{
    Schedule, SimulateError, allgather, binomial_broadcast, ring_allgather, ring_allreduce, simulate, simulate_after,
    tree_allreduce,
};
use flexcomm_domain::{Link, LinkMatrix, Rank};
use proptest::prelude::*;

fn link(alpha_s: f64, beta: f64) -> Link {
    Link::new(alpha_s, 8.0 / beta).unwrap()
}

fn time(schedule: &Schedule, bytes: f64, links: &LinkMatrix) -> f64 {
    simulate(schedule, &|_| bytes, links).unwrap().get()
}

fn close(got: f64, want: f64) -> bool {
    (got - want).abs() <= 1e-9 * want.abs().max(1e-12)
}

proptest! {
    #[test]
    fn equal_links_give_the_closed_forms(log in 0u32..7, a in 1e-6..0.1f64, b in 1e-11..1e-6f64, m in 1.0..1e8f64) {
        let n = 1u32 << log;
        let (nf, log) = (f64::from(n), f64::from(log));
        let links = LinkMatrix::uniform(n as usize, link(a, b)).unwrap();
        let ring = time(&ring_allreduce(n).unwrap(), m / nf, &links);
        prop_assert!(close(ring, 2.0 * (nf - 1.0) * a + 2.0 * (nf - 1.0) / nf * m * b));
        let tree = time(&tree_allreduce(n).unwrap(), m, &links);
        prop_assert!(close(tree, 2.0 * a * log + 2.0 * log * m * b));
        let broadcast = time(&binomial_broadcast(n, Rank(n / 3)).unwrap(), m, &links);
        prop_assert!(close(broadcast, a * log + log * m * b));
        let gather = time(&allgather(n).unwrap(), m, &links);
        prop_assert!(close(gather, a * log + (nf - 1.0) * m * b));
    }

    /// AR-Topk is a broadcast of indices followed by an allreduce of values. On equal links each rank may begin
    /// the second half when it has its indices, so the sum of the closed forms is an upper bound, and the
    /// allreduce alone after the last index a lower one.
    #[test]
    fn art_is_a_broadcast_and_an_allreduce(log in 1u32..7, a in 1e-6..0.1f64, b in 1e-11..1e-6f64, mc in 1.0..1e8f64) {
        let n = 1u32 << log;
        let (nf, log) = (f64::from(n), f64::from(log));
        let links = LinkMatrix::uniform(n as usize, link(a, b)).unwrap();
        let start = simulate_after(&binomial_broadcast(n, Rank(1)).unwrap(), &|_| mc, &links, &vec![0.0; n as usize]).unwrap();
        let finish = simulate_after(&ring_allreduce(n).unwrap(), &|_| mc / nf, &links, &start).unwrap();
        let art_ring = finish.into_iter().fold(0.0, f64::max);
        let closed = a * (2.0 * (nf - 1.0) + log) + mc * b * (2.0 * (nf - 1.0) / nf + log);
        prop_assert!(art_ring <= closed * (1.0 + 1e-9));
        prop_assert!(art_ring >= (closed - a * log - mc * b * log) * (1.0 - 1e-9));
    }

    #[test]
    fn any_n_ring_is_the_closed_form(n in 1u32..40, a in 1e-6..0.1f64, b in 1e-11..1e-6f64, m in 1.0..1e8f64) {
        let nf = f64::from(n);
        let links = LinkMatrix::uniform(n as usize, link(a, b)).unwrap();
        let ring = time(&ring_allreduce(n).unwrap(), m / nf, &links);
        prop_assert!(close(ring, 2.0 * (nf - 1.0) * (a + m / nf * b)));
        let gather = time(&ring_allgather(n).unwrap(), m, &links);
        prop_assert!(close(gather, (nf - 1.0) * (a + m * b)));
    }

    /// Unequal links cost at least what the best of them would, at most what the worst would.
    #[test]
    fn unequal_links_lie_between_best_and_worst(
        n in 2u32..10,
        kind: prop::sample::Index,
        bytes in 1.0..1e7f64,
        links in prop::collection::vec((1e-6..0.1f64, 1e-10..1e-6f64), 100),
    ) {
        let schedule = kind.get(&every_kind(n)).clone();
        let n = n as usize;
        let matrix = LinkMatrix::from_fn(n, |i, j| link(links[i * 10 + j].0, links[i * 10 + j].1)).unwrap();
        let pairs = (0..n * n).map(|p| (p / n, p % n)).filter(|(i, j)| i != j);
        let off = pairs.map(|(i, j)| links[i * 10 + j]);
        let best = off.fold((1.0f64, 1.0f64), |a, l| (a.0.min(l.0), a.1.min(l.1)));
        let worst = LinkMatrix::uniform(n, matrix.worst()).unwrap();
        let best = LinkMatrix::uniform(n, link(best.0, best.1)).unwrap();
        let got = time(&schedule, bytes, &matrix);
        prop_assert!(got >= time(&schedule, bytes, &best) * (1.0 - 1e-9));
        prop_assert!(got <= time(&schedule, bytes, &worst) * (1.0 + 1e-9));
    }
}

/// One edge of the ring has a hundredth of the bandwidth: it carries 2(N-1)/N of the bytes, and nothing else matters.
#[test]
fn a_ring_is_as_slow_as_its_slowest_edge() {
    let (n, m, slow) = (8u32, 8e6, 8e-7);
    let matrix = LinkMatrix::from_fn(8, |i, j| link(1e-6, if (i, j) == (3, 4) { slow } else { slow / 100.0 })).unwrap();
    let ring = time(&ring_allreduce(n).unwrap(), m / 8.0, &matrix);
    let edge = 2.0 * 7.0 / 8.0 * m * slow;
    assert!(ring >= edge && ring <= edge * 1.2, "{ring} against {edge}");
    // A tree that does not use that edge does not care.
    let fast = LinkMatrix::uniform(8, link(1e-6, slow / 100.0)).unwrap();
    let tree = tree_allreduce(n).unwrap();
    assert!(tree.transfers().all(|t| (t.from, t.to) != (Rank(3), Rank(4))));
    assert_eq!(time(&tree, m, &matrix), time(&tree, m, &fast));
}

/// Messages of one rank share its NIC: a root that sends to three others at once needs three times the bytes.
#[test]
fn sends_of_one_rank_serialise() {
    use flexcomm_collectives::{Chunks, Goal, Op, Transfer};
    let to = |r| Transfer { from: Rank(0), to: Rank(r), chunks: Chunks::one(0), op: Op::Copy };
    let rounds = vec![vec![to(1), to(2), to(3)]];
    let star = Schedule { ranks: 4, chunks: 1, goal: Goal::Broadcast { root: Rank(0) }, rounds };
    let links = LinkMatrix::uniform(4, link(0.5, 1e-3)).unwrap();
    let finish = simulate_after(&star, &|_| 1000.0, &links, &[0.0; 4]).unwrap();
    assert_eq!(finish, [3.0, 1.5, 2.5, 3.5]);
    // And into one rank: its NIC takes one after the other.
    let from = |r| Transfer { from: Rank(r), to: Rank(0), chunks: Chunks::one(r), op: Op::Copy };
    let rounds = vec![vec![from(1), from(2), from(3)]];
    let incast = Schedule { ranks: 4, chunks: 4, goal: Goal::Allgather, rounds };
    let finish = simulate_after(&incast, &|_| 1000.0, &links, &[0.0; 4]).unwrap();
    assert_eq!(finish, [3.5, 1.0, 1.0, 1.0]);
}

/// Ranks of one node share its NIC, first come, first served; what they send each other passes beside it.
#[test]
fn ranks_of_one_node_share_its_nic() {
    use flexcomm_collectives::{Chunks, Goal, Op, Transfer};
    let message = |from, to| Transfer { from: Rank(from), to: Rank(to), chunks: Chunks::one(from), op: Op::Copy };
    let rounds = vec![vec![message(0, 2), message(1, 3), message(2, 3)]];
    let schedule = Schedule { ranks: 4, chunks: 4, goal: Goal::Allgather, rounds };
    let finish = |nodes: [u32; 4], start: [f64; 4]| {
        let links = LinkMatrix::uniform(4, link(0.5, 1e-3)).unwrap().on_nodes(nodes.to_vec()).unwrap();
        simulate_after(&schedule, &|_| 1000.0, &links, &start).unwrap()
    };
    // Rank 3 receives two messages through a NIC of its own, one by one.
    assert_eq!(finish([0, 1, 2, 3], [0.0; 4]), [1.0, 1.0, 1.5, 2.5]);
    // Of the two that leave node 0 the second waits; rank 2's comes by another way.
    assert_eq!(finish([0, 0, 1, 1], [0.0; 4]), [1.0, 2.0, 1.5, 2.5]);
    // Rank 0 is late: rank 1 does not wait for it.
    assert_eq!(finish([0, 0, 1, 1], [4.0, 0.0, 0.0, 0.0]), [5.0, 1.0, 5.5, 1.5]);
}

#[test]
fn a_late_rank_delays_those_that_need_it() {
    let broadcast = binomial_broadcast(4, Rank(0)).unwrap();
    let links = LinkMatrix::uniform(4, link(1.0, 1e-9)).unwrap();
    let finish = simulate_after(&broadcast, &|_| 0.0, &links, &[0.0, 0.0, 10.0, 0.0]).unwrap();
    assert_eq!(finish, [0.0, 1.0, 10.0, 11.0]);
}

#[test]
fn bad_input_is_named() {
    let ring = ring_allreduce(3).unwrap();
    let three = LinkMatrix::uniform(3, link(1e-3, 1e-9)).unwrap();
    let four = LinkMatrix::uniform(4, link(1e-3, 1e-9)).unwrap();
    assert_eq!(simulate(&ring, &|_| 1.0, &four), Err(SimulateError::Ranks { schedule: 3, matrix: 4 }));
    assert!(matches!(simulate(&ring, &|_| f64::NAN, &three), Err(SimulateError::Bytes { chunk: 0, .. })));
    assert!(matches!(simulate(&ring, &|c| -(c as f64), &three), Err(SimulateError::Bytes { chunk: 1, .. })));
    assert!(matches!(simulate(&ring, &|_| 1e300, &three), Err(SimulateError::Time(_))));
    let late = simulate_after(&ring, &|_| 1.0, &three, &[0.0, f64::NAN, 0.0]);
    assert!(matches!(late, Err(SimulateError::Start { rank: 1, .. })));
    assert!(matches!(simulate_after(&ring, &|_| 1.0, &three, &[0.0]), Err(SimulateError::Starts { .. })));
    let mut broken = ring;
    broken.rounds[0][0].to = Rank(3);
    assert!(matches!(simulate(&broken, &|_| 1.0, &three), Err(SimulateError::Outside { round: 0, .. })));
}
