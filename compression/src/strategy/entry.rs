//! What the registries are made of.

use super::params::{Param, Values};
use crate::codec::{Codec, Scope, Shape, Travels};
use crate::memory::Memory;
use crate::momentum::Momentum;

/// GRACE's classes (Table 1).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Class {
    /// Fewer bits per value.
    Quantization,
    /// Fewer values.
    Sparsification,
    /// Both.
    Hybrid,
    /// Factors of a matrix.
    LowRank,
}

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
    /// In the textual form.
    pub name: &'static str,
    /// Code on the wire; never reused.
    pub code: u8,
    /// Its class.
    pub class: Class,
    /// One line for `--help`.
    pub about: &'static str,
    /// Paper, section, equation.
    pub source: &'static str,
    /// At most [`crate::wire::MAX_PARAMETERS`].
    pub params: &'static [Param],
    /// How payloads come together; by parameters, since some methods do both.
    pub travels: fn(&Values) -> Travels,
    /// What it takes as one tensor, if nothing else is asked for.
    pub scope: Scope,
    /// What it promises.
    pub nature: fn(&Values) -> Nature,
    /// Strategies' arguments that tests and benches run, as in `name(HERE)`: at least one, covering each branch.
    pub examples: &'static [&'static str],
    /// A codec for one tensor.
    pub build: fn(&Values, Shape) -> Box<dyn Codec>,
}

impl std::fmt::Debug for Entry {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Entry").field("name", &self.name).field("code", &self.code).finish_non_exhaustive()
    }
}

/// A memory's line.
#[derive(Debug)]
pub struct MemoryEntry {
    /// In `ef(NAME, ...)`.
    pub name: &'static str,
    /// One line for `--help`.
    pub about: &'static str,
    /// Its parameters.
    pub params: &'static [Param],
    /// For a gradient of n values.
    pub build: fn(&Values, usize) -> Box<dyn Memory>,
}

/// A momentum's line.
#[derive(Debug)]
pub struct MomentumEntry {
    /// In `NAME(mu=...)`.
    pub name: &'static str,
    /// One line for `--help`.
    pub about: &'static str,
    /// Its parameters.
    pub params: &'static [Param],
    /// For a gradient of n values.
    pub build: fn(&Values, usize) -> Box<dyn Momentum>,
}
