//! A step of a job: every rank computes, and exchanges its buckets one after the other while it does.

use crate::network::{ConnectionId, Happened, Network};
use std::collections::BTreeMap;
use std::sync::Arc;

/// A message of a collective.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Send {
    /// Whom to.
    pub to: usize,
    /// Bytes on the wire.
    pub bytes: f64,
}

/// What a rank does in one round of a collective: posts its sends, then waits for what it receives.
#[derive(Debug, Clone, PartialEq)]
pub struct Round {
    /// The round's number, the same for sender and receiver.
    pub index: u32,
    /// In the order in which they are posted.
    pub sends: Vec<Send>,
    /// How many messages of this round it waits for.
    pub receives: u32,
    /// Bytes of these.
    pub received_bytes: f64,
}

/// A collective: each rank's rounds.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct Program {
    /// By rank.
    pub ranks: Vec<Vec<Round>>,
}

/// A part of a bucket's exchange.
#[derive(Debug, Clone)]
pub enum Stage {
    /// Transfers.
    Collective(Arc<Program>),
    /// Seconds that each rank computes before it goes on: between the rounds of a method, and to decompress.
    Compute(Vec<f64>),
}

/// A stretch of a rank's own computing.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Piece {
    /// How long.
    pub seconds: f64,
    /// The exchange that is begun after it, by its number in the step.
    pub begins: Option<usize>,
}

/// A step.
#[derive(Debug, Clone, Default)]
pub struct Step {
    /// By rank: forward, backward with its buckets, and compressing, in order.
    pub compute: Vec<Vec<Piece>>,
    /// The buckets' exchanges, in the order in which every rank runs them, one at a time.
    pub exchanges: Vec<Vec<Stage>>,
    /// By rank: seconds after the last exchange (the optimizer).
    pub after: Vec<f64>,
}

/// When things happened, seconds since the start of the clock.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Times {
    /// By rank.
    pub ranks: Vec<RankTimes>,
}

/// One rank's step.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct RankTimes {
    /// Its step began.
    pub began: f64,
    /// Its own computing ended.
    pub computed: f64,
    /// By exchange: begun, ended.
    pub exchanges: Vec<Span>,
    /// Its step ended.
    pub ended: f64,
}

/// From when to when.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct Span {
    /// Begun.
    pub from: f64,
    /// Ended.
    pub to: f64,
}

/// What a collective costs a rank besides transfers, fitted to a library.
#[derive(Debug, Clone, Copy, PartialEq, serde::Serialize, serde::Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Software {
    /// Seconds to begin a collective.
    pub collective_s: f64,
    /// Seconds in each of its rounds.
    pub round_s: f64,
    /// Seconds for each byte received, to copy and to add up.
    pub byte_s: f64,
}

/// Which round of a step.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct RoundOf {
    /// Of the step.
    pub exchange: usize,
    /// Of the exchange.
    pub stage: usize,
    /// Of the collective: [`Round::index`].
    pub round: u32,
}

/// What events of the job and of others carry.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Token<T> {
    /// A rank's own computing goes on.
    Compute(usize),
    /// A rank's exchange goes on.
    Exchange(usize),
    /// A message of the job.
    Message {
        /// Whom to.
        to: usize,
        /// Of what.
        of: RoundOf,
    },
    /// Anything else's.
    Other(T),
}

/// The connections of a job's ranks, each to each.
#[derive(Debug, Clone)]
pub struct Mesh {
    /// `to[from][to]`; none to itself.
    pub to: Vec<Vec<Option<ConnectionId>>>,
}

#[derive(Debug, Default)]
struct Rank {
    times: RankTimes,
    piece: usize,
    /// Exchanges that its own computing has begun.
    begun: usize,
    exchange: usize,
    stage: usize,
    round: usize,
    /// A timer of its exchange runs.
    busy: bool,
    posted: bool,
    entered: bool,
    arrived: BTreeMap<RoundOf, u32>,
    after: bool,
    done: bool,
}

/// What takes what is not the job's.
pub type Others<'a, T> = dyn FnMut(&mut Network<Token<T>>, Happened<T>) + 'a;

/// Runs a step to its end on every rank. `starts`: when each rank's begins. What is not the job's goes to `others`.
pub fn run<T: Copy>(
    network: &mut Network<Token<T>>,
    mesh: &Mesh,
    software: Software,
    step: &Step,
    starts: &[f64],
    others: &mut Others<'_, T>,
) -> Times {
    let ranks = starts.iter().map(|&began| Rank {
        times: RankTimes { began, exchanges: vec![Span::default(); step.exchanges.len()], ..RankTimes::default() },
        ..Rank::default()
    });
    let mut run = Run { network, mesh, software, step, ranks: ranks.collect() };
    for rank in 0..run.ranks.len() {
        run.next_piece(rank, run.ranks[rank].times.began);
    }
    while run.ranks.iter().any(|rank| !rank.done) {
        match run.network.advance() {
            None => break,
            Some(Happened::Timer(Token::Compute(rank))) => run.computed(rank),
            Some(Happened::Timer(Token::Exchange(rank))) => {
                run.ranks[rank].busy = false;
                run.exchange(rank);
            }
            Some(Happened::Delivered(Token::Message { to, of })) => {
                *run.ranks[to].arrived.entry(of).or_default() += 1;
                run.exchange(to);
            }
            Some(Happened::Timer(Token::Other(token))) => others(run.network, Happened::Timer(token)),
            Some(Happened::Delivered(Token::Other(token))) => others(run.network, Happened::Delivered(token)),
            Some(
                Happened::Timer(Token::Message { .. }) | Happened::Delivered(Token::Compute(_) | Token::Exchange(_)),
            ) => {}
        }
    }
    Times { ranks: run.ranks.into_iter().map(|rank| rank.times).collect() }
}

struct Run<'a, T> {
    network: &'a mut Network<Token<T>>,
    mesh: &'a Mesh,
    software: Software,
    step: &'a Step,
    ranks: Vec<Rank>,
}

impl<T: Copy> Run<'_, T> {
    fn next_piece(&mut self, rank: usize, from: f64) {
        match self.step.compute[rank].get(self.ranks[rank].piece) {
            Some(piece) => self.network.timer(from + piece.seconds, Token::Compute(rank)),
            None => {
                self.ranks[rank].times.computed = from;
                self.exchange(rank);
            }
        }
    }

    fn computed(&mut self, rank: usize) {
        if self.ranks[rank].after {
            let ended = self.network.now();
            let rank = &mut self.ranks[rank];
            (rank.times.ended, rank.done) = (ended, true);
            return;
        }
        let piece = self.step.compute[rank][self.ranks[rank].piece];
        self.ranks[rank].piece += 1;
        if piece.begins.is_some() {
            self.ranks[rank].begun += 1;
            self.exchange(rank);
        }
        self.next_piece(rank, self.network.now());
    }

    /// A rank's exchanges go on as far as they can.
    fn exchange(&mut self, rank: usize) {
        while !self.ranks[rank].busy {
            let Rank { exchange, begun, after, .. } = self.ranks[rank];
            let computed = self.ranks[rank].piece == self.step.compute[rank].len();
            if exchange == self.step.exchanges.len() && computed && !after {
                self.ranks[rank].after = true;
                self.network.timer(self.network.now() + self.step.after[rank], Token::Compute(rank));
            }
            if exchange >= begun.min(self.step.exchanges.len()) || !self.stage(rank) {
                return;
            }
        }
    }

    fn busy(&mut self, rank: usize, seconds: f64) {
        self.ranks[rank].busy = true;
        self.network.timer(self.network.now() + seconds, Token::Exchange(rank));
    }

    /// One thing of a rank's stage; whether there was one to do.
    fn stage(&mut self, rank: usize) -> bool {
        let Rank { exchange, stage, entered, .. } = self.ranks[rank];
        if stage == 0 && !entered {
            self.ranks[rank].times.exchanges[exchange].from = self.network.now();
        }
        let Some(what) = self.step.exchanges[exchange].get(stage) else {
            let now = self.network.now();
            let state = &mut self.ranks[rank];
            state.times.exchanges[exchange].to = now;
            (state.exchange, state.stage, state.entered) = (exchange + 1, 0, false);
            return true;
        };
        match (what, entered) {
            (Stage::Compute(seconds), false) => {
                self.ranks[rank].entered = true;
                self.busy(rank, seconds[rank]);
            }
            (Stage::Collective(_), false) => {
                (self.ranks[rank].entered, self.ranks[rank].round) = (true, 0);
                self.busy(rank, self.software.collective_s);
            }
            (Stage::Compute(_), true) => self.leave_stage(rank),
            (Stage::Collective(program), true) => return self.round(rank, program),
        }
        true
    }

    fn leave_stage(&mut self, rank: usize) {
        let state = &mut self.ranks[rank];
        (state.stage, state.entered) = (state.stage + 1, false);
    }

    fn round(&mut self, rank: usize, program: &Program) -> bool {
        let Rank { exchange, stage, round, posted, .. } = self.ranks[rank];
        let Some(what) = program.ranks[rank].get(round) else {
            self.leave_stage(rank);
            return true;
        };
        let of = RoundOf { exchange, stage, round: what.index };
        if !posted {
            for send in &what.sends {
                if let Some(connection) = self.mesh.to[rank][send.to] {
                    let token = Token::Message { to: send.to, of };
                    self.network.send(connection, send.bytes, token);
                }
            }
            self.ranks[rank].posted = true;
        }
        if self.ranks[rank].arrived.get(&of).copied().unwrap_or(0) < what.receives {
            return false;
        }
        self.ranks[rank].arrived.remove(&of);
        (self.ranks[rank].round, self.ranks[rank].posted) = (round + 1, false);
        self.busy(rank, self.software.round_s + self.software.byte_s * what.received_bytes);
        true
    }
}
