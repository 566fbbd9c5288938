//! Rounding at random, 64 values at a time: as `methods/quantization` defines it for one value after the other, bit for bit.

use super::super::rounding::{Rounded, Rounding, Squares, Steps, TABLED};
use super::super::{KEY_MASK, by_width};
use super::draws::Draws;
use super::{load, steps, store};
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
    #[inline(always)]
    pub(super) fn new(squares: &Squares) -> Self {
        Self(load(squares))
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

    #[inline(always)]
    pub(super) fn store(self, squares: &mut Squares) {
        store(squares, self.0);
    }
}

/// 16 of 64 values.
#[inline(always)]
pub(super) fn quarter(group: &[f32; VALUES], part: usize) -> __m512 {
    load(&group.as_chunks::<16>().0[part])
}

/// The upper halves of four vectors of 16 numbers, in order.
#[inline]
#[target_feature(enable = "avx512f,avx512bw")]
fn upper_halves(parts: [__m512i; 4]) -> [__m512i; 2] {
    let order: [u16; 32] = std::array::from_fn(|i| 2 * i as u16 + 1);
    let pair = |low, high| _mm512_permutex2var_epi16(low, load(&order), high);
    [pair(parts[0], parts[1]), pair(parts[2], parts[3])]
}

/// Packing two vectors in order works within quarters of them: their eights take turns.
#[inline]
#[target_feature(enable = "avx512f")]
fn in_pairs(bytes: __m512i) -> __m512i {
    _mm512_permutexvar_epi64(_mm512_setr_epi64(0, 2, 4, 6, 1, 3, 5, 7), bytes)
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

fn check_groups(width: usize, groups: &[[f32; VALUES]], (first, codes): (u32, &[u8])) {
    assert!(groups.is_empty() || first.is_multiple_of(VALUES as u32), "words are drawn for whole groups");
    assert!(codes.len() >= VALUES / 8 * width * groups.len(), "room for all codes");
}

/// Calls with each group of values, their random numbers, and room for their codes of `width` bits; answers how many values these
/// are. The first is a multiple of 64.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl")]
fn groups(width: usize, values: Rounded<'_>, mut each: impl FnMut(&[f32; VALUES], [__m512i; 4], &mut [u8])) -> usize {
    let Rounded { random, x, first, codes, .. } = values;
    let groups = x.as_chunks::<VALUES>().0;
    check_groups(width, groups, (first, codes));
    let mut draws = Draws::new(random, first);
    for (group, to) in groups.iter().zip(codes.chunks_exact_mut(VALUES / 8 * width)) {
        each(group, draws.next(), to);
    }
    VALUES * groups.len()
}

/// [`round`], and to steps by permutations of bytes.
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vbmi,avx512vnni,popcnt")]
pub(crate) fn round_by_bytes(rounding: Rounding, values: Rounded<'_>, squares: &mut Squares) -> (usize, Option<u64>) {
    let Rounding::Steps(steps) = rounding else { return round(rounding, values, squares) };
    let (len, mut whole) = (values.x.len().max(VALUES), 0);
    let done = to_steps((&[steps], len), values, std::slice::from_mut(&mut whole));
    (done, (done > 0).then_some(whole))
}

/// Codes of whole groups of 64 values; answers how many values, and what squares of whole numbers add up to.
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl")]
pub(crate) fn round(rounding: Rounding, values: Rounded<'_>, squares: &mut Squares) -> (usize, Option<u64>) {
    if !(1..=8).contains(&values.width) {
        return (0, None);
    }
    by_width!(values.width, round_to(rounding, values, squares))
}

#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl")]
fn round_to<const W: usize>(rounding: Rounding, values: Rounded<'_>, squares: &mut Squares) -> (usize, Option<u64>) {
    match rounding {
        Rounding::Steps(_) => steps::round(rounding, values, squares),
        Rounding::Powers { scale, k } => {
            let powers = match k {
                k if k <= TABLED_POWERS => powers::<BYTES, W>,
                k if k <= SUMMED => powers::<MULTIPLES, W>,
                _ => powers::<NORMS, W>,
            };
            (powers((scale, k), values, squares), None)
        }
        Rounding::Signs { scale } => signs::<W>(scale, values),
    }
}

/// [`round`] to steps, which are others every `len` values; answers how many values, and the squares of each part.
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vbmi,avx512vnni,popcnt")]
pub(crate) fn to_steps((steps, len): (&[Steps], usize), values: Rounded<'_>, squares: &mut [u64]) -> usize {
    if !(2..=8).contains(&values.width) {
        return 0;
    }
    match steps.iter().all(|steps| steps.low == steps.high) {
        true => by_width!(values.width, steps_to[true]((steps, len), values, squares)),
        false => by_width!(values.width, steps_to[false]((steps, len), values, squares)),
    }
}

#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vbmi,avx512vnni,popcnt")]
fn steps_to<const W: usize, const SYMMETRIC: bool>(
    (steps, len): (&[Steps], usize),
    values: Rounded<'_>,
    squares: &mut [u64],
) -> usize {
    let Rounded { random, x, first, codes, .. } = values;
    let groups = x.as_chunks::<VALUES>().0;
    check_groups(W, groups, (first, codes));
    let below_step = _mm512_set1_epi32((1 << 24) - 1);
    let order = highest();
    let (most, least) = (_mm512_set1_epi8(i8::MAX), _mm512_set1_epi8(i8::MIN));
    let (mut draws, mut rooms) = (Draws::new(random, first), codes.chunks_exact_mut(VALUES / 8 * W));
    for ((steps, groups), squares) in steps.iter().zip(groups.chunks(len / VALUES)).zip(squares) {
        let (scale, offset) = (_mm512_set1_ps(steps.scale), _mm512_set1_epi8(steps.offset as u8 as i8));
        let (low, high) = (_mm512_set1_ps(-steps.low), _mm512_set1_ps(steps.high));
        let (mut sum, mut lowest) = (_mm512_setzero_si512(), 0);
        for (group, to) in groups.iter().zip(&mut rooms) {
            let mut parts = [_mm512_setzero_si512(); 4];
            for (part, (sum, word)) in parts.iter_mut().zip(draws.next()).enumerate() {
                let x = _mm512_mul_ps(quarter(group, part), scale);
                let x = match SYMMETRIC {
                    // The smaller magnitude, with the sign of x.
                    true => _mm512_range_ps::<0b0010>(x, high),
                    false => _mm512_max_ps(_mm512_min_ps(x, high), low),
                };
                *sum = _mm512_add_epi32(_mm512_cvttps_epi32(x), _mm512_and_si512(word, below_step));
            }
            let levels = highest_bytes(parts, order);
            let magnitudes = _mm512_abs_epi8(levels);
            // One factor is a byte with a sign, which 128 does not fit.
            sum = _mm512_dpbusd_epi32(sum, magnitudes, _mm512_min_epu8(magnitudes, most));
            if W == 8 {
                lowest += _mm512_cmpeq_epi8_mask(levels, least).count_ones();
            }
            put::<W>(to, _mm512_add_epi8(levels, offset));
        }
        // 128 · 127 was added where 128 · 128 belongs.
        *squares = _mm512_reduce_add_epi32(sum) as u64 + 128 * u64::from(lowest);
    }
    VALUES * groups.len()
}

/// Bytes 3, 7, … of four vectors, in order, of which [`highest`] is told.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vbmi")]
fn highest_bytes(parts: [__m512i; 4], highest: __m512i) -> __m512i {
    let low = _mm512_permutex2var_epi8(parts[0], highest, parts[1]);
    let high = _mm512_permutex2var_epi8(parts[2], highest, parts[3]);
    _mm512_inserti64x4::<1>(low, _mm512_castsi512_si256(high))
}

/// Where bytes 3, 7, … of two vectors are; the upper half does not matter.
#[inline]
#[target_feature(enable = "avx512f,avx512bw")]
fn highest() -> __m512i {
    // The compiler is not to know which these are: it would rather take four instructions that it thinks faster.
    let order: [u8; VALUES] = std::hint::black_box(std::array::from_fn(|i| (4 * i as u8 + 3) % 128));
    load(&order)
}

/// Adds squares of whole groups of 64 values; answers how many values, and their largest key.
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl")]
pub(crate) fn approximate(x: &[f32], squares: &mut Squares) -> (usize, u32) {
    let groups = x.as_chunks::<VALUES>().0;
    let (mut sums, mut max, mask) =
        (Sums::new(squares), [_mm512_setzero_si512(); 4], _mm512_set1_epi32(KEY_MASK as i32));
    for group in groups {
        for (part, max) in max.iter_mut().enumerate() {
            let x = quarter(group, part);
            sums.add(part, x);
            *max = _mm512_max_epu32(*max, _mm512_and_si512(_mm512_castps_si512(x), mask));
        }
    }
    sums.store(squares);
    let max = _mm512_max_epu32(_mm512_max_epu32(max[0], max[1]), _mm512_max_epu32(max[2], max[3]));
    (VALUES * groups.len(), _mm512_reduce_max_epu32(max))
}

/// Puts 64 codes of W bits side by side.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vl")]
fn put<const W: usize>(to: &mut [u8], codes: __m512i) {
    assert!(to.len() == VALUES / 8 * W);
    // Weights that move the upper of two codes, and of two pairs, beside the lower.
    let pairs = || _mm512_maddubs_epi16(_mm512_set1_epi16(1 | (1 << W.min(7)) << 8), codes);
    let fours = || _mm512_madd_epi16(pairs(), _mm512_set1_epi32(1 | 1 << (16 + 2 * W.min(7))));
    // SAFETY: 8 W bytes.
    unsafe {
        match W {
            1 => to.as_mut_ptr().cast::<u64>().write_unaligned(_mm512_test_epi8_mask(codes, codes)),
            2 => _mm_storeu_si128(to.as_mut_ptr().cast(), _mm512_cvtepi32_epi8(fours())),
            4 => _mm256_storeu_si256(to.as_mut_ptr().cast(), _mm512_cvtepi16_epi8(pairs())),
            8 => _mm512_storeu_si512(to.as_mut_ptr().cast(), codes),
            _ => store_first::<W>(to, eights::<W>(fours())),
        }
    }
}

/// The first 8 W bytes. A store with a mask would take longer.
///
/// # Safety
/// So many are there.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vl")]
unsafe fn store_first<const W: usize>(to: &mut [u8], bytes: __m512i) {
    let (half, mut at) = (_mm512_castsi512_si256(bytes), 0);
    let mut rest = half;
    // SAFETY: by the caller's promise.
    unsafe {
        if W & 4 != 0 {
            _mm256_storeu_si256(to.as_mut_ptr().cast(), half);
            (rest, at) = (_mm512_extracti64x4_epi64::<1>(bytes), 32);
        }
        let (mut last, to) = (_mm256_castsi256_si128(rest), to.as_mut_ptr().add(at));
        at = 0;
        if W & 2 != 0 {
            _mm_storeu_si128(to.cast(), last);
            (last, at) = (_mm256_extracti128_si256::<1>(rest), 16);
        }
        if W & 1 != 0 {
            _mm_storel_epi64(to.add(at).cast(), last);
        }
    }
}

/// Of 16 numbers of 4 W bits, whose pairs are W bytes each, these bytes: the first 8 W.
#[inline]
#[target_feature(enable = "avx512f,avx512bw")]
fn eights<const W: usize>(fours: __m512i) -> __m512i {
    // Within each 16 bytes the two pairs' bytes, and of these, two at a time, those that count.
    let bytes: [u8; 16] = std::array::from_fn(|to| if to < 2 * W { (to / W * 8 + to % W) as u8 } else { 0 });
    let twos: [u16; 32] = std::array::from_fn(|to| if to < 4 * W { (to / W * 8 + to % W) as u16 } else { 0 });
    let upper = _mm512_set1_epi64(-1 << (4 * W));
    // Where the mask is set the shifted bits, else those that lie right.
    let down = _mm512_srl_epi64(fours, _mm_cvtsi32_si128(32 - 4 * W as i32));
    let pairs = _mm512_ternarylogic_epi64::<0xca>(upper, down, fours);
    _mm512_permutexvar_epi16(load(&twos), _mm512_shuffle_epi8(pairs, _mm512_broadcast_i32x4(load(&bytes))))
}

/// Up to so many powers of two, a value's multiple of the lowest one neither overflows nor is too small for an f32, and squares of
/// these can be added up.
const SUMMED: i32 = 50;

/// Up to so many, bytes hold the squares of the lower and of the upper half of levels.
const TABLED_POWERS: i32 = 8;

/// How squares of powers of two are added up.
const BYTES: u8 = 0;
const MULTIPLES: u8 = 1;
const NORMS: u8 = 2;

/// Squares in units of the lowest level's: of levels 1 to 4, and of 5 to 8 in 256 of them.
struct Counted {
    sums: [__m512i; 2],
}

impl Counted {
    #[inline]
    #[target_feature(enable = "avx512f")]
    fn new() -> Self {
        Self { sums: [_mm512_setzero_si512(); 2] }
    }

    /// Of 64 levels. Exact in every order: 4096 squares of at most 2^14.
    #[inline]
    #[target_feature(enable = "avx512f,avx512bw")]
    fn add(&mut self, levels: __m512i) {
        let tables = [[0, 1, 4, 16, 64, 0, 0, 0, 0], [0, 0, 0, 0, 0, 1, 4, 16, 64]];
        for (sum, table) in self.sums.iter_mut().zip(tables) {
            let squares: [u8; 16] = std::array::from_fn(|level| table.get(level).copied().unwrap_or(0));
            let squares = _mm512_shuffle_epi8(_mm512_broadcast_i32x4(load(&squares)), levels);
            let squares = _mm512_sad_epu8(squares, _mm512_setzero_si512());
            *sum = _mm512_add_epi64(*sum, squares);
        }
    }

    /// To sums that have room for them: 16 of 64.
    #[inline]
    #[target_feature(enable = "avx512f,avx512dq")]
    fn add_to(self, squares: &mut Squares, unit: f32) {
        for ((sum, unit), to) in self.sums.into_iter().zip([unit, 256.0 * unit]).zip(squares.as_chunks_mut::<8>().0) {
            to.iter_mut().zip(load::<[u64; 8], _>(&sum)).for_each(|(to, count)| *to += count as f32 * unit);
        }
    }
}

#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl")]
fn powers<const SUMS: u8, const W: usize>((scale, k): (f32, i32), values: Rounded<'_>, squares: &mut Squares) -> usize {
    // Squares of lowest levels, and what makes them squares of norms.
    let unit = if SUMS == MULTIPLES { 2f32.powi(-2 * k) } else { 1.0 };
    let (mut sums, mut counted) = (Sums::new(squares), Counted::new());
    sums.times(1.0 / unit);
    // Where a product with a power of two rounds nothing, both are one.
    let (first, second) = if SUMS == NORMS { (1.0, 2f32.powi(k)) } else { (2f32.powi(k), 1.0) };
    let (scale, norm, second) = (_mm512_set1_ps(first * scale), _mm512_set1_ps(first), _mm512_set1_ps(second));
    let (exponents, to_norms) = (_mm512_set1_epi32(EXPONENT), _mm512_set1_epi32(k << 23));
    // What is below 2 carries into no level.
    let (half, one, level_one) = (_mm512_set1_ps(0.5), _mm512_set1_ps(1.0), _mm512_set1_epi32(128 << 23));
    let (before, offset) = (_mm512_set1_epi8(127), _mm512_set1_epi8(k as i8));
    let done = groups(W, values, |group, words, to| {
        let (mut levels, mut signs) = ([_mm512_setzero_si512(); 4], [_mm512_setzero_si512(); 4]);
        for (part, word) in words.into_iter().enumerate() {
            let x = quarter(group, part);
            let y = magnitude_up_to(_mm512_mul_ps(x, scale), norm);
            let y = if SUMS == NORMS { _mm512_mul_ps(y, second) } else { y };
            // Half of y is exact: fused or not, the sum is rounded once.
            let y = _mm512_castps_si512(_mm512_max_ps(y, _mm512_fmadd_ps(y, half, one)));
            let carried = _mm512_add_epi32(y, _mm512_and_si512(word, _mm512_set1_epi32(!EXPONENT & i32::MAX)));
            if SUMS != BYTES {
                let is_level = _mm512_cmpge_epi32_mask(carried, level_one);
                let power = _mm512_maskz_and_epi32(is_level, carried, exponents);
                match SUMS {
                    MULTIPLES => sums.add_exact(part, _mm512_castsi512_ps(power)),
                    _ => sums.add(part, _mm512_castsi512_ps(_mm512_maskz_sub_epi32(is_level, power, to_norms))),
                }
            }
            (levels[part], signs[part]) = (carried, _mm512_castps_si512(x));
        }
        let [low, high] = upper_halves(levels).map(|half| _mm512_srli_epi16::<7>(half));
        let level = _mm512_sub_epi8(_mm512_packus_epi16(low, high), before);
        let [low, high] = upper_halves(signs);
        let minus = _mm512_movepi8_mask(_mm512_packs_epi16(low, high));
        if SUMS == BYTES {
            counted.add(level);
        }
        let signed = _mm512_mask_sub_epi8(level, minus, _mm512_setzero_si512(), level);
        put::<W>(to, in_pairs(_mm512_add_epi8(signed, offset)));
    });
    sums.times(unit);
    sums.store(squares);
    counted.add_to(squares, 2f32.powi(2 - 2 * k));
    done
}

#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl")]
fn signs<const W: usize>(scale: f32, values: Rounded<'_>) -> (usize, Option<u64>) {
    let scale = _mm512_set1_ps(scale);
    let largest = _mm512_set1_ps(0.999_999_9 * CHANCES);
    let done = groups(W, values, |group, words, to| {
        let mut minus = [0; 4];
        for (part, (minus, word)) in minus.iter_mut().zip(words).enumerate() {
            let chance = _mm512_mul_ps(quarter(group, part), scale);
            let drawn = _mm512_min_ps(_mm512_cvtepi32_ps(word), largest);
            *minus = _mm512_cmp_ps_mask::<_CMP_GE_OQ>(drawn, chance);
        }
        match W {
            1 => to.copy_from_slice(&joined(minus).to_le_bytes()),
            _ => put::<W>(to, _mm512_maskz_mov_epi8(joined(minus), _mm512_set1_epi8(1))),
        }
    });
    (done, Some(done as u64))
}

/// Natural compression of whole groups of 64 values, none of whose exponents reaches the largest; answers how many values.
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl")]
pub(crate) fn to_powers(values: Rounded<'_>, bits: &mut [u8], (scale, squares): (f32, &mut Squares)) -> usize {
    let mut bits = bits.as_chunks_mut::<8>().0.iter_mut();
    let mut sums = Sums::new(squares);
    let (scale, exponents) = (_mm512_set1_ps(scale), _mm512_set1_epi32(EXPONENT));
    let mantissa = _mm512_set1_epi32(!EXPONENT & i32::MAX);
    let done = groups(8, values, |group, words, to| {
        let mut carried = [_mm512_setzero_si512(); 4];
        for (part, (carried, word)) in carried.iter_mut().zip(words).enumerate() {
            // The sign stays as it is.
            let x = _mm512_castps_si512(quarter(group, part));
            *carried = _mm512_add_epi32(x, _mm512_and_si512(word, mantissa));
            let power = _mm512_castsi512_ps(_mm512_and_si512(*carried, exponents));
            // Squares of powers of two are exact, but for those that are nothing beside the largest.
            sums.add_exact(part, _mm512_mul_ps(power, scale));
        }
        let halves = upper_halves(carried);
        let levels = halves.map(|half| _mm512_srli_epi16::<8>(_mm512_slli_epi16::<1>(half)));
        put::<8>(to, in_pairs(_mm512_packus_epi16(levels[0], levels[1])));
        let [low, high] = halves.map(|half| u64::from(_mm512_movepi16_mask(half)));
        if let Some(bits) = bits.next() {
            *bits = (low | high << 32).to_le_bytes();
        }
    });
    sums.store(squares);
    done
}

/// `out += scale * ±2^(exponent − 127)`, 16 at a time; answers how many values.
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl")]
pub(crate) fn add_powers(exponents: &[u8], signs: &[u8], (scale, out): (f32, &mut [f32])) -> usize {
    let (scale, minus) = (_mm512_set1_ps(scale), _mm512_set1_epi32(i32::MIN));
    let (groups, _) = out.as_chunks_mut::<16>();
    let values = exponents.as_chunks::<16>().0.iter().zip(signs.as_chunks::<2>().0);
    for (to, (exponents, signs)) in groups.iter_mut().zip(values) {
        let bits = _mm512_slli_epi32::<23>(_mm512_cvtepu8_epi32(load(exponents)));
        let bits = _mm512_mask_or_epi32(bits, u16::from_le_bytes(*signs), bits, minus);
        store(to, _mm512_add_ps(load(to), _mm512_mul_ps(_mm512_castsi512_ps(bits), scale)));
    }
    16 * groups.len()
}

/// `out += values[code]`, or, where it is FRESH, `out = 0 + values[code]`, 16 at a time; answers how many values.
#[target_feature(enable = "avx512f")]
pub(crate) fn add_codes<const FRESH: bool>(codes: &[u8], values: &[f32; TABLED], out: &mut [f32]) -> usize {
    let (groups, _) = out.as_chunks_mut::<16>();
    let [low, high]: [__m512; 2] = load(values);
    for (to, codes) in groups.iter_mut().zip(codes.as_chunks::<16>().0) {
        let codes = _mm512_cvtepu8_epi32(load(codes));
        let held = if FRESH { _mm512_setzero_ps() } else { load(to) };
        store(to, _mm512_add_ps(held, _mm512_permutex2var_ps(low, codes, high)));
    }
    16 * groups.len().min(codes.len() / 16)
}
