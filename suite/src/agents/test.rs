//! A granted throughput test: the two sides of `flexcomm_probes::throughput` with messages of the network for sockets.

use super::{Carries, Shared, Token};
use flexcomm_agent::parts::Failed;
use flexcomm_probes::Nanos;
use flexcomm_probes::edge::MeasureError;
use flexcomm_probes::throughput::{DirectionResult, Plan, Rate, Receiving, Sending, TcpSummary, ThroughputResult};
use flexcomm_truth::job;
use flexcomm_truth::network::ConnectionId;

/// Round trips before the first byte: for each of two connections its own, challenge, and answer with proof.
const HANDSHAKES: u8 = 6;
/// A handshake that takes longer than this has failed, seconds.
const HANDSHAKE_S: f64 = 4.0;
/// Bytes of a frame with heads.
const FRAME_BYTES: f64 = 120.0;
/// Unsent bytes that the stream may hold (`TCP_NOTSENT_LOWAT`).
const NOT_SENT: f64 = 65_536.0;
/// A phase has so many pieces at least, so that their arrivals show its course; a piece is no larger than what a kernel hands over
/// at once, no smaller than a segment.
const PIECES: u64 = 256;
const PIECE_BYTES: (u64, u64) = (1448, 65_536);
/// Time between two looks of both sides, seconds.
pub(super) const LOOK_S: f64 = 0.01;

/// A message between the two sides.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) enum Frame {
    /// The client's part of a round trip of the handshakes, of which so many are left, this one included.
    HandshakeRequest(u8),
    /// The server's.
    HandshakeReply(u8),
    /// The receiver is ready: the phase begins.
    Begin,
    /// Bytes of the test.
    Data(u32),
    /// The receiver has enough.
    Stop,
    /// The sender has sent all.
    Done,
    /// What the server found.
    Report,
}

/// Whose test it is, and its connections from the client to the server and back.
pub(super) struct TestConnections<'a> {
    pub(super) network: &'a mut Shared,
    /// Seconds since agents began.
    pub(super) now: f64,
    pub(super) client: usize,
    pub(super) out: ConnectionId,
    pub(super) back: ConnectionId,
}

/// A test from its handshakes to its report.
#[derive(Debug)]
pub(super) struct Test {
    /// Of this agent's tests.
    pub(super) number: u64,
    plan: Plan,
    begun: f64,
    rtt_s: f64,
    /// Whether the server sends now.
    is_back: bool,
    sending: Option<Sending>,
    receiving: Option<Receiving>,
    is_sent: bool,
    /// What the sender reports to have sent.
    sent: Option<u64>,
    is_stopped: bool,
    found: Option<Rate>,
    /// Of the stream as it was sent last: round trips without queues, and with them, seconds.
    round_trips: (f64, f64),
    result: ThroughputResult,
}

pub(super) type Outcome = Result<ThroughputResult, Failed>;

fn nanos(now: f64) -> Nanos {
    Nanos((now * 1e9) as u64)
}

impl Test {
    pub(super) fn begin(number: u64, plan: Plan, connections: &mut TestConnections<'_>) -> Self {
        let begun = connections.now;
        let result = ThroughputResult { out: None, back: None, streams: plan.streams() };
        let test = Self {
            number,
            plan,
            begun,
            rtt_s: 0.0,
            is_back: false,
            sending: None,
            receiving: None,
            is_sent: false,
            sent: None,
            is_stopped: false,
            found: None,
            round_trips: (0.0, 0.0),
            result,
        };
        connections.network.reopen(connections.out);
        connections.network.reopen(connections.back);
        test.send_frame(connections, true, Frame::HandshakeRequest(HANDSHAKES));
        test
    }

    fn token(&self, connections: &TestConnections<'_>, frame: Frame) -> job::Token<Token> {
        job::Token::Other(Token(Carries::Test(connections.client, self.number, frame)))
    }

    fn send_frame(&self, connections: &mut TestConnections<'_>, to_server: bool, frame: Frame) {
        let (way, token) = (if to_server { connections.out } else { connections.back }, self.token(connections, frame));
        connections.network.datagram(way, FRAME_BYTES, token);
    }

    /// A frame arrived at either side. The outcome ends the test.
    pub(super) fn arrived(&mut self, connections: &mut TestConnections<'_>, frame: Frame) -> Option<Outcome> {
        let now = connections.now;
        match frame {
            Frame::HandshakeRequest(1) => self.receive(connections),
            Frame::HandshakeRequest(left) => self.send_frame(connections, false, Frame::HandshakeReply(left)),
            Frame::HandshakeReply(left) => {
                if left == HANDSHAKES {
                    self.rtt_s = now - self.begun;
                }
                self.send_frame(connections, true, Frame::HandshakeRequest(left - 1));
            }
            Frame::Begin => {
                let (out, back) = self.plan.shares();
                let budget = if self.is_back { back } else { out };
                self.sending = Some(Sending::new(nanos(now), budget, self.plan.time_limit_s()));
            }
            Frame::Data(bytes) => {
                if let Some(receiving) = &mut self.receiving {
                    receiving.data([(nanos(now), u64::from(bytes))]);
                }
            }
            Frame::Stop => {
                if let Some(sending) = &mut self.sending {
                    sending.stop();
                }
            }
            Frame::Done => {
                self.sent = self.sending.as_ref().map(Sending::sent);
                if let (Some(receiving), Some(sent)) = (&mut self.receiving, self.sent) {
                    receiving.done(sent);
                }
            }
            Frame::Report => return self.reported(connections),
        }
        self.look(connections)
    }

    /// The side that receives is ready.
    fn receive(&mut self, connections: &mut TestConnections<'_>) {
        let now = nanos(connections.now);
        self.receiving = Some(Receiving::new(now, self.plan.time_limit_s(), self.rtt_s));
        self.send_frame(connections, self.is_back, Frame::Begin);
    }

    /// Both sides look at what there is to do.
    pub(super) fn look(&mut self, connections: &mut TestConnections<'_>) -> Option<Outcome> {
        let now = connections.now;
        if self.receiving.is_none() && self.found.is_none() && now - self.begun > HANDSHAKE_S * f64::from(HANDSHAKES) {
            return Some(Err(self.failed(&MeasureError::Silent("the server's go-ahead"))));
        }
        self.send(connections);
        let receiving = self.receiving.as_mut()?;
        if self.sent.is_some() && receiving.finished(nanos(now)) {
            return self.received(connections);
        }
        if nanos(now) >= receiving.deadline() {
            return Some(Err(self.failed(&MeasureError::Silent("the end of the phase"))));
        }
        if receiving.wants_stop(nanos(now)) && self.sent.is_none() && !self.is_stopped {
            self.is_stopped = true;
            self.send_frame(connections, self.is_back, Frame::Stop);
        }
        None
    }

    fn send(&mut self, connections: &mut TestConnections<'_>) {
        let (to_server, now) = (!self.is_back, nanos(connections.now));
        let way = if to_server { connections.out } else { connections.back };
        let piece = (self.plan.budget_bytes() / 2 / PIECES).clamp(PIECE_BYTES.0, PIECE_BYTES.1);
        if !self.is_sent && self.sending.is_some() {
            let info = connections.network.tcp_info(way);
            self.round_trips = (info.path_s, info.round_trip_s);
        }
        while let Some(sending) = &mut self.sending {
            let bytes = sending.allowance(now).min(piece);
            if bytes == 0 || connections.network.tcp_info(way).waiting >= NOT_SENT {
                break;
            }
            sending.wrote(bytes);
            let token = self.token(connections, Frame::Data(bytes as u32));
            connections.network.send(way, bytes as f64, token);
        }
        let is_over = self.sending.as_ref().is_some_and(|sending| sending.allowance(now) == 0);
        if is_over && !self.is_sent {
            self.is_sent = true;
            self.send_frame(connections, to_server, Frame::Done);
        }
    }

    /// All of a phase arrived.
    fn received(&mut self, connections: &mut TestConnections<'_>) -> Option<Outcome> {
        self.found = self.receiving.take().and_then(|receiving| receiving.rate());
        if !self.is_back {
            self.send_frame(connections, false, Frame::Report);
            return None;
        }
        self.result.back = self.direction();
        Some(if self.result.back.is_some() { Ok(self.result) } else { Err(self.failed(&MeasureError::Nothing)) })
    }

    /// The client knows what the server found; the other direction begins.
    fn reported(&mut self, connections: &mut TestConnections<'_>) -> Option<Outcome> {
        self.result.out = self.direction();
        if self.result.out.is_none() {
            return Some(Err(self.failed(&MeasureError::Nothing)));
        }
        (self.is_back, self.sending, self.is_sent, self.sent, self.is_stopped) = (true, None, false, None, false);
        self.receive(connections);
        None
    }

    fn direction(&self) -> Option<DirectionResult> {
        const SEGMENT: u32 = 1448;
        let ((path_s, round_trip_s), us) = (self.round_trips, |seconds: f64| (seconds * 1e6) as u32);
        let (rate, sent_bytes) = self.found.zip(self.sent)?;
        // What is under way is the window.
        let cwnd = (rate.bps / 8.0 * round_trip_s / f64::from(SEGMENT)) as u32;
        let round_trips = TcpSummary { rtt_us: us(round_trip_s), min_rtt_us: us(path_s), ..TcpSummary::default() };
        Some(DirectionResult { rate, sent_bytes, tcp: TcpSummary { cwnd, mss: SEGMENT, ..round_trips } })
    }

    fn failed(&self, error: &MeasureError) -> Failed {
        Failed { why: error.to_string(), bytes: self.plan.budget_bytes() }
    }
}
