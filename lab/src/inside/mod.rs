//! The inside of the lab: an emulated cluster, its network trace and its live view.
//!
//! Runs as init of user-mode Linux or in namespaces of its own; tells the host what it does by lines on stdout that
//! begin with [`LINE`] and listens for `stop` (or the end) of stdin.

mod config;
mod drive;
mod network;
mod processes;
mod rest;
mod summary;
mod system;
mod view;

pub use config::LAB_SETTINGS;
pub(crate) use system::sh;

use anyhow::{Context, Result};
use std::io::{BufRead, Write};
use std::path::Path;
use tokio::sync::watch;

use crate::plan::{LINE, LabPlan};

/// Says a line to the host. A host that is gone ends the inside by closing stdin, so errors mean nothing here.
pub(crate) fn say(line: &str) {
    let mut out = std::io::stdout().lock();
    for part in line.lines() {
        let _ = writeln!(out, "{LINE}{part}");
    }
    let _ = out.flush();
}

/// Runs the inside for the plan in a file. As init of user-mode Linux it ends in power-off on every way out;
/// a plan that cannot be read ends in a panic of that kernel, which ends it as well.
pub fn run(plan_file: &Path) -> Result<()> {
    let plan = load(plan_file).inspect_err(say_error)?;
    let outcome = std::panic::catch_unwind(|| inside(&plan));
    let outcome = outcome.unwrap_or_else(|_| Err(anyhow::anyhow!("the lab's inside panicked")));
    let outcome = outcome.inspect_err(say_error);
    if plan.uml {
        system::power_off();
    }
    outcome
}

fn say_error(error: &anyhow::Error) {
    say(&format!("error: {}", format!("{error:#}").replace('\n', " | ")));
}

fn load(plan_file: &Path) -> Result<LabPlan> {
    let text = std::fs::read_to_string(plan_file).with_context(|| plan_file.display().to_string())?;
    serde_json::from_str(&text).with_context(|| plan_file.display().to_string())
}

fn inside(plan: &LabPlan) -> Result<()> {
    if plan.uml {
        std::env::set_current_dir("/")?;
    }
    system::prepare(plan.uml)?;
    network::build(plan)?;
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build()?;
    runtime.block_on(async { drive::drive(plan, stop_signal()).await })
}

/// Becomes true when the host says `stop` or is gone.
fn stop_signal() -> watch::Receiver<bool> {
    let (send, receive) = watch::channel(false);
    std::thread::spawn(move || {
        for line in std::io::stdin().lock().lines() {
            match line {
                Ok(text) if text.trim() != "stop" => {}
                _ => break,
            }
        }
        send.send_replace(true);
    });
    receive
}
