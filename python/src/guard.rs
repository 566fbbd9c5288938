//! Where Rust ends: nothing but values and Python exceptions leaves this crate, never a panic.

use pyo3::exceptions::{PyRuntimeError, PyValueError};
use pyo3::prelude::*;
use std::panic::{AssertUnwindSafe, catch_unwind};

pyo3::create_exception!(
    _core,
    FlexcommError,
    PyRuntimeError,
    "flexcomm could not go on; the text names cause and remedy."
);

pyo3::create_exception!(
    _core,
    NotOnDeviceError,
    FlexcommError,
    "Kernels cannot do this; nothing was sent, and the host can do it, whose bytes are the same."
);

/// Why a call failed.
#[derive(Debug)]
pub enum Failure {
    /// The caller's input.
    Input(String),
    /// Nothing was sent, and the host can do it.
    NotOnDevice(String),
    /// Everything else.
    Run(String),
}

impl Failure {
    /// Of the caller's input.
    pub fn input(text: impl std::fmt::Display) -> Self {
        Self::Input(text.to_string())
    }

    /// Of what kernels cannot do.
    pub fn not_on_device(why: impl std::fmt::Display) -> Self {
        Self::NotOnDevice(why.to_string())
    }
}

impl std::fmt::Display for Failure {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let (Self::Input(text) | Self::NotOnDevice(text) | Self::Run(text)) = self;
        f.write_str(text)
    }
}

impl<E: std::error::Error> From<E> for Failure {
    fn from(error: E) -> Self {
        Self::Run(format!("failed to {error}"))
    }
}

impl From<Failure> for PyErr {
    fn from(failure: Failure) -> Self {
        match failure {
            Failure::Input(text) => PyValueError::new_err(text),
            Failure::NotOnDevice(text) => NotOnDeviceError::new_err(text),
            Failure::Run(text) => FlexcommError::new_err(text),
        }
    }
}

/// Runs without the interpreter lock, and makes a panic an exception.
pub fn guard<T: Send>(py: Python<'_>, run: impl FnOnce() -> Result<T, Failure> + Send) -> PyResult<T> {
    let done = py.detach(|| catch_unwind(AssertUnwindSafe(run)));
    match done {
        Ok(result) => Ok(result?),
        Err(panic) => Err(FlexcommError::new_err(text_of(panic.as_ref()))),
    }
}

fn text_of(panic: &(dyn std::any::Any + Send)) -> String {
    let text = panic.downcast_ref::<&str>().copied().or(panic.downcast_ref::<String>().map(String::as_str));
    format!("flexcomm's core stopped by a bug of its own, please report it: {}", text.unwrap_or("no text"))
}
