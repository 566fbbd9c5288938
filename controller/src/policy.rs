//! What an operator allows a job.

use flexcomm_domain::CompressorKind;
use flexcomm_domain::spec::SpecError;
use flexcomm_wire::api::JobPolicy;
use std::collections::BTreeSet;

/// Kinds of compressors that a job may use; none: all.
pub type Kinds = Option<BTreeSet<CompressorKind>>;

/// The policy that an operator asked for, each kind once and by the name it has here.
///
/// # Errors
/// A kind that is not known, with the nearest one that is.
pub fn asked(policy: &JobPolicy) -> Result<Kinds, SpecError> {
    policy.kinds.as_ref().map(|kinds| kinds.iter().map(|kind| kind.parse()).collect()).transpose()
}

/// A policy that was stored. A kind that this release does not have allows nothing here, and the others still count.
pub fn stored(policy: &JobPolicy) -> Kinds {
    policy.kinds.as_ref().map(|kinds| kinds.iter().filter_map(|kind| kind.parse().ok()).collect())
}

/// As it is shown and stored.
pub fn shown(kinds: &Kinds) -> JobPolicy {
    JobPolicy { kinds: kinds.as_ref().map(|kinds| kinds.iter().map(ToString::to_string).collect()) }
}
