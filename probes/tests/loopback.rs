//! Echo and throughput over the loopback interface: the whole path, without timing.
#![allow(clippy::unwrap_used)]

mod common;

use common::{assert_medians, has_ipv6, skipped, unless_busy};
use flexcomm_probes::Token;
use flexcomm_probes::edge::{
    EchoProber, EchoResponder, EchoSettings, MeasureError, ThroughputServer, measure_throughput,
};
use flexcomm_probes::throughput::{Direction, Plan, Refusal};
use std::net::SocketAddr;
use std::time::{Duration, Instant};

const TIMEOUT: Duration = Duration::from_secs(30);

fn token() -> Token {
    Token::new("the token of the tests").unwrap()
}

fn any(v6: bool) -> SocketAddr {
    if v6 { "[::1]:0".parse().unwrap() } else { "127.0.0.1:0".parse().unwrap() }
}

/// Waits for events until `enough` says so.
fn collect(v6: bool, token_of_prober: &Token, enough: impl Fn(&EchoProber, SocketAddr, usize) -> bool) -> usize {
    let responder = EchoResponder::spawn(any(v6), &token()).unwrap();
    let settings = EchoSettings { interval_s: 0.005, ..EchoSettings::default() };
    let (prober, mut events) = EchoProber::spawn(token_of_prober, settings).unwrap();
    let peer = responder.local_addr();
    prober.set_peers(&[peer]);
    let (begin, mut samples) = (Instant::now(), 0);
    while !enough(&prober, peer, samples) {
        assert!(begin.elapsed() < TIMEOUT, "only {samples} samples");
        while let Ok(event) = events.try_recv() {
            assert_eq!(event.peer, peer);
            samples += usize::from(event.sample.is_some());
        }
        std::thread::yield_now();
    }
    samples
}

#[test]
fn echoes_come_back_over_both_families() {
    for v6 in [false, true] {
        if v6 && !has_ipv6() {
            continue;
        }
        collect(v6, &token(), |prober, peer, samples| {
            let summary = prober.summary(peer).unwrap();
            samples >= 50 && summary.answered >= 50 && summary.loss_out == Some(0.0)
        });
    }
}

#[test]
fn a_foreign_token_gets_no_echo() {
    let foreign = Token::new("some other token").unwrap();
    let samples = collect(false, &foreign, |prober, peer, _| prober.summary(peer).unwrap().sent >= 5);
    assert_eq!(samples, 0);
}

#[test]
fn throughput_is_measured_both_ways_and_within_budget() {
    let server = ThroughputServer::spawn(any(false), &token()).unwrap();
    for streams in [1, 4] {
        let plan = Plan::new(streams, 8_000_000, 5.0, Direction::Both).unwrap();
        let result = unless_busy(|| measure_throughput(server.local_addr(), &token(), &plan));
        assert!(result.out_bps().unwrap() > 1e6 && result.back_bps().unwrap() > 1e6, "{result:?}");
        assert!(result.bytes() <= 8_000_000, "{result:?}");
        assert!(result.out.unwrap().tcp.mss > 0);
    }
}

#[test]
fn one_direction_and_ipv6() {
    if !has_ipv6() {
        return;
    }
    let server = ThroughputServer::spawn(any(true), &token()).unwrap();
    let plan = Plan::new(2, 1_000_000, 5.0, Direction::Back).unwrap();
    let result = measure_throughput(server.local_addr(), &token(), &plan).unwrap();
    assert!(result.out.is_none() && result.back.is_some());
}

#[test]
fn a_foreign_token_gets_no_session() {
    let server = ThroughputServer::spawn(any(false), &token()).unwrap();
    let foreign = Token::new("some other token").unwrap();
    let error = measure_throughput(server.local_addr(), &foreign, &Plan::default()).unwrap_err();
    assert!(matches!(error, MeasureError::Refused(Refusal::Token)), "{error}");
}

#[test]
fn a_second_session_is_refused_clearly_and_the_first_goes_on() {
    let server = ThroughputServer::spawn(any(false), &token()).unwrap();
    let addr = server.local_addr();
    // Paced at 8 Mbit/s, the first takes about a second. It may itself come while a small one runs.
    let first = std::thread::spawn(move || {
        let plan = Plan::new(1, 1_000_000, 5.0, Direction::Out).unwrap().paced(8_000_000);
        loop {
            match measure_throughput(addr, &token(), &plan) {
                Err(MeasureError::Refused(Refusal::Busy(_))) => std::thread::yield_now(),
                outcome => break outcome,
            }
        }
    });
    let small = Plan::new(1, 100_000, 5.0, Direction::Out).unwrap();
    let begin = Instant::now();
    let refused = loop {
        match measure_throughput(addr, &token(), &small) {
            Err(MeasureError::Refused(Refusal::Busy(ms))) => break ms,
            Err(error) => panic!("{error}"),
            Ok(_) => assert!(begin.elapsed() < TIMEOUT, "never busy"),
        }
    };
    assert!(refused > 0);
    assert!(first.join().unwrap().is_ok());
    unless_busy(|| measure_throughput(addr, &token(), &small));
}

#[test]
fn garbage_and_silence_do_not_block_the_server() {
    use std::io::Write;
    let server = ThroughputServer::spawn(any(false), &token()).unwrap();
    let mut silent = Vec::new();
    for i in 0..20u8 {
        let mut socket = std::net::TcpStream::connect(server.local_addr()).unwrap();
        if i % 2 == 0 {
            let _ = socket.write_all(&[i; 4096]);
        }
        silent.push(socket);
    }
    let plan = Plan::new(1, 200_000, 5.0, Direction::Out).unwrap();
    measure_throughput(server.local_addr(), &token(), &plan).unwrap();
}

/// Far more connections than may be in their handshake, all of them silent and all from one address.
#[test]
fn a_crowd_of_silent_connections_shuts_nobody_out() {
    let server = ThroughputServer::spawn(any(false), &token()).unwrap();
    let crowd = || -> Vec<_> { (0..200).map(|_| std::net::TcpStream::connect(server.local_addr()).unwrap()).collect() };
    let mut silent = crowd();
    for _ in 0..3 {
        // So few bytes that all came at once, on a processor that was away for a while, would tell no rate.
        let plan = Plan::new(4, 20_000_000, 5.0, Direction::Out).unwrap();
        unless_busy(|| measure_throughput(server.local_addr(), &token(), &plan));
        silent.extend(crowd());
    }
}

/// The server says goodbye by itself: what blocks is the read of its challenge and then of the end.
#[test]
fn a_connection_without_the_token_is_closed() {
    use std::io::Read;
    let server = ThroughputServer::spawn(any(false), &token()).unwrap();
    let mut socket = std::net::TcpStream::connect(server.local_addr()).unwrap();
    socket.set_read_timeout(Some(TIMEOUT)).unwrap();
    let mut got = Vec::new();
    socket.read_to_end(&mut got).unwrap();
    assert!(!got.is_empty(), "a challenge comes first");
}

/// A server that takes connections and never says a word.
#[test]
fn a_measurement_can_be_stopped_before_it_begins() {
    use flexcomm_probes::edge::measure_throughput_until;
    use std::sync::atomic::{AtomicBool, Ordering};
    let mute = std::net::TcpListener::bind(any(false)).unwrap();
    let addr = mute.local_addr().unwrap();
    let stop = AtomicBool::new(false);
    let outcome = std::thread::scope(|scope| {
        let measuring = scope.spawn(|| measure_throughput_until(addr, &token(), &Plan::default(), &stop));
        let _socket = mute.accept().unwrap();
        stop.store(true, Ordering::Relaxed);
        measuring.join().unwrap()
    });
    assert!(matches!(outcome, Err(MeasureError::Stopped)), "{outcome:?}");
    let outcome = measure_throughput_until(addr, &token(), &Plan::default(), &stop);
    assert!(matches!(outcome, Err(MeasureError::Stopped)), "{outcome:?}");
}

#[test]
fn no_server_is_said_plainly() {
    let plan = Plan::default();
    let error = measure_throughput("127.0.0.1:1".parse().unwrap(), &token(), &plan).unwrap_err().to_string();
    assert!(error.starts_with("connect to 127.0.0.1:1: "), "{error}");
}

#[test]
fn a_stopped_measurement_gives_what_it_has() {
    use flexcomm_probes::edge::measure_throughput_until;
    use std::sync::atomic::AtomicBool;
    let server = ThroughputServer::spawn(any(false), &token()).unwrap();
    let plan = Plan::new(1, 100_000_000, 30.0, Direction::Both).unwrap().paced(20_000_000);
    let stop = AtomicBool::new(false);
    let result = std::thread::scope(|scope| {
        let measuring = scope.spawn(|| measure_throughput_until(server.local_addr(), &token(), &plan, &stop));
        std::thread::sleep(Duration::from_millis(100));
        stop.store(true, std::sync::atomic::Ordering::Relaxed);
        measuring.join().unwrap()
    });
    // Stopped before the first byte there is nothing to tell; after it, one direction at most.
    match result {
        Ok(result) => assert!(result.back.is_none() && result.bytes() < 50_000_000, "{result:?}"),
        Err(error) => assert!(matches!(error, MeasureError::Nothing | MeasureError::Stopped), "{error}"),
    }
}

#[test]
fn loopback_answers_pings_and_ends_a_trace() {
    use flexcomm_probes::edge::{PingError, PingSettings, ping_many, trace_route};
    use flexcomm_probes::ping::PingPlan;
    use flexcomm_probes::trace::TracePlan;
    use std::net::IpAddr;
    use std::sync::atomic::AtomicBool;
    let stop = AtomicBool::new(false);
    let mut targets: Vec<IpAddr> = (1..200u8).map(|i| IpAddr::from([127, 1, 0, i])).collect();
    let v6 = has_ipv6();
    if v6 {
        targets.push("::1".parse().unwrap());
    }
    let settings = PingSettings { plan: PingPlan { count: 4, interval_s: 0.4, timeout_s: 5.0 }, payload: 56 };
    let lost = || match ping_many(&targets, &settings, &stop, &mut |_| {}) {
        Ok(report) => {
            assert_eq!(report.targets.len(), targets.len());
            [report.targets.iter().filter(|t| (t.answered, t.loss) != (4, 0.0)).count() as f64]
        }
        Err(PingError::Permission(error)) => {
            skipped(&format!("its ping part: no ICMP socket is allowed here ({error})"));
            [0.0]
        }
        Err(error) => panic!("{error}"),
    };
    assert_medians("targets on the loopback interface that lost echoes", lost, |[bad]| *bad == 0.0);
    for target in ["127.0.0.1", "::1"].into_iter().take(if v6 { 2 } else { 1 }) {
        let target: IpAddr = target.parse().unwrap();
        let path = trace_route(target, &TracePlan::default(), &stop).unwrap();
        assert!(path.reached, "{path:?}");
        assert_eq!(path.addresses(), vec![Some(target)]);
    }
}

#[test]
fn surge_ping_is_there_by_name() {
    use flexcomm_probes::edge::{PingBackend, PingError, PingSettings, ping_many_surge};
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    let targets = ["127.0.0.1".parse().unwrap(), "127.0.0.2".parse().unwrap()];
    match runtime.block_on(ping_many_surge(&targets, &PingSettings::default(), &Default::default())) {
        Ok(report) => {
            assert_eq!(report.backend, PingBackend::Surge);
            assert!(report.targets.iter().all(|t| t.answered == 10), "{report:?}");
        }
        Err(PingError::Permission(error)) => skipped(&format!("no ICMP socket is allowed here ({error})")),
        Err(error) => panic!("{error}"),
    }
}
