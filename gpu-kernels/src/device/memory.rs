//! Memory and clocks of the device's own, for benchmarks and tests: kernels borrow a training process's memory instead.

use super::gpu::code;
use super::{Blas, BlasOnStream, Gpu, OnStream, Span};
use cudarc::driver::{result, sys};

/// Failed to prepare or time work on the device.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
pub enum MemoryError {
    /// More than the device has.
    #[error(
        "allocate {bytes} bytes on the device: {free} are free; measure fewer values, or stop what else uses the GPU"
    )]
    Full {
        /// Asked for.
        bytes: u64,
        /// What the driver says.
        free: u64,
    },
    /// The driver refused.
    #[error("{call}: the CUDA driver says {code}")]
    Driver {
        /// What was asked of it.
        call: &'static str,
        /// Its error's name.
        code: String,
    },
    /// A buffer of another length.
    #[error("copy {got} bytes to or from a buffer of {expected} on the device")]
    Length {
        /// Of the buffer.
        expected: u64,
        /// As given.
        got: u64,
    },
}

fn failed(call: &'static str) -> impl Fn(result::DriverError) -> MemoryError {
    move |error| MemoryError::Driver { call, code: code(error) }
}

/// Memory on the device, freed when dropped. All of its calls wait for the device.
#[derive(Debug)]
pub struct Allocation<'a> {
    gpu: &'a Gpu,
    span: Span,
}

impl Gpu {
    /// Memory with any content.
    pub fn allocate(&self, bytes: u64) -> Result<Allocation<'_>, MemoryError> {
        // The driver refuses 0.
        let size = bytes.max(1) as usize;
        // SAFETY: freed once, by the allocation.
        match self.within(|| unsafe { result::malloc_sync(size) }) {
            // SAFETY: it is allocated and nobody else has it.
            Ok(address) => Ok(Allocation { gpu: self, span: unsafe { Span::new(address, bytes) } }),
            Err(error) if error.0 == sys::CUresult::CUDA_ERROR_OUT_OF_MEMORY => {
                let (free, _) = self.within(result::mem_get_info).map_err(failed("ask for free memory"))?;
                Err(MemoryError::Full { bytes, free: free as u64 })
            }
            Err(error) => Err(failed("allocate memory on the device")(error)),
        }
    }

    /// Waits for all work of the device.
    pub fn wait(&self) -> Result<(), MemoryError> {
        self.within(result::ctx::synchronize).map_err(failed("wait for the device"))
    }

    /// A stream of its own, which ends with what is answered.
    pub fn stream(&self) -> Result<Stream<'_>, MemoryError> {
        let kind = result::stream::StreamKind::NonBlocking;
        let handle = self.within(|| result::stream::create(kind)).map_err(failed("make a stream"))?;
        Ok(Stream { gpu: self, handle })
    }

    /// The device's name.
    pub fn name(&self) -> Result<String, MemoryError> {
        result::device::get_name(self.handle()).map_err(failed("ask for the device's name"))
    }
}

impl Allocation<'_> {
    /// For kernels to borrow while this lives.
    pub fn span(&self) -> Span {
        self.span
    }

    fn check(&self, got: usize) -> Result<(), MemoryError> {
        let expected = self.span.bytes();
        if got as u64 == expected { Ok(()) } else { Err(MemoryError::Length { expected, got: got as u64 }) }
    }

    /// Fills all of it.
    pub fn write(&self, bytes: &[u8]) -> Result<(), MemoryError> {
        self.check(bytes.len())?;
        // SAFETY: as long as the buffer.
        let copied = self.gpu.within(|| unsafe { result::memcpy_htod_sync(self.span.address(), bytes) });
        copied.map_err(failed("copy to the device"))
    }

    /// Reads all of it.
    pub fn read(&self, bytes: &mut [u8]) -> Result<(), MemoryError> {
        self.check(bytes.len())?;
        // SAFETY: as long as the buffer.
        let copied = self.gpu.within(|| unsafe { result::memcpy_dtoh_sync(bytes, self.span.address()) });
        copied.map_err(failed("copy from the device"))
    }
}

impl Drop for Allocation<'_> {
    fn drop(&mut self) {
        // SAFETY: allocated by this, freed once; freeing waits for the device.
        let _ = self.gpu.within(|| unsafe { result::free_sync(self.span.address()) });
    }
}

/// A stream that this process made.
#[derive(Debug)]
pub struct Stream<'a> {
    gpu: &'a Gpu,
    handle: sys::CUstream,
}

impl Stream<'_> {
    /// To launch on.
    pub fn device(&self) -> OnStream<'_> {
        // SAFETY: it is of this device, and lives as long as what is answered.
        unsafe { self.gpu.on(self.handle as u64) }
    }

    /// To launch and to multiply on.
    pub fn blas<'b>(&'b self, blas: &'b Blas<'b>, workspace: Span) -> BlasOnStream<'b> {
        // SAFETY: as above.
        unsafe { blas.on(self.handle as u64, workspace) }
    }

    /// Seconds that the device takes for what `work` queues on this stream, by events around it.
    pub fn seconds<E: From<MemoryError>>(&self, work: impl FnOnce(&OnStream<'_>) -> Result<(), E>) -> Result<f64, E> {
        let (begin, end) = (Event::new(self.gpu)?, Event::new(self.gpu)?);
        begin.record(self.handle)?;
        work(&self.device())?;
        end.record(self.handle)?;
        Ok(end.since(&begin)?)
    }
}

impl<'a> Stream<'a> {
    /// What `work` queues on this stream, as a CUDA graph: nothing of it runs yet. Fails where something in it waits or
    /// allocates.
    pub fn graph<E: From<MemoryError>>(
        &self,
        work: impl FnOnce(&OnStream<'_>) -> Result<(), E>,
    ) -> Result<Graph<'a>, E> {
        let mode = sys::CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_THREAD_LOCAL;
        // SAFETY: the stream lives, and nobody else has it.
        let begun = self.gpu.within(|| unsafe { sys::cuStreamBeginCapture_v2(self.handle, mode) }.result());
        begun.map_err(failed("begin to capture a graph"))?;
        let queued = work(&self.device());
        let mut recorded = std::ptr::null_mut();
        // Also after an error: the stream must be of use again.
        // SAFETY: as above; the driver writes one pointer.
        let ended = self.gpu.within(|| unsafe { sys::cuStreamEndCapture(self.handle, &mut recorded) }.result());
        let made = match (queued, ended) {
            (Err(error), _) => Err(error),
            (Ok(()), Err(error)) => Err(failed("capture a graph")(error).into()),
            (Ok(()), Ok(())) => self.instantiate(recorded).map_err(E::from),
        };
        if !recorded.is_null() {
            // SAFETY: what was made of it is a copy.
            let _ = self.gpu.within(|| unsafe { sys::cuGraphDestroy(recorded) }.result());
        }
        made
    }

    fn instantiate(&self, recorded: sys::CUgraph) -> Result<Graph<'a>, MemoryError> {
        let mut handle = std::ptr::null_mut();
        // SAFETY: the graph was captured a moment ago; the driver writes one pointer.
        let made = self.gpu.within(|| unsafe { sys::cuGraphInstantiateWithFlags(&mut handle, recorded, 0) }.result());
        made.map_err(failed("instantiate a graph"))?;
        Ok(Graph { gpu: self.gpu, handle })
    }

    /// Queues all of a graph.
    pub fn replay(&self, graph: &Graph<'_>) -> Result<(), MemoryError> {
        // SAFETY: both live; spans in it are vouched for by their makers.
        let queued = self.gpu.within(|| unsafe { sys::cuGraphLaunch(graph.handle, self.handle) }.result());
        queued.map_err(failed("launch a graph"))
    }
}

/// Work that was captured once and is launched as often as wanted, with the same arguments each time.
#[derive(Debug)]
pub struct Graph<'a> {
    gpu: &'a Gpu,
    handle: sys::CUgraphExec,
}

impl Drop for Graph<'_> {
    fn drop(&mut self) {
        // SAFETY: made by this, destroyed once; the driver waits for launches that still run.
        let _ = self.gpu.within(|| unsafe { sys::cuGraphExecDestroy(self.handle) }.result());
    }
}

impl Drop for Stream<'_> {
    fn drop(&mut self) {
        // SAFETY: made by this, destroyed once.
        let _ = self.gpu.within(|| unsafe { result::stream::destroy(self.handle) });
    }
}

/// A point in a stream.
struct Event<'a> {
    gpu: &'a Gpu,
    handle: sys::CUevent,
}

impl<'a> Event<'a> {
    fn new(gpu: &'a Gpu) -> Result<Self, MemoryError> {
        let made = gpu.within(|| result::event::create(sys::CUevent_flags::CU_EVENT_DEFAULT));
        Ok(Self { gpu, handle: made.map_err(failed("make an event"))? })
    }

    fn record(&self, stream: sys::CUstream) -> Result<(), MemoryError> {
        // SAFETY: both live.
        let recorded = self.gpu.within(|| unsafe { result::event::record(self.handle, stream) });
        recorded.map_err(failed("record an event"))
    }

    fn since(&self, before: &Self) -> Result<f64, MemoryError> {
        // SAFETY: it was recorded.
        let reached = self.gpu.within(|| unsafe { result::event::synchronize(self.handle) });
        reached.map_err(failed("wait for an event"))?;
        let (read, mut milliseconds) = (elapsed_time()?, 0.0f32);
        // SAFETY: both were recorded, and the driver writes one number.
        let elapsed = self.gpu.within(|| unsafe { read(&mut milliseconds, before.handle, self.handle) }.result());
        elapsed.map_err(failed("read an event"))?;
        Ok(f64::from(milliseconds) * 1e-3)
    }
}

type ElapsedTime = unsafe extern "C" fn(*mut f32, sys::CUevent, sys::CUevent) -> sys::CUresult;

/// What tells the time between events, by the name that every driver has: cudarc panics over drivers before CUDA 12.8, which
/// lack the newer one.
fn elapsed_time() -> Result<ElapsedTime, MemoryError> {
    // SAFETY: the driver is loaded, or there would be no event; the signature is that of cuda.h.
    let found = unsafe { sys::culib().get::<ElapsedTime>(b"cuEventElapsedTime\0").map(|function| *function) };
    found.map_err(|error| MemoryError::Driver { call: "find what reads events", code: error.to_string() })
}

impl Drop for Event<'_> {
    fn drop(&mut self) {
        // SAFETY: made by this, destroyed once.
        let _ = self.gpu.within(|| unsafe { result::event::destroy(self.handle) });
    }
}
