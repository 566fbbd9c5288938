//! `flexcomm probe trace`.

use super::{Common, ms, print_json};
use anyhow::{Context, anyhow};
use flexcomm_domain::Seconds;
use flexcomm_probes::edge::trace_route;
use flexcomm_probes::trace::{Hop, TracePlan};
use std::sync::atomic::Ordering;

#[derive(clap::Args)]
pub(super) struct Args {
    /// Name or address of the host to find the way to.
    host: String,
    /// Farthest hop, at most 64.
    #[arg(short, long, default_value_t = 30)]
    max_hops: u8,
    /// Probes per hop, at most 10.
    #[arg(short, long, default_value_t = 3)]
    queries: u8,
    /// A probe without an answer after this is lost.
    #[arg(long, default_value = "1s")]
    timeout: Seconds,
    #[command(flatten)]
    common: Common,
}

pub(super) fn run(args: &Args) -> anyhow::Result<()> {
    let target = args.common.resolve(&args.host)?;
    let plan = TracePlan { max_hops: args.max_hops, queries: args.queries, timeout_s: args.timeout.get() };
    let stop = flexcomm_signals::stop_or_end().context("failed to watch for Ctrl-C")?;
    let path = trace_route(target, &plan, &stop).context("failed to trace the route")?;
    if args.common.json {
        print_json(&path)?;
    } else {
        path.hops.iter().for_each(|hop| println!("{}", line(hop)));
    }
    match (path.reached, path.refused_by) {
        (true, _) if args.common.json => Ok(()),
        (true, _) => {
            println!("--- {target} reached in {} hop{}", path.hops.len(), if path.hops.len() == 1 { "" } else { "s" });
            Ok(())
        }
        (false, Some(by)) => Err(anyhow!("{target} was not reached: {by} refuses to pass packets on")),
        (false, None) if stop.load(Ordering::Relaxed) => Err(anyhow!("ended before {target} was reached")),
        (false, None) => Err(anyhow!("{target} was not reached: it or a firewall on the way is silent about UDP")),
    }
}

fn line(hop: &Hop) -> String {
    let names: Vec<String> = hop.addr.iter().chain(&hop.others).map(ToString::to_string).collect();
    let name = if names.is_empty() { "*".to_owned() } else { names.join(" or ") };
    let times: Vec<String> = hop.rtts_s.iter().map(|rtt| rtt.map_or("*".to_owned(), ms)).collect();
    format!("{:2}  {name}  {}", hop.ttl, times.join("  "))
}
