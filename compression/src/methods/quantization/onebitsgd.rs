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

use super::levels::check_padding;
use crate::Energy;
use crate::codec::{Codec, Context, EncodeError, ReadError, Shape, Size, Target, not_finite};
use crate::entry::Entry;
use crate::kernels::Columns;
use crate::wire::{Reader, Writer, packed_bytes};
use flexcomm_domain::spec::compressors;

pub(super) const ENTRY: Entry = Entry {
    info: &compressors::ONEBITSGD,
    code: 20,
    examples: &["", "per=column", "threshold=0.5", "threshold=-0.25,per=column"],
    build: |values, shape| Box::new(OneBitSgd::new(values.number(0) as f32, values.whole(1) == 1, shape)),
};

#[derive(Debug)]
struct OneBitSgd {
    n: usize,
    threshold: f32,
    /// What has means of its own: the tensor, or each column.
    columns: Columns,
    /// Of the payload that is decoded: below, then others.
    means: [Vec<f32>; 2],
    /// Bits of a message that is made: room there would have to be zeroed first.
    bits: Vec<u8>,
}

impl OneBitSgd {
    fn new(threshold: f32, per_column: bool, shape: Shape) -> Self {
        let columns = if per_column { shape.cols.max(1) } else { 1 };
        let means = [vec![0.0; columns], vec![0.0; columns]];
        let bits = vec![0; packed_bytes(shape.values(), 1)];
        Self { n: shape.values(), threshold, columns: Columns::new(columns), means, bits }
    }
}

impl Codec for OneBitSgd {
    fn encode(&mut self, x: &[f32], context: &Context, out: &mut Writer) -> Result<Energy, EncodeError> {
        let Self { threshold, columns, bits, .. } = self;
        let partition = context.kernel.partition(x, *threshold, bits);
        if !partition.energy().is_finite() {
            return Err(not_finite(x));
        }
        let mut sent = 0.0;
        let mut side = |sum: f64, count: u64| {
            let mean = if count == 0 { 0.0 } else { (sum / count as f64) as f32 };
            sent += f64::from(mean).powi(2) * count as f64;
            mean
        };
        if let [_] = columns.below[..] {
            let [below, others] = partition.sums();
            out.f32(side(below, partition.count_below));
            out.f32(side(others, x.len() as u64 - partition.count_below));
        } else {
            let rows = (x.len() / columns.below.len()) as u64;
            context.kernel.partition_columns(x, *threshold, columns);
            let [below, others] = &columns.sums;
            for ((below, others), count) in below.iter().zip(others).zip(&columns.below) {
                out.f32(side(*below, u64::from(*count)));
                out.f32(side(*others, rows - u64::from(*count)));
            }
        }
        out.raw(bits);
        Ok(Energy { sent, compensated: context.known.map_or(partition.energy(), |known| known.energy) })
    }

    fn decode(&mut self, from: &mut Reader<'_>, context: &Context, target: Target<'_>) -> Result<(), ReadError> {
        let Target { scale, out, fresh } = target;
        let [below, others] = &mut self.means;
        for (below, others) in below.iter_mut().zip(&mut *others) {
            (*below, *others) = (from.f32("mean below")? * scale, from.f32("mean of the others")? * scale);
            if !(below.is_finite() && others.is_finite()) {
                return Err(ReadError::number("mean", *below, "it must be in range"));
            }
        }
        let bits = from.take("sides", packed_bytes(out.len(), 1))?;
        check_padding("sides", bits, out.len())?;
        match (&below[..], &others[..], fresh) {
            ([below], [others], true) => context.kernel.add_sides::<true>(bits, [*others, *below], out),
            ([below], [others], false) => context.kernel.add_sides::<false>(bits, [*others, *below], out),
            (below, others, true) => context.kernel.add_columns::<true>(bits, [others, below], out),
            (below, others, false) => context.kernel.add_columns::<false>(bits, [others, below], out),
        }
        Ok(())
    }

    fn size(&self) -> Size {
        Size::Exact(8 * self.columns.below.len() + packed_bytes(self.n, 1))
    }
}
