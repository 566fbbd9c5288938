//! Random-k (Stich et al. 2018; GRACE 3.2; BytePS's `randomk`): k values at random, without replacement. Scaled by n/k it is
//! unbiased, unscaled contractive in the mean.
//!
//! With a shared seed every rank draws the same indices: none travel, and payloads, k values, add up in flight. Else the
//! indices are this rank's own and travel with the values.

use super::sparse;
use super::subset::Subset;
use crate::codec::{Codec, Context, EncodeError, ReadError, Shape, Size, Target};
use crate::entry::Entry;
use crate::wire::{Reader, Writer, write_indices};
use crate::{Energy, kernels};
use flexcomm_domain::spec::{ValueType, Values, compressors};

pub(super) const ENTRY: Entry = Entry {
    info: &compressors::RANDOMK,
    code: 65,
    examples: &["k=0.01", "k=0.6", "k=4,scaled=true", "k=0.2,shared=false", "k=0.3,scaled=true,shared=false"],
    build: |values, shape| Box::new(RandomK::new(values, shape)),
};

#[derive(Debug)]
struct RandomK {
    n: usize,
    k: usize,
    /// 1 or n/k.
    factor: f32,
    shared: bool,
    subset: Subset,
    /// What is sent.
    values: Vec<f32>,
    /// Of a message that is decoded.
    indices: Vec<u32>,
}

impl RandomK {
    fn new(values: &Values, shape: Shape) -> Self {
        let n = shape.values();
        let k = values.kept(0, n);
        let factor = if values.is_on(1) && k > 0 { (n as f64 / k as f64) as f32 } else { 1.0 };
        let (subset, kept, indices) = Default::default();
        Self { n, k, factor, shared: values.is_on(2), subset, values: kept, indices }
    }

    fn draw(&mut self, context: &Context) {
        let stream = if self.shared { context.shared(0) } else { context.own(0) };
        self.subset.draw(stream, self.n, self.k);
    }
}

impl Codec for RandomK {
    fn encode(&mut self, x: &[f32], context: &Context, out: &mut Writer) -> Result<Energy, EncodeError> {
        let stats = context.stats(x)?;
        self.draw(context);
        let Self { subset, values, factor, .. } = self;
        values.clear();
        // Held inside the finite numbers: n/k times a huge value would leave them.
        let scaled = |i: &u32| (x[*i as usize] * *factor).clamp(-f32::MAX, f32::MAX);
        values.extend(subset.indices.iter().map(scaled));
        if !self.shared {
            out.u32(self.k as u32);
            write_indices(&self.subset.indices, self.n, out);
        }
        out.f32s(&self.values);
        Ok(Energy { sent: kernels::energy(&self.values), compensated: stats.energy })
    }

    fn encode_taking(&mut self, x: &mut [f32], context: &Context, out: &mut Writer) -> Result<Energy, EncodeError> {
        let energy = self.encode(x, context, out)?;
        self.subset.indices.iter().zip(&self.values).for_each(|(i, value)| x[*i as usize] -= value);
        Ok(energy)
    }

    fn decode(&mut self, from: &mut Reader<'_>, context: &Context, target: Target<'_>) -> Result<(), ReadError> {
        let (scale, out) = target.added();
        if !self.shared {
            return sparse::decode_add(from, (&mut self.indices, ValueType::F32), (scale, out));
        }
        self.draw(context);
        let values = from.f32s("value", self.k)?;
        self.subset.indices.iter().zip(values).for_each(|(i, value)| out[*i as usize] += scale * value);
        Ok(())
    }

    fn draws_together(&self) -> bool {
        self.shared
    }

    fn size(&self) -> Size {
        match self.shared {
            true => Size::Exact(4 * self.k),
            false => sparse::size(self.n, self.k, ValueType::F32),
        }
    }
}
