//! What methods share that send where values are large and their signs: the payload of k (4 bytes), a set of k indices, k signs
//! and, where it is not known beforehand, what a positive and a negative sign stand for, f32 each; and a codec around a rule
//! that chooses them.

use super::super::sparsification::adaptive::write_signs;
use super::super::sparsification::sparse::{most_index_bytes, selection_of};
use crate::codec::{Codec, Context, EncodeError, ReadError, Shape, Size, Target};
use crate::random::Stream;
use crate::wire::{Reader, Writer, packed_bytes, read_indices, unpack, write_indices_least};
use crate::{Energy, Selection};

/// A rule that chooses values of which only the sign is sent.
pub(super) trait Choose: Send + std::fmt::Debug {
    /// The magnitude that every sign stands for, where that is known beforehand.
    fn magnitude(&self) -> Option<f32>;

    /// Fills `selection`, which is empty, with indices and values of `x`, which is finite.
    fn choose(&mut self, x: &[f32], context: &Context, selection: &mut Selection) -> Sent;
}

/// What the signs of a selection stand for.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct Sent {
    /// Of the positive values, and of the negative ones.
    pub(super) magnitudes: [f32; 2],
    /// Σ of their squares over all that is sent.
    pub(super) energy: f64,
}

/// Sends the signs of the values that a rule chooses.
#[derive(Debug)]
pub(super) struct Signed<C> {
    n: usize,
    rule: C,
    selection: Selection,
    sent: Sent,
    /// Of a message that is decoded.
    indices: Vec<u32>,
    negative: Vec<u8>,
}

impl<C: Choose> Signed<C> {
    pub(super) fn new(rule: C, shape: Shape) -> Self {
        let n = shape.values();
        let (selection, indices, negative) = (selection_of(n, n), Vec::with_capacity(n), Vec::with_capacity(n));
        Self { n, rule, selection, sent: Sent::default(), indices, negative }
    }
}

impl<C: Choose> Codec for Signed<C> {
    fn encode(&mut self, x: &[f32], context: &Context, out: &mut Writer) -> Result<Energy, EncodeError> {
        let stats = context.stats(x)?;
        out.reserve(self.size().most());
        self.selection.reset(x.len());
        self.sent = self.rule.choose(x, context, &mut self.selection);
        out.u32(self.selection.len() as u32);
        write_indices_least(self.selection.indices(), x.len(), out);
        write_signs(self.selection.values(), out);
        if self.rule.magnitude().is_none() {
            self.sent.magnitudes.iter().for_each(|magnitude| out.f32(*magnitude));
        }
        Ok(Energy { sent: self.sent.energy, compensated: stats.energy })
    }

    fn encode_taking(&mut self, x: &mut [f32], context: &Context, out: &mut Writer) -> Result<Energy, EncodeError> {
        let energy = self.encode(x, context, out)?;
        let [positive, negative] = self.sent.magnitudes;
        for (i, value) in self.selection.indices().iter().zip(self.selection.values()) {
            x[*i as usize] -= if *value < 0.0 { -negative } else { positive };
        }
        Ok(energy)
    }

    fn decode(&mut self, from: &mut Reader<'_>, _: &Context, target: Target<'_>) -> Result<(), ReadError> {
        let (scale, out) = target.added();
        let Self { rule, indices, negative, .. } = self;
        let k = from.u32("number of values")? as usize;
        read_indices(from, out.len(), k, indices)?;
        negative.resize(k, 0);
        unpack(from, "signs", 1, negative)?;
        let values = match rule.magnitude() {
            Some(magnitude) => [magnitude, -magnitude],
            None => [from.scale("mean of the positive")?, -from.scale("mean of the negative")?],
        };
        for (i, negative) in indices.iter().zip(negative) {
            out[*i as usize] += scale * values[usize::from(*negative)];
        }
        Ok(())
    }

    fn size(&self) -> Size {
        let magnitudes = if self.rule.magnitude().is_none() { 8 } else { 0 };
        Size::AtMost(4 + most_index_bytes(self.n, self.n) + packed_bytes(self.n, 1) + magnitudes)
    }
}

/// Magnitudes of a random sample of the values, or of all where it is as large, by sign; zeros are left out.
pub(super) fn sample(x: &[f32], (samples, stream): (usize, Stream), by_sign: &mut [Vec<f32>; 2]) {
    by_sign.iter_mut().for_each(Vec::clear);
    for i in 0..samples {
        let value = x[if samples < x.len() { stream.place(i as u32, x.len()) } else { i }];
        if value != 0.0 {
            by_sign[usize::from(value < 0.0)].push(value.abs());
        }
    }
}
