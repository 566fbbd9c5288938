//! Names and numbers that identify things.

use crate::Invalid;
use crate::text::serde_as_text;
use serde::{Deserialize, Serialize};
use std::fmt;
use std::str::FromStr;

/// Longest name of a node or job: fits a DNS label and keeps metrics labels and log lines short.
const MAX_NAME: usize = 63;

macro_rules! name {
    ($(#[$doc:meta])* $name:ident, $what:literal) => {
        $(#[$doc])*
        #[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
        pub struct $name(String);

        impl $name {
            /// Validates: 1 to 63 characters of `a-z A-Z 0-9 . _ -`, the first a letter or digit.
            pub fn new(text: &str) -> Result<Self, Invalid> {
                let allowed = |c: char| c.is_ascii_alphanumeric() || matches!(c, '.' | '_' | '-');
                let ok = !text.is_empty()
                    && text.len() <= MAX_NAME
                    && text.chars().all(allowed)
                    && text.starts_with(|c: char| c.is_ascii_alphanumeric());
                if ok {
                    Ok(Self(text.to_owned()))
                } else {
                    Err(Invalid::text(
                        $what,
                        text,
                        "1 to 63 characters of a-z A-Z 0-9 . _ -, the first a letter or digit",
                    ))
                }
            }

            /// The name as text.
            pub fn as_str(&self) -> &str {
                &self.0
            }
        }

        impl fmt::Display for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str(&self.0)
            }
        }

        impl FromStr for $name {
            type Err = Invalid;
            fn from_str(text: &str) -> Result<Self, Invalid> {
                Self::new(text)
            }
        }

        serde_as_text!($name);
    };
}

name!(
    /// The name of a node: one agent runs there.
    NodeName,
    "node name"
);
name!(
    /// The name of a training job.
    JobId,
    "job id"
);

/// One run of a job: random, made by rank 0 when the ranks meet, and the same on all of them. A job's name may be used
/// again; the id tells its runs apart. As text 16 hexadecimal digits.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct RunId(pub u64);

impl fmt::Display for RunId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:016x}", self.0)
    }
}

impl FromStr for RunId {
    type Err = Invalid;
    fn from_str(text: &str) -> Result<Self, Invalid> {
        let allowed = "16 hexadecimal digits in lower case";
        let digits = text.len() == 16 && text.chars().all(|c| matches!(c, '0'..='9' | 'a'..='f'));
        let number = u64::from_str_radix(text, 16).ok().filter(|_| digits);
        number.map(Self).ok_or_else(|| Invalid::text("run id", text, allowed))
    }
}

serde_as_text!(RunId);

/// A worker's number within its job, 0 to N-1. Rank 0's copy of the orders is the one that counts.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(transparent)]
pub struct Rank(pub u32);

impl Rank {
    /// As an index into per-rank arrays.
    pub const fn index(self) -> usize {
        self.0 as usize
    }
}

impl fmt::Display for Rank {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", self.0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_checked() {
        assert!(NodeName::new("node-1.rack_2").is_ok());
        for bad in ["", "-a", "a b", "a/b", "é", &"x".repeat(64)] {
            assert!(JobId::new(bad).is_err(), "{bad:?} was accepted");
        }
        assert!(serde_json::from_str::<NodeName>("\"a b\"").is_err());
    }
}
