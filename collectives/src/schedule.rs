//! A schedule as data, and one rank's view of it.

use flexcomm_domain::Rank;
use std::ops::Range;

/// What a receiver does with a chunk that arrives.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Op {
    /// Replaces what it has.
    Copy,
    /// Adds it to what it has.
    Reduce,
}

/// A run of neighbouring chunks. Chunks lie one after the other in the buffer, so a run is one slice.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Chunks {
    /// The first chunk.
    pub first: u32,
    /// How many; never 0 in a valid schedule.
    pub count: u32,
}

impl Chunks {
    /// One chunk.
    pub const fn one(chunk: u32) -> Self {
        Self { first: chunk, count: 1 }
    }

    /// As indices. Saturates, so that a broken schedule can still be looked at.
    pub const fn range(self) -> Range<usize> {
        self.first as usize..self.first.saturating_add(self.count) as usize
    }

    /// Whether the two runs share a chunk.
    pub fn overlaps(self, other: Self) -> bool {
        let (a, b) = (self.range(), other.range());
        a.start < b.end && b.start < a.end
    }
}

/// One message: `from` sends its chunks to `to`, which copies or adds them.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Transfer {
    /// The sender.
    pub from: Rank,
    /// The receiver.
    pub to: Rank,
    /// What is sent.
    pub chunks: Chunks,
    /// What the receiver does with it.
    pub op: Op,
}

/// What every rank holds when a schedule has run.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Goal {
    /// Every chunk is the sum over all ranks, each exactly once. Before: each rank has its own values.
    Allreduce,
    /// Chunk c is rank c's block. Before: each rank has its own block. There are as many chunks as ranks.
    Allgather,
    /// Every chunk is the root's. Before: only the root has them.
    Broadcast {
        /// Whose values travel.
        root: Rank,
    },
}

/// Who sends which chunks to whom, round by round.
///
/// Within a round a rank posts all its sends and receives together and goes on when all are done; it does
/// not wait for other ranks' rounds. No chunk is both sent and received by one rank in one round, so sends
/// may read the buffer while receives write it.
///
/// A `Schedule` is whatever it was built from; [`crate::verify`] says whether it reaches its goal.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct Schedule {
    /// N.
    pub ranks: u32,
    /// Into how many chunks the buffer is cut; see [`chunk_range`].
    pub chunks: u32,
    /// What it is for.
    pub goal: Goal,
    /// The transfers of each round.
    pub rounds: Vec<Vec<Transfer>>,
}

/// One message as its sender or receiver sees it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Move {
    /// The other side.
    pub peer: Rank,
    /// What travels.
    pub chunks: Chunks,
    /// What the receiver does with it.
    pub op: Op,
}

/// What one rank does in one round: all of it at once, then on to the next.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Round {
    /// The round's number in the schedule, the same on both sides of a transfer.
    pub index: u32,
    /// What it sends, in the order in which it uses the NIC.
    pub sends: Vec<Move>,
    /// What it receives.
    pub recvs: Vec<Move>,
}

impl Schedule {
    /// What it is for.
    pub const fn goal(&self) -> Goal {
        self.goal
    }

    /// What `rank` does, in order; rounds in which it does nothing are left out.
    pub fn for_rank(&self, rank: Rank) -> Vec<Round> {
        let view = |(index, transfers): (usize, &Vec<Transfer>)| {
            let side = |mine: fn(&Transfer) -> Rank, other: fn(&Transfer) -> Rank| {
                let own = transfers.iter().filter(move |t| mine(t) == rank);
                own.map(|t| Move { peer: other(t), chunks: t.chunks, op: t.op }).collect()
            };
            let sends: Vec<Move> = side(|t| t.from, |t| t.to);
            let recvs: Vec<Move> = side(|t| t.to, |t| t.from);
            // Generators stay far below 2^32 rounds (MAX_RANKS).
            (!sends.is_empty() || !recvs.is_empty()).then_some(Round { index: index as u32, sends, recvs })
        };
        self.rounds.iter().enumerate().filter_map(view).collect()
    }

    /// All messages.
    pub fn transfers(&self) -> impl Iterator<Item = &Transfer> {
        self.rounds.iter().flatten()
    }

    /// Bytes that leave each rank, given each chunk's bytes.
    pub fn bytes_sent(&self, bytes_of_chunk: &dyn Fn(usize) -> f64) -> Vec<f64> {
        let mut sent = vec![0.0; self.ranks as usize];
        for t in self.transfers() {
            if let Some(total) = sent.get_mut(t.from.index()) {
                *total += t.chunks.range().map(bytes_of_chunk).sum::<f64>();
            }
        }
        sent
    }
}

/// Which of `len` values are in chunk `chunk` of `chunks`: sizes differ by at most one, the larger come
/// first, neighbours touch. Empty for a chunk that does not exist.
pub fn chunk_range(len: usize, chunks: u32, chunk: u32) -> Range<usize> {
    if chunk >= chunks {
        return len..len;
    }
    let (chunks, chunk) = (chunks as usize, chunk as usize);
    let (base, larger) = (len / chunks, len % chunks);
    let start = chunk * base + chunk.min(larger);
    start..start + base + usize::from(chunk < larger)
}

impl Chunks {
    /// Which of `len` values this run covers when they are cut into `chunks` chunks.
    pub fn values(self, len: usize, chunks: u32) -> Range<usize> {
        if self.count == 0 {
            return len..len;
        }
        let last = self.first.saturating_add(self.count - 1);
        chunk_range(len, chunks, self.first).start..chunk_range(len, chunks, last).end
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn chunks_partition_the_buffer(len in 0usize..10_000, chunks in 1u32..300) {
            let mut next = 0;
            let mut sizes = Vec::new();
            for c in 0..chunks {
                let range = chunk_range(len, chunks, c);
                prop_assert_eq!(range.start, next);
                next = range.end;
                sizes.push(range.len());
            }
            prop_assert_eq!(next, len);
            prop_assert!(sizes.iter().max().unwrap() - sizes.iter().min().unwrap() <= 1);
            prop_assert_eq!(Chunks { first: 0, count: chunks }.values(len, chunks), 0..len);
        }
    }

    #[test]
    fn a_view_keeps_both_sides_and_skips_idle_rounds() {
        let t = |from, to, op| Transfer { from: Rank(from), to: Rank(to), chunks: Chunks::one(0), op };
        let rounds = vec![vec![t(0, 1, Op::Reduce)], vec![t(1, 2, Op::Copy)], vec![t(2, 0, Op::Copy)]];
        let schedule = Schedule { ranks: 3, chunks: 1, goal: Goal::Allreduce, rounds };
        let view = schedule.for_rank(Rank(1));
        assert_eq!(view.iter().map(|r| r.index).collect::<Vec<_>>(), [0, 1]);
        assert_eq!(view[0].recvs, [Move { peer: Rank(0), chunks: Chunks::one(0), op: Op::Reduce }]);
        assert!(view[0].sends.is_empty());
        assert_eq!(view[1].sends, [Move { peer: Rank(2), chunks: Chunks::one(0), op: Op::Copy }]);
        assert!(schedule.for_rank(Rank(9)).is_empty());
    }

    #[test]
    fn a_chunk_that_does_not_exist_is_empty() {
        assert_eq!(chunk_range(10, 3, 3), 10..10);
        assert_eq!(Chunks { first: 0, count: 0 }.values(10, 3), 10..10);
        assert_eq!(chunk_range(0, 0, 0), 0..0);
    }
}
