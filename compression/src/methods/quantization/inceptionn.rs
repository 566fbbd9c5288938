//! INCEPTIONN (Li et al. 2018): every value takes 32, 16, 8 or 0 bits by its exponent, with a tag of 2 bits. With the bound
//! 2^-b: |x| ≥ 1 is sent whole, |x| < 2^-b not at all; between, numbers from 2^-⌊b/2⌋ on as a sign and 15 bits of the fraction,
//! smaller ones as a sign and 7 bits, both cut off. (Algorithm 2: its bound for the exponent is 127 − b, and the 16 bits
//! begin ⌈b/2⌉ above it.)
//!
//! The 7 bits begin behind the ⌊b/2⌋ zeros that such a number's fraction begins with. Implementations that keep the zeros
//! have steps of 2^-7 there and break the bound; with b up to 14, ours keeps it: |x − C(x)| < 2^-b.
//!
//! Payload: tags as `levels(2)` (0: nothing, 1: 8 bits, 2: 16 bits, 3: 32 bits); then all bytes, all u16, all f32, each in order
//! of the values. The highest bit of each is the sign.

use super::levels::BLOCK;
use crate::Energy;
use crate::codec::{Codec, Context, EncodeError, ReadError, Size, Target};
use crate::entry::Entry;
use crate::kernels::{Pack, Unpack, Work};
use crate::wire::{Reader, Writer, packed_bytes};
use flexcomm_domain::spec::compressors;

pub(super) const ENTRY: Entry = Entry {
    info: &compressors::INCEPTIONN,
    code: 30,
    examples: &["", "bound=1", "bound=14"],
    build: |values, shape| {
        let (n, bound) = (shape.values(), values.whole(0) as u32);
        // Room that is not written to costs nothing; how much is used changes from step to step.
        Box::new(Inceptionn { n, bound, rest: Vec::with_capacity(BYTES[3] * n) })
    },
};

#[derive(Debug)]
struct Inceptionn {
    n: usize,
    bound: u32,
    /// What comes behind the tags: bytes, and in pairs and fours.
    rest: Vec<u8>,
}

/// Values that are left out together where none of them was sent.
const GROUP: usize = 256;

const BYTES: [usize; 4] = [0, 1, 2, 4];

/// Where each size of a payload begins.
#[derive(Debug, Clone, Copy)]
struct Starts {
    eights: usize,
    sixteens: usize,
    whole: usize,
    end: usize,
}

impl Starts {
    fn new(counts: [usize; 4]) -> Self {
        let (sixteens, whole) = (counts[1], counts[1] + 2 * counts[2]);
        Self { eights: 0, sixteens, whole, end: whole + 4 * counts[3] }
    }
}

impl Inceptionn {
    /// Bits of the fraction in front of the 7.
    fn skipped(&self) -> u32 {
        self.bound / 2
    }

    /// Scales that bring |x| to whole numbers, by tag.
    fn scales(&self) -> [f32; 4] {
        [0.0, 2f32.powi(7 + self.skipped() as i32), 2f32.powi(15), 1.0]
    }
}

impl Codec for Inceptionn {
    fn encode(&mut self, x: &[f32], context: &Context, out: &mut Writer) -> Result<Energy, EncodeError> {
        let compensated = context.stats(x)?.energy;
        out.reserve(self.size().most());
        let (mut tags, mut counts, bound, skipped) = ([0; BLOCK], [0; 4], self.bound, self.skipped());
        let room = out.room(packed_bytes(x.len(), 2));
        for (x, out) in x.chunks(BLOCK).zip(room.chunks_mut(BLOCK / 4)) {
            let tags = &mut tags[..x.len()];
            context.kernel.run(Tags { x, bound, skipped, tags, counts: &mut counts });
            context.kernel.run(Pack { codes: tags, width: 2, out });
        }
        let starts = Starts::new(counts);
        self.rest.clear();
        self.rest.resize(starts.end, 0);
        let (scales, mut at, mut sent) = (self.scales(), starts, 0.0);
        for x in x {
            let (tag, sign) = (tag(*x, bound, skipped), x.to_bits() >> 31);
            let whole = (x.abs() * scales[usize::from(tag)]) as u32;
            let value = match tag {
                0 => 0.0,
                1 => {
                    self.rest[at.eights] = (whole | sign << 7) as u8;
                    at.eights += 1;
                    whole as f32 / scales[1]
                }
                2 => {
                    self.rest[at.sixteens..at.sixteens + 2]
                        .copy_from_slice(&((whole | sign << 15) as u16).to_le_bytes());
                    at.sixteens += 2;
                    whole as f32 / scales[2]
                }
                _ => {
                    self.rest[at.whole..at.whole + 4].copy_from_slice(&x.to_le_bytes());
                    at.whole += 4;
                    *x
                }
            };
            sent += f64::from(value) * f64::from(value);
        }
        out.raw(&self.rest);
        Ok(Energy { sent, compensated })
    }

    fn decode(&mut self, from: &mut Reader<'_>, context: &Context, target: Target<'_>) -> Result<(), ReadError> {
        let (scale, out) = target.added();
        let packed = from.take("tags", packed_bytes(out.len(), 2))?;
        super::levels::check_padding("tags", packed, 2 * out.len())?;
        // Padding counts as tag 0, which takes no bytes.
        let starts = Starts::new(context.kernel.run(CountTags(packed)));
        let rest = from.take("values", starts.end)?;
        let (scales, mut at, mut tags) = (self.scales(), starts, [0; GROUP]);
        for (block, packed) in out.chunks_mut(GROUP).zip(packed.chunks(GROUP / 4)) {
            if packed.iter().all(|tags| *tags == 0) {
                continue;
            }
            let tags = &mut tags[..block.len()];
            context.kernel.run(Unpack { packed, width: 2, codes: tags });
            for (to, tag) in block.iter_mut().zip(tags) {
                let value = match tag {
                    0 => continue,
                    1 => {
                        at.eights += 1;
                        let byte = rest[at.eights - 1];
                        signed(f32::from(byte & 0x7f) / scales[1], byte & 0x80 != 0)
                    }
                    2 => {
                        at.sixteens += 2;
                        let pair = u16::from_le_bytes([rest[at.sixteens - 2], rest[at.sixteens - 1]]);
                        signed(f32::from(pair & 0x7fff) / scales[2], pair & 0x8000 != 0)
                    }
                    _ => {
                        at.whole += 4;
                        Reader::new(&rest[at.whole - 4..at.whole]).f32("value")?
                    }
                } * scale;
                if !value.is_finite() {
                    return Err(ReadError::number("value", value, "it must be in range"));
                }
                *to += value;
            }
        }
        Ok(())
    }

    fn size(&self) -> Size {
        Size::AtMost(packed_bytes(self.n, 2) + BYTES[3] * self.n)
    }
}

fn signed(value: f32, negative: bool) -> f32 {
    if negative { -value } else { value }
}

/// How many bits a value takes: 0, 8, 16 or 32, as 0 to 3.
#[inline(always)]
fn tag(x: f32, bound: u32, skipped: u32) -> u8 {
    let exponent = x.to_bits() << 1 >> 24;
    u8::from(exponent >= 127 - bound) + u8::from(exponent >= 127 - skipped) + u8::from(exponent >= 127)
}

/// Tags, counted too.
struct Tags<'a> {
    x: &'a [f32],
    bound: u32,
    skipped: u32,
    tags: &'a mut [u8],
    counts: &'a mut [usize; 4],
}

impl Work for Tags<'_> {
    #[inline(always)]
    fn run(self) {
        for (to, x) in self.tags.iter_mut().zip(self.x) {
            *to = tag(*x, self.bound, self.skipped);
        }
        for (tag, count) in self.counts.iter_mut().enumerate() {
            *count += self.tags.iter().filter(|t| usize::from(**t) == tag).count();
        }
    }
}

/// How often each tag occurs in packed tags.
struct CountTags<'a>(&'a [u8]);

impl Work<[usize; 4]> for CountTags<'_> {
    #[inline(always)]
    fn run(self) -> [usize; 4] {
        let (mut low, mut high, mut both) = (0, 0, 0);
        for byte in self.0 {
            let (l, h) = (byte & 0x55, byte >> 1 & 0x55);
            low += l.count_ones() as usize;
            high += h.count_ones() as usize;
            both += (l & h).count_ones() as usize;
        }
        [4 * self.0.len() + both - low - high, low - both, high - both, both]
    }
}
