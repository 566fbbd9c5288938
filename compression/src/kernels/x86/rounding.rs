//! Rounding at random, 64 values at a time: as `methods/quantization` defines it for one value after the other, bit for bit.
//!
//! Words are drawn for some groups before their values are looked at: two short loops keep a processor busier than one whose chain
//! of instructions is as long as both.

use super::super::KEY_MASK;
use super::super::rounding::{Rounded, Rounding, Squares, TABLED};
use super::pass::AHEAD;
use crate::random::{Counter, Stream};
use std::arch::x86_64::*;

/// Values whose codes fill one vector.
const VALUES: usize = 64;

/// 2^31: what makes a chance comparable with a word without its lowest bit.
const CHANCES: f32 = 2_147_483_648.0;

/// The bits of powers of two.
const EXPONENT: i32 = 0x7f80_0000;

/// [`Stream::word`] of neighbours between two multiples of 2^16.
struct Draws {
    spread: __m512i,
    turned: __m512i,
    first_key: __m512i,
    second_key: __m512i,
    third_key: __m512i,
}

impl Draws {
    #[inline]
    #[target_feature(enable = "avx512f")]
    fn new(random: Stream, first: u32) -> Self {
        let lane = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
        let number = _mm512_add_epi32(_mm512_set1_epi32(first as i32), lane);
        let key = random.keys().map(|word| word as i32);
        Self {
            spread: _mm512_mullo_epi32(number, _mm512_set1_epi32(Counter::SPREAD as i32)),
            turned: _mm512_rol_epi32::<16>(number),
            // x ^ k and its upper half moved down, in one.
            first_key: _mm512_set1_epi32(key[0] ^ (random.keys()[0] >> 16) as i32),
            second_key: _mm512_set1_epi32(key[1]),
            third_key: _mm512_set1_epi32(key[2]),
        }
    }

    /// The next 16.
    #[inline]
    #[target_feature(enable = "avx512f")]
    fn next(&mut self) -> __m512i {
        const XOR3: i32 = 0x96;
        let x = _mm512_ternarylogic_epi32::<XOR3>(self.spread, _mm512_srli_epi32::<16>(self.spread), self.first_key);
        let x = mix(x);
        let x = _mm512_xor_si512(x, _mm512_srli_epi32::<16>(x));
        let x = _mm512_xor_si512(_mm512_add_epi32(x, self.second_key), self.turned);
        let x = mix(_mm512_xor_si512(x, _mm512_srli_epi32::<16>(x)));
        self.spread = _mm512_add_epi32(self.spread, _mm512_set1_epi32(Counter::SPREAD.wrapping_mul(16) as i32));
        self.turned = _mm512_add_epi32(self.turned, _mm512_set1_epi32(16 << 16));
        _mm512_ternarylogic_epi32::<XOR3>(x, _mm512_srli_epi32::<16>(x), self.third_key)
    }

    /// The next of whole groups, for values whose successors are asked for meanwhile: memory has nothing else to do.
    #[inline]
    #[target_feature(enable = "avx512f")]
    fn fill(&mut self, words: &mut [[u32; VALUES]], x: &[[f32; VALUES]]) {
        let words = words.as_flattened_mut().as_chunks_mut::<16>().0;
        for (to, x) in words.iter_mut().zip(x.as_flattened().as_chunks::<16>().0) {
            // A hint, which may point anywhere.
            _mm_prefetch::<_MM_HINT_T0>(x.as_ptr().wrapping_add(AHEAD).cast());
            // SAFETY: 16 words.
            unsafe { _mm512_storeu_si512(to.as_mut_ptr().cast(), self.next()) };
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

/// Sums of squares in four vectors.
struct Sums([__m512; 4]);

impl Sums {
    #[inline]
    #[target_feature(enable = "avx512f")]
    fn new(squares: &Squares) -> Self {
        // SAFETY: 64 values, of which four times 16 are loaded.
        unsafe { Self([0, 16, 32, 48].map(|at| _mm512_loadu_ps(squares.as_ptr().add(at)))) }
    }

    /// The square is rounded before it is added, as everywhere.
    #[inline]
    #[target_feature(enable = "avx512f")]
    fn add(&mut self, part: usize, value: __m512) {
        self.0[part] = _mm512_add_ps(self.0[part], _mm512_mul_ps(value, value));
    }

    #[inline]
    #[target_feature(enable = "avx512f")]
    fn store(self, squares: &mut Squares) {
        for (sum, to) in self.0.into_iter().zip(squares.as_chunks_mut::<16>().0) {
            // SAFETY: 16 values.
            unsafe { _mm512_storeu_ps(to.as_mut_ptr(), sum) };
        }
    }
}

#[inline]
#[target_feature(enable = "avx512f")]
fn load(group: &[f32; VALUES], part: usize) -> __m512 {
    // SAFETY: as_chunks of 64 values has four of 16.
    unsafe { _mm512_loadu_ps(group.as_chunks::<16>().0[part].as_ptr()) }
}

#[inline]
#[target_feature(enable = "avx512f")]
fn load_words(group: &[u32; VALUES], part: usize) -> __m512i {
    // SAFETY: as_chunks of 64 words has four of 16.
    unsafe { _mm512_loadu_si512(group.as_chunks::<16>().0[part].as_ptr().cast()) }
}

#[inline]
#[target_feature(enable = "avx512f")]
fn store(to: &mut [u8; VALUES], codes: __m512i) {
    // SAFETY: 64 bytes.
    unsafe { _mm512_storeu_si512(to.as_mut_ptr().cast(), codes) }
}

/// Words of 16 bits of four vectors of 16 numbers, in an order that [`in_order`] mends.
#[inline]
#[target_feature(enable = "avx512f,avx512bw")]
fn halves(parts: [__m512i; 4]) -> [__m512i; 2] {
    [_mm512_packs_epi32(parts[0], parts[1]), _mm512_packs_epi32(parts[2], parts[3])]
}

/// Packing works within quarters of a vector: part j of quarter i belongs to quarter j, part i.
#[inline]
#[target_feature(enable = "avx512f")]
fn in_order(bytes: __m512i) -> __m512i {
    let order = _mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
    _mm512_permutexvar_epi32(order, bytes)
}

/// Numbers from −128 to 127 as bytes.
#[inline]
#[target_feature(enable = "avx512f,avx512bw")]
fn bytes(parts: [__m512i; 4]) -> __m512i {
    let [low, high] = halves(parts);
    in_order(_mm512_packs_epi16(low, high))
}

/// Numbers from 0 to 255 as bytes.
#[inline]
#[target_feature(enable = "avx512f,avx512bw")]
fn unsigned_bytes(parts: [__m512i; 4]) -> __m512i {
    let [low, high] = halves(parts);
    in_order(_mm512_packus_epi16(low, high))
}

/// Four masks as one.
fn joined(masks: [u16; 4]) -> u64 {
    masks.into_iter().rev().fold(0, |all, mask| all << 16 | u64::from(mask))
}

/// A number in [0, 2^31] of 24 bits.
#[inline]
#[target_feature(enable = "avx512f")]
fn drawn(word: __m512i) -> __m512 {
    _mm512_cvtepi32_ps(_mm512_srli_epi32::<1>(word))
}

/// Where the sign bit is set.
#[inline]
#[target_feature(enable = "avx512f,avx512dq")]
fn negative(x: __m512) -> __mmask16 {
    _mm512_movepi32_mask(_mm512_castps_si512(x))
}

/// The smaller of |x| and a limit.
#[inline]
#[target_feature(enable = "avx512f,avx512dq")]
fn magnitude_up_to(x: __m512, limit: __m512) -> __m512 {
    // The smaller magnitude, without a sign.
    _mm512_range_ps::<0b1010>(x, limit)
}

/// Groups of values, their words, and where their codes go.
struct Piece<'a> {
    x: &'a [[f32; VALUES]],
    words: &'a [[u32; VALUES]],
    codes: &'a mut [[u8; VALUES]],
}

impl<'a> Piece<'a> {
    fn groups(self) -> impl Iterator<Item = (&'a [f32; VALUES], &'a [u32; VALUES], &'a mut [u8; VALUES])> {
        self.x.iter().zip(self.words).zip(self.codes).map(|((x, words), codes)| (x, words, codes))
    }
}

/// Calls with piece after piece whose words are drawn; answers how many values these are. Beyond a multiple of 2^16 the counter
/// would start anew, which no caller with a long tensor needs.
#[inline]
#[target_feature(enable = "avx512f")]
fn pieces(values: Rounded<'_>, mut each: impl FnMut(Piece<'_>)) -> usize {
    let Rounded { random, x, first, codes, words } = values;
    if Counter::reach(first) < x.len() {
        return 0;
    }
    let mut draws = Draws::new(random, first);
    let ((groups, _), (codes, _), (words, _)) = (x.as_chunks(), codes.as_chunks_mut(), words.as_chunks_mut());
    for (x, codes) in groups.chunks(words.len()).zip(codes.chunks_mut(words.len())) {
        let words = &mut words[..x.len()];
        draws.fill(words, x);
        each(Piece { x, words, codes });
    }
    VALUES * groups.len()
}

/// Codes of whole groups of 64 values; answers how many values.
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl")]
pub(super) fn round(rounding: Rounding, values: Rounded<'_>, squares: &mut Squares) -> usize {
    pieces(values, |piece| match rounding {
        Rounding::Steps { scale, low: 1.0, high: 1.0, offset: 1 } => ternary(scale, piece, squares),
        Rounding::Steps { scale, low, high, offset } if low == high => {
            steps::<true>((scale, low, high, offset), piece, squares)
        }
        Rounding::Steps { scale, low, high, offset } => steps::<false>((scale, low, high, offset), piece, squares),
        Rounding::Powers { scale, k, to_lowest } => powers((scale, k, to_lowest), piece, squares),
        Rounding::Signs { scale } => signs(scale, piece, squares),
    })
}

/// Natural compression of whole groups of 64 values; answers how many values.
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl")]
pub(super) fn to_powers(values: Rounded<'_>, bits: &mut [u8], (scale, squares): (f32, &mut Squares)) -> usize {
    let mut bits = bits.as_chunks_mut::<8>().0.iter_mut();
    pieces(values, |piece| natural(piece, &mut bits, (scale, squares)))
}

#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl")]
fn steps<const SYMMETRIC: bool>(
    (scale, low, high, offset): (f32, f32, f32, i32),
    piece: Piece<'_>,
    squares: &mut Squares,
) {
    let mut sums = Sums::new(squares);
    let (scale, low, high) = (_mm512_set1_ps(scale), _mm512_set1_ps(low), _mm512_set1_ps(high));
    let (chances, one, sign) = (_mm512_set1_ps(CHANCES), _mm512_set1_ps(1.0), _mm512_set1_epi32(i32::MIN));
    let offset = _mm512_set1_epi8(offset as u8 as i8);
    for (group, words, to) in piece.groups() {
        let mut levels = [_mm512_setzero_si512(); 4];
        for (part, level) in levels.iter_mut().enumerate() {
            let (x, word) = (load(group, part), load_words(words, part));
            let limit = if SYMMETRIC { high } else { _mm512_mask_blend_ps(negative(x), high, low) };
            let steps = magnitude_up_to(_mm512_mul_ps(x, scale), limit);
            let below = _mm512_roundscale_ps::<{ _MM_FROUND_TO_NEG_INF | _MM_FROUND_NO_EXC }>(steps);
            let chance = _mm512_mul_ps(_mm512_sub_ps(steps, below), chances);
            let up = _mm512_cmp_ps_mask::<_CMP_LT_OQ>(drawn(word), chance);
            let rounded = _mm512_mask_add_ps(below, up, below, one);
            sums.add(part, rounded);
            // The sign of x: bits of the one or, under the mask, of the other.
            let signed = _mm512_ternarylogic_epi32::<0xf8>(_mm512_castps_si512(rounded), _mm512_castps_si512(x), sign);
            *level = _mm512_cvtps_epi32(_mm512_castsi512_ps(signed));
        }
        store(to, _mm512_add_epi8(bytes(levels), offset));
    }
    sums.store(squares);
}

/// [`steps`] to −1, 0 and 1: whether one is all that is to be found out.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl")]
fn ternary(scale: f32, piece: Piece<'_>, squares: &mut Squares) {
    let (scale, limit, chances) = (_mm512_set1_ps(scale), _mm512_set1_ps(1.0), _mm512_set1_ps(CHANCES));
    // Drawn numbers are rounded, up to 2^31, but what reaches the limit is one for sure.
    let largest = _mm512_set1_ps(CHANCES.next_down());
    let mut ones = 0;
    for (group, words, to) in piece.groups() {
        let (mut up, mut down) = ([0; 4], [0; 4]);
        for part in 0..4 {
            let (x, word) = (load(group, part), load_words(words, part));
            let chance = _mm512_mul_ps(magnitude_up_to(_mm512_mul_ps(x, scale), limit), chances);
            up[part] = _mm512_cmp_ps_mask::<_CMP_LT_OQ>(_mm512_min_ps(drawn(word), largest), chance);
            down[part] = negative(x);
        }
        let (is_one, is_negative) = (joined(up), joined(down));
        ones += is_one.count_ones();
        let plus = _mm512_mask_mov_epi8(_mm512_set1_epi8(1), is_one & !is_negative, _mm512_set1_epi8(2));
        store(to, _mm512_mask_mov_epi8(plus, is_one & is_negative, _mm512_setzero_si512()));
    }
    // A whole number: no matter in which sum.
    squares[0] += ones as f32;
}

#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl")]
fn powers((scale, k, to_lowest): (f32, i32, f32), piece: Piece<'_>, squares: &mut Squares) {
    let mut sums = Sums::new(squares);
    let (scale, one, chances) = (_mm512_set1_ps(scale), _mm512_set1_ps(1.0), _mm512_set1_ps(CHANCES));
    let (to_lowest, offset) = (_mm512_set1_ps(to_lowest), _mm512_set1_epi8(k as i8));
    // Exponents from 128 − k on are levels from 1 on.
    let (before, first) = (_mm512_set1_epi32(127 - k), _mm512_set1_epi32(1));
    let lowest = _mm512_castsi512_ps(_mm512_set1_epi32((128 - k) << 23));
    let exponents = _mm512_castsi512_ps(_mm512_set1_epi32(EXPONENT));
    for (group, words, to) in piece.groups() {
        let mut levels = [_mm512_setzero_si512(); 4];
        for (part, level) in levels.iter_mut().enumerate() {
            let (x, word) = (load(group, part), load_words(words, part));
            let t = magnitude_up_to(_mm512_mul_ps(x, scale), one);
            let carried = _mm512_add_epi32(_mm512_castps_si512(t), _mm512_srli_epi32::<9>(word));
            let below = _mm512_mul_ps(t, to_lowest);
            let is_power = _mm512_cmp_ps_mask::<_CMP_NLT_UQ>(below, one);
            let chance = _mm512_mul_ps(below, chances);
            let is_lowest = _mm512_mask_cmp_ps_mask::<_CMP_LT_OQ>(!is_power, drawn(word), chance);
            let magnitude = _mm512_maskz_and_ps(is_power, _mm512_castsi512_ps(carried), exponents);
            sums.add(part, _mm512_mask_mov_ps(magnitude, is_lowest, lowest));
            let above = _mm512_maskz_sub_epi32(is_power, _mm512_srli_epi32::<23>(carried), before);
            let above = _mm512_mask_mov_epi32(above, is_lowest, first);
            *level = _mm512_mask_sub_epi32(above, negative(x), _mm512_setzero_si512(), above);
        }
        store(to, _mm512_add_epi8(bytes(levels), offset));
    }
    sums.store(squares);
}

#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl")]
fn signs(scale: f32, piece: Piece<'_>, squares: &mut Squares) {
    let (scale, chances) = (_mm512_set1_ps(scale), _mm512_set1_ps(CHANCES));
    let (largest, piece_len) = (_mm512_set1_ps(0.999_999_9 * CHANCES), piece.x.len());
    for (group, words, to) in piece.groups() {
        let mut minus = [0; 4];
        for (part, minus) in minus.iter_mut().enumerate() {
            let chance = _mm512_mul_ps(_mm512_mul_ps(load(group, part), scale), chances);
            let drawn = _mm512_min_ps(_mm512_cvtepi32_ps(load_words(words, part)), largest);
            *minus = _mm512_cmp_ps_mask::<_CMP_GE_OQ>(drawn, chance);
        }
        store(to, _mm512_maskz_mov_epi8(joined(minus), _mm512_set1_epi8(1)));
    }
    squares[0] += (VALUES * piece_len) as f32;
}

#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl")]
fn natural<'a>(
    piece: Piece<'_>,
    bits: &mut impl Iterator<Item = &'a mut [u8; 8]>,
    (scale, squares): (f32, &mut Squares),
) {
    let mut sums = Sums::new(squares);
    let (mask, scale) = (_mm512_set1_epi32(KEY_MASK as i32), _mm512_set1_ps(scale));
    let (largest, exponents) = (_mm512_set1_epi32(0x7f7f_ffff), _mm512_set1_epi32(EXPONENT));
    for ((group, words, to), bits) in piece.groups().zip(bits) {
        let (mut levels, mut minus) = ([_mm512_setzero_si512(); 4], [0; 4]);
        for (part, level) in levels.iter_mut().enumerate() {
            let x = load(group, part);
            minus[part] = negative(x);
            let magnitude = _mm512_and_si512(_mm512_castps_si512(x), mask);
            let carried = _mm512_add_epi32(magnitude, _mm512_srli_epi32::<9>(load_words(words, part)));
            let carried = _mm512_min_epu32(carried, largest);
            let power = _mm512_castsi512_ps(_mm512_and_si512(carried, exponents));
            sums.add(part, _mm512_mul_ps(power, scale));
            *level = _mm512_srli_epi32::<23>(carried);
        }
        store(to, unsigned_bytes(levels));
        *bits = joined(minus).to_le_bytes();
    }
    sums.store(squares);
}

/// `out += scale * ±2^(exponent − 127)`, 16 at a time; answers how many values.
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl")]
pub(super) fn add_powers(exponents: &[u8], signs: &[u8], (scale, out): (f32, &mut [f32])) -> usize {
    let (scale, minus) = (_mm512_set1_ps(scale), _mm512_set1_epi32(i32::MIN));
    let (groups, _) = out.as_chunks_mut::<16>();
    let values = exponents.as_chunks::<16>().0.iter().zip(signs.as_chunks::<2>().0);
    for (to, (exponents, signs)) in groups.iter_mut().zip(values) {
        // SAFETY: 16 bytes and 16 values.
        let (exponents, held) = unsafe { (_mm_loadu_si128(exponents.as_ptr().cast()), _mm512_loadu_ps(to.as_ptr())) };
        let bits = _mm512_slli_epi32::<23>(_mm512_cvtepu8_epi32(exponents));
        let bits = _mm512_mask_or_epi32(bits, u16::from_le_bytes(*signs), bits, minus);
        let sum = _mm512_add_ps(held, _mm512_mul_ps(_mm512_castsi512_ps(bits), scale));
        // SAFETY: 16 values.
        unsafe { _mm512_storeu_ps(to.as_mut_ptr(), sum) };
    }
    16 * groups.len()
}

/// `out += values[code]`, or, where it is FRESH, `out = 0 + values[code]`, 16 at a time; answers how many values.
#[target_feature(enable = "avx512f")]
pub(super) fn add_codes<const FRESH: bool>(codes: &[u8], values: &[f32; TABLED], out: &mut [f32]) -> usize {
    let (groups, _) = out.as_chunks_mut::<16>();
    // SAFETY: twice 16 values.
    let (low, high) = unsafe { (_mm512_loadu_ps(values.as_ptr()), _mm512_loadu_ps(values.as_ptr().add(16))) };
    for (to, codes) in groups.iter_mut().zip(codes.as_chunks::<16>().0) {
        // SAFETY: 16 bytes and 16 values.
        unsafe {
            let codes = _mm512_cvtepu8_epi32(_mm_loadu_si128(codes.as_ptr().cast()));
            let held = if FRESH { _mm512_setzero_ps() } else { _mm512_loadu_ps(to.as_ptr()) };
            let sum = _mm512_add_ps(held, _mm512_permutex2var_ps(low, codes, high));
            _mm512_storeu_ps(to.as_mut_ptr(), sum);
        }
    }
    16 * groups.len().min(codes.len() / 16)
}
