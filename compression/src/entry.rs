//! What the registry is made of.

use crate::codec::{Codec, Shape};
use flexcomm_domain::spec::{CompressorInfo, Values};

/// A codec's line in the registry.
#[derive(Debug)]
pub struct Entry {
    /// Name and parameters.
    pub info: &'static CompressorInfo,
    /// Code on the wire; never reused.
    pub code: u8,
    /// Strategies' arguments that tests and benches run, as in `name(HERE)`: at least one, covering each branch.
    pub examples: &'static [&'static str],
    /// A codec for one tensor.
    pub build: fn(&Values, Shape) -> Box<dyn Codec>,
}
