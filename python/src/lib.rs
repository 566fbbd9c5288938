//! The core of the Python package: one `Core` per attached model. The package's Python side takes addresses and
//! lengths of tensors and runs the collectives; error feedback, payloads, the agreement, orders, telemetry and
//! shadow trials are here, without the interpreter lock.

mod core;
mod exchange;
mod guard;
mod log;
mod memory;
mod meter;
mod report;
mod session;

use pyo3::prelude::*;

/// Native part of flexcomm; see the package.
#[pymodule]
mod _core {
    #[pymodule_export]
    use super::core::Core;
    #[pymodule_export]
    use super::guard::FlexcommError;
    use super::*;

    #[pymodule_init]
    fn init(module: &Bound<'_, PyModule>) -> PyResult<()> {
        super::log::begin();
        module.add("PROTOCOL", flexcomm_wire::PROTOCOL)?;
        module.add("VERSION", env!("CARGO_PKG_VERSION"))
    }

    /// The canonical text and the digest of a strategy, `COMPRESSOR@CR/COLLECTIVE[:SELECTION]`.
    #[pyfunction]
    fn parse_strategy(text: &str) -> PyResult<(String, u64)> {
        let strategy: flexcomm_domain::Strategy = text.parse().map_err(guard::Failure::input)?;
        Ok((strategy.to_string(), strategy.digest().0))
    }

    /// Log lines since the last call: Python's level and the text.
    #[pyfunction]
    fn take_log() -> Vec<(u8, String)> {
        log::take()
    }
}
