//! Adaptive threshold (Dryden et al. 2016, "Communication quantization for data-parallel training of deep neural networks";
//! GRACE 3.3): of the positive and of the negative values the same share is sent, the largest ones; of each only where it
//! is, and for all of a sign one mean.
//!
//! The two thresholds are estimated from a sample for each gradient. Zeros are never sent. Of a sign that the sample misses, as
//! it does where nearly all values are 0, the largest is.

use super::super::sparsification::sparse::{Pick, selection_of};
use super::signed;
use crate::codec::{Codec, Context, EncodeError, ReadError, Shape, Size};
use crate::entry::Entry;
use crate::wire::{Reader, Writer};
use crate::{Energy, Selection};
use flexcomm_domain::spec::{Values, compressors};

pub(super) const ENTRY: Entry = Entry {
    info: &compressors::ADAPTIVETHRESHOLD,
    code: 114,
    examples: &["k=0.01", "k=0.3,sample=0.2", "k=5"],
    build: |values, shape| Box::new(AdaptiveThreshold::new(values, shape)),
};

/// Fewer are no estimate: shorter tensors are looked at whole.
const LEAST_SAMPLES: usize = 1024;

#[derive(Debug)]
struct AdaptiveThreshold {
    n: usize,
    /// k/n.
    share: f64,
    samples: usize,
    sample: [Vec<f32>; 2],
    selection: Selection,
    /// Of the positive values that are sent, and of the magnitudes of the negative ones.
    means: [f32; 2],
    /// Of a message that is decoded.
    indices: Vec<u32>,
    negative: Vec<u8>,
}

impl AdaptiveThreshold {
    fn new(values: &Values, shape: Shape) -> Self {
        let n = shape.values();
        let share = values.kept(0, n) as f64 / n.max(1) as f64;
        let samples = ((n as f64 * values.number(1)).ceil() as usize).max(LEAST_SAMPLES).min(n);
        // Room for a sample of one sign.
        let sample = [Vec::with_capacity(samples), Vec::with_capacity(samples)];
        let (selection, means) = (selection_of(n, n), [0.0; 2]);
        let (indices, negative) = (Vec::with_capacity(n), Vec::with_capacity(n));
        Self { n, share, samples, sample, selection, means, indices, negative }
    }

    /// For each sign the magnitude that the share of its sample reaches; infinity where there is none.
    fn thresholds(&mut self, x: &[f32], context: &Context) -> [f32; 2] {
        let (n, samples, stream) = (x.len(), self.samples, context.own(0));
        self.sample.iter_mut().for_each(Vec::clear);
        for i in 0..samples {
            let random = || ((u64::from(stream.word(i as u32)) * n as u64) >> 32) as usize;
            let value = x[if samples < n { random() } else { i }];
            if value != 0.0 {
                self.sample[usize::from(value < 0.0)].push(value.abs());
            }
        }
        let (share, [positive, negative]) = (self.share, &mut self.sample);
        [
            threshold(positive, share).unwrap_or_else(|| largest(x.iter().copied())),
            threshold(negative, share).unwrap_or_else(|| largest(x.iter().map(|x| -x))),
        ]
    }

    /// Counts and means of each sign among what is sent.
    fn take_means(&mut self) -> [usize; 2] {
        let (mut sums, mut counts) = ([0.0f64; 2], [0usize; 2]);
        for value in self.selection.values() {
            let side = usize::from(*value < 0.0);
            sums[side] += f64::from(value.abs());
            counts[side] += 1;
        }
        self.means = [0, 1].map(|side| (sums[side] / counts[side].max(1) as f64) as f32);
        counts
    }
}

/// The magnitude that the share of a sample reaches.
fn threshold(sample: &mut [f32], share: f64) -> Option<f32> {
    let rank = ((sample.len() as f64 * share).round() as usize).max(1).min(sample.len()).checked_sub(1)?;
    Some(*sample.select_nth_unstable_by(rank, |a, b| b.total_cmp(a)).1)
}

/// The largest of those above 0; infinity where none is.
fn largest(values: impl Iterator<Item = f32>) -> f32 {
    let largest = values.fold(0.0, f32::max);
    if largest > 0.0 { largest } else { f32::INFINITY }
}

impl Codec for AdaptiveThreshold {
    fn encode(&mut self, x: &[f32], context: &Context, out: &mut Writer) -> Result<Energy, EncodeError> {
        let stats = context.stats(x)?;
        out.reserve(self.size().most());
        let [positive, negative] = self.thresholds(x, context);
        let selection = &mut self.selection;
        selection.reset(x.len());
        // Thresholds are above 0: zeros stay below both.
        context.kernel.run(Pick { x, selection, admits: |_, x| (x >= positive) | (x <= -negative) });
        let counts = self.take_means();
        signed::write(&self.selection, out);
        self.means.iter().for_each(|mean| out.f32(*mean));
        let energy = |side: usize| counts[side] as f64 * f64::from(self.means[side]).powi(2);
        Ok(Energy { sent: energy(0) + energy(1), compensated: stats.energy })
    }

    fn encode_taking(&mut self, x: &mut [f32], context: &Context, out: &mut Writer) -> Result<Energy, EncodeError> {
        let energy = self.encode(x, context, out)?;
        let [positive, negative] = self.means;
        for (i, value) in self.selection.indices().iter().zip(self.selection.values()) {
            x[*i as usize] -= if *value < 0.0 { -negative } else { positive };
        }
        Ok(energy)
    }

    fn decode_add(
        &mut self,
        from: &mut Reader<'_>,
        _context: &Context,
        (scale, out): (f32, &mut [f32]),
    ) -> Result<(), ReadError> {
        let Self { indices, negative, .. } = self;
        signed::read(from, out.len(), (indices, negative))?;
        let means = [from.scale("mean of the positive")?, -from.scale("mean of the negative")?];
        for (i, negative) in indices.iter().zip(negative) {
            out[*i as usize] += scale * means[usize::from(*negative)];
        }
        Ok(())
    }

    fn size(&self) -> Size {
        Size::AtMost(signed::most_bytes(self.n) + 8)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Build;
    use flexcomm_domain::spec::CompressorSpec;

    /// A sample of 1 % all but surely sees none of three values among a million; what is sent is the largest of each sign.
    #[test]
    fn a_sign_that_the_sample_misses_sends_its_largest() {
        let spec: CompressorSpec = "adaptivethreshold(k=0.01)".parse().unwrap();
        let mut codec = spec.codec(Shape::vector(1_000_000));
        let (mut x, mut out) = (vec![0.0; 1_000_000], Writer::new());
        (x[7], x[500_000], x[999_999]) = (2.0, -3.0, 1.0);
        let energy = codec.encode(&x, &Context::new(1), &mut out).unwrap();
        assert_eq!((energy.sent, energy.compensated), (13.0, 14.0));
        let mut got = vec![0.0; 1_000_000];
        codec.decode_add(&mut Reader::new(out.bytes()), &Context::new(1), (1.0, &mut got)).unwrap();
        x[999_999] = 0.0;
        assert_eq!(got, x);
    }
}
