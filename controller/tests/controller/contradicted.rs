//! One node that is wrong about its links: the job adapts to what the other nodes and its own steps show, and whoever looks
//! learns which node is not believed.

use crate::common::{Agent, Api, Network, Server, VALUES, config};
use flexcomm_domain::Strategy;
use flexcomm_wire::ReportBody;
use flexcomm_wire::api::{DecisionView, JobView};
use serde_json::Value;

const NAMES: [&str; 3] = ["a", "b", "c"];
const FAST: Network = Network { latency_us: 100.0, bandwidth_bps: 100e9 };
const SLOW: Network = Network { latency_us: 100.0, bandwidth_bps: 100e6 };

struct Cluster {
    agents: Vec<Agent>,
    step: u64,
    /// What c reports of its links instead of what they are.
    claim: Option<Network>,
}

impl Cluster {
    async fn start(api: &Api) -> Self {
        let mut agents: Vec<Agent> = NAMES.iter().zip(0..).map(|(name, rank)| Agent::new(name, rank)).collect();
        for agent in &mut agents {
            assert!(agent.register(api).await.status().is_success());
        }
        for agent in &mut agents {
            let ReportBody::JobSeen(mut hello) = agent.hello() else { unreachable!() };
            hello.world = 3;
            agent.report(api, vec![ReportBody::JobSeen(hello)]).await;
        }
        Self { agents, step: 0, claim: None }
    }

    /// Ten steps under the newest decision over such a network. All ranks say that it is in force.
    async fn train(&mut self, api: &Api, network: Network) {
        let order = self.agents[0].orders(api).await.jobs.into_iter().find_map(|j| j.decision);
        let now = order.as_ref().map_or((0, Strategy::DENSE_RING), |order| {
            (order.version, order.to_decision(&crate::common::job()).unwrap().plan.alike().copied().unwrap())
        });
        for (agent, name) in self.agents.iter_mut().zip(NAMES) {
            let orders = agent.orders(api).await;
            let trial = orders.jobs.first().and_then(|j| j.trial.clone());
            let claims = self.claim.filter(|_| name == "c").unwrap_or(network);
            let peers = NAMES.iter().filter(|peer| **peer != name);
            let mut bodies: Vec<ReportBody> = peers.map(|peer| agent.link(peer, claims)).collect();
            bodies.extend(order.as_ref().map(|order| agent.applied(order.version, order.digest, self.step)));
            bodies.push(agent.steps(now, (self.step, 10), sync_us(now.1, network)));
            bodies.extend(trial.map(|t| agent.trial(&t)));
            bodies.extend(agent.tests(&orders, Some(claims)));
            assert_eq!(agent.report(api, bodies).await.first_reason, None);
        }
        self.step += 10;
    }
}

/// What the slowest of three links carries in a step.
fn sync_us(strategy: Strategy, network: Network) -> f64 {
    let bytes = if strategy.is_dense() { 16.0 / 3.0 } else { 16.0 * strategy.cr().get() } * VALUES as f64;
    4.0 * network.latency_us + bytes * 8e6 / network.bandwidth_bps
}

#[tokio::test]
async fn a_node_that_is_wrong_about_its_links_is_named_and_the_job_adapts_all_the_same() {
    let dir = tempfile::tempdir().unwrap();
    let server = Server::start(config(dir.path())).await;
    let api = Api::new(&server.url);
    let mut cluster = Cluster::start(&api).await;
    let decision = async |api: &Api| -> Option<DecisionView> {
        let answer = api.get("/api/v1/jobs/j/decision").await;
        if answer.status() == 404 { None } else { Some(answer.json().await.unwrap()) }
    };
    let before = api
        .until("a decision that all ranks follow", async |api| {
            cluster.train(api, FAST).await;
            decision(api).await.filter(|d| d.applied_at_step.is_some())
        })
        .await;
    assert_eq!(before.cr, 1.0, "{}", before.reason);
    let seen: JobView = api.json("/api/v1/jobs/j").await;
    assert_eq!(seen.doubted, []);

    cluster.claim = Some(Network { latency_us: 100.0, bandwidth_bps: 1e5 });
    let seen: JobView = api
        .until("the node is named", async |api| {
            cluster.train(api, FAST).await;
            let view: JobView = api.json("/api/v1/jobs/j").await;
            (!view.doubted.is_empty()).then_some(view)
        })
        .await;
    assert_eq!(seen.doubted.len(), 1, "{:?}", seen.doubted);
    let doubt = &seen.doubted[0];
    assert!(doubt.node == Some(crate::common::node("c")) && doubt.what.contains("its links count as"), "{doubt:?}");
    let metrics = api.get("/metrics").await.text().await.unwrap();
    assert!(metrics.contains("flexcomm_job_doubted{node=\"c\",training_job=\"j\"} 1\n"), "{metrics}");
    let now = decision(&api).await.unwrap();
    assert_eq!((now.cr, now.version), (1.0, before.version), "{}", now.reason);
    let report: Value = api.json("/api/v1/jobs/j/report").await;
    let alternatives = report["report"]["alternatives"].as_array().unwrap();
    let longest = alternatives.iter().map(|a| a["t_step_s"].as_f64().unwrap()).fold(0.0, f64::max);
    assert!(longest < 1.0, "priced on what c claims: a step of {longest} s");

    // The network really falls; c goes on with its claim.
    let after = api
        .until("it compresses", async |api| {
            cluster.train(api, SLOW).await;
            decision(api).await.filter(|d| d.cr < 1.0)
        })
        .await;
    assert!(after.version > before.version);
    server.stop().await;
}
