//! Halves, 16 at a time.

use super::super::KEY_MASK;
use super::super::rounding::Squares;
use super::rounding::{Sums, quarter};
use super::{load, store};
use std::arch::x86_64::*;

/// Rounds to nearest, ties to even, whatever the processor's mode, and raises nothing.
const NEAREST: i32 = _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC;

/// Bits of the halves nearest to values.
#[inline]
#[target_feature(enable = "avx512f")]
fn narrow16<const F16: bool>(x: __m512) -> __m256i {
    if F16 {
        return _mm512_cvtps_ph::<NEAREST>(x);
    }
    let bits = _mm512_castps_si512(x);
    let odd = _mm512_and_si512(_mm512_srli_epi32::<16>(bits), _mm512_set1_epi32(1));
    let carried = _mm512_add_epi32(_mm512_add_epi32(bits, _mm512_set1_epi32(0x7fff)), odd);
    _mm512_cvtepi32_epi16(_mm512_srli_epi32::<16>(carried))
}

#[inline]
#[target_feature(enable = "avx512f")]
fn widen16<const F16: bool>(halves: __m256i) -> __m512 {
    match F16 {
        true => _mm512_cvtph_ps(halves),
        false => _mm512_castsi512_ps(_mm512_slli_epi32::<16>(_mm512_cvtepu16_epi32(halves))),
    }
}

/// Whole groups of 64 values; answers how many values.
#[target_feature(enable = "avx512f,avx512dq")]
pub(crate) fn narrow<const F16: bool>(
    (x, limit): (&[f32], f32),
    to: &mut [[u8; 2]],
    (compensated, sent): (&mut Squares, &mut Squares),
) -> usize {
    let (mut of_compensated, mut of_sent, limit) = (Sums::new(compensated), Sums::new(sent), _mm512_set1_ps(limit));
    let (groups, _) = x.as_chunks::<64>();
    for (group, to) in groups.iter().zip(to.as_chunks_mut::<64>().0) {
        for (part, to) in to.as_chunks_mut::<16>().0.iter_mut().enumerate() {
            let x = quarter(group, part);
            of_compensated.add(part, x);
            // The smaller magnitude, with the sign of x.
            let halves = narrow16::<F16>(_mm512_range_ps::<0b0010>(x, limit));
            // Squares of 11 bits are exact; those of a bf16 may lie below f32's range.
            match F16 {
                true => of_sent.add_exact(part, widen16::<F16>(halves)),
                false => of_sent.add(part, widen16::<F16>(halves)),
            }
            store(to, halves);
        }
    }
    of_compensated.store(compensated);
    of_sent.store(sent);
    64 * groups.len()
}

/// Whole vectors; answers how many values, and the largest key of what was added.
#[target_feature(enable = "avx512f")]
pub(crate) fn widen<const FRESH: bool, const F16: bool>(
    from: &[[u8; 2]],
    (scale, out): (f32, &mut [f32]),
) -> (usize, u32) {
    let (scale, mask, mut max) = (_mm512_set1_ps(scale), _mm512_set1_epi32(KEY_MASK as i32), _mm512_setzero_si512());
    let (groups, _) = out.as_chunks_mut::<16>();
    let done = 16 * groups.len().min(from.len() / 16);
    for (to, from) in groups.iter_mut().zip(from.as_chunks::<16>().0) {
        let value = _mm512_mul_ps(widen16::<F16>(load(from)), scale);
        max = _mm512_max_epu32(max, _mm512_and_si512(_mm512_castps_si512(value), mask));
        let held = if FRESH { _mm512_setzero_ps() } else { load(to) };
        store(to, _mm512_add_ps(held, value));
    }
    (done, _mm512_reduce_max_epu32(max))
}
