//! Every generator for every N up to 64 is proven, and broken schedules are refused.
#![allow(clippy::unwrap_used)] // helpers of tests are tests

mod common;

use common::every_kind;
use flexcomm_collectives::{
    Chunks, Goal, Move, Op, Round, Schedule, Transfer, VerifyError, binomial_broadcast, ring_allreduce, tree_allreduce,
    verify, verify_views,
};
use flexcomm_domain::Rank;
use proptest::prelude::*;

/// Runs a schedule on numbers, round by round, reading what was there when the round began; answers whether the goal
/// is reached. It knows nothing of sets or views: an independent judge for the verifier.
fn reaches_goal_on_numbers(schedule: &Schedule) -> bool {
    let (n, chunks) = (schedule.ranks as usize, schedule.chunks as usize);
    // Odd constants far apart: a sum with a wrong count of any term meets the right one with probability 2^-64.
    let own = |rank: usize, chunk: usize| {
        ((rank * 4096 + chunk) as u64 + 1).wrapping_mul(0x9e37_79b9_7f4a_7c15).rotate_left(29)
    };
    let garbage = |rank: usize, chunk: usize| own(rank + 7919, chunk);
    let has = |rank: usize, chunk: usize| match schedule.goal {
        Goal::Allreduce => true,
        Goal::Allgather => rank == chunk,
        Goal::Broadcast { root } => rank == root.index(),
    };
    let first = |r: usize, c: usize| if has(r, c) { own(r, c) } else { garbage(r, c) };
    let mut data: Vec<Vec<u64>> = (0..n).map(|r| (0..chunks).map(|c| first(r, c)).collect()).collect();
    for round in &schedule.rounds {
        let before = data.clone();
        for t in round {
            for chunk in t.chunks.range() {
                let value = before[t.from.index()][chunk];
                let mine = &mut data[t.to.index()][chunk];
                *mine = if t.op == Op::Copy { value } else { mine.wrapping_add(value) };
            }
        }
    }
    let want = |chunk: usize| match schedule.goal {
        Goal::Allreduce => (0..n).fold(0u64, |sum, r| sum.wrapping_add(own(r, chunk))),
        Goal::Allgather => own(chunk, chunk),
        Goal::Broadcast { root } => own(root.index(), chunk),
    };
    data.iter().all(|rank| rank.iter().enumerate().all(|(c, v)| *v == want(c)))
}

#[test]
fn every_generator_reaches_its_goal_for_every_n() {
    for n in 1..=64 {
        for schedule in every_kind(n) {
            verify(&schedule).unwrap_or_else(|e| panic!("{:?} of {n}: failed to {e}", schedule.goal));
            assert!(reaches_goal_on_numbers(&schedule), "{:?} of {n}", schedule.goal);
        }
        for root in 0..n {
            verify(&binomial_broadcast(n, Rank(root)).unwrap()).unwrap();
        }
    }
}

/// Every generated schedule is lean: without any one of its transfers it fails.
#[test]
fn no_transfer_can_be_left_out() {
    for n in 2..=9 {
        for schedule in every_kind(n) {
            for round in 0..schedule.rounds.len() {
                for i in 0..schedule.rounds[round].len() {
                    let mut broken = schedule.clone();
                    broken.rounds[round].remove(i);
                    assert!(verify(&broken).is_err(), "{:?} of {n} without {round}/{i}", schedule.goal);
                }
            }
        }
    }
}

#[test]
fn no_operation_can_be_the_other_one() {
    for n in 2..=9 {
        for schedule in every_kind(n) {
            for round in 0..schedule.rounds.len() {
                for i in 0..schedule.rounds[round].len() {
                    let mut broken = schedule.clone();
                    let op = &mut broken.rounds[round][i].op;
                    *op = if *op == Op::Copy { Op::Reduce } else { Op::Copy };
                    assert!(verify(&broken).is_err(), "{:?} of {n} with {round}/{i} changed", schedule.goal);
                }
            }
        }
    }
}

#[derive(Debug, Clone)]
enum Mutation {
    From(u32),
    To(u32),
    Chunk(u32),
    Count(u32),
    Twice,
    SwapRounds(prop::sample::Index),
    DropRound,
    AnotherGoal(u32),
    MoveToRound(prop::sample::Index),
}

fn mutation() -> impl Strategy<Value = Mutation> {
    prop_oneof![
        (0u32..20).prop_map(Mutation::From),
        (0u32..20).prop_map(Mutation::To),
        (0u32..20).prop_map(Mutation::Chunk),
        prop_oneof![0u32..5, Just(u32::MAX)].prop_map(Mutation::Count),
        Just(Mutation::Twice),
        any::<prop::sample::Index>().prop_map(Mutation::SwapRounds),
        Just(Mutation::DropRound),
        (0u32..20).prop_map(Mutation::AnotherGoal),
        any::<prop::sample::Index>().prop_map(Mutation::MoveToRound),
    ]
}

fn mutate(schedule: &mut Schedule, round: prop::sample::Index, at: prop::sample::Index, mutation: &Mutation) {
    let rounds = schedule.rounds.len();
    let round = round.index(rounds);
    if schedule.rounds[round].is_empty() {
        return;
    }
    let at = at.index(schedule.rounds[round].len());
    let transfer = &mut schedule.rounds[round][at];
    match mutation {
        Mutation::From(rank) => transfer.from = Rank(*rank),
        Mutation::To(rank) => transfer.to = Rank(*rank),
        Mutation::Chunk(chunk) => transfer.chunks.first = *chunk,
        Mutation::Count(count) => transfer.chunks.count = *count,
        Mutation::Twice => {
            let again = *transfer;
            schedule.rounds[round].push(again);
        }
        Mutation::SwapRounds(other) => schedule.rounds.swap(round, other.index(rounds)),
        Mutation::DropRound => schedule.rounds[round].clear(),
        Mutation::AnotherGoal(root) => schedule.goal = Goal::Broadcast { root: Rank(*root) },
        Mutation::MoveToRound(other) => {
            let moved = schedule.rounds[round].remove(at);
            schedule.rounds[other.index(rounds)].push(moved);
        }
    }
}

fn is_well_formed(schedule: &Schedule) -> bool {
    schedule
        .transfers()
        .all(|t| t.from.0.max(t.to.0) < schedule.ranks && t.chunks.range().end <= schedule.chunks as usize)
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(2000))]

    /// Whatever is done to a schedule: what the verifier accepts is right on numbers too.
    #[test]
    fn what_is_accepted_is_right(
        n in 2u32..12,
        kind: prop::sample::Index,
        round: prop::sample::Index,
        at: prop::sample::Index,
        mutations in prop::collection::vec(mutation(), 1..3),
    ) {
        let mut schedule = kind.get(&every_kind(n)).clone();
        for m in &mutations {
            mutate(&mut schedule, round, at, m);
        }
        let verdict = verify(&schedule);
        let right = is_well_formed(&schedule) && reaches_goal_on_numbers(&schedule);
        prop_assert!(verdict.is_err() || right, "{mutations:?}: accepted");
    }

    /// Garbage gets an error, never a panic or an endless loop.
    #[test]
    fn any_schedule_is_judged(
        ranks in 0u32..5,
        chunks in 0u32..5,
        rounds in prop::collection::vec(prop::collection::vec((0u32..6, 0u32..6, 0u32..6, 0u32..3, any::<bool>()), 0..4), 0..4),
    ) {
        let transfer = |(from, to, first, count, copy)| Transfer {
            from: Rank(from),
            to: Rank(to),
            chunks: Chunks { first, count },
            op: if copy { Op::Copy } else { Op::Reduce },
        };
        let rounds = rounds.into_iter().map(|r: Vec<_>| r.into_iter().map(transfer).collect()).collect();
        let schedule = Schedule { ranks, chunks, goal: Goal::Allreduce, rounds };
        let accepted = verify(&schedule).is_ok();
        prop_assert!(!accepted || reaches_goal_on_numbers(&schedule));
    }
}

#[test]
fn the_reason_is_named() {
    let ring = || ring_allreduce(4).unwrap();
    let mut twice = ring();
    let again = twice.rounds[0][1];
    twice.rounds[0].push(again);
    assert!(matches!(verify(&twice), Err(VerifyError::Race { round: 0, rank: Rank(2), .. })));

    let mut twice = ring();
    twice.rounds.insert(1, vec![again]);
    assert!(matches!(verify(&twice), Err(VerifyError::Twice { round: 1, from: Rank(1), to: Rank(2), .. })));

    let mut short = ring();
    short.rounds.pop();
    assert!(matches!(verify(&short), Err(VerifyError::Goal { .. })));

    let mut early = binomial_broadcast(4, Rank(0)).unwrap();
    early.rounds.swap(0, 1);
    assert!(matches!(verify(&early), Err(VerifyError::Nothing { round: 0, from: Rank(2), chunk: 0 })));

    let mut outside = ring();
    outside.rounds[0][0].to = Rank(4);
    assert!(matches!(verify(&outside), Err(VerifyError::Outside { .. })));

    let mut itself = ring();
    itself.rounds[0][0].to = itself.rounds[0][0].from;
    assert!(matches!(verify(&itself), Err(VerifyError::Outside { .. })));

    let mut empty = tree_allreduce(1).unwrap();
    empty.chunks = 0;
    assert!(matches!(verify(&empty), Err(VerifyError::Shape { .. })));

    let mut cut = ring();
    cut.goal = Goal::Allgather;
    cut.chunks = 5;
    assert!(matches!(verify(&cut), Err(VerifyError::Shape { .. })));
}

fn send(peer: u32) -> Move {
    Move { peer: Rank(peer), chunks: Chunks::one(0), op: Op::Copy }
}

/// Three ranks that each wait for the left neighbour before they send to the right one.
#[test]
fn a_circle_of_waiting_is_a_deadlock() {
    let view = |r: u32| {
        vec![
            Round { index: 0, sends: vec![], recvs: vec![send((r + 2) % 3)] },
            Round { index: 1, sends: vec![send((r + 1) % 3)], recvs: vec![] },
        ]
    };
    let views: Vec<_> = (0..3).map(view).collect();
    let error = verify_views(&views, 1, Goal::Broadcast { root: Rank(0) }).unwrap_err();
    assert_eq!(error, VerifyError::Deadlock { rank: Rank(0), round: 0 });
}

#[test]
fn a_message_that_no_one_awaits_is_a_deadlock() {
    let views = vec![vec![Round { index: 0, sends: vec![send(1)], recvs: vec![] }], vec![]];
    let error = verify_views(&views, 1, Goal::Broadcast { root: Rank(0) }).unwrap_err();
    assert_eq!(error, VerifyError::Deadlock { rank: Rank(0), round: 0 });
}

#[test]
fn sides_that_speak_of_different_messages_are_refused() {
    let ring = ring_allreduce(4).unwrap();
    let mut views: Vec<_> = (0..4).map(|r| ring.for_rank(Rank(r))).collect();
    verify_views(&views, 4, Goal::Allreduce).unwrap();
    views[2][1].recvs[0].op = Op::Copy;
    assert!(matches!(verify_views(&views, 4, Goal::Allreduce), Err(VerifyError::Mismatch { .. })));

    // Frames carry the number of their round: both sides must mean the same.
    let mut views: Vec<_> = (0..4).map(|r| ring.for_rank(Rank(r))).collect();
    views[2][1].index = 7;
    assert!(matches!(verify_views(&views, 4, Goal::Allreduce), Err(VerifyError::Mismatch { .. })));
}

/// Two messages between the same ranks in one round keep their order.
#[test]
fn messages_of_one_link_keep_their_order() {
    let chunk = |c| Move { peer: Rank(0), chunks: Chunks::one(c), op: Op::Copy };
    let to = |c| Move { peer: Rank(1), chunks: Chunks::one(c), op: Op::Copy };
    let views = |first, second| {
        vec![
            vec![Round { index: 0, sends: vec![to(0), to(1)], recvs: vec![] }],
            vec![Round { index: 0, sends: vec![], recvs: vec![chunk(first), chunk(second)] }],
        ]
    };
    let goal = Goal::Broadcast { root: Rank(0) };
    verify_views(&views(0, 1), 2, goal).unwrap();
    assert!(matches!(verify_views(&views(1, 0), 2, goal), Err(VerifyError::Mismatch { .. })));
}
