//! The kernels against the CPU side, without a GPU: their source runs on an emulator that draws the order of threads.
#![allow(clippy::unwrap_used, clippy::print_stdout, unsafe_code)]

mod bucket;
mod data;
mod emulated;
mod gains;
mod graph;
mod hybrid;
mod indices;
mod large;
mod layers;
mod lists;
mod low_rank;
mod marsit;
mod quantize;
mod standin;
mod three_lc;
mod threshold;
mod topk;
