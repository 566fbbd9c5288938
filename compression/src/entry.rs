//! What the registry is made of.

use crate::codec::{Codec, Shape};
use flexcomm_domain::spec::{CompressorInfo, Values};

/// What a codec promises about C(x); `tests/codecs` holds it to that.
#[derive(Clone, Copy)]
pub enum Nature {
    /// E C(x) = x.
    Unbiased,
    /// ‖x − C(x)‖² ≤ (1 − delta) ‖x‖² for every draw; delta by parameters and n.
    Contractive(fn(&Values, usize) -> f64),
    /// As [`Self::Contractive`], in the mean over draws.
    ContractiveInMean(fn(&Values, usize) -> f64),
    /// As [`Self::Contractive`], of what error feedback accumulates: without a memory hardly anything is ever sent.
    Accumulated(fn(&Values, usize) -> f64),
    /// Neither, with the reason.
    Biased(&'static str),
}

/// A codec's line in the registry.
pub struct Entry {
    /// Name and parameters.
    pub info: &'static CompressorInfo,
    /// Code on the wire; never reused.
    pub code: u8,
    /// What it promises.
    pub nature: fn(&Values) -> Nature,
    /// Strategies' arguments that tests and benches run, as in `name(HERE)`: at least one, covering each branch.
    pub examples: &'static [&'static str],
    /// A codec for one tensor.
    pub build: fn(&Values, Shape) -> Box<dyn Codec>,
}

impl std::fmt::Debug for Entry {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Entry").field("name", &self.info.name).field("code", &self.code).finish_non_exhaustive()
    }
}
