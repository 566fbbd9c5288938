//! The values that reach a cut, 16 candidates at a time.

use super::super::KEY_MASK;
use super::super::compact::Compaction;
use super::{load, store};
use std::arch::x86_64::*;

/// Candidates in one vector.
const LANES: usize = 16;

/// Keeps those of whole vectors while there is room for one; answers of how many candidates.
#[target_feature(enable = "avx512f,popcnt,bmi1,bmi2")]
pub(crate) fn compact((indices, bits): (&[u32], &[u32]), to: &mut Compaction<'_>) -> usize {
    let (mask, cut) = (_mm512_set1_epi32(KEY_MASK as i32), _mm512_set1_epi32(to.key as i32));
    let groups = indices.as_chunks::<LANES>().0.iter().zip(bits.as_chunks::<LANES>().0);
    let mut done = 0;
    for (index, value) in groups {
        let (indices, values) = (&mut to.indices[to.len..], &mut to.values[to.len..]);
        let (Some(indices), Some(values)) = (indices.first_chunk_mut::<LANES>(), values.first_chunk_mut::<LANES>())
        else {
            return done;
        };
        let value = load(value);
        let key = _mm512_and_si512(value, mask);
        let ties = first_bits(_mm512_cmpeq_epu32_mask(key, cut), to.ties);
        let kept = _mm512_cmpgt_epu32_mask(key, cut) | ties;
        store(indices, _mm512_maskz_compress_epi32(kept, load(index)));
        store(values, _mm512_maskz_compress_epi32(kept, value));
        to.ties -= ties.count_ones() as usize;
        to.len += kept.count_ones() as usize;
        done += LANES;
    }
    done
}

/// At most so many of the set bits, the lowest.
fn first_bits(mut bits: u16, most: usize) -> u16 {
    while bits.count_ones() as usize > most {
        bits &= !(1 << bits.ilog2());
    }
    bits
}
