//! What steps cost: one figure per step from what its ranks reported, medians over steps. Pure.

use flexcomm_domain::{Gain, Seconds, Timestamp, Version};
use flexcomm_planner::{Measured, Scatter};
use flexcomm_wire::Ran;
use std::collections::{BTreeMap, BTreeSet};

use crate::limits::{MEASURED_STEPS, STEP_WINDOW};
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
    /// [`robust_mean`] over ranks: one that comes late finds the others' data there and has a short step, the next is long.
    pub step_us: f64,
    /// [`robust_mean`] over ranks.
    pub gain: f64,
    /// [`robust_mean`] over ranks.
    pub bytes_sent: f64,
}

/// Ranks of a synchronous job take the same time for the same steps. One whose steps differ from the others' by more than
/// this factor is wrong about them.
const CREDIBLE: f64 = 4.0;

/// Steps that arrived within less time say nothing by when they arrived: one report brings those of a second.
const CLOCK_S: f64 = 3.0;

/// A rank whose steps cannot be those of the job, and are not counted.
#[derive(Debug, Clone, PartialEq)]
pub struct Doubted {
    /// Which.
    pub rank: u32,
    /// What it claims, against what.
    pub why: String,
}

/// The step that a job is at: the lower median of its ranks' newest, which no single rank moves far.
pub fn job_step(newest: &BTreeMap<u32, u64>) -> Option<u64> {
    let mut steps: Vec<u64> = newest.values().copied().collect();
    steps.sort_unstable();
    steps.get(steps.len().checked_sub(1)? / 2).copied()
}

/// Ranks that claim to be so far ahead as the window of steps reaches.
pub fn ahead(newest: &BTreeMap<u32, u64>) -> Vec<Doubted> {
    let Some(job) = job_step(newest) else { return Vec::new() };
    let far = newest.iter().filter(|(_, step)| **step > job.saturating_add(STEP_WINDOW));
    far.map(|(rank, step)| Doubted { rank: *rank, why: format!("is at step {step}, the job at {job}") }).collect()
}

/// Ranks whose steps are not counted. The controller's own clock has a vote: it knows in what time how many steps came.
pub fn doubted(rows: &[StepRow]) -> Vec<Doubted> {
    let mut of_rank: BTreeMap<u32, Vec<&StepRow>> = BTreeMap::new();
    rows.iter().for_each(|row| of_rank.entry(row.rank).or_default().push(row));
    let claims: Vec<(u32, f64)> =
        of_rank.iter().filter_map(|(rank, own)| Some((*rank, median(own.iter().map(|r| r.step_us))?))).collect();
    let clock = median(of_rank.values().filter_map(|own| by_clock(own)));
    let Some(job_us) = low_median(claims.iter().map(|c| c.1).chain(clock)) else { return Vec::new() };
    let wrong = claims.into_iter().filter(|(_, us)| *us > CREDIBLE * job_us || us * CREDIBLE < job_us);
    let ms = |us: f64| us * 1e-3;
    let why = |us: f64| format!("reports steps of {:.1} ms, the job's take {:.1} ms", ms(us), ms(job_us));
    wrong.map(|(rank, claimed_us)| Doubted { rank, why: why(claimed_us) }).collect()
}

/// The time of a step by when the first and the last of a rank arrived.
fn by_clock(own: &[&StepRow]) -> Option<f64> {
    let (first, last) = (own.first()?, own.last()?);
    let passed = last.received.since(first.received).get();
    (passed >= CLOCK_S && last.step > first.step).then(|| passed * 1e6 / (last.step - first.step) as f64)
}

/// The middle, of an even number the lower one.
fn low_median(values: impl IntoIterator<Item = f64>) -> Option<f64> {
    let mut sorted: Vec<f64> = values.into_iter().collect();
    sorted.sort_by(f64::total_cmp);
    sorted.get(sorted.len().checked_sub(1)? / 2).copied()
}

/// The mean of what lies within [`CREDIBLE`] of the lower median: one rank's claim moves it no further.
pub fn robust_mean(values: impl IntoIterator<Item = f64>) -> Option<f64> {
    let values: Vec<f64> = values.into_iter().collect();
    let middle = low_median(values.iter().copied())?;
    let near: Vec<f64> = values.into_iter().filter(|v| *v <= CREDIBLE * middle && v * CREDIBLE >= middle).collect();
    Some(near.iter().sum::<f64>() / near.len() as f64)
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
    let mean = |of: fn(&StepRow) -> f64| robust_mean(ranks.iter().map(of));
    let one_decision = ranks.iter().all(|r| r.version == last.version && r.ran == last.ran);
    if !(complete && one_decision) {
        return None;
    }
    let step_us = mean(|r| r.step_us)?;
    Some(WholeStep {
        step: last.step,
        version: last.version,
        ran: last.ran.clone(),
        received: ranks.iter().map(|r| r.received).max().unwrap_or_default(),
        sync_us: sync_us.min(CREDIBLE * step_us),
        compute_us: (last.step_us.min(CREDIBLE * step_us) - last.comp_us - last.sync_us).max(0.0),
        comp_us: last.comp_us.min(CREDIBLE * step_us),
        step_us,
        gain: mean(|r| r.gain)?,
        bytes_sent: mean(|r| r.bytes_sent as f64)?,
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
        scatter: scatter(own),
    })
}

/// Between which times steps lie, but for one in twenty at either end.
fn scatter(steps: &[&WholeStep]) -> Option<Scatter> {
    let ends = |of: fn(&WholeStep) -> f64| {
        let mut sorted: Vec<f64> = steps.iter().map(|s| of(s)).collect();
        sorted.sort_by(f64::total_cmp);
        let left_out = sorted.len() / 20;
        Some((seconds(*sorted.get(left_out)?)?, seconds(*sorted.get(sorted.len().checked_sub(left_out + 1)?)?)?))
    };
    let ((step_low, step_high), (sync_low, sync_high)) = (ends(|s| s.step_us)?, ends(|s| s.sync_us)?);
    Some(Scatter { step_low, step_high, sync_low, sync_high })
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
    fn one_ranks_claims_are_not_the_jobs() {
        let with = |claim: fn(&mut StepRow), ranks: u32| -> Vec<StepRow> {
            let rows = (0..40).flat_map(|step| (0..ranks).map(move |rank| row(step, rank, 1, 50.0)));
            let wrong = |mut row: StepRow| {
                if row.rank == 1 {
                    claim(&mut row);
                }
                row
            };
            rows.map(wrong).collect()
        };
        for ranks in [2, 3, 8] {
            // Steps of an hour.
            let hours = with(|r| (r.step_us, r.sync_us) = (3.6e9, 3.5e9), ranks);
            let found = doubted(&hours);
            assert_eq!(found.iter().map(|d| d.rank).collect::<Vec<_>>(), [1], "of {ranks}");
            assert!(found[0].why.contains("3600000.0 ms, the job's take 0.2 ms"), "{found:?}");
            let steps = whole_steps(&hours, &all(ranks));
            assert!(steps.iter().all(|s| s.step_us == 170.0 && s.sync_us <= CREDIBLE * 170.0), "{:?}", steps[0]);
            // A gain of 1.
            let gains = with(|r| r.gain = 1.0, ranks);
            assert!(doubted(&gains).is_empty());
        }
        let rows = with(|r| (r.step, r.gain) = (r.step, 1.0), 3);
        let kept = rows.into_iter().map(|r| StepRow { gain: if r.rank == 1 { 1.0 } else { 0.05 }, ..r });
        let steps = whole_steps(&kept.collect::<Vec<_>>(), &all(3));
        assert!((steps[0].gain - 0.05).abs() < 1e-12);
    }

    #[test]
    fn one_rank_far_ahead_does_not_move_the_job() {
        let newest = |steps: &[u64]| -> BTreeMap<u32, u64> { (0..).zip(steps.iter().copied()).collect() };
        for steps in [&[2013, 1_000_000_000_000][..], &[2013, 2014, 1_000_000_000_000]] {
            assert!(job_step(&newest(steps)).unwrap() < 2015);
            let found = ahead(&newest(steps));
            assert!(found.len() == 1 && found[0].why.contains("step 1000000000000"), "{found:?}");
        }
        assert!(ahead(&newest(&[2013, 2500])).is_empty(), "its reports came first");
        assert_eq!(job_step(&BTreeMap::new()), None);
    }

    /// Two ranks that differ: what the controller's clock says of both decides.
    #[test]
    fn the_controllers_clock_has_a_vote() {
        let at = |step: u64, rank: u32, step_us: f64| StepRow {
            received: Timestamp(step * 50_000),
            step_us,
            ..row(step, rank, 1, 50.0)
        };
        for wrong_us in [10.0, 3.6e9] {
            let rows: Vec<StepRow> = (0..100).flat_map(|step| [at(step, 0, 50_000.0), at(step, 1, wrong_us)]).collect();
            assert_eq!(doubted(&rows).iter().map(|d| d.rank).collect::<Vec<_>>(), [1], "{wrong_us}");
        }
    }

    #[test]
    fn scatter_leaves_out_one_in_twenty_at_either_end() {
        let rows: Vec<StepRow> =
            (0..40).map(|i| row(i + 1, 0, 1, if i == 7 { 1e6 } else { 30.0 + i as f64 })).collect();
        let scatter = measured(&whole_steps(&rows, &all(1)), Version(1)).unwrap().scatter.unwrap();
        assert!((scatter.sync_low.get() - 32e-6).abs() < 1e-12, "{scatter:?}");
        assert!((scatter.sync_high.get() - 68e-6).abs() < 1e-12, "{scatter:?}");
        assert!(scatter.step_high.get() < 1e-3);
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
