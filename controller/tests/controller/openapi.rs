//! What the controller reads and answers is what `openapi.json` says, field by field.

use crate::common::{Agent, Api, Network, Server, VALUES, config, job, node};
use flexcomm_domain::{CodecCost, RunId, Strategy};
use flexcomm_wire::api::{JobPolicy, Pin, ScenarioSet};
use flexcomm_wire::{
    DecisionOrder, EchoPeer, Heartbeat, HostSeen, JobOrders, Orders, PathReport, ProbePlan, Register, ReportBody,
    ShapeOrder, ShapeReport, ThroughputGrant, ThroughputReport, TrialOrder,
};
use serde_json::{Value, json};
use std::collections::BTreeSet;

const RUN: Option<RunId> = Some(RunId(7));

const GOOD: Network = Network { latency_us: 100.0, bandwidth_bps: 1e9 };

/// How closely a value must fit.
#[derive(Clone, Copy, PartialEq)]
enum Fit {
    /// Nothing that the schema does not know, everything that it requires.
    Valid,
    /// Everything that it knows.
    Full,
}

struct Document(Value);

impl Document {
    fn schema<'a>(&'a self, schema: &'a Value) -> &'a Value {
        match schema["$ref"].as_str() {
            Some(path) => self.0.pointer(path.trim_start_matches('#')).unwrap_or_else(|| panic!("no {path}")),
            None => schema,
        }
    }

    fn named(&self, name: &str) -> &Value {
        &self.0["components"]["schemas"][name]
    }

    fn check(&self, schema: &Value, value: &Value, fit: Fit) -> Result<(), String> {
        let schema = self.schema(schema);
        let within = |what: &str, inner: Result<(), String>| inner.map_err(|e| format!("{what}: {e}"));
        if let Some(choices) = schema["oneOf"].as_array() {
            let tried: Vec<_> = choices.iter().map(|choice| self.check(choice, value, fit)).collect();
            let fitting = tried.iter().filter(|t| t.is_ok()).count();
            return if fitting == 1 { Ok(()) } else { Err(format!("{fitting} choices fit {value}: {tried:?}")) };
        }
        if let Some(constant) = schema.get("const")
            && constant != value
        {
            return Err(format!("{value} is not {constant}"));
        }
        kind(schema, value)?;
        if let Some(items) = value.as_array() {
            for (i, item) in items.iter().enumerate() {
                let of = schema["prefixItems"].get(i).unwrap_or(&schema["items"]);
                within(&i.to_string(), self.check(of, item, fit))?;
            }
        }
        let (Some(fields), Some(known)) = (value.as_object(), schema["properties"].as_object()) else { return Ok(()) };
        for (name, field) in fields {
            let of = known.get(name).ok_or(format!("{name} is not described"))?;
            within(name, self.check(of, field, fit))?;
        }
        let required = schema["required"].as_array().into_iter().flatten().filter_map(Value::as_str);
        let all = known.keys().map(String::as_str).filter(|_| fit == Fit::Full);
        match required.chain(all).find(|name| !fields.contains_key(*name)) {
            Some(name) => Err(format!("{name} is missing")),
            None => Ok(()),
        }
    }
}

fn kind(schema: &Value, value: &Value) -> Result<(), String> {
    let kinds: Vec<&str> = match &schema["type"] {
        Value::String(one) => vec![one],
        Value::Array(several) => several.iter().filter_map(Value::as_str).collect(),
        _ if schema.get("const").is_some() => return Ok(()),
        _ => return Err(format!("no type in {schema}")),
    };
    let fits = |kind: &&str| match *kind {
        "null" => value.is_null(),
        "boolean" => value.is_boolean(),
        "integer" => value.is_u64() && schema["maximum"].as_u64().is_none_or(|most| value.as_u64() <= Some(most)),
        "number" => value.is_number(),
        "string" => value.is_string(),
        "array" => value.is_array(),
        "object" => value.is_object(),
        other => panic!("unknown type {other}"),
    };
    if kinds.iter().any(fits) { Ok(()) } else { Err(format!("{value} is not of type {kinds:?}")) }
}

fn strategy() -> flexcomm_wire::StrategyWire {
    "topk@0.01/art-ring:star".parse::<Strategy>().unwrap().into()
}

/// Every kind of report, every field set.
fn reports(agent: &mut Agent) -> Vec<ReportBody> {
    let trial = TrialOrder { run: RUN, id: 1, candidates: vec![strategy()], iterations: 10, budget_ms: 1000 };
    let mut steps = agent.steps((0, "topk@0.01/art-ring:star".parse().unwrap()), (0, 2), 10.0);
    if let ReportBody::Steps(report) = &mut steps {
        report.steps.iter_mut().for_each(|s| (s.wait_us, s.accuracy) = (Some(1.0), Some(0.5)));
    }
    let mut tried = agent.trial(&trial);
    if let ReportBody::Trial(report) = &mut tried {
        report.aborted = Some("no memory".into());
        report.shadow_us = Some(2e3);
        report.outcomes.iter_mut().for_each(|o| (o.shadow_gain, o.shadow_energy) = (Some(0.5), Some(1.0)));
    }
    let mut hello = agent.hello();
    if let ReportBody::JobSeen(seen) = &mut hello {
        (seen.buckets, seen.momentum) = (vec![VALUES - 1, 1], Some(0.9));
        seen.machine = Some("NVIDIA H200".into());
        seen.policy = Some(json!(policy()));
        let costs = [CodecCost { value_s: 1e-9, kept_s: 0.0 }; 2];
        seen.codecs.iter_mut().for_each(|codec| {
            (codec.index_coding, codec.times) = (Some("least".into()), Some(costs.into()));
        });
    }
    let throughput = ThroughputReport {
        grant: 1,
        peer: node("b"),
        out_bps: Some(1e9),
        back_bps: Some(1e9),
        out_is_lower_bound: true,
        back_is_lower_bound: true,
        bytes: 10,
        out_bytes: Some(5),
        took_us: Some(1e4),
        cpu_us: Some(1e3),
        error: Some("it broke".into()),
    };
    let mut link = agent.link("b", GOOD);
    if let ReportBody::Link(report) = &mut link {
        report.by_icmp = true;
    }
    vec![
        link,
        ReportBody::Throughput(throughput),
        ReportBody::Path(PathReport { peer: node("b"), hops: vec![None, Some([10, 0, 0, 2].into())] }),
        hello,
        ReportBody::JobLeft { job: job(), rank: 0, run: RUN, connection_lost: true },
        steps,
        agent.applied(1, 2, 3),
        tried,
        ReportBody::Shape(ShapeReport { id: 1, error: Some("no netem".into()) }),
    ]
}

fn orders() -> Orders {
    let decision = DecisionOrder {
        run: RUN,
        version: 1,
        parent: 0,
        strategy: strategy(),
        digest: 1,
        decided_at_us: 1,
        reason: "because".into(),
    };
    let trial = TrialOrder { run: RUN, id: 1, candidates: vec![strategy()], iterations: 10, budget_ms: 1000 };
    let peer = EchoPeer { node: node("b"), addr: [10, 0, 0, 2].into(), echo_port: 1, throughput_port: 2 };
    Orders {
        epoch: 1,
        probes: ProbePlan { echo_interval_ms: 1, trace_interval_s: 1, peers: vec![peer] },
        grants: vec![ThroughputGrant { id: 1, peer: node("b"), budget_bytes: 1, valid_ms: 1 }],
        jobs: vec![JobOrders { job: job(), decision: Some(decision), trial: Some(trial) }],
        shape: Some(ShapeOrder { id: 1, latency_us: 1.0, jitter_us: 1.0, loss: 0.1, bandwidth_bps: 1e6 }),
    }
}

fn scenario() -> ScenarioSet {
    let nodes = Some(vec![node("a")]);
    ScenarioSet { label: "C1".into(), latency_us: 1.0, jitter_us: 1.0, loss: 0.1, bandwidth_bps: 1e6, nodes }
}

/// Every key set; in truth `observe` and `pin` do not go together.
fn policy() -> JobPolicy {
    JobPolicy {
        kinds: Some(vec!["topk".into(), "onebit".into()]),
        objective: Some(json!({ "name": "knee", "unit_s": 0.1 })),
        least_gain: Some(0.1),
        most_overhead: Some(0.5),
        observe: true,
        pin: Some(Pin { strategy: strategy(), until: Some("2126-11-21T08:30:00Z".into()) }),
    }
}

fn document() -> Document {
    Document(serde_json::from_str(include_str!("../../src/api/openapi.json")).unwrap())
}

#[test]
fn bodies_and_orders_are_described_field_by_field() {
    let document = document();
    let mut agent = Agent { run: RUN, ..Agent::new("a", 0) };
    let bodies = reports(&mut agent);
    let kinds = document.named("ReportBody")["oneOf"].as_array().unwrap().len();
    assert_eq!(kinds, bodies.len(), "a kind of report is not described, or has no sample here");
    let addr = Some([10, 0, 0, 1].into());
    let hosts = vec![HostSeen { host: "gateway".into(), addr, round_trip_us: Some(200.0), loss: Some(0.0) }];
    let beat = Heartbeat { instance: 1, now_us: 1, orders_epoch: 1, spooled: 1, hosts };
    let samples = [
        ("Register", json!(Register { previous: vec![1], ..agent.registration() })),
        ("Heartbeat", json!(beat)),
        ("ReportBatch", json!(agent.batch(bodies))),
        ("Orders", json!(orders())),
        ("ScenarioSet", json!(scenario())),
        ("AskTrial", json!({ "candidates": [strategy()] })),
        ("JobPolicy", json!(policy())),
    ];
    for (name, sample) in &samples {
        document.check(document.named(name), sample, Fit::Full).unwrap_or_else(|e| panic!("{name}: {e}"));
    }
    // What is not required may be left out, and the rest still reads.
    for (name, sample) in &samples[..1] {
        let required = document.named(name)["required"].as_array().unwrap();
        let mut least = sample.clone();
        least.as_object_mut().unwrap().retain(|field, _| required.contains(&json!(field)));
        serde_json::from_value::<Register>(least).unwrap();
    }
}

/// A job with steps, a trial, a decision and something of every list.
async fn lively(api: &Api, agents: &mut [Agent; 2]) {
    for agent in agents.iter_mut() {
        assert!(agent.register(api).await.status().is_success());
    }
    for (i, peer) in [(0, "b"), (1, "a")] {
        let agent = &mut agents[i];
        let path = ReportBody::Path(PathReport { peer: node(peer), hops: vec![None] });
        let before = vec![
            agent.hello(),
            ReportBody::JobLeft { job: job(), rank: agent.rank, run: agent.run, connection_lost: false },
        ];
        agent.report(api, before).await;
        agent.run = RUN;
        let [link, test] = agent.measured(peer, GOOD);
        let bodies = vec![link, test, path, agent.hello(), agent.link("nobody", GOOD)];
        agent.report(api, bodies).await;
    }
    api.put("/api/v1/scenario", &ScenarioSet { nodes: None, ..scenario() }).await;
    let refused = ReportBody::Shape(ShapeReport { id: 1, error: Some("no netem".into()) });
    agents[0].report(api, vec![refused]).await;
    // The planner asks for one only where it is worth it.
    assert_eq!(api.post("/api/v1/jobs/j/trials", &json!({})).await.status(), 202);
    let mut step = 0;
    api.until("a decision and intervals", async |api| {
        let mut orders = None;
        for agent in agents.iter_mut() {
            let mut bodies = vec![agent.steps((0, Strategy::DENSE_RING), (step, 10), 200_000.0)];
            let own = agent.orders(api).await;
            bodies.extend(own.jobs.first().and_then(|j| j.trial.as_ref()).map(|t| agent.trial(t)));
            agent.report(api, bodies).await;
            orders = Some(own);
        }
        step += 10;
        let intervals: Vec<Value> = api.json("/api/v1/jobs/j/intervals").await;
        let decided = orders.is_some_and(|o| o.jobs.iter().any(|j| j.decision.is_some()));
        (decided && !intervals.is_empty()).then_some(())
    })
    .await;
}

#[tokio::test]
async fn answers_are_described_field_by_field() {
    let dir = tempfile::tempdir().unwrap();
    let server = Server::start(config(dir.path())).await;
    let api = Api::new(&server.url);
    lively(&api, &mut [Agent::new("a", 0), Agent::new("b", 1)]).await;
    let document = document();
    let paths = document.0["paths"].as_object().unwrap();
    let mut seen = BTreeSet::new();
    for (path, methods) in paths {
        let content = &methods["get"]["responses"]["200"]["content"];
        let Some(schema) = content.get("application/json").map(|c| &c["schema"]) else { continue };
        let real = [("{job}", "j"), ("{node}", "a"), ("{from}", "a"), ("{to}", "b")];
        let real = real.iter().fold(path.clone(), |path, (name, value)| path.replace(name, value));
        let request = api.client.get(format!("{}{real}", api.url)).bearer_auth(crate::common::TOKEN);
        let answer = request.send().await.unwrap();
        assert_eq!(answer.status(), 200, "{real}");
        let body: Value = answer.json().await.unwrap();
        assert!(body.as_array().is_none_or(|list| !list.is_empty()), "{real} is empty: nothing is shown");
        document.check(schema, &body, Fit::Valid).unwrap_or_else(|e| panic!("{real}: {e}"));
        seen.insert(real);
    }
    assert!(seen.len() >= 16, "{seen:?}");
    let path = "/api/v1/jobs/j/policy";
    let mut set: Value = json!({});
    for given in [JobPolicy { observe: false, ..policy() }, JobPolicy { pin: None, ..policy() }] {
        let answer: Value = api.put(path, &given).await.json().await.unwrap();
        assert_eq!(answer["not_offered"].as_array().unwrap().len(), 1, "{answer}");
        let view: Value = api.json(path).await;
        document.check(document.named("PolicyView"), &view, Fit::Valid).unwrap();
        assert_eq!((view["policy"]["kinds"].clone(), &view["source"]), (json!(["onebit", "topk"]), &json!("operator")));
        set.as_object_mut().unwrap().extend(answer.as_object().unwrap().clone());
    }
    document.check(document.named("PolicySet"), &set, Fit::Full).unwrap();
    let view: Value = api.delete(path).await.json().await.unwrap();
    document.check(document.named("PolicyView"), &view, Fit::Valid).unwrap();
    let problem: Value = api.get("/nowhere").await.json().await.unwrap();
    document.check(document.named("Problem"), &problem, Fit::Full).unwrap();
    server.stop().await;
}
