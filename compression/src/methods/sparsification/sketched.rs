//! Sketched-SGD (Ivkin et al. 2019, "Communication-efficient distributed SGD with sketching", algorithms 1 and 2): ranks add
//! up count-sketches of their gradients in flight; from the sum each rank recovers the same k large coordinates; then their
//! exact values add up in a second exchange.
//!
//! Recovery: `top` takes the k largest estimates. `heavymix` (algorithm 1) takes those whose estimated square is at least a
//! k-th of the estimated energy, and fills up with others at random.
//!
//! Round 0: rows x columns sums, f32. Value i goes to one column of each row, with a sign, both by hash: the same on every
//! rank, new in every step. Its estimate is the median over rows. Round 1: k values.
//!
//! A sketch that saves nothing, rows x columns + k >= n, is not made: round 0 is empty and round 1 carries all n values. So no
//! step sends more than the dense gradient.

use super::agreed::Agreed;
use super::sparse::Choose;
use super::subset::Subset;
use super::topk::Largest;
use crate::codec::{Codec, Context, EncodeError, ReadError, Shape, Size, Target};
use crate::entry::Entry;
use crate::kernels::{Work, key};
use crate::random::Stream;
use crate::wire::{Reader, Writer};
use crate::{Energy, Selection};
use flexcomm_domain::spec::{Values, compressors};

pub(super) const ENTRY: Entry = Entry {
    info: &compressors::SKETCHED,
    code: 74,
    examples: &["k=0.01,columns=0.1", "k=7,rows=4,columns=0.1,recover=heavymix", "k=0.3,rows=1", "k=0.3,columns=0.2"],
    build: |values, shape| Box::new(Sketched::new(values, shape)),
};

const MOST_ROWS: usize = 15;

#[derive(Debug)]
struct Sketched {
    rows: usize,
    columns: usize,
    heavymix: bool,
    /// Row by row; f64 so that no sum of f32 overflows.
    table: Vec<f64>,
    /// The sum over ranks.
    sum: Vec<f32>,
    estimates: Vec<f32>,
    largest: Largest,
    selection: Selection,
    subset: Subset,
    agreed: Agreed,
}

impl Sketched {
    fn new(values: &Values, shape: Shape) -> Self {
        let n = shape.values();
        let (rows, columns) = (values.whole(1), values.kept(2, n));
        let k = values.kept(0, n);
        // Of a sketch that is not made nothing is estimated.
        let saves = rows * columns + k < n;
        let (sums, estimates) = if saves { (rows * columns, n) } else { (0, 0) };
        Self {
            rows,
            columns,
            heavymix: values.whole(3) == 1,
            table: vec![0.0; sums],
            sum: vec![0.0; sums],
            estimates: vec![0.0; estimates],
            largest: Largest::new(k),
            selection: Selection::default(),
            subset: Subset::default(),
            agreed: if saves { Agreed::new(n, k) } else { Agreed::on_all(n) },
        }
    }

    fn is_dense(&self) -> bool {
        self.table.is_empty()
    }

    fn write_sketch(&mut self, x: &[f32], context: &Context, out: &mut Writer) {
        if self.is_dense() {
            return;
        }
        self.table.fill(0.0);
        for (row, table) in self.table.chunks_mut(self.columns.max(1)).enumerate() {
            let stream = context.shared(row as u32);
            for (i, x) in (0..).zip(x) {
                let (column, sign) = place(stream, i, self.columns);
                table[column] += f64::from(f32::from_bits(x.to_bits() ^ sign));
            }
        }
        // A sum beyond f32 would be refused as infinite.
        let most = f64::from(f32::MAX);
        self.table.iter().for_each(|sum| out.f32(sum.clamp(-most, most) as f32));
    }

    fn recover(&mut self, context: &Context) -> Result<(), ReadError> {
        let Self { rows, columns, sum, estimates, .. } = self;
        let streams: [Stream; MOST_ROWS] = std::array::from_fn(|row| context.shared(row as u32));
        context.kernel.run(Estimate { streams: &streams[..*rows], columns: *columns, sum, estimates });
        if self.heavymix && self.mix(context) {
            return Ok(());
        }
        let infinite = |_| ReadError::number("estimate", f32::INFINITY, "it must be finite");
        self.selection.reset(self.estimates.len());
        self.largest.choose(&self.estimates, context, &mut self.selection).map_err(infinite)?;
        self.agreed.indices.clear();
        self.agreed.indices.extend_from_slice(self.selection.indices());
        Ok(())
    }

    /// HEAVYMIX; false when there are k heavy ones anyway.
    fn mix(&mut self, context: &Context) -> bool {
        let mut energies = [0.0; MOST_ROWS];
        for (energy, row) in energies.iter_mut().zip(self.sum.chunks(self.columns.max(1))) {
            *energy = crate::kernels::energy(row);
        }
        let energies = &mut energies[..self.rows];
        energies.sort_unstable_by(f64::total_cmp);
        let Agreed { n, k, indices, .. } = &mut self.agreed;
        let least = energies[self.rows / 2] / *k as f64;
        let heavy = |estimate: f32| estimate != 0.0 && f64::from(estimate).powi(2) >= least;
        let count = self.estimates.iter().filter(|e| heavy(**e)).count();
        if count >= *k {
            return false;
        }
        // Of those that are not heavy, counted in their order.
        self.subset.draw(context.shared(MOST_ROWS as u32), *n - count, *k - count);
        let mut drawn = self.subset.indices.iter().copied().peekable();
        let mut light = 0;
        indices.clear();
        for (i, estimate) in (0..).zip(&self.estimates) {
            if heavy(*estimate) {
                indices.push(i);
                continue;
            }
            if drawn.next_if_eq(&light).is_some() {
                indices.push(i);
            }
            light += 1;
        }
        true
    }
}

/// Column, and the sign as the bit to flip: upper and lowest bits of one hash.
#[inline(always)]
fn place(stream: Stream, i: u32, columns: usize) -> (usize, u32) {
    let word = stream.word(i);
    (((u64::from(word) * columns as u64) >> 32) as usize, word << 31)
}

/// Medians over rows.
struct Estimate<'a> {
    streams: &'a [Stream],
    columns: usize,
    sum: &'a [f32],
    estimates: &'a mut [f32],
}

impl Work for Estimate<'_> {
    #[inline(always)]
    fn run(self) {
        let rows = self.streams.len();
        for (i, to) in (0..).zip(self.estimates) {
            let mut seen = [0.0f32; MOST_ROWS];
            for (row, stream) in self.streams.iter().enumerate() {
                let (column, sign) = place(*stream, i, self.columns);
                let mut value = f32::from_bits(self.sum[row * self.columns + column].to_bits() ^ sign);
                // Kept in order as they come: there are few.
                for before in &mut seen[..row] {
                    if value < *before {
                        std::mem::swap(before, &mut value);
                    }
                }
                seen[row] = value;
            }
            // Of an even number the smaller of the middle two: a mean of two could overflow.
            let (low, high) = (seen[(rows - 1) / 2], seen[rows / 2]);
            *to = if key(low) <= key(high) { low } else { high };
        }
    }
}

impl Codec for Sketched {
    fn encode(&mut self, x: &[f32], context: &Context, out: &mut Writer) -> Result<Energy, EncodeError> {
        let stats = context.stats(x)?;
        let mut energy = Energy { sent: 0.0, compensated: stats.energy };
        match context.round {
            0 => self.write_sketch(x, context, out),
            _ => energy.sent = self.agreed.encode(x, 2, out)?,
        }
        Ok(energy)
    }

    fn encode_taking(&mut self, x: &mut [f32], context: &Context, out: &mut Writer) -> Result<Energy, EncodeError> {
        let energy = self.encode(x, context, out)?;
        self.agreed.take(x);
        Ok(energy)
    }

    fn decode(&mut self, from: &mut Reader<'_>, _: &Context, target: Target<'_>) -> Result<(), ReadError> {
        self.agreed.decode_add(from, target.added())
    }

    fn size(&self) -> Size {
        Size::Exact(4 * self.agreed.k)
    }

    fn rounds(&self) -> u32 {
        2
    }

    fn round_size(&self, round: u32) -> Size {
        if round == 0 { Size::Exact(4 * self.table.len()) } else { self.size() }
    }

    fn reply(&mut self, sum: &mut Reader<'_>, context: &Context, _scale: f32) -> Result<(), ReadError> {
        if context.round > 0 {
            return sum.f32s("value", self.agreed.k).map(|_| ());
        }
        if self.is_dense() {
            return Ok(());
        }
        let sums = sum.f32s("sum of a sketch", self.sum.len())?;
        self.sum.iter_mut().zip(sums).for_each(|(to, sum)| *to = sum);
        self.recover(context)
    }

    fn wants_reply(&self) -> bool {
        false
    }
}
