//! A cluster's life as the API shows it: agents come, a job starts, the network collapses, the decision follows and says
//! why, a trial is asked for and answered.

use crate::common::{Agent, Api, Network, Server, VALUES, config, node};
use flexcomm_controller::replay::{Comparison, Replayed, Settings, replay};
use flexcomm_domain::{Link, LinkMatrix, Strategy, Version};
use flexcomm_optimizer::Problem;
use flexcomm_wire::ReportBody;
use flexcomm_wire::api::{
    DecisionView, HistoryEntry, IntervalView, JobView, LinkView, NodeView, SnapshotEntry, TrialView,
};
use serde_json::Value;

const FAST: Network = Network { latency_us: 100.0, bandwidth_bps: 100e9 };
pub const SLOW: Network = Network { latency_us: 1000.0, bandwidth_bps: 100e6 };

/// Two agents with a rank each, and trainers that follow orders.
pub struct Cluster {
    pub agents: [Agent; 2],
    pub network: Network,
    step: u64,
    version: u64,
    strategy: Strategy,
    trials_answered: u64,
    /// What runs before the first decision, when it is not the strategy.
    own: Option<Strategy>,
    /// Whether the agents have nothing to say of the links yet.
    blind: bool,
}

impl Cluster {
    pub async fn start(api: &Api) -> Self {
        let mut agents = [Agent::new("a", 0), Agent::new("b", 1)];
        for agent in &mut agents {
            assert!(agent.register(api).await.status().is_success());
        }
        Self {
            agents,
            network: FAST,
            step: 0,
            version: 0,
            strategy: Strategy::DENSE_RING,
            trials_answered: 0,
            own: None,
            blind: false,
        }
    }

    fn sync_us(&self) -> f64 {
        let link = Link::new(self.network.latency_us * 1e-6, self.network.bandwidth_bps).unwrap();
        let problem = Problem::new(VALUES, LinkMatrix::uniform(2, link).unwrap());
        // The world is a bit slower than the model, so that there is something to fit.
        1.2 * problem.evaluate(&self.strategy).unwrap().t_sync.get() * 1e6
    }

    /// Ten steps on each rank; then whatever the orders say.
    async fn train(&mut self, api: &Api) {
        let orders = self.agents[0].orders(api).await;
        let sync_us = self.sync_us();
        let (step, ran) = (self.step, (self.version, self.strategy));
        self.step += 10;
        let job = orders.jobs.first().cloned();
        let trial = job.as_ref().and_then(|j| j.trial.clone()).filter(|t| t.id > self.trials_answered);
        let next = job.and_then(|j| j.decision).filter(|d| d.version > self.version);
        for (index, peer) in [(0, "b"), (1, "a")] {
            let agent = &mut self.agents[index];
            let mut steps = agent.steps(ran, (step, 10), sync_us);
            if let (ReportBody::Steps(report), 0, Some(own)) = (&mut steps, ran.0, self.own) {
                report.strategy = own.into();
                report.steps.iter_mut().for_each(|s| (s.comp_us, s.step_us, s.gain) = (300.0, s.step_us + 300.0, 0.7));
            }
            let mut bodies = vec![steps];
            if !self.blind {
                bodies.push(agent.link(peer, self.network));
                let own = agent.orders(api).await;
                bodies.extend(agent.tests(&own, Some(self.network)));
            }
            bodies.extend(trial.as_ref().map(|t| agent.trial(t)));
            bodies.extend(next.as_ref().map(|d| agent.applied(d.version, d.digest, step + 10)));
            let ack = agent.report(api, bodies).await;
            assert_eq!((ack.rejected, ack.first_reason, ack.acked_seq), (0, None, agent.seq));
        }
        self.trials_answered = trial.map_or(self.trials_answered, |t| t.id);
        if let Some(order) = next {
            let decision = order.to_decision(&crate::common::job()).unwrap();
            assert_eq!(decision.parent, Version(self.version), "a decision was skipped");
            (self.version, self.strategy) = (order.version, *decision.plan.alike().unwrap());
        }
    }

    pub async fn train_until<T>(&mut self, api: &Api, what: &str, mut look: impl AsyncFnMut(&Api) -> Option<T>) -> T {
        api.until(what, async |api| {
            self.train(api).await;
            look(api).await
        })
        .await
    }
}

pub async fn decision(api: &Api) -> Option<DecisionView> {
    let answer = api.get("/api/v1/jobs/j/decision").await;
    if answer.status() == 404 { None } else { Some(answer.json().await.unwrap()) }
}

/// The nodes are there, a job is announced, and its report says what it waits for.
async fn a_job_is_announced(cluster: &mut Cluster, api: &Api) {
    let nodes: Vec<NodeView> = api.json("/api/v1/nodes").await;
    assert_eq!(nodes.iter().map(|n| n.node.as_str()).collect::<Vec<_>>(), ["a", "b"]);
    assert!(nodes.iter().all(|n| n.live && n.may_shape));

    for agent in &mut cluster.agents {
        let hello = agent.hello();
        agent.report(api, vec![hello]).await;
    }
    let jobs: Vec<JobView> = api.json("/api/v1/jobs").await;
    assert_eq!(jobs[0].nodes, [Some(node("a")), Some(node("b"))]);
    assert_eq!((jobs[0].live_ranks, jobs[0].step), (2, 0));
    api.until("waiting for links", async |api| {
        let report: Value = api.json("/api/v1/jobs/j/report").await;
        report["waiting"][0].as_str().filter(|w| *w == "no latency from a to b, no latency from b to a").map(drop)
    })
    .await;
}

/// By the planner, or by the user where the planner knows enough.
async fn a_trial_is_asked_for(cluster: &mut Cluster, api: &Api) {
    let asked = api.post("/api/v1/jobs/j/trials", &serde_json::json!({})).await.status();
    assert!(asked == 202 || asked == 409, "{asked}");
    let trials: Vec<TrialView> = cluster
        .train_until(api, "a trial", async |api| {
            let trials: Vec<TrialView> = api.json("/api/v1/jobs/j/trials").await;
            trials.iter().any(|t| t.state == "done").then_some(trials)
        })
        .await;
    assert_eq!(trials.last().unwrap().outcomes.len(), trials.last().unwrap().candidates.len());
}

/// Dense on the fast network; returns the decision in force.
async fn the_first_decision(cluster: &mut Cluster, api: &Api) -> DecisionView {
    let first = cluster.train_until(api, "the first decision", async |api| decision(api).await).await;
    let links: Vec<LinkView> = api.json("/api/v1/links").await;
    assert_eq!(links.len(), 2);
    assert_eq!(links[0].bandwidth_bps, Some(FAST.bandwidth_bps));
    let applied = cluster
        .train_until(api, "the first decision in force", async |api| {
            decision(api).await.filter(|d| d.applied_at_step.is_some())
        })
        .await;
    assert!(applied.version >= first.version && applied.cr > 0.9, "dense is best on a fast network: {applied:?}");
    applied
}

async fn the_network_collapses(cluster: &mut Cluster, api: &Api, applied: &DecisionView) -> DecisionView {
    cluster.network = SLOW;
    let second = cluster
        .train_until(api, "another decision", async |api| {
            decision(api).await.filter(|d| d.cr < 1.0 && d.applied_at_step.is_some())
        })
        .await;
    assert!(second.version > applied.version && !second.reason.is_empty());
    second
}

/// Returns how long the history is.
async fn the_history_says_why(api: &Api, first: &DecisionView, second: &DecisionView) -> usize {
    let history: Vec<HistoryEntry> = api.json("/api/v1/jobs/j/history").await;
    let versions: Vec<u64> = history.iter().map(|h| h.decision.version).collect();
    assert!(versions.windows(2).all(|w| w[0] == w[1] + 1), "{versions:?}");
    let entry = history.iter().find(|h| h.decision.version == second.version).unwrap();
    assert!(entry.report["alternatives"].as_array().unwrap().len() > 5);
    assert!(entry.report["seen"]["links"]["bandwidth_worst_bps"].as_f64().unwrap() < 1e9);
    let since = history.iter().filter(|h| h.decision.version > first.version);
    let mut changed = since.filter_map(|h| h.report["changed"].as_str());
    let fell = |what: &str| what.contains("bandwidth fell from ") && what.contains(" Gbit/s to ");
    assert!(changed.any(fell), "{history:#?}");
    let saves = |a: &Value| a["saves"].as_f64().zip(a["sure"].as_f64());
    assert!(
        saves(&entry.report["best"]).is_some_and(|(saves, sure)| saves >= 0.0 && sure <= 1.0),
        "{:#}",
        entry.report
    );
    assert!(entry.report["seed"].is_u64());
    history.len()
}

/// Every decision, and the newest look, by what is stored of them.
pub async fn all_is_decided_again_the_same(api: &Api, decisions: usize) {
    let entries: Vec<SnapshotEntry> = api.json("/api/v1/jobs/j/snapshots").await;
    let replayed: Vec<Replayed> = entries.iter().map(|entry| replay(entry, &Settings::new())).collect();
    assert!(replayed.iter().all(|r| r.comparison == Comparison::Same), "{replayed:#?}");
    assert!(replayed.iter().all(|r| r.form.is_empty() && r.at.is_some()), "{replayed:#?}");
    let made = |r: &&Replayed| r.recorded.as_ref().is_some_and(|choice| choice.verdict == "change");
    assert!(replayed.iter().filter(made).count() >= decisions && decisions >= 2, "{replayed:#?}");
}

async fn snapshots_are_paged(api: &Api) {
    let versions = async |query: &str| -> Vec<u64> {
        let page: Vec<SnapshotEntry> = api.json(&format!("/api/v1/jobs/j/snapshots{query}")).await;
        page.iter().map(|entry| entry.version).collect()
    };
    assert_eq!(versions("?before=3&limit=1").await, [2]);
    assert_eq!(versions("?before=3&limit=4000000000").await, [2, 1]);
    assert!(versions("?before=1").await.is_empty());
    assert_eq!(api.get("/api/v1/jobs/nobody/snapshots").await.status(), 404);
    assert_eq!(api.get("/api/v1/jobs/j/snapshots?since=3").await.status(), 400);
}

async fn time_is_predicted_and_measured(cluster: &mut Cluster, api: &Api, second: &DecisionView) {
    let intervals: Vec<IntervalView> = cluster
        .train_until(api, "measured intervals", async |api| {
            let all: Vec<IntervalView> = api.json("/api/v1/jobs/j/intervals").await;
            let own = all.iter().filter(|i| i.version >= second.version && i.predicted_sync_us.is_some()).count();
            (own >= 2).then_some(all)
        })
        .await;
    assert!(intervals.windows(2).all(|w| w[0].at_us <= w[1].at_us && w[0].to_step < w[1].from_step));
    let view: JobView = api.json("/api/v1/jobs/j").await;
    assert!(view.sync_us.is_some() && view.predicted_sync_us.is_some() && view.loss.is_some());
    let metrics = api.get("/metrics").await.text().await.unwrap();
    for line in [
        "flexcomm_job_predicted_seconds{part=\"sync\",training_job=\"j\"}",
        "flexcomm_link_latency_seconds{from=\"a\",to=\"b\"} 0.001",
    ] {
        assert!(metrics.contains(line), "no {line} in\n{metrics}");
    }
}

/// A strategy that the user runs until the first decision: what it costs is shown, and nothing is predicted for it.
#[tokio::test]
async fn what_the_user_runs_first_is_shown_and_never_priced() {
    let dir = tempfile::tempdir().unwrap();
    let server = Server::start(config(dir.path())).await;
    let api = Api::new(&server.url);
    let mut cluster = Cluster::start(&api).await;
    cluster.blind = true;
    cluster.own = Some("qsgd(s=16)+ef(vanilla)/allgather".parse().unwrap());
    for agent in &mut cluster.agents {
        let hello = agent.hello();
        agent.report(&api, vec![hello]).await;
    }
    let named = async |api: &Api| {
        let all: Vec<IntervalView> = api.json("/api/v1/jobs/j/intervals").await;
        (!all.is_empty()).then_some(())
    };
    cluster.train_until(&api, "an interval of what the user runs", named).await;
    cluster.blind = false;
    let intervals: Vec<IntervalView> = cluster
        .train_until(&api, "an interval of a decision", async |api| {
            let all: Vec<IntervalView> = api.json("/api/v1/jobs/j/intervals").await;
            all.iter().any(|i| i.version > 0).then_some(all)
        })
        .await;
    let (named, decided): (Vec<_>, Vec<_>) = intervals.iter().partition(|i| i.version == 0);
    assert!(!named.is_empty(), "{intervals:#?}");
    for i in named {
        assert_eq!(i.strategy.0, "qsgd(s=16)+ef(vanilla)/allgather");
        assert_eq!((i.measured_comp_us, i.bytes_sent, i.gain), (Some(300.0), Some(1000.0), Some(0.7)));
        assert_eq!((i.predicted_sync_us, i.predicted_step_us), (None, None));
    }
    let gain = |i: &IntervalView| if i.strategy.0.starts_with("none/") { 1.0 } else { 0.8 };
    assert!(decided.iter().all(|i| i.gain == Some(gain(i))), "{decided:#?}");
    server.stop().await;
}

#[tokio::test]
async fn the_decision_follows_the_network_and_history_says_why() {
    let dir = tempfile::tempdir().unwrap();
    let server = Server::start(config(dir.path())).await;
    let api = Api::new(&server.url);
    let mut cluster = Cluster::start(&api).await;
    a_job_is_announced(&mut cluster, &api).await;
    let applied = the_first_decision(&mut cluster, &api).await;
    let second = the_network_collapses(&mut cluster, &api, &applied).await;
    a_trial_is_asked_for(&mut cluster, &api).await;
    let decisions = the_history_says_why(&api, &applied, &second).await;
    all_is_decided_again_the_same(&api, decisions).await;
    snapshots_are_paged(&api).await;
    time_is_predicted_and_measured(&mut cluster, &api, &second).await;

    for agent in &mut cluster.agents {
        let bye = flexcomm_wire::ReportBody::JobLeft {
            job: crate::common::job(),
            rank: agent.rank,
            run: agent.run,
            connection_lost: false,
        };
        agent.report(&api, vec![bye]).await;
    }
    let orders = cluster.agents[0].orders(&api).await;
    assert!(orders.jobs.is_empty());
    let kept: Vec<HistoryEntry> = api.json("/api/v1/jobs/j/history").await;
    assert!(kept.len() >= decisions);
    server.stop().await;
}

/// A bit of the newest decision flips on disk between two starts: it is named with its remedy, counted, and not published;
/// what looks at all jobs goes on.
#[tokio::test]
async fn a_damaged_decision_is_never_used_and_the_job_is_decided_anew() {
    let dir = tempfile::tempdir().unwrap();
    let server = Server::start(config(dir.path())).await.ready().await;
    let api = Api::new(&server.url);
    let mut cluster = Cluster::start(&api).await;
    a_job_is_announced(&mut cluster, &api).await;
    let made = cluster.train_until(&api, "a decision", async |api| decision(api).await).await;
    server.stop().await;

    let path = dir.path().join("test.db");
    let mut bytes = std::fs::read(&path).unwrap();
    let text = made.reason.as_bytes();
    let found: Vec<usize> = (0..bytes.len() - text.len()).filter(|at| bytes[*at..].starts_with(text)).collect();
    assert!(!found.is_empty());
    found.iter().for_each(|at| bytes[at + text.len() / 2] ^= 1);
    std::fs::write(&path, bytes).unwrap();

    let server = Server::start(config(dir.path())).await.ready().await;
    let api = Api::new(&server.url);
    for agent in &mut cluster.agents {
        assert!(agent.register(&api).await.status().is_success());
        let orders = agent.orders(&api).await;
        let published = orders.jobs.iter().filter_map(|job| job.decision.as_ref());
        assert!(published.clone().all(|decision| decision.version > made.version), "{orders:?}");
    }
    cluster.version = made.version;
    let anew = cluster.train_until(&api, "a decision", async |api| decision(api).await).await;
    assert!(anew.version > made.version, "{} after {}", anew.version, made.version);
    let history: Value = api.json("/api/v1/jobs/j/history").await;
    let versions: Vec<u64> = history.as_array().unwrap().iter().filter_map(|e| e["version"].as_u64()).collect();
    assert!(versions.contains(&anew.version) && !versions.contains(&made.version), "{history}");
    let jobs: Value = api.json("/api/v1/jobs").await;
    assert_eq!(jobs.as_array().map(Vec::len), Some(1), "{jobs}");
    let metrics = api.get("/metrics").await.text().await.unwrap();
    let damaged = metrics.lines().find_map(|line| line.strip_prefix("flexcomm_store_damaged_rows "));
    assert!(damaged.unwrap().parse::<f64>().unwrap() >= 1.0, "{metrics}");
    server.stop().await;
}
