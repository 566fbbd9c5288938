//! Signs by comparison into a mask. Both answer how many values are done, a multiple of 8; the caller does the rest.

use super::super::portable::BLOCK;
use super::super::signs::{Decayed, Sums};
use super::super::{KEY_MASK, PassStats};
use super::pass::{AHEAD, STREAMED, add_squares, stream512, sum};
use super::{load, store};
use std::arch::x86_64::*;

/// What one block's values add up to.
#[derive(Clone, Copy)]
struct Block {
    magnitudes: __m512d,
    squares: __m512d,
}

impl Block {
    #[inline]
    #[target_feature(enable = "avx512f")]
    fn new() -> Self {
        Self { magnitudes: _mm512_setzero_pd(), squares: _mm512_setzero_pd() }
    }

    /// 16 values' signs; answers their keys.
    #[inline]
    #[target_feature(enable = "avx512f")]
    fn add<const MAGNITUDES: bool>(&mut self, values: __m512, to: &mut [u8; 2]) -> __m512i {
        *to = _mm512_cmp_ps_mask::<_CMP_LT_OQ>(values, _mm512_setzero_ps()).to_le_bytes();
        let keys = _mm512_and_si512(_mm512_castps_si512(values), _mm512_set1_epi32(KEY_MASK as i32));
        let low = _mm512_cvtps_pd(_mm256_castsi256_ps(_mm512_castsi512_si256(keys)));
        let high = _mm512_cvtps_pd(_mm256_castsi256_ps(_mm512_extracti64x4_epi64::<1>(keys)));
        // The lower eight before the upper: each lane adds in the order of positions.
        if MAGNITUDES {
            self.magnitudes = _mm512_add_pd(_mm512_add_pd(self.magnitudes, low), high);
        }
        // Squares are exact in f64: it does not matter whether they are added in one instruction.
        self.squares = _mm512_fmadd_pd(high, high, _mm512_fmadd_pd(low, low, self.squares));
        keys
    }

    #[inline(always)]
    fn store(self, sums: &mut Sums) {
        store(&mut sums.magnitudes, self.magnitudes);
        store(&mut sums.squares, self.squares);
    }
}

/// Two blocks at once as far as there are pairs: their sums wait for each other half as long.
#[target_feature(enable = "avx512f")]
pub(crate) fn avx512<const MAGNITUDES: bool>(x: &[f32], bits: &mut [u8], sums: &mut Sums) -> usize {
    let mut max = _mm512_setzero_si512();
    // What comes from memory comes fastest in one stream.
    let (paired, alone) = x.split_at(if x.len() < STREAMED { x.len() / (2 * BLOCK) * (2 * BLOCK) } else { 0 });
    let (pairs, rest) = (paired.as_chunks::<{ 2 * BLOCK }>().0, alone);
    let (of_pairs, of_rest) = bits.split_at_mut(pairs.len() * 2 * BLOCK / 8);
    for (pair, bits) in pairs.iter().zip(of_pairs.chunks_exact_mut(2 * BLOCK / 8)) {
        let (mut blocks, (first, second)) = ([Block::new(); 2], bits.split_at_mut(BLOCK / 8));
        let groups = pair[..BLOCK].as_chunks::<16>().0.iter().zip(pair[BLOCK..].as_chunks::<16>().0);
        let to = first.as_chunks_mut::<2>().0.iter_mut().zip(second.as_chunks_mut::<2>().0);
        for (i, ((one, other), (first, second))) in groups.zip(to).enumerate() {
            for half in 0..2 {
                let ahead = pair.as_ptr().wrapping_add(AHEAD + 32 * i + 16 * half);
                // A hint, which may point anywhere.
                _mm_prefetch::<_MM_HINT_T0>(ahead.cast());
            }
            max = _mm512_max_epu32(max, blocks[0].add::<MAGNITUDES>(load(one), first));
            max = _mm512_max_epu32(max, blocks[1].add::<MAGNITUDES>(load(other), second));
        }
        for block in blocks {
            block.store(sums);
            sums.close();
        }
    }
    for (values, bits) in rest.chunks(BLOCK).zip(of_rest.chunks_mut(BLOCK / 8)) {
        let mut block = Block::new();
        for (group, to) in values.as_chunks::<16>().0.iter().zip(bits.as_chunks_mut::<2>().0) {
            max = _mm512_max_epu32(max, block.add::<MAGNITUDES>(load(group), to));
        }
        block.store(sums);
        if values.len() == BLOCK {
            sums.close();
        }
    }
    sums.max_key = _mm512_reduce_max_epu32(max);
    x.len() / 16 * 16
}

/// A momentum's next values and their signs, of whole blocks; answers of how many values.
#[target_feature(enable = "avx512f")]
pub(crate) fn decayed_avx512(decayed: Decayed<'_>, seen: &mut PassStats) -> usize {
    let n = decayed.x.len();
    assert!(decayed.momentum.len() == n && decayed.next.len() == n, "slices of one length");
    let aligned = decayed.next.as_ptr().addr().is_multiple_of(16);
    match n >= STREAMED && aligned {
        true => decay::<true>(decayed, seen),
        false => decay::<false>(decayed, seen),
    }
}

#[inline]
#[target_feature(enable = "avx512f")]
fn decay<const STREAM: bool>(decayed: Decayed<'_>, seen: &mut PassStats) -> usize {
    let Decayed { x, momentum, next, bits, delta } = decayed;
    let (fresh, kept) = (_mm512_set1_ps(1.0 - delta), _mm512_set1_ps(delta));
    let (mask, mut max) = (_mm512_set1_epi32(KEY_MASK as i32), _mm512_setzero_si512());
    let (blocks, _) = x.as_chunks::<BLOCK>();
    let values = blocks.iter().zip(momentum.as_chunks::<BLOCK>().0).zip(next.as_chunks_mut::<BLOCK>().0);
    for (((x, momentum), next), bits) in values.zip(bits.chunks_exact_mut(BLOCK / 8)) {
        let mut squares = _mm512_setzero_pd();
        let groups = x.as_chunks::<16>().0.iter().zip(momentum.as_chunks::<16>().0);
        let to = next.as_chunks_mut::<16>().0.iter_mut().zip(bits.as_chunks_mut::<2>().0);
        for ((x, momentum), (next, bits)) in groups.zip(to) {
            let x = load(x);
            let value = _mm512_add_ps(_mm512_mul_ps(fresh, x), _mm512_mul_ps(kept, load(momentum)));
            match STREAM {
                // SAFETY: 16 values, of which the caller saw that they are aligned.
                true => unsafe { stream512(next.as_mut_ptr(), value) },
                false => store(next, value),
            }
            *bits = _mm512_cmp_ps_mask::<_CMP_LT_OQ>(value, _mm512_setzero_ps()).to_le_bytes();
            max = _mm512_max_epu32(max, _mm512_and_si512(_mm512_castps_si512(x), mask));
            squares = add_squares(squares, x);
        }
        seen.energy += sum(squares);
    }
    if STREAM {
        _mm_sfence();
    }
    seen.max_key = _mm512_reduce_max_epu32(max);
    BLOCK * blocks.len()
}

#[target_feature(enable = "avx2,fma")]
pub(crate) fn avx2(x: &[f32], bits: &mut [u8], sums: &mut Sums) -> usize {
    for (block, bits) in x.chunks(BLOCK).zip(bits.chunks_mut(BLOCK / 8)) {
        avx2_block(block, bits, sums);
        if block.len() == BLOCK {
            sums.close();
        }
    }
    x.len() / 8 * 8
}

#[inline]
#[target_feature(enable = "avx2,fma")]
fn avx2_block(x: &[f32], bits: &mut [u8], sums: &mut Sums) {
    let (groups, _) = x.as_chunks::<8>();
    let (mut magnitudes, mut squares) = ([_mm256_setzero_pd(); 2], [_mm256_setzero_pd(); 2]);
    let (mask, mut max) = (_mm256_set1_epi32(KEY_MASK as i32), _mm256_setzero_si256());
    for (group, to) in groups.iter().zip(bits) {
        let values = load(group);
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
    store(&mut sums.magnitudes, magnitudes);
    store(&mut sums.squares, squares);
    sums.max_key = load::<[u32; 8], _>(&max).into_iter().fold(sums.max_key, u32::max);
}

#[target_feature(enable = "avx512f")]
pub(crate) fn add_avx512<const FRESH: bool>(bits: &[u8], values: [f32; 2], out: &mut [f32]) -> usize {
    // Of zeros, −0 gives +0.
    let [clear, set] = values.map(|value| _mm512_set1_ps(if FRESH { 0.0 + value } else { value }));
    let (groups, _) = out.as_chunks_mut::<16>();
    for (group, bits) in groups.iter_mut().zip(bits.as_chunks::<2>().0) {
        let value = _mm512_mask_blend_ps(u16::from_le_bytes(*bits), clear, set);
        store(group, if FRESH { value } else { _mm512_add_ps(load(group), value) });
    }
    16 * groups.len().min(bits.len() / 2)
}
