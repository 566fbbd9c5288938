//! Two runs of a job under one name are told apart: the second begins anew, and while the first lives it is refused.

use crate::common::{Agent, Api, Network, Server, config, job, problem};
use flexcomm_domain::{RunId, Strategy};
use flexcomm_wire::ReportBody;
use flexcomm_wire::api::DecisionView;
use serde_json::{Value, json};

const GOOD: Network = Network { latency_us: 100.0, bandwidth_bps: 25e9 };

async fn start(dir: &std::path::Path) -> (Server, Api, [Agent; 2]) {
    let server = Server::start(config(dir)).await;
    let api = Api::new(&server.url);
    let mut agents = [Agent::new("a", 0), Agent::new("b", 1)];
    for agent in &mut agents {
        assert!(agent.register(&api).await.status().is_success());
    }
    for (agent, peer) in agents.iter_mut().zip(["b", "a"]) {
        let measured = agent.measured(peer, GOOD).into();
        assert_eq!(agent.report(&api, measured).await.first_reason, None);
    }
    (server, api, agents)
}

async fn hello(api: &Api, agents: &mut [Agent; 2], run: u64) {
    for agent in agents {
        agent.run = Some(RunId(run));
        let bodies = vec![agent.hello()];
        assert_eq!(agent.report(api, bodies).await.first_reason, None);
    }
}

async fn goodbye(api: &Api, agents: &mut [Agent; 2], connection_lost: bool) {
    for agent in agents {
        let bodies = vec![ReportBody::JobLeft { job: job(), rank: agent.rank, run: agent.run, connection_lost }];
        assert_eq!(agent.report(api, bodies).await.first_reason, None);
    }
}

/// Trains from step 0 until a decision of this run is in force and an interval was measured; answers its version.
async fn train(api: &Api, agents: &mut [Agent; 2]) -> u64 {
    let (mut step, mut version, mut strategy) = (0, 0, Strategy::DENSE_RING);
    api.until("a decision in force", async |api| {
        let order = agents[0].orders(api).await.jobs.into_iter().next();
        let next = order.as_ref().and_then(|j| j.decision.clone()).filter(|d| d.version > version);
        for agent in agents.iter_mut() {
            let mut bodies = vec![agent.steps((version, strategy), (step, 10), 100_000.0)];
            bodies.extend(order.as_ref().and_then(|j| j.trial.as_ref()).map(|t| agent.trial(t)));
            bodies.extend(next.as_ref().map(|d| agent.applied(d.version, d.digest, step + 10)));
            agent.report(api, bodies).await;
        }
        step += 10;
        if let Some(order) = next {
            assert_eq!(order.run, agents[0].run, "a decision names its run");
            (version, strategy) = (order.version, order.to_decision(&job()).unwrap().plan.alike().copied().unwrap());
        }
        let intervals: Vec<Value> = api.json("/api/v1/jobs/j/intervals").await;
        (version > 0 && intervals.len() > 1).then_some(version)
    })
    .await
}

#[tokio::test]
async fn a_second_run_under_the_same_name_begins_anew() {
    let dir = tempfile::tempdir().unwrap();
    let (server, api, mut agents) = start(dir.path()).await;
    hello(&api, &mut agents, 1).await;
    let first = train(&api, &mut agents).await;
    goodbye(&api, &mut agents, true).await;
    let ended: Value = api.json("/api/v1/jobs/j").await;
    assert_eq!((&ended["ended"]["how"], &ended["run"]), (&json!("connection-lost"), &json!("0000000000000001")));
    let kept: DecisionView = api.json("/api/v1/jobs/j/decision").await;
    assert_eq!(kept.version, first, "an ended run is still shown");
    api.until("the report of the newest decision", async |api| {
        let report: Value = api.json("/api/v1/jobs/j/report").await;
        (report["at_us"] == kept.since_us && report["report"]["seed"].is_u64()).then_some(())
    })
    .await;

    hello(&api, &mut agents, 2).await;
    let view: Value = api.json("/api/v1/jobs/j").await;
    assert_eq!((&view["ended"], &view["run"], &view["step"]), (&json!(null), &json!("0000000000000002"), &json!(0)));
    assert_eq!(api.get("/api/v1/jobs/j/decision").await.status(), 404, "it does not start with the other's decision");
    for list in ["history", "intervals", "trials", "progress"] {
        let found: Value = api.json(&format!("/api/v1/jobs/j/{list}")).await;
        assert_eq!(found, json!([]), "{list}");
    }
    let second = train(&api, &mut agents).await;
    assert!(second > first, "versions only grow under one name: {second} after {first}");
    let runs: Value = api.json("/api/v1/jobs/j/runs").await;
    assert_eq!((&runs[0]["run"], &runs[0]["ended"]["how"]), (&json!("0000000000000001"), &json!("connection-lost")));
    assert_eq!((&runs[0]["version"], runs.as_array().unwrap().len()), (&json!(first), 1));

    // The agents start again: their trainers are of the same run, which goes on.
    goodbye(&api, &mut agents, false).await;
    let ended: Value = api.json("/api/v1/jobs/j").await;
    assert_eq!(ended["ended"]["how"], "left");
    hello(&api, &mut agents, 2).await;
    let back: DecisionView = api.json("/api/v1/jobs/j/decision").await;
    assert!(back.version >= second);
    server.stop().await;
}

#[tokio::test]
async fn a_job_that_ended_undecided_has_no_report() {
    let dir = tempfile::tempdir().unwrap();
    let server = Server::start(config(dir.path())).await;
    let api = Api::new(&server.url);
    // Without any link nothing is decided.
    let mut agents = [Agent::new("a", 0), Agent::new("b", 1)];
    for agent in &mut agents {
        assert!(agent.register(&api).await.status().is_success());
    }
    hello(&api, &mut agents, 1).await;
    goodbye(&api, &mut agents, false).await;
    let answer = api.until("no report", async |api| {
        let answer = api.get("/api/v1/jobs/j/report").await;
        (answer.status() == 404).then_some(answer)
    });
    let refused = problem(answer.await, 404).await;
    assert!(refused["detail"].as_str().unwrap().contains("/api/v1/jobs/j/intervals"), "{refused}");
    server.stop().await;
}

#[tokio::test]
async fn a_run_is_refused_while_another_one_lives_under_its_name() {
    let dir = tempfile::tempdir().unwrap();
    let (server, api, mut agents) = start(dir.path()).await;
    hello(&api, &mut agents, 1).await;
    let mut other = Agent::new("c", 0);
    assert!(other.register(&api).await.status().is_success());
    other.run = Some(RunId(2));
    let bodies = vec![other.hello()];
    let ack = other.report(&api, bodies.clone()).await;
    let refused = ack.refused.first().unwrap();
    assert_eq!((ack.refused.len(), ack.rejected, &refused.job, refused.run), (1, 1, &job(), RunId(2)));
    assert_eq!(ack.first_reason, None, "a refusal is told once");
    for part in ["0000000000000001", "0000000000000002", "on node a", "FLEXCOMM_JOB"] {
        assert!(refused.reason.contains(part), "{part}: {}", refused.reason);
    }
    let view: Value = api.json("/api/v1/jobs/j").await;
    assert_eq!((&view["run"], &view["nodes"]), (&json!("0000000000000001"), &json!(["a", "b"])));

    goodbye(&api, &mut agents, false).await;
    let ack = other.report(&api, bodies).await;
    assert_eq!((ack.refused.len(), ack.rejected), (0, 0), "the name is free: {ack:?}");
    server.stop().await;
}

/// A node without a trainer, which reads the run's id where everybody can, takes no rank over and ends nothing.
#[tokio::test]
async fn a_node_cannot_take_over_ranks_that_live_on_others() {
    let dir = tempfile::tempdir().unwrap();
    let (server, api, mut agents) = start(dir.path()).await;
    hello(&api, &mut agents, 1).await;
    let mut evil = Agent::new("evil", 0);
    assert!(evil.register(&api).await.status().is_success());
    let view: Value = api.json("/api/v1/jobs/j").await;
    evil.run = Some(view["run"].as_str().unwrap().parse().unwrap());
    for rank in [0, 1] {
        evil.rank = rank;
        let bodies = vec![evil.hello(), ReportBody::JobLeft { job: job(), rank, run: None, connection_lost: false }];
        let ack = evil.report(&api, bodies).await;
        assert_eq!(ack.rejected, 2, "{ack:?}");
        assert!(ack.refused[0].reason.contains("node evil"), "{ack:?}");
    }
    let view: Value = api.json("/api/v1/jobs/j").await;
    assert_eq!((&view["nodes"], &view["ended"], &view["live_ranks"]), (&json!(["a", "b"]), &json!(null), &json!(2)));
    let aside: Value = api.json("/api/v1/rejected-reports").await;
    assert!(aside.to_string().contains("node evil") || aside.to_string().contains("not on evil"), "{aside}");
    server.stop().await;
}

#[tokio::test]
async fn an_ended_job_is_deleted_with_all_that_bears_its_name() {
    let dir = tempfile::tempdir().unwrap();
    let (server, api, mut agents) = start(dir.path()).await;
    hello(&api, &mut agents, 1).await;
    train(&api, &mut agents).await;
    let path = "/api/v1/jobs/j";
    problem(api.client.delete(format!("{}{path}", api.url)).send().await.unwrap(), 401).await;
    problem(api.delete(path).await, 409).await;
    goodbye(&api, &mut agents, false).await;
    assert_eq!(api.delete(path).await.status(), 204);
    problem(api.get(path).await, 404).await;
    problem(api.delete(path).await, 404).await;
    assert!(!api.get("/metrics").await.text().await.unwrap().contains("job=\"j\""));
    server.stop().await;
    let pool = sqlx::sqlite::SqliteConnectOptions::new().filename(dir.path().join("test.db"));
    let pool = sqlx::SqlitePool::connect_with(pool).await.unwrap();
    let tables: Vec<(String,)> = sqlx::query_as(
        "SELECT m.name FROM sqlite_schema m JOIN pragma_table_info(m.name) c WHERE m.type = 'table' AND c.name = 'job'",
    )
    .fetch_all(&pool)
    .await
    .unwrap();
    assert!(tables.len() >= 12, "{tables:?}");
    for (table,) in tables {
        let text = sqlx::AssertSqlSafe(format!("SELECT count(*) FROM {table} WHERE job = 'j'"));
        let (rows,): (i64,) = sqlx::query_as(text).fetch_one(&pool).await.unwrap();
        assert_eq!(rows, 0, "{table}");
    }
    pool.close().await;
}
