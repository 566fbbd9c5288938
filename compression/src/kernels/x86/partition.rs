//! Two sides of a threshold, 16 values at a time.

use super::super::partition::{Columns, LANES, PartitionSums};
use super::{load, store};
use std::arch::x86_64::*;

/// [`LANES`] sums in two vectors.
type Lanes = [__m512d; 2];

#[inline]
#[target_feature(enable = "avx512f")]
fn widened(x: __m512) -> [__m512d; 2] {
    let upper = _mm256_castpd_ps(_mm512_extractf64x4_pd::<1>(_mm512_castps_pd(x)));
    [_mm512_cvtps_pd(_mm512_castps512_ps256(x)), _mm512_cvtps_pd(upper)]
}

/// Whole vectors; answers how many values.
#[target_feature(enable = "avx512f,popcnt")]
pub(crate) fn partition(x: &[f32], threshold: f32, bits: &mut [u8], partition: &mut PartitionSums) -> usize {
    let threshold = _mm512_set1_ps(threshold);
    let (mut below, mut others): (Lanes, Lanes) = (load(&partition.below), load(&partition.others));
    let (mut squares, mut count): (Lanes, _) = (load(&partition.squares), 0);
    let (groups, _) = x.as_chunks::<LANES>();
    for (group, bits) in groups.iter().zip(bits.as_chunks_mut::<2>().0) {
        let x = load(group);
        let mask = _mm512_cmp_ps_mask::<_CMP_LT_OQ>(x, threshold);
        *bits = mask.to_le_bytes();
        count += u64::from(mask.count_ones());
        for (half, (x, mask)) in widened(x).into_iter().zip(mask.to_le_bytes()).enumerate() {
            below[half] = _mm512_mask_add_pd(below[half], mask, below[half], x);
            others[half] = _mm512_mask_add_pd(others[half], !mask, others[half], x);
            // Squares are exact in f64: it does not matter whether they are added in one instruction.
            squares[half] = _mm512_fmadd_pd(x, x, squares[half]);
        }
    }
    store(&mut partition.below, below);
    store(&mut partition.others, others);
    store(&mut partition.squares, squares);
    partition.count_below += count;
    LANES * groups.len()
}

/// Rows that are added to sums while these are in registers.
const ROWS: usize = 8;

/// Whole vectors of columns, of rows in order; answers how many columns.
#[target_feature(enable = "avx512f")]
pub(crate) fn partition_columns(x: &[f32], threshold: f32, columns: &mut Columns) -> usize {
    let (width, threshold) = (columns.below.len(), _mm512_set1_ps(threshold));
    let Columns { sums: [below, others], below: counts } = columns;
    for rows in x.chunks(ROWS * width) {
        let sums = below.as_chunks_mut::<LANES>().0.iter_mut().zip(others.as_chunks_mut::<LANES>().0);
        for (i, ((to_below, to_others), to_count)) in sums.zip(counts.as_chunks_mut::<LANES>().0).enumerate() {
            let (mut below, mut others): (Lanes, Lanes) = (load(to_below), load(to_others));
            let mut count = load(to_count);
            for group in rows.chunks_exact(width).filter_map(|row| row[LANES * i..].first_chunk::<LANES>()) {
                let x = load(group);
                let mask = _mm512_cmp_ps_mask::<_CMP_LT_OQ>(x, threshold);
                count = _mm512_mask_add_epi32(count, mask, count, _mm512_set1_epi32(1));
                for (half, (x, mask)) in widened(x).into_iter().zip(mask.to_le_bytes()).enumerate() {
                    below[half] = _mm512_mask_add_pd(below[half], mask, below[half], x);
                    others[half] = _mm512_mask_add_pd(others[half], !mask, others[half], x);
                }
            }
            store(to_below, below);
            store(to_others, others);
            store(to_count, count);
        }
    }
    width / LANES * LANES
}

/// `out +=` either value of each column, by the bits; true.
#[target_feature(enable = "avx512f")]
pub(crate) fn add_columns<const FRESH: bool>(bits: &[u8], [clear, set]: [&[f32]; 2], out: &mut [f32]) -> bool {
    let mut place = 0;
    for row in out.chunks_mut(clear.len()) {
        for ((to, clear), set) in row.chunks_mut(LANES).zip(clear.chunks(LANES)).zip(set.chunks(LANES)) {
            let there = u16::MAX >> (LANES - to.len());
            let mut word = [0; 4];
            let left = &bits[place / 8..];
            match left.first_chunk::<4>() {
                Some(whole) => word = *whole,
                None => word[..left.len()].copy_from_slice(left),
            }
            let is_set = (u32::from_le_bytes(word) >> (place % 8)) as u16;
            assert!(clear.len() >= to.len() && set.len() >= to.len(), "values of each column");
            // SAFETY: all three have the values of the mask.
            unsafe {
                let [clear, set] = [clear, set].map(|values| _mm512_maskz_loadu_ps(there, values.as_ptr()));
                let held = if FRESH { _mm512_setzero_ps() } else { _mm512_maskz_loadu_ps(there, to.as_ptr()) };
                let sum = _mm512_add_ps(held, _mm512_mask_blend_ps(is_set, clear, set));
                _mm512_mask_storeu_ps(to.as_mut_ptr(), there, sum);
            }
            place += to.len();
        }
    }
    true
}
