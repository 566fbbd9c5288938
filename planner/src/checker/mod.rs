//! Passes or refuses an outcome before it is published. Shares no code with the phases of `decide` and none
//! with the optimizer's cost model: it has its own arithmetic of the closed forms over real bytes, its own
//! canonical text for the digest, and it judges a rollback by the evidence in the snapshot.

mod claims;
mod costs;
mod rules;

use crate::{Outcome, Snapshot, Verdict};
use flexcomm_domain::Timestamp;
use serde::Serialize;
use std::fmt;

/// How far a claimed time may be from the recomputed one, as a share: rounding, nothing else.
const TOLERANCE: f64 = 1e-6;

/// One broken rule.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Violation {
    /// Name of the rule, for metrics: `version`, `parent`, `job`, `digest`, `offered`, `dwell`, `blocked`,
    /// `rollback`, `no-change`, `time`, `finite`, `dense`, `worse`, `links`, `report`, `trial`, `buckets`, `steady`, `floor`.
    pub rule: &'static str,
    /// What was found, with numbers.
    pub what: String,
}

impl fmt::Display for Violation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: {}", self.rule, self.what)
    }
}

/// Every rule that the outcome breaks; empty: it may be published.
pub fn check(snapshot: &Snapshot, outcome: &Outcome, now: Timestamp) -> Vec<Violation> {
    let mut found = Findings::default();
    claims::finite(outcome, &mut found);
    claims::trial(snapshot, outcome, &mut found);
    claims::power(snapshot, outcome, &mut found);
    claims::buckets(snapshot, outcome, &mut found);
    if let Verdict::Change(decision) = &outcome.verdict {
        rules::identity(snapshot, decision, now, &mut found);
        rules::offered(snapshot, decision, &mut found);
        rules::timing(snapshot, outcome, now, &mut found);
        rules::evidence(snapshot, outcome, &mut found);
        claims::times(snapshot, outcome, decision, &mut found);
        claims::worth(snapshot, outcome, decision, &mut found);
        claims::floor(snapshot, outcome, decision, &mut found);
    }
    found.0
}

#[derive(Default)]
struct Findings(Vec<Violation>);

impl Findings {
    fn expect(&mut self, holds: bool, rule: &'static str, what: impl FnOnce() -> String) {
        if !holds {
            self.0.push(Violation { rule, what: what() });
        }
    }
}
