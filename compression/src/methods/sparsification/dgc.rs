//! The selection of deep gradient compression (Lin et al. 2018) and of SGC (Sun et al. 2019). A threshold is estimated as
//! the top share of a random sample; when far more values than asked for reach it, a top-k among these settles it
//! (hierarchical selection). Momentum correction and masking are the memory `ef(dgc)`, SGC's compensation is `ef(sgc)`.

use super::sparse::{Choose, Sparse};
use crate::Selection;
use crate::codec::{Context, EncodeError, Stats, not_finite};
use crate::entry::Entry;
use crate::kernels::{Candidates, NOT_FINITE, key, scan};
use crate::select::cut::{ANY_KEY, Cutter};
use crate::select::topk::push_cut;
use flexcomm_domain::spec::{Values, compressors};

pub(super) const ENTRY: Entry = Entry {
    info: &compressors::DGC,
    code: 69,
    examples: &["k=0.01", "k=0.2,sample=0.1,most=1", "k=9,most=4"],
    build: |values, shape| Box::new(Sparse::new(shape.values(), Sampled::new(values, shape.values()))),
};

pub(super) const SGC: Entry = Entry { info: &compressors::SGC, code: 70, examples: &["k=0.05"], ..ENTRY };

/// Fewer are no estimate: shorter tensors are looked at whole.
const LEAST_SAMPLES: usize = 1024;

#[derive(Debug)]
struct Sampled {
    k: usize,
    samples: usize,
    most: usize,
    sample: Vec<u32>,
    found: Candidates,
    cutter: Cutter,
}

impl Sampled {
    fn new(values: &Values, n: usize) -> Self {
        let k = values.kept(0, n);
        let samples = ((n as f64 * values.number(1)).ceil() as usize).max(LEAST_SAMPLES).min(n);
        let most = ((k as f64 * values.number(2)) as usize).clamp(k, n);
        let (sample, found, cutter) = Default::default();
        Self { k, samples, most, sample, found, cutter }
    }

    /// The least key of the sample's top share.
    fn threshold(&mut self, x: &[f32], context: &Context) -> u32 {
        let (n, stream) = (x.len(), context.own(0));
        self.sample.clear();
        match self.samples < n {
            true => self.sample.extend((0..self.samples as u32).map(|i| key(x[stream.place(i, n)]))),
            false => self.sample.extend(x.iter().map(|x| key(*x))),
        }
        let share = self.samples as f64 * (self.k as f64 / n as f64);
        let rank = (share.round() as usize).clamp(1, self.samples) - 1;
        *self.sample.select_nth_unstable_by(rank, |a, b| b.cmp(a)).1
    }
}

impl Choose for Sampled {
    const FIXED: bool = false;

    fn most(&self) -> usize {
        self.most
    }

    fn choose(&mut self, x: &[f32], context: &Context, selection: &mut Selection) -> Result<Stats, EncodeError> {
        if x.is_empty() {
            return Ok(Stats::default());
        }
        let threshold = self.threshold(x, context);
        self.found.reset(self.most);
        let scanned = scan(context.kernel, x, Some(threshold), &mut self.found);
        if scanned.max_key >= NOT_FINITE {
            return Err(not_finite(x));
        }
        match self.found.get().filter(|(indices, _)| indices.len() <= self.most) {
            Some((indices, bits)) => {
                selection.indices.extend_from_slice(indices);
                selection.values.extend(bits.iter().map(|b| f32::from_bits(*b)));
            }
            // More than k reach the threshold, so the k largest of these are the k largest of all.
            None => {
                let cut = self.cutter.cut(x.iter().map(|x| key(*x)), ANY_KEY, (x.len(), self.k));
                push_cut(selection, (0..).zip(x.iter().copied()), self.k, cut);
            }
        }
        Ok(Stats { energy: scanned.energy, max: f32::from_bits(scanned.max_key) })
    }
}
