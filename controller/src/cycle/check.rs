//! Phase 3: the planner's checker, which shares no code with it. What it refuses is not published.

use flexcomm_planner::{Outcome, Verdict};

use super::Gathered;

/// Why an outcome may not be applied; then the old memory is kept, too.
pub fn check(gathered: &Gathered, outcome: &Outcome) -> Option<String> {
    let violations = flexcomm_planner::check(&gathered.snapshot, outcome, gathered.now);
    let words: Vec<String> = violations.iter().map(ToString::to_string).collect();
    let why = (!words.is_empty()).then(|| words.join("; "))?;
    let change = matches!(outcome.verdict, Verdict::Change(_));
    tracing::error!(job = %gathered.job.job, change, why, "the checker refuses the planner's outcome");
    Some(why)
}
