//! The job's own connections, as the kernel's TCP counts them: what they tell about a link, for free.
//!
//! While a stream waits for a link, its bytes are acknowledged at the rate at which the slowest link lets them through,
//! however large the latency is and whatever library sends them (Gloo, NCCL's sockets, MPI): dispersion of a packet
//! train, seen from the sender. So a link is measured in the direction in which it was used, with no byte of our own.
//!
//! A stream counts only as long as the link was what held it up: acknowledgements came evenly, nothing else of this
//! machine shared the way, and packets queued (round trips longer than the path's).

use crate::Nanos;
use crate::passive::STREAM_S;
use std::collections::BTreeMap;
use std::net::IpAddr;

/// A stream in which nothing was acknowledged for so long has ended, seconds.
const ENDED_S: f64 = 0.025;
/// And at most: then the next begins.
const MOST_S: f64 = 0.2;
/// And at least so many bytes.
const LEAST_BYTES: u64 = 32 * 1024;
/// The longest pause, as a share of the piece: after a longer one the sender waited for something else.
const LONGEST_PAUSE: f64 = 0.25;
/// Packets queue when the round trip is so many times the path's own.
const QUEUED: f64 = 1.25;
/// Share of the looks at a piece that must find a queue.
const QUEUED_LOOKS: f64 = 0.5;
/// Share of all that this machine sent meanwhile that must have been this piece.
const ALONE: f64 = 0.8;

/// One connection (of the kernel's `struct tcp_info`).
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Flow {
    /// The kernel's cookie: no other connection has it while the machine is up.
    pub id: u64,
    /// The other end.
    pub peer: IpAddr,
    /// Whether it is the job's, to a node whose link is measured. Others are company: they take a part of the way out.
    pub job: bool,
    /// Bytes that the other end has acknowledged since the connection began.
    pub acked: u64,
    /// Smoothed round trip, seconds: the queue is in it.
    pub rtt_s: f64,
    /// Round trip of the path without a queue, seconds.
    pub path_s: f64,
}

/// A piece of a stream: what one link let through.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Piece {
    /// Where it went.
    pub peer: IpAddr,
    /// Bytes acknowledged.
    pub bytes: u64,
    /// Seconds that they took: no latency is in it.
    pub seconds: f64,
}

/// What was acknowledged of all connections to one peer between two looks.
#[derive(Debug, Clone, Copy, Default)]
struct Progress {
    bytes: u64,
    /// Of these, bytes of connections with a queue.
    queued: u64,
}

/// A stream to one peer while it lasts.
#[derive(Debug, Clone, Copy)]
struct Stream {
    begun: Nanos,
    /// When, and how much since it began, at the newest progress; and at the one before, until when it surely ran.
    newest: (Nanos, u64),
    sure: (Nanos, u64),
    longest_pause_s: f64,
    everything: u64,
    looks: u32,
    queued: u32,
}

impl Stream {
    /// Bytes acknowledged before `now` say nothing: nobody saw when they began.
    fn begin(now: Nanos) -> Self {
        let start = (now, 0);
        Self { begun: now, newest: start, sure: start, longest_pause_s: 0.0, everything: 0, looks: 0, queued: 0 }
    }

    fn grow(&mut self, now: Nanos, progress: Progress) {
        self.longest_pause_s = self.longest_pause_s.max(now.since(self.newest.0));
        self.sure = self.newest;
        self.newest = (now, self.newest.1 + progress.bytes);
        self.looks += 1;
        self.queued += u32::from(2 * progress.queued >= progress.bytes);
    }

    fn length_s(&self) -> f64 {
        self.sure.0.since(self.begun)
    }

    /// What it shows, if the link was what held it up.
    fn piece(&self, peer: IpAddr) -> Option<Piece> {
        let (seconds, bytes) = (self.length_s(), self.sure.1);
        let enough = seconds >= STREAM_S && bytes >= LEAST_BYTES;
        let even = self.longest_pause_s <= LONGEST_PAUSE * seconds;
        let queued = f64::from(self.queued) >= QUEUED_LOOKS * f64::from(self.looks);
        let alone = self.newest.1 as f64 >= ALONE * self.everything as f64;
        (enough && even && queued && alone).then_some(Piece { peer, bytes, seconds })
    }
}

/// Turns looks at the connections into pieces of streams.
#[derive(Debug, Clone, Default)]
pub struct FlowWatch {
    before: BTreeMap<u64, Flow>,
    streams: BTreeMap<IpAddr, Stream>,
}

impl FlowWatch {
    /// Whether a stream is being watched: the next look should come soon (10 ms).
    pub fn is_streaming(&self) -> bool {
        !self.streams.is_empty()
    }

    /// The connections as they are at `now`; returns the pieces that ended.
    pub fn look(&mut self, now: Nanos, flows: &[Flow]) -> Vec<Piece> {
        let (progress, everything) = self.progress(flows);
        self.before = flows.iter().map(|flow| (flow.id, *flow)).collect();
        let mut pieces = self.end_silent(now);
        for stream in self.streams.values_mut() {
            stream.everything += everything;
        }
        for (peer, progress) in progress {
            let stream = self.streams.entry(peer).or_insert_with(|| Stream::begin(now));
            if stream.begun < now {
                stream.grow(now, progress);
            }
            if stream.length_s() >= MOST_S && stream.sure.1 >= LEAST_BYTES {
                pieces.extend(stream.piece(peer));
                *stream = Stream::begin(now);
            }
        }
        pieces
    }

    /// Streams without progress for too long are over.
    fn end_silent(&mut self, now: Nanos) -> Vec<Piece> {
        let mut pieces = Vec::new();
        self.streams.retain(|peer, stream| {
            let runs = now.since(stream.newest.0) <= ENDED_S;
            if !runs {
                pieces.extend(stream.piece(*peer));
            }
            runs
        });
        pieces
    }

    /// What was acknowledged since the last look: of the job per peer (peers with nothing are left out), and of all.
    fn progress(&self, flows: &[Flow]) -> (BTreeMap<IpAddr, Progress>, u64) {
        let mut progress: BTreeMap<IpAddr, Progress> = BTreeMap::new();
        let mut everything = 0;
        for flow in flows {
            let bytes = self.before.get(&flow.id).map_or(0, |before| flow.acked.saturating_sub(before.acked));
            everything += bytes;
            if bytes > 0 && flow.job {
                let of_peer = progress.entry(flow.peer).or_default();
                of_peer.bytes += bytes;
                of_peer.queued += if flow.rtt_s >= QUEUED * flow.path_s { bytes } else { 0 };
            }
        }
        (progress, everything)
    }
}

#[cfg(test)]
mod tests;
