//! Shadows of what a pipeline runs: contiguous blocks of each layer, since quantizers have norms of neighbours, and whole
//! matrices for what factors them.

use super::WHOLE_LAYER;
use crate::bucket::Param;
use crate::error::EngineError;
use crate::piped::{How, Piped, layers};
use flexcomm_compression::Energy;
use flexcomm_compression::pipeline::{Member, Step};
use flexcomm_domain::spec::{Class, CompressorSpec};
use flexcomm_trainer::{Heard, Status};
use rand::seq::SliceRandom;
use rand::{Rng, SeedableRng};
use rand_chacha::ChaCha8Rng;
use std::ops::Range;

/// Blocks begin and end at multiples of this, where they do not reach the layer's end: QSGD has a norm for as many values.
const GRAIN: usize = 512;

/// Values of a layer that a candidate compresses as it would in training, by itself.
#[derive(Debug)]
pub(super) struct Block {
    range: Range<usize>,
    piped: Box<Piped>,
    buffer: Vec<u8>,
    out: Vec<f32>,
}

/// Where a block lies, as rows of so many columns, and for how many of the bucket's values each of its values counts.
struct Place {
    range: Range<usize>,
    cols: usize,
    weight: f64,
}

/// The blocks of a bucket with their weights, holding back what training does.
pub(super) fn blocks(
    spec: &CompressorSpec,
    params: &[Param],
    residual: &[f32],
    (share, seed): (f64, u64),
) -> Result<Vec<(f64, Block)>, EngineError> {
    let mut rng = ChaCha8Rng::seed_from_u64(seed);
    let places = match spec.compressor().class {
        Class::LowRank => matrices(params, share, &mut rng),
        Class::Quantization | Class::Sparsification | Class::Hybrid => contiguous(params, share, &mut rng),
    };
    let block = |(number, place): (usize, Place)| {
        let layer = layers(&[Param { id: 0, len: place.range.len(), cols: place.cols }])?;
        let member = Member { tensor: number as u32, ..Member::alone(seed) };
        let held = &residual[place.range.clone()];
        let piped = match held.iter().all(|value| *value == 0.0) {
            true => Piped::new(0, spec, layer, member),
            false => Piped::holding(0, spec, (layer, member), held)?,
        };
        let (piped, out) = (Box::new(piped), vec![0.0; place.range.len()]);
        Ok((place.weight, Block { range: place.range, piped, buffer: Vec::new(), out }))
    };
    places.into_iter().enumerate().map(block).collect()
}

/// Begin of each parameter in its bucket.
fn placed(params: &[Param]) -> impl Iterator<Item = (usize, &Param)> {
    let ends = params.iter().scan(0, |end, param| {
        *end += param.len;
        Some(*end - param.len)
    });
    ends.zip(params).filter(|(_, param)| param.len > 0)
}

fn contiguous(params: &[Param], share: f64, rng: &mut ChaCha8Rng) -> Vec<Place> {
    let place = |(start, param): (usize, &Param)| {
        let wanted = ((param.len as f64 * share).ceil() as usize).max(WHOLE_LAYER).next_multiple_of(GRAIN);
        let length = wanted.min(param.len);
        let first = GRAIN * rng.random_range(0..=(param.len - length) / GRAIN);
        let range = start + first..start + first + length;
        Place { range, cols: 1, weight: param.len as f64 / length as f64 }
    };
    placed(params).map(place).collect()
}

/// Whole matrices, by chance, until they are as many values as asked for; vectors all.
fn matrices(params: &[Param], share: f64, rng: &mut ChaCha8Rng) -> Vec<Place> {
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
    let place =
        |(start, param): (usize, &Param), weight| Place { range: start..start + param.len, cols: param.cols, weight };
    let matrices = matrices.into_iter().map(|at| place(at, weight));
    matrices.chain(vectors.into_iter().map(|at| place(at, 1.0))).collect()
}

impl Block {
    /// Compresses its part of a bucket's gradient, as the only rank; what was kept of what, nothing of a gradient that is not
    /// finite.
    pub(super) fn step(&mut self, gradient: &[f32], index: u64) -> Result<Energy, EngineError> {
        let Self { range, piped, buffer, out } = self;
        out.copy_from_slice(&gradient[range.clone()]);
        let mut turn = piped.begin(out, Step { index, learning_rate: 1.0 });
        let bad = piped.status() != Status::default();
        let heard = Heard { not_finite: u32::from(bad), ..Heard::default() };
        loop {
            buffer.clear();
            buffer.resize(turn.bytes, 0);
            piped.write(buffer);
            if turn.last || turn.how == How::Over {
                break;
            }
            turn = piped.next(&heard, &[buffer])?;
        }
        piped.end(Some(&heard), &[buffer], out)?;
        Ok(if bad { Energy::default() } else { piped.energy() })
    }
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
        let lengths: Vec<_> = places.iter().map(|place| place.range.len()).collect();
        assert_eq!(lengths, [5120, 100, 7680, 10_240]);
        for (place, (start, param)) in places.iter().zip(placed(&params())) {
            assert!(place.range.start >= start && place.range.end <= start + param.len, "{:?}", place.range);
            assert!((place.weight * place.range.len() as f64 - param.len as f64).abs() < 1e-6);
        }
    }

    #[test]
    fn matrices_are_taken_whole() {
        let mut rng = ChaCha8Rng::seed_from_u64(1);
        let few = matrices(&params(), 0.1, &mut rng);
        assert_eq!(few.len(), 3, "one matrix and both vectors");
        let (start, cols) = (few[0].range.start, few[0].cols);
        assert!([(0, 100), (20_100, 300)].contains(&(start, cols)));
        assert!((few[0].weight * few[0].range.len() as f64 - 50_000.0).abs() < 1e-6);
        assert_eq!(matrices(&params(), 1.0, &mut rng).iter().map(|p| p.range.len()).sum::<usize>(), 90_100);
    }
}
