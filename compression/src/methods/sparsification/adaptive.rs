//! Adaptive sparsification (Wangni et al. 2018, "Gradient sparsification for communication-efficient distributed
//! optimization"): value i is sent with probability p_i = min(lambda |x_i|, 1), as x_i / p_i. Unbiased, and of all unbiased ways
//! to send k values in the mean it has the least variance.
//!
//! lambda by algorithm 3: p = min(k |x| / ‖x‖₁, 1), then a few times what is not yet at 1 is scaled so that the sum is k again.
//!
//! Payload: what has p = 1 as it is; the rest, which are all ±1/lambda (section 3.3), as one number and signs.

use super::sparse::{self, Pick, most_index_bytes};
use crate::codec::{Codec, Context, EncodeError, ReadError, Shape, Size, Target};
use crate::entry::Entry;
use crate::kernels::{Kernel, Work, key};
use crate::wire::{Reader, Writer, add_finite, packed_bytes, read_indices, write_indices_least};
use crate::{Energy, Selection};
use flexcomm_domain::spec::{ValueType, Values, compressors};

pub(super) const ENTRY: Entry = Entry {
    info: &compressors::ADAPTIVE,
    code: 72,
    examples: &["k=0.05", "k=0.5", "k=3,rounds=0"],
    build: |values, shape| Box::new(Adaptive::new(values, shape)),
};

#[derive(Debug)]
struct Adaptive {
    n: usize,
    k: usize,
    rounds: usize,
    /// With p = 1.
    sure: Selection,
    /// With p below 1; their values are ±1/lambda.
    chance: Selection,
    /// Of a message that is decoded.
    indices: Vec<u32>,
}

impl Adaptive {
    fn new(values: &Values, shape: Shape) -> Self {
        let n = shape.values();
        let (sure, chance) = (sparse::selection_of(n, n), sparse::selection_of(n, n));
        let indices = Vec::with_capacity(n);
        Self { n, k: values.kept(0, n), rounds: values.whole(1), sure, chance, indices }
    }

    /// 1/lambda: magnitudes from here on are sent for sure. 0 for a tensor of zeros.
    fn magnitude(&self, kernel: Kernel, x: &[f32]) -> f32 {
        let k = self.k as f64;
        let mut below = kernel.run(Below { x, limit: u32::MAX });
        let mut magnitude = below.sum / k;
        for _ in 0..self.rounds {
            below = kernel.run(Below { x, limit: key(limited(magnitude)) });
            // The sum that is left for what is below 1; nothing below, or no room: done.
            let left = k - (x.len() as f64 - below.count as f64);
            if below.sum <= 0.0 || left <= 0.0 || below.sum / left >= magnitude {
                break;
            }
            magnitude = below.sum / left;
        }
        limited(magnitude)
    }
}

/// A positive finite f32, or 0 for 0.
fn limited(magnitude: f64) -> f32 {
    if magnitude <= 0.0 { 0.0 } else { (magnitude.min(f64::from(f32::MAX)) as f32).max(f32::from_bits(1)) }
}

impl Codec for Adaptive {
    fn encode(&mut self, x: &[f32], context: &Context, out: &mut Writer) -> Result<Energy, EncodeError> {
        let stats = context.stats(x)?;
        out.reserve(self.size().most());
        let magnitude = self.magnitude(context.kernel, x);
        let Self { sure, chance, .. } = self;
        sure.reset(x.len());
        chance.reset(x.len());
        let limit = key(magnitude);
        if magnitude > 0.0 {
            context.kernel.run(Pick { x, selection: sure, admits: |_, x| key(x) >= limit });
            // A word of 32 bits is below p 2^32 with probability p, up to 2^-32.
            let (stream, scale) = (context.own(0), 4_294_967_296.0 / f64::from(magnitude));
            let chosen = |i: u32, x: f32| {
                let likely = f64::from(stream.word(i)) < f64::from(x.abs()) * scale;
                likely & (key(x) < limit)
            };
            context.kernel.run(Pick { x, selection: chance, admits: chosen });
        }
        chance.values.iter_mut().for_each(|value| *value = magnitude.copysign(*value));
        out.f32(magnitude);
        out.u32(sure.len() as u32);
        write_indices_least(sure.indices(), x.len(), out);
        out.f32s(sure.values());
        out.u32(chance.len() as u32);
        write_indices_least(chance.indices(), x.len(), out);
        write_signs(chance.values(), out);
        Ok(Energy { sent: sure.energy() + chance.energy(), compensated: stats.energy })
    }

    fn encode_taking(&mut self, x: &mut [f32], context: &Context, out: &mut Writer) -> Result<Energy, EncodeError> {
        let energy = self.encode(x, context, out)?;
        self.sure.indices().iter().for_each(|i| x[*i as usize] = 0.0);
        self.chance.indices().iter().zip(self.chance.values()).for_each(|(i, value)| x[*i as usize] -= value);
        Ok(energy)
    }

    fn decode(&mut self, from: &mut Reader<'_>, _: &Context, target: Target<'_>) -> Result<(), ReadError> {
        let (scale, out) = target.added();
        let magnitude = from.scale("magnitude")?;
        sparse::decode_add(from, (&mut self.indices, ValueType::F32), (scale, &mut *out))?;
        let k = from.u32("number of signs")? as usize;
        read_indices(from, out.len(), k, &mut self.indices)?;
        let mut signs = from.bits("signs", packed_bytes(k, 1))?;
        for i in &self.indices {
            let value = if signs.get("signs", 1)? == 1 { -magnitude } else { magnitude };
            // A value may be named in both lists by a message that no encoder writes: it stays finite.
            add_finite(&mut out[*i as usize], scale * value)?;
        }
        signs.finish("signs")
    }

    fn size(&self) -> Size {
        // Every value is in one of the two, and costs more among the sure ones; the other set may be as large in indices.
        Size::AtMost(12 + 2 * most_index_bytes(self.n, self.n) + 4 * self.n + packed_bytes(self.n, 1))
    }
}

/// One bit each, set for negative values.
pub(in crate::methods) fn write_signs(values: &[f32], out: &mut Writer) {
    let bits = out.room(packed_bytes(values.len(), 1));
    for (byte, group) in bits.iter_mut().zip(values.chunks(8)) {
        *byte = group.iter().enumerate().fold(0, |byte, (i, value)| byte | u8::from(*value < 0.0) << i);
    }
}

/// Σ |x| and count of what is below a limit.
struct Below<'a> {
    x: &'a [f32],
    limit: u32,
}

#[derive(Debug, Clone, Copy, Default)]
struct Sums {
    sum: f64,
    count: u64,
}

const LANES: usize = 8;

impl Work<Sums> for Below<'_> {
    #[inline(always)]
    fn run(self) -> Sums {
        let (mut sums, mut counts) = ([0.0f64; LANES], [0u32; LANES]);
        for chunk in self.x.chunks(LANES) {
            for (lane, value) in chunk.iter().enumerate() {
                let below = key(*value) < self.limit;
                sums[lane] += if below { f64::from(value.abs()) } else { 0.0 };
                counts[lane] += u32::from(below);
            }
        }
        Sums { sum: sums.iter().sum(), count: counts.iter().map(|c| u64::from(*c)).sum() }
    }
}
