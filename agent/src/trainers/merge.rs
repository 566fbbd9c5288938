//! What new orders of a job do to those that its trainers have: pure.

use flexcomm_domain::Strategy;
use flexcomm_wire::{DecisionOrder, JobOrders, MAX_CANDIDATES, TrialOrder};

/// Longest reason that trainers get, in characters: it is for people, the controller keeps the whole.
const MAX_REASON: usize = 400;
/// Most iterations per candidate and longest budget of a trial, in ms: an hour.
const MAX_ITERATIONS: u32 = 10_000;
const MAX_TRIAL_MS: u64 = 3_600_000;

/// A part of new orders that was not taken over.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Rejected {
    /// Older than what trainers have, or another one of the same version.
    StaleDecision(String),
    /// Strategy or digest wrong.
    InvalidDecision(String),
    /// Older than the last trial, or out of range.
    Trial(String),
}

/// The orders to send: never an older decision, never an unchecked one. A decision that is missing from the new
/// orders stays; a trial that is missing is over.
pub fn merge(sent: &JobOrders, last_trial: u64, new: &JobOrders) -> (JobOrders, Vec<Rejected>) {
    let mut rejected = Vec::new();
    let mut merged = JobOrders { job: sent.job.clone(), decision: sent.decision.clone(), trial: None };
    if let Some(decision) = &new.decision {
        match newer(sent, decision) {
            Ok(true) => merged.decision = Some(shortened(decision)),
            Ok(false) => {}
            Err(why) => rejected.push(why),
        }
    }
    if let Some(trial) = &new.trial {
        match check_trial(trial, last_trial) {
            Ok(()) => merged.trial = Some(trial.clone()),
            Err(why) => {
                rejected.push(Rejected::Trial(why));
                merged.trial = sent.trial.clone();
            }
        }
    }
    (merged, rejected)
}

fn newer(sent: &JobOrders, new: &DecisionOrder) -> Result<bool, Rejected> {
    new.to_decision(&sent.job).map_err(|error| Rejected::InvalidDecision(error.to_string()))?;
    let Some(old) = &sent.decision else { return Ok(true) };
    if new.run != old.run {
        // Of another run of the job, which the controller began after that one; orders come in order.
        return Ok(true);
    }
    if new.version < old.version {
        let text = format!("decision {} of job {}: {} is in force", new.version, sent.job, old.version);
        return Err(Rejected::StaleDecision(text));
    }
    if new.version == old.version && new.digest != old.digest {
        let text = format!("decision {} of job {} exists already with another strategy", new.version, sent.job);
        return Err(Rejected::StaleDecision(text));
    }
    Ok(new.version > old.version)
}

fn shortened(decision: &DecisionOrder) -> DecisionOrder {
    let mut decision = decision.clone();
    if decision.reason.chars().count() > MAX_REASON {
        decision.reason = decision.reason.chars().take(MAX_REASON - 1).chain(['…']).collect();
    }
    decision
}

fn check_trial(trial: &TrialOrder, last: u64) -> Result<(), String> {
    if trial.id < last {
        return Err(format!("trial {}: trial {last} was published already", trial.id));
    }
    if trial.candidates.is_empty() || trial.candidates.len() > MAX_CANDIDATES {
        return Err(format!("trial {}: {} candidates, 1 to {MAX_CANDIDATES}", trial.id, trial.candidates.len()));
    }
    if !(1..=MAX_ITERATIONS).contains(&trial.iterations) || !(1..=MAX_TRIAL_MS).contains(&trial.budget_ms) {
        return Err(format!("trial {}: {} iterations within {} ms", trial.id, trial.iterations, trial.budget_ms));
    }
    for candidate in &trial.candidates {
        Strategy::try_from(candidate).map_err(|error| format!("trial {}: {error}", trial.id))?;
    }
    Ok(())
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;
    use flexcomm_domain::{Decision, Strategy, Timestamp, Version};
    use proptest::prelude::*;

    pub(crate) fn decision(version: u64, strategy: &str) -> DecisionOrder {
        DecisionOrder::from(&Decision {
            job: "j".parse().unwrap(),
            version: Version(version),
            parent: Version(version.saturating_sub(1)),
            plan: strategy.parse().unwrap(),
            decided_at: Timestamp(1),
            reason: "because".into(),
        })
    }

    fn orders(decision: Option<DecisionOrder>) -> JobOrders {
        JobOrders { job: "j".parse().unwrap(), decision, trial: None }
    }

    fn trial(id: u64) -> TrialOrder {
        let candidates = vec![Strategy::DENSE_RING.into()];
        TrialOrder { run: None, id, candidates, iterations: 10, budget_ms: 1000 }
    }

    const TOPK: &str = "topk@0.01/allgather";

    #[test]
    fn older_and_contradicting_decisions_are_rejected() {
        let sent = orders(Some(decision(5, TOPK)));
        for bad in [decision(4, TOPK), decision(5, "topk@0.1/allgather")] {
            let (merged, rejected) = merge(&sent, 0, &orders(Some(bad)));
            assert!(matches!(rejected[..], [Rejected::StaleDecision(_)]));
            assert_eq!(merged, sent);
        }
        let (merged, rejected) = merge(&sent, 0, &orders(Some(decision(6, "topk@0.1/allgather"))));
        assert_eq!((merged.decision.unwrap().version, rejected), (6, vec![]));
        assert_eq!(merge(&sent, 0, &sent), (sent.clone(), vec![]));
        assert_eq!(merge(&sent, 0, &orders(None)), (sent, vec![]), "a missing decision stays in force");
    }

    #[test]
    fn forged_decisions_are_rejected() {
        let mut forged = decision(9, TOPK);
        forged.strategy.0 = "topk(k=0.5)+ef(vanilla)/allgather".into();
        let (merged, rejected) = merge(&orders(None), 0, &orders(Some(forged)));
        assert!(merged.decision.is_none() && matches!(rejected[..], [Rejected::InvalidDecision(_)]));
    }

    #[test]
    fn trials_come_and_go_and_only_grow() {
        let mut new = orders(None);
        new.trial = Some(trial(3));
        let (sent, rejected) = merge(&orders(None), 0, &new);
        assert!(sent.trial.is_some() && rejected.is_empty());
        assert!(merge(&sent, 3, &orders(None)).0.trial.is_none());
        let changes: [fn(&mut TrialOrder); 5] = [
            |t| t.id = 2,
            |t| t.candidates.clear(),
            |t| t.iterations = 0,
            |t| t.budget_ms = u64::MAX,
            |t| t.candidates[0].0 = "topk(k=-1)/allgather".into(),
        ];
        for change in changes {
            let mut bad = trial(4);
            change(&mut bad);
            new.trial = Some(bad);
            let (merged, rejected) = merge(&sent, 3, &new);
            assert!(matches!(rejected[..], [Rejected::Trial(_)]));
            assert_eq!(merged.trial, sent.trial);
        }
    }

    #[test]
    fn the_largest_orders_fit_on_a_line() {
        let mut long = decision(1 << 53, TOPK);
        long.reason = "\u{1}".repeat(5000);
        let mut new = orders(Some(long));
        let mut big = trial(1 << 53);
        big.candidates = vec!["topk@0.0123456789/art-tree:var".parse::<Strategy>().unwrap().into(); MAX_CANDIDATES];
        new.trial = Some(big);
        let (merged, rejected) = merge(&orders(None), 0, &new);
        assert!(rejected.is_empty());
        let bytes = serde_json::to_vec(&merged).unwrap().len();
        assert!(bytes <= flexcomm_wire::MAX_LINE / 2, "{bytes} bytes");
    }

    proptest! {
        #[test]
        fn versions_only_grow(versions in prop::collection::vec((0u64..10, any::<bool>()), 1..30)) {
            let mut sent = orders(None);
            for (version, dense) in versions {
                let strategy = if dense { "none@1/dense-ring" } else { TOPK };
                let before = sent.decision.clone();
                sent = merge(&sent, 0, &orders(Some(decision(version, strategy)))).0;
                let after = sent.decision.clone().unwrap();
                if let Some(before) = before {
                    prop_assert!(after.version > before.version || after == before);
                }
            }
        }
    }
}
