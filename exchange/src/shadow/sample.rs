//! What of a bucket a shadow looks at.

use crate::bucket::Param;
use flexcomm_domain::spec::{Class, CompressorSpec, Scope};
use rand::seq::SliceRandom;
use rand::seq::index::sample;
use rand::{Rng, SeedableRng};
use rand_chacha::ChaCha8Rng;
use std::ops::Range;

/// Layers up to this many values are taken whole: a share of a few values is no estimate.
const WHOLE_LAYER: usize = 4096;

/// Least values that a sample should keep: the energy of so few large ones is known to a few percent.
const LEAST_KEPT: f64 = 1024.0;

/// Blocks begin and end at multiples of this, where they do not reach the layer's end: QSGD has a norm for as many values.
const GRAIN: usize = 512;

/// How much is sampled, and by which draw.
#[derive(Debug, Clone, Copy)]
pub(super) struct Sampling {
    /// Of the values.
    pub(super) share: f64,
    pub(super) seed: u64,
}

/// Which values of a bucket.
#[derive(Debug)]
pub(super) enum Places {
    /// One after the other.
    Block(Range<usize>),
    /// Ascending.
    Coordinates(Vec<u32>),
}

impl Places {
    pub(super) fn len(&self) -> usize {
        match self {
            Self::Block(range) => range.len(),
            Self::Coordinates(indices) => indices.len(),
        }
    }

    /// Indices in the bucket.
    pub(super) fn indices(&self) -> Vec<u32> {
        match self {
            Self::Block(range) => (range.start as u32..range.end as u32).collect(),
            Self::Coordinates(indices) => indices.clone(),
        }
    }

    /// `to` becomes the values there.
    pub(super) fn copy(&self, values: &[f32], to: &mut Vec<f32>) {
        to.clear();
        match self {
            Self::Block(range) => to.extend_from_slice(&values[range.clone()]),
            Self::Coordinates(indices) => to.extend(indices.iter().map(|i| values[*i as usize])),
        }
    }

    /// The values there; none of none.
    pub(super) fn of(&self, values: &[f32]) -> Vec<f32> {
        let mut out = Vec::new();
        if !values.is_empty() {
            self.copy(values, &mut out);
        }
        out
    }
}

/// A part of a bucket, as rows of so many columns, and for how many of the bucket's values each of its values counts.
#[derive(Debug)]
pub(super) struct Sample {
    pub(super) places: Places,
    pub(super) cols: usize,
    pub(super) weight: f64,
}

/// The samples of a bucket that mean something for a compressor.
pub(super) fn samples(spec: &CompressorSpec, params: &[Param], sampling: Sampling) -> Vec<Sample> {
    let mut rng = ChaCha8Rng::seed_from_u64(sampling.seed);
    match spec.compressor().class {
        Class::LowRank => matrices(params, sampling.share, &mut rng),
        Class::Sparsification => coordinates(spec, params, sampling.share, &mut rng),
        Class::Quantization | Class::Hybrid => contiguous(params, sampling.share, &mut rng),
    }
}

/// A uniform subset of the fused bucket, or of each layer where each is compressed by itself.
fn coordinates(spec: &CompressorSpec, params: &[Param], share: f64, rng: &mut ChaCha8Rng) -> Vec<Sample> {
    let lengths: Vec<usize> = match spec.scope() {
        Scope::Tensor => params.iter().map(|param| param.len).collect(),
        Scope::Bucket => vec![params.iter().map(|param| param.len).sum()],
    };
    // A number of values is one of all values.
    let least = spec.ratio().map_or(usize::MAX, |ratio| ((LEAST_KEPT / ratio.get()).ceil() as usize).max(WHOLE_LAYER));
    let mut start = 0;
    let mut drawn = Vec::with_capacity(lengths.len());
    for length in lengths {
        let wanted = ((length as f64 * share).ceil() as usize).max(least).min(length);
        let mut indices: Vec<u32> = sample(rng, length, wanted).into_iter().map(|i| (start + i) as u32).collect();
        indices.sort_unstable();
        if length > 0 {
            let weight = length as f64 / wanted as f64;
            drawn.push(Sample { places: Places::Coordinates(indices), cols: 1, weight });
        }
        start += length;
    }
    drawn
}

/// Begin of each parameter in its bucket.
fn placed(params: &[Param]) -> impl Iterator<Item = (usize, &Param)> {
    let ends = params.iter().scan(0, |end, param| {
        *end += param.len;
        Some(*end - param.len)
    });
    ends.zip(params).filter(|(_, param)| param.len > 0)
}

fn contiguous(params: &[Param], share: f64, rng: &mut ChaCha8Rng) -> Vec<Sample> {
    let place = |(start, param): (usize, &Param)| {
        let wanted = ((param.len as f64 * share).ceil() as usize).max(WHOLE_LAYER).next_multiple_of(GRAIN);
        let length = wanted.min(param.len);
        let first = GRAIN * rng.random_range(0..=(param.len - length) / GRAIN);
        let places = Places::Block(start + first..start + first + length);
        Sample { places, cols: 1, weight: param.len as f64 / length as f64 }
    };
    placed(params).map(place).collect()
}

/// Whole matrices, by chance, until they are as many values as asked for; vectors all.
fn matrices(params: &[Param], share: f64, rng: &mut ChaCha8Rng) -> Vec<Sample> {
    let is_matrix = |param: &Param| param.cols > 1 && param.cols < param.len;
    let (mut matrices, vectors): (Vec<_>, Vec<_>) = placed(params).partition(|(_, param)| is_matrix(param));
    let all: usize = matrices.iter().map(|(_, param)| param.len).sum();
    matrices.shuffle(rng);
    let mut taken = 0;
    matrices.retain(|(_, param)| {
        let wanted = taken == 0 || (taken as f64) < share * all as f64;
        taken += if wanted { param.len } else { 0 };
        wanted
    });
    let weight = if taken > 0 { all as f64 / taken as f64 } else { 1.0 };
    let place = |(start, param): (usize, &Param), weight| Sample {
        places: Places::Block(start..start + param.len),
        cols: param.cols,
        weight,
    };
    let matrices = matrices.into_iter().map(|at| place(at, weight));
    matrices.chain(vectors.into_iter().map(|at| place(at, 1.0))).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn params() -> Vec<Param> {
        let of = |id, len, cols| Param { id, len, cols };
        vec![of(0, 20_000, 100), of(1, 100, 1), of(2, 30_000, 300), of(3, 0, 1), of(4, 40_000, 1)]
    }

    #[test]
    fn blocks_are_contiguous_and_count_for_their_layers() {
        let mut rng = ChaCha8Rng::seed_from_u64(1);
        let places = contiguous(&params(), 0.25, &mut rng);
        let lengths: Vec<_> = places.iter().map(|place| place.places.len()).collect();
        assert_eq!(lengths, [5120, 100, 7680, 10_240]);
        for (place, (start, param)) in places.iter().zip(placed(&params())) {
            let Places::Block(range) = &place.places else { panic!("{place:?}") };
            assert!(range.start >= start && range.end <= start + param.len, "{range:?}");
            assert!((place.weight * place.places.len() as f64 - param.len as f64).abs() < 1e-6);
        }
    }

    #[test]
    fn matrices_are_taken_whole() {
        let mut rng = ChaCha8Rng::seed_from_u64(1);
        let few = matrices(&params(), 0.1, &mut rng);
        assert_eq!(few.len(), 3, "one matrix and both vectors");
        let (start, cols) = (few[0].places.indices()[0] as usize, few[0].cols);
        assert!([(0, 100), (20_100, 300)].contains(&(start, cols)));
        assert!((few[0].weight * few[0].places.len() as f64 - 50_000.0).abs() < 1e-6);
        assert_eq!(matrices(&params(), 1.0, &mut rng).iter().map(|p| p.places.len()).sum::<usize>(), 90_100);
    }
}
