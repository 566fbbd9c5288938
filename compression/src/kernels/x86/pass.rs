//! The pass over a gradient.

use super::super::portable::{self, BLOCK};
use super::super::{Added, Candidates, Feed, KEY_MASK, PassStats, SLACK};
use super::{load, store};
use std::arch::x86_64::*;
use std::ops::Range;

/// From here on what is written goes past the caches: it would push out what is read, and be gone itself before it is
/// needed. Three buffers of 16 MiB fill the last level of most processors.
pub(super) const STREAMED: usize = 1 << 22;

/// What becomes of the values of a pass.
const READ: u8 = 0;
const STORE: u8 = 1;
const STREAM: u8 = 2;
/// Beside one of these: both weights are 1, and no product changes anything.
const PLAIN: u8 = 4;

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

    /// Room at `len`; without it the list counts as overflowed.
    #[inline(always)]
    fn slots<const LANES: usize>(&mut self) -> Option<(&mut [u32; LANES], &mut [u32; LANES])> {
        let (indices, bits) = (&mut self.indices[self.len..], &mut self.bits[self.len..]);
        match (indices.first_chunk_mut(), bits.first_chunk_mut()) {
            (Some(indices), Some(bits)) if !self.overflowed => Some((indices, bits)),
            _ => {
                self.overflowed = true;
                None
            }
        }
    }
}

/// Slices of a pass, of one length or, when it only reads, two of them empty.
struct Buffers<'a> {
    gradient: &'a [f32],
    residual: &'a [f32],
    compensated: &'a mut [f32],
    weights: (f32, f32),
    /// No key reaches u32::MAX: without a floor there are no candidates.
    floor: u32,
}

impl<'a> Buffers<'a> {
    fn new(feed: Feed<'a>) -> (Self, u8) {
        let Feed { gradient, added, floor } = feed;
        let floor = floor.unwrap_or(u32::MAX);
        let Some(Added { residual, beta, gamma, compensated }) = added else {
            return (Self { gradient, residual: &[], compensated: &mut [], weights: (0.0, 1.0), floor }, READ);
        };
        let n = gradient.len();
        assert!(residual.len() == n && compensated.len() == n, "slices of one length");
        // Stores past the caches must be aligned to 16 bytes.
        let streams = n >= STREAMED && compensated.as_ptr().addr().is_multiple_of(16);
        let plain = if (beta, gamma) == (1.0, 1.0) { PLAIN } else { 0 };
        (
            Self { gradient, residual, compensated, weights: (beta, gamma), floor },
            plain | if streams { STREAM } else { STORE },
        )
    }

    /// The values from `done` on, of which fewer than a vector are left, and the block's sums, go into the answer.
    fn finish(self, done: usize, (sums, found): ([f64; 8], &mut Candidates), mut out: PassStats) -> PassStats {
        let rest = self.gradient.len() - done;
        let (mut values, (beta, gamma)) = ([0.0; 16], self.weights);
        let values = &mut values[..rest];
        values.copy_from_slice(&self.gradient[done..]);
        if !self.residual.is_empty() {
            values.iter_mut().zip(&self.residual[done..]).for_each(|(value, r)| *value = beta * r + gamma * *value);
            self.compensated[done..].copy_from_slice(values);
        }
        out.energy += portable::energy_on(sums, values);
        out.max_key = values.iter().fold(out.max_key, |max, x| max.max(super::super::key(*x)));
        if self.floor <= KEY_MASK {
            portable::collect(values, done as u32, self.floor, found);
        }
        out
    }
}

#[target_feature(enable = "avx512f,avx512bw,popcnt,bmi1,bmi2")]
pub(crate) fn avx512(feed: Feed<'_>, found: &mut Candidates) -> PassStats {
    let (buffers, mode) = Buffers::new(feed);
    match mode {
        READ => run_avx512::<READ>(buffers, found),
        STORE => run_avx512::<STORE>(buffers, found),
        STREAM => run_avx512::<STREAM>(buffers, found),
        mode if mode == PLAIN | STORE => run_avx512::<{ PLAIN | STORE }>(buffers, found),
        _ => run_avx512::<{ PLAIN | STREAM }>(buffers, found),
    }
}

#[target_feature(enable = "avx512f,avx512bw,popcnt,bmi1,bmi2")]
fn run_avx512<const MODE: u8>(mut buffers: Buffers<'_>, found: &mut Candidates) -> PassStats {
    let whole = buffers.gradient.len() / LANES * LANES;
    assert!(MODE == READ || (buffers.residual.len() >= whole && buffers.compensated.len() >= whole));
    let (mut seen, mut sink, mut from) = (Seen::new(), Sink::new(found), 0);
    // What comes from memory comes fastest in one stream.
    if MODE == READ && buffers.floor > KEY_MASK && whole < STREAMED {
        let mut max_key = 0;
        let done = side_by_side::<2>(buffers.gradient, BLOCK, |part| {
            seen.energy += part.energy;
            max_key = part.max_key.max(max_key);
        });
        (seen.max, from) = (_mm512_set1_epi32(max_key as i32), done);
    }
    let [now, before] = &mut [Hits::NONE; 2];
    let (mut now, mut before) = (now, before);
    while from + BLOCK <= whole {
        look::<MODE>(&mut buffers, from, &mut seen, now);
        keep::<MODE>(&buffers, before, &mut sink);
        std::mem::swap(&mut now, &mut before);
        from += BLOCK;
    }
    seen.finish::<MODE>(&buffers, from);
    look_at_last::<MODE>(&mut buffers, from..whole, &mut seen, now);
    keep::<MODE>(&buffers, before, &mut sink);
    keep::<MODE>(&buffers, now, &mut sink);
    if MODE & STREAM == STREAM {
        _mm_sfence();
    }
    (found.len, found.overflowed) = (sink.len, sink.overflowed);
    let out = PassStats { energy: seen.energy, max_key: _mm512_reduce_max_epu32(seen.max) };
    buffers.finish(whole, (seen.sums, found), out)
}

/// Values per vector.
const LANES: usize = 16;

/// Where a block's values reached the floor.
#[derive(Clone, Copy)]
struct Hits {
    start: usize,
    /// A bit for each vector of which one did: gathered in a register, since a vector of numbers that were stored one by one
    /// cannot be loaded before these and all stores before them have reached the cache.
    vectors: u64,
    /// A bit for each value.
    values: [u16; BLOCK / LANES],
}

impl Hits {
    const NONE: Self = Self { start: 0, vectors: 0, values: [0; BLOCK / LANES] };
}

/// What the values so far add up to.
struct Seen {
    /// Of whole blocks.
    energy: f64,
    /// Of the block before, of which the first half was added up; none before the first block.
    half: Option<__m512d>,
    /// Of the last block, while it is short.
    sums: [f64; 8],
    max: __m512i,
}

impl Seen {
    #[inline]
    #[target_feature(enable = "avx512f")]
    fn new() -> Self {
        Self { energy: 0.0, half: None, sums: [0.0; 8], max: _mm512_setzero_si512() }
    }

    /// Adds up the second half of the block that ends at `end`.
    #[inline]
    #[target_feature(enable = "avx512f")]
    fn finish<const MODE: u8>(&mut self, buffers: &Buffers<'_>, end: usize) {
        let Some(mut squares) = self.half.take() else { return };
        for at in (end - BLOCK / 2..end).step_by(LANES) {
            // SAFETY: a block that was looked at.
            squares = add_squares(squares, unsafe { looked_at::<MODE>(buffers, at) });
        }
        self.energy += sum(squares);
    }
}

/// The values that are looked at from `at` on.
///
/// # Safety
/// at + 16 <= the length of the slices.
#[inline]
#[target_feature(enable = "avx512f")]
unsafe fn values_at<const MODE: u8>(buffers: &Buffers<'_>, at: usize) -> __m512 {
    let (beta, gamma) = (_mm512_set1_ps(buffers.weights.0), _mm512_set1_ps(buffers.weights.1));
    // SAFETY: by the caller's promise.
    unsafe {
        let value = _mm512_loadu_ps(buffers.gradient.as_ptr().add(at));
        if MODE == READ {
            return value;
        }
        let residual = _mm512_loadu_ps(buffers.residual.as_ptr().add(at));
        match MODE & PLAIN {
            PLAIN => _mm512_add_ps(residual, value),
            _ => _mm512_add_ps(_mm512_mul_ps(beta, residual), _mm512_mul_ps(gamma, value)),
        }
    }
}

/// The values that were looked at from `at` on. What was stored is near; what went past the caches is not.
///
/// # Safety
/// They were.
#[inline]
#[target_feature(enable = "avx512f")]
unsafe fn looked_at<const MODE: u8>(buffers: &Buffers<'_>, at: usize) -> __m512 {
    // SAFETY: by the caller's promise.
    unsafe {
        match MODE & !PLAIN {
            STORE => _mm512_loadu_ps(buffers.compensated.as_ptr().add(at)),
            _ => values_at::<MODE>(buffers, at),
        }
    }
}

/// Feeds values from `at` on, and keeps the largest key; a bit for each that reaches the floor.
///
/// # Safety
/// at + 16 <= the length of the slices.
#[inline]
#[target_feature(enable = "avx512f")]
unsafe fn feed_at<const MODE: u8>(buffers: &mut Buffers<'_>, at: usize, max: &mut __m512i) -> u16 {
    let (mask, floor) = (_mm512_set1_epi32(KEY_MASK as i32), _mm512_set1_epi32(buffers.floor as i32));
    // SAFETY: by the caller's promise; past the caches slices are aligned.
    let value = unsafe {
        let value = values_at::<MODE>(buffers, at);
        let to = buffers.compensated.as_mut_ptr().wrapping_add(at);
        match MODE & !PLAIN {
            READ => {}
            STORE => _mm512_storeu_ps(to, value),
            _ => stream512(to, value),
        }
        value
    };
    let key = _mm512_and_si512(_mm512_castps_si512(value), mask);
    *max = _mm512_max_epu32(*max, key);
    _mm512_cmpge_epu32_mask(key, floor)
}

/// Feeds a whole block and finds what reaches the floor. Sums of squares are chains, by whose latency a block takes longer than
/// by all else: the first half of this block's and the second half of the one before are added up side by side.
#[inline]
#[target_feature(enable = "avx512f")]
fn look<const MODE: u8>(buffers: &mut Buffers<'_>, start: usize, seen: &mut Seen, hits: &mut Hits) {
    let before = if seen.half.is_some() { start - BLOCK / 2 } else { start };
    let (mut squares, mut old) = (_mm512_setzero_pd(), seen.half.unwrap_or(_mm512_setzero_pd()));
    let (mut max, mut vectors) = (seen.max, 0u64);
    for (pair, hits) in hits.values.as_chunks_mut::<2>().0.iter_mut().enumerate() {
        // SAFETY: the caller has a block in every slice that is used, and has looked at the one before.
        unsafe {
            for (i, hit) in hits.iter_mut().enumerate() {
                let vector = 2 * pair + i;
                *hit = feed_at::<MODE>(buffers, start + LANES * vector, &mut max);
                vectors |= u64::from(*hit != 0) << vector;
            }
            squares = add_squares(squares, looked_at::<MODE>(buffers, start + LANES * pair));
            old = add_squares(old, looked_at::<MODE>(buffers, before + LANES * pair));
        }
    }
    if seen.half.is_some() {
        seen.energy += sum(old);
    }
    (seen.half, seen.max) = (Some(squares), max);
    (hits.start, hits.vectors) = (start, vectors);
}

/// As [`look`], of whole vectors that are less than a block.
#[inline]
#[target_feature(enable = "avx512f")]
fn look_at_last<const MODE: u8>(buffers: &mut Buffers<'_>, range: Range<usize>, seen: &mut Seen, hits: &mut Hits) {
    let mut squares = _mm512_setzero_pd();
    (hits.start, hits.vectors) = (range.start, 0);
    for ((vector, hit), at) in hits.values.iter_mut().enumerate().zip(range.step_by(LANES)) {
        // SAFETY: the caller has these values in every slice that is used.
        unsafe {
            *hit = feed_at::<MODE>(buffers, at, &mut seen.max);
            squares = add_squares(squares, looked_at::<MODE>(buffers, at));
        }
        hits.vectors |= u64::from(*hit != 0) << vector;
    }
    store(&mut seen.sums, squares);
}

/// Keeps a block's values that reached the floor. Apart from looking, where a branch would be guessed wrong every few vectors,
/// and after the next block was looked at: what is guessed wrong here is known before that is done.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,popcnt,bmi1,bmi2")]
fn keep<const MODE: u8>(buffers: &Buffers<'_>, hits: &Hits, sink: &mut Sink<'_>) {
    let lane = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
    let mut vectors = hits.vectors;
    while vectors != 0 {
        let vector = vectors.trailing_zeros() as usize;
        vectors &= vectors - 1;
        let (at, hits) = (hits.start + LANES * vector, hits.values[vector % (BLOCK / LANES)]);
        let Some((indices, bits)) = sink.slots::<LANES>() else { return };
        let index = _mm512_add_epi32(lane, _mm512_set1_epi32(at as i32));
        // Compressing in a register and storing all lanes is far faster than a compressing store on some processors.
        // SAFETY: these values were looked at.
        let values = _mm512_castps_si512(unsafe { looked_at::<MODE>(buffers, at) });
        store(indices, _mm512_maskz_compress_epi32(hits, index));
        store(bits, _mm512_maskz_compress_epi32(hits, values));
        sink.len += hits.count_ones() as usize;
    }
}

/// Adds 16 squares to eight sums, the lower eight before the upper: each adds in the order of positions.
#[inline]
#[target_feature(enable = "avx512f")]
pub(super) fn add_squares(squares: __m512d, value: __m512) -> __m512d {
    let low = _mm512_cvtps_pd(_mm512_castps512_ps256(value));
    let high = _mm512_cvtps_pd(_mm256_castpd_ps(_mm512_extractf64x4_pd::<1>(_mm512_castps_pd(value))));
    // Squares are exact in f64: it does not matter whether they are added in one instruction.
    _mm512_fmadd_pd(high, high, _mm512_fmadd_pd(low, low, squares))
}

/// How many values ahead of two blocks that are read side by side the next are asked for, in the order of memory: processors
/// guess it from one stream but not from two.
pub(super) const AHEAD: usize = 4096;

/// Hands over what parts of `len` values, a multiple of 16, add up to, in order, as far as there are N of them left; answers how
/// many values these are. The sums of one part wait for each other; those of others meanwhile go on.
#[inline]
#[target_feature(enable = "avx512f")]
fn side_by_side<const N: usize>(x: &[f32], len: usize, mut each: impl FnMut(PassStats)) -> usize {
    assert!(len.is_multiple_of(16), "whole vectors");
    let mask = _mm512_set1_epi32(KEY_MASK as i32);
    for parts in x.chunks_exact(N * len) {
        let (mut squares, mut max) = ([_mm512_setzero_pd(); N], [_mm512_setzero_si512(); N]);
        for at in (0..len).step_by(16) {
            for part in 0..N {
                let ahead = parts.as_ptr().wrapping_add(AHEAD + N * at + 16 * part);
                // A hint, which may point anywhere.
                _mm_prefetch::<_MM_HINT_T0>(ahead.cast());
                // SAFETY: at + 16 <= len, and there are N times as many values.
                let value = unsafe { _mm512_loadu_ps(parts.as_ptr().add(part * len + at)) };
                max[part] = _mm512_max_epu32(max[part], _mm512_and_si512(_mm512_castps_si512(value), mask));
                squares[part] = add_squares(squares[part], value);
            }
        }
        let seen = squares.into_iter().zip(max);
        seen.for_each(|(squares, max)| each(PassStats { energy: sum(squares), max_key: _mm512_reduce_max_epu32(max) }));
    }
    x.len() / (N * len) * (N * len)
}

/// Of parts of at most a block; true.
#[target_feature(enable = "avx512f")]
pub(crate) fn parts(x: &[f32], len: usize, seen: &mut [PassStats]) -> bool {
    let mut seen = seen.iter_mut();
    let mut each = |stats| seen.next().into_iter().for_each(|seen| *seen = stats);
    let done = side_by_side::<2>(x, len, &mut each);
    side_by_side::<1>(&x[done..], len, &mut each);
    true
}

/// Of eight, one after the other.
#[inline(always)]
pub(super) fn sum(squares: __m512d) -> f64 {
    load::<[f64; 8], _>(&squares).iter().sum()
}

/// Stores past the caches.
///
/// # Safety
/// `to` is aligned to 16 bytes, and 16 values may be written there.
#[inline]
#[target_feature(enable = "avx512f")]
pub(super) unsafe fn stream512(to: *mut f32, values: __m512) {
    // SAFETY: by the caller's promise.
    unsafe {
        _mm_stream_ps(to, _mm512_castps512_ps128(values));
        _mm_stream_ps(to.add(4), _mm512_extractf32x4_ps::<1>(values));
        _mm_stream_ps(to.add(8), _mm512_extractf32x4_ps::<2>(values));
        _mm_stream_ps(to.add(12), _mm512_extractf32x4_ps::<3>(values));
    }
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
pub(crate) fn avx2(feed: Feed<'_>, found: &mut Candidates) -> PassStats {
    let (buffers, mode) = Buffers::new(feed);
    match mode {
        READ => run_avx2::<READ>(buffers, found),
        STORE => run_avx2::<STORE>(buffers, found),
        STREAM => run_avx2::<STREAM>(buffers, found),
        mode if mode == PLAIN | STORE => run_avx2::<{ PLAIN | STORE }>(buffers, found),
        _ => run_avx2::<{ PLAIN | STREAM }>(buffers, found),
    }
}

#[target_feature(enable = "avx2,fma")]
fn run_avx2<const MODE: u8>(buffers: Buffers<'_>, found: &mut Candidates) -> PassStats {
    const LANES: usize = 8;
    let whole = buffers.gradient.len() / LANES * LANES;
    assert!(MODE == READ || (buffers.residual.len() >= whole && buffers.compensated.len() >= whole));
    let (beta, gamma) = (_mm256_set1_ps(buffers.weights.0), _mm256_set1_ps(buffers.weights.1));
    let mask = _mm256_set1_epi32(KEY_MASK as i32);
    // Keys have 31 bits, so signed comparison serves; one below the floor turns "greater" into "at least".
    let below = _mm256_set1_epi32(if buffers.floor > KEY_MASK { i32::MAX } else { buffers.floor as i32 - 1 });
    let lane = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7);
    let (mut energy, mut sums, mut max) = (0.0, [0.0f64; 8], _mm256_setzero_si256());
    let mut sink = Sink::new(found);
    for start in (0..whole).step_by(BLOCK) {
        let end = whole.min(start + BLOCK);
        let (mut low_squares, mut high_squares) = (_mm256_setzero_pd(), _mm256_setzero_pd());
        for at in (start..end).step_by(LANES) {
            // SAFETY: at + LANES <= whole, which is within the slices that are used (asserted above).
            let value = unsafe {
                let mut value = _mm256_loadu_ps(buffers.gradient.as_ptr().add(at));
                if MODE != READ {
                    let residual = _mm256_loadu_ps(buffers.residual.as_ptr().add(at));
                    value = match MODE & PLAIN {
                        PLAIN => _mm256_add_ps(residual, value),
                        _ => _mm256_add_ps(_mm256_mul_ps(beta, residual), _mm256_mul_ps(gamma, value)),
                    };
                    let to = buffers.compensated.as_mut_ptr().add(at);
                    if MODE & STREAM == STREAM { stream256(to, value) } else { _mm256_storeu_ps(to, value) }
                }
                value
            };
            let low = _mm256_cvtps_pd(_mm256_castps256_ps128(value));
            let high = _mm256_cvtps_pd(_mm256_extractf128_ps::<1>(value));
            low_squares = _mm256_fmadd_pd(low, low, low_squares);
            high_squares = _mm256_fmadd_pd(high, high, high_squares);
            let bits = _mm256_castps_si256(value);
            let key = _mm256_and_si256(bits, mask);
            max = _mm256_max_epu32(max, key);
            let hits = _mm256_movemask_ps(_mm256_castsi256_ps(_mm256_cmpgt_epi32(key, below))) as usize;
            if hits != 0
                && let Some((indices, values)) = sink.slots::<LANES>()
            {
                let index = _mm256_add_epi32(lane, _mm256_set1_epi32(at as i32));
                let order = load(&PACK[hits]);
                store(indices, _mm256_permutevar8x32_epi32(index, order));
                store(values, _mm256_permutevar8x32_epi32(bits, order));
                sink.len += hits.count_ones() as usize;
            }
        }
        store(&mut sums, [low_squares, high_squares]);
        if end - start == BLOCK {
            energy += sums.iter().sum::<f64>();
            sums = [0.0; 8];
        }
    }
    if MODE & STREAM == STREAM {
        _mm_sfence();
    }
    (found.len, found.overflowed) = (sink.len, sink.overflowed);
    let max_key = load::<[u32; 8], _>(&max).into_iter().fold(0, u32::max);
    buffers.finish(whole, (sums, found), PassStats { energy, max_key })
}

/// As [`stream512`], of 8 values.
///
/// # Safety
/// `to` is aligned to 16 bytes, and 8 values may be written there.
#[inline]
#[target_feature(enable = "avx2,fma")]
unsafe fn stream256(to: *mut f32, values: __m256) {
    // SAFETY: by the caller's promise.
    unsafe {
        _mm_stream_ps(to, _mm256_castps256_ps128(values));
        _mm_stream_ps(to.add(4), _mm256_extractf128_ps::<1>(values));
    }
}
