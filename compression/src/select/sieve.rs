//! What the pass that makes a tensor can collect for a selection of its k largest, so that it need not be read again.

use crate::Kernel;
use crate::codec::Stats;
use crate::kernels::{Added, Candidates, Fed, Feed, scan};
use crate::select::topk::floor_of;

/// The values that reach a sampled floor. A codec that selects the k largest lends it to the memory
/// ([`crate::memory::Memory::compensate_sieving`]).
#[derive(Debug, Default)]
pub struct Sieve {
    k: usize,
    sample: Vec<u32>,
    found: Candidates,
    floor: Option<u32>,
    /// Filled by the memory, for the tensor that comes next.
    filled: bool,
}

impl Sieve {
    /// For about k values; forgets what was found.
    pub(crate) fn want(&mut self, k: usize) -> &mut Self {
        (self.k, self.filled) = (k, false);
        self
    }

    /// One pass: `fed` becomes what the codec compresses, and what reaches the floor is collected.
    pub(crate) fn feed(&mut self, kernel: Kernel, gradient: &[f32], added: Added<'_>) -> Stats {
        let Added { residual, beta, gamma, .. } = added;
        self.sample(gradient.len(), |i| beta * residual[i] + gamma * gradient[i]);
        let fed = kernel.feed(Feed { gradient, added: Some(added), floor: self.floor }, &mut self.found);
        self.filled = true;
        fed.stats()
    }

    /// As [`Self::feed`], of a tensor that is there, unless a memory has made it and knows.
    pub(crate) fn scan(&mut self, kernel: Kernel, x: &[f32], (k, known): (usize, Option<Stats>)) -> Stats {
        let filled = std::mem::take(&mut self.filled) && k == self.k;
        if let Some(stats) = known.filter(|_| filled) {
            return stats;
        }
        self.want(k).sample(x.len(), |i| x[i]);
        let seen: Fed = scan(kernel, x, self.floor, &mut self.found);
        seen.stats()
    }

    /// Positions, ascending, and float bits of what reaches the floor; None when that is fewer than `least`, or too many
    /// to keep.
    pub(crate) fn found(&self, least: usize) -> Option<(&[u32], &[u32])> {
        self.floor.and_then(|_| self.found.get()).filter(|(indices, _)| indices.len() >= least)
    }

    fn sample(&mut self, n: usize, at: impl Fn(usize) -> f32) {
        self.floor = floor_of(at, (n, self.k.min(n)), &mut self.sample, &mut self.found);
    }
}
