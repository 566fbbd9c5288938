//! Whatever comes in: a clear problem or rejected and counted, never a 500, and nothing stored is lost.

use crate::common::{Agent, Api, Network, Server, TOKEN, config, problem};
use flexcomm_domain::Strategy;
use flexcomm_wire::api::{LinkView, NodeView, ScenarioSet, ScenarioView};
use flexcomm_wire::{Heartbeat, HostSeen, Register, ReportAck, ReportBatch, ReportBody, StrategyWire};
use serde_json::{Value, json};

const GOOD: Network = Network { latency_us: 100.0, bandwidth_bps: 1e9 };

struct Scene {
    server: Server,
    api: Api,
    a: Agent,
    b: Agent,
    _dir: tempfile::TempDir,
}

/// Two agents, one good link.
async fn scene() -> Scene {
    let dir = tempfile::tempdir().unwrap();
    let server = Server::start(config(dir.path())).await;
    let api = Api::new(&server.url);
    let (mut a, mut b) = (Agent::new("a", 0), Agent::new("b", 1));
    assert!(a.register(&api).await.status().is_success() && b.register(&api).await.status().is_success());
    let measured = a.measured("b", GOOD).into();
    a.report(&api, measured).await;
    Scene { server, api, a, b, _dir: dir }
}

impl Scene {
    async fn links(&self) -> Vec<LinkView> {
        self.api.json("/api/v1/links").await
    }

    async fn rejected(&self, reason: &str) -> u64 {
        let metrics = self.api.get("/metrics").await.text().await.unwrap();
        let line = format!("flexcomm_rejected_reports_total{{reason=\"{reason}\"}} ");
        metrics.lines().find_map(|l| l.strip_prefix(&line)).unwrap().parse().unwrap()
    }

    async fn raw(&self, node: &str, body: Value) -> reqwest::Response {
        self.api.post(&format!("/api/v1/agents/{node}/reports"), &body).await
    }

    /// Everything good is still there.
    async fn intact(self) {
        let links = self.links().await;
        assert_eq!((links.len(), links[0].latency_us, links[0].bandwidth_bps), (1, 100.0, Some(1e9)));
        self.server.stop().await;
    }
}

#[tokio::test]
async fn absurd_measurements_are_rejected_and_the_others_of_the_batch_are_stored() {
    let mut s = scene().await;
    let mut bodies = Vec::new();
    for bad in [-1.0, 1e300] {
        bodies.push(s.a.link("b", Network { latency_us: bad, ..GOOD }));
        bodies.extend(s.a.measured("b", Network { bandwidth_bps: bad, ..GOOD }).into_iter().skip(1));
    }
    // NaN and infinity are null in JSON.
    bodies.push(s.a.link("b", Network { latency_us: f64::NAN, ..GOOD }));
    bodies.push(s.a.link("b", Network { latency_us: f64::INFINITY, ..GOOD }));
    bodies.push(s.a.link("b", GOOD));
    let ack = s.a.report(&s.api, bodies).await;
    assert_eq!((ack.rejected, ack.acked_seq), (6, s.a.seq));
    assert!(ack.first_reason.unwrap().contains("latency_us is -1"));
    assert_eq!((s.rejected("bad-value").await, s.rejected("malformed").await), (4, 2));
    let aside: Value = s.api.json("/api/v1/rejected-reports").await;
    assert!(aside.as_array().unwrap().iter().any(|r| r["reason"] == "malformed" && r["count"] == 2));
    s.intact().await;
}

#[tokio::test]
async fn reports_of_the_unknown_are_rejected() {
    let mut s = scene().await;
    let dense = (0, Strategy::DENSE_RING);
    let bodies = vec![
        s.a.link("nobody", GOOD),
        s.a.link("a", GOOD),
        s.a.steps(dense, (0, 3), 100.0),
        s.a.applied(1, 2, 3),
        ReportBody::JobLeft { job: crate::common::job(), rank: 0, run: None, connection_lost: false },
    ];
    let ack = s.a.report(&s.api, bodies).await;
    assert_eq!(ack.rejected, 5);
    assert_eq!((s.rejected("unknown-node").await, s.rejected("unknown-job").await), (1, 3));

    let (hello_a, hello_b) = (s.a.hello(), s.b.hello());
    s.a.report(&s.api, vec![hello_a]).await;
    let steps = s.b.steps(dense, (0, 3), 100.0);
    assert_eq!(s.b.report(&s.api, vec![steps]).await.rejected, 1, "rank 1 has not said hello");
    s.b.report(&s.api, vec![hello_b]).await;
    let later = s.b.steps((9, Strategy::DENSE_RING), (0, 3), 100.0);
    let trial = flexcomm_wire::TrialOrder { run: None, id: 77, candidates: vec![], iterations: 1, budget_ms: 1 };
    let ack = s.b.report(&s.api, vec![later, s.b.applied(9, 1, 2), s.b.trial(&trial)]).await;
    assert_eq!(ack.rejected, 3);
    assert_eq!((s.rejected("unknown-version").await, s.rejected("unknown-trial").await), (2, 1));
    let foreign = s.b.rank;
    s.b.rank = 0;
    let steps = s.b.steps(dense, (0, 3), 100.0);
    assert_eq!(s.b.report(&s.api, vec![steps]).await.rejected, 1, "rank 0 runs on a");
    s.b.rank = foreign;
    let mut other = Agent::new("b", 1).hello();
    if let ReportBody::JobSeen(seen) = &mut other {
        seen.world = 3;
    }
    assert!(s.b.report(&s.api, vec![other]).await.first_reason.unwrap().starts_with("job-conflict"));
    s.intact().await;
}

#[tokio::test]
async fn a_decision_that_is_older_or_another_is_rejected() {
    let mut s = scene().await;
    let back = s.b.measured("a", GOOD).into();
    s.b.report(&s.api, back).await;
    for agent in [&mut s.a, &mut s.b] {
        let hello = agent.hello();
        agent.report(&s.api, vec![hello]).await;
    }
    let mut step = 0;
    // The first decision waits for no trial: each is answered at once.
    let orders = loop {
        step += 10;
        for agent in [&mut s.a, &mut s.b] {
            let mut bodies = vec![agent.steps((0, Strategy::DENSE_RING), (step, 10), 50_000.0)];
            let orders = agent.orders(&s.api).await;
            bodies.extend(orders.jobs.first().and_then(|j| j.trial.as_ref()).map(|t| agent.trial(t)));
            agent.report(&s.api, bodies).await;
        }
        let orders = s.a.orders(&s.api).await;
        if orders.jobs[0].decision.is_some() {
            break orders;
        }
        assert!(step < 5000, "no decision");
        tokio::time::sleep(std::time::Duration::from_millis(20)).await;
    };
    let d = orders.jobs[0].decision.clone().unwrap();
    let (wrong, right) = (s.a.applied(d.version, d.digest ^ 1, step), s.a.applied(d.version, d.digest, step));
    let ack = s.a.report(&s.api, vec![wrong, right, s.a.applied(0, 0, step)]).await;
    assert_eq!((ack.rejected, s.rejected("digest").await), (2, 1));
    assert!(ack.first_reason.unwrap().contains("digest"));
    s.server.stop().await;
}

#[tokio::test]
async fn trials_are_asked_for_one_at_a_time() {
    let mut s = scene().await;
    problem(s.api.post("/api/v1/jobs/j/trials", &json!({})).await, 404).await;
    for agent in [&mut s.a, &mut s.b] {
        let hello = agent.hello();
        agent.report(&s.api, vec![hello]).await;
    }
    let bad = json!({ "candidates": [{ "compressor": "topk", "cr": 2.0, "collective": "allgather" }] });
    problem(s.api.post("/api/v1/jobs/j/trials", &bad).await, 422).await;
    problem(s.api.post("/api/v1/jobs/j/trials", &json!({ "candidate": [] })).await, 422).await;
    let bad = json!({ "candidates": [{ "compressor": "topk", "ratio": 0.1 }] });
    let said = problem(s.api.post("/api/v1/jobs/j/trials", &bad).await, 422).await["detail"].to_string();
    assert!(said.contains("candidates[0]: ") && said.contains("topk(k=0.01)+ef(vanilla)/allgather"), "{said}");
    assert!(!said.contains("untagged"), "{said}");
    assert_eq!(s.api.post("/api/v1/jobs/j/trials", &json!({})).await.status(), 202);
    problem(s.api.post("/api/v1/jobs/j/trials", &json!({})).await, 409).await;
    let order = s.b.orders(&s.api).await.jobs[0].trial.clone().unwrap();
    assert_eq!(order.candidates.len(), 15, "by each rank itself, by star and by var, one per ratio: {order:?}");
    s.intact().await;
}

/// Another process holds the database's write lock for longer than the controller waits.
/// An unknown kind is refused with the nearest name; the list is shown and counts for trials, also for those asked for by hand.
#[tokio::test]
async fn a_job_s_policy_lists_the_kinds_that_it_may_use() {
    let mut s = scene().await;
    let path = "/api/v1/jobs/j/policy";
    problem(s.api.put(path, &json!({ "kinds": ["topk"] })).await, 404).await;
    let hello = s.a.hello_with(&["topk", "eightbit+ef(vanilla)", "fp16", "signsgd"]);
    s.a.report(&s.api, vec![hello]).await;
    let policy = async |api: &Api| api.json::<Value>("/api/v1/jobs/j").await["policy"].clone();
    assert_eq!(policy(&s.api).await, json!({ "kinds": null }));
    for (bad, expected) in [
        (json!({ "kinds": ["topkk"] }), "did you mean topk?"),
        (json!({ "kinds": ["topk(k=0.1)"] }), "topk(k=0.1)"),
        (json!({ "kinds": ["topk(0.01)"] }), "kinds are names without parameters, allowed is \"topk\""),
        (json!({ "kinds": ["topk(k=0.01)+ef(vanilla)"] }), "names without parameters, allowed is \"topk\""),
        (json!({ "kinds": ["topkk(k=0.01)"] }), "did you mean topk?"),
        (json!([]), "a policy is an object with any of the keys kinds, objective"),
        (json!({ "kinds": "topk" }), "kinds"),
        (json!({ "kind": ["topk"] }), "unknown key \"kind\", did you mean kinds?"),
        (json!({ "kinds": [] }), "[\"none\"] is dense alone, and null is all"),
        (json!({ "kinds": ["threshold"] }), "its threshold v has the gradient's unit"),
        (
            json!({ "kinds": ["threshold", "onebit"] }),
            "onebit: no trainer of the job offers it: name it with its parameters in attach(candidates=[...])",
        ),
        (json!({ "kinds": ["signsgd"] }), "trainers offer signsgd, but it is biased"),
    ] {
        let said = problem(s.api.put(path, &bad).await, 422).await;
        assert!(said["detail"].as_str().unwrap().contains(expected), "{said}");
    }
    assert_eq!(policy(&s.api).await, json!({ "kinds": null }), "nothing of a refused one is kept");
    let set = s.api.put(path, &json!({ "kinds": ["u8bit", "fp16", "fp16"] })).await;
    assert_eq!(set.status(), 200);
    let kinds = json!(["eightbit", "fp16"]);
    assert_eq!(set.json::<Value>().await.unwrap(), json!({ "kinds": kinds, "not_offered": [], "note": null }));
    assert_eq!(policy(&s.api).await, json!({ "kinds": kinds }));
    let topk: Vec<StrategyWire> = vec!["topk@0.1/allgather".parse::<Strategy>().unwrap().into()];
    let said = problem(s.api.post("/api/v1/jobs/j/trials", &json!({ "candidates": topk })).await, 422).await;
    assert!(said["detail"].as_str().unwrap().contains("its kind is not in the job's policy"), "{said}");
    let some: Value = s.api.put(path, &json!({ "kinds": ["topk", "onebit"] })).await.json().await.unwrap();
    assert_eq!((&some["kinds"], &some["not_offered"][0]["kind"]), (&json!(["onebit", "topk"]), &json!("onebit")));
    assert!(some["not_offered"][0]["why"].as_str().unwrap().contains("attach(candidates="), "{some}");
    assert_eq!(s.api.put(path, &json!({ "kinds": ["none"] })).await.status(), 200);
    problem(s.api.post("/api/v1/jobs/j/trials", &json!({})).await, 422).await;
    let lifted = s.api.put(path, &json!({ "kinds": null })).await;
    assert_eq!(lifted.status(), 200);
    assert_eq!(s.api.post("/api/v1/jobs/j/trials", &json!({ "candidates": topk })).await.status(), 202);
    let left = ReportBody::JobLeft { job: crate::common::job(), rank: 0, run: None, connection_lost: false };
    s.a.report(&s.api, vec![left]).await;
    let later: Value = s.api.put(path, &json!({ "kinds": ["onebit"] })).await.json().await.unwrap();
    assert!(later["note"].as_str().unwrap().contains("no trainer of the job is attached"), "{later}");
    let dense: Value = s.api.put(path, &json!({ "kinds": ["none"] })).await.json().await.unwrap();
    assert_eq!(dense["note"], Value::Null, "dense needs no offer");
    s.intact().await;
}

#[tokio::test]
async fn a_store_that_fails_is_said_and_nothing_is_lost() {
    let mut s = scene().await;
    let db = s._dir.path().join("test.db");
    let options = sqlx::sqlite::SqliteConnectOptions::new().filename(db);
    let other = sqlx::SqlitePool::connect_with(options).await.unwrap();
    let lock = other.begin_with("BEGIN IMMEDIATE").await.unwrap();
    problem(s.api.get("/readyz").await, 503).await;
    let link = s.a.link("b", Network { latency_us: 333.0, ..GOOD });
    let batch = s.a.batch(vec![link]);
    let refused = s.api.post("/api/v1/agents/a/reports", &batch).await;
    assert!(refused.headers().contains_key("retry-after"));
    problem(refused, 503).await;
    assert_eq!(s.api.get("/healthz").await.status(), 200);
    assert!(s.api.get("/metrics").await.text().await.unwrap().contains("flexcomm_store_ready 0\n"));
    lock.rollback().await.unwrap();
    s.api.until("ready again", async |api| (api.get("/readyz").await.status() == 200).then_some(())).await;
    assert_eq!(s.api.post("/api/v1/agents/a/reports", &batch).await.status(), 200);
    assert_eq!(s.links().await[0].latency_us, 333.0);
    s.server.stop().await;
}

#[tokio::test]
async fn clocks_that_jump_move_nothing() {
    let mut s = scene().await;
    for at_us in [0, u64::MAX >> 12, 5] {
        let link = s.a.link("b", GOOD);
        let mut batch = s.a.batch(vec![link]);
        batch.reports[0].at_us = at_us;
        assert_eq!(s.api.post("/api/v1/agents/a/reports", &batch).await.status(), 200);
        let beat = Heartbeat { instance: s.a.instance, now_us: at_us, orders_epoch: 0, spooled: 0, hosts: Vec::new() };
        assert_eq!(s.api.post("/api/v1/agents/a/heartbeat", &beat).await.status(), 204);
    }
    let links = s.links().await;
    assert!(links[0].latency_age_ms < 60_000.0);
    let nodes: Vec<NodeView> = s.api.json("/api/v1/nodes").await;
    assert!(nodes[0].live && nodes[0].heartbeat_age_ms < 60_000);
    s.intact().await;
}

#[tokio::test]
async fn a_heartbeat_counts_whatever_it_tells_of_hosts() {
    let s = scene().await;
    let host = |loss| HostSeen { host: "gateway".into(), addr: None, round_trip_us: None, loss };
    for (hosts, shown) in
        [(vec![host(Some(0.5))], 1), (vec![host(Some(1.5))], 0), (vec![host(None); 9], 0), (vec![], 0)]
    {
        let beat = Heartbeat { instance: s.a.instance, now_us: 1, orders_epoch: 0, spooled: 0, hosts };
        assert_eq!(s.api.post("/api/v1/agents/a/heartbeat", &beat).await.status(), 204);
        let nodes: Vec<NodeView> = s.api.json("/api/v1/nodes").await;
        assert!(nodes[0].live && nodes[0].hosts.len() == shown, "{:?}", nodes[0]);
    }
}

#[tokio::test]
async fn one_name_has_one_agent() {
    let mut s = scene().await;
    let mut second = Agent::new("a", 0);
    second.instance = 999;
    let refused = problem(second.register(&s.api).await, 409).await;
    assert!(refused["detail"].as_str().unwrap().contains("another agent holds the name a"));
    let beat = Heartbeat { instance: 999, now_us: 1, orders_epoch: 0, spooled: 0, hosts: Vec::new() };
    problem(s.api.post("/api/v1/agents/a/heartbeat", &beat).await, 404).await;
    let batch = ReportBatch { instance: 999, reports: vec![] };
    problem(s.api.post("/api/v1/agents/a/reports", &batch).await, 404).await;
    let guess = Register { previous: vec![1, 2, 3], ..second.registration() };
    problem(s.api.post("/api/v1/agents/register", &guess).await, 409).await;
    assert!(s.a.register(&s.api).await.status().is_success(), "the owner may register again");
    problem(s.api.delete("/api/v1/nodes/a").await, 409).await;
    s.intact().await;
}

/// Killed and started again, an agent knows which instance it was and need not wait for its own death to be seen.
#[tokio::test]
async fn an_agent_that_comes_back_has_its_name_at_once() {
    let s = scene().await;
    let again = Register { instance: 999, previous: vec![7, s.a.instance], ..s.a.registration() };
    assert_eq!(s.api.post("/api/v1/agents/register", &again).await.status(), 200);
    let beat = Heartbeat { instance: s.a.instance, now_us: 1, orders_epoch: 0, spooled: 0, hosts: Vec::new() };
    problem(s.api.post("/api/v1/agents/a/heartbeat", &beat).await, 404).await;
    problem(s.api.post("/api/v1/agents/register", &s.a.registration()).await, 409).await;
    s.intact().await;
}

/// Texts and numbers that only a broken or hostile agent sends are refused by name, counted, and change nothing.
#[tokio::test]
async fn what_no_agent_says_is_refused_and_counted() {
    let mut s = scene().await;
    let refused = |api: &Api, body: Register| {
        let (client, url) = (api.client.clone(), format!("{}/api/v1/agents/register", api.url));
        async move { problem(client.post(url).bearer_auth(TOKEN).json(&body).send().await.unwrap(), 422).await }
    };
    let long = Register { software: "x".repeat(10_000), ..s.a.registration() };
    let said = refused(&s.api, long).await["detail"].as_str().unwrap().to_owned();
    assert!(said.contains("software has 10000 characters, allowed are 100"), "{said}");
    refused(&s.api, Register { previous: vec![1; 17], ..s.a.registration() }).await;
    let nodes: Vec<NodeView> = s.api.json("/api/v1/nodes").await;
    assert_eq!(nodes[0].software, "0.1.0");

    let before = s.a.seq;
    s.a.seq = 1 << 50;
    let link = s.a.link("b", GOOD);
    let said = problem(s.api.post("/api/v1/agents/a/reports", &s.a.batch(vec![link])).await, 422).await;
    assert!(said["detail"].as_str().unwrap().contains(&format!("seq jumps from {before} to ")), "{said}");
    s.a.seq = before;
    let link = s.a.link("b", GOOD);
    assert_eq!(s.a.report(&s.api, vec![link]).await.acked_seq, before + 1, "its own numbers still count");

    problem(s.api.get("/nowhere").await, 404).await;
    let metrics = s.api.get("/metrics").await.text().await.unwrap();
    for line in ["{problem=\"invalid\"} 3\n", "{problem=\"not-found\"} 1\n"] {
        assert!(metrics.contains(&format!("flexcomm_refused_requests_total{line}")), "no {line} in\n{metrics}");
    }
    s.intact().await;
}

#[tokio::test]
async fn batches_that_make_no_sense_are_refused_whole() {
    let s = scene().await;
    let report = |seq: Value| json!({ "seq": seq, "at_us": 1, "body": { "kind": "job-left", "job": "j", "rank": 0 } });
    for reports in [
        json!([report(json!("x"))]),
        json!([report(json!(0))]),
        json!([report(json!(7)), report(json!(7))]),
        json!([{ "at_us": 1 }]),
        json!(5),
    ] {
        let body = json!({ "instance": s.a.instance, "reports": reports });
        problem(s.raw("a", body).await, 422).await;
    }
    let many: Vec<Value> = (1..=513).map(|i| report(json!(i + 10))).collect();
    problem(s.raw("a", json!({ "instance": s.a.instance, "reports": many })).await, 422).await;
    problem(s.raw("nobody", json!({ "instance": 1, "reports": [] })).await, 404).await;
    problem(s.raw("a%20b", json!({ "instance": 1, "reports": [] })).await, 404).await;
    // A report of a kind that this version does not know is acknowledged, so that the agent goes on.
    let future = json!({ "seq": 9, "at_us": 1, "body": { "kind": "from-the-future", "x": 1 } });
    let ack: ReportAck =
        s.raw("a", json!({ "instance": s.a.instance, "reports": [future] })).await.json().await.unwrap();
    assert_eq!((ack.acked_seq, ack.rejected), (9, 1));
    let again = json!({ "seq": 9, "at_us": 1, "body": { "kind": "from-the-future", "x": 1 } });
    let ack: ReportAck =
        s.raw("a", json!({ "instance": s.a.instance, "reports": [again] })).await.json().await.unwrap();
    assert_eq!((ack.acked_seq, ack.rejected), (9, 0), "a repeated report is dropped");
    s.intact().await;
}

#[tokio::test]
async fn http_that_makes_no_sense_gets_a_problem() {
    let s = scene().await;
    let url = |path: &str| format!("{}{path}", s.api.url);
    let client = &s.api.client;
    problem(s.api.get("/nothing/here").await, 404).await;
    problem(s.api.get("/api/v1/jobs/none").await, 404).await;
    problem(s.api.get("/api/v1/jobs/none/decision").await, 404).await;
    problem(s.api.get("/api/v1/jobs/-bad-/history").await, 404).await;
    problem(s.api.get("/api/v1/links/a/b/history?limit=many").await, 400).await;
    let unknown = problem(s.api.get("/api/v1/links/a/nobody/history").await, 404).await;
    assert!(unknown["detail"].as_str().unwrap().contains("nobody"), "{unknown}");
    problem(s.api.get("/api/v1/links/nobody/a/history").await, 404).await;
    let known: Vec<Value> = s.api.json("/api/v1/links/b/a/history").await;
    assert!(known.is_empty(), "known nodes, nothing measured yet");
    let wrong = s.api.delete("/api/v1/jobs").await;
    assert_eq!(wrong.headers()["allow"], "GET,HEAD");
    problem(wrong, 405).await;
    let wrong = s.api.get("/api/v1/agents/register").await;
    assert_eq!(wrong.headers()["allow"], "POST");
    problem(wrong, 405).await;
    let post = || client.post(url("/api/v1/agents/register")).bearer_auth(TOKEN);
    let json = "application/json";
    problem(post().header("content-type", json).body("{\"protocol\": ").send().await.unwrap(), 400).await;
    problem(post().header("content-type", json).body("{\"protocol\": 1e999}").send().await.unwrap(), 400).await;
    problem(post().header("content-type", json).body("{}").send().await.unwrap(), 422).await;
    problem(post().body("{}").send().await.unwrap(), 415).await;
    let huge = vec![b' '; (64 << 10) + 1];
    problem(post().header("content-type", json).body(huge).send().await.unwrap(), 413).await;
    problem(client.post(url("/api/v1/agents/register")).body("{}").send().await.unwrap(), 401).await;
    let forged = client.put(url("/api/v1/scenario")).bearer_auth("forged").body("{}").send().await.unwrap();
    problem(forged, 401).await;
    let no_token = client.get(url("/api/v1/agents/a/stream")).send().await.unwrap();
    problem(no_token, 401).await;
    let good = Agent::new("c", 2).registration();
    let refused = s.api.post("/api/v1/agents/register", &Register { protocol: 99, ..good.clone() }).await;
    let text = problem(refused, 422).await["detail"].as_str().unwrap().to_owned();
    assert!(text.contains("99") && text.contains(&format!("speaks {}", flexcomm_wire::PROTOCOL)), "{text}");
    let refused = s.api.post("/api/v1/agents/register", &Register { addr: "0.0.0.0".parse().unwrap(), ..good }).await;
    problem(refused, 422).await;
    s.intact().await;
}

#[tokio::test]
async fn scenarios_are_checked_ordered_and_reported() {
    let mut s = scene().await;
    let set = ScenarioSet {
        label: "C1 epoch 13".into(),
        latency_us: 1000.0,
        jitter_us: 0.0,
        loss: 0.0,
        bandwidth_bps: 1e7,
        nodes: None,
    };
    for bad in [
        ScenarioSet { latency_us: -1.0, ..set.clone() },
        ScenarioSet { loss: 1.0, ..set.clone() },
        ScenarioSet { bandwidth_bps: 0.0, ..set.clone() },
    ] {
        problem(s.api.put("/api/v1/scenario", &bad).await, 422).await;
    }
    let view: ScenarioView = s.api.put("/api/v1/scenario", &set).await.json().await.unwrap();
    let order = s.a.orders(&s.api).await.shape.unwrap();
    assert_eq!((order.id, order.bandwidth_bps, view.in_force.len()), (view.id, 1e7, 0));
    let report = |error: Option<&str>| {
        ReportBody::Shape(flexcomm_wire::ShapeReport { id: view.id, error: error.map(Into::into) })
    };
    s.a.report(&s.api, vec![report(None)]).await;
    s.b.report(&s.api, vec![report(Some("the kernel has no netem"))]).await;
    let view: ScenarioView = s.api.json("/api/v1/scenario").await;
    assert_eq!(view.in_force, [crate::common::node("a")]);
    assert_eq!(view.refused, [(crate::common::node("b"), "the kernel has no netem".to_owned())]);
    let only_b = ScenarioSet { nodes: Some(vec![crate::common::node("b")]), ..set };
    s.api.put("/api/v1/scenario", &only_b).await;
    assert!(s.a.orders(&s.api).await.shape.is_none() && s.b.orders(&s.api).await.shape.is_some());
    assert_eq!(s.api.delete("/api/v1/scenario").await.status(), 204);
    assert!(s.b.orders(&s.api).await.shape.is_none());
    s.intact().await;
}

#[tokio::test]
async fn a_scenario_that_nobody_can_follow_is_refused() {
    let s = scene().await;
    let set = json!({ "label": "x", "latency_us": 1.0, "bandwidth_bps": 1e9 });
    let with = |key: &str, value: Value| {
        let mut set = set.clone();
        set[key] = value;
        set
    };
    let typo = problem(s.api.put("/api/v1/scenario", &with("lantency", json!(3))).await, 422).await;
    assert!(typo["detail"].as_str().unwrap().contains("lantency"), "{typo}");
    let unknown = with("nodes", json!(["a", "nobody", "noone"]));
    let unknown = problem(s.api.put("/api/v1/scenario", &unknown).await, 422).await;
    assert!(unknown["detail"].as_str().unwrap().ends_with("never registered: nobody, noone"), "{unknown}");
    let unwilling = Register { may_shape: false, ..s.a.registration() };
    assert!(s.api.post("/api/v1/agents/register", &unwilling).await.status().is_success());
    let refused = problem(s.api.put("/api/v1/scenario", &with("nodes", json!(["a"]))).await, 409).await;
    assert!(refused["detail"].as_str().unwrap().contains("[shaping]"), "{refused}");
    problem(s.api.put("/api/v1/scenario", &with("nodes", json!([]))).await, 409).await;
    let view: ScenarioView = s.api.json("/api/v1/scenario").await;
    assert_eq!(view.set, None, "what was refused is not kept");
    assert_eq!(s.api.put("/api/v1/scenario", &set).await.status(), 200, "b may shape");
    s.intact().await;
}

#[tokio::test]
async fn without_leave_nobody_shapes() {
    let dir = tempfile::tempdir().unwrap();
    let server = Server::start(flexcomm_controller::RawConfig { scenario: false, ..config(dir.path()) }).await;
    let api = Api::new(&server.url);
    let set = json!({ "label": "x", "latency_us": 1.0, "bandwidth_bps": 1e9 });
    let refused = problem(api.put("/api/v1/scenario", &set).await, 409).await;
    assert!(refused["detail"].as_str().unwrap().contains("scenario = false"));
    problem(api.delete("/api/v1/scenario").await, 409).await;
    server.stop().await;
}

/// Whatever a request lacks: the same envelope, and a sentence that is not the framework's.
#[tokio::test]
async fn every_bad_request_is_a_problem_in_our_own_words() {
    let mut s = scene().await;
    let hello = s.a.hello();
    s.a.report(&s.api, vec![hello]).await;
    let policy = "/api/v1/jobs/j/policy";
    let json = "application/json";
    for (method, path, (kind, body), status, expected) in [
        ("GET", "/nowhere", ("", ""), 404, "nothing is served at /nowhere"),
        ("GET", "/api/v1/jobs/%FF", ("", ""), 404, "job is not UTF-8"),
        ("GET", "/api/v1/jobs/a%20b", ("", ""), 404, "a b"),
        ("GET", "/api/v1/links/a/%FF/history", ("", ""), 404, "to is not UTF-8"),
        ("GET", "/api/v1/links/a/a%20b/history", ("", ""), 404, "a b"),
        ("GET", "/api/v1/jobs/j/history?limit=x", ("", ""), 400, "limit: invalid digit"),
        ("GET", "/api/v1/jobs/j/history?limit=0", ("", ""), 400, "limit: it is 0, allowed are 1 to 5000"),
        ("GET", "/api/v1/links/a/b/history?limit=0", ("", ""), 400, "limit: it is 0, allowed are 1 to 5000"),
        ("PUT", "/api/v1/jobs/later/policy", (json, "{}"), 404, "in its script (`policy=` of attach)"),
        ("GET", "/api/v1/jobs/j/history?nonsense=1", ("", ""), 400, "`nonsense`, expected `limit` or `before`"),
        ("DELETE", "/api/v1/nodes", ("", ""), 405, "openapi.json"),
        ("POST", policy, (json, "{}"), 405, "openapi.json"),
        ("PUT", policy, ("text/plain", "{}"), 415, "Content-Type: application/json"),
        ("PUT", policy, (json, ""), 400, "the body is not JSON"),
        ("PUT", policy, (json, "{"), 400, "the body is not JSON"),
        ("PUT", policy, (json, "{\"kinds\": null} x"), 400, "the body is not JSON"),
        ("PUT", policy, (json, "{\"kinds\": 5}"), 422, "kinds: expected a list of names"),
        ("POST", "/api/v1/jobs/j/trials", (json, "{\"candidates\": [5]}"), 422, "candidates[0]"),
        ("POST", "/api/v1/agents/a/heartbeat", (json, "{}"), 422, "missing field"),
        ("POST", "/api/v1/agents/%FF/heartbeat", (json, "{}"), 404, "node is not UTF-8"),
    ] {
        let request = s.api.client.request(method.parse().unwrap(), format!("{}{path}", s.api.url));
        let request = request.bearer_auth(TOKEN).header("content-type", kind).body(body);
        let said = problem(request.send().await.unwrap(), status).await;
        let detail = said["detail"].as_str().unwrap();
        assert!(detail.contains(expected), "{method} {path} {body}: {detail}");
        for theirs in ["Failed to", "deserialize", "Invalid U", "target type", "Cannot parse", "Expected request"] {
            assert!(!detail.contains(theirs), "{method} {path} {body}: {detail}");
        }
    }
    s.intact().await;
}

#[tokio::test]
async fn the_page_loads_nothing_from_elsewhere() {
    let s = scene().await;
    let page = s.api.get("/").await;
    let policy = page.headers()["content-security-policy"].to_str().unwrap().to_owned();
    assert!(policy.contains("default-src 'none'") && !policy.contains("http"));
    let mut all = page.text().await.unwrap();
    for path in ["/page.css", "/page.js", "/charts.js"] {
        let file = s.api.get(path).await;
        assert_eq!(file.status(), 200);
        all += &file.text().await.unwrap();
    }
    let outside = |text: &str| text.replace("http://www.w3.org/2000/svg", "").contains("://");
    assert!(!outside(&all), "the page names another server");
    for unsafe_sink in ["innerHTML", "outerHTML", "insertAdjacentHTML", "document.write", "eval("] {
        assert!(!all.contains(unsafe_sink), "{unsafe_sink}");
    }
    s.intact().await;
}

/// Any other name than an address, localhost and what is configured: a page of another site whose name resolves here.
#[tokio::test]
async fn a_foreign_host_is_refused_by_the_name_of_the_setting() {
    let dir = tempfile::tempdir().unwrap();
    let mut own = config(dir.path());
    own.allowed_hosts = vec!["flexcomm.example.org".into()];
    let server = Server::start(own).await;
    let api = Api::new(&server.url);
    let ask = |path: &str, host: &str| api.client.get(format!("{}{path}", api.url)).header("host", host).send();
    for path in ["/api/v1/jobs", "/", "/metrics", "/healthz", "/nothing"] {
        let refused = problem(ask(path, "evil.example:7070").await.unwrap(), 421).await;
        let detail = refused["detail"].as_str().unwrap();
        assert!(detail.contains("evil.example:7070") && detail.contains("allowed_hosts"), "{detail}");
    }
    let forged = api.client.post(format!("{}/api/v1/agents/register", api.url)).bearer_auth(TOKEN);
    problem(forged.header("host", "evil.example").json(&json!({})).send().await.unwrap(), 421).await;
    for host in ["localhost:7070", "127.0.0.1", "[::1]:7070", "flexcomm.example.org", "FLEXCOMM.example.org:7070"] {
        assert_eq!(ask("/api/v1/jobs", host).await.unwrap().status(), 200, "{host}");
    }
    assert_eq!(api.get("/metrics").await.status(), 200);
    let metrics = api.get("/metrics").await.text().await.unwrap();
    assert!(metrics.contains("flexcomm_refused_requests_total{problem=\"host\"} 6"), "{metrics}");
    server.stop().await;
}

/// A report that is far too long is rejected unread, one that is not JSON at its end refuses the batch, and small requests
/// have small bodies.
#[tokio::test]
async fn bodies_are_bounded_each_by_itself() {
    let mut s = scene().await;
    let mut batch = serde_json::to_value(s.a.batch(vec![s.a.hello(), s.a.link("b", GOOD)])).unwrap();
    batch["reports"][0]["body"]["backend"] = json!(vec![0; 200_000]);
    let ack: ReportAck = s.raw("a", batch).await.json().await.unwrap();
    assert_eq!((ack.rejected, ack.acked_seq), (1, s.a.seq));
    let why = ack.first_reason.unwrap();
    assert!(why.contains("400") && why.contains("at most 262144 are read"), "{why}");

    let report = |seq: u64| json!({ "seq": seq, "at_us": 1, "body": { "kind": "job-left", "job": "j", "rank": 0 } });
    let many: Vec<Value> = (100..100 + 513).map(report).collect();
    let refused = problem(s.raw("a", json!({ "instance": 100, "reports": many })).await, 422).await;
    assert!(refused["detail"].as_str().unwrap().contains("at most 512 in a batch"), "{refused}");

    let beat = s.api.post("/api/v1/agents/a/heartbeat", &json!({ "instance": 100, "x": "x".repeat(70_000) })).await;
    assert!(problem(beat, 413).await["detail"].as_str().unwrap().contains("at most 65536 bytes"));
    s.intact().await;
}

/// Large bodies that never end share a budget: the next is told to come again, heartbeats are heard, and what the budget
/// held is free when they are gone.
#[tokio::test]
async fn half_sent_bodies_share_a_budget() {
    use tokio::io::{AsyncReadExt, AsyncWriteExt};
    let s = scene().await;
    let address = s.api.url.strip_prefix("http://").unwrap().to_owned();
    let head = format!(
        "POST /api/v1/agents/a/reports HTTP/1.1\r\nhost: 127.0.0.1\r\ncontent-type: application/json\r\n\
         authorization: Bearer {TOKEN}\r\ncontent-length: 16000000\r\n\r\n"
    );
    let part = vec![b' '; 15_900_000];
    let mut open = Vec::new();
    let mut refused = 0;
    for _ in 0..6 {
        let mut connection = tokio::net::TcpStream::connect(&address).await.unwrap();
        connection.write_all(head.as_bytes()).await.unwrap();
        // Where it is refused the rest of it is not read.
        let sent = connection.write_all(&part).await;
        let mut answer = vec![0; 4096];
        let wait = tokio::time::Duration::from_millis(500);
        match tokio::time::timeout(wait, connection.read(&mut answer)).await {
            Ok(Ok(read)) => {
                let answer = String::from_utf8_lossy(&answer[..read]).to_lowercase();
                assert!(answer.contains(" 503 ") && answer.contains("retry-after: 1"), "{answer}");
                refused += 1;
            }
            Ok(Err(_)) => refused += 1,
            Err(_) => sent.unwrap(),
        }
        open.push(connection);
    }
    assert_eq!(refused, 2, "four fit");
    let beat = Heartbeat { instance: 100, now_us: 1, orders_epoch: 0, spooled: 0, hosts: Vec::new() };
    assert_eq!(s.api.post("/api/v1/agents/a/heartbeat", &beat).await.status(), 204);
    drop(open);
    let large = json!({ "instance": 100, "reports": [], "x": "x".repeat(10_000_000) });
    s.api
        .until("a large body", async |api| {
            let answer = api.post("/api/v1/agents/a/reports", &large).await;
            (answer.status() != 503).then_some(())
        })
        .await;
    s.intact().await;
}
