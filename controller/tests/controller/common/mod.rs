//! A controller on a port of its own, and agents that say what a test wants.

pub mod process;

use flexcomm_controller::{RawConfig, serve_on};
use flexcomm_domain::{JobId, NodeName, RunId, Seconds, Strategy};
use flexcomm_optimizer::PolicyConfig;
use flexcomm_optimizer::policy::TimeToQuality;
use flexcomm_wire::{
    AppliedReport, CodecInfo, Hello, LinkReport, Orders, PROTOCOL, Register, Report, ReportAck, ReportBatch,
    ReportBody, StepRecord, StepsReport, ThroughputReport, TrialOrder, TrialOutcome, TrialReport,
};
use reqwest::{Client, Response, StatusCode};
use serde::de::DeserializeOwned;
use serde_json::Value;
use std::collections::BTreeSet;
use std::path::Path;
use std::time::{Duration, Instant};
use tokio::net::TcpListener;
use tokio::sync::oneshot;

pub const TOKEN: &str = "a-token-for-tests";

/// Longest any test waits for something to happen.
pub const TIMEOUT: Duration = Duration::from_secs(120);

pub fn config(dir: &Path) -> RawConfig {
    let token_file = dir.join("token");
    std::fs::write(&token_file, TOKEN).unwrap();
    let s = |v| Seconds::new(v).unwrap();
    let mut config = RawConfig { db: dir.join("test.db"), token_file, scenario: true, ..RawConfig::default() };
    // A machine that stalls for seconds does not make agents of a test die.
    config.agents.dead_after_ms = 600_000;
    config.cycle.tick_ms = 50;
    config.cycle.debounce_ms = 5;
    // What is not sent is lost: then dense is best on a fast network.
    let lost = TimeToQuality { exponent: Some(1.0), ..TimeToQuality::default() };
    config.planner.policy = PolicyConfig::TimeToQuality(lost);
    config.planner.dwell_s = s(0.05);
    config.planner.switch_cost_s = s(0.01);
    config
}

pub struct Server {
    pub url: String,
    stop: Option<oneshot::Sender<()>>,
    task: tokio::task::JoinHandle<()>,
}

impl Server {
    pub async fn start(config: RawConfig) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let url = format!("http://{}", listener.local_addr().unwrap());
        let (stop, stopped) = oneshot::channel::<()>();
        let config = config.validate().unwrap();
        let task = tokio::spawn(async move {
            let stopped = async { drop(stopped.await) };
            serve_on(listener, config, stopped).await.unwrap();
        });
        Self { url, stop: Some(stop), task }
    }

    /// Waits until the store is there.
    pub async fn ready(self) -> Self {
        assert_eq!(Api::new(&self.url).get("/readyz").await.status(), 200);
        self
    }

    pub async fn stop(mut self) {
        drop(self.stop.take());
        self.task.await.unwrap();
    }
}

pub struct Api {
    pub client: Client,
    pub url: String,
}

impl Api {
    pub fn new(url: &str) -> Self {
        Self { client: Client::builder().no_proxy().timeout(TIMEOUT).build().unwrap(), url: url.to_owned() }
    }

    pub async fn get(&self, path: &str) -> Response {
        self.client.get(format!("{}{path}", self.url)).send().await.unwrap()
    }

    pub async fn json<T: DeserializeOwned>(&self, path: &str) -> T {
        let answer = self.get(path).await;
        assert_eq!(answer.status(), StatusCode::OK, "GET {path}");
        answer.json().await.unwrap()
    }

    pub async fn post(&self, path: &str, body: &impl serde::Serialize) -> Response {
        let request = self.client.post(format!("{}{path}", self.url)).bearer_auth(TOKEN).json(body);
        request.send().await.unwrap()
    }

    pub async fn put(&self, path: &str, body: &impl serde::Serialize) -> Response {
        self.client.put(format!("{}{path}", self.url)).bearer_auth(TOKEN).json(body).send().await.unwrap()
    }

    pub async fn delete(&self, path: &str) -> Response {
        self.client.delete(format!("{}{path}", self.url)).bearer_auth(TOKEN).send().await.unwrap()
    }

    /// Looks until something is there.
    pub async fn until<T>(&self, what: &str, mut look: impl AsyncFnMut(&Self) -> Option<T>) -> T {
        let since = Instant::now();
        loop {
            if let Some(found) = look(self).await {
                return found;
            }
            if since.elapsed() > TIMEOUT {
                let report: Value = self.json("/api/v1/jobs/j/report").await;
                panic!("{what} did not happen; the last report: {report:#}");
            }
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    }
}

pub async fn problem(answer: Response, status: u16) -> Value {
    assert_eq!(answer.status().as_u16(), status);
    let kind = answer.headers()["content-type"].to_str().unwrap().to_owned();
    assert_eq!(kind, "application/problem+json");
    let body: Value = answer.json().await.unwrap();
    assert_eq!(body["status"], status);
    assert!(body["detail"].as_str().is_some_and(|d| !d.is_empty()), "{body}");
    assert!(body["title"].is_string() && body["type"].is_string(), "{body}");
    body
}

pub fn node(name: &str) -> NodeName {
    NodeName::new(name).unwrap()
}

pub fn job() -> JobId {
    JobId::new("j").unwrap()
}

pub struct Agent {
    pub name: NodeName,
    pub instance: u64,
    pub seq: u64,
    pub rank: u32,
    /// Of the job that its trainer runs.
    pub run: Option<RunId>,
    /// Grants that it has used.
    pub granted: BTreeSet<u64>,
}

/// The world that agents report.
#[derive(Debug, Clone, Copy)]
pub struct Network {
    pub latency_us: f64,
    pub bandwidth_bps: f64,
}

pub const VALUES: u64 = 1_000_000;
pub const WORLD: u32 = 2;

impl Agent {
    pub fn new(name: &str, rank: u32) -> Self {
        Self { name: node(name), instance: u64::from(rank) + 100, seq: 0, rank, run: None, granted: BTreeSet::new() }
    }

    pub fn registration(&self) -> Register {
        Register {
            protocol: PROTOCOL,
            node: self.name.clone(),
            instance: self.instance,
            previous: vec![],
            addr: format!("10.0.0.{}", self.rank + 1).parse().unwrap(),
            echo_port: 7071,
            throughput_port: 7072,
            may_shape: true,
            software: "0.1.0".into(),
        }
    }

    pub async fn register(&mut self, api: &Api) -> Response {
        let answer = api.post("/api/v1/agents/register", &self.registration()).await;
        if answer.status().is_success() {
            let bytes: flexcomm_wire::Registered = answer.json().await.unwrap();
            self.seq = bytes.acked_seq;
            return api.get("/healthz").await;
        }
        answer
    }

    pub fn batch(&mut self, bodies: Vec<ReportBody>) -> ReportBatch {
        let report = |body| {
            self.seq += 1;
            Report { seq: self.seq, at_us: 1, body }
        };
        ReportBatch { instance: self.instance, reports: bodies.into_iter().map(report).collect() }
    }

    pub async fn report(&mut self, api: &Api, bodies: Vec<ReportBody>) -> ReportAck {
        let batch = self.batch(bodies);
        let answer = api.post(&format!("/api/v1/agents/{}/reports", self.name), &batch).await;
        assert_eq!(answer.status(), StatusCode::OK);
        answer.json().await.unwrap()
    }

    pub async fn orders(&self, api: &Api) -> Orders {
        let url = format!("{}/api/v1/agents/{}/orders", api.url, self.name);
        api.client.get(url).bearer_auth(TOKEN).send().await.unwrap().json().await.unwrap()
    }

    pub fn link(&self, peer: &str, network: Network) -> ReportBody {
        ReportBody::Link(LinkReport {
            peer: node(peer),
            latency_us: network.latency_us,
            latency_confidence: 0.95,
            latency_age_ms: 3.0,
            jitter_us: 5.0,
            loss_out: 0.0,
            loss_back: 0.0,
            by_icmp: false,
        })
    }

    /// The latency of a link, and a throughput test of it that ended earlier.
    pub fn measured(&self, peer: &str, network: Network) -> [ReportBody; 2] {
        [self.link(peer, network), tested(0, node(peer), Some(network.bandwidth_bps), 1 << 20)]
    }

    /// Throughput tests that new orders grant, as they end on such a network; without one they fail.
    pub fn tests(&mut self, orders: &Orders, network: Option<Network>) -> Vec<ReportBody> {
        let bps = network.map(|network| network.bandwidth_bps);
        let new = orders.grants.iter().filter(|grant| self.granted.insert(grant.id));
        new.map(|grant| tested(grant.id, grant.peer.clone(), bps, grant.budget_bytes)).collect()
    }

    pub fn hello(&self) -> ReportBody {
        self.hello_with(&["topk"])
    }

    pub fn hello_with(&self, compressors: &[&str]) -> ReportBody {
        let codec = |text: &&str| CodecInfo {
            compressor: (*text).to_owned(),
            header_bytes: 16,
            index_bytes: 4.0,
            index_coding: None,
            value_bytes: 4.0,
            rounds: 1,
            times: None,
            on_request: false,
        };
        ReportBody::JobSeen(Hello {
            run: self.run,
            codecs: compressors.iter().map(codec).collect(),
            collectives: ["dense-ring", "dense-tree", "allgather", "art-ring", "art-tree"].map(Into::into).to_vec(),
            ..Hello::new(job(), (self.rank, WORLD), VALUES, "lab-tcp")
        })
    }

    pub fn applied(&self, version: u64, digest: u64, step: u64) -> ReportBody {
        ReportBody::Applied(AppliedReport { job: job(), rank: self.rank, version, digest, step })
    }

    /// `count` steps from `from` on, with a collective of `sync_us` and 2 ms of computation.
    pub fn steps(&self, (version, strategy): (u64, Strategy), (from, count): (u64, u64), sync_us: f64) -> ReportBody {
        let comp_us = if strategy.is_dense() { 0.0 } else { 500.0 };
        let record = |step| StepRecord {
            step,
            compute_us: 2000.0,
            comp_us,
            wait_us: None,
            sync_us: sync_us + 10.0 * f64::from(self.rank),
            step_us: 2000.0 + comp_us + sync_us + 10.0 * f64::from(self.rank),
            bytes_sent: 1000,
            gain: if strategy.is_dense() { 1.0 } else { 0.8 },
            energy: Some(1.0),
            bucket_energies: Vec::new(),
            loss: Some(2.0 / (step + 1) as f64),
            accuracy: None,
        };
        let steps = (from..from + count).map(record).collect();
        let strategy = strategy.into();
        ReportBody::Steps(StepsReport { job: job(), rank: self.rank, version, strategy, steps })
    }

    /// Gain falls slowly as less is kept, so that compression pays on a slow network.
    pub fn trial(&self, order: &TrialOrder) -> ReportBody {
        let outcome = |wire: &flexcomm_wire::StrategyWire| TrialOutcome {
            strategy: wire.clone(),
            gain: Strategy::try_from(wire).unwrap().cr().get().powf(0.1),
            energy: Some(1.0),
            shadow_gain: None,
            shadow_energy: None,
            comp_us: 500.0,
            sync_us: 1000.0,
            iterations: order.iterations,
        };
        ReportBody::Trial(TrialReport {
            job: job(),
            rank: self.rank,
            id: order.id,
            outcomes: order.candidates.iter().map(outcome).collect(),
            aborted: None,
            cost_us: 1e5,
            bytes: Some(3_000_000),
            cpu_us: Some(2e5),
            shadow_us: None,
        })
    }
}

fn tested(grant: u64, peer: NodeName, bps: Option<f64>, bytes: u64) -> ReportBody {
    ReportBody::Throughput(ThroughputReport {
        grant,
        peer,
        out_bps: bps,
        back_bps: bps,
        out_is_lower_bound: false,
        back_is_lower_bound: false,
        bytes: bps.map_or(0, |_| bytes),
        out_bytes: None,
        took_us: None,
        cpu_us: None,
        error: bps.is_none().then(|| "no connection".to_owned()),
    })
}
