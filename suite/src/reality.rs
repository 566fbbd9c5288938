//! The truth beside an experiment (`python/bench/experiment.py --cell`, its results.json): the same settings on the same cell, in the order that both
//! put them, and by how much the truth is off.
//!
//! What is learned is the experiment's own: a setting needs as many steps to the target as it did there, so what is compared is the
//! time of these steps. A setting that does not reach the target is compared over all of its steps.

use crate::cells::Cell;
use crate::files;
use crate::fixed;
use crate::ranks::Data;
use crate::score::{self, Point};
use anyhow::{Context, Result, ensure};
use flexcomm_truth::coefficients::Coefficients;
use serde::{Deserialize, Serialize};
use serde_json::Value;
use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::path::Path;
use std::sync::Arc;

/// The experiment's name of a run that adapts; the truth has no curve of it.
const ADAPTIVE: &str = "flexcomm";

/// What is promised of every cell: Kendall's tau at least,
const LEAST_TAU: f64 = 0.8;
/// ratios between settings off by so much at the median
const MEDIAN: f64 = 0.15;
/// and at worst.
const WORST: f64 = 0.3;

/// Keys of a cell that an experiment does not play: labels; seeds, which are those of its runs; and times of computing and compression,
/// which are its machine's (`compute_s` is written by `experiment.py --calibrate`, which may come after a cell was played).
const NOT_PLAYED: [&str; 7] =
    ["family", "phase_s", "seeds", "compute_s", "codec_factor", "codec_factors", "communication_ratio"];

/// Whether a plan.json beside the results tells what was played.
///
/// # Errors
/// It tells of another cell: which keys differ.
pub fn check_plan(results: &Path, cell: &Cell) -> Result<bool> {
    let path = results.with_file_name("plan.json");
    if !path.exists() {
        return Ok(false);
    }
    let mut plan: Value = files::read_json(&path)?;
    let played = plan.get_mut("cell").and_then(Value::as_object_mut);
    let played =
        played.with_context(|| format!("{} is of no cell: `experiment.py --cell` makes one", path.display()))?;
    let name = played.remove("name").and_then(|name| name.as_str().map(str::to_owned)).unwrap_or_default();
    // With what a file may leave out.
    let played: Cell = serde_json::from_value(Value::Object(std::mem::take(played)))
        .with_context(|| format!("failed to read the cell of {}", path.display()))?;
    let [played, cell_keys] = [&played, cell].map(serde_json::to_value);
    let (played, cell_keys) = (played.context("write a cell as JSON")?, cell_keys.context("write a cell as JSON")?);
    let keys = [&played, &cell_keys].into_iter().filter_map(Value::as_object).flat_map(|keys| keys.keys());
    let keys: BTreeSet<&String> = keys.filter(|key| !NOT_PLAYED.contains(&key.as_str())).collect();
    let differs = keys.into_iter().filter(|key| played.get(key) != cell_keys.get(key)).map(|key| {
        let text = |value: Option<&Value>| value.map_or("none".to_owned(), Value::to_string);
        match (played.get(key), cell_keys.get(key)) {
            (Some(Value::Array(_) | Value::Object(_)), _) => key.clone(),
            (played, cell) => format!("{key} (played with {}, the cell has {})", text(played), text(cell)),
        }
    });
    let differs: Vec<String> = differs.collect();
    ensure!(
        differs.is_empty(),
        "{} is not of the cell {}: {} played {name}, which differs in {}",
        results.display(),
        cell.name,
        path.display(),
        differs.join(", ")
    );
    Ok(true)
}

/// One run of the experiment.
#[derive(Debug, Clone, PartialEq, Deserialize)]
pub struct MeasuredRun {
    /// The strategy.
    pub setting: String,
    /// Of the run.
    pub seed: u64,
    /// When each step ended on all ranks, seconds since the start.
    pub ends: Vec<f64>,
    /// Test losses every [`fixed::TEST_EVERY`] steps, the first before any.
    pub losses: Vec<f64>,
}

impl MeasuredRun {
    fn smoothed(&self) -> Vec<Point> {
        score::smooth(&fixed::points(&self.losses))
    }
}

/// Milliseconds of a step in the mean over those that begin in a phase; none where no step does.
#[derive(Debug, Clone, Copy, PartialEq, Default, Serialize)]
pub struct PhaseTimes {
    /// Measured.
    pub experiment_ms: Option<f64>,
    /// Of the truth.
    pub truth_ms: Option<f64>,
}

/// A setting in both.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct SettingComparison {
    /// The strategy.
    pub setting: String,
    /// Runs of the experiment.
    pub seeds: usize,
    /// Whether all of them reached the target.
    pub reached: bool,
    /// Seconds to the target, geometric mean over seeds.
    pub experiment_s: f64,
    /// The same steps in the truth.
    pub truth_s: f64,
    /// The truth's over the experiment's.
    pub ratio: f64,
    /// By phase of the cell.
    pub phases: Vec<PhaseTimes>,
}

/// All settings of a cell.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Comparison {
    /// The cell's name.
    pub cell: String,
    /// Rank correlation of the two orders of settings by seconds; none of a single setting.
    pub kendall: Option<f64>,
    /// By how much the truth is off, whichever way (0.1: 1.1 times as long or as short), in the median of the settings.
    pub median_error: f64,
    /// The same of the worst setting.
    pub worst_error: f64,
    /// The same of ratios between settings: without what all settings have in common, their geometric mean.
    pub median_ratio_error: f64,
    /// The same of the worst setting.
    pub worst_ratio_error: f64,
    /// In the experiment's order.
    pub settings: Vec<SettingComparison>,
}

/// Times of a setting's runs on one side.
#[derive(Default)]
struct Side {
    seconds: Vec<f64>,
    /// By phase: seconds of its steps, and how many.
    phases: Vec<(f64, u32)>,
}

impl Side {
    fn add(&mut self, cell: &Cell, ends: &[f64], steps: f64) -> Result<()> {
        let whole = ends.len() as f64;
        self.seconds.push(score::seconds_at(ends, steps.min(whole)).context("a run has no steps")?);
        self.phases.resize(cell.phases.len(), (0.0, 0));
        let mut from = 0.0;
        for &end in ends {
            let (seconds, steps) = &mut self.phases[cell.phase_at(from)];
            (*seconds, *steps) = (*seconds + end - from, *steps + 1);
            from = end;
        }
        Ok(())
    }

    fn mean_s(&self) -> f64 {
        score::geometric_mean(self.seconds.iter().copied()).unwrap_or(f64::NAN)
    }

    fn phase_ms(&self, phase: usize) -> Option<f64> {
        self.phases.get(phase).filter(|(_, steps)| *steps > 0).map(|(seconds, steps)| 1e3 * seconds / f64::from(*steps))
    }
}

/// Plays the experiment's settings through the truth.
pub fn compare(runs: &[MeasuredRun], cell: &Cell, truth: &Coefficients, data: &Arc<Data>) -> Result<Comparison> {
    let dense: BTreeMap<u64, Vec<Point>> =
        runs.iter().filter(|run| run.setting == fixed::DENSE).map(|run| (run.seed, run.smoothed())).collect();
    let mut by_setting: BTreeMap<&str, Vec<&MeasuredRun>> = BTreeMap::new();
    for run in runs.iter().filter(|run| run.setting != ADAPTIVE) {
        ensure!(
            run.ends.len() as u64 == cell.steps,
            "{} has {} steps, the cell {}",
            run.setting,
            run.ends.len(),
            cell.steps
        );
        by_setting.entry(&run.setting).or_default().push(run);
    }
    ensure!(!by_setting.is_empty(), "the experiment has no result of a fixed setting");
    let mut settings = Vec::new();
    for (setting, runs) in by_setting {
        let curve = fixed::sizes(cell, setting, data)?;
        let (mut measured, mut played, mut reached) = (Side::default(), Side::default(), true);
        for run in &runs {
            let target = dense.get(&run.seed).and_then(|dense| score::target(dense, 0.9));
            let target = target.with_context(|| format!("seed {} has no run of {}", run.seed, fixed::DENSE))?;
            let needed = score::steps_to(&run.smoothed(), target);
            reached &= needed.is_some();
            let steps = needed.unwrap_or(cell.steps as f64);
            measured.add(cell, &run.ends, steps)?;
            played.add(cell, &fixed::replay(cell, truth, run.seed, &curve)?, steps)?;
        }
        let (experiment_s, truth_s) = (measured.mean_s(), played.mean_s());
        let phase = |phase| PhaseTimes { experiment_ms: measured.phase_ms(phase), truth_ms: played.phase_ms(phase) };
        settings.push(SettingComparison {
            setting: setting.to_owned(),
            seeds: runs.len(),
            reached,
            experiment_s,
            truth_s,
            ratio: truth_s / experiment_s,
            phases: (0..cell.phases.len()).map(phase).collect(),
        });
    }
    settings.sort_by(|a, b| a.experiment_s.total_cmp(&b.experiment_s));
    let errors: Vec<f64> = settings.iter().map(|one| score::apart(one.ratio, 1.0)).collect();
    let ratio_errors = ratio_errors(&settings);
    let of_share = |errors: &[f64], share| score::quantile(errors, share).unwrap_or(f64::NAN);
    let of = |value: fn(&SettingComparison) -> f64| settings.iter().map(value).collect::<Vec<_>>();
    Ok(Comparison {
        cell: cell.name.clone(),
        kendall: score::kendall(&of(|one| one.experiment_s), &of(|one| one.truth_s)),
        median_error: of_share(&errors, 0.5),
        worst_error: of_share(&errors, 1.0),
        median_ratio_error: of_share(&ratio_errors, 0.5),
        worst_ratio_error: of_share(&ratio_errors, 1.0),
        settings,
    })
}

/// By how much the truth is off in each setting, without what all settings of the cell have in common.
fn ratio_errors(settings: &[SettingComparison]) -> Vec<f64> {
    let common = score::geometric_mean(settings.iter().map(|one| one.ratio)).unwrap_or(f64::NAN);
    settings.iter().map(|one| score::apart(one.ratio, common)).collect()
}

fn percent(error: f64) -> String {
    format!("{:.0} %", 100.0 * error)
}

fn in_words(passes: bool) -> &'static str {
    if passes { "PASS" } else { "FAIL" }
}

impl Comparison {
    /// Whether the order of settings and the ratios between them are as near as promised. A single setting has no order.
    pub fn passes(&self) -> bool {
        let Self { kendall, median_ratio_error, worst_ratio_error, .. } = self;
        kendall.is_some_and(|tau| tau >= LEAST_TAU) && *median_ratio_error <= MEDIAN && *worst_ratio_error <= WORST
    }
}

/// A line on all cells together.
pub fn closing(all: &[Comparison]) -> String {
    let passed = all.iter().filter(|one| one.passes()).count();
    let tau = all.iter().filter_map(|one| one.kendall).min_by(f64::total_cmp);
    let errors: Vec<f64> = all.iter().flat_map(|one| ratio_errors(&one.settings)).collect();
    let of_share = |share| percent(score::quantile(&errors, share).unwrap_or(f64::NAN));
    format!(
        "{}: {passed} of {} cells are within a Kendall's tau of {LEAST_TAU} and ratios between settings off by {} at the median, {} at \
         worst; over all, the least tau is {} and ratios are off by {} and {}",
        in_words(passed == all.len() && passed > 0),
        all.len(),
        percent(MEDIAN),
        percent(WORST),
        tau.map_or("-".to_owned(), |tau| format!("{tau:.2}")),
        of_share(0.5),
        of_share(1.0)
    )
}

impl fmt::Display for Comparison {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { cell, kendall, settings, .. } = self;
        let kendall = kendall.map_or("-".to_owned(), |tau| format!("{tau:.2}"));
        let passes = in_words(self.passes());
        let [median, worst] = [self.median_error, self.worst_error].map(percent);
        writeln!(
            f,
            "{cell}: {passes}, Kendall's tau {kendall}; the truth is off by {median} at the median, {worst} at worst,"
        )?;
        let [median, worst] = [self.median_ratio_error, self.worst_ratio_error].map(percent);
        writeln!(f, "in the ratios between settings by {median} and {worst}\n")?;
        let phases = settings.first().map_or(0, |one| one.phases.len());
        let heads: String = (1..=phases).map(|phase| format!(" phase {phase}, ms per step |")).collect();
        writeln!(f, "| setting | experiment s | truth s | ratio |{heads}\n{}|", "|---".repeat(4 + phases))?;
        let ms = |value: Option<f64>| value.map_or("-".to_owned(), |ms| format!("{ms:.0}"));
        for one in settings {
            let flag = if one.reached { "" } else { " (all steps)" };
            write!(f, "| {}{flag} | {:.1} | {:.1} | {:.2} |", one.setting, one.experiment_s, one.truth_s, one.ratio)?;
            for phase in &one.phases {
                write!(f, " {} / {} |", ms(phase.experiment_ms), ms(phase.truth_ms))?;
            }
            writeln!(f)?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const TOP_K: &str = "topk(k=0.01)+ef(vanilla)/allgather";

    fn cell() -> Cell {
        let text = include_str!("../reality/bandwidth.toml");
        let cell: Cell = toml::from_str(text).unwrap();
        Cell { name: "b".to_owned(), world: 2, steps: 50, ..cell }
    }

    /// What an experiment would have shown where the truth is right.
    fn as_played(cell: &Cell, truth: &Coefficients, data: &Arc<Data>, setting: &str, losses: [f64; 3]) -> MeasuredRun {
        let curve = fixed::sizes(cell, setting, data).unwrap();
        let ends = fixed::replay(cell, truth, 1, &curve).unwrap();
        MeasuredRun { setting: setting.to_owned(), seed: 1, ends, losses: losses.to_vec() }
    }

    #[test]
    fn the_truth_agrees_with_itself_and_a_slower_experiment_is_seen() {
        let (cell, truth, data) = (cell(), Coefficients::frozen(), Arc::new(Data::synthetic(2)));
        let dense = as_played(&cell, &truth, &data, fixed::DENSE, [2.0, 1.0, 0.5]);
        let top_k = as_played(&cell, &truth, &data, TOP_K, [2.0, 1.5, 1.4]);
        let adaptive = MeasuredRun { setting: ADAPTIVE.to_owned(), ends: vec![1.0], ..dense.clone() };
        let compared = compare(&[dense.clone(), top_k.clone(), adaptive], &cell, &truth, &data).unwrap();
        assert_eq!((compared.kendall, compared.worst_error, compared.settings.len()), (Some(1.0), 0.0, 2));
        let [first, second] = &compared.settings[..] else { unreachable!() };
        assert_eq!((first.setting.as_str(), first.reached, second.reached), (TOP_K, false, true));
        assert!(
            (second.experiment_s / dense.ends[44] - 1.0).abs() < 0.05,
            "dense's target is at nine tenths of its steps"
        );
        assert_eq!(first.experiment_s, top_k.ends[49], "without the target: all steps");
        assert_eq!(second.phases[0].experiment_ms, second.phases[0].truth_ms);
        let slower = MeasuredRun { ends: dense.ends.iter().map(|end| 1.2 * end).collect(), ..dense };
        let compared = compare(&[slower, top_k], &cell, &truth, &data).unwrap();
        assert!((compared.settings[1].ratio - 1.0 / 1.2).abs() < 1e-9 && (compared.worst_error - 0.2).abs() < 1e-9);
        let text = compared.to_string();
        let first = "Kendall's tau 1.00; the truth is off by 10 % at the median, 20 % at worst,";
        // One setting is slower than the other by 20 %: each is off by the root of that from what both have in common.
        assert!(text.contains(&format!("{first}\nin the ratios between settings by 10 % and 10 %\n")), "{text}");
        assert!(text.contains(&format!("| {TOP_K} (all steps) |")), "{text}");
    }

    #[test]
    fn what_was_played_is_the_cell() {
        let folder = tempfile::tempdir().unwrap();
        let (results, cell) = (folder.path().join("results.json"), cell());
        assert!(!check_plan(&results, &cell).unwrap());
        let write = |plan: &Value| files::write_json(&folder.path().join("plan.json"), plan).unwrap();
        let played = |change: &dyn Fn(&mut Cell)| {
            let mut played = cell.clone();
            change(&mut played);
            let mut played = serde_json::to_value(&played).unwrap();
            played["name"] = "other".into();
            write(&serde_json::json!({ "cell": played, "seeds": 3 }));
            check_plan(&results, &cell).map_err(|error| format!("{error:#}"))
        };
        assert_eq!(played(&|_| ()), Ok(true));
        // Its processor's time is the machine's.
        assert_eq!(played(&|cell| (cell.compute_s, cell.communication_ratio) = (0.0111, 3.0)), Ok(true));
        let error = played(&|cell| (cell.steps, cell.batch) = (60, 32)).unwrap_err();
        assert!(
            error.contains(
                "played other, which differs in batch (played with 32, the cell has 64), steps (played with 60"
            ),
            "{error}"
        );
        assert!(error.contains("is not of the cell b: "), "{error}");
        let error = played(&|cell| cell.phases[0].latency_ms = 7.0).unwrap_err();
        assert!(error.ends_with("which differs in phase"), "{error}");
        write(&serde_json::json!({ "cell": null }));
        assert!(check_plan(&results, &cell).unwrap_err().to_string().contains("plan.json is of no cell"));
    }

    #[test]
    fn limits_are_those_of_order_and_ratios() {
        let one = |ratio: f64| SettingComparison {
            setting: "x".into(),
            seeds: 1,
            reached: true,
            experiment_s: 1.0,
            truth_s: ratio,
            ratio,
            phases: Vec::new(),
        };
        let passed = Comparison {
            cell: "c".into(),
            kendall: Some(0.8),
            median_error: 0.4,
            worst_error: 0.9,
            median_ratio_error: 0.15,
            worst_ratio_error: 0.3,
            settings: vec![one(2.0), one(2.0), one(2.2)],
        };
        let failed = [
            Comparison { kendall: Some(0.79), ..passed.clone() },
            Comparison { kendall: None, ..passed.clone() },
            Comparison { median_ratio_error: 0.16, ..passed.clone() },
            Comparison { worst_ratio_error: 0.31, ..passed.clone() },
        ];
        assert!(passed.passes() && failed.iter().all(|one| !one.passes()));
        assert!(passed.to_string().starts_with("c: PASS, ") && failed[0].to_string().starts_with("c: FAIL, "));
        let line = closing(&[passed.clone(), failed[0].clone()]);
        assert!(line.starts_with("FAIL: 1 of 2 cells are within a Kendall's tau of 0.8 "), "{line}");
        // Of 2, 2 and 2.2 over their mean.
        assert!(line.ends_with("the least tau is 0.79 and ratios are off by 3 % and 7 %"), "{line}");
        assert!(closing(&[passed]).starts_with("PASS: 1 of 1 cells") && closing(&[]).starts_with("FAIL: 0 of 0"));
    }

    #[test]
    fn results_that_cannot_be_compared_are_named() {
        let (cell, truth, data) = (cell(), Coefficients::frozen(), Arc::new(Data::synthetic(2)));
        let ran = |setting: &str, steps: usize| MeasuredRun {
            setting: setting.to_owned(),
            seed: 3,
            ends: (1..=steps).map(|end| end as f64).collect(),
            losses: vec![2.0, 1.0, 0.5],
        };
        let error = |runs: &[MeasuredRun]| format!("{:#}", compare(runs, &cell, &truth, &data).unwrap_err());
        assert!(error(&[ran(TOP_K, 50)]).contains("seed 3 has no run of none/dense-ring"));
        assert!(error(&[ran(fixed::DENSE, 20)]).contains("none/dense-ring has 20 steps, the cell 50"));
        assert!(error(&[ran("topq", 50)]).contains("failed to read the strategy topq"));
        assert!(error(&[ran(ADAPTIVE, 50)]).contains("no result of a fixed setting"));
    }

    #[test]
    fn steps_are_of_the_phase_in_which_they_begin() {
        let cell = cell();
        assert_eq!([0.0, 29.9, 30.0, 59.9, 60.0, 95.0].map(|at| cell.phase_at(at)), [0, 0, 1, 1, 0, 1]);
        let mut side = Side::default();
        side.add(&cell, &[10.0, 20.0, 29.0, 50.0, 61.0], 2.5).unwrap();
        assert!((side.mean_s() - 24.5).abs() < 1e-9);
        assert_eq!([0, 1, 2].map(|phase| side.phase_ms(phase)), [Some(12_500.0), Some(11_000.0), None]);
    }

    /// What suite/reality keeps of the six cells in user-mode Linux.
    #[test]
    fn the_truth_is_near_what_was_measured() {
        let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("reality");
        let text = std::fs::read_to_string(folder.join("uml.toml")).unwrap();
        let (truth, data) = (Coefficients::parse("uml.toml", &text).unwrap(), Arc::new(Data::synthetic(4)));
        let cells = ["asymmetric", "bandwidth", "c1", "latency", "slow-node", "swing"];
        let mut off = Vec::new();
        for name in cells {
            let cell = Cell::read(&folder.join(format!("{name}.toml"))).unwrap();
            let runs: Vec<MeasuredRun> = files::read_json(&folder.join(format!("{name}.json"))).unwrap();
            let compared = compare(&runs, &cell, &truth, &data).unwrap();
            assert!(compared.settings.len() == 12 && compared.kendall.unwrap() >= 0.8, "{compared}");
            assert!(compared.median_ratio_error < 0.15 && compared.worst_ratio_error < 0.3, "{compared}");
            off.extend(compared.settings.iter().map(|one| score::apart(one.ratio, 1.0)));
        }
        assert!(score::quantile(&off, 0.5).unwrap() < 0.15, "{off:?}");
    }
}
