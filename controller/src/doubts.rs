//! Nodes whose reports are contradicted and therefore not counted. Pure.

use flexcomm_domain::{JobId, NodeName, Timestamp};
use std::collections::BTreeMap;

/// A contradiction is reported when it has lasted for this long, seconds: a change of the network reaches one measurement
/// before another.
const LASTING_S: f64 = 5.0;

/// A node whose reports on one matter are not counted.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub struct Doubt {
    /// Which; absent where no agent has announced the rank.
    pub node: Option<NodeName>,
    /// What it reports, against what, as a sentence.
    pub what: String,
}

/// Since when each job's nodes are doubted.
#[derive(Debug, Default)]
pub struct Doubts(BTreeMap<JobId, BTreeMap<Option<NodeName>, Since>>);

#[derive(Debug, Clone, Copy)]
struct Since {
    first: Timestamp,
    logged: bool,
}

impl Doubts {
    /// Those of a job that have lasted. Logs when one is first reported and when it has ended.
    pub fn lasting(&mut self, job: &JobId, found: &[Doubt], now: Timestamp) -> Vec<Doubt> {
        let known = self.0.entry(job.clone()).or_default();
        known.retain(|node, since| {
            let lasts = found.iter().any(|doubt| doubt.node == *node);
            if !lasts && since.logged {
                tracing::info!(%job, node = name(node), "a node's reports are counted again");
            }
            lasts
        });
        let mut lasting = Vec::new();
        for doubt in found {
            let since = known.entry(doubt.node.clone()).or_insert(Since { first: now, logged: false });
            if now.since(since.first).get() < LASTING_S {
                continue;
            }
            if !since.logged {
                tracing::warn!(%job, node = name(&doubt.node), what = doubt.what, "a node's reports are not counted");
            }
            lasting.push(doubt.clone());
        }
        for doubt in &lasting {
            known.entry(doubt.node.clone()).and_modify(|since| since.logged = true);
        }
        lasting
    }

    /// Forgets jobs that no longer run.
    pub fn retain(&mut self, runs: impl Fn(&JobId) -> bool) {
        self.0.retain(|job, _| runs(job));
    }
}

fn name(node: &Option<NodeName>) -> &str {
    node.as_ref().map_or("unknown", NodeName::as_str)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_doubt_is_reported_when_it_lasts() {
        let (job, mut doubts) = (JobId::new("j").unwrap(), Doubts::default());
        let of = |node: &str| Doubt { node: Some(NodeName::new(node).unwrap()), what: format!("{node} is wrong") };
        let mut at = |s: u64, found: &[Doubt]| doubts.lasting(&job, found, Timestamp(s * 1_000_000));
        assert!(at(1, &[of("a")]).is_empty() && at(4, &[of("a"), of("b")]).is_empty());
        assert_eq!(at(6, &[of("a"), of("b")]), [of("a")]);
        assert_eq!(at(9, &[of("b")]), [of("b")], "a is right again");
        assert!(at(10, &[of("a")]).is_empty(), "from the beginning");
    }
}
