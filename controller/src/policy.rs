//! What an operator allows a job.

use flexcomm_domain::CompressorKind;
use flexcomm_domain::spec::{SpecError, is_name_alone};
use flexcomm_planner::{NOT_EMPTY, Snapshot};
use flexcomm_wire::api::{JobPolicy, NotOffered, PolicySet};
use std::collections::BTreeSet;

/// Kinds of compressors that a job may use; none: all.
pub type Kinds = Option<BTreeSet<CompressorKind>>;

/// A policy that is not taken.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
pub enum PolicyError {
    /// A kind that is not known, with the nearest one that is.
    #[error("failed to {0}")]
    Unknown(#[from] SpecError),
    /// A kind with parameters or parts.
    #[error("kinds has {text:?}: kinds are names without parameters, allowed is {name:?}")]
    Parameters {
        /// As written.
        text: String,
        /// Its compressor.
        name: &'static str,
    },
    /// It would allow nothing.
    #[error("kinds is an empty list, allowed is {NOT_EMPTY}, and null is all")]
    Empty,
    /// Nothing that it lists can be decided.
    #[error("nothing of the list can be used and dense alone would be left; list \"none\" where that is meant: {0}")]
    Unusable(String),
}

/// The kinds that an operator asked for, each once and by the name it has here.
///
/// # Errors
/// [`PolicyError::Unknown`], [`PolicyError::Parameters`], [`PolicyError::Empty`].
pub fn asked(policy: &JobPolicy) -> Result<Kinds, PolicyError> {
    let Some(kinds) = &policy.kinds else { return Ok(None) };
    if kinds.is_empty() {
        return Err(PolicyError::Empty);
    }
    Ok(Some(kinds.iter().map(|kind| read(kind)).collect::<Result<_, _>>()?))
}

fn read(text: &str) -> Result<CompressorKind, PolicyError> {
    let kind: CompressorKind = text.split(['(', '+']).next().unwrap_or_default().parse()?;
    if is_name_alone(text) {
        return Ok(kind);
    }
    Err(PolicyError::Parameters { text: text.to_owned(), name: kind.name() })
}

/// What it is answered for a job of which this is known.
///
/// # Errors
/// [`PolicyError::Unusable`].
pub fn answer(kinds: &Kinds, snapshot: Snapshot) -> Result<PolicySet, PolicyError> {
    let JobPolicy { kinds: names } = shown(kinds);
    let all: Vec<CompressorKind> = kinds.iter().flatten().copied().collect();
    let needs_offer = all.iter().any(|kind| kind.name() != "none");
    if snapshot.offer.codecs.is_empty() && needs_offer {
        let note = "no trainer of the job is attached: nothing is known yet of what they offer".to_owned();
        return Ok(PolicySet { kinds: names, not_offered: Vec::new(), note: Some(note) });
    }
    let snapshot = Snapshot { kinds: kinds.clone(), ..snapshot };
    let left_out =
        |kind: &CompressorKind| Some(NotOffered { kind: kind.to_string(), why: snapshot.kind_left_out(*kind)? });
    let not_offered: Vec<NotOffered> = all.iter().filter_map(left_out).collect();
    if !all.is_empty() && not_offered.len() == all.len() {
        let each = not_offered.iter().map(|NotOffered { kind, why }| format!("{kind}: {why}"));
        return Err(PolicyError::Unusable(each.collect::<Vec<_>>().join("; ")));
    }
    Ok(PolicySet { kinds: names, not_offered, note: None })
}

/// A policy that was stored. A kind that this release does not have allows nothing here, and the others still count.
pub fn stored(policy: &JobPolicy) -> Kinds {
    policy.kinds.as_ref().map(|kinds| kinds.iter().filter_map(|kind| kind.parse().ok()).collect())
}

/// As it is shown and stored.
pub fn shown(kinds: &Kinds) -> JobPolicy {
    JobPolicy { kinds: kinds.as_ref().map(|kinds| kinds.iter().map(ToString::to_string).collect()) }
}
