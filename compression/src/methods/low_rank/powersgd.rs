//! PowerSGD (Vogels et al. 2019): one step of subspace iteration per training step, from the right factor of the step before.
//!
//! Algorithm 1: P = M Q, averaged; P̂ = orthogonalize(P); Q = Mᵀ P̂, averaged; decompressed P̂ Qᵀ. Q starts as normal values
//! that are the same on all ranks, and is kept (warm start; section 3 and 4.2). With error feedback `ef(vanilla)` it is
//! the paper's algorithm 2. P̂ has columns of norm √m here and Q is divided by m, so that no value of Q can be larger
//! than the largest of the gradient times √m/√m = 1: the product is the paper's.
//!
//! Contractive with delta 0: P̂P̂ᵀ is a projection.

use super::alternating::{Alternating, Halves, SHRINK};
use super::matrix::{orthogonalize, rescale};
use crate::entry::Entry;
use flexcomm_domain::spec::compressors;

pub(super) const ENTRY: Entry = Entry {
    info: &compressors::POWERSGD,
    code: 144,
    examples: &["rank=2", "rank=1", "rank=4"],
    build: |values, shape| Box::new(Alternating::new(Power, values.whole(0), shape)),
};

#[derive(Debug)]
struct Power;

impl Halves for Power {
    /// Columns of norm 1: orthogonalize(M Q) does not depend on their norms. A column that is zero starts again.
    fn right(&mut self, r: &mut [f32], len: usize, start: impl Fn(usize, &mut [f32])) {
        for (k, vector) in r.chunks_exact_mut(len).enumerate() {
            if rescale(vector, SHRINK) == 0.0 {
                start(k, vector);
                rescale(vector, SHRINK);
            }
        }
    }

    fn left(&mut self, p: &mut [f32], len: usize, b: &mut [f32]) {
        orthogonalize(p, len, (len as f64).sqrt());
        b.iter_mut().zip(p).for_each(|(b, p)| *b = *p / len as f32);
    }
}
