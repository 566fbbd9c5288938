//! Why reports are rejected. One that is carries a [`Reason`], is counted and acknowledged, so that the agent does not
//! send it for ever; the others of its batch are stored.

use flexcomm_domain::words;
use flexcomm_wire::BadValue;

words! {
    /// Why a report was rejected; the label of `flexcomm_rejected_reports_total`.
    pub enum Reason {
        /// Not a report of this protocol: a field is missing, of another type, or NaN (null in JSON).
        Malformed = "malformed",
        /// A number out of its range.
        BadValue = "bad-value",
        /// It names a node that never registered.
        UnknownNode = "unknown-node",
        /// It names a job that no trainer announced.
        UnknownJob = "unknown-job",
        /// The rank is not there, or it runs on another node.
        UnknownRank = "unknown-rank",
        /// The job is known with another size, and runs.
        JobConflict = "job-conflict",
        /// A decision that was never made.
        UnknownVersion = "unknown-version",
        /// A decision older than one that the rank already reported.
        OldVersion = "old-version",
        /// The digest is not the decision's.
        Digest = "digest",
        /// A trial that was never asked for.
        UnknownTrial = "unknown-trial",
        /// A limit is reached.
        Full = "full",
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
