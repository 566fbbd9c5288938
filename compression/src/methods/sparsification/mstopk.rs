//! MSTopk (Shi et al. 2021, "Towards scalable distributed training of deep learning on public cloud clusters"): a threshold
//! is searched between mean |x| and max |x| by 25 rounds of bisection; what reaches the lowest threshold that at most k
//! reach is taken, and the rest up to exactly k is a run of neighbours, at a random place, among what reaches the
//! highest threshold that more than k reach. `select/mstopk.rs` explains why one exact cut answers all rounds.

use super::sparse::{Choose, Sparse};
use crate::Selection;
use crate::codec::{CandidateFilter, Context, EncodeError, Stats, not_finite};
use crate::entry::Entry;
use crate::kernels::key;
use crate::select::cut::Cutter;
use crate::select::mstopk::{bisect, mean_magnitude, pick};
use crate::select::topk::cut_found;
use flexcomm_domain::spec::compressors;

pub(super) const ENTRY: Entry = Entry {
    info: &compressors::MSTOPK,
    code: 68,
    examples: &["k=0.01", "k=0.3", "k=7"],
    build: |values, shape| Box::new(Sparse::new(shape.values(), MsTopK::new(values.kept(0, shape.values())))),
};

#[derive(Debug)]
struct MsTopK {
    k: usize,
    filter: CandidateFilter,
    cutter: Cutter,
}

impl MsTopK {
    fn new(k: usize) -> Self {
        Self { k, filter: CandidateFilter::default(), cutter: Cutter::default() }
    }
}

impl Choose for MsTopK {
    const FIXED: bool = true;

    fn most(&self) -> usize {
        self.k
    }

    fn filter(&mut self) -> Option<&mut CandidateFilter> {
        Some(self.filter.want(self.k + 1))
    }

    fn choose(&mut self, x: &[f32], context: &Context, selection: &mut Selection) -> Result<Stats, EncodeError> {
        let Self { k, filter, cutter } = self;
        let (k, n) = (*k, x.len());
        let stats = filter.scan(context.kernel, x, (k + 1, context.known));
        if !stats.is_finite() {
            return Err(not_finite(x));
        }
        if k == n {
            selection.indices.extend(0..k as u32);
            selection.values.extend_from_slice(x);
            return Ok(stats);
        }
        let highest = key(stats.max);
        let found = filter.floor().zip(filter.found(k + 1));
        let cut = match found {
            Some((floor, (_, bits))) => cut_found(context.kernel, cutter, bits, (floor..=highest, k + 1)),
            None => cutter.cut(x.iter().map(|x| key(*x)), 0..=highest, (n, k + 1)),
        };
        let thresholds = bisect(mean_magnitude(x), stats.max, |threshold| key(threshold) <= cut.key);
        let [a, b, ..] = context.own(0).block(0);
        let chosen = (thresholds, u64::from(a) << 32 | u64::from(b));
        // The few candidates serve when they hold all that reaches the lower threshold.
        match found.filter(|(floor, _)| key(thresholds.lower) >= *floor) {
            Some((_, (indices, bits))) => {
                let values = bits.iter().map(|bits| f32::from_bits(*bits));
                pick(selection, indices.iter().copied().zip(values), k, chosen);
            }
            None => pick(selection, (0..).zip(x.iter().copied()), k, chosen),
        }
        if found.is_some() {
            filter.learn(cut.key);
        }
        Ok(stats)
    }
}
