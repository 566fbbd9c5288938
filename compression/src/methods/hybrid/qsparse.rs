//! Qsparse (Basu et al. 2019, "Qsparse-local-SGD", sections 2.1 to 2.3): top-k or random-k, with what is kept quantised too.
//!
//! `levels`: QSGD's stochastic quantiser with s levels of the l2 norm of the k values (lemma 1). It expands what it keeps by
//! up to 1 + beta, beta = min(k/s², sqrt(k)/s); `scaled` divides by that (lemma 2), which makes the whole contractive
//! for every s. `sign`: the sign, times the mean magnitude of the k values (lemma 3).
//!
//! Layers are compressed one by one (corollary 1, piecewise compression): of k values of like size beta grows with sqrt(k), and over
//! a bucket of many layers the division leaves hardly anything.
//!
//! Random indices are drawn from the shared seed and do not travel.

use super::super::sparsification::{adaptive::write_signs, sparse::Choose, subset::Subset, topk::Largest};
use crate::codec::{Codec, Context, EncodeError, ReadError, Shape, Size, Target};
use crate::entry::Entry;
use crate::wire::{
    Reader, Writer, index_bytes, levels_width, pack, packed_bytes, read_indices, unpack_checked, write_indices,
};
use crate::{Energy, Selection};
use flexcomm_domain::spec::{Values, compressors, quantizer_bound};

pub(super) const ENTRY: Entry = Entry {
    info: &compressors::QSPARSE,
    code: 112,
    examples: &[
        "k=0.05",
        "k=0.3,select=random,s=3",
        "k=0.1,quantize=sign",
        "k=0.2,select=random,quantize=sign",
        "k=4,s=127,scaled=false",
    ],
    build: |values, shape| Box::new(Qsparse::new(values, shape)),
};

#[derive(Debug)]
struct Qsparse {
    n: usize,
    k: usize,
    random: bool,
    sign: bool,
    /// s.
    levels: usize,
    /// 1 or 1 + beta.
    divisor: f64,
    largest: Largest,
    subset: Subset,
    /// What is kept; then its values are what is sent for them.
    kept: Selection,
    codes: Vec<u8>,
    /// Of a message that is decoded.
    indices: Vec<u32>,
}

impl Qsparse {
    fn new(values: &Values, shape: Shape) -> Self {
        let (n, levels) = (shape.values(), values.whole(3));
        let k = values.kept(0, n);
        let divisor = if values.is_on(4) { 1.0 + quantizer_bound(k, levels) } else { 1.0 };
        let (subset, kept, codes, indices) = Default::default();
        let (random, sign) = (values.whole(1) == 1, values.whole(2) == 1);
        Self { n, k, random, sign, levels, divisor, largest: Largest::new(k), subset, kept, codes, indices }
    }

    /// What a signed level is worth under a norm: the same number for writer and reader, never beyond the norm.
    fn worth(&self, norm: f32, level: f32) -> f32 {
        (f64::from(norm) * (f64::from(level) / (self.levels as f64 * self.divisor))) as f32
    }

    fn write_levels(&mut self, context: &Context, out: &mut Writer) {
        let norm = self.kept.energy().sqrt().min(f64::from(f32::MAX)) as f32;
        let (s, stream) = (self.levels as f32, context.own(1));
        self.codes.clear();
        for i in 0..self.kept.len() {
            let value = self.kept.values[i];
            let share = if norm > 0.0 { (value.abs() / norm).min(1.0) * s } else { 0.0 };
            let level = (share + stream.uniform(i as u32)).floor().min(s);
            let signed = if value < 0.0 { -level } else { level };
            self.codes.push((s + signed) as u8);
            self.kept.values[i] = self.worth(norm, signed);
        }
        out.f32(norm);
        pack(&self.codes, levels_width(2 * self.levels as u64 + 1), out);
    }

    fn write_signs(&mut self, out: &mut Writer) {
        let values = &mut self.kept.values;
        let sum: f64 = values.iter().map(|v| f64::from(v.abs())).sum();
        let mean = (sum / self.k.max(1) as f64) as f32;
        out.f32(mean);
        write_signs(values, out);
        values.iter_mut().for_each(|value| *value = if *value < 0.0 { -mean } else { mean });
    }
}

impl Codec for Qsparse {
    fn encode(&mut self, x: &[f32], context: &Context, out: &mut Writer) -> Result<Energy, EncodeError> {
        let Self { k, kept, largest, subset, .. } = self;
        kept.reset(x.len());
        let compensated = if self.random {
            let stats = context.stats(x)?;
            subset.draw(context.shared(0), x.len(), *k);
            kept.indices.extend_from_slice(&subset.indices);
            kept.values.extend(subset.indices.iter().map(|i| x[*i as usize]));
            stats.energy
        } else {
            let stats = largest.choose(x, context, kept)?;
            write_indices(kept.indices(), x.len(), out);
            stats.energy
        };
        match self.sign {
            true => self.write_signs(out),
            false => self.write_levels(context, out),
        }
        Ok(Energy { sent: self.kept.energy(), compensated })
    }

    fn encode_taking(&mut self, x: &mut [f32], context: &Context, out: &mut Writer) -> Result<Energy, EncodeError> {
        let energy = self.encode(x, context, out)?;
        self.kept.indices.iter().zip(&self.kept.values).for_each(|(i, value)| x[*i as usize] -= value);
        Ok(energy)
    }

    fn decode(&mut self, from: &mut Reader<'_>, context: &Context, target: Target<'_>) -> Result<(), ReadError> {
        let (scale, out) = target.added();
        if self.random {
            self.subset.draw(context.shared(0), self.n, self.k);
        } else {
            read_indices(from, out.len(), self.k, &mut self.indices)?;
        }
        let magnitude = from.scale("norm or mean")?;
        self.codes.resize(self.k, 0);
        let levels = if self.sign { 2 } else { 2 * self.levels as u64 + 1 };
        unpack_checked(from, "signs or levels", levels, &mut self.codes)?;
        let indices = if self.random { &self.subset.indices } else { &self.indices };
        for (i, code) in indices.iter().zip(&self.codes) {
            let value = match self.sign {
                true => magnitude * (1.0 - 2.0 * f32::from(*code)),
                false => self.worth(magnitude, f32::from(*code) - self.levels as f32),
            };
            out[*i as usize] += scale * value;
        }
        Ok(())
    }

    fn draws_together(&self) -> bool {
        self.random
    }

    fn size(&self) -> Size {
        let width = if self.sign { 1 } else { levels_width(2 * self.levels as u64 + 1) };
        let indices = if self.random { 0 } else { index_bytes(self.n, self.k) };
        Size::Exact(indices + 4 + packed_bytes(self.k, width))
    }
}
