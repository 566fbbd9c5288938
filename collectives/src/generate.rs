//! Generators of schedules. Each is proven by [`crate::verify`] for every N from 1 to 64 (tests/).

use crate::{Chunks, Goal, Op, Schedule, Transfer};
use flexcomm_domain::{Collective, Rank};

/// Most ranks a schedule is made for: a ring holds 2N(N-1) transfers, 2 million here (42 MB).
pub const MAX_RANKS: u32 = 1024;

/// Failed to generate a schedule.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum GenerateError {
    /// No ranks, or too many.
    #[error("make a schedule for {0} ranks: allowed are 1 to {MAX_RANKS}")]
    Ranks(u32),
    /// The root is none of the ranks.
    #[error("make a broadcast from rank {root} among {ranks} ranks: ranks count from 0")]
    Root {
        /// As given.
        root: Rank,
        /// N.
        ranks: u32,
    },
    /// Recursive doubling pairs ranks by their bits.
    #[error("make a recursive-doubling allgather for {0} ranks: it needs a power of two")]
    NotPowerOfTwo(u32),
}

/// How values are added up: the schedule, and its closed form. What adds up takes `latencies(N)`·α + `volume(N)`·Mβ for M bytes
/// on equal links: of the ring that is exact for every N, of the tree where N is a power of two, and else an upper bound.
#[derive(Debug)]
pub struct Allreduce {
    /// The schedule of N ranks.
    pub schedule: fn(u32) -> Result<Schedule, GenerateError>,
    /// Latencies on the critical path of N ranks.
    pub latencies: fn(f64) -> f64,
    /// Bytes on the critical path of N ranks over those of the whole message.
    pub volume: fn(f64) -> f64,
}

static RING: Allreduce = Allreduce {
    schedule: ring_allreduce,
    latencies: |ranks| 2.0 * (ranks - 1.0),
    volume: |ranks| 2.0 * (ranks - 1.0) / ranks,
};

static TREE: Allreduce = Allreduce {
    schedule: tree_allreduce,
    latencies: |ranks| 2.0 * ranks.log2().ceil(),
    volume: |ranks| 2.0 * ranks.log2().ceil(),
};

/// How a collective adds up values. A codec whose messages are gathered may add up something beside them, which goes around a
/// ring.
pub fn allreduce(collective: Collective) -> &'static Allreduce {
    match collective {
        Collective::DenseRing | Collective::ArtRing | Collective::Allgather => &RING,
        Collective::DenseTree | Collective::ArtTree => &TREE,
    }
}

fn checked(ranks: u32) -> Result<u32, GenerateError> {
    if (1..=MAX_RANKS).contains(&ranks) { Ok(ranks) } else { Err(GenerateError::Ranks(ranks)) }
}

/// Rounds of one hop to the right: in round i rank r sends chunk `r + offset - i` (mod N).
fn ring_rounds(n: u32, offset: u32, op: Op) -> impl Iterator<Item = Vec<Transfer>> {
    (0..n - 1).map(move |i| {
        let hop = move |r: u32| Transfer {
            from: Rank(r),
            to: Rank((r + 1) % n),
            chunks: Chunks::one((r + offset + n - i) % n),
            op,
        };
        (0..n).map(hop).collect()
    })
}

/// Ring allreduce: reduce-scatter, then allgather, in N chunks. 2(N-1)α + 2(N-1)/N·Mβ on equal links.
pub fn ring_allreduce(ranks: u32) -> Result<Schedule, GenerateError> {
    let n = checked(ranks)?;
    // After the first half rank r has the whole sum of chunk r + 1, which it then passes on.
    let rounds = ring_rounds(n, 0, Op::Reduce).chain(ring_rounds(n, 1, Op::Copy)).collect();
    Ok(Schedule { ranks: n, chunks: n, goal: Goal::Allreduce, rounds })
}

/// Ring allgather: (N-1)(α + Mβ) for blocks of M bytes on equal links.
pub fn ring_allgather(ranks: u32) -> Result<Schedule, GenerateError> {
    let n = checked(ranks)?;
    Ok(Schedule { ranks: n, chunks: n, goal: Goal::Allgather, rounds: ring_rounds(n, 0, Op::Copy).collect() })
}

/// Recursive doubling: α·log N + (N-1)Mβ for blocks of M bytes on equal links. N must be a power of two.
pub fn doubling_allgather(ranks: u32) -> Result<Schedule, GenerateError> {
    let n = checked(ranks)?;
    if !n.is_power_of_two() {
        return Err(GenerateError::NotPowerOfTwo(n));
    }
    let exchange = |bit: u32| {
        // Before this round r holds the aligned run of 2^bit blocks that r is in.
        let send = move |r: u32| Transfer {
            from: Rank(r),
            to: Rank(r ^ (1 << bit)),
            chunks: Chunks { first: r >> bit << bit, count: 1 << bit },
            op: Op::Copy,
        };
        (0..n).map(send).collect()
    };
    Ok(Schedule { ranks: n, chunks: n, goal: Goal::Allgather, rounds: (0..n.ilog2()).map(exchange).collect() })
}

/// Allgather: recursive doubling for powers of two, a ring otherwise.
pub fn allgather(ranks: u32) -> Result<Schedule, GenerateError> {
    if ranks.is_power_of_two() { doubling_allgather(ranks) } else { ring_allgather(ranks) }
}

fn ceil_log2(n: u32) -> u32 {
    n.next_power_of_two().ilog2()
}

/// The edges (parent, child) of round `bit` of a binomial tree over N ranks, counted from the root.
fn tree_edges(n: u32, root: u32, bit: u32) -> impl Iterator<Item = (Rank, Rank)> {
    let step = 1 << bit;
    let parents = (0..n).step_by(2 * step as usize).filter(move |p| p + step < n);
    parents.map(move |p| (Rank((root + p) % n), Rank((root + p + step) % n)))
}

/// Binomial broadcast from any root: α·log N + log N·Mβ on equal links, in ⌈log N⌉ rounds.
pub fn binomial_broadcast(ranks: u32, root: Rank) -> Result<Schedule, GenerateError> {
    let n = checked(ranks)?;
    if root.0 >= n {
        return Err(GenerateError::Root { root, ranks: n });
    }
    Ok(Schedule { ranks: n, chunks: 1, goal: Goal::Broadcast { root }, rounds: broadcast_rounds(n, root.0).collect() })
}

fn broadcast_rounds(n: u32, root: u32) -> impl Iterator<Item = Vec<Transfer>> {
    let down = |(from, to)| Transfer { from, to, chunks: Chunks::one(0), op: Op::Copy };
    (0..ceil_log2(n)).rev().map(move |bit| tree_edges(n, root, bit).map(down).collect())
}

/// Tree allreduce: binomial reduce to rank 0, then binomial broadcast. 2α·log N + 2 log N·Mβ on equal links.
pub fn tree_allreduce(ranks: u32) -> Result<Schedule, GenerateError> {
    let n = checked(ranks)?;
    let up = |(to, from)| Transfer { from, to, chunks: Chunks::one(0), op: Op::Reduce };
    let reduce = (0..ceil_log2(n)).map(|bit| tree_edges(n, 0, bit).map(up).collect());
    let rounds = reduce.chain(broadcast_rounds(n, 0)).collect();
    Ok(Schedule { ranks: n, chunks: 1, goal: Goal::Allreduce, rounds })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bad_sizes_are_refused_by_name() {
        assert_eq!(ring_allreduce(0).unwrap_err().to_string(), "make a schedule for 0 ranks: allowed are 1 to 1024");
        assert!(tree_allreduce(MAX_RANKS + 1).is_err());
        assert!(ring_allreduce(u32::MAX).is_err());
        assert_eq!(allgather(0), Err(GenerateError::Ranks(0)));
        assert_eq!(doubling_allgather(6), Err(GenerateError::NotPowerOfTwo(6)));
        let error = binomial_broadcast(4, Rank(4)).unwrap_err();
        assert_eq!(error, GenerateError::Root { root: Rank(4), ranks: 4 });
    }

    #[test]
    fn round_counts_are_the_textbook_ones() {
        for n in 1..=64 {
            let log = ceil_log2(n) as usize;
            assert_eq!(ring_allreduce(n).unwrap().rounds.len(), 2 * (n as usize - 1));
            assert_eq!(tree_allreduce(n).unwrap().rounds.len(), 2 * log);
            assert_eq!(binomial_broadcast(n, Rank(n - 1)).unwrap().rounds.len(), log);
            let gather = if n.is_power_of_two() { log } else { n as usize - 1 };
            assert_eq!(allgather(n).unwrap().rounds.len(), gather);
        }
    }
}
