//! Who may read what the agent keeps. A test of its own process: the umask is the process's.
#![allow(clippy::unwrap_used)]

mod support;

use nix::sys::stat::{Mode, umask};
use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use support::{Agent, Controller, Trainer, wait_for};

fn mode(path: &Path) -> u32 {
    std::fs::metadata(path).unwrap().permissions().mode() & 0o777
}

/// All that lies under a folder, with the folder.
fn all(folder: &Path) -> Vec<std::path::PathBuf> {
    let entries = std::fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path());
    let below = entries.flat_map(|path| if path.is_dir() { all(&path) } else { vec![path] });
    std::iter::once(folder.to_owned()).chain(below).collect()
}

#[tokio::test(flavor = "multi_thread")]
async fn state_is_for_the_agents_user_and_the_socket_is_for_trainers_whatever_the_umask() {
    for mask in [Mode::empty(), Mode::from_bits_truncate(0o077)] {
        umask(mask);
        let controller = Controller::start().await;
        let agent = Agent::start(&controller, "a");
        let mut trainer = Trainer::join(&agent, "j", 0).await;
        trainer.steps(0..3).await;
        let decided = flexcomm_domain::Decision {
            job: "j".parse().unwrap(),
            version: flexcomm_domain::Version(1),
            parent: flexcomm_domain::Version(0),
            plan: flexcomm_domain::Strategy::DENSE_RING.into(),
            decided_at: flexcomm_domain::Timestamp(1),
            reason: "a test".into(),
        };
        let decision = Some((&decided).into());
        let job = flexcomm_wire::JobOrders { job: "j".parse().unwrap(), decision, trial: None };
        controller.order(|orders| orders.jobs = vec![job]);
        let (state, run) = (agent.config.state_dir.clone(), agent.config.run_dir.clone());
        wait_for("the saved decision", || state.join("decisions/j.json").exists().then_some(())).await;
        wait_for("steps", || (controller.steps("a").len() == 3).then_some(())).await;
        let kept = all(&state);
        assert!(kept.len() > 8, "{kept:?}");
        for path in kept {
            let wanted = if path.is_dir() { 0o700 } else { 0o600 };
            assert_eq!(mode(&path), wanted, "{} is {:o} under umask {mask:?}", path.display(), mode(&path));
        }
        let socket = (agent.socket(), agent.config.socket_mode);
        for (path, wanted) in [(run.clone(), 0o755), (run.join("agent.lock"), 0o600), socket] {
            assert_eq!(mode(&path), wanted, "{} is {:o} under umask {mask:?}", path.display(), mode(&path));
        }
        agent.end().await;
    }
}
