//! The part of `Core` for buckets on a GPU: kernels on torch's current stream, on memory that torch owns. What is wrong on
//! this side of the allgather is an answer and no exception: the hook then takes the host, whose bytes are the same.
//! `unsafe` is for addresses and streams that the hook vouches for.
#![allow(unsafe_code)]

use crate::core::Core;
use crate::exchange::method_of;
use crate::guard::{Failure, guard};
use crate::memory;
use flexcomm_compression::{HEADER_BYTES, Method};
use flexcomm_engine::{Answers, Home, OnHost, Ran, Shared, chooses, kernels, lock};
use flexcomm_gpu_kernels::bucket::Gradient;
use flexcomm_gpu_kernels::{Cache, Copies, DType, Gpu, LaunchError, OUTCOME_BYTES, OnStream, Span};
use flexcomm_trainer::Status;
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

/// The tensor that was lent to a bucket.
#[derive(Debug)]
struct Lent {
    gpu: &'static Gpu,
    _tensor: Py<PyAny>,
}

/// A tensor that is lent, if it is memory that kernels can use.
pub(crate) fn lend((ordinal, (tensor, address, bytes)): (u32, Memory)) -> Result<(Box<dyn Home>, Span), String> {
    let (gpu, memory) = (gpu(ordinal)?, span((address, bytes)));
    gpu.check_memory("the memory that was lent", memory).map_err(|error| format!("failed to {error}"))?;
    Ok((Box::new(Lent { gpu, _tensor: tensor }), memory))
}

impl Home for Lent {
    fn fetch(&self, from: Span, to: &mut [u8]) -> Result<(), LaunchError> {
        // Of whatever stream it was written on.
        self.gpu.wait().map_err(|error| LaunchError::Driver { kernel: "what came before", code: error.to_string() })?;
        // SAFETY: the default stream is always there.
        unsafe { self.gpu.on(0) }.download(from, to)
    }
}

/// A bucket that all ranks gather, in the step under way.
struct Turn {
    bucket: Shared,
    method: Method,
    seed: u64,
}

impl Core {
    fn gathered(&self, index: usize) -> Result<Result<Turn, OnHost>, Failure> {
        let session = self.lock();
        let tick = session.now()?;
        let (bucket, method) = (session.store.bucket(index)?, method_of(&tick.strategy)?);
        Ok(Ok(Turn { bucket, method, seed: session.seed_of(&tick) }))
    }

    fn prepare(&self, index: usize, place: Place, lent: Option<Memory>) -> Result<Result<(u64, u64), String>, Failure> {
        let turn = match self.gathered(index)? {
            Ok(turn) => turn,
            Err(why) => return Ok(Err(why.to_string())),
        };
        // The session first, as everywhere: whoever holds a bucket and waits for the session blocks who does it that way.
        let strategy = self.lock().now()?.strategy;
        let mut bucket = lock(&turn.bucket);
        let shape = (bucket.params().len(), bucket.kept(turn.method));
        let has = match strategy.collective().is_art() {
            true => chooses(&strategy),
            false => kernels(turn.method, shape, 0).map(drop),
        };
        if let Err(why) = has {
            return Ok(Err(why.to_string()));
        }
        let device = match on(place) {
            Ok(device) => device,
            Err(why) => return Ok(Err(why)),
        };
        if !bucket.is_resident() {
            let Some(lent) = lent else { return Ok(Ok((bucket.lent_bytes()?, 0))) };
            let moved = lend((place.0, lent))
                .and_then(|home| bucket.reside(&device, home).map_err(|error| format!("failed to {error}")));
            if let Err(why) = moved {
                return Ok(Err(why));
            }
        }
        Ok(Ok((0, bucket.outcome_on_device()?.address())))
    }
}

/// A tensor of bytes, where it lies and how long it is.
pub(crate) type Memory = (Py<PyAny>, u64, u64);

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
        session.watches() && session.shadow_on_host
    }

    /// Makes the device ready for a bucket that is compressed there: why that cannot be (else empty), bytes of device memory
    /// (aligned to 256) to lend it in a second call, and once it has them the address of its outcome.
    #[pyo3(signature = (index, place, lent=None))]
    fn on_device(
        &self,
        py: Python<'_>,
        index: usize,
        place: Place,
        lent: Option<Memory>,
    ) -> PyResult<(String, u64, u64)> {
        guard(py, || {
            let ready = self.prepare(index, place, lent)?;
            Ok(ready.map_or_else(|why| (why, 0, 0), |(need, outcome)| (String::new(), need, outcome)))
        })
    }

    /// As `pack`, launched on the device: address, values and type of the gradient, address and bytes of the block.
    /// Answers why that cannot be, else nothing.
    fn pack_on(
        &self,
        py: Python<'_>,
        index: usize,
        place: Place,
        gradient: (u64, u64, String),
        block: (u64, u64),
    ) -> PyResult<String> {
        guard(py, || {
            let began = Instant::now();
            let (address, n, name) = gradient;
            let dtype = dtype(&name)?;
            let at = Gradient { at: span((address, n * dtype.bytes())), dtype, weights: (1.0, 1.0) };
            let (turn, device) = match (self.gathered(index)?, on(place)) {
                (Ok(turn), Ok(device)) => (turn, device),
                (Err(why), _) => return Ok(why.to_string()),
                (_, Err(why)) => return Ok(why),
            };
            let mut word = vec![0; self.lock().riding.bytes(index as u32)];
            self.lock().riding.write_bytes(index as u32, n as usize, Status::default(), &mut word)?;
            let packed = lock(&turn.bucket).pack_on(&device, (turn.method, turn.seed), at, (span(block), &word));
            self.lock().meter.hook_work(began);
            Ok(packed.err().map(|why| why.to_string()).unwrap_or_default())
        })
    }

    /// As `unpack`, launched on the device before anybody knows what the ranks said: `out` takes float32.
    fn add_on(&self, py: Python<'_>, index: usize, place: Place, blocks: (u64, u64), out: u64) -> PyResult<()> {
        guard(py, || {
            let device = on(place).map_err(Failure::Run)?;
            let turn = self.gathered(index)??;
            let (world, word) = {
                let session = self.lock();
                (session.world, session.riding.bytes(index as u32))
            };
            let bucket = lock(&turn.bucket);
            let out = span((out, 4 * bucket.values() as u64));
            Ok(bucket.add_on(&device, (turn.method, world, word), (span(blocks), out))?)
        })
    }

    /// After the device: whether what `add_on` left is the mean gradient. All ranks' words and headers, and this rank's
    /// outcome, lie on the host now.
    fn judge(
        &self,
        py: Python<'_>,
        index: usize,
        n: usize,
        heads: (usize, usize),
        outcome: (usize, usize),
    ) -> PyResult<bool> {
        guard(py, || {
            let began = Instant::now();
            self.lock().meter.landed(false);
            let heads = memory::Span::new::<u8>("the words", heads.0, heads.1)?.bytes();
            let outcome = memory::Span::new::<u8>("the outcome", outcome.0, outcome.1)?.bytes();
            let outcome: &[u8; OUTCOME_BYTES as usize] = outcome
                .first_chunk()
                .ok_or_else(|| Failure::Run(format!("failed to read an outcome of {} bytes", outcome.len())))?;
            let turn = self.gathered(index)??;
            let mut session = self.lock();
            let word = session.riding.bytes(index as u32);
            let all: Vec<(&[u8], &[u8])> =
                heads.chunks_exact(word + HEADER_BYTES).map(|head| head.split_at(word)).collect();
            let heard = session.riding.hear_bytes(index as u32, n, all.iter().map(|(word, _)| *word))?;
            drop(session);
            let headers: Vec<&[u8]> = all.iter().map(|(_, header)| *header).collect();
            let mut bucket = lock(&turn.bucket);
            let ran = bucket.judge(Answers { heard: &heard, headers: &headers, outcome })?;
            let energy = bucket.energy();
            drop(bucket);
            let mut session = self.lock();
            session.meter.other_work(began);
            session.meter.done(energy);
            Ok(ran == Ran::Good)
        })
    }
}
