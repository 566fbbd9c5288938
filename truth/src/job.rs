//! A step of a job: every rank does its part in order, and launches collectives that go on beside it.

use crate::network::{ConnectionId, Network, NetworkEvent};
use std::collections::{BTreeMap, BTreeSet, VecDeque};
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

/// What a collective transfers: each rank's rounds.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct Program {
    /// By rank.
    pub ranks: Vec<Vec<Round>>,
    /// Whether all of it happens once for each of [`Software::segments`], with that part of the bytes.
    pub segmented: bool,
}

/// A collective of a step.
#[derive(Debug, Clone)]
pub struct Collective {
    /// Among whose connections: [`Mesh::groups`].
    pub group: usize,
    /// What it transfers.
    pub program: Arc<Program>,
}

/// What a rank does next.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Do {
    /// Computes for so many seconds.
    Compute(f64),
    /// Hands a collective, by its number in the step, to the library, which begins those of a group in the order in which they came.
    Launch(usize),
    /// Goes on when its part of a collective has ended.
    Wait(usize),
}

/// A step.
#[derive(Debug, Clone, Default)]
pub struct Step {
    /// By rank, in order. All ranks launch the collectives of a group in the same order.
    pub ranks: Vec<Vec<Do>>,
    /// Each launched once by every rank.
    pub collectives: Vec<Collective>,
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
    /// When each thing that it did was done.
    pub done: Vec<f64>,
    /// By collective: begun by the library, ended.
    pub collectives: Vec<Span>,
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
    /// Collectives of a group that are under way on a rank at once (Gloo: 2, by the threads of its process group).
    #[serde(default = "one")]
    pub at_once: u32,
    /// Whether a message leaves only when its receiver has asked for it (Gloo's unbound buffers): a round then takes
    /// latency there and back.
    #[serde(default)]
    pub rendezvous: bool,
    /// Segments of an allreduce's blocks that go round side by side (Gloo's ring: 2).
    #[serde(default = "one")]
    pub segments: u32,
    /// Whether all ranks share one processor, on which their computing and this software take turns (user-mode Linux has one). Else
    /// each rank has cores enough for both.
    #[serde(default)]
    pub one_processor: bool,
}

fn one() -> u32 {
    1
}

impl Software {
    /// Of nothing but these times: one collective after the other, messages leave at once, in one piece.
    pub const fn plain(collective_s: f64, round_s: f64, byte_s: f64) -> Self {
        Self { collective_s, round_s, byte_s, at_once: 1, rendezvous: false, segments: 1, one_processor: false }
    }
}

/// Bytes with which a receiver says that it waits (Gloo's preamble of a message).
const READY_BYTES: f64 = 56.0;

/// Which round of a step.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct RoundOf {
    /// Of the step.
    pub collective: usize,
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
    /// Which collective of the step.
    pub collective: usize,
    /// Which of its segments.
    pub segment: u32,
}

/// What events of the job and of others carry.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Token<T> {
    /// A rank has computed.
    Computed(usize),
    /// A collective has begun on a rank.
    Begun {
        /// Which rank.
        rank: usize,
        /// Which collective of the step.
        collective: usize,
    },
    /// A rank has taken in a round.
    Received(At),
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
#[derive(Debug, Clone, Default)]
pub struct Mesh {
    /// By group `[group][from][to]`; none to itself.
    pub groups: Vec<Vec<Vec<Option<ConnectionId>>>>,
}

#[derive(Debug, Default)]
struct Rank {
    times: RankTimes,
    /// By group: launched, not begun.
    launched: Vec<VecDeque<usize>>,
    /// By group: how many are under way.
    under_way: Vec<u32>,
    collectives: Vec<State>,
    arrived: BTreeMap<RoundOf, usize>,
    /// Sends that wait for their receiver, with their bytes; and receivers that wait for a send.
    posted: BTreeMap<(RoundOf, usize), f64>,
    ready: BTreeSet<(RoundOf, usize)>,
    done: bool,
}

/// A rank's side of a collective.
#[derive(Debug, Clone, Default)]
struct State {
    /// None before it has begun.
    segments: Vec<Segment>,
    ended: bool,
}

/// A part of a collective that goes through all of its rounds.
#[derive(Debug, Clone, Default)]
struct Segment {
    round: usize,
    posted: bool,
    /// What arrived is being taken in.
    busy: bool,
}

/// What takes what is not the job's.
pub type Others<'a, T> = dyn FnMut(&mut Network<Token<T>>, NetworkEvent<T>) + 'a;

/// A step that cannot end: nothing is left that could happen. Completes "failed to ...".
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
#[error(
    "end a step: rank {rank} waits in collective {collective} for messages that nobody sends, or that never arrive"
)]
pub struct Stuck {
    /// The first that waits.
    pub rank: usize,
    /// For which collective of the step.
    pub collective: usize,
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
    let count = step.collectives.len();
    let ranks = starts.iter().map(|&began| Rank {
        times: RankTimes { began, collectives: vec![Span::default(); count], ..RankTimes::default() },
        launched: vec![VecDeque::new(); mesh.groups.len()],
        under_way: vec![0; mesh.groups.len()],
        collectives: vec![State::default(); count],
        ..Rank::default()
    });
    let free_at = vec![0.0; starts.len()];
    let not_done = starts.len();
    let mut run = Run { network, mesh, software, step, ranks: ranks.collect(), not_done, free_at, pending: 0 };
    for rank in 0..run.ranks.len() {
        run.go_on(rank, run.ranks[rank].times.began);
    }
    while run.not_done > 0 {
        // Others' events may come for ever.
        let Some(what) = run.network.advance().filter(|_| run.pending > 0) else {
            let rank = run.ranks.iter().position(|rank| !rank.done).unwrap_or_default();
            let collective = run.ranks[rank].collectives.iter().position(|state| !state.ended);
            return Err(Stuck { rank, collective: collective.unwrap_or_default() });
        };
        let (NetworkEvent::Timer(token) | NetworkEvent::Delivered(token)) = what;
        run.pending -= usize::from(!matches!(token, Token::Other(_)));
        match what {
            NetworkEvent::Timer(Token::Computed(rank)) => run.did(rank, run.network.now()),
            NetworkEvent::Timer(Token::Begun { rank, collective }) => run.begun(rank, collective),
            NetworkEvent::Timer(Token::Received(at)) => {
                run.ranks[at.rank].collectives[at.collective].segments[at.segment as usize].busy = false;
                run.collective(at.rank, at.collective);
            }
            NetworkEvent::Delivered(Token::Message { to, of }) => {
                *run.ranks[to].arrived.entry(of).or_default() += 1;
                run.collective(to, of.collective);
            }
            NetworkEvent::Delivered(Token::Ready { to, by, of }) => run.ready(to, by, of),
            NetworkEvent::Timer(Token::Other(token)) => others(run.network, NetworkEvent::Timer(token)),
            NetworkEvent::Delivered(Token::Other(token)) => others(run.network, NetworkEvent::Delivered(token)),
            NetworkEvent::Timer(Token::Message { .. } | Token::Ready { .. })
            | NetworkEvent::Delivered(Token::Computed(_) | Token::Begun { .. } | Token::Received(_)) => {}
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
    /// How many of them.
    not_done: usize,
    /// By processor: when what takes turns on it has ended. A rank's software does.
    free_at: Vec<f64>,
    /// Timers and messages of the job under way.
    pending: usize,
}

impl<T: Copy> Run<'_, T> {
    /// A rank, at a moment, does what it can until it computes or waits.
    fn go_on(&mut self, rank: usize, at: f64) {
        match self.step.ranks[rank].get(self.ranks[rank].times.done.len()) {
            None => {
                (self.ranks[rank].times.ended, self.ranks[rank].done) = (at, true);
                self.not_done -= 1;
            }
            Some(Do::Compute(seconds)) => {
                let until = self.computes(rank, at, *seconds);
                self.pending += 1;
                self.network.timer(until, Token::Computed(rank));
            }
            Some(&Do::Launch(collective)) => {
                let group = self.step.collectives[collective].group;
                self.ranks[rank].launched[group].push_back(collective);
                self.begin(rank, group);
                self.did(rank, at);
            }
            Some(&Do::Wait(collective)) if self.ranks[rank].collectives[collective].ended => self.did(rank, at),
            Some(Do::Wait(_)) => {}
        }
    }

    /// What a rank was at is done.
    fn did(&mut self, rank: usize, at: f64) {
        self.ranks[rank].times.done.push(at);
        self.go_on(rank, at);
    }

    /// Something takes its turn on a rank's processor: when it has ended.
    fn turn(&mut self, rank: usize, from: f64, seconds: f64) -> f64 {
        let free_at = &mut self.free_at[if self.software.one_processor { 0 } else { rank }];
        *free_at = free_at.max(from) + seconds;
        *free_at
    }

    /// When a rank that begins to compute has ended.
    fn computes(&mut self, rank: usize, from: f64, seconds: f64) -> f64 {
        if self.software.one_processor { self.turn(rank, from, seconds) } else { from + seconds }
    }

    fn software(&mut self, rank: usize, seconds: f64, then: Token<T>) {
        let until = self.turn(rank, self.network.now(), seconds);
        self.pending += 1;
        self.network.timer(until, then);
    }

    /// A group's collectives begin, as many as may be under way.
    fn begin(&mut self, rank: usize, group: usize) {
        let now = self.network.now();
        while self.ranks[rank].under_way[group] < self.software.at_once.max(1) {
            let Some(collective) = self.ranks[rank].launched[group].pop_front() else { break };
            self.ranks[rank].under_way[group] += 1;
            self.ranks[rank].times.collectives[collective].from = now;
            self.software(rank, self.software.collective_s, Token::Begun { rank, collective });
        }
    }

    fn begun(&mut self, rank: usize, collective: usize) {
        let segmented = self.step.collectives[collective].program.segmented;
        let segments = if segmented { self.software.segments.max(1) } else { 1 };
        self.ranks[rank].collectives[collective].segments = vec![Segment::default(); segments as usize];
        self.collective(rank, collective);
    }

    /// A collective goes on as far as it can.
    fn collective(&mut self, rank: usize, collective: usize) {
        let Collective { group, program } = &self.step.collectives[collective];
        let count = self.ranks[rank].collectives[collective].segments.len() as u32;
        for segment in 0..count {
            self.round(At { rank, collective, segment }, program, 1.0 / f64::from(count));
        }
        let rounds = program.ranks[rank].len();
        let state = &mut self.ranks[rank].collectives[collective];
        if count == 0 || state.ended || !state.segments.iter().all(|segment| !segment.busy && segment.round == rounds) {
            return;
        }
        state.ended = true;
        let now = self.network.now();
        self.ranks[rank].times.collectives[collective].to = now;
        self.ranks[rank].under_way[*group] -= 1;
        self.begin(rank, *group);
        let next = self.step.ranks[rank].get(self.ranks[rank].times.done.len());
        if next == Some(&Do::Wait(collective)) {
            self.did(rank, now);
        }
    }

    /// A segment posts the messages of its round, and takes in what it waited for.
    fn round(&mut self, at: At, program: &Program, share: f64) {
        let At { rank, collective, segment } = at;
        let Segment { round, posted, busy } = self.ranks[rank].collectives[collective].segments[segment as usize];
        let Some(what) = program.ranks[rank].get(round).filter(|_| !busy) else { return };
        let of = RoundOf { collective, round: what.index, segment };
        if !posted {
            self.post(rank, of, what, share);
        }
        let all = self.ranks[rank].arrived.get(&of).copied().unwrap_or(0) >= what.senders.len();
        self.ranks[rank].collectives[collective].segments[segment as usize] = if all {
            Segment { round: round + 1, posted: false, busy: true }
        } else {
            Segment { round, posted: true, busy }
        };
        if all {
            self.ranks[rank].arrived.remove(&of);
            let seconds = self.software.round_s + self.software.byte_s * what.received_bytes * share;
            self.software(rank, seconds, Token::Received(at));
        }
    }

    fn post(&mut self, rank: usize, of: RoundOf, what: &Round, share: f64) {
        if self.software.rendezvous {
            for &sender in &what.senders {
                self.transmit(rank, sender, READY_BYTES, Token::Ready { to: sender, by: rank, of }, of);
            }
        }
        for send in &what.sends {
            if self.software.rendezvous && !self.ranks[rank].ready.remove(&(of, send.to)) {
                self.ranks[rank].posted.insert((of, send.to), send.bytes * share);
            } else {
                self.transmit(rank, send.to, send.bytes * share, Token::Message { to: send.to, of }, of);
            }
        }
    }

    fn ready(&mut self, sender: usize, by: usize, of: RoundOf) {
        match self.ranks[sender].posted.remove(&(of, by)) {
            Some(bytes) => self.transmit(sender, by, bytes, Token::Message { to: by, of }, of),
            None => _ = self.ranks[sender].ready.insert((of, by)),
        }
    }

    fn transmit(&mut self, from: usize, to: usize, bytes: f64, token: Token<T>, of: RoundOf) {
        let group = self.step.collectives[of.collective].group;
        if let Some(connection) = self.mesh.groups[group][from][to] {
            self.pending += 1;
            self.network.send(connection, bytes, token);
        }
    }
}
