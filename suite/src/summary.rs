//! What all cells say together: `summary.json`.

use crate::adaptive::Experiments;
use crate::baselines::{Adapted, Record};
use crate::fixed::{self, DENSE};
use crate::score::{self, Families, Interval};
use serde::{Deserialize, Serialize};
use std::collections::{BTreeMap, BTreeSet};

/// Who is compared with fixed settings.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Who {
    /// Agents and controller.
    Flexcomm,
    /// The best of each phase, two steps after the change.
    Oracle,
    /// Any fixed setting at each change.
    Random,
    /// One setting for all cells.
    BestAverageFixed,
    /// The planner whose runs are kept with the baselines.
    RecordedPlanner,
}

impl Who {
    /// In the order of the table.
    pub const ALL: [Self; 5] =
        [Self::Flexcomm, Self::Oracle, Self::Random, Self::BestAverageFixed, Self::RecordedPlanner];

    /// In the table and in plots.
    pub fn name(self) -> &'static str {
        match self {
            Self::Flexcomm => "flexcomm",
            Self::Oracle => "oracle",
            Self::Random => "random",
            Self::BestAverageFixed => "best average fixed",
            Self::RecordedPlanner => "recorded planner",
        }
    }
}

/// What times are divided by.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Over {
    /// The best fixed setting of each cell.
    BestFixed,
    /// Dense.
    Dense,
    /// The oracle.
    Oracle,
}

/// A run.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Row {
    /// Name of the cell.
    pub cell: String,
    /// `flexcomm`, `oracle`, `random`, or a fixed setting's strategy.
    pub setting: String,
    /// Of the run.
    pub seed: u64,
    /// As they count: three times the budget for a run that does not reach the target.
    pub seconds_to_target: f64,
    /// Whether it does.
    pub reached: bool,
    /// Share of held-out images that is recognised; none of a run that ended with an error.
    pub final_accuracy: Option<f64>,
    /// Of seconds to the target, with the same seed; that and those below.
    pub ratio_to_best_fixed: Option<f64>,
    /// The same, to dense.
    pub ratio_to_dense: Option<f64>,
    /// The same, to the oracle.
    pub ratio_to_oracle: Option<f64>,
    /// Of live trials.
    pub experiment_seconds: f64,
    /// Why there is no result.
    pub error: Option<String>,
}

/// Times of one over times of another.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Compared {
    /// Whose.
    pub who: Who,
    /// Over whose.
    pub over: Over,
    /// Over families of the geometric mean over their cells.
    pub geomean: f64,
    /// Of it, 95 %.
    pub interval: Interval,
    /// Of cells.
    pub p95: f64,
    /// Of cells.
    pub worst: f64,
    /// Which that is.
    pub worst_cell: String,
}

/// Cells that are alike in something, against their best fixed settings.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Group {
    /// In what.
    pub name: String,
    /// How many.
    pub cells: usize,
    /// Of each.
    pub compared: Vec<Compared>,
}

/// Of several values.
#[derive(Debug, Clone, Copy, Default, PartialEq, Serialize, Deserialize)]
pub struct Spread {
    /// None of no values.
    pub median: Option<f64>,
    /// 95 % are below it.
    pub p95: Option<f64>,
}

impl Spread {
    fn of(values: &[f64]) -> Self {
        Self { median: score::quantile(values, 0.5), p95: score::quantile(values, 0.95) }
    }
}

/// What flexcomm's runs spent to find out.
#[derive(Debug, Clone, Copy, Default, PartialEq, Serialize, Deserialize)]
pub struct Spent {
    /// In the mean of the runs.
    pub mean: Experiments,
    /// Seconds of live trials over the run's.
    pub share_of_time: Spread,
}

/// How fast flexcomm's runs follow changes of the network.
#[derive(Debug, Clone, Copy, Default, PartialEq, Serialize, Deserialize)]
pub struct Reaction {
    /// Seconds from a change to a better strategy.
    pub seconds: Spread,
    /// The same, over the length of the cell's phases.
    pub share_of_phase: Spread,
    /// Changes after which one came.
    pub made: usize,
    /// Changes after which none came, though there was one.
    pub missed: usize,
    /// Changes that asked for none.
    pub unneeded: usize,
}

/// Where most of the time over the oracle's goes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Cause {
    /// Steps under a worse strategy after changes of the network.
    Waiting,
    /// Live trials.
    Exploring,
    /// More steps than the oracle: what compression costs in learning was taken for less.
    WrongGain,
    /// Slower steps, whose synchronisation was predicted wrong by 30 % and more at the median.
    WrongLink,
    /// Slower steps, though their synchronisation was predicted well.
    WrongCost,
}

impl Cause {
    pub(crate) fn text(self) -> &'static str {
        match self {
            Self::Waiting => "waiting",
            Self::Exploring => "exploring",
            Self::WrongGain => "wrong gain",
            Self::WrongLink => "wrong link",
            Self::WrongCost => "wrong cost",
        }
    }
}

/// A cell in which flexcomm loses most.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Worst {
    /// Its name.
    pub cell: String,
    /// To the best fixed setting.
    pub ratio: f64,
    /// Why, where the runs tell.
    pub cause: Option<Cause>,
    /// Of the time over the oracle's.
    pub share: Option<f64>,
    /// Runs with an error.
    pub errors: usize,
}

/// All of it.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Summary {
    /// Of cells and truth.
    pub digest: String,
    /// Whether they are the frozen ones.
    pub frozen: bool,
    /// Of the program whose decisions these are.
    pub binary: String,
    /// Runs.
    pub cells: Vec<Row>,
    /// Fixed setting: flexcomm's time over its.
    pub geomean_vs_fixed: BTreeMap<String, f64>,
    /// Of cells whose phases last for 60 s and more.
    pub worst_ratio_to_best_fixed_60s: Option<f64>,
    /// Predicted over true t_sync, how far from 1.
    pub prediction_error: Spread,
    /// The one setting that is best over all cells.
    pub best_average_fixed: Option<String>,
    /// Everyone against the best fixed settings, dense and the oracle.
    pub compared: Vec<Compared>,
    /// By family.
    pub by_family: Vec<Group>,
    /// By length of phases.
    pub by_phase: Vec<Group>,
    /// By ratio of communication to computing.
    pub by_ratio: Vec<Group>,
    /// Where flexcomm loses most.
    pub worst: Vec<Worst>,
    /// What experiments took.
    pub experiments: Spent,
    /// From changes to better strategies.
    pub reaction: Reaction,
    /// Flexcomm's runs that do not reach the target, those with errors among them.
    pub unreached: usize,
    /// Flexcomm's runs that ended with an error.
    pub errors: usize,
    /// Cells without a result.
    pub failed: Vec<String>,
}

/// What a summary is of, besides its records.
#[derive(Debug, Clone, PartialEq)]
pub struct Of {
    /// Of cells and truth.
    pub digest: String,
    /// Whether they are the frozen ones.
    pub frozen: bool,
    /// Of the deciding program.
    pub binary: String,
    /// Cells without a result.
    pub failed: Vec<String>,
}

struct View<'a> {
    records: &'a [Record],
    best_average: Option<String>,
}

impl View<'_> {
    /// Seconds as they count.
    fn seconds(&self, record: &Record, who: Who, seed: u64) -> Option<f64> {
        let baselines = &record.baselines;
        match who {
            Who::Flexcomm => record.seconds(&record.flexcomm, seed),
            Who::Oracle => record.seconds(&baselines.oracle, seed),
            // Has no run with seeds that were added for a narrower interval.
            Who::Random if !baselines.seeds.contains(&seed) => None,
            Who::Random => record.seconds(&baselines.random, seed),
            Who::BestAverageFixed => baselines.fixed_seconds(&of_label(record, self.best_average.as_ref()?)?, seed),
            Who::RecordedPlanner => {
                let run = baselines.recorded.iter().find(|run| run.seed == seed)?;
                baselines.counted(seed, run.seconds)
            }
        }
    }

    fn over(&self, record: &Record, over: Over, seed: u64) -> Option<f64> {
        match over {
            Over::BestFixed => record.baselines.fixed_seconds(record.baselines.best_fixed()?, seed),
            Over::Dense => record.baselines.fixed_seconds(DENSE, seed),
            Over::Oracle => self.seconds(record, Who::Oracle, seed),
        }
    }

    /// By seed.
    fn ratios(&self, record: &Record, who: Who, over: Over) -> Vec<f64> {
        let ratio = |seed: &u64| Some(self.seconds(record, who, *seed)? / self.over(record, over, *seed)?);
        record.seeds.iter().filter_map(ratio).collect()
    }

    fn ratio(&self, record: &Record, who: Who, over: Over) -> Option<f64> {
        score::geometric_mean(self.ratios(record, who, over))
    }

    fn compared(&self, who: Who, over: Over, keep: impl Fn(&Record) -> bool) -> Option<Compared> {
        let kept: Vec<&Record> = self.records.iter().filter(|record| keep(record)).collect();
        let families = families(&kept, |record| self.ratios(record, who, over));
        let mut cells: Vec<(f64, &str)> =
            kept.iter().filter_map(|record| Some((self.ratio(record, who, over)?, record.name.as_str()))).collect();
        cells.sort_by(|a, b| a.0.total_cmp(&b.0));
        let (worst, worst_cell) = *cells.last()?;
        let ratios: Vec<f64> = cells.iter().map(|(ratio, _)| *ratio).collect();
        Some(Compared {
            who,
            over,
            geomean: score::mean_of_families(&families)?,
            interval: score::bootstrap(&families, 1)?,
            p95: score::quantile(&ratios, 0.95)?,
            worst,
            worst_cell: worst_cell.to_owned(),
        })
    }

    /// Cells by what they are alike in, in the order of its key.
    fn groups<K: Ord>(&self, key: impl Fn(&Record) -> K, name: impl Fn(&K) -> String) -> Vec<Group> {
        let keys: BTreeSet<K> = self.records.iter().map(&key).collect();
        let group = |wanted: &K| Group {
            name: name(wanted),
            cells: self.records.iter().filter(|record| key(record) == *wanted).count(),
            compared: Who::ALL
                .into_iter()
                .filter_map(|who| self.compared(who, Over::BestFixed, |record| key(record) == *wanted))
                .collect(),
        };
        keys.iter().map(group).collect()
    }

    fn rows(&self, record: &Record) -> Vec<Row> {
        let baselines = &record.baselines;
        let row = |setting: &str, seed: u64, seconds: Option<f64>, adapted: Option<&Adapted>| {
            let counted = baselines.counted(seed, seconds)?;
            let ratio = |over| Some(counted / self.over(record, over, seed)?);
            Some(Row {
                cell: record.name.clone(),
                setting: setting.to_owned(),
                seed,
                seconds_to_target: counted,
                reached: seconds.is_some(),
                final_accuracy: adapted.map_or(baselines.fixed(setting, seed).map(|f| f.accuracy), |run| run.accuracy),
                ratio_to_best_fixed: ratio(Over::BestFixed),
                ratio_to_dense: ratio(Over::Dense),
                ratio_to_oracle: ratio(Over::Oracle),
                experiment_seconds: adapted.map_or(0.0, |run| run.experiments.seconds),
                error: adapted.and_then(|run| run.error.clone()),
            })
        };
        let missing = Adapted { error: Some("missing".into()), ..Adapted::default() };
        let mut rows = Vec::new();
        for (who, runs) in [
            ("flexcomm", &record.flexcomm),
            ("oracle", &baselines.oracle),
            ("random", &baselines.random),
            ("recorded planner", &baselines.recorded),
        ] {
            for seed in &record.seeds {
                let run = runs.iter().find(|run| run.seed == *seed);
                // Controls may have fewer seeds.
                let run = if who == "flexcomm" { run.or(Some(&missing)) } else { run };
                rows.extend(run.and_then(|run| row(who, *seed, run.seconds, Some(run))));
            }
        }
        let wanted = baselines.fixed.iter().filter(|run| record.seeds.contains(&run.seed));
        rows.extend(wanted.filter_map(|run| row(&run.setting, run.seed, run.seconds, None)));
        rows
    }

    /// Why a cell's runs take longer than the oracle's, and how much of that one cause is.
    fn cause(&self, record: &Record) -> Option<(Cause, f64)> {
        let mut causes: BTreeMap<Cause, f64> = BTreeMap::new();
        let mut lost = 0.0;
        let error = Spread::of(&prediction_errors(&record.flexcomm)).median;
        for run in &record.flexcomm {
            let oracle = record.baselines.oracle.iter().find(|oracle| oracle.seed == run.seed)?;
            let (seconds, best) = (self.seconds(record, Who::Flexcomm, run.seed)?, oracle.seconds?);
            lost += seconds - best;
            let more_steps = run.steps.zip(oracle.steps).map_or(0.0, |(own, best)| (own - best).max(0.0));
            let known = [
                (Cause::Waiting, run.reactions.lost_s),
                (Cause::Exploring, run.experiments.seconds),
                (Cause::WrongGain, more_steps * best / oracle.steps?),
            ];
            let slower = seconds - best - known.iter().map(|(_, seconds)| seconds).sum::<f64>();
            known.into_iter().for_each(|(cause, seconds)| *causes.entry(cause).or_default() += seconds);
            // What is left are slower steps, if the target was reached at all.
            if let (Some(_), Some(error)) = (run.seconds, error) {
                let cause = if error >= 0.3 { Cause::WrongLink } else { Cause::WrongCost };
                *causes.entry(cause).or_default() += slower.max(0.0);
            }
        }
        let (cause, seconds) = causes.into_iter().max_by(|a, b| a.1.total_cmp(&b.1))?;
        (lost > 0.0 && seconds > 0.0).then(|| (cause, (seconds / lost).min(1.0)))
    }
}

/// The strategy of a label in a cell.
fn of_label(record: &Record, label: &str) -> Option<String> {
    record.baselines.settings().into_iter().find(|setting| fixed::label(setting) == label).map(str::to_owned)
}

fn families(records: &[&Record], ratios: impl Fn(&Record) -> Vec<f64>) -> Families {
    let mut families: BTreeMap<&str, Vec<Vec<f64>>> = BTreeMap::new();
    for record in records {
        families.entry(&record.cell.family).or_default().push(ratios(record));
    }
    families.into_values().collect()
}

fn prediction_errors(runs: &[Adapted]) -> Vec<f64> {
    let predictions = runs.iter().flat_map(|run| &run.predictions).filter(|p| p.true_s > 0.0);
    predictions.map(|p| (p.predicted_s / p.true_s - 1.0).abs()).collect()
}

/// Labels of the fixed settings that ran in all cells, in the order of the first.
fn labels(records: &[Record]) -> Vec<String> {
    let Some(first) = records.first() else { return Vec::new() };
    let all = first.baselines.settings().into_iter().map(fixed::label);
    all.filter(|label| records.iter().all(|record| of_label(record, label).is_some())).collect()
}

/// One setting for all cells: the least time over dense's, of those whose final accuracy is within half a point of dense's in the mean.
fn best_average(records: &[Record]) -> Option<String> {
    let all: Vec<&Record> = records.iter().collect();
    let time = |label: &str| {
        let ratios = |record: &Record| {
            let Some(setting) = of_label(record, label) else { return Vec::new() };
            let baselines = &record.baselines;
            let seconds = |setting: &str, seed| baselines.fixed_seconds(setting, seed);
            let ratio = |seed: &u64| Some(seconds(&setting, *seed)? / seconds(DENSE, *seed)?);
            baselines.seeds.iter().filter_map(ratio).collect()
        };
        score::mean_of_families(&families(&all, ratios))
    };
    let accurate = |label: &String| {
        let differences =
            records.iter().filter_map(|record| record.baselines.accuracy_over_dense(&of_label(record, label)?));
        differences.clone().sum::<f64>() >= -crate::baselines::ACCURACY_POINTS * differences.count() as f64
    };
    let timed = labels(records).into_iter().filter(accurate).filter_map(|label| Some((time(&label)?, label)));
    timed.min_by(|a, b| a.0.total_cmp(&b.0)).map(|(_, label)| label)
}

/// A number's band, by the upper ends of all but the last.
fn band(value: f64, ends: &[f64]) -> usize {
    ends.partition_point(|end| *end <= value)
}

impl Summary {
    /// Of the records of all cells.
    pub fn new(records: &[Record], of: Of) -> Self {
        let view = View { records, best_average: best_average(records) };
        let runs = || records.iter().flat_map(|record| &record.flexcomm);
        let all: Vec<&Record> = records.iter().collect();
        let against = |label: String| {
            let ratios = |record: &Record| {
                of_label(record, &label).map_or(Vec::new(), |setting| record.ratios(&record.flexcomm, &setting))
            };
            Some((label.clone(), score::mean_of_families(&families(&all, ratios))?))
        };
        let every: BTreeSet<String> =
            records.iter().flat_map(|record| record.baselines.settings()).map(fixed::label).collect();
        let flexcomm = |record: &Record| view.ratio(record, Who::Flexcomm, Over::BestFixed);
        let worst_60 = records.iter().filter(|record| record.cell.phase_s >= 60.0).filter_map(flexcomm);
        let mut worst: Vec<Worst> = records.iter().filter_map(|record| worst_of(&view, record)).collect();
        worst.sort_by(|a, b| b.ratio.total_cmp(&a.ratio));
        worst.truncate(8);
        let pairs =
            Who::ALL.iter().flat_map(|who| [Over::BestFixed, Over::Dense, Over::Oracle].map(|over| (*who, over)));
        Self {
            digest: of.digest,
            frozen: of.frozen,
            binary: of.binary,
            cells: records.iter().flat_map(|record| view.rows(record)).collect(),
            geomean_vs_fixed: every.into_iter().filter_map(against).collect(),
            worst_ratio_to_best_fixed_60s: worst_60.reduce(f64::max),
            prediction_error: Spread::of(
                &records.iter().flat_map(|r| prediction_errors(&r.flexcomm)).collect::<Vec<_>>(),
            ),
            compared: pairs.filter_map(|(who, over)| view.compared(who, over, |_| true)).collect(),
            by_family: view.groups(|record| record.cell.family.clone(), String::clone),
            by_phase: view.groups(|record| band(record.cell.phase_s, &PHASE_ENDS), |band| PHASE_BANDS[*band].into()),
            by_ratio: view
                .groups(|record| band(record.cell.communication_ratio, &RATIO_ENDS), |band| RATIO_BANDS[*band].into()),
            worst,
            experiments: spent(records),
            reaction: reaction(records),
            unreached: runs().filter(|run| run.seconds.is_none()).count(),
            errors: runs().filter(|run| run.error.is_some()).count(),
            failed: of.failed,
            best_average_fixed: view.best_average,
        }
    }

    /// What is compared of one with another.
    pub fn of(&self, who: Who, over: Over) -> Option<&Compared> {
        self.compared.iter().find(|compared| (compared.who, compared.over) == (who, over))
    }
}

const PHASE_ENDS: [f64; 3] = [30.0, 120.0, 720.0];
const PHASE_BANDS: [&str; 4] = ["below 30 s", "30 s to 2 min", "2 to 12 min", "12 min and more"];
const RATIO_ENDS: [f64; 4] = [0.3, 1.0, 3.0, 10.0];
const RATIO_BANDS: [&str; 5] = ["below 0.3", "0.3 to 1", "1 to 3", "3 to 10", "10 and more"];

fn worst_of(view: &View<'_>, record: &Record) -> Option<Worst> {
    let ratio = view.ratio(record, Who::Flexcomm, Over::BestFixed)?;
    let (cause, share) = view.cause(record).unzip();
    let errors = record.flexcomm.iter().filter(|run| run.error.is_some()).count();
    Some(Worst { cell: record.name.clone(), ratio, cause, share, errors })
}

fn spent(records: &[Record]) -> Spent {
    let runs: Vec<&Adapted> =
        records.iter().flat_map(|record| &record.flexcomm).filter(|run| run.error.is_none()).collect();
    let count = runs.len().max(1) as f64;
    let mean = |of: fn(&Experiments) -> f64| runs.iter().map(|run| of(&run.experiments)).sum::<f64>() / count;
    let share = |run: &&Adapted| Some(run.experiments.seconds / run.line.at_s.last().filter(|end| **end > 0.0)?);
    let shares: Vec<f64> = runs.iter().filter_map(share).collect();
    let mean =
        Experiments { seconds: mean(|e| e.seconds), bytes: mean(|e| e.bytes), cpu_seconds: mean(|e| e.cpu_seconds) };
    Spent { mean, share_of_time: Spread::of(&shares) }
}

fn reaction(records: &[Record]) -> Reaction {
    let (mut seconds, mut shares, mut all) = (Vec::new(), Vec::new(), Reaction::default());
    for record in records {
        for run in &record.flexcomm {
            seconds.extend(&run.reactions.after_s);
            shares.extend(run.reactions.after_s.iter().map(|after| after / record.cell.phase_s));
            all.missed += run.reactions.missed;
            all.unneeded += run.reactions.unneeded;
        }
    }
    all.made = seconds.len();
    (all.seconds, all.share_of_phase) = (Spread::of(&seconds), Spread::of(&shares));
    all
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;
    use crate::baselines::{Baselines, FixedRun, Measure, PhaseBest};
    use crate::families;
    use crate::reaction::Reactions;

    const TOP_K: &str = "topk(k=0.01)+ef(vanilla)/allgather";

    fn adapted(seed: u64, seconds: Option<f64>) -> Adapted {
        let steps = seconds.map(|_| 1000.0);
        Adapted { seed, seconds, steps, accuracy: Some(0.9), ..Adapted::default() }
    }

    /// One seed; dense takes 100 s for 1,000 steps and has a budget of 110 s.
    pub(crate) fn record(name: &str, family: &str, phase_s: f64, top_k: f64, flexcomm: Option<f64>) -> Record {
        let fixed = |setting: &str, seconds: f64| FixedRun {
            setting: setting.into(),
            seed: 1,
            steps: Some(1000.0),
            seconds: Some(seconds),
            accuracy: 0.9,
        };
        let mut cell = families::drawn()[0].clone();
        (cell.family, cell.phase_s, cell.communication_ratio) = (family.into(), phase_s, 2.0);
        let baselines = Baselines {
            digest: String::new(),
            seeds: vec![1],
            measures: vec![Measure { seed: 1, target: 0.5, budget_s: 110.0 }],
            fixed: vec![fixed(DENSE, 100.0), fixed(TOP_K, top_k)],
            phases: vec![PhaseBest { setting: TOP_K.into(), step_s: 0.05 }],
            lines: BTreeMap::new(),
            oracle: vec![adapted(1, Some(40.0))],
            random: vec![adapted(1, Some(200.0))],
            recorded: Vec::new(),
        };
        let flexcomm = vec![adapted(1, flexcomm)];
        Record { name: name.into(), cell, seeds: vec![1], baselines, binary: "a".into(), flexcomm }
    }

    pub(crate) fn summary(records: &[Record]) -> Summary {
        let of = Of { digest: "d".into(), frozen: false, binary: "b".into(), failed: vec!["gone".into()] };
        Summary::new(records, of)
    }

    #[test]
    fn ratios_are_those_of_hand_made_cells() {
        let records = [
            record("a-1", "a", 10.0, 50.0, None),
            record("a-2", "a", 60.0, 50.0, Some(100.0)),
            record("b-1", "b", 300.0, 201.0, Some(50.0)),
        ];
        let summary = summary(&records);
        let near = |a: f64, b: f64| assert!((a / b - 1.0).abs() < 1e-9, "{a} is not {b}");
        // Against 50, 50 and dense's 100 s: 330/50, 100/50; and 50/100.
        let best = summary.of(Who::Flexcomm, Over::BestFixed).unwrap();
        near(best.geomean, ((6.6f64 * 2.0).sqrt() * 0.5).sqrt());
        near(best.worst, 6.6);
        assert_eq!(best.worst_cell, "a-1");
        near(summary.of(Who::Flexcomm, Over::Oracle).unwrap().geomean, ((8.25f64 * 2.5).sqrt() * 1.25).sqrt());
        near(summary.of(Who::Random, Over::Dense).unwrap().geomean, 2.0);
        near(summary.worst_ratio_to_best_fixed_60s.unwrap(), 2.0);
        // That is not a-1, which has phases of 10 s.
        near(summary.geomean_vs_fixed[DENSE], ((3.3f64 * 1.0).sqrt() * 0.5).sqrt());
        // One setting for all: top-k takes half of dense's time in a and a bit more than twice of it in b.
        assert_eq!(summary.best_average_fixed.as_deref(), Some(DENSE));
        assert_eq!((summary.unreached, summary.errors), (1, 0));
        let names = |groups: &[Group]| groups.iter().map(|g| (g.name.clone(), g.cells)).collect::<Vec<_>>();
        assert_eq!(names(&summary.by_family), [("a".into(), 2), ("b".into(), 1)]);
        assert_eq!(
            names(&summary.by_phase),
            [("below 30 s".into(), 1), ("30 s to 2 min".into(), 1), ("2 to 12 min".into(), 1)]
        );
        assert_eq!(names(&summary.by_ratio), [("1 to 3".into(), 3)]);
    }

    #[test]
    fn the_file_has_the_keys_that_its_readers_know() {
        let mut late = record("a-1", "a", 60.0, 50.0, Some(100.0));
        late.flexcomm[0].predictions = [(1.0, 2.0), (3.0, 2.0), (2.0, 2.0)]
            .map(|(predicted_s, true_s)| crate::adaptive::Prediction {
                at_s: 0.0,
                strategy: String::new(),
                predicted_s,
                true_s,
            })
            .to_vec();
        let json = serde_json::to_value(summary(&[late])).unwrap();
        let row = |key: &str| json["cells"][0][key].clone();
        assert_eq!((row("cell"), row("setting"), row("seed")), ("a-1".into(), "flexcomm".into(), 1.into()));
        assert_eq!((row("seconds_to_target"), row("final_accuracy")), (100.0.into(), 0.9.into()));
        let ratios = (row("ratio_to_best_fixed"), row("ratio_to_dense"), row("ratio_to_oracle"));
        assert_eq!(ratios, (2.0.into(), 1.0.into(), 2.5.into()));
        assert_eq!((row("experiment_seconds"), row("reached")), (0.0.into(), true.into()));
        assert_eq!(json["geomean_vs_fixed"][TOP_K].as_f64().map(|ratio| (ratio * 1e6).round()), Some(2e6));
        assert_eq!(json["worst_ratio_to_best_fixed_60s"], 2.0);
        assert_eq!(json["prediction_error"]["median"], 0.5);
        assert!((json["prediction_error"]["p95"].as_f64().unwrap() - 0.5).abs() < 1e-9);
        assert_eq!(json["cells"].as_array().unwrap().len(), 5);
    }

    #[test]
    fn a_missing_run_counts_as_unreached_and_is_told() {
        let mut gone = record("a-1", "a", 60.0, 50.0, None);
        gone.flexcomm.clear();
        let summary = summary(&[gone]);
        assert_eq!(summary.cells[0].error.as_deref(), Some("missing"));
        assert_eq!(summary.cells[0].seconds_to_target, 330.0);
        assert!((summary.worst_ratio_to_best_fixed_60s.unwrap() - 6.6).abs() < 1e-9);
    }

    #[test]
    fn causes_are_the_largest_part_of_what_is_lost() {
        let of = |change: &dyn Fn(&mut Adapted)| {
            let mut record = record("a-1", "a", 60.0, 50.0, Some(100.0));
            change(&mut record.flexcomm[0]);
            let worst = summary(&[record]).worst.remove(0);
            (worst.cause, worst.share.map(|share| (share * 60.0).round()))
        };
        // Of the 60 s more than the oracle's 40.
        let waited = |run: &mut Adapted| run.reactions = Reactions { lost_s: 45.0, ..Reactions::default() };
        assert_eq!(of(&waited), (Some(Cause::Waiting), Some(45.0)));
        assert_eq!(of(&|run| run.experiments.seconds = 31.0), (Some(Cause::Exploring), Some(31.0)));
        assert_eq!(of(&|run| run.steps = Some(2000.0)), (Some(Cause::WrongGain), Some(40.0)));
        let predicted = |predicted_s: f64| {
            move |run: &mut Adapted| {
                let strategy = String::new();
                run.predictions = vec![crate::adaptive::Prediction { at_s: 0.0, strategy, predicted_s, true_s: 1.0 }];
            }
        };
        assert_eq!(of(&predicted(0.5)).0, Some(Cause::WrongLink));
        assert_eq!(of(&predicted(1.1)).0, Some(Cause::WrongCost));
        assert_eq!(of(&|_| ()).0, None, "nothing tells");
        assert_eq!(of(&|run| run.seconds = Some(39.0)).0, None, "nothing is lost");
    }

    #[test]
    fn the_table_says_it_in_words() {
        let table =
            summary(&[record("a-1", "a", 60.0, 50.0, Some(100.0)), record("b-1", "b", 10.0, 50.0, None)]).table();
        for part in [
            "2 cells, 2 runs of flexcomm; cells and truth are NOT the frozen ones",
            "WITHOUT A RESULT: gone",
            "each cell's best fixed setting",
            "best average fixed",
            "The best average fixed setting is topk(k=0.01)",
            "30 s to 2 min",
            "target not reached               1 runs, 0 of them with an error",
            "Not in the truth",
        ] {
            assert!(table.contains(part), "no {part:?} in {table}");
        }
        assert!(table.lines().all(|line| line.chars().count() <= 150), "{table}");
    }
}
