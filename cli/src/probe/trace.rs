//! `flexcomm probe trace`.

use super::{Family, ms, print_json, seconds, stop_on_ctrl_c};
use anyhow::Context;
use flexcomm_domain::Seconds;
use flexcomm_probes::edge::trace_route;
use flexcomm_probes::trace::{Hop, TracePlan};

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
    /// Print one JSON document instead of lines.
    #[arg(long)]
    json: bool,
    #[command(flatten)]
    family: Family,
}

pub(super) fn run(args: &Args) -> anyhow::Result<()> {
    let target = args.family.resolve(&args.host)?;
    let plan = TracePlan { max_hops: args.max_hops, queries: args.queries, timeout_s: seconds(args.timeout) };
    let stop = stop_on_ctrl_c()?;
    let path = trace_route(target, &plan, &stop).context("failed to trace the route")?;
    if args.json {
        return print_json(&path);
    }
    for hop in &path.hops {
        println!("{}", line(hop));
    }
    match (path.reached, path.refused_by) {
        (true, _) => println!("--- {target} reached in {} hops", path.hops.len()),
        (false, Some(by)) => println!("--- {by} refuses to pass packets to {target}"),
        (false, None) => println!("--- {target} not reached: it or a firewall on the way is silent about UDP"),
    }
    Ok(())
}

fn line(hop: &Hop) -> String {
    let names: Vec<String> = hop.addr.iter().chain(&hop.others).map(ToString::to_string).collect();
    let name = if names.is_empty() { "*".to_owned() } else { names.join(" or ") };
    let times: Vec<String> = hop.rtts_s.iter().map(|rtt| rtt.map_or("*".to_owned(), ms)).collect();
    format!("{:2}  {name}  {}", hop.ttl, times.join("  "))
}
