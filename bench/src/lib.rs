//! `flexcomm bench`: what this machine does.
#![allow(clippy::print_stdout)]

mod compressors;
mod data;
mod fitted;
mod gpu;
mod gpu_check;
mod gpu_torch;
mod measure;
mod output;
mod plot;
mod torch;
mod worker;

use anyhow::Result;
use clap::Subcommand;

/// Arguments of `flexcomm bench`.
#[derive(clap::Args)]
pub struct Args {
    #[command(subcommand)]
    command: Bench,
}

#[derive(Subcommand)]
enum Bench {
    /// Time every compressor on this machine against a plain copy of the same bytes, and against torch.topk.
    Compressors(compressors::Args),
    /// Time the kernels on a GPU against a copy within it.
    Gpu(gpu::Args),
    /// The process in which `compressors` measures.
    #[command(hide = true)]
    MeasureCompressors,
}

/// Runs `flexcomm bench`.
pub fn run(args: Args) -> Result<()> {
    match args.command {
        Bench::Compressors(args) => compressors::run(args),
        Bench::Gpu(args) => gpu::run(&args),
        Bench::MeasureCompressors => worker::run(),
    }
}
