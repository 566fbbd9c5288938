//! GradZip (Cho et al. 2019): alternating least squares on ‖M − P Rᵀ‖² + λ (‖P‖² + ‖R‖²).
//!
//! The paper was a workshop's; what is public of it is its abstract and GRACE's description (section 3.4): "employs an extra
//! regularizer ‖P‖_F² + ‖R‖_F² and uses an alternating direction method to obtain factors P and R", with Table 1's size
//! (m + L) r. Implemented is this definition: each half step is the minimum for the other factor fixed,
//! P = M R (RᵀR + λ' I)⁻¹ and R = Mᵀ P (PᵀP + λ' I)⁻¹, one of each per training step, both linear in M and so averaged in
//! flight, R kept for the next step. Ours: λ' = λ times the mean squared norm of the fixed factor's columns, so that
//! the unit of the gradient does not matter.
//!
//! Contractive with delta 0: R = 0 already gives ‖M‖², and the minimum is not above it.

use super::alternating::{Alternating, Halves, SHRINK, total};
use super::matrix::dot64;
use crate::entry::Entry;
use flexcomm_domain::spec::compressors;

pub(super) const ENTRY: Entry = Entry {
    info: &compressors::GRADZIP,
    code: 145,
    examples: &["rank=2", "rank=1,lambda=0.5", "rank=4,lambda=0.000001"],
    build: |values, shape| Box::new(Alternating::new(Ridge::new(values.number(1)), values.whole(0), shape)),
};

#[derive(Debug)]
struct Ridge {
    lambda: f64,
    /// FᵀF + λ' I, then its Cholesky factor.
    gram: Vec<f64>,
    /// One row of F.
    row: Vec<f64>,
}

impl Ridge {
    fn new(lambda: f64) -> Self {
        Self { lambda, gram: Vec::new(), row: Vec::new() }
    }

    /// `f = F (FᵀF + λ' I)⁻¹ * scale`, F = r vectors.
    fn solve(&mut self, f: &mut [f32], len: usize, scale: f64) {
        let r = f.len() / len;
        self.cholesky(f, len, r);
        self.row.resize(r, 0.0);
        for i in 0..len {
            (0..r).for_each(|k| self.row[k] = f64::from(f[k * len + i]));
            substitute(&self.gram, &mut self.row);
            (0..r).for_each(|k| f[k * len + i] = (self.row[k] * scale) as f32);
        }
    }

    fn cholesky(&mut self, f: &[f32], len: usize, r: usize) {
        let vector = |k: usize| &f[k * len..(k + 1) * len];
        self.gram.clear();
        self.gram.extend((0..r * r).map(|i| dot64(vector(i / r), vector(i % r))));
        let trace: f64 = (0..r).map(|k| self.gram[k * r + k]).sum();
        let shift = self.lambda * trace / r as f64;
        (0..r).for_each(|k| self.gram[k * r + k] += shift);
        let g = &mut self.gram;
        for i in 0..r {
            for j in 0..=i {
                let sum = g[i * r + j] - (0..j).map(|k| g[i * r + k] * g[j * r + k]).sum::<f64>();
                // But for rounding no pivot is below λ', by which all of FᵀF was lifted.
                g[i * r + j] = if i == j { sum.max(shift).sqrt() } else { sum / g[j * r + j] };
            }
        }
    }
}

/// Solves L Lᵀ x = b in place.
fn substitute(l: &[f64], b: &mut [f64]) {
    let r = b.len();
    for i in 0..r {
        let sum = b[i] - (0..i).map(|k| l[i * r + k] * b[k]).sum::<f64>();
        b[i] = sum / l[i * r + i];
    }
    for i in (0..r).rev() {
        let sum = b[i] - (i + 1..r).map(|k| l[k * r + i] * b[k]).sum::<f64>();
        b[i] = sum / l[i * r + i];
    }
}

/// Brings the mean squared value to 1; false for zeros.
fn normalize(vectors: &mut [f32]) -> bool {
    let scale = (vectors.len() as f64 / total(vectors)).sqrt();
    let finite = scale.is_finite();
    if finite {
        vectors.iter_mut().for_each(|value| *value = (f64::from(*value) * scale) as f32);
    }
    finite
}

impl Halves for Ridge {
    fn right(&mut self, r: &mut [f32], len: usize, start: impl Fn(usize, &mut [f32])) {
        if !normalize(r) {
            r.chunks_exact_mut(len).enumerate().for_each(|(k, vector)| start(k, vector));
            normalize(r);
        }
        self.solve(r, len, SHRINK);
    }

    fn left(&mut self, p: &mut [f32], len: usize, b: &mut [f32]) {
        let any = normalize(p);
        b.copy_from_slice(p);
        if any {
            self.solve(b, len, 1.0);
        }
    }
}
