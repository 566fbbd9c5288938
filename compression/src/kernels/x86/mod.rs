//! AVX2 and AVX-512 behind functions that are safe to call: they check the processor. Results are those of the portable
//! loops, bit for bit.
#![allow(unsafe_code)]

mod pass;
mod signs;

use super::signs::Sums;
use super::{Candidates, Fed, Feed, Work, portable};

/// AVX2 and FMA.
pub(super) fn has_avx2() -> bool {
    is_x86_feature_detected!("avx2") && is_x86_feature_detected!("fma")
}

/// AVX-512 Foundation.
pub(super) fn has_avx512() -> bool {
    is_x86_feature_detected!("avx512f")
}

/// The pass with AVX2, or the portable one on processors without.
pub(super) fn feed_avx2(feed: Feed<'_>, found: &mut Candidates) -> Fed {
    if !has_avx2() {
        return portable::feed(feed, found);
    }
    // SAFETY: the processor has avx2 and fma.
    unsafe { pass::avx2(feed, found) }
}

/// The pass with AVX-512, or the portable one on processors without.
pub(super) fn feed_avx512(feed: Feed<'_>, found: &mut Candidates) -> Fed {
    if !has_avx512() {
        return portable::feed(feed, found);
    }
    // SAFETY: the processor has avx512f.
    unsafe { pass::avx512(feed, found) }
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
        // SAFETY: the processor has avx512f.
        true => unsafe { signs::avx512::<MAGNITUDES>(x, bits, &mut sums) },
        false => 0,
    };
    sums.add(&x[done..], &mut bits[done / 8..]);
    sums
}

/// Adds ±value where whole vectors of values are left, and answers to how many; on processors without AVX-512 to none.
pub(super) fn add_signs_avx512(bits: &[u8], value: f32, out: &mut [f32]) -> usize {
    match has_avx512() {
        // SAFETY: the processor has avx512f.
        true => unsafe { signs::add_avx512(bits, value, out) },
        false => 0,
    }
}

/// A loop compiled for AVX2, or as it is on processors without.
pub(super) fn work_avx2<W: Work>(work: W) -> W::Output {
    if !has_avx2() {
        return work.run();
    }
    // SAFETY: the processor has avx2 and fma.
    unsafe { inside_avx2(work) }
}

/// A loop compiled for AVX-512 with bytes, words and double words, or for AVX2 on processors without.
pub(super) fn work_avx512<W: Work>(work: W) -> W::Output {
    let rest = is_x86_feature_detected!("avx512bw") && is_x86_feature_detected!("avx512dq");
    if !(has_avx512() && rest && is_x86_feature_detected!("avx512vl")) {
        return work_avx2(work);
    }
    // SAFETY: the processor has all four.
    unsafe { inside_avx512(work) }
}

#[target_feature(enable = "avx2,fma")]
fn inside_avx2<W: Work>(work: W) -> W::Output {
    work.run()
}

#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl")]
fn inside_avx512<W: Work>(work: W) -> W::Output {
    work.run()
}
