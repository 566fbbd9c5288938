//! `flexcomm probe throughput`.

use super::{Common, TokenArgs, print_json};
use anyhow::Context;
use flexcomm_domain::{Bandwidth, Seconds};
use flexcomm_probes::THROUGHPUT_PORT;
use flexcomm_probes::edge::{MeasureError, measure_throughput_until};
use flexcomm_probes::throughput::{Direction, DirectionResult, Plan, ThroughputResult};
use std::net::SocketAddr;

#[derive(Clone, Copy, clap::ValueEnum)]
enum Way {
    /// From here to HOST.
    Out,
    /// From HOST to here.
    Back,
    /// One after the other.
    Both,
}

#[derive(clap::Args)]
pub(super) struct Args {
    /// Name or address of the host to measure.
    host: String,
    /// TCP port of the throughput server there.
    #[arg(long, default_value_t = THROUGHPUT_PORT)]
    port: u16,
    /// TCP streams, 1 to 16. Several find the rate of a long link sooner.
    #[arg(short, long, default_value_t = 4)]
    streams: u8,
    /// Most bytes to spend, both directions together, with k, M or G behind. A test ends earlier when its estimate
    /// is steady.
    #[arg(short, long, default_value = "64M", value_parser = parse_bytes)]
    budget: u64,
    /// Longest time of each direction.
    #[arg(short, long, default_value = "10s")]
    time: Seconds,
    /// Which way.
    #[arg(short, long, value_enum, default_value = "both")]
    direction: Way,
    /// Let the kernel pace all streams together at this rate (for example 1.2gbit), to spare the queues on the way.
    #[arg(long)]
    pace: Option<Bandwidth>,
    #[command(flatten)]
    common: Common,
    #[command(flatten)]
    token: TokenArgs,
}

#[derive(serde::Serialize)]
struct Report {
    target: SocketAddr,
    bytes: u64,
    #[serde(flatten)]
    result: ThroughputResult,
}

/// `250k`, `64M`, `1G` or plain bytes; powers of ten.
fn parse_bytes(text: &str) -> Result<u64, String> {
    let (number, scale) = match text.char_indices().last() {
        Some((i, 'k' | 'K')) => (&text[..i], 1e3),
        Some((i, 'm' | 'M')) => (&text[..i], 1e6),
        Some((i, 'g' | 'G')) => (&text[..i], 1e9),
        _ => (text, 1.0),
    };
    let value = number.parse::<f64>().ok().map(|v| v * scale).filter(|v| (0.0..=1e15).contains(v));
    value.map(|v| v as u64).ok_or_else(|| "a number of bytes, for example 250k, 64M or 1G".to_owned())
}

pub(super) fn run(args: &Args) -> anyhow::Result<()> {
    let token = args.token.read()?;
    let target = SocketAddr::new(args.common.resolve(&args.host)?, args.port);
    let direction = match args.direction {
        Way::Out => Direction::Out,
        Way::Back => Direction::Back,
        Way::Both => Direction::Both,
    };
    let plan = Plan::new(args.streams, args.budget, args.time.get(), direction)?;
    let plan = args.pace.map_or(plan, |bandwidth| plan.paced(bandwidth.get() as u64));
    let stop = flexcomm_signals::stop_or_end().context("failed to watch for Ctrl-C")?;
    let result = measure_throughput_until(target, &token, &plan, &stop).map_err(|error| {
        let remedy = remedy(&error, args.port);
        anyhow::Error::new(error).context(format!("failed to measure the throughput to {target}{remedy}"))
    })?;
    if args.common.json {
        return print_json(&Report { target, bytes: result.bytes(), result });
    }
    for (way, found) in [("out ", &result.out), ("back", &result.back)] {
        if let Some(found) = found {
            println!("{way} {}", line(found));
        }
    }
    println!("--- {target}: {} stream(s), {:.2} MB spent", result.streams, result.bytes() as f64 / 1e6);
    Ok(())
}

fn remedy(error: &MeasureError, port: u16) -> String {
    match error {
        MeasureError::Connect { .. } => {
            format!(
                " (is an agent or `flexcomm probe serve` running there, and does a firewall let TCP port {port} through?)"
            )
        }
        _ => String::new(),
    }
}

fn line(found: &DirectionResult) -> String {
    let rate = &found.rate;
    let bandwidth = Bandwidth::new(rate.bps).map_or_else(|_| format!("{} bit/s", rate.bps), |b| b.to_string());
    let how = if rate.steady { "steady" } else { "not steady: give more bytes or time" };
    let tcp = &found.tcp;
    format!(
        "{bandwidth} over {:.3} s ({how}) · {:.2} MB sent · rtt {:.3} ms, min {:.3} ms · {} retransmits · cwnd {} x {} B",
        rate.used_s,
        found.sent_bytes as f64 / 1e6,
        f64::from(tcp.rtt_us) / 1e3,
        f64::from(tcp.min_rtt_us) / 1e3,
        tcp.retransmits,
        tcp.cwnd,
        tcp.mss
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bytes_have_units() {
        assert_eq!(parse_bytes("250k"), Ok(250_000));
        assert_eq!(parse_bytes("1.5M"), Ok(1_500_000));
        assert_eq!(parse_bytes("17"), Ok(17));
        for bad in ["", "k", "-1", "nan", "1T", "é"] {
            assert!(parse_bytes(bad).is_err(), "{bad:?} was accepted");
        }
    }
}
