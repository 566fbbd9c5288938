//! 8-bit approximations (Dettmers 2016): |x| / max |x| becomes the nearest of 128 magnitudes, with a sign, in a byte.
//!
//! - `type=dynamic` (dynamic tree): behind the sign, z zeros say the exponent 10^-z, a set bit ends them, and what is left
//!   numbers the 2^(6−z) equal parts of [0.1, 1]; a part stands for its middle. Exponents go from 0 to 6.
//! - `type=static` (1-3-4): 3 bits of exponent 10^-e, e from 0 to 7, and 4 bits that number 16 parts of [0.1, 1]. Its smallest
//!   code stands for 0 here, which the definition leaves out.
//!
//! All bits 0 is 0. The sign bit alone, which would be −0, is 1, as in the author's library (its dynamic map adds
//! 0 and 1); −1 goes to the largest negative code.
//!
//! Payload: max |x|, f32; n bytes.

use super::levels::{BLOCK, add_meanings, multiplier};
use super::scheme::max;
use crate::codec::{Codec, Context, EncodeError, ReadError, Size, Target};
use crate::entry::Entry;
use crate::kernels::{Lines, Table, key};
use crate::wire::{Reader, Writer};
use crate::{Energy, Kernel};
use flexcomm_domain::spec::compressors;
use std::ops::RangeInclusive;

pub(super) const ENTRY: Entry = Entry {
    info: &compressors::EIGHTBIT,
    code: 19,
    examples: &["", "type=static"],
    build: |values, shape| Box::new(EightBit::new(values.whole(0) == 0, shape.values())),
};

#[derive(Debug)]
struct EightBit {
    n: usize,
    /// What each byte stands for, in units of max |x|.
    values: Box<[f32; 256]>,
    /// Between code i and i + 1 of the magnitudes; the last is between code 127 and 1.
    bounds: [f32; 128],
    /// By the upper bits of |x| / max |x|: the code of the least number with these.
    guesses: Box<[u8; CELLS]>,
    /// Codes whose bounds are evenly spaced.
    runs: &'static [RangeInclusive<u8>],
    table: Box<Table>,
    /// A block's, before they are appended: room in the message would have to be zeroed first.
    codes: Vec<u8>,
}

/// Of the dynamic tree: one for each exponent.
const TREE: &[RangeInclusive<u8>] = &[0..=0, 1..=1, 2..=3, 4..=7, 8..=15, 16..=31, 32..=63, 64..=127, 128..=128];

/// Of 1-3-4: one for each exponent; of the lowest, two codes differ.
const FIXED: &[RangeInclusive<u8>] =
    &[0..=0, 1..=1, 2..=15, 16..=31, 32..=47, 48..=63, 64..=79, 80..=95, 96..=111, 112..=127, 128..=128];

/// From so many values on it pays to draw lines.
const LINED: usize = 4096;

/// Numbers that share the exponent and 7 bits of the mantissa: narrower than any code but the lowest two.
const CELL_BITS: u32 = 16;

/// Up to 1.0.
const CELLS: usize = (0x3f80_0000 >> CELL_BITS) + 1;

/// Code of 1.
const ONE: u8 = 0x80;

/// Magnitude number `code` of the dynamic tree.
fn dynamic(code: u32) -> f64 {
    if code == 0 {
        return 0.0;
    }
    let bits = code.ilog2();
    middle(code - (1 << bits), 1 << bits) * 10f64.powi(bits as i32 - 6)
}

/// Magnitude number `code` of 1-3-4.
fn fixed(code: u32) -> f64 {
    if code == 0 { 0.0 } else { middle(code & 15, 16) * 10f64.powi((code >> 4) as i32 - 7) }
}

/// Of part i of `parts` equal parts of [0.1, 1].
fn middle(i: u32, parts: u32) -> f64 {
    0.1 + 0.9 * (f64::from(i) + 0.5) / f64::from(parts)
}

impl EightBit {
    fn new(tree: bool, n: usize) -> Self {
        let magnitude = if tree { dynamic } else { fixed };
        let mut values = Box::new([0.0; 256]);
        for code in 0..128 {
            let value = magnitude(code as u32) as f32;
            (values[code], values[code + 128]) = (value, -value);
        }
        values[usize::from(ONE)] = 1.0;
        let mut bounds = [0.0; 128];
        for (code, bound) in bounds.iter_mut().enumerate() {
            let above = if code == 127 { 1.0 } else { values[code + 1] };
            *bound = (values[code] + above) / 2.0;
        }
        let mut guesses = Box::new([0; CELLS]);
        for (cell, guess) in guesses.iter_mut().enumerate() {
            let least = f32::from_bits((cell as u32) << CELL_BITS);
            *guess = bounds.iter().take_while(|bound| least >= **bound).count() as u8;
        }
        let runs = if tree { TREE } else { FIXED };
        Self { n, values, bounds, guesses, runs, table: Box::new(Table::ZEROS), codes: vec![0; BLOCK] }
    }

    /// The nearest code of x = t max |x|.
    fn code(&self, t: f32) -> u8 {
        let magnitude = t.abs().min(1.0);
        let mut code = self.guesses[(magnitude.to_bits() >> CELL_BITS) as usize];
        while code < 128 && magnitude >= self.bounds[usize::from(code)] {
            code += 1;
        }
        match code {
            // The sign of 1 does not fit: −1 is its neighbour.
            128 if t < 0.0 => 0xff,
            128 => ONE,
            0 => 0,
            code => code | if t < 0.0 { 0x80 } else { 0 },
        }
    }
}

impl EightBit {
    /// What vectors need for values divided by a largest one, where f32 has room for it.
    fn lines(&self, divisor: f32) -> Option<Lines> {
        let mut keys = [0; 16];
        for (to, run) in keys.iter_mut().zip(self.runs).skip(1) {
            *to = self.first_key(*run.start(), divisor);
        }
        let bound = |code: u8| f64::from(self.bounds[usize::from(code)]) * f64::from(divisor);
        (1e-25..1e25).contains(&divisor).then(|| Lines::new(self.runs, &keys[..self.runs.len()], bound)).flatten()
    }

    /// Of the least magnitude that has at least this code, which is above 0.
    fn first_key(&self, code: u8, divisor: f32) -> u32 {
        let bound = self.bounds[usize::from(code) - 1];
        let reaches = |key: u32| f32::from_bits(key) / divisor >= bound;
        let mut key = key(bound * divisor);
        while reaches(key) {
            key -= 1;
        }
        while !reaches(key) {
            key += 1;
        }
        key
    }

    /// Appends codes; answers the sum of squares of what they stand for.
    fn append(&mut self, x: &[f32], (divisor, kernel): (f32, Kernel), out: &mut Writer) -> f64 {
        let lines = if x.len() >= LINED { self.lines(divisor) } else { None };
        let (mut codes, mut squares) = (std::mem::take(&mut self.codes), 0.0);
        self.table.fill(|code| self.values[usize::from(code)].powi(2));
        for x in x.chunks(BLOCK) {
            let (codes, exact) = (&mut codes[..x.len()], |x: f32| self.code(x / divisor));
            let done = lines.as_ref().map_or(0, |lines| kernel.line_codes(lines, x, codes, exact));
            codes[done..].iter_mut().zip(&x[done..]).for_each(|(to, x)| *to = exact(*x));
            squares += kernel.sum_of_meanings(codes, &self.table);
            out.raw(codes);
        }
        self.codes = codes;
        squares
    }
}

impl Codec for EightBit {
    fn encode(&mut self, x: &[f32], context: &Context, out: &mut Writer) -> Result<Energy, EncodeError> {
        let stats = context.stats(x)?;
        let norm = max(stats);
        out.reserve(self.size().most());
        out.f32(norm);
        let squares = self.append(x, (if norm > 0.0 { norm } else { 1.0 }, context.kernel), out);
        let norm = f64::from(norm);
        Ok(Energy { sent: squares * norm * norm, compensated: stats.energy })
    }

    fn decode(&mut self, from: &mut Reader<'_>, context: &Context, target: Target<'_>) -> Result<(), ReadError> {
        let norm = from.f32("norm")?;
        let step = multiplier(target.scale, (norm, norm), 1.0)?;
        let codes = from.take("codes", target.out.len())?;
        self.table.fill(|code| self.values[usize::from(code)] * step);
        add_meanings(codes, &self.table, context.kernel, target);
        Ok(())
    }

    fn size(&self) -> Size {
        Size::Exact(4 + self.n)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Against the plain definition: the magnitudes with the least distance.
    #[test]
    fn codes_are_the_nearest() {
        for tree in [true, false] {
            let codec = EightBit::new(tree, 1);
            let mut magnitudes: Vec<f32> = codec.values[..128].to_vec();
            magnitudes.push(1.0);
            assert!(magnitudes.is_sorted());
            for i in 0..200_000u32 {
                // From 1e-9 to 1 in equal ratios.
                let t = (10f64.powf(-9.0 * f64::from(i) / 200_000.0) as f32).min(1.0);
                let distance = |m: f32| (f64::from(m) - f64::from(t)).abs();
                let best = magnitudes.iter().map(|m| distance(*m)).fold(f64::MAX, f64::min);
                let got = codec.values[usize::from(codec.code(t))];
                // Bounds are rounded to f32.
                assert!(distance(got) <= best + 1e-7 * f64::from(t), "{t} became {got}");
                let below = codec.values[usize::from(codec.code(-t))];
                assert!(below == -got || got == 1.0 && below == -codec.values[127], "{below}");
            }
        }
    }

    /// Every kernel against the definition, one value after the other: next to every bound, with either sign, and all over.
    #[test]
    fn lines_are_the_definition() {
        // With the last three the least value of code 1 is a power of two: of the tree, of the tree, of 1-3-4.
        let divisors = [1.0f32, 0.37, 6.5e-22, 9.9e18, 1.999_999_9, 0.866_976_7, 1.733_953_4, 0.808_198_6];
        for (tree, divisor) in [true, false].into_iter().flat_map(|tree| divisors.map(|divisor| (tree, divisor))) {
            let mut codec = EightBit::new(tree, 1);
            let near = codec.bounds.iter().flat_map(|bound| {
                let x = bound * divisor;
                [x.next_down().next_down(), x.next_down(), x, x.next_up(), x.next_up().next_up()]
            });
            let all = (0..60_000).map(|i| divisor * 10f64.powf(-9.5 * f64::from(i) / 60_000.0) as f32);
            // Whole groups of one value: doubt about another one must not hide what vectors make of it.
            let groups = near.chain([0.0, f32::MIN_POSITIVE, 1e-45, 1e-9 * divisor]).flat_map(|x| [x; 64]);
            let filled = groups.chain(all).map(|x| x.min(divisor));
            let x: Vec<f32> = filled.enumerate().map(|(i, x)| if i % 3 == 0 { -x } else { x }).collect();
            assert!(codec.lines(divisor).is_some(), "{divisor}");
            let want: Vec<u8> = x.iter().map(|x| codec.code(x / divisor)).collect();
            for kernel in Kernel::available() {
                let mut out = Writer::new();
                codec.append(&x, (divisor, kernel), &mut out);
                let differs = out.bytes().iter().zip(&want).position(|(got, want)| got != want);
                assert_eq!(differs.map(|i| (x[i], out.bytes()[i], want[i])), None, "{kernel:?} {divisor}");
            }
        }
    }

    /// Where the least value of code 1 is a power of two, what is below it has an octave of its own.
    #[test]
    fn zeros_stay_zeros() {
        for (tree, divisor) in [(true, 0.866_976_7f32), (true, 1.733_953_4), (false, 0.808_198_6)] {
            let mut codec = EightBit::new(tree, 8192);
            assert!(codec.first_key(1, divisor).trailing_zeros() >= 23, "{divisor}");
            let mut x = vec![0.0; 8192];
            x[0] = divisor;
            for kernel in Kernel::available() {
                let mut out = Writer::new();
                codec.append(&x, (divisor, kernel), &mut out);
                assert_eq!(out.bytes()[0], ONE, "{kernel:?} {divisor}");
                assert!(out.bytes()[1..].iter().all(|code| *code == 0), "{kernel:?} {divisor}");
            }
        }
    }

    /// The published dynamic map: middles of 2^i parts of [0.1, 1], times 10^(i−6), i from 0 to 6.
    #[test]
    fn known_values() {
        let tree = EightBit::new(true, 1);
        for (code, value) in
            [(0, 0.0), (1, 0.55e-6), (2, 3.25e-6), (3, 7.75e-6), (64, 0.107_031_25), (127, 0.992_968_75)]
        {
            assert!((tree.values[code] - value).abs() <= 1e-6 * value, "{code}: {}", tree.values[code]);
        }
        let fixed = EightBit::new(false, 1);
        for (code, value) in [(0, 0.0), (1, 1.843_75e-8), (0x70, 0.128_125), (0x7f, 0.971_875)] {
            assert!((fixed.values[code] - value).abs() <= 1e-6 * value, "{code}: {}", fixed.values[code]);
        }
    }
}
