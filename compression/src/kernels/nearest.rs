//! Nearest codes by arithmetic in f32 where that leaves no doubt. What decides is an exact function of one value, which is
//! asked wherever two bounds of the answer differ.

use std::ops::RangeInclusive;

/// Evenly spaced points on both sides of 0: code = round(inverse * x) − lowest, from 0 to 255.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Even {
    /// Below and above the inverse, by more than all roundings.
    pub(super) inverses: [f32; 2],
    pub(super) lowest: i16,
}

impl Even {
    /// None where f32 has no such inverse or 0 lies beyond the points.
    pub(crate) fn new(inverse: f64, lowest: f64) -> Option<Self> {
        // That of the inverse, of its multiple here, and of the product.
        const MARGIN: f32 = 1.0 / 4_194_304.0;
        let usable = (1e-30..1e30).contains(&inverse) && (-255.0..=0.0).contains(&lowest);
        let inverses = [1.0 - MARGIN, 1.0 + MARGIN].map(|factor| inverse as f32 * factor);
        usable.then_some(Self { inverses, lowest: lowest as i16 })
    }
}

/// Magnitudes whose codes rise in straight lines, a line for each run of codes, and a set upper bit for values below 0. The
/// code 128, of the largest, has room for no such bit: of values below 0 it is 255.
#[derive(Debug, Clone)]
pub(crate) struct Lines {
    /// Of keys: that of the largest with code 0. What is below it has code 0 too.
    pub(super) first_octave: i32,
    /// By octave: the key from which on the next line holds, and the line before.
    pub(super) starts: [i32; 32],
    pub(super) lines: [i32; 32],
    /// By line: code = offset + slope |x|, rounded down, but no more than the last. The offset is too low by half the margin.
    pub(super) slopes: [f32; 16],
    pub(super) offsets: [f32; 16],
    pub(super) lasts: [i32; 16],
}

impl Lines {
    /// More than all roundings of the line and of what is exact, in codes below 256.
    pub(super) const MARGIN: f32 = 2e-4;

    /// From runs of codes, the least key of each run, and an upper bound of each code's values, evenly spaced within a run. None
    /// where two runs begin in one octave.
    pub(crate) fn new(runs: &[RangeInclusive<u8>], keys: &[u32], bound: impl Fn(u8) -> f64) -> Option<Self> {
        // Smaller ones are taken for this octave: code 0 must hold some of it, also where code 1 begins with an octave.
        let first_octave = keys.get(1)?.saturating_sub(1) >> 23;
        let mut made = Self {
            first_octave: first_octave as i32,
            starts: [i32::MAX; 32],
            lines: [0; 32],
            slopes: [0.0; 16],
            offsets: [0.0; 16],
            lasts: [0; 16],
        };
        for (line, run) in runs.iter().enumerate().take(16) {
            let (slope, offset) = Self::line(run, &bound);
            made.slopes[line] = slope as f32;
            made.offsets[line] = offset as f32 - Self::MARGIN / 2.0;
            made.lasts[line] = i32::from(*run.end());
        }
        for octave in 0..32 {
            let (low, high) = ((first_octave + octave) << 23, (first_octave + octave + 1) << 23);
            let line = keys.partition_point(|key| *key <= low).saturating_sub(1);
            made.lines[octave as usize] = line as i32;
            match keys.get(line + 1) {
                Some(next) if *next < high => made.starts[octave as usize] = *next as i32,
                _ => {}
            }
            if keys.get(line + 2).is_some_and(|next| *next < high) {
                return None;
            }
        }
        Some(made)
    }

    fn line(run: &RangeInclusive<u8>, bound: impl Fn(u8) -> f64) -> (f64, f64) {
        let (first, last) = (*run.start(), *run.end());
        if first == last {
            return (0.0, f64::from(first) + 0.5);
        }
        let width = match last - first {
            1 => bound(first),
            steps => (bound(last - 1) - bound(first)) / f64::from(steps - 1),
        };
        (1.0 / width, f64::from(first) + 1.0 - bound(first) / width)
    }
}
