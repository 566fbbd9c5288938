//! Ends trials: when every rank has answered, when rank 0 has and the others are late, or when none has in time.

use flexcomm_domain::{Seconds, Timestamp};

use super::CycleError;
use crate::app::App;
use crate::store::{JobRow, TrialReportRow, TrialRow};

/// Ranks finish a trial at the same step; their reports lie in spools for a moment at most. In seconds.
const OTHERS_WAIT_S: f64 = 5.0;

/// What a trial may take beyond its own budget until it is given up: the order has to reach the trainers, the
/// report has to come back. In seconds.
const GRACE_S: f64 = 30.0;

/// Ends the pending trial of a job when it is over.
pub async fn settle(app: &App, job: &JobRow) -> Result<(), CycleError> {
    let newest = app.store.trials(&job.job, 1).await?;
    let Some(pending) = newest.iter().find(|t| t.state == "pending") else { return Ok(()) };
    let reports = app.store.trial_reports(&job.job, 1).await?;
    let now = app.clock.now();
    match verdict(pending, &reports, job.world, now) {
        None => {}
        Some(aborted) => {
            app.store.end_trial(&job.job, pending.id, aborted.as_deref(), now).await?;
        }
    }
    Ok(())
}

/// `None` while it runs; else why it was aborted, if it was.
fn verdict(trial: &TrialRow, reports: &[TrialReportRow], world: u32, now: Timestamp) -> Option<Option<String>> {
    let own: Vec<&TrialReportRow> = reports.iter().filter(|r| r.id == trial.id).collect();
    let leader = own.iter().find(|r| r.rank == 0);
    let late = leader.is_some_and(|r| now.since(r.received).get() >= OTHERS_WAIT_S);
    if own.len() >= world as usize || late {
        let empty = own.iter().all(|r| r.outcomes.is_empty());
        let why = own.iter().find_map(|r| r.aborted.clone());
        return Some(empty.then(|| why.unwrap_or_else(|| "no candidate ran".to_owned())));
    }
    let limit = Seconds::new(trial.budget_ms as f64 * 1e-3 + GRACE_S).unwrap_or(Seconds::ZERO);
    let over = now.since(trial.asked) >= limit;
    over.then(|| Some(format!("{} of {world} ranks answered within {limit}", own.len())))
}

#[cfg(test)]
mod tests {
    use super::*;
    use flexcomm_domain::Strategy;
    use flexcomm_wire::TrialOutcome;

    fn trial() -> TrialRow {
        TrialRow {
            id: 4,
            asked: Timestamp(0),
            why: String::new(),
            state: "pending".into(),
            candidates: vec![Strategy::DENSE_RING],
            iterations: 10,
            budget_ms: 1000,
            ended: None,
            aborted: None,
        }
    }

    fn report(rank: u32, ran: bool) -> TrialReportRow {
        let outcome = TrialOutcome {
            strategy: Strategy::DENSE_RING.into(),
            gain: 1.0,
            energy: None,
            shadow_gain: None,
            shadow_energy: None,
            comp_us: 0.0,
            sync_us: 1.0,
            iterations: 1,
        };
        let outcomes = if ran { vec![outcome] } else { vec![] };
        TrialReportRow {
            id: 4,
            rank,
            outcomes,
            aborted: (!ran).then(|| "no memory".into()),
            cost_us: 0.0,
            received: Timestamp(0),
        }
    }

    #[test]
    fn trials_end() {
        let at = |s: u64| Timestamp(s * 1_000_000);
        assert_eq!(verdict(&trial(), &[], 2, at(30)), None);
        assert!(verdict(&trial(), &[], 2, at(31)).unwrap().unwrap().contains("0 of 2 ranks"));
        assert_eq!(verdict(&trial(), &[report(0, true), report(1, true)], 2, at(1)), Some(None));
        assert_eq!(verdict(&trial(), &[report(0, true)], 2, at(1)), None);
        assert_eq!(verdict(&trial(), &[report(0, true)], 2, at(5)), Some(None));
        assert_eq!(verdict(&trial(), &[report(1, true)], 2, at(5)), None);
        assert_eq!(verdict(&trial(), &[report(0, false), report(1, false)], 2, at(1)), Some(Some("no memory".into())));
        let older = TrialReportRow { id: 3, ..report(0, true) };
        assert_eq!(verdict(&trial(), &[older], 1, at(1)), None);
    }
}
