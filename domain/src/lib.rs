//! Leaf crate: the words and units of flexcomm as types that validate when built.
//!
//! Everything is in SI units inside (seconds, bytes, bits per second); every constructor refuses NaN,
//! infinities and values outside its range with an [`Invalid`] (a [`spec::SpecError`] for compressors) that names the
//! quantity, the value and the allowed range. All other crates depend on this one; it depends on none of them.

mod codec_bytes;
mod codec_cost;
mod decision;
mod energy;
mod ids;
mod link;
mod nearest;
mod plan;
mod share;
pub mod spec;
mod strategy;
mod text;
mod time;
mod units;

pub use codec_bytes::{CodecBytes, IndexBytes};
pub use codec_cost::CodecCost;
pub use decision::{Decision, Digest, Version};
pub use energy::Energy;
pub use ids::{JobId, NodeName, Rank, RunId};
pub use link::{Link, LinkMatrix};
pub use nearest::nearest;
pub use plan::{MAX_BUCKETS, MAX_PLAN_TEXT, Plan};
pub use share::{Need, ShareAccount, ShareRules};
pub use spec::{CompressorKind, CompressorSpec, Family, default_compressors, further_compressors};
pub use strategy::{Collective, MAX_STRATEGY_TEXT, Pattern, Selection, Selector, Strategy, strategy_text};
pub use time::Timestamp;
pub use units::{Bandwidth, CompressionRatio, Gain, Seconds};

/// A value that a constructor of this crate refused.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
pub enum Invalid {
    /// A number outside its allowed range, or not a number.
    #[error("{what} is {}, allowed is {allowed}", short(*.value))]
    Range {
        /// Which quantity.
        what: &'static str,
        /// The value as given.
        value: f64,
        /// The allowed range in words.
        allowed: String,
    },
    /// A text that does not name anything known or breaks the rules for names.
    #[error("{what} {value:?} is not valid: {allowed}")]
    Text {
        /// Which quantity.
        what: &'static str,
        /// The text as given, shortened to 80 characters.
        value: String,
        /// What would be accepted.
        allowed: String,
    },
    /// Parts that are valid alone but not together.
    #[error("{0}")]
    Combination(String),
}

/// A number of any size in a few characters: nobody counts 300 zeros.
pub fn short(value: f64) -> String {
    let plain = value == 0.0 || !value.is_finite() || (1e-6..1e12).contains(&value.abs());
    if plain { value.to_string() } else { format!("{value:e}") }
}

impl Invalid {
    pub(crate) fn text(what: &'static str, value: &str, allowed: impl Into<String>) -> Self {
        Self::Text { what, value: value.chars().take(80).collect(), allowed: allowed.into() }
    }

    /// A name that is none of those known: the nearest is offered.
    pub(crate) fn unknown(what: &'static str, name: &str, known: &[&str]) -> Self {
        let all = known.join(", ");
        let allowed = match nearest(&name.to_lowercase(), known) {
            Some(nearest) => format!("did you mean {nearest}? There are {all}"),
            None => format!("there are {all}"),
        };
        Self::text(what, name, allowed)
    }
}
