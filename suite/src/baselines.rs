//! What flexcomm is compared with in a cell: fixed settings, an oracle and chance; and how a run counts.

use crate::adaptive::{Experiments, RatedPrediction, Switch, TimedOrder};
use crate::cells::{Cell, Chance};
use crate::fixed::{self, Curves, DENSE, rounded};
use crate::reaction::Reactions;
use crate::score::{self, Point};
use anyhow::{Context, Result};
use flexcomm_domain::Strategy;
use flexcomm_truth::coefficients::Coefficients;
use rand::Rng;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;

/// Losses over time.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct Line {
    /// Seconds since the start, of every [`fixed::TEST_EVERY`]th step, the first before any.
    pub at_s: Vec<f64>,
    /// Test losses, smoothed.
    pub losses: Vec<f64>,
}

/// What a run took to the target.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) struct Reached {
    pub(crate) steps: f64,
    pub(crate) seconds: f64,
}

/// A run: when its steps ended, and what it learned.
pub(crate) struct Course<'a> {
    ends: &'a [f64],
    pub(crate) curve: Vec<Point>,
}

impl<'a> Course<'a> {
    pub(crate) fn new(ends: &'a [f64], losses: &[f64]) -> Self {
        Self { ends, curve: score::smooth(&fixed::points(losses)) }
    }

    pub(crate) fn reached(&self, target: f64) -> Option<Reached> {
        let steps = score::steps_to(&self.curve, target)?;
        Some(Reached { steps, seconds: score::seconds_at(self.ends, steps)? })
    }

    pub(crate) fn line(&self) -> Line {
        let at =
            |point: &Point| Some((rounded(score::seconds_at(self.ends, point.steps as f64)?), rounded(point.loss)));
        // JSON has no infinity.
        let (at_s, losses) = self.curve.iter().filter(|point| point.loss.is_finite()).map_while(at).unzip();
        Line { at_s, losses }
    }
}

/// What a seed's runs are measured by.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Measure {
    /// Of the runs.
    pub seed: u64,
    /// The test loss that dense has reached, smoothed, at 90 % of its budget.
    pub target: f64,
    /// Seconds that dense takes for its budget of steps.
    pub budget_s: f64,
}

/// Dense's budget, as a share of a run's steps: others, which may need three times as many, still come to the target within the run.
pub const BUDGET_SHARE: f64 = 1.0 / 3.0;

/// Of dense's budget, where its loss is the target.
pub const TARGET_SHARE: f64 = 0.9 * BUDGET_SHARE;

/// How often the budget a run counts that does not reach the target, ends with an error or is missing.
pub const UNREACHED: f64 = 3.0;

/// A fixed setting with a seed.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct FixedRun {
    /// The strategy.
    pub setting: String,
    /// Of the run.
    pub seed: u64,
    /// To the target; none where it is not reached.
    pub steps: Option<f64>,
    /// The same, in seconds.
    pub seconds: Option<f64>,
    /// At the end.
    pub accuracy: f64,
}

/// A run that adapted, as it is kept.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct Adapted {
    /// Of the run.
    pub seed: u64,
    /// Why it has no result.
    pub error: Option<String>,
    /// To the target; none where it is not reached.
    pub steps: Option<f64>,
    /// The same, in seconds.
    pub seconds: Option<f64>,
    /// At the end.
    pub accuracy: Option<f64>,
    /// What it learned when.
    pub line: Line,
    /// Strategies that came into force.
    pub switches: Vec<Switch>,
    /// What was spent to find out.
    pub experiments: Experiments,
    /// What decisions promised against what came.
    pub predictions: Vec<RatedPrediction>,
    /// How it followed the network's changes.
    pub reactions: Reactions,
    /// To the target, or to what counts where it is not reached.
    #[serde(default)]
    pub lost: Lost,
    /// Requests, reports and parts of orders that were refused, with the reasons.
    #[serde(default)]
    pub problems: Vec<String>,
}

/// Seconds that a run lost before its end as it counts.
#[derive(Debug, Clone, Copy, Default, PartialEq, Serialize, Deserialize)]
pub struct Lost {
    /// See [`Reactions::lost_s`].
    pub waiting_s: f64,
    /// By live trials and shadow trials.
    pub exploring_s: f64,
}

/// The fixed settings in a phase.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct PhaseBest {
    /// The one that gets to the target soonest if the phase lasts.
    pub setting: String,
    /// Seconds of its steps.
    pub step_s: f64,
}

/// What does not hang on the binary that decides: fixed settings and controls in a cell.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct Baselines {
    /// Of the cell, the truth and the curves of `seeds`.
    pub digest: String,
    /// Those that settings are chosen by; further ones only narrow intervals.
    pub seeds: Vec<u64>,
    /// One for each seed.
    pub measures: Vec<Measure>,
    /// Settings by seeds.
    pub fixed: Vec<FixedRun>,
    /// One for each phase of the cell.
    pub phases: Vec<PhaseBest>,
    /// Dense and the best fixed setting with the first seed.
    pub lines: BTreeMap<String, Line>,
    /// Runs of an oracle.
    pub oracle: Vec<Adapted>,
    /// Runs by chance.
    pub random: Vec<Adapted>,
    /// Runs of the planner that all others are compared with.
    #[serde(default)]
    pub recorded_planner: Option<RecordedPlanner>,
}

/// Flexcomm's runs in a cell by the program of one commit.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct RecordedPlanner {
    /// Whose planner decided.
    pub commit: String,
    /// Of the program.
    pub binary: String,
    /// One for each seed.
    pub runs: Vec<Adapted>,
}

/// Everything of a cell.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Record {
    /// Of the cell's file.
    pub name: String,
    /// The cell.
    pub cell: Cell,
    /// Runs that the summary is of.
    pub seeds: Vec<u64>,
    /// What flexcomm is compared with.
    pub baselines: Baselines,
    /// Of the program whose decisions `flexcomm` shows.
    pub binary: String,
    /// Runs of agents and controller.
    pub flexcomm: Vec<Adapted>,
    /// Why the cell could not be run to its end; not kept.
    #[serde(skip)]
    pub error: Option<String>,
}

/// What a setting's final accuracy may be below dense's to count as a best one: half a point, and what rounding makes of it.
pub const ACCURACY_POINTS: f64 = 0.005 + 1e-9;

impl Baselines {
    /// What a seed's runs are measured by.
    pub fn measure(&self, seed: u64) -> Option<&Measure> {
        self.measures.iter().find(|measure| measure.seed == seed)
    }

    /// Seconds as they count: three times the budget at most, and without any. None for a seed that nothing is known of.
    pub fn counted(&self, seed: u64, seconds: Option<f64>) -> Option<f64> {
        let most = UNREACHED * self.measure(seed)?.budget_s;
        Some(seconds.map_or(most, |seconds| seconds.min(most)))
    }

    /// Runs of the recorded planner; none where none is recorded.
    pub fn recorded(&self) -> &[Adapted] {
        self.recorded_planner.as_ref().map_or(&[], |planner| &planner.runs)
    }

    /// A fixed setting's run.
    pub fn fixed(&self, setting: &str, seed: u64) -> Option<&FixedRun> {
        self.fixed.iter().find(|run| run.setting == setting && run.seed == seed)
    }

    /// Its seconds as they count.
    pub fn fixed_seconds(&self, setting: &str, seed: u64) -> Option<f64> {
        self.counted(seed, self.fixed(setting, seed)?.seconds)
    }

    /// All that ran, in the order of the list of settings.
    pub fn settings(&self) -> Vec<&str> {
        let first = self.seeds.first();
        self.fixed.iter().filter(|run| Some(&run.seed) == first).map(|run| run.setting.as_str()).collect()
    }

    fn accuracy(&self, setting: &str) -> Option<f64> {
        let runs = self.seeds.iter().map(|seed| Some(self.fixed(setting, *seed)?.accuracy));
        let all: Vec<f64> = runs.collect::<Option<_>>()?;
        Some(all.iter().sum::<f64>() / all.len() as f64)
    }

    /// Settings whose final accuracy is within half a point of dense's, or above it, in the mean over the seeds.
    fn accurate(&self) -> Vec<&str> {
        let accurate = |setting: &&str| self.accuracy_over_dense(setting).is_some_and(|over| over >= -ACCURACY_POINTS);
        self.settings().into_iter().filter(accurate).collect()
    }

    /// By how much its final accuracy is above dense's, in the mean over the seeds.
    pub fn accuracy_over_dense(&self, setting: &str) -> Option<f64> {
        Some(self.accuracy(setting)? - self.accuracy(DENSE)?)
    }

    /// Of those the one with the least seconds in the geometric mean over the seeds.
    pub fn best_fixed(&self) -> Option<&str> {
        let timed = self.accurate().into_iter().filter_map(|setting| Some((self.mean_seconds(setting)?, setting)));
        timed.min_by(|a, b| a.0.total_cmp(&b.0)).map(|(_, setting)| setting)
    }

    /// Seconds of the best fixed setting with a seed, as they count; the least of those that are known, where some are missing.
    pub fn best_seconds(&self, seed: u64) -> Option<f64> {
        if let Some(best) = self.best_fixed() {
            return self.fixed_seconds(best, seed);
        }
        let least = self.fixed(DENSE, seed)?.accuracy - ACCURACY_POINTS;
        let known = self.fixed.iter().filter(|run| run.seed == seed && run.accuracy >= least);
        known.filter_map(|run| self.counted(seed, run.seconds)).min_by(f64::total_cmp)
    }

    /// Seconds as they count, in the geometric mean over the seeds.
    pub fn mean_seconds(&self, setting: &str) -> Option<f64> {
        let seconds: Option<Vec<f64>> = self.seeds.iter().map(|seed| self.fixed_seconds(setting, *seed)).collect();
        score::geometric_mean(seconds?)
    }

    /// The loss that a seed's runs are to reach.
    pub(crate) fn target(&self, seed: u64) -> Result<f64> {
        Ok(self.measure(seed).context("dense comes first")?.target)
    }

    /// Seconds after which a seed's run counts as one that does not reach the target: until then controls follow the network.
    pub(crate) fn counts_until(&self, seed: u64) -> Result<f64> {
        Ok(UNREACHED * self.measure(seed).context("dense comes first")?.budget_s)
    }

    /// Steps that a setting takes to the target over dense's, in the geometric mean over the seeds; none where one does not get there.
    fn more_steps(&self, setting: &str) -> Option<f64> {
        let ratio = |seed: &u64| Some(self.fixed(setting, *seed)?.steps? / self.fixed(DENSE, *seed)?.steps?);
        score::geometric_mean(self.seeds.iter().map(ratio).collect::<Option<Vec<f64>>>()?)
    }

    pub(crate) fn add_fixed(
        &mut self,
        cell: &Cell,
        truth: &Coefficients,
        curves: &Curves,
        setting: &str,
    ) -> Result<()> {
        let seed = curves.recipe.seed;
        if self.fixed(setting, seed).is_some() {
            return Ok(());
        }
        let curve = curves.of(setting)?;
        let smooth = score::smooth(&fixed::points(&curve.losses));
        // What comes after the last step that counts is not played.
        let until = |steps: f64| {
            let played = Cell { steps: (steps.ceil() as u64).clamp(1, cell.steps), ..cell.clone() };
            score::seconds_at(&fixed::replay(&played, truth, seed, curve)?, steps).context("a replay ended early")
        };
        if setting == DENSE {
            let target = score::target(&smooth, TARGET_SHARE).context("dense has no losses")?;
            let budget_s = until(cell.steps as f64 * BUDGET_SHARE)?;
            self.measures.push(Measure { seed, target, budget_s });
        }
        let steps = score::steps_to(&smooth, self.target(seed)?);
        let seconds = steps.map(until).transpose()?;
        self.fixed.push(FixedRun { setting: setting.to_owned(), seed, steps, seconds, accuracy: curve.accuracy });
        Ok(())
    }

    /// What dense and the best fixed setting learn when, with the first seed.
    pub(crate) fn add_lines(&mut self, cell: &Cell, truth: &Coefficients, curves: &Curves) -> Result<()> {
        let best = self.best_fixed().context("no fixed setting ran")?.to_owned();
        self.lines.retain(|setting, _| *setting == best || setting == DENSE);
        for setting in [DENSE, &best] {
            if !self.lines.contains_key(setting) {
                let curve = curves.of(setting)?;
                let ends = fixed::replay(cell, truth, curves.recipe.seed, curve)?;
                self.lines.insert(setting.to_owned(), Course::new(&ends, &curve.losses).line());
            }
        }
        Ok(())
    }

    /// The best fixed setting of each phase, by the steps that the network lets it make and those that it needs.
    pub(crate) fn add_phases(&mut self, cell: &Cell, truth: &Coefficients, curves: &Curves) -> Result<()> {
        for phase in &cell.phases[self.phases.len()..] {
            let mut best: Option<(f64, PhaseBest)> = None;
            for setting in self.accurate() {
                let Some(more) = self.more_steps(setting) else { continue };
                let step_s = fixed::step_in_phase(cell, phase, truth, curves.recipe.seed, curves.of(setting)?)?;
                if best.as_ref().is_none_or(|(least, _)| step_s * more < *least) {
                    best = Some((step_s * more, PhaseBest { setting: setting.to_owned(), step_s }));
                }
            }
            self.phases.push(best.context("no fixed setting reaches the target")?.1);
        }
        Ok(())
    }
}

/// What the oracle orders up to a moment: the best of each phase, where it is another than before.
pub(crate) fn oracle_script(cell: &Cell, phases: &[PhaseBest], until: f64) -> Result<Vec<TimedOrder>> {
    let mut script = Vec::<TimedOrder>::new();
    for (at_s, phase) in [0.0].into_iter().chain(cell.changes(until)).zip(phases.iter().cycle()) {
        let strategy: Strategy = phase.setting.parse().with_context(|| format!("read {}", phase.setting))?;
        if script.last().is_none_or(|last| last.strategy != strategy) {
            script.push(TimedOrder { at_s, strategy });
        }
    }
    Ok(script)
}

/// Any fixed setting at each change up to a moment.
pub(crate) fn random_script(cell: &Cell, seed: u64, until: f64) -> Vec<TimedOrder> {
    let mut rng = cell.rng(seed, Chance::Control);
    let settings = fixed::settings(cell.momentum);
    let any = |at_s| TimedOrder { at_s, strategy: settings[rng.random_range(0..settings.len())].1 };
    [0.0].into_iter().chain(cell.changes(until)).map(any).collect()
}
