//! The part of `Core` for buckets on a GPU: kernels on torch's current stream, on memory that torch owns. What is wrong before
//! anything is sent is an answer and no exception: the hook then takes the host, whose bytes are the same.
//! `unsafe` is for addresses and streams that the hook vouches for.
#![allow(unsafe_code)]

use crate::core::Core;
use crate::exchange::{RoundPy, Tagged, described, header_of};
use crate::guard::{Failure, guard};
use crate::memory;
use flexcomm_exchange::{DeviceBuffer, How, OnHost, Round, Status};
use flexcomm_gpu_kernels::bucket::Gradient;
use flexcomm_gpu_kernels::{Cache, Copies, DType, Gpu, LaunchError, OnStream, Span};
use pyo3::prelude::*;
use std::collections::BTreeMap;
use std::sync::{Mutex, PoisonError};
use std::time::Instant;

/// "0": gradients on a GPU are compressed on the host.
const SWITCH: &str = "FLEXCOMM_GPU_KERNELS";

/// The kernels on a device, loaded when first asked for and never unloaded: what they run on must outlive every stream and
/// every tensor of the process.
fn gpu(ordinal: u32) -> Result<&'static Gpu, String> {
    static LOADED: Mutex<BTreeMap<u32, Result<&'static Gpu, String>>> = Mutex::new(BTreeMap::new());
    if std::env::var_os(SWITCH).is_some_and(|value| value == "0") {
        return Err(format!("{SWITCH} is 0"));
    }
    let load = || match Gpu::load(ordinal, Cache::from_environment().as_ref()) {
        Ok(gpu) => Ok(&*Box::leak(Box::new(gpu))),
        Err(error) => Err(format!("failed to {error}")),
    };
    LOADED.lock().unwrap_or_else(PoisonError::into_inner).entry(ordinal).or_insert_with(load).clone()
}

/// A device's number and a stream of it.
pub(crate) type Place = (u32, u64);

pub(crate) fn on((ordinal, stream): Place) -> Result<OnStream<'static>, String> {
    // SAFETY: the hook passes torch's current stream of this device, which torch never destroys.
    gpu(ordinal).map(|gpu| unsafe { gpu.on(stream) })
}

pub(crate) fn dtype(name: &str) -> Result<DType, Failure> {
    match name {
        "float32" => Ok(DType::F32),
        "float16" => Ok(DType::F16),
        "bfloat16" => Ok(DType::Bf16),
        _ => Err(Failure::input(format!("kernels take float32, float16 and bfloat16, not {name}"))),
    }
}

/// Memory of a tensor.
pub(crate) fn span((address, bytes): (u64, u64)) -> Span {
    // SAFETY: the hook passes `data_ptr()` and bytes of contiguous tensors on the device, which it keeps until the stream
    // has done what was launched (torch's allocator gives memory of a stream only to what comes later on it).
    unsafe { Span::new(address, bytes) }
}

/// A tensor that a bucket borrows.
#[derive(Debug)]
struct Tensor {
    gpu: &'static Gpu,
    _tensor: Py<PyAny>,
}

/// The memory of a tensor, if kernels can use it.
pub(crate) fn device_buffer(
    (ordinal, (tensor, address, bytes)): (u32, Memory),
) -> Result<(Box<dyn DeviceBuffer>, Span), String> {
    let (gpu, memory) = (gpu(ordinal)?, span((address, bytes)));
    gpu.check_memory("the memory that was given", memory).map_err(|error| format!("failed to {error}"))?;
    Ok((Box::new(Tensor { gpu, _tensor: tensor }), memory))
}

impl DeviceBuffer for Tensor {
    fn fetch(&self, from: Span, to: &mut [u8]) -> Result<(), LaunchError> {
        // Of whatever stream it was written on.
        self.gpu.wait().map_err(|error| LaunchError::Driver { kernel: "what came before", code: error.to_string() })?;
        // SAFETY: the default stream is always there.
        unsafe { self.gpu.on(0) }.download(from, to)
    }
}

/// A tensor of bytes, where it lies and how long it is.
pub(crate) type Memory = (Py<PyAny>, u64, u64);

/// A gradient on a device: address, values and type.
type OnDevice = (u64, u64, String);

/// The first round of an exchange on a device.
#[pyclass(frozen, get_all)]
#[derive(Debug)]
pub struct Begun {
    /// Why the host must do it; empty where kernels do, and then the rest counts.
    why: String,
    round: Option<Py<RoundPy>>,
    /// Whether its message stays on the device, see `write_block_on`.
    stays: bool,
    /// Where the outcome of such a message lies, and its bytes.
    outcome: (u64, u64),
}

/// What a [`Begun`] has, where kernels do it.
struct Launched {
    round: RoundPy,
    stays: bool,
    outcome: (u64, u64),
}

impl Begun {
    fn on_host(why: String) -> Self {
        Self { why, round: None, stays: false, outcome: (0, 0) }
    }
}

impl Core {
    fn begun_on(
        &self,
        (index, place): (usize, Place),
        (address, n, name): OnDevice,
        rates: &[f64],
    ) -> Result<Result<Launched, String>, Failure> {
        let began = Instant::now();
        let dtype = dtype(&name)?;
        let given = Gradient { at: span((address, n * dtype.bytes())), dtype, weights: (1.0, 1.0) };
        let device = match on(place) {
            Ok(device) => device,
            Err(why) => return Ok(Err(why)),
        };
        let exchange = self.lock().exchange(index)?;
        let step = exchange.at(rates)?;
        let begun = exchange.with(|bucket| {
            let round = bucket.begin_on(&device, given, (step, exchange.leader))?;
            let (stays, outcome) = (bucket.stays(), bucket.outcome_on().ok());
            let outcome = outcome.map_or((0, 0), |outcome| (outcome.address(), outcome.bytes()));
            Ok::<_, OnHost>((round, stays, outcome))
        });
        self.lock().meter.hook_work(began);
        let launched = |(round, stays, outcome)| Launched { round: described(&round), stays, outcome };
        Ok(begun.map(launched).map_err(|why| why.to_string()))
    }
}

#[pymethods]
impl Core {
    /// Why kernels cannot be had on this device; empty when they are loaded (seconds, the first time ever).
    #[staticmethod]
    fn kernels(py: Python<'_>, ordinal: u32) -> PyResult<String> {
        guard(py, || Ok(gpu(ordinal).err().unwrap_or_default()))
    }

    /// Whether something on the host looks at gradients in this step: a shadow trial that kernels cannot do.
    fn watching(&self) -> bool {
        let session = self.lock();
        session.watches() && session.shadows_on_host()
    }

    /// Makes the device ready for a bucket that is compressed there: why that cannot be (else empty), and bytes of device memory
    /// (aligned to 256) to give it in a second call, 0 once it has them. Then also bytes of a block whose message stays on the
    /// device (see `write_block_on`; 0 where none does), and of control header and message header at its beginning.
    #[pyo3(signature = (index, place, memory=None))]
    fn device_ready(
        &self,
        py: Python<'_>,
        index: usize,
        place: Place,
        memory: Option<Memory>,
    ) -> PyResult<(String, u64, usize, usize)> {
        guard(py, || {
            let no = |why| Ok((why, 0, 0, 0));
            let exchange = self.lock().exchange(index)?;
            let needed = exchange.with(|bucket| if bucket.is_on_device() { Ok(0) } else { bucket.device_bytes() });
            let (need, device) = match (needed, on(place)) {
                (Ok(need), Ok(device)) => (need, device),
                (Err(why), _) => return no(why.to_string()),
                (_, Err(why)) => return no(why),
            };
            match memory.filter(|_| need > 0) {
                None if need > 0 => return Ok((String::new(), need, 0, 0)),
                None => {}
                Some(memory) => {
                    let moved = device_buffer((place.0, memory)).and_then(|buffer| {
                        exchange.with(|bucket| bucket.move_to_device(&device, buffer)).map_err(|why| why.to_string())
                    });
                    if let Err(why) = moved {
                        return no(why);
                    }
                }
            }
            let staying = exchange.with(|bucket| bucket.staying()).filter(|_| exchange.leader.is_none());
            let Some((bytes, header)) = staying else { return Ok((String::new(), 0, 0, 0)) };
            let round = Round { how: How::Gather, bytes, header: Some(0), last: true };
            let control = round.head_bytes();
            Ok((String::new(), 0, control + bytes, control + header))
        })
    }

    /// As `begin_exchange`, on the device: address, values and type of the gradient.
    fn begin_exchange_on(
        &self,
        py: Python<'_>,
        index: usize,
        place: Place,
        gradient: OnDevice,
        rates: Vec<f64>,
    ) -> PyResult<Begun> {
        match guard(py, || self.begun_on((index, place), gradient, &rates))? {
            Ok(Launched { round, stays, outcome }) => {
                Ok(Begun { why: String::new(), round: Some(Py::new(py, round)?), stays, outcome })
            }
            Err(why) => Ok(Begun::on_host(why)),
        }
    }

    /// As `next_round`, on the device.
    fn next_round_on(&self, py: Python<'_>, index: usize, place: Place, arrived: (usize, usize)) -> PyResult<RoundPy> {
        guard(py, || {
            let arrived = memory::Span::new::<u8>("what arrived", arrived.0, arrived.1)?.bytes();
            let device = on(place).map_err(Failure::Run)?;
            self.go_on(index, arrived, |bucket, refused, parts| bucket.next_on(&device, refused, parts))
        })
    }

    /// As `finish_exchange`: `out` (float32, of so many values, on the device) becomes the mean. Answers whether it is finite; if
    /// not, `out` means nothing.
    fn finish_exchange_on(
        &self,
        py: Python<'_>,
        index: usize,
        place: Place,
        arrived: (usize, usize),
        out: (u64, usize),
    ) -> PyResult<bool> {
        guard(py, || {
            let arrived = memory::Span::new::<u8>("what arrived", arrived.0, arrived.1)?.bytes();
            let device = on(place).map_err(Failure::Run)?;
            let (address, n) = out;
            let to = span((address, 4 * n as u64));
            self.finished(index, arrived, |bucket, refused, parts| bucket.finish_on(&device, (refused, parts), to))
        })
    }

    /// Of a message that stays on the device: writes this rank's block there, address and bytes. Answers why that cannot be, else
    /// nothing.
    fn write_block_on(&self, py: Python<'_>, index: usize, place: Place, block: (u64, u64)) -> PyResult<String> {
        guard(py, || {
            let began = Instant::now();
            let device = match on(place) {
                Ok(device) => device,
                Err(why) => return Ok(why),
            };
            let exchange = self.lock().exchange(index)?;
            let (round, tag) = exchange.round();
            let control = header_of(&self.lock(), Tagged { index, tag }, &round, Status::Ready).unwrap_or_default();
            let written = exchange.with(|bucket| bucket.write_on(&device, &control, span(block)));
            self.lock().meter.hook_work(began);
            Ok(written.err().map(|why| why.to_string()).unwrap_or_default())
        })
    }

    /// Of messages that stay on the device, launched before anybody knows the ranks' status: `out` takes float32.
    fn add_blocks_on(
        &self,
        py: Python<'_>,
        index: usize,
        place: Place,
        blocks: (u64, u64),
        out: (u64, usize),
    ) -> PyResult<()> {
        guard(py, || {
            let device = on(place).map_err(Failure::Run)?;
            let exchange = self.lock().exchange(index)?;
            let (round, _) = exchange.round();
            let control = round.head_bytes();
            let to = span((out.0, 4 * out.1 as u64));
            Ok(exchange.with(|bucket| bucket.add_on(&device, (span(blocks), control), to))?)
        })
    }

    /// After the device: whether what `add_blocks_on` left is the mean gradient. All ranks' control and message headers, and this
    /// rank's outcome, lie on the host now.
    fn judge(&self, py: Python<'_>, index: usize, headers: (usize, usize), outcome: (usize, usize)) -> PyResult<bool> {
        guard(py, || {
            let headers = memory::Span::new::<u8>("the headers", headers.0, headers.1)?.bytes();
            let outcome = memory::Span::new::<u8>("the outcome", outcome.0, outcome.1)?.bytes();
            self.judged(index, headers, outcome)
        })
    }
}
