//! Codes of w bits, 64 at a time: their w bits side by side are 8 w bytes.

use super::super::places::{Packed, Places, SPAN};
use super::{load, store};
use std::arch::x86_64::*;

/// Codes in one vector.
const LANES: usize = 64;

/// Bytes of the first 8 w of a vector.
fn first_bytes(width: usize) -> u64 {
    u64::MAX >> (64 - 8 * width)
}

/// `TABLE[8 w * i + j]`: for packing, byte j of word i of 8 bytes, of which w count.
fn pack_order(width: usize) -> [u8; LANES] {
    std::array::from_fn(|to| if to < 8 * width { (to / width * 8 + to % width) as u8 } else { 0 })
}

/// For unpacking: the w bytes of group i into word i; what lies above them is cut off later.
fn unpack_order(width: usize) -> [u8; LANES] {
    std::array::from_fn(|to| if to % 8 < width { (to / 8 * width + to % 8) as u8 } else { 0 })
}

/// Packs whole vectors; answers how many codes.
#[target_feature(enable = "avx512f,avx512bw,avx512vbmi")]
pub(crate) fn pack(codes: &[u8], width: u32, out: &mut [u8]) -> usize {
    let w = width as usize;
    let (groups, _) = codes.as_chunks::<LANES>();
    let (order, mask) = (load(&pack_order(w)), first_bytes(w));
    // Pairs, fours and eights: the upper half's bits move down to the lower half's.
    let pairs = _mm512_set1_epi16(1 | (1 << w.min(7)) << 8);
    let fours = _mm512_set1_epi32(1 | (1 << (2 * w.min(7))) << 16);
    let down = _mm_cvtsi32_si128(32 - 4 * width as i32);
    let upper = _mm512_set1_epi64(-1 << (4 * w));
    for (group, to) in groups.iter().zip(out.chunks_exact_mut(8 * w)) {
        let mut bits = load(group);
        if w < 8 {
            // Weights are below 2^8 and codes below 2^7: the one as unsigned bytes, the other as signed.
            bits = _mm512_madd_epi16(_mm512_maddubs_epi16(pairs, bits), fours);
            // Where the mask is set the shifted bits, else those that lie right.
            bits = _mm512_ternarylogic_epi64::<0xca>(upper, _mm512_srl_epi64(bits, down), bits);
            bits = _mm512_permutexvar_epi8(order, bits);
        }
        // SAFETY: the mask has 8 w bits, and as many bytes are there.
        unsafe { _mm512_mask_storeu_epi8(to.as_mut_ptr().cast(), mask, bits) };
    }
    LANES * groups.len()
}

/// Spreads the codes of a width over a vector's bytes.
#[derive(Clone, Copy)]
struct Spread {
    order: __m512i,
    /// Where in its word each code begins.
    places: __m512i,
    mask: u64,
    /// A code's bits.
    code: __m512i,
}

impl Spread {
    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512vbmi")]
    fn new(w: usize) -> Self {
        Self {
            order: load(&unpack_order(w)),
            places: load(&std::array::from_fn::<u8, LANES, _>(|lane| (lane % 8 * w) as u8)),
            mask: first_bytes(w),
            code: _mm512_set1_epi8((u8::MAX >> (8 - w)) as i8),
        }
    }

    /// The codes of 8 w bytes; above them in each byte are bits of others.
    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512vbmi")]
    fn codes(self, from: &[u8]) -> __m512i {
        assert!(from.len() as u32 >= self.mask.count_ones(), "bytes of 64 codes");
        // SAFETY: the mask has 8 w bits, and as many bytes are there.
        let bits = unsafe { _mm512_maskz_loadu_epi8(self.mask, from.as_ptr().cast()) };
        _mm512_multishift_epi64_epi8(self.places, _mm512_permutexvar_epi8(self.order, bits))
    }
}

/// Unpacks whole vectors; answers how many codes, and the largest.
#[target_feature(enable = "avx512f,avx512bw,avx512vbmi")]
pub(crate) fn unpack(packed: &[u8], width: u32, codes: &mut [u8]) -> (usize, u8) {
    let w = width as usize;
    let (groups, _) = codes.as_chunks_mut::<LANES>();
    let (spread, mut most) = (Spread::new(w), _mm512_setzero_si512());
    for (group, from) in groups.iter_mut().zip(packed.chunks_exact(8 * w)) {
        let bits = _mm512_and_si512(spread.codes(from), spread.code);
        most = _mm512_max_epu8(most, bits);
        store(group, bits);
    }
    (LANES * groups.len(), load::<[u8; LANES], _>(&most).into_iter().fold(0, u8::max))
}

/// Places of codes that are not that of 0 among whole vectors; answers of how many codes, and how many places.
#[target_feature(enable = "avx512f,avx512bw,avx512vbmi,bmi1,popcnt")]
pub(crate) fn places(packed: Packed<'_>, to: &mut Places) -> (usize, usize) {
    match packed.width {
        1 => places_of_bytes::<1>(packed, to),
        2 => places_of_bytes::<2>(packed, to),
        4 => places_of_bytes::<4>(packed, to),
        8 => places_of_bytes::<8>(packed, to),
        _ => places_of_codes(packed, to),
    }
}

#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vbmi,bmi1,popcnt")]
fn places_of_codes(packed: Packed<'_>, to: &mut Places) -> (usize, usize) {
    let (w, groups) = (packed.width as usize, packed.n / LANES);
    let (spread, zeros, mut count) = (Spread::new(w), _mm512_set1_epi8(packed.zero as i8), 0);
    for (i, from) in packed.bytes.chunks_exact(8 * w).take(groups).enumerate() {
        let others = _mm512_test_epi8_mask(_mm512_xor_si512(spread.codes(from), zeros), spread.code);
        count = to.push(count, LANES * i, others);
    }
    (LANES * groups, count)
}

/// Where no code lies in two bytes: bytes that are not all zeros first, then their codes.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,bmi1,popcnt")]
fn places_of_bytes<const W: usize>(packed: Packed<'_>, to: &mut Places) -> (usize, usize) {
    let (per_byte, mask) = (8 / W, u8::MAX >> (8 - W));
    let zeros = (0..8).step_by(W).fold(0, |byte, at| byte | packed.zero << at);
    let (groups, _) = packed.bytes[..packed.n / per_byte].as_chunks::<LANES>();
    // They lie so far behind that their codes' places, which take their room, never get ahead of them.
    let start = SPAN - SPAN / per_byte;
    let mut end = start;
    for (i, group) in groups.iter().enumerate() {
        let others = _mm512_xor_si512(load(group), _mm512_set1_epi8(zeros as i8));
        end = to.push(end, LANES * i, _mm512_test_epi8_mask(others, others));
    }
    let mut count = 0;
    for at in start..end {
        let byte = to.0[at];
        let mut others = packed.bytes[usize::from(byte)] ^ zeros;
        while others != 0 {
            let lane = others.trailing_zeros() as usize / W;
            others &= !(mask << (W * lane));
            to.0[count] = byte * per_byte as u16 + lane as u16;
            count += 1;
        }
    }
    (LANES * per_byte * groups.len(), count)
}
