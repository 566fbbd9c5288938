//! The compressors of `flexcomm-compression` as CUDA kernels.
//!
//! Sources are CUDA C++ files in `cuda/`, compiled by NVRTC when [`Gpu::load`] first meets a device and kept on disk
//! ([`Cache`]). Nothing of CUDA is needed to build: the driver and NVRTC are loaded at run time, and what is missing is
//! a [`LoadError`] that names it and its remedy. The caller's answer to such an error is the CPU path.

mod arch;
pub mod bench;
pub mod bucket;
mod cache;
mod device;
mod error;
mod feedback;
mod gains;
pub mod hybrid;
mod indices;
mod launch;
mod lists;
pub mod low_rank;
pub mod marsit;
mod quantize;
mod random;
mod ranges;
mod select;
pub mod source;
pub mod three_lc;
mod threshold;
mod workspace;

pub use arch::Arch;
pub use cache::Cache;
pub use device::{
    Allocation, BLAS_WORKSPACE, Blas, BlasOnStream, Compiled, Copies, Cublas, Device, Gpu, Graph, MemoryError, Nvrtc,
    OnStream, Span, Stream, THREADS, in_environment,
};
pub use error::{BlasError, CacheError, LaunchError, LoadError, Version};
pub use feedback::{DType, ErrorFeedback};
pub use gains::{MOST_CANDIDATES, gains, largest};
pub use indices::{add_mean, compensate, gather, random_k, scatter, subset, subset_scratch};
pub use lists::{ListRoom, Lists, add_lists, list_bytes, lists_room};
pub use low_rank::{Gemm, Sgemm};
pub use quantize::{Norm, Quantizer, add, majority, quantize};
pub use random::{Random, RandomK};
pub use ranges::add_sized;
pub use select::{Form, Selection, Set, Tail, pack, payload_room, topk};
pub use source::Module;
pub use threshold::{Fit, Threshold, threshold};
pub use workspace::{MOST_VALUES, OUTCOME_BYTES, Outcome, STRUCTURES, Target, workspace_bytes};
