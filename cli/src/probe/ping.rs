//! `flexcomm probe ping`.

use super::{Common, describe, ms, percent, print_json};
use anyhow::{Context, bail};
use flexcomm_domain::Seconds;
use flexcomm_probes::edge::{PingReport, PingSettings, SocketKind, ping_many, ping_many_surge};
use flexcomm_probes::ping::PingPlan;
use std::net::IpAddr;
use std::sync::atomic::Ordering;

#[derive(Clone, Copy, clap::ValueEnum)]
enum Backend {
    /// The kernel's receive stamps on a thread of its own: exact to microseconds also under load.
    Kernel,
    /// The surge-ping crate: right from about a millisecond up on an idle machine.
    Surge,
}

#[derive(clap::Args)]
pub(super) struct Args {
    /// Names or addresses of the hosts to ping, all at once.
    #[arg(required = true, value_name = "HOST")]
    hosts: Vec<String>,
    /// Echoes to each host; Ctrl-C ends earlier and prints what was found so far.
    #[arg(short, long, default_value_t = 10)]
    count: u64,
    /// Time between two echoes to the same host; the hosts are spread over it.
    #[arg(short, long, default_value = "200ms")]
    interval: Seconds,
    /// An echo without a reply after this is lost.
    #[arg(long, default_value = "2s")]
    timeout: Seconds,
    /// Bytes of payload, 16 to 1400.
    #[arg(short, long, default_value_t = 56)]
    size: usize,
    /// Who does the work.
    #[arg(long, value_enum, default_value = "kernel")]
    backend: Backend,
    #[command(flatten)]
    common: Common,
}

pub(super) fn run(args: &Args) -> anyhow::Result<()> {
    let (targets, unknown) = resolve(args);
    if targets.is_empty() {
        bail!("{}", unknown.join("; "));
    }
    let plan = PingPlan { count: args.count, interval_s: args.interval.get(), timeout_s: args.timeout.get() };
    let settings = PingSettings { plan, payload: args.size };
    let stop = flexcomm_signals::stop_or_end().context("failed to watch for Ctrl-C")?;
    let report = match args.backend {
        Backend::Kernel => ping_many(&targets, &settings, &stop, &mut |reply| {
            if !args.common.json {
                println!("{} seq={} {}", reply.target, reply.seq, ms(reply.rtt_s));
            }
        }),
        Backend::Surge => {
            let runtime = tokio::runtime::Builder::new_current_thread()
                .enable_all()
                .build()
                .context("failed to start pinging")?;
            runtime.block_on(ping_many_surge(&targets, &settings, &stop))
        }
    };
    let report = report.context("failed to ping")?;
    if args.common.json {
        print_json(&report)?;
    } else {
        print(&report);
    }
    all_answered(&report, stop.load(Ordering::Relaxed), unknown)
}

/// The addresses of the hosts, and what is wrong with the names of the others, which keep nobody from being pinged.
fn resolve(args: &Args) -> (Vec<IpAddr>, Vec<String>) {
    let (mut targets, mut unknown) = (Vec::new(), Vec::new());
    for host in &args.hosts {
        match args.common.resolve(host) {
            Ok(target) => targets.push(target),
            Err(error) => unknown.push(format!("{error:#}")),
        }
    }
    (targets, unknown)
}

/// An error that names those who did not answer at all, after those without an address.
fn all_answered(report: &PingReport, ended: bool, mut wrong: Vec<String>) -> anyhow::Result<()> {
    let silent = report.targets.iter().filter(|target| target.answered == 0);
    let why = |error: &Option<String>| error.as_ref().map_or(String::new(), |error| format!(" ({error})"));
    let silent: Vec<String> = silent.map(|target| format!("{}{}", target.target, why(&target.error))).collect();
    let lost = if ended { "ended before an answer from" } else { "no answer, 100 % lost, from" };
    if !silent.is_empty() {
        wrong.push(format!("{lost} {}", silent.join(", ")));
    }
    if wrong.is_empty() { Ok(()) } else { bail!("{}", wrong.join("; ")) }
}

fn print(report: &PingReport) {
    for target in &report.targets {
        let socket = if target.target.is_ipv6() { report.socket_v6 } else { report.socket_v4 };
        let socket = match socket {
            Some(SocketKind::Datagram) => "unprivileged ICMP socket",
            Some(SocketKind::Raw) => "raw socket",
            None => "no socket",
        };
        let loss = percent(target.loss);
        println!(
            "--- ping {}: {} sent, {} answered, {loss} lost, {socket}",
            target.target, target.sent, target.answered
        );
        if let Some(rtt) = &target.rtt {
            println!("{}", describe(rtt));
        }
        if let Some(error) = &target.error {
            println!("failed to send: {error}");
        }
    }
}
