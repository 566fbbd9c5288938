//! The pass with AVX2 and with AVX-512, behind functions that are safe to call: they check the processor.
//!
//! Both add into f64 sums of their own order, so energies may differ from the portable ones in the last bits;
//! `fed`, the largest key and the candidates are the same.
#![allow(unsafe_code)]

use super::{Candidates, Fed, Feed, KEY_MASK, SLACK, Work, portable};
use std::arch::x86_64::*;

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
    unsafe { run_avx2(feed, found) }
}

/// The pass with AVX-512, or the portable one on processors without.
pub(super) fn feed_avx512(feed: Feed<'_>, found: &mut Candidates) -> Fed {
    if !has_avx512() {
        return portable::feed(feed, found);
    }
    // SAFETY: the processor has avx512f.
    unsafe { run_avx512(feed, found) }
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

/// Where candidates are written. Kernels store whole vectors of up to `SLACK` lanes at `len` and then advance `len` by
/// the candidates among them.
struct Sink<'a> {
    indices: &'a mut [u32],
    bits: &'a mut [u32],
    len: usize,
    overflowed: bool,
}

impl<'a> Sink<'a> {
    fn new(found: &'a mut Candidates) -> Self {
        let end = found.limit + SLACK;
        let (indices, bits) = (&mut found.indices, &mut found.bits);
        // With less room than promised (no reset yet), nothing can be stored: every vector overflows.
        let room = indices.len().min(bits.len()).min(end);
        Self { indices: &mut indices[..room], bits: &mut bits[..room], len: found.len, overflowed: found.overflowed }
    }

    /// Room for `lanes` at `len`; without it the list counts as overflowed.
    fn slots(&mut self, lanes: usize) -> Option<(*mut u32, *mut u32)> {
        let range = self.len..self.len + lanes;
        match (self.indices.get_mut(range.clone()), self.bits.get_mut(range)) {
            (Some(indices), Some(bits)) if !self.overflowed => Some((indices.as_mut_ptr(), bits.as_mut_ptr())),
            _ => {
                self.overflowed = true;
                None
            }
        }
    }
}

/// Values after the last whole vector, and what the sink holds, go back into `found`.
fn finish(feed: Feed<'_>, done: usize, found: &mut Candidates, mut out: Fed) -> Fed {
    let Feed { gradient, residual, fed, floor } = feed;
    let rest = Feed { gradient: &gradient[done..], residual: &residual[done..], fed: &mut fed[done..], floor };
    let before = found.len;
    let tail = portable::feed(rest, found);
    if !found.overflowed {
        found.indices[before..found.len].iter_mut().for_each(|i| *i += done as u32);
    }
    out.energy += tail.energy;
    out.max_key = out.max_key.max(tail.max_key);
    out
}

#[target_feature(enable = "avx512f")]
fn run_avx512(feed: Feed<'_>, found: &mut Candidates) -> Fed {
    const LANES: usize = 16;
    let whole = feed.gradient.len() / LANES * LANES;
    assert!(feed.residual.len() >= whole && feed.fed.len() >= whole, "slices of one length");
    let mask = _mm512_set1_epi32(KEY_MASK as i32);
    // No key reaches u32::MAX: without a floor there are no candidates.
    let floor = _mm512_set1_epi32(feed.floor.unwrap_or(u32::MAX) as i32);
    let lane = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
    let (mut low, mut high, mut max) = (_mm512_setzero_pd(), _mm512_setzero_pd(), _mm512_setzero_si512());
    let mut sink = Sink::new(found);
    for at in (0..whole).step_by(LANES) {
        // SAFETY: at + LANES <= whole, which is within all three slices (asserted above).
        let sum = unsafe {
            let g = _mm512_loadu_ps(feed.gradient.as_ptr().add(at));
            let r = _mm512_loadu_ps(feed.residual.as_ptr().add(at));
            let sum = _mm512_add_ps(g, r);
            _mm512_storeu_ps(feed.fed.as_mut_ptr().add(at), sum);
            sum
        };
        let a = _mm512_cvtps_pd(_mm512_castps512_ps256(sum));
        let b = _mm512_cvtps_pd(_mm256_castpd_ps(_mm512_extractf64x4_pd::<1>(_mm512_castps_pd(sum))));
        low = _mm512_fmadd_pd(a, a, low);
        high = _mm512_fmadd_pd(b, b, high);
        let bits = _mm512_castps_si512(sum);
        let key = _mm512_and_si512(bits, mask);
        max = _mm512_max_epu32(max, key);
        let hits = _mm512_cmpge_epu32_mask(key, floor);
        if hits != 0
            && let Some((indices, values)) = sink.slots(LANES)
        {
            let index = _mm512_add_epi32(lane, _mm512_set1_epi32(at as i32));
            // Compressing in a register and storing all lanes is far faster than a compressing store on some processors.
            // SAFETY: `slots` answered room for LANES values at each.
            unsafe {
                _mm512_storeu_si512(indices.cast(), _mm512_maskz_compress_epi32(hits, index));
                _mm512_storeu_si512(values.cast(), _mm512_maskz_compress_epi32(hits, bits));
            }
            sink.len += hits.count_ones() as usize;
        }
    }
    (found.len, found.overflowed) = (sink.len, sink.overflowed);
    let energy = _mm512_reduce_add_pd(_mm512_add_pd(low, high));
    finish(feed, whole, found, Fed { energy, max_key: _mm512_reduce_max_epu32(max) })
}

/// `PACK[hits]`: the lanes of the set bits first.
static PACK: [[u32; 8]; 256] = {
    let mut table = [[0; 8]; 256];
    let mut hits = 0;
    while hits < 256 {
        let (mut lane, mut to) = (0, 0);
        while lane < 8 {
            if hits >> lane & 1 == 1 {
                table[hits][to] = lane as u32;
                to += 1;
            }
            lane += 1;
        }
        hits += 1;
    }
    table
};

#[target_feature(enable = "avx2,fma")]
fn run_avx2(feed: Feed<'_>, found: &mut Candidates) -> Fed {
    const LANES: usize = 8;
    let whole = feed.gradient.len() / LANES * LANES;
    assert!(feed.residual.len() >= whole && feed.fed.len() >= whole, "slices of one length");
    let mask = _mm256_set1_epi32(KEY_MASK as i32);
    // Keys have 31 bits, so signed comparison serves; one below the floor turns "greater" into "at least".
    let below = _mm256_set1_epi32(feed.floor.map_or(i32::MAX, |floor| floor.min(KEY_MASK) as i32 - 1));
    let lane = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7);
    let (mut low, mut high, mut max) = (_mm256_setzero_pd(), _mm256_setzero_pd(), _mm256_setzero_si256());
    let mut sink = Sink::new(found);
    for at in (0..whole).step_by(LANES) {
        // SAFETY: at + LANES <= whole, which is within all three slices (asserted above).
        let sum = unsafe {
            let g = _mm256_loadu_ps(feed.gradient.as_ptr().add(at));
            let r = _mm256_loadu_ps(feed.residual.as_ptr().add(at));
            let sum = _mm256_add_ps(g, r);
            _mm256_storeu_ps(feed.fed.as_mut_ptr().add(at), sum);
            sum
        };
        let a = _mm256_cvtps_pd(_mm256_castps256_ps128(sum));
        let b = _mm256_cvtps_pd(_mm256_extractf128_ps::<1>(sum));
        low = _mm256_fmadd_pd(a, a, low);
        high = _mm256_fmadd_pd(b, b, high);
        let bits = _mm256_castps_si256(sum);
        let key = _mm256_and_si256(bits, mask);
        max = _mm256_max_epu32(max, key);
        let hits = _mm256_movemask_ps(_mm256_castsi256_ps(_mm256_cmpgt_epi32(key, below))) as usize;
        if hits != 0
            && let Some((indices, values)) = sink.slots(LANES)
        {
            let index = _mm256_add_epi32(lane, _mm256_set1_epi32(at as i32));
            // SAFETY: an entry of PACK has 8 lanes, and `slots` answered room for LANES values at each.
            unsafe {
                let order = _mm256_loadu_si256(PACK[hits].as_ptr().cast());
                _mm256_storeu_si256(indices.cast(), _mm256_permutevar8x32_epi32(index, order));
                _mm256_storeu_si256(values.cast(), _mm256_permutevar8x32_epi32(bits, order));
            }
            sink.len += hits.count_ones() as usize;
        }
    }
    (found.len, found.overflowed) = (sink.len, sink.overflowed);
    let (mut sums, mut keys) = ([0.0f64; 4], [0u32; 8]);
    // SAFETY: both arrays have the size of the vector.
    unsafe {
        _mm256_storeu_pd(sums.as_mut_ptr(), _mm256_add_pd(low, high));
        _mm256_storeu_si256(keys.as_mut_ptr().cast(), max);
    }
    let max_key = keys.into_iter().fold(0, u32::max);
    finish(feed, whole, found, Fed { energy: sums.iter().sum(), max_key })
}
