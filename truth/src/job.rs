//! A step of a job: every rank computes, and exchanges its buckets one after the other while it does.

use crate::network::{ConnectionId, Happened, Network};
use std::collections::{BTreeMap, BTreeSet};
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
    /// From whom it waits for a message of this round.
    pub senders: Vec<usize>,
    /// Bytes of these.
    pub received_bytes: f64,
}

/// A collective: each rank's rounds.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct Program {
    /// By rank.
    pub ranks: Vec<Vec<Round>>,
    /// Whether all of it happens once for each of [`Software::segments`], with that part of the bytes.
    pub segmented: bool,
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
    /// What the ranks exchange besides, over a group of its own: every rank begins it with its first bucket, beside the exchanges, and
    /// waits for it at the end of the step.
    pub control: Vec<Stage>,
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
    /// Exchanges of a rank that are under way at once (Gloo: 2, by the threads of its process group).
    #[serde(default = "one")]
    pub at_once: u32,
    /// Whether a message leaves only when its receiver has asked for it (Gloo's unbound buffers): a round then takes
    /// latency there and back.
    #[serde(default)]
    pub rendezvous: bool,
    /// Segments of an allreduce's blocks that go round side by side (Gloo's ring: 2).
    #[serde(default = "one")]
    pub segments: u32,
}

fn one() -> u32 {
    1
}

impl Software {
    /// Of nothing but these times: one exchange after the other, messages leave at once, in one piece.
    pub const fn plain(collective_s: f64, round_s: f64, byte_s: f64) -> Self {
        Self { collective_s, round_s, byte_s, at_once: 1, rendezvous: false, segments: 1 }
    }
}

/// Bytes with which a receiver says that it waits (Gloo's preamble of a message).
const READY_BYTES: f64 = 56.0;

/// Which round of a step.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct RoundOf {
    /// Of the step; the control group's comes after the others.
    pub exchange: usize,
    /// Of the exchange.
    pub stage: usize,
    /// Of the collective: [`Round::index`].
    pub round: u32,
    /// Of the collective's segments.
    pub segment: u32,
}

/// Where something of a rank's goes on.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct At {
    /// Which rank.
    pub rank: usize,
    /// Which of its exchanges.
    pub exchange: usize,
    /// Which segment of a collective; 0 where there is none.
    pub segment: u32,
}

/// What events of the job and of others carry.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Token<T> {
    /// A rank's own computing goes on.
    Compute(usize),
    /// A rank's exchange goes on.
    Exchange(At),
    /// A message of the job.
    Message {
        /// Whom to.
        to: usize,
        /// Of what.
        of: RoundOf,
    },
    /// A receiver of a message says that it waits for it.
    Ready {
        /// Who is to send it.
        to: usize,
        /// Who waits.
        by: usize,
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
    /// The control group's, in the same form; empty where no step uses it.
    pub control: Vec<Vec<Option<ConnectionId>>>,
}

#[derive(Debug, Default)]
struct Rank {
    times: RankTimes,
    piece: usize,
    /// Exchanges that its own computing has begun.
    begun: usize,
    exchanges: Vec<Exchange>,
    /// Software of all exchanges takes turns.
    free_at: f64,
    arrived: BTreeMap<RoundOf, usize>,
    /// Sends that wait for their receiver, with their bytes; and receivers that wait for a send.
    posted: BTreeMap<(RoundOf, usize), f64>,
    ready: BTreeSet<(RoundOf, usize)>,
    after: bool,
    updated: bool,
    done: bool,
}

/// A rank's side of an exchange.
#[derive(Debug, Clone, Default)]
struct Exchange {
    stage: usize,
    entered: bool,
    /// A timer of the stage runs.
    busy: bool,
    segments: Vec<Segment>,
    done: bool,
}

/// A part of a collective that goes through all of its rounds.
#[derive(Debug, Clone, Default)]
struct Segment {
    round: usize,
    posted: bool,
    /// A timer of it runs.
    busy: bool,
}

/// What takes what is not the job's.
pub type Others<'a, T> = dyn FnMut(&mut Network<Token<T>>, Happened<T>) + 'a;

/// A step that cannot end: nothing is left that could happen. Completes "failed to ...".
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
#[error("end a step: rank {rank} waits in exchange {exchange} for messages that nobody sends, or that never arrive")]
pub struct Stuck {
    /// The first that waits.
    pub rank: usize,
    /// In which exchange of the step.
    pub exchange: usize,
}

/// Runs a step to its end on every rank. `starts`: when each rank's begins. What is not the job's goes to `others`.
pub fn run<T: Copy>(
    network: &mut Network<Token<T>>,
    mesh: &Mesh,
    software: Software,
    step: &Step,
    starts: &[f64],
    others: &mut Others<'_, T>,
) -> Result<Times, Stuck> {
    let count = step.exchanges.len();
    let ranks = starts.iter().map(|&began| Rank {
        times: RankTimes { began, exchanges: vec![Span::default(); count], ..RankTimes::default() },
        exchanges: vec![Exchange::default(); count + 1],
        ..Rank::default()
    });
    let mut run = Run { network, mesh, software, step, ranks: ranks.collect() };
    for rank in 0..run.ranks.len() {
        run.next_piece(rank, run.ranks[rank].times.began);
    }
    while let Some(rank) = run.ranks.iter().position(|rank| !rank.done) {
        match run.network.advance() {
            None => {
                let ended = |exchange: &Span| exchange.to > 0.0;
                let exchange = run.ranks[rank].times.exchanges.iter().filter(|e| ended(e)).count();
                return Err(Stuck { rank, exchange });
            }
            Some(Happened::Timer(Token::Compute(rank))) => run.computed(rank),
            Some(Happened::Timer(Token::Exchange(at))) => run.software_done(at),
            Some(Happened::Delivered(Token::Message { to, of })) => {
                *run.ranks[to].arrived.entry(of).or_default() += 1;
                run.exchange(to);
            }
            Some(Happened::Delivered(Token::Ready { to, by, of })) => run.ready(to, by, of),
            Some(Happened::Timer(Token::Other(token))) => others(run.network, Happened::Timer(token)),
            Some(Happened::Delivered(Token::Other(token))) => others(run.network, Happened::Delivered(token)),
            Some(
                Happened::Timer(Token::Message { .. } | Token::Ready { .. })
                | Happened::Delivered(Token::Compute(_) | Token::Exchange(_)),
            ) => {}
        }
    }
    Ok(Times { ranks: run.ranks.into_iter().map(|rank| rank.times).collect() })
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
            self.ranks[rank].updated = true;
            return self.exchange(rank);
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
        let at_once = self.software.at_once.max(1) as usize;
        let control = self.step.exchanges.len();
        let computed = self.ranks[rank].piece == self.step.compute[rank].len();
        loop {
            let Rank { exchanges, begun, .. } = &self.ranks[rank];
            let open = (0..control).filter(|&number| !exchanges[number].done).take(at_once);
            let open = open.take_while(|number| number < begun);
            let beside = (!exchanges[control].done && (*begun > 0 || computed)).then_some(control);
            let open: Vec<usize> = open.chain(beside).collect();
            if !open.into_iter().any(|exchange| self.stage(rank, exchange)) {
                break;
            }
        }
        let now = self.network.now();
        let Rank { exchanges, after, updated, done, times, .. } = &mut self.ranks[rank];
        if computed && !*after && exchanges[..control].iter().all(|exchange| exchange.done) {
            *after = true;
            self.network.timer(now + self.step.after[rank], Token::Compute(rank));
        } else if *updated && !*done && exchanges[control].done {
            (times.ended, *done) = (now, true);
        }
    }

    /// After what else the rank's software has to do.
    fn software(&mut self, at: At, seconds: f64) {
        let until = self.ranks[at.rank].free_at.max(self.network.now()) + seconds;
        self.ranks[at.rank].free_at = until;
        self.network.timer(until, Token::Exchange(at));
    }

    fn software_done(&mut self, At { rank, exchange, segment }: At) {
        let state = &mut self.ranks[rank].exchanges[exchange];
        match state.segments.get_mut(segment as usize) {
            Some(segment) if !state.busy => segment.busy = false,
            _ => state.busy = false,
        }
        self.exchange(rank);
    }

    /// One thing of a rank's exchange; whether there was one to do.
    fn stage(&mut self, rank: usize, exchange: usize) -> bool {
        let Exchange { stage, entered, busy, .. } = self.ranks[rank].exchanges[exchange];
        if busy {
            return false;
        }
        let now = self.network.now();
        let stages = self.step.exchanges.get(exchange).unwrap_or(&self.step.control);
        let Rank { times, exchanges, .. } = &mut self.ranks[rank];
        // Of the control group's no times are kept.
        let mut span = times.exchanges.get_mut(exchange);
        if let Some(span) = span.as_mut().filter(|_| stage == 0 && !entered) {
            span.from = now;
        }
        let Some(what) = stages.get(stage) else {
            span.into_iter().for_each(|span| span.to = now);
            exchanges[exchange].done = true;
            return true;
        };
        let (seconds, segments) = match (what, entered) {
            (Stage::Compute(seconds), false) => (seconds[rank], 0),
            (Stage::Collective(program), false) => {
                (self.software.collective_s, if program.segmented { self.software.segments.max(1) } else { 1 })
            }
            (Stage::Compute(_), true) => return self.leave_stage(rank, exchange),
            (Stage::Collective(program), true) => return self.collective(rank, exchange, program),
        };
        let state = &mut self.ranks[rank].exchanges[exchange];
        (state.entered, state.busy) = (true, true);
        state.segments = vec![Segment::default(); segments as usize];
        self.software(At { rank, exchange, segment: 0 }, seconds);
        true
    }

    fn leave_stage(&mut self, rank: usize, exchange: usize) -> bool {
        let state = &mut self.ranks[rank].exchanges[exchange];
        (state.stage, state.entered) = (state.stage + 1, false);
        true
    }

    /// A segment of a collective goes on, or the collective ends; whether there was anything to do.
    fn collective(&mut self, rank: usize, exchange: usize, program: &Program) -> bool {
        let segments = &self.ranks[rank].exchanges[exchange].segments;
        let count = segments.len() as u32;
        if segments.iter().all(|segment| !segment.busy && segment.round == program.ranks[rank].len()) {
            return self.leave_stage(rank, exchange);
        }
        let share = 1.0 / f64::from(count);
        (0..count).any(|segment| self.round(At { rank, exchange, segment }, program, share))
    }

    fn round(&mut self, at: At, program: &Program, share: f64) -> bool {
        let At { rank, exchange, segment } = at;
        let stage = self.ranks[rank].exchanges[exchange].stage;
        let Segment { round, posted, busy } = self.ranks[rank].exchanges[exchange].segments[segment as usize];
        let Some(what) = program.ranks[rank].get(round).filter(|_| !busy) else { return false };
        let of = RoundOf { exchange, stage, round: what.index, segment };
        if !posted {
            self.post(rank, of, what, share);
            self.ranks[rank].exchanges[exchange].segments[segment as usize].posted = true;
        }
        if self.ranks[rank].arrived.get(&of).copied().unwrap_or(0) < what.senders.len() {
            return false;
        }
        self.ranks[rank].arrived.remove(&of);
        self.ranks[rank].exchanges[exchange].segments[segment as usize] =
            Segment { round: round + 1, posted: false, busy: true };
        self.software(at, self.software.round_s + self.software.byte_s * what.received_bytes * share);
        true
    }

    fn post(&mut self, rank: usize, of: RoundOf, what: &Round, share: f64) {
        if self.software.rendezvous {
            for &sender in &what.senders {
                self.transmit(rank, sender, of, READY_BYTES, Token::Ready { to: sender, by: rank, of });
            }
        }
        for send in &what.sends {
            if self.software.rendezvous && !self.ranks[rank].ready.remove(&(of, send.to)) {
                self.ranks[rank].posted.insert((of, send.to), send.bytes * share);
            } else {
                self.transmit(rank, send.to, of, send.bytes * share, Token::Message { to: send.to, of });
            }
        }
    }

    fn ready(&mut self, sender: usize, by: usize, of: RoundOf) {
        match self.ranks[sender].posted.remove(&(of, by)) {
            Some(bytes) => self.transmit(sender, by, of, bytes, Token::Message { to: by, of }),
            None => _ = self.ranks[sender].ready.insert((of, by)),
        }
    }

    fn transmit(&mut self, from: usize, to: usize, of: RoundOf, bytes: f64, token: Token<T>) {
        let Mesh { to: own, control } = self.mesh;
        let connections = if of.exchange < self.step.exchanges.len() { own } else { control };
        if let Some(connection) = connections[from][to] {
            self.network.send(connection, bytes, token);
        }
    }
}
