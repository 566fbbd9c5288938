//! What steps cost: one figure per step from what its ranks reported, medians over steps. Pure.

use flexcomm_domain::{Gain, Plan, Seconds, Timestamp, Version};
use flexcomm_planner::{Measured, Scatter};
use std::borrow::Borrow;
use std::collections::{BTreeMap, BTreeSet};

use crate::limits::{MEASURED_STEPS, STEP_WINDOW};
use crate::store::StepRow;

/// The first steps under a decision run with cold buffers and are left out.
const COLD_STEPS: usize = 2;

/// What cold buffers cost is little of a step that takes longer, microseconds; but for a job's first, in which connections are made.
const LONG_US: f64 = 2e6;

/// A step that every rank reported whose agent lives.
#[derive(Debug, Clone, PartialEq)]
pub struct WholeStep {
    /// Its number.
    pub step: u64,
    /// The decision in force.
    pub version: Version,
    /// What ran.
    pub ran: Plan,
    /// When its last report arrived.
    pub received: Timestamp,
    /// The collective proper, from the last rank's entry to the last rank's end. Where ranks cannot tell when
    /// the last one entered: the least time over the ranks, since the one that came last waited for nobody.
    pub sync_us: f64,
    /// Of the rank that came last: all that is neither compression nor the collective proper.
    pub compute_us: f64,
    /// Of the rank that came last.
    pub comp_us: f64,
    /// Mean over the ranks that agree: one that comes late finds the others' data there and has a short step, the next is long.
    pub step_us: f64,
    /// [`gain_over_ranks`].
    pub gain: f64,
    /// Mean over the ranks that agree.
    pub bytes_sent: f64,
    /// The share of each bucket in the energy of the gradient before error feedback, in the mean over the ranks that report it; empty
    /// where none does.
    pub energies: Vec<f64>,
}

impl WholeStep {
    /// Whether it is a step of what is in force: of a decision, or of what the user named before the first. What else a user runs says
    /// nothing of what the model predicts: what he named before, and AR-Topk by a selection that he holds. Of a decision that is not in
    /// force any more it is not known which selection it had.
    pub fn is_as_decided(&self, in_force: Option<(Version, &Plan)>) -> bool {
        match in_force {
            Some((version, decided)) if version == self.version => self.ran == *decided,
            _ => {
                self.ran.is_dense()
                    || self.version > Version(0) && self.ran.strategies().iter().all(|of| of.selection().is_none())
            }
        }
    }
}

/// Ranks of a synchronous job take the same time for the same steps. One whose steps differ from the others' by more than
/// this factor is wrong about them: where long and short ones alternate, medians differ by less.
const CREDIBLE: f64 = 2.0;

/// What ranks find of one collective may differ by this factor: the first of a tree is done before the last.
const APART: f64 = 4.0;

/// A rank's energy counts for at most so many times the median. Ranks whose data differ have gradients that differ, and up to this
/// factor each counts in full; in return one claim can have most of the weight in a small job: 4/5 of it with 2 or 3 ranks, 2/3
/// with 4 or 5, half from 8 ranks on, as [`gain_over_ranks`] has it.
const MOST_ENERGY: f64 = 4.0;

/// Steps that arrived within less time say nothing by when they arrived: one report brings those of up to four seconds.
const CLOCK_S: f64 = 12.0;

/// A rank is silent when its newest steps came so much earlier than another's, in seconds ...
const SILENT_S: f64 = 10.0;

/// ... and are so many steps behind: where a step takes longer than [`SILENT_S`], ranks are one apart.
const SILENT_STEPS: u64 = 3;

/// Steps that are older tell nothing of the network of now: as many seconds, and as many times a step takes.
const OUTDATED: (f64, f64) = (10.0, 4.0);

/// Fewest steps between two changes of what they take, and the least change, in logarithms.
const CHANGED_STEPS: usize = 3;
const CHANGED: f64 = 0.2;
/// A change is more than so many times what steps are off their median by.
const SCATTERS: f64 = 3.0;

/// What is stored of one rank's steps.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct StepSpan {
    /// The oldest step, and when it arrived.
    pub oldest: (u64, Timestamp),
    /// The newest step, and when it arrived.
    pub newest: (u64, Timestamp),
}

impl StepSpan {
    /// The time of a step by when the first and the last arrived, microseconds.
    fn by_clock(&self) -> Option<f64> {
        let passed = self.newest.1.since(self.oldest.1).get();
        let steps = self.newest.0.checked_sub(self.oldest.0).filter(|steps| *steps > 0)?;
        (passed >= CLOCK_S).then(|| passed * 1e6 / steps as f64)
    }
}

/// A rank whose steps are not counted.
#[derive(Debug, Clone, PartialEq)]
pub struct Doubted {
    /// Which.
    pub rank: u32,
    /// What it claims, against what.
    pub why: String,
}

/// What is known of a job's newest steps.
#[derive(Debug, Default, PartialEq)]
pub struct RecentSteps {
    /// The step that the job is at.
    pub newest: Option<u64>,
    /// The newest steps that every rank reported which is counted, ascending.
    pub whole: Vec<WholeStep>,
    /// Ranks that are not counted: no step waits for them.
    pub doubted: Vec<Doubted>,
}

/// What ranks claim of the same thing, as one value that no minority moves: the median. Of an even number of claims rank 0's
/// counts twice, as its orders are the ones that count.
pub fn median_of_ranks(claims: impl IntoIterator<Item = (u32, f64)>) -> Option<f64> {
    let claims: Vec<(u32, f64)> = claims.into_iter().collect();
    let again = claims.iter().find(|(rank, _)| *rank == 0 && claims.len().is_multiple_of(2)).copied();
    let mut sorted: Vec<f64> = claims.iter().copied().chain(again).map(|(_, value)| value).collect();
    sorted.sort_by(f64::total_cmp);
    sorted.get(sorted.len().checked_sub(1)? / 2).copied()
}

/// The largest of what ranks claim of what all wait for, but what exceeds their [`median_of_ranks`] by more than [`APART`].
pub fn slowest(claims: impl Iterator<Item = (u32, f64)> + Clone) -> Option<f64> {
    let most = APART * median_of_ranks(claims.clone())?;
    claims.map(|(_, us)| us).filter(|us| *us <= most).max_by(f64::total_cmp)
}

/// The gain over ranks, 1 - Σ‖e_i - T_i‖²/Σ‖e_i‖²: the mean of their gains, weighted by the energies ‖e_i‖² that come with them. An
/// energy counts for [`MOST_ENERGY`] times the median at most, one that is not told for the median; where that is 0, ranks count
/// alike. So one of N ranks has at most 4/(4 + ⌊N/2⌋) of the weight, whatever it claims. Where the true energies lie within a
/// factor of 4 none of them is cut, and one rank's claims move the gain by no more than that share.
pub fn gain_over_ranks(claims: impl Iterator<Item = (f64, Option<f64>)> + Clone) -> Option<f64> {
    let mut energies: Vec<f64> = claims.clone().filter_map(|(_, energy)| energy).collect();
    energies.sort_by(f64::total_cmp);
    // Of an even number the lower one: of two ranks the higher may be the one that is wrong.
    let median = energies.get(energies.len().saturating_sub(1) / 2).copied().unwrap_or(0.0);
    let weight = |energy: Option<f64>| match energy {
        Some(energy) if median > 0.0 => (energy / median).min(MOST_ENERGY),
        _ => 1.0,
    };
    let all: f64 = claims.clone().map(|(_, energy)| weight(energy)).sum();
    let kept: f64 = claims.map(|(gain, energy)| weight(energy) * gain).sum();
    (all > 0.0).then(|| kept / all)
}

/// Whether one value is within [`CREDIBLE`] of another.
fn credible(value: f64, of: f64) -> bool {
    value <= CREDIBLE * of && value * CREDIBLE >= of
}

/// The step that a job is at: the [`median_of_ranks`] of its ranks' newest.
pub fn job_step(spans: &BTreeMap<u32, StepSpan>) -> Option<u64> {
    // Steps are below 2^53, which every report is checked for.
    median_of_ranks(spans.iter().map(|(rank, span)| (*rank, span.newest.0 as f64))).map(|step| step as u64)
}

/// Of the ranks that are expected to report, those whose newest steps are not those that the job is at: far ahead or behind,
/// or none for a while.
pub fn astray(spans: &BTreeMap<u32, StepSpan>, expected: &BTreeSet<u32>) -> Vec<Doubted> {
    let Some(job) = job_step(spans) else { return Vec::new() };
    let first = spans.values().map(|span| span.oldest.1).min().unwrap_or_default();
    let last = spans.values().map(|span| span.newest.1).max().unwrap_or_default();
    let why = |rank: &u32| {
        let (step, at) = spans.get(rank).map_or((None, first), |span| (Some(span.newest.0), span.newest.1));
        let silent_s = last.since(at).get();
        let silent = silent_s > SILENT_S && job.saturating_sub(step.unwrap_or(0)) > SILENT_STEPS;
        match step {
            Some(step) if step.abs_diff(job) > STEP_WINDOW => Some(format!("is at step {step}, the job at {job}")),
            Some(step) if silent => Some(format!("has reported nothing after step {step} for {silent_s:.0} s")),
            None if silent => Some(format!("has reported no step in {silent_s:.0} s")),
            _ => None,
        }
    };
    expected.iter().filter_map(|rank| Some(Doubted { rank: *rank, why: why(rank)? })).collect()
}

/// Ranks whose steps cannot take what they report. The controller's own clock counts as one more claim: it knows in what time
/// how many steps came.
pub fn doubted(rows: &[StepRow], spans: &BTreeMap<u32, StepSpan>) -> Vec<Doubted> {
    let mut of_rank: BTreeMap<u32, Vec<&StepRow>> = BTreeMap::new();
    rows.iter().for_each(|row| of_rank.entry(row.rank).or_default().push(row));
    let medians = |of: fn(&StepRow) -> f64| -> Vec<(u32, f64)> {
        of_rank.iter().filter_map(|(rank, own)| Some((*rank, median(own.iter().map(|r| of(r)))?))).collect()
    };
    let claims = medians(|r| r.step_us);
    let clocks = of_rank.iter().filter_map(|(rank, own)| {
        let of_rows = StepSpan { oldest: arrived(own.first()?), newest: arrived(own.last()?) };
        of_rows.by_clock().or_else(|| spans.get(rank)?.by_clock())
    });
    // Of one rank alone the clock is no second opinion: it counts pauses between epochs as steps.
    let clock = median(clocks).filter(|_| claims.len() > 1).map(|us| (u32::MAX, us));
    let Some(job_us) = median_of_ranks(claims.iter().copied().chain(clock)) else { return Vec::new() };
    let ms = |us: f64| us * 1e-3;
    let steps = claims.iter().filter(|(_, us)| !credible(*us, job_us));
    let steps = steps
        .map(|(rank, us)| (*rank, format!("reports steps of {:.1} ms, the job's take {:.1} ms", ms(*us), ms(job_us))));
    let parts = medians(|r| r.sync_us.max(r.comp_us));
    let parts = parts.into_iter().filter(|(_, us)| *us > APART * job_us);
    let parts =
        parts.map(|(rank, us)| (rank, format!("reports {:.1} ms within steps that take {:.1} ms", ms(us), ms(job_us))));
    parts.chain(steps).collect::<BTreeMap<u32, String>>().into_iter().map(|(rank, why)| Doubted { rank, why }).collect()
}

fn arrived(row: &StepRow) -> (u64, Timestamp) {
    (row.step, row.received)
}

/// Steps that all expected ranks reported under one decision, ascending. A report of another rank counts as well.
pub fn whole_steps(rows: &[StepRow], expected: &BTreeSet<u32>) -> Vec<WholeStep> {
    rows.chunk_by(|a, b| a.step == b.step).filter_map(|ranks| whole(ranks, expected)).collect()
}

fn whole(ranks: &[StepRow], expected: &BTreeSet<u32>) -> Option<WholeStep> {
    let complete = expected.iter().all(|rank| ranks.iter().any(|r| r.rank == *rank));
    let last = ranks.iter().min_by(|a, b| a.wait_us.unwrap_or(a.sync_us).total_cmp(&b.wait_us.unwrap_or(b.sync_us)))?;
    let one_decision = ranks.iter().all(|r| r.version == last.version && r.ran == last.ran);
    if !(complete && one_decision) {
        return None;
    }
    let claims = |of: fn(&StepRow) -> f64| ranks.iter().map(move |r| (r.rank, of(r)));
    let step_us = agreeing_mean(claims(|r| r.step_us))?;
    let sync_us = if ranks.iter().all(|r| r.wait_us.is_some()) {
        slowest(claims(|r| (r.sync_us - r.wait_us.unwrap_or(0.0)).max(0.0)))?
    } else {
        last.sync_us
    };
    Some(WholeStep {
        step: last.step,
        version: last.version,
        ran: last.ran.clone(),
        received: ranks.iter().map(|r| r.received).max().unwrap_or_default(),
        sync_us: sync_us.min(step_us),
        compute_us: (last.step_us.min(CREDIBLE * step_us) - last.comp_us - last.sync_us).max(0.0),
        comp_us: last.comp_us.min(step_us),
        step_us,
        gain: gain_over_ranks(ranks.iter().map(|r| (r.gain, r.energy)))?,
        bytes_sent: agreeing_mean(claims(|r| r.bytes_sent as f64))?,
        energies: mean_shares(&ranks.iter().filter_map(|r| r.bucket_energies.as_deref()).collect::<Vec<_>>()),
    })
}

/// The mean of what lies within [`CREDIBLE`] of the [`median_of_ranks`].
fn agreeing_mean(claims: impl Iterator<Item = (u32, f64)> + Clone) -> Option<f64> {
    let median = median_of_ranks(claims.clone())?;
    let near: Vec<f64> = claims.map(|(_, value)| value).filter(|value| credible(*value, median)).collect();
    Some(near.iter().sum::<f64>() / near.len() as f64)
}

/// The buckets' shares in the energy of the gradient, in the mean over the newest steps of so many buckets that report them.
pub fn bucket_energies(steps: &[WholeStep], buckets: usize) -> Vec<f32> {
    let of = steps.iter().map(|step| &step.energies[..]).filter(|energies| energies.len() == buckets);
    mean_shares(&of.collect::<Vec<_>>()).into_iter().map(|share| share as f32).collect()
}

/// The mean of what each of some lists has as shares of its sum, of those that have as many numbers as most of them. Empty where there
/// are none.
fn mean_shares(lists: &[&[f64]]) -> Vec<f64> {
    let counts = |list: &&&[f64]| list.iter().sum::<f64>() > 0.0;
    let mut lengths: Vec<usize> = lists.iter().filter(counts).map(|list| list.len()).collect();
    lengths.sort_unstable();
    let Some(length) = lengths.get(lengths.len() / 2).copied() else { return Vec::new() };
    let mut shares = vec![0.0; length];
    let mut count = 0.0;
    for list in lists.iter().filter(counts).filter(|list| list.len() == length) {
        let all: f64 = list.iter().sum();
        shares.iter_mut().zip(*list).for_each(|(sum, energy)| *sum += energy / all);
        count += 1.0;
    }
    shares.iter_mut().for_each(|sum| *sum /= count);
    shares
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

/// Medians over the newest steps under one decision; `None` where the newest of them is outdated.
pub fn measured(steps: &[impl Borrow<WholeStep>], version: Version, now: Timestamp) -> Option<Measured> {
    let first = steps.iter().position(|s| s.borrow().version == version)?;
    // In the middle of the window the first steps are the cold ones only when others stand before them.
    let begins = first > 0 || steps[first].borrow().step == 0;
    let own = steps[first..].iter().map(Borrow::borrow).filter(|s: &&WholeStep| s.version == version);
    let own: Vec<&WholeStep> = own.collect();
    // Where the step before was long none is cold.
    let is_long = |at: usize| steps[at].borrow().step_us >= LONG_US;
    let most = match is_long(first.saturating_sub(1)) {
        _ if !begins => 0,
        true => usize::from(first == 0),
        false => COLD_STEPS,
    };
    let cold = most.min(own.len());
    let own = &own[cold..];
    let own = since_change(&own[own.len().saturating_sub(MEASURED_STEPS)..]);
    let of = |f: fn(&WholeStep) -> f64| median(own.iter().map(|s| f(s)));
    let age_s = now.since(own.last()?.received).get();
    if age_s > OUTDATED.0.max(OUTDATED.1 * of(|s| s.step_us)? * 1e-6) {
        return None;
    }
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

/// The steps since the newest change of what they take: where two medians in place of one bring all steps together nearer, in
/// logarithms, by more than two steps differ from the other median, and the medians differ by far more than steps do from theirs. One or two
/// pauses are no change, nor is noise.
fn since_change<'a>(steps: &'a [&'a WholeStep]) -> &'a [&'a WholeStep] {
    let logarithms: Vec<f64> = steps.iter().map(|step| step.step_us.max(1.0).ln()).collect();
    // Median, and the sum of distances from it.
    let of = |part: &[f64]| {
        let middle = median(part.iter().copied()).unwrap_or_default();
        (middle, part.iter().map(|x| (x - middle).abs()).sum::<f64>())
    };
    let mut from = 0;
    loop {
        let part = &logarithms[from..];
        let all = of(part).1;
        let split = |at: usize| {
            let ((before, left), (now, right)) = (of(&part[..at]), of(&part[at..]));
            let changed = (now - before).abs();
            let is_change = changed > CHANGED.max(SCATTERS * (left + right) / part.len() as f64);
            (all - left - right, is_change && all - left - right > 2.0 * changed, at)
        };
        let splits = (CHANGED_STEPS..=part.len().saturating_sub(CHANGED_STEPS)).map(split);
        match splits.max_by(|a, b| a.0.total_cmp(&b.0)) {
            Some((_, true, at)) => from += at,
            _ => return &steps[from..],
        }
    }
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
    use proptest::collection::vec;
    use proptest::prelude::{Just, Strategy, any, prop_assert, prop_assert_eq, prop_oneof, proptest};

    pub(crate) fn row(step: u64, rank: u32, version: u64, sync_us: f64) -> StepRow {
        StepRow {
            step,
            rank,
            version: Version(version),
            ran: Plan::DENSE_RING,
            received: Timestamp(step),
            compute_us: 100.0,
            comp_us: 10.0,
            sync_us,
            wait_us: None,
            step_us: 120.0 + sync_us,
            gain: 1.0 - f64::from(rank) / 10.0,
            energy: None,
            bytes_sent: 1000,
            bucket_energies: None,
        }
    }

    pub(crate) fn all(world: u32) -> BTreeSet<u32> {
        (0..world).collect()
    }

    #[test]
    fn buckets_have_the_mean_of_the_shares_that_are_reported() {
        let with = |step, rank, energies: Option<&[f64]>| StepRow {
            bucket_energies: energies.map(<[f64]>::to_vec),
            ..row(step, rank, 0, 1.0)
        };
        let rows = [
            with(1, 0, Some(&[1.0, 3.0])),
            with(1, 1, Some(&[300.0, 100.0])),
            with(2, 0, None),
            with(2, 1, Some(&[0.0, 0.0])),
            with(3, 0, Some(&[1.0, 0.0])),
            with(3, 1, None),
        ];
        let steps = whole_steps(&rows, &BTreeSet::from([0, 1]));
        let shares: Vec<_> = steps.iter().map(|step| step.energies.clone()).collect();
        assert_eq!(shares, [vec![0.5, 0.5], vec![], vec![1.0, 0.0]], "a rank's scale does not count");
        assert_eq!(bucket_energies(&steps, 2), [0.75, 0.25]);
        let (two, one) = (Some(&[1.0, 3.0][..]), Some(&[1.0][..]));
        let odd = [with(4, 0, two), with(4, 1, two), with(4, 2, one)];
        let odd = whole_steps(&odd, &BTreeSet::from([0, 1, 2]));
        assert_eq!(bucket_energies(&odd, 2), [0.25, 0.75], "one rank with other buckets");
        assert!(bucket_energies(&odd, 3).is_empty() && bucket_energies(&[], 2).is_empty());
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
        assert_eq!(steps[0].gain, 0.95, "the mean of ranks that do not tell their energies");
    }

    fn none() -> BTreeMap<u32, StepSpan> {
        BTreeMap::new()
    }

    fn ranks(doubted: &[Doubted]) -> Vec<u32> {
        doubted.iter().map(|d| d.rank).collect()
    }

    #[test]
    fn one_ranks_claims_are_not_the_jobs() {
        let with = |claim: fn(&mut StepRow), ranks: u32| -> Vec<StepRow> {
            let rows = (0..40).flat_map(|step| (0..ranks).map(move |rank| row(step, rank, 1, 50.0)));
            let wrong = |mut row: StepRow| {
                row.gain = 0.3;
                if row.rank == 1 {
                    claim(&mut row);
                }
                row
            };
            rows.map(wrong).collect()
        };
        for world in [2, 3, 8] {
            // Steps of an hour.
            let hours = with(|r| (r.step_us, r.sync_us) = (3.6e9, 3.5e9), world);
            let found = doubted(&hours, &none());
            assert_eq!(ranks(&found), [1], "of {world}");
            assert!(found[0].why.contains("3600000.0 ms, the job's take 0.2 ms"), "{found:?}");
            let steps = whole_steps(&hours, &all(world));
            assert!(steps.iter().all(|s| s.step_us == 170.0 && s.sync_us <= 170.0), "{:?}", steps[0]);
            // A collective of an hour within a true step, with and without the time that ranks waited in it.
            for wait_us in [None, Some(0.0)] {
                let mut sync = with(|r| r.sync_us = 3.6e9, world);
                sync.iter_mut().for_each(|r| r.wait_us = wait_us);
                let found = doubted(&sync, &none());
                assert!(ranks(&found) == [1] && found[0].why.contains("3600000.0 ms within steps"), "{found:?}");
                assert_eq!(whole_steps(&sync, &all(world))[0].sync_us, 50.0, "of {world}, {wait_us:?}");
            }
            // A gain of 1, where the others keep 0.3, and an energy that no other has.
            let mut gains = with(|r| r.gain = 1.0, world);
            assert!(doubted(&gains, &none()).is_empty());
            let plain = whole_steps(&gains, &all(world))[0].gain;
            gains.iter_mut().for_each(|r| r.energy = Some(if r.rank == 1 { 1e90 } else { 2.0 }));
            let share = MOST_ENERGY / (MOST_ENERGY + f64::from(world - 1));
            for (gain, weight) in [(plain, 1.0 / f64::from(world)), (whole_steps(&gains, &all(world))[0].gain, share)] {
                assert!((gain - (0.3 + 0.7 * weight)).abs() < 1e-12, "{gain} of {world}");
            }
            // Steps that take 3.8 times as long.
            let longer = with(|r| r.step_us *= 3.8, world);
            assert_eq!(
                (ranks(&doubted(&longer, &none())), whole_steps(&longer, &all(world))[0].step_us),
                (vec![1], 170.0)
            );
        }
    }

    fn span(oldest: (u64, u64), newest: (u64, u64)) -> StepSpan {
        let at = |(step, s): (u64, u64)| (step, Timestamp(s * 1_000_000));
        StepSpan { oldest: at(oldest), newest: at(newest) }
    }

    #[test]
    fn the_job_is_where_its_ranks_are_and_those_that_are_not_are_named() {
        let spans = |newest: &[(u64, u64)]| -> BTreeMap<u32, StepSpan> {
            (0..).zip(newest.iter().map(|newest| span((0, 0), *newest))).collect()
        };
        let far = 1_000_000_000_000;
        for newest in [&[(2013, 100), (far, 100)][..], &[(2013, 100), (2014, 100), (far, 100)]] {
            let spans = spans(newest);
            assert!(job_step(&spans).unwrap() < 2015);
            let found = astray(&spans, &all(newest.len() as u32));
            assert!(found.len() == 1 && found[0].why.contains("step 1000000000000"), "{found:?}");
        }
        let reports_one_after_the_other = spans(&[(2013, 100), (2500, 101)]);
        assert!(astray(&reports_one_after_the_other, &all(2)).is_empty());
        let silent = spans(&[(2013, 100), (1900, 80)]);
        let found = astray(&silent, &all(2));
        assert_eq!(found[0].why, "has reported nothing after step 1900 for 20 s");
        assert!(astray(&spans(&[(20, 100), (19, 80)]), &all(2)).is_empty(), "its steps take 20 s");
        let never = astray(&spans(&[(2013, 100)]), &all(2));
        assert!(ranks(&never) == [1] && never[0].why.contains("no step in 100 s"), "{never:?}");
        assert_eq!(job_step(&none()), None);
    }

    /// Two ranks that differ: what the controller's clock says of both decides; where steps are too fast for it in the window
    /// that is looked at, by all that is stored.
    #[test]
    fn the_controllers_clock_counts_as_a_claim() {
        for (step_us, stored) in [(150_000.0, none()), (5_000.0, BTreeMap::from([(0, span((0, 0), (3000, 15)))]))] {
            let at = |step: u64, rank: u32, claim_us: f64| StepRow {
                received: Timestamp(step * step_us as u64),
                step_us: claim_us,
                ..row(step, rank, 1, 5.0)
            };
            for wrong_us in [10.0, 3.6e9] {
                for (liar, honest) in [(0, 1), (1, 0)] {
                    let steps = (0..100).flat_map(|step| [at(step, honest, step_us), at(step, liar, wrong_us)]);
                    let mut rows: Vec<StepRow> = steps.collect();
                    rows.sort_by_key(|r| (r.step, r.rank));
                    assert_eq!(ranks(&doubted(&rows, &stored)), [liar], "{wrong_us} against {step_us}");
                }
            }
        }
    }

    #[test]
    fn outdated_steps_tell_nothing_of_now() {
        let rows: Vec<StepRow> = (0..40).map(|step| row(step, 0, 1, 50.0)).collect();
        let steps = whole_steps(&rows, &all(1));
        let newest = steps.last().unwrap().received;
        let after = |s: u64| measured(&steps, Version(1), Timestamp(newest.0 + s * 1_000_000));
        assert!(after(5).is_some() && after(11).is_none());
        let slow: Vec<StepRow> = rows.iter().map(|r| StepRow { step_us: 15e6, ..r.clone() }).collect();
        let steps = whole_steps(&slow, &all(1));
        assert!(measured(&steps, Version(1), Timestamp(newest.0 + 30_000_000)).is_some(), "two steps ago");
    }

    fn energies(ranks: std::ops::Range<usize>, spread: f64) -> impl Strategy<Value = Vec<(f64, f64)>> {
        (0.0..30f64, vec((0.0..=1.0, 1.0..=spread), ranks)).prop_map(|(scale, ranks)| {
            ranks.into_iter().map(|(gain, energy)| (gain, energy * 10f64.powf(scale - 15.0))).collect()
        })
    }

    fn over(ranks: &[(f64, f64)]) -> f64 {
        gain_over_ranks(ranks.iter().map(|(gain, energy)| (*gain, Some(*energy)))).unwrap()
    }

    proptest! {
        #[test]
        fn a_gain_is_of_the_energy_of_all_ranks(ranks in energies(1..9, 4.0)) {
            let (left, all) = ranks.iter().fold((0.0, 0.0), |(left, all), (g, e)| (left + (1.0 - g) * e, all + e));
            prop_assert!((over(&ranks) - (1.0 - left / all)).abs() < 1e-12);
            let mean = ranks.iter().map(|(gain, _)| gain).sum::<f64>() / ranks.len() as f64;
            let alike: Vec<(f64, f64)> = ranks.iter().map(|(gain, _)| (*gain, ranks[0].1)).collect();
            prop_assert!((over(&alike) - mean).abs() < 1e-12);
            let untold = ranks.iter().map(|(gain, _)| (*gain, None));
            prop_assert!((gain_over_ranks(untold).unwrap() - mean).abs() < 1e-12);
        }

        /// Whatever one rank claims or leaves out, of energies as they may be.
        #[test]
        fn one_rank_has_no_more_than_its_share_of_the_weight(
            ranks in energies(2..9, 1e9), wrong in prop_oneof![0.0..1e93, 1e-300..1e-3, Just(0.0)], told in any::<bool>()
        ) {
            let wrong = |gain| {
                let others = ranks[1..].iter().map(|(_, energy)| (0.0, Some(*energy)));
                gain_over_ranks(others.chain([(gain, told.then_some(wrong))])).unwrap()
            };
            let share = MOST_ENERGY / (MOST_ENERGY + (ranks.len() / 2) as f64);
            prop_assert_eq!(wrong(0.0), 0.0);
            prop_assert!(wrong(1.0) <= share + 1e-12, "{} of {share}", wrong(1.0));
        }

        #[test]
        fn one_ranks_claims_move_the_gain_by_no_more_than_its_share(
            ranks in energies(2..9, 4.0), gain in 0.0..=1.0f64, factor in -200.0..60f64, liar in 0..9usize
        ) {
            let mut claims = ranks.clone();
            let liar = liar % ranks.len();
            claims[liar] = (gain, ranks[liar].1 * 10f64.powf(factor));
            let share = MOST_ENERGY / (MOST_ENERGY + (ranks.len() / 2) as f64);
            let moved = (over(&claims) - over(&ranks)).abs();
            prop_assert!(moved <= share + 1e-12, "{moved} of {share}");
        }
    }

    #[test]
    fn ranks_whose_gradients_are_larger_count_for_more() {
        assert_eq!(gain_over_ranks([].into_iter()), None);
        assert_eq!(over(&[(0.2, 1.0), (0.2, 1.0), (0.8, 4.0)]), 0.6, "the median says 0.2");
        assert_eq!(over(&[(0.5, 1.0), (1.0, 1e90)]), 0.9, "cut at 4");
        assert_eq!(over(&[(0.5, 0.0), (1.0, 0.0)]), 0.75, "dense");
        let told = gain_over_ranks([(0.25, Some(1.0)), (0.75, Some(3.0)), (1.0, None)].into_iter());
        assert_eq!(told, Some(0.7), "one that is not told has the median, 1");
    }

    #[test]
    fn of_an_even_number_of_claims_rank_0s_counts_twice() {
        assert_eq!(median_of_ranks([]), None);
        assert_eq!(median_of_ranks([(0, 1.0), (1, 9.0)]), Some(1.0));
        assert_eq!(median_of_ranks([(0, 9.0), (1, 1.0)]), Some(9.0));
        assert_eq!(median_of_ranks([(1, 9.0), (2, 1.0)]), Some(1.0));
        assert_eq!(median_of_ranks([(0, 9.0), (1, 1.0), (2, 2.0)]), Some(2.0));
        assert_eq!(median_of_ranks([(0, 9.0), (1, 1.0), (2, 2.0), (3, 3.0)]), Some(3.0));
    }

    #[test]
    fn scatter_leaves_out_one_in_twenty_at_either_end() {
        let rows: Vec<StepRow> =
            (0..40).map(|i| row(i + 1, 0, 1, if i == 7 { 1e6 } else { 30.0 + i as f64 })).collect();
        let scatter = measured(&whole_steps(&rows, &all(1)), Version(1), Timestamp(0)).unwrap().scatter.unwrap();
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

    /// Three steps of another network count alone; one or two are a pause.
    #[test]
    fn steps_of_the_network_before_count_no_more() {
        let of = |sync_us: &[f64]| {
            let rows: Vec<StepRow> = sync_us.iter().zip(0..).map(|(us, step)| row(step, 0, 1, *us)).collect();
            let m = measured(&whole_steps(&rows, &all(1)), Version(1), Timestamp(0)).unwrap();
            (m.steps, (m.t_sync.get() * 1e6).round())
        };
        let run = |newest: &[f64]| of(&[&[30.0; 30][..], newest].concat());
        assert_eq!(run(&[]), (28, 30.0));
        assert_eq!(run(&[300.0, 300.0]), (30, 30.0));
        assert_eq!(run(&[300.0, 310.0, 320.0]), (3, 310.0));
        assert_eq!(run(&[300.0, 300.0, 30.0, 300.0]), (32, 30.0), "pauses");
        assert_eq!(run(&[300.0; 12]), (12, 300.0));
        assert_eq!(run(&[300.0, 300.0, 30.0, 300.0, 310.0, 300.0]), (6, 300.0), "a pause of the other kind");
        assert_eq!(run(&[[300.0; 12].as_slice(), &[30.0; 3]].concat()), (3, 30.0));
        assert_eq!(run(&[31.0; 12]), (40, 30.0), "a drift");
        let lengths: Vec<f64> = (0..45).map(|i| if i * 7 % 3 == 0 { 60.0 } else { 150.0 }).collect();
        assert_eq!(of(&lengths).0, 40, "short and long sequences");
        let long = |sync_us: [f64; 4]| of(&sync_us);
        assert_eq!(long([9e6, 3e6, 3e6, 3e6]), (3, 3e6), "a job's first step is cold, however long");
        assert_eq!(long([9e6, 30.0, 30.0, 30.0]), (3, 30.0));
        let mut rows: Vec<StepRow> = (0..8).map(|step| row(step, 0, u64::from(step > 3), 30.0)).collect();
        rows[4].step_us = 3e6;
        let m = measured(&whole_steps(&rows, &all(1)), Version(1), Timestamp(0)).unwrap();
        assert_eq!((m.steps, m.t_step.get()), (2, 150e-6), "one long step after a decision, for connections");
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
        let m = measured(&steps, Version(1), Timestamp(0)).unwrap();
        assert_eq!((m.steps, m.t_sync.get()), (8, 30.0 * 1e-6));
        assert_eq!(measured(&steps, Version(0), Timestamp(0)).unwrap().t_sync.get(), 9.0 * 1e-6);
        assert_eq!(measured(&steps, Version(7), Timestamp(0)), None);
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
