//! Random numbers, 64 at a time: [`Stream::fourths`], bit for bit.

use crate::random::{FIRST_FACTOR, FOURS, SECOND_FACTOR, SPREAD, Stream};
use std::arch::x86_64::*;

/// [`Stream::fourths`].
pub(super) struct Draws {
    spread: __m512i,
    first_key: __m512i,
    second_key: __m512i,
}

impl Draws {
    /// From number `first`, a multiple of 64, on.
    #[inline]
    #[target_feature(enable = "avx512f")]
    pub(super) fn new(random: Stream, first: u32) -> Self {
        let lane = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
        let word = _mm512_add_epi32(_mm512_set1_epi32((first / 4) as i32), lane);
        let key = random.keys().map(|word| _mm512_set1_epi32(word as i32));
        let spread = _mm512_add_epi32(times(word, SPREAD), key[0]);
        Self { spread, first_key: key[1], second_key: key[2] }
    }

    /// The next 64, 16 in a vector.
    #[inline]
    #[target_feature(enable = "avx512f")]
    pub(super) fn next(&mut self) -> [__m512i; 4] {
        const XOR3: i32 = 0x96;
        let x = self.spread;
        let x = times(_mm512_ternarylogic_epi32::<XOR3>(x, _mm512_srli_epi32::<16>(x), self.first_key), FIRST_FACTOR);
        let x = times(_mm512_ternarylogic_epi32::<XOR3>(x, _mm512_srli_epi32::<15>(x), self.second_key), SECOND_FACTOR);
        let word = _mm512_xor_si512(x, _mm512_srli_epi32::<16>(x));
        self.spread = _mm512_add_epi32(self.spread, _mm512_set1_epi32(SPREAD.wrapping_mul(16) as i32));
        [word, times(word, FOURS[1]), times(word, FOURS[2]), times(word, FOURS[3])]
    }
}

#[inline]
#[target_feature(enable = "avx512f")]
fn times(x: __m512i, factor: u32) -> __m512i {
    _mm512_mullo_epi32(x, _mm512_set1_epi32(factor as i32))
}
