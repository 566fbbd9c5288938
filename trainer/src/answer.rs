//! What each rank answers about a trial, before it and in each of its iterations. All ranks have all answers, so all decide alike.

use crate::message::AbortCause;

/// Bytes of an answer on the wire: its verdict, and a reason that is cut where it is longer.
pub const ANSWER_BYTES: usize = 512;

/// Whether the trial goes on.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Verdict {
    /// It does.
    GoOn = 0,
    /// This rank cannot run it, or not any more.
    Cannot = 1,
    /// A gradient or a loss was not finite.
    Diverged = 2,
    /// Its time budget is used up.
    Budget = 3,
}

/// A rank's verdict.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Answer {
    /// What it says.
    pub verdict: Verdict,
    /// Why it cannot; empty with other verdicts.
    pub why: String,
}

impl Answer {
    /// Without a reason.
    pub fn of(verdict: Verdict) -> Self {
        Self { verdict, why: String::new() }
    }

    /// Why this rank cannot.
    pub fn cannot(why: impl Into<String>) -> Self {
        Self { verdict: Verdict::Cannot, why: why.into() }
    }

    /// As [`ANSWER_BYTES`] bytes.
    pub fn encode(&self) -> Vec<u8> {
        let mut bytes = vec![self.verdict as u8];
        bytes.extend(self.why.bytes().take(ANSWER_BYTES - 1));
        bytes.resize(ANSWER_BYTES, 0);
        bytes
    }

    /// As a rank has sent it; none where it is no answer.
    pub fn decode(bytes: &[u8]) -> Option<Self> {
        let (code, why) = bytes.split_first().filter(|_| bytes.len() == ANSWER_BYTES)?;
        let verdicts = [Verdict::GoOn, Verdict::Cannot, Verdict::Diverged, Verdict::Budget];
        let verdict = verdicts.into_iter().find(|verdict| *verdict as u8 == *code)?;
        // The cut may have left a part of a character.
        let why = String::from_utf8_lossy(why);
        Some(Self { verdict, why: why.trim_end_matches(['\0', char::REPLACEMENT_CHARACTER]).to_owned() })
    }
}

/// The first rank that cannot run a trial, and why.
pub(crate) fn refusal(answers: &[Answer]) -> Option<String> {
    let refused = answers.iter().enumerate().find(|(_, answer)| answer.verdict == Verdict::Cannot);
    refused.map(|(rank, answer)| format!("rank {rank}: {}", answer.why))
}

/// Why a trial ends with this iteration.
pub(crate) fn end(answers: &[Answer]) -> Option<AbortCause> {
    let any = |verdict| answers.iter().any(|answer| answer.verdict == verdict);
    let causes = [
        (Verdict::Cannot, AbortCause::Left),
        (Verdict::Diverged, AbortCause::Diverged),
        (Verdict::Budget, AbortCause::Budget),
    ];
    causes.into_iter().find(|(verdict, _)| any(*verdict)).map(|(_, cause)| cause)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn answers_round_trip_and_long_reasons_are_cut(code in 0u8..5, why in "\\PC{0,600}") {
            let mut bytes = Answer::cannot(why.clone()).encode();
            prop_assert_eq!(bytes.len(), ANSWER_BYTES);
            bytes[0] = code;
            match Answer::decode(&bytes) {
                Some(read) => prop_assert!(read.verdict as u8 == code && why.starts_with(&read.why)),
                None => prop_assert_eq!(code, 4),
            }
        }
    }

    #[test]
    fn one_rank_is_enough() {
        let go = || Answer::of(Verdict::GoOn);
        assert_eq!((refusal(&[go()]), end(&[go()])), (None, None));
        let all = [go(), Answer::of(Verdict::Budget), Answer::cannot("no memory"), Answer::of(Verdict::Diverged)];
        assert_eq!((refusal(&all), end(&all)), (Some("rank 2: no memory".into()), Some(AbortCause::Left)));
        assert_eq!(end(&[go(), Answer::of(Verdict::Budget)]), Some(AbortCause::Budget));
        assert_eq!(Answer::decode(&[0; 5]), None);
    }
}
