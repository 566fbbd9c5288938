//! Decisions reach all ranks at one step, whatever agents do.

use crate::common::{FakeAgent, Ranks, orders, versions, wait_for};
use flexcomm_wire::FromTrainer;

/// Long enough to be ended by the test.
const FOREVER: &str = "--steps=100000000";

fn start(world: usize, agents_of: &[usize]) -> (Ranks, Vec<FakeAgent>) {
    let folder = tempfile::tempdir().unwrap();
    let agents = agents_of.iter().map(|r| FakeAgent::start(folder.path(), &format!("a{r}"))).collect();
    let root = folder.path().to_owned();
    let args = move |rank: usize| {
        vec![FOREVER.to_owned(), format!("--socket={}", FakeAgent::path(&root, &format!("a{rank}")))]
    };
    (Ranks::start_with(world, args, folder), agents)
}

#[test]
fn all_ranks_switch_at_one_step_by_rank_0s_copy_alone() {
    let (ranks, mut agents) = start(4, &[0, 1, 2]);
    wait_for("the job runs", || agents[0].step() > 3);
    // Rank 1 hears something else, rank 2 hears it too early, rank 3 has no agent.
    agents[1].decide(9, "topk@0.5/allgather");
    agents[2].decide(1, "topk@0.1/art-ring:star");
    let seen = agents[1].step();
    wait_for("steps go on", || agents[1].step() > seen + 5);
    agents[0].decide(1, "topk@0.1/art-ring:star");
    wait_for("version 1 is in force", || agents.iter().all(|a| a.applied().len() == 1));
    agents[0].decide(3, "none@1/dense-tree");
    wait_for("version 3 is in force", || agents.iter().all(|a| a.applied().len() == 2));
    ranks.stop(3);
    let applied: Vec<_> = agents.iter().map(FakeAgent::applied).collect();
    let (ends, log) = ranks.join();
    assert!(ends.iter().all(|end| end.stopped));
    let versions = versions(&log);
    assert_eq!(versions.iter().map(|v| v.1).collect::<Vec<_>>(), [0, 1, 3]);
    for applied in applied {
        let applied: Vec<_> = applied.iter().map(|report| (report.step, report.version)).collect();
        assert_eq!(applied, versions[1..]);
    }
}

#[test]
fn versions_twice_backwards_and_forged_change_nothing() {
    let (ranks, mut agents) = start(3, &[0]);
    let agent = &mut agents[0];
    agent.decide(5, "topk@0.1/allgather");
    wait_for("version 5 is in force", || agent.applied().len() == 1);
    let mut forged = orders(8, "topk@0.2/allgather", None);
    forged.decision.as_mut().unwrap().strategy.0 = "topk(k=0.3)+ef(vanilla)/allgather".into();
    let bad = [
        orders(5, "topk@0.1/allgather", None),
        orders(4, "topk@0.01/allgather", None),
        orders(5, "topk@0.01/allgather", None),
        forged,
    ];
    for order in bad {
        agent.publish(&order);
        let seen = agent.step();
        wait_for("steps go on", || agent.step() > seen + 3);
    }
    agent.send_garbage();
    agent.decide(6, "lwtopk@0.1/allgather");
    wait_for("version 6 is in force", || agent.applied().len() == 2);
    ranks.stop(0);
    let (_, log) = ranks.join();
    assert_eq!(versions(&log).iter().map(|v| v.1).collect::<Vec<_>>(), [0, 5, 6]);
}

#[test]
fn training_outlives_its_agents_and_follows_a_new_one() {
    let (ranks, mut agents) = start(4, &[0, 1]);
    agents[0].decide(2, "topk@0.1/allgather");
    wait_for("version 2 is in force", || agents.iter().all(|a| a.applied().len() == 1));
    let one = agents.pop().unwrap();
    agents.pop().unwrap().kill();
    let seen = one.step();
    wait_for("steps go on without rank 0's agent", || one.step() > seen + 10);

    let mut agent = FakeAgent::start(ranks.folder.path(), "a0");
    wait_for("rank 0 finds the new agent", || !agent.applied().is_empty());
    assert_eq!(agent.applied()[0].version, 2, "a new agent is told what is in force");
    // The new agent has lost its memory and publishes an older version first.
    agent.decide(1, "none@1/dense-ring");
    let seen = agent.step();
    wait_for("steps go on", || agent.step() > seen + 5);
    agent.decide(7, "topk@0.05/art-tree:var");
    wait_for("version 7 is in force", || one.applied().len() == 2);
    ranks.stop(1);
    let (_, log) = ranks.join();
    assert_eq!(versions(&log).iter().map(|v| v.1).collect::<Vec<_>>(), [0, 2, 7]);
}

#[test]
fn telemetry_says_what_ran() {
    let (ranks, mut agents) = start(2, &[0, 1]);
    agents[0].decide(1, "topk@0.1/allgather");
    wait_for("steps under version 1", || {
        agents[1].received().iter().any(|m| matches!(m, FromTrainer::Steps(s) if s.version == 1))
    });
    ranks.stop(0);
    ranks.join();
    wait_for("goodbyes", || agents.iter().all(|a| a.received().last() == Some(&FromTrainer::Bye)));
    for agent in &agents {
        let mut next = 0;
        for message in agent.received() {
            let FromTrainer::Steps(report) = message else { continue };
            let expected = if report.version == 1 { "topk(k=0.1)+ef(vanilla)/allgather" } else { "none/dense-ring" };
            assert_eq!(report.strategy.0, expected);
            for step in report.steps {
                assert_eq!(step.step, next, "each step is reported once, in order");
                next += 1;
                assert!(step.sync_us > 0.0 && step.compute_us > 0.0 && step.bytes_sent > 0);
                assert!(step.step_us >= step.sync_us + step.comp_us);
                assert!(if report.version == 1 { step.gain < 1.0 } else { step.gain == 1.0 });
                assert_eq!(step.energy > Some(0.0), report.version == 1);
            }
        }
        assert!(next > 0);
    }
}
