//! Codes of w bits, one per value, with a norm per bucket: the shape that most quantizers share.
//!
//! Payload: a norm (f32) per bucket, then `levels(w)` of all codes, or Elias' codes ([`Coding`]). Work goes in blocks whose
//! codes stay in the first-level cache; each loop is compiled for every kernel.

use super::elias::{Decoder, Elias, Encoder, ROOM};
use super::scheme::Scheme;
use crate::Energy;
use crate::codec::{Codec, Context, EncodeError, ReadError, Size, Target, not_finite};
pub(super) use crate::kernels::Words;
pub(super) use crate::kernels::total;
use crate::kernels::{
    Kernel, Pack, Packed, PassStats, Places, Rounded, Rounding, Squares, Steps, TABLED, Table, Unpack, Work, stats,
    stats_of_parts,
};
use crate::random::Stream;
use crate::wire::{Reader, Writer, levels_width, packed_bytes};
use std::fmt::Debug;

/// Values per block.
pub(super) const BLOCK: usize = 4096;

/// How one value becomes a code, and what a code means. Mark all `#[inline(always)]`.
pub(super) trait Rule: Copy + Debug + Send + 'static {
    /// Whether levels are whole multiples of a step; others are parts of the norm.
    const IS_EVEN: bool;

    /// With this step ([`Scheme::step`]), and levels below and above 0.
    fn new(step: f32, levels: [u32; 2], random: Stream) -> Self;

    /// The codes of values, by [`each`]; the first is number `first` of the tensor.
    fn codes(self, x: &[f32], first: u32, to: (&mut [u8], &mut Words));

    /// What it stands for, in steps.
    fn relative(self, code: u8) -> f32;

    /// The same for kernels that round at once, where they can.
    fn rounding(self) -> Option<Rounding>;
}

/// How codes are written.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Coding {
    /// `levels(w)`: of one size, whatever the values are.
    Packed,
    /// Elias' where they take at most a [`SHARE`]th of the packed ones' bytes: the sign bit of the first norm tells it, and
    /// which of them and their length come behind the norms.
    Least,
    /// Elias' alone.
    Elias(Elias),
}

/// Elias' codes take time for each value that is not 0, to write and on every rank to read, and packed ones hardly any:
/// sparser than that, both take the same.
const SHARE: usize = 10;

/// Of fewer values with one norm, or more bits per code, hardly any gradient has so many zeros, and a size that all ranks know
/// beforehand spares them the collective of the sizes.
const FEWEST: usize = 4096;
const MOST_BITS: u32 = 4;

impl Coding {
    fn least<R: Rule>(scheme: &Scheme<R>, in_bucket: usize) -> Self {
        let few_levels = scheme.zero().is_some() && levels_width(scheme.levels()) <= MOST_BITS;
        if few_levels && in_bucket >= FEWEST { Self::Least } else { Self::Packed }
    }
}

/// In front of Elias' codes where the coding is [`Coding::Least`]: which of them. Then their length, u32.
const GAMMA: u8 = 1;
const DELTA: u8 = 2;

/// A [`Scheme`] as a codec.
#[derive(Debug)]
pub(super) struct Bucketed<R> {
    scheme: Scheme<R>,
    n: usize,
    /// Values per norm.
    bucket: usize,
    codes: Box<[u8; BLOCK]>,
    words: Box<Words>,
    /// A block's, before they are appended: room in the message would have to be zeroed first.
    packed: Box<[u8; BLOCK]>,
    buckets: Box<Buckets>,
    coding: Coding,
    /// Room for Elias' codes, and for the places of what is not 0.
    bits: Writer,
    places: Box<Places>,
}

/// The most buckets of a block that are looked at before they are rounded.
const MOST: usize = BLOCK / 64;

/// What was seen of them. A buffer that is kept, since clearing it takes as long as some values.
#[derive(Debug)]
struct Buckets {
    seen: [PassStats; MOST],
    norms: [f32; MOST],
    steps: [Steps; MOST],
    squares: [u64; MOST],
}

impl Buckets {
    const NONE: Self =
        Self { seen: [PassStats::NOTHING; MOST], norms: [0.0; MOST], steps: [Steps::NONE; MOST], squares: [0; MOST] };
}

impl<R: Rule> Bucketed<R> {
    /// In the coding that takes the fewest bytes. With a bucket of 0 values, the tensor is one bucket.
    pub(super) fn new(scheme: Scheme<R>, n: usize, bucket: usize) -> Self {
        let in_bucket = if bucket == 0 { n } else { bucket.min(n) };
        Self::in_coding(scheme, (n, bucket), Coding::least(&scheme, in_bucket))
    }

    pub(super) fn in_coding(scheme: Scheme<R>, (n, bucket): (usize, usize), coding: Coding) -> Self {
        let bucket = if bucket == 0 { n.max(1) } else { bucket };
        Self {
            coding,
            bits: Writer::new(),
            places: Box::new(Places::NONE),
            scheme,
            n,
            bucket,
            codes: Box::new([0; BLOCK]),
            words: Box::new(Words::NONE),
            packed: Box::new([0; BLOCK]),
            buckets: Box::new(Buckets::NONE),
        }
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
            true if self.scheme.is_of_max() => context.approximate_stats(x)?,
            true => context.stats(x)?,
            false => stats(context.kernel, values),
        };
        match stats.is_finite() {
            true => Ok((self.scheme.norm(values, stats, context.kernel), stats.energy)),
            false => Err(not_finite(x)),
        }
    }

    fn fill(&mut self, x: &[f32], context: &Context, out: &mut Writer) -> Result<Energy, EncodeError> {
        let (width, random, mut norm_at) = (self.width(), context.own(0), out.len());
        out.reserve(self.norm_bytes() + packed_bytes(x.len(), width));
        out.room(self.norm_bytes());
        let (mut energy, mut step, mut rule) = (Energy::default(), 0.0, self.scheme.rule(0.0, random));
        // Vectors pack what they round, where all pieces begin with a byte and a word of random numbers.
        let at_once = self.bucket.is_multiple_of(64) || self.bucket >= self.n;
        // Of small buckets a block has whole ones.
        let len = if at_once && self.bucket <= BLOCK { BLOCK / self.bucket * self.bucket } else { BLOCK };
        for (i, block) in x.chunks(len).enumerate() {
            let (start, packed_len) = (i * len, packed_bytes(block.len(), width));
            if at_once && self.whole_buckets((block, start), (context.kernel, random), (out, &mut norm_at), &mut energy)
            {
                out.raw(&self.packed[..packed_len]);
                continue;
            }
            for (from, to) in pieces(start, block.len(), self.bucket) {
                let at = start + from;
                if at.is_multiple_of(self.bucket) {
                    let (norm, compensated) = self.open(x, at, context)?;
                    out.set_f32(norm_at, norm);
                    norm_at += 4;
                    energy.compensated += compensated;
                    (step, rule) = (f64::from(self.scheme.step(norm)), self.scheme.rule(norm, random));
                }
                let (x, codes) = (&block[from..to], &mut self.codes[from..to]);
                let codes = Codes { rule, random, x, first: at as u32, codes, words: &mut self.words };
                let squares = match at_once {
                    true => codes.packed_on(context.kernel, (width, &mut self.packed[from / 8 * width as usize..])),
                    false => codes.on(context.kernel),
                };
                energy.sent += step * step * squares;
            }
            let packed = &mut self.packed[..packed_len];
            if !at_once {
                Pack { codes: &self.codes[..block.len()], width, out: packed }.on(context.kernel);
            }
            out.raw(packed);
        }
        Ok(energy)
    }

    /// Norms and codes of a block of small whole buckets, first all the one and then all the other: a bucket after the other
    /// would wait for its norm. Answers whether that could be done; if not, nothing was.
    fn whole_buckets(
        &mut self,
        (block, first): (&[f32], usize),
        (kernel, random): (Kernel, Stream),
        (out, norm_at): (&mut Writer, &mut usize),
        energy: &mut Energy,
    ) -> bool {
        let (width, len, count) = (self.width(), self.bucket, block.len() / self.bucket);
        if !(2..=MOST).contains(&count) || !block.len().is_multiple_of(len) || !first.is_multiple_of(len) {
            return false;
        }
        let Buckets { seen, norms, steps, squares } = &mut *self.buckets;
        if !stats_of_parts(kernel, block, len, &mut seen[..count]) {
            return false;
        }
        let buckets = block.chunks_exact(len).zip(&*seen).zip(norms.iter_mut().zip(&mut *steps));
        for ((values, part), (norm, steps)) in buckets {
            let stats = part.stats();
            *norm = self.scheme.norm(values, stats, kernel);
            match self.scheme.rule(*norm, random).rounding() {
                Some(Rounding::Steps(these)) if stats.is_finite() => *steps = these,
                _ => return false,
            }
        }
        let packed = &mut self.packed[..packed_bytes(block.len(), width)];
        let values = Rounded { random, x: block, first: first as u32, width, codes: packed, words: &mut self.words };
        if kernel.round_parts((&steps[..count], len), values, &mut squares[..count]) == 0 {
            return false;
        }
        for ((part, norm), squares) in seen.iter().zip(&*norms).zip(&*squares).take(count) {
            out.set_f32(*norm_at, *norm);
            *norm_at += 4;
            let step = f64::from(self.scheme.step(*norm));
            energy.compensated += part.energy;
            energy.sent += step * step * *squares as f64;
        }
        true
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

impl<R: Rule> Codec for Bucketed<R> {
    fn encode(&mut self, x: &[f32], context: &Context, out: &mut Writer) -> Result<Energy, EncodeError> {
        let start = out.len();
        let energy = self.fill(x, context, out).inspect_err(|_| out.truncate(start))?;
        match self.coding {
            Coding::Packed => {}
            Coding::Least => self.shorten((start, x.len()), context.kernel, out),
            Coding::Elias(elias) => self.replace(elias, (start, x.len()), context.kernel, out),
        }
        Ok(energy)
    }

    fn pack_codes(&mut self) {
        if self.coding == Coding::Least {
            self.coding = Coding::Packed;
        }
    }

    fn decode(&mut self, from: &mut Reader<'_>, context: &Context, target: Target<'_>) -> Result<(), ReadError> {
        let Target { scale, out, fresh } = target;
        match fresh {
            true => self.read::<true>(from, context, (scale, out)),
            false => self.read::<false>(from, context, (scale, out)),
        }
    }

    fn size(&self) -> Size {
        let norms = self.norm_bytes();
        let packed = norms + packed_bytes(self.n, self.width());
        match self.coding {
            Coding::Packed => Size::Exact(packed),
            Coding::Least => Size::AtMost(packed),
            Coding::Elias(elias) => Size::AtMost(norms + 4 + self.most_bits(elias).div_ceil(8) as usize),
        }
    }
}

impl<R: Rule> Bucketed<R> {
    /// Bits where no value is 0 and all levels take the longest code; distances of 1 take one bit.
    fn most_bits(&self, elias: Elias) -> u64 {
        let longest = (1..=self.scheme.levels() / 2).map(|level| elias.width(level)).max().unwrap_or(1);
        self.n as u64 * u64::from(2 + longest) + u64::from(elias.width(self.n as u64 + 1))
    }

    /// Elias' codes in place of packed ones where they are so much shorter. `start` is the payload's.
    fn shorten(&mut self, (start, n): (usize, usize), kernel: Kernel, out: &mut Writer) {
        let at = start + self.norm_bytes();
        let Some(packed) = self.packed(&out.bytes()[at..], n) else { return };
        // A byte and a length come with them.
        let most = (packed.bytes.len() / SHARE).saturating_sub(1 + 4);
        // Their length hangs on what is drawn: no step may be the first to find too little room.
        self.bits.reserve(most + ROOM);
        let encoder = Encoder { packed, places: &mut self.places, kernel };
        let (elias, bits) = encoder.estimate();
        if bits.div_ceil(8) > most as u64 || !encoder.code(elias, most, self.bits.bits()) {
            return;
        }
        let first = f32::from_le_bytes(*out.bytes()[start..].first_chunk().unwrap_or(&[0; 4]));
        out.set_f32(start, -first);
        out.truncate(at);
        out.u8(if elias == Elias::Gamma { GAMMA } else { DELTA });
        self.append_bits(out);
    }

    /// Elias' codes in place of packed ones.
    fn replace(&mut self, elias: Elias, (start, n): (usize, usize), kernel: Kernel, out: &mut Writer) {
        let at = start + self.norm_bytes();
        let Some(packed) = self.packed(&out.bytes()[at..], n) else { return };
        self.bits.reserve(self.size().most() + ROOM);
        Encoder { packed, places: &mut self.places, kernel }.code(elias, usize::MAX, self.bits.bits());
        out.truncate(at);
        self.append_bits(out);
    }

    fn packed<'a>(&mut self, bytes: &'a [u8], n: usize) -> Option<Packed<'a>> {
        self.bits.clear();
        Some(Packed { bytes, n, width: self.width(), zero: self.scheme.zero()? })
    }

    fn append_bits(&self, out: &mut Writer) {
        out.u32(self.bits.len() as u32);
        out.raw(self.bits.bytes());
    }

    /// Elias' codes behind norms, from their length on.
    fn read_elias(
        &self,
        elias: Elias,
        from: &mut Reader<'_>,
        (steps, rule): (impl Iterator<Item = f32>, R),
        target: Target<'_>,
    ) -> Result<(), ReadError> {
        let (most, zero) = (self.scheme.levels() - 1, self.scheme.zero().unwrap_or(0));
        let length = from.u32("bytes of codes")? as usize;
        let bits = from.bits("codes", length)?;
        Decoder { rule, zero, most: most as u8, bucket: self.bucket, steps }.add(elias, bits, target)
    }

    /// Which of Elias' codes follow norms of which the first is `first`; none where codes are packed.
    fn elias_behind(&self, first: Option<f32>, from: &mut Reader<'_>) -> Result<Option<Elias>, ReadError> {
        match (self.coding, self.scheme.zero(), first) {
            (Coding::Elias(elias), ..) => Ok(Some(elias)),
            (_, Some(_), Some(first)) if first.is_sign_negative() => match from.u8("coding")? {
                GAMMA => Ok(Some(Elias::Gamma)),
                DELTA => Ok(Some(Elias::Delta)),
                other => Err(ReadError::field("coding", other, "no such coding")),
            },
            _ => Ok(None),
        }
    }

    /// FRESH: to zeros instead of what `out` holds.
    fn read<const FRESH: bool>(
        &mut self,
        from: &mut Reader<'_>,
        context: &Context,
        (scale, out): (f32, &mut [f32]),
    ) -> Result<(), ReadError> {
        let (width, random) = (self.width(), context.own(0));
        let mut norms = from.f32s("norm", out.len().div_ceil(self.bucket))?;
        if let Some(elias) = self.elias_behind(norms.clone().next(), from)? {
            let marked = self.coding != Coding::Elias(elias);
            let norms = norms.enumerate().map(|(i, norm)| if i == 0 && marked { norm.abs() } else { norm });
            let most = self.scheme.most();
            for norm in norms.clone() {
                multiplier(scale, (norm, self.scheme.step(norm)), most)?;
            }
            let (steps, rule) = (norms.map(|norm| scale * self.scheme.step(norm)), self.scheme.rule(0.0, random));
            return self.read_elias(elias, from, (steps, rule), Target { scale, out, fresh: FRESH });
        }
        let packed = from.take("levels", packed_bytes(out.len(), width))?;
        check_padding("levels", packed, out.len() * width as usize)?;
        let (mut step, mut rule, mut table) = (0.0, self.scheme.rule(0.0, random), None);
        // A table for each bucket takes as long as some tens of values.
        let is_tabled = self.scheme.levels() <= TABLED as u64 && self.bucket >= 2 * TABLED;
        let rooms = packed.chunks(packed_bytes(BLOCK, width));
        for ((i, block), packed) in out.chunks_mut(BLOCK).enumerate().zip(rooms) {
            let codes = &mut self.codes[..block.len()];
            let most = Unpack { packed, width, codes }.on(context.kernel);
            check_level(most, self.scheme.levels())?;
            for (from, to) in pieces(i * BLOCK, block.len(), self.bucket) {
                if (i * BLOCK + from).is_multiple_of(self.bucket)
                    && let Some(norm) = norms.next()
                {
                    step = multiplier(scale, (norm, self.scheme.step(norm)), self.scheme.most())?;
                    rule = self.scheme.rule(norm, random);
                    let value = |code| rule.relative(code as u8) * step;
                    table = is_tabled.then(|| std::array::from_fn(value));
                }
                let (codes, out) = (&codes[from..to], &mut block[from..to]);
                let done = table.map_or(0, |table| context.kernel.add_codes::<FRESH>(codes, &table, out));
                context.kernel.run(Add::<FRESH, _> { rule, codes: &codes[done..], step, out: &mut out[done..] });
            }
        }
        Ok(())
    }
}

/// Decodes bytes that a table says the meaning of, scale included.
pub(super) fn add_meanings(codes: &[u8], table: &Table, kernel: Kernel, target: Target<'_>) {
    match target.fresh {
        true => kernel.add_meanings::<true>(codes, table, target.out),
        false => kernel.add_meanings::<false>(codes, table, target.out),
    }
}

/// scale * step, if the norm is one and `most` such steps are finite.
pub(super) fn multiplier(scale: f32, (norm, step): (f32, f32), most: f32) -> Result<f32, ReadError> {
    let number = |rule| ReadError::number("norm", norm, rule);
    if norm < 0.0 {
        return Err(number("it must not be negative"));
    }
    let step = scale * step;
    if (step * most).is_finite() { Ok(step) } else { Err(number("what it stands for must be finite")) }
}

/// Refuses a code beyond the last.
pub(super) fn check_level(most: u8, levels: u64) -> Result<(), ReadError> {
    if u64::from(most) < levels { Ok(()) } else { Err(ReadError::field("levels", most, "no such level")) }
}

/// Refuses set bits behind the last of `bits`.
pub(super) fn check_padding(what: &'static str, bytes: &[u8], bits: usize) -> Result<(), ReadError> {
    let padding = bytes.last().map_or(0, |byte| if bits.is_multiple_of(8) { 0 } else { byte >> (bits % 8) });
    if padding == 0 { Ok(()) } else { Err(ReadError::field(what, padding, "padding must be 0")) }
}

/// Codes of values, and Σ relative².
pub(super) struct Codes<'a, R> {
    pub(super) rule: R,
    /// The rule's.
    pub(super) random: Stream,
    pub(super) x: &'a [f32],
    /// Number of the first value in the tensor.
    pub(super) first: u32,
    pub(super) codes: &'a mut [u8],
    pub(super) words: &'a mut Words,
}

impl<R: Rule> Codes<'_, R> {
    /// At once as far as the kernel can, and the rest one after the other; answers Σ relative².
    pub(super) fn on(mut self, kernel: Kernel) -> f64 {
        // Kernels begin where four numbers begin to share a word.
        let (before, end) = ((self.first.wrapping_neg() % 64) as usize, self.x.len());
        let before = before.min(end);
        let start = self.part(0, before).rest(kernel, Some(0), [0.0; 64]);
        if before == end {
            return start;
        }
        let Codes { rule, random, x, first, codes, words } = self.part(before, end);
        let (mut squares, values) = ([0.0; 64], Rounded { random, x, first, width: 8, codes, words });
        let (done, whole) = at_once(kernel, rule, values, &mut squares);
        start + self.part(before + done, end).rest(kernel, whole, squares)
    }

    /// As [`Self::on`], and packs them: where that ends in whole bytes at every 64th number, and starts with one of these.
    fn packed_on(mut self, kernel: Kernel, (width, out): (u32, &mut [u8])) -> f64 {
        let end = self.x.len();
        let Codes { rule, random, x, first, words, .. } = self.part(0, end);
        let (mut squares, values) = ([0.0; 64], Rounded { random, x, first, width, codes: &mut *out, words });
        let (done, whole) = at_once(kernel, rule, values, &mut squares);
        let sum = match done {
            0 => self.part(0, end).on(kernel),
            _ => self.part(done, end).rest(kernel, whole, squares),
        };
        if done < end {
            Pack { codes: &self.codes[done..], width, out: &mut out[done / 8 * width as usize..] }.on(kernel);
        }
        sum
    }

    fn part(&mut self, from: usize, to: usize) -> Codes<'_, R> {
        let Self { rule, random, x, first, codes, words } = self;
        let first = first.wrapping_add(from as u32);
        Codes { rule: *rule, random: *random, x: &x[from..to], first, codes: &mut codes[from..to], words }
    }

    /// One after the other, if there are any; answers Σ relative² of these and of what was done at once.
    fn rest(self, kernel: Kernel, whole: Option<u64>, mut squares: Squares) -> f64 {
        let Self { rule, x, first, codes, words, .. } = self;
        let sums = !x.is_empty() || whole.is_none();
        if !x.is_empty() {
            kernel.run(Rest { rule, x, first, codes, words, squares: &mut squares });
        }
        whole.unwrap_or(0) as f64 + if sums { total(&squares) } else { 0.0 }
    }
}

fn at_once(kernel: Kernel, rule: impl Rule, values: Rounded<'_>, squares: &mut Squares) -> (usize, Option<u64>) {
    rule.rounding().map_or((0, None), |rounding| kernel.round(rounding, values, squares))
}

/// What is left of [`Codes`].
struct Rest<'a, R> {
    rule: R,
    x: &'a [f32],
    first: u32,
    codes: &'a mut [u8],
    words: &'a mut Words,
    squares: &'a mut Squares,
}

impl<R: Rule> Work for Rest<'_, R> {
    #[inline(always)]
    fn run(self) {
        let Self { rule, x, first, codes, words, squares } = self;
        rule.codes(x, first, (&mut *codes, words));
        add_squares(codes, squares, |code| rule.relative(code));
    }
}

/// Adds the square of what each code means, the i-th to sum i modulo 64.
#[inline(always)]
pub(super) fn add_squares(codes: &[u8], squares: &mut Squares, value: impl Fn(u8) -> f32) {
    // A copy of their own, so that the loop keeps them in registers.
    let mut sums = *squares;
    for group in codes.chunks(sums.len()) {
        for (sum, code) in sums.iter_mut().zip(group) {
            let value = value(*code);
            *sum += value * value;
        }
    }
    *squares = sums;
}

/// The codes of values by a function of one and its random number; the first is number `first` of the tensor.
///
/// Numbers are drawn before values are looked at: processors overlap the turns of two short loops better than those of
/// one whose chain of instructions is as long as both.
#[inline(always)]
pub(super) fn each(
    mut x: &[f32],
    mut first: u32,
    ((mut codes, words), random): ((&mut [u8], &mut Words), Stream),
    code: impl Fn(f32, u32) -> u8,
) {
    while !x.is_empty() {
        let count = Words::room(first).min(x.len());
        let drawn = words.draw(first, count, |group, to| random.fourths(group, to));
        let (now, later) = x.split_at(count);
        let (to, rest) = codes.split_at_mut(count);
        for ((x, word), to) in now.iter().zip(drawn).zip(to) {
            *to = code(*x, *word);
        }
        (x, codes, first) = (later, rest, first.wrapping_add(count as u32));
    }
}

/// `out += relative * step`; where it is FRESH, to zeros.
struct Add<'a, const FRESH: bool, R> {
    rule: R,
    codes: &'a [u8],
    step: f32,
    out: &'a mut [f32],
}

impl<const FRESH: bool, R: Rule> Work for Add<'_, FRESH, R> {
    #[inline(always)]
    fn run(self) {
        for (to, code) in self.out.iter_mut().zip(self.codes) {
            let held = if FRESH { 0.0 } else { *to };
            *to = held + self.rule.relative(*code) * self.step;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
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
