//! Orders reach agents by stream and by polling, whole, with epochs that only grow.

use crate::common::{Agent, Api, Network, Server, TOKEN, config};
use flexcomm_wire::api::ScenarioSet;
use flexcomm_wire::{Orders, ReportBody, ThroughputReport};

/// The next `orders` event of a stream.
async fn next(stream: &mut reqwest::Response, buffer: &mut String) -> Option<Orders> {
    loop {
        if let Some((event, rest)) = buffer.clone().split_once("\n\n") {
            *buffer = rest.to_owned();
            let data = event.lines().find_map(|l| l.strip_prefix("data: "));
            if let (true, Some(data)) = (event.contains("event: orders"), data) {
                return Some(serde_json::from_str(data).unwrap());
            }
            continue;
        }
        let chunk = tokio::time::timeout(crate::common::TIMEOUT, stream.chunk())
            .await
            .expect("the stream is silent")
            .ok()??;
        buffer.push_str(std::str::from_utf8(&chunk).unwrap());
    }
}

async fn open(api: &Api, node: &str) -> reqwest::Response {
    let url = format!("{}/api/v1/agents/{node}/stream", api.url);
    api.client.get(url).bearer_auth(TOKEN).send().await.unwrap()
}

fn scenario(label: &str) -> ScenarioSet {
    let (latency_us, bandwidth_bps) = (1000.0, 1e7);
    ScenarioSet { label: label.into(), latency_us, jitter_us: 0.0, loss: 0.0, bandwidth_bps, nodes: None }
}

#[tokio::test]
async fn the_stream_brings_everything_at_once_and_every_change() {
    let dir = tempfile::tempdir().unwrap();
    let server = Server::start(config(dir.path())).await;
    let api = Api::new(&server.url);
    let mut a = Agent::new("a", 0);
    assert!(a.register(&api).await.status().is_success());
    crate::common::problem(open(&api, "nobody").await, 404).await;
    let (mut stream, mut buffer) = (open(&api, "a").await, String::new());
    let first = next(&mut stream, &mut buffer).await.unwrap();
    assert!(first.probes.peers.is_empty());

    let mut b = Agent::new("b", 1);
    assert!(b.register(&api).await.status().is_success());
    let mut seen = vec![first.epoch];
    let mut wait = async |what: &str, test: &dyn Fn(&Orders) -> bool| loop {
        let orders = next(&mut stream, &mut buffer).await.unwrap_or_else(|| panic!("{what}: the stream ended"));
        seen.push(orders.epoch);
        if test(&orders) {
            break orders;
        }
    };
    let with_peer = wait("a peer", &|o| !o.probes.peers.is_empty()).await;
    assert_eq!(with_peer.probes.peers[0].node, b.name);
    let grant = match with_peer.grants.first() {
        Some(grant) => grant.clone(),
        None => wait("a grant", &|o| !o.grants.is_empty()).await.grants[0].clone(),
    };
    let done = ReportBody::Throughput(ThroughputReport {
        grant: grant.id,
        peer: b.name.clone(),
        out_bps: Some(1e9),
        back_bps: Some(9e8),
        out_is_lower_bound: false,
        back_is_lower_bound: false,
        bytes: grant.budget_bytes,
        out_bytes: None,
        took_us: None,
        cpu_us: None,
        error: None,
    });
    let good = Network { latency_us: 100.0, bandwidth_bps: 1e9 };
    let link = a.link("b", good);
    a.report(&api, vec![link, done]).await;
    wait("the end of the grant", &|o| o.grants.is_empty()).await;
    api.put("/api/v1/scenario", &scenario("one")).await;
    wait("a shape", &|o| o.shape.as_ref().is_some_and(|s| s.bandwidth_bps == 1e7)).await;
    assert!(seen.windows(2).all(|w| w[0] < w[1]), "{seen:?}");
    let polled = a.orders(&api).await;
    assert!(polled.epoch >= *seen.last().unwrap());

    server.stop().await;
    while next(&mut stream, &mut buffer).await.is_some() {}
    let server = Server::start(config(dir.path())).await;
    let later = a.orders(&Api::new(&server.url)).await;
    assert!(later.epoch > polled.epoch, "the epoch grows across restarts");
    assert!(later.shape.is_some());
    server.stop().await;
}
