//! All buckets of a model. Residuals belong to parameters.

use crate::bucket::{Bucket, Param};
use crate::error::ExchangeError;
use flexcomm_compression::pipeline::Member;
use flexcomm_domain::spec::CompressorSpec;
use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// A bucket that an exchange in flight may hold.
pub type Shared = Arc<Mutex<Bucket>>;

/// Residuals by parameter.
type Residuals = BTreeMap<u32, Vec<f32>>;

/// The buckets in their present layout.
#[derive(Debug)]
pub struct Store {
    member: Member,
    buckets: Vec<Shared>,
    /// Residuals of parameters that are in no bucket now.
    waiting: Residuals,
    /// Saved pipelines that wait for their buckets, by the bucket's parameters.
    states: Vec<PipelineState>,
    /// Of before a trial.
    saved: Option<Saved>,
}

/// What a trial may change besides the buckets, which keep training's pipelines by themselves.
#[derive(Debug)]
struct Saved {
    waiting: Residuals,
    states: Vec<PipelineState>,
}

/// A saved pipeline: its bucket's parameters in order, and what [`Bucket::state`] gave.
pub type PipelineState = (Vec<u32>, Vec<u8>);

/// The bucket, also after a panic elsewhere: an exchange that ended in one is not finished.
pub fn lock(bucket: &Shared) -> MutexGuard<'_, Bucket> {
    bucket.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Store {
    /// Of this rank, whose first tensor is `member`'s.
    pub fn new(member: Member) -> Self {
        Self { member, buckets: Vec::new(), waiting: Residuals::new(), states: Vec::new(), saved: None }
    }

    /// The bucket at `index` now holds these parameters. Buckets from `index` on whose layout differs are
    /// dissolved; their residuals wait for their parameters.
    pub fn layout(&mut self, index: usize, params: Vec<Param>) -> Result<(), ExchangeError> {
        if self.buckets.get(index).is_some_and(|b| lock(b).params() == params) {
            return Ok(());
        }
        if index > self.buckets.len() {
            let what = "buckets come in order, one is missing before it";
            return Err(ExchangeError::Order { bucket: index as u32, what });
        }
        // All of them first: what cannot be fetched must not be lost by halves.
        self.copy_to_host(index)?;
        for bucket in self.buckets.drain(index..) {
            let bucket = lock(&bucket);
            put(&mut self.waiting, bucket.params(), bucket.own_residual());
            if let Some(saved) = self.saved.as_mut().filter(|_| bucket.tries()) {
                put(&mut saved.waiting, bucket.params(), bucket.own_residual());
            }
        }
        let residual = self.gather(&params)?;
        let before = self.buckets.iter().map(|bucket| lock(bucket).params().len()).sum::<usize>();
        let member = Member { tensor: self.member.tensor + before as u32, ..self.member };
        let bucket = Bucket::new(index as u32, params, member, residual.as_deref())?;
        self.buckets.push(Arc::new(Mutex::new(bucket)));
        Ok(())
    }

    /// Residuals of buckets from `index` on lie on the host afterwards.
    fn copy_to_host(&self, index: usize) -> Result<(), ExchangeError> {
        self.buckets[index..].iter().try_for_each(|bucket| lock(bucket).copy_to_host())
    }

    fn gather(&mut self, params: &[Param]) -> Result<Option<Vec<f32>>, ExchangeError> {
        if !params.iter().any(|p| self.waiting.contains_key(&p.id)) {
            return Ok(None);
        }
        let mut residual = Vec::with_capacity(params.iter().map(|p| p.len).sum());
        for param in params {
            match self.waiting.remove(&param.id) {
                Some(values) if values.len() == param.len => residual.extend(values),
                Some(values) => {
                    let text = format!("parameter {} has {} values, saved are {}", param.id, param.len, values.len());
                    return Err(ExchangeError::State(text));
                }
                None => residual.resize(residual.len() + param.len, 0.0),
            }
        }
        Ok(Some(residual))
    }

    /// The bucket at `index`.
    pub fn bucket(&self, index: usize) -> Result<Shared, ExchangeError> {
        let missing = ExchangeError::Order { bucket: index as u32, what: "its layout is not known" };
        self.buckets.get(index).cloned().ok_or(missing)
    }

    /// All buckets.
    pub fn buckets(&self) -> &[Shared] {
        &self.buckets
    }

    /// Residuals by parameter, of the candidate where a trial is under way, as the model's parameters are; parameters without one
    /// are left out.
    pub fn export(&self) -> Result<Residuals, ExchangeError> {
        self.copy_to_host(0)?;
        let mut out = self.waiting.clone();
        for bucket in &self.buckets {
            let bucket = lock(bucket);
            put(&mut out, bucket.params(), bucket.has_residual().then(|| bucket.residual()));
        }
        Ok(out)
    }

    /// Replaces all residuals; a parameter that is not named has none. `lengths` are all parameters of the model.
    pub fn import(&mut self, mut residuals: Residuals, lengths: &[Param]) -> Result<(), ExchangeError> {
        for (id, values) in &residuals {
            let known = lengths.iter().find(|p| p.id == *id);
            let Some(param) = known.filter(|p| p.len == values.len()) else {
                let text = format!("parameter {id} with {} values is not of this model", values.len());
                return Err(ExchangeError::State(text));
            };
            if let Some(at) = values.iter().position(|v| !v.is_finite()) {
                return Err(ExchangeError::State(format!("value {at} of parameter {} is not finite", param.id)));
            }
        }
        for bucket in &self.buckets {
            let mut bucket = lock(bucket);
            // An entry of zeros is one, too: another rank's has other values.
            let named = bucket.params().iter().any(|p| residuals.contains_key(&p.id));
            let of = |p: &Param| residuals.remove(&p.id).unwrap_or_else(|| vec![0.0; p.len]);
            let residual: Vec<f32> = bucket.params().iter().flat_map(of).collect();
            bucket.set_residual(named.then_some(&residual[..]))?;
        }
        self.waiting = residuals;
        self.states.clear();
        Ok(())
    }

    /// The pipelines as they are now; of buckets that have none yet, what waits for them.
    pub fn pipelines(&self) -> Result<Vec<PipelineState>, ExchangeError> {
        self.copy_to_host(0)?;
        let mut out = self.states.clone();
        for bucket in &self.buckets {
            let bucket = lock(bucket);
            if let Some(state) = bucket.state() {
                out.push((bucket.params().iter().map(|p| p.id).collect(), state));
            }
        }
        Ok(out)
    }

    /// Pipelines to go on with, after [`Self::import`].
    pub fn await_pipelines(&mut self, states: Vec<PipelineState>) {
        self.states = states;
    }

    /// The saved pipeline of a bucket with these parameters.
    pub fn take_state(&mut self, params: &[Param]) -> Option<Vec<u8>> {
        let same = |(ids, _): &PipelineState| ids.iter().eq(params.iter().map(|p| &p.id));
        let place = self.states.iter().position(same)?;
        Some(self.states.swap_remove(place).1)
    }

    /// Whether a saved pipeline of these parameters fits `spec`.
    pub fn check_state(&self, spec: &CompressorSpec, params: &[Param], state: &[u8]) -> Result<(), ExchangeError> {
        let mut pipeline =
            flexcomm_compression::pipeline::Pipeline::new(spec, crate::bucket::layers(params)?, self.member);
        Ok(pipeline.restore(state)?)
    }

    /// A trial begins: what it changes comes back by [`Self::restore`]. The buckets keep training's pipelines by themselves, see
    /// [`Bucket::in_trial`].
    pub fn save(&mut self) {
        self.saved = Some(Saved { waiting: self.waiting.clone(), states: self.states.clone() });
    }

    /// A trial was left, and what its last candidate did stays.
    pub fn leave_trial(&self) {
        self.buckets.iter().for_each(|bucket| lock(bucket).leave_trial());
    }

    /// A candidate is over: everything is as at [`Self::save`], bit for bit. Once for every candidate.
    pub fn restore(&mut self) -> Result<(), ExchangeError> {
        let Some(saved) = &self.saved else {
            return Err(ExchangeError::NoSnapshot);
        };
        self.states.clone_from(&saved.states);
        self.waiting.clone_from(&saved.waiting);
        for bucket in &self.buckets {
            let mut bucket = lock(bucket);
            bucket.end_candidate();
            bucket.params().iter().for_each(|param| drop(self.waiting.remove(&param.id)));
        }
        Ok(())
    }
}

fn put(waiting: &mut Residuals, params: &[Param], residual: Option<Vec<f32>>) {
    if let Some(residual) = residual {
        split(waiting, params, &residual);
    }
}

/// A bucket's values, parameter by parameter.
fn split(out: &mut Residuals, params: &[Param], values: &[f32]) {
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
    use crate::bucket::Host;
    use crate::head::Arrived;
    use flexcomm_compression::pipeline::Step;

    fn params(list: &[(u32, usize)]) -> Vec<Param> {
        list.iter().map(|(id, len)| Param { id: *id, len: *len, cols: 1 }).collect()
    }

    fn store() -> Store {
        Store::new(Member::alone(1))
    }

    fn hold(store: &Store, bucket: usize, values: &[f32]) {
        lock(&store.bucket(bucket).unwrap()).set_residual(Some(values)).unwrap();
    }

    fn residual(store: &Store, bucket: usize) -> Vec<f32> {
        lock(&store.bucket(bucket).unwrap()).residual()
    }

    #[test]
    fn residuals_move_with_their_parameters() {
        let mut store = store();
        store.layout(0, params(&[(0, 2), (1, 1), (2, 3)])).unwrap();
        hold(&store, 0, &[1.0, 2.0, 3.0, 4.0, 5.0, 6.0]);
        let before = store.export().unwrap();
        // Rebuilt: two buckets, reverse order.
        store.layout(0, params(&[(2, 3)])).unwrap();
        store.layout(1, params(&[(1, 1), (0, 2)])).unwrap();
        assert_eq!(residual(&store, 0), [4.0, 5.0, 6.0]);
        assert_eq!(residual(&store, 1), [3.0, 1.0, 2.0]);
        assert_eq!(store.export().unwrap(), before);
        assert!(store.layout(3, params(&[(9, 1)])).is_err());
        assert!(store.bucket(2).is_err());
    }

    #[test]
    fn states_are_checked_before_anything_changes() {
        let mut own = store();
        let model = params(&[(0, 2), (1, 1)]);
        own.layout(0, model.clone()).unwrap();
        hold(&own, 0, &[1.0, 2.0, 3.0]);
        let good = own.export().unwrap();
        for bad in [(0, vec![1.0]), (7, vec![1.0]), (1, vec![f32::NAN])] {
            assert!(own.import([bad].into(), &model).is_err());
            assert_eq!(own.export().unwrap(), good);
        }
        own.import([(1, vec![9.0])].into(), &model).unwrap();
        assert_eq!(residual(&own, 0), [0.0, 0.0, 9.0]);
        for (state, expected) in [(Residuals::new(), false), ([(1, vec![0.0])].into(), true)] {
            own.import(state, &model).unwrap();
            assert_eq!(lock(&own.bucket(0).unwrap()).has_residual(), expected);
        }
        // Before any bucket is known it waits.
        let mut early = store();
        early.import(good.clone(), &model).unwrap();
        early.layout(0, params(&[(1, 1), (0, 2)])).unwrap();
        assert_eq!(early.export().unwrap(), good);
    }

    /// Steps of a rank alone in every bucket.
    fn train(store: &Store, (spec, trial): (&str, bool), steps: u64) {
        for (index, bucket) in (0..steps).flat_map(|index| store.buckets().iter().map(move |bucket| (index, bucket))) {
            let mut bucket = lock(bucket);
            bucket.in_trial(trial).unwrap();
            bucket.prepare(&spec.parse().unwrap(), None).unwrap();
            let gradient: Vec<f32> = (0..bucket.values()).map(|i| (i as f32 + index as f32).sin()).collect();
            let Ok(round) = bucket.begin(&Host, &gradient, Step { index, learning_rate: 0.1 }, None);
            let mut part = vec![0; round.bytes];
            bucket.write(&mut part);
            let arrived = Arrived { refused: false, parts: vec![&part] };
            bucket.finish(&Host, &arrived, &mut gradient.clone()).unwrap();
        }
    }

    /// Bits of all residuals by parameter.
    fn bits(store: &Store) -> BTreeMap<u32, Vec<u32>> {
        let bits = |values: Vec<f32>| values.iter().map(|v| v.to_bits()).collect();
        store.export().unwrap().into_iter().map(|(id, values)| (id, bits(values))).collect()
    }

    const TOPK: &str = "topk(k=0.3)+ef(vanilla)";

    #[test]
    fn trials_leave_no_trace() {
        let (mut own, mut twin) = (store(), store());
        for store in [&mut own, &mut twin] {
            store.layout(0, params(&[(0, 20), (1, 7)])).unwrap();
            store.layout(1, params(&[(2, 5)])).unwrap();
            train(store, (TOPK, false), 3);
        }
        let before = bits(&own);
        own.save();
        for candidate in ["none", "topk(k=0.1)+ef(vanilla)", "topk(k=0.1)+ef(dgc,mu=0.9)", "signsgd", TOPK] {
            train(&own, (candidate, true), 2);
            // A checkpoint that is taken or loaded meanwhile is the candidate's.
            assert_ne!(bits(&own), before, "{candidate}");
            own.import(Residuals::new(), &params(&[(0, 20), (1, 7), (2, 5), (3, 4)])).unwrap();
            own.restore().unwrap();
            assert_eq!(bits(&own), before, "{candidate}");
        }
        for store in [&own, &twin] {
            train(store, (TOPK, false), 3);
        }
        assert_eq!(bits(&own), bits(&twin));
    }

    #[test]
    fn a_trial_that_is_left_goes_on_with_its_last_candidate() {
        let mut own = store();
        own.layout(0, params(&[(0, 20)])).unwrap();
        train(&own, (TOPK, false), 3);
        own.save();
        train(&own, ("topk(k=0.1)+ef(vanilla)", true), 2);
        let left = residual(&own, 0);
        lock(&own.bucket(0).unwrap()).in_trial(false).unwrap();
        assert_eq!(own.export().unwrap()[&0], left);
    }

    #[test]
    fn buckets_that_did_not_exist_before_a_trial_hold_nothing_back_after_it() {
        let mut own = store();
        assert!(own.restore().is_err());
        own.save();
        own.layout(0, params(&[(0, 2)])).unwrap();
        own.layout(1, params(&[(1, 9)])).unwrap();
        for _ in 0..2 {
            train(&own, (TOPK, true), 2);
            own.restore().unwrap();
            assert!(own.export().unwrap().is_empty() && !lock(&own.bucket(1).unwrap()).has_residual());
        }
    }

    #[test]
    fn what_waited_for_its_bucket_or_was_laid_out_anew_is_there_after_a_trial() {
        let mut own = store();
        let model = params(&[(0, 2), (1, 1), (2, 1)]);
        let loaded: Residuals = [(0, vec![1.0, -0.0]), (2, vec![5.0])].into();
        own.import(loaded, &model).unwrap();
        own.save();
        own.layout(0, params(&[(1, 1), (0, 2)])).unwrap();
        let before = bits(&own);
        assert_eq!(before[&0], [1.0f32.to_bits(), (-0.0f32).to_bits()]);
        train(&own, (TOPK, true), 2);
        own.restore().unwrap();
        assert_eq!(bits(&own), before);
        // Laid out anew in the midst of a candidate.
        train(&own, (TOPK, true), 2);
        own.layout(0, params(&[(0, 2), (1, 1)])).unwrap();
        train(&own, (TOPK, true), 2);
        own.restore().unwrap();
        assert_eq!(bits(&own), before);
        assert_eq!(own.export().unwrap()[&2], [5.0]);
    }
}
