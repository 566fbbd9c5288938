//! Why reports are rejected. One that is carries a [`Reason`], is counted and acknowledged, so that the agent does not
//! send it for ever; the others of its batch are stored.

use flexcomm_wire::BadValue;

/// Why a report was rejected; the label of `flexcomm_rejected_reports_total`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Reason {
    /// Not a report of this protocol: a field is missing, of another type, or NaN (null in JSON).
    Malformed,
    /// A number out of its range.
    BadValue,
    /// It names a node that never registered.
    UnknownNode,
    /// It names a job that no trainer announced.
    UnknownJob,
    /// The rank is not there, or it runs on another node.
    UnknownRank,
    /// The job is known with another size, and runs.
    JobConflict,
    /// A decision that was never made.
    UnknownVersion,
    /// A decision older than one that the rank already reported.
    OldVersion,
    /// The digest is not the decision's.
    Digest,
    /// A trial that was never asked for.
    UnknownTrial,
    /// A limit is reached.
    Full,
}

impl Reason {
    /// All of them, for metrics and documentation.
    pub const ALL: [Self; 11] = [
        Self::Malformed,
        Self::BadValue,
        Self::UnknownNode,
        Self::UnknownJob,
        Self::UnknownRank,
        Self::JobConflict,
        Self::UnknownVersion,
        Self::OldVersion,
        Self::Digest,
        Self::UnknownTrial,
        Self::Full,
    ];

    /// The label.
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Malformed => "malformed",
            Self::BadValue => "bad-value",
            Self::UnknownNode => "unknown-node",
            Self::UnknownJob => "unknown-job",
            Self::UnknownRank => "unknown-rank",
            Self::JobConflict => "job-conflict",
            Self::UnknownVersion => "unknown-version",
            Self::OldVersion => "old-version",
            Self::Digest => "digest",
            Self::UnknownTrial => "unknown-trial",
            Self::Full => "full",
        }
    }
}

/// A report that is not stored.
#[derive(Debug, Clone, PartialEq)]
pub struct Rejected {
    /// Of which kind.
    pub reason: Reason,
    /// What was wrong with which value.
    pub detail: String,
}

impl Rejected {
    /// With a detail in words.
    pub fn new(reason: Reason, detail: impl Into<String>) -> Self {
        Self { reason, detail: detail.into() }
    }
}

impl From<BadValue> for Rejected {
    fn from(bad: BadValue) -> Self {
        Self::new(Reason::BadValue, bad.0)
    }
}
