//! Shadow trials of gradients that lie on a GPU: kernels look at them there. What is wrong is an answer and no exception: the shadows then
//! begin anew on the host.

use crate::core::Core;
use crate::device::{Memory, Place, device_buffer, on, span};
use crate::guard::{Failure, guard};
use crate::memory;
use flexcomm_exchange::{OnHost, Param, Shadow, lock};
use pyo3::prelude::*;
use pyo3::types::PyBytes;

impl Core {
    fn sample_shadows(&self, index: usize, place: Place) -> Result<Result<(Vec<u8>, u64), String>, Failure> {
        if let Err(why) = on(place) {
            return Ok(Err(why));
        }
        let mut session = self.lock();
        let session = &mut *session;
        let shared = session.store.bucket(index)?;
        let params: Vec<Param> = lock(&shared).params().to_vec();
        let ready = |shadow: &Shadow| shadow.is_on_device(index, params.iter().map(|param| param.len).sum());
        if session.shadows.shadow().is_none_or(|shadow| ready(shadow)) {
            return Ok(Ok((Vec::new(), 0)));
        }
        // What is under way of a bucket that had another layout is ignored from now on.
        session.shadows.forget_from(index);
        let Some(shadow) = session.shadows.shadow() else { return Ok(Ok((Vec::new(), 0))) };
        Ok(match shadow.sample_on(index, &params) {
            Ok((indices, need)) => Ok((indices.iter().flat_map(|index| index.to_ne_bytes()).collect(), need)),
            Err(why) => Err(why.to_string()),
        })
    }

    fn give_to_shadows(&self, index: usize, place: Place, memory: Memory) -> Result<Result<(), String>, Failure> {
        let device = match on(place) {
            Ok(device) => device,
            Err(why) => return Ok(Err(why)),
        };
        let mut session = self.lock();
        let session = &mut *session;
        let shared = session.store.bucket(index)?;
        let mut bucket = lock(&shared);
        // Waits, once for every bucket of a shadow trial, where a device has the residual.
        bucket.copy_to_host()?;
        let Some(shadow) = session.shadows.shadow() else { return Ok(Ok(())) };
        Ok(device_buffer((place.0, memory)).and_then(|buffer| {
            let residual = bucket.residual();
            let residual = (index, &residual[..]);
            shadow.move_to_device(&device, residual, buffer).map_err(|why| why.to_string())
        }))
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

    /// Makes a bucket's subsets ready: why that cannot be (else empty), their coordinates as unsigned words of 32 bits, and bytes of
    /// device memory (aligned to 256) to pass in a second call; nothing and 0 when they are.
    #[pyo3(signature = (index, place, memory=None))]
    fn shadow_ready<'py>(
        &self,
        py: Python<'py>,
        index: usize,
        place: Place,
        memory: Option<Memory>,
    ) -> PyResult<(String, Bound<'py, PyBytes>, u64)> {
        let (why, indices, need) = guard(py, || {
            let ready = match memory {
                None => self.sample_shadows(index, place)?,
                Some(memory) => self.give_to_shadows(index, place, memory)?.map(|()| (Vec::new(), 0)),
            };
            Ok(ready.map_or_else(|why| (why, Vec::new(), 0), |(indices, need)| (String::new(), indices, need)))
        })?;
        Ok((why, PyBytes::new(py, &indices), need))
    }

    /// Launches a step of a bucket's shadows, over address and number of the float32 values at their coordinates. Answers why that
    /// cannot be (else empty), address and bytes of what they will find, and a number to bring it with to `shadow_outcomes`.
    fn shadow_step(
        &self,
        py: Python<'_>,
        index: usize,
        place: Place,
        values: (u64, u64),
    ) -> PyResult<(String, u64, u64, u64)> {
        guard(py, || {
            let device = match on(place) {
                Ok(device) => device,
                Err(why) => return Ok((why, 0, 0, 0)),
            };
            let mut session = self.lock();
            let (steps, generation) = (session.steps(), session.shadows.generation());
            let Some(shadow) = session.shadows.shadow() else { return Ok((String::new(), 0, 0, generation)) };
            let values = span((values.0, 4 * values.1));
            let found = shadow.observe_on(&device, (index, values), steps);
            Ok(match found {
                Ok(found) => (String::new(), found.address(), found.bytes(), generation),
                // They began between two buckets of this step.
                Err(OnHost::Absent) => (String::new(), 0, 0, generation),
                Err(why) => (why.to_string(), 0, 0, generation),
            })
        })
    }

    /// What the shadows found in a step, by bucket: index, address and bytes.
    fn shadow_outcomes(&self, py: Python<'_>, generation: u64, found: Vec<(usize, usize, usize)>) -> PyResult<()> {
        guard(py, || {
            let mut session = self.lock();
            if session.shadows.generation() != generation {
                // Of others, before these.
                return Ok(());
            }
            for (index, address, bytes) in found {
                let bytes = memory::Span::new::<u8>("what the shadows found", address, bytes)?.bytes();
                if let Some(shadow) = session.shadows.shadow() {
                    shadow.take_outcomes(index, bytes)?;
                }
            }
            session.end_shadows();
            Ok(())
        })
    }
}
