//! What links are told of throughput tests, by what carries the tests out.

use super::*;
use crate::skipped;
use crate::spool::Spool;
use flexcomm_domain::NodeName;
use flexcomm_probes::echo::Loss;
use flexcomm_probes::edge::{PingSettings, ping_many};
use std::collections::BTreeMap;
use std::net::{IpAddr, Ipv4Addr};

/// The controller is on loopback by default.
fn config(text: &str) -> Config {
    Config::parse(text, crate::Overrides { token: Some("a-test-token".into()), ..Default::default() }).unwrap()
}

fn token() -> Token {
    Token::new("a token of tests").unwrap()
}

#[tokio::test(flavor = "multi_thread")]
async fn a_link_and_the_controller_learn_what_a_test_found() {
    let server = ThroughputServer::spawn((Ipv4Addr::LOCALHOST, 0).into(), &token()).unwrap();
    let (folder, metrics) = (tempfile::tempdir().unwrap(), Metrics::new().unwrap());
    let reports = ReportLog::new(Spool::open(&folder.path().join("spool"), 1 << 20).unwrap(), metrics.clone());
    let links = Arc::new(Mutex::new(Links::new(Instant::now())));
    let (addr, node) = (server.local_addr(), NodeName::new("b").unwrap());
    let peers = [EchoPeer { node: node.clone(), addr: addr.ip(), echo_port: 1, throughput_port: addr.port() }];
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
    let grant = ThroughputGrant { id: 1, peer: node, budget_bytes: 1 << 20, valid_ms: 60_000 };
    grants_in.try_send((Instant::now(), grant)).unwrap();
    let begun = Instant::now();
    while reports.waiting() == 0 {
        assert!(begun.elapsed() < Duration::from_secs(120), "the test never ends");
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
    let batch = reports.batch(1, 1 << 20).unwrap();
    let text = String::from_utf8_lossy(&batch[0].payload).into_owned();
    assert!(text.contains("\"out_bps\":") && !text.contains("\"out_bps\":null"), "{text}");
    assert!(lock(&links).capacity_bps() > 0.0);
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
