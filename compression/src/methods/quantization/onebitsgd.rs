//! 1-bit SGD (Seide et al. 2014): values below a threshold (0) become one bit, the others its opposite; each side is
//! decoded to the mean of its values, which makes the squared error the least. `per=column` takes means per column of the
//! layer's matrix, as the paper does; `per=tensor` two for the whole tensor, as GRACE (section 3.1). The paper's
//! error feedback is the memory `vanilla`: `onebitsgd+ef(vanilla)`.
//!
//! Decoding selects one of two means by the bit. Implementations that negate the byte instead of the bit decode to
//! hundreds, a known mistake.
//!
//! Payload: per column (or once) the mean of the values below the threshold, then that of the others, f32 each, 0 for
//! an empty side; n bits, set for values below the threshold.

use super::levels::{BLOCK, check_padding};
use super::packing::{Pack, Unpack};
use crate::Energy;
use crate::codec::{Codec, Context, EncodeError, ReadError, Scope, Shape, Size, Travels};
use crate::kernels::Work;
use crate::strategy::params::{Kind, Param};
use crate::strategy::{Class, Entry, Nature};
use crate::wire::{Reader, Writer, packed_bytes};
use std::ops::Bound;

const ANY: Kind = Kind::Number(Bound::Unbounded, Bound::Unbounded);

pub(super) const ENTRY: Entry = Entry {
    name: "onebitsgd",
    code: 20,
    class: Class::Quantization,
    about: "one bit per value, decoded to the mean of its side",
    source: "Seide et al. 2014, 1-Bit SGD, sections 3.1 and 3.2; GRACE, section 3.1",
    params: &[
        Param::optional("threshold", ANY, 0.0, "values below it are one side"),
        Param::optional("per", Kind::Choice(&["tensor", "column"]), 0.0, "what has means of its own"),
    ],
    travels: |_| Travels::Gathers,
    scope: Scope::Tensor,
    // What is left is ‖x‖² − ‖C(x)‖². With the threshold at 0 all values of a side have one sign, and then m times the
    // squared mean of m values is at least their energy / m. At another threshold the means may be 0.
    nature: |values| match values.number(0) == 0.0 {
        true => Nature::Contractive(|_, n| (1.0 - 1e-6) / n.max(1) as f64),
        false => Nature::Contractive(|_, _| 0.0),
    },
    examples: &["", "per=column", "threshold=0.5", "threshold=-0.25,per=column"],
    build: |values, shape| Box::new(OneBitSgd::new(values.number(0) as f32, values.whole(1) == 1, shape)),
};

#[derive(Debug)]
struct OneBitSgd {
    n: usize,
    threshold: f32,
    /// Columns with means of their own; 1: the tensor.
    columns: usize,
    /// Per lane of the sums: value number i adds to lane i mod their number.
    lanes: Vec<Lane>,
    /// Of the payload that is decoded: below, then others.
    means: Vec<[f32; 2]>,
}

/// Sums and count of one side, and the sum of the other.
#[derive(Debug, Clone, Copy, Default)]
struct Lane {
    below: f64,
    others: f64,
    count_below: u64,
    count: u64,
}

/// Lanes when the tensor has one pair of means.
const LANES: usize = 16;

impl OneBitSgd {
    fn new(threshold: f32, per_column: bool, shape: Shape) -> Self {
        let columns = if per_column { shape.cols.max(1) } else { 1 };
        let lanes = if columns == 1 { LANES } else { columns };
        Self {
            n: shape.values(),
            threshold,
            columns,
            lanes: vec![Lane::default(); lanes],
            means: vec![[0.0; 2]; columns],
        }
    }

    /// Adds all values to their lanes.
    fn add_up(&mut self, x: &[f32], context: &Context) {
        self.lanes.fill(Lane::default());
        if self.columns > 1 {
            context.kernel.run(ByColumn { x, threshold: self.threshold, lanes: &mut self.lanes });
            return;
        }
        let sides = context.kernel.run(Sides { x, threshold: self.threshold });
        self.lanes[0] = sides;
    }
}

impl Lane {
    /// Mean below, mean of the others.
    fn means(&self) -> [f32; 2] {
        let mean = |sum: f64, count: u64| if count == 0 { 0.0 } else { (sum / count as f64) as f32 };
        [mean(self.below, self.count_below), mean(self.others, self.count - self.count_below)]
    }
}

impl Codec for OneBitSgd {
    fn encode(&mut self, x: &[f32], context: &Context, out: &mut Writer) -> Result<Energy, EncodeError> {
        let fed = context.stats(x)?.energy;
        self.add_up(x, context);
        let mut sent = 0.0;
        for lane in &self.lanes[..self.columns] {
            let [below, others] = lane.means();
            out.f32(below);
            out.f32(others);
            sent += f64::from(below).powi(2) * lane.count_below as f64;
            sent += f64::from(others).powi(2) * (lane.count - lane.count_below) as f64;
        }
        let mut codes = [0; BLOCK];
        for (x, out) in x.chunks(BLOCK).zip(out.room(packed_bytes(x.len(), 1)).chunks_mut(BLOCK / 8)) {
            let codes = &mut codes[..x.len()];
            context.kernel.run(Below { x, threshold: self.threshold, codes });
            context.kernel.run(Pack { codes, width: 1, out });
        }
        Ok(Energy { sent, fed })
    }

    fn decode_add(
        &mut self,
        from: &mut Reader<'_>,
        context: &Context,
        (scale, out): (f32, &mut [f32]),
    ) -> Result<(), ReadError> {
        for pair in &mut self.means {
            *pair = [from.f32("mean below")? * scale, from.f32("mean of the others")? * scale];
            if !(pair[0].is_finite() && pair[1].is_finite()) {
                let value = f64::from(pair[0]);
                return Err(ReadError::Number { what: "mean", value, rule: "it must be in range" });
            }
        }
        let bits = from.take("sides", packed_bytes(out.len(), 1))?;
        check_padding("sides", bits, out.len())?;
        let mut codes = [0; BLOCK];
        for ((i, out), packed) in out.chunks_mut(BLOCK).enumerate().zip(bits.chunks(BLOCK / 8)) {
            let codes = &mut codes[..out.len()];
            context.kernel.run(Unpack { packed, width: 1, codes });
            context.kernel.run(Select { codes, means: &self.means, first: i * BLOCK, out });
        }
        Ok(())
    }

    fn size(&self) -> Size {
        Size::Exact(8 * self.columns + packed_bytes(self.n, 1))
    }
}

/// Sums of both sides of the whole tensor.
struct Sides<'a> {
    x: &'a [f32],
    threshold: f32,
}

impl Work for Sides<'_> {
    type Output = Lane;

    #[inline(always)]
    fn run(self) -> Lane {
        let (mut all, mut below, mut count) = ([0.0f64; LANES], [0.0f64; LANES], [0u32; LANES]);
        let (groups, rest) = self.x.as_chunks::<LANES>();
        for group in groups {
            for lane in 0..LANES {
                let is_below = group[lane] < self.threshold;
                let x = f64::from(group[lane]);
                all[lane] += if is_below { 0.0 } else { x };
                below[lane] += if is_below { x } else { 0.0 };
                // 2^32 values in 16 lanes: no overflow.
                count[lane] += u32::from(is_below);
            }
        }
        for (lane, x) in rest.iter().enumerate() {
            let is_below = *x < self.threshold;
            all[lane] += if is_below { 0.0 } else { f64::from(*x) };
            below[lane] += if is_below { f64::from(*x) } else { 0.0 };
            count[lane] += u32::from(is_below);
        }
        let count_below = count.iter().map(|count| u64::from(*count)).sum();
        Lane { below: below.iter().sum(), others: all.iter().sum(), count_below, count: self.x.len() as u64 }
    }
}

/// Sums of both sides of each column.
struct ByColumn<'a> {
    x: &'a [f32],
    threshold: f32,
    lanes: &'a mut [Lane],
}

impl Work for ByColumn<'_> {
    type Output = ();

    #[inline(always)]
    fn run(self) {
        for row in self.x.chunks(self.lanes.len()) {
            for (lane, x) in self.lanes.iter_mut().zip(row) {
                let is_below = *x < self.threshold;
                let x = f64::from(*x);
                lane.below += if is_below { x } else { 0.0 };
                lane.others += if is_below { 0.0 } else { x };
                lane.count_below += u64::from(is_below);
                lane.count += 1;
            }
        }
    }
}

struct Below<'a> {
    x: &'a [f32],
    threshold: f32,
    codes: &'a mut [u8],
}

impl Work for Below<'_> {
    type Output = ();

    #[inline(always)]
    fn run(self) {
        self.codes.iter_mut().zip(self.x).for_each(|(code, x)| *code = u8::from(*x < self.threshold));
    }
}

/// Adds the mean that each code selects.
struct Select<'a> {
    codes: &'a [u8],
    means: &'a [[f32; 2]],
    /// Number of the first value.
    first: usize,
    out: &'a mut [f32],
}

impl Work for Select<'_> {
    type Output = ();

    #[inline(always)]
    fn run(self) {
        if let [[below, others]] = self.means {
            for (to, code) in self.out.iter_mut().zip(self.codes) {
                *to += if *code == 1 { *below } else { *others };
            }
            return;
        }
        let mut column = self.first % self.means.len();
        for (to, code) in self.out.iter_mut().zip(self.codes) {
            let [below, others] = self.means[column];
            *to += if *code == 1 { below } else { others };
            column = if column + 1 == self.means.len() { 0 } else { column + 1 };
        }
    }
}
