//! The control message that rank 0 broadcasts to the ranks of its job. Little-endian, padded with zeros to [`MESSAGE_BYTES`].
//!
//! | bytes | what |
//! |---|---|
//! | 0-3 | `FLXC` |
//! | 4 | version of this layout |
//! | 5 | ticks from this message to the next |
//! | 6 | ticks that the next message has to arrive |
//! | 7 | 0 |
//! | 8-15 | the step at whose end it takes force |
//! | 16-23 | version in force |
//! | 24-31 | digest of the plan in force |
//! | 32-33 | length of what follows, 0 = nothing is announced |
//! | 34- | what is announced: a byte that says which, then its fields |
//!
//! | announced | fields |
//! |---|---|
//! | 1: decision | version (8), length of the plan's text (2), its text |
//! | 2: trial | id (8), iterations (4), budget (8), number of candidates (1), of each the length of its text (1) and its text |
//! | 3: the end of the job | |

use flexcomm_domain::{Digest, Invalid, MAX_PLAN_TEXT, MAX_STRATEGY_TEXT, Plan, Strategy, Version};
use flexcomm_wire::MAX_CANDIDATES;
use std::str::FromStr;

/// Bytes of every control message: room for a plan whose text has [`MAX_PLAN_TEXT`] bytes, and so for a trial whose candidates have
/// [`MAX_TRIAL_TEXT`].
pub const MESSAGE_BYTES: usize = HEAD_BYTES + DECISION_FIXED + MAX_PLAN_TEXT;

const _: () = assert!(HEAD_BYTES + TRIAL_FIXED + MAX_CANDIDATES + MAX_TRIAL_TEXT <= MESSAGE_BYTES);

const HEAD_BYTES: usize = 34;

/// Most bytes of all texts of a trial's candidates: 64 for each of [`MAX_CANDIDATES`], and enough for one strategy of any
/// length.
pub const MAX_TRIAL_TEXT: usize = 1024;

/// Most iterations of one candidate in a trial (the paper: 10); more is training, not a trial.
pub const MAX_ITERATIONS: u32 = 1000;

const MAGIC: [u8; 4] = *b"FLXC";
const LAYOUT: u8 = 2;
/// Kind, version, length of the plan's text.
const DECISION_FIXED: usize = 1 + 8 + 2;
/// Kind, id, iterations, budget, number of candidates.
const TRIAL_FIXED: usize = 1 + 8 + 4 + 8 + 1;

/// Why a control message was refused.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
pub enum MessageError {
    /// Fewer bytes than its fields need.
    #[error("read a control message: {got} bytes where {need} are needed")]
    Short {
        /// As found.
        got: usize,
        /// As needed.
        need: usize,
    },
    /// Something else than a message of ours.
    #[error("read a control message: it begins with {0:02x?}, expected the letters FLXC")]
    Magic([u8; 4]),
    /// A peer of another release.
    #[error("read a control message: its layout is {0}, this side reads {LAYOUT}")]
    Layout(u8),
    /// A field that no sender of ours writes.
    #[error("read a control message: {what} is {value}")]
    Field {
        /// Which field.
        what: &'static str,
        /// As found.
        value: u64,
    },
    /// An announced strategy that is no text.
    #[error("read an announced strategy: it is no UTF-8")]
    Text,
    /// An announced strategy that is not one.
    #[error("read an announced strategy: {0}")]
    Strategy(#[from] Invalid),
}

/// Why a trial ended early.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum AbortCause {
    /// Its time budget was used up.
    Budget,
    /// A candidate produced values that are not numbers.
    Diverged,
    /// The job was asked to end.
    Stopped,
    /// Some rank went on in a loop that cannot replay batches.
    Left,
}

impl AbortCause {
    /// For reports.
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Budget => "the trial's time budget was used up",
            Self::Diverged => "a candidate's loss was not a number",
            Self::Stopped => "the job was asked to end",
            Self::Left => "the training loop was left for one that does not use Session.batches()",
        }
    }
}

/// A trial as all ranks know it.
#[derive(Debug, Clone, PartialEq)]
pub struct TrialPlan {
    /// Only grows within the job.
    pub id: u64,
    /// 1 to [`MAX_CANDIDATES`].
    pub candidates: Vec<Strategy>,
    /// Per candidate, 1 to [`MAX_ITERATIONS`].
    pub iterations: u32,
    /// Rank 0 aborts the trial when it has taken longer than this, in milliseconds.
    pub budget_ms: u64,
}

impl TrialPlan {
    /// Checks the limits.
    pub fn new(id: u64, candidates: Vec<Strategy>, iterations: u32, budget_ms: u64) -> Result<Self, Invalid> {
        if candidates.is_empty() || candidates.len() > MAX_CANDIDATES {
            let value = candidates.len() as f64;
            return Err(Invalid::Range { what: "number of a trial's candidates", value, allowed: "1 to 16".into() });
        }
        if !(1..=MAX_ITERATIONS).contains(&iterations) {
            let value = f64::from(iterations);
            return Err(Invalid::Range { what: "number of a trial's iterations", value, allowed: "1 to 1000".into() });
        }
        let bytes: usize = candidates.iter().map(|strategy| strategy.to_string().len()).sum();
        if bytes > MAX_TRIAL_TEXT {
            let (what, allowed) = ("number of characters of a trial's candidates", "at most 1024");
            return Err(Invalid::Range { what, value: bytes as f64, allowed: allowed.into() });
        }
        Ok(Self { id, candidates, iterations, budget_ms })
    }

    /// Iterations of all candidates together.
    pub fn ticks(&self) -> u32 {
        // At most 16 * 1000.
        self.candidates.len() as u32 * self.iterations
    }
}

/// What rank 0 announces.
#[derive(Debug, Clone, PartialEq)]
#[expect(clippy::large_enum_variant, reason = "a rank holds one at a time")]
pub enum Announced {
    /// Another plan.
    Decision {
        /// Its version.
        version: Version,
        /// What to do.
        plan: Plan,
    },
    /// A live trial.
    Trial(TrialPlan),
    /// The job ends in an orderly way.
    Stop,
}

/// When messages come.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Schedule {
    /// Ticks from one message to the next.
    pub every: u8,
    /// Ticks that a message has to arrive, the one that sends it included; at most `every`.
    pub delay: u8,
}

/// Most ticks from one message to the next, however short steps are: when the network collapses they become long.
pub const MOST_APART: u8 = 8;

/// What rank 0 broadcasts.
#[derive(Debug, Clone, PartialEq)]
pub struct ControlMessage {
    /// Of the messages from here on.
    pub schedule: Schedule,
    /// The step at whose end it takes force.
    pub step: u64,
    /// The decision in force until then; 0 before the first.
    pub version: Version,
    /// Its plan's digest.
    pub digest: Digest,
    /// What is in force from then on.
    pub announced: Option<Announced>,
}

impl ControlMessage {
    /// As [`MESSAGE_BYTES`] bytes.
    pub fn encode(&self) -> Vec<u8> {
        let mut out = Vec::with_capacity(MESSAGE_BYTES);
        out.extend_from_slice(&MAGIC);
        out.extend_from_slice(&[LAYOUT, self.schedule.every, self.schedule.delay, 0]);
        out.extend_from_slice(&self.step.to_le_bytes());
        out.extend_from_slice(&self.version.0.to_le_bytes());
        out.extend_from_slice(&self.digest.0.to_le_bytes());
        out.extend_from_slice(&[0, 0]);
        if let Some(announced) = &self.announced {
            encode_announced(announced, &mut out);
        }
        // At most MESSAGE_BYTES - HEAD_BYTES, far below 2^16.
        let length = (out.len() - HEAD_BYTES) as u16;
        out[HEAD_BYTES - 2..HEAD_BYTES].copy_from_slice(&length.to_le_bytes());
        out.resize(MESSAGE_BYTES, 0);
        out
    }

    /// Reads a message of [`MESSAGE_BYTES`] bytes.
    pub fn decode(bytes: &[u8]) -> Result<Self, MessageError> {
        if bytes.len() != MESSAGE_BYTES {
            return Err(MessageError::Short { got: bytes.len(), need: MESSAGE_BYTES });
        }
        let mut read = Reader(bytes);
        let magic = read.array::<4>()?;
        if magic != MAGIC {
            return Err(MessageError::Magic(magic));
        }
        let [layout, every, delay, _] = read.array()?;
        if layout != LAYOUT {
            return Err(MessageError::Layout(layout));
        }
        if !(1..=MOST_APART).contains(&every) || !(1..=every).contains(&delay) {
            return Err(MessageError::Field { what: "its schedule", value: u64::from(every) });
        }
        let (step, version, digest) = (read.u64()?, Version(read.u64()?), Digest(read.u64()?));
        let length = usize::from(read.u16()?);
        let mut read = Reader(read.bytes(length)?);
        let announced = if length > 0 { Some(decode_announced(&mut read)?) } else { None };
        if !read.0.is_empty() {
            let (what, value) = ("the number of bytes behind what is announced", read.0.len() as u64);
            return Err(MessageError::Field { what, value });
        }
        Ok(Self { schedule: Schedule { every, delay }, step, version, digest, announced })
    }
}

struct Reader<'a>(&'a [u8]);

impl Reader<'_> {
    fn array<const N: usize>(&mut self) -> Result<[u8; N], MessageError> {
        let (head, rest) = self.0.split_first_chunk::<N>().ok_or(MessageError::Short { got: self.0.len(), need: N })?;
        self.0 = rest;
        Ok(*head)
    }

    fn bytes(&mut self, length: usize) -> Result<&[u8], MessageError> {
        let short = MessageError::Short { got: self.0.len(), need: length };
        let (head, rest) = self.0.split_at_checked(length).ok_or(short)?;
        self.0 = rest;
        Ok(head)
    }

    fn parse<T: FromStr<Err = Invalid>>(&mut self, length: usize) -> Result<T, MessageError> {
        let text = std::str::from_utf8(self.bytes(length)?).map_err(|_| MessageError::Text)?;
        Ok(text.parse()?)
    }

    fn u64(&mut self) -> Result<u64, MessageError> {
        self.array().map(u64::from_le_bytes)
    }

    fn u16(&mut self) -> Result<u16, MessageError> {
        self.array().map(u16::from_le_bytes)
    }

    fn u8(&mut self) -> Result<u8, MessageError> {
        self.array::<1>().map(|[byte]| byte)
    }
}

fn encode_announced(announced: &Announced, out: &mut Vec<u8>) {
    match announced {
        Announced::Decision { version, plan } => {
            out.push(1);
            out.extend_from_slice(&version.0.to_le_bytes());
            let text = plan.to_string();
            // At most MAX_PLAN_TEXT, which fits two bytes.
            out.extend_from_slice(&(text.len().min(MAX_PLAN_TEXT) as u16).to_le_bytes());
            out.extend_from_slice(text.as_bytes());
        }
        Announced::Trial(trial) => {
            out.push(2);
            out.extend_from_slice(&trial.id.to_le_bytes());
            out.extend_from_slice(&trial.iterations.to_le_bytes());
            out.extend_from_slice(&trial.budget_ms.to_le_bytes());
            // TrialPlan::new bounds it; should one be built otherwise, the rest is left out on every rank alike.
            let candidates = &trial.candidates[..trial.candidates.len().min(MAX_CANDIDATES)];
            out.push(candidates.len() as u8);
            candidates.iter().for_each(|strategy| encode_strategy(strategy, out));
        }
        Announced::Stop => out.push(3),
    }
}

fn decode_announced(read: &mut Reader) -> Result<Announced, MessageError> {
    Ok(match read.u8()? {
        1 => {
            let (version, length) = (Version(read.u64()?), usize::from(read.u16()?));
            Announced::Decision { version, plan: read.parse(length)? }
        }
        2 => Announced::Trial(decode_trial(read)?),
        3 => Announced::Stop,
        other => return Err(MessageError::Field { what: "the kind of what is announced", value: u64::from(other) }),
    })
}

fn decode_trial(read: &mut Reader) -> Result<TrialPlan, MessageError> {
    let id = read.u64()?;
    let iterations = u32::from_le_bytes(read.array()?);
    let budget_ms = read.u64()?;
    let count = read.u8()?;
    if usize::from(count) > MAX_CANDIDATES {
        return Err(MessageError::Field { what: "the number of a trial's candidates", value: u64::from(count) });
    }
    let candidates = (0..count).map(|_| decode_strategy(read)).collect::<Result<_, _>>()?;
    Ok(TrialPlan::new(id, candidates, iterations, budget_ms)?)
}

/// Its length, then its canonical text.
fn encode_strategy(strategy: &Strategy, out: &mut Vec<u8>) {
    let text = strategy.to_string();
    // At most MAX_STRATEGY_TEXT, which fits a byte.
    out.push(text.len().min(MAX_STRATEGY_TEXT) as u8);
    out.extend_from_slice(text.as_bytes());
}

fn decode_strategy(read: &mut Reader) -> Result<Strategy, MessageError> {
    let length = usize::from(read.u8()?);
    read.parse(length)
}

#[cfg(test)]
mod tests {
    use super::*;
    use flexcomm_domain::{MAX_BUCKETS, Strategy};
    use proptest::prelude::*;
    use proptest::strategy::Strategy as _;

    fn strategies() -> impl proptest::strategy::Strategy<Value = Strategy> {
        let texts =
            ["none/dense-ring", "fp16/dense-tree", "lwtopk@0.1/allgather", "powersgd(rank=2)+ef(vanilla)/dense-ring"];
        (0..=texts.len(), 1e-6..1.0f64).prop_map(move |(i, c)| match texts.get(i) {
            Some(text) => text.parse().unwrap(),
            None => format!("topk@{c}/art-ring:star").parse().unwrap(),
        })
    }

    /// Of one bucket up to as many as there can be, with texts of any length that is allowed.
    fn plans() -> impl proptest::strategy::Strategy<Value = Plan> {
        prop::collection::vec(strategies(), 1..=MAX_BUCKETS).prop_map(|buckets| Plan::by_bucket(&buckets).unwrap())
    }

    fn announcements() -> impl proptest::strategy::Strategy<Value = Announced> {
        prop_oneof![
            (any::<u64>(), plans()).prop_map(|(v, plan)| Announced::Decision { version: Version(v), plan }),
            (any::<u64>(), prop::collection::vec(strategies(), 1..=MAX_CANDIDATES), 1..=MAX_ITERATIONS, any::<u64>())
                .prop_map(|(id, c, i, b)| Announced::Trial(TrialPlan::new(id, c, i, b).unwrap())),
            Just(Announced::Stop),
        ]
    }

    fn messages() -> impl proptest::strategy::Strategy<Value = ControlMessage> {
        let schedules = (1..=MOST_APART).prop_flat_map(|every| (Just(every), 1..=every));
        (schedules, any::<u64>(), any::<u64>(), any::<u64>(), prop::option::of(announcements())).prop_map(
            |((every, delay), step, version, digest, announced)| ControlMessage {
                schedule: Schedule { every, delay },
                step,
                version: Version(version),
                digest: Digest(digest),
                announced,
            },
        )
    }

    proptest! {
        #[test]
        fn messages_round_trip_in_one_size(message in messages()) {
            let bytes = message.encode();
            prop_assert_eq!(bytes.len(), MESSAGE_BYTES);
            prop_assert_eq!(ControlMessage::decode(&bytes).unwrap(), message);
            prop_assert!(ControlMessage::decode(&bytes[1..]).is_err());
        }

        #[test]
        fn any_bytes_are_an_error_or_a_message(mut bytes in prop::collection::vec(any::<u8>(), MESSAGE_BYTES), ours: bool) {
            if ours {
                bytes[..8].copy_from_slice(b"FLXC\x02\x02\x01\x00");
                bytes[HEAD_BYTES - 1] = 0;
                bytes[HEAD_BYTES] %= 4;
            }
            if let Ok(message) = ControlMessage::decode(&bytes) {
                prop_assert_eq!(ControlMessage::decode(&message.encode()).unwrap(), message);
            }
        }
    }

    #[test]
    fn foreign_messages_are_named() {
        let mut bytes = vec![0; MESSAGE_BYTES];
        assert!(ControlMessage::decode(&bytes).unwrap_err().to_string().contains("FLXC"));
        bytes[..8].copy_from_slice(b"FLXC\x07\x02\x01\x00");
        assert_eq!(ControlMessage::decode(&bytes), Err(MessageError::Layout(7)));
        bytes[4..6].copy_from_slice(&[LAYOUT, MOST_APART + 1]);
        assert!(ControlMessage::decode(&bytes).unwrap_err().to_string().contains("its schedule is 9"));
        bytes[5] = 2;
        bytes[HEAD_BYTES - 2..HEAD_BYTES].fill(0xff);
        assert!(matches!(ControlMessage::decode(&bytes), Err(MessageError::Short { need: 65535, .. })));
    }

    #[test]
    fn the_longest_plan_fits() {
        let of = |bucket: usize| -> Strategy {
            let collective = if bucket == 0 { "art-ring:var" } else { "allgather" };
            format!("topk(k=0.1{bucket:013}1)+ef(vanilla)/{collective}").parse().unwrap()
        };
        let plan = Plan::by_bucket(&(0..MAX_BUCKETS).map(of).collect::<Vec<_>>()).unwrap();
        assert_eq!(plan.to_string().len(), MAX_PLAN_TEXT);
        let message = ControlMessage {
            schedule: Schedule { every: 1, delay: 1 },
            step: 1,
            version: Version(1),
            digest: Digest(1),
            announced: Some(Announced::Decision { version: Version(2), plan }),
        };
        assert_eq!(ControlMessage::decode(&message.encode()).unwrap(), message);
    }

    #[test]
    fn trials_have_limits() {
        assert!(TrialPlan::new(1, vec![], 10, 0).is_err());
        assert!(TrialPlan::new(1, vec![Strategy::DENSE_RING; 17], 10, 0).is_err());
        assert!(TrialPlan::new(1, vec![Strategy::DENSE_RING], 0, 0).is_err());
        assert!(TrialPlan::new(1, vec![Strategy::DENSE_RING], 1001, 0).is_err());
        let long = "sidco(k=0.12345678901234567,fit=gamma,first=0.12345678901234567)+ef(vanilla)/allgather";
        assert!(TrialPlan::new(1, vec![long.parse().unwrap(); 16], 10, 0).unwrap_err().to_string().contains("1024"));
    }
}
