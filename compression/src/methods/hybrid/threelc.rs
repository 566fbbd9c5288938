//! 3LC (Lim, Andersen and Kaminsky 2019, "3LC: lightweight and effective traffic compression for distributed machine
//! learning", section 3): 3-value quantisation with sparsity multiplication, M = s max |x|, q = round(x / M) in {−1, 0, 1};
//! quartic encoding, five q in a byte; zero-run encoding of bytes that stand for five zeros.
//!
//! Quartic: the tensor, padded with zeros to 5p values, is five runs of p; byte i holds the i-th of each, 81a + 27b + 9c +
//! 3d + e with digits q + 1. Five zeros are 121, and 243 to 255 are free: 2 to 14 bytes of 121 in a row become one byte,
//! 241 more than their number.

use crate::codec::{Codec, Context, EncodeError, ReadError, Shape, Size, Target};
use crate::entry::Entry;
use crate::kernels::{FIVE_ZEROS, Table, WORTH};
use crate::wire::{Reader, Writer};
use crate::{Energy, Kernel};
use flexcomm_domain::spec::compressors;

pub(super) const ENTRY: Entry = Entry {
    info: &compressors::THREELC,
    code: 116,
    examples: &["s=1", "s=1.75", "s=1.9"],
    build: |values, shape| Box::new(ThreeLc::new(values.number(0), shape)),
};

/// Values per byte.
const DIGITS: usize = 5;

/// Codes from here on are runs of two and more [`FIVE_ZEROS`].
const FIRST_RUN: u8 = 243;

const LONGEST_RUN: usize = 14;

#[derive(Debug)]
struct ThreeLc {
    n: usize,
    s: f64,
    /// Quartic bytes.
    quartic: Vec<u8>,
    /// A set bit for each that is not [`FIVE_ZEROS`].
    busy: Vec<u64>,
    /// The same with runs shortened.
    coded: Vec<u8>,
    table: Box<Table>,
}

impl ThreeLc {
    fn new(s: f64, shape: Shape) -> Self {
        let n = shape.values();
        let bytes = n.div_ceil(DIGITS);
        let (quartic, busy, coded) = (vec![0; bytes], vec![0; bytes.div_ceil(64)], vec![0; bytes + ROOM]);
        Self { n, s, quartic, busy, coded, table: Box::new(Table::ZEROS) }
    }

    /// `out += value * q`.
    fn add(&mut self, kernel: Kernel, value: f32, out: &mut [f32]) {
        let Self { quartic, table, .. } = self;
        for (run, worth) in out.chunks_mut(quartic.len().max(1)).zip(WORTH) {
            table.fill(|byte| value * (f32::from(byte / worth % 3) - 1.0));
            kernel.add_meanings::<false>(&quartic[..run.len()], table, run);
        }
    }
}

impl Codec for ThreeLc {
    fn encode(&mut self, x: &[f32], context: &Context, out: &mut Writer) -> Result<Energy, EncodeError> {
        let stats = context.stats(x)?;
        out.reserve(self.size().most());
        let m = (self.s * f64::from(stats.max)).min(f64::from(f32::MAX)) as f32;
        // Zeros are below half of any M, also where that half is no f32.
        let half = (0.5 * m).max(f32::from_bits(1));
        let sent = context.kernel.quartic(x, half, (&mut self.quartic, &mut self.busy));
        out.f32(m);
        let len = shorten(&self.quartic, &self.busy, &mut self.coded);
        out.raw(&self.coded[..len]);
        Ok(Energy { sent: sent as f64 * f64::from(m).powi(2), compensated: stats.energy })
    }

    fn encode_taking(&mut self, x: &mut [f32], context: &Context, out: &mut Writer) -> Result<Energy, EncodeError> {
        let start = out.len();
        let energy = self.encode(x, context, out)?;
        let m = Reader::new(&out.bytes()[start..]).scale("M")?;
        self.add(context.kernel, -m, x);
        Ok(energy)
    }

    fn decode(&mut self, from: &mut Reader<'_>, context: &Context, target: Target<'_>) -> Result<(), ReadError> {
        let (scale, out) = target.added();
        let m = from.scale("M")?;
        self.quartic.resize(out.len().div_ceil(DIGITS), 0);
        read_runs(from, &mut self.quartic)?;
        check_padding(&self.quartic, out.len())?;
        self.add(context.kernel, scale * m, out);
        Ok(())
    }

    fn size(&self) -> Size {
        Size::AtMost(4 + self.n.div_ceil(DIGITS))
    }
}

/// Shortens runs of [`FIVE_ZEROS`]; answers how many bytes are left. `to` has [`ROOM`] more than there are bytes.
fn shorten(quartic: &[u8], busy: &[u64], to: &mut [u8]) -> usize {
    let (mut at, mut next) = (0, 0);
    for (word, first) in busy.iter().zip((0..).step_by(64)) {
        if *word == u64::MAX && next == first {
            to[at..at + 64].copy_from_slice(&quartic[first..first + 64]);
            (at, next) = (at + 64, first + 64);
            continue;
        }
        let mut bits = *word;
        while bits != 0 {
            let place = first + bits.trailing_zeros() as usize;
            bits &= bits - 1;
            at = write_zeros(place - next, to, at);
            to[at] = quartic[place];
            (at, next) = (at + 1, place + 1);
        }
    }
    write_zeros(quartic.len() - next, to, at)
}

/// Room behind what is written: whole words of 16 bytes are stored.
const ROOM: usize = 16;

/// Writes a run of so many [`FIVE_ZEROS`] at a place; answers the next. Without a branch up to 16 codes: which would be guessed
/// wrong too often.
#[inline]
fn write_zeros(zeros: usize, to: &mut [u8], mut at: usize) -> usize {
    let (mut longest, rest) = (zeros / LONGEST_RUN, zeros % LONGEST_RUN);
    while longest > ROOM {
        to[at..at + ROOM].fill(u8::MAX);
        (at, longest) = (at + ROOM, longest - ROOM);
    }
    to[at..at + ROOM].fill(u8::MAX);
    at += longest;
    to[at] = if rest == 1 { FIVE_ZEROS } else { FIRST_RUN.wrapping_add(rest as u8).wrapping_sub(2) };
    at + usize::from(rest > 0)
}

/// The inverse of [`shorten`].
fn read_runs(from: &mut Reader<'_>, quartic: &mut [u8]) -> Result<(), ReadError> {
    let code = |byte: u8| match byte < FIRST_RUN {
        true => (byte, 1),
        false => (FIVE_ZEROS, usize::from(byte - FIRST_RUN) + 2),
    };
    // Every code as if it were a long run: what is too much the next one overwrites.
    let (mut at, mut used, mut all) = (0, 0, *from);
    let bytes = all.take("quartic bytes", from.left())?;
    while let Some(to) = quartic.get_mut(at..at + ROOM)
        && let Some(byte) = bytes.get(used)
    {
        let (value, run) = code(*byte);
        to.fill(value);
        (at, used) = (at + run, used + 1);
    }
    from.take("quartic bytes", used)?;
    while at < quartic.len() {
        let (value, run) = code(from.u8("quartic byte")?);
        let Some(to) = quartic.get_mut(at..at + run) else {
            return Err(ReadError::field("run of zeros", run as u64, "it passes the tensor's end"));
        };
        to.fill(value);
        at += run;
    }
    Ok(())
}

/// Digits beyond the tensor's end must stand for 0.
fn check_padding(quartic: &[u8], n: usize) -> Result<(), ReadError> {
    let p = quartic.len();
    for place in n..DIGITS * p {
        let (byte, worth) = (quartic[place % p], WORTH[place / p]);
        if byte / worth % 3 != 1 {
            return Err(ReadError::field("padding", byte, "it must stand for 0"));
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn shortened(bytes: &[u8]) -> Vec<u8> {
        let mut busy = vec![0u64; bytes.len().div_ceil(64)];
        let places = bytes.iter().enumerate().filter(|(_, byte)| **byte != FIVE_ZEROS);
        places.for_each(|(i, _)| busy[i / 64] |= 1 << (i % 64));
        let mut to = vec![9; bytes.len() + ROOM];
        let len = shorten(bytes, &busy, &mut to);
        to.truncate(len);
        to
    }

    proptest! {
        #[test]
        fn runs_come_back(
            mut bytes in prop::collection::vec(prop_oneof![3 => Just(FIVE_ZEROS), 1 => 0u8..FIRST_RUN], 0..900),
            quiet in 0usize..900,
            busy in 0usize..900,
        ) {
            let len = bytes.len();
            bytes[quiet.min(len)..(quiet + 400).min(len)].fill(FIVE_ZEROS);
            bytes[busy.min(len)..(busy + 200).min(len)].fill(7);
            let out = shortened(&bytes);
            prop_assert!(out.len() <= len);
            let mut back = vec![0; len];
            let mut from = Reader::new(&out);
            read_runs(&mut from, &mut back).unwrap();
            prop_assert_eq!((back, from.left()), (bytes, 0));
        }
    }

    /// By hand: one run of each length that the code has, and what is left of a longer one.
    #[test]
    fn runs_have_the_published_codes() {
        let coded = |zeros: usize| shortened(&vec![FIVE_ZEROS; zeros]);
        assert_eq!((coded(1), coded(2), coded(14)), (vec![121], vec![243], vec![255]));
        assert_eq!((coded(15), coded(30)), (vec![255, 121], vec![255, 255, 243]));
        assert_eq!((coded(14 * 40 + 13), coded(0)), ([vec![255; 40], vec![254]].concat(), vec![]));
        assert_eq!(shortened(&[121, 5, 121, 121, 6]), [121, 5, 243, 6]);
    }

    /// A run beyond the tensor's end, and an end before it.
    #[test]
    fn runs_that_do_not_fit_are_refused() {
        for (bytes, len) in [(vec![255], 13), (vec![7; 20], 21), (vec![255, 255], 29), (vec![], 1)] {
            assert!(read_runs(&mut Reader::new(&bytes), &mut vec![0; len]).is_err(), "{bytes:?} for {len}");
        }
    }

    #[test]
    fn quartic_by_hand() {
        // Five runs of two: (1, 0), (−1, 0), (0, 0), (1, 1), (−1, padding).
        let x = [5.0, 0.0, -5.0, 1.0, 0.0, -1.0, 5.0, 5.0, -5.0];
        let (mut bytes, mut busy) = (vec![0; 2], [0]);
        let sent = Kernel::Portable.quartic(&x, 2.5, (&mut bytes, &mut busy));
        assert_eq!(bytes, [2 * 81 + 9 + 2 * 3, 81 + 27 + 9 + 2 * 3 + 1]);
        assert_eq!((sent, busy), (5, [3]));
    }
}
