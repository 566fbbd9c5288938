//! Min-max quantization to 8 bits (Bagua's ByteGrad): with the step d = (max − min) / 255 and the grid point u = round(max / d)
//! on top, each value becomes the nearest of the 256 multiples of d from (u − 255) d to u d.
//!
//! Since 0 is such a multiple, zeros stay zeros where 0 lies between min and max. Bagua's code adds 1e-7 to max − min, which
//! makes tensors of small values vanish: here d = 0 stands for a constant tensor instead. Values that the rounding of u
//! pushes below the grid go to its lowest point (a conversion to u8 would make them the highest), and what is decoded
//! stays between min and max.
//!
//! Payload: min, f32; max, f32; n bytes, grid points from the lowest on.

use super::levels::{BLOCK, add_meanings};
use crate::Energy;
use crate::codec::{Codec, Context, EncodeError, ReadError, Shape, Size, Target};
use crate::entry::Entry;
use crate::kernels::{Even, Kernel, Table, Work};
use crate::wire::{Reader, Writer};
use flexcomm_domain::spec::compressors;

pub(super) const ENTRY: Entry = Entry {
    info: &compressors::MINMAX8,
    code: 31,
    examples: &[""],
    build: |_, Shape { rows, cols }| {
        Box::new(MinMax { n: rows * cols, table: Box::new(Table::ZEROS), codes: Box::new([0; BLOCK]) })
    },
};

#[derive(Debug)]
struct MinMax {
    n: usize,
    table: Box<Table>,
    /// A block's, before they are appended: room in the message would have to be zeroed first.
    codes: Box<[u8; BLOCK]>,
}

/// The grid of a tensor, in f64: values far from 0 in a narrow range have large u.
#[derive(Debug, Clone, Copy)]
struct Grid {
    min: f64,
    max: f64,
    step: f64,
    inverse: f64,
    lowest: f64,
}

impl Grid {
    fn new(min: f32, max: f32) -> Self {
        let (min, max) = (f64::from(min), f64::from(max));
        let step = (max - min) / 255.0;
        let inverse = if step > 0.0 { 1.0 / step } else { 0.0 };
        Self { min, max, step, inverse, lowest: (max * inverse).round_ties_even() - 255.0 }
    }

    #[inline(always)]
    fn code(self, x: f32) -> u8 {
        // The largest u, 2^24 * 255, plus 2^52 is exact: adding it rounds to the nearest whole number.
        const WHOLE: f64 = 6_755_399_441_055_744.0;
        let nearest = (f64::from(x) * self.inverse + WHOLE) - WHOLE;
        (nearest - self.lowest).clamp(0.0, 255.0) as u8
    }

    /// At once as far as the kernel can.
    fn codes(self, x: &[f32], codes: &mut [u8], kernel: Kernel) {
        let even = Even::new(self.inverse, self.lowest);
        let done = even.map_or(0, |even| kernel.even_codes(even, x, codes, |x| self.code(x)));
        kernel.run(Round { grid: self, x: &x[done..], codes: &mut codes[done..] });
    }

    fn value(self, code: u8) -> f32 {
        // With step 0 both ends of the clamp are the value.
        ((f64::from(code) + self.lowest) * self.step).clamp(self.min, self.max) as f32
    }
}

impl Codec for MinMax {
    fn encode(&mut self, x: &[f32], context: &Context, out: &mut Writer) -> Result<Energy, EncodeError> {
        let compensated = context.stats(x)?.energy;
        let (min, max) = context.kernel.run(Range(x));
        out.reserve(self.size().most());
        out.f32(min);
        out.f32(max);
        let (grid, mut squares) = (Grid::new(min, max), 0.0);
        let largest = f64::from(max.max(-min));
        let unit = if largest > 0.0 { 1.0 / largest } else { 0.0 };
        self.table.fill(|code| (f64::from(grid.value(code)) * unit).powi(2) as f32);
        for x in x.chunks(BLOCK) {
            let codes = &mut self.codes[..x.len()];
            grid.codes(x, codes, context.kernel);
            squares += context.kernel.sum_of_meanings(codes, &self.table);
            out.raw(codes);
        }
        Ok(Energy { sent: squares * largest * largest, compensated })
    }

    fn decode(&mut self, from: &mut Reader<'_>, context: &Context, target: Target<'_>) -> Result<(), ReadError> {
        let (scale, min, max) = (target.scale, from.f32("min")?, from.f32("max")?);
        if min > max || !(min * scale).is_finite() || !(max * scale).is_finite() {
            return Err(ReadError::number("min", min, "it must not exceed max, both in range"));
        }
        let (codes, grid) = (from.take("codes", target.out.len())?, Grid::new(min, max));
        self.table.fill(|code| grid.value(code) * scale);
        add_meanings(codes, &self.table, context.kernel, target);
        Ok(())
    }

    fn size(&self) -> Size {
        Size::Exact(8 + self.n)
    }
}

/// min and max; (0, 0) of nothing.
struct Range<'a>(&'a [f32]);

impl Work<(f32, f32)> for Range<'_> {
    #[inline(always)]
    fn run(self) -> (f32, f32) {
        let Some(first) = self.0.first() else { return (0.0, 0.0) };
        let (mut low, mut high) = ([*first; 64], [*first; 64]);
        let (groups, rest) = self.0.as_chunks::<64>();
        for group in groups {
            for ((low, high), x) in low.iter_mut().zip(&mut high).zip(group) {
                *low = if *x < *low { *x } else { *low };
                *high = if *x > *high { *x } else { *high };
            }
        }
        let (low, high) = (low.iter().chain(rest), high.iter().chain(rest));
        // Adding 0 makes −0 to 0: which of the two zeros is met first must not show.
        (low.copied().fold(*first, f32::min) + 0.0, high.copied().fold(*first, f32::max) + 0.0)
    }
}

/// The codes that kernels leave.
struct Round<'a> {
    grid: Grid,
    x: &'a [f32],
    codes: &'a mut [u8],
}

impl Work for Round<'_> {
    #[inline(always)]
    fn run(self) {
        self.codes.iter_mut().zip(self.x).for_each(|(code, x)| *code = self.grid.code(*x));
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    /// Every kernel against the definition, one value after the other; values next to the middle between two points among them.
    fn check(x: &[f32]) {
        let (min, max) = Kernel::Portable.run(Range(x));
        let grid = Grid::new(min, max);
        let want: Vec<u8> = x.iter().map(|x| grid.code(*x)).collect();
        for kernel in Kernel::available() {
            let mut codes = vec![7; x.len()];
            grid.codes(x, &mut codes, kernel);
            assert_eq!(codes, want, "{kernel:?}, from {min} to {max}");
        }
    }

    #[test]
    fn middles_are_decided_as_defined() {
        for (min, max) in [(-1.0f32, 1.0f32), (-0.3, 0.7), (-1e-20, 3e-20), (0.0, 255.0), (-255.0, 0.0), (-1e-9, 5e15)]
        {
            let step = (f64::from(max) - f64::from(min)) / 255.0;
            let middles = (-260..260).map(|i| (step * (f64::from(i) + 0.5)) as f32);
            let near =
                middles.flat_map(|x| [x.next_down().next_down(), x.next_down(), x, x.next_up(), x.next_up().next_up()]);
            let inside = near.chain([0.0, 1e-45, -1e-45]).filter(|x| (min..=max).contains(x));
            // Whole groups of one value: doubt about another one must not hide what vectors make of it.
            check(&[min, max].into_iter().chain(inside).flat_map(|x| [x; 64]).collect::<Vec<_>>());
        }
    }

    proptest! {
        #[test]
        fn kernels_agree(x in prop::collection::vec(-1.0f32..1.0, 1..400), scale in prop_oneof![Just(1.0f32), Just(1e-38), Just(1e38)], shift in prop_oneof![Just(0.0f32), Just(0.9f32), Just(5.0)]) {
            check(&x.iter().map(|x| (x + shift).min(3.0) * scale).collect::<Vec<_>>());
        }
    }
}
