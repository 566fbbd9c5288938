//! Min-max quantization to 8 bits (Bagua's ByteGrad): with the step d = (max − min) / 255 and the grid point u = round(max / d)
//! on top, each value becomes the nearest of the 256 multiples of d from (u − 255) d to u d.
//!
//! Since 0 is such a multiple, zeros stay zeros where 0 lies between min and max. Bagua's code adds 1e-7 to max − min, which
//! makes tensors of small values vanish: here d = 0 stands for a constant tensor instead. Values that the rounding of u
//! pushes below the grid go to its lowest point (a conversion to u8 would make them the highest), and what is decoded
//! stays between min and max.
//!
//! Payload: min, f32; max, f32; n bytes, grid points from the lowest on.

use crate::Energy;
use crate::codec::{Codec, Context, EncodeError, ReadError, Scope, Shape, Size, Travels};
use crate::kernels::Work;
use crate::strategy::{Class, Entry, Nature};
use crate::wire::{Reader, Writer};

pub(super) const ENTRY: Entry = Entry {
    name: "minmax8",
    code: 31,
    class: Class::Quantization,
    about: "8 bits between min and max",
    source: "Bagua, ByteGrad, MinMaxUInt8 (the compression pattern of seed 003, section 2)",
    params: &[],
    travels: |_| Travels::Gathers,
    scope: Scope::Tensor,
    // Every error is at most |x| and at most one step, and the largest |x| is at least 127.5 steps.
    nature: |_| Nature::Contractive(|_, n| 0.99 / n.max(1) as f64),
    examples: &[""],
    build: |_, Shape { rows, cols }| Box::new(MinMax { n: rows * cols }),
};

#[derive(Debug)]
struct MinMax {
    n: usize,
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

    #[inline(always)]
    fn value(self, code: u8) -> f32 {
        // With step 0 both ends of the clamp are the value.
        ((f64::from(code) + self.lowest) * self.step).clamp(self.min, self.max) as f32
    }
}

impl Codec for MinMax {
    fn encode(&mut self, x: &[f32], context: &Context, out: &mut Writer) -> Result<Energy, EncodeError> {
        let fed = context.stats(x)?.energy;
        let (min, max) = context.kernel.run(Range(x));
        out.f32(min);
        out.f32(max);
        let sent = context.kernel.run(Round { grid: Grid::new(min, max), x, codes: out.room(x.len()) });
        Ok(Energy { sent, fed })
    }

    fn decode_add(
        &mut self,
        from: &mut Reader<'_>,
        context: &Context,
        (scale, out): (f32, &mut [f32]),
    ) -> Result<(), ReadError> {
        let (min, max) = (from.f32("min")?, from.f32("max")?);
        if min > max || !(min * scale).is_finite() || !(max * scale).is_finite() {
            let value = f64::from(min);
            return Err(ReadError::Number { what: "min", value, rule: "it must not exceed max, both in range" });
        }
        let codes = from.take("codes", out.len())?;
        context.kernel.run(Add { grid: Grid::new(min, max), codes, scale, out });
        Ok(())
    }

    fn size(&self) -> Size {
        Size::Exact(8 + self.n)
    }
}

/// min and max; (0, 0) of nothing.
struct Range<'a>(&'a [f32]);

impl Work for Range<'_> {
    type Output = (f32, f32);

    #[inline(always)]
    fn run(self) -> (f32, f32) {
        let Some(first) = self.0.first() else { return (0.0, 0.0) };
        let (mut low, mut high) = ([*first; 16], [*first; 16]);
        for group in self.0.chunks(16) {
            for ((low, high), x) in low.iter_mut().zip(&mut high).zip(group) {
                *low = if *x < *low { *x } else { *low };
                *high = if *x > *high { *x } else { *high };
            }
        }
        // Adding 0 makes −0 to 0: which of the two zeros is met first must not show.
        (low.into_iter().fold(*first, f32::min) + 0.0, high.into_iter().fold(*first, f32::max) + 0.0)
    }
}

struct Round<'a> {
    grid: Grid,
    x: &'a [f32],
    codes: &'a mut [u8],
}

impl Work for Round<'_> {
    type Output = f64;

    #[inline(always)]
    fn run(self) -> f64 {
        let mut sums = [0.0f64; 8];
        for (x, codes) in self.x.chunks(8).zip(self.codes.chunks_mut(8)) {
            for ((x, code), sum) in x.iter().zip(codes).zip(&mut sums) {
                *code = self.grid.code(*x);
                let value = f64::from(self.grid.value(*code));
                *sum += value * value;
            }
        }
        sums.iter().sum()
    }
}

struct Add<'a> {
    grid: Grid,
    codes: &'a [u8],
    scale: f32,
    out: &'a mut [f32],
}

impl Work for Add<'_> {
    type Output = ();

    #[inline(always)]
    fn run(self) {
        for (to, code) in self.out.iter_mut().zip(self.codes) {
            *to += self.grid.value(*code) * self.scale;
        }
    }
}
