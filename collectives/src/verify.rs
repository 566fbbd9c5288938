//! The verifier: runs a schedule symbolically, from the ranks' own views, and compares what each rank
//! then holds with the goal. It shares no code with the generators.
//!
//! Every rank's chunk is a set of contributions. Ranks are run as the workers run them: all moves of a round are
//! posted together, a message passes when both sides have posted it (rendezvous, no buffering), and a rank goes on when
//! its round is complete. If no rank can go on before the end, the schedule deadlocks.

use crate::{Goal, Move, Op, Round, Schedule};
use flexcomm_domain::Rank;

/// Failed to verify a schedule.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum VerifyError {
    /// Sizes that cannot be.
    #[error("verify a schedule of {ranks} ranks and {chunks} chunks for {goal:?}")]
    Shape {
        /// N.
        ranks: u32,
        /// Chunks.
        chunks: u32,
        /// For what.
        goal: Goal,
    },
    /// As many views are needed as there are ranks.
    #[error("verify {given} views of a schedule of {ranks} ranks")]
    Views {
        /// How many were given.
        given: usize,
        /// N.
        ranks: u32,
    },
    /// A peer or chunk that does not exist, a message to oneself, or no chunk at all.
    #[error("verify round {round} of rank {rank}: {what:?} names no other rank or no chunk of the schedule")]
    Outside {
        /// Which round.
        round: u32,
        /// Whose.
        rank: Rank,
        /// The move.
        what: Move,
    },
    /// A rank sends and receives, or receives twice, the same chunk in one round: the result depends on timing.
    #[error("verify round {round} of rank {rank}: {one:?} and {other:?} touch the same chunk")]
    Race {
        /// Which round.
        round: u32,
        /// Whose.
        rank: Rank,
        /// A receive.
        one: Move,
        /// A send or another receive.
        other: Move,
    },
    /// Both sides speak of different messages.
    #[error("verify the message from rank {from} to rank {to}: sent is {sent:?}, expected is {expected:?}")]
    Mismatch {
        /// The sender.
        from: Rank,
        /// The receiver.
        to: Rank,
        /// Round and move of the sender.
        sent: (u32, Move),
        /// Round and move of the receiver.
        expected: (u32, Move),
    },
    /// A rank sends a chunk of which it has nothing.
    #[error("verify round {round}: rank {from} sends chunk {chunk}, which it does not have")]
    Nothing {
        /// Which round.
        round: u32,
        /// The sender.
        from: Rank,
        /// The chunk.
        chunk: usize,
    },
    /// A rank adds to a chunk of which it has nothing: what lies in its buffer is undefined.
    #[error("verify round {round}: rank {to} adds to chunk {chunk}, which it does not have")]
    IntoNothing {
        /// Which round.
        round: u32,
        /// The receiver.
        to: Rank,
        /// The chunk.
        chunk: usize,
    },
    /// A contribution would be counted twice.
    #[error("verify round {round}: rank {to} would count a contribution to chunk {chunk} from rank {from} twice")]
    Twice {
        /// Which round.
        round: u32,
        /// The sender.
        from: Rank,
        /// The receiver.
        to: Rank,
        /// The chunk.
        chunk: usize,
    },
    /// Ranks wait for each other for ever.
    #[error("verify a schedule: rank {rank} waits in round {round} for ever")]
    Deadlock {
        /// The first rank that waits.
        rank: Rank,
        /// Where.
        round: u32,
    },
    /// A rank ends with something else than the goal.
    #[error("verify a schedule: rank {rank} ends without chunk {chunk} as {goal:?} asks")]
    Goal {
        /// The first such rank.
        rank: Rank,
        /// The first such chunk.
        chunk: usize,
        /// For what.
        goal: Goal,
    },
}

/// Proves that the schedule reaches its goal, cannot deadlock and has no race.
pub fn verify(schedule: &Schedule) -> Result<(), VerifyError> {
    let outside = schedule.transfers().find(|t| t.from.0.max(t.to.0) >= schedule.ranks);
    if let Some(t) = outside {
        let what = Move { peer: t.to, chunks: t.chunks, op: t.op };
        return Err(VerifyError::Outside { round: 0, rank: t.from, what });
    }
    let views: Vec<_> = (0..schedule.ranks).map(|r| schedule.for_rank(Rank(r))).collect();
    verify_views(&views, schedule.chunks, schedule.goal)
}

/// Proves that the ranks' views, as the workers would run them, reach the goal together.
pub fn verify_views(views: &[Vec<Round>], chunks: u32, goal: Goal) -> Result<(), VerifyError> {
    let ranks = u32::try_from(views.len()).unwrap_or(u32::MAX);
    let fits = match goal {
        Goal::Allreduce => true,
        Goal::Allgather => chunks == ranks,
        Goal::Broadcast { root } => root.0 < ranks,
    };
    if ranks == 0 || chunks == 0 || !fits {
        return Err(VerifyError::Shape { ranks, chunks, goal });
    }
    for (rank, rounds) in views.iter().enumerate() {
        for round in rounds {
            check_round(Rank(rank as u32), round, ranks, chunks)?;
        }
    }
    let mut machine = Machine::new(views, chunks as usize, goal);
    machine.run()?;
    machine.check(goal)
}

fn check_round(rank: Rank, round: &Round, ranks: u32, chunks: u32) -> Result<(), VerifyError> {
    for what in round.sends.iter().chain(&round.recvs) {
        let in_range = what.chunks.count > 0 && what.chunks.range().end <= chunks as usize;
        if what.peer.0 >= ranks || what.peer == rank || !in_range {
            return Err(VerifyError::Outside { round: round.index, rank, what: *what });
        }
    }
    for (i, one) in round.recvs.iter().enumerate() {
        let others = round.sends.iter().chain(&round.recvs[i + 1..]);
        if let Some(other) = others.into_iter().find(|other| other.chunks.overlaps(one.chunks)) {
            return Err(VerifyError::Race { round: round.index, rank, one: *one, other: *other });
        }
    }
    Ok(())
}

/// A set of ranks.
#[derive(Clone, PartialEq, Eq)]
struct Set(Vec<u64>);

impl Set {
    fn empty(ranks: usize) -> Self {
        Self(vec![0; ranks.div_ceil(64)])
    }

    fn of(ranks: usize, members: impl IntoIterator<Item = usize>) -> Self {
        let mut set = Self::empty(ranks);
        for r in members {
            set.0[r / 64] |= 1 << (r % 64);
        }
        set
    }

    fn is_empty(&self) -> bool {
        self.0.iter().all(|w| *w == 0)
    }

    fn meets(&self, other: &Self) -> bool {
        self.0.iter().zip(&other.0).any(|(a, b)| a & b != 0)
    }

    fn add(&mut self, other: &Self) {
        self.0.iter_mut().zip(&other.0).for_each(|(a, b)| *a |= b);
    }
}

struct Machine<'a> {
    views: &'a [Vec<Round>],
    /// Per rank: the round it is in.
    at: Vec<usize>,
    /// Per rank: which sends and receives of that round are done.
    sent: Vec<Vec<bool>>,
    received: Vec<Vec<bool>>,
    /// `holds[rank][chunk]`.
    holds: Vec<Vec<Set>>,
}

impl<'a> Machine<'a> {
    fn new(views: &'a [Vec<Round>], chunks: usize, goal: Goal) -> Self {
        let n = views.len();
        let first = |rank: usize, chunk: usize| match goal {
            Goal::Allreduce => Set::of(n, [rank]),
            Goal::Allgather if chunk == rank => Set::of(n, [rank]),
            Goal::Broadcast { root } if root.index() == rank => Set::of(n, [rank]),
            _ => Set::empty(n),
        };
        let holds = (0..n).map(|r| (0..chunks).map(|c| first(r, c)).collect()).collect();
        let none = vec![Vec::new(); n];
        let mut machine = Self { views, at: vec![0; n], sent: none.clone(), received: none, holds };
        (0..n).for_each(|r| machine.post(r));
        machine
    }

    fn round(&self, rank: usize) -> Option<&'a Round> {
        self.views[rank].get(self.at[rank])
    }

    fn post(&mut self, rank: usize) {
        let (sends, recvs) = self.round(rank).map_or((0, 0), |r| (r.sends.len(), r.recvs.len()));
        self.sent[rank] = vec![false; sends];
        self.received[rank] = vec![false; recvs];
    }

    /// Lets every message pass that can, until all ranks are at their end.
    fn run(&mut self) -> Result<(), VerifyError> {
        let mut work: Vec<usize> = (0..self.views.len()).rev().collect();
        while let Some(rank) = work.pop() {
            self.receive(rank, &mut work)?;
            if self.advance(rank) {
                work.push(rank);
            }
        }
        match (0..self.views.len()).find_map(|r| Some((r, self.round(r)?))) {
            Some((rank, round)) => Err(VerifyError::Deadlock { rank: Rank(rank as u32), round: round.index }),
            None => Ok(()),
        }
    }

    /// Passes what peers have posted for `rank`; wakes senders, and the receivers of `rank`'s own sends.
    fn receive(&mut self, rank: usize, work: &mut Vec<usize>) -> Result<(), VerifyError> {
        let Some(round) = self.round(rank) else { return Ok(()) };
        for (i, expected) in round.recvs.iter().enumerate() {
            let from = expected.peer.index();
            if self.received[rank][i] {
                continue;
            }
            // Links keep order: the first message that is still open meets the first receive that is.
            let Some((j, sent)) = self.open_send(from, rank) else { continue };
            let sender_round = self.round(from).map_or(0, |r| r.index);
            let same = sender_round == round.index && sent.chunks == expected.chunks && sent.op == expected.op;
            if !same {
                let (from, to) = (expected.peer, Rank(rank as u32));
                return Err(VerifyError::Mismatch {
                    from,
                    to,
                    sent: (sender_round, sent),
                    expected: (round.index, *expected),
                });
            }
            self.pass(from, rank, round.index, sent)?;
            self.sent[from][j] = true;
            self.received[rank][i] = true;
            work.push(from);
        }
        work.extend(self.waiting_receivers(rank, round));
        Ok(())
    }

    /// The first send of `from`'s round to `to` that is not done.
    fn open_send(&self, from: usize, to: usize) -> Option<(usize, Move)> {
        let sends = &self.round(from)?.sends;
        let open = sends.iter().enumerate().find(|(j, m)| m.peer.index() == to && !self.sent[from][*j]);
        open.map(|(j, m)| (j, *m))
    }

    /// Receivers that have posted a receive for an open send of `rank`, and so can go on.
    fn waiting_receivers(&self, rank: usize, round: &Round) -> Vec<usize> {
        let open = round.sends.iter().enumerate().filter(|(j, _)| !self.sent[rank][*j]);
        let waits = |to: usize| {
            let recvs = self.round(to).map_or(&[][..], |r| &r.recvs);
            recvs.iter().zip(&self.received[to]).any(|(m, done)| m.peer.index() == rank && !done)
        };
        open.map(|(_, m)| m.peer.index()).filter(|to| waits(*to)).collect()
    }

    fn pass(&mut self, from: usize, to: usize, round: u32, what: Move) -> Result<(), VerifyError> {
        for chunk in what.chunks.range() {
            let value = self.holds[from][chunk].clone();
            let (from, rank) = (Rank(from as u32), Rank(to as u32));
            if value.is_empty() {
                return Err(VerifyError::Nothing { round, from, chunk });
            }
            let mine = &mut self.holds[to][chunk];
            match what.op {
                Op::Copy => *mine = value,
                Op::Reduce if mine.is_empty() => return Err(VerifyError::IntoNothing { round, to: rank, chunk }),
                Op::Reduce if mine.meets(&value) => return Err(VerifyError::Twice { round, from, to: rank, chunk }),
                Op::Reduce => mine.add(&value),
            }
        }
        Ok(())
    }

    /// Moves `rank` on when its round is complete.
    fn advance(&mut self, rank: usize) -> bool {
        let complete =
            self.round(rank).is_some() && self.sent[rank].iter().all(|d| *d) && self.received[rank].iter().all(|d| *d);
        if complete {
            self.at[rank] += 1;
            self.post(rank);
        }
        complete
    }

    fn check(&self, goal: Goal) -> Result<(), VerifyError> {
        let n = self.views.len();
        let want = |chunk: usize| match goal {
            Goal::Allreduce => Set::of(n, 0..n),
            Goal::Allgather => Set::of(n, [chunk]),
            Goal::Broadcast { root } => Set::of(n, [root.index()]),
        };
        for (rank, chunks) in self.holds.iter().enumerate() {
            if let Some(chunk) = (0..chunks.len()).find(|c| chunks[*c] != want(*c)) {
                return Err(VerifyError::Goal { rank: Rank(rank as u32), chunk, goal });
            }
        }
        Ok(())
    }
}
