//! Shadow trials of gradients that lie on a GPU: kernels look at them there. Where they cannot, the shadows begin anew on the host.

use crate::core::Core;
use crate::device::{BorrowedTensor, CudaStream, Region, on};
use crate::guard::{Failure, guard};
use crate::memory::Span;
use flexcomm_exchange::{NotOnDevice, Param, Shadow, lock};
use pyo3::prelude::*;

/// What the shadows of a bucket need on its device; nothing and 0 when they have it.
#[pyclass(frozen, get_all)]
#[derive(Debug, Default)]
pub struct ShadowNeeds {
    /// Coordinates of the values that they look at, as unsigned words of 32 bits.
    coordinates: Vec<u8>,
    /// Bytes of device memory, aligned to 256.
    memory: u64,
}

/// A step of a bucket's shadows, once the stream has done it.
#[pyclass(frozen, get_all)]
#[derive(Debug)]
pub struct ShadowStep {
    /// Where the outcomes will lie.
    outcomes: Region,
    /// To bring them with to `shadow_outcomes`.
    generation: u64,
}

impl Core {
    fn sample_shadows(&self, index: usize) -> Result<ShadowNeeds, Failure> {
        let mut session = self.lock();
        let session = &mut *session;
        let shared = session.store.bucket(index)?;
        let params: Vec<Param> = lock(&shared).params().to_vec();
        let ready = |shadow: &Shadow| shadow.is_on_device(index, params.iter().map(|param| param.len).sum());
        if session.shadows.shadow().is_none_or(|shadow| ready(shadow)) {
            return Ok(ShadowNeeds::default());
        }
        // What is under way of a bucket that had another layout is ignored from now on.
        session.shadows.forget_from(index);
        let Some(shadow) = session.shadows.shadow() else { return Ok(ShadowNeeds::default()) };
        let (indices, memory) = shadow.sample_on(index, &params).map_err(Failure::not_on_device)?;
        Ok(ShadowNeeds { coordinates: indices.iter().flat_map(|index| index.to_ne_bytes()).collect(), memory })
    }

    fn give_to_shadows(
        &self,
        index: usize,
        stream: CudaStream,
        memory: BorrowedTensor,
    ) -> Result<ShadowNeeds, Failure> {
        let device = on(stream)?;
        let mut session = self.lock();
        let session = &mut *session;
        let shared = session.store.bucket(index)?;
        let mut bucket = lock(&shared);
        // Waits, once for every bucket of a shadow trial, where a device has the residual.
        bucket.copy_to_host()?;
        if let Some(shadow) = session.shadows.shadow() {
            let residual = bucket.residual();
            let moved = shadow.move_to_device(&device, index, &residual, memory.buffer(stream)?);
            moved.map_err(Failure::not_on_device)?;
        }
        Ok(ShadowNeeds::default())
    }
}

#[pymethods]
impl Core {
    /// Whether shadows look at the bucket under way where it lies, on a device; and whether they have memory there.
    fn shadowing(&self, index: usize) -> (bool, bool) {
        let mut session = self.lock();
        let has_memory = session.shadows.shadow().is_some_and(|shadow| shadow.has_memory_on_device(index));
        (session.settled && !session.shadows_on_host() && session.watches(), has_memory)
    }

    /// From now on they look at copies on the host, beginning anew.
    fn shadow_on_host(&self) {
        let mut session = self.lock();
        session.shadows.begin_anew();
        session.host_generation = Some(session.shadows.generation());
    }

    /// Makes a bucket's subsets ready: answers what to give them in a second call, as `memory`.
    #[pyo3(signature = (index, stream, memory=None))]
    fn shadow_ready(
        &self,
        py: Python<'_>,
        index: usize,
        stream: CudaStream,
        memory: Option<BorrowedTensor>,
    ) -> PyResult<ShadowNeeds> {
        guard(py, || match memory {
            None => on(stream).and_then(|_| self.sample_shadows(index)),
            Some(memory) => self.give_to_shadows(index, stream, memory),
        })
    }

    /// Launches a step of a bucket's shadows, over the float32 values at their coordinates; none where there are no shadows.
    fn shadow_step(
        &self,
        py: Python<'_>,
        index: usize,
        stream: CudaStream,
        values: Span,
    ) -> PyResult<Option<ShadowStep>> {
        guard(py, || {
            let device = on(stream)?;
            let mut session = self.lock();
            let (steps, generation) = (session.steps(), session.shadows.generation());
            let Some(shadow) = session.shadows.shadow() else { return Ok(None) };
            match shadow.observe_on(&device, index, values.on_device(), steps) {
                Ok(outcomes) => Ok(Some(ShadowStep { outcomes: outcomes.into(), generation })),
                // They began between two buckets of this step.
                Err(NotOnDevice::Absent) => Ok(None),
                Err(why) => Err(Failure::not_on_device(why)),
            }
        })
    }

    /// The outcomes of the shadows in a step, with the index of each bucket.
    fn shadow_outcomes(&self, py: Python<'_>, generation: u64, outcomes: Vec<(usize, Span)>) -> PyResult<()> {
        guard(py, || {
            let mut session = self.lock();
            if session.shadows.generation() != generation {
                // Of others, before these.
                return Ok(());
            }
            for (index, outcomes) in outcomes {
                if let Some(shadow) = session.shadows.shadow() {
                    shadow.take_outcomes(index, outcomes.read::<u8>("what the shadows found")?)?;
                }
            }
            session.end_shadows();
            Ok(())
        })
    }
}
