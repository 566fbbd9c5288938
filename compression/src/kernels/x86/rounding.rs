//! Rounding at random, 64 values at a time: as `methods/quantization` defines it for one value after the other, bit for bit.
//!
//! Words are drawn for some groups before their values are looked at: two short loops keep a processor busier than one whose chain
//! of instructions is as long as both.

use super::super::KEY_MASK;
use super::super::rounding::{Rounded, Rounding, Squares, TABLED, Words};
use super::draws::{Draws, draw};
use std::arch::x86_64::*;

/// Values whose codes fill one vector.
const VALUES: usize = 64;

/// 2^31: what makes a chance comparable with a word.
const CHANCES: f32 = 2_147_483_648.0;

/// The bits of powers of two.
const EXPONENT: i32 = 0x7f80_0000;

/// Sums of squares in four vectors.
pub(super) struct Sums(pub(super) [__m512; 4]);

impl Sums {
    #[inline]
    #[target_feature(enable = "avx512f")]
    pub(super) fn new(squares: &Squares) -> Self {
        // SAFETY: 64 values, of which four times 16 are loaded.
        unsafe { Self([0, 16, 32, 48].map(|at| _mm512_loadu_ps(squares.as_ptr().add(at)))) }
    }

    /// The square is rounded before it is added, as everywhere.
    #[inline]
    #[target_feature(enable = "avx512f")]
    pub(super) fn add(&mut self, part: usize, value: __m512) {
        self.0[part] = _mm512_add_ps(self.0[part], _mm512_mul_ps(value, value));
    }

    /// As [`Self::add`], of a value whose square is exact, neither too large nor too small for an f32.
    #[inline]
    #[target_feature(enable = "avx512f")]
    pub(super) fn add_exact(&mut self, part: usize, value: __m512) {
        self.0[part] = _mm512_fmadd_ps(value, value, self.0[part]);
    }

    /// Of a power of two, which rounds nothing.
    #[inline]
    #[target_feature(enable = "avx512f")]
    fn times(&mut self, factor: f32) {
        self.0 = self.0.map(|sum| _mm512_mul_ps(sum, _mm512_set1_ps(factor)));
    }

    #[inline]
    #[target_feature(enable = "avx512f")]
    pub(super) fn store(self, squares: &mut Squares) {
        for (sum, to) in self.0.into_iter().zip(squares.as_chunks_mut::<16>().0) {
            // SAFETY: 16 values.
            unsafe { _mm512_storeu_ps(to.as_mut_ptr(), sum) };
        }
    }
}

#[inline]
#[target_feature(enable = "avx512f")]
pub(super) fn load(group: &[f32; VALUES], part: usize) -> __m512 {
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
pub(super) fn store(to: &mut [u8; VALUES], codes: __m512i) {
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
pub(super) fn in_order(bytes: __m512i) -> __m512i {
    let order = _mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
    _mm512_permutexvar_epi32(order, bytes)
}

/// Numbers from 0 to 255 as bytes.
#[inline]
#[target_feature(enable = "avx512f,avx512bw")]
pub(super) fn unsigned_bytes(parts: [__m512i; 4]) -> __m512i {
    let [low, high] = halves(parts);
    in_order(_mm512_packus_epi16(low, high))
}

/// Four masks as one.
pub(super) fn joined(masks: [u16; 4]) -> u64 {
    masks.into_iter().rev().fold(0, |all, mask| all << 16 | u64::from(mask))
}

/// Where the sign bit is set.
#[inline]
#[target_feature(enable = "avx512f,avx512dq")]
pub(super) fn negative(x: __m512) -> __mmask16 {
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

/// Calls with piece after piece whose words are drawn; answers how many values these are.
#[inline]
#[target_feature(enable = "avx512f")]
fn pieces(values: Rounded<'_>, mut each: impl FnMut(Piece<'_>)) -> usize {
    let Rounded { random, x, first, codes, words } = values;
    let ((mut groups, _), (mut codes, _)) = (x.as_chunks::<VALUES>(), codes.as_chunks_mut::<VALUES>());
    let all = groups.len();
    while !groups.is_empty() {
        let first = first.wrapping_add((VALUES * (all - groups.len())) as u32);
        let count = (Words::room(first) / VALUES).min(groups.len());
        let fill = |group, to: &mut [[u32; 32]]| draw(Draws::new(random, group), to, groups.as_ptr().cast());
        let words = words.draw(first, VALUES * count, fill);
        let ((x, later), (to, rest)) = (groups.split_at(count), codes.split_at_mut(count));
        each(Piece { x, words: words.as_chunks().0, codes: to });
        (groups, codes) = (later, rest);
    }
    VALUES * all
}

/// Codes of whole groups of 64 values; answers how many values.
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl")]
pub(super) fn round(rounding: Rounding, values: Rounded<'_>, squares: &mut Squares) -> usize {
    pieces(values, |piece| match rounding {
        Rounding::Steps { scale, low, high, bits, offset } if low == high => {
            steps::<true>((scale, low, high), (bits, offset), (piece, squares))
        }
        Rounding::Steps { scale, low, high, bits, offset } => {
            steps::<false>((scale, low, high), (bits, offset), (piece, squares))
        }
        Rounding::Powers { scale, k } if k <= SUMMED => powers::<true>((scale, k), piece, squares),
        Rounding::Powers { scale, k } => powers::<false>((scale, k), piece, squares),
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
    (scale, low, high): (f32, f32, f32),
    (bits, offset): (u32, i32),
    (piece, squares): (Piece<'_>, &mut Squares),
) {
    let (scale, low, high) = (_mm512_set1_ps(scale), _mm512_set1_ps(-low), _mm512_set1_ps(high));
    let (unused, bits) = (_mm512_set1_epi32(32 - bits as i32), _mm512_set1_epi32(bits as i32));
    let offset = _mm512_set1_epi8(offset as u8 as i8);
    let mut sums = [_mm512_setzero_si512(); 2];
    for (group, words, to) in piece.groups() {
        let mut levels = [_mm512_setzero_si512(); 4];
        for (part, level) in levels.iter_mut().enumerate() {
            let parts = _mm512_mul_ps(load(group, part), scale);
            // The smaller magnitude, with the sign of x.
            let parts = match SYMMETRIC {
                true => _mm512_range_ps::<0b0010>(parts, high),
                false => _mm512_max_ps(_mm512_min_ps(parts, high), low),
            };
            let drawn = _mm512_srlv_epi32(load_words(words, part), unused);
            *level = _mm512_srav_epi32(_mm512_add_epi32(_mm512_cvttps_epi32(parts), drawn), bits);
        }
        let halves = halves(levels);
        for (sum, half) in sums.iter_mut().zip(halves) {
            *sum = _mm512_add_epi32(*sum, _mm512_madd_epi16(half, half));
        }
        store(to, _mm512_add_epi8(in_order(_mm512_packs_epi16(halves[0], halves[1])), offset));
    }
    // Whole numbers below 2^24: no matter in which sum, nor in which order.
    let mut sent = Sums::new(squares);
    sent.0[0] = _mm512_add_ps(sent.0[0], _mm512_cvtepi32_ps(_mm512_add_epi32(sums[0], sums[1])));
    sent.store(squares);
}

/// Up to so many powers of two, squares of the lowest level's multiples can be added up.
const SUMMED: i32 = 50;

#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl")]
fn powers<const SMALL: bool>((scale, k): (f32, i32), piece: Piece<'_>, squares: &mut Squares) {
    // Squares of lowest levels, and what makes them squares of norms.
    let unit = if SMALL { 2f32.powi(-2 * k) } else { 1.0 };
    let mut sums = Sums::new(squares);
    sums.times(1.0 / unit);
    let (scale, one, twice) = (_mm512_set1_ps(scale), _mm512_set1_ps(1.0), _mm512_set1_ps(2f32.powi(k)));
    let (exponents, to_norms) = (_mm512_set1_epi32(EXPONENT), _mm512_set1_epi32(k << 23));
    // What is below 2 carries into no level.
    let (half, first) = (_mm512_set1_ps(0.5), _mm512_set1_epi32(128 << 23));
    let (before, offset) = (_mm512_set1_epi8(127), _mm512_set1_epi8(k as i8));
    for (group, words, to) in piece.groups() {
        let (mut levels, mut minus) = ([_mm512_setzero_si512(); 4], [0; 4]);
        for (part, level) in levels.iter_mut().enumerate() {
            let x = load(group, part);
            minus[part] = negative(x);
            let y = _mm512_mul_ps(magnitude_up_to(_mm512_mul_ps(x, scale), one), twice);
            // Half of y is exact: fused or not, the sum is rounded once.
            let y = _mm512_castps_si512(_mm512_max_ps(y, _mm512_fmadd_ps(y, half, one)));
            let carried = _mm512_add_epi32(y, _mm512_srli_epi32::<9>(load_words(words, part)));
            let is_level = _mm512_cmpge_epi32_mask(carried, first);
            let power = _mm512_maskz_and_epi32(is_level, carried, exponents);
            if SMALL {
                sums.add_exact(part, _mm512_castsi512_ps(power));
            } else {
                let power = _mm512_maskz_sub_epi32(is_level, power, to_norms);
                sums.add(part, _mm512_castsi512_ps(power));
            }
            *level = _mm512_srli_epi32::<23>(carried);
        }
        let level = _mm512_sub_epi8(unsigned_bytes(levels), before);
        let signed = _mm512_mask_sub_epi8(level, joined(minus), _mm512_setzero_si512(), level);
        store(to, _mm512_add_epi8(signed, offset));
    }
    sums.times(unit);
    sums.store(squares);
}

#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl")]
fn signs(scale: f32, piece: Piece<'_>, squares: &mut Squares) {
    let scale = _mm512_set1_ps(scale);
    let (largest, piece_len) = (_mm512_set1_ps(0.999_999_9 * CHANCES), piece.x.len());
    for (group, words, to) in piece.groups() {
        let mut minus = [0; 4];
        for (part, minus) in minus.iter_mut().enumerate() {
            let chance = _mm512_mul_ps(load(group, part), scale);
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
