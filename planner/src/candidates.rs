//! Which compressors that a job offers are candidates, and why the others are not.

use crate::Snapshot;
use flexcomm_domain::spec::{CompressorSpec, SpecError, is_name_alone};
use flexcomm_domain::{CompressorKind, Family};
use flexcomm_optimizer::Space;
use serde::{Deserialize, Serialize};
use std::fmt;
use std::str::FromStr;

/// Why a list of what may be used cannot be empty; completes "... is an empty list, allowed is ...".
pub const NOT_EMPTY: &str = "one compressor or more; [\"none\"] is dense alone";

/// An entry of `planner.compressors`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub enum Allowed {
    /// A name alone, with any parameters and memory: what a job's policy lists.
    Kind(CompressorKind),
    /// This one: `powersgd(rank=2)+ef(vanilla)`.
    Family(Box<Family>),
}

impl Allowed {
    /// Whether it allows this one.
    pub fn covers(&self, family: &Family) -> bool {
        match self {
            Self::Kind(kind) => *kind == CompressorKind::from(family),
            Self::Family(own) => **own == *family,
        }
    }
}

/// Why a text is no entry of `planner.compressors`. Completes "failed to ...".
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum AllowedError {
    /// It cannot be read.
    #[error(transparent)]
    Spec(#[from] SpecError),
    /// It has a ratio, which would not count.
    #[error(
        "allow {text:?} at its ratio alone: ratios are those of planner.crs for every compressor, so write {family} here"
    )]
    Ratio {
        /// As written.
        text: String,
        /// Without the ratio.
        family: Box<Family>,
    },
}

impl FromStr for Allowed {
    type Err = AllowedError;

    fn from_str(text: &str) -> Result<Self, AllowedError> {
        if is_name_alone(text) {
            return Ok(Self::Kind(text.parse()?));
        }
        let family: Box<Family> = Box::new(text.parse()?);
        if text.parse().is_ok_and(|spec: CompressorSpec| spec.ratio().is_some()) {
            return Err(AllowedError::Ratio { text: text.to_owned(), family });
        }
        Ok(Self::Family(family))
    }
}

impl TryFrom<String> for Allowed {
    type Error = String;

    fn try_from(text: String) -> Result<Self, String> {
        text.parse().map_err(|error: AllowedError| format!("failed to {error}"))
    }
}

impl From<Allowed> for String {
    fn from(allowed: Allowed) -> Self {
        allowed.to_string()
    }
}

impl fmt::Display for Allowed {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Kind(kind) => kind.fmt(f),
            Self::Family(family) => family.fmt(f),
        }
    }
}

/// Why a compressor that the job offers is no candidate.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum LeftOut {
    /// The job's policy does not list its kind.
    Kind,
    /// `planner.compressors` does not list it.
    Config,
    /// It is biased, and no error feedback makes up for that.
    Biased,
    /// Neither the job's policy nor the settings name it, and it is no candidate by default.
    OnRequest,
}

impl fmt::Display for LeftOut {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Kind => "its kind is not in the job's policy",
            Self::Config => "it is not in planner.compressors",
            Self::Biased => {
                "it is biased and without error feedback what it leaves out is lost: add +ef(vanilla), or allow it by \
                 planner.biased_without_memory = true"
            }
            Self::OnRequest => {
                "it is no candidate by default: name its kind in the job's policy, or it in planner.compressors or in \
                 attach(candidates=[...])"
            }
        })
    }
}

impl Snapshot {
    /// Why a compressor is no candidate; none where it is one as soon as the job offers it.
    pub fn left_out(&self, family: &Family) -> Option<LeftOut> {
        let listed = self.config.compressors.as_ref().is_none_or(|only| only.iter().any(|x| x.covers(family)));
        let allowed = self.policy.kinds.as_ref().is_none_or(|only| only.contains(&CompressorKind::from(family)));
        let biased = family.any().is_biased_without_memory() && !self.config.biased_without_memory;
        let named = self.config.compressors.is_some() || self.policy.kinds.is_some();
        let unnamed = !named && self.offer.on_request.contains(family);
        let reasons = [
            (!allowed, LeftOut::Kind),
            (!listed, LeftOut::Config),
            (unnamed, LeftOut::OnRequest),
            (biased, LeftOut::Biased),
        ];
        reasons.into_iter().find_map(|(holds, why)| holds.then_some(why))
    }

    /// Why nothing of a kind can be decided, and what to do; none where something can, and of dense.
    pub fn kind_left_out(&self, kind: CompressorKind) -> Option<String> {
        let own: Vec<&Family> =
            self.offer.codecs.keys().filter(|family| CompressorKind::from(*family) == kind).collect();
        let reasons: Vec<LeftOut> = own.iter().filter_map(|family| self.left_out(family)).collect();
        if kind.name() == "none" || reasons.len() < own.len() {
            return None;
        }
        if let (Some(family), Some(why)) = (own.first(), reasons.first()) {
            return Some(format!("trainers offer {family}, but {why}"));
        }
        let why = kind.not_offered().map_or(String::new(), |why| format!(" by itself, since {why}"));
        Some(format!("no trainer of the job offers it{why}: name it with its parameters in attach(candidates=[...])"))
    }

    /// The candidates: what the job offers and its policy and the settings allow.
    pub fn space(&self) -> Space {
        Space {
            crs: self.config.crs.clone(),
            compressors: self.offer.codecs.keys().copied().filter(|family| self.left_out(family).is_none()).collect(),
            collectives: self.offer.collectives.clone(),
            selections: self.config.selections.clone(),
        }
    }

    /// What the job offers and is no candidate, each with the reason; of what it offers on request what the policy and the settings
    /// allow.
    pub(crate) fn all_left_out(&self) -> Vec<(Family, LeftOut)> {
        let left_out = self.offer.codecs.keys().filter_map(|family| Some((*family, self.left_out(family)?)));
        let asked_for =
            |(family, why): &(Family, LeftOut)| *why == LeftOut::Biased || !self.offer.on_request.contains(family);
        left_out.filter(asked_for).collect()
    }
}
