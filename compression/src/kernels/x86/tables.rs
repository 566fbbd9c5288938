//! Codes of one byte, 64 at a time: of 256 values each byte is looked up by itself.

use super::super::rounding::Squares;
use super::super::tables::Table;
use super::rounding::{Sums, in_order};
use super::{load, store};
use std::arch::x86_64::*;

/// One byte of each of 256 values.
type Plane = [__m512i; 4];

/// The values of 64 codes, in order.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vbmi")]
fn meanings(codes: &[u8; 64], planes: &[Plane; 4]) -> [__m512; 4] {
    // What interleaves bytes works within quarters of a vector: part j of quarter i belongs to quarter j, part i.
    let codes = in_order(load(codes));
    let upper = _mm512_movepi8_mask(codes);
    let [a, b, c, d] = planes.each_ref().map(|plane| {
        let low = _mm512_permutex2var_epi8(plane[0], codes, plane[1]);
        _mm512_mask_blend_epi8(upper, low, _mm512_permutex2var_epi8(plane[2], codes, plane[3]))
    });
    let (low, high) = (
        (_mm512_unpacklo_epi8(a, b), _mm512_unpackhi_epi8(a, b)),
        (_mm512_unpacklo_epi8(c, d), _mm512_unpackhi_epi8(c, d)),
    );
    let values = [
        _mm512_unpacklo_epi16(low.0, high.0),
        _mm512_unpackhi_epi16(low.0, high.0),
        _mm512_unpacklo_epi16(low.1, high.1),
        _mm512_unpackhi_epi16(low.1, high.1),
    ];
    values.map(|value| _mm512_castsi512_ps(value))
}

/// `out += table[code]` of whole groups of 64 codes; answers how many.
#[target_feature(enable = "avx512f,avx512bw,avx512vbmi")]
pub(crate) fn add<const FRESH: bool>(codes: &[u8], table: &Table, out: &mut [f32]) -> usize {
    let planes = load(&table.planes);
    let (groups, _) = out.as_chunks_mut::<64>();
    let done = 64 * groups.len().min(codes.len() / 64);
    for (to, codes) in groups.iter_mut().zip(codes.as_chunks::<64>().0) {
        for (to, value) in to.as_chunks_mut::<16>().0.iter_mut().zip(meanings(codes, &planes)) {
            let held = if FRESH { _mm512_setzero_ps() } else { load(to) };
            store(to, _mm512_add_ps(held, value));
        }
    }
    done
}

/// Adds what whole groups of 64 codes mean, i modulo 64 to sum i; answers of how many.
#[target_feature(enable = "avx512f,avx512bw,avx512vbmi")]
pub(crate) fn sum(codes: &[u8], table: &Table, sums: &mut Squares) -> usize {
    let (planes, mut all) = (load(&table.planes), Sums::new(sums));
    let (groups, _) = codes.as_chunks::<64>();
    for codes in groups {
        all.0.iter_mut().zip(meanings(codes, &planes)).for_each(|(sum, value)| *sum = _mm512_add_ps(*sum, value));
    }
    all.store(sums);
    64 * groups.len()
}
