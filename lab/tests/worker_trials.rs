//! A live trial leaves no trace: parameters are bit for bit as without it.
#![allow(clippy::unwrap_used, reason = "a test that cannot go on has failed")]

mod worker_common;

use flexcomm_wire::{FromTrainer, TrialOrder, TrialReport};
use std::sync::{Arc, Mutex};
use worker_common::{FakeAgent, Ranks, orders, trial, wait_for};

const STRATEGY: &str = "--strategy=mstopk@0.05/allgather";
const LENGTH: [&str; 2] = ["--steps=200", "--steps-per-epoch=50"];

/// Of each trial, without those that its shadow trials complete.
fn first_reports(mut reports: Vec<TrialReport>) -> Vec<TrialReport> {
    reports.dedup_by_key(|report| report.id);
    reports
}

/// Trains with one trial after each of the first three epochs.
fn with_trials(trials: [TrialOrder; 3]) -> (Vec<String>, Vec<TrialReport>) {
    let folder = tempfile::tempdir().unwrap();
    let agent = Arc::new(Mutex::new(FakeAgent::start(folder.path(), "a0")));
    let socket = FakeAgent::path(folder.path(), "a0");
    let args = move |rank: usize| {
        let socket = (rank == 0).then(|| format!("--socket={socket}"));
        LENGTH.into_iter().chain([STRATEGY]).map(String::from).chain(socket).collect()
    };
    let watch = {
        let (agent, mut done, mut trials) = (Arc::clone(&agent), 0, trials.into_iter());
        move |_: &str| {
            let mut agent = agent.lock().unwrap();
            wait_for("the agent has welcomed the rank and heard of the last trial", || {
                let ended = first_reports(agent.trials()).len();
                agent.received().iter().any(|m| matches!(m, FromTrainer::Steps(_))) && ended == done
            });
            if let Some(trial) = trials.next() {
                agent.publish(&orders(0, "", Some(trial)));
                done += 1;
            }
        }
    };
    let (_, log) = Ranks::start_watched(3, args, folder, Box::new(watch)).join();
    let reports = agent.lock().unwrap().trials();
    (log, reports)
}

#[test]
fn three_trials_within_200_steps_change_no_bit() {
    let many = ["topk@0.1/allgather", "topk@0.01/art-ring:star", "topk@0.1/art-tree:var", "lwtopk@0.1/allgather"];
    let (log, reports) = with_trials([
        trial(1, &["none@1/dense-tree"], 2, 60_000),
        trial(2, &many, 10, 60_000),
        // Its budget is used up at once: it ends within its first candidate.
        trial(3, &["none@1/dense-ring"; 16], 1000, 0),
    ]);
    let (_, plain) = Ranks::start(3, &[LENGTH[0], LENGTH[1], STRATEGY]).join();
    assert_eq!((log.len(), plain.len()), (200, 200));
    let differ = log.iter().zip(&plain).find(|(a, b)| a != b);
    assert_eq!(differ, None, "the first step that differs");

    let completed = reports.iter().rfind(|report| report.id == 2).unwrap();
    let shadowed: Vec<bool> = completed.outcomes.iter().map(|o| o.shadow_gain.is_some()).collect();
    assert_eq!(shadowed, [true, false, false, true], "of what needs no other rank");
    let reports = first_reports(reports);
    assert_eq!(reports.iter().map(|r| r.id).collect::<Vec<_>>(), [1, 2, 3]);
    assert_eq!(reports[1].outcomes.iter().map(|o| o.iterations).collect::<Vec<_>>(), [10; 4]);
    assert_eq!(reports[1].aborted, None);
    let iterations: u32 = reports[2].outcomes.iter().map(|o| o.iterations).sum();
    assert!(reports[2].aborted.as_ref().unwrap().contains("budget"));
    assert!((1..16_000).contains(&iterations), "{iterations}");
}
