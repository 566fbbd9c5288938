//! What PowerSGD and GradZip share: a matrix M of m x L becomes P Rᵀ with r columns each, in two exchanges that both add
//! up in flight. With R from the step before: P = M a(R), averaged; R = Mᵀ b(P), averaged. The methods differ in a and b.
//!
//! Vectors, and matrices so small that both factors hold no fewer values than they, are sent as they are in the second
//! exchange; they send nothing in the first.
//!
//! Payload: round 0 P, r vectors of m values; round 1 R, r vectors of L values; f32. Only products of P and R matter, so
//! scales are moved from P to R where that keeps numbers away from the ends of f32. Where R, the sum of all ranks' or what
//! is left of the gradient would still lie beyond them, a rank sends a share of its R instead: a step from zero towards
//! P Rᵀ is contractive where P Rᵀ is.
//!
//! What a rank's own message means (its error feedback) is P R_ownᵀ, of which the mean over ranks is what is decoded.

use super::matrix::{AddProduct, Strides, Times, Transposed, product_energy};
use crate::codec::{Codec, Context, EncodeError, ReadError, Shape, Size, Stats, Target};
use crate::kernels::key;
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

/// Largest value of R of which the sum over ranks, with its roundings, stays inside f32.
fn summand(world: u32) -> f32 {
    let rounding = if world > 1 { 1.0 - 1e-4 } else { 1.0 };
    (f64::from(f32::MAX) * rounding / f64::from(world.max(1))) as f32
}

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

    /// R of this rank into `values`; `most` is max |x|. Answers the energy of what is sent.
    fn encode_right(&mut self, x: &[f32], most: f32, context: &Context) -> f64 {
        let Self { shape, rank, left, factor, values, .. } = self;
        values.resize(*rank * shape.cols, 0.0);
        // Without a reply to the first round there is no left factor: nothing is sent.
        factor.resize(*rank * shape.rows, 0.0);
        left.resize(*rank * shape.rows, 0.0);
        self.project(x, context);
        if !self.is_clear_of_the_ends(most, context) && !self.stays_inside(x, context, &mut vec![0.0; x.len()]) {
            self.send_a_share(x, context);
        }
        let Self { shape, left, values, .. } = self;
        product_energy((left, shape.rows), (values, shape.cols))
    }

    /// `values = Mᵀ b(P)`.
    fn project(&mut self, x: &[f32], context: &Context) {
        let Self { shape, factor, values, .. } = self;
        context.kernel.run(Transposed { matrix: x, cols: shape.cols, left: factor, to: values });
    }

    /// Whether no sum of R, no product and nothing that is left can be beyond f32, by the largest values alone.
    fn is_clear_of_the_ends(&self, most: f32, context: &Context) -> bool {
        let Shape { rows, cols } = self.shape;
        let largest = |vector: &[f32]| vector.iter().fold(0, |max, value| key(*value).max(max));
        let vectors = self.left.chunks_exact(rows).zip(self.values.chunks_exact(cols));
        let (mut product, mut factor) = (0.0, 0);
        for (left, right) in vectors {
            let right = largest(right);
            factor = right.max(factor);
            product += f64::from(f32::from_bits(largest(left))) * f64::from(f32::from_bits(right));
        }
        factor <= key(summand(context.world)) && product + f64::from(most) < f64::from(f32::MAX)
    }

    /// A quarter of R, or of that and so on, so that everything stays inside f32.
    #[cold]
    fn send_a_share(&mut self, x: &[f32], context: &Context) {
        let (whole, mut buffer) = (self.factor.clone(), vec![0.0; x.len()]);
        // More quarters than f32 has.
        for _ in 0..140 {
            self.factor.iter_mut().for_each(|value| *value *= 0.25);
            self.project(x, context);
            if self.stays_inside(x, context, &mut buffer) {
                break;
            }
        }
        self.factor = whole;
    }

    /// Whether R's sum, the product and what is left are all inside f32, value by value.
    fn stays_inside(&mut self, x: &[f32], context: &Context, buffer: &mut [f32]) -> bool {
        let limit = key(summand(context.world));
        if self.values.iter().any(|value| key(*value) > limit) {
            return false;
        }
        // The product alone: none of its values may be cut, or energies would not be those of the factors.
        buffer.fill(0.0);
        let uncut = self.add(context, (1.0, buffer)).is_ok() && buffer.iter().all(|value| value.abs() < f32::MAX);
        buffer.copy_from_slice(x);
        uncut && self.add(context, (-1.0, buffer)).is_ok()
    }

    /// `out += scale left valuesᵀ`.
    fn add(&mut self, context: &Context, (scale, out): (f32, &mut [f32])) -> Result<(), ReadError> {
        let Self { shape, rank, left, values, .. } = self;
        left.resize(*rank * shape.rows, 0.0);
        let strides = Strides::vectors(shape.rows);
        AddProduct { left, strides, right: values, cols: shape.cols, scale, out }.checked(context.kernel)
    }
}

impl<H: Halves> Codec for Alternating<H> {
    fn encode(&mut self, x: &[f32], context: &Context, out: &mut Writer) -> Result<Energy, EncodeError> {
        let Stats { energy: compensated, max } = context.stats(x)?;
        let mut sent = 0.0;
        match (self.is_dense(), context.round) {
            (true, 0) => {}
            (true, _) => {
                out.f32s(x);
                sent = compensated;
            }
            (false, 0) => {
                self.encode_left(x, context);
                out.f32s(&self.values);
            }
            (false, _) => {
                sent = self.encode_right(x, max, context);
                out.f32s(&self.values);
            }
        }
        Ok(Energy { sent, compensated })
    }

    fn encode_taking(&mut self, x: &mut [f32], context: &Context, out: &mut Writer) -> Result<Energy, EncodeError> {
        let energy = self.encode(x, context, out)?;
        match self.is_dense() {
            true => x.fill(0.0),
            false => self.add(context, (-1.0, x))?,
        }
        Ok(energy)
    }

    fn decode(&mut self, from: &mut Reader<'_>, context: &Context, target: Target<'_>) -> Result<(), ReadError> {
        let (scale, out) = target.added();
        if self.is_dense() {
            return from.add_f32s("values", (scale, out));
        }
        let values = from.f32s("values", self.count(1))?;
        self.values.clear();
        self.values.extend(values);
        self.add(context, (scale, out))
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
            let rule = "it must be 0 or rank times columns";
            return Err(ReadError::field("length of the warm start", len as u64, rule));
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
