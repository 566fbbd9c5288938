//! Random words, 16 at a time: [`Stream::twins`], bit for bit.

use super::pass::AHEAD;
use crate::random::{Counter, Stream};
use std::arch::x86_64::*;

/// [`Stream::twins`].
pub(super) struct Draws {
    number: __m512i,
    spread: __m512i,
    first_key: __m512i,
    second_key: __m512i,
    third_key: __m512i,
}

impl Draws {
    /// From group `group` of 32 values on, which have 16 words.
    #[inline]
    #[target_feature(enable = "avx512f")]
    pub(super) fn new(random: Stream, group: u32) -> Self {
        let lane = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
        let number = _mm512_add_epi32(_mm512_set1_epi32(16 * group as i32), lane);
        let key = random.keys().map(|word| word as i32);
        Self {
            number,
            spread: _mm512_mullo_epi32(number, _mm512_set1_epi32(Counter::SPREAD as i32)),
            // x ^ k and its upper half moved down, in one.
            first_key: _mm512_set1_epi32(key[0] ^ (random.keys()[0] >> 16) as i32),
            second_key: _mm512_set1_epi32(key[1]),
            third_key: _mm512_set1_epi32(key[2]),
        }
    }

    /// The next 16 words.
    #[inline]
    #[target_feature(enable = "avx512f")]
    fn next(&mut self) -> __m512i {
        const XOR3: i32 = 0x96;
        let x = _mm512_ternarylogic_epi32::<XOR3>(self.spread, _mm512_srli_epi32::<16>(self.spread), self.first_key);
        let x = mix(x);
        let x = _mm512_xor_si512(x, _mm512_srli_epi32::<16>(x));
        let x = _mm512_xor_si512(_mm512_add_epi32(x, self.second_key), _mm512_rol_epi32::<16>(self.number));
        let x = mix(_mm512_xor_si512(x, _mm512_srli_epi32::<16>(x)));
        self.number = _mm512_add_epi32(self.number, _mm512_set1_epi32(16));
        self.spread = _mm512_add_epi32(self.spread, _mm512_set1_epi32(Counter::SPREAD.wrapping_mul(16) as i32));
        _mm512_ternarylogic_epi32::<XOR3>(x, _mm512_srli_epi32::<16>(x), self.third_key)
    }
}

/// Draws whole groups, for values from `x` on whose successors are asked for meanwhile: memory has nothing else to do.
#[inline]
#[target_feature(enable = "avx512f")]
pub(super) fn draw(mut draws: Draws, to: &mut [[u32; 32]], x: *const f32) {
    for (i, to) in to.iter_mut().enumerate() {
        let word = draws.next();
        for (half, word) in [word, _mm512_rol_epi32::<16>(word)].into_iter().enumerate() {
            // A hint, which may point anywhere.
            _mm_prefetch::<_MM_HINT_T0>(x.wrapping_add(AHEAD + 32 * i + 16 * half).cast());
            // SAFETY: half of 32 words.
            unsafe { _mm512_storeu_si512(to[16 * half..].as_mut_ptr().cast(), word) };
        }
    }
}

/// The middle of `random::mix`: what comes before and after is shared with its neighbours.
#[inline]
#[target_feature(enable = "avx512f")]
fn mix(x: __m512i) -> __m512i {
    let x = _mm512_mullo_epi32(x, _mm512_set1_epi32(0x7feb_352d));
    let x = _mm512_xor_si512(x, _mm512_srli_epi32::<15>(x));
    _mm512_mullo_epi32(x, _mm512_set1_epi32(0x846c_a68b_u32 as i32))
}
