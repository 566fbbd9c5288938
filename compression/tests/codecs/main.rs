//! Every registered compressor through one harness (`all.rs`), and each class's own tests in its own file.
#![allow(clippy::unwrap_used, unsafe_code)] // helpers of tests are tests; counting allocations needs unsafe

mod all;
mod allocations;
mod documented;
mod draws;
mod extremes;
mod golden;
mod harness;
mod hybrid;
mod known_mistakes;
mod low_rank;
mod memory;
mod passes;
mod quantization;
mod refusals;
mod sparsification;
mod states;
mod steady;
mod undo;
