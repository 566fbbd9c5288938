//! All buckets of a model. Residuals belong to parameters.

use crate::auto::AutoSelection;
use crate::bucket::{Bucket, Param};
use crate::error::EngineError;
use flexcomm_compression::Memory;
use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// A bucket that an exchange in flight may hold.
pub type Shared = Arc<Mutex<Bucket>>;

/// A bucket's parameters, what its residual held back, and whether the ranks had agreed that it may.
type SavedBucket = (Vec<Param>, Memory, bool);

/// A copy of everything that a step changes, for trials.
#[derive(Debug, Default)]
pub struct Saved {
    /// The buckets of then: none before the first backward pass with the hook.
    buckets: Vec<SavedBucket>,
    stash: Held,
    auto: Option<AutoSelection>,
}

impl Saved {
    /// What was held back of every parameter, wherever it lay.
    fn by_parameter(&self) -> Held {
        let mut out = self.stash.clone();
        for (params, memory, _) in self.buckets.iter().filter(|(_, _, holds_back)| *holds_back) {
            split(&mut out, params, memory.values());
        }
        out
    }
}

/// Values that are held back, by parameter.
type Held = BTreeMap<u32, Vec<f32>>;

/// The buckets in their present layout.
#[derive(Debug, Default)]
pub struct Store {
    buckets: Vec<Shared>,
    /// What was held back of parameters that are in no bucket now.
    stash: Held,
    /// Saved pipelines that wait for their buckets, by the bucket's parameters.
    states: Vec<PipeState>,
}

/// A saved pipeline: its bucket's parameters in order, and what [`Piped::state`] gave.
pub type PipeState = (Vec<u32>, Vec<u8>);

/// The bucket, also after a panic elsewhere: an exchange that ended in one is not settled.
pub fn lock(bucket: &Shared) -> MutexGuard<'_, Bucket> {
    bucket.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Store {
    /// The bucket at `index` now holds these parameters. Buckets from `index` on whose layout differs are
    /// dissolved; what they held back waits for its parameters.
    pub fn layout(&mut self, index: usize, params: Vec<Param>) -> Result<(), EngineError> {
        if self.buckets.get(index).is_some_and(|b| lock(b).params() == params) {
            return Ok(());
        }
        if index > self.buckets.len() {
            let what = "buckets come in order, one is missing before it";
            return Err(EngineError::Order { bucket: index as u32, what });
        }
        // All of them first: what cannot be fetched must not be lost by halves.
        self.come_home(index)?;
        for bucket in self.buckets.drain(index..) {
            put(&mut self.stash, &lock(&bucket));
        }
        let residual = self.gather(&params)?;
        self.buckets.push(Arc::new(Mutex::new(Bucket::new(index as u32, params, residual)?)));
        Ok(())
    }

    /// What buckets from `index` on hold back lies on the host afterwards.
    fn come_home(&self, index: usize) -> Result<(), EngineError> {
        self.buckets[index..].iter().try_for_each(|bucket| lock(bucket).come_home())
    }

    fn gather(&mut self, params: &[Param]) -> Result<Option<Vec<f32>>, EngineError> {
        if !params.iter().any(|p| self.stash.contains_key(&p.id)) {
            return Ok(None);
        }
        let mut residual = Vec::with_capacity(params.iter().map(|p| p.len).sum());
        for param in params {
            match self.stash.remove(&param.id) {
                Some(values) if values.len() == param.len => residual.extend(values),
                Some(values) => {
                    let text = format!("parameter {} has {} values, saved are {}", param.id, param.len, values.len());
                    return Err(EngineError::State(text));
                }
                None => residual.resize(residual.len() + param.len, 0.0),
            }
        }
        Ok(Some(residual))
    }

    /// The bucket at `index`.
    pub fn bucket(&self, index: usize) -> Result<Shared, EngineError> {
        let missing = EngineError::Order { bucket: index as u32, what: "its layout is not known" };
        self.buckets.get(index).cloned().ok_or(missing)
    }

    /// All buckets.
    pub fn buckets(&self) -> &[Shared] {
        &self.buckets
    }

    /// What is held back, by parameter; parameters of which nothing is are left out.
    pub fn export(&self) -> Result<Held, EngineError> {
        self.come_home(0)?;
        let mut out = self.stash.clone();
        self.buckets.iter().for_each(|bucket| put(&mut out, &lock(bucket)));
        Ok(out)
    }

    /// Replaces what is held back. `lengths` are all parameters of the model.
    pub fn import(&mut self, state: Held, lengths: &[Param]) -> Result<(), EngineError> {
        for (id, values) in &state {
            let known = lengths.iter().find(|p| p.id == *id);
            let Some(param) = known.filter(|p| p.len == values.len()) else {
                let text = format!("parameter {id} with {} values is not of this model", values.len());
                return Err(EngineError::State(text));
            };
            if let Some(at) = values.iter().position(|v| !v.is_finite()) {
                return Err(EngineError::State(format!("value {at} of parameter {} is not finite", param.id)));
            }
        }
        self.buckets.iter().for_each(|bucket| lock(bucket).drop_pipe());
        self.replace(state)?;
        self.states.clear();
        Ok(())
    }

    /// Every parameter now holds back this; one that is not named, nothing.
    fn replace(&mut self, mut held: Held) -> Result<(), EngineError> {
        for bucket in &self.buckets {
            let mut bucket = lock(bucket);
            let holds_back = bucket.params().iter().any(|p| held.contains_key(&p.id));
            let of = |p: &Param| held.remove(&p.id).unwrap_or_else(|| vec![0.0; p.len]);
            let residual: Vec<f32> = bucket.params().iter().flat_map(of).collect();
            bucket.set_residual(Memory::from_values(residual), holds_back)?;
        }
        self.stash = held;
        Ok(())
    }

    /// How many parameters the buckets before this one have.
    pub fn params_before(&self, index: usize) -> usize {
        self.buckets.iter().take(index).map(|bucket| lock(bucket).params().len()).sum()
    }

    /// The pipelines as they are now; of buckets that have none yet, what waits for them.
    pub fn pipes(&self) -> Result<Vec<PipeState>, EngineError> {
        self.come_home(0)?;
        let ids = |bucket: &Bucket| bucket.params().iter().map(|p| p.id).collect::<Vec<_>>();
        let mut out = self.states.clone();
        for bucket in &self.buckets {
            let bucket = lock(bucket);
            let ids = ids(&bucket);
            if let Some(pipe) = bucket.own_pipe() {
                out.push((ids, pipe.state()));
            }
        }
        Ok(out)
    }

    /// Pipelines to go on with, after [`Self::import`].
    pub fn await_pipes(&mut self, states: Vec<PipeState>) {
        self.states = states;
    }

    /// The saved pipeline of a bucket with these parameters.
    pub fn take_state(&mut self, params: &[Param]) -> Option<Vec<u8>> {
        let same = |(ids, _): &PipeState| ids.iter().eq(params.iter().map(|p| &p.id));
        let place = self.states.iter().position(same)?;
        Some(self.states.swap_remove(place).1)
    }

    /// Copies what a step changes into buffers that are kept.
    pub fn save_into(&self, auto: &AutoSelection, saved: &mut Saved) -> Result<(), EngineError> {
        self.come_home(0)?;
        saved.buckets.resize_with(self.buckets.len(), Default::default);
        for (bucket, (params, memory, holds_back)) in self.buckets.iter().zip(&mut saved.buckets) {
            let bucket = lock(bucket);
            bucket.params().clone_into(params);
            bucket.save_into(memory);
            *holds_back = bucket.holds_back();
        }
        saved.stash.clone_from(&self.stash);
        saved.auto = Some(auto.clone());
        Ok(())
    }

    /// Puts it back, bit for bit, and may do so again. Where the buckets are others than then, or there were none, each
    /// parameter has what was held back of it then: nothing, if nothing was.
    pub fn restore(&mut self, auto: &mut AutoSelection, saved: &Saved) -> Result<(), EngineError> {
        let Some(auto_then) = &saved.auto else {
            return Err(EngineError::State("nothing was saved".into()));
        };
        let known = self.buckets.iter().zip(&saved.buckets).all(|(b, (params, ..))| lock(b).params() == params);
        if known && self.buckets.len() == saved.buckets.len() {
            for (bucket, (_, memory, holds_back)) in self.buckets.iter().zip(&saved.buckets) {
                lock(bucket).set_residual(memory.clone(), *holds_back)?;
            }
            self.stash.clone_from(&saved.stash);
        } else {
            self.replace(saved.by_parameter())?;
        }
        auto.clone_from(auto_then);
        Ok(())
    }
}

fn put(stash: &mut Held, bucket: &Bucket) {
    if bucket.remembers() {
        split(stash, bucket.params(), &bucket.held_back());
    }
}

/// A bucket's values, parameter by parameter.
fn split(out: &mut Held, params: &[Param], values: &[f32]) {
    let mut rest = values;
    for param in params {
        let (own, after) = rest.split_at(param.len);
        out.insert(param.id, own.to_vec());
        rest = after;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn params(list: &[(u32, usize)]) -> Vec<Param> {
        list.iter().map(|(id, len)| Param { id: *id, len: *len, cols: 1 }).collect()
    }

    fn hold(store: &Store, bucket: usize, values: &[f32]) {
        lock(&store.bucket(bucket).unwrap()).set_residual(Memory::from_values(values.to_vec()), true).unwrap();
    }

    #[test]
    fn residuals_move_with_their_parameters() {
        let mut store = Store::default();
        store.layout(0, params(&[(0, 2), (1, 1), (2, 3)])).unwrap();
        hold(&store, 0, &[1.0, 2.0, 3.0, 4.0, 5.0, 6.0]);
        let before = store.export().unwrap();
        // Rebuilt: two buckets, reverse order.
        store.layout(0, params(&[(2, 3)])).unwrap();
        store.layout(1, params(&[(1, 1), (0, 2)])).unwrap();
        assert_eq!(lock(&store.bucket(0).unwrap()).residual(), [4.0, 5.0, 6.0]);
        assert_eq!(lock(&store.bucket(1).unwrap()).residual(), [3.0, 1.0, 2.0]);
        assert_eq!(store.export().unwrap(), before);
        assert!(store.layout(3, params(&[(9, 1)])).is_err());
        assert!(store.bucket(2).is_err());
    }

    #[test]
    fn states_are_checked_before_anything_changes() {
        let mut store = Store::default();
        let model = params(&[(0, 2), (1, 1)]);
        store.layout(0, model.clone()).unwrap();
        hold(&store, 0, &[1.0, 2.0, 3.0]);
        let good = store.export().unwrap();
        for bad in [(0, vec![1.0]), (7, vec![1.0]), (1, vec![f32::NAN])] {
            assert!(store.import([bad].into(), &model).is_err());
            assert_eq!(store.export().unwrap(), good);
        }
        store.import([(1, vec![9.0])].into(), &model).unwrap();
        assert_eq!(lock(&store.bucket(0).unwrap()).residual(), [0.0, 0.0, 9.0]);
        // An entry of zeros is one too: another rank's has other values.
        for (state, expected) in [(Held::new(), false), ([(1, vec![0.0])].into(), true)] {
            store.import(state, &model).unwrap();
            assert_eq!(lock(&store.bucket(0).unwrap()).holds_back(), expected);
        }
        // Before any bucket is known it waits.
        let mut early = Store::default();
        early.import(good.clone(), &model).unwrap();
        early.layout(0, params(&[(1, 1), (0, 2)])).unwrap();
        assert_eq!(early.export().unwrap(), good);
    }

    #[test]
    fn trials_leave_no_trace() {
        let mut store = Store::default();
        store.layout(0, params(&[(0, 2)])).unwrap();
        hold(&store, 0, &[0.1, -0.0]);
        store.layout(1, params(&[(1, 2)])).unwrap();
        hold(&store, 1, &[0.0, 0.0]);
        store.layout(2, params(&[(2, 1)])).unwrap();
        let (mut auto, mut saved) = (AutoSelection::new(2), Saved::default());
        store.save_into(&auto, &mut saved).unwrap();
        let kept = auto.clone();
        [&[7.0, 8.0][..], &[7.0, 8.0], &[7.0]].iter().enumerate().for_each(|(bucket, held)| hold(&store, bucket, held));
        auto.observe(1, 2.0, 3.0);
        store.restore(&mut auto, &saved).unwrap();
        let bits: Vec<u32> = lock(&store.bucket(0).unwrap()).residual().iter().map(|v| v.to_bits()).collect();
        assert_eq!((bits, auto), (vec![0.1f32.to_bits(), (-0.0f32).to_bits()], kept));
        // Whether zeros are held back or nothing: other ranks' values are none, and all run the same collectives.
        assert_eq!([0, 1, 2].map(|bucket| lock(&store.bucket(bucket).unwrap()).holds_back()), [true, true, false]);
    }
    fn bits(store: &Store) -> Vec<Vec<u32>> {
        store.buckets().iter().map(|b| lock(b).residual().iter().map(|v| v.to_bits()).collect()).collect()
    }

    #[test]
    fn buckets_that_did_not_exist_then_hold_nothing_back_after_a_trial() {
        let (mut store, mut saved) = (Store::default(), Saved::default());
        let mut auto = AutoSelection::new(2);
        assert!(store.restore(&mut auto, &saved).is_err());
        store.save_into(&auto, &mut saved).unwrap();
        store.layout(0, params(&[(0, 2)])).unwrap();
        store.layout(1, params(&[(1, 1)])).unwrap();
        // Once for every candidate.
        for _ in 0..2 {
            hold(&store, 0, &[7.0, 8.0]);
            hold(&store, 1, &[f32::MIN_POSITIVE]);
            store.restore(&mut auto, &saved).unwrap();
            assert_eq!(bits(&store), [vec![0, 0], vec![0]]);
            assert!(store.export().unwrap().is_empty() && !lock(&store.bucket(0).unwrap()).holds_back());
        }
    }

    #[test]
    fn what_waited_for_its_bucket_then_is_there_after_a_trial() {
        let (mut store, mut saved) = (Store::default(), Saved::default());
        let mut auto = AutoSelection::new(2);
        let model = params(&[(0, 2), (1, 1), (2, 1)]);
        let loaded: Held = [(0, vec![1.0, -0.0]), (2, vec![5.0])].into();
        store.import(loaded.clone(), &model).unwrap();
        store.save_into(&auto, &mut saved).unwrap();
        store.layout(0, params(&[(1, 1), (0, 2)])).unwrap();
        hold(&store, 0, &[9.0, 9.0, 9.0]);
        for _ in 0..2 {
            store.restore(&mut auto, &saved).unwrap();
            assert_eq!(bits(&store), [vec![0, 1.0f32.to_bits(), (-0.0f32).to_bits()]]);
            // The rest waits on.
            assert_eq!(store.export().unwrap()[&2], [5.0]);
        }
    }

    #[test]
    fn buckets_laid_out_anew_since_then_are_restored_by_parameter() {
        let (mut store, mut saved) = (Store::default(), Saved::default());
        let mut auto = AutoSelection::new(2);
        store.layout(0, params(&[(0, 2), (1, 1)])).unwrap();
        hold(&store, 0, &[1.0, 2.0, 3.0]);
        store.save_into(&auto, &mut saved).unwrap();
        let then = store.export().unwrap();
        // As many buckets as then, of as many values.
        store.layout(0, params(&[(1, 1), (0, 2)])).unwrap();
        hold(&store, 0, &[0.0, 0.0, 9.0]);
        store.restore(&mut auto, &saved).unwrap();
        assert_eq!(lock(&store.bucket(0).unwrap()).residual(), [3.0, 1.0, 2.0]);
        assert_eq!(store.export().unwrap(), then);
    }
}
