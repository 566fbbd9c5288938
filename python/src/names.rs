//! Strategies as users name them, and what this package can run.

use crate::exchange::Transfer;
use crate::guard::Failure;
use flexcomm_domain::spec::CompressorSpec;
use flexcomm_domain::{Family, Strategy};
use pyo3::prelude::*;

/// Reads and checks a compressor.
pub fn compressor(text: &str) -> Result<CompressorSpec, Failure> {
    let spec = text.parse().and_then(CompressorSpec::trainable);
    spec.map_err(|e| Failure::input(format!("failed to {e}")))
}

/// Longest text of a compressor to decide about: agents take no longer ones.
const MOST_NAME: usize = 63;

/// A compressor to decide about, its ratio left open or not: `dgc(k=*)+ef(vanilla)`, `qsgd(s=16)`.
pub fn candidate(text: &str) -> Result<Family, Failure> {
    let family: Family = text.parse().map_err(|e| Failure::input(format!("failed to {e}")))?;
    family.any().trainable().map_err(|e| Failure::input(format!("failed to {e}")))?;
    if family.is_none() {
        return Err(Failure::input("dense is always a candidate: leave it out"));
    }
    match family.to_string().len() {
        0..=MOST_NAME => Ok(family),
        length => Err(Failure::input(format!(
            "{family} has {length} characters, allowed are {MOST_NAME}: leave out what is at its default"
        ))),
    }
}

/// A strategy as a user names it.
#[pyclass(frozen, get_all)]
pub struct Named {
    /// Its canonical text.
    strategy: String,
    /// The compressor's canonical text; none where DDP's own allreduce runs it.
    spec: Option<String>,
    /// Whether DDP runs it without a hook, too.
    dense: bool,
    /// Whether training by it loses what a step does not send, for want of error feedback.
    drops: bool,
}

/// Reads it: with its collective, or a compressor alone, which takes the collective that is usual for it.
pub fn strategy(text: &str) -> Result<Named, Failure> {
    let strategy: Strategy = text.parse().map_err(Failure::input)?;
    let spec = strategy.spec().trainable();
    let spec = spec.map_err(|error| Failure::input(format!("{strategy} cannot be run: failed to {error}")))?;
    let compresses = !is_cast(&strategy);
    Ok(Named {
        strategy: strategy.to_string(),
        spec: compresses.then(|| spec.to_string()),
        dense: strategy == Strategy::DENSE_RING,
        drops: compresses && spec.drops(),
    })
}

/// In what a strategy's buckets travel where they are cast.
pub fn half(strategy: &Strategy) -> Option<Transfer> {
    match strategy.spec().to_string().as_str() {
        "fp16" => Some(Transfer::Float16),
        "bf16" => Some(Transfer::Bfloat16),
        _ => None,
    }
}

/// Whether a strategy that a user names is DDP's allreduce, as it is or in another type.
pub fn is_cast(strategy: &Strategy) -> bool {
    strategy.is_dense() || half(strategy).is_some()
}

/// A compressor, and arguments to try.
#[pyclass(name = "Compressor", frozen, get_all)]
pub struct Described {
    name: &'static str,
    about: &'static str,
    parameters: Vec<Parameter>,
    examples: Vec<&'static str>,
}

/// A compressor's parameter: what it may be, and what it does.
#[pyclass(frozen, get_all)]
#[derive(Clone)]
pub struct Parameter {
    name: &'static str,
    allowed: String,
    about: &'static str,
}

/// All compressors.
pub fn compressors() -> Vec<Described> {
    let parameter =
        |p: &flexcomm_domain::spec::Param| Parameter { name: p.name, allowed: p.kind.to_string(), about: p.about };
    let describe = |entry: &'static flexcomm_compression::entry::Entry| Described {
        name: entry.info.name,
        about: entry.info.about,
        parameters: entry.info.params.iter().map(parameter).collect(),
        examples: entry.examples.to_vec(),
    };
    flexcomm_compression::methods::all().map(describe).collect()
}
