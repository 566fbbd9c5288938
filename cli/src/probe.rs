//! `flexcomm probe`: each probe by itself.

mod echo;
mod ping;
mod serve;
mod throughput;
mod trace;

use anyhow::{Context, bail};
use clap::Subcommand;
use flexcomm_probes::Token;
use flexcomm_probes::stats::Summary;
use std::net::{IpAddr, SocketAddr, ToSocketAddrs};
use std::path::PathBuf;

/// What the exit status says, at the end of every help text.
const EXIT: &str = "Exit status: 0 when every host answered; 1 when one did not, or something else failed, with the \
                    reason on the standard error (what was found so far is printed all the same); 2 for wrong \
                    arguments. The first Ctrl-C ends a probe early, with what was found until then; a second one at \
                    once, with 130.";

/// Arguments of `flexcomm probe`.
#[derive(clap::Args)]
#[command(after_help = EXIT)]
pub struct Args {
    #[command(subcommand)]
    probe: Probe,
}

#[derive(Subcommand)]
enum Probe {
    /// Latency, jitter and loss in each direction by UDP echo. Needs an agent or `flexcomm probe serve` with the
    /// same token at HOST, and no privilege.
    #[command(after_help = EXIT)]
    Echo(echo::Args),
    /// Latency and loss by ICMP echo, many hosts at once. Needs nothing at HOST.
    #[command(after_help = EXIT)]
    Ping(ping::Args),
    /// The hops to HOST by UDP traceroute. Needs no privilege.
    #[command(after_help = EXIT)]
    Trace(trace::Args),
    /// Bandwidth in both directions over TCP with few bytes. Needs an agent or `flexcomm probe serve` with the same
    /// token at HOST.
    #[command(after_help = EXIT)]
    Throughput(throughput::Args),
    /// Answer echo and throughput probes until Ctrl-C or SIGTERM, without an agent.
    Serve(serve::Args),
}

/// Where the cluster's token is.
#[derive(clap::Args)]
struct TokenArgs {
    /// File with the cluster's token (8 to 1024 bytes; white space around it is ignored). Without it the
    /// environment variable FLEXCOMM_TOKEN is used; there is no option for the token itself, because arguments
    /// are visible to every user of the machine.
    #[arg(long, value_name = "FILE")]
    token_file: Option<PathBuf>,
}

impl TokenArgs {
    fn read(&self) -> anyhow::Result<Token> {
        let text = match (&self.token_file, std::env::var("FLEXCOMM_TOKEN").ok()) {
            (Some(path), _) => {
                std::fs::read_to_string(path).with_context(|| format!("failed to read token {}", path.display()))?
            }
            (None, Some(text)) => text,
            (None, None) => bail!(
                "no token: give the cluster's with --token-file FILE or in FLEXCOMM_TOKEN; \
                 make one with `head -c 32 /dev/urandom | base64 > FILE`"
            ),
        };
        Ok(Token::new(&text)?)
    }
}

/// Runs `flexcomm probe`.
pub fn run(args: Args) -> anyhow::Result<()> {
    match args.probe {
        Probe::Echo(args) => echo::run(&args),
        Probe::Ping(args) => ping::run(&args),
        Probe::Trace(args) => trace::run(&args),
        Probe::Throughput(args) => throughput::run(&args),
        Probe::Serve(args) => serve::run(&args),
    }
}

/// What every probe has.
#[derive(clap::Args)]
struct Common {
    /// Print one JSON document instead of lines.
    #[arg(long)]
    json: bool,
    /// Use IPv4 only.
    #[arg(short = '4', long, conflicts_with = "ipv6")]
    ipv4: bool,
    /// Use IPv6 only.
    #[arg(short = '6', long)]
    ipv6: bool,
}

impl Common {
    fn resolve(&self, host: &str) -> anyhow::Result<IpAddr> {
        let wanted = |addr: &SocketAddr| !(self.ipv4 && addr.is_ipv6() || self.ipv6 && addr.is_ipv4());
        let mut found = (host, 0).to_socket_addrs().with_context(|| format!("failed to look up {host:?}"))?;
        let addr = found.find(wanted).with_context(|| format!("{host:?} has no address of that family"))?;
        Ok(addr.ip())
    }
}

fn ms(seconds: f64) -> String {
    format!("{:.3} ms", seconds * 1e3)
}

/// One line of a summary.
fn describe(rtt: &Summary) -> String {
    format!(
        "round trip min {} · median {} · p95 {} · p99 {} · jitter {}",
        ms(rtt.min_s),
        ms(rtt.median_s),
        ms(rtt.p95_s),
        ms(rtt.p99_s),
        ms(rtt.jitter_s)
    )
}

fn percent(share: f64) -> String {
    format!("{:.1} %", share * 100.0)
}

/// Prints what a probe found as one JSON document.
fn print_json(value: &impl serde::Serialize) -> anyhow::Result<()> {
    println!("{}", serde_json::to_string_pretty(value).context("failed to write JSON")?);
    Ok(())
}
