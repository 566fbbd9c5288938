//! Loops written once in plain Rust and compiled for each instruction set.
//!
//! A codec's loop becomes a struct that implements [`Work`] with `#[inline(always)]` on `run` and on the small functions
//! that it calls; [`Kernel::run`] then compiles it for AVX2 and AVX-512 too and picks at run time. Integer work and
//! sums in a fixed number of lanes give the same bits on every kernel. No `unsafe` is needed outside `x86/`.

use super::Kernel;

/// A loop over slices that it borrows, and what it answers.
pub(crate) trait Work<O = ()> {
    /// Mark it `#[inline(always)]`.
    fn run(self) -> O;
}

impl Kernel {
    /// Runs the loop with this kernel's instructions, or portably where the machine has them not.
    pub(crate) fn run<O>(self, work: impl Work<O>) -> O {
        match self {
            #[cfg(target_arch = "x86_64")]
            Self::Avx2 => super::x86::work_avx2(work),
            #[cfg(target_arch = "x86_64")]
            Self::Avx512 => super::x86::work_avx512(work),
            _ => work.run(),
        }
    }
}
