//! The core of the Python package: one `Core` per attached model. The package's Python side gives tensors and
//! runs the collectives; error feedback, payloads, the agreement, orders, telemetry and
//! shadow trials are here, without the interpreter lock.

mod checkpoint;
mod control;
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
    use super::checkpoint::Pipelines;
    #[pymodule_export]
    use super::core::{AutoLeaders, Core, ShadowGain, State, TickPy};
    #[pymodule_export]
    use super::device::{CudaStream, DeviceNeeds, Region};
    #[pymodule_export]
    use super::exchange::{ElementPy, HowPy, RoundPy, Transfer};
    #[pymodule_export]
    use super::guard::{FlexcommError, NotOnDeviceError};
    #[pymodule_export]
    use super::log::LogLevel;
    #[pymodule_export]
    use super::names::{Described, Named, Parameter};
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

    /// A strategy, given as `COMPRESSOR/COLLECTIVE[:SELECTION]` or as a compressor alone, which takes the collective that is usual for
    /// it.
    #[pyfunction]
    fn parse_strategy(text: &str) -> PyResult<names::Named> {
        Ok(names::strategy(text)?)
    }

    /// The digest that decisions for a strategy, or for a plan of several, carry.
    #[pyfunction]
    fn digest(text: &str) -> PyResult<u64> {
        Ok(text.parse::<flexcomm_domain::Plan>().map_err(guard::Failure::input)?.digest().0)
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

    /// What a script sets for its job, given and answered as JSON.
    #[pyfunction]
    fn parse_policy(text: &str) -> PyResult<String> {
        let written = serde_json::from_str(text).map_err(guard::Failure::input)?;
        let policy = flexcomm_planner::JobPolicy::read(&written).map_err(guard::Failure::input)?;
        Ok(serde_json::to_string(&policy).map_err(guard::Failure::input)?)
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
