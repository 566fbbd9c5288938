//! PowerSGD (Vogels et al. 2019, algorithm 1): P = M Q, added up over ranks; P̂ = orthogonalize(P); Q = Mᵀ P̂, added up; the
//! gradient is P̂ Qᵀ. M Q and Mᵀ P̂ are cuBLAS's ([`crate::Blas`]), all else are kernels. P̂ Qᵀ, with its few columns, is as
//! fast as memory either way, and must be the same float on every rank and in every memory: that one is a kernel too.
//!
//! Payloads are those of `compression` (round 0 P, round 1 Q, f32), equal up to the order of sums in the products.

use crate::feedback::ErrorFeedback;
use crate::indices;
use crate::launch::{launch, start};
use crate::random::Random;
use crate::workspace::{Target, Workspace, check, check_apart, check_count, require};
use crate::{Device, LaunchError, Span};

/// `to = op(a) op(b)`, matrices by columns as BLAS has them; op transposes where it is set.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Sgemm {
    /// Of a, of b.
    pub transposed: [bool; 2],
    /// Rows of the product, its columns, and what is summed over.
    pub m: u32,
    /// Columns of the product.
    pub n: u32,
    /// Terms of each sum.
    pub k: u32,
    /// f32, and the distance between columns.
    pub a: (Span, u32),
    /// As `a`.
    pub b: (Span, u32),
    /// As `a`.
    pub to: (Span, u32),
}

/// Multiplies matrices, in the order of a device's launches.
pub trait Gemm {
    /// Queues a product of f32.
    fn sgemm(&self, call: &Sgemm) -> Result<(), LaunchError>;
}

/// A layer as a matrix of rows x cols, row by row, of which `rank` columns are sent.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct LowRank {
    rows: u32,
    cols: u32,
    rank: u32,
}

/// A layer's memory on the device, f32: the right factor from step to step (zeros at first), the left one within a step,
/// and scratch. [`LowRank::bytes`] has their sizes.
#[derive(Debug, Clone, Copy)]
pub struct Factors {
    /// Q of the step before.
    pub warm: Span,
    /// P̂.
    pub left: Span,
    /// Nothing that lasts.
    pub scratch: Span,
}

const ALIGN: u64 = 4;

impl LowRank {
    /// None where both factors hold no fewer values than the matrix: such a layer is sent as it is.
    pub fn new(rows: u64, cols: u64, rank: u64) -> Result<Option<Self>, LaunchError> {
        check_count(rows.saturating_mul(cols))?;
        require(rank > 0, "rank", 0.0, "at least 1")?;
        let rank = rank.min(rows).min(cols);
        let saves = rows > 1 && cols > 1 && rank * (rows + cols) < rows * cols;
        Ok(saves.then_some(Self { rows: rows as u32, cols: cols as u32, rank: rank as u32 }))
    }

    /// Values of P, and of Q.
    pub fn counts(self) -> [u64; 2] {
        [self.rows, self.cols].map(|len| u64::from(self.rank) * u64::from(len))
    }

    /// Of `warm`, `left` and `scratch`.
    pub fn bytes(self) -> [u64; 3] {
        let [left, right] = self.counts();
        [4 * right, 4 * left, 4 * left.max(right)]
    }
}

/// A layer of the compensated gradient.
#[derive(Debug, Clone, Copy)]
pub struct Layer {
    /// Its sizes.
    pub shape: LowRank,
    /// rows x cols f32.
    pub matrix: Span,
    /// Its memory.
    pub factors: Factors,
}

impl Layer {
    fn check(&self) -> Result<(), LaunchError> {
        let (LowRank { rows, cols, .. }, factors) = (self.shape, &self.factors);
        let [warm, left, scratch] = self.shape.bytes();
        check("the layer", self.matrix, 4 * u64::from(rows) * u64::from(cols), ALIGN)?;
        check("the warm start", factors.warm, warm, ALIGN)?;
        check("the left factor", factors.left, left, ALIGN)?;
        check("the scratch memory", factors.scratch, scratch, ALIGN)?;
        check_apart(("the left factor", factors.left), ("the scratch memory", factors.scratch))
    }

    /// M times the factor in the scratch memory: a row-major matrix is its transpose by columns.
    fn times(&self, to: Span) -> Sgemm {
        let (LowRank { rows, cols, rank }, a, b) = (self.shape, self.matrix, self.factors.scratch);
        let transposed = [true, false];
        Sgemm { transposed, m: rows, n: rank, k: cols, a: (a, cols), b: (b, cols), to: (to, rows) }
    }

    /// Mᵀ times the factor in the scratch memory.
    fn transposed(&self, to: Span) -> Sgemm {
        let (LowRank { rows, cols, rank }, a, b) = (self.shape, self.matrix, self.factors.scratch);
        let transposed = [false, false];
        Sgemm { transposed, m: cols, n: rank, k: rows, a: (a, cols), b: (b, rows), to: (to, cols) }
    }
}

/// Error feedback of a bucket, before its layers. A gradient that is refused leaves the memory, and its layers send zeros.
pub fn begin(device: &impl Device, feedback: &ErrorFeedback, workspace: Span) -> Result<(), LaunchError> {
    indices::compensate(device, feedback, workspace)?;
    start(device, "keep", feedback.n, (feedback.residual(), Workspace::new(workspace, feedback.n)?.outcome))
}

/// What the calls of a step share: the bucket's values and workspace, as in [`begin`].
#[derive(Debug, Clone, Copy)]
pub struct Step {
    /// Of the bucket.
    pub n: u64,
    /// That of [`begin`].
    pub workspace: Span,
}

impl Step {
    fn parts(&self) -> Result<Workspace, LaunchError> {
        Workspace::new(self.workspace, self.n)
    }

    fn send(&self, device: &impl Device, values: Span, count: u64, per_square: f64) -> Result<(), LaunchError> {
        start(device, "power_send", count, (values, count, per_square, self.parts()?.ends()))
    }
}

/// Round 0: this rank's P of a layer, to `to`. `random` is of the job and the layer: its step and rank do not count.
pub fn left(
    device: &(impl Device + Gemm),
    layer: &Layer,
    random: Random,
    to: Span,
    step: &Step,
) -> Result<(), LaunchError> {
    layer.check()?;
    let [count, _] = layer.shape.counts();
    check("the left factor to send", to, 4 * count, ALIGN)?;
    let (LowRank { cols, rank, .. }, Factors { warm, scratch, .. }) = (layer.shape, layer.factors);
    let random = Random { step: 0, rank: None, ..random };
    let threads = u64::from(rank) * u64::from(crate::THREADS);
    start(device, "power_right", threads, (warm, scratch, cols, rank, random.stream(0)))?;
    device.sgemm(&layer.times(to))?;
    step.send(device, to, count, 0.0)
}

/// Round 1: from the sum of all ranks' P, times `scale` their mean, this rank's Q to `to`; what both stand for is taken out
/// of the layer, whose values then are its memory.
pub fn right(
    device: &(impl Device + Gemm),
    layer: &Layer,
    sum: Span,
    scale: f32,
    to: Span,
    step: &Step,
) -> Result<(), LaunchError> {
    layer.check()?;
    let (LowRank { rows, rank, .. }, Factors { left, scratch, .. }) = (layer.shape, layer.factors);
    let [from, count] = layer.shape.counts();
    check("the sum of left factors", sum, 4 * from, ALIGN)?;
    check("the right factor to send", to, 4 * count, ALIGN)?;
    check_apart(("the sum of left factors", sum), ("the left factor", left))?;
    launch(device, "power_left", 1, (sum, scale, left, scratch, rows, rank))?;
    device.sgemm(&layer.transposed(to))?;
    // The left factor's vectors are orthogonal, each of energy `rows`.
    step.send(device, to, count, f64::from(rows))?;
    add(device, layer.shape, left, to, Target { out: layer.matrix, scale: -1.0 })
}

/// Keeps the mean Q, which is `scale` times the sum, as the warm start of the next step, unless it is all zeros.
pub fn keep_warm(device: &impl Device, layer: &Layer, sum: Span, scale: f32, step: &Step) -> Result<(), LaunchError> {
    let (warm, [_, count]) = (layer.factors.warm, layer.shape.counts());
    check("the sum of right factors", sum, 4 * count, ALIGN)?;
    check("the warm start", warm, 4 * count, ALIGN)?;
    let parts = step.parts()?;
    device.zero(parts.zeroed)?;
    start(device, "power_any", count, (sum, count, scale, parts.state))?;
    start(device, "power_warm", count, (sum, count, scale, warm, parts.state))
}

/// `out += scale left rightᵀ`: decoding, with the left factor of [`right`] and the sum of right factors.
pub fn add(
    device: &impl Device,
    shape: LowRank,
    left: Span,
    right: Span,
    Target { scale, out }: Target,
) -> Result<(), LaunchError> {
    let [lefts, rights] = shape.counts();
    let (rows, cols) = (u64::from(shape.rows), u64::from(shape.cols));
    check("the left factor", left, 4 * lefts, ALIGN)?;
    check("the right factor", right, 4 * rights, ALIGN)?;
    check("out", out, 4 * rows * cols, ALIGN)?;
    check_apart(("out", out), ("the left factor", left))?;
    check_apart(("out", out), ("the right factor", right))?;
    start(device, "power_add", rows * cols, (out, rows, cols, left, right, shape.rank, scale))
}
