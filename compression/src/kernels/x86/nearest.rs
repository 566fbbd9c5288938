//! Nearest codes, 64 at a time.

use super::super::KEY_MASK;
use super::super::nearest::{Even, Lines};
use super::rounding::{in_order, joined, negative, quarter, unsigned_bytes};
use super::{load, store};
use std::arch::x86_64::*;

/// Codes of whole groups of 64 values, one after the other by `exact` where the vector answers that one of them is in doubt;
/// answers how many.
#[inline]
#[target_feature(enable = "avx512f")]
fn groups(
    x: &[f32],
    codes: &mut [u8],
    exact: impl Fn(f32) -> u8,
    mut vector: impl FnMut(&[f32; 64], &mut [u8; 64]) -> bool,
) -> usize {
    let (groups, _) = x.as_chunks::<64>();
    for (group, to) in groups.iter().zip(codes.as_chunks_mut::<64>().0) {
        if !vector(group, to) {
            to.iter_mut().zip(group).for_each(|(to, x)| *to = exact(*x));
        }
    }
    64 * groups.len().min(codes.len() / 64)
}

#[target_feature(enable = "avx512f,avx512bw,avx512dq")]
pub(crate) fn even_codes(even: Even, x: &[f32], codes: &mut [u8], exact: impl Fn(f32) -> u8) -> usize {
    let inverses = even.inverses.map(|inverse| _mm512_set1_ps(inverse));
    let lowest = _mm512_set1_epi16(even.lowest);
    groups(x, codes, exact, |group, to| {
        let (mut points, mut doubt) = ([_mm512_setzero_si512(); 4], 0);
        for (part, point) in points.iter_mut().enumerate() {
            let x = quarter(group, part);
            // To the nearest, ties to even: rounding never reverses an order.
            let [low, high] = inverses.map(|inverse| _mm512_cvtps_epi32(_mm512_mul_ps(x, inverse)));
            doubt |= _mm512_cmpneq_epi32_mask(low, high);
            *point = low;
        }
        let halves =
            [(0, 1), (2, 3)].map(|(low, high)| _mm512_sub_epi16(_mm512_packs_epi32(points[low], points[high]), lowest));
        store(to, in_order(_mm512_packus_epi16(halves[0], halves[1])));
        doubt == 0
    })
}

#[target_feature(enable = "avx512f,avx512bw,avx512dq")]
pub(crate) fn line_codes(lines: &Lines, x: &[f32], codes: &mut [u8], exact: impl Fn(f32) -> u8) -> usize {
    let [starts, numbers] = [&lines.starts, &lines.lines].map(load::<[__m512i; 2], _>);
    let (slopes, offsets, lasts) = (load(&lines.slopes), load(&lines.offsets), load(&lines.lasts));
    let (mask, first) = (_mm512_set1_epi32(KEY_MASK as i32), _mm512_set1_epi32(lines.first_octave));
    let (zero, one, margin) = (_mm512_setzero_si512(), _mm512_set1_epi32(1), _mm512_set1_ps(Lines::MARGIN));
    let (sign, largest) = (_mm512_set1_epi8(i8::MIN), _mm512_set1_epi8(-1));
    groups(x, codes, exact, |group, to| {
        let (mut levels, mut minus, mut doubt) = ([zero; 4], [0; 4], 0);
        for (part, level) in levels.iter_mut().enumerate() {
            let x = quarter(group, part);
            minus[part] = negative(x);
            let key = _mm512_and_si512(_mm512_castps_si512(x), mask);
            let octave = _mm512_max_epi32(_mm512_sub_epi32(_mm512_srli_epi32::<23>(key), first), zero);
            let next = _mm512_cmpge_epi32_mask(key, _mm512_permutex2var_epi32(starts[0], octave, starts[1]));
            let line = _mm512_permutex2var_epi32(numbers[0], octave, numbers[1]);
            let line = _mm512_mask_add_epi32(line, next, line, one);
            let (slope, offset) = (_mm512_permutexvar_ps(line, slopes), _mm512_permutexvar_ps(line, offsets));
            let low = _mm512_fmadd_ps(_mm512_castsi512_ps(key), slope, offset);
            let last = _mm512_permutexvar_epi32(line, lasts);
            let [low, high] =
                [low, _mm512_add_ps(low, margin)].map(|code| _mm512_min_epi32(_mm512_cvttps_epi32(code), last));
            doubt |= _mm512_cmpneq_epi32_mask(low, high);
            *level = low;
        }
        let (codes, minus) = (unsigned_bytes(levels), joined(minus));
        let (is_zero, is_one) = (_mm512_testn_epi8_mask(codes, codes), _mm512_cmpeq_epi8_mask(codes, sign));
        let signed = _mm512_mask_add_epi8(codes, minus & !is_zero, codes, sign);
        store(to, _mm512_mask_mov_epi8(signed, minus & is_one, largest));
        doubt == 0
    })
}
