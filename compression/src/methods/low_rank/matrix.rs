//! Products of a matrix with thin ones, each in one read of the large one.
//!
//! A large matrix is held by rows, m x L. A thin one is held by its vectors, one after the other: r vectors of length m
//! (left) or L (right). Sums have a fixed order, so every kernel answers the same bits.

use crate::Kernel;
use crate::codec::ReadError;
use crate::kernels::{NOT_FINITE, Work, key};

/// Partial sums of a dot product.
const LANES: usize = 32;

/// Rows that are added at a time in [`Transposed`].
const ROWS: usize = 4;

/// Sums of a product that are held at a time.
const COLUMNS: usize = 256;

/// Where value (i, k) of a thin matrix lies: i * by_row + k * by_vector.
#[derive(Debug, Clone, Copy)]
pub(super) struct Strides {
    pub(super) by_row: usize,
    pub(super) by_vector: usize,
}

impl Strides {
    /// Vector after vector, each of `len` values.
    pub(super) const fn vectors(len: usize) -> Self {
        Self { by_row: 1, by_vector: len }
    }

    #[inline(always)]
    const fn at(self, i: usize, k: usize) -> usize {
        i * self.by_row + k * self.by_vector
    }
}

/// `to = M right`. A last row that is shorter counts as filled up with zeros.
pub(super) struct Times<'a> {
    pub(super) matrix: &'a [f32],
    pub(super) cols: usize,
    pub(super) right: &'a [f32],
    pub(super) to: &'a mut [f32],
    pub(super) strides: Strides,
}

impl Work for Times<'_> {
    #[inline(always)]
    fn run(self) {
        for (i, row) in self.matrix.chunks(self.cols).enumerate() {
            for (k, vector) in self.right.chunks_exact(self.cols).enumerate() {
                self.to[self.strides.at(i, k)] = dot(row, vector);
            }
        }
    }
}

#[inline(always)]
fn dot(a: &[f32], b: &[f32]) -> f32 {
    let mut sums = [0.0f32; LANES];
    let (whole, rest) = a.as_chunks::<LANES>();
    for (a, b) in whole.iter().zip(b.as_chunks::<LANES>().0) {
        for lane in 0..LANES {
            sums[lane] += a[lane] * b[lane];
        }
    }
    for (lane, (a, b)) in rest.iter().zip(&b[whole.len() * LANES..]).enumerate() {
        sums[lane] += a * b;
    }
    let mut width = LANES / 2;
    while width > 0 {
        for lane in 0..width {
            sums[lane] += sums[lane + width];
        }
        width /= 2;
    }
    sums[0]
}

/// `to = Mᵀ left`.
pub(super) struct Transposed<'a> {
    pub(super) matrix: &'a [f32],
    pub(super) cols: usize,
    pub(super) left: &'a [f32],
    pub(super) to: &'a mut [f32],
}

impl Work for Transposed<'_> {
    #[inline(always)]
    fn run(self) {
        let rows = self.matrix.len() / self.cols;
        self.to.fill(0.0);
        for (block, several) in self.matrix.chunks(ROWS * self.cols).enumerate() {
            for (to, left) in self.to.chunks_exact_mut(self.cols).zip(self.left.chunks_exact(rows)) {
                let left = &left[block * ROWS..];
                match several.len() == ROWS * self.cols {
                    true => {
                        let (a, rest) = several.split_at(self.cols);
                        let (b, rest) = rest.split_at(self.cols);
                        let (c, d) = rest.split_at(self.cols);
                        for ((((to, a), b), c), d) in to.iter_mut().zip(a).zip(b).zip(c).zip(d) {
                            *to += (left[0] * a + left[1] * b) + (left[2] * c + left[3] * d);
                        }
                    }
                    false => {
                        let rows = several.chunks_exact(self.cols);
                        rows.zip(left).for_each(|(row, left)| add_scaled(to, *left, row));
                    }
                }
            }
        }
    }
}

/// `out += left rightᵀ * scale`, left with `strides`; the product is summed up before it is added, so that adding it with
/// scale -1 takes away exactly what adding it with scale 1 to zeros gives. Products beyond f32 count as its largest
/// values. Answers whether all sums are finite.
pub(super) struct AddProduct<'a> {
    pub(super) left: &'a [f32],
    pub(super) strides: Strides,
    pub(super) right: &'a [f32],
    pub(super) cols: usize,
    pub(super) scale: f32,
    pub(super) out: &'a mut [f32],
}

impl Work<bool> for AddProduct<'_> {
    #[inline(always)]
    fn run(self) -> bool {
        let (mut worst, mut sums) = (0u32, [0.0f32; COLUMNS]);
        for (i, row) in self.out.chunks_mut(self.cols).enumerate() {
            for (block, out) in row.chunks_mut(COLUMNS).enumerate() {
                let at = block * COLUMNS;
                let sums = &mut sums[..out.len()];
                sums.fill(0.0);
                for (k, right) in self.right.chunks_exact(self.cols).enumerate() {
                    add_scaled(sums, self.left[self.strides.at(i, k)], &right[at..at + sums.len()]);
                }
                if sums.iter().fold(0, |worst, sum| key(*sum).max(worst)) >= NOT_FINITE {
                    saturate((self.left, self.strides), (self.right, self.cols), (i, at), sums);
                }
                add_scaled(out, self.scale, sums);
                worst = out.iter().fold(worst, |worst, value| key(*value).max(worst));
            }
        }
        worst < NOT_FINITE
    }
}

impl AddProduct<'_> {
    /// Refuses sums that are not finite.
    pub(super) fn checked(self, kernel: Kernel) -> Result<(), ReadError> {
        match kernel.run(self) {
            true => Ok(()),
            false => Err(ReadError::number("value", f32::INFINITY, "it must be finite")),
        }
    }
}

/// Sums of row `i` from column `at` on again, in f64.
#[cold]
fn saturate(
    (left, strides): (&[f32], Strides),
    (right, cols): (&[f32], usize),
    (i, at): (usize, usize),
    sums: &mut [f32],
) {
    for (j, sum) in (at..).zip(sums) {
        let terms = right.chunks_exact(cols).enumerate();
        let wide: f64 = terms.map(|(k, right)| f64::from(left[strides.at(i, k)]) * f64::from(right[j])).sum();
        *sum = wide.clamp(f64::from(-f32::MAX), f64::from(f32::MAX)) as f32;
    }
}

#[inline(always)]
fn add_scaled(to: &mut [f32], factor: f32, from: &[f32]) {
    to.iter_mut().zip(from).for_each(|(to, from)| *to += factor * from);
}

/// a · b in f64.
pub(super) fn dot64(a: &[f32], b: &[f32]) -> f64 {
    let mut sums = [0.0f64; 8];
    let (whole, rest) = a.as_chunks::<8>();
    for (a, b) in whole.iter().zip(b.as_chunks::<8>().0) {
        for lane in 0..8 {
            sums[lane] += f64::from(a[lane]) * f64::from(b[lane]);
        }
    }
    let tail = rest.iter().zip(&b[whole.len() * 8..]).map(|(a, b)| f64::from(*a) * f64::from(*b)).sum::<f64>();
    sums.iter().sum::<f64>() + tail
}

/// ‖left rightᵀ‖² of two thin matrices: the trace of (leftᵀ left)(rightᵀ right).
pub(super) fn product_energy(left: (&[f32], usize), right: (&[f32], usize)) -> f64 {
    let vectors = |of: (&[f32], usize)| of.0.len() / of.1.max(1);
    let vector = |of: (&[f32], usize), k: usize| k * of.1..(k + 1) * of.1;
    let mut sum = 0.0;
    for a in 0..vectors(left) {
        for b in 0..vectors(left) {
            let dots = |of: (&[f32], usize)| dot64(&of.0[vector(of, a)], &of.0[vector(of, b)]);
            sum += dots(left) * dots(right);
        }
    }
    sum.max(0.0)
}

/// Makes vectors orthogonal, each of norm `norm`, in their order (Gram-Schmidt, every vector twice, so that rounding leaves
/// none of the others in it). What depends on those before becomes zeros.
pub(super) fn orthogonalize(vectors: &mut [f32], len: usize, norm: f64) {
    for k in 0..vectors.len() / len {
        let (before, rest) = vectors.split_at_mut(k * len);
        let vector = &mut rest[..len];
        let whole = rescale(vector, 1.0);
        for _ in 0..2 {
            for other in before.chunks_exact(len) {
                let share = (dot64(other, vector) / (norm * norm)) as f32;
                add_scaled(vector, -share, other);
            }
        }
        // Below this nothing but rounding is left.
        let left = dot64(vector, vector).sqrt();
        match whole > 0.0 && left > 1e-5 {
            true => drop(rescale(vector, norm)),
            false => vector.fill(0.0),
        }
    }
}

/// Brings a vector to this norm, unless it is zero; answers the norm that it had.
pub(super) fn rescale(vector: &mut [f32], norm: f64) -> f64 {
    let had = dot64(vector, vector).sqrt();
    if had > 0.0 {
        vector.iter_mut().for_each(|value| *value = (f64::from(*value) * (norm / had)) as f32);
    }
    had
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Kernel;
    use crate::random::Stream;

    fn values(n: usize, seed: u64) -> Vec<f32> {
        let stream = Stream::new(seed, [0; 4]);
        (0..n as u32).map(|i| stream.uniform(i) - 0.5).collect()
    }

    /// Against sums in f64, with lengths around every block.
    #[test]
    fn products_are_products() {
        for (rows, cols, rank) in [(1, 1, 1), (3, 5, 2), (4, 32, 1), (9, 33, 3), (70, 65, 4), (5, 200, 2)] {
            let (matrix, left, right) = (values(rows * cols, 1), values(rows * rank, 2), values(cols * rank, 3));
            for kernel in Kernel::available() {
                let mut to = vec![0.0; rows * rank];
                let strides = Strides::vectors(rows);
                kernel.run(Times { matrix: &matrix, cols, right: &right, to: &mut to, strides });
                let mut back = vec![0.0; cols * rank];
                kernel.run(Transposed { matrix: &matrix, cols, left: &left, to: &mut back });
                let mut out = matrix.clone();
                let add = AddProduct { left: &left, strides, right: &right, cols, scale: 0.5, out: &mut out };
                assert!(kernel.run(add));
                let near = |a: f32, b: f64| assert!((f64::from(a) - b).abs() < 1e-4, "{a} is not {b}");
                let at = |v: &[f32], i: usize| f64::from(v[i]);
                for k in 0..rank {
                    for i in 0..rows {
                        let sum = (0..cols).map(|j| at(&matrix, i * cols + j) * at(&right, k * cols + j)).sum();
                        near(to[k * rows + i], sum);
                    }
                    for j in 0..cols {
                        let sum = (0..rows).map(|i| at(&matrix, i * cols + j) * at(&left, k * rows + i)).sum();
                        near(back[k * cols + j], sum);
                    }
                }
                let mut energy = 0.0;
                for i in 0..rows {
                    for j in 0..cols {
                        let sum: f64 = (0..rank).map(|k| at(&left, k * rows + i) * at(&right, k * cols + j)).sum();
                        near(out[i * cols + j], at(&matrix, i * cols + j) + 0.5 * sum);
                        energy += sum * sum;
                    }
                }
                assert!((product_energy((&left, rows), (&right, cols)) - energy).abs() <= 1e-6 * energy);
            }
        }
    }

    #[test]
    fn orthogonal_vectors_and_zeros_for_what_depends() {
        let len = 50;
        let mut vectors = values(3 * len, 7);
        let copy: Vec<f32> = (0..len).map(|i| 2.0 * vectors[i] - vectors[len + i]).collect();
        vectors.splice(2 * len..2 * len, copy);
        orthogonalize(&mut vectors, len, 3.0);
        for a in 0..4 {
            for b in 0..4 {
                let got = dot64(&vectors[a * len..(a + 1) * len], &vectors[b * len..(b + 1) * len]);
                let want = if a == b && a != 2 { 9.0 } else { 0.0 };
                assert!((got - want).abs() < 1e-5, "{a}, {b}: {got}");
            }
        }
    }
}
