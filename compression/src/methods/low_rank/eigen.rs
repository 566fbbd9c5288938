//! Eigenvalues and eigenvectors of a symmetric matrix, in f64: Householder's reduction to a tridiagonal matrix, then the QL
//! iteration with implicit shifts (Golub and Van Loan, "Matrix computations", 8.3). Our own and not a library's because
//! all ranks must get the same bits whatever their processors are: plain sums in a fixed order do that, libraries
//! that pick fused instructions at run time do not.

use crate::Kernel;
use crate::kernels::Work;

/// Sweeps per eigenvalue; two are usual. Beyond, what is reached is taken: still an orthogonal basis.
const MOST_SWEEPS: usize = 50;

/// Buffers, kept.
#[derive(Debug, Default)]
pub(super) struct Eigen {
    /// The matrix, n x n; used up by [`Self::solve`].
    pub(super) matrix: Vec<f64>,
    /// Eigenvectors as rows, orthonormal, in the order of `order`'s entries.
    pub(super) vectors: Vec<f64>,
    /// Eigenvalues.
    pub(super) values: Vec<f64>,
    /// Places of eigenvalues from the largest to the least.
    pub(super) order: Vec<u32>,
    off: Vec<f64>,
    work: Vec<f64>,
}

impl Eigen {
    /// An n x n matrix of zeros to be filled.
    pub(super) fn reset(&mut self, n: usize) -> &mut [f64] {
        self.matrix.clear();
        self.matrix.resize(n * n, 0.0);
        &mut self.matrix
    }

    /// Eigenvector number `rank` from the largest eigenvalue on.
    pub(super) fn vector(&self, rank: usize) -> &[f64] {
        let n = self.values.len();
        let at = self.order[rank] as usize;
        &self.vectors[at * n..(at + 1) * n]
    }

    /// Of the symmetric matrix that was filled in.
    pub(super) fn solve(&mut self, kernel: Kernel) {
        let n = self.matrix.len().isqrt();
        for buffer in [&mut self.values, &mut self.off, &mut self.work] {
            buffer.clear();
            buffer.resize(n, 0.0);
        }
        self.vectors.clear();
        self.vectors.resize(n * n, 0.0);
        kernel.run(Solve(self, n));
        let values = &self.values;
        self.order.clear();
        self.order.extend(0..n as u32);
        self.order.sort_unstable_by(|a, b| values[*b as usize].total_cmp(&values[*a as usize]).then(a.cmp(b)));
    }
}

struct Solve<'a>(&'a mut Eigen, usize);

impl Work for Solve<'_> {
    #[inline(always)]
    fn run(self) {
        let Self(Eigen { matrix, vectors, values, off, work, .. }, n) = self;
        tridiagonalize(matrix, n, (values, off), work);
        accumulate(matrix, n, vectors, work);
        iterate(values, off, vectors);
    }
}

#[inline(always)]
fn dot(a: &[f64], b: &[f64]) -> f64 {
    let mut sums = [0.0f64; 16];
    let (whole, rest) = a.as_chunks::<16>();
    for (a, b) in whole.iter().zip(b.as_chunks::<16>().0) {
        for lane in 0..16 {
            sums[lane] += a[lane] * b[lane];
        }
    }
    let mut sum = 0.0;
    for (a, b) in rest.iter().zip(&b[whole.len() * 16..]) {
        sum += a * b;
    }
    for lane in sums {
        sum += lane;
    }
    sum
}

/// A = Z T Zᵀ. `values` becomes T's diagonal, `off` what is beside it; row k of A keeps the reflection's vector from k + 1
/// on and in place k 2 / ‖v‖².
#[inline(always)]
fn tridiagonalize(a: &mut [f64], n: usize, (values, off): (&mut [f64], &mut [f64]), work: &mut [f64]) {
    for k in 0..n {
        values[k] = a[k * n + k];
        a[k * n + k] = 0.0;
        if k + 1 == n {
            break;
        }
        let (head, tail) = a.split_at_mut((k + 1) * n);
        let row = &mut head[k * n..];
        let v = &mut row[k + 1..];
        let norm = dot(v, v).sqrt();
        off[k] = if v[0] > 0.0 { -norm } else { norm };
        let only = v.len() == 1 || norm == 0.0;
        if only {
            off[k] = v[0];
            continue;
        }
        v[0] -= off[k];
        let factor = 2.0 / dot(v, v);
        row[k] = factor;
        let (v, m) = (&row[k + 1..], n - k - 1);
        let p = &mut work[..m];
        for (p, line) in p.iter_mut().zip(tail.chunks_exact(n)) {
            *p = factor * dot(&line[k + 1..], v);
        }
        let half = factor / 2.0 * dot(v, p);
        p.iter_mut().zip(v).for_each(|(p, v)| *p -= half * v);
        for (i, line) in tail.chunks_exact_mut(n).enumerate() {
            let (vi, pi) = (v[i], p[i]);
            for ((x, v), p) in line[k + 1..].iter_mut().zip(v).zip(&*p) {
                *x -= vi * p + pi * v;
            }
        }
    }
}

/// Zᵀ into `z`, from the reflections.
#[inline(always)]
fn accumulate(a: &[f64], n: usize, z: &mut [f64], work: &mut [f64]) {
    (0..n).for_each(|i| z[i * n + i] = 1.0);
    for k in (0..n.saturating_sub(2)).rev() {
        let factor = a[k * n + k];
        if factor == 0.0 {
            continue;
        }
        let v = &mut work[..n - k - 1];
        v.copy_from_slice(&a[k * n + k + 1..(k + 1) * n]);
        for line in z.chunks_exact_mut(n).skip(k + 1) {
            let line = &mut line[k + 1..];
            let share = factor * dot(line, v);
            line.iter_mut().zip(&*v).for_each(|(z, v)| *z -= share * v);
        }
    }
}

/// QL: T becomes diagonal, and the rows of `z` its eigenvectors.
#[inline(always)]
fn iterate(d: &mut [f64], e: &mut [f64], z: &mut [f64]) {
    let n = d.len();
    for l in 0..n {
        for _ in 0..MOST_SWEEPS {
            let small = |m: usize| e[m].abs() <= f64::EPSILON * (d[m].abs() + d[m + 1].abs());
            let mut m = l;
            while m + 1 < n && !small(m) {
                m += 1;
            }
            if m == l {
                break;
            }
            sweep((l, m), d, e, z);
        }
    }
}

/// One sweep over the block l..=m, with Wilkinson's shift.
#[inline(always)]
fn sweep((l, m): (usize, usize), d: &mut [f64], e: &mut [f64], z: &mut [f64]) {
    let n = d.len();
    let g = (d[l + 1] - d[l]) / (2.0 * e[l]);
    let root = (g * g + 1.0).sqrt();
    let mut g = d[m] - d[l] + e[l] / (g + if g < 0.0 { -root } else { root });
    let (mut s, mut c, mut p) = (1.0, 1.0, 0.0);
    for i in (l..m).rev() {
        let (f, b) = (s * e[i], c * e[i]);
        let r = (f * f + g * g).sqrt();
        e[i + 1] = r;
        if r == 0.0 {
            d[i + 1] -= p;
            e[m] = 0.0;
            return;
        }
        (s, c) = (f / r, g / r);
        g = d[i + 1] - p;
        let r = (d[i] - g) * s + 2.0 * c * b;
        p = s * r;
        d[i + 1] = g + p;
        g = c * r - b;
        let (head, tail) = z.split_at_mut((i + 1) * n);
        for (low, high) in head[i * n..].iter_mut().zip(&mut tail[..n]) {
            let f = *high;
            *high = s * *low + c * f;
            *low = c * *low - s * f;
        }
    }
    d[l] -= p;
    e[l] = g;
    e[m] = 0.0;
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::random::Stream;

    fn check(n: usize, at: impl Fn(usize, usize) -> f64) {
        let mut eigen = Eigen::default();
        let matrix: Vec<f64> = (0..n * n).map(|i| at(i / n, i % n)).collect();
        eigen.reset(n).copy_from_slice(&matrix);
        eigen.solve(Kernel::best());
        let scale = matrix.iter().fold(0.0f64, |max, v| max.max(v.abs())) * n as f64;
        for i in 0..n {
            let v = eigen.vector(i);
            let value = eigen.values[eigen.order[i] as usize];
            for row in 0..n {
                let product: f64 = (0..n).map(|j| matrix[row * n + j] * v[j]).sum();
                assert!((product - value * v[row]).abs() <= 1e-12 * scale, "n = {n}, value {i}");
            }
            for j in 0..n {
                let dot: f64 = v.iter().zip(eigen.vector(j)).map(|(a, b)| a * b).sum();
                assert!((dot - if i == j { 1.0 } else { 0.0 }).abs() < 1e-12, "n = {n}: {i}, {j}: {dot}");
            }
        }
    }

    /// A v = value v, and the vectors are orthonormal: random, diagonal, zero, repeated values, of low rank, huge, tiny.
    #[test]
    fn eigenvectors_by_definition() {
        let stream = Stream::new(3, [0; 4]);
        let random = |i: usize, j: usize| stream.unit((i.min(j) * 1000 + i.max(j)) as u64) - 0.5;
        for n in [0, 1, 2, 3, 7, 40, 65] {
            check(n, random);
            check(n, |i, j| 1e80 * random(i, j));
            check(n, |i, j| 1e-95 * random(i, j));
            check(n, |_, _| 0.0);
            check(n, |i, j| if i == j { (i % 3) as f64 } else { 0.0 });
            check(n, |i, j| (i + 1) as f64 * (j + 1) as f64);
        }
    }

    #[test]
    fn known_values() {
        let mut eigen = Eigen::default();
        eigen.reset(3).copy_from_slice(&[2.0, -1.0, 0.0, -1.0, 2.0, -1.0, 0.0, -1.0, 2.0]);
        eigen.solve(Kernel::Portable);
        let got: Vec<f64> = eigen.order.iter().map(|i| eigen.values[*i as usize]).collect();
        let root = 2f64.sqrt();
        for (got, want) in got.iter().zip([2.0 + root, 2.0, 2.0 - root]) {
            assert!((got - want).abs() < 1e-14, "{got} is not {want}");
        }
    }
}
