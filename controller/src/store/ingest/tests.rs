//! Reports as they are stored, and those that are not.

use super::super::tests::{register, scratch};
use super::super::{Deletion, NewDecision, NewTrial, Registration, TestRow};
use super::*;
use flexcomm_domain::{Decision, Strategy, Version};

fn node(name: &str) -> NodeName {
    NodeName::new(name).unwrap()
}

fn job() -> JobId {
    JobId::new("j").unwrap()
}

async fn registered(store: &Store, name: &str) {
    assert_eq!(store.register(&register(name), Timestamp(0)).await.unwrap(), Registration::Done(0));
}

fn hello(rank: u32, world: u32) -> ReportBody {
    let collectives = vec!["dense-ring".into()];
    ReportBody::JobSeen(Hello { collectives, ..Hello::new(job(), (rank, world), 10, "x") })
}

async fn send(store: &Store, (name, seq): (&str, u64), body: ReportBody, live: &[&str]) -> Ingested {
    let live: Vec<NodeName> = live.iter().map(|n| node(n)).collect();
    let batch = vec![Incoming { seq, body: Ok(body) }];
    match store.ingest((&node(name), 1), batch, &live, Timestamp(seq)).await.unwrap() {
        Ingest::Done(done) => done,
        other => panic!("{other:?}"),
    }
}

/// Also by whoever has read the job before.
#[tokio::test]
async fn buckets_that_a_rank_says_later_are_the_jobs() {
    let (store, _dir) = scratch().await;
    registered(&store, "a").await;
    let says = |rank, buckets: &[u64]| {
        let ReportBody::JobSeen(seen) = hello(rank, 2) else { unreachable!() };
        ReportBody::JobSeen(Hello { buckets: buckets.to_vec(), ..seen })
    };
    let said: [(u32, &[u64], &[u64]); 6] = [
        (0, &[], &[]),
        (1, &[], &[]),
        (0, &[4, 6], &[4, 6]),
        (1, &[4, 6], &[4, 6]),
        (1, &[], &[4, 6]),
        (0, &[3, 3, 4], &[3, 3, 4]),
    ];
    for (seq, (rank, buckets, known)) in (1..).zip(said) {
        let done = send(&store, ("a", seq), says(rank, buckets), &["a"]).await;
        // Of the first of two ranks nothing is decided.
        let news = if seq == 1 { vec![] } else { vec![News::Job] };
        assert_eq!((done.rejected, done.news), (0, news));
        let jobs = store.running_jobs().await.unwrap();
        assert_eq!((jobs.len(), &jobs[0].buckets[..], jobs[0].created), (1, known, Timestamp(1)));
    }
    // Another run of the name has its own.
    for (seq, rank) in [(7, 0), (8, 1)] {
        let left = ReportBody::JobLeft { job: job(), rank, run: None, connection_lost: false };
        send(&store, ("a", seq), left, &["a"]).await;
    }
    send(&store, ("a", 9), says(0, &[]), &["a"]).await;
    assert!(store.running_jobs().await.unwrap()[0].buckets.is_empty());
}

#[tokio::test]
async fn the_newest_test_of_a_link_by_each_of_its_ends_is_known() {
    let (store, _dir) = scratch().await;
    for name in ["a", "b"] {
        registered(&store, name).await;
    }
    let test = |peer: &str, out, back, out_is_lower_bound| {
        ReportBody::Throughput(ThroughputReport {
            grant: 1,
            peer: node(peer),
            out_bps: Some(out),
            back_bps: Some(back),
            out_is_lower_bound,
            back_is_lower_bound: false,
            bytes: 200_000,
            out_bytes: Some(100_000),
            took_us: None,
            cpu_us: None,
            error: None,
        })
    };
    send(&store, ("a", 1), test("b", 9e7, 8e7, false), &["a", "b"]).await;
    send(&store, ("b", 1), test("a", 3e6, 4e6, true), &["a", "b"]).await;
    assert!(store.link_tests().await.unwrap()[3].is_lower_bound);
    send(&store, ("b", 2), test("a", 2e6, 1e6, false), &["a", "b"]).await;
    let found = |t: &TestRow| (t.src.to_string(), t.reporter.to_string(), t.bandwidth_bps, t.is_lower_bound);
    let stored: Vec<_> = store.link_tests().await.unwrap().iter().map(found).collect();
    let exact = [("a", "a", 9e7), ("a", "b", 1e6), ("b", "a", 8e7), ("b", "b", 2e6)];
    let mut expected = exact.map(|(src, reporter, bps)| (src.to_owned(), reporter.to_owned(), bps, false)).to_vec();
    expected.push(("b".to_owned(), "b".to_owned(), 3e6, true));
    assert_eq!(stored, expected, "a bound replaces no test that was none");
}

/// Links of a batch are stored together, and what is kept in memory of them is what is stored; one whose peer nobody knows
/// does not hold up the others.
#[tokio::test]
async fn links_that_are_kept_are_those_that_are_stored() {
    let (store, _dir) = scratch().await;
    for name in ["a", "b", "c"] {
        registered(&store, name).await;
    }
    let link = |peer: &str, latency_us: f64| LinkReport {
        peer: node(peer),
        latency_us,
        latency_confidence: 1.0 / 3.0,
        latency_age_ms: 0.1,
        jitter_us: 0.0,
        loss_out: 0.0,
        loss_back: 0.1,
        by_icmp: latency_us > 250.0,
    };
    let put = async |name: &str, first: u64, links: &[(&str, f64)]| {
        let numbered = (first..).zip(links);
        let batch = numbered.map(|(seq, (peer, us))| Incoming { seq, body: Ok(ReportBody::Link(link(peer, *us))) });
        match store.ingest((&node(name), 1), batch.collect(), &[], Timestamp(first)).await.unwrap() {
            Ingest::Done(done) => (done.acked_seq, done.rejected, done.news, done.first_reason.unwrap_or_default()),
            other => panic!("{other:?}"),
        }
    };
    let same = async || {
        let kept = store.links().await.unwrap();
        let stored: Vec<LinkRow> =
            sql!("read", "SELECT * FROM links ORDER BY src, dst").fetch_all(&store.read).await.unwrap();
        assert_eq!(*kept, stored);
        kept.iter().map(|row| (row.src.to_string() + row.dst.as_str(), row.report.latency_us)).collect::<Vec<_>>()
    };
    assert_eq!(same().await, []);
    let all_new = put("a", 1, &[("c", 100.0), ("b", 200.0)]).await;
    assert_eq!(all_new, (2, 0, vec![News::Job], String::new()));
    assert_eq!(same().await, [("ab".to_owned(), 200.0), ("ac".to_owned(), 100.0)]);
    let (acked, rejected, news, why) = put("a", 3, &[("b", 300.1), ("x", 1.0), ("a", 2.0), ("c", 100.1)]).await;
    assert_eq!((acked, rejected, news), (6, 2, vec![News::Job]));
    assert!(why.contains("node x never registered"), "{why}");
    assert_eq!(same().await, [("ab".to_owned(), 300.1), ("ac".to_owned(), 100.1)]);
    assert_eq!(put("a", 7, &[("b", 301.0)]).await.2, [], "what only confirms is no news");
    assert_eq!(same().await[0], ("ab".to_owned(), 301.0));
    assert_eq!(put("b", 1, &[("x", 1.0)]).await.2, []);
    put("b", 2, &[("a", 4.0), ("a", 5.0)]).await;
    assert_eq!(same().await.last(), Some(&("ba".to_owned(), 5.0)));
    assert_eq!(store.link_history(&node("b"), &node("a"), 9).await.unwrap().len(), 2);
    store.forget_node(&node("c")).await.unwrap();
    assert_eq!(same().await.len(), 2);
}

#[tokio::test]
async fn a_report_is_stored_once_and_another_instance_is_refused() {
    let (store, _dir) = scratch().await;
    registered(&store, "a").await;
    assert_eq!(send(&store, ("a", 5), hello(0, 2), &["a"]).await.acked_seq, 5);
    let again = send(&store, ("a", 5), hello(0, 2), &["a"]).await;
    assert_eq!((again.acked_seq, again.repeated, again.news.len()), (5, 1, 0));
    let other = store.ingest((&node("a"), 2), vec![], &[], Timestamp(0)).await.unwrap();
    assert_eq!(other, Ingest::Stranger);
    let reports = [6, 7 + MAX_SEQ_STEP].map(|seq| Incoming { seq, body: Ok(hello(0, 2)) });
    let jump = store.ingest((&node("a"), 1), reports.to_vec(), &[], Timestamp(0)).await.unwrap();
    assert_eq!(jump, Ingest::Jump { from: 6, to: 7 + MAX_SEQ_STEP });
    assert_eq!(store.node(&node("a")).await.unwrap().unwrap().acked_seq, 5);
}

#[tokio::test]
async fn a_job_keeps_its_size_while_anybody_alive_runs_it() {
    let (store, _dir) = scratch().await;
    registered(&store, "a").await;
    registered(&store, "b").await;
    send(&store, ("a", 1), hello(0, 2), &["a", "b"]).await;
    send(&store, ("b", 1), hello(1, 2), &["a", "b"]).await;
    let refused = send(&store, ("b", 2), hello(1, 4), &["a", "b"]).await;
    assert!(refused.first_reason.unwrap().starts_with("job-conflict"));
    assert_eq!(send(&store, ("b", 3), hello(1, 4), &["b"]).await.rejected, 0, "a is dead");
    assert_eq!(store.job(&job()).await.unwrap().unwrap().world, 4);
    assert_eq!(store.ranks(&job()).await.unwrap().len(), 1, "ranks of the run before are gone");
}

/// Agents and trainers without run ids refuse a version or a trial older than what they know of a name.
#[tokio::test]
async fn a_name_goes_on_counting_after_it_was_deleted() {
    let (store, _dir) = scratch().await;
    registered(&store, "a").await;
    send(&store, ("a", 1), hello(0, 1), &["a"]).await;
    let run = store.job(&job()).await.unwrap().unwrap();
    let decision = Decision {
        job: job(),
        version: Version(1),
        parent: Version(0),
        plan: flexcomm_domain::Plan::DENSE_RING,
        decided_at: Timestamp(1),
        reason: "r".into(),
    };
    store
        .put_decision(&run, &NewDecision { decision: &decision, seed: 0, report: "{}", memory: "{}", snapshot: "{}" })
        .await
        .unwrap();
    let new = NewTrial { candidates: &[Strategy::DENSE_RING], iterations: 1, budget_ms: 1, why: "w" };
    assert_eq!(store.ask_trial(&run, &new, Timestamp(1)).await.unwrap(), Some(1));
    for seq in [2, 4] {
        let left = ReportBody::JobLeft { job: job(), rank: 0, run: None, connection_lost: false };
        send(&store, ("a", seq), left, &["a"]).await;
        assert_eq!(store.delete_job(&job(), &[]).await.unwrap(), Deletion::Done);
        send(&store, ("a", seq + 1), hello(0, 1), &["a"]).await;
        assert_eq!(store.job(&job()).await.unwrap().unwrap().earlier, Version(1));
    }
    let run = store.job(&job()).await.unwrap().unwrap();
    assert_eq!(store.ask_trial(&run, &new, Timestamp(1)).await.unwrap(), Some(2));
}

#[tokio::test]
async fn a_rank_that_left_another_run_is_still_in_this_one() {
    let (store, _dir) = scratch().await;
    registered(&store, "a").await;
    let ReportBody::JobSeen(seen) = hello(0, 1) else { unreachable!() };
    let joins = ReportBody::JobSeen(Hello { run: Some(RunId(2)), ..seen });
    send(&store, ("a", 1), joins, &["a"]).await;
    let left = |run| ReportBody::JobLeft { job: job(), rank: 0, run, connection_lost: true };
    let ignored = send(&store, ("a", 2), left(Some(RunId(1))), &["a"]).await;
    assert!(ignored.first_reason.unwrap().contains("no longer has the job's name"));
    assert_eq!(store.running_jobs().await.unwrap().len(), 1);
    // From an agent that does not name the run.
    send(&store, ("a", 3), left(None), &["a"]).await;
    assert_eq!(store.running_jobs().await.unwrap().len(), 0);
}

/// Whoever has the token reads a job's run id: that a rank is somewhere is believed of another node only once it has
/// left its own, or that one is silent.
#[tokio::test]
async fn a_rank_moves_only_when_its_node_is_silent_or_it_has_left() {
    let (store, _dir) = scratch().await;
    for name in ["a", "b", "c"] {
        registered(&store, name).await;
    }
    let everyone = ["a", "b", "c"];
    let of_run = |rank| match hello(rank, 2) {
        ReportBody::JobSeen(seen) => ReportBody::JobSeen(Hello { run: Some(flexcomm_domain::RunId(7)), ..seen }),
        other => other,
    };
    let places = async || {
        let ranks = store.ranks(&job()).await.unwrap();
        ranks.iter().map(|r| (r.node.to_string(), r.left.is_some())).collect::<Vec<_>>()
    };
    let at = |node: &str, left| (node.to_owned(), left);
    send(&store, ("a", 1), of_run(0), &everyone).await;
    send(&store, ("b", 1), of_run(1), &everyone).await;
    let refused = send(&store, ("c", 1), of_run(0), &everyone).await;
    assert_eq!(refused.refused.len(), 1, "{refused:?}");
    let why = &refused.refused[0].reason;
    assert!(why.contains("node c") && why.contains("on node a"), "{why}");
    assert_eq!(places().await, [at("a", false), at("b", false)]);
    let left = || ReportBody::JobLeft { job: job(), rank: 0, run: None, connection_lost: false };
    send(&store, ("c", 2), left(), &everyone).await;
    assert_eq!(places().await, [at("a", false), at("b", false)]);

    assert_eq!(send(&store, ("a", 2), of_run(0), &everyone).await.rejected, 0, "it announces itself again");
    assert_eq!(send(&store, ("c", 3), of_run(1), &["a", "c"]).await.rejected, 0, "b is silent");
    send(&store, ("a", 3), left(), &everyone).await;
    assert_eq!(send(&store, ("c", 4), of_run(0), &everyone).await.rejected, 0, "it has left a");
    assert_eq!(places().await, [at("c", false), at("c", false)]);
}

/// How a run of an older release ended is not known, and one rank's claim is not the run's newest step.
#[tokio::test]
async fn a_run_is_kept_with_what_is_known_of_its_end() {
    let (store, _dir) = scratch().await;
    for name in ["a", "b", "c"] {
        registered(&store, name).await;
    }
    let live = ["a", "b", "c"];
    let steps = |rank: u32, step| {
        let record = flexcomm_wire::StepRecord {
            step,
            compute_us: 1.0,
            sync_us: 1.0,
            step_us: 2.0,
            bytes_sent: 1,
            gain: 1.0,
            energy: (rank > 0).then_some(0.25),
            bucket_energies: [1.0, 3.0].repeat(rank.min(1) as usize),
            ..flexcomm_wire::StepRecord::default()
        };
        let strategy = Strategy::DENSE_RING.into();
        ReportBody::Steps(StepsReport { job: job(), rank, version: 0, strategy, steps: vec![record] })
    };
    for (rank, (name, step)) in [("a", 7), ("b", 1_000_000_000_000), ("c", 8)].into_iter().enumerate() {
        send(&store, (name, 1), hello(rank as u32, 3), &live).await;
        assert_eq!(send(&store, (name, 2), steps(rank as u32, step), &live).await.rejected, 0);
    }
    // Of a trainer that does not tell its gradient's energy none is known.
    let energies = |row: super::super::StepRow| (row.step, row.energy, row.bucket_energies);
    let stored: Vec<_> = store.steps(&job(), 0, 100).await.unwrap().into_iter().map(energies).collect();
    assert_eq!(stored, [(7, None, None), (8, Some(0.25), Some(vec![1.0, 3.0]))]);
    let update = "UPDATE jobs SET ended_us = 5, ended_how = NULL; UPDATE ranks SET left_us = 5";
    sqlx::query(update).execute(&mut *store.write.connection().await).await.unwrap();
    send(&store, ("a", 3), hello(0, 1), &live).await;
    let runs = store.runs(&job()).await.unwrap();
    assert_eq!((runs.len(), runs[0].how, runs[0].step), (1, None, Some(8)));

    use super::super::Deletion;
    let delete = async |live: &[&str]| {
        let live: Vec<NodeName> = live.iter().map(|n| node(n)).collect();
        store.delete_job(&job(), &live).await.unwrap()
    };
    assert_eq!(delete(&["a"]).await, Deletion::Running);
    assert_eq!(delete(&["b"]).await, Deletion::Done, "no agent of it is alive");
}

#[tokio::test]
async fn applied_reports_must_not_go_back() {
    let (store, _dir) = scratch().await;
    registered(&store, "a").await;
    send(&store, ("a", 1), hello(0, 1), &["a"]).await;
    let run = store.job(&job()).await.unwrap().unwrap();
    let mut digest = 0;
    for version in 1..=2 {
        let decision = Decision {
            job: job(),
            version: Version(version),
            parent: Version(version - 1),
            plan: flexcomm_domain::Plan::DENSE_RING,
            decided_at: Timestamp(version),
            reason: "r".into(),
        };
        digest = decision.digest().0;
        let new = NewDecision { decision: &decision, seed: 0, report: "{}", memory: "{}", snapshot: "{}" };
        store.put_decision(&run, &new).await.unwrap();
    }
    let applied =
        |version, digest| ReportBody::Applied(AppliedReport { job: job(), rank: 0, version, digest, step: 7 });
    let reason = |done: Ingested| done.first_reason.unwrap_or_default();
    assert!(reason(send(&store, ("a", 2), applied(2, digest ^ 1), &[]).await).starts_with("digest"));
    assert_eq!(reason(send(&store, ("a", 3), applied(2, digest), &[]).await), "");
    assert_eq!(store.decision(&job()).await.unwrap().unwrap().applied_at_step, Some(7));
    assert!(reason(send(&store, ("a", 4), applied(1, digest), &[]).await).starts_with("old-version"));
    assert!(reason(send(&store, ("a", 5), applied(3, digest), &[]).await).starts_with("unknown-version"));
    let counts: Vec<_> = store.rejected().await.unwrap().into_iter().map(|r| (r.reason, r.count)).collect();
    let expected = [("digest", 1), ("old-version", 1), ("unknown-version", 1)];
    assert_eq!(counts, expected.map(|(reason, count)| (reason.to_owned(), count)));
}
