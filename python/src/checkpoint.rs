//! The part of `Core` for what outlives a step: snapshots of live trials, residuals and pipelines of checkpoints.

use crate::core::Core;
use crate::guard::{Failure, guard};
use crate::memory::Span;
use crate::session::Session;
use flexcomm_exchange::{Param, PipelineState};
use pyo3::prelude::*;
use std::collections::BTreeMap;

/// The state of the pipelines for a checkpoint.
#[pyclass(frozen, get_all, from_py_object)]
#[derive(Clone)]
pub struct Pipelines {
    /// The compressor's canonical text.
    compressor: String,
    /// The step that comes next.
    step: u64,
    /// By bucket the parameters' ids, and bytes.
    buckets: Vec<PipelineState>,
}

#[pymethods]
impl Pipelines {
    #[new]
    fn new(compressor: String, step: u64, buckets: Vec<PipelineState>) -> Self {
        Self { compressor, step, buckets }
    }
}

impl Core {
    /// Whether saved pipelines of what the user named can be put back.
    fn check_states(&self, session: &Session, states: &[PipelineState]) -> Result<(), Failure> {
        let Some(named) = session.named else { return Ok(()) };
        for (ids, state) in states {
            let params: Option<Vec<Param>> = ids.iter().map(|id| self.model.get(*id as usize).copied()).collect();
            let foreign = || Failure::Run("failed to load a pipeline: it has parameters of another model".into());
            session.store.check_state(&named.spec, &params.ok_or_else(foreign)?, state)?;
        }
        Ok(())
    }
}

#[pymethods]
impl Core {
    /// Copies what a step changes here; one copy is kept.
    fn save(&self, py: Python<'_>) -> PyResult<()> {
        guard(py, || {
            self.lock().store.save();
            Ok(())
        })
    }

    /// Puts the copy back, bit for bit.
    fn restore(&self, py: Python<'_>) -> PyResult<()> {
        guard(py, || Ok(self.lock().store.restore()?))
    }

    /// The residuals, by parameter id, as float32 in native byte order.
    fn residuals(&self, py: Python<'_>) -> PyResult<BTreeMap<u32, Vec<u8>>> {
        guard(py, || {
            let bytes = |values: Vec<f32>| values.iter().flat_map(|v| v.to_ne_bytes()).collect();
            Ok(self.lock().store.export()?.into_iter().map(|(id, values)| (id, bytes(values))).collect())
        })
    }

    /// Replaces the residuals, float32 by parameter id, and the pipelines. Answers whether these go on: they do under the same
    /// compressor. Changes nothing when any of it does not fit.
    #[pyo3(signature = (state, pipelines=None))]
    fn set_residuals(
        &self,
        py: Python<'_>,
        state: BTreeMap<u32, Span>,
        pipelines: Option<Pipelines>,
    ) -> PyResult<bool> {
        guard(py, || {
            let take = |(id, values): (u32, Span)| Ok((id, values.read::<f32>("a saved parameter")?.to_vec()));
            let state = state.into_iter().map(take).collect::<Result<BTreeMap<_, _>, Failure>>()?;
            let session = &mut *self.lock();
            let same = |spec: &str| session.named.is_some_and(|named| named.spec.to_string() == spec);
            let pipelines = pipelines.filter(|saved| same(&saved.compressor));
            if let Some(Pipelines { buckets, .. }) = &pipelines {
                self.check_states(session, buckets)?;
            }
            session.store.import(state, &self.model)?;
            let goes_on = pipelines.is_some();
            if let Some(Pipelines { step, buckets, .. }) = pipelines {
                let now = session.next_step();
                session.named.iter_mut().for_each(|named| named.offset = step.wrapping_sub(now));
                session.store.await_pipelines(buckets);
            }
            Ok(goes_on)
        })
    }

    /// The state of the pipelines for a checkpoint; none when what the user named is not in force.
    fn pipelines(&self, py: Python<'_>) -> PyResult<Option<Pipelines>> {
        guard(py, || {
            let session = self.lock();
            let (step, version) = (session.next_step(), session.control.look().in_force().version.0);
            let Some(named) = session.named.filter(|_| version == 0) else { return Ok(None) };
            let buckets = session.store.pipelines()?;
            Ok(Some(Pipelines { compressor: named.spec.to_string(), step: step.wrapping_add(named.offset), buckets }))
        })
    }
}
