//! AVX2 and AVX-512 behind functions that are safe to call: they check the processor. Results are those of the portable
//! loops, bit for bit.
#![allow(unsafe_code)]

mod compact;
mod draws;
mod halves;
mod nearest;
mod pack;
mod partition;
mod pass;
mod rounding;
mod signs;
mod steps;
mod tables;
mod ternary;

use super::compact::Compaction;
use super::nearest::{Even, Lines};
use super::partition::{Columns, PartitionSums};
use super::rounding::{Rounded, Rounding, Squares, Steps, TABLED};
use super::signs::{Decayed, Sums};
use super::tables::Table;
use super::{Candidates, Feed, PassStats, Work, portable};
use std::sync::LazyLock;

/// AVX2 and FMA.
pub(super) fn has_avx2() -> bool {
    is_x86_feature_detected!("avx2") && is_x86_feature_detected!("fma")
}

/// AVX-512 with bytes, words and double words, in all lengths, and what every processor with these has: counts of bits.
pub(super) fn has_avx512() -> bool {
    *AVX512
}

/// [`has_avx512`], permutations of bytes and products of bytes.
fn has_avx512_bytes() -> bool {
    *AVX512_BYTES
}

static AVX512_BYTES: LazyLock<bool> =
    LazyLock::new(|| *AVX512 && is_x86_feature_detected!("avx512vbmi") && is_x86_feature_detected!("avx512vnni"));

/// Asked for every few hundred values: one look instead of seven.
static AVX512: LazyLock<bool> = LazyLock::new(|| {
    let lengths = is_x86_feature_detected!("avx512f") && is_x86_feature_detected!("avx512vl");
    let words = is_x86_feature_detected!("avx512bw") && is_x86_feature_detected!("avx512dq");
    let bits = is_x86_feature_detected!("bmi1") && is_x86_feature_detected!("bmi2");
    lengths && words && bits && is_x86_feature_detected!("popcnt")
});

/// The pass with AVX2, or the portable one on processors without.
pub(super) fn feed_avx2(feed: Feed<'_>, found: &mut Candidates) -> PassStats {
    if !has_avx2() {
        return portable::feed(feed, found);
    }
    // SAFETY: the processor has avx2 and fma.
    unsafe { pass::avx2(feed, found) }
}

/// The pass with AVX-512, or the portable one on processors without.
pub(super) fn feed_avx512(feed: Feed<'_>, found: &mut Candidates) -> PassStats {
    if !has_avx512() {
        return portable::feed(feed, found);
    }
    // SAFETY: the processor has these.
    unsafe { pass::avx512(feed, found) }
}

/// Keeps those of the first candidates; of none on processors without AVX-512.
pub(super) fn compact_avx512(found: (&[u32], &[u32]), to: &mut Compaction<'_>) -> usize {
    match has_avx512() {
        // SAFETY: the processor has these.
        true => unsafe { compact::compact(found, to) },
        false => 0,
    }
}

/// Signs with AVX2, or portably on processors without.
pub(super) fn signs_avx2(x: &[f32], bits: &mut [u8]) -> Sums {
    let mut sums = Sums::default();
    let done = match has_avx2() {
        // SAFETY: the processor has avx2 and fma.
        true => unsafe { signs::avx2(x, bits, &mut sums) },
        false => 0,
    };
    sums.add(&x[done..], &mut bits[done / 8..]);
    sums
}

/// Signs with AVX-512, or portably on processors without.
pub(super) fn signs_avx512<const MAGNITUDES: bool>(x: &[f32], bits: &mut [u8]) -> Sums {
    let mut sums = Sums::default();
    let done = match has_avx512() {
        // SAFETY: the processor has these.
        true => unsafe { signs::avx512::<MAGNITUDES>(x, bits, &mut sums) },
        false => 0,
    };
    sums.add(&x[done..], &mut bits[done / 8..]);
    sums
}

/// A momentum's next values and their signs, of whole blocks; on processors without AVX-512 of none.
pub(super) fn decayed_signs_avx512(decayed: Decayed<'_>, seen: &mut PassStats) -> usize {
    let n = decayed.x.len();
    assert!(decayed.momentum.len() == n && decayed.next.len() == n, "slices of one length");
    match has_avx512() {
        // SAFETY: the processor has these.
        true => unsafe { signs::decayed_avx512(decayed, seen) },
        false => 0,
    }
}

/// Statistics of parts of `len` values, a multiple of 16; on processors without AVX-512 of none.
pub(super) fn stats_of_parts_avx512(x: &[f32], len: usize, seen: &mut [PassStats]) -> bool {
    if has_avx512() {
        // SAFETY: the processor has these.
        unsafe { pass::parts(x, len, seen) };
    }
    has_avx512()
}

/// Adds either value, if FRESH to zeros, where whole vectors of values are left, and answers to how many; on processors without
/// AVX-512 to none.
pub(super) fn add_sides_avx512<const FRESH: bool>(bits: &[u8], values: [f32; 2], out: &mut [f32]) -> usize {
    match has_avx512() {
        // SAFETY: the processor has these.
        true => unsafe { signs::add_avx512::<FRESH>(bits, values, out) },
        false => 0,
    }
}

/// Halves of the first values; of none on processors without these vectors.
pub(super) fn narrow_avx512<const F16: bool>(
    x: (&[f32], f32),
    to: &mut [[u8; 2]],
    squares: (&mut Squares, &mut Squares),
) -> usize {
    match has_avx512() {
        // SAFETY: the processor has these.
        true => unsafe { halves::narrow::<F16>(x, to, squares) },
        false => 0,
    }
}

/// Adds the first halves; none on processors without these vectors.
pub(super) fn widen_avx512<const FRESH: bool, const F16: bool>(
    from: &[[u8; 2]],
    target: (f32, &mut [f32]),
) -> (usize, u32) {
    match has_avx512() {
        // SAFETY: the processor has these.
        true => unsafe { halves::widen::<FRESH, F16>(from, target) },
        false => (0, 0),
    }
}

/// Squares of the first values, and their largest key; of none on processors without AVX-512.
pub(super) fn approximate_avx512(x: &[f32], squares: &mut Squares) -> (usize, u32) {
    match has_avx512() {
        // SAFETY: the processor has these.
        true => unsafe { rounding::approximate(x, squares) },
        false => (0, 0),
    }
}

/// Rounds the first values; none on processors without these vectors.
pub(super) fn round_avx512(rounding: Rounding, values: Rounded<'_>, squares: &mut Squares) -> (usize, Option<u64>) {
    match rounding {
        // SAFETY: the processor has these, avx512vbmi and avx512vnni.
        Rounding::Steps(steps) if has_avx512_bytes() => {
            let (len, mut whole) = (values.x.len().max(64), 0);
            let done = unsafe { rounding::to_steps((&[steps], len), values, std::slice::from_mut(&mut whole)) };
            (done, (done > 0).then_some(whole))
        }
        Rounding::Steps(_) => round_avx2(rounding, values),
        // SAFETY: the processor has these.
        _ if has_avx512() => unsafe { rounding::round(rounding, values, squares) },
        _ => (0, None),
    }
}

/// Rounds parts to steps of their own; none on processors without these vectors.
pub(super) fn round_parts_avx512(steps: (&[Steps], usize), values: Rounded<'_>, squares: &mut [u64]) -> usize {
    match has_avx512_bytes() {
        // SAFETY: the processor has these.
        true => unsafe { rounding::to_steps(steps, values, squares) },
        false => 0,
    }
}

/// Rounds the first values to steps; none on processors without AVX2.
pub(super) fn round_avx2(rounding: Rounding, values: Rounded<'_>) -> (usize, Option<u64>) {
    match rounding {
        // SAFETY: the processor has avx2 and fma.
        Rounding::Steps(steps) if has_avx2() => unsafe { steps::avx2(steps, values) },
        _ => (0, None),
    }
}

/// Rounds the first values to powers of two; none on processors without these vectors.
pub(super) fn round_to_powers_avx512(values: Rounded<'_>, signs: &mut [u8], squares: (f32, &mut Squares)) -> usize {
    match has_avx512() {
        // SAFETY: the processor has these.
        true => unsafe { rounding::to_powers(values, signs, squares) },
        false => 0,
    }
}

/// Adds the first powers of two; none on processors without these vectors.
pub(super) fn add_powers_avx512(exponents: &[u8], signs: &[u8], target: (f32, &mut [f32])) -> usize {
    match has_avx512() {
        // SAFETY: the processor has these.
        true => unsafe { rounding::add_powers(exponents, signs, target) },
        false => 0,
    }
}

/// Adds what the first codes mean; none on processors without AVX-512.
pub(super) fn add_codes_avx512<const FRESH: bool>(codes: &[u8], values: &[f32; TABLED], out: &mut [f32]) -> usize {
    match has_avx512() {
        // SAFETY: the processor has these.
        true => unsafe { rounding::add_codes::<FRESH>(codes, values, out) },
        false => 0,
    }
}

/// Adds what the first codes mean; none on processors without these vectors.
pub(super) fn add_meanings_avx512<const FRESH: bool>(codes: &[u8], table: &Table, out: &mut [f32]) -> usize {
    match has_avx512_bytes() {
        // SAFETY: the processor has these and avx512vbmi.
        true => unsafe { tables::add::<FRESH>(codes, table, out) },
        false => 0,
    }
}

/// Adds up what the first codes mean; none on processors without these vectors.
pub(super) fn sum_of_meanings_avx512(codes: &[u8], table: &Table, sums: &mut Squares) -> usize {
    match has_avx512_bytes() {
        // SAFETY: the processor has these and avx512vbmi.
        true => unsafe { tables::sum(codes, table, sums) },
        false => 0,
    }
}

/// Nearest codes of the first values; of none on processors without AVX-512.
pub(super) fn even_codes_avx512(even: Even, x: &[f32], codes: &mut [u8], exact: impl Fn(f32) -> u8) -> usize {
    match has_avx512() {
        // SAFETY: the processor has these.
        true => unsafe { nearest::even_codes(even, x, codes, exact) },
        false => 0,
    }
}

/// Nearest codes of the first values; of none on processors without AVX-512.
pub(super) fn line_codes_avx512(lines: &Lines, x: &[f32], codes: &mut [u8], exact: impl Fn(f32) -> u8) -> usize {
    match has_avx512() {
        // SAFETY: the processor has these.
        true => unsafe { nearest::line_codes(lines, x, codes, exact) },
        false => 0,
    }
}

/// Both sides of the first values; of none on processors without AVX-512.
pub(super) fn partition_avx512(x: &[f32], threshold: f32, bits: &mut [u8], partition: &mut PartitionSums) -> usize {
    match has_avx512() {
        // SAFETY: the processor has these.
        true => unsafe { partition::partition(x, threshold, bits, partition) },
        false => 0,
    }
}

/// Both sides of the first columns; of none on processors without AVX-512.
pub(super) fn sides_of_columns_avx512(x: &[f32], threshold: f32, columns: &mut Columns) -> usize {
    match has_avx512() {
        // SAFETY: the processor has these.
        true => unsafe { partition::partition_columns(x, threshold, columns) },
        false => 0,
    }
}

/// Adds either value of each column, unless the processor has no AVX-512; answers whether.
pub(super) fn add_columns_avx512<const FRESH: bool>(bits: &[u8], values: [&[f32]; 2], out: &mut [f32]) -> bool {
    if has_avx512() {
        // SAFETY: the processor has these.
        unsafe { partition::add_columns::<FRESH>(bits, values, out) }
    }
    has_avx512()
}

/// The first bytes of ternary values; none on processors without AVX-512.
pub(super) fn quartic_avx512(x: &[f32], half: f32, to: (&mut [u8], &mut [u64])) -> (usize, u64) {
    match has_avx512() {
        // SAFETY: the processor has these.
        true => unsafe { ternary::quartic(x, half, to) },
        false => (0, 0),
    }
}

/// Packs the first codes; none on processors without these vectors.
pub(super) fn pack_avx512(codes: &[u8], width: u32, out: &mut [u8]) -> usize {
    match has_avx512_bytes() {
        // SAFETY: the processor has these and avx512vbmi.
        true => unsafe { pack::pack(codes, width, out) },
        false => 0,
    }
}

/// Unpacks the first codes; none on processors without these vectors.
pub(super) fn unpack_avx512(packed: &[u8], width: u32, codes: &mut [u8]) -> (usize, u8) {
    match has_avx512_bytes() {
        // SAFETY: the processor has these and avx512vbmi.
        true => unsafe { pack::unpack(packed, width, codes) },
        false => (0, 0),
    }
}

/// A loop compiled for AVX2, or as it is on processors without.
pub(super) fn work_avx2<O>(work: impl Work<O>) -> O {
    if !has_avx2() {
        return work.run();
    }
    // SAFETY: the processor has avx2 and fma.
    unsafe { inside_avx2(work) }
}

/// A loop compiled for AVX-512 with bytes, words and double words, or for AVX2 on processors without.
pub(super) fn work_avx512<O>(work: impl Work<O>) -> O {
    if !has_avx512() {
        return work_avx2(work);
    }
    // SAFETY: the processor has these.
    unsafe { inside_avx512(work) }
}

#[target_feature(enable = "avx2,fma")]
fn inside_avx2<O>(work: impl Work<O>) -> O {
    work.run()
}

#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl")]
fn inside_avx512<O>(work: impl Work<O>) -> O {
    work.run()
}
