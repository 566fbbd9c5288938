//! What steps cost: one figure per step from what its ranks reported, medians over steps. Pure.

use flexcomm_domain::{Gain, Seconds, Timestamp, Version};
use flexcomm_planner::Measured;
use flexcomm_wire::Ran;
use std::collections::BTreeSet;

use crate::limits::MEASURED_STEPS;
use crate::store::StepRow;

/// The first steps under a decision run with cold buffers and are left out.
const COLD_STEPS: usize = 2;

/// A step that every rank reported whose agent lives.
#[derive(Debug, Clone, PartialEq)]
pub struct WholeStep {
    /// Its number.
    pub step: u64,
    /// The decision in force.
    pub version: Version,
    /// What ran.
    pub ran: Ran,
    /// When its last report arrived.
    pub received: Timestamp,
    /// The collective proper, from the last rank's entry to the last rank's end. Where ranks cannot tell when
    /// the last one entered: the least time over the ranks, since the one that came last waited for nobody.
    pub sync_us: f64,
    /// Of the rank that came last: all that is neither compression nor the collective proper.
    pub compute_us: f64,
    /// Of the rank that came last.
    pub comp_us: f64,
    /// Mean over ranks: one that comes late finds the others' data there and has a short step, the next is long.
    pub step_us: f64,
    /// Mean over ranks.
    pub gain: f64,
    /// Mean over ranks.
    pub bytes_sent: f64,
}

/// Steps that all expected ranks reported under one decision, ascending. A report of another rank counts as well.
pub fn whole_steps(rows: &[StepRow], expected: &BTreeSet<u32>) -> Vec<WholeStep> {
    rows.chunk_by(|a, b| a.step == b.step).filter_map(|ranks| whole(ranks, expected)).collect()
}

fn whole(ranks: &[StepRow], expected: &BTreeSet<u32>) -> Option<WholeStep> {
    let complete = expected.iter().all(|rank| ranks.iter().any(|r| r.rank == *rank));
    let waits: Option<Vec<f64>> = ranks.iter().map(|r| r.wait_us).collect();
    let last = ranks.iter().min_by(|a, b| a.wait_us.unwrap_or(a.sync_us).total_cmp(&b.wait_us.unwrap_or(b.sync_us)))?;
    let proper = |r: &StepRow| (r.sync_us - r.wait_us.unwrap_or(0.0)).max(0.0);
    let sync_us = match waits {
        Some(_) => ranks.iter().map(proper).fold(0.0, f64::max),
        None => last.sync_us,
    };
    let one_decision = ranks.iter().all(|r| r.version == last.version && r.ran == last.ran);
    (complete && one_decision).then(|| WholeStep {
        step: last.step,
        version: last.version,
        ran: last.ran.clone(),
        received: ranks.iter().map(|r| r.received).max().unwrap_or_default(),
        sync_us,
        compute_us: (last.step_us - last.comp_us - last.sync_us).max(0.0),
        comp_us: last.comp_us,
        step_us: ranks.iter().map(|r| r.step_us).sum::<f64>() / ranks.len() as f64,
        gain: ranks.iter().map(|r| r.gain).sum::<f64>() / ranks.len() as f64,
        bytes_sent: ranks.iter().map(|r| r.bytes_sent as f64).sum::<f64>() / ranks.len() as f64,
    })
}

/// Median; `None` of nothing.
pub fn median(values: impl IntoIterator<Item = f64>) -> Option<f64> {
    let mut sorted: Vec<f64> = values.into_iter().collect();
    sorted.sort_by(f64::total_cmp);
    let (low, high) = (sorted.get(sorted.len().checked_sub(1)? / 2)?, sorted.get(sorted.len() / 2)?);
    Some((low + high) / 2.0)
}

fn seconds(us: f64) -> Option<Seconds> {
    Seconds::new(us * 1e-6).ok()
}

/// Median time of a step outside compression and collective, over the newest steps of any decision.
pub fn compute(steps: &[WholeStep]) -> Option<Seconds> {
    let newest = &steps[steps.len().saturating_sub(MEASURED_STEPS)..];
    seconds(median(newest.iter().map(|s| s.compute_us))?)
}

/// Medians over the newest steps under one decision.
pub fn measured(steps: &[WholeStep], version: Version) -> Option<Measured> {
    let first = steps.iter().position(|s| s.version == version)?;
    // In the middle of the window the first steps are the cold ones only when others stand before them.
    let cold = if first > 0 || steps[first].step == 0 { COLD_STEPS } else { 0 };
    let own: Vec<&WholeStep> = steps[first..].iter().filter(|s| s.version == version).skip(cold).collect();
    let own = &own[own.len().saturating_sub(MEASURED_STEPS)..];
    let of = |f: fn(&WholeStep) -> f64| median(own.iter().map(|s| f(s)));
    let gain = of(|s| s.gain)?;
    let spread = median(own.iter().map(|s| (s.gain - gain).abs()))? / gain;
    Some(Measured {
        version,
        steps: own.len() as u64,
        t_step: seconds(of(|s| s.step_us)?)?,
        t_comp: seconds(of(|s| s.comp_us)?)?,
        t_sync: seconds(of(|s| s.sync_us)?)?,
        gain: Gain::new(gain.min(1.0)).ok()?,
        gain_spread: spread.clamp(0.0, 10.0),
    })
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;

    pub(crate) fn row(step: u64, rank: u32, version: u64, sync_us: f64) -> StepRow {
        StepRow {
            step,
            rank,
            version: Version(version),
            ran: flexcomm_domain::Strategy::DENSE_RING.into(),
            received: Timestamp(step),
            compute_us: 100.0,
            comp_us: 10.0,
            sync_us,
            wait_us: None,
            step_us: 120.0 + sync_us,
            gain: 1.0 - f64::from(rank) / 10.0,
            bytes_sent: 1000,
        }
    }

    pub(crate) fn all(world: u32) -> BTreeSet<u32> {
        (0..world).collect()
    }

    /// Ranks of an agent that is gone are not waited for; what they reported before counts.
    #[test]
    fn a_step_counts_when_the_expected_ranks_reported_it() {
        let rows = [row(1, 0, 1, 50.0), row(1, 1, 1, 30.0), row(2, 0, 1, 20.0), row(3, 1, 1, 1.0)];
        let steps: Vec<u64> = whole_steps(&rows, &[0].into()).iter().map(|s| s.step).collect();
        assert_eq!(steps, [1, 2]);
        assert_eq!(whole_steps(&rows, &[0].into())[0].sync_us, 30.0, "rank 1 had reported step 1");
    }

    #[test]
    fn a_step_is_what_its_last_rank_paid() {
        let rows = [row(1, 0, 1, 50.0), row(1, 1, 1, 30.0), row(2, 0, 1, 20.0), row(3, 0, 1, 1.0), row(3, 1, 2, 1.0)];
        let steps = whole_steps(&rows, &all(2));
        assert_eq!(steps.len(), 1, "step 2 lacks a rank, step 3 ran under two decisions");
        assert_eq!((steps[0].sync_us, steps[0].step_us, steps[0].compute_us), (30.0, 160.0, 110.0));
        assert!((steps[0].gain - 0.95).abs() < 1e-12);
    }

    #[test]
    fn waiting_for_late_ranks_is_not_the_collective() {
        // Rank 1 enters 40 µs after rank 0 and finds rank 0's data there: it is done after 5, rank 0 20 later.
        let waited = |row: StepRow, wait_us| StepRow { wait_us: Some(wait_us), ..row };
        let rows = [waited(row(1, 0, 1, 65.0), 40.0), waited(row(1, 1, 1, 5.0), 0.0)];
        let steps = whole_steps(&rows, &all(2));
        assert_eq!((steps[0].sync_us, steps[0].step_us, steps[0].compute_us), (25.0, 155.0, 110.0));
        let unknown = [rows[0].clone(), StepRow { wait_us: None, ..rows[1].clone() }];
        assert_eq!(whole_steps(&unknown, &all(2))[0].sync_us, 5.0, "one rank that cannot tell spoils it for all");
    }

    #[test]
    fn medians_skip_the_cold_steps_of_a_decision() {
        let rows: Vec<StepRow> = (0..20)
            .map(|i| {
                row(
                    i,
                    0,
                    u64::from(i >= 10),
                    if i < 10 {
                        9.0
                    } else if i < 12 {
                        1000.0
                    } else {
                        30.0
                    },
                )
            })
            .collect();
        let steps = whole_steps(&rows, &all(1));
        let m = measured(&steps, Version(1)).unwrap();
        assert_eq!((m.steps, m.t_sync.get()), (8, 30.0 * 1e-6));
        assert_eq!(measured(&steps, Version(0)).unwrap().t_sync.get(), 9.0 * 1e-6);
        assert_eq!(measured(&steps, Version(7)), None);
        assert!((compute(&steps).unwrap().get() - 110.0 * 1e-6).abs() < 1e-12);
        assert_eq!(compute(&[]), None);
    }

    #[test]
    fn medians() {
        assert_eq!(median([]), None);
        assert_eq!(median([3.0, 1.0, 2.0]), Some(2.0));
        assert_eq!(median([4.0, 1.0, 2.0, 3.0]), Some(2.5));
    }
}
