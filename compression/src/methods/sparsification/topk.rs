//! Top-k (Aji and Heafield 2017; Alistarh et al. 2018; GRACE 3.2): the k largest by magnitude, exactly, ties to the
//! lowest index.

use super::sparse::{Choose, Sparse};
use crate::Selection;
use crate::codec::{CandidateFilter, Context, EncodeError, Stats, not_finite};
use crate::entry::Entry;
use crate::kernels::key;
use crate::select::cut::Cutter;
use crate::select::topk::{cut_found, push_cut, push_found};
use flexcomm_domain::spec::compressors;

pub(super) const ENTRY: Entry = Entry {
    info: &compressors::TOPK,
    code: 64,
    examples: &["k=0.01", "k=0.3", "k=5"],
    build: |values, shape| Box::new(Sparse::new(shape.values(), Largest::new(values.kept(0, shape.values())))),
};

/// Chooses exactly the k largest, with buffers that it keeps.
#[derive(Debug)]
pub(in crate::methods) struct Largest {
    k: usize,
    filter: CandidateFilter,
    cutter: Cutter,
}

impl Largest {
    pub(in crate::methods) fn new(k: usize) -> Self {
        Self { k, filter: CandidateFilter::default(), cutter: Cutter::default() }
    }
}

impl Choose for Largest {
    const FIXED: bool = true;

    fn most(&self) -> usize {
        self.k
    }

    fn filter(&mut self) -> Option<&mut CandidateFilter> {
        Some(self.filter.want(self.k))
    }

    /// One read of a long tensor, as `select/topk.rs` explains, or none at all, when the pass that made it has looked.
    fn choose(&mut self, x: &[f32], context: &Context, selection: &mut Selection) -> Result<Stats, EncodeError> {
        let Self { k, filter, cutter } = self;
        let k = *k;
        let stats = filter.scan(context.kernel, x, (k, context.known));
        if !stats.is_finite() {
            return Err(not_finite(x));
        }
        if k == x.len() {
            selection.indices.extend(0..k as u32);
            selection.values.extend_from_slice(x);
            return Ok(stats);
        }
        let highest = key(stats.max);
        if let Some((floor, found)) = filter.floor().zip(filter.found(k)) {
            let cut = cut_found(context.kernel, cutter, found.1, (floor..=highest, k));
            push_found(context.kernel, selection, found, (k, cut));
            filter.learn(cut.key);
        } else {
            let cut = cutter.cut(x.iter().map(|x| key(*x)), 0..=highest, (x.len(), k));
            push_cut(selection, (0..).zip(x.iter().copied()), k, cut);
        }
        Ok(stats)
    }
}
