//! The probes against `ping` and `iperf3`, between two namespaces: `cargo run --example compare -p flexcomm-probes`.
//! Needs root, iproute2, iputils-ping and iperf3; takes about two minutes.
#![allow(clippy::print_stdout, clippy::unwrap_used)]

#[path = "../tests/common/mod.rs"]
mod common;

use common::{B, Pair, able, inside};
use flexcomm_probes::Token;
use flexcomm_probes::edge::{
    EchoProber, EchoResponder, EchoSettings, PingSettings, ThroughputServer, measure_throughput, ping_many,
    ping_many_surge,
};
use flexcomm_probes::ping::PingPlan;
use flexcomm_probes::throughput::{Direction, Plan};
use std::net::{IpAddr, SocketAddr};
use std::sync::atomic::AtomicBool;
use std::time::Duration;

fn main() {
    if !able(&["ping", "iperf3"]) {
        return;
    }
    let pair = Pair::new("cmp");
    let token = Token::new("the token of the comparison").unwrap();
    latency(&pair, &token);
    bandwidth(&pair, &token);
}

fn row(name: &str, min: f64, median: f64, p95: f64) {
    println!("| {name} | {:.1} | {:.1} | {:.1} |", min * 1e6, median * 1e6, p95 * 1e6);
}

fn latency(pair: &Pair, token: &Token) {
    println!("| 200 round trips, µs | min | median | p95 |\n|---|---|---|---|");
    let out = pair.run(&pair.a, &format!("ping -c 200 -i 0.02 {B}"));
    let times = out.lines().filter_map(|line| line.split("time=").nth(1)?.split(' ').next()?.parse::<f64>().ok());
    let times: Vec<f64> = times.map(|ms| ms * 1e-3).collect();
    let system = flexcomm_probes::stats::Summary::of(&times).unwrap();
    row("ping (iputils)", system.min_s, system.median_s, system.p95_s);
    let plan = PingPlan { count: 200, interval_s: 0.02, timeout_s: 1.0 };
    let settings = PingSettings { plan, payload: 56 };
    let (target, stop): ([IpAddr; 1], _) = ([B.parse().unwrap()], AtomicBool::new(false));
    let kernel = inside(&pair.a, || ping_many(&target, &settings, &stop, &mut |_| {})).unwrap();
    let surge = inside(&pair.a, || {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        runtime.block_on(ping_many_surge(&target, &settings, &stop)).unwrap()
    });
    for (name, report) in [("probe ping, kernel", kernel), ("probe ping, surge", surge)] {
        let rtt = report.targets[0].rtt.unwrap();
        row(name, rtt.min_s, rtt.median_s, rtt.p95_s);
    }
    let any: SocketAddr = format!("{B}:0").parse().unwrap();
    let responder = inside(&pair.b, || EchoResponder::spawn(any, token).unwrap());
    let settings = EchoSettings { interval_s: 0.02, ..EchoSettings::default() };
    let (prober, _events) = inside(&pair.a, || EchoProber::spawn(token, settings).unwrap());
    prober.set_peers(&[responder.local_addr()]);
    let summary = || prober.summary(responder.local_addr()).unwrap();
    while summary().answered < 200 {
        std::thread::sleep(Duration::from_millis(20));
    }
    let rtt = summary().rtt.unwrap();
    row("probe echo", rtt.min_s, rtt.median_s, rtt.p95_s);
}

fn bandwidth(pair: &Pair, token: &Token) {
    println!("\n| htb | iperf3 Mbit/s, MB | probe out Mbit/s, MB | probe back Mbit/s, MB | worst error | most bytes |");
    println!("|---|---|---|---|---|---|");
    let any: SocketAddr = format!("{B}:0").parse().unwrap();
    let server = inside(&pair.b, || ThroughputServer::spawn(any, token).unwrap());
    let _iperf = pair.start(&pair.b, "iperf3 -s");
    std::thread::sleep(Duration::from_millis(500));
    for mbit in [10, 100, 500] {
        pair.htb(mbit);
        let json = pair.run(&pair.a, &format!("iperf3 -c {B} -J"));
        let end = serde_json::from_str::<serde_json::Value>(&json).unwrap()["end"].clone();
        let (rate, spent) =
            (end["sum_received"]["bits_per_second"].as_f64().unwrap(), end["sum_sent"]["bytes"].as_f64().unwrap());
        let budget = if mbit == 10 { 1_000_000 } else { 64_000_000 };
        let plan = Plan::new(4, budget, 10.0, Direction::Both).unwrap();
        let found = inside(&pair.a, || measure_throughput(server.local_addr(), token, &plan)).unwrap();
        let (out, back) = (found.out.unwrap(), found.back.unwrap());
        let error = |bps: f64| (bps / rate - 1.0).abs();
        let worst = error(out.rate.bps).max(error(back.rate.bps)) * 100.0;
        let most = out.sent_bytes.max(back.sent_bytes) as f64 / spent * 100.0;
        let cell = |bps: f64, bytes: f64| format!("{:.2}, {:.1}", bps / 1e6, bytes / 1e6);
        println!(
            "| {mbit} Mbit/s | {} | {} | {} | {worst:.1} % | {most:.1} % |",
            cell(rate, spent),
            cell(out.rate.bps, out.sent_bytes as f64),
            cell(back.rate.bps, back.sent_bytes as f64)
        );
    }
}
