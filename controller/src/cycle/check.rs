//! Phase 3: the planner's checker, which shares no code with it. What it refuses is not published.

use flexcomm_planner::{Outcome, Verdict};

use super::Gathered;
use super::decide::Decided;

/// An outcome that may be applied, or what is wrong with it.
#[derive(Debug, Clone)]
pub struct Checked {
    /// The planner's answer.
    pub outcome: Outcome,
    /// Seed of its random numbers.
    pub seed: u64,
    /// Why its decision may not be published; then the old memory is kept, too.
    pub refused: Option<String>,
}

/// Checks what would be published.
pub fn check(gathered: &Gathered, decided: Decided) -> Checked {
    let Decided { outcome, seed } = decided;
    let violations = flexcomm_planner::check(&gathered.snapshot, &outcome, gathered.now);
    let words: Vec<String> = violations.iter().map(ToString::to_string).collect();
    let refused = (!words.is_empty()).then(|| words.join("; "));
    if let Some(why) = &refused {
        let change = matches!(outcome.verdict, Verdict::Change(_));
        tracing::error!(job = %gathered.job.job, change, why, "the checker refuses the planner's outcome");
    }
    Checked { outcome, seed, refused }
}
