//! How a run followed the changes of its network.

use crate::adaptive::AdaptiveRun;
use crate::baselines::PhaseBest;
use crate::cells::Cell;
use crate::score;
use serde::{Deserialize, Serialize};

/// After all changes of the network within a run.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct Reactions {
    /// Seconds from a change to a better strategy, where there was one to be found and it came before the next change.
    pub after_s: Vec<f64>,
    /// Changes after which no better one came before the next change.
    pub missed: usize,
    /// Changes after which the strategy in force was a good one.
    pub unneeded: usize,
    /// Seconds that steps took longer in the meantime than they did, or would have, under the better one.
    pub lost_s: f64,
}

/// Step times this close to the best one's are as good.
const NEAR: f64 = 1.05;

/// Steps under one strategy in one phase.
struct Segment {
    /// Number of phases before.
    phase: usize,
    from_s: f64,
    steps: f64,
    /// At the median: trials stretch few of them.
    step_s: f64,
}

fn segments(ran: &AdaptiveRun, changes: &[f64]) -> Vec<Segment> {
    let begins = |step: usize| if step == 0 { 0.0 } else { ran.ends[step - 1] };
    let phase = |step: usize| changes.partition_point(|change| *change <= begins(step));
    let strategy = |step: usize| ran.switches.partition_point(|switch| switch.step <= step as u64);
    let steps: Vec<usize> = (0..ran.ends.len()).collect();
    let alike = |a: &usize, b: &usize| (phase(*a), strategy(*a)) == (phase(*b), strategy(*b));
    let segment = |run: &[usize]| {
        let seconds: Vec<f64> = run.iter().map(|&step| ran.ends[step] - begins(step)).collect();
        let step_s = score::quantile(&seconds, 0.5).unwrap_or(0.0);
        Segment { phase: phase(run[0]), from_s: begins(run[0]), steps: run.len() as f64, step_s }
    };
    steps.chunk_by(alike).map(segment).collect()
}

/// Reads them off a run's step times: better is a strategy whose steps take no more than 1.05 times those of the phase's best fixed
/// setting, or less by that factor than those of the strategy that was in force at the change.
pub fn of(ran: &AdaptiveRun, cell: &Cell, phases: &[PhaseBest]) -> Reactions {
    let changes = cell.changes(ran.ends.last().copied().unwrap_or(0.0));
    let mut all = Reactions::default();
    for segments in segments(ran, &changes).chunk_by(|a, b| a.phase == b.phase).filter(|segments| segments[0].phase > 0)
    {
        let (first, changed) = (&segments[0], changes[segments[0].phase - 1]);
        let Some(best) = phases.get(first.phase % phases.len().max(1)) else { continue };
        if first.step_s <= NEAR * best.step_s {
            all.unneeded += 1;
            continue;
        }
        let better = |segment: &Segment| segment.step_s <= NEAR * best.step_s || segment.step_s * NEAR <= first.step_s;
        let found = segments.iter().position(better);
        let (until, then_s) = found.map_or((segments.len(), best.step_s), |at| (at, segments[at].step_s));
        all.lost_s +=
            segments[..until].iter().map(|segment| segment.steps * (segment.step_s - then_s).max(0.0)).sum::<f64>();
        match found {
            Some(at) => all.after_s.push(segments[at].from_s - changed),
            // One that the run did not see to its end might have been answered.
            None => all.missed += usize::from(changes.get(first.phase).is_some_and(|end| ran.ends.last() >= Some(end))),
        }
    }
    all
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::adaptive::Switch;
    use crate::families;

    /// Phases of 10 s. Steps take 1 s at first; after the first change 2 s until a switch to 0.5 s; after the second one 0.5 s, which
    /// is the best; after the third 2 s with nothing done, and the run ends so after the fourth.
    #[test]
    fn reactions_are_read_off_step_times() {
        let mut cell = families::drawn()[0].clone();
        cell.phases.iter_mut().for_each(|phase| phase.seconds = 10.0);
        let steps = [1.0; 10].into_iter().chain([2.0; 3]).chain([0.5; 8]).chain([0.5; 20]).chain([2.0; 7]);
        let ends: Vec<f64> = steps
            .scan(0.0, |at, seconds| {
                Some({
                    *at += seconds;
                    *at
                })
            })
            .collect();
        let switch = Switch { step: 13, at_s: 16.0, version: 1, strategy: "x".into() };
        let ran = AdaptiveRun { ends, switches: vec![switch], ..AdaptiveRun::default() };
        let phases: Vec<PhaseBest> = (0..4).map(|_| PhaseBest { setting: "x".into(), step_s: 0.5 }).collect();
        let reactions = of(&ran, &cell, &phases);
        assert_eq!(reactions.after_s, [6.0]);
        assert_eq!((reactions.unneeded, reactions.missed), (1, 1));
        assert!((reactions.lost_s - (3.0 * 1.5 + 7.0 * 1.5)).abs() < 1e-9, "{reactions:?}");
        // Two of the slow steps are over by then, and the switch is not seen.
        let lost_s = of(&ran.until(14.5), &cell, &phases).lost_s;
        assert!((lost_s - 2.0 * 1.5).abs() < 1e-9, "{lost_s}");
    }
}
