//! Loops written once in plain Rust and compiled for each instruction set.
//!
//! A codec's loop becomes a struct that implements [`Work`] with `#[inline(always)]` on `run` and on the small functions
//! that it calls; [`Kernel::run`] then compiles it for AVX2 and AVX-512 too and picks at run time. Integer work and
//! sums in a fixed number of lanes give the same bits on every kernel. No `unsafe` is needed outside `x86.rs`.

use super::{Candidates, Fed, Kernel, key, portable};
use crate::codec::Stats;

/// A loop over slices that it borrows.
pub(crate) trait Work {
    /// What it answers.
    type Output;
    /// Mark it `#[inline(always)]`.
    fn run(self) -> Self::Output;
}

impl Kernel {
    /// Runs the loop with this kernel's instructions, or portably where the machine has them not.
    pub(crate) fn run<W: Work>(self, work: W) -> W::Output {
        match self {
            #[cfg(target_arch = "x86_64")]
            Self::Avx2 => super::x86::work_avx2(work),
            #[cfg(target_arch = "x86_64")]
            Self::Avx512 => super::x86::work_avx512(work),
            _ => work.run(),
        }
    }
}

/// Values per block: what a block's second loop reads is still in the first-level cache.
const BLOCK: usize = 1024;

/// ‖x‖² and max |x| in one read. NaN and infinity show in both.
pub(crate) fn stats(kernel: Kernel, x: &[f32]) -> Stats {
    let fed = kernel.run(Scan { x, floor: None, found: &mut Candidates::default() });
    Stats { energy: fed.energy, max: f32::from_bits(fed.max_key) }
}

/// [`stats`], and the candidates from a floor on.
pub(crate) fn scan(kernel: Kernel, x: &[f32], floor: Option<u32>, found: &mut Candidates) -> Fed {
    kernel.run(Scan { x, floor, found })
}

struct Scan<'a, 'b> {
    x: &'a [f32],
    floor: Option<u32>,
    found: &'b mut Candidates,
}

impl Work for Scan<'_, '_> {
    type Output = Fed;

    #[inline(always)]
    fn run(self) -> Fed {
        let mut out = Fed::default();
        for (i, block) in self.x.chunks(BLOCK).enumerate() {
            out.energy += portable::energy(block);
            out.max_key = block.iter().fold(out.max_key, |max, x| max.max(key(*x)));
            if let Some(floor) = self.floor {
                // Positions fit u32: Layers sees to it.
                portable::collect(block, (i * BLOCK) as u32, floor, self.found);
            }
        }
        out
    }
}

/// `fed = beta * residual + gamma * gradient` (GRACE, equation 5), and what its values are.
pub(crate) struct Compensate<'a> {
    pub(crate) gradient: &'a [f32],
    pub(crate) residual: &'a [f32],
    pub(crate) fed: &'a mut [f32],
    pub(crate) beta: f32,
    pub(crate) gamma: f32,
}

impl Work for Compensate<'_> {
    type Output = Stats;

    #[inline(always)]
    fn run(self) -> Stats {
        let (mut energy, mut max) = (0.0, 0);
        let pairs = self.gradient.chunks(BLOCK).zip(self.residual.chunks(BLOCK));
        for ((g, r), f) in pairs.zip(self.fed.chunks_mut(BLOCK)) {
            f.iter_mut().zip(g).zip(r).for_each(|((f, g), r)| *f = self.beta * r + self.gamma * g);
            energy += portable::energy(f);
            max = f.iter().fold(max, |max: u32, x| max.max(key(*x)));
        }
        Stats { energy, max: f32::from_bits(max) }
    }
}
