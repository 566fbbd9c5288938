//! What methods that send some values as they are share: the payload of k (4 bytes), a set of k indices and their values in
//! this order ([`kept_values`]); and a codec around a rule that chooses them.

use super::kept_values;
use crate::codec::{CandidateFilter, Carried, Codec, Context, EncodeError, ReadError, Size, Stats, Target};
use crate::kernels::{ROOM, Work};
use crate::wire::{Reader, Writer, index_bytes, read_indices, write_indices, write_indices_least};
use crate::{Energy, Selection};
use flexcomm_domain::spec::{ValueType, selection_bytes};

/// Bytes of a payload with k of n values.
pub(super) fn size(n: usize, k: usize, value_type: ValueType) -> Size {
    // n is below 2^32: it fits.
    Size::Exact(selection_bytes(n as u64, k as u64, value_type) as usize)
}

/// Bytes of a set of at most k indices: [`index_bytes`] grows with k but for the rounding of its parts.
pub(in crate::methods) fn most_index_bytes(n: usize, k: usize) -> usize {
    index_bytes(n, k) + 1
}

/// `out += scale * C(x)`; `indices` is a buffer that the codec keeps.
pub(super) fn decode_add(
    from: &mut Reader<'_>,
    (indices, value_type): (&mut Vec<u32>, ValueType),
    target: (f32, &mut [f32]),
) -> Result<(), ReadError> {
    let k = from.u32("number of values")? as usize;
    read_indices(from, target.1.len(), k, indices)?;
    kept_values::add(from, (indices, value_type), target)
}

/// A rule that chooses values.
pub(in crate::methods) trait Choose: Send + std::fmt::Debug {
    /// Whether the number of values is always [`Self::most`], and the payload's size thereby known.
    const FIXED: bool;

    /// How many values at most.
    fn most(&self) -> usize;

    /// Fills `selection`, which is empty, with indices and values of `x`; refuses what is not finite.
    fn choose(&mut self, x: &[f32], context: &Context, selection: &mut Selection) -> Result<Stats, EncodeError>;

    /// As [`Codec::filter`].
    fn filter(&mut self) -> Option<&mut CandidateFilter> {
        None
    }

    /// As [`Codec::carried`].
    fn carried(&mut self, _residual: &[f32], _share: Carried) {}

    /// As [`Codec::save`].
    fn save(&self, _out: &mut Writer) {}

    /// As [`Codec::restore`].
    fn restore(&mut self, _from: &mut Reader<'_>) -> Result<(), ReadError> {
        Ok(())
    }
}

/// With room for `most` of n values, and for those that kernels write ahead. Room that is not written to costs nothing; how much
/// is used changes from step to step.
pub(in crate::methods) fn selection_of(n: usize, most: usize) -> Selection {
    Selection { n, indices: Vec::with_capacity(most + ROOM), values: Vec::with_capacity(most + ROOM) }
}

/// Sends the values that a rule chooses, as they are.
#[derive(Debug)]
pub(super) struct Sparse<C> {
    n: usize,
    rule: C,
    selection: Selection,
    /// Of a message that is decoded.
    indices: Vec<u32>,
    value_type: ValueType,
}

impl<C: Choose> Sparse<C> {
    pub(super) fn new(n: usize, rule: C) -> Self {
        let most = rule.most();
        let (selection, indices) = (selection_of(n, most), Vec::with_capacity(most));
        Self { n, rule, selection, indices, value_type: ValueType::F32 }
    }
}

impl<C: Choose> Codec for Sparse<C> {
    fn encode(&mut self, x: &[f32], context: &Context, out: &mut Writer) -> Result<Energy, EncodeError> {
        out.reserve(self.size().most());
        let Self { rule, selection, value_type, .. } = self;
        selection.reset(x.len());
        let compensated = rule.choose(x, context, selection)?.energy;
        out.u32(selection.len() as u32);
        match C::FIXED {
            true => write_indices(selection.indices(), x.len(), out),
            false => write_indices_least(selection.indices(), x.len(), out),
        }
        // They become what is sent.
        kept_values::write(&mut selection.values, *value_type, out);
        Ok(Energy { sent: selection.energy(), compensated })
    }

    fn encode_taking(&mut self, x: &mut [f32], context: &Context, out: &mut Writer) -> Result<Energy, EncodeError> {
        let energy = self.encode(x, context, out)?;
        let Selection { indices, values, .. } = &self.selection;
        match self.value_type {
            ValueType::F32 => indices.iter().for_each(|i| x[*i as usize] = 0.0),
            ValueType::Bf16 | ValueType::Int8 => {
                indices.iter().zip(values).for_each(|(i, value)| x[*i as usize] -= value);
            }
        }
        Ok(energy)
    }

    fn decode(&mut self, from: &mut Reader<'_>, _: &Context, target: Target<'_>) -> Result<(), ReadError> {
        decode_add(from, (&mut self.indices, self.value_type), target.added())
    }

    fn select(&mut self, x: &[f32], context: &Context) -> Result<Option<&Selection>, EncodeError> {
        self.selection.reset(x.len());
        self.rule.choose(x, context, &mut self.selection)?;
        Ok(Some(&self.selection))
    }

    fn most_selected(&self) -> usize {
        self.rule.most()
    }

    fn filter(&mut self) -> Option<&mut CandidateFilter> {
        self.rule.filter()
    }

    fn send_values_as(&mut self, value_type: ValueType) {
        self.value_type = value_type;
    }

    fn carried(&mut self, residual: &[f32], share: Carried) {
        self.rule.carried(residual, share);
    }

    fn size(&self) -> Size {
        let most = self.rule.most();
        match C::FIXED {
            true => size(self.n, most, self.value_type),
            false => {
                let values = self.value_type.bytes(most as u64) as usize;
                Size::AtMost(4 + most_index_bytes(self.n, most) + values)
            }
        }
    }

    fn save(&self, out: &mut Writer) {
        self.rule.save(out);
    }

    fn restore(&mut self, from: &mut Reader<'_>) -> Result<(), ReadError> {
        self.rule.restore(from)
    }
}

/// Appends the values that a test of index and value admits, in one read.
pub(in crate::methods) struct Pick<'a, F> {
    pub(in crate::methods) x: &'a [f32],
    pub(in crate::methods) selection: &'a mut Selection,
    pub(in crate::methods) admits: F,
}

/// Values that are looked at together: without a branch per value.
const GROUP: usize = 16;

impl<F: Fn(u32, f32) -> bool> Work for Pick<'_, F> {
    #[inline(always)]
    fn run(self) {
        let Self { x, selection, admits } = self;
        let (groups, rest) = x.as_chunks::<GROUP>();
        // Positions fit u32: Layers sees to it.
        let mut base = 0u32;
        for group in groups {
            let mut hits = 0u32;
            for (lane, value) in group.iter().enumerate() {
                hits |= u32::from(admits(base + lane as u32, *value)) << lane;
            }
            while hits != 0 {
                let lane = hits.trailing_zeros();
                hits &= hits - 1;
                selection.indices.push(base + lane);
                selection.values.push(group[lane as usize % GROUP]);
            }
            base += GROUP as u32;
        }
        for (index, value) in (base..).zip(rest) {
            if admits(index, *value) {
                selection.indices.push(index);
                selection.values.push(*value);
            }
        }
    }
}
