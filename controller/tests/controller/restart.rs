//! The controller is killed, again and again, in the middle of reports and decisions. What it acknowledged is
//! there, versions only grow, nothing is there twice.

use crate::common::process::{Process, TOKEN_FILE};
use crate::common::{Agent, Api, Network};
use flexcomm_domain::Strategy;
use flexcomm_wire::api::HistoryEntry;
use flexcomm_wire::{Orders, ReportAck, ReportBatch};
use std::collections::BTreeMap;
use std::time::{Duration, Instant};

/// How often it is killed.
const KILLS: u32 = 24;

/// An agent as it should be: keeps a batch until it is acknowledged.
struct Spooler {
    agent: Agent,
    unacked: Option<ReportBatch>,
    acked: u64,
    links: usize,
}

impl Spooler {
    /// Registers when needed and sends what waits. False when the server went away.
    async fn deliver(&mut self, api: &Api) -> bool {
        let Some(batch) = &self.unacked else { return true };
        let path = format!("{}/api/v1/agents/{}/reports", api.url, self.agent.name);
        let sent = api.client.post(path).bearer_auth(crate::common::TOKEN).json(batch).send().await;
        let Ok(answer) = sent else { return false };
        if answer.status() == 404 {
            let url = format!("{}/api/v1/agents/register", api.url);
            let body = self.agent.registration();
            return api.client.post(url).bearer_auth(crate::common::TOKEN).json(&body).send().await.is_ok();
        }
        let Ok(ack) = answer.json::<ReportAck>().await else { return false };
        assert_eq!(ack.rejected, 0, "{:?}", ack.first_reason);
        assert_eq!(ack.acked_seq, self.agent.seq);
        self.acked = ack.acked_seq;
        self.unacked = None;
        true
    }
}

/// An agent's orders; none of one that is not registered. An error: the server went away.
async fn orders(api: &Api, name: &str) -> reqwest::Result<Option<Orders>> {
    let url = format!("{}/api/v1/agents/{name}/orders", api.url);
    let answer = api.client.get(url).bearer_auth(crate::common::TOKEN).send().await?;
    if answer.status() == 404 { Ok(None) } else { answer.json().await.map(Some) }
}

struct Life {
    spoolers: [Spooler; 2],
    step: u64,
    version: u64,
    strategy: Strategy,
    trial: u64,
    fast: bool,
    /// The step from which the network is slow; none before the first decision.
    falls_at: Option<u64>,
    published: BTreeMap<u64, (u64, String)>,
    epoch: u64,
}

impl Life {
    fn new() -> Self {
        let spooler = |name, rank| Spooler { agent: Agent::new(name, rank), unacked: None, acked: 0, links: 0 };
        Self {
            spoolers: [spooler("a", 0), spooler("b", 1)],
            step: 0,
            version: 0,
            strategy: Strategy::DENSE_RING,
            trial: 0,
            fast: true,
            falls_at: None,
            published: BTreeMap::new(),
            epoch: 0,
        }
    }

    /// Ten steps and what the orders say, delivered or kept. False when the server went away.
    async fn train(&mut self, api: &Api) -> bool {
        for spooler in &mut self.spoolers {
            if !spooler.deliver(api).await {
                return false;
            }
        }
        if self.spoolers.iter().any(|s| s.unacked.is_some()) {
            return true;
        }
        let (Ok(of_a), Ok(of_b)) = (orders(api, "a").await, orders(api, "b").await) else { return false };
        self.follow(of_a, of_b);
        true
    }

    fn follow(&mut self, of_a: Option<Orders>, of_b: Option<Orders>) {
        let (first, granted) = (of_a.is_none(), [of_a.clone(), of_b]);
        // It falls once, some steps after the first decision, and stays so: a network that changes faster than it is measured is no
        // reason to decide.
        self.fast = self.step < self.falls_at.unwrap_or(u64::MAX);
        let bandwidth_bps = if self.fast { 25e9 } else { 5e7 };
        let network = Network { latency_us: 200.0, bandwidth_bps };
        let sent = if self.strategy.is_dense() { 1.0 } else { 2.0 * self.strategy.cr().get() };
        let sync_us = 2.0 * network.latency_us + sent * 32e6 / bandwidth_bps * 1e6;
        let job = of_a.and_then(|o| {
            assert!(o.epoch >= self.epoch, "epoch {} after {}", o.epoch, self.epoch);
            self.epoch = o.epoch;
            o.jobs.into_iter().next()
        });
        let decision = job.as_ref().and_then(|j| j.decision.clone());
        if let Some(d) = &decision {
            assert!(d.version >= self.version, "version {} after {}", d.version, self.version);
            let known = self.published.insert(d.version, (d.parent, format!("{:?}", d.strategy)));
            let now = (d.parent, format!("{:?}", d.strategy));
            assert!(known.is_none_or(|before| before == now), "decision {} changed", d.version);
        }
        let trial = job.and_then(|j| j.trial).filter(|t| t.id > self.trial);
        let next = decision.filter(|d| d.version > self.version);
        let (step, ran) = (self.step, (self.version, self.strategy));
        self.step += 10;
        for ((spooler, peer), granted) in self.spoolers.iter_mut().zip(["b", "a"]).zip(granted) {
            let agent = &mut spooler.agent;
            let mut bodies = vec![agent.hello()];
            if !first {
                spooler.links += 1;
                bodies.push(agent.link(peer, network));
                bodies.push(agent.steps(ran, (step, 10), sync_us));
                if let Some(granted) = &granted {
                    bodies.extend(agent.tests(granted, Some(network)));
                }
                bodies.extend(trial.as_ref().map(|t| agent.trial(t)));
                bodies.extend(next.as_ref().map(|d| agent.applied(d.version, d.digest, step + 10)));
            }
            spooler.unacked = Some(agent.batch(bodies));
        }
        self.trial = trial.map_or(self.trial, |t| t.id);
        if let Some(d) = next {
            self.falls_at.get_or_insert(self.step + 200);
            (self.version, self.strategy) = (d.version, Strategy::try_from(&d.strategy).unwrap());
        }
    }
}

#[tokio::test]
async fn a_database_has_one_controller_until_that_is_killed() {
    let dir = tempfile::tempdir().unwrap();
    let (mut first, api) = Process::start(dir.path()).await;
    let token_file = dir.path().join("another-token");
    let second = Process::command(dir.path()).env(TOKEN_FILE, &token_file).status().unwrap();
    assert_eq!(second.code(), Some(1));
    let error = std::fs::read_to_string(dir.path().join("error")).unwrap();
    let pid = first.0.id();
    assert!(error.contains(&format!("the controller with process {pid} works with it")), "{error}");
    assert!(error.contains(&format!("kill {pid}")) && error.contains("--db"), "{error}");
    assert!(!token_file.exists(), "a start that failed made a token");
    assert_eq!(api.get("/readyz").await.status(), 200, "the first goes on");
    first.0.kill().unwrap();
    drop(first);
    let (_third, api) = Process::start(dir.path()).await;
    assert_eq!(api.get("/readyz").await.status(), 200);
}

#[tokio::test]
async fn killed_again_and_again_it_loses_nothing() {
    let dir = tempfile::tempdir().unwrap();
    let mut life = Life::new();
    let since = Instant::now();
    // On a slow machine a life is too short for a decision: more lives.
    for kill in 0u32.. {
        if kill >= KILLS && (life.version >= 2 || since.elapsed() > crate::common::TIMEOUT) {
            break;
        }
        let (mut process, api) = Process::start(dir.path()).await;
        // Each life ends at another moment, some in the middle of a request.
        let lives_on = Duration::from_millis(60 + u64::from(kill) * 37 % 240);
        let end = tokio::time::sleep(lives_on);
        tokio::pin!(end);
        loop {
            tokio::select! {
                () = &mut end => break,
                alive = life.train(&api) => assert!(alive, "the server went away by itself"),
            }
        }
        process.0.kill().unwrap();
        drop(process);
    }
    assert!(life.version >= 2, "only {} decisions in {KILLS} lives", life.version);

    let (process, api) = Process::start(dir.path()).await;
    let since = Instant::now();
    while life.spoolers.iter().any(|s| s.unacked.is_some()) {
        for spooler in &mut life.spoolers {
            spooler.deliver(&api).await;
        }
        assert!(since.elapsed() < crate::common::TIMEOUT);
    }
    let history: Vec<HistoryEntry> = api.json("/api/v1/jobs/j/history?limit=5000").await;
    let versions: Vec<u64> = history.iter().rev().map(|h| h.decision.version).collect();
    let expected: Vec<u64> = (1..=versions.len() as u64).collect();
    assert_eq!(versions, expected, "versions grow by one, each is there once");
    for entry in &history {
        assert_eq!(entry.decision.parent + 1, entry.decision.version);
        if let Some((parent, _)) = life.published.get(&entry.decision.version) {
            assert_eq!(*parent, entry.decision.parent);
        }
    }
    let stored = *versions.last().unwrap();
    assert!(life.published.keys().all(|v| *v <= stored), "a decision was published that is not stored");
    let metrics = api.get("/metrics").await.text().await.unwrap();
    for spooler in &life.spoolers {
        let line = format!("flexcomm_node_acked_reports_total{{node=\"{}\"}} {}\n", spooler.agent.name, spooler.acked);
        assert!(metrics.contains(&line), "no {line} in\n{metrics}");
        assert_eq!(spooler.acked, spooler.agent.seq);
        let peer = if spooler.agent.rank == 0 { "b" } else { "a" };
        let path = format!("/api/v1/links/{}/{peer}/history", spooler.agent.name);
        let stored: Vec<serde_json::Value> = api.json(&path).await;
        // Old ones go once a minute.
        assert!((spooler.links.min(1024)..=spooler.links).contains(&stored.len()), "each report is stored once");
    }
    drop(process);
}
