//! TCP connections between all ranks of a job, and frames on them.
//!
//! One thread, non-blocking sockets: in a round all sends and receives make progress together, so ranks that
//! send to each other at once cannot block each other, whatever the sizes. Nothing here waits for longer than
//! the timeout, and every failure names the rank it is about.

mod clock;
mod connect;
mod frame;

pub use frame::{FRAME_HEAD, Incoming, Outgoing, Stamp, Tag};

use flexcomm_domain::{Rank, RunId};
use frame::Header;
use nix::poll::{PollFd, PollFlags, PollTimeout};
use std::collections::VecDeque;
use std::io::{ErrorKind, IoSlice, Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::os::fd::AsFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

/// Most ranks of one job: each holds a connection to every other.
pub const MAX_WORLD: usize = 256;

/// How long a rank that was told to stop still waits for the others in a collective.
const STOP_GRACE: Duration = Duration::from_secs(3);

/// Longest single wait, so that a wish to stop is seen.
const POLL_SLICE: Duration = Duration::from_millis(250);

/// A failure between two ranks.
#[derive(Debug, thiserror::Error)]
pub enum MeshError {
    /// The local end could not be opened.
    #[error("listen on {addr}: {source}")]
    Listen {
        /// This rank's address.
        addr: SocketAddr,
        /// Why.
        source: std::io::Error,
    },
    /// Some ranks did not turn up.
    #[error("meet all ranks within {seconds} s: {missing} missing")]
    Missing {
        /// The timeout.
        seconds: f64,
        /// Which, with addresses.
        missing: String,
    },
    /// A worker that was started with other settings.
    #[error("meet rank {peer} ({addr}): {what}")]
    Stranger {
        /// As it says.
        peer: Rank,
        /// Its address.
        addr: SocketAddr,
        /// What differs.
        what: String,
    },
    /// The connection broke: the process is gone, or the network.
    #[error("talk to rank {peer} ({addr}): {what}")]
    Lost {
        /// Which rank.
        peer: Rank,
        /// Its address.
        addr: SocketAddr,
        /// What the system says.
        what: String,
    },
    /// Nothing moved for too long.
    #[error("exchange with {waiting}: nothing arrived and nothing left for {seconds} s")]
    Timeout {
        /// Whom it waited for.
        waiting: String,
        /// The timeout.
        seconds: f64,
    },
    /// A peer told why it ends.
    #[error("talk to rank {peer}: it gave up because of rank {culprit}")]
    GaveUp {
        /// Who told.
        peer: Rank,
        /// Whom it blames.
        culprit: Rank,
    },
    /// The ranks do not run the same.
    #[error("read a frame of rank {peer}: it runs another step, iteration of a trial or decision than this rank")]
    Desynchronised {
        /// The sender.
        peer: Rank,
    },
    /// A frame of another place in the exchange.
    #[error("read a frame of rank {peer}: it is {got}, expected {expected}")]
    Unexpected {
        /// The sender.
        peer: Rank,
        /// As found.
        got: String,
        /// As the schedule says.
        expected: String,
    },
    /// Told to stop while the others did not answer any more.
    #[error("finish the step after being told to stop: {waiting} did not answer within {} s", STOP_GRACE.as_secs())]
    Stopped {
        /// Whom it waited for.
        waiting: String,
    },
    /// poll(2) failed.
    #[error("wait for the network: {0}")]
    Poll(nix::errno::Errno),
}

impl MeshError {
    /// Which rank is to blame, as far as this rank knows.
    fn culprit(&self) -> Option<Rank> {
        match self {
            Self::Lost { peer, .. } | Self::Desynchronised { peer } | Self::Unexpected { peer, .. } => Some(*peer),
            Self::GaveUp { culprit, .. } => Some(*culprit),
            _ => None,
        }
    }
}

#[derive(Debug)]
struct Peer {
    rank: Rank,
    addr: SocketAddr,
    stream: TcpStream,
    /// Whether a frame to it is half sent, so that nothing else may be written.
    mid_frame: bool,
    /// Whether its stamps are by this rank's clock.
    same_clock: bool,
    /// The number that it greeted with: rank 0's is the id of the run.
    run: u64,
    /// Frames of the control group that nobody has asked for yet.
    control: VecDeque<Vec<u8>>,
}

/// How to meet the other ranks.
#[derive(Debug, Clone)]
pub struct MeshConfig {
    /// This rank.
    pub rank: Rank,
    /// Every rank's address, in order.
    pub peers: Vec<SocketAddr>,
    /// Digest of all settings that must be alike on every rank.
    pub settings: u64,
    /// For meeting, and for silence within an exchange.
    pub timeout: Duration,
}

/// A connection to every other rank.
#[derive(Debug)]
pub struct Mesh {
    rank: Rank,
    run: RunId,
    peers: Vec<Option<Peer>>,
    timeout: Duration,
    stop: Arc<AtomicBool>,
    /// Whether a rank that this one heard of was told to stop.
    peer_stops: bool,
    /// Frames of the control group that leave with the next round.
    posted: Vec<Outgoing>,
    bytes_sent: u64,
    /// When this rank and when the last rank known of entered the step's exchange, by this rank's clock.
    own_entry_us: u64,
    last_entry_us: u64,
}

impl Mesh {
    /// Which run of the job this is: random, and the same on all ranks.
    pub fn run(&self) -> RunId {
        self.run
    }

    /// This rank.
    pub fn rank(&self) -> Rank {
        self.rank
    }

    /// N.
    pub fn world(&self) -> usize {
        self.peers.len()
    }

    /// Where a rank is; none for this one.
    fn addr(&self, rank: Rank) -> Option<SocketAddr> {
        self.peers.get(rank.index())?.as_ref().map(|peer| peer.addr)
    }

    /// Bytes of exchanges' frames sent so far.
    pub fn bytes_sent(&self) -> u64 {
        self.bytes_sent
    }

    /// This rank enters a step's exchange now.
    pub fn enter(&mut self) {
        self.own_entry_us = clock::now_us();
        self.last_entry_us = self.own_entry_us;
    }

    /// How long this rank was in the step's exchange before the last rank entered it. Absent when the ranks
    /// do not share a clock. True at the end of an allreduce or allgather, when every rank has heard of all.
    pub fn wait_time(&self) -> Option<Duration> {
        self.shares_clock().then(|| Duration::from_micros(self.last_entry_us - self.own_entry_us))
    }

    fn shares_clock(&self) -> bool {
        self.peers.iter().flatten().all(|peer| peer.same_clock)
    }

    /// Whether this rank, or one that it heard of, was told to stop.
    pub fn told_to_stop(&self) -> bool {
        self.peer_stops || self.stop.load(Ordering::Relaxed)
    }

    /// What the frames of an exchange say besides their payload.
    pub fn stamp(&self, check: u32) -> Stamp {
        Stamp { check, last_entry_us: self.last_entry_us, stop: self.told_to_stop() }
    }

    /// Sends something of the control group to every other rank, with the next round.
    pub fn post(&mut self, body: &[u8]) {
        let ranks: Vec<Rank> = self.peers.iter().flatten().map(|peer| peer.rank).collect();
        ranks.into_iter().for_each(|rank| self.post_to(rank, body.to_vec()));
    }

    /// As [`Self::post`], to one rank.
    pub fn post_to(&mut self, rank: Rank, body: Vec<u8>) {
        self.posted.push(Outgoing::control(rank, body));
    }

    /// The next thing of the control group that a rank has sent; waits for it.
    pub fn collect(&mut self, from: Rank) -> Result<Vec<u8>, MeshError> {
        if let Some(body) = self.peer(from)?.control.pop_front() {
            return Ok(body);
        }
        let mut recvs = [Incoming::control(from)];
        self.round(&mut [], &mut recvs)?;
        let [frame] = recvs;
        Ok(frame.into_body())
    }

    /// Does one round: sends and receives all of it.
    pub fn round(&mut self, sends: &mut [Outgoing], recvs: &mut [Incoming]) -> Result<(), MeshError> {
        let mut posted = std::mem::take(&mut self.posted);
        let done = self.try_round(&mut posted, &mut []).and_then(|()| self.try_round(sends, recvs));
        if let Err(error) = &done {
            self.give_up(error);
        }
        if self.shares_clock() {
            let received = recvs.iter().filter(|r| r.done()).map(Incoming::last_entry_us);
            self.last_entry_us = received.fold(self.last_entry_us, u64::max);
        }
        self.peer_stops |= recvs.iter().any(|r| r.done() && r.stop());
        for frame in recvs.iter_mut().filter(|frame| !frame.early.is_empty()) {
            let early = std::mem::take(&mut frame.early);
            self.peer(frame.peer)?.control.extend(early);
        }
        self.bytes_sent += sends.iter().map(|s| s.len() as u64).sum::<u64>();
        done
    }

    fn try_round(&mut self, sends: &mut [Outgoing], recvs: &mut [Incoming]) -> Result<(), MeshError> {
        let mut last_progress = Instant::now();
        loop {
            let mut moved = false;
            for i in 0..sends.len() {
                moved |= self.push(sends, i)?;
            }
            for i in 0..recvs.len() {
                moved |= self.pull(recvs, i)?;
            }
            if sends.iter().all(Outgoing::done) && recvs.iter().all(Incoming::done) {
                return Ok(());
            }
            let now = Instant::now();
            if moved {
                last_progress = now;
                continue;
            }
            self.check_timeout(sends, recvs, now - last_progress)?;
            self.wait(sends, recvs)?;
        }
    }

    fn peer(&mut self, rank: Rank) -> Result<&mut Peer, MeshError> {
        let own = self.rank;
        let unexpected = move || MeshError::Unexpected {
            peer: rank,
            got: format!("not a peer of rank {own}"),
            expected: "a schedule for this job".into(),
        };
        self.peers.get_mut(rank.index()).and_then(Option::as_mut).ok_or_else(unexpected)
    }

    /// Writes as much of one frame as the system takes; false when it takes nothing.
    fn push(&mut self, sends: &mut [Outgoing], i: usize) -> Result<bool, MeshError> {
        let (before, rest) = sends.split_at_mut(i);
        let Some(frame) = rest.first_mut() else { return Ok(false) };
        if frame.done() || before.iter().any(|s| s.peer == frame.peer && !s.done()) {
            return Ok(false);
        }
        let peer = self.peer(frame.peer)?;
        let mut moved = false;
        while !frame.done() {
            let (head, body) = frame.rest();
            match peer.stream.write_vectored(&[IoSlice::new(head), IoSlice::new(body)]) {
                Ok(0) => return Err(peer.lost("it takes no more bytes")),
                Ok(n) => {
                    frame.sent += n;
                    peer.mid_frame = !frame.done();
                    moved = true;
                }
                Err(error) if error.kind() == ErrorKind::WouldBlock => break,
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                // What it said before it went may tell more than the broken pipe.
                Err(error) => return Err(peer.closing_error().unwrap_or_else(|| peer.lost(&error.to_string()))),
            }
        }
        Ok(moved)
    }

    /// Reads as much of one frame as there is; false when there is nothing.
    fn pull(&mut self, recvs: &mut [Incoming], i: usize) -> Result<bool, MeshError> {
        let (before, rest) = recvs.split_at_mut(i);
        let Some(frame) = rest.first_mut() else { return Ok(false) };
        if frame.done() || before.iter().any(|r| r.peer == frame.peer && !r.done()) {
            return Ok(false);
        }
        let peer = self.peer(frame.peer)?;
        let mut moved = false;
        while !frame.done() {
            match peer.stream.read(frame.space()) {
                Ok(0) => return Err(peer.lost("it closed the connection (its process has ended)")),
                Ok(n) => {
                    moved = true;
                    frame.advance(n)?;
                }
                Err(error) if error.kind() == ErrorKind::WouldBlock => break,
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                Err(error) => return Err(peer.lost(&error.to_string())),
            }
        }
        Ok(moved)
    }

    fn check_timeout(&self, sends: &[Outgoing], recvs: &[Incoming], idle: Duration) -> Result<(), MeshError> {
        if self.stop.load(Ordering::Relaxed) && idle > STOP_GRACE {
            return Err(MeshError::Stopped { waiting: self.waiting(sends, recvs) });
        }
        if idle > self.timeout {
            let seconds = self.timeout.as_secs_f64();
            return Err(MeshError::Timeout { waiting: self.waiting(sends, recvs), seconds });
        }
        Ok(())
    }

    fn waiting(&self, sends: &[Outgoing], recvs: &[Incoming]) -> String {
        let open = sends.iter().filter(|s| !s.done()).map(|s| s.peer);
        let mut ranks: Vec<Rank> = open.chain(recvs.iter().filter(|r| !r.done()).map(|r| r.peer)).collect();
        ranks.sort();
        ranks.dedup();
        let name = |rank: &Rank| match self.addr(*rank) {
            Some(addr) => format!("rank {rank} ({addr})"),
            None => format!("rank {rank}"),
        };
        ranks.iter().map(name).collect::<Vec<_>>().join(", ")
    }

    /// Sleeps until one of the unfinished sockets is ready, for at most [`POLL_SLICE`].
    fn wait(&self, sends: &[Outgoing], recvs: &[Incoming]) -> Result<(), MeshError> {
        let mut fds = Vec::with_capacity(sends.len() + recvs.len());
        for peer in self.peers.iter().flatten() {
            let mut flags = PollFlags::empty();
            if sends.iter().any(|s| s.peer == peer.rank && !s.done()) {
                flags |= PollFlags::POLLOUT;
            }
            if recvs.iter().any(|r| r.peer == peer.rank && !r.done()) {
                flags |= PollFlags::POLLIN;
            }
            if !flags.is_empty() {
                fds.push(PollFd::new(peer.stream.as_fd(), flags));
            }
        }
        let slice = self.timeout.min(POLL_SLICE).max(Duration::from_millis(1));
        let slice = PollTimeout::try_from(slice).unwrap_or(PollTimeout::MAX);
        match nix::poll::poll(&mut fds, slice) {
            Ok(_) | Err(nix::errno::Errno::EINTR) => Ok(()),
            Err(errno) => Err(MeshError::Poll(errno)),
        }
    }

    /// Tells the peers whom this rank blames, as far as that is possible without waiting: a chain of broken
    /// connections would otherwise hide which process died first.
    fn give_up(&mut self, error: &MeshError) {
        let culprit = error.culprit().unwrap_or(self.rank);
        let goodbye = Header::goodbye(culprit);
        for peer in self.peers.iter_mut().flatten().filter(|p| p.rank != culprit && !p.mid_frame) {
            if let Err(error) = peer.stream.write_all(&goodbye) {
                tracing::debug!(peer = %peer.rank, %error, "could not say goodbye");
            }
        }
    }
}

impl Peer {
    fn lost(&self, what: &str) -> MeshError {
        MeshError::Lost { peer: self.rank, addr: self.addr, what: what.to_owned() }
    }

    /// A goodbye that arrived before the connection broke.
    fn closing_error(&mut self) -> Option<MeshError> {
        let mut head = [0; FRAME_HEAD];
        self.stream.read_exact(&mut head).ok()?;
        let culprit = Header::read(head).culprit()?;
        Some(MeshError::GaveUp { peer: self.rank, culprit })
    }
}
