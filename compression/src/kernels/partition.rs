//! Two sides of a threshold: a bit for each value below it, and what each side adds up to.

use super::{Kernel, Work};

/// Sums side by side: value i is added to sum i modulo this.
pub(super) const LANES: usize = 16;

/// Sums and the count of the values below.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct PartitionSums {
    pub(super) below: [f64; LANES],
    pub(super) others: [f64; LANES],
    pub(super) squares: [f64; LANES],
    pub(crate) count_below: u64,
}

impl PartitionSums {
    /// Σ of the values below, and of the others.
    pub(crate) fn sums(&self) -> [f64; 2] {
        [self.below.iter().sum(), self.others.iter().sum()]
    }

    /// Σ x². Not finite where a value is not.
    pub(crate) fn energy(&self) -> f64 {
        self.squares.iter().sum()
    }
}

impl Kernel {
    /// In one read; `bits` has ⌈n/8⌉ bytes.
    pub(crate) fn partition(self, x: &[f32], threshold: f32, bits: &mut [u8]) -> PartitionSums {
        let mut partition = PartitionSums::default();
        let done = self.partition_first(x, threshold, bits, &mut partition);
        self.run(Rest { x: &x[done..], threshold, bits: &mut bits[done / 8..], partition: &mut partition });
        partition
    }
}

/// What kernels leave, from a multiple of [`LANES`] on.
struct Rest<'a> {
    x: &'a [f32],
    threshold: f32,
    bits: &'a mut [u8],
    partition: &'a mut PartitionSums,
}

impl Work for Rest<'_> {
    #[inline(always)]
    fn run(self) {
        // A copy of its own, so that the loop keeps it in registers.
        let mut partition = *self.partition;
        for (x, bits) in self.x.chunks(LANES).zip(self.bits.chunks_mut(LANES / 8)) {
            let mut mask = 0u16;
            for (lane, x) in x.iter().enumerate() {
                let (is_below, x) = (*x < self.threshold, f64::from(*x));
                partition.below[lane] += if is_below { x } else { 0.0 };
                partition.others[lane] += if is_below { 0.0 } else { x };
                partition.squares[lane] += x * x;
                mask |= u16::from(is_below) << lane;
            }
            partition.count_below += u64::from(mask.count_ones());
            bits.copy_from_slice(&mask.to_le_bytes()[..bits.len()]);
        }
        *self.partition = partition;
    }
}

/// [`PartitionSums`] of each column of a matrix: sums of the values below and of the others, each in the order of rows, and how many
/// are below.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Columns {
    pub(crate) sums: [Vec<f64>; 2],
    pub(crate) below: Vec<u32>,
}

impl Columns {
    /// Of so many.
    pub(crate) fn new(columns: usize) -> Self {
        Self { sums: [vec![0.0; columns], vec![0.0; columns]], below: vec![0; columns] }
    }
}

impl Kernel {
    /// Sums of both sides of each column of whole rows.
    pub(crate) fn partition_columns(self, x: &[f32], threshold: f32, columns: &mut Columns) {
        columns.sums.iter_mut().for_each(|sums| sums.fill(0.0));
        columns.below.fill(0);
        let done = self.partition_first_columns(x, threshold, columns);
        self.run(RestOfColumns { x, threshold, columns, done });
    }

    /// `out +=` the first value of its column, or the second where the bit is set; where it is FRESH, to zeros.
    pub(crate) fn add_columns<const FRESH: bool>(self, bits: &[u8], values: [&[f32]; 2], out: &mut [f32]) {
        if !self.add_all_columns::<FRESH>(bits, values, out) {
            self.run(AddColumns::<FRESH> { bits, values, out });
        }
    }
}

/// Columns that kernels leave.
struct RestOfColumns<'a> {
    x: &'a [f32],
    threshold: f32,
    columns: &'a mut Columns,
    done: usize,
}

impl Work for RestOfColumns<'_> {
    #[inline(always)]
    fn run(self) {
        let Self { x, threshold, columns: Columns { sums: [below, others], below: count }, done } = self;
        for row in x.chunks_exact(count.len()) {
            let sums = below[done..].iter_mut().zip(&mut others[done..]).zip(&mut count[done..]);
            for (((below, others), count), x) in sums.zip(&row[done..]) {
                let (is_below, x) = (*x < threshold, f64::from(*x));
                *below += if is_below { x } else { 0.0 };
                *others += if is_below { 0.0 } else { x };
                *count += u32::from(is_below);
            }
        }
    }
}

/// [`Kernel::add_columns`].
struct AddColumns<'a, const FRESH: bool> {
    bits: &'a [u8],
    values: [&'a [f32]; 2],
    out: &'a mut [f32],
}

impl<const FRESH: bool> Work for AddColumns<'_, FRESH> {
    #[inline(always)]
    fn run(self) {
        let Self { bits, values: [clear, set], out } = self;
        for (row, out) in out.chunks_mut(clear.len()).enumerate() {
            let first = row * clear.len();
            for (i, ((to, clear), set)) in out.iter_mut().zip(clear).zip(set).enumerate() {
                let is_set = bits[(first + i) / 8] >> ((first + i) % 8) & 1 == 1;
                let held = if FRESH { 0.0 } else { *to };
                *to = held + if is_set { *set } else { *clear };
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn all_kernels_see_the_same_sides(
            x in prop::collection::vec(any::<f32>().prop_filter("a number", |x| x.is_finite()), 0..300),
            threshold in prop_oneof![Just(0.0f32), any::<f32>().prop_filter("a number", |x| !x.is_nan())],
        ) {
            let (mut sums, mut bits) = ([[0.0f64; LANES]; 3], vec![0u8; x.len().div_ceil(8)]);
            for (i, x) in x.iter().enumerate() {
                let (side, wide) = (usize::from(*x >= threshold), f64::from(*x));
                sums[side][i % LANES] += wide;
                sums[2][i % LANES] += wide * wide;
                bits[i / 8] |= u8::from(side == 0) << (i % 8);
            }
            let count: u32 = bits.iter().map(|byte| byte.count_ones()).sum();
            for kernel in Kernel::available() {
                let mut got = vec![0xaa; bits.len()];
                let partition = kernel.partition(&x, threshold, &mut got);
                prop_assert_eq!(&got, &bits, "{:?}", kernel);
                let sums = sums.map(|sums| sums.iter().sum::<f64>());
                prop_assert_eq!((partition.sums(), partition.energy()), ([sums[0], sums[1]], sums[2]), "{:?}", kernel);
                prop_assert_eq!(partition.count_below, u64::from(count));
                let (mut fresh, mut added) = (vec![f32::NAN; x.len()], vec![1.0; x.len()]);
                kernel.add_sides::<true>(&bits, [0.5, -0.0], &mut fresh);
                kernel.add_sides::<false>(&bits, [0.5, -3.0], &mut added);
                for i in 0..x.len() {
                    let (added_want, fresh_want) = match bits[i / 8] >> (i % 8) & 1 {
                        1 => (-2.0, 0.0f32),
                        _ => (1.5, 0.5),
                    };
                    prop_assert_eq!((fresh[i].to_bits(), added[i]), (fresh_want.to_bits(), added_want));
                }
            }
        }

        #[test]
        fn all_kernels_see_the_same_columns(rows in 0usize..40, width in 1usize..70, seed: u64, threshold in -1.0f32..1.0) {
            let stream = crate::random::Stream::new(seed, [0; 4]);
            let x: Vec<f32> = (0..rows * width).map(|i| 4.0 * stream.uniform(i as u32) - 2.0).collect();
            let (mut want, mut bits) = (Columns::new(width), vec![0u8; x.len().div_ceil(8)]);
            for (i, x) in x.iter().enumerate() {
                let side = usize::from(*x >= threshold);
                want.sums[side][i % width] += f64::from(*x);
                want.below[i % width] += u32::from(side == 0);
                bits[i / 8] |= u8::from(side == 0) << (i % 8);
            }
            let values: [Vec<f32>; 2] = [1.0, -2.0].map(|side| (0..width).map(|i| side * i as f32).collect());
            let value = |i: usize| values[usize::from(bits[i / 8] >> (i % 8) & 1 == 1)][i % width];
            for kernel in Kernel::available() {
                let mut columns = Columns::new(width);
                columns.below.fill(7);
                kernel.partition_columns(&x, threshold, &mut columns);
                prop_assert_eq!(&columns, &want, "{:?}", kernel);
                let (mut fresh, mut added) = (vec![f32::NAN; x.len()], x.clone());
                kernel.add_columns::<true>(&bits, [&values[0], &values[1]], &mut fresh);
                kernel.add_columns::<false>(&bits, [&values[0], &values[1]], &mut added);
                for i in 0..x.len() {
                    prop_assert_eq!((fresh[i].to_bits(), added[i]), ((0.0 + value(i)).to_bits(), x[i] + value(i)));
                }
            }
        }
    }
}
