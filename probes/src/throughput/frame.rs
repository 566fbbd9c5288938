//! Frames of the control connection and of the handshakes: kind (1 byte), length (2 bytes), payload. All numbers
//! are little-endian.

use super::{Direction, Plan, Rate, TcpSummary};
use crate::auth::{Key, same};
use flexcomm_domain::Invalid;

/// Longest payload of any frame.
const MAX_PAYLOAD: usize = 192;

/// A keyed hash that shows knowledge of the token.
pub type Proof = [u8; 32];

/// What a connection is for.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Purpose {
    /// A new session.
    Control {
        /// What to do.
        plan: Plan,
        /// The client's round trip in µs, for the receiver's estimator.
        rtt_us: u32,
    },
    /// A stream of a session.
    Stream {
        /// Which session.
        session: u64,
    },
}

/// Why a server does not serve.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum Refusal {
    /// One session at a time.
    #[error("the server is busy with another session for at most {0} ms")]
    Busy(u32),
    /// Wrong token.
    #[error("the server does not accept this token: both ends need the same")]
    Token,
    /// A plan it does not carry out, or a stream of no session.
    #[error("the server does not accept the request: its version or limits differ")]
    Request,
}

/// One frame.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Frame {
    /// Server's first word on every connection.
    Challenge([u8; 32]),
    /// Client's answer.
    Hello {
        /// The client's own challenge.
        nonce: [u8; 32],
        /// What it wants.
        purpose: Purpose,
        /// See [`client_proof`].
        proof: Proof,
    },
    /// Server's answer.
    Accept {
        /// The session to name in the streams' hellos.
        session: u64,
        /// See [`server_proof`].
        proof: Proof,
    },
    /// Server's other answer.
    Refuse(Refusal),
    /// All streams are there: the first phase begins.
    Ready,
    /// Receiver: enough.
    Stop,
    /// Sender: no more than these bytes in this phase.
    Done {
        /// Bytes written to all streams.
        bytes: u64,
        /// What TCP says.
        tcp: TcpSummary,
    },
    /// Server: what it found in the phase out.
    Report(Option<Rate>),
    /// Client: it has all of the phase before, the phase back may begin.
    Go,
}

/// Bytes that are no frame.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
pub enum BadFrame {
    /// Unknown kind.
    #[error("a frame of unknown kind {0} arrived")]
    Kind(u8),
    /// A length that this kind does not have.
    #[error("a frame of kind {0} arrived with {1} bytes")]
    Length(u8, usize),
    /// A value out of range.
    #[error("a frame of kind {0} arrived with an impossible value")]
    Value(u8),
    /// A plan out of range.
    #[error(transparent)]
    Plan(#[from] Invalid),
}

/// What a client proves: that it knows the token, on this connection, for this purpose.
pub fn client_proof(key: &Key, challenge: &[u8; 32], nonce: &[u8; 32], purpose: &Purpose) -> Proof {
    key.mac(&[b"client", challenge, nonce, &purpose_bytes(purpose)])
}

/// What the server proves in return.
pub fn server_proof(key: &Key, challenge: &[u8; 32], nonce: &[u8; 32], session: u64) -> Proof {
    key.mac(&[b"server", challenge, nonce, &session.to_le_bytes()])
}

/// Constant-time comparison of proofs.
pub(crate) fn proves(given: &Proof, expected: &Proof) -> bool {
    same(given, expected)
}

fn purpose_bytes(purpose: &Purpose) -> Vec<u8> {
    match purpose {
        Purpose::Control { plan, rtt_us } => {
            let direction = match plan.direction {
                Direction::Out => 0,
                Direction::Back => 1,
                Direction::Both => 2,
            };
            let mut bytes = vec![0, plan.streams, direction];
            bytes.extend(plan.budget_bytes.to_le_bytes());
            bytes.extend(((plan.time_limit_s * 1e3) as u32).to_le_bytes());
            bytes.extend(plan.pace_bps.unwrap_or(0).to_le_bytes());
            bytes.extend(rtt_us.to_le_bytes());
            bytes
        }
        Purpose::Stream { session } => [&[1][..], &session.to_le_bytes()].concat(),
    }
}

struct Reader<'a>(&'a [u8]);

impl Reader<'_> {
    fn take<const N: usize>(&mut self) -> Option<[u8; N]> {
        let (head, tail) = self.0.split_first_chunk::<N>()?;
        self.0 = tail;
        Some(*head)
    }

    fn u8(&mut self) -> Option<u8> {
        self.take::<1>().map(|b| b[0])
    }

    fn u32(&mut self) -> Option<u32> {
        self.take().map(u32::from_le_bytes)
    }

    fn u64(&mut self) -> Option<u64> {
        self.take().map(u64::from_le_bytes)
    }

    fn f64(&mut self) -> Option<f64> {
        self.take().map(f64::from_le_bytes)
    }
}

impl Frame {
    fn kind(&self) -> u8 {
        match self {
            Self::Challenge(_) => 1,
            Self::Hello { .. } => 2,
            Self::Accept { .. } => 3,
            Self::Refuse(_) => 4,
            Self::Ready => 5,
            Self::Stop => 6,
            Self::Done { .. } => 7,
            Self::Report(_) => 8,
            Self::Go => 9,
        }
    }

    fn payload(&self) -> Vec<u8> {
        match self {
            Self::Challenge(nonce) => nonce.to_vec(),
            Self::Hello { nonce, purpose, proof } => [&nonce[..], &proof[..], &purpose_bytes(purpose)].concat(),
            Self::Accept { session, proof } => [&session.to_le_bytes()[..], &proof[..]].concat(),
            Self::Refuse(refusal) => {
                let (code, ms) = match refusal {
                    Refusal::Busy(ms) => (0, *ms),
                    Refusal::Token => (1, 0),
                    Refusal::Request => (2, 0),
                };
                [&[code][..], &u32::to_le_bytes(ms)].concat()
            }
            Self::Ready | Self::Stop | Self::Go => Vec::new(),
            Self::Done { bytes, tcp } => {
                let mut out = bytes.to_le_bytes().to_vec();
                for word in [tcp.rtt_us, tcp.min_rtt_us, tcp.retransmits, tcp.cwnd, tcp.mss] {
                    out.extend(word.to_le_bytes());
                }
                out.extend(tcp.delivery_bps.to_le_bytes());
                out
            }
            Self::Report(None) => Vec::new(),
            Self::Report(Some(rate)) => {
                let mut out = vec![u8::from(rate.steady)];
                for number in [rate.bps, rate.used_bytes, rate.used_s] {
                    out.extend(number.to_le_bytes());
                }
                out
            }
        }
    }

    /// Encodes.
    pub fn encode(&self) -> Vec<u8> {
        let payload = self.payload();
        let mut out = vec![self.kind()];
        out.extend((payload.len() as u16).to_le_bytes());
        out.extend(payload);
        out
    }

    fn decode(kind: u8, payload: &[u8]) -> Result<Self, BadFrame> {
        let mut reader = Reader(payload);
        let frame = Self::read(kind, &mut reader, payload.is_empty())?;
        match frame {
            Some(frame) if reader.0.is_empty() => Ok(frame),
            _ => Err(BadFrame::Length(kind, payload.len())),
        }
    }

    /// `None`: too short.
    fn read(kind: u8, r: &mut Reader<'_>, empty: bool) -> Result<Option<Self>, BadFrame> {
        Ok(match kind {
            1 => r.take().map(Self::Challenge),
            2 => return read_hello(r),
            3 => r.u64().zip(r.take()).map(|(session, proof)| Self::Accept { session, proof }),
            4 => match r.u8().zip(r.u32()) {
                Some((0, ms)) => Some(Self::Refuse(Refusal::Busy(ms))),
                Some((1, _)) => Some(Self::Refuse(Refusal::Token)),
                Some((2, _)) => Some(Self::Refuse(Refusal::Request)),
                Some(_) => return Err(BadFrame::Value(kind)),
                None => None,
            },
            5 => Some(Self::Ready),
            6 => Some(Self::Stop),
            7 => return read_done(r),
            8 if empty => Some(Self::Report(None)),
            8 => return read_report(r),
            9 => Some(Self::Go),
            other => return Err(BadFrame::Kind(other)),
        })
    }
}

fn read_hello(r: &mut Reader<'_>) -> Result<Option<Frame>, BadFrame> {
    let Some(((nonce, proof), kind)) = r.take().zip(r.take()).zip(r.u8()) else { return Ok(None) };
    let purpose = match kind {
        0 => {
            let (Some((streams, direction)), Some((budget, ms)), Some((pace, rtt_us))) =
                (r.u8().zip(r.u8()), r.u64().zip(r.u32()), r.u64().zip(r.u32()))
            else {
                return Ok(None);
            };
            let direction = match direction {
                0 => Direction::Out,
                1 => Direction::Back,
                2 => Direction::Both,
                _ => return Err(BadFrame::Value(2)),
            };
            let plan = Plan::new(streams, budget, f64::from(ms) / 1e3, direction)?;
            Purpose::Control { plan: if pace > 0 { plan.paced(pace) } else { plan }, rtt_us }
        }
        1 => match r.u64() {
            Some(session) => Purpose::Stream { session },
            None => return Ok(None),
        },
        _ => return Err(BadFrame::Value(2)),
    };
    Ok(Some(Frame::Hello { nonce, purpose, proof }))
}

fn read_done(r: &mut Reader<'_>) -> Result<Option<Frame>, BadFrame> {
    let bytes = r.u64();
    let words = [r.u32(), r.u32(), r.u32(), r.u32(), r.u32()];
    let (Some(bytes), Some(delivery_bps)) = (bytes, r.f64()) else { return Ok(None) };
    let [Some(rtt_us), Some(min_rtt_us), Some(retransmits), Some(cwnd), Some(mss)] = words else { return Ok(None) };
    if !(delivery_bps.is_finite() && delivery_bps >= 0.0) {
        return Err(BadFrame::Value(7));
    }
    let tcp = TcpSummary { rtt_us, min_rtt_us, retransmits, cwnd, mss, delivery_bps };
    Ok(Some(Frame::Done { bytes, tcp }))
}

fn read_report(r: &mut Reader<'_>) -> Result<Option<Frame>, BadFrame> {
    let Some(steady) = r.u8() else { return Ok(None) };
    let [Some(bps), Some(used_bytes), Some(used_s)] = [r.f64(), r.f64(), r.f64()] else { return Ok(None) };
    let possible = [bps, used_bytes, used_s].iter().all(|v| v.is_finite() && *v >= 0.0);
    if !possible || steady > 1 {
        return Err(BadFrame::Value(8));
    }
    Ok(Some(Frame::Report(Some(Rate { bps, steady: steady == 1, used_bytes, used_s }))))
}

/// Takes bytes as they come and gives whole frames.
#[derive(Debug, Default)]
pub struct FrameReader {
    buffer: Vec<u8>,
}

impl FrameReader {
    /// Bytes that may still be pushed before [`FrameReader::next_frame`] must be called: frames are small, so a
    /// peer that sends more without pause is not one of ours.
    pub fn room(&self) -> usize {
        (4 * (MAX_PAYLOAD + 3)).saturating_sub(self.buffer.len())
    }

    /// Adds bytes; what goes beyond [`FrameReader::room`] is left out.
    pub fn push(&mut self, bytes: &[u8]) {
        let take = bytes.len().min(self.room());
        self.buffer.extend_from_slice(&bytes[..take]);
    }

    /// The next whole frame; `None` when more bytes are needed.
    pub fn next_frame(&mut self) -> Result<Option<Frame>, BadFrame> {
        let [kind, low, high, ..] = self.buffer[..] else { return Ok(None) };
        let length = usize::from(u16::from_le_bytes([low, high]));
        if !(1..=9).contains(&kind) {
            return Err(BadFrame::Kind(kind));
        }
        if length > MAX_PAYLOAD {
            return Err(BadFrame::Length(kind, length));
        }
        if self.buffer.len() < 3 + length {
            return Ok(None);
        }
        let frame = Frame::decode(kind, &self.buffer[3..3 + length])?;
        self.buffer.drain(..3 + length);
        Ok(Some(frame))
    }
}
