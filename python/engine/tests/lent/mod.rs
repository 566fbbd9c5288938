//! Memory of the kernels' emulator, lent to a bucket.

#[allow(dead_code, unsafe_code)]
#[path = "../../../../gpu-kernels/tests/kernels/emulated.rs"]
mod emulated;

pub use emulated::{Emulated, Memory};
use flexcomm_engine::Home;
use flexcomm_gpu_kernels::{Copies, LaunchError, Span};

pub struct Lent {
    pub device: Emulated,
    pub _memory: Memory,
}

impl std::fmt::Debug for Lent {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Lent")
    }
}

impl Home for Lent {
    fn fetch(&self, from: Span, to: &mut [u8]) -> Result<(), LaunchError> {
        self.device.download(from, to)
    }
}
