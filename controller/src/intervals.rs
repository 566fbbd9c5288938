//! Cuts the steps of a job into intervals and holds each against what was predicted for it. Pure.

use crate::limits::{INTERVAL_MOST_STEPS, INTERVAL_STEPS, INTERVAL_US};
use crate::measure::{WholeStep, median};
use crate::store::{IntervalRow, OpenInterval};
use flexcomm_domain::{Plan, Timestamp, Version};

/// The first steps under a decision belong to no interval: cold buffers.
const COLD_STEPS: u64 = 2;

/// What is believed of the strategy in force now.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Prediction {
    /// The decision in force.
    pub version: Version,
    /// The collective.
    pub sync_us: f64,
    /// The step.
    pub step_us: f64,
}

/// What a cut depends on besides the steps.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Surroundings<'a> {
    /// Of the strategy in force; absent without links.
    pub prediction: Option<Prediction>,
    /// The decision in force.
    pub in_force: Option<(Version, &'a Plan)>,
    /// Now.
    pub now: Timestamp,
}

/// What follows from new steps.
#[derive(Debug, Clone, PartialEq)]
pub struct Cut {
    /// To be stored, oldest first.
    pub closed: Vec<IntervalRow>,
    /// What is measured from here on.
    pub open: OpenInterval,
}

/// Closes what is full. `steps` ascend and may reach back before the open interval.
pub fn cut(open: Option<OpenInterval>, steps: &[WholeStep], around: &Surroundings<'_>) -> Cut {
    let first = steps.first().map_or(0, |s| s.step);
    let version = steps.last().map_or(Version(0), |s| s.version);
    let mut open = open.unwrap_or_else(|| begin(version, first, around));
    if steps.last().is_some_and(|s| s.step + COLD_STEPS < open.from_step) {
        // The job started again from an earlier step.
        open = begin(version, first, around);
    }
    let mut closed = Vec::new();
    let from = open.from_step;
    let new: Vec<&WholeStep> = steps.iter().filter(|s| s.step >= from).collect();
    for run in new.chunk_by(|a, b| a.version == b.version && a.ran == b.ran) {
        let (head, mut rest) = (run[0], run);
        if head.version != open.version {
            open = begin(head.version, head.step + COLD_STEPS, around);
            rest = &run[run.len().min(COLD_STEPS as usize)..];
        }
        while let Some(length) = full_length(rest) {
            let (full, tail) = rest.split_at(length);
            closed.extend(close(&open, full, around));
            open = begin(open.version, full[length - 1].step + 1, around);
            rest = tail;
        }
    }
    Cut { closed, open }
}

/// Steps that make an interval, when there are enough.
fn full_length(steps: &[&WholeStep]) -> Option<usize> {
    let mut time_us = 0.0;
    let enough = |(i, step): (usize, &&WholeStep)| {
        time_us += step.step_us;
        let full = time_us >= INTERVAL_US || i + 1 >= INTERVAL_MOST_STEPS;
        (full && i + 1 >= INTERVAL_STEPS).then_some(i + 1)
    };
    steps.iter().enumerate().find_map(enough)
}

fn begin(version: Version, from_step: u64, around: &Surroundings<'_>) -> OpenInterval {
    let known = around.prediction.filter(|p| p.version == version);
    OpenInterval {
        version,
        from_step,
        began: around.now,
        predicted_sync_us: known.map(|p| p.sync_us),
        predicted_step_us: known.map(|p| p.step_us),
    }
}

fn close(open: &OpenInterval, steps: &[&WholeStep], around: &Surroundings<'_>) -> Option<IntervalRow> {
    let (first, last) = (steps.first()?, steps.last()?);
    let of = |f: fn(&WholeStep) -> f64| median(steps.iter().map(|s| f(s)));
    let priced = last.is_as_decided(around.in_force);
    Some(IntervalRow {
        version: open.version,
        ran: last.ran.clone(),
        from_step: first.step,
        to_step: last.step,
        at: around.now,
        predicted_sync_us: open.predicted_sync_us.filter(|_| priced),
        measured_sync_us: of(|s| s.sync_us)?,
        predicted_step_us: open.predicted_step_us.filter(|_| priced),
        measured_step_us: of(|s| s.step_us)?,
        comp_us: of(|s| s.comp_us),
        bytes_sent: of(|s| s.bytes_sent),
        gain: of(|s| s.gain),
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::measure::tests::{all, row};
    use crate::measure::whole_steps;
    use flexcomm_domain::Strategy;

    fn at(s: u64) -> Timestamp {
        Timestamp(100_000_000 + s * 1_000_000)
    }

    fn around(version: u64, sync_us: f64, now: Timestamp) -> Surroundings<'static> {
        let prediction = Prediction { version: Version(version), sync_us, step_us: 200.0 };
        Surroundings { prediction: Some(prediction), in_force: None, now }
    }

    fn steps(range: std::ops::Range<u64>, version: u64, now: Timestamp) -> Vec<WholeStep> {
        let rows: Vec<_> = range.map(|i| row(i, 0, version, 50.0)).collect();
        let mut steps = whole_steps(&rows, &all(1));
        steps.iter_mut().for_each(|s| (s.received, s.step_us) = (now, 1e5));
        steps
    }

    #[test]
    fn fast_steps_make_no_more_intervals_than_a_hundred_of_them_each() {
        let mut fast = steps(0..250, 1, at(10));
        fast.iter_mut().for_each(|s| s.step_us = 100.0);
        let spans = |cut: Cut| cut.closed.iter().map(|i| (i.from_step, i.to_step)).collect::<Vec<_>>();
        assert_eq!(spans(cut(None, &fast, &around(1, 100.0, at(10)))), [(0, 99), (100, 199)]);
        fast.iter_mut().for_each(|s| s.step_us = 2e4);
        assert_eq!(spans(cut(None, &fast, &around(1, 100.0, at(10))))[..2], [(0, 49), (50, 99)]);
    }

    #[test]
    fn intervals_carry_the_prediction_made_before_them() {
        let first = cut(None, &steps(0..25, 1, at(10)), &around(1, 100.0, at(10)));
        let spans: Vec<_> = first.closed.iter().map(|i| (i.from_step, i.to_step)).collect();
        assert_eq!(spans, [(0, 9), (10, 19)]);
        assert_eq!(first.open.from_step, 20);
        // What has been learnt since counts from the next interval on.
        let mut later = around(1, 100.0, at(12));
        later.prediction.as_mut().unwrap().sync_us = 70.0;
        let second = cut(Some(first.open), &steps(15..31, 1, at(12)), &later);
        assert_eq!(second.closed.len(), 1);
        assert_eq!(second.closed[0].predicted_sync_us, Some(100.0));
        assert_eq!(second.open.predicted_sync_us, Some(70.0));
        assert_eq!(second.closed[0].measured_sync_us, 50.0);
    }

    #[test]
    fn what_the_user_runs_before_the_first_decision_is_measured_and_never_priced() {
        let own: Strategy = "qsgd(s=16)/allgather".parse().unwrap();
        let mut all = steps(0..20, 0, at(30));
        all[..10].iter_mut().for_each(|s| s.ran = own.into());
        let around = around(0, 100.0, at(30));
        // The links are known for long.
        let open = cut(None, &all[..1], &Surroundings { now: at(10), ..around }).open;
        let closed = cut(Some(open), &all, &around).closed;
        assert_eq!(closed.iter().map(|i| i.ran == own).collect::<Vec<_>>(), [true, false]);
        let priced = |i: &IntervalRow| [i.predicted_sync_us.is_some(), i.predicted_step_us.is_some()];
        assert_eq!((priced(&closed[0]), priced(&closed[1])), ([false; 2], [true; 2]));
        assert_eq!((closed[0].comp_us, closed[0].bytes_sent, closed[0].gain), (Some(10.0), Some(1000.0), Some(1.0)));
    }

    #[test]
    fn what_is_led_by_another_selection_than_was_decided_is_measured_and_never_priced() {
        let [star, var, other] = ["topk@0.1/art-ring:star", "topk@0.1/art-ring:var", "topk@0.1/allgather"]
            .map(|text| text.parse::<Strategy>().unwrap());
        for (ran, in_force, expected) in [
            (star, Some((Version(1), star)), true),
            (var, Some((Version(1), star)), false),
            (var, Some((Version(2), var)), false),
            (other, Some((Version(2), var)), true),
        ] {
            let mut all = steps(0..10, 1, at(30));
            all.iter_mut().for_each(|s| s.ran = ran.into());
            let decided = in_force.map(|(version, of)| (version, of.into()));
            let in_force = decided.as_ref().map(|(version, plan)| (*version, plan));
            let around = Surroundings { in_force, ..around(1, 100.0, at(10)) };
            let open = cut(None, &all[..1], &around).open;
            let closed = cut(Some(open), &all, &Surroundings { now: at(30), ..around }).closed;
            assert_eq!(
                (closed[0].ran.clone(), closed[0].predicted_sync_us.is_some()),
                (ran.into(), expected),
                "{ran} under {in_force:?}"
            );
        }
    }

    #[test]
    fn a_new_decision_starts_a_new_interval_after_its_cold_steps() {
        let open = cut(None, &steps(0..5, 1, at(10)), &around(1, 100.0, at(10))).open;
        let both = [steps(0..8, 1, at(20)), steps(8..20, 2, at(20))].concat();
        let next = cut(Some(open), &both, &around(2, 100.0, at(20)));
        let spans: Vec<_> = next.closed.iter().map(|i| (i.version.0, i.from_step, i.to_step)).collect();
        assert_eq!(spans, [(2, 10, 19)]);
        // One step of a third decision that all ranks report: looked at again, nothing of it is measured twice.
        let third = [steps(12..20, 2, at(21)), steps(20..21, 3, at(21))].concat();
        let next = cut(Some(next.open), &third, &around(3, 100.0, at(21)));
        assert_eq!((next.closed.len(), next.open.from_step), (0, 22));
        let again = cut(Some(next.open.clone()), &third, &around(3, 100.0, at(22)));
        assert_eq!((again.closed.len(), again.open), (0, next.open));
    }

    #[test]
    fn without_links_nothing_is_predicted() {
        let blind = Surroundings { prediction: None, ..around(0, 1.0, at(50)) };
        let cut = cut(None, &steps(0..10, 0, at(50)), &blind);
        assert_eq!(cut.closed[0].predicted_sync_us, None);
    }

    #[test]
    fn a_job_that_starts_again_is_measured_again() {
        let open = cut(None, &steps(100..125, 1, at(1)), &around(1, 100.0, at(1))).open;
        assert_eq!(cut(Some(open), &steps(0..12, 1, at(2)), &around(1, 100.0, at(2))).closed[0].from_step, 0);
    }
}
