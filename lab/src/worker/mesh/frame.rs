//! A frame: what it is, where in the exchange it belongs, payload. Little-endian.
//!
//! | bytes | what |
//! |---|---|
//! | 0-3 | `FLXF` a part of an exchange, `FLXC` something of the control group, `FLXE` a goodbye |
//! | 4-7 | check of step, version, digest and iteration; of a goodbye the number of the rank to blame |
//! | 8-11 | length of the payload |
//! | 12-13 | which exchange of the step |
//! | 14-15 | round of the exchange |
//! | 16-23 | when the last rank that the sender knows of entered the step's exchange, by the sender's clock, in µs |
//! | 24 | 1: the sender, or a rank that it heard of, was told to stop |
//! | 25-27 | 0 |
//! | 28- | the payload |
//!
//! Frames of the control group come between those of exchanges, sooner than they are asked for: they are kept.

use super::MeshError;
use flexcomm_domain::Rank;

/// Bytes of a frame before its payload.
pub const FRAME_HEAD: usize = 28;

/// Largest payload of a frame of the control group.
const MOST_CONTROL: usize = 1 << 16;

const EXCHANGE: [u8; 4] = *b"FLXF";
const CONTROL: [u8; 4] = *b"FLXC";
const GOODBYE: [u8; 4] = *b"FLXE";

/// Where in a step a frame belongs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Tag {
    /// Which exchange of the step.
    pub exchange: u16,
    /// Round of the exchange.
    pub round: u16,
}

/// The first bytes of a frame.
#[derive(Debug, Clone, Copy)]
pub(super) struct Header([u8; FRAME_HEAD]);

impl Header {
    fn new(kind: [u8; 4], number: u32, length: usize) -> Self {
        let mut head = [0; FRAME_HEAD];
        head[..4].copy_from_slice(&kind);
        head[4..8].copy_from_slice(&number.to_le_bytes());
        // Gradients are bounded well below 4 GiB (MAX_PARAMETERS).
        head[8..12].copy_from_slice(&(length as u32).to_le_bytes());
        Self(head)
    }

    pub(super) fn goodbye(culprit: Rank) -> [u8; FRAME_HEAD] {
        Self::new(GOODBYE, culprit.0, 0).0
    }

    pub(super) fn read(bytes: [u8; FRAME_HEAD]) -> Self {
        Self(bytes)
    }

    fn is(&self, kind: [u8; 4]) -> bool {
        self.0[..4] == kind
    }

    fn u16_at(&self, at: usize) -> u16 {
        u16::from_le_bytes([self.0[at], self.0[at + 1]])
    }

    fn u32_at(&self, at: usize) -> u32 {
        u32::from(self.u16_at(at)) | u32::from(self.u16_at(at + 2)) << 16
    }

    /// Whom a goodbye blames.
    pub(super) fn culprit(&self) -> Option<Rank> {
        self.is(GOODBYE).then(|| Rank(self.u32_at(4)))
    }

    fn length(&self) -> usize {
        self.u32_at(8) as usize
    }

    fn tag(&self) -> Tag {
        Tag { exchange: self.u16_at(12), round: self.u16_at(14) }
    }
}

/// What frames of a step's exchange say besides their payload.
#[derive(Debug, Clone, Copy)]
pub struct Stamp {
    /// The same on all ranks in the same step and iteration under the same decision.
    pub check: u32,
    /// When the last rank known of entered the step's exchange.
    pub last_entry_us: u64,
    /// Whether this rank, or one it heard of, was told to stop.
    pub stop: bool,
}

/// A frame on its way out.
#[derive(Debug)]
pub struct Outgoing {
    /// To whom.
    pub peer: Rank,
    head: [u8; FRAME_HEAD],
    body: Vec<u8>,
    pub(super) sent: usize,
}

impl Outgoing {
    /// A part of an exchange.
    pub fn new(peer: Rank, tag: Tag, stamp: Stamp, body: Vec<u8>) -> Self {
        let Header(mut head) = Header::new(EXCHANGE, stamp.check, body.len());
        head[12..14].copy_from_slice(&tag.exchange.to_le_bytes());
        head[14..16].copy_from_slice(&tag.round.to_le_bytes());
        head[16..24].copy_from_slice(&stamp.last_entry_us.to_le_bytes());
        head[24] = u8::from(stamp.stop);
        Self { peer, head, body, sent: 0 }
    }

    /// Something of the control group.
    pub(super) fn control(peer: Rank, body: Vec<u8>) -> Self {
        Self { peer, head: Header::new(CONTROL, 0, body.len()).0, body, sent: 0 }
    }

    pub(super) fn rest(&self) -> (&[u8], &[u8]) {
        let head = self.sent.min(self.head.len());
        (&self.head[head..], &self.body[self.sent - head..])
    }

    pub(super) fn done(&self) -> bool {
        self.sent == self.len()
    }

    /// Bytes of the whole frame.
    pub(super) fn len(&self) -> usize {
        self.head.len() + self.body.len()
    }

    /// The payload's buffer, to be used again.
    pub fn into_body(self) -> Vec<u8> {
        self.body
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Stage {
    Head,
    Body,
    /// Of a frame of the control group, whether or not that is what is expected.
    Control,
    Done,
}

/// What a frame must be.
#[derive(Debug, Clone, Copy)]
enum Expected {
    /// A part of an exchange.
    Exchange { tag: Tag, check: u32 },
    /// Anything of the control group.
    Control,
}

/// A frame that is expected.
#[derive(Debug)]
pub struct Incoming {
    /// From whom.
    pub peer: Rank,
    expected: Expected,
    stage: Stage,
    head: [u8; FRAME_HEAD],
    body: Vec<u8>,
    control: Vec<u8>,
    /// Frames of the control group that came before it.
    pub(super) early: Vec<Vec<u8>>,
    /// Of the stage's buffer.
    got: usize,
}

impl Incoming {
    fn of(peer: Rank, expected: Expected, body: Vec<u8>) -> Self {
        let (control, early) = Default::default();
        Self { peer, expected, stage: Stage::Head, head: [0; FRAME_HEAD], body, control, early, got: 0 }
    }

    /// A part of an exchange; `body` has exactly the length that must arrive.
    pub fn new(peer: Rank, tag: Tag, check: u32, body: Vec<u8>) -> Self {
        Self::of(peer, Expected::Exchange { tag, check }, body)
    }

    /// Something of the control group.
    pub(super) fn control(peer: Rank) -> Self {
        Self::of(peer, Expected::Control, Vec::new())
    }

    /// The payload.
    pub fn into_body(self) -> Vec<u8> {
        self.body
    }

    /// The payload.
    pub fn body(&self) -> &[u8] {
        &self.body
    }

    /// When the last rank that the sender knew of entered the step's exchange, by the sender's clock, in µs.
    pub fn last_entry_us(&self) -> u64 {
        self.head[16..].first_chunk().map_or(0, |bytes| u64::from_le_bytes(*bytes))
    }

    /// Whether the sender, or a rank that it heard of, was told to stop.
    pub fn stop(&self) -> bool {
        self.head[24] != 0
    }

    pub(super) fn done(&self) -> bool {
        self.stage == Stage::Done
    }

    pub(super) fn space(&mut self) -> &mut [u8] {
        let buffer = match self.stage {
            Stage::Head => &mut self.head[..],
            Stage::Control => &mut self.control,
            Stage::Body | Stage::Done => &mut self.body,
        };
        &mut buffer[self.got..]
    }

    /// `n` bytes were read into the space.
    pub(super) fn advance(&mut self, n: usize) -> Result<(), MeshError> {
        self.got += n;
        // A stage whose buffer is empty is passed through at once.
        while !self.done() && self.space().is_empty() {
            self.got = 0;
            self.stage = match self.stage {
                Stage::Head => self.read_head()?,
                Stage::Control => self.keep_control(),
                Stage::Body | Stage::Done => Stage::Done,
            };
        }
        Ok(())
    }

    fn keep_control(&mut self) -> Stage {
        let control = std::mem::take(&mut self.control);
        if matches!(self.expected, Expected::Control) {
            self.body = control;
            return Stage::Done;
        }
        self.early.push(control);
        Stage::Head
    }

    fn read_head(&mut self) -> Result<Stage, MeshError> {
        let head = Header::read(self.head);
        if let Some(culprit) = head.culprit() {
            return Err(MeshError::GaveUp { peer: self.peer, culprit });
        }
        if head.is(CONTROL) && head.length() <= MOST_CONTROL {
            self.control = vec![0; head.length()];
            return Ok(Stage::Control);
        }
        let unexpected = |got: String, expected: String| MeshError::Unexpected { peer: self.peer, got, expected };
        if !head.is(EXCHANGE) {
            return Err(unexpected(format!("something that begins with {:02x?}", &self.head[..4]), "a frame".into()));
        }
        let words =
            |(tag, length): (Tag, usize)| format!("exchange {} round {} with {length} bytes", tag.exchange, tag.round);
        let got = (head.tag(), head.length());
        let Expected::Exchange { tag, check } = self.expected else {
            return Err(unexpected(words(got), "a message of the control group".into()));
        };
        // First: when decisions differ, sizes differ too, and the decision is what should be named.
        if head.u32_at(4) != check {
            return Err(MeshError::Desynchronised { peer: self.peer });
        }
        let expected = (tag, self.body.len());
        if got != expected {
            return Err(unexpected(words(got), words(expected)));
        }
        Ok(Stage::Body)
    }
}
