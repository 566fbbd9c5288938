//! What all cells say together: `summary.json`.

use crate::adaptive::Experiments;
use crate::baselines::{ACCURACY_POINTS, Adapted, Record, UNREACHED};
use crate::fixed::{self, DENSE};
use crate::ranks::Model;
use crate::ratios::{View, best_average, families, of_label, prediction_errors};
use crate::score::{self, Interval};
use serde::{Deserialize, Serialize};
use std::collections::{BTreeMap, BTreeSet};

/// Who is compared with fixed settings.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Method {
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

impl Method {
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
    /// `flexcomm`, `oracle`, `random`, `recorded planner`, or a fixed setting's strategy.
    pub setting: String,
    /// Of the run.
    pub seed: u64,
    /// As they count: three times the budget for a run that does not reach the target. None of a cell that failed before its budget
    /// was known.
    pub seconds_to_target: Option<f64>,
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
    /// Of live trials, up to the target or to what counts where it is not reached.
    pub experiment_seconds: f64,
    /// Why there is no result.
    pub error: Option<String>,
}

/// Times of one over times of another.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct RatioStats {
    /// Whose.
    pub who: Method,
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
    pub compared: Vec<RatioStats>,
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
    pub(crate) fn of(values: &[f64]) -> Self {
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

/// How fast runs follow changes of the network.
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

/// Final accuracy over dense's with the same seed, of runs without an error.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct Accuracy {
    /// Whose.
    pub who: Method,
    /// Of the runs, as a share of images.
    pub median: f64,
    /// The least.
    pub worst: f64,
    /// Runs more than half a point below dense.
    pub below: usize,
    /// Runs.
    pub runs: usize,
}

/// Requests, reports and parts of orders that were refused in flexcomm's runs.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct Problems {
    /// In all runs.
    pub count: usize,
    /// In how many runs.
    pub runs: usize,
    /// The first: its cell, seed and reason.
    pub first: Option<String>,
}

/// Where most of the time over the oracle's goes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Cause {
    /// Steps under a worse strategy after changes of the network.
    Waiting,
    /// Live trials, and steps that shadow trials made longer.
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

/// Flexcomm in a cell. Ratios are of seconds to the target.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct CellRow {
    /// Its name.
    pub cell: String,
    /// Its family.
    pub family: String,
    /// N.
    pub world: usize,
    /// What is trained.
    pub model: Model,
    /// Of SGD.
    pub momentum: f32,
    /// Length of its phases.
    pub phase_s: f64,
    /// See [`crate::cells::Cell::communication_ratio`].
    pub communication_ratio: f64,
    /// None where none ran.
    pub best_fixed: Option<String>,
    /// Flexcomm's to the best fixed setting.
    pub ratio: f64,
    /// Of it, by Student's t of its seeds; none of one.
    pub interval: Option<Interval>,
    /// Flexcomm's to dense.
    pub over_dense: Option<f64>,
    /// Flexcomm's to the oracle.
    pub over_oracle: Option<f64>,
    /// The random control's to the best fixed setting.
    pub random: Option<f64>,
    /// The recorded planner's to the best fixed setting.
    pub recorded_planner: Option<f64>,
    /// Why it takes longer than the oracle, where the runs tell.
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
    /// Cells that have not run to their end and are left out.
    pub incomplete: Vec<String>,
    /// Runs.
    pub cells: Vec<Row>,
    /// Fixed setting: flexcomm's time over its.
    pub geomean_vs_fixed: BTreeMap<String, f64>,
    /// Of cells whose phases last for 60 s and more.
    pub worst_ratio_to_best_fixed_60s: Option<f64>,
    /// How far predicted and true t_sync are apart, over the smaller one: of decisions, and of what is in force after each change.
    pub prediction_error: Spread,
    /// The one setting that is best over all cells.
    pub best_average_fixed: Option<String>,
    /// Everyone against the best fixed settings, dense and the oracle.
    pub compared: Vec<RatioStats>,
    /// By family.
    pub by_family: Vec<Group>,
    /// By length of phases.
    pub by_phase: Vec<Group>,
    /// By ratio of communication to computing.
    pub by_ratio: Vec<Group>,
    /// Flexcomm in each cell, by family and name.
    pub by_cell: Vec<CellRow>,
    /// What experiments took.
    pub experiments: Spent,
    /// From changes to better strategies.
    pub reaction: Reaction,
    /// Of the oracle's runs, as the limit of what is seen of a change in steps.
    pub reaction_of_oracle: Reaction,
    /// Of flexcomm and the controls.
    pub accuracy_over_dense: Vec<Accuracy>,
    /// What was refused.
    pub problems: Problems,
    /// Flexcomm's runs that do not reach the target, those with errors among them.
    pub unreached: usize,
    /// Flexcomm's runs that ended with an error.
    pub errors: usize,
    /// Cells that could not be run to their end.
    pub failed: Vec<String>,
}

/// What a summary is of, besides its records.
#[derive(Debug, Clone, PartialEq)]
pub struct Provenance {
    /// Of cells and truth.
    pub digest: String,
    /// Whether they are the frozen ones.
    pub frozen: bool,
    /// Of the deciding program.
    pub binary: String,
    /// Cells that have not run to their end and are left out.
    pub incomplete: Vec<String>,
}

/// A number's band, by the upper ends of all but the last.
fn band(value: f64, ends: &[f64]) -> usize {
    ends.partition_point(|end| *end <= value)
}

impl Summary {
    /// Of the records of all cells.
    pub fn new(records: &[Record], provenance: Provenance) -> Self {
        let view = View { records, best_average: best_average(records) };
        let cells: Vec<Row> = records.iter().flat_map(|record| view.rows(record)).collect();
        let of_flexcomm = || cells.iter().filter(|row| row.setting == Method::Flexcomm.name());
        let all: Vec<&Record> = records.iter().collect();
        let against = |label: String| {
            let ratios = |record: &Record| {
                let known = of_label(record, &label).map(|setting| record.ratios(&record.flexcomm, &setting));
                let failed = record.error.as_ref().map(|_| vec![UNREACHED; record.seeds.len()]);
                known.or(failed).unwrap_or_default()
            };
            Some((label.clone(), score::mean_of_families(&families(&all, ratios))?))
        };
        let every: BTreeSet<String> =
            records.iter().flat_map(|record| record.baselines.settings()).map(fixed::label).collect();
        let mut by_cell: Vec<CellRow> = records.iter().filter_map(|record| cell_row(&view, record)).collect();
        by_cell.sort_by(|a, b| (&a.family, &a.cell).cmp(&(&b.family, &b.cell)));
        let pairs =
            Method::ALL.iter().flat_map(|who| [Over::BestFixed, Over::Dense, Over::Oracle].map(|over| (*who, over)));
        Self {
            digest: provenance.digest,
            frozen: provenance.frozen,
            binary: provenance.binary,
            incomplete: provenance.incomplete,
            geomean_vs_fixed: every.into_iter().filter_map(against).collect(),
            worst_ratio_to_best_fixed_60s: worst_of(&by_cell, 60.0).map(|row| row.ratio),
            prediction_error: Spread::of(&records.iter().flat_map(|r| prediction_errors(r.runs())).collect::<Vec<_>>()),
            compared: pairs.filter_map(|(who, over)| view.compared(who, over)).collect(),
            by_family: view.groups(|record| record.cell.family.clone(), String::clone),
            by_phase: view.groups(phase_band, |band| PHASE_BANDS[*band].into()),
            by_ratio: view
                .groups(|record| band(record.cell.communication_ratio, &RATIO_ENDS), |band| RATIO_BANDS[*band].into()),
            by_cell,
            experiments: spent(records),
            reaction: reaction(records, |record| &record.flexcomm),
            reaction_of_oracle: reaction(records, |record| &record.baselines.oracle),
            accuracy_over_dense: [
                accuracy(records, Method::Flexcomm, |record| &record.flexcomm),
                accuracy(records, Method::RecordedPlanner, |record| record.baselines.recorded()),
            ]
            .into_iter()
            .flatten()
            .collect(),
            problems: problems(records),
            unreached: of_flexcomm().filter(|row| !row.reached).count(),
            errors: of_flexcomm().filter(|row| row.error.is_some()).count(),
            failed: records.iter().filter(|r| r.error.is_some()).map(|r| r.name.clone()).collect(),
            cells,
            best_average_fixed: view.best_average,
        }
    }

    /// What is compared of one with another.
    pub fn of(&self, who: Method, over: Over) -> Option<&RatioStats> {
        self.compared.iter().find(|compared| (compared.who, compared.over) == (who, over))
    }

    /// The cell in which flexcomm takes longest over the best fixed setting, of those with phases of so many seconds and more.
    pub fn worst_of(&self, least_phase_s: f64) -> Option<&CellRow> {
        worst_of(&self.by_cell, least_phase_s)
    }

    /// Where flexcomm loses most.
    pub fn worst(&self) -> Vec<&CellRow> {
        let mut worst: Vec<&CellRow> = self.by_cell.iter().collect();
        worst.sort_by(|a, b| b.ratio.total_cmp(&a.ratio));
        worst.truncate(8);
        worst
    }
}

const PHASE_ENDS: [f64; 3] = [30.0, 120.0, 720.0];
pub(crate) const PHASE_BANDS: [&str; 4] = ["below 30 s", "30 s to 2 min", "2 to 12 min", "12 min and more"];
const RATIO_ENDS: [f64; 4] = [0.3, 1.0, 3.0, 10.0];
const RATIO_BANDS: [&str; 5] = ["below 0.3", "0.3 to 1", "1 to 3", "3 to 10", "10 and more"];

/// A cell's place among [`PHASE_BANDS`].
pub(crate) fn phase_band(record: &Record) -> usize {
    band(record.cell.phase_s, &PHASE_ENDS)
}

fn worst_of(rows: &[CellRow], least_phase_s: f64) -> Option<&CellRow> {
    rows.iter().filter(|row| row.phase_s >= least_phase_s).max_by(|a, b| a.ratio.total_cmp(&b.ratio))
}

fn cell_row(view: &View<'_>, record: &Record) -> Option<CellRow> {
    let (cell, best) = (&record.cell, |who| view.ratio(record, who, Over::BestFixed));
    let ratios = view.ratios(record, Method::Flexcomm, Over::BestFixed);
    let ratio = score::geometric_mean(ratios.iter().copied())?;
    let of_half = |half: f64| Interval { low: ratio * (-half).exp(), high: ratio * half.exp() };
    let (cause, share) = view.cause(record).unzip();
    Some(CellRow {
        cell: record.name.clone(),
        family: cell.family.clone(),
        world: cell.world,
        model: cell.model,
        momentum: cell.momentum,
        phase_s: cell.phase_s,
        communication_ratio: cell.communication_ratio,
        best_fixed: record.baselines.best_fixed().map(str::to_owned),
        ratio,
        interval: score::half_width(&ratios).map(of_half),
        over_dense: view.ratio(record, Method::Flexcomm, Over::Dense),
        over_oracle: view.ratio(record, Method::Flexcomm, Over::Oracle),
        random: best(Method::Random),
        recorded_planner: best(Method::RecordedPlanner),
        cause,
        share,
        errors: record.runs().filter(|run| run.error.is_some()).count(),
    })
}

fn accuracy(records: &[Record], who: Method, runs: fn(&Record) -> &[Adapted]) -> Option<Accuracy> {
    let over = |record: &Record| {
        let over = |run: &Adapted| Some(run.accuracy? - record.baselines.fixed(DENSE, run.seed)?.accuracy);
        record.of_its_seeds(runs(record)).filter_map(over).collect::<Vec<f64>>()
    };
    let all: Vec<f64> = records.iter().flat_map(over).collect();
    Some(Accuracy {
        who,
        median: score::quantile(&all, 0.5)?,
        worst: score::quantile(&all, 0.0)?,
        below: all.iter().filter(|over| **over < -ACCURACY_POINTS).count(),
        runs: all.len(),
    })
}

fn problems(records: &[Record]) -> Problems {
    let mut all = Problems::default();
    for record in records {
        for run in record.runs().filter(|run| !run.problems.is_empty()) {
            (all.count, all.runs) = (all.count + run.problems.len(), all.runs + 1);
            let first = || format!("{}, seed {}: {}", record.name, run.seed, run.problems[0]);
            all.first.get_or_insert_with(first);
        }
    }
    all
}

fn spent(records: &[Record]) -> Spent {
    let runs: Vec<&Adapted> = records.iter().flat_map(Record::runs).filter(|run| run.error.is_none()).collect();
    let count = runs.len().max(1) as f64;
    let mean = |of: fn(&Experiments) -> f64| runs.iter().map(|run| of(&run.experiments)).sum::<f64>() / count;
    let shares = |record: &Record| record.live_and_shadow().into_iter().map(|(live, _)| live).collect::<Vec<f64>>();
    let shares: Vec<f64> = records.iter().flat_map(shares).collect();
    let mean = Experiments {
        seconds: mean(|e| e.seconds),
        shadow_seconds: mean(|e| e.shadow_seconds),
        bytes: mean(|e| e.bytes),
        cpu_seconds: mean(|e| e.cpu_seconds),
    };
    Spent { mean, share_of_time: Spread::of(&shares) }
}

fn reaction(records: &[Record], runs: fn(&Record) -> &[Adapted]) -> Reaction {
    let (mut seconds, mut shares, mut all) = (Vec::new(), Vec::new(), Reaction::default());
    for record in records {
        for run in record.of_its_seeds(runs(record)) {
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
            recorded_planner: None,
        };
        let flexcomm = vec![adapted(1, flexcomm)];
        Record { name: name.into(), cell, seeds: vec![1], baselines, binary: "a".into(), flexcomm, error: None }
    }

    pub(crate) fn summary(records: &[Record]) -> Summary {
        let provenance = Provenance { digest: "d".into(), frozen: false, binary: "b".into(), incomplete: Vec::new() };
        Summary::new(records, provenance)
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
        let best = summary.of(Method::Flexcomm, Over::BestFixed).unwrap();
        near(best.geomean, ((6.6f64 * 2.0).sqrt() * 0.5).sqrt());
        near(best.worst, 6.6);
        assert_eq!(best.worst_cell, "a-1");
        near(summary.of(Method::Flexcomm, Over::Oracle).unwrap().geomean, ((8.25f64 * 2.5).sqrt() * 1.25).sqrt());
        near(summary.of(Method::Random, Over::Dense).unwrap().geomean, 2.0);
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
            .map(|(predicted_s, true_s)| crate::adaptive::RatedPrediction {
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
        assert!((json["prediction_error"]["median"].as_f64().unwrap() - 0.5).abs() < 1e-9);
        // Half of what came is as wrong as twice as much.
        assert!((json["prediction_error"]["p95"].as_f64().unwrap() - 0.95).abs() < 1e-9);
        assert_eq!(json["cells"].as_array().unwrap().len(), 5);
    }

    #[test]
    fn a_missing_run_counts_as_unreached_and_is_told() {
        let mut gone = record("a-1", "a", 60.0, 50.0, None);
        gone.flexcomm.clear();
        let summary = summary(&[gone]);
        assert_eq!(summary.cells[0].error.as_deref(), Some("missing"));
        assert_eq!(summary.cells[0].seconds_to_target, Some(330.0));
        assert!((summary.worst_ratio_to_best_fixed_60s.unwrap() - 6.6).abs() < 1e-9);
    }

    #[test]
    fn a_cell_that_failed_counts_three_budgets() {
        let near =
            |value: Option<f64>, expected: f64| assert!((value.unwrap() / expected - 1.0).abs() < 1e-9, "{value:?}");
        let well = || record("a-1", "a", 60.0, 50.0, Some(50.0));
        let failed = |change: &dyn Fn(&mut Record)| {
            let mut failed = record("b-1", "b", 60.0, 50.0, None);
            failed.flexcomm.clear();
            change(&mut failed);
            failed.fail("broken".into());
            let summary = summary(&[failed, well()]);
            let best = summary.of(Method::Flexcomm, Over::BestFixed).unwrap();
            assert_eq!(best.worst_cell, "b-1");
            near(Some(best.geomean), best.worst.sqrt());
            assert_eq!((summary.failed.clone(), summary.errors, summary.unreached), (vec!["b-1".into()], 1, 1));
            assert_eq!(summary.worst_ratio_to_best_fixed_60s, Some(best.worst));
            assert_eq!(summary.best_average_fixed.as_deref(), Some(TOP_K), "of cells that did not fail");
            assert!(summary.table().contains("FAILED, and counted as three budgets: b-1"), "{}", summary.table());
            let row = summary.cells[0].clone();
            assert_eq!((row.cell.as_str(), row.seed, row.error.as_deref()), ("b-1", 1, Some("broken")));
            near(row.ratio_to_best_fixed, best.worst);
            assert!(!row.reached);
            (row, summary.geomean_vs_fixed[TOP_K])
        };
        // 330 s over top-k's 50.
        let (row, over_top_k) = failed(&|_| ());
        near(row.ratio_to_best_fixed, 6.6);
        near(Some(over_top_k), 6.6f64.sqrt());
        assert_eq!(row.seconds_to_target, Some(330.0));
        // Of two seeds one was played, and only dense, before it failed.
        let (row, _) = failed(&|failed| {
            failed.baselines.seeds = vec![1, 2];
            failed.baselines.fixed.truncate(1);
            failed.baselines.oracle.clear();
        });
        near(row.ratio_to_best_fixed, 3.3);
        assert_eq!(row.ratio_to_oracle, Some(3.0));
        // Nothing is known.
        let (row, over_top_k) = failed(&|failed| {
            failed.baselines = Baselines { seeds: vec![1], ..Baselines::default() };
        });
        assert_eq!((row.seconds_to_target, row.ratio_to_best_fixed, row.ratio_to_dense), (None, Some(3.0), Some(3.0)));
        near(Some(over_top_k), 3f64.sqrt());
    }

    #[test]
    fn accuracy_is_held_to_that_of_dense_and_what_was_refused_is_told() {
        let mut records: Vec<Record> =
            ["a-1", "a-2", "a-3"].map(|name| record(name, "a", 60.0, 50.0, Some(50.0))).into();
        // Dense's is 0.9.
        let accuracies = [Some(0.8949), Some(0.91), None];
        records.iter_mut().zip(accuracies).for_each(|(record, accuracy)| record.flexcomm[0].accuracy = accuracy);
        records[1].flexcomm[0].problems = vec!["no such job".into(), "too late".into()];
        let summary = summary(&records);
        let [flexcomm] = &summary.accuracy_over_dense[..] else { panic!("one") };
        assert_eq!((flexcomm.who, flexcomm.below, flexcomm.runs), (Method::Flexcomm, 1, 2));
        assert!((flexcomm.worst + 0.0051).abs() < 1e-9 && (flexcomm.median - 0.00245).abs() < 1e-9, "{flexcomm:?}");
        let first = Some("a-2, seed 1: no such job".into());
        assert_eq!(summary.problems, Problems { count: 2, runs: 1, first });
        let table = summary.table();
        for part in [
            "final accuracy over dense's      +0.25 points at the median, -0.51 at worst, 1 of 2 runs below -0.5",
            "refused requests and orders      2 in 1 runs; the first: a-2, seed 1: no such job",
        ] {
            assert!(table.contains(part), "no {part:?} in {table}");
        }
    }

    #[test]
    fn runs_with_other_seeds_than_those_of_the_record_count_nowhere() {
        let one = record("a-1", "a", 60.0, 50.0, Some(100.0));
        let mut more = one.clone();
        let mut other = adapted(2, None);
        (other.accuracy, other.error, other.problems) = (Some(0.1), Some("broken".into()), vec!["late".into()]);
        (other.reactions.missed, other.experiments.bytes) = (5, 1e9);
        more.baselines.oracle.push(other.clone());
        more.flexcomm.push(other);
        assert_eq!(summary(&[more]), summary(&[one]));
    }

    #[test]
    fn causes_are_the_largest_part_of_what_is_lost() {
        let of = |change: &dyn Fn(&mut Adapted)| {
            let mut record = record("a-1", "a", 60.0, 50.0, Some(100.0));
            change(&mut record.flexcomm[0]);
            let worst = summary(&[record]).by_cell.remove(0);
            (worst.cause, worst.share.map(|share| (share * 60.0).round()))
        };
        // Of the 60 s more than the oracle's 40.
        let waited = |run: &mut Adapted| run.lost.waiting_s = 45.0;
        assert_eq!(of(&waited), (Some(Cause::Waiting), Some(45.0)));
        assert_eq!(of(&|run| run.lost.exploring_s = 31.0), (Some(Cause::Exploring), Some(31.0)));
        assert_eq!(of(&|run| run.steps = Some(2000.0)), (Some(Cause::WrongGain), Some(40.0)));
        let predicted = |predicted_s: f64| {
            move |run: &mut Adapted| {
                let strategy = String::new();
                run.predictions =
                    vec![crate::adaptive::RatedPrediction { at_s: 0.0, strategy, predicted_s, true_s: 1.0 }];
            }
        };
        assert_eq!(of(&predicted(0.5)).0, Some(Cause::WrongLink));
        assert_eq!(of(&predicted(1.1)).0, Some(Cause::WrongCost));
        // What came after the target is in none.
        let late = Reactions { lost_s: 50.0, ..Reactions::default() };
        assert_eq!(of(&|run| (run.reactions, run.experiments.seconds) = (late.clone(), 50.0)).0, None);
        // A seed in which the oracle does not reach the target tells nothing, the other does.
        let mut two = record("a-1", "a", 60.0, 50.0, Some(100.0));
        two.flexcomm[0].lost.waiting_s = 45.0;
        two.baselines.oracle.insert(0, adapted(2, None));
        two.flexcomm.insert(0, adapted(2, Some(100.0)));
        two.seeds.push(2);
        assert_eq!(summary(&[two]).by_cell[0].cause, Some(Cause::Waiting));
        let share = |top_k: f64, seconds: Option<f64>, change: &dyn Fn(&mut Record)| {
            let mut record = record("a-1", "a", 60.0, top_k, seconds);
            change(&mut record);
            let row = summary(&[record]).by_cell.remove(0);
            (row.cause.unwrap(), (row.share.unwrap() * 1000.0).round() / 1000.0)
        };
        let both_wait = |record: &mut Record| {
            (record.flexcomm[0].lost.waiting_s, record.baselines.oracle[0].lost.waiting_s) = (45.0, 15.0);
        };
        assert_eq!(share(50.0, Some(100.0), &both_wait), (Cause::Waiting, 0.5));
        // Where the best fixed setting is faster than the oracle its steps count: 500 more of 40 ms in 80 s.
        let fewer_steps = |record: &mut Record| record.baselines.fixed[1].steps = Some(500.0);
        assert_eq!(share(20.0, Some(100.0), &fewer_steps), (Cause::WrongGain, 0.25));
        // One that does not reach the target counts 330 s, and made all its steps.
        let many = |record: &mut Record| record.cell.steps = 3900;
        assert_eq!(share(50.0, None, &many), (Cause::WrongGain, 0.4));
        // 60 s and 2,000 steps of 40 ms more: together more than the 60 s that were lost.
        let twice = |record: &mut Record| {
            (record.flexcomm[0].lost.waiting_s, record.flexcomm[0].steps) = (60.0, Some(3000.0));
        };
        assert_eq!(share(50.0, Some(100.0), &twice), (Cause::WrongGain, 0.571));
        assert_eq!(of(&|_| ()).0, None, "nothing tells");
        assert_eq!(of(&|run| run.seconds = Some(39.0)).0, None, "nothing is lost");
    }

    #[test]
    fn each_cell_has_a_row() {
        let mut first = record("b-1", "b", 60.0, 50.0, Some(100.0));
        first.flexcomm[0].lost.waiting_s = 45.0;
        let mut second = record("a-2", "a", 10.0, 50.0, None);
        second.flexcomm[0].error = Some("broken".into());
        // Two seeds, with 100 and 110 s.
        let mut third = record("a-1", "a", 1800.0, 50.0, Some(100.0));
        third.seeds.push(2);
        third.flexcomm.push(adapted(2, Some(110.0)));
        let measure = Measure { seed: 2, ..third.baselines.measures[0].clone() };
        third.baselines.measures.push(measure);
        for run in third.baselines.fixed.clone() {
            third.baselines.fixed.push(FixedRun { seed: 2, ..run });
        }
        let runs = vec![adapted(1, Some(25.0))];
        third.baselines.recorded_planner =
            Some(crate::baselines::RecordedPlanner { commit: "c".into(), binary: "d".into(), runs });
        let summary = summary(&[first, third, second]);
        let names: Vec<&str> = summary.by_cell.iter().map(|row| row.cell.as_str()).collect();
        assert_eq!(names, ["a-1", "a-2", "b-1"]);
        let worst: Vec<&str> = summary.worst().iter().map(|row| row.cell.as_str()).collect();
        assert_eq!(worst, ["a-2", "a-1", "b-1"]);
        let table = summary.table();
        // Student's t of two logarithms: 12.7 times half of their difference.
        for part in [
            "a-1             4  convolutional 0.9  1800 s  2.00  topk(k=0.01)                 2.10 1.14 -  3.84    1.05    2.35    4.00    0.50",
            "a-2             4  convolutional 0.9    10 s  2.00  topk(k=0.01)                 6.60            -    3.30    8.25    4.00       -  1 failed",
            "2.00            -    1.00    2.50    4.00       -  waiting",
            "with phases of 60 s and more: 2.10 (a-1)",
        ] {
            assert!(table.contains(part), "no {part:?} in {table}");
        }
        assert!(table.lines().all(|line| line.chars().count() <= 150), "{table}");
    }

    #[test]
    fn the_table_says_it_in_words() {
        let mut broken = record("b-1", "b", 10.0, 50.0, None);
        broken.error = Some("broken".into());
        let table = summary(&[record("a-1", "a", 60.0, 50.0, Some(100.0)), broken]).table();
        for part in [
            "2 cells, 2 runs of flexcomm by the program b; cells and truth are NOT the frozen ones",
            "FAILED, and counted as three budgets: b-1",
            "each cell's best fixed setting",
            "best average fixed",
            "The best average fixed setting is topk(k=0.01)",
            "  none/dense-ring                               ",
            "The worst over its best fixed setting, of cells with phases of 60 s and more: 2.00 (a-1)",
            "30 s to 2 min",
            "target not reached               1 runs, 0 of them with an error",
            "Not in the truth",
        ] {
            assert!(table.contains(part), "no {part:?} in {table}");
        }
        assert!(table.lines().all(|line| line.chars().count() <= 150), "{table}");
    }
}
