//! The part of `Core` for buckets on a GPU: kernels on torch's current stream, on memory that torch owns. What is wrong before
//! anything is sent is a [`Failure::NotOnDevice`]: the hook then takes the host, whose bytes are the same.
//! `unsafe` is for streams that the hook vouches for.
#![allow(unsafe_code)]

use crate::core::Core;
use crate::exchange::ElementPy;
use crate::guard::{Failure, guard};
use crate::memory::Span;
use flexcomm_exchange::{Answers, Arrived, DeviceBuffer, How, Round};
use flexcomm_gpu_kernels::bucket::Gradient;
use flexcomm_gpu_kernels::{Cache, Copies, DType, Gpu, LaunchError, OnStream, Span as DeviceSpan};
use pyo3::prelude::*;
use std::collections::BTreeMap;
use std::sync::{Mutex, PoisonError};
use std::time::Instant;

/// "0": gradients on a GPU are compressed on the host.
const SWITCH: &str = "FLEXCOMM_GPU_KERNELS";

/// The kernels on a device, loaded when first asked for and never unloaded: what they run on must outlive every stream and
/// every tensor of the process.
pub(crate) fn gpu(ordinal: u32) -> Result<&'static Gpu, Failure> {
    static LOADED: Mutex<BTreeMap<u32, Result<&'static Gpu, String>>> = Mutex::new(BTreeMap::new());
    if std::env::var_os(SWITCH).is_some_and(|value| value == "0") {
        return Err(Failure::not_on_device(format!("{SWITCH} is 0")));
    }
    let load = || match Gpu::load(ordinal, Cache::from_environment().as_ref()) {
        Ok(gpu) => Ok(&*Box::leak(Box::new(gpu))),
        Err(error) => Err(format!("failed to {error}")),
    };
    let loaded = LOADED.lock().unwrap_or_else(PoisonError::into_inner).entry(ordinal).or_insert_with(load).clone();
    loaded.map_err(Failure::not_on_device)
}

/// A stream of the CUDA device with this number, by its handle (`torch.cuda.Stream.cuda_stream`).
#[pyclass(frozen, get_all, from_py_object)]
#[derive(Debug, Clone, Copy)]
pub struct CudaStream {
    ordinal: u32,
    handle: u64,
}

#[pymethods]
impl CudaStream {
    #[new]
    fn new(ordinal: u32, handle: u64) -> Self {
        Self { ordinal, handle }
    }
}

/// A part of memory that the core was given on a device.
#[pyclass(frozen, get_all)]
#[derive(Debug, Clone, Copy)]
pub struct Region {
    address: u64,
    bytes: u64,
}

impl From<DeviceSpan> for Region {
    fn from(span: DeviceSpan) -> Self {
        Self { address: span.address(), bytes: span.bytes() }
    }
}

pub(crate) fn on(stream: CudaStream) -> Result<OnStream<'static>, Failure> {
    // SAFETY: the hook passes torch's current stream of this device, which torch never destroys.
    gpu(stream.ordinal).map(|gpu| unsafe { gpu.on(stream.handle) })
}

pub(crate) fn on_device(gradient: Span, element: ElementPy) -> Result<Gradient, Failure> {
    let dtype = match element {
        ElementPy::Float32 => DType::F32,
        ElementPy::Float16 => DType::F16,
        ElementPy::Bfloat16 => DType::Bf16,
        ElementPy::Byte => return Err(Failure::input("a gradient of bytes has no meaning")),
    };
    Ok(Gradient { at: gradient.on_device(), dtype, weights: (1.0, 1.0) })
}

/// A tensor of bytes on a device that the core keeps.
pub(crate) struct BorrowedTensor {
    tensor: Py<PyAny>,
    span: Span,
}

impl FromPyObject<'_, '_> for BorrowedTensor {
    type Error = PyErr;

    fn extract(tensor: Borrowed<'_, '_, PyAny>) -> PyResult<Self> {
        Ok(Self { span: tensor.extract()?, tensor: tensor.to_owned().unbind() })
    }
}

impl BorrowedTensor {
    /// Its memory, if kernels can use it.
    pub(crate) fn buffer(self, stream: CudaStream) -> Result<Box<dyn DeviceBuffer>, Failure> {
        let (gpu, memory) = (gpu(stream.ordinal)?, self.span.on_device());
        let checked = gpu.check_memory("the memory that was given", memory);
        checked.map_err(|error| Failure::not_on_device(format!("failed to {error}")))?;
        Ok(Box::new(BucketMemory::new(gpu, memory, self.tensor)))
    }
}

/// What a bucket borrows: a tensor, or memory of the driver's.
#[derive(Debug)]
pub(crate) struct BucketMemory<T> {
    gpu: &'static Gpu,
    span: DeviceSpan,
    _memory: T,
}

impl<T> BucketMemory<T> {
    pub(crate) fn new(gpu: &'static Gpu, span: DeviceSpan, memory: T) -> Self {
        Self { gpu, span, _memory: memory }
    }
}

impl<T: std::fmt::Debug + Send> DeviceBuffer for BucketMemory<T> {
    fn span(&self) -> DeviceSpan {
        self.span
    }

    fn fetch(&self, from: DeviceSpan, to: &mut [u8]) -> Result<(), LaunchError> {
        // Of whatever stream it was written on.
        self.gpu.wait().map_err(|error| LaunchError::Driver { kernel: "what came before", code: error.to_string() })?;
        // SAFETY: the default stream is always there.
        unsafe { self.gpu.on(0) }.download(from, to)
    }
}

/// What a bucket needs that is compressed on its device.
#[pyclass(frozen, get_all)]
#[derive(Debug, Default)]
pub struct DeviceNeeds {
    /// Bytes of device memory, aligned to 256; 0 once it has them, and only then the rest counts.
    memory: u64,
    /// Bytes of a block whose message stays on the device (see `add_blocks_on`; 0 where none does), and of control header and
    /// message header at its beginning.
    block: usize,
    headers: usize,
}

#[pymethods]
impl Core {
    /// Loads the kernels of this device, which takes seconds the first time ever.
    #[staticmethod]
    fn load_kernels(py: Python<'_>, ordinal: u32) -> PyResult<()> {
        guard(py, || gpu(ordinal).map(drop))
    }

    /// Whether something on the host looks at gradients in this step: a shadow trial that kernels cannot do.
    fn watching(&self) -> bool {
        let session = self.lock();
        session.watches() && session.shadows_on_host()
    }

    /// Makes the device ready for a bucket that is compressed there: answers what to give it in a second call, as `memory`.
    #[pyo3(signature = (index, stream, memory=None))]
    fn device_ready(
        &self,
        py: Python<'_>,
        index: usize,
        stream: CudaStream,
        memory: Option<BorrowedTensor>,
    ) -> PyResult<DeviceNeeds> {
        guard(py, || {
            let exchange = self.lock().exchange(index)?;
            let needed = exchange.with(|bucket| if bucket.is_on_device() { Ok(0) } else { bucket.device_bytes() });
            let (need, device) = (needed.map_err(Failure::not_on_device)?, on(stream)?);
            match memory.filter(|_| need > 0) {
                None if need > 0 => return Ok(DeviceNeeds { memory: need, ..DeviceNeeds::default() }),
                None => {}
                Some(memory) => {
                    let buffer = memory.buffer(stream)?;
                    let moved = exchange.with(|bucket| bucket.move_to_device(&device, buffer));
                    moved.map_err(Failure::not_on_device)?;
                }
            }
            let staying = exchange.with(|bucket| bucket.staying()).filter(|_| exchange.leader.is_none());
            let Some((bytes, header)) = staying else { return Ok(DeviceNeeds::default()) };
            let round = Round { how: How::Gather, bytes, header: Some(0), last: true };
            let control = round.head_bytes();
            Ok(DeviceNeeds { memory: 0, block: control + bytes, headers: control + header })
        })
    }

    /// Of messages that stay on the device, launched before the ranks' status is known: `out` takes float32.
    fn add_blocks_on(&self, py: Python<'_>, index: usize, stream: CudaStream, blocks: Span, out: Span) -> PyResult<()> {
        guard(py, || {
            let device = on(stream)?;
            let exchange = self.lock().exchange(index)?;
            let control = exchange.round().0.head_bytes();
            let (blocks, out) = (blocks.on_device(), out.on_device());
            Ok(exchange.with(|bucket| bucket.add_on(&device, blocks, control, out))?)
        })
    }

    /// After the device: whether what `add_blocks_on` left is the mean gradient. All ranks' control and message headers, and this
    /// rank's outcome, lie on the host now.
    fn judge(&self, py: Python<'_>, index: usize, headers: Span, outcome: Span) -> PyResult<bool> {
        guard(py, || {
            let began = Instant::now();
            let outcome = outcome.read::<u8>("the outcome")?;
            let (exchange, Arrived { refused, parts: headers }) = self.arrived(index, headers, false)?;
            self.ended(began, &exchange, |bucket| bucket.judge(Answers { refused, headers: &headers, outcome }))
        })
    }
}
