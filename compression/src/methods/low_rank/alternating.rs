//! What PowerSGD and GradZip share: a matrix M of m x L becomes P Rᵀ with r columns each, in two exchanges that both add
//! up in flight. With R from the step before: P = M a(R), averaged; R = Mᵀ b(P), averaged. The methods differ in a and b.
//!
//! Vectors, and matrices so small that both factors hold no fewer values than they, are sent as they are in the second
//! exchange; they send nothing in the first.
//!
//! Payload: round 0 P, r vectors of m values; round 1 R, r vectors of L values; f32. Only products of P and R matter, so
//! scales are moved from P to R where that keeps numbers away from the ends of f32.
//!
//! What a rank's own message means (its error feedback) is P R_ownᵀ, of which the mean over ranks is what is decoded.

use super::matrix::{AddProduct, Strides, Times, Transposed, product_energy};
use crate::codec::{Codec, Context, EncodeError, ReadError, Shape, Size};
use crate::wire::{Reader, Writer};
use crate::{Energy, kernels};

/// The two half steps.
pub(super) trait Halves: Send + std::fmt::Debug {
    /// a(R) times [`SHRINK`], in place; `len` values per vector. `start` gives the vectors of the first step again.
    fn right(&mut self, r: &mut [f32], len: usize, start: impl Fn(usize, &mut [f32]));

    /// From the mean P (times any number) in place the left factor, and b of it into `b`.
    fn left(&mut self, p: &mut [f32], len: usize, b: &mut [f32]);
}

/// P travels times this: sums of 256 ranks and 2^16 values of f32's largest stay inside f32.
pub(super) const SHRINK: f64 = 1.0 / (1u64 << 24) as f64;

#[derive(Debug)]
pub(super) struct Alternating<H> {
    halves: H,
    shape: Shape,
    /// 0: sent as it is.
    rank: usize,
    /// R of the last step, empty before the first.
    warm: Vec<f32>,
    /// The left factor between rounds and until the next step.
    left: Vec<f32>,
    /// a(R), then b(P).
    factor: Vec<f32>,
    /// What is sent, or arrives.
    values: Vec<f32>,
}

impl<H: Halves> Alternating<H> {
    pub(super) fn new(halves: H, rank: usize, shape: Shape) -> Self {
        let rank = rank.min(shape.rows).min(shape.cols);
        let saves = shape.is_matrix() && rank * (shape.rows + shape.cols) < shape.values();
        let rank = if saves { rank } else { 0 };
        // Zeros leave no warm start: it may come in any step.
        let warm = Vec::with_capacity(rank * shape.cols);
        let (left, factor, values) = Default::default();
        Self { halves, shape, rank, warm, left, factor, values }
    }

    fn is_dense(&self) -> bool {
        self.rank == 0
    }

    /// Values of the round's payload.
    fn count(&self, round: u32) -> usize {
        match (self.is_dense(), round) {
            (true, 0) => 0,
            (true, _) => self.shape.values(),
            (false, 0) => self.rank * self.shape.rows,
            (false, _) => self.rank * self.shape.cols,
        }
    }

    /// P of this rank into `values`.
    fn encode_left(&mut self, x: &[f32], context: &Context) {
        let Self { halves, shape, rank, warm, factor, values, .. } = self;
        let cols = shape.cols;
        let stream = Context { step: 0, ..*context }.shared(0);
        // Twelve uniform values make a normal one (Irwin-Hall), by exact arithmetic: the same on every machine.
        let normal = |i: usize| (0..12).map(|j| stream.uniform((12 * i + j) as u32)).sum::<f32>() - 6.0;
        let start = |k: usize, to: &mut [f32]| (k * cols..).zip(to).for_each(|(i, to)| *to = normal(i));
        factor.clear();
        factor.extend_from_slice(warm);
        if warm.is_empty() {
            factor.resize(*rank * cols, 0.0);
        }
        halves.right(factor, cols, start);
        values.resize(*rank * shape.rows, 0.0);
        let strides = Strides::vectors(shape.rows);
        context.kernel.run(Times { matrix: x, cols, right: factor, to: values, strides });
    }

    /// R of this rank into `values`.
    fn encode_right(&mut self, x: &[f32], context: &Context) -> f64 {
        let Self { shape, rank, left, factor, values, .. } = self;
        values.resize(*rank * shape.cols, 0.0);
        // Without a reply to the first round there is no left factor: nothing is sent.
        factor.resize(*rank * shape.rows, 0.0);
        left.resize(*rank * shape.rows, 0.0);
        context.kernel.run(Transposed { matrix: x, cols: shape.cols, left: factor, to: values });
        values.iter_mut().for_each(|value| *value = value.clamp(-f32::MAX, f32::MAX));
        product_energy((left, shape.rows), (values, shape.cols))
    }

    /// `out += scale left valuesᵀ`.
    fn add(&mut self, context: &Context, (scale, out): (f32, &mut [f32])) -> bool {
        let Self { shape, rank, left, values, .. } = self;
        left.resize(*rank * shape.rows, 0.0);
        let strides = Strides::vectors(shape.rows);
        context.kernel.run(AddProduct { left, strides, right: values, cols: shape.cols, scale, out })
    }
}

impl<H: Halves> Codec for Alternating<H> {
    fn encode(&mut self, x: &[f32], context: &Context, out: &mut Writer) -> Result<Energy, EncodeError> {
        let fed = context.stats(x)?.energy;
        let mut sent = 0.0;
        match (self.is_dense(), context.round) {
            (true, 0) => {}
            (true, _) => {
                out.f32s(x);
                sent = fed;
            }
            (false, 0) => {
                self.encode_left(x, context);
                out.f32s(&self.values);
            }
            (false, _) => {
                sent = self.encode_right(x, context);
                out.f32s(&self.values);
            }
        }
        Ok(Energy { sent, fed })
    }

    fn encode_taking(&mut self, x: &mut [f32], context: &Context, out: &mut Writer) -> Result<Energy, EncodeError> {
        let energy = self.encode(x, context, out)?;
        if self.is_dense() {
            x.fill(0.0);
        } else if !self.add(context, (-1.0, x)) {
            let (what, value, rule) = ("value", f64::INFINITY, "it must be finite");
            return Err(EncodeError::Own(ReadError::Number { what, value, rule }));
        }
        Ok(energy)
    }

    fn decode_add(
        &mut self,
        from: &mut Reader<'_>,
        context: &Context,
        (scale, out): (f32, &mut [f32]),
    ) -> Result<(), ReadError> {
        let values = from.f32s("values", self.count(1))?;
        if self.is_dense() {
            out.iter_mut().zip(values).for_each(|(out, value)| *out += scale * value);
        } else {
            self.values.clear();
            self.values.extend(values);
            if !self.add(context, (scale, out)) {
                let (what, value, rule) = ("value", f64::INFINITY, "it must be finite");
                return Err(ReadError::Number { what, value, rule });
            }
        }
        Ok(())
    }

    fn size(&self) -> Size {
        Size::Exact(4 * self.count(1))
    }

    fn rounds(&self) -> u32 {
        2
    }

    fn round_size(&self, round: u32) -> Size {
        Size::Exact(4 * self.count(round))
    }

    fn reply(&mut self, sum: &mut Reader<'_>, context: &Context, scale: f32) -> Result<(), ReadError> {
        let values = sum.f32s("factor", self.count(context.round))?;
        if self.is_dense() {
            return Ok(());
        }
        if context.round == 0 {
            self.left.clear();
            self.left.extend(values.map(|value| value * scale));
            self.factor.resize(self.left.len(), 0.0);
            self.halves.left(&mut self.left, self.shape.rows, &mut self.factor);
        // A gradient of zeros says nothing of the next one: the start stays warm.
        } else if values.clone().any(|value| value * scale != 0.0) {
            self.warm.clear();
            self.warm.extend(values.map(|value| value * scale));
        }
        Ok(())
    }

    fn save(&self, out: &mut Writer) {
        out.u32(self.warm.len() as u32);
        out.f32s(&self.warm);
    }

    fn restore(&mut self, from: &mut Reader<'_>) -> Result<(), ReadError> {
        let len = from.u32("length of the warm start")? as usize;
        if len != 0 && len != self.rank * self.shape.cols {
            let (what, value) = ("length of the warm start", len as u64);
            return Err(ReadError::Field { what, value, rule: "it must be 0 or rank times columns" });
        }
        let values = from.f32s("warm start", len)?;
        self.warm.clear();
        self.warm.extend(values);
        Ok(())
    }
}

/// Σ x² of all vectors, for those who bring them to a common scale.
pub(super) fn total(vectors: &[f32]) -> f64 {
    kernels::energy(vectors)
}
