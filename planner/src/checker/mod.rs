//! Passes or refuses an outcome before it is published. Shares no code with `decide` and none with what it believes: it judges from the
//! snapshot, and limits of what is expected (least gain, most overhead) by what the report expects of the choice; it has its own canonical
//! text for the digest.

mod policy;
mod report;
mod rules;

use crate::{Outcome, Snapshot, Verdict};
use flexcomm_domain::Timestamp;
use serde::Serialize;
use std::fmt;

/// One broken rule.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Violation {
    /// Name of the rule, for metrics: `version`, `parent`, `job`, `digest`, `offered`, `dwell`, `applied`, `no-change`, `finite`,
    /// `links`, `report`, `trial`, `observe`, `pin`, `limits`, `loss`.
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
    report::finite(outcome, &mut found);
    rules::trial(snapshot, outcome, &mut found);
    let pin = policy::pin(snapshot, now);
    policy::untouched(snapshot, outcome, pin, &mut found);
    if let Verdict::Change(decision) = &outcome.verdict {
        let pinned = pin.is_some_and(|pin| *pin == decision.plan);
        rules::identity(snapshot, decision, now, &mut found);
        rules::timing(snapshot, decision, now, pinned, &mut found);
        report::chosen(snapshot, outcome, decision, pinned, &mut found);
        if !pinned {
            rules::offered(snapshot, decision, &mut found);
            policy::limits(snapshot, outcome, decision, &mut found);
        }
        rules::loss(snapshot, decision, pinned, &mut found);
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
