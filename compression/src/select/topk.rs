//! Exact top-k: the k largest by magnitude, ties to the lowest index.
//!
//! A long part is read once: a sample gives a floor that the k-th largest very probably reaches, the pass over the
//! gradient collects everything from the floor on, and the exact cut is made among those few. When the sample misled
//! (too few or far too many candidates), the cut is made over all values; the answer is the same.

use super::cut::Cut;
use super::none::push_range;
use super::{Pass, Select};
use crate::Selection;
use crate::feedback::CompressError;
use crate::kernels::{Candidates, key};
use flexcomm_domain::CompressionRatio;
use std::ops::Range;

/// From here on a sample pays.
const SAMPLED: usize = 4096;

/// One sample per this many values, within the bounds below.
const SAMPLE_EVERY: usize = 128;
const SAMPLE_LEAST: usize = 1024;
const SAMPLE_MOST: usize = 32_768;

/// Candidates beyond this multiple of k (plus a constant for small k) mean that the sample misled.
const SPARE: usize = 4;
const SPARE_LEAST: usize = 8192;

pub(super) struct TopK;

impl Select for TopK {
    fn select(&self, cr: CompressionRatio, pass: &mut Pass<'_>) -> Result<f64, CompressError> {
        let n = pass.gradient.len();
        top_k_of(pass, 0..n, cr.keep(n))
    }
}

/// Feeds a part and appends its k largest values to the selection; answers the part's energy.
pub(super) fn top_k_of(pass: &mut Pass<'_>, range: Range<usize>, k: usize) -> Result<f64, CompressError> {
    let floor = sampled_floor(pass, range.clone(), k);
    let energy = pass.feed(range.clone(), floor)?.energy;
    if k == range.len() {
        push_range(pass, range);
        return Ok(energy);
    }
    let Pass { scratch, selection, fed, .. } = pass;
    let base = range.start as u32;
    let candidates = floor.and_then(|_| scratch.found.get()).filter(|(indices, _)| indices.len() >= k);
    if let Some((indices, bits)) = candidates {
        let values = bits.iter().map(|b| f32::from_bits(*b));
        let cut = scratch.cutter.cut(values.clone().map(key), bits.len(), k);
        push_cut(selection, indices.iter().map(|i| base + i).zip(values), k, cut);
    } else {
        let part = &fed[range.clone()];
        let cut = scratch.cutter.cut(part.iter().map(|x| key(*x)), part.len(), k);
        push_cut(selection, (base..).zip(part.iter().copied()), k, cut);
    }
    Ok(energy)
}

/// A key that about k values of a part reach, a few more rather than fewer, and room for them; None when that is most
/// of them or the part is short.
pub(super) fn sampled_floor(pass: &mut Pass<'_>, range: Range<usize>, k: usize) -> Option<u32> {
    let Pass { gradient, residual, scratch, .. } = pass;
    let at = |i: usize| gradient[range.start + i] + residual[range.start + i];
    floor_of(at, (range.len(), k), &mut scratch.sample, &mut scratch.found)
}

/// As [`sampled_floor`], of n values that `at` answers.
pub(crate) fn floor_of(
    at: impl Fn(usize) -> f32,
    (n, k): (usize, usize),
    sample: &mut Vec<u32>,
    found: &mut Candidates,
) -> Option<u32> {
    if n < SAMPLED || k == n {
        return None;
    }
    let samples = (n / SAMPLE_EVERY).clamp(SAMPLE_LEAST, SAMPLE_MOST);
    let expected = samples as f64 * (k as f64 / n as f64);
    // Four standard deviations of the count, and some for small counts.
    let rank = (expected + 4.0 * expected.sqrt() + 8.0) as usize;
    if rank >= samples {
        return None;
    }
    let stride = n / samples;
    sample.clear();
    sample.extend((0..samples).map(|i| key(at(sampled_place(i, stride)))));
    let (_, floor, _) = sample.select_nth_unstable_by(rank, |a, b| b.cmp(a));
    found.reset((k.saturating_mul(SPARE) + SPARE_LEAST).min(n));
    Some(*floor)
}

/// Where the i-th stride is looked at: anywhere in it, so that a period in the data does not meet one in the sample.
fn sampled_place(i: usize, stride: usize) -> usize {
    let jitter = (i as u64).wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 32;
    i * stride + ((jitter * stride as u64) >> 32) as usize
}

/// Appends the k values that the cut admits, in order of position. Stores every value and moves on only past those
/// that are in: near the cut a branch would be guessed wrong half of the time.
pub(crate) fn push_cut(selection: &mut Selection, values: impl Iterator<Item = (u32, f32)>, k: usize, mut cut: Cut) {
    let first = selection.indices.len();
    // One place more: after the last that is in, values are stored behind it until the end.
    selection.indices.resize(first + k + 1, 0);
    selection.values.resize(first + k + 1, 0.0);
    let (indices, kept) = (&mut selection.indices[first..], &mut selection.values[first..]);
    let mut count = 0;
    for (index, value) in values {
        indices[count] = index;
        kept[count] = value;
        count += usize::from(cut.admits(key(value)));
    }
    selection.indices.truncate(first + k);
    selection.values.truncate(first + k);
}

#[cfg(test)]
mod tests {
    use super::sampled_place;
    use crate::{GradientCompressor, Kernel, Layers, Method, naive};
    use flexcomm_domain::{CompressionRatio, Compressor};

    /// Loud exactly where the sample looks, and nowhere else: the floor is far too high, and too few reach it.
    #[test]
    fn a_sample_that_misleads_changes_nothing() {
        let (n, samples) = (40_000, 1024);
        let mut gradient: Vec<f32> = (0..n).map(|i| 1.0 + (i * 7919 % n) as f32 * 1e-4).collect();
        (0..samples).for_each(|i| gradient[sampled_place(i, n / samples)] = 1e3 + i as f32);
        let cr = CompressionRatio::new(0.1).unwrap();
        for kernel in Kernel::available() {
            let mut rank = GradientCompressor::with_kernel(Layers::fused(n).unwrap(), kernel);
            let sent = rank.compress(Method::new(Compressor::TopK, cr), &gradient, 0).unwrap();
            assert_eq!(sent.selection.indices(), naive::topk(&gradient, 4000));
            let mut rank = GradientCompressor::with_kernel(Layers::fused(n).unwrap(), kernel);
            let sent = rank.compress(Method::new(Compressor::MsTopK, cr), &gradient, 5).unwrap();
            assert_eq!(sent.selection.indices(), naive::mstopk(&gradient, 4000, 5));
        }
    }
}
