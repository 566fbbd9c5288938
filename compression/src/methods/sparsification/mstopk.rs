//! MSTopk (Shi et al. 2021, "Towards scalable distributed training of deep learning on public cloud clusters"): a threshold
//! is searched between mean |x| and max |x| by 25 rounds of bisection; what reaches the lowest threshold that at most k
//! reach is taken, and the rest up to exactly k is a run of neighbours, at a random place, among what reaches the
//! highest threshold that more than k reach. `select/mstopk.rs` explains why one exact cut answers all rounds.

use super::sparse::{Choose, Sparse};
use crate::Selection;
use crate::codec::{Context, EncodeError, Stats, not_finite};
use crate::entry::Entry;
use crate::kernels::{Candidates, NOT_FINITE, key, scan};
use crate::select::cut::{ANY_KEY, Cutter};
use crate::select::mstopk::{bisect, mean_magnitude, pick};
use crate::select::topk::floor_of;
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
    found: Candidates,
    sample: Vec<u32>,
    cutter: Cutter,
}

impl MsTopK {
    fn new(k: usize) -> Self {
        Self { k, found: Candidates::default(), sample: Vec::new(), cutter: Cutter::default() }
    }
}

impl Choose for MsTopK {
    const FIXED: bool = true;

    fn most(&self) -> usize {
        self.k
    }

    fn choose(&mut self, x: &[f32], context: &Context, selection: &mut Selection) -> Result<Stats, EncodeError> {
        let Self { k, found, sample, cutter } = self;
        let (k, n) = (*k, x.len());
        let floor = if k == n { None } else { floor_of(|i| x[i], (n, k + 1), sample, found) };
        let scanned = scan(context.kernel, x, floor, found);
        if scanned.max_key >= NOT_FINITE {
            return Err(not_finite(x));
        }
        let stats = Stats { energy: scanned.energy, max: f32::from_bits(scanned.max_key) };
        if k == n {
            selection.indices.extend(0..k as u32);
            selection.values.extend_from_slice(x);
            return Ok(stats);
        }
        let [a, b, ..] = context.own(0).block(0);
        let seed = u64::from(a) << 32 | u64::from(b);
        let mean = mean_magnitude(x);
        let search = |beyond: u32| bisect(mean, stats.max, |threshold| key(threshold) <= beyond);
        // The few candidates serve when they hold all that reaches the lower threshold.
        if let Some((indices, bits)) = found.get().filter(|(indices, _)| floor.is_some() && indices.len() > k) {
            let values = bits.iter().map(|b| f32::from_bits(*b));
            let thresholds = search(cutter.cut(values.clone().map(key), ANY_KEY, (bits.len(), k + 1)).key);
            if floor.is_some_and(|floor| key(thresholds.lower) >= floor) {
                pick(selection, indices.iter().copied().zip(values), k, (thresholds, seed));
                return Ok(stats);
            }
        }
        let thresholds = search(cutter.cut(x.iter().map(|x| key(*x)), ANY_KEY, (n, k + 1)).key);
        pick(selection, (0..).zip(x.iter().copied()), k, (thresholds, seed));
        Ok(stats)
    }
}
