//! The part of `Core` for dense buckets, which torch sums as they are: their times.

use crate::core::Core;
use crate::exchange::sum_share;
use flexcomm_domain::Rank;
use pyo3::prelude::*;

#[pymethods]
impl Core {
    /// DDP starts to exchange a bucket of `n` values of `element` bytes by itself, dense and without the hook.
    fn launched_natively(&self, index: usize, n: usize, element: usize) -> PyResult<()> {
        let mut session = self.lock();
        let tick = session.now()?;
        session.pass(&tick, index, n)?;
        let share = sum_share(session.world, n.saturating_mul(element));
        session.meter.launched(share);
        Ok(())
    }

    /// A collective starts in which a message of so many bytes is summed.
    fn launched(&self, bytes: usize) {
        let mut session = self.lock();
        let share = sum_share(session.world, bytes);
        session.meter.launched(share);
    }

    /// So many dense buckets have arrived.
    #[pyo3(signature = (count=1))]
    fn landed(&self, count: usize) {
        let mut session = self.lock();
        for _ in 0..count {
            session.meter.done(flexcomm_compression::Energy::default());
        }
    }

    /// Warns once that something else runs than what was decided.
    fn warn_once(&self, what: String) {
        let mut session = self.lock();
        // All ranks do the same; one line is enough.
        if session.rank == Rank(0) {
            session.warn_once(what);
        }
    }
}
