//! Codes of what is not 0 by Elias (QSGD, section 3.1, Code_s): per value that is not 0 its distance from the one before (the
//! first counts from −1), a sign bit and the magnitude of its level; at last the distance to n.

use super::levels::{BLOCK, Rule};
use crate::codec::{ReadError, Target};
use crate::kernels::by_width;
use crate::wire::{BitReader, BitWriter, Code, delta_bits, first_delta, first_gamma, gamma_bits};

/// Which of Elias' codes distances and magnitudes are in.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Elias {
    Gamma,
    Delta,
}

/// The largest magnitude of a level.
const MOST: usize = 128;

/// Codes of short distances, and of levels from −128 on with their signs.
struct Tables {
    distances: [Code; 256],
    levels: [Code; 2 * MOST + 1],
}

const NO_CODE: Code = Code { bits: 0, width: 0 };

static GAMMA: Tables = Tables::new(Elias::Gamma);
static DELTA: Tables = Tables::new(Elias::Delta);

impl Tables {
    const fn new(elias: Elias) -> Self {
        let mut own = Self { distances: [NO_CODE; 256], levels: [NO_CODE; 2 * MOST + 1] };
        let mut value = 1;
        while value < 256 {
            own.distances[value] = elias.code(value as u64);
            if value <= MOST {
                let magnitude = elias.code(value as u64);
                own.levels[MOST + value] = Code { bits: 0, width: 1 }.then(magnitude);
                own.levels[MOST - value] = Code { bits: 1, width: 1 }.then(magnitude);
            }
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

/// `levels(w)` of n values.
#[derive(Debug, Clone, Copy)]
pub(super) struct Packed<'a> {
    pub(super) bytes: &'a [u8],
    pub(super) n: usize,
    /// Bits of a code.
    pub(super) width: u32,
    /// What is 0.
    pub(super) zero: u8,
}

/// Codes between two looks at how many bytes there are.
const SPAN: usize = 512;

/// Spans that are looked at before all of them are coded.
const SAMPLES: usize = 16;

/// Mean distance from which on delta codes are the shorter ones.
const FAR: u64 = 32;

/// The most bytes that the codes of a span take.
pub(super) const SPAN_BYTES: usize = SPAN * (delta_bits(u32::MAX as u64) + 1 + gamma_bits(MOST as u64)) as usize / 8;

impl Packed<'_> {
    /// Which of Elias' codes takes fewer bits, and about how many, by what some spans hold.
    pub(super) fn estimate(self) -> (Elias, u64) {
        let (mut seen, mut others) = (0, 0u64);
        for at in (0..self.n).step_by((self.n / SPAN / SAMPLES).max(1) * SPAN) {
            seen += SPAN.min(self.n - at) as u64;
            others += by_width!(self.width, count(self, at));
        }
        let gap = (seen / others.max(1)).max(1);
        let elias = if gap < FAR { Elias::Gamma } else { Elias::Delta };
        // A distance, a sign and a level of 1.
        (elias, self.n as u64 * others / seen.max(1) * u64::from(elias.width(gap) + 2))
    }

    /// Elias' codes; answers whether they take no more than `most` bytes, without which they are not whole.
    pub(super) fn code(self, elias: Elias, most: usize, bits: BitWriter<'_>) -> bool {
        by_width!(self.width, code(self, elias, most, bits))
    }
}

fn code<const W: u32>(packed: Packed<'_>, elias: Elias, most: usize, mut bits: BitWriter<'_>) -> bool {
    let (Tables { distances, levels }, mask) = (elias.tables(), u64::MAX >> (64 - W));
    let (mut before, mut busy) = (0, [Group::default(); SPAN / 8]);
    for first in (0..packed.n).step_by(SPAN) {
        if bits.bytes() > most {
            return false;
        }
        // Groups without another code than that of 0 are left out first: as branches of the same loop they would be guessed
        // wrong too often.
        let mut count = 0;
        for group in groups::<W>(packed, first) {
            busy[count] = group;
            count += usize::from(group.others != 0);
        }
        for Group { at, codes, mut others } in busy[..count].iter().copied() {
            while others != 0 {
                let lane = others.trailing_zeros() / W;
                others &= !(mask << (lane * W));
                let place = u64::from(at + lane) + 1;
                let level = levels[(codes >> (lane * W) & mask) as usize + MOST - usize::from(packed.zero)];
                let code = match distances.get((place - before) as usize) {
                    Some(distance) => distance.then(level),
                    None => {
                        elias.put(&mut bits, place - before);
                        level
                    }
                };
                bits.put(code.bits, code.width);
                before = place;
            }
        }
    }
    elias.put(&mut bits, packed.n as u64 + 1 - before);
    let bytes = bits.bytes();
    bits.finish();
    bytes <= most
}

/// How many codes of a span from `first` on are not 0.
fn count<const W: u32>(packed: Packed<'_>, first: usize) -> u64 {
    let lowest = lanes::<W>(1);
    let any = |others: u64| (1..W).fold(others, |any, bit| any | others >> bit) & lowest;
    groups::<W>(packed, first).map(|group| u64::from(any(group.others).count_ones())).sum()
}

/// A word of codes.
#[derive(Debug, Clone, Copy, Default)]
struct Group {
    /// Place of the first.
    at: u32,
    codes: u64,
    /// Bits that differ from those of zeros.
    others: u64,
}

/// Codes of W bits in a word: as many as it holds, or as fill bytes.
const fn group_len(width: u32) -> u32 {
    if 64 % width == 0 { 64 / width } else { 8 }
}

/// The same code in all lanes of a word.
const fn lanes<const W: u32>(code: u64) -> u64 {
    let (mut word, mut lane) = (0, 0);
    while lane < group_len(W) {
        word |= code << (lane * W);
        lane += 1;
    }
    word
}

/// The codes of a span from `first` on.
#[inline(always)]
fn groups<const W: u32>(packed: Packed<'_>, first: usize) -> impl Iterator<Item = Group> {
    let (n, zeros) = (packed.n, lanes::<W>(u64::from(packed.zero)));
    (first..n.min(first + SPAN)).step_by(group_len(W) as usize).map(move |at| {
        let bytes = &packed.bytes[at / 8 * W as usize..];
        let word = bytes.first_chunk().copied().unwrap_or_else(|| {
            let mut last = [0; 8];
            last[..bytes.len()].copy_from_slice(bytes);
            last
        });
        let (codes, here) = (u64::from_le_bytes(word), group_len(W).min((n - at) as u32));
        Group { at: at as u32, codes, others: (codes ^ zeros) & (u64::MAX >> (64 - here * W)) }
    })
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
        loop {
            let (word, count) = bits.peek();
            let (mut gap, gap_bits) = elias.first(word);
            // Most levels are 1, the shortest code: to guess that waits for no other bits.
            let (mut level, level_bits) = match word.wrapping_shr(gap_bits + 1) {
                one if one & 1 == 1 => (1, 1),
                other => elias.first(other),
            };
            let width = gap_bits + 1 + level_bits;
            let negative = if width < count && place + gap < end {
                bits.skip(width);
                word >> gap_bits & 1 == 1
            } else {
                gap = elias.get(&mut bits, "distance")?;
                if place + gap >= end {
                    place += gap;
                    break;
                }
                let sign = bits.get("sign", 1)?;
                level = elias.get(&mut bits, "level")?;
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::wire::{Writer, levels_width, pack};
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn codes_are_those_of_one_after_the_other(
            most in 2u8..=254,
            rare in 0u32..40,
            drawn in prop::collection::vec(any::<(u32, u8)>(), 0..3000),
        ) {
            let (zero, width) = (most / 2, levels_width(u64::from(most) + 1));
            let level = |(draw, code): &(u32, u8)| if draw % (rare + 1) == 0 { code % (most + 1) } else { zero };
            let codes: Vec<u8> = drawn.iter().map(level).collect();
            let (mut packed, n) = (Writer::new(), codes.len());
            pack(&codes, width, &mut packed);
            let packed = Packed { bytes: packed.bytes(), n, width, zero };
            for elias in [Elias::Gamma, Elias::Delta] {
                let (mut out, mut plain, mut before) = (Writer::new(), Writer::new(), 0);
                prop_assert!(packed.code(elias, usize::MAX, out.bits()));
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
                let fits = |most| packed.code(elias, most, Writer::new().bits());
                prop_assert!(fits(out.len()) && !fits(out.len() - 1));
            }
        }
    }
}
