//! Ternary values, 64 bytes at a time.

use super::super::ternary::{FIVE_ZEROS, WORTH};
use super::rounding::{joined, quarter};
use super::store;
use std::arch::x86_64::*;

/// Whole groups of 64 bytes whose five runs are there; answers how many bytes, and how many values are not 0.
#[target_feature(enable = "avx512f,avx512bw,popcnt")]
pub(crate) fn quartic(x: &[f32], half: f32, (to, busy): (&mut [u8], &mut [u64])) -> (usize, u64) {
    let (plus, minus) = (_mm512_set1_ps(half), _mm512_set1_ps(-half));
    let (len, mut count) = (to.len(), 0);
    // The last run is the shortest.
    let groups = len.min(x.len().saturating_sub(4 * len)) / 64;
    for (i, (to, busy)) in to.as_chunks_mut::<64>().0[..groups].iter_mut().zip(busy).enumerate() {
        let (mut bytes, mut any) = (_mm512_set1_epi8(FIVE_ZEROS as i8), 0);
        for (run, worth) in WORTH.into_iter().enumerate() {
            let Some(group) = x[run * len + 64 * i..].first_chunk::<64>() else { return (64 * i, count) };
            let (mut above, mut below) = ([0; 4], [0; 4]);
            for part in 0..4 {
                let x = quarter(group, part);
                above[part] = _mm512_cmp_ps_mask::<_CMP_GE_OQ>(x, plus);
                below[part] = _mm512_cmp_ps_mask::<_CMP_LE_OQ>(x, minus);
            }
            let (above, below, worth) = (joined(above), joined(below), _mm512_set1_epi8(worth as i8));
            bytes = _mm512_mask_add_epi8(bytes, above, bytes, worth);
            bytes = _mm512_mask_sub_epi8(bytes, below, bytes, worth);
            count += u64::from((above | below).count_ones());
            any |= above | below;
        }
        store(to, bytes);
        *busy = any;
    }
    (64 * groups, count)
}
