//! `cargo xtask walls`: the walls of ARCHITECTURE.md as facts of the build.
//!
//! A wall that no one guards falls: arrows between crates point one way, pure crates neither link nor name
//! anything that reads a clock, a socket, a file or ambient randomness, SQL stays in the controller's store,
//! `unsafe` in the modules that are named here, and no file grows past what one can read.
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
        Some("walls") => walls(),
        other => bail!("usage: cargo xtask walls (got {other:?})"),
    }
}

fn walls() -> Result<()> {
    let mut breaches = arrows::check()?;
    breaches.extend(sources::check()?);
    for breach in &breaches {
        println!("wall: {breach}");
    }
    if !breaches.is_empty() {
        bail!("{} breaches of the walls in ARCHITECTURE.md", breaches.len());
    }
    println!("walls: all stand");
    Ok(())
}
