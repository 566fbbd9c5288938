//! What an operator sets for one job: it counts from the next look on, is shown, and can be taken back.

use crate::common::{Api, Server, config, problem};
use crate::story::{Cluster, SLOW, all_is_decided_again_the_same, decision};
use flexcomm_wire::api::{DecisionView, JobView, PolicyView};
use serde_json::{Value, json};

const PATH: &str = "/api/v1/jobs/j/policy";
const PINNED: &str = "topk(k=0.05)+ef(vanilla)/allgather";

async fn set(api: &Api, policy: Value) {
    let answer = api.put(PATH, &policy).await;
    assert_eq!(answer.status(), 200, "{policy}: {}", answer.text().await.unwrap());
}

async fn report(api: &Api) -> Value {
    api.json::<Value>("/api/v1/jobs/j/report").await["report"].clone()
}

async fn verdict(cluster: &mut Cluster, api: &Api, verdict: &str) -> Value {
    let look = async |api: &Api| Some(report(api).await).filter(|report| report["verdict"] == verdict);
    cluster.train_until(api, verdict, look).await
}

async fn decided(cluster: &mut Cluster, api: &Api, what: &str, is: impl Fn(&DecisionView) -> bool) -> DecisionView {
    let look = async |api: &Api| decision(api).await.filter(|d| is(d) && d.applied_at_step.is_some());
    cluster.train_until(api, what, look).await
}

/// By the newest look: what is not admitted has no score.
async fn dense_alone_is_admitted(api: &Api) {
    let report = report(api).await;
    let all = report["alternatives"].as_array().unwrap();
    let admitted = |a: &&Value| a["score"].is_number();
    let is_dense = |a: &Value| a["strategy"].as_str().unwrap().starts_with("none/");
    assert!(all.len() > 5 && all.iter().filter(admitted).all(is_dense), "{report:#}");
}

async fn announced(api: &Api) -> Cluster {
    let mut cluster = Cluster::start(api).await;
    for agent in &mut cluster.agents {
        let hello = agent.hello();
        agent.report(api, vec![hello]).await;
    }
    cluster
}

#[tokio::test]
async fn what_is_set_for_a_job_counts_from_the_next_look_on() {
    let dir = tempfile::tempdir().unwrap();
    let server = Server::start(config(dir.path())).await;
    let api = Api::new(&server.url);
    assert_eq!(api.get(PATH).await.status(), 404);
    assert_eq!(api.delete(PATH).await.status(), 404);
    let mut cluster = announced(&api).await;
    let view: PolicyView = api.json(PATH).await;
    assert_eq!((view.policy, view.source.as_str()), (Default::default(), "controller"));
    let counts = view.in_force;
    assert_eq!((&counts.objective["name"], counts.least_gain), (&json!("time-to-quality"), 0.0));
    assert_eq!((counts.compressors, counts.confidence), (None, 0.85));

    set(&api, json!({ "observe": true })).await;
    let observed = verdict(&mut cluster, &api, "observing").await;
    let why = observed["why"].as_str().unwrap();
    let proposes = observed["proposed"].is_string();
    assert!(why.contains("only observes") && why.contains("nothing would change") != proposes, "{observed}");
    assert_eq!((decision(&api).await, api.json::<Value>("/api/v1/jobs/j/trials").await), (None, json!([])));

    set(&api, json!({ "pin": { "strategy": PINNED, "until": "2126-11-21T09:30:00+01:00" } })).await;
    let pinned = decided(&mut cluster, &api, "the pin", |d| d.strategy == PINNED).await;
    assert!(pinned.reason.contains("is pinned until 2126-11-21T08:30:00Z"), "{}", pinned.reason);
    verdict(&mut cluster, &api, "pinned").await;
    let job: JobView = api.json("/api/v1/jobs/j").await;
    let pin = job.policy.pin.unwrap();
    assert_eq!((pin.strategy.0.as_str(), pin.until.as_deref()), (PINNED, Some("2126-11-21T08:30:00Z")));
    assert_eq!((job.policy.observe, job.policy_source.as_str()), (false, "operator"), "the whole policy is replaced");

    cluster.network = SLOW;
    set(&api, json!({ "kinds": null })).await;
    decided(&mut cluster, &api, "a ratio for the slow network", |d| d.strategy != PINNED && d.cr < 1.0).await;
    set(&api, json!({ "least_gain": 1 })).await;
    decided(&mut cluster, &api, "dense", |d| d.cr == 1.0).await;
    dense_alone_is_admitted(&api).await;
    set(&api, json!({})).await;
    decided(&mut cluster, &api, "compression again", |d| d.cr < 1.0).await;
    set(&api, json!({ "most_overhead": 0 })).await;
    let dense = decided(&mut cluster, &api, "dense again", |d| d.cr == 1.0).await;
    dense_alone_is_admitted(&api).await;

    set(&api, json!({ "objective": "knee" })).await;
    let named = async |api: &Api| Some(report(api).await).filter(|report| report["policy"] == "knee");
    cluster.train_until(&api, "a look by the knee", named).await;
    let view: PolicyView = api.json(PATH).await;
    assert_eq!((&view.policy.objective.unwrap()["name"], view.source.as_str()), (&json!("knee"), "operator"));
    assert_eq!(view.in_force.objective["name"], "knee");
    let view: PolicyView = api.delete(PATH).await.json().await.unwrap();
    assert_eq!((view.policy, view.source.as_str()), (Default::default(), "controller"));
    let default = async |api: &Api| Some(report(api).await).filter(|report| report["policy"] == "time-to-quality");
    cluster.train_until(&api, "a look as before", default).await;
    all_is_decided_again_the_same(&api, dense.version as usize).await;
    server.stop().await;
}

/// Of ranks whose scripts differ the lowest counts, until an operator sets a policy, and again when that is taken back.
#[tokio::test]
async fn what_the_script_sets_counts_until_an_operator_sets_another() {
    let dir = tempfile::tempdir().unwrap();
    let server = Server::start(config(dir.path())).await;
    let api = Api::new(&server.url);
    let mut cluster = Cluster::start(&api).await;
    let scripts = [json!({ "observe": true, "of a later release": 1 }), json!({ "least_gain": 0.5 })];
    for (agent, policy) in cluster.agents.iter_mut().zip(scripts).rev() {
        let mut hello = agent.hello();
        if let flexcomm_wire::ReportBody::JobSeen(seen) = &mut hello {
            seen.policy = Some(policy);
        }
        assert_eq!(agent.report(&api, vec![hello]).await.rejected, 0);
    }
    let view: PolicyView = api.json(PATH).await;
    assert_eq!((view.policy.observe, view.policy.least_gain, view.source.as_str()), (true, None, "script"));
    verdict(&mut cluster, &api, "observing").await;
    let waiting = api.json::<Value>("/api/v1/jobs/j/report").await["waiting"].to_string();
    assert!(waiting.contains("ranks 0 and 1 set different policies: that of rank 0 counts"), "{waiting}");

    set(&api, json!({})).await;
    cluster.train_until(&api, "a decision", async |api| decision(api).await).await;
    let job: JobView = api.json("/api/v1/jobs/j").await;
    assert_eq!((job.policy, job.policy_source.as_str()), (Default::default(), "operator"), "all of it is replaced");
    let view: PolicyView = api.delete(PATH).await.json().await.unwrap();
    assert_eq!((view.policy.observe, view.source.as_str()), (true, "script"));
    server.stop().await;
}

#[tokio::test]
async fn a_policy_that_cannot_count_is_refused_and_nothing_of_it_is_kept() {
    let dir = tempfile::tempdir().unwrap();
    let server = Server::start(config(dir.path())).await;
    let api = Api::new(&server.url);
    announced(&api).await;
    set(&api, json!({ "least_gain": 0.5 })).await;
    let pin = |strategy: &str, until: Option<&str>| json!({ "pin": { "strategy": strategy, "until": until } });
    for (bad, expected) in [
        (json!({ "least_gian": 0.5 }), "unknown key \"least_gian\", did you mean least_gain?"),
        (json!({ "least_gain": 2 }), "least_gain is 2, allowed is 0 to 1"),
        (json!({ "objective": "kneee" }), "did you mean knee?"),
        (json!({ "observe": "yes" }), "observe: expected true or false, found \"yes\""),
        (pin(PINNED, Some("2026-01-01T00:00:00Z")), "pin.until is 2026-01-01T00:00:00Z, allowed is a time after now"),
        (pin(PINNED, Some("next week")), "expected a time with its zone, from 1970 to 9999-12-30, as in RFC 3339"),
        (pin("topkk(k=0.1)/allgather", None), "did you mean topk?"),
        (
            pin("mstopk(k=0.1)+ef(vanilla)/allgather", None),
            "no trainer of the job offers mstopk(k=*)+ef(vanilla); offered are topk(k=*)+ef(vanilla) by dense-ring",
        ),
        (
            pin("topk(k=0.1)/allgather", None),
            "no trainer of the job offers topk(k=*); they offer topk(k=*)+ef(vanilla)",
        ),
        (json!({ "observe": true, "pin": { "strategy": PINNED } }), "observe and pin do not go together"),
    ] {
        let refused = problem(api.put(PATH, &bad).await, 422).await;
        let has = |words: &str| refused["detail"].as_str().unwrap().contains(words);
        assert!(!(has("; they offer ") && has("offered are")), "{refused}");
        assert!(refused["detail"].as_str().unwrap().contains(expected), "{bad}: {refused}");
    }
    let view: PolicyView = api.json(PATH).await;
    assert_eq!((view.policy.least_gain, view.policy.pin), (Some(0.5), None));
    let by_bucket = pin("none/dense-ring | none/dense-tree", None);
    let set: Value = api.put(PATH, &by_bucket).await.json().await.unwrap();
    assert!(set["note"].as_str().unwrap().contains("buckets of the job's gradient are not known yet"), "{set}");
    self::set(&api, json!({ "least_gain": 0.5 })).await;
    server.stop().await;
    let server = Server::start(config(dir.path())).await.ready().await;
    let view: PolicyView = Api::new(&server.url).json(PATH).await;
    assert_eq!((view.policy.least_gain, view.source.as_str()), (Some(0.5), "operator"), "it outlives a restart");
    server.stop().await;
}

#[tokio::test]
async fn a_pin_is_taken_with_a_note_where_no_trainer_is_attached() {
    let dir = tempfile::tempdir().unwrap();
    let server = Server::start(config(dir.path())).await;
    let api = Api::new(&server.url);
    let mut cluster = announced(&api).await;
    for agent in &mut cluster.agents {
        let (rank, run) = (agent.rank, agent.run);
        let left = flexcomm_wire::ReportBody::JobLeft { job: crate::common::job(), rank, run, connection_lost: false };
        agent.report(&api, vec![left]).await;
    }
    let strategy = "mstopk(k=0.1)+ef(vanilla)/allgather";
    let set: Value = api.put(PATH, &json!({ "pin": { "strategy": strategy } })).await.json().await.unwrap();
    assert!(set["note"].as_str().unwrap().contains("no trainer of the job is attached"), "{set}");
    for agent in &mut cluster.agents {
        let hello = agent.hello();
        agent.report(&api, vec![hello]).await;
    }
    let made = cluster.train_until(&api, "a decision", async |api| decision(api).await).await;
    assert!(
        made.strategy != strategy && made.reason.contains("cannot run: no trainer of the job offers mstopk"),
        "{made:?}"
    );
    server.stop().await;
}
