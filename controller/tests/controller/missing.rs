//! A job one of whose agents is gone is seen through the agents that live, and whoever looks learns which node is
//! missing, since when, and what that means.

use crate::common::{Agent, Api, Network, Server, config};
use flexcomm_domain::Strategy;
use flexcomm_wire::api::{DecisionView, IntervalView};
use serde_json::Value;
use std::cell::RefCell;
use std::io::Write;
use std::sync::Once;

const GOOD: Network = Network { latency_us: 100.0, bandwidth_bps: 25e9 };

thread_local! {
    /// What was logged on a test's thread, where its server runs, too.
    static LOG: RefCell<Vec<u8>> = const { RefCell::new(Vec::new()) };
}

struct Log;

impl Write for Log {
    fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
        LOG.with_borrow_mut(|log| log.write(bytes))
    }
    fn flush(&mut self) -> std::io::Result<()> {
        Ok(())
    }
}

/// One subscriber for the process: what a place in the code logs is decided once for all threads.
fn keep_logs() {
    static ONCE: Once = Once::new();
    ONCE.call_once(|| tracing_subscriber::fmt().with_ansi(false).with_writer(|| Log).init());
}

fn logged() -> String {
    LOG.with_borrow(|log| String::from_utf8(log.clone()).unwrap())
}

fn lines(part: &str) -> usize {
    logged().lines().filter(|line| line.contains(part)).count()
}

/// Two agents; those in `live` report. No rank but those that live says that a decision is in force.
struct Cluster {
    agents: [Agent; 2],
    step: u64,
}

impl Cluster {
    async fn start(api: &Api) -> Self {
        let mut agents = [Agent::new("a", 0), Agent::new("b", 1)];
        for (agent, peer) in agents.iter_mut().zip(["b", "a"]) {
            assert!(agent.register(api).await.status().is_success());
            let bodies = [agent.hello()].into_iter().chain(agent.measured(peer, GOOD)).collect();
            agent.report(api, bodies).await;
        }
        Self { agents, step: 0 }
    }

    /// Ten steps on the ranks that live, under the decision that they know.
    async fn train(&mut self, api: &Api, live: &[usize], (version, strategy): (u64, Strategy)) {
        for &index in live {
            let agent = &mut self.agents[index];
            let orders = agent.orders(api).await;
            let trial = orders.jobs.first().and_then(|j| j.trial.clone());
            // Steps that are no faster than dense ones would be left for these, whatever the dwell time.
            let step_us = if strategy.is_dense() { 50_000.0 } else { 20_000.0 };
            let mut bodies = vec![agent.steps((version, strategy), (self.step, 10), step_us)];
            bodies.push(agent.link(["b", "a"][index], GOOD));
            bodies.extend(trial.map(|t| agent.trial(&t)));
            let ack = agent.report(api, bodies).await;
            assert_eq!(ack.first_reason, None);
        }
        self.step += 10;
    }

    /// Until something was decided, which no rank follows yet.
    async fn decided(&mut self, api: &Api) -> DecisionView {
        api.until("a decision", async |api| {
            self.train(api, &[0, 1], (0, Strategy::DENSE_RING)).await;
            let answer = api.get("/api/v1/jobs/j/decision").await;
            if answer.status() == 404 { None } else { Some(answer.json().await.unwrap()) }
        })
        .await
    }
}

async fn server(dir: &std::path::Path) -> Server {
    let mut config = config(dir);
    (config.agents.heartbeat_ms, config.agents.dead_after_ms) = (200, 1500);
    // Ranks go on under the first decision here, whatever the planner would like to try.
    config.planner.dwell_s = flexcomm_domain::Seconds::new(3600.0).unwrap();
    Server::start(config).await
}

/// Beyond the window of steps that the controller keeps, in which the silent rank's last steps are.
const FAR: u64 = 2100;

/// Whether the job is shown at its newest step.
fn follows(view: &Value, step: u64) -> bool {
    view["step_us"].is_number() && view["step"] == step - 1
}

async fn newest_interval(api: &Api) -> u64 {
    let all: Vec<IntervalView> = api.json("/api/v1/jobs/j/intervals").await;
    all.last().map_or(0, |i| i.to_step)
}

#[tokio::test]
async fn a_job_is_seen_through_the_agents_that_live() {
    keep_logs();
    let dir = tempfile::tempdir().unwrap();
    let server = server(dir.path()).await;
    let api = Api::new(&server.url);
    let mut cluster = Cluster::start(&api).await;
    let decision = cluster.decided(&api).await;
    let last = cluster.step;
    let whole: Value = api.json("/api/v1/jobs/j").await;
    assert_eq!((whole["missing"].clone(), lines("missing")), (serde_json::json!([]), 0));

    // From here on rank 1's agent is silent. Rank 0 follows the decision, and rank 1 follows rank 0.
    let order = cluster.agents[0].orders(&api).await.jobs[0].decision.clone().unwrap();
    let strategy = *order.to_decision(&crate::common::job()).unwrap().plan.alike().unwrap();
    let applied = cluster.agents[0].applied(decision.version, order.digest, last);
    cluster.agents[0].report(&api, vec![applied]).await;
    let seen: Value = api
        .until("steps of the rank whose agent lives", async |api| {
            cluster.train(api, &[0], (decision.version, strategy)).await;
            let view: Value = api.json("/api/v1/jobs/j").await;
            let shown = follows(&view, cluster.step) && newest_interval(api).await > last + 20;
            let now: DecisionView = api.json("/api/v1/jobs/j/decision").await;
            let shown = shown && now.applied_at_step.is_some();
            (shown && view["missing"].as_array().is_some_and(|m| !m.is_empty())).then_some(view)
        })
        .await;
    let missing = &seen["missing"][0];
    assert_eq!((&missing["node"], &missing["ranks"]), (&"b".into(), &serde_json::json!([1])), "{missing}");
    assert!(missing["since"].as_str().unwrap().starts_with("20") && missing["since_us"].as_u64().unwrap() > 0);
    let meaning = missing["meaning"].as_str().unwrap();
    assert!(meaning.contains("rank 1") && meaning.contains("through rank 0"), "{meaning}");
    assert_eq!((&seen["live_ranks"], &seen["world"]), (&1.into(), &2.into()));
    let now: DecisionView = api.json("/api/v1/jobs/j/decision").await;
    assert_eq!((now.version, now.applied_at_step), (decision.version, Some(last)), "rank 0's report counts");
    let metrics = api.get("/metrics").await.text().await.unwrap();
    assert!(metrics.contains("flexcomm_job_missing_nodes{training_job=\"j\"} 1\n"), "{metrics}");
    assert!(metrics.contains("flexcomm_job_missing_node_seconds{node=\"b\",training_job=\"j\"}"), "{metrics}");

    api.until("steps far beyond the silent rank's", async |api| {
        cluster.train(api, &[0], (decision.version, strategy)).await;
        let view: Value = api.json("/api/v1/jobs/j").await;
        (follows(&view, cluster.step) && newest_interval(api).await > last + FAR).then_some(())
    })
    .await;

    assert!(cluster.agents[1].register(&api).await.status().is_success());
    api.until("the node is back", async |api| {
        cluster.train(api, &[0, 1], (decision.version, strategy)).await;
        let view: Value = api.json("/api/v1/jobs/j").await;
        (view["missing"] == serde_json::json!([]) && lines("node b is back") > 0).then_some(())
    })
    .await;
    for (part, times) in
        [("node b is missing", 1), ("job=j node=b silent_s", 1), ("node b is back", 1), ("node a is", 0)]
    {
        assert_eq!(lines(part), times, "{part}: {}", logged());
    }
    let metrics = api.get("/metrics").await.text().await.unwrap();
    assert!(metrics.contains("flexcomm_job_missing_nodes{training_job=\"j\"} 0\n"), "{metrics}");
    server.stop().await;
}

#[tokio::test]
async fn without_the_agent_of_rank_0_no_decision_reaches_the_job() {
    let dir = tempfile::tempdir().unwrap();
    let server = server(dir.path()).await;
    let api = Api::new(&server.url);
    let mut cluster = Cluster::start(&api).await;
    let decision = cluster.decided(&api).await;
    let last = cluster.step;
    let seen: Value = api
        .until("steps of the rank whose agent lives", async |api| {
            cluster.train(api, &[1], (0, Strategy::DENSE_RING)).await;
            let view: Value = api.json("/api/v1/jobs/j").await;
            let shown = follows(&view, cluster.step) && newest_interval(api).await > last + FAR;
            (shown && view["missing"].as_array().is_some_and(|m| !m.is_empty())).then_some(view)
        })
        .await;
    let missing = &seen["missing"][0];
    assert_eq!((&missing["node"], &missing["ranks"]), (&"a".into(), &serde_json::json!([0])), "{missing}");
    let meaning = missing["meaning"].as_str().unwrap();
    assert!(meaning.contains("no new decision") && !meaning.contains("through rank 0"), "{meaning}");
    let now: DecisionView = api.json("/api/v1/jobs/j/decision").await;
    assert_eq!((now.version, now.applied_at_step), (decision.version, None), "no rank has switched");
    server.stop().await;
}
