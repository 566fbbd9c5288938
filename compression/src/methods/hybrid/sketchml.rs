//! SketchML (Jiang et al. 2018, "SketchML: accelerating distributed machine learning with data sketches", section 3; GRACE
//! 3.3): of the values that are not 0 the indices are sent, and for each the number of its bucket between quantiles; positive
//! and negative values apart.
//!
//! Quantiles are those of a sample of magnitudes; a bucket stands for the mean of its values. The paper takes the middle of its
//! two ends, which in the last bucket of a heavy tail is farther from most values than 0 is. With `rows` above 0 the bucket
//! numbers go through a MinMaxSketch: each is inserted into `rows` hash tables that keep the least number, and the largest over
//! tables is what is read. Collisions thereby make magnitudes smaller,
//! never larger, and never flip a sign. Buckets are cut into `groups`, each with its own indices and tables, which bounds
//! by how much. With 0 rows the numbers are packed as they are.
//!
//! The paper codes indices as differences in one to four bytes; here they are a set in its least coding (gaps included).

use super::super::sparsification::sparse::most_index_bytes;
use super::signed;
use crate::Energy;
use crate::codec::{Codec, Context, EncodeError, ReadError, Shape, Size, Target};
use crate::entry::Entry;
use crate::random::Stream;
use crate::wire::{
    Reader, Writer, add_finite, levels_width, pack, packed_bytes, read_indices, unpack, write_indices_least,
};
use flexcomm_domain::spec::{Values, compressors};

pub(super) const ENTRY: Entry = Entry {
    info: &compressors::SKETCHML,
    code: 115,
    examples: &["", "rows=0", "buckets=17,rows=3,columns=0.5,groups=4", "buckets=2,rows=1,groups=1"],
    build: |values, shape| Box::new(SketchMl::new(values, shape)),
};

const MOST_ROWS: usize = 8;

/// Magnitudes that quantiles are taken from.
const SAMPLES: usize = 32_768;

#[derive(Debug)]
struct SketchMl {
    n: usize,
    buckets: usize,
    rows: usize,
    columns: f64,
    groups: usize,
    /// Magnitudes of either sign.
    sample: [Vec<f32>; 2],
    /// The inner ends of the buckets of either sign, ascending.
    ends: [Vec<f32>; 2],
    /// What each bucket of either sign stands for.
    means: [Vec<f32>; 2],
    /// Sums of magnitudes and numbers of values, by code.
    sums: Vec<(f64, u64)>,
    /// Per value: 0 for zero, else 1 + bucket + buckets if negative.
    codes: Vec<u16>,
    /// Of one sign and group.
    indices: Vec<u32>,
    levels: Vec<u8>,
    table: Vec<u8>,
}

impl SketchMl {
    fn new(values: &Values, shape: Shape) -> Self {
        let (n, buckets, groups) = (shape.values(), values.whole(0), values.whole(3).min(values.whole(0)));
        let [room, half] = [n, SAMPLES.min(n)];
        Self {
            n,
            buckets,
            rows: values.whole(1),
            columns: values.number(2),
            groups,
            sample: [Vec::with_capacity(half), Vec::with_capacity(half)],
            ends: [vec![0.0; buckets - 1], vec![0.0; buckets - 1]],
            means: [vec![0.0; buckets], vec![0.0; buckets]],
            sums: vec![(0.0, 0); 1 + 2 * buckets],
            codes: Vec::with_capacity(n),
            indices: Vec::with_capacity(room),
            levels: Vec::with_capacity(room),
            table: Vec::with_capacity(values.whole(1) * (room + 1)),
        }
    }

    /// Buckets of a group.
    fn width(&self) -> usize {
        self.buckets.div_ceil(self.groups)
    }

    /// Places of each table for k values.
    fn places(&self, k: usize) -> usize {
        ((k as f64 * self.columns).ceil() as usize).clamp(1, k.max(1))
    }

    /// Ends of the buckets.
    fn quantiles(&mut self) {
        for (sample, ends) in self.sample.iter_mut().zip(&mut self.ends) {
            sample.sort_unstable_by(f32::total_cmp);
            // What the sample has missed is one bucket.
            let quantile = |j: usize| sample.get(j * sample.len().saturating_sub(1) / self.buckets).copied();
            ends.iter_mut().zip(1..).for_each(|(end, j)| *end = quantile(j).unwrap_or(f32::INFINITY));
        }
    }

    /// Codes of all values, and the means of their buckets.
    fn classify(&mut self, x: &[f32]) {
        let Self { ends, codes, buckets, sums, means, .. } = self;
        codes.clear();
        sums.fill((0.0, 0));
        codes.extend(x.iter().map(|x| {
            let side = usize::from(*x < 0.0);
            let bucket = ends[side].partition_point(|end| *end <= x.abs());
            let code = if *x == 0.0 { 0 } else { 1 + bucket + side * *buckets };
            sums[code].0 += f64::from(x.abs());
            sums[code].1 += 1;
            code as u16
        }));
        let means = means.iter_mut().flatten();
        means.zip(&sums[1..]).for_each(|(mean, (sum, count))| *mean = (sum / (*count).max(1) as f64) as f32);
    }

    /// One sign's group: k, indices, then tables or levels. Answers the energy that a reader sees.
    fn write_group(&mut self, (side, group): (usize, usize), context: &Context, out: &mut Writer) -> f64 {
        let first = group * self.width();
        let last = (first + self.width()).min(self.buckets);
        let codes = (1 + side * self.buckets + first) as u16..(1 + side * self.buckets + last) as u16;
        self.indices.clear();
        self.levels.clear();
        for (i, code) in (0..).zip(&self.codes) {
            if codes.contains(code) {
                self.indices.push(i);
                self.levels.push((code - codes.start) as u8);
            }
        }
        out.u32(self.indices.len() as u32);
        write_indices_least(&self.indices, self.n, out);
        self.sketch(context, out);
        let means = &self.means[side];
        self.levels.iter().map(|level| f64::from(means[first + usize::from(*level)]).powi(2)).sum()
    }

    /// Writes the levels, or their tables; then `levels` is what a reader gets back.
    fn sketch(&mut self, context: &Context, out: &mut Writer) {
        let bits = levels_width(self.width() as u64);
        if bits == 0 {
            return;
        }
        if self.rows == 0 {
            return pack(&self.levels, bits, out);
        }
        let (places, most) = (self.places(self.indices.len()), (self.width() - 1) as u8);
        let streams: [Stream; MOST_ROWS] = std::array::from_fn(|row| context.shared(row as u32));
        self.table.clear();
        self.table.resize(self.rows * places, most);
        for (stream, table) in streams.iter().zip(self.table.chunks_mut(places)) {
            for (index, level) in self.indices.iter().zip(&self.levels) {
                let at = &mut table[stream.place(*index, places)];
                *at = (*at).min(*level);
            }
        }
        pack(&self.table, bits, out);
        self.query(&streams, places);
    }

    /// `levels` of the indices, from the tables: the largest over rows.
    fn query(&mut self, streams: &[Stream], places: usize) {
        let Self { indices, levels, table, .. } = self;
        levels.clear();
        levels.extend(indices.iter().map(|index| {
            let found = streams.iter().zip(table.chunks(places)).map(|(stream, row)| row[stream.place(*index, places)]);
            found.max().unwrap_or(0)
        }));
    }

    /// The other side of [`Self::write_group`]: indices and levels.
    fn read_group(&mut self, from: &mut Reader<'_>, context: &Context, n: usize) -> Result<(), ReadError> {
        let k = from.u32("number of values")? as usize;
        read_indices(from, n, k, &mut self.indices)?;
        let bits = levels_width(self.width() as u64);
        self.levels.clear();
        self.levels.resize(k, 0);
        if bits == 0 {
            return Ok(());
        }
        if self.rows == 0 {
            return unpack(from, "bucket", bits, &mut self.levels);
        }
        let places = self.places(k);
        self.table.clear();
        self.table.resize(self.rows * places, 0);
        unpack(from, "table of buckets", bits, &mut self.table)?;
        let streams: [Stream; MOST_ROWS] = std::array::from_fn(|row| context.shared(row as u32));
        self.query(&streams, places);
        Ok(())
    }
}

impl Codec for SketchMl {
    fn encode(&mut self, x: &[f32], context: &Context, out: &mut Writer) -> Result<Energy, EncodeError> {
        let stats = context.stats(x)?;
        out.reserve(self.size().most());
        signed::sample(x, (SAMPLES.min(x.len()), context.own(0)), &mut self.sample);
        self.quantiles();
        self.classify(x);
        let mut sent = 0.0;
        for side in 0..2 {
            self.means[side].iter().for_each(|mean| out.f32(*mean));
            for group in 0..self.groups {
                sent += self.write_group((side, group), context, out);
            }
        }
        Ok(Energy { sent, compensated: stats.energy })
    }

    fn decode(&mut self, from: &mut Reader<'_>, context: &Context, target: Target<'_>) -> Result<(), ReadError> {
        let (scale, out) = target.added();
        for (side, sign) in [1.0, -1.0].into_iter().enumerate() {
            for j in 0..self.buckets {
                self.means[side][j] = from.scale("mean of a bucket")?;
            }
            for group in 0..self.groups {
                self.read_group(from, context, out.len())?;
                let first = group * self.width();
                for (i, level) in self.indices.iter().zip(&self.levels) {
                    let bucket = (first + usize::from(*level)).min(self.buckets - 1);
                    // A message that no encoder writes may name a value in several groups: it stays finite.
                    add_finite(&mut out[*i as usize], scale * sign * self.means[side][bucket])?;
                }
            }
        }
        Ok(())
    }

    fn draws_together(&self) -> bool {
        self.rows > 0
    }

    fn size(&self) -> Size {
        // Every value is in one group at most; a set costs no more than its bitmap.
        let bits = levels_width(self.width() as u64);
        let places = if self.rows == 0 { self.n } else { self.rows * (self.n + 2 * self.groups) };
        let sets = 2 * self.groups * (4 + most_index_bytes(self.n, self.n) + 1);
        Size::AtMost(8 * self.buckets + sets + packed_bytes(places, bits))
    }
}
