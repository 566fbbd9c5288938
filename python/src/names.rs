//! Strategies as users name them, and what this package can run.

use crate::guard::Failure;
use flexcomm_compression::Build;
use flexcomm_compression::codec::{Element, Travels};
use flexcomm_domain::Strategy;
use flexcomm_domain::spec::CompressorSpec;

/// Reads and checks a compressor.
pub fn compressor(text: &str) -> Result<CompressorSpec, Failure> {
    let spec = text.parse().and_then(CompressorSpec::trainable);
    spec.map_err(|e| Failure::input(format!("failed to {e}")))
}

/// A strategy as a user names it: with its collective, or a compressor alone, which takes the collective that is usual for it.
pub fn strategy(text: &str) -> Result<Strategy, Failure> {
    if !text.contains(['/', '@']) {
        return Strategy::usual(compressor(text)?).map_err(Failure::input);
    }
    let strategy: Strategy = text.parse().map_err(Failure::input)?;
    match strategy.spec().trainable() {
        Ok(_) => Ok(strategy),
        Err(error) => Err(Failure::input(format!("{strategy} cannot be run: failed to {error}"))),
    }
}

/// Code of the type in which a strategy's buckets travel where they are cast: 0 none, 1 float16, 2 bfloat16.
pub fn half_code(strategy: &Strategy) -> i64 {
    match strategy.spec().compressor().name {
        "fp16" if strategy.spec().to_string() == "fp16" => 1,
        "bf16" if strategy.spec().to_string() == "bf16" => 2,
        _ => 0,
    }
}

/// Whether a strategy that a user names is DDP's allreduce, as it is or in another type.
pub fn is_cast(strategy: &Strategy) -> bool {
    strategy.is_dense() || half_code(strategy) != 0
}

/// Name of the type whose elements add up; empty when messages are gathered.
pub fn element(spec: &CompressorSpec) -> &'static str {
    match spec.travels() {
        Travels::Sums(Element::F32) => "float32",
        Travels::Sums(Element::F16) => "float16",
        Travels::Sums(Element::Bf16) => "bfloat16",
        Travels::Gathers => "",
    }
}

/// A compressor: name, what it does, its parameters, arguments to try.
pub type Described = (&'static str, &'static str, Vec<(&'static str, String, &'static str)>, Vec<&'static str>);

/// All of them.
pub fn compressors() -> Vec<Described> {
    let parameter = |p: &flexcomm_domain::spec::Param| (p.name, p.kind.to_string(), p.about);
    let describe = |entry: &'static flexcomm_compression::entry::Entry| {
        let parameters = entry.info.params.iter().map(parameter).collect();
        (entry.info.name, entry.info.about, parameters, entry.examples.to_vec())
    };
    flexcomm_compression::methods::all().map(describe).collect()
}
