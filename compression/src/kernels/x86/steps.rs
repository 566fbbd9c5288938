//! Rounding at random to steps with AVX2, 32 values at a time: floats become whole numbers in one instruction, where plain loops
//! take a dozen to do it as Rust defines it.

use super::super::rounding::{Rounded, Rounding, Squares, Steps};
use super::{load, store};
use crate::random::{FIRST_FACTOR, FOURS, SECOND_FACTOR, SPREAD, Stream};
use std::arch::x86_64::*;

/// Values that share words.
const VALUES: usize = 64;

/// [`Stream::fourths`], bit for bit: two vectors of 8 words, for each of which four numbers are made.
struct Draws {
    spread: __m256i,
    first_key: __m256i,
    second_key: __m256i,
}

impl Draws {
    /// From number `first`, a multiple of 64, on.
    #[inline]
    #[target_feature(enable = "avx2,fma")]
    fn new(random: Stream, first: u32) -> Self {
        let word = _mm256_add_epi32(all(first / 4), _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7));
        let [before, first_key, second_key, _] = random.keys().map(|key| all(key));
        let spread = _mm256_add_epi32(_mm256_mullo_epi32(word, all(SPREAD)), before);
        Self { spread, first_key, second_key }
    }

    /// The next 8 words.
    #[inline]
    #[target_feature(enable = "avx2,fma")]
    fn next(&mut self) -> __m256i {
        let x = _mm256_xor_si256(_mm256_xor_si256(self.spread, _mm256_srli_epi32::<16>(self.spread)), self.first_key);
        let x = _mm256_mullo_epi32(x, all(FIRST_FACTOR));
        let x = _mm256_xor_si256(_mm256_xor_si256(x, _mm256_srli_epi32::<15>(x)), self.second_key);
        let x = _mm256_mullo_epi32(x, all(SECOND_FACTOR));
        self.spread = _mm256_add_epi32(self.spread, all(SPREAD.wrapping_mul(8)));
        _mm256_xor_si256(x, _mm256_srli_epi32::<16>(x))
    }
}

#[inline]
#[target_feature(enable = "avx2,fma")]
fn all(value: u32) -> __m256i {
    _mm256_set1_epi32(value as i32)
}

/// Codes of a byte each, of whole groups of 64 values, the first a multiple of 64; answers how many values, and Σ levels².
/// Of none, where the rule is another or codes are narrower.
#[target_feature(enable = "avx2,fma")]
pub(crate) fn round(rounding: Rounding, values: Rounded<'_>, _: &mut Squares) -> (usize, Option<u64>) {
    let Rounding::Steps(steps) = rounding else { return (0, None) };
    let Rounded { random, x, first, width, codes, .. } = values;
    let groups = x.as_chunks::<VALUES>().0;
    if width != 8 || groups.is_empty() {
        return (0, None);
    }
    assert!(first.is_multiple_of(VALUES as u32), "words are drawn for whole groups");
    let (mut draws, offset) = (Draws::new(random, first), _mm256_set1_epi8(steps.offset as u8 as i8));
    let mut sum = _mm256_setzero_si256();
    for (group, to) in groups.iter().zip(codes.as_chunks_mut::<VALUES>().0) {
        let words = [draws.next(), draws.next()];
        for (half, to) in to.as_chunks_mut::<32>().0.iter_mut().enumerate() {
            let part = |i: usize| {
                let word = _mm256_mullo_epi32(words[i % 2], all(FOURS[2 * half + i / 2]));
                level(steps, &group.as_chunks::<8>().0[4 * half + i], word)
            };
            let pairs = [_mm256_packs_epi32(part(0), part(1)), _mm256_packs_epi32(part(2), part(3))];
            for pair in pairs {
                sum = _mm256_add_epi32(sum, _mm256_madd_epi16(pair, pair));
            }
            // Packing works within halves of a vector.
            let order = _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7);
            let levels = _mm256_permutevar8x32_epi32(_mm256_packs_epi16(pairs[0], pairs[1]), order);
            store(to, _mm256_add_epi8(levels, offset));
        }
    }
    let sums: [i32; 8] = load(&sum);
    (VALUES * groups.len(), Some(sums.into_iter().map(|sum| sum as u64).sum()))
}

#[inline]
#[target_feature(enable = "avx2,fma")]
fn level(steps: Steps, x: &[f32; 8], word: __m256i) -> __m256i {
    let parts = _mm256_mul_ps(load(x), _mm256_set1_ps(steps.scale));
    let parts = _mm256_max_ps(_mm256_min_ps(parts, _mm256_set1_ps(steps.high)), _mm256_set1_ps(-steps.low));
    let below_step = _mm256_and_si256(word, all((1 << 24) - 1));
    _mm256_srai_epi32::<24>(_mm256_add_epi32(_mm256_cvttps_epi32(parts), below_step))
}
