//! The control word: what every frame between ranks carries besides its payload. Little-endian.
//!
//! | bytes | what |
//! |---|---|
//! | 0-3 | `FLXW` |
//! | 4 | version of this layout |
//! | 5 | flags: 1 = iteration of a trial, 2 = the sender has been asked to stop |
//! | 6-7 | length of the plan that follows, 0 = none |
//! | 8-15 | step |
//! | 16-23 | version in force |
//! | 24-31 | digest of the strategy that this frame belongs to |
//! | 32-35 | iteration within the trial, 0 in training |
//! | 36- | the announced plan |

use flexcomm_domain::{Digest, Invalid, MAX_STRATEGY_TEXT, Strategy, Version};
use flexcomm_wire::MAX_CANDIDATES;

/// Bytes of a control word without a plan: what every frame pays in steady state.
pub const WORD_BASE: usize = 36;

/// Bytes of the longest control word: a trial whose candidates have [`MAX_TRIAL_TEXT`] bytes is announced.
pub const WORD_MAX: usize = WORD_BASE + TRIAL_FIXED + MAX_CANDIDATES + MAX_TRIAL_TEXT;

/// Most bytes of all texts of a trial's candidates: 64 for each of [`MAX_CANDIDATES`], and enough for one strategy of any
/// length. The room for a plan is reserved in full, on a payload of the training.
pub const MAX_TRIAL_TEXT: usize = 1024;

/// Most iterations of one candidate in a trial (the paper: 10); more is training, not a trial.
pub const MAX_ITERATIONS: u32 = 1000;

const MAGIC: [u8; 4] = *b"FLXW";
const LAYOUT: u8 = 2;
const FLAG_TRIAL: u8 = 1;
const FLAG_STOP: u8 = 2;
/// Kind, first step, id, iterations, budget, number of candidates.
const TRIAL_FIXED: usize = 1 + 8 + 8 + 4 + 8 + 1;

/// Why a control word was refused.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
pub enum WordError {
    /// Fewer bytes than its fields need.
    #[error("read a control word: {got} bytes where {need} are needed")]
    Short {
        /// As found.
        got: usize,
        /// As needed.
        need: usize,
    },
    /// Something else than a frame of ours.
    #[error("read a control word: it begins with {0:02x?}, expected the letters FLXW")]
    Magic([u8; 4]),
    /// A peer of another release.
    #[error("read a control word: its layout is {0}, this side speaks {LAYOUT}")]
    Layout(u8),
    /// A field that no sender of ours writes.
    #[error("read a control word: {what} is {value}")]
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
            return Err(Invalid::Range { what: "number of a trial's candidates", value, allowed: "1 to 16" });
        }
        if !(1..=MAX_ITERATIONS).contains(&iterations) {
            let value = f64::from(iterations);
            return Err(Invalid::Range { what: "number of a trial's iterations", value, allowed: "1 to 1000" });
        }
        let bytes: usize = candidates.iter().map(|strategy| strategy.to_string().len()).sum();
        if bytes > MAX_TRIAL_TEXT {
            let (what, allowed) = ("number of characters of a trial's candidates", "at most 1024");
            return Err(Invalid::Range { what, value: bytes as f64, allowed });
        }
        Ok(Self { id, candidates, iterations, budget_ms })
    }

    /// Iterations of all candidates together.
    pub fn ticks(&self) -> u32 {
        // At most 16 * 1000.
        self.candidates.len() as u32 * self.iterations
    }
}

/// What rank 0 announces. It takes force at the tick after the one in which it is announced.
#[derive(Debug, Clone, PartialEq)]
pub enum Plan {
    /// Another strategy.
    Decision {
        /// Its version.
        version: Version,
        /// What to do.
        strategy: Box<Strategy>,
    },
    /// A live trial.
    Trial(TrialPlan),
    /// The running trial ends early.
    Abort(AbortCause),
    /// The job ends in an orderly way.
    Stop,
}

/// The control word of a frame.
#[derive(Debug, Clone, PartialEq)]
pub struct ControlWord {
    /// The sender's step.
    pub step: u64,
    /// The decision in force at the sender; 0 before the first.
    pub version: Version,
    /// Digest of the strategy that this frame belongs to (in a trial: the candidate's).
    pub digest: Digest,
    /// The iteration within a trial; none in training.
    pub iteration: Option<u32>,
    /// The sender, or someone it heard, was asked to stop.
    pub stop_wished: bool,
    /// The announced plan and the step at which it takes force.
    pub plan: Option<(u64, Plan)>,
}

impl ControlWord {
    /// Appends the word to `out`: [`WORD_BASE`] bytes and at most [`WORD_MAX`].
    pub fn encode(&self, out: &mut Vec<u8>) {
        let start = out.len();
        let flag = |set: bool, bit: u8| if set { bit } else { 0 };
        out.extend_from_slice(&MAGIC);
        out.push(LAYOUT);
        out.push(flag(self.iteration.is_some(), FLAG_TRIAL) | flag(self.stop_wished, FLAG_STOP));
        out.extend_from_slice(&[0, 0]);
        out.extend_from_slice(&self.step.to_le_bytes());
        out.extend_from_slice(&self.version.0.to_le_bytes());
        out.extend_from_slice(&self.digest.0.to_le_bytes());
        out.extend_from_slice(&self.iteration.unwrap_or(0).to_le_bytes());
        if let Some((first_step, plan)) = &self.plan {
            encode_plan(*first_step, plan, out);
        }
        // At most WORD_MAX - WORD_BASE, far below 2^16.
        let plan_bytes = (out.len() - start - WORD_BASE) as u16;
        out[start + 6..start + 8].copy_from_slice(&plan_bytes.to_le_bytes());
    }

    /// How many bytes of plan follow, read from the first [`WORD_BASE`] bytes. Checks magic, layout and limit.
    pub fn plan_bytes(base: &[u8; WORD_BASE]) -> Result<usize, WordError> {
        let mut read = Reader(base);
        let magic = read.array::<4>()?;
        if magic != MAGIC {
            return Err(WordError::Magic(magic));
        }
        let [layout, _flags] = read.array()?;
        if layout != LAYOUT {
            return Err(WordError::Layout(layout));
        }
        let plan = usize::from(u16::from_le_bytes(read.array()?));
        if plan > WORD_MAX - WORD_BASE {
            return Err(WordError::Field { what: "the plan's length", value: plan as u64 });
        }
        Ok(plan)
    }

    /// Reads a word that fills `bytes` exactly.
    pub fn decode(bytes: &[u8]) -> Result<Self, WordError> {
        let short = WordError::Short { got: bytes.len(), need: WORD_BASE };
        let base = bytes.first_chunk::<WORD_BASE>().ok_or(short)?;
        let need = WORD_BASE + Self::plan_bytes(base)?;
        if bytes.len() != need {
            return Err(WordError::Short { got: bytes.len(), need });
        }
        let flags = base[5];
        if flags & !(FLAG_TRIAL | FLAG_STOP) != 0 {
            return Err(WordError::Field { what: "the flags field", value: u64::from(flags) });
        }
        let mut read = Reader(&bytes[8..]);
        let (step, version, digest) = (read.u64()?, Version(read.u64()?), Digest(read.u64()?));
        let iteration = u32::from_le_bytes(read.array()?);
        let plan = if read.0.is_empty() { None } else { Some(decode_plan(&mut read)?) };
        if !read.0.is_empty() {
            return Err(WordError::Field { what: "the number of bytes behind the plan", value: read.0.len() as u64 });
        }
        Ok(Self {
            step,
            version,
            digest,
            iteration: (flags & FLAG_TRIAL != 0).then_some(iteration),
            stop_wished: flags & FLAG_STOP != 0,
            plan,
        })
    }
}

struct Reader<'a>(&'a [u8]);

impl Reader<'_> {
    fn array<const N: usize>(&mut self) -> Result<[u8; N], WordError> {
        let (head, rest) = self.0.split_first_chunk::<N>().ok_or(WordError::Short { got: self.0.len(), need: N })?;
        self.0 = rest;
        Ok(*head)
    }

    fn bytes(&mut self, length: usize) -> Result<&[u8], WordError> {
        let short = WordError::Short { got: self.0.len(), need: length };
        let (head, rest) = self.0.split_at_checked(length).ok_or(short)?;
        self.0 = rest;
        Ok(head)
    }

    fn u64(&mut self) -> Result<u64, WordError> {
        self.array().map(u64::from_le_bytes)
    }

    fn u8(&mut self) -> Result<u8, WordError> {
        self.array::<1>().map(|[byte]| byte)
    }
}

fn encode_plan(first_step: u64, plan: &Plan, out: &mut Vec<u8>) {
    let kind = match plan {
        Plan::Decision { .. } => 1,
        Plan::Trial(_) => 2,
        Plan::Abort(_) => 3,
        Plan::Stop => 4,
    };
    out.push(kind);
    out.extend_from_slice(&first_step.to_le_bytes());
    match plan {
        Plan::Decision { version, strategy } => {
            out.extend_from_slice(&version.0.to_le_bytes());
            encode_strategy(strategy, out);
        }
        Plan::Trial(trial) => {
            out.extend_from_slice(&trial.id.to_le_bytes());
            out.extend_from_slice(&trial.iterations.to_le_bytes());
            out.extend_from_slice(&trial.budget_ms.to_le_bytes());
            // TrialPlan::new bounds it; should one be built otherwise, the rest is left out on every rank alike.
            let candidates = &trial.candidates[..trial.candidates.len().min(MAX_CANDIDATES)];
            out.push(candidates.len() as u8);
            candidates.iter().for_each(|strategy| encode_strategy(strategy, out));
        }
        Plan::Abort(cause) => out.push(match cause {
            AbortCause::Budget => 1,
            AbortCause::Diverged => 2,
            AbortCause::Stopped => 3,
            AbortCause::Left => 4,
        }),
        Plan::Stop => {}
    }
}

fn decode_plan(read: &mut Reader) -> Result<(u64, Plan), WordError> {
    let kind = read.u8()?;
    let first_step = read.u64()?;
    let plan = match kind {
        1 => Plan::Decision { version: Version(read.u64()?), strategy: Box::new(decode_strategy(read)?) },
        2 => Plan::Trial(decode_trial(read)?),
        3 => Plan::Abort(match read.u8()? {
            1 => AbortCause::Budget,
            2 => AbortCause::Diverged,
            3 => AbortCause::Stopped,
            4 => AbortCause::Left,
            other => return Err(WordError::Field { what: "a trial's abort cause", value: u64::from(other) }),
        }),
        4 => Plan::Stop,
        other => return Err(WordError::Field { what: "the plan's kind", value: u64::from(other) }),
    };
    Ok((first_step, plan))
}

fn decode_trial(read: &mut Reader) -> Result<TrialPlan, WordError> {
    let id = read.u64()?;
    let iterations = u32::from_le_bytes(read.array()?);
    let budget_ms = read.u64()?;
    let count = read.u8()?;
    if usize::from(count) > MAX_CANDIDATES {
        return Err(WordError::Field { what: "the number of a trial's candidates", value: u64::from(count) });
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

fn decode_strategy(read: &mut Reader) -> Result<Strategy, WordError> {
    let length = usize::from(read.u8()?);
    let text = read.bytes(length)?;
    let text = std::str::from_utf8(text).map_err(|_| WordError::Text)?;
    Ok(text.parse()?)
}

#[cfg(test)]
mod tests {
    use super::*;
    use flexcomm_domain::Strategy;
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

    fn plans() -> impl proptest::strategy::Strategy<Value = Plan> {
        prop_oneof![
            (any::<u64>(), strategies())
                .prop_map(|(v, strategy)| Plan::Decision { version: Version(v), strategy: strategy.into() }),
            (any::<u64>(), prop::collection::vec(strategies(), 1..=MAX_CANDIDATES), 1..=MAX_ITERATIONS, any::<u64>())
                .prop_map(|(id, c, i, b)| Plan::Trial(TrialPlan::new(id, c, i, b).unwrap())),
            Just(Plan::Abort(AbortCause::Budget)),
            Just(Plan::Abort(AbortCause::Diverged)),
            Just(Plan::Abort(AbortCause::Left)),
            Just(Plan::Stop),
        ]
    }

    fn words() -> impl proptest::strategy::Strategy<Value = ControlWord> {
        let plan = prop::option::of((any::<u64>(), plans()));
        (any::<u64>(), any::<u64>(), any::<u64>(), prop::option::of(any::<u32>()), any::<bool>(), plan).prop_map(
            |(step, version, digest, iteration, stop_wished, plan)| ControlWord {
                step,
                version: Version(version),
                digest: Digest(digest),
                iteration,
                stop_wished,
                plan,
            },
        )
    }

    proptest! {
        #[test]
        fn words_round_trip_within_their_limit(word in words()) {
            let mut bytes = Vec::new();
            word.encode(&mut bytes);
            prop_assert!(bytes.len() <= WORD_MAX);
            prop_assert!(word.plan.is_some() || bytes.len() == WORD_BASE);
            prop_assert_eq!(ControlWord::decode(&bytes).unwrap(), word);
            for cut in 0..bytes.len() {
                prop_assert!(ControlWord::decode(&bytes[..cut]).is_err(), "a word cut at {} was read", cut);
            }
            bytes.push(0);
            prop_assert!(ControlWord::decode(&bytes).is_err());
        }

        #[test]
        fn any_bytes_are_an_error_or_a_word(mut bytes in prop::collection::vec(any::<u8>(), 0..300), ours: bool) {
            if ours && bytes.len() >= 8 {
                bytes[..5].copy_from_slice(b"FLXW\x02");
                let plan = bytes.len().saturating_sub(WORD_BASE) as u16;
                bytes[6..8].copy_from_slice(&plan.to_le_bytes());
            }
            if let Ok(word) = ControlWord::decode(&bytes) {
                let mut again = Vec::new();
                word.encode(&mut again);
                prop_assert_eq!(again.len(), bytes.len());
            }
        }
    }

    #[test]
    fn foreign_frames_are_named() {
        let mut bytes = [0; WORD_BASE];
        bytes[..4].copy_from_slice(b"GET ");
        assert!(ControlWord::decode(&bytes).unwrap_err().to_string().contains("FLXW"));
        bytes[..5].copy_from_slice(b"FLXW\x07");
        assert_eq!(ControlWord::decode(&bytes), Err(WordError::Layout(7)));
        bytes[4..8].copy_from_slice(&[2, 0, 0xff, 0xff]);
        assert!(ControlWord::decode(&bytes).unwrap_err().to_string().contains("65535"));
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
