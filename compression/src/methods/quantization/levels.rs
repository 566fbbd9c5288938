//! Codes of w bits, one per value, with a norm per bucket: the shape that most quantizers share.
//!
//! Payload: a norm (f32) per bucket, then `levels(w)` of all codes. Work goes in blocks whose codes stay in the
//! first-level cache; each loop is compiled for every kernel.

use crate::Energy;
use crate::codec::{Codec, Context, EncodeError, ReadError, Size, Stats, not_finite};
use crate::kernels::{Kernel, Work, stats};
use crate::random::Stream;
use crate::wire::{Reader, Writer, levels_width, packed_bytes};
use std::fmt::Debug;

/// Values per block.
pub(super) const BLOCK: usize = 4096;

/// The largest norm: a multiple of norm / s that rounds up must still be finite. What is larger is clipped to it.
pub(super) const LARGEST_NORM: f64 = 3.4e38;

/// ‖x‖₂ as it is sent: not below max |x|, although it is rounded, and finite.
pub(super) fn l2(stats: Stats) -> f32 {
    (stats.norm().min(LARGEST_NORM) as f32).max(max(stats))
}

/// max |x| as it is sent.
pub(super) fn max(stats: Stats) -> f32 {
    stats.max.min(LARGEST_NORM as f32)
}

/// How one value becomes a code, and what a code means. Mark all `#[inline(always)]`.
pub(super) trait Rule: Copy {
    /// The code of value number i of the tensor.
    fn code(self, x: f32, i: u32) -> u8;

    /// What it stands for, in steps ([`Scheme::step`]).
    fn relative(self, code: u8) -> f32;
}

/// A quantizer with one norm per bucket.
pub(super) trait Scheme: Copy + Debug + Send + 'static {
    type Rule: Rule;

    /// Different codes.
    fn levels(&self) -> u64;

    /// What is sent of a bucket: at least 0, finite.
    fn norm(&self, x: &[f32], stats: Stats, kernel: Kernel) -> f32;

    /// What relative values are multiples of.
    fn step(&self, norm: f32) -> f32;

    /// The largest magnitude of a relative value.
    fn most(&self) -> f32;

    /// The rule for a bucket of this norm.
    fn rule(&self, norm: f32, random: Stream) -> Self::Rule;
}

/// A [`Scheme`] as a codec.
#[derive(Debug)]
pub(super) struct Bucketed<S> {
    scheme: S,
    n: usize,
    /// Values per norm.
    bucket: usize,
    codes: Box<[u8; BLOCK]>,
}

impl<S: Scheme> Bucketed<S> {
    /// With a bucket of 0 values, the tensor is one bucket.
    pub(super) fn new(scheme: S, n: usize, bucket: usize) -> Self {
        let bucket = if bucket == 0 { n.max(1) } else { bucket };
        Self { scheme, n, bucket, codes: Box::new([0; BLOCK]) }
    }

    fn width(&self) -> u32 {
        levels_width(self.scheme.levels())
    }

    fn norm_bytes(&self) -> usize {
        4 * self.n.div_ceil(self.bucket)
    }

    /// Norm and ‖x‖² of the bucket that starts at `at`.
    pub(super) fn open(&self, x: &[f32], at: usize, context: &Context) -> Result<(f32, f64), EncodeError> {
        let values = &x[at..x.len().min(at + self.bucket)];
        let stats = match values.len() == x.len() {
            true => context.stats(x)?,
            false => stats(context.kernel, values),
        };
        match stats.is_finite() {
            true => Ok((self.scheme.norm(values, stats, context.kernel), stats.energy)),
            false => Err(not_finite(x)),
        }
    }

    fn fill(&mut self, x: &[f32], context: &Context, room: &mut [u8]) -> Result<Energy, EncodeError> {
        let (norms, packed) = room.split_at_mut(self.norm_bytes());
        let (mut norms, width, random) = (norms.as_chunks_mut::<4>().0.iter_mut(), self.width(), context.own(0));
        let (mut energy, mut step, mut rule) = (Energy::default(), 0.0, self.scheme.rule(0.0, random));
        let rooms = packed.chunks_mut(packed_bytes(BLOCK, width));
        for ((i, block), room) in x.chunks(BLOCK).enumerate().zip(rooms) {
            for (from, to) in pieces(i * BLOCK, block.len(), self.bucket) {
                let at = i * BLOCK + from;
                if at.is_multiple_of(self.bucket) {
                    let (norm, fed) = self.open(x, at, context)?;
                    norms.next().into_iter().for_each(|bytes| *bytes = norm.to_le_bytes());
                    energy.fed += fed;
                    (step, rule) = (f64::from(self.scheme.step(norm)), self.scheme.rule(norm, random));
                }
                let (x, codes) = (&block[from..to], &mut self.codes[from..to]);
                energy.sent += step * step * context.kernel.run(Codes { rule, x, first: at as u32, codes });
            }
            context.kernel.run(Pack { codes: &self.codes[..block.len()], width, out: room });
        }
        Ok(energy)
    }
}

/// Ranges within a block of `len` values from value `start` on that lie in one bucket each.
fn pieces(start: usize, len: usize, bucket: usize) -> impl Iterator<Item = (usize, usize)> {
    let mut at = 0;
    std::iter::from_fn(move || {
        let from = at;
        at = len.min(from + bucket - (start + from) % bucket);
        (from < len).then_some((from, at))
    })
}

impl<S: Scheme> Codec for Bucketed<S> {
    fn encode(&mut self, x: &[f32], context: &Context, out: &mut Writer) -> Result<Energy, EncodeError> {
        let (start, bytes) = (out.len(), self.norm_bytes() + packed_bytes(x.len(), self.width()));
        let result = self.fill(x, context, out.room(bytes));
        if result.is_err() {
            out.truncate(start);
        }
        result
    }

    fn decode_add(
        &mut self,
        from: &mut Reader<'_>,
        context: &Context,
        (scale, out): (f32, &mut [f32]),
    ) -> Result<(), ReadError> {
        let width = self.width();
        let mut norms = from.f32s("norm", out.len().div_ceil(self.bucket))?;
        let packed = from.take("levels", packed_bytes(out.len(), width))?;
        check_padding("levels", packed, out.len() * width as usize)?;
        let (mut step, mut rule) = (0.0, self.scheme.rule(0.0, context.own(0)));
        let rooms = packed.chunks(packed_bytes(BLOCK, width));
        for ((i, block), packed) in out.chunks_mut(BLOCK).enumerate().zip(rooms) {
            let codes = &mut self.codes[..block.len()];
            let most = context.kernel.run(Unpack { packed, width, codes });
            check_level(most, self.scheme.levels())?;
            for (from, to) in pieces(i * BLOCK, block.len(), self.bucket) {
                if (i * BLOCK + from).is_multiple_of(self.bucket)
                    && let Some(norm) = norms.next()
                {
                    step = multiplier(scale, (norm, self.scheme.step(norm)), self.scheme.most())?;
                    rule = self.scheme.rule(norm, context.own(0));
                }
                context.kernel.run(Add { rule, codes: &codes[from..to], step, out: &mut block[from..to] });
            }
        }
        Ok(())
    }

    fn size(&self) -> Size {
        Size::Exact(self.norm_bytes() + packed_bytes(self.n, self.width()))
    }
}

/// scale * step, if the norm is one and `most` such steps are finite.
pub(super) fn multiplier(scale: f32, (norm, step): (f32, f32), most: f32) -> Result<f32, ReadError> {
    let number = |rule| ReadError::Number { what: "norm", value: f64::from(norm), rule };
    if norm < 0.0 {
        return Err(number("it must not be negative"));
    }
    let step = scale * step;
    if (step * most).is_finite() { Ok(step) } else { Err(number("what it stands for must be finite")) }
}

/// Refuses a code beyond the last.
pub(super) fn check_level(most: u8, levels: u64) -> Result<(), ReadError> {
    let value = u64::from(most);
    if value < levels { Ok(()) } else { Err(ReadError::Field { what: "levels", value, rule: "no such level" }) }
}

/// Refuses set bits behind the last of `bits`.
pub(super) fn check_padding(what: &'static str, bytes: &[u8], bits: usize) -> Result<(), ReadError> {
    let padding = bytes.last().map_or(0, |byte| if bits.is_multiple_of(8) { 0 } else { byte >> (bits % 8) });
    let error = ReadError::Field { what, value: u64::from(padding), rule: "padding must be 0" };
    if padding == 0 { Ok(()) } else { Err(error) }
}

/// Codes of values, and Σ relative².
pub(super) struct Codes<'a, R> {
    pub(super) rule: R,
    pub(super) x: &'a [f32],
    /// Number of the first value in the tensor.
    pub(super) first: u32,
    pub(super) codes: &'a mut [u8],
}

impl<R: Rule> Work for Codes<'_, R> {
    type Output = f64;

    #[inline(always)]
    fn run(self) -> f64 {
        let (rule, first) = (self.rule, self.first);
        for (j, (x, code)) in self.x.iter().zip(self.codes.iter_mut()).enumerate() {
            *code = rule.code(*x, first.wrapping_add(j as u32));
        }
        squares(rule, self.codes)
    }
}

/// In 32 sums of at most 128 squares each: whole relative values are added without rounding.
#[inline(always)]
fn squares<R: Rule>(rule: R, codes: &[u8]) -> f64 {
    let mut lanes = [0.0f32; 32];
    let (groups, rest) = codes.as_chunks::<32>();
    for group in groups {
        for (lane, code) in lanes.iter_mut().zip(group) {
            let value = rule.relative(*code);
            *lane += value * value;
        }
    }
    for (lane, code) in lanes.iter_mut().zip(rest) {
        let value = rule.relative(*code);
        *lane += value * value;
    }
    lanes.iter().map(|lane| f64::from(*lane)).sum()
}

/// `out += relative * step`.
pub(super) struct Add<'a, R> {
    pub(super) rule: R,
    pub(super) codes: &'a [u8],
    pub(super) step: f32,
    pub(super) out: &'a mut [f32],
}

impl<R: Rule> Work for Add<'_, R> {
    type Output = ();

    #[inline(always)]
    fn run(self) {
        for (to, code) in self.out.iter_mut().zip(self.codes) {
            *to += self.rule.relative(*code) * self.step;
        }
    }
}

/// Packs codes below 2^width, 8 at a time in one word.
pub(super) struct Pack<'a> {
    pub(super) codes: &'a [u8],
    pub(super) width: u32,
    pub(super) out: &'a mut [u8],
}

/// Calls a function with the width as a constant.
macro_rules! by_width {
    ($width:expr, $function:ident($($argument:expr),*)) => {
        match $width {
            1 => $function::<1>($($argument),*),
            2 => $function::<2>($($argument),*),
            3 => $function::<3>($($argument),*),
            4 => $function::<4>($($argument),*),
            5 => $function::<5>($($argument),*),
            6 => $function::<6>($($argument),*),
            7 => $function::<7>($($argument),*),
            _ => $function::<8>($($argument),*),
        }
    };
}

impl Work for Pack<'_> {
    type Output = ();

    #[inline(always)]
    fn run(self) {
        by_width!(self.width, pack(self.codes, self.out));
    }
}

#[inline(always)]
fn pack<const W: usize>(codes: &[u8], out: &mut [u8]) {
    let (groups, rest) = codes.as_chunks::<8>();
    let (rooms, last) = out.as_chunks_mut::<W>();
    for (group, room) in groups.iter().zip(rooms.iter_mut()) {
        let word = merge::<W>(u64::from_le_bytes(*group)).to_le_bytes();
        room.copy_from_slice(&word[..W]);
    }
    if !rest.is_empty() {
        let mut group = [0; 8];
        group[..rest.len()].copy_from_slice(rest);
        let word = merge::<W>(u64::from_le_bytes(group)).to_le_bytes();
        // The last group may fill a whole room, when its bits do.
        let room = rooms.get_mut(groups.len()).map_or(last, |room| &mut room[..]);
        room.copy_from_slice(&word[..room.len()]);
    }
}

/// The low W bits of 8 bytes, side by side: neighbours in three rounds.
#[inline(always)]
fn merge<const W: usize>(x: u64) -> u64 {
    let pairs = x & 0x00ff_00ff_00ff_00ff | (x & 0xff00_ff00_ff00_ff00) >> (8 - W);
    let fours = pairs & 0x0000_ffff_0000_ffff | (pairs & 0xffff_0000_ffff_0000) >> (16 - 2 * W);
    fours & 0xffff_ffff | fours >> 32 << (4 * W)
}

/// The inverse of [`Pack`]; answers the largest code.
pub(super) struct Unpack<'a> {
    pub(super) packed: &'a [u8],
    pub(super) width: u32,
    pub(super) codes: &'a mut [u8],
}

impl Work for Unpack<'_> {
    type Output = u8;

    #[inline(always)]
    fn run(self) -> u8 {
        by_width!(self.width, unpack(self.packed, self.codes));
        self.codes.iter().fold(0, |most, code| most.max(*code))
    }
}

#[inline(always)]
fn unpack<const W: usize>(packed: &[u8], codes: &mut [u8]) {
    let (groups, rest) = codes.as_chunks_mut::<8>();
    for (group, from) in groups.iter_mut().zip(packed.chunks_exact(W)) {
        let mut word = [0; 8];
        word[..W].copy_from_slice(from);
        *group = spread::<W>(u64::from_le_bytes(word)).to_le_bytes();
    }
    if !rest.is_empty() {
        let from = &packed[groups.len() * W..];
        let mut word = [0; 8];
        word[..from.len()].copy_from_slice(from);
        let group = spread::<W>(u64::from_le_bytes(word)).to_le_bytes();
        rest.copy_from_slice(&group[..rest.len()]);
    }
}

/// One shift per lane: a single instruction for all 8.
#[inline(always)]
fn spread<const W: usize>(x: u64) -> u64 {
    let mut group = [0; 8];
    for (lane, code) in group.iter_mut().enumerate() {
        *code = (x >> (lane * W)) as u8 & (u8::MAX >> (8 - W));
    }
    u64::from_le_bytes(group)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::wire;
    use proptest::prelude::*;

    proptest! {
        /// The same bytes as the plain loops of `wire`, on every kernel.
        #[test]
        fn packing_is_that_of_the_format(width in 1u32..=8, values in prop::collection::vec(any::<u8>(), 0..200)) {
            let codes: Vec<u8> = values.iter().map(|v| (u32::from(*v) & ((1 << width) - 1)) as u8).collect();
            let mut want = Writer::new();
            wire::pack(&codes, width, &mut want);
            for kernel in Kernel::available() {
                let mut out = vec![0; want.len()];
                kernel.run(Pack { codes: &codes, width, out: &mut out });
                prop_assert_eq!(&out[..], want.bytes());
                let mut back = vec![9; codes.len()];
                let most = kernel.run(Unpack { packed: &out, width, codes: &mut back });
                prop_assert_eq!(most, codes.iter().copied().max().unwrap_or(0));
                prop_assert_eq!(&back, &codes);
            }
        }

        #[test]
        fn pieces_cover_a_block(start in 0usize..50, len in 0usize..60, bucket in 1usize..20) {
            let mut next = 0;
            for (from, to) in pieces(start, len, bucket) {
                prop_assert!(from == next && to > from);
                prop_assert_eq!((start + from) / bucket, (start + to - 1) / bucket);
                prop_assert!(to == len || (start + to).is_multiple_of(bucket));
                next = to;
            }
            prop_assert_eq!(next, len);
        }
    }
}
