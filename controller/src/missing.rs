//! Which nodes of a job its agents cannot be asked about any more, and what that means for it. Pure.

use flexcomm_domain::{JobId, NodeName, Timestamp};
use std::collections::{BTreeMap, BTreeSet};

use crate::limits::ANNOUNCED_WITHIN_S;
use crate::store::{JobRow, RankRow};

/// A node of a job whose agent is silent, or ranks that no agent has announced.
#[derive(Debug, Clone, PartialEq)]
pub struct Missing {
    /// Which node; `None` where no agent has announced the ranks.
    pub node: Option<NodeName>,
    /// Its ranks of the job.
    pub ranks: Vec<u32>,
    /// When its agent sent something last; when the job began, where no agent has announced the ranks.
    pub since: Timestamp,
}

impl Missing {
    /// What it means for the job, as a sentence.
    pub fn meaning(&self) -> String {
        let ranks: Vec<String> = self.ranks.iter().map(ToString::to_string).collect();
        let ranks = format!("rank{} {}", if ranks.len() == 1 { "" } else { "s" }, ranks.join(", "));
        if self.node.is_none() {
            return format!(
                "no agent has announced {ranks}: nothing is decided, and nothing is seen of what was measured there. Start \
                 the agent on their nodes, and let FLEXCOMM_SOCKET name its socket"
            );
        }
        if self.ranks.contains(&0) {
            return format!(
                "rank 0 runs there: no new decision and no trial can reach the job until its agent is back. All ranks go \
                 on with the decision that they have; nothing is seen of what {ranks} measured"
            );
        }
        format!(
            "the trainers of {ranks} go on and follow new decisions through rank 0; nothing is seen of what they measure until \
             the agent is back, and steps count that the other ranks reported"
        )
    }
}

/// How much of a job is seen.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct Sight {
    /// Nodes that are missing, by name, and last the ranks that no agent has announced.
    pub missing: Vec<Missing>,
    /// A step counts when these ranks reported it: those whose agents live, or all while no agent lives.
    pub expected: BTreeSet<u32>,
}

/// Looks at a job: `silent` says since when a node's agent has been silent, `None` while it is alive.
pub fn sight(job: &JobRow, ranks: &[RankRow], now: Timestamp, silent: impl Fn(&RankRow) -> Option<Timestamp>) -> Sight {
    let all: BTreeSet<u32> = (0..job.world).collect();
    let mut nodes: BTreeMap<&NodeName, Missing> = BTreeMap::new();
    let mut expected: BTreeSet<u32> = all.clone();
    for rank in ranks {
        let since = silent(rank).filter(|_| rank.left.is_none());
        if since.is_some() || rank.left.is_some() {
            expected.remove(&rank.rank);
        }
        if let Some(since) = since {
            let node = Some(rank.node.clone());
            let entry = nodes.entry(&rank.node).or_insert(Missing { node, ranks: Vec::new(), since });
            entry.ranks.push(rank.rank);
        }
    }
    let mut missing: Vec<Missing> = nodes.into_values().collect();
    let unannounced: Vec<u32> = all.iter().copied().filter(|r| ranks.iter().all(|k| k.rank != *r)).collect();
    if !unannounced.is_empty() && now.since(job.created).get() >= ANNOUNCED_WITHIN_S {
        expected.retain(|rank| !unannounced.contains(rank));
        missing.push(Missing { node: None, ranks: unannounced, since: job.created });
    }
    Sight { missing, expected: if expected.is_empty() { all } else { expected } }
}

/// What was missing at the last look, so that it is logged once when it goes missing and once when it is back.
#[derive(Debug, Default)]
pub struct Noted(BTreeMap<JobId, Vec<Missing>>);

impl Noted {
    /// Logs what differs from the last look at the job.
    pub fn note(&mut self, job: &JobId, missing: &[Missing], now: Timestamp) {
        let before = self.0.insert(job.clone(), missing.to_vec()).unwrap_or_default();
        let name = |m: &Missing| m.node.as_ref().map_or("its node".to_owned(), |n| format!("node {n}"));
        for new in missing.iter().filter(|m| before.iter().all(|b| b.node != m.node)) {
            let silent_s = now.since(new.since).get().round();
            let node = new.node.as_ref().map(tracing::field::display);
            tracing::warn!(%job, node, silent_s, "{} is missing: {}", name(new), new.meaning());
        }
        for back in before.iter().filter(|b| missing.iter().all(|m| m.node != b.node)) {
            tracing::info!(%job, ranks = ?back.ranks, "{} is back", name(back));
        }
    }

    /// Forgets jobs that no longer run.
    pub fn retain(&mut self, runs: impl Fn(&JobId) -> bool) {
        self.0.retain(|job, _| runs(job));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn job(world: u32) -> JobRow {
        JobRow {
            policy: None,
            job: JobId::new("j").unwrap(),
            run: None,
            world,
            gradient_values: 1,
            buckets: Vec::new(),
            momentum: None,
            machine: None,
            backend: "x".into(),
            created: Timestamp(0),
            ended: None,
            how: None,
            earlier: flexcomm_domain::Version(0),
            loss: None,
            accuracy: None,
        }
    }

    fn rank(rank: u32, node: &str) -> RankRow {
        RankRow {
            rank,
            node: NodeName::new(node).unwrap(),
            codecs: vec![],
            collectives: vec![],
            policy: None,
            seen: Timestamp(0),
            left: None,
        }
    }

    fn at(ranks: &[RankRow], world: u32, seconds: u64, dead: &[&str]) -> Sight {
        let silent = |r: &RankRow| dead.contains(&r.node.as_str()).then_some(Timestamp(7));
        sight(&job(world), ranks, Timestamp(seconds * 1_000_000), silent)
    }

    #[test]
    fn a_silent_nodes_ranks_are_missing_together_and_not_expected() {
        let ranks = [rank(0, "a"), rank(1, "b"), rank(2, "a"), rank(3, "b")];
        let seen = at(&ranks, 4, 1, &["b"]);
        assert_eq!(seen.expected, BTreeSet::from([0, 2]));
        let node = |name: &str| Some(NodeName::new(name).unwrap());
        assert_eq!(seen.missing, [Missing { node: node("b"), ranks: vec![1, 3], since: Timestamp(7) }]);
        assert!(seen.missing[0].meaning().starts_with("the trainers of ranks 1, 3 go on"));
        assert_eq!(at(&ranks, 4, 1, &[]), Sight { missing: vec![], expected: (0..4).collect() });
        let none = at(&ranks, 4, 1, &["a", "b"]);
        assert_eq!((none.missing.len(), none.expected), (2, (0..4).collect()), "what was whole before stays so");
        assert!(none.missing[0].meaning().contains("no new decision"), "rank 0 is on a");
    }

    #[test]
    fn ranks_have_some_time_to_be_announced_and_those_that_left_are_not_missing() {
        let ranks = [rank(0, "a"), RankRow { left: Some(Timestamp(1)), ..rank(1, "b") }];
        let early = at(&ranks, 3, 1, &["b"]);
        assert_eq!((early.missing, early.expected), (vec![], BTreeSet::from([0, 2])));
        let late = at(&ranks, 3, 3600, &["b"]);
        assert_eq!((late.missing.len(), late.expected), (1, BTreeSet::from([0])));
        assert_eq!((&late.missing[0].node, &late.missing[0].ranks[..]), (&None, &[2][..]));
    }
}
