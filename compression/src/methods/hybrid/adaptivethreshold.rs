//! Adaptive threshold (Dryden et al. 2016, "Communication quantization for data-parallel training of deep neural networks";
//! GRACE 3.3): of the positive and of the negative values the same share is sent, the largest ones; of each only where it
//! is, and for all of a sign one mean.
//!
//! The two thresholds are estimated from a sample for each gradient. Zeros are never sent. Of a sign that the sample misses, as
//! it does where nearly all values are 0, the largest is.

use super::super::sparsification::sparse::Pick;
use super::signed::{self, Choose, Sent, Signed};
use crate::Selection;
use crate::codec::{Context, Shape};
use crate::entry::Entry;
use flexcomm_domain::spec::{Values, compressors};

pub(super) const ENTRY: Entry = Entry {
    info: &compressors::ADAPTIVETHRESHOLD,
    code: 114,
    examples: &["k=0.01", "k=0.3,sample=0.2", "k=5"],
    build: |values, shape| Box::new(Signed::new(AdaptiveThreshold::new(values, shape), shape)),
};

/// Fewer are no estimate: shorter tensors are looked at whole.
const LEAST_SAMPLES: usize = 1024;

#[derive(Debug)]
struct AdaptiveThreshold {
    /// k/n.
    share: f64,
    samples: usize,
    sample: [Vec<f32>; 2],
}

impl AdaptiveThreshold {
    fn new(values: &Values, shape: Shape) -> Self {
        let n = shape.values();
        let share = values.kept(0, n) as f64 / n.max(1) as f64;
        let samples = ((n as f64 * values.number(1)).ceil() as usize).max(LEAST_SAMPLES).min(n);
        // Room for a sample of one sign.
        Self { share, samples, sample: [Vec::with_capacity(samples), Vec::with_capacity(samples)] }
    }

    /// For each sign the magnitude that the share of its sample reaches; infinity where there is none.
    fn thresholds(&mut self, x: &[f32], context: &Context) -> [f32; 2] {
        signed::sample(x, (self.samples, context.own(0)), &mut self.sample);
        let (share, [positive, negative]) = (self.share, &mut self.sample);
        [
            threshold(positive, share).unwrap_or_else(|| largest(x.iter().copied())),
            threshold(negative, share).unwrap_or_else(|| largest(x.iter().map(|x| -x))),
        ]
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

impl Choose for AdaptiveThreshold {
    fn magnitude(&self) -> Option<f32> {
        None
    }

    fn choose(&mut self, x: &[f32], context: &Context, selection: &mut Selection) -> Sent {
        let [positive, negative] = self.thresholds(x, context);
        // Thresholds are above 0: zeros stay below both.
        let selected = &mut *selection;
        context.kernel.run(Pick { x, selection: selected, admits: |_, x| (x >= positive) | (x <= -negative) });
        let (mut sums, mut counts) = ([0.0f64; 2], [0usize; 2]);
        for value in selection.values() {
            let side = usize::from(*value < 0.0);
            sums[side] += f64::from(value.abs());
            counts[side] += 1;
        }
        let magnitudes = [0, 1].map(|side| (sums[side] / counts[side].max(1) as f64) as f32);
        let [positive, negative] = [0, 1].map(|side| counts[side] as f64 * f64::from(magnitudes[side]).powi(2));
        Sent { magnitudes, energy: positive + negative }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Build;
    use crate::codec::Target;
    use crate::wire::{Reader, Writer};
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
        codec.decode(&mut Reader::new(out.bytes()), &Context::new(1), Target::add(1.0, &mut got)).unwrap();
        x[999_999] = 0.0;
        assert_eq!(got, x);
    }
}
