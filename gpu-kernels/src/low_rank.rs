//! PowerSGD (Vogels et al. 2019, algorithm 1): P = M Q, added up over ranks; P̂ = orthogonalize(P); Q = Mᵀ P̂, added up; the
//! gradient is P̂ Qᵀ. M Q and Mᵀ P̂ are cuBLAS's ([`crate::Blas`]), all else are kernels. P̂ Qᵀ, with its few columns, is as
//! fast as memory either way, and must be the same float on every rank and in every memory: that one is a kernel too.
//!
//! Payloads are those of `compression` (round 0 P, round 1 Q, f32), equal up to the order of sums in the products.

use crate::feed::Feed;
use crate::indices;
use crate::launch::{launch, start};
use crate::random::Random;
use crate::workspace::{Workspace, check, check_apart, check_count, require};
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

    fn check(self, matrix: Span, factors: &Factors) -> Result<(), LaunchError> {
        let [warm, left, scratch] = self.bytes();
        check(("the layer", matrix, 4 * u64::from(self.rows) * u64::from(self.cols)), ALIGN)?;
        check(("the warm start", factors.warm, warm), ALIGN)?;
        check(("the left factor", factors.left, left), ALIGN)?;
        check(("the scratch memory", factors.scratch, scratch), ALIGN)?;
        check_apart(("the left factor", factors.left), ("the scratch memory", factors.scratch))
    }

    /// M factor: a row-major matrix is its transpose by columns.
    fn times(self, matrix: Span, right: Span, to: Span) -> Sgemm {
        let Self { rows, cols, rank } = self;
        let transposed = [true, false];
        Sgemm { transposed, m: rows, n: rank, k: cols, a: (matrix, cols), b: (right, cols), to: (to, rows) }
    }

    /// Mᵀ factor.
    fn transposed(self, matrix: Span, left: Span, to: Span) -> Sgemm {
        let Self { rows, cols, rank } = self;
        let transposed = [false, false];
        Sgemm { transposed, m: cols, n: rank, k: rows, a: (matrix, cols), b: (left, rows), to: (to, cols) }
    }
}

/// Error feedback of a bucket, before its layers. A gradient that is refused leaves the memory, and its layers send zeros.
pub fn begin(device: &impl Device, feed: &Feed, workspace: Span) -> Result<(), LaunchError> {
    indices::feed(device, feed, workspace)?;
    start(device, "keep", feed.n, (feed.residual(), Workspace::new(workspace, feed.n)?.outcome))
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

    fn send(&self, device: &impl Device, (values, count): (Span, u64), per_square: f64) -> Result<(), LaunchError> {
        start(device, "power_send", count, (values, count, per_square, self.parts()?.ends()))
    }
}

/// Round 0: this rank's P of a layer of the compensated gradient, to `to`. `random` is of the job and the layer: its step and rank do
/// not count.
pub fn left(
    device: &(impl Device + Gemm),
    (layer, random): (LowRank, Random),
    (matrix, factors, to): (Span, &Factors, Span),
    step: &Step,
) -> Result<(), LaunchError> {
    layer.check(matrix, factors)?;
    let [count, _] = layer.counts();
    check(("the left factor to send", to, 4 * count), ALIGN)?;
    let (LowRank { cols, rank, .. }, random) = (layer, Random { step: 0, rank: None, ..random });
    let threads = u64::from(rank) * u64::from(crate::THREADS);
    start(device, "power_right", threads, (factors.warm, factors.scratch, cols, rank, random.stream(0)))?;
    device.sgemm(&layer.times(matrix, factors.scratch, to))?;
    step.send(device, (to, count), 0.0)
}

/// Round 1: from the sum of all ranks' P, times `scale` their mean, this rank's Q to `to`; what both stand for is taken out
/// of the layer, whose values then are its memory.
pub fn right(
    device: &(impl Device + Gemm),
    (layer, sum, scale): (LowRank, Span, f32),
    (matrix, factors, to): (Span, &Factors, Span),
    step: &Step,
) -> Result<(), LaunchError> {
    layer.check(matrix, factors)?;
    let [from, count] = layer.counts();
    check(("the sum of left factors", sum, 4 * from), ALIGN)?;
    check(("the right factor to send", to, 4 * count), ALIGN)?;
    check_apart(("the sum of left factors", sum), ("the left factor", factors.left))?;
    launch(device, "power_left", 1, (sum, scale, factors.left, factors.scratch, layer.rows, layer.rank))?;
    device.sgemm(&layer.transposed(matrix, factors.scratch, to))?;
    // The left factor's vectors are orthogonal, each of energy `rows`.
    step.send(device, (to, count), f64::from(layer.rows))?;
    add(device, (layer, factors.left, to), (-1.0, matrix))
}

/// Keeps the mean Q for the next step, unless it is all zeros.
pub fn keep_warm(
    device: &impl Device,
    (layer, sum, scale): (LowRank, Span, f32),
    warm: Span,
    step: &Step,
) -> Result<(), LaunchError> {
    let [_, count] = layer.counts();
    check(("the sum of right factors", sum, 4 * count), ALIGN)?;
    check(("the warm start", warm, 4 * count), ALIGN)?;
    let parts = step.parts()?;
    device.zero(parts.zeroed)?;
    start(device, "power_any", count, (sum, count, scale, parts.state))?;
    start(device, "power_warm", count, (sum, count, scale, warm, parts.state))
}

/// `out += scale left rightᵀ`: decoding, with the left factor of [`right`] and the sum of right factors.
pub fn add(
    device: &impl Device,
    (layer, left, right): (LowRank, Span, Span),
    (scale, out): (f32, Span),
) -> Result<(), LaunchError> {
    let [lefts, rights] = layer.counts();
    let (rows, cols) = (u64::from(layer.rows), u64::from(layer.cols));
    check(("the left factor", left, 4 * lefts), ALIGN)?;
    check(("the right factor", right, 4 * rights), ALIGN)?;
    check(("out", out, 4 * rows * cols), ALIGN)?;
    check_apart(("out", out), ("the left factor", left))?;
    check_apart(("out", out), ("the right factor", right))?;
    start(device, "power_add", rows * cols, (out, rows, cols, left, right, layer.rank, scale))
}
