//! An agent in a network namespace of its own watches the connections of a job there.

use crate::support::{Agent, Controller, DEADLINE, config};
use crate::tc_common::{Net, can_make_namespaces};
use flexcomm_wire::EchoPeer;
use std::io::{Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::sync::Arc;
use std::time::{Duration, Instant};

/// The peer answers neither echoes nor tests: what is known of the link comes from the job's connection.
fn silent_peer() -> EchoPeer {
    EchoPeer { node: "b".parse().unwrap(), addr: [10, 99, 0, 2].into(), echo_port: 7071, throughput_port: 7072 }
}

/// Endless bytes from the namespace to its peer, over a link of 50 Mbit/s in which they queue.
fn job(net: &Net) {
    net.tc(&["qdisc", "add", "dev", "v0", "root", "tbf", "rate", "50mbit", "burst", "32kb", "latency", "100ms"]);
    let listener = net.within_peer(|| TcpListener::bind("10.99.0.2:0").unwrap());
    let there = listener.local_addr().unwrap();
    let mut sender = net.within(|| TcpStream::connect(there).unwrap());
    let mut receiver = listener.accept().unwrap().0;
    // Both end with the sockets when the test's process does, or with an error when the namespaces go.
    std::thread::spawn(move || while receiver.read(&mut [0; 65536]).is_ok_and(|n| n > 0) {});
    std::thread::spawn(move || while sender.write_all(&[1; 65536]).is_ok() {});
}

/// The agent's counter of samples taken in from connections and trainers; there is no trainer here.
async fn samples(listen: SocketAddr) -> Option<u64> {
    let client = reqwest::Client::builder().no_proxy().build().unwrap();
    let text = client.get(format!("http://{listen}/metrics")).send().await.ok()?.text().await.ok()?;
    let line = text.lines().find_map(|line| line.strip_prefix("flexcomm_agent_passive_samples_total "))?;
    line.parse().ok()
}

async fn watches_the_job() {
    let controller = Controller::start().await;
    let folder = Arc::new(tempfile::tempdir().unwrap());
    let listen: SocketAddr = "127.0.0.1:7073".parse().unwrap();
    let config = flexcomm_agent::Config { metrics_listen: Some(listen), ..config(&controller, "a", folder.path()) };
    let agent = Agent::with(config, folder);
    controller.registered("a").await;
    controller.order(|orders| orders.probes.peers = vec![silent_peer()]);
    let begun = Instant::now();
    while samples(listen).await.is_none_or(|count| count < 5) {
        assert!(begun.elapsed() < DEADLINE, "the job's connection brings no samples");
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
    // Its thread ends with it.
    agent.end().await;
}

#[test]
fn the_connections_of_a_job_are_samples_of_the_link() {
    if !can_make_namespaces() {
        return;
    }
    let net = Net::new();
    job(&net);
    net.within(|| {
        let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build().unwrap();
        runtime.block_on(watches_the_job());
    });
}
