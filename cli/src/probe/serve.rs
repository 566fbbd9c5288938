//! `flexcomm probe serve`.

use super::TokenArgs;
use anyhow::Context;
use flexcomm_probes::edge::{EchoResponder, ThroughputServer};
use flexcomm_probes::{ECHO_PORT, THROUGHPUT_PORT};
use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::sync::atomic::Ordering;
use std::time::Duration;

#[derive(clap::Args)]
pub(super) struct Args {
    /// Address to listen on; `::` serves IPv6 and IPv4.
    #[arg(long, alias = "bind", value_name = "ADDR", default_value_t = IpAddr::V4(Ipv4Addr::UNSPECIFIED))]
    listen: IpAddr,
    /// UDP port of the echo responder; 0 takes any free one.
    #[arg(long, default_value_t = ECHO_PORT)]
    echo_port: u16,
    /// TCP port of the throughput server; 0 takes any free one.
    #[arg(long, default_value_t = THROUGHPUT_PORT)]
    throughput_port: u16,
    #[command(flatten)]
    token: TokenArgs,
}

pub(super) fn run(args: &Args) -> anyhow::Result<()> {
    let token = args.token.read()?;
    let stop = flexcomm_signals::stop_or_end().context("failed to watch for Ctrl-C")?;
    let echo = EchoResponder::spawn(SocketAddr::new(args.listen, args.echo_port), &token)
        .context("failed to start the echo responder (is an agent running here already?)")?;
    let throughput = ThroughputServer::spawn(SocketAddr::new(args.listen, args.throughput_port), &token)
        .context("failed to start the throughput server (is an agent running here already?)")?;
    println!(
        "echo on UDP {}, throughput on TCP {}; Ctrl-C or SIGTERM ends",
        echo.local_addr(),
        throughput.local_addr()
    );
    while !stop.load(Ordering::Relaxed) {
        std::thread::sleep(Duration::from_millis(100));
    }
    let stats = echo.stats();
    println!("{} echoes answered, {} packets without the token", stats.replies, stats.malformed);
    Ok(())
}
