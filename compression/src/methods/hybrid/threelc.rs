//! 3LC (Lim, Andersen and Kaminsky 2019, "3LC: lightweight and effective traffic compression for distributed machine
//! learning", section 3): 3-value quantisation with sparsity multiplication, M = s max |x|, q = round(x / M) in {−1, 0, 1};
//! quartic encoding, five q in a byte; zero-run encoding of bytes that stand for five zeros.
//!
//! Quartic: the tensor, padded with zeros to 5p values, is five runs of p; byte i holds the i-th of each, 81a + 27b + 9c +
//! 3d + e with digits q + 1. Five zeros are 121, and 243 to 255 are free: 2 to 14 bytes of 121 in a row become one byte,
//! 241 more than their number.

use crate::Energy;
use crate::codec::{Codec, Context, EncodeError, ReadError, Scope, Shape, Size, Travels};
use crate::kernels::{Work, key};
use crate::strategy::{Class, Entry, Kind, Nature, Param};
use crate::wire::{Reader, Writer};
use std::ops::Bound;

pub(super) const ENTRY: Entry = Entry {
    name: "threelc",
    code: 116,
    class: Class::Hybrid,
    about: "three values, five to a byte, runs of zeros shortened",
    source: "Lim et al. 2019, \"3LC\", section 3; GRACE 3.3",
    params: &[Param::optional(
        "s",
        Kind::Number(Bound::Included(1.0), Bound::Excluded(2.0)),
        1.0,
        "sparsity multiplier: the larger, the more zeros",
    )],
    travels: |_| Travels::Gathers,
    scope: Scope::Tensor,
    // |x| >= M/2 comes no farther from 0 by taking M away, and the largest value, M/s, is left with s − 1 of itself.
    nature: |_| Nature::Contractive(|values, n| 0.999 * (1.0 - (values.number(0) - 1.0).powi(2)) / n.max(1) as f64),
    examples: &["s=1", "s=1.75", "s=1.9"],
    build: |values, shape| Box::new(ThreeLc::new(values.number(0), shape)),
};

/// Values per byte.
const DIGITS: usize = 5;

/// The worth of each run's digit.
const WORTH: [u8; DIGITS] = [81, 27, 9, 3, 1];

/// Five zeros.
const ZEROS: u8 = 121;

/// Codes from here on are runs of two and more [`ZEROS`].
const FIRST_RUN: u8 = 243;

const LONGEST_RUN: usize = 14;

#[derive(Debug)]
struct ThreeLc {
    n: usize,
    s: f64,
    /// Quartic bytes.
    quartic: Vec<u8>,
}

impl ThreeLc {
    fn new(s: f64, shape: Shape) -> Self {
        let n = shape.values();
        Self { n, s, quartic: vec![0; n.div_ceil(DIGITS)] }
    }
}

impl Codec for ThreeLc {
    fn encode(&mut self, x: &[f32], context: &Context, out: &mut Writer) -> Result<Energy, EncodeError> {
        let stats = context.stats(x)?;
        out.reserve(self.size().most());
        let m = (self.s * f64::from(stats.max)).min(f64::from(f32::MAX)) as f32;
        // Zeros are below half of any M, also where that half is no f32.
        let half = (0.5 * m).max(f32::from_bits(1));
        let sent = context.kernel.run(Quartic { x, half: key(half), to: &mut self.quartic });
        out.f32(m);
        write_runs(&self.quartic, out);
        Ok(Energy { sent: sent as f64 * f64::from(m).powi(2), fed: stats.energy })
    }

    fn encode_taking(&mut self, x: &mut [f32], context: &Context, out: &mut Writer) -> Result<Energy, EncodeError> {
        let start = out.len();
        let energy = self.encode(x, context, out)?;
        let m = Reader::new(&out.bytes()[start..]).scale("M")?;
        context.kernel.run(Add { quartic: &self.quartic, value: -m, out: x });
        Ok(energy)
    }

    fn decode_add(
        &mut self,
        from: &mut Reader<'_>,
        context: &Context,
        (scale, out): (f32, &mut [f32]),
    ) -> Result<(), ReadError> {
        let m = from.scale("M")?;
        self.quartic.resize(out.len().div_ceil(DIGITS), 0);
        read_runs(from, &mut self.quartic)?;
        check_padding(&self.quartic, out.len())?;
        context.kernel.run(Add { quartic: &self.quartic, value: scale * m, out });
        Ok(())
    }

    fn size(&self) -> Size {
        Size::AtMost(4 + self.n.div_ceil(DIGITS))
    }
}

/// Quantises and encodes; answers how many values are not 0.
struct Quartic<'a> {
    x: &'a [f32],
    /// Keys from here on are ±1.
    half: u32,
    to: &'a mut [u8],
}

impl Work for Quartic<'_> {
    type Output = u64;

    #[inline(always)]
    fn run(self) -> u64 {
        let Self { x, half, to } = self;
        // Every digit stands for 0 until a value says otherwise: so does the padding.
        to.fill(ZEROS);
        let mut sent = 0;
        for (run, worth) in x.chunks(to.len().max(1)).zip(WORTH) {
            for (block, to) in run.chunks(4096).zip(to.chunks_mut(4096)) {
                let mut count = 0u32;
                for (x, to) in block.iter().zip(to) {
                    let large = u8::from(key(*x) >= half);
                    let negative = (x.to_bits() >> 31) as u8;
                    // ±worth: −worth is its complement, plus 1.
                    *to = to.wrapping_add(
                        ((worth ^ negative.wrapping_neg()).wrapping_add(negative)) & large.wrapping_neg(),
                    );
                    count += u32::from(large);
                }
                sent += u64::from(count);
            }
        }
        sent
    }
}

/// `out += value * q`.
struct Add<'a> {
    quartic: &'a [u8],
    value: f32,
    out: &'a mut [f32],
}

impl Work for Add<'_> {
    type Output = ();

    #[inline(always)]
    fn run(self) {
        for (run, worth) in self.out.chunks_mut(self.quartic.len().max(1)).zip(WORTH) {
            for (to, byte) in run.iter_mut().zip(self.quartic) {
                let digit = byte / worth % 3;
                *to += self.value * (f32::from(digit) - 1.0);
            }
        }
    }
}

fn write_runs(quartic: &[u8], out: &mut Writer) {
    let mut rest = quartic;
    while let Some(first) = rest.first() {
        let run = rest.iter().take(LONGEST_RUN).take_while(|byte| **byte == ZEROS).count();
        if run >= 2 {
            out.u8(FIRST_RUN + (run - 2) as u8);
            rest = &rest[run..];
        } else {
            // What is no zero is copied up to the next one.
            let plain = rest.iter().position(|byte| *byte == ZEROS).unwrap_or(rest.len()).max(1);
            debug_assert!(plain == 1 || *first != ZEROS);
            out.raw(&rest[..plain]);
            rest = &rest[plain..];
        }
    }
}

fn read_runs(from: &mut Reader<'_>, quartic: &mut [u8]) -> Result<(), ReadError> {
    let mut at = 0;
    while at < quartic.len() {
        let byte = from.u8("quartic byte")?;
        let (value, run) = if byte < FIRST_RUN { (byte, 1) } else { (ZEROS, usize::from(byte - FIRST_RUN) + 2) };
        let Some(to) = quartic.get_mut(at..at + run) else {
            return Err(ReadError::Field {
                what: "run of zeros",
                value: run as u64,
                rule: "it passes the tensor's end",
            });
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
            return Err(ReadError::Field { what: "padding", value: u64::from(byte), rule: "it must stand for 0" });
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn runs_come_back(bytes in prop::collection::vec(prop_oneof![3 => Just(ZEROS), 1 => 0u8..FIRST_RUN], 0..200)) {
            let mut out = Writer::new();
            write_runs(&bytes, &mut out);
            prop_assert!(out.len() <= bytes.len());
            let mut back = vec![0; bytes.len()];
            let mut from = Reader::new(out.bytes());
            read_runs(&mut from, &mut back).unwrap();
            prop_assert_eq!((back, from.left()), (bytes, 0));
        }
    }

    /// By hand: one run of each length that the code has, and what is left of a longer one.
    #[test]
    fn runs_have_the_published_codes() {
        let coded = |zeros: usize| {
            let mut out = Writer::new();
            write_runs(&vec![ZEROS; zeros], &mut out);
            out.into_vec()
        };
        assert_eq!((coded(1), coded(2), coded(14)), (vec![121], vec![243], vec![255]));
        assert_eq!((coded(15), coded(30)), (vec![255, 121], vec![255, 255, 243]));
    }

    #[test]
    fn quartic_by_hand() {
        // Five runs of two: (1, 0), (−1, 0), (0, 0), (1, 1), (−1, padding).
        let x = [5.0, 0.0, -5.0, 1.0, 0.0, -1.0, 5.0, 5.0, -5.0];
        let mut bytes = vec![0; 2];
        let sent = crate::Kernel::Portable.run(Quartic { x: &x, half: key(2.5), to: &mut bytes });
        assert_eq!(bytes, [2 * 81 + 9 + 2 * 3, 81 + 27 + 9 + 2 * 3 + 1]);
        assert_eq!(sent, 5);
    }
}
