//! A live trial leaves no trace: parameters are bit for bit as without it.

use crate::common::{FakeAgent, Ranks, orders, trial, wait_for};
use flexcomm_wire::{FromTrainer, TrialOrder, TrialReport};
use std::sync::{Arc, Mutex};

const STRATEGY: &str = "--strategy=mstopk@0.05/allgather";
const LENGTH: [&str; 2] = ["--steps=200", "--steps-per-epoch=50"];

/// Of each trial, without those that its shadow trials complete.
fn first_reports(mut reports: Vec<TrialReport>) -> Vec<TrialReport> {
    reports.dedup_by_key(|report| report.id);
    reports
}

/// Trains with one trial after each of the first epochs, on gradients that `spoil` changes.
fn with_trials(trials: Vec<TrialOrder>, spoil: fn(&mut Vec<f32>)) -> (Vec<String>, Vec<TrialReport>) {
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
    let (_, log) = Ranks::start_spoiled(3, args, folder, Box::new(watch), |_| spoil).join();
    let reports = agent.lock().unwrap().trials();
    (log, reports)
}

/// The same without them.
fn without_trials(spoil: fn(&mut Vec<f32>)) -> Vec<String> {
    let args = |_| LENGTH.into_iter().chain([STRATEGY]).map(String::from).collect();
    Ranks::start_spoiled(3, args, tempfile::tempdir().unwrap(), Box::new(|_| {}), |_| spoil).join().1
}

#[test]
fn three_trials_within_200_steps_change_no_bit() {
    let many = ["topk@0.1/allgather", "topk@0.01/art-ring:star", "topk@0.1/art-tree:var", "lwtopk@0.1/allgather"];
    let trials = vec![
        trial(1, &["none@1/dense-tree"], 2, 60_000),
        trial(2, &many, 10, 60_000),
        // Its budget is used up at once: it ends within its first candidate.
        trial(3, &["none@1/dense-ring"; 16], 1000, 0),
    ];
    let (log, reports) = with_trials(trials, |_| {});
    let plain = without_trials(|_| {});
    assert_eq!((log.len(), plain.len()), (200, 200));
    let differ = log.iter().zip(&plain).find(|(a, b)| a != b);
    assert_eq!(differ, None, "the first step that differs");

    let completed = reports.iter().rfind(|report| report.id == 2).unwrap();
    let shadowed: Vec<bool> = completed.outcomes.iter().map(|o| o.shadow_gain.is_some()).collect();
    assert_eq!(shadowed, [true; 4], "AR-Topk's from rank 0, over samples of all ranks");
    let reports = first_reports(reports);
    assert_eq!(reports.iter().map(|r| r.id).collect::<Vec<_>>(), [1, 2, 3]);
    assert_eq!(reports[1].outcomes.iter().map(|o| o.iterations).collect::<Vec<_>>(), [10; 4]);
    assert_eq!(reports[1].aborted, None);
    let iterations: u32 = reports[2].outcomes.iter().map(|o| o.iterations).sum();
    assert!(reports[2].aborted.as_ref().unwrap().contains("budget"));
    assert!((1..16_000).contains(&iterations), "{iterations}");
}

#[test]
fn a_candidate_that_diverges_ends_its_trial_and_leaves_no_trace() {
    // Twice the largest factor is not finite: every exchange is refused. The other factor leaves parameters that give no loss: biases
    // that only grow keep the hidden layer from answering 0.
    let diverges = ["topk(k=0.1)+ef(vanilla,gamma=3e38)/allgather", "topk(k=0.1)+ef(vanilla,gamma=1e37)/allgather"];
    let good = "topk(k=0.1)+ef(vanilla)/allgather";
    let trials = (1..).zip(diverges).map(|(id, bad)| trial(id, &[good, bad, good], 10, 60_000)).collect();
    let spoil: fn(&mut Vec<f32>) = |gradient| gradient[784 * 12..][..12].fill(-2.0);
    let (log, reports) = with_trials(trials, spoil);
    let plain = without_trials(spoil);
    assert_eq!(log.iter().zip(&plain).find(|(a, b)| a != b), None, "the first step that differs");
    for (report, bad) in first_reports(reports).iter().zip(diverges) {
        assert_eq!(report.aborted.as_deref(), Some("a candidate's loss was not a number"), "{report:?}");
        let [before, diverged] = &report.outcomes[..] else { panic!("{:?}", report.outcomes) };
        assert_eq!((before.iterations, diverged.strategy.0.as_str()), (10, bad));
        assert!((1..10).contains(&diverged.iterations), "{diverged:?}");
        // Also where every exchange was refused: it took its time.
        assert!(diverged.sync_us > 0.0 && diverged.comp_us > 0.0, "{diverged:?}");
    }
}
