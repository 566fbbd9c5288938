//! What kernels run on: the memory and the stream of the caller. `unsafe` in this folder is for calls into the driver
//! and NVRTC, and for addresses that callers vouch for.

#![allow(unsafe_code)]

mod blas;
mod gpu;
mod library;
mod memory;
mod nvrtc;

pub use blas::{BLAS_WORKSPACE, Blas, BlasOnStream, Cublas};
pub use gpu::{Gpu, OnStream};
pub use memory::{Allocation, Graph, MemoryError, Stream};
pub use nvrtc::{Compiled, Nvrtc, in_environment};

use crate::LaunchError;

/// Runs kernels, one after the other, in the order of calls. Nothing waits for them.
pub trait Device {
    /// Starts a kernel with `blocks` blocks of [`THREADS`] threads. Every argument is a word whose low bytes are the
    /// kernel's parameter.
    fn launch(&self, kernel: &'static str, blocks: u32, arguments: &[u64]) -> Result<(), LaunchError>;

    /// Sets memory to zero.
    fn zero(&self, span: Span) -> Result<(), LaunchError>;

    /// Copies as many bytes as both have, within the device.
    fn copy(&self, to: Span, from: Span) -> Result<(), LaunchError>;

    /// Blocks of a kernel that run at the same time: with more, some would begin when others end, and half of the device
    /// would wait for these.
    fn blocks(&self, kernel: &'static str) -> u32;
}

/// A device to which a process hands what it has in its own memory.
pub trait Copies: Device {
    /// Copies to the device, after what was launched before. The bytes are read before this returns. A few of them wait for
    /// nothing; of many the driver may wait until there is room to put them aside. No CUDA graph captures this.
    fn upload(&self, to: Span, bytes: &[u8]) -> Result<(), LaunchError>;

    /// Copies from the device: waits for all that was launched before.
    fn download(&self, from: Span, to: &mut [u8]) -> Result<(), LaunchError>;
}

/// Threads per block of every kernel.
pub const THREADS: u32 = 256;

/// Most arguments of a kernel.
pub(crate) const MOST_ARGUMENTS: usize = 16;

/// Memory on the device that the caller owns.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Span {
    address: u64,
    bytes: u64,
}

impl Span {
    /// No memory.
    pub const NONE: Self = Self { address: 0, bytes: 0 };

    /// `bytes` of device memory from `address` on.
    ///
    /// # Safety
    /// The memory must belong to the device and stay allocated, and nobody else may write to it, until all work that was
    /// launched with it is done on the stream it was launched on.
    pub const unsafe fn new(address: u64, bytes: u64) -> Self {
        Self { address, bytes }
    }

    /// Where it starts.
    pub const fn address(self) -> u64 {
        self.address
    }

    /// How long it is.
    pub const fn bytes(self) -> u64 {
        self.bytes
    }

    /// Whether there is any.
    pub const fn is_none(self) -> bool {
        self.bytes == 0
    }

    /// The part from `at` on, `bytes` long; within this one, or nothing.
    pub fn part(self, at: u64, bytes: u64) -> Self {
        let inside = at.checked_add(bytes).is_some_and(|end| end <= self.bytes);
        if inside { Self { address: self.address + at, bytes } } else { Self::NONE }
    }

    /// Whether the two share a byte.
    pub(crate) fn overlaps(self, other: Self) -> bool {
        let apart = self.address + self.bytes <= other.address || other.address + other.bytes <= self.address;
        !(self.is_none() || other.is_none() || apart)
    }
}
