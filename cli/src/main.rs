//! The one binary `flexcomm` with its sub-commands.
#![allow(clippy::print_stdout)]

use clap::{Parser, Subcommand};

/// An argument that its parser could not judge alone: told as the parser tells its own, by exit status 2.
#[derive(Debug)]
struct BadArgument(String);

impl std::fmt::Display for BadArgument {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(&self.0)
    }
}

impl std::error::Error for BadArgument {}

/// Returns a [`BadArgument`] with this text.
macro_rules! bad_argument {
    ($($text:tt)*) => { return Err(crate::BadArgument(format!($($text)*)).into()) };
}

mod agent;
mod controller;
mod doctor;
mod environment;
mod lab;
mod plan;
mod probe;
mod repeats;
mod replay;

/// Keeps data-parallel training at the best compressor, compression ratio and collective while the network changes.
#[derive(Parser)]
#[command(name = "flexcomm", version, max_term_width = 100)]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    /// What-if: times per collective and compression ratio, the Pareto front, the choice and why.
    Plan(plan::Args),
    /// Measure the network to a host: echo, ping, trace, throughput.
    Probe(probe::Args),
    /// Run the agent of this node.
    Agent(agent::Args),
    /// Run the controller.
    Controller(controller::Args),
    /// An emulated cluster on this machine: a real network that changes, a real training job on it.
    Lab(lab::Args),
    /// Say what is missing on this machine, with the command that mends it.
    Doctor(doctor::Args),
    /// Decide a job's recorded decisions again and show what differs.
    Replay(replay::Args),
    /// Measure this machine.
    Bench(flexcomm_bench::Args),
    /// Internal: the process that puts shaped links back when the agent dies. The agent starts it by itself.
    #[command(hide = true)]
    TcGuardian,
}

fn main() -> std::process::ExitCode {
    let command = Cli::parse().command;
    if matches!(command, Command::Agent(_) | Command::Controller(_) | Command::Probe(_) | Command::Replay(_)) {
        let names = std::env::vars_os().filter_map(|(name, _)| name.into_string().ok());
        environment::warnings(names).iter().for_each(|line| write_line(line));
    }
    let outcome = match command {
        Command::Plan(args) => plan::run(args),
        Command::Probe(args) => probe::run(args),
        Command::Agent(args) => agent::run(args),
        Command::Controller(args) => controller::run(args),
        Command::Lab(args) => lab::run(args),
        Command::Doctor(args) => doctor::run(args),
        Command::Replay(args) => replay::run(args),
        Command::Bench(args) => flexcomm_bench::run(args),
        Command::TcGuardian => std::process::exit(flexcomm_agent::tc::guardian::main()),
    };
    let status = match outcome {
        Ok(()) => std::process::ExitCode::SUCCESS,
        Err(error) => {
            write_line(&format!("{error:#}"));
            if error.is::<BadArgument>() { 2.into() } else { std::process::ExitCode::FAILURE }
        }
    };
    flexcomm_log::flush();
    status
}

/// An address to listen on. Names are not looked up: which of a name's addresses is meant would be a guess.
fn address(text: &str) -> Result<std::net::SocketAddr, String> {
    text.parse().map_err(|_| "expected IP:PORT, for example 127.0.0.1:7070".to_owned())
}

/// On stderr, which a daemon's supervisor may have closed or may not read.
fn write_line(what: &str) {
    flexcomm_log::write_line(&format!("flexcomm: {what}"));
}
