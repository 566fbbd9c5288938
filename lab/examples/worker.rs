//! `flexcomm lab worker` alone, for tests that need real processes and for trying it out:
//!
//! ```text
//! cargo run -p flexcomm-lab --example worker -- --epochs 1 --strategy topk@0.01/allgather
//! ```

use clap::Parser;

#[derive(Parser)]
struct Cli {
    #[command(flatten)]
    args: flexcomm_lab::worker::Args,
}

fn main() -> anyhow::Result<()> {
    flexcomm_lab::worker::run(Cli::parse().args)
}
