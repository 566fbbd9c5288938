//! Codes of what is not 0 by Elias (QSGD, section 3.1, Code_s): per value that is not 0 its distance from the one before (the
//! first counts from −1), a sign bit and the magnitude of its level; at last the distance to n.

use super::levels::{BLOCK, Rule};
use crate::Kernel;
use crate::codec::{ReadError, Target};
use crate::kernels::{Packed, Places, SPAN, by_width};
use crate::wire::{BitReader, BitRoom, BitWriter, Code, Window, delta_bits, first_delta, first_gamma, gamma_bits};

/// Which of Elias' codes distances and magnitudes are in.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Elias {
    Gamma,
    Delta,
}

/// The largest magnitude of a level.
const MOST: usize = 128;

/// Distances whose codes are looked up.
const NEAR: usize = 1024;

/// Codes of short distances, and of levels from −128 on with their signs.
struct Tables {
    distances: [Short; NEAR],
    levels: [Short; 2 * MOST + 1],
}

/// A [`Code`] of at most 24 bits, in 4 bytes: the tables lie in the first-level cache beside what is coded.
#[derive(Clone, Copy)]
struct Short(u32);

impl Short {
    const fn new(code: Code) -> Self {
        assert!(code.width <= 24);
        Self((code.bits as u32) << 5 | code.width)
    }

    #[inline(always)]
    fn code(self) -> Code {
        Code { bits: u64::from(self.0 >> 5), width: self.0 & 31 }
    }
}

static GAMMA: Tables = Tables::new(Elias::Gamma);
static DELTA: Tables = Tables::new(Elias::Delta);

impl Tables {
    const fn new(elias: Elias) -> Self {
        let mut own = Self { distances: [Short(0); NEAR], levels: [Short(0); 2 * MOST + 1] };
        let mut value = 1;
        while value < NEAR {
            own.distances[value] = Short::new(elias.code(value as u64));
            value += 1;
        }
        let mut value = 1;
        while value <= MOST {
            let magnitude = elias.code(value as u64);
            own.levels[MOST + value] = Short::new(Code { bits: 0, width: 1 }.then(magnitude));
            own.levels[MOST - value] = Short::new(Code { bits: 1, width: 1 }.then(magnitude));
            value += 1;
        }
        own
    }
}

impl Elias {
    const fn code(self, value: u64) -> Code {
        match self {
            Self::Gamma => Code::gamma(value),
            Self::Delta => Code::delta(value),
        }
    }

    fn tables(self) -> &'static Tables {
        match self {
            Self::Gamma => &GAMMA,
            Self::Delta => &DELTA,
        }
    }

    /// Bits of a number's code.
    pub(super) fn width(self, value: u64) -> u32 {
        match self {
            Self::Gamma => gamma_bits(value),
            Self::Delta => delta_bits(value),
        }
    }

    fn put(self, bits: &mut BitWriter<'_>, value: u64) {
        match self {
            Self::Gamma => bits.gamma(value),
            Self::Delta => bits.delta(value),
        }
    }

    /// The number that these bits begin with, and how many of them it is: more than 64 where it may be a longer one.
    #[inline(always)]
    fn first(self, bits: u64) -> (u64, u32) {
        match self {
            Self::Gamma => first_gamma(bits),
            Self::Delta => first_delta(bits),
        }
    }

    fn get(self, bits: &mut BitReader<'_>, what: &'static str) -> Result<u64, ReadError> {
        match self {
            Self::Gamma => bits.gamma(what),
            Self::Delta => bits.delta(what),
        }
    }
}

/// Codes of a sample.
const SAMPLE: usize = 512;

/// Samples that are looked at before all codes are coded.
const SAMPLES: usize = 16;

/// Mean distance from which on delta codes are the shorter ones.
const FAR: u64 = 32;

/// The most bytes that the codes of one value take.
const MOST_BYTES: usize = (gamma_bits(u32::MAX as u64) + 1 + gamma_bits(MOST as u64)).div_ceil(8) as usize;

/// The most bytes beyond those asked for that coding needs room for: codes of a span, and a word.
pub(super) const ROOM: usize = SPAN * MOST_BYTES + 8;

/// Codes that become Elias'.
#[derive(Debug)]
pub(super) struct Encoder<'a> {
    pub(super) packed: Packed<'a>,
    pub(super) places: &'a mut Places,
    pub(super) kernel: Kernel,
}

impl Encoder<'_> {
    /// Which of Elias' codes takes fewer bits, and about how many, by what some samples hold.
    pub(super) fn estimate(&self) -> (Elias, u64) {
        let Self { packed, kernel, .. } = *self;
        let (mut seen, mut others) = (0, 0);
        for at in (0..packed.n).step_by((packed.n / SAMPLE / SAMPLES).max(1) * SAMPLE) {
            let sample = packed.part(at, SAMPLE);
            seen += sample.n as u64;
            others += sample.others(kernel) as u64;
        }
        let gap = (seen / others.max(1)).max(1);
        let elias = if gap < FAR { Elias::Gamma } else { Elias::Delta };
        // A distance, a sign and a level of 1.
        (elias, packed.n as u64 * others / seen.max(1) * u64::from(elias.width(gap) + 2))
    }

    /// Elias' codes; answers whether they take no more than `most` bytes, without which they are not whole.
    pub(super) fn code(self, elias: Elias, most: usize, mut bits: BitWriter<'_>) -> bool {
        let Self { packed, places, kernel } = self;
        let mut before = 0;
        for first in (0..packed.n).step_by(SPAN) {
            if bits.bytes() > most {
                return false;
            }
            let span = packed.part(first, SPAN);
            let found = kernel.places(span, places);
            bits.in_room(found.len() * MOST_BYTES, |room| {
                before = by_width!(span.width, code(elias, (span, first), (found, before), room));
            });
        }
        elias.put(&mut bits, packed.n as u64 + 1 - before);
        let bytes = bits.bytes();
        bits.finish();
        bytes <= most
    }
}

/// Codes of the values at some places of a span, whose first is number `first`; the last coded one was the `before`-th.
/// Answers which the last one is now.
fn code<const W: usize>(
    elias: Elias,
    (span, first): (Packed<'_>, usize),
    (places, mut before): (&[u16], u64),
    room: &mut BitRoom<'_>,
) -> u64 {
    let (Tables { distances, levels }, mask) = (elias.tables(), u8::MAX >> (8 - W));
    let levels = &levels[MOST - usize::from(span.zero)..];
    for place in places {
        let (number, bit) = ((first + usize::from(*place)) as u64 + 1, usize::from(*place) * W);
        let next = if 8 % W == 0 { 0 } else { span.bytes.get(bit / 8 + 1).copied().unwrap_or(0) };
        let level = (u16::from_le_bytes([span.bytes[bit / 8], next]) >> (bit % 8)) as u8 & mask;
        let level = levels[usize::from(level)].code();
        let code = match distances.get((number - before) as usize) {
            Some(distance) => distance.code().then(level),
            None => {
                let Code { bits, width } = elias.code(number - before);
                // A room takes 56 bits at once.
                room.put(bits & u64::from(u32::MAX), width.min(32));
                room.put(bits >> 32, width.saturating_sub(32));
                level
            }
        };
        room.put(code.bits, code.width);
        before = number;
    }
    before
}

/// What codes stand for, bucket by bucket.
pub(super) struct Decoder<R, S> {
    pub(super) rule: R,
    /// What is 0, and the largest code.
    pub(super) zero: u8,
    pub(super) most: u8,
    pub(super) bucket: usize,
    /// Of each bucket.
    pub(super) steps: S,
}

impl<R: Rule, S: Iterator<Item = f32>> Decoder<R, S> {
    /// `relative * step` of each, and zeros between.
    pub(super) fn add(mut self, elias: Elias, mut bits: BitReader<'_>, target: Target<'_>) -> Result<(), ReadError> {
        let Target { out, fresh, .. } = target;
        let (mut place, end) = (0, out.len() as u64 + 1);
        let (mut opened, mut step, mut cleared) = (0, 0.0, if fresh { 0 } else { out.len() });
        let [below, above] = [self.zero, self.most - self.zero].map(u64::from);
        let (mut window, mut ones) = (bits.window(), [0.0; 2]);
        loop {
            // As far as nothing else is to be done, which hangs on the place.
            let ready = if below.min(above) == 0 { 0 } else { out.len().min(opened).min(cleared) };
            place = match elias {
                Elias::Gamma => add_ones(first_gamma, &mut window, (place, ones), &mut out[..ready]),
                Elias::Delta => add_ones(first_delta, &mut window, (place, ones), &mut out[..ready]),
            };
            let filled = window.refill();
            let word = window.bits();
            let (mut gap, gap_bits) = elias.first(word);
            // Most levels are 1, the shortest code: to guess that waits for no other bits.
            let (mut level, level_bits) = match word.wrapping_shr(gap_bits + 1) {
                one if one & 1 == 1 => (1, 1),
                other => elias.first(other),
            };
            let width = gap_bits + 1 + level_bits;
            let negative = if filled && width <= Window::LEAST && place + gap < end {
                window.skip(width);
                word >> gap_bits & 1 == 1
            } else {
                bits.resume(&window);
                gap = elias.get(&mut bits, "distance")?;
                if place + gap >= end {
                    place += gap;
                    break;
                }
                let sign = bits.get("sign", 1)?;
                level = elias.get(&mut bits, "level")?;
                window = bits.window();
                sign == 1
            };
            place += gap;
            if level > if negative { below } else { above } {
                return Err(ReadError::field("level", level, "no such level"));
            }
            let at = place as usize - 1;
            while opened <= at {
                step = self.steps.next().unwrap_or(0.0);
                opened += self.bucket;
                ones =
                    [self.zero.wrapping_add(1), self.zero.wrapping_sub(1)].map(|code| self.rule.relative(code) * step);
            }
            // Block by block, which then are in the first-level cache.
            if cleared <= at {
                let from = std::mem::replace(&mut cleared, out.len().min(at / BLOCK * BLOCK + BLOCK));
                out[from..cleared].fill(0.0);
            }
            let code = if negative { self.zero - level as u8 } else { self.zero + level as u8 };
            out[at] += self.rule.relative(code) * step;
        }
        if place > end {
            return Err(ReadError::field("distance", place, "it leads beyond the end"));
        }
        out[cleared..].fill(0.0);
        bits.finish("codes")
    }
}

/// Values that are added together.
const BATCH: usize = 32;

/// Adds values of levels 1 and −1 as long as there are no others and they lie within `out`, from behind the `place`-th on;
/// answers which the last one is now.
#[inline(always)]
fn add_ones(
    first: impl Fn(u64) -> (u64, u32),
    from: &mut Window<'_>,
    (mut place, ones): (u64, [f32; 2]),
    out: &mut [f32],
) -> u64 {
    let mut window = *from;
    // Adding waits for memory where a tensor is larger than the caches: once all places of a batch are known it waits for many
    // at once.
    let mut batch = [(0, 0.0); BATCH];
    loop {
        let mut known = 0;
        while known < BATCH && window.refill() {
            let (gap, width) = first(window.bits());
            // A sign, and the code of 1.
            let behind = window.bits().wrapping_shr(width);
            // What is no code, as any bytes may be, has a width beyond all others and no distance.
            if width + 2 > Window::LEAST || behind & 2 == 0 || place + gap > out.len() as u64 {
                break;
            }
            batch[known] = ((place + gap) as usize - 1, ones[behind as usize & 1]);
            known += 1;
            window.skip(width + 2);
            place += gap;
        }
        for (at, value) in &batch[..known] {
            out[*at] += value;
        }
        if known < BATCH {
            break;
        }
    }
    *from = window;
    place
}

#[cfg(test)]
mod tests {
    use super::super::linear::Linear;
    use super::*;
    use crate::random::Stream;
    use crate::wire::{Reader, Writer, levels_width, pack};
    use proptest::prelude::*;

    proptest! {
        /// Whatever arrives: an error, or values within the tensor.
        #[test]
        fn any_bytes_are_survived(
            runs in prop::collection::vec((prop_oneof![any::<u8>(), Just(0), Just(0xff)], 1usize..20), 0..30),
            n in 1usize..3 * BLOCK,
            fresh: bool,
        ) {
            let drawn: Vec<u8> = runs.iter().flat_map(|(byte, len)| std::iter::repeat_n(*byte, *len)).collect();
            for elias in [Elias::Gamma, Elias::Delta] {
                let rule = Linear::new(1.0, [1, 1], Stream::new(1, [0; 4]));
                let decoder = Decoder { rule, zero: 1, most: 2, bucket: n, steps: std::iter::once(1.0) };
                let (mut out, mut reader) = (vec![0.0; n], Reader::new(&drawn));
                let bits = reader.bits("codes", drawn.len()).unwrap();
                _ = decoder.add(elias, bits, Target { scale: 1.0, out: &mut out, fresh });
                prop_assert!(out.iter().all(|value| [-1.0, 0.0, 1.0].contains(value)));
            }
        }

        /// Of any distances, also such as are not looked up, on every kernel.
        #[test]
        fn codes_are_those_of_one_after_the_other(
            most in 2u8..=254,
            rare in prop_oneof![0u32..40, Just(2000u32)],
            drawn in prop::collection::vec(any::<(u32, u8)>(), 0..2 * SPAN + 100),
        ) {
            let (zero, width) = (most / 2, levels_width(u64::from(most) + 1));
            let level = |(draw, code): &(u32, u8)| if draw % (rare + 1) == 0 { code % (most + 1) } else { zero };
            let codes: Vec<u8> = drawn.iter().map(level).collect();
            let (mut packed, n) = (Writer::new(), codes.len());
            pack(&codes, width, &mut packed);
            let packed = Packed { bytes: packed.bytes(), n, width, zero };
            let both = |kernel| [(Elias::Gamma, kernel), (Elias::Delta, kernel)];
            for (elias, kernel) in Kernel::available().flat_map(both) {
                let code = |most, bits: BitWriter<'_>| {
                    let mut places = Places::NONE;
                    Encoder { packed, places: &mut places, kernel }.code(elias, most, bits)
                };
                let (mut out, mut plain, mut before) = (Writer::new(), Writer::new(), 0);
                prop_assert!(code(usize::MAX, out.bits()));
                let mut bits = plain.bits();
                for (place, code) in (1..).zip(&codes).filter(|(_, code)| **code != zero) {
                    elias.put(&mut bits, place - before);
                    bits.put(u64::from(*code < zero), 1);
                    elias.put(&mut bits, u64::from(code.abs_diff(zero)));
                    before = place;
                }
                elias.put(&mut bits, n as u64 + 1 - before);
                bits.finish();
                prop_assert_eq!(out.bytes(), plain.bytes());
                let fits = |most| code(most, Writer::new().bits());
                prop_assert!(fits(out.len()) && !fits(out.len() - 1));
            }
        }
    }
}
