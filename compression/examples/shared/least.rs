//! What no quantizer to 4 bits can do without: one read, a product, a cut, codes side by side. No norm, no random numbers, no
//! clipping, no squares. Written in the vectors' own words, else it would time the compiler.
#![allow(unsafe_code)]

/// Codes of all whole groups of 64 values, if this processor has the vectors.
pub fn least(x: &[f32], scale: f32, out: &mut [u8]) -> bool {
    #[cfg(target_arch = "x86_64")]
    if is_x86_feature_detected!("avx512bw") && is_x86_feature_detected!("avx512vl") {
        // SAFETY: the processor has these.
        unsafe { x86::round(x, scale, out) };
        return true;
    }
    let _ = (x, scale, out);
    false
}

#[cfg(target_arch = "x86_64")]
mod x86 {
    use std::arch::x86_64::*;

    #[target_feature(enable = "avx512f,avx512bw,avx512vl")]
    pub fn round(x: &[f32], scale: f32, out: &mut [u8]) {
        let (scale, offset, pairs) = (_mm512_set1_ps(scale), _mm512_set1_epi8(4), _mm512_set1_epi16(1 | 16 << 8));
        let order = _mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
        for (group, to) in x.as_chunks::<64>().0.iter().zip(out.as_chunks_mut::<32>().0) {
            let level = |part: usize| {
                // SAFETY: 64 values, of which four times 16 are loaded.
                let x = unsafe { _mm512_loadu_ps(group.as_ptr().add(16 * part)) };
                _mm512_cvttps_epi32(_mm512_mul_ps(x, scale))
            };
            let [low, high] = [_mm512_packs_epi32(level(0), level(1)), _mm512_packs_epi32(level(2), level(3))];
            let levels = _mm512_permutexvar_epi32(order, _mm512_packs_epi16(low, high));
            let codes = _mm512_maddubs_epi16(pairs, _mm512_add_epi8(levels, offset));
            // SAFETY: 32 bytes.
            unsafe { _mm256_storeu_si256(to.as_mut_ptr().cast(), _mm512_cvtepi16_epi8(codes)) };
        }
    }
}
