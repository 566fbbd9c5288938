//! QSGD (Alistarh et al. 2017): each value of a bucket becomes ‖x‖ sign(x) l/s, where l is one of the two whole numbers
//! next to s|x|/‖x‖, drawn so that the mean is x.
//!
//! Section 3.1 defines it for a whole vector with the Euclidean norm (`bucket=0`), section 4 splits vectors into
//! buckets with a norm each and section 5 also takes the largest magnitude as norm. GRACE (section 3.1) prints the two
//! chances the wrong way round; with them the mean would not be x.
//!
//! Payload, `coding=packed`: norms, f32 each; l + s as `levels(⌈log2(2s+1)⌉)`. `gamma` and `delta` (section 3.1, Code_s):
//! norms; bytes of what follows, u32; per value that is not 0 its distance from the one before (the first counts from
//! −1) in Elias' code, a sign bit, |l| in Elias' code; at last the distance to n.

use super::levels::{BLOCK, Bucketed, Codes, Scheme, Words, l2, max, multiplier};
use super::linear::Linear;
use crate::codec::{Codec, Context, EncodeError, ReadError, Size, Stats};
use crate::entry::Entry;
use crate::random::Stream;
use crate::wire::{BitReader, BitWriter, Reader, Writer, delta_bits, gamma_bits};
use crate::{Energy, Kernel};
use flexcomm_domain::spec::compressors;

pub(super) const ENTRY: Entry = Entry {
    info: &compressors::QSGD,
    code: 25,
    examples: &[
        "s=4",
        "s=1,bucket=0",
        "s=127,norm=max",
        "s=15,bucket=7,norm=max",
        "s=4,bucket=0,coding=gamma",
        "s=2,bucket=100,coding=delta",
    ],
    build: |values, shape| {
        let scheme = Uniform { s: values.whole(0) as u32, euclidean: values.whole(2) == 0 };
        let (n, bucket) = (shape.values(), values.whole(1));
        match values.whole(3) {
            0 => Box::new(Bucketed::new(scheme, n, bucket)),
            coding => Box::new(Sparse::new(scheme, (n, bucket), coding == 2)),
        }
    },
};

/// s equal steps of a norm.
#[derive(Debug, Clone, Copy)]
pub(super) struct Uniform {
    pub(super) s: u32,
    /// ‖x‖₂, else max |x|.
    pub(super) euclidean: bool,
}

impl Scheme for Uniform {
    type Rule = Linear;

    fn levels(&self) -> u64 {
        2 * u64::from(self.s) + 1
    }

    fn norm(&self, _x: &[f32], stats: Stats, _kernel: Kernel) -> f32 {
        if self.euclidean { l2(stats) } else { max(stats) }
    }

    fn is_of_max(&self) -> bool {
        !self.euclidean
    }

    fn step(&self, norm: f32) -> f32 {
        norm / self.s as f32
    }

    fn most(&self) -> f32 {
        self.s as f32
    }

    fn rule(&self, norm: f32, random: Stream) -> Linear {
        Linear::symmetric(self.step(norm), self.s, random)
    }
}

/// With Elias' codes of what is not 0.
#[derive(Debug)]
struct Sparse {
    scheme: Uniform,
    buckets: Bucketed<Uniform>,
    n: usize,
    bucket: usize,
    delta: bool,
    bits: Writer,
}

impl Sparse {
    fn new(scheme: Uniform, (n, bucket): (usize, usize), delta: bool) -> Self {
        let buckets = Bucketed::new(scheme, n, bucket);
        Self {
            scheme,
            buckets,
            n,
            bucket: if bucket == 0 { n.max(1) } else { bucket },
            delta,
            bits: Writer::from_vec(Vec::new()),
        }
    }

    /// Appends norms to `out` and codes to `bits`.
    fn fill(&mut self, x: &[f32], context: &Context, out: &mut Writer) -> Result<Energy, EncodeError> {
        let (mut energy, mut codes, mut words) = (Energy::default(), [0; BLOCK], Words::NONE);
        let (mut bits, mut before, random) = (self.bits.bits(), 0, context.own(0));
        for at in (0..x.len()).step_by(self.bucket) {
            let (norm, compensated) = self.buckets.open(x, at, context)?;
            out.f32(norm);
            let (rule, step) = (self.scheme.rule(norm, random), f64::from(self.scheme.step(norm)));
            energy.compensated += compensated;
            for (i, x) in x[at..x.len().min(at + self.bucket)].chunks(BLOCK).enumerate() {
                let (first, codes) = (at + i * BLOCK, &mut codes[..x.len()]);
                let all = Codes { rule, random, x, first: first as u32, codes: &mut *codes, words: &mut words };
                energy.sent += step * step * all.on(context.kernel);
                for (i, code) in codes.iter().enumerate().filter(|(_, code)| u32::from(**code) != self.scheme.s) {
                    let (place, level) = ((first + i) as u64 + 1, i64::from(*code) - i64::from(self.scheme.s));
                    put(&mut bits, self.delta, place - before);
                    bits.put(u64::from(level < 0), 1);
                    put(&mut bits, self.delta, level.unsigned_abs());
                    before = place;
                }
            }
        }
        put(&mut bits, self.delta, x.len() as u64 + 1 - before);
        bits.finish();
        Ok(energy)
    }
}

fn put(bits: &mut BitWriter<'_>, delta: bool, value: u64) {
    if delta { bits.delta(value) } else { bits.gamma(value) }
}

fn get(bits: &mut BitReader<'_>, delta: bool, what: &'static str) -> Result<u64, ReadError> {
    if delta { bits.delta(what) } else { bits.gamma(what) }
}

impl Codec for Sparse {
    fn encode(&mut self, x: &[f32], context: &Context, out: &mut Writer) -> Result<Energy, EncodeError> {
        let (start, most) = (out.len(), self.size().most());
        // Their length hangs on what is drawn: no step may be the first to find too little room.
        self.bits.clear();
        self.bits.reserve(most);
        out.reserve(most);
        let energy = self.fill(x, context, out).inspect_err(|_| out.truncate(start))?;
        out.u32(self.bits.len() as u32);
        out.raw(self.bits.bytes());
        Ok(energy)
    }

    fn decode_add(
        &mut self,
        from: &mut Reader<'_>,
        _context: &Context,
        (scale, out): (f32, &mut [f32]),
    ) -> Result<(), ReadError> {
        let norms = from.f32s("norm", out.len().div_ceil(self.bucket))?;
        for norm in norms.clone() {
            multiplier(scale, (norm, self.scheme.step(norm)), self.scheme.most())?;
        }
        let bytes = from.u32("bytes of codes")? as usize;
        let mut bits = from.bits("codes", bytes)?;
        let (mut place, end) = (0, out.len() as u64 + 1);
        let (mut steps, mut opened, mut step) = (norms.map(|norm| scale * self.scheme.step(norm)), 0, 0.0);
        loop {
            place += get(&mut bits, self.delta, "distance")?;
            if place >= end {
                break;
            }
            let negative = bits.get("sign", 1)? == 1;
            let level = get(&mut bits, self.delta, "level")?;
            if level > u64::from(self.scheme.s) {
                return Err(ReadError::Field { what: "level", value: level, rule: "no such level" });
            }
            let at = place as usize - 1;
            while opened <= at / self.bucket {
                step = steps.next().unwrap_or(0.0);
                opened += 1;
            }
            out[at] += if negative { -(level as f32) } else { level as f32 } * step;
        }
        if place > end {
            return Err(ReadError::Field { what: "distance", value: place, rule: "it leads beyond the end" });
        }
        bits.finish("codes")
    }

    fn size(&self) -> Size {
        // Most bits where no value is 0 and all levels take the longest code; distances of 1 take one bit.
        let (s, end) = (u64::from(self.scheme.s), self.n as u64 + 1);
        let code = |value| if self.delta { delta_bits(value) } else { gamma_bits(value) };
        let longest = (1..=s).map(code).max().unwrap_or(1);
        let bits = self.n as u64 * u64::from(2 + longest) + u64::from(code(end));
        Size::AtMost(4 * self.n.div_ceil(self.bucket) + 4 + bits.div_ceil(8) as usize)
    }
}
