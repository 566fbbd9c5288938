//! The jobs of tests/suite over the lab's TCP. python/tests/test_suite.py runs the same over torch.distributed.

use crate::common::{FakeAgent, Ranks, orders, trial, versions, wait_for};
use flexcomm_domain::Plan;
use flexcomm_lab::worker::Ended;
use flexcomm_wire::{JobOrders, TrialOrder};
use serde::Deserialize;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

const RANKS: usize = 4;

/// Long enough to be ended by the test.
const FOREVER: u64 = 100_000_000;

/// Steps after an order that changes nothing.
const ON: u64 = 6;

/// What tests/suite/README.md describes.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Suite {
    strategy: String,
    #[serde(default)]
    held: bool,
    orders: Vec<Order>,
    versions: Vec<u64>,
    fails: Option<Failure>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Failure {
    rank: usize,
    how: How,
    error: Vec<String>,
}

#[derive(Deserialize, Clone, Copy, PartialEq)]
#[serde(rename_all = "snake_case")]
enum How {
    NotFinite,
    Codec,
    Killed,
}

impl How {
    /// Does it to a gradient that is to be exchanged.
    fn spoil(self, gradient: &mut Vec<f32>) {
        let middle = gradient.len() / 2;
        match self {
            Self::NotFinite => gradient[middle] = f32::NAN,
            Self::Codec => drop(gradient.pop()),
            // As far as the others can tell: its connections close, and it says nothing before.
            Self::Killed => std::panic::resume_unwind(Box::new("killed")),
        }
    }
}

impl Failure {
    /// Every rank that is left says the same of it.
    fn check(&self, ends: Vec<anyhow::Result<Ended>>) {
        let name = format!("rank {}", self.rank);
        for (rank, end) in
            ends.into_iter().enumerate().filter(|(rank, _)| self.how != How::Killed || *rank != self.rank)
        {
            let text = format!("{:#}", end.unwrap_err());
            assert!(self.error.iter().chain([&name]).all(|part| text.contains(part)), "rank {rank} says: {text}");
        }
    }
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Order {
    decision: Option<DecisionOf>,
    trial: Option<TrialOf>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct DecisionOf {
    version: u64,
    strategy: String,
    #[serde(default)]
    forged: bool,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct TrialOf {
    id: u64,
    candidates: Vec<String>,
    iterations: u32,
    #[serde(default)]
    shadows: bool,
}

impl TrialOf {
    fn order(&self) -> TrialOrder {
        let candidates: Vec<&str> = self.candidates.iter().map(String::as_str).collect();
        trial(self.id, &candidates, self.iterations, 60_000)
    }

    /// Whether rank 0 has reported what the shadow trials of all that compresses found.
    fn has_shadows(&self, leader: &FakeAgent) -> bool {
        let last = leader.trials().into_iter().rfind(|report| report.id == self.id);
        let dense = |strategy: &str| strategy.starts_with("none");
        let found = |gain: Option<f64>| gain.is_some_and(|gain| gain > 0.0 && gain < 1.0);
        last.is_some_and(|report| report.outcomes.iter().all(|o| dense(&o.strategy.0) || found(o.shadow_gain)))
    }

    /// What a rank has reported of it first: its shadow trials complete it later.
    fn check(&self, agent: &FakeAgent) {
        let report = agent.trials().into_iter().find(|report| report.id == self.id).unwrap();
        let ran: Vec<(&str, u32)> = report.outcomes.iter().map(|o| (o.strategy.0.as_str(), o.iterations)).collect();
        let asked: Vec<(&str, u32)> = self.candidates.iter().map(|c| (c.as_str(), self.iterations)).collect();
        assert_eq!((ran, report.aborted), (asked, None));
        for outcome in &report.outcomes {
            assert!(outcome.gain > 0.0 && outcome.gain <= 1.0 && outcome.sync_us > 0.0, "{outcome:?}");
            assert!(outcome.energy > Some(0.0) || outcome.gain == 1.0, "{outcome:?}");
        }
    }
}

impl Order {
    fn published(&self) -> JobOrders {
        let (version, strategy) = self.decision.as_ref().map_or((0, ""), |d| (d.version, d.strategy.as_str()));
        let mut orders = orders(version, strategy, self.trial.as_ref().map(TrialOf::order));
        if let Some(decision) = orders.decision.as_mut().filter(|_| self.decision.as_ref().unwrap().forged) {
            decision.digest = 7;
        }
        orders
    }
}

/// A job under way.
struct Running {
    ranks: Ranks,
    /// Of the first two ranks. Orders come by rank 0's; both get reports.
    agents: [FakeAgent; 2],
    /// From then on the rank fails that is to.
    fails: Arc<AtomicBool>,
}

impl Suite {
    fn start(&self, steps: u64) -> Running {
        let folder = tempfile::tempdir().unwrap();
        let agents = ["a0", "a1"].map(|name| FakeAgent::start(folder.path(), name));
        let sockets = ["a0", "a1"].map(|name| FakeAgent::path(folder.path(), name));
        let option = if self.held { "strategy" } else { "initial" };
        let args = |rank: usize| {
            let socket = sockets.get(rank).map(|socket| format!("--socket={socket}"));
            [format!("--{option}={}", self.strategy), format!("--steps={steps}")].into_iter().chain(socket).collect()
        };
        let fails = Arc::new(AtomicBool::new(false));
        let spoil = |rank: usize| {
            let how = self.fails.as_ref().filter(|failure| failure.rank == rank).map(|failure| failure.how);
            let flag = Arc::clone(&fails);
            move |gradient: &mut Vec<f32>| {
                how.filter(|_| flag.load(Ordering::Relaxed)).into_iter().for_each(|how| how.spoil(gradient));
            }
        };
        let ranks = Ranks::start_spoiled(RANKS, args, folder, Box::new(|_| {}), spoil);
        Running { ranks, agents, fails }
    }

    /// Versions that come into force, each with the digest of the first strategy that was ordered under it.
    fn decided(&self) -> Vec<(u64, u64)> {
        let decisions: Vec<&DecisionOf> = self.orders.iter().filter_map(|order| order.decision.as_ref()).collect();
        let digest = |version| {
            let first = decisions.iter().find(|d| d.version == version && !d.forged).unwrap();
            first.strategy.parse::<Plan>().unwrap().digest().0
        };
        self.versions[1..].iter().map(|version| (*version, digest(*version))).collect()
    }

    /// Publishes one order after the other, and waits for what it does.
    fn order(&self, agents: &mut [FakeAgent]) {
        wait_for("the job runs", || agents.iter().all(|agent| agent.step() > 2));
        let mut left = self.versions[1..].iter().peekable();
        let mut applied = 0;
        for order in &self.orders {
            agents[0].publish(&order.published());
            let (seen, decided) = (agents[0].step(), order.decision.as_ref());
            if decided.is_some_and(|d| !d.forged && left.next_if_eq(&&d.version).is_some()) {
                applied += 1;
                wait_for("the decision is in force", || agents.iter().all(|agent| agent.applied().len() >= applied));
            }
            if let Some(trial) = &order.trial {
                let reported = |agent: &FakeAgent| agent.trials().iter().any(|report| report.id == trial.id);
                wait_for("the trial is reported", || agents.iter().all(reported));
                wait_for("its shadows are reported", || !trial.shadows || trial.has_shadows(&agents[0]));
            }
            wait_for("steps go on", || agents[0].step() > seen + ON);
        }
        assert_eq!(left.next(), None, "no order has it");
        for agent in agents {
            let applied: Vec<(u64, u64)> =
                agent.applied().iter().map(|report| (report.version, report.digest)).collect();
            assert_eq!(applied, self.decided());
            self.orders.iter().filter_map(|order| order.trial.as_ref()).for_each(|trial| trial.check(agent));
        }
    }

    fn run(&self) {
        let Running { ranks, mut agents, fails } = self.start(FOREVER);
        self.order(&mut agents);
        if let Some(failure) = &self.fails {
            fails.store(true, Ordering::Relaxed);
            return failure.check(ranks.results().0);
        }
        ranks.stop(0);
        let (_, log) = ranks.join();
        let in_force: Vec<u64> = versions(&log).into_iter().map(|(_, version)| version).collect();
        assert_eq!(in_force, self.versions);
        if self.held {
            // Its agents live as long as it runs.
            let plain = self.start(log.len() as u64);
            let (_, plain) = plain.ranks.join();
            assert_eq!(log.len(), plain.len());
            assert_eq!(log.iter().zip(&plain).find(|(a, b)| a != b), None, "the first step that differs");
        }
    }
}

#[test]
fn every_job_of_the_suite() {
    let folder = Path::new(concat!(env!("CARGO_MANIFEST_DIR"), "/../tests/suite"));
    let mut files: Vec<_> = std::fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path()).collect();
    files.retain(|path| path.extension().is_some_and(|extension| extension == "json"));
    files.sort();
    assert!(files.len() > 10, "{files:?}");
    for path in files {
        // Shown where it fails.
        eprintln!("{}", path.display());
        let suite: Suite = serde_json::from_str(&std::fs::read_to_string(&path).unwrap()).unwrap();
        suite.run();
    }
}
