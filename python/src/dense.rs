//! The part of `Core` for dense buckets, which torch sums as they are: their times and the control header.

use crate::core::Core;
use crate::exchange::ring_share;
use crate::guard::Failure;
use crate::memory::Span;
use flexcomm_domain::Rank;
use flexcomm_trainer::Status;
use pyo3::prelude::*;

#[pymethods]
impl Core {
    /// A bucket of `n` values of `element` bytes that DDP exchanges by itself, dense and without the hook, starts: elements of
    /// the word that travels with it, 0 for none. `words`: whether there are any.
    fn pass_by(&self, index: usize, n: usize, element: usize, words: bool) -> PyResult<usize> {
        let mut session = self.lock();
        let tick = session.now()?;
        let bits = session.pass(&tick, index, n)?;
        let bits = if words { bits } else { 0 };
        let share = ring_share(session.world, (n + bits).saturating_mul(element), false);
        session.meter.launched(share);
        Ok(bits)
    }

    /// Elements at the end of what the first bucket of this step sums, n values and the word, that are summed by themselves;
    /// `dense`: it is a dense bucket's.
    fn apart(&self, dense: bool, n: usize) -> PyResult<usize> {
        let session = self.lock();
        Ok(session.apart(&session.now()?, dense, n))
    }

    /// A collective starts in which a message of so many bytes is summed (or gathered) by all.
    fn launched(&self, bytes: usize, gathered: bool) {
        let mut session = self.lock();
        let share = ring_share(session.world, bytes, gathered);
        session.meter.launched(share);
    }

    /// So many dense buckets have arrived.
    #[pyo3(signature = (count=1))]
    fn landed(&self, count: usize) {
        let mut session = self.lock();
        for _ in 0..count {
            session.meter.landed(false);
            session.meter.done(flexcomm_compression::Energy::default());
        }
    }

    /// Writes the word of a dense bucket: zeros and ones.
    fn word(&self, index: u32, n: usize, word: usize, len: usize) -> PyResult<()> {
        let word = Span::new::<f32>("the word", word, len)?.floats_mut();
        Ok(self.lock().riding.write_bits(index, n, Status::default(), word).map_err(Failure::from)?)
    }

    /// Takes in the sums of a dense bucket's word.
    fn hear(&self, index: u32, n: usize, word: usize, len: usize) -> PyResult<()> {
        let sums = Span::new::<f32>("the word", word, len)?.floats();
        self.lock().riding.hear_bits(index, n, sums).map_err(Failure::from)?;
        Ok(())
    }

    /// Says once that something else runs than what was decided.
    fn instead(&self, what: String) {
        let mut session = self.lock();
        // All ranks do the same; one line is enough.
        if session.rank == Rank(0) {
            session.instead(what);
        }
    }
}
