//! A decision: an immutable value with a version and a parent.

use crate::{JobId, Plan, Timestamp};
use serde::{Deserialize, Serialize};
use std::fmt;

/// A decision's version within its job. Only grows; 0 means that nothing has been decided yet.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default, Serialize, Deserialize)]
#[serde(transparent)]
pub struct Version(pub u64);

impl Version {
    /// The version after this one.
    pub fn next(self) -> Version {
        Version(self.0 + 1)
    }
}

impl fmt::Display for Version {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", self.0)
    }
}

/// 64 bits of BLAKE3 over a plan's canonical text: what ranks compare to know that they run the same.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(transparent)]
pub struct Digest(pub u64);

impl Digest {
    /// Of any canonical text.
    pub fn of(text: &str) -> Self {
        let hash = blake3::hash(text.as_bytes());
        let mut first = [0; 8];
        first.copy_from_slice(&hash.as_bytes()[..8]);
        // 53 bits survive JSON readers that hold every number as a double.
        Self(u64::from_le_bytes(first) >> 11)
    }
}

impl fmt::Display for Digest {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:014x}", self.0)
    }
}

/// A plan for a job, with what makes it traceable.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Decision {
    /// Whose.
    pub job: JobId,
    /// Only grows within a job.
    pub version: Version,
    /// The decision that was in force when this one was made; 0 for the first.
    pub parent: Version,
    /// What to do.
    #[serde(rename = "strategy")]
    pub plan: Plan,
    /// When it was made.
    pub decided_at: Timestamp,
    /// One sentence why.
    pub reason: String,
}

impl Decision {
    /// The digest of the plan.
    pub fn digest(&self) -> Digest {
        self.plan.digest()
    }
}
