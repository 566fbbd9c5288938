//! A frame: control word, where in the exchange it belongs, payload.
//!
//! | bytes | what |
//! |---|---|
//! | 0-35 | the control word without its plan |
//! | 36-39 | length of the payload |
//! | 40-41 | which exchange of the step |
//! | 42-43 | round of the exchange |
//! | 44-51 | when the last rank that the sender knows of entered the step's exchange, by the sender's clock, in µs |
//! | 52- | the plan, then the payload |
//!
//! A goodbye is a head of `FLXE` and the number of the rank to blame.

use super::piece::{Piece, PieceWatch};
use super::{MeshError, accept};
use flexcomm_domain::Rank;
use flexcomm_trainer::{Agreement, ControlWord, WORD_BASE};
use std::time::Instant;

/// Bytes of a frame before plan and payload.
pub const FRAME_HEAD: usize = WORD_BASE + 16;

const GOODBYE: [u8; 4] = *b"FLXE";

/// Where in a step a frame belongs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Tag {
    /// Which exchange of the step.
    pub exchange: u16,
    /// Round of the exchange.
    pub round: u16,
}

pub(super) struct Header;

impl Header {
    pub(super) fn goodbye(culprit: Rank) -> [u8; FRAME_HEAD] {
        let mut head = [0; FRAME_HEAD];
        head[..4].copy_from_slice(&GOODBYE);
        head[4..8].copy_from_slice(&culprit.0.to_le_bytes());
        head
    }

    pub(super) fn culprit(head: &[u8; FRAME_HEAD]) -> Option<Rank> {
        let number = [head[4], head[5], head[6], head[7]];
        (head[..4] == GOODBYE).then(|| Rank(u32::from_le_bytes(number)))
    }
}

/// A frame on its way out.
#[derive(Debug)]
pub struct Outgoing {
    /// To whom.
    pub peer: Rank,
    head: Vec<u8>,
    body: Vec<u8>,
    pub(super) sent: usize,
}

impl Outgoing {
    /// With the word as it is now; `last_entry_us` is passed on.
    pub fn new(peer: Rank, tag: Tag, (agreement, last_entry_us): (&Agreement, u64), body: Vec<u8>) -> Self {
        let mut word = Vec::with_capacity(FRAME_HEAD);
        agreement.word().encode(&mut word);
        let mut head = word[..WORD_BASE].to_vec();
        // Gradients are bounded well below 4 GiB (MAX_PARAMETERS).
        head.extend_from_slice(&(body.len() as u32).to_le_bytes());
        head.extend_from_slice(&tag.exchange.to_le_bytes());
        head.extend_from_slice(&tag.round.to_le_bytes());
        head.extend_from_slice(&last_entry_us.to_le_bytes());
        head.extend_from_slice(&word[WORD_BASE..]);
        Self { peer, head, body, sent: 0 }
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
    Plan,
    Body,
    Done,
}

/// A frame that is expected.
#[derive(Debug)]
pub struct Incoming {
    /// From whom.
    pub peer: Rank,
    tag: Tag,
    stage: Stage,
    head: [u8; FRAME_HEAD],
    plan: Vec<u8>,
    body: Vec<u8>,
    /// Of the stage's buffer.
    got: usize,
    piece: PieceWatch,
}

impl Incoming {
    /// `body` has exactly the length that must arrive.
    pub fn new(peer: Rank, tag: Tag, body: Vec<u8>) -> Self {
        let (head, plan) = ([0; FRAME_HEAD], Vec::new());
        Self { peer, tag, stage: Stage::Head, head, plan, body, got: 0, piece: PieceWatch::default() }
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
        let mut bytes = [0; 8];
        bytes.copy_from_slice(&self.head[WORD_BASE + 8..FRAME_HEAD]);
        u64::from_le_bytes(bytes)
    }

    /// What its arrival says about the link, if it was an even stream.
    pub fn piece(&self) -> Option<Piece> {
        self.piece.piece().filter(|_| self.done())
    }

    /// There is nothing more to read for now.
    pub(super) fn drained(&mut self) {
        self.piece.drained(Instant::now());
    }

    pub(super) fn done(&self) -> bool {
        self.stage == Stage::Done
    }

    pub(super) fn space(&mut self) -> &mut [u8] {
        let buffer = match self.stage {
            Stage::Head => &mut self.head[..],
            Stage::Plan => &mut self.plan,
            Stage::Body | Stage::Done => &mut self.body,
        };
        &mut buffer[self.got..]
    }

    /// `n` bytes were read into the space.
    pub(super) fn advance(&mut self, n: usize, agreement: &mut Agreement) -> Result<(), MeshError> {
        self.got += n;
        self.piece.read(n, Instant::now());
        // A stage whose buffer is empty is passed through at once.
        while !self.done() && self.space().is_empty() {
            self.got = 0;
            self.stage = match self.stage {
                Stage::Head => self.read_head()?,
                Stage::Plan => self.read_plan(agreement)?,
                Stage::Body | Stage::Done => Stage::Done,
            };
        }
        Ok(())
    }

    fn read_head(&mut self) -> Result<Stage, MeshError> {
        if let Some(culprit) = Header::culprit(&self.head) {
            return Err(MeshError::GaveUp { peer: self.peer, culprit });
        }
        let mut base = [0; WORD_BASE];
        base.copy_from_slice(&self.head[..WORD_BASE]);
        let word = |source| MeshError::Word { peer: self.peer, source };
        self.plan = vec![0; ControlWord::plan_bytes(&base).map_err(word)?];
        Ok(Stage::Plan)
    }

    /// The word first: when versions differ, sizes differ too, and the version is what should be named.
    fn read_plan(&mut self, agreement: &mut Agreement) -> Result<Stage, MeshError> {
        let mut word = self.head[..WORD_BASE].to_vec();
        word.extend_from_slice(&self.plan);
        accept(agreement, self.peer, &word)?;
        let rest = &self.head[WORD_BASE..];
        let length = u32::from_le_bytes([rest[0], rest[1], rest[2], rest[3]]) as usize;
        let exchange = u16::from_le_bytes([rest[4], rest[5]]);
        let round = u16::from_le_bytes([rest[6], rest[7]]);
        let got = (Tag { exchange, round }, length);
        let expected = (self.tag, self.body.len());
        if got == expected {
            return Ok(Stage::Body);
        }
        let words =
            |(tag, length): (Tag, usize)| format!("exchange {} round {} with {length} bytes", tag.exchange, tag.round);
        Err(MeshError::Unexpected { peer: self.peer, got: words(got), expected: words(expected) })
    }
}
