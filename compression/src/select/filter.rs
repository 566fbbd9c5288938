//! What the pass that makes a tensor can collect for a selection of its k largest, so that it need not be read again.

use crate::Kernel;
use crate::codec::Stats;
use crate::kernels::{Added, Candidates, Feed, PassStats, scan};
use crate::select::topk::{floor_of, floor_of_few, room};

/// The values that reach a floor, a little below the last tensor's cut or, when that is unknown or misled, sampled. A codec
/// that selects the k largest passes it to the memory ([`crate::memory::Memory::compensate`]).
#[derive(Debug, Default)]
pub struct CandidateFilter {
    k: usize,
    sample: Vec<u32>,
    found: Candidates,
    floor: Option<u32>,
    guess: Option<Guess>,
    /// Filled by the memory, for the tensor that comes next.
    filled: bool,
}

/// What one tensor tells of the next: gradients change little from step to step, and what error feedback adds less.
#[derive(Debug, Clone, Copy)]
struct Guess {
    /// The k-th largest key.
    cut: u32,
    /// How far below it to begin: so far that an eighth to a half of k is found beyond k.
    gap: u32,
}

impl CandidateFilter {
    /// For about k values; forgets what was found.
    pub(crate) fn want(&mut self, k: usize) -> &mut Self {
        self.guess = self.guess.filter(|_| k == self.k);
        (self.k, self.filled) = (k, false);
        self
    }

    /// One pass: `compensated` becomes what the codec compresses, and what reaches the floor is collected.
    pub(crate) fn feed(&mut self, kernel: Kernel, gradient: &[f32], added: Added<'_>) -> Stats {
        let Added { residual, beta, gamma, compensated } = added;
        let guessed = self.aim(gradient.len(), |i| beta * residual[i] + gamma * gradient[i]);
        let added = Some(Added { residual, beta, gamma, compensated: &mut *compensated });
        let seen = kernel.feed(Feed { gradient, added, floor: self.floor }, &mut self.found);
        self.look_again(kernel, compensated, guessed);
        self.filled = true;
        seen.stats()
    }

    /// As [`Self::feed`], of a tensor that is there, unless a memory has made it and knows.
    pub(crate) fn scan(&mut self, kernel: Kernel, x: &[f32], (k, known): (usize, Option<Stats>)) -> Stats {
        let filled = std::mem::take(&mut self.filled) && k == self.k;
        if let Some(stats) = known.filter(|_| filled) {
            return stats;
        }
        let guessed = self.want(k).aim(x.len(), |i| x[i]);
        let seen: PassStats = scan(kernel, x, self.floor, &mut self.found);
        self.look_again(kernel, x, guessed);
        seen.stats()
    }

    /// The k-th largest of what was found has this key: the next tensor's is looked for near it.
    pub(crate) fn learn(&mut self, cut: u32) {
        let count = self.found.get().map_or(0, |(indices, _)| indices.len());
        let gap = match self.guess {
            Some(Guess { gap, .. }) if count > self.k + self.k / 2 => gap - gap / 8,
            Some(Guess { gap, .. }) if count < self.k + self.k / 8 => gap + gap / 8 + 1,
            Some(Guess { gap, .. }) => gap,
            None => self.floor.map_or(0, |floor| cut.saturating_sub(floor)),
        };
        self.guess = Some(Guess { cut, gap });
    }

    /// What the found ones reach; None when nothing was looked for.
    pub(crate) fn floor(&self) -> Option<u32> {
        self.floor
    }

    /// Positions, ascending, and float bits of what reaches the floor; None when that is fewer than `least`, or too many
    /// to keep.
    pub(crate) fn found(&self, least: usize) -> Option<(&[u32], &[u32])> {
        self.floor.and_then(|_| self.found.get()).filter(|(indices, _)| indices.len() >= least)
    }

    /// Sets the floor; answers whether it is a guess.
    fn aim(&mut self, n: usize, at: impl Fn(usize) -> f32) -> bool {
        let Some(Guess { cut, gap }) = self.guess else {
            self.sample(n, at);
            return false;
        };
        self.floor = Some(cut.saturating_sub(gap));
        self.found.reset(room(n, self.k));
        true
    }

    /// When a guess misled, reads the tensor once more with a sampled floor; a short one always, from which the floor comes.
    fn look_again(&mut self, kernel: Kernel, x: &[f32], guessed: bool) {
        if self.found(self.k).is_some() {
            return;
        }
        self.guess = None;
        if guessed {
            self.sample(x.len(), |i| x[i]);
        }
        let few = if self.floor.is_none() { floor_of_few(kernel, x, self.k, &mut self.found) } else { None };
        self.floor = self.floor.or(few);
        if guessed || few.is_some() {
            scan(kernel, x, self.floor, &mut self.found);
        }
    }

    fn sample(&mut self, n: usize, at: impl Fn(usize) -> f32) {
        self.floor = floor_of(at, (n, self.k.min(n)), &mut self.sample, &mut self.found);
    }
}
