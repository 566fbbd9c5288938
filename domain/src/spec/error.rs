//! What can be wrong with a compressor as written.

use super::params::Param;
use crate::nearest;

/// Failed to read a compressor's text.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum SpecError {
    /// Not of the form.
    #[error("read strategy {text:?}: at {rest:?}, expected {expected}")]
    Syntax {
        /// All of it.
        text: String,
        /// From where it went wrong.
        rest: String,
        /// What should be there.
        expected: &'static str,
    },
    /// A ratio behind an `@`, as texts of strategies had it before their parameters were written out.
    #[error("read strategy {text:?}: parameters are written in parentheses, error feedback is written out: {now}")]
    RatioBehind {
        /// All of it.
        text: String,
        /// What to write instead.
        now: String,
    },
    /// No such compressor, memory or other part.
    #[error("find {what} {name:?}: {known}")]
    Unknown {
        /// Which sort.
        what: &'static str,
        /// As written.
        name: String,
        /// What to write instead.
        known: String,
    },
    /// No such parameter.
    #[error("set {key:?} of {of}: it takes {known}")]
    UnknownKey {
        /// Whose.
        of: String,
        /// As written.
        key: String,
        /// All it has.
        known: String,
    },
    /// A parameter without a default.
    #[error("build {of} without {key}: it must be given, {allowed}")]
    Missing {
        /// Whose.
        of: String,
        /// Which.
        key: &'static str,
        /// Its range.
        allowed: String,
    },
    /// A value outside its range.
    #[error("set {key} of {of} to {value:?}: it must be {allowed}")]
    Range {
        /// Whose.
        of: String,
        /// Which.
        key: String,
        /// As written.
        value: String,
        /// Its range.
        allowed: String,
    },
    /// A compressor that sends what error feedback accumulates, without a memory.
    #[error(
        "train with {of} without error feedback: it sends what accumulates there, and without it next to nothing; \
         add a memory, as in {of}+ef(vanilla)"
    )]
    NoMemory {
        /// The strategy, as written in its canonical form.
        of: String,
    },
    /// An unbiased compressor whose variance may be large, with error feedback.
    #[error(
        "train with {of}: the residual of error feedback would grow without bound, since the compressor scales up what it \
         sends in place of the rest; leave out the memory, or the scaling where it is a parameter"
    )]
    Diverges {
        /// The strategy, as written in its canonical form.
        of: String,
    },
    /// Given more than once.
    #[error("set {key} of {of} twice")]
    Twice {
        /// Whose.
        of: String,
        /// Which.
        key: String,
    },
}

impl SpecError {
    pub(super) fn unknown_key(of: &str, key: &str, params: &[Param]) -> Self {
        let names: Vec<_> = params.iter().map(|p| p.name).collect();
        let mut known = if names.is_empty() { "no parameters".into() } else { names.join(", ") };
        if let Some(nearest) = nearest(&key.to_lowercase(), &names) {
            known += &format!("; did you mean {nearest}?");
        }
        Self::UnknownKey { of: of.into(), key: key.into(), known }
    }

    pub(super) fn missing(of: &str, param: &Param) -> Self {
        Self::Missing { of: of.into(), key: param.name, allowed: param.kind.to_string() }
    }

    pub(super) fn range(of: &str, param: &Param, value: &str) -> Self {
        let (key, allowed) = (param.name.into(), param.kind.allowed(value));
        Self::Range { of: of.into(), key, value: value.into(), allowed }
    }

    pub(super) fn unknown<'a>(what: &'static str, name: &str, known: impl Iterator<Item = &'a str>) -> Self {
        let all: Vec<&str> = known.collect();
        let known = match nearest(&name.to_lowercase(), &all) {
            Some(nearest) => format!("did you mean {nearest}?"),
            None => format!("there is {}", all.join(", ")),
        };
        Self::unknown_as(what, name, known)
    }

    /// Without the names of all compressors, which are too many for an error; `parts` are those that come after one.
    pub(super) fn unknown_compressor<'a>(name: &str, all: &[&str], mut parts: impl Iterator<Item = &'a str>) -> Self {
        let known = match nearest(&name.to_lowercase(), all) {
            _ if parts.any(|part| part == name) => {
                "this comes after a compressor, as ef does in topk(k=0.01)+ef(vanilla)".into()
            }
            _ if matches!(name, "artopk" | "ar-topk") => {
                "AR-Topk is a collective around a compressor that selects values: topk(k=...)+ef(vanilla)/art-ring:star, \
                 or :var"
                    .into()
            }
            Some(nearest) => format!("did you mean {nearest}?"),
            None => "compression/COMPRESSORS.md lists all of them, as flexcomm.torch.compressors() does".into(),
        };
        Self::unknown_as("compressor", name, known)
    }

    fn unknown_as(what: &'static str, name: &str, known: String) -> Self {
        Self::Unknown { what, name: name.chars().take(80).collect(), known }
    }
}
