//! The core of the Python package: one `Core` per attached model. The package's Python side gives tensors and
//! runs the collectives; error feedback, payloads, the agreement, orders, telemetry and
//! shadow trials are here, without the interpreter lock.

mod core;
mod dense;
mod device;
mod exchange;
mod guard;
mod log;
mod memory;
mod meter;
mod names;
mod session;
mod shadows_on;
mod telemetry;
mod tensor;
mod times;

use pyo3::prelude::*;

/// Native part of flexcomm; see the package.
#[pymodule]
mod _core {
    #[pymodule_export]
    use super::core::{AutoLeaders, Core, Pipelines, ShadowGain, State, TickPy};
    #[pymodule_export]
    use super::device::{DeviceNeeds, Place, Region};
    #[pymodule_export]
    use super::exchange::{ElementPy, HowPy, RoundPy, Transfer};
    #[pymodule_export]
    use super::guard::{FlexcommError, NotOnDeviceError};
    #[pymodule_export]
    use super::log::LogLevel;
    #[pymodule_export]
    use super::names::{Described, Parameter};
    #[pymodule_export]
    use super::session::{Fault, Next, PartStatus};
    #[pymodule_export]
    use super::shadows_on::{ShadowNeeds, ShadowStep};
    #[pymodule_export]
    use super::tensor::{Message, TensorDecoder, TensorEncoder};
    use super::*;

    #[pymodule_init]
    fn init(module: &Bound<'_, PyModule>) -> PyResult<()> {
        super::log::begin();
        module.add("PROTOCOL", flexcomm_wire::PROTOCOL)?;
        module.add("CONTROL_BYTES", flexcomm_trainer::MESSAGE_BYTES)?;
        module.add("VERSION", env!("CARGO_PKG_VERSION"))
    }

    /// The canonical text of a strategy, given as `COMPRESSOR/COLLECTIVE[:SELECTION]` or as a compressor alone, which takes the
    /// collective that is usual for it; and the compressor's canonical text (none where DDP's allreduce runs it).
    #[pyfunction]
    fn parse_strategy(text: &str) -> PyResult<(String, Option<String>)> {
        let strategy = names::strategy(text)?;
        let compressor = (!names::is_cast(&strategy)).then(|| strategy.spec().to_string());
        Ok((strategy.to_string(), compressor))
    }

    /// The digest that decisions for a strategy carry.
    #[pyfunction]
    fn digest(text: &str) -> PyResult<u64> {
        Ok(text.parse::<flexcomm_domain::Strategy>().map_err(guard::Failure::input)?.digest().0)
    }

    /// The canonical text of a compressor with its parameters, memory and momentum: `topk(k=0.01)+ef(vanilla)`.
    #[pyfunction]
    fn parse_compressor(text: &str) -> PyResult<String> {
        Ok(names::compressor(text)?.to_string())
    }

    /// The canonical text of a compressor to decide about, whose ratio may be left open: `topk(k=*)+ef(vanilla)`.
    #[pyfunction]
    fn parse_candidate(text: &str) -> PyResult<String> {
        Ok(names::candidate(text)?.to_string())
    }

    /// Whether training by such a spec loses what a step does not send, for want of error feedback.
    #[pyfunction]
    fn drops(text: &str) -> PyResult<bool> {
        Ok(tensor::drops(text)?)
    }

    /// BytePS's map of strings as such a spec.
    #[pyfunction]
    fn parse_byteps(map: std::collections::BTreeMap<String, String>) -> PyResult<String> {
        let map = map.iter().map(|(key, value)| (key.as_str(), value.as_str()));
        let read = flexcomm_domain::spec::CompressorSpec::from_byteps(map);
        Ok(read.map_err(|error| guard::Failure::input(format!("failed to {error}")))?.to_string())
    }

    #[pyfunction]
    fn compressors() -> Vec<names::Described> {
        names::compressors()
    }

    /// Log lines since the last call.
    #[pyfunction]
    fn take_log() -> Vec<(log::LogLevel, String)> {
        log::take()
    }
}
