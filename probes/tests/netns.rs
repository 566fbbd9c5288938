//! Against the system's own tools, between two network namespaces.
#![allow(clippy::unwrap_used)]

mod common;

use common::{A, B, B6, Pair, able, alone, assert_medians, inside, ping_error, sh, side_by_side, unless_busy};
use flexcomm_probes::Token;
use flexcomm_probes::edge::{
    EchoProber, EchoResponder, EchoSettings, PingSettings, ThroughputServer, measure_throughput, ping_many,
    ping_many_surge, trace_route,
};
use flexcomm_probes::ping::PingPlan;
use flexcomm_probes::throughput::{Direction, Plan};
use flexcomm_probes::trace::TracePlan;
use std::net::{IpAddr, SocketAddr};
use std::sync::atomic::AtomicBool;
use std::time::{Duration, Instant};

fn token() -> Token {
    Token::new("the token of the tests").unwrap()
}

/// Median round trip in seconds of the system's ping.
fn system_ping(pair: &Pair, target: &str) -> f64 {
    let out = pair.run(&pair.a, &format!("ping -c 50 -i 0.02 {target}"));
    let times = out.lines().filter_map(|line| line.split("time=").nth(1)?.split(' ').next()?.parse::<f64>().ok());
    let mut times: Vec<f64> = times.collect();
    assert_eq!(times.len(), 50, "{out}");
    times.sort_by(f64::total_cmp);
    times[25] * 1e-3
}

fn settings() -> PingSettings {
    PingSettings { plan: PingPlan { count: 50, interval_s: 0.02, timeout_s: 2.0 }, payload: 56 }
}

/// The median of ping is within 5 % or 50 µs of the system's.
fn agree(what: &str, ours: impl Fn() -> f64 + Sync, system: impl Fn() -> f64) {
    let measure = || {
        let (ours, system) = side_by_side(&ours, &system);
        [ping_error(ours, system)]
    };
    assert_medians(&format!("{what}, error in units of what is allowed"), measure, |[error]| error.abs() <= 1.0);
}

#[test]
fn an_unprivileged_socket_is_used_where_the_system_allows_it() {
    use flexcomm_probes::edge::SocketKind;
    if !able(&[]) {
        return;
    }
    let _alone = alone();
    let pair = Pair::new("dgram");
    if !pair.v6 {
        return;
    }
    let ping = || {
        let report = inside(&pair.a, || {
            ping_many(&[B.parse().unwrap(), B6.parse().unwrap()], &settings(), &AtomicBool::new(false), &mut |_| {})
        });
        let report = report.unwrap();
        assert!(report.targets.iter().all(|t| t.answered == 50 && t.duplicates == 0), "{report:?}");
        (report.socket_v4.unwrap(), report.socket_v6.unwrap())
    };
    // Words with spaces: not by `run`.
    let allow = |range: &str| {
        let set = ["netns", "exec", &pair.a, "sysctl", "-qw", &format!("net.ipv4.ping_group_range={range}")];
        assert!(std::process::Command::new("ip").args(set).status().unwrap().success());
    };
    allow("0 2147483647");
    assert_eq!(ping(), (SocketKind::Datagram, SocketKind::Datagram));
    allow("1 0");
    assert_eq!(ping(), (SocketKind::Raw, SocketKind::Raw));
}

/// bit/s and bytes of the system's iperf3. Three seconds instead of its default ten: less to undercut.
fn iperf3(pair: &Pair) -> (f64, f64) {
    let begin = Instant::now();
    loop {
        let out = std::process::Command::new("ip")
            .args(["netns", "exec", &pair.a, "iperf3", "-c", B, "-t", "3", "-J"])
            .output()
            .unwrap();
        // A test that the busy server broke off ends with success, too, and without sums.
        let end = serde_json::from_slice::<serde_json::Value>(&out.stdout).unwrap_or_default()["end"].take();
        let number = |sum: &str, key: &str| end[sum][key].as_f64();
        if let (Some(bps), Some(bytes)) = (number("sum_received", "bits_per_second"), number("sum_sent", "bytes")) {
            return (bps, bytes);
        }
        assert!(begin.elapsed() < Duration::from_secs(60), "iperf3 measured nothing: {out:?}");
    }
}

#[test]
fn loss_is_seen_in_its_direction() {
    if !able(&[]) {
        return;
    }
    let _alone = alone();
    let pair = Pair::new("loss");
    let responder = inside(&pair.b, || EchoResponder::spawn(format!("{B}:0").parse().unwrap(), &token()).unwrap());
    let settings = EchoSettings { interval_s: 0.002, ..EchoSettings::default() };
    let (prober, events) = inside(&pair.a, || EchoProber::spawn(&token(), settings).unwrap());
    drop(events);
    prober.set_peers(&[responder.local_addr()]);
    let until = |what: &str, done: &dyn Fn() -> bool| {
        let begin = Instant::now();
        while !done() {
            assert!(begin.elapsed() < Duration::from_secs(60), "{what}: {:?}", prober.summaries());
            std::thread::yield_now();
        }
    };
    let summary = || prober.summary(responder.local_addr()).unwrap();
    until("answers", &|| summary().answered > 100);
    // The way back is cut for as long as fifty requests take to arrive, then it opens again.
    sh(&format!("ip -n {} route add blackhole {A}/32", pair.b));
    let arrived = responder.stats().replies;
    until("requests without a way back", &|| responder.stats().replies > arrived + 50);
    sh(&format!("ip -n {} route del blackhole {A}/32", pair.b));
    let answered = summary().answered;
    until("answers again", &|| summary().answered > answered + 20);
    until("the loss", &|| summary().loss > 0.0 && summary().loss_back.unwrap() > 0.0);
    assert_eq!(summary().loss_out, Some(0.0), "{:?}", summary());
}

#[test]
fn a_trace_names_every_router() {
    if !able(&[]) {
        return;
    }
    let _alone = alone();
    let (left, right) = (Pair::new("tr1"), Pair::new("tr2"));
    if !(left.v6 && right.v6) {
        return;
    }
    // left.a - left.b = router = right.a - right.b, over a second pair of networks.
    let (router, far) = (&left.b, &right.b);
    sh(&format!("ip link add up0 netns {router} type veth peer name up0 netns {far}"));
    for (ns, host) in [(router, 1), (far, 2)] {
        sh(&format!("ip -n {ns} addr add 10.98.0.{host}/24 dev up0"));
        let _ = std::process::Command::new("ip")
            .args(["-n", ns, "addr", "add", &format!("fd98::{host}/64"), "dev", "up0", "nodad"])
            .output();
        sh(&format!("ip -n {ns} link set up0 up"));
    }
    left.run(router, "sysctl -qw net.ipv4.ip_forward=1 net.ipv6.conf.all.forwarding=1 net.ipv4.icmp_ratelimit=0 net.ipv6.icmp.ratelimit=0");
    // The far end has a network of the same numbers towards its own peer: only the route back counts.
    sh(&format!("ip -n {far} addr flush dev veth0"));
    sh(&format!("ip -n {far} route add 10.99.0.0/24 via 10.98.0.1"));
    sh(&format!("ip -n {} route add 10.98.0.0/24 via {B}", left.a));
    sh(&format!("ip -n {far} route add fd99::/64 via fd98::1"));
    sh(&format!("ip -n {} route add fd98::/64 via {B6}", left.a));
    for (target, hop) in [("10.98.0.2", B), ("fd98::2", B6)] {
        let target: IpAddr = target.parse().unwrap();
        let trace = || inside(&left.a, || trace_route(target, &TracePlan::default(), &AtomicBool::new(false)));
        let path = trace().unwrap();
        assert!(path.reached, "{path:?}");
        assert_eq!(path.addresses(), vec![Some(hop.parse().unwrap()), Some(target)]);
        // The very first probes may fall to the search for neighbours.
        assert!(path.hops.iter().all(|hop| hop.median_s.is_some()), "{path:?}");
    }
}

/// Tests of this name compare times and rates: `./dev test` runs them with nothing beside.
mod timed {
    use super::*;

    #[test]
    fn ping_agrees_with_the_systems() {
        if !able(&["ping"]) {
            return;
        }
        let _alone = alone();
        let pair = Pair::new("ping");
        for target in [B, B6].into_iter().take(if pair.v6 { 2 } else { 1 }) {
            let addr: [IpAddr; 1] = [target.parse().unwrap()];
            let kernel = || {
                let report = inside(&pair.a, || ping_many(&addr, &settings(), &AtomicBool::new(false), &mut |_| {}));
                report.unwrap().targets[0].rtt.unwrap().median_s
            };
            agree(&format!("kernel {target}"), kernel, || system_ping(&pair, target));
            let surge = || {
                let report = inside(&pair.a, || {
                    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
                    runtime.block_on(ping_many_surge(&addr, &settings(), &AtomicBool::new(false)))
                });
                report.unwrap().targets[0].rtt.unwrap().median_s
            };
            agree(&format!("surge {target}"), surge, || system_ping(&pair, target));
        }
    }

    #[test]
    fn throughput_agrees_with_iperf3_at_a_tenth_of_its_bytes() {
        if !able(&["iperf3"]) {
            return;
        }
        let _alone = alone();
        let pair = Pair::new("tput");
        let server: SocketAddr = format!("{B}:0").parse().unwrap();
        let server = inside(&pair.b, || ThroughputServer::spawn(server, &token()).unwrap());
        let _iperf = pair.start(&pair.b, "iperf3 -s");
        for mbit in [100, 500] {
            pair.htb(mbit);
            let what = format!("{mbit} Mbit/s, error and share of iperf3's bytes, out and back");
            let measure = || {
                let (reference, spent) = iperf3(&pair);
                let plan = Plan::new(4, 64_000_000, 10.0, Direction::Both).unwrap();
                let found =
                    unless_busy(|| inside(&pair.a, || measure_throughput(server.local_addr(), &token(), &plan)));
                let (out, back) = (found.out.unwrap(), found.back.unwrap());
                let error = |bps: f64| bps / reference - 1.0;
                let share = |bytes: u64| bytes as f64 / spent;
                [error(out.rate.bps), share(out.sent_bytes), error(back.rate.bps), share(back.sent_bytes)]
            };
            assert_medians(&what, measure, |[out, spent_out, back, spent_back]| {
                [out, back].iter().all(|error| error.abs() <= 0.05)
                    && [spent_out, spent_back].iter().all(|s| **s <= 0.1)
            });
        }
    }

    #[test]
    fn a_small_budget_is_enough_for_a_slow_link() {
        if !able(&[]) {
            return;
        }
        let _alone = alone();
        let pair = Pair::new("slow");
        pair.htb(10);
        let server: SocketAddr = format!("{B}:0").parse().unwrap();
        let server = inside(&pair.b, || ThroughputServer::spawn(server, &token()).unwrap());
        let plan = Plan::new(4, 250_000, 5.0, Direction::Both).unwrap();
        let measure = || {
            let found = unless_busy(|| inside(&pair.a, || measure_throughput(server.local_addr(), &token(), &plan)));
            assert!(found.bytes() <= 250_000);
            [found.out_bps().unwrap(), found.back_bps().unwrap()].map(|bps| bps / 9.6e6 - 1.0)
        };
        assert_medians("10 Mbit/s, error out and back", measure, |errors| errors.iter().all(|error| error.abs() < 0.1));
    }
}
