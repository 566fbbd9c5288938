//! What experiments take is kept per job and shown.

use crate::common::{Agent, Api, Server, config, node};
use flexcomm_wire::{ReportBody, ThroughputReport, TrialOrder};
use serde_json::{Value, json};

fn test(peer: &str, took_us: Option<f64>) -> ReportBody {
    ReportBody::Throughput(ThroughputReport {
        grant: 1,
        peer: node(peer),
        out_bps: Some(1e9),
        back_bps: None,
        out_is_lower_bound: false,
        back_is_lower_bound: false,
        bytes: 250_000,
        out_bytes: Some(250_000),
        took_us,
        cpu_us: took_us.map(|us| 0.25 * us),
        error: None,
    })
}

async fn trial_asked_for(api: &Api, agent: &Agent) -> TrialOrder {
    assert_eq!(api.post("/api/v1/jobs/j/trials", &json!({})).await.status(), 202);
    api.until("a trial", async |api| agent.orders(api).await.jobs.first().and_then(|job| job.trial.clone())).await
}

#[tokio::test]
async fn tests_count_for_the_jobs_on_both_nodes_and_a_trial_counts_once() {
    let dir = tempfile::tempdir().unwrap();
    let server = Server::start(config(dir.path())).await.ready().await;
    let api = Api::new(&server.url);
    let mut agents = [Agent::new("a", 0), Agent::new("b", 1), Agent::new("spare", 2)];
    for agent in &mut agents {
        agent.register(&api).await;
    }
    let [a, b, spare] = &mut agents;
    // Before the job there is none to count for.
    a.report(&api, vec![test("b", Some(1e6)), a.hello()]).await;
    b.report(&api, vec![b.hello()]).await;
    let path = "/api/v1/jobs/j/experiments";
    assert_eq!(api.json::<Value>(path).await, json!([]));
    // An older agent does not say how long its test took.
    let mut never_began = test("b", None);
    if let ReportBody::Throughput(report) = &mut never_began {
        (report.bytes, report.out_bytes, report.out_bps) = (0, None, None);
    }
    a.report(&api, vec![test("b", Some(2e4)), test("spare", Some(1e6)), test("b", None), never_began]).await;
    b.report(&api, vec![test("a", Some(4e4))]).await;
    spare.report(&api, vec![test("a", Some(1e6))]).await;
    let order = trial_asked_for(&api, a).await;
    let reported = |agent: &Agent, shadow: Option<f64>| {
        let ReportBody::Trial(mut report) = agent.trial(&order) else { unreachable!("a trial is reported") };
        (report.shadow_us, report.outcomes[0].shadow_gain) = (shadow, shadow.map(|_| 0.5));
        ReportBody::Trial(report)
    };
    // The leader completes its report as shadows tell more.
    let reports = vec![reported(a, None), reported(a, Some(1e3)), reported(a, Some(3e3))];
    a.report(&api, reports).await;
    b.report(&api, vec![reported(b, Some(9e3))]).await;
    let entries: Vec<Value> = api.json(path).await;
    let of = |kind: &str| {
        let entry = entries.iter().find(|entry| entry["kind"] == kind).unwrap();
        let counted = |key: &str| entry[key].as_f64().map(|number| (number * 1e9).round() / 1e9);
        let number = |key: &str| counted(key).unwrap();
        let run_s = number("seconds") / number("share");
        assert!((0.001..60.0).contains(&run_s), "the run has lasted {run_s} s");
        (entry["count"].as_u64().unwrap(), number("seconds"), counted("bytes"), counted("cpu_s"))
    };
    assert_eq!(of("throughput-test"), (3, 0.06, Some(750_000.0), Some(0.015)));
    assert_eq!(of("live-trial"), (1, 0.1, Some(3_000_000.0), Some(0.2)));
    assert_eq!(of("shadow-trial"), (1, 0.003, None, Some(0.003)));
    server.stop().await;
    // It is on disk, and gone with the run.
    let server = Server::start(config(dir.path())).await.ready().await;
    let api = Api::new(&server.url);
    assert_eq!(api.json::<Vec<Value>>(path).await.len(), 3);
    let left = |agent: &Agent| ReportBody::JobLeft {
        job: crate::common::job(),
        rank: agent.rank,
        run: None,
        connection_lost: false,
    };
    for agent in [&mut *a, &mut *b] {
        agent.register(&api).await;
        agent.report(&api, vec![left(agent)]).await;
    }
    a.report(&api, vec![a.hello()]).await;
    assert_eq!(api.json::<Value>(path).await, json!([]));
    server.stop().await;
}
