//! Signs by comparison into a mask. Both answer how many values are done, a multiple of 8; the caller does the rest.

use super::super::KEY_MASK;
use super::super::signs::Sums;
use std::arch::x86_64::*;

#[target_feature(enable = "avx512f")]
pub(super) fn avx512<const MAGNITUDES: bool>(x: &[f32], bits: &mut [u8], sums: &mut Sums) -> usize {
    let (groups, _) = x.as_chunks::<16>();
    let (mut magnitudes, mut squares) = (_mm512_setzero_pd(), _mm512_setzero_pd());
    let (mask, mut max) = (_mm512_set1_epi32(KEY_MASK as i32), _mm512_setzero_si512());
    for (group, to) in groups.iter().zip(bits.as_chunks_mut::<2>().0) {
        // SAFETY: a group has 16 values.
        let values = unsafe { _mm512_loadu_ps(group.as_ptr()) };
        *to = _mm512_cmp_ps_mask::<_CMP_LT_OQ>(values, _mm512_setzero_ps()).to_le_bytes();
        let keys = _mm512_and_si512(_mm512_castps_si512(values), mask);
        max = _mm512_max_epu32(max, keys);
        let low = _mm512_cvtps_pd(_mm256_castsi256_ps(_mm512_castsi512_si256(keys)));
        let high = _mm512_cvtps_pd(_mm256_castsi256_ps(_mm512_extracti64x4_epi64::<1>(keys)));
        // The lower eight before the upper: each lane adds in the order of positions.
        if MAGNITUDES {
            magnitudes = _mm512_add_pd(_mm512_add_pd(magnitudes, low), high);
        }
        squares = _mm512_add_pd(squares, _mm512_mul_pd(low, low));
        squares = _mm512_add_pd(squares, _mm512_mul_pd(high, high));
    }
    // SAFETY: arrays of the size of the vector.
    unsafe {
        _mm512_storeu_pd(sums.magnitudes.as_mut_ptr(), magnitudes);
        _mm512_storeu_pd(sums.squares.as_mut_ptr(), squares);
    }
    sums.max_key = _mm512_reduce_max_epu32(max);
    16 * groups.len()
}

#[target_feature(enable = "avx2,fma")]
pub(super) fn avx2(x: &[f32], bits: &mut [u8], sums: &mut Sums) -> usize {
    let (groups, _) = x.as_chunks::<8>();
    let (mut magnitudes, mut squares) = ([_mm256_setzero_pd(); 2], [_mm256_setzero_pd(); 2]);
    let (mask, mut max) = (_mm256_set1_epi32(KEY_MASK as i32), _mm256_setzero_si256());
    for (group, to) in groups.iter().zip(bits) {
        // SAFETY: a group has 8 values.
        let values = unsafe { _mm256_loadu_ps(group.as_ptr()) };
        *to = _mm256_movemask_ps(_mm256_cmp_ps::<_CMP_LT_OQ>(values, _mm256_setzero_ps())) as u8;
        let keys = _mm256_and_si256(_mm256_castps_si256(values), mask);
        max = _mm256_max_epu32(max, keys);
        let keys = _mm256_castsi256_ps(keys);
        let halves = [_mm256_castps256_ps128(keys), _mm256_extractf128_ps::<1>(keys)];
        for (half, (magnitudes, squares)) in halves.into_iter().zip(magnitudes.iter_mut().zip(&mut squares)) {
            let wide = _mm256_cvtps_pd(half);
            *magnitudes = _mm256_add_pd(*magnitudes, wide);
            *squares = _mm256_add_pd(*squares, _mm256_mul_pd(wide, wide));
        }
    }
    let mut keys = [0u32; 8];
    // SAFETY: arrays of the size of the vectors.
    unsafe {
        for half in 0..2 {
            _mm256_storeu_pd(sums.magnitudes[4 * half..].as_mut_ptr(), magnitudes[half]);
            _mm256_storeu_pd(sums.squares[4 * half..].as_mut_ptr(), squares[half]);
        }
        _mm256_storeu_si256(keys.as_mut_ptr().cast(), max);
    }
    sums.max_key = keys.into_iter().fold(0, u32::max);
    8 * groups.len()
}

#[target_feature(enable = "avx512f")]
pub(super) fn add_avx512(bits: &[u8], value: f32, out: &mut [f32]) -> usize {
    let (plus, minus) = (_mm512_set1_ps(value), _mm512_set1_ps(-value));
    let (groups, _) = out.as_chunks_mut::<16>();
    for (group, bits) in groups.iter_mut().zip(bits.as_chunks::<2>().0) {
        let signed = _mm512_mask_blend_ps(u16::from_le_bytes(*bits), plus, minus);
        // SAFETY: a group has 16 values.
        unsafe { _mm512_storeu_ps(group.as_mut_ptr(), _mm512_add_ps(_mm512_loadu_ps(group.as_ptr()), signed)) };
    }
    16 * groups.len()
}
