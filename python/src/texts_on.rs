//! A strategy named by a text, on a bucket that lies on a GPU: kernels compress it and add messages up, which cross to the host
//! and travel as `texts` has it.

use crate::core::Core;
use crate::device::{Memory, Place, dtype, lend, on, span};
use crate::guard::{Failure, guard};
use crate::memory;
use crate::texts::{at_rates, described};
use flexcomm_gpu_kernels::bucket::Gradient;
use pyo3::prelude::*;
use std::time::Instant;

#[pymethods]
impl Core {
    /// Makes the device ready for a bucket under the text: why that cannot be (else empty), and bytes of device memory (aligned to
    /// 256) to lend it in a second call, 0 once it has them.
    #[pyo3(signature = (index, place, lent=None))]
    fn text_on_device(
        &self,
        py: Python<'_>,
        index: usize,
        place: Place,
        lent: Option<Memory>,
    ) -> PyResult<(String, u64)> {
        guard(py, || {
            let (turns, member) = {
                let mut session = self.lock();
                let turns = session.turns(index)?;
                session.prepare(&turns)?;
                (turns, session.member(index))
            };
            let needed = turns.with(|pipe| if pipe.is_resident() { Ok(0) } else { pipe.lent_bytes(member) })?;
            let (need, device) = match (needed, on(place)) {
                (Ok(need), Ok(device)) => (need, device),
                (Err(why), _) => return Ok((why.to_string(), 0)),
                (_, Err(why)) => return Ok((why, 0)),
            };
            let Some(lent) = lent.filter(|_| need > 0) else { return Ok((String::new(), need)) };
            let home = match lend((place.0, lent)) {
                Ok(home) => home,
                Err(why) => return Ok((why, 0)),
            };
            let moved = turns.with(|pipe| pipe.reside(&device, member, home))?;
            Ok((moved.err().map(|why| why.to_string()).unwrap_or_default(), 0))
        })
    }

    /// As `speak`, on the device: address, values and type of the gradient. Answers why that cannot be (else empty), and the
    /// turn.
    fn speak_on(
        &self,
        py: Python<'_>,
        index: usize,
        place: Place,
        gradient: (u64, u64, String),
        rates: Vec<f64>,
    ) -> PyResult<(String, u8, usize, bool)> {
        guard(py, || {
            let began = Instant::now();
            let (address, n, name) = gradient;
            let dtype = dtype(&name)?;
            let given = Gradient { at: span((address, n * dtype.bytes())), dtype, weights: (1.0, 1.0) };
            let device = match on(place) {
                Ok(device) => device,
                Err(why) => return Ok((why, 0, 0, true)),
            };
            let turns = self.lock().turns(index)?;
            let (step, layers) = at_rates(turns.step, &rates);
            let begun = turns.with(|pipe| pipe.layer_rates(layers).map(|()| pipe.begin_on(&device, given, step)))??;
            let turn = match begun {
                Ok(turn) => turn,
                Err(why) => return Ok((why.to_string(), 0, 0, true)),
            };
            let mut session = self.lock();
            session.meter.hook_work(began);
            let (how, elements, last) = described(&session, index, &turn);
            Ok((String::new(), how, elements, last))
        })
    }

    /// As `conclude`: `out` (float32, of so many values, on the device) becomes the mean. Answers whether it is finite; if not,
    /// `out` means nothing.
    fn conclude_on(
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
            self.concluded((index, n), arrived, |pipe, heard, parts| pipe.end_on(&device, (heard, parts), to))
        })
    }
}
