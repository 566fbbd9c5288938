//! Top-k (Aji and Heafield 2017; Alistarh et al. 2018; GRACE 3.2): the k largest by magnitude, exactly, ties to the
//! lowest index.

use super::sparse;
use crate::codec::{CandidateFilter, Codec, Context, EncodeError, ReadError, Shape, Size, Stats, not_finite};
use crate::entry::Entry;
use crate::kernels::key;
use crate::select::cut::Cutter;
use crate::select::topk::{cut_found, push_cut, push_found};
use crate::wire::{Reader, Writer};
use crate::{Energy, Selection};
use flexcomm_domain::spec::{ValueType, compressors};

pub(super) const ENTRY: Entry = Entry {
    info: &compressors::TOPK,
    code: 64,
    examples: &["k=0.01", "k=0.3", "k=5"],
    build: |values, shape| Box::new(TopK::new(values.kept(0, shape.values()), shape)),
};

#[derive(Debug)]
pub(super) struct TopK {
    n: usize,
    k: usize,
    selector: Selector,
    /// Of a message that is decoded.
    indices: Vec<u32>,
    value_type: ValueType,
}

impl TopK {
    pub(super) fn new(k: usize, shape: Shape) -> Self {
        Self { n: shape.values(), k, selector: Selector::default(), indices: Vec::new(), value_type: ValueType::F32 }
    }
}

impl Codec for TopK {
    fn encode(&mut self, x: &[f32], context: &Context, out: &mut Writer) -> Result<Energy, EncodeError> {
        let compensated = self.selector.select(x, self.k, context)?.energy;
        let selection = &mut self.selector.selection;
        sparse::write(selection, self.value_type, out);
        Ok(Energy { sent: selection.energy(), compensated })
    }

    fn encode_taking(&mut self, x: &mut [f32], context: &Context, out: &mut Writer) -> Result<Energy, EncodeError> {
        let energy = self.encode(x, context, out)?;
        sparse::take(x, &self.selector.selection, self.value_type);
        Ok(energy)
    }

    fn select(&mut self, x: &[f32], context: &Context) -> Result<Option<&Selection>, EncodeError> {
        self.selector.select(x, self.k, context)?;
        Ok(Some(&self.selector.selection))
    }

    fn most_selected(&self) -> usize {
        self.k
    }

    fn filter(&mut self) -> Option<&mut CandidateFilter> {
        Some(self.selector.filter.want(self.k))
    }

    fn decode_add(
        &mut self,
        from: &mut Reader<'_>,
        _context: &Context,
        target: (f32, &mut [f32]),
    ) -> Result<(), ReadError> {
        sparse::decode_add(from, (&mut self.indices, self.value_type), target)
    }

    fn size(&self) -> Size {
        sparse::size(self.n, self.k, self.value_type)
    }

    fn send_values_as(&mut self, value_type: ValueType) {
        self.value_type = value_type;
    }
}

/// Selects exactly k values with buffers that it keeps.
#[derive(Debug, Default)]
pub(in crate::methods) struct Selector {
    filter: CandidateFilter,
    cutter: Cutter,
    /// The last selection.
    pub(in crate::methods) selection: Selection,
}

impl Selector {
    /// The k largest into [`Self::selection`]; one read of a long tensor, as `select/topk.rs` explains, or none at all, when the
    /// pass that made it has looked.
    pub(in crate::methods) fn select(&mut self, x: &[f32], k: usize, context: &Context) -> Result<Stats, EncodeError> {
        let Self { filter, cutter, selection } = self;
        selection.reset(x.len());
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
