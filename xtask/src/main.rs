//! `cargo xtask dependencies`: the rules of ARCHITECTURE.md about dependencies, checked.
//!
//! Dependencies between crates point one way, pure crates neither link nor name anything that reads a clock, a socket, a
//! file or ambient randomness, SQL stays in the controller's store, `unsafe` in the modules that are named here, and no
//! file grows past what one can read.
#![allow(clippy::print_stdout)]

mod arrows;
mod sources;

use anyhow::{Result, bail};

fn main() -> std::process::ExitCode {
    match run() {
        Ok(()) => std::process::ExitCode::SUCCESS,
        Err(error) => {
            println!("xtask: {error:#}");
            std::process::ExitCode::FAILURE
        }
    }
}

fn run() -> Result<()> {
    match std::env::args().nth(1).as_deref() {
        Some("dependencies") => dependencies(),
        other => bail!("usage: cargo xtask dependencies (got {other:?})"),
    }
}

fn dependencies() -> Result<()> {
    let mut broken = arrows::check()?;
    broken.extend(sources::check()?);
    for rule in &broken {
        println!("broken: {rule}");
    }
    if !broken.is_empty() {
        bail!("{} rules of ARCHITECTURE.md are broken", broken.len());
    }
    println!("dependencies: every rule holds");
    Ok(())
}
