//! GradiVeQ (Yu et al. 2018): the gradient is cut into slices of K values, which are projected on the d leading principal
//! components of earlier slices. A linear code: compressed slices add up in flight.
//!
//! A period is one step sent as it is, from whose mean gradient every rank computes the same mean slice μ and the
//! components U (eigenvectors of the slices' covariance; one U per tensor, section 3: correlations hold across a
//! layer's slices and over time), and then `every` steps that send c = Uᵀ(g − μ); decompressed U c + μ.
//! U has columns of norm √K here and c is divided by √K, so that no value of c leaves the range of those in the gradient.
//!
//! Tensors that would not become smaller are always sent as they are, and those of too few whole slices to learn from: W must
//! be more than d, since fewer span no d directions, and at least 2 (K − d) / d. Of slices that have nothing in common, a mean over W
//! and any d directions leave (1 − d/K)(1 + 1/W) of the energy: at most 1 − d/(2K) from there on.
//!
//! Payload, f32: as it is: n values. Compressed: 1 (the sum counts messages, for μ), then d values per slice; the last
//! slice is filled up with zeros. Which of the two it is follows from the step's number, the same on all ranks.

use super::eigen::Eigen;
use super::matrix::{AddProduct, Strides, Times, dot64};
use crate::codec::{Codec, Context, EncodeError, ReadError, Shape, Size, Target};
use crate::entry::Entry;
use crate::kernels::Work;
use crate::wire::{Reader, Writer};
use crate::{Energy, Kernel, kernels};
use flexcomm_domain::spec::{Values, compressors};

pub(super) const ENTRY: Entry = Entry {
    info: &compressors::GRADIVEQ,
    code: 147,
    examples: &["d=16,slice=128", "d=2,slice=8,every=2", "d=1,slice=3,every=1"],
    build: |values, shape| Box::new(GradiVeQ::new(values, shape)),
};

#[derive(Debug, Default)]
struct GradiVeQ {
    n: usize,
    slice: usize,
    kept: usize,
    every: u64,
    /// The step whose mean gradient the basis is of.
    learned: Option<u64>,
    /// U √K, d vectors of K values; then μ. Empty before the first period.
    basis: Vec<f32>,
    /// U / √K, and what it makes of μ.
    forward: Vec<f32>,
    shift: Vec<f32>,
    values: Vec<f32>,
    /// U √K · μ per component, and the last slice.
    along: Vec<f64>,
    tail: Vec<f64>,
    /// Of learning: the mean slice, and one slice around it.
    middle: Vec<f64>,
    moved: Vec<f64>,
    eigen: Eigen,
}

impl GradiVeQ {
    fn new(values: &Values, shape: Shape) -> Self {
        let (kept, slice, every) = (values.whole(0), values.whole(1), values.whole(2) as u64);
        let (along, tail) = (Vec::with_capacity(kept), Vec::with_capacity(slice));
        Self { n: shape.values(), slice, kept, every, along, tail, ..Self::default() }
    }

    fn slices(&self) -> usize {
        self.n.div_ceil(self.slice)
    }

    fn compressed_count(&self) -> usize {
        1 + self.slices() * self.kept
    }

    /// Whether it is never compressed: by the tensor's length and the parameters, so that all ranks agree.
    fn never(&self) -> bool {
        let (whole, kept) = (self.n / self.slice, self.kept);
        let teaches = whole > kept && whole * kept >= 2 * self.slice.saturating_sub(kept);
        !teaches || self.compressed_count() >= self.n
    }

    /// Whether this step is compressed: it is one of the `every` that follow the one that was learned from.
    fn compresses(&self, context: &Context) -> bool {
        !self.never() && self.learned.is_some_and(|at| context.step > at && context.step - at <= self.every)
    }

    fn count(&self, context: &Context) -> usize {
        if self.compresses(context) { self.compressed_count() } else { self.n }
    }

    /// Slice by slice.
    fn strides(&self) -> Strides {
        Strides { by_row: self.kept, by_vector: 1 }
    }

    /// `forward` and `shift` from `basis`.
    fn prepare(&mut self, kernel: Kernel) {
        let (basis, mean) = self.basis.split_at(self.kept * self.slice);
        self.forward.clear();
        self.forward.extend(basis.iter().map(|value| value / self.slice as f32));
        self.shift.resize(self.kept, 0.0);
        let strides = Strides { by_row: self.kept, by_vector: 1 };
        kernel.run(Times { matrix: mean, cols: self.slice, right: &self.forward, to: &mut self.shift, strides });
    }

    /// Basis and mean of a gradient's slices.
    fn learn(&mut self, gradient: &[f32], kernel: Kernel) {
        let k = self.slice;
        let whole = gradient.len() / k;
        let Self { middle: mean, moved, eigen, .. } = self;
        mean.clear();
        mean.resize(k, 0.0);
        moved.resize(k, 0.0);
        for slice in gradient.chunks_exact(k) {
            mean.iter_mut().zip(slice).for_each(|(mean, x)| *mean += f64::from(*x) / whole as f64);
        }
        kernel.run(Covariance { slices: gradient, mean, moved, to: eigen.reset(k) });
        eigen.solve(kernel);
        let norm = (k as f64).sqrt();
        self.basis.clear();
        for rank in 0..self.kept {
            self.basis.extend(self.eigen.vector(rank).iter().map(|v| (v * norm) as f32));
        }
        self.basis.extend(self.middle.iter().map(|v| *v as f32));
        self.prepare(kernel);
    }

    /// Components of x into `values`.
    fn project(&mut self, x: &[f32], kernel: Kernel) {
        let (count, strides) = (self.slices() * self.kept, self.strides());
        let Self { slice, kept, forward, shift, values, .. } = self;
        values.resize(count, 0.0);
        kernel.run(Times { matrix: x, cols: *slice, right: forward, to: values, strides });
        for components in values.chunks_exact_mut(*kept) {
            let moved = components.iter_mut().zip(&*shift);
            moved.for_each(|(c, shift)| *c = (*c - shift).clamp(-f32::MAX, f32::MAX));
        }
    }

    /// `out += scale (U c + count μ)`, c from `values`.
    fn add(&self, kernel: Kernel, (scale, messages): (f32, f32), out: &mut [f32]) -> Result<(), ReadError> {
        let (basis, mean) = self.basis.split_at(self.kept * self.slice);
        let weight = scale * messages;
        for slice in out.chunks_mut(self.slice) {
            slice.iter_mut().zip(mean).for_each(|(out, mean)| *out += weight * mean);
        }
        let (cols, left, strides) = (self.slice, &self.values[..], self.strides());
        AddProduct { left, strides, right: basis, cols, scale, out }.checked(kernel)
    }
}

impl Codec for GradiVeQ {
    fn encode(&mut self, x: &[f32], context: &Context, out: &mut Writer) -> Result<Energy, EncodeError> {
        let compensated = context.stats(x)?.energy;
        if !self.compresses(context) {
            out.f32s(x);
            return Ok(Energy { sent: compensated, compensated });
        }
        self.project(x, context.kernel);
        out.f32(1.0);
        out.f32s(&self.values);
        Ok(Energy { sent: self.energy(), compensated })
    }

    fn decode(&mut self, from: &mut Reader<'_>, context: &Context, target: Target<'_>) -> Result<(), ReadError> {
        let (scale, out) = target.added();
        if !self.compresses(context) {
            return from.add_f32s("values", (scale, out));
        }
        let messages = from.f32("count of messages")?;
        let values = from.f32s("components", self.compressed_count() - 1)?;
        self.values.clear();
        self.values.extend(values);
        self.add(context.kernel, (scale, messages), out)
    }

    /// Steps are learned from or compressed by their number.
    fn draws_together(&self) -> bool {
        true
    }

    fn size(&self) -> Size {
        if self.never() { Size::Exact(4 * self.n) } else { Size::AtMost(4 * self.n) }
    }

    fn summed_size(&self, context: &Context) -> usize {
        4 * self.count(context)
    }

    fn reply(&mut self, sum: &mut Reader<'_>, context: &Context, scale: f32) -> Result<(), ReadError> {
        let values = sum.f32s("values", self.count(context))?;
        if self.never() || self.compresses(context) {
            return Ok(());
        }
        let mut mean = std::mem::take(&mut self.values);
        mean.clear();
        mean.extend(values.map(|value| value * scale));
        self.learn(&mean, context.kernel);
        self.values = mean;
        self.learned = Some(context.step);
        Ok(())
    }

    fn wants_reply(&self) -> bool {
        !self.never()
    }

    fn save(&self, out: &mut Writer) {
        out.u64(self.learned.unwrap_or(0));
        out.u32(self.basis.len() as u32);
        out.f32s(&self.basis);
    }

    fn restore(&mut self, from: &mut Reader<'_>) -> Result<(), ReadError> {
        let learned = from.u64("step of the basis")?;
        let len = from.u32("length of the basis")? as usize;
        if len != 0 && len != (self.kept + 1) * self.slice {
            return Err(ReadError::field("length of the basis", len as u64, "it must be 0 or (d + 1) * slice"));
        }
        if len == 0 && learned != 0 {
            return Err(ReadError::field("step of the basis", learned, "it must be 0 when there is no basis"));
        }
        let values = from.f32s("basis", len)?;
        self.basis.clear();
        self.basis.extend(values);
        self.learned = (len > 0).then_some(learned);
        if len > 0 {
            self.prepare(Kernel::best());
        }
        Ok(())
    }
}

impl GradiVeQ {
    /// ‖C(x)‖² from the components: Σ (‖U c‖² + 2 (U c)·μ + ‖μ‖²), the last slice by its values, since it is cut.
    fn energy(&mut self) -> f64 {
        let (k, kept) = (self.slice, self.kept);
        let whole = self.n / k;
        let (basis, mean) = self.basis.split_at(kept * k);
        let (along, tail) = (&mut self.along, &mut self.tail);
        along.clear();
        along.extend(basis.chunks_exact(k).map(|u| dot64(u, mean)));
        let own = kernels::energy(mean);
        let mut sum = 0.0;
        for components in self.values.chunks_exact(kept).take(whole) {
            let squares: f64 = components.iter().map(|c| f64::from(*c).powi(2)).sum();
            let cross: f64 = components.iter().zip(&*along).map(|(c, a)| f64::from(*c) * a).sum();
            sum += squares * k as f64 + 2.0 * cross + own;
        }
        let components = self.values.chunks_exact(kept).skip(whole).flatten();
        tail.clear();
        tail.extend(mean[..self.n - whole * k].iter().map(|v| f64::from(*v)));
        for (c, u) in components.zip(basis.chunks_exact(k)) {
            tail.iter_mut().zip(u).for_each(|(t, u)| *t += f64::from(*c) * f64::from(*u));
        }
        sum.max(0.0) + tail.iter().map(|t| t * t).sum::<f64>()
    }
}

/// Covariance of slices around their mean.
struct Covariance<'a> {
    slices: &'a [f32],
    mean: &'a [f64],
    moved: &'a mut [f64],
    to: &'a mut [f64],
}

impl Work for Covariance<'_> {
    #[inline(always)]
    fn run(self) {
        let (k, moved) = (self.mean.len(), self.moved);
        for slice in self.slices.chunks_exact(k) {
            for ((to, x), mean) in moved.iter_mut().zip(slice).zip(self.mean) {
                *to = f64::from(*x) - mean;
            }
            for (row, factor) in self.to.chunks_exact_mut(k).zip(&*moved) {
                row.iter_mut().zip(&*moved).for_each(|(to, x)| *to += factor * x);
            }
        }
    }
}
