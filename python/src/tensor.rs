//! `flexcomm.compress`: one tensor by itself, see [`flexcomm_compression::tensor`].

use crate::guard::{Failure, guard};
use crate::memory::Span;
use flexcomm_compression::tensor::{Decoder, Encoder, Kind, TensorError, TensorMessage, TensorShape};
use flexcomm_domain::spec::CompressorSpec;
use pyo3::prelude::*;
use pyo3::types::PyBytes;
use std::sync::{Mutex, MutexGuard, PoisonError};

/// A compressed tensor. The package's `Message` has it inside.
#[pyclass(frozen)]
pub struct Message {
    message: TensorMessage,
}

/// Of the caller's input: which bytes, texts and shapes are given is the caller's choice.
fn input(error: TensorError) -> Failure {
    Failure::Input(format!("failed to {error}"))
}

#[pymethods]
impl Message {
    /// Reads bytes that `to_bytes` gave.
    #[staticmethod]
    fn from_bytes(py: Python<'_>, bytes: &[u8]) -> PyResult<Self> {
        guard(py, || Ok(Self { message: TensorMessage::from_bytes(bytes).map_err(input)? }))
    }

    fn to_bytes<'py>(&self, py: Python<'py>) -> Bound<'py, PyBytes> {
        PyBytes::new(py, &self.message.to_bytes())
    }

    fn spec(&self) -> String {
        self.message.spec().to_string()
    }

    fn shape(&self) -> Vec<u64> {
        self.message.shape().dimensions().to_vec()
    }

    fn dtype(&self) -> &'static str {
        self.message.shape().kind().name()
    }

    fn step(&self) -> u64 {
        self.message.step()
    }

    fn wire_bytes(&self) -> usize {
        self.message.wire_bytes()
    }
}

/// Compresses tensors of one shape.
#[pyclass(frozen)]
pub struct TensorEncoder {
    encoder: Mutex<Encoder>,
    values: usize,
}

impl TensorEncoder {
    fn lock(&self) -> MutexGuard<'_, Encoder> {
        self.encoder.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[pymethods]
impl TensorEncoder {
    #[new]
    fn new(py: Python<'_>, spec: &str, shape: Vec<u64>, dtype: &str, seed: u64) -> PyResult<Self> {
        guard(py, || {
            let spec: CompressorSpec = spec.parse().map_err(|e| Failure::input(format!("failed to {e}")))?;
            let unknown = || Failure::input(format!("dtype {dtype:?} is none of float32, float16, bfloat16, float64"));
            let shape = TensorShape::new(shape, Kind::by_name(dtype).ok_or_else(unknown)?).map_err(input)?;
            let values = shape.values();
            Ok(Self { encoder: Mutex::new(Encoder::new(&spec, shape, seed)), values })
        })
    }

    /// The message of the float32 values at an address, and the share of their energy that it keeps.
    fn encode(&self, py: Python<'_>, address: usize, learning_rate: f64) -> PyResult<(Message, f64)> {
        let span = Span::of_floats(address, self.values);
        guard(py, || {
            let (message, outcome) =
                self.lock().encode(span.read::<f32>("the tensor")?, learning_rate).map_err(input)?;
            Ok((Message { message }, outcome.energy.gain()))
        })
    }

    /// Writes the residual of error feedback as float32 to an address; answers whether there is one.
    fn residual(&self, py: Python<'_>, address: usize) -> PyResult<bool> {
        let span = Span::of_floats(address, self.values);
        guard(py, || {
            let residual = self.lock().residual();
            let there = residual.len() == self.values;
            if there {
                span.write::<f32>("the residual")?.copy_from_slice(&residual);
            }
            Ok(there)
        })
    }
}

/// Restores tensors of one compressor and shape.
#[pyclass(frozen)]
pub struct TensorDecoder {
    decoder: Mutex<Decoder>,
}

#[pymethods]
impl TensorDecoder {
    /// For messages like this one.
    #[new]
    fn new(py: Python<'_>, message: &Message) -> PyResult<Self> {
        guard(py, || Ok(Self { decoder: Mutex::new(Decoder::of(&message.message)) }))
    }

    /// Writes what the message means to the float32 values at an address: as many as the message's shape has.
    fn decode(&self, py: Python<'_>, message: &Message, address: usize) -> PyResult<()> {
        let span = Span::of_floats(address, message.message.shape().values());
        guard(py, || {
            let mut decoder = self.decoder.lock().unwrap_or_else(PoisonError::into_inner);
            decoder.decode(&message.message, span.write::<f32>("the tensor")?).map_err(input)
        })
    }
}
