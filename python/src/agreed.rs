//! AR-Topk of a bucket on a GPU: error feedback, selection, gather and scatter are kernels; indices and values, which are few,
//! cross to the host, whose collectives are those of every rank.

use crate::core::Core;
use crate::device::{Place, dtype, on, span};
use crate::guard::{Failure, guard};
use crate::memory;
use flexcomm_engine::lock;
use flexcomm_gpu_kernels::bucket::Gradient;
use pyo3::prelude::*;
use std::time::Instant;

/// On the device: address and bytes.
type Lent = (u64, u64);

#[pymethods]
impl Core {
    /// Bytes of device memory for the lists of AR-Topk's indices and values.
    fn list_bytes(&self, index: usize) -> PyResult<u64> {
        let turn = self.turn(index)?;
        let bytes = lock(&turn.bucket).list_bytes(turn.method);
        Ok(bytes)
    }

    /// As `choose`, on the device: address, values and type of the gradient, the lists. Answers why that cannot be, else
    /// nothing.
    fn choose_on(
        &self,
        py: Python<'_>,
        index: usize,
        at: (Place, Lent),
        gradient: (u64, u64, String),
        leader: i64,
        side: (usize, usize),
    ) -> PyResult<String> {
        guard(py, || {
            let began = Instant::now();
            let side = memory::Span::new::<u8>("the side message", side.0, side.1)?.bytes_mut();
            let (address, n, name) = gradient;
            let dtype = dtype(&name)?;
            let given = Gradient { at: span((address, n * dtype.bytes())), dtype, weights: (1.0, 1.0) };
            let device = match on(at.0) {
                Ok(device) => device,
                Err(why) => return Ok(why),
            };
            let turn = self.turn(index)?;
            let may_lead = leader < 0 || leader == i64::from(self.lock().rank.0);
            let mut bucket = lock(&turn.bucket);
            let status = match bucket.choose_on(&device, (turn.method, may_lead), given, span(at.1)) {
                Ok(status) => status,
                Err(why) => return Ok(why.to_string()),
            };
            let weight = bucket.weight();
            drop(bucket);
            self.bid((index, n as usize), (status, weight), side);
            self.lock().meter.hook_work(began);
            Ok(String::new())
        })
    }

    /// As `take`, of what `choose_on` fed.
    fn take_on(
        &self,
        py: Python<'_>,
        index: usize,
        at: (Place, Lent),
        leader_and_values: (usize, usize),
        message: (usize, usize),
        payload: (usize, usize),
    ) -> PyResult<()> {
        guard(py, || {
            let message = memory::Span::new::<u8>("the indices", message.0, message.1)?.bytes();
            let payload = memory::Span::new::<f32>("the payload", payload.0, payload.1)?.floats_mut();
            let device = on(at.0).map_err(Failure::Run)?;
            self.taken(index, leader_and_values, message, payload, |bucket, turn, leader, body, values| {
                bucket.take_on(&device, (turn.method, leader), body, (span(at.1), values))
            })
        })
    }

    /// As `scatter`: `out` (float32, of so many values, on the device) becomes the mean. Answers whether it is finite; if not,
    /// `out` is as before.
    fn scatter_on(
        &self,
        py: Python<'_>,
        index: usize,
        at: (Place, Lent),
        leader: usize,
        payload: (usize, usize),
        out: (u64, usize),
    ) -> PyResult<bool> {
        guard(py, || {
            let payload = memory::Span::new::<f32>("the payload", payload.0, payload.1)?.floats_mut();
            let device = on(at.0).map_err(Failure::Run)?;
            let (address, n) = out;
            let to = span((address, 4 * n as u64));
            self.scattered(index, (leader, n), payload, |bucket, heard, sums, world| {
                bucket.scatter_on(&device, (heard, sums, world as u32), (span(at.1), to))
            })
        })
    }
}
