//! Codes of one byte each, by a table of what they mean.

use super::Kernel;
use super::rounding::{Squares, total};

/// What each of 256 codes means.
#[derive(Debug, Clone)]
#[repr(align(64))]
pub(crate) struct Table {
    pub(super) values: [f32; 256],
    /// Byte i of each value: what vectors look up.
    pub(super) planes: [[u8; 256]; 4],
}

impl Table {
    /// Of all zeros.
    pub(crate) const ZEROS: Self = Self { values: [0.0; 256], planes: [[0; 256]; 4] };

    /// By a function of the code.
    pub(crate) fn fill(&mut self, value: impl Fn(u8) -> f32) {
        for (code, to) in (0..=u8::MAX).zip(&mut self.values) {
            *to = value(code);
            let bytes = to.to_le_bytes();
            self.planes.iter_mut().zip(bytes).for_each(|(plane, byte)| plane[usize::from(code)] = byte);
        }
    }
}

/// Codes whose meanings are added up in f32 at once.
const SUMMED: usize = 4096;

impl Kernel {
    /// `out += table[code]`, where it is FRESH to zeros. Slices of one length.
    pub(crate) fn add_meanings<const FRESH: bool>(self, codes: &[u8], table: &Table, out: &mut [f32]) {
        let done = self.add_first_meanings::<FRESH>(codes, table, out);
        for (to, code) in out[done..].iter_mut().zip(&codes[done..]) {
            *to = if FRESH { 0.0 } else { *to } + table.values[usize::from(*code)];
        }
    }

    /// Σ table[code], of meanings of about one sign and not far from 1.
    pub(crate) fn sum_of_meanings(self, codes: &[u8], table: &Table) -> f64 {
        codes.chunks(SUMMED).map(|codes| self.sum_of_block(codes, table)).sum()
    }

    fn sum_of_block(self, codes: &[u8], table: &Table) -> f64 {
        let mut sums: Squares = [0.0; 64];
        let done = self.sum_of_first_meanings(codes, table, &mut sums);
        for group in codes[done..].chunks(sums.len()) {
            sums.iter_mut().zip(group).for_each(|(sum, code)| *sum += table.values[usize::from(*code)]);
        }
        total(&sums)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn all_kernels_look_up_the_same(codes in prop::collection::vec(any::<u8>(), 0..9000), shift in 0u32..31) {
            let mut table = Table::ZEROS;
            table.fill(|code| f32::from_bits(u32::from(code).wrapping_mul(0x9e37_79b9) >> shift & 0x7eff_ffff));
            let bits = |x: &[f32]| x.iter().map(|x| x.to_bits()).collect::<Vec<_>>();
            let values: Vec<f32> = codes.iter().map(|code| table.values[usize::from(*code)]).collect();
            let held: Vec<f32> = (0..codes.len()).map(|i| i as f32).collect();
            for kernel in Kernel::available() {
                let (mut fresh, mut added) = (vec![f32::NAN; codes.len()], held.clone());
                kernel.add_meanings::<true>(&codes, &table, &mut fresh);
                prop_assert_eq!(bits(&fresh), bits(&values), "{:?}", kernel);
                kernel.add_meanings::<false>(&codes, &table, &mut added);
                let want: Vec<f32> = held.iter().zip(&values).map(|(held, value)| held + value).collect();
                prop_assert_eq!(bits(&added), bits(&want), "{:?}", kernel);
            }
            table.fill(|code| 0.25 + f32::from(code) / 255.0);
            let want: f64 = codes.iter().map(|code| f64::from(table.values[usize::from(*code)])).sum();
            let sums: Vec<f64> = Kernel::available().map(|kernel| kernel.sum_of_meanings(&codes, &table)).collect();
            prop_assert!((sums[0] - want).abs() <= 4e-6 * want, "{} {want}", sums[0]);
            prop_assert!(sums.iter().all(|sum| *sum == sums[0]), "{sums:?}");
        }
    }
}
