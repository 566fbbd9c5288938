//! Exact top-k: the k largest by magnitude, ties to the lowest index.
//!
//! A long part is read once: a sample gives a floor that the k-th largest very probably reaches, the pass over the
//! gradient collects everything from the floor on, and the exact cut is made among those few. When the sample misled
//! (too few or far too many candidates), the cut is made over all values; the answer is the same.

use super::cut::{Cut, Cutter};
use crate::kernels::{Candidates, Compaction, KEY_MASK, ROOM, Work, key};
use crate::{Kernel, Selection};
use std::ops::RangeInclusive;

/// From here on a sample pays.
const SAMPLED: usize = 4096;

/// One sample per this many values, within the bounds below.
const SAMPLE_EVERY: usize = 128;
const SAMPLE_LEAST: usize = 1024;
const SAMPLE_MOST: usize = 32_768;

/// Samples side by side: what a value costs is the way to its line of the cache, which its neighbours share.
const TOGETHER: usize = 4;

/// Candidates beyond this multiple of k (plus a constant for small k) mean that the sample misled.
const SPARE: usize = 4;
const SPARE_LEAST: usize = 8192;

/// Up to so many candidates, which then stay in the second-level cache, are counted again and again.
const COUNTED: usize = 32_768;

/// The cut for the k largest of candidates, given by float bits, whose keys lie within a range.
pub(crate) fn cut_found(
    kernel: Kernel,
    cutter: &mut Cutter,
    bits: &[u32],
    (within, k): (RangeInclusive<u32>, usize),
) -> Cut {
    if bits.len() > COUNTED {
        return cutter.cut(bits.iter().map(|bits| bits & KEY_MASK), within, (bits.len(), k));
    }
    let count = |least| kernel.run(Reach { bits, least }) as usize;
    let (mut low, mut high) = within.into_inner();
    while low < high {
        let middle = high - (high - low) / 2;
        match count(middle) >= k {
            true => low = middle,
            false => high = middle - 1,
        }
    }
    Cut { key: low, ties: k - count(low + 1) }
}

/// How many keys reach a least one.
struct Reach<'a> {
    bits: &'a [u32],
    least: u32,
}

impl Work<u32> for Reach<'_> {
    #[inline(always)]
    fn run(self) -> u32 {
        self.bits.iter().map(|bits| u32::from(bits & KEY_MASK >= self.least)).sum()
    }
}

/// A key that about k of n values, which `at` answers, reach, a few more rather than fewer, and room for them; None when that is
/// most of them or they are few.
pub(crate) fn floor_of(
    at: impl Fn(usize) -> f32,
    (n, k): (usize, usize),
    sample: &mut Vec<u32>,
    found: &mut Candidates,
) -> Option<u32> {
    if n < SAMPLED || k == n {
        return None;
    }
    let samples = (n / SAMPLE_EVERY).clamp(SAMPLE_LEAST, SAMPLE_MOST) / TOGETHER * TOGETHER;
    let expected = samples as f64 * (k as f64 / n as f64);
    // Four standard deviations of the count, and some for small counts.
    let rank = (expected + 4.0 * expected.sqrt() + 8.0) as usize;
    if rank >= samples {
        return None;
    }
    let stride = n / samples * TOGETHER;
    sample.clear();
    for i in 0..samples / TOGETHER {
        let place = sampled_place(i, stride);
        sample.extend_from_slice(&std::array::from_fn::<u32, TOGETHER, _>(|j| key(at(place + j))));
    }
    let (_, floor, _) = sample.select_nth_unstable_by(rank, |a, b| b.cmp(a));
    found.reset(room(n, k));
    Some(*floor)
}

/// A key that at least k of a short tensor's values reach, and hardly more, and room for them; None when these are many or the
/// tensor is one to sample.
///
/// It is near the k-th largest of the largest of many groups: each of these stands for a value.
pub(crate) fn floor_of_few(kernel: Kernel, x: &[f32], k: usize, found: &mut Candidates) -> Option<u32> {
    let floor = match x.len() {
        n if n >= SAMPLED || k == 0 => return None,
        n if n >= 4 * MANY && k <= MANY / 2 => kernel.run(FloorOfGroups::<MANY> { x, k }),
        n if n >= 4 * SOME && k <= SOME / 2 => kernel.run(FloorOfGroups::<SOME> { x, k }),
        _ => return None,
    };
    found.reset(room(x.len(), k));
    Some(floor)
}

/// How many groups.
const SOME: usize = 64;
const MANY: usize = 256;

/// Group i is of the values i modulo GROUPS.
struct FloorOfGroups<'a, const GROUPS: usize> {
    x: &'a [f32],
    k: usize,
}

/// Bits of a key that the floor leaves out.
const COARSE: u32 = 16;

impl<const GROUPS: usize> Work<u32> for FloorOfGroups<'_, GROUPS> {
    #[inline(always)]
    fn run(self) -> u32 {
        let mut largest = [0; GROUPS];
        let (rows, rest) = self.x.as_chunks::<GROUPS>();
        for row in rows {
            largest.iter_mut().zip(row).for_each(|(largest, x)| *largest = key(*x).max(*largest));
        }
        largest.iter_mut().zip(rest).for_each(|(largest, x)| *largest = key(*x).max(*largest));
        let largest = largest.map(|key| (key >> COARSE) as u16);
        // The highest that k groups reach.
        let (mut low, mut high) = (0, (KEY_MASK >> COARSE) as u16);
        while low < high {
            let middle = high - (high - low) / 2;
            match largest.iter().map(|key| u16::from(*key >= middle)).sum::<u16>() >= self.k as u16 {
                true => low = middle,
                false => high = middle - 1,
            }
        }
        u32::from(low) << COARSE
    }
}

/// For how many candidates there is room.
pub(crate) fn room(n: usize, k: usize) -> usize {
    (k.saturating_mul(SPARE) + SPARE_LEAST).min(n)
}

/// Where the i-th stride is looked at: anywhere in it, so that a period in the data does not meet one in the sample.
fn sampled_place(i: usize, stride: usize) -> usize {
    let jitter = (i as u64).wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 32;
    i * stride + ((jitter * (stride - TOGETHER + 1) as u64) >> 32) as usize
}

/// Appends the k values that reach the cut, in order of position.
pub(crate) fn push_cut(selection: &mut Selection, values: impl Iterator<Item = (u32, f32)>, k: usize, cut: Cut) {
    push(selection, k, cut, |to| values.for_each(|(index, value)| to.next(index, value)));
}

/// As [`push_cut`], of candidates.
pub(crate) fn push_found(kernel: Kernel, selection: &mut Selection, found: (&[u32], &[u32]), (k, cut): (usize, Cut)) {
    push(selection, k, cut, |to| kernel.compact(found, to));
}

fn push(selection: &mut Selection, k: usize, Cut { key, ties }: Cut, compact: impl FnOnce(&mut Compaction<'_>)) {
    let Selection { indices, values, .. } = selection;
    let first = indices.len();
    indices.resize(first + k + ROOM, 0);
    values.resize(first + k + ROOM, 0.0);
    compact(&mut Compaction { key, ties, indices: &mut indices[first..], values: &mut values[first..], len: 0 });
    indices.truncate(first + k);
    values.truncate(first + k);
}

#[cfg(test)]
mod tests {
    use super::{SAMPLED, TOGETHER, floor_of_few, sampled_place};
    use crate::kernels::{Candidates, key};
    use crate::pipeline::{Gradient, Member, Pipeline, Step};
    use crate::{Kernel, Layers, naive};

    /// k values reach it whatever they are, and of independent ones hardly more.
    #[test]
    fn a_short_tensors_floor_is_reached_by_k_and_few_more() {
        for (n, k) in [(256, 1), (700, 32), (1000, 10), (1024, 128), (SAMPLED - 1, 41), (SAMPLED - 1, 128)] {
            let stream = crate::random::Stream::new(n as u64, [0; 4]);
            let drawn: Vec<f32> = (0..n as u32).map(|i| stream.uniform(i).ln()).collect();
            let (equal, one): (Vec<f32>, Vec<f32>) = (vec![-2.0; n], (0..n).map(|i| f32::from(i == 7)).collect());
            for kernel in Kernel::available() {
                let reaching = |x: &[f32]| {
                    let floor = floor_of_few(kernel, x, k, &mut Candidates::default()).unwrap();
                    x.iter().filter(|x| key(**x) >= floor).count()
                };
                assert!((k..=2 * k + 8).contains(&reaching(&drawn)), "{} for {k} of {n}", reaching(&drawn));
                assert!(reaching(&equal) == n && reaching(&one) >= k);
            }
        }
        for (n, k) in [(SAMPLED, 10), (255, 1), (1000, 33), (1000, 0)] {
            let none = floor_of_few(Kernel::best(), &vec![1.0; n], k, &mut Candidates::default());
            assert_eq!(none, None, "{k} of {n}");
        }
    }

    /// Loud exactly where the sample looks, and nowhere else: the floor is far too high, and too few reach it.
    #[test]
    fn a_sample_that_misleads_changes_nothing() {
        let (n, samples) = (40_000, 1024);
        let mut gradient: Vec<f32> = (0..n).map(|i| 1.0 + (i * 7919 % n) as f32 * 1e-4).collect();
        (0..samples).for_each(|i| {
            let place = sampled_place(i / TOGETHER, n / samples * TOGETHER) + i % TOGETHER;
            gradient[place] = 1e3 + i as f32;
        });
        for kernel in Kernel::available() {
            let spec = "topk(k=0.1)+ef(vanilla)".parse().unwrap();
            let mut rank = Pipeline::new(&spec, Layers::fused(n).unwrap(), Member::alone(0)).with_kernel(kernel);
            let step = Step { index: 0, learning_rate: 1.0 };
            rank.select(Gradient::F32(&gradient), step, true).unwrap();
            assert_eq!(rank.selected(), naive::topk(&gradient, 4000));
        }
    }
}
