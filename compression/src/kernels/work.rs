//! Loops written once in plain Rust and compiled for each instruction set.
//!
//! A codec's loop becomes a struct that implements [`Work`] with `#[inline(always)]` on `run` and on the small functions
//! that it calls; [`super::Kernel::run`] then compiles it for AVX2 and AVX-512 too and picks at run time. Integer work and
//! sums in a fixed number of lanes give the same bits on every kernel. No `unsafe` is needed.

/// A loop over slices that it borrows, and what it answers.
pub(crate) trait Work<O = ()> {
    /// Mark it `#[inline(always)]`.
    fn run(self) -> O;
}
