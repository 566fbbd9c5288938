//! What links are told of throughput tests, by what carries the tests out.

use super::*;
use crate::skipped;
use crate::spool::Spool;
use flexcomm_probes::echo::Loss;
use flexcomm_probes::edge::{PingSettings, ping_many};
use std::collections::BTreeMap;
use std::net::{Ipv4Addr, TcpListener, TcpStream};
use std::sync::atomic::Ordering;

const FAST_BPS: f64 = 235e6;
/// What is left of it beside a test: less than half, but more than what no sharing explains.
const SHARED_BPS: f64 = 105e6;

/// One link on which pieces of streams have shown [`FAST_BPS`], and a grant to test it, in use.
struct Bench {
    links: Arc<Mutex<Links>>,
    reports: Arc<ReportLog>,
    grants_in: mpsc::Sender<(Instant, ThroughputGrant)>,
    _folder: tempfile::TempDir,
}

/// The controller is on loopback by default.
fn config(text: &str) -> Config {
    Config::parse(text, crate::Overrides { token: Some("a-test-token".into()), ..Default::default() }).unwrap()
}

fn token() -> Token {
    Token::new("a token of tests").unwrap()
}

impl Bench {
    /// The peer's throughput server is at `server`.
    fn start(server: SocketAddr) -> Self {
        let (folder, metrics) = (tempfile::tempdir().unwrap(), Metrics::new().unwrap());
        let reports = ReportLog::new(Spool::open(&folder.path().join("spool"), 1 << 20).unwrap(), metrics.clone());
        let links = Arc::new(Mutex::new(Links::new(Instant::now())));
        let (node, throughput_port) = ("b".parse().unwrap(), server.port());
        let peers = [EchoPeer { node, addr: server.ip(), echo_port: 1, throughput_port }];
        lock(&links).set_peers((&peers, Duration::from_millis(100)), Instant::now());
        let tests = Tests {
            links: links.clone(),
            token: token(),
            reports: reports.clone(),
            metrics,
            budget: Budget::open(folder.path().join("budget"), 0.01, 0.0),
            began: Instant::now(),
            quit: Arc::default(),
        };
        let (grants_in, grants) = mpsc::channel(1);
        tokio::spawn(tests.run(grants));
        let grant = ThroughputGrant { id: 1, peer: "b".parse().unwrap(), budget_bytes: 1 << 20, valid_ms: 60_000 };
        let bench = Self { links, reports, grants_in, _folder: folder };
        bench.pieces(FAST_BPS, Instant::now());
        bench.grants_in.try_send((Instant::now(), grant)).unwrap();
        bench
    }

    /// Pieces of a stream, more than a fall needs, the last of which ends at `at`.
    fn pieces(&self, bps: f64, at: Instant) {
        let bytes = 2_500_000;
        let samples = [(bytes, bytes as f64 * 8.0 / bps); 5];
        assert_eq!(lock(&self.links).transfers(Ipv4Addr::LOCALHOST.into(), &samples, at), 5);
    }

    fn bandwidth(&self) -> f64 {
        lock(&self.links).capacity_bps(Instant::now())
    }

    /// Whether the test has ended.
    fn reported(&self) -> bool {
        self.reports.waiting() > 0
    }

    async fn end(&self) {
        let begun = Instant::now();
        while !self.reported() {
            assert!(begun.elapsed() < Duration::from_secs(120), "the test never ends");
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    }

    /// Slow pieces that begin well after the test are a fall of the link.
    fn is_believed_again(&self) {
        self.pieces(SHARED_BPS, Instant::now() + Duration::from_secs(1));
        let found = self.bandwidth();
        assert!((found / SHARED_BPS - 1.0).abs() < 0.1, "{found} although the test is over");
    }
}

/// A test towards a server that does not answer, the connection that it waits on, and the bandwidth of its link after
/// slow pieces.
async fn while_a_test_waits() -> (Bench, TcpStream, f64) {
    loop {
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
        let bench = Bench::start(listener.local_addr().unwrap());
        let (connection, _) = tokio::task::spawn_blocking(move || listener.accept().unwrap()).await.unwrap();
        bench.pieces(SHARED_BPS, Instant::now());
        let found = bench.bandwidth();
        // A machine that stalled for seconds in between has shown nothing: the test gave up.
        if !bench.reported() {
            return (bench, connection, found);
        }
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn what_a_test_slows_down_is_no_fall_until_it_fails() {
    let (bench, connection, found) = while_a_test_waits().await;
    assert!((found / FAST_BPS - 1.0).abs() < 0.1, "{found} while a test shares the link");
    drop(connection);
    bench.end().await;
    bench.is_believed_again();
}

#[tokio::test(flavor = "multi_thread")]
async fn a_test_that_brings_a_result_is_over() {
    let server = ThroughputServer::spawn((Ipv4Addr::LOCALHOST, 0).into(), &token()).unwrap();
    let bench = Bench::start(server.local_addr());
    bench.end().await;
    let batch = bench.reports.batch(1, 1 << 20).unwrap();
    let text = String::from_utf8_lossy(&batch[0].payload).into_owned();
    assert!(text.contains("\"out_bps\":") && !text.contains("\"out_bps\":null"), "{text}");
    bench.is_believed_again();
}

/// The loopback answers ICMP on all of 127.0.0.0/8, and nothing answers UDP echoes there.
#[tokio::test]
async fn a_peer_whose_echoes_are_lost_is_measured_by_icmp_until_it_answers_them() {
    let addr = IpAddr::from([127, 0, 0, 77]);
    if let Err(error) = ping_many(&[addr], &PingSettings::default(), &AtomicBool::new(true), &mut |_| {}) {
        return skipped::skipped(&format!("no ICMP socket is allowed here ({error})"));
    }
    let metrics = Metrics::new().unwrap();
    let began = Instant::now();
    let peer = EchoPeer { node: "b".parse().unwrap(), addr, echo_port: 7071, throughput_port: 7072 };
    let mut links = Links::new(began);
    links.set_peers((std::slice::from_ref(&peer), Duration::from_millis(100)), began);
    assert!(links.silent(began).is_empty(), "it has had no time to answer");
    let (links, quit) = (Arc::new(Mutex::new(links)), Arc::new(AtomicBool::new(false)));
    let hosts = Arc::new(Mutex::new(Hosts::of(&config("ping_hosts = [\"127.0.0.78\", \"gateway\"]"))));
    let shared = (links.clone(), hosts.clone(), metrics.clone(), quit.clone());
    let pings = tokio::task::spawn_blocking(move || pings::watch(&shared.0, &shared.1, &shared.2, &shared.3));
    let lost = BTreeMap::from([(echo_addr(&peer), Loss { sent: 9, answered: 0, out: None, back: None })]);
    let report = loop {
        assert!(began.elapsed() < Duration::from_secs(60), "it is never pinged");
        tokio::time::sleep(Duration::from_millis(50)).await;
        let due = lock(&links).reports(&lost, Instant::now(), Duration::from_secs(2));
        if let Some(report) = due.into_iter().next() {
            break report;
        }
    };
    assert!(report.by_icmp && report.latency_us < 1e6 && report.loss_out < 0.5, "{report:?}");
    assert!(metrics.peers_pinged_total.get() > 0);
    quit.store(true, Ordering::Relaxed);
    pings.await.unwrap();
    let seen = lock(&hosts).seen();
    assert_eq!(
        seen.iter().map(|host| host.host.as_str()).collect::<Vec<_>>(),
        ["127.0.0.78"],
        "no gateway on loopback"
    );
    assert!(seen[0].addr.is_some() && seen[0].loss.is_some_and(|loss| loss < 0.5), "{seen:?}");
}
