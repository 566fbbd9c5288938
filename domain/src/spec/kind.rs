//! A compressor by its name alone.

use super::{CompressorInfo, Family, OnRequest, SpecError, find};
use crate::text::serde_as_text;
use std::fmt;
use std::str::FromStr;

/// A compressor with any parameters and memory: `topk`, `fp16`, `powersgd`. What a job's policy allows.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct CompressorKind(&'static CompressorInfo);

impl CompressorKind {
    /// The compressor's name.
    pub fn name(&self) -> &'static str {
        self.0.name
    }

    /// Why trainers offer it only where a script names it with its parameters (`attach(candidates=[...])`); none where they
    /// offer it by themselves.
    pub fn not_offered(&self) -> Option<&'static str> {
        match self.0.on_request {
            OnRequest::No(why) => Some(why),
            OnRequest::Usual | OnRequest::As(_) => None,
        }
    }
}

impl From<&Family> for CompressorKind {
    fn from(family: &Family) -> Self {
        Self(family.any().compressor())
    }
}

impl FromStr for CompressorKind {
    type Err = SpecError;

    fn from_str(text: &str) -> Result<Self, SpecError> {
        find(text).map(Self)
    }
}

impl fmt::Display for CompressorKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

serde_as_text!(CompressorKind);

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn kinds_are_names_and_unknown_ones_are_told_the_nearest() {
        let kind = |text: &str| text.parse::<CompressorKind>();
        assert_eq!(kind("topk").unwrap(), CompressorKind::from(&"topk(k=*)+ef(vanilla)".parse::<Family>().unwrap()));
        assert_eq!(kind("u8bit").unwrap().name(), "eightbit", "by its name elsewhere");
        for (text, expected) in [("topkk", "did you mean topk?"), ("topk(k=0.1)", "topk(k=0.1)"), ("", "\"\"")] {
            let error = kind(text).unwrap_err().to_string();
            assert!(error.contains(expected), "{error}");
        }
    }
}
