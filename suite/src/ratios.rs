//! One over another: whose seconds, cell by cell, and why flexcomm's are more than the oracle's.

use crate::baselines::{Adapted, Record, UNREACHED};
use crate::cells::Cell;
use crate::fixed::{self, DENSE};
use crate::score::{self, CellRatios, Families};
use crate::summary::{Cause, Group, Method, Over, RatioStats, Row, Spread};
use std::collections::{BTreeMap, BTreeSet};

/// Records, and what is best over all of them.
pub(crate) struct View<'a> {
    pub(crate) records: &'a [Record],
    pub(crate) best_average: Option<String>,
}

impl View<'_> {
    /// Seconds as they count.
    fn seconds(&self, record: &Record, who: Method, seed: u64) -> Option<f64> {
        let baselines = &record.baselines;
        match who {
            Method::Flexcomm => record.seconds(&record.flexcomm, seed),
            // What is best in a phase for a whole run need not be best for a part of it.
            Method::Oracle => {
                let script = record.seconds(&baselines.oracle, seed)?;
                Some(baselines.best_seconds(seed).map_or(script, |best| best.min(script)))
            }
            // Has no run with seeds that were added for a narrower interval.
            Method::Random if !baselines.seeds.contains(&seed) => None,
            Method::Random => record.seconds(&baselines.random, seed),
            Method::BestAverageFixed => baselines.fixed_seconds(&of_label(record, self.best_average.as_ref()?)?, seed),
            Method::RecordedPlanner => {
                let run = baselines.recorded().iter().find(|run| run.seed == seed)?;
                baselines.counted(seed, run.seconds)
            }
        }
    }

    fn over(&self, record: &Record, over: Over, seed: u64) -> Option<f64> {
        match over {
            Over::BestFixed => record.baselines.best_seconds(seed),
            Over::Dense => record.baselines.fixed_seconds(DENSE, seed),
            // It did not fail itself.
            Over::Oracle if record.error.is_some() && record.baselines.oracle.iter().all(|run| run.seed != seed) => {
                None
            }
            Over::Oracle => self.seconds(record, Method::Oracle, seed),
        }
    }

    /// By seed.
    pub(crate) fn ratios(&self, record: &Record, who: Method, over: Over) -> Vec<f64> {
        let known = |seed| Some(self.seconds(record, who, seed)? / self.over(record, over, seed)?);
        let of_failed = |seed| of_failed(record, seed).filter(|_| who == Method::Flexcomm);
        record.seeds.iter().filter_map(|seed| known(*seed).or(of_failed(*seed))).collect()
    }

    pub(crate) fn ratio(&self, record: &Record, who: Method, over: Over) -> Option<f64> {
        score::geometric_mean(self.ratios(record, who, over))
    }

    /// Over all cells, families alike.
    pub(crate) fn compared(&self, who: Method, over: Over) -> Option<RatioStats> {
        let all: Vec<&Record> = self.records.iter().collect();
        self.compared_in(&all, who, over, families(&all, |record| self.ratios(record, who, over)))
    }

    fn compared_in(&self, kept: &[&Record], who: Method, over: Over, families: Families) -> Option<RatioStats> {
        let mut cells: Vec<(f64, &str)> =
            kept.iter().filter_map(|record| Some((self.ratio(record, who, over)?, record.name.as_str()))).collect();
        cells.sort_by(|a, b| a.0.total_cmp(&b.0));
        let (worst, worst_cell) = *cells.last()?;
        let ratios: Vec<f64> = cells.iter().map(|(ratio, _)| *ratio).collect();
        Some(RatioStats {
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
    pub(crate) fn groups<K: Ord>(&self, key: impl Fn(&Record) -> K, name: impl Fn(&K) -> String) -> Vec<Group> {
        let keys: BTreeSet<K> = self.records.iter().map(&key).collect();
        let group = |wanted: &K| {
            let kept: Vec<&Record> = self.records.iter().filter(|record| key(record) == *wanted).collect();
            // A group has one or two cells of a family, whose spread would say nothing: its cells count alike.
            let alike = |who| families(&kept, |record| self.ratios(record, who, Over::BestFixed)).concat();
            let compared = |who: Method| self.compared_in(&kept, who, Over::BestFixed, vec![alike(who)]);
            Group {
                name: name(wanted),
                cells: kept.len(),
                compared: Method::ALL.into_iter().filter_map(compared).collect(),
            }
        };
        keys.iter().map(group).collect()
    }

    pub(crate) fn rows(&self, record: &Record) -> Vec<Row> {
        let baselines = &record.baselines;
        let row = |setting: &str, seed: u64, counted: Option<f64>, adapted: Option<&Adapted>| {
            let of_failed = of_failed(record, seed).filter(|_| setting == Method::Flexcomm.name());
            counted.or(of_failed)?;
            let ratio = |over| (|| Some(counted? / self.over(record, over, seed)?))().or(of_failed);
            Some(Row {
                cell: record.name.clone(),
                setting: setting.to_owned(),
                seed,
                seconds_to_target: counted,
                // As late as that it counts as if it never came.
                reached: counted.zip(baselines.counted(seed, None)).is_some_and(|(counted, most)| counted < most),
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
            (Method::Flexcomm, record.flexcomm.as_slice()),
            (Method::Oracle, &baselines.oracle),
            (Method::Random, &baselines.random),
            (Method::RecordedPlanner, baselines.recorded()),
        ] {
            for seed in &record.seeds {
                let run = runs.iter().find(|run| run.seed == *seed);
                // Controls may have fewer seeds.
                let run = if who == Method::Flexcomm { run.or(Some(&missing)) } else { run };
                rows.extend(run.and_then(|run| row(who.name(), *seed, self.seconds(record, who, *seed), Some(run))));
            }
        }
        let wanted = baselines.fixed.iter().filter(|run| record.seeds.contains(&run.seed));
        rows.extend(
            wanted.filter_map(|run| row(&run.setting, run.seed, baselines.counted(run.seed, run.seconds), None)),
        );
        rows
    }

    /// Steps to the target that go with the seconds of [`Method::Oracle`].
    fn oracle_steps(&self, record: &Record, seed: u64) -> Option<f64> {
        let baselines = &record.baselines;
        let script = baselines.oracle.iter().find(|run| run.seed == seed)?;
        let best = baselines.best_fixed().and_then(|best| baselines.fixed(best, seed));
        let fixed =
            best.filter(|best| best.seconds.is_some_and(|best| script.seconds.is_none_or(|script| best < script)));
        fixed.map_or(script.steps, |best| best.steps)
    }

    /// Why a cell's runs take longer than the oracle's, and how much of that one cause is. Causes may count the same seconds twice;
    /// where they add up to more than was lost it is the share of their sum.
    pub(crate) fn cause(&self, record: &Record) -> Option<(Cause, f64)> {
        let mut causes: BTreeMap<Cause, f64> = BTreeMap::new();
        let mut lost = 0.0;
        let error = Spread::of(&prediction_errors(record.runs())).median;
        for run in record.runs() {
            let both = |who| self.seconds(record, who, run.seed);
            let both = both(Method::Flexcomm).zip(both(Method::Oracle));
            let Some(((seconds, best), best_steps)) = both.zip(self.oracle_steps(record, run.seed)) else { continue };
            lost += seconds - best;
            // One that does not reach the target made all of its steps.
            let steps = run.steps.or_else(|| run.error.is_none().then_some(record.cell.steps as f64));
            let more_steps = steps.map_or(0.0, |own| (own - best_steps).max(0.0));
            // The oracle waits, too.
            let oracle = record.baselines.oracle.iter().find(|oracle| oracle.seed == run.seed);
            let known = [
                (Cause::Waiting, (run.lost.waiting_s - oracle.map_or(0.0, |oracle| oracle.lost.waiting_s)).max(0.0)),
                (Cause::Exploring, run.lost.exploring_s),
                (Cause::WrongGain, more_steps * best / best_steps),
            ];
            let slower = seconds - best - known.iter().map(|(_, seconds)| seconds).sum::<f64>();
            known.into_iter().for_each(|(cause, seconds)| *causes.entry(cause).or_default() += seconds);
            // What is left are slower steps, if the target was reached at all.
            if let (Some(_), Some(error)) = (run.seconds, error) {
                let cause = if error >= 0.3 { Cause::WrongLink } else { Cause::WrongCost };
                *causes.entry(cause).or_default() += slower.max(0.0);
            }
        }
        let sum: f64 = causes.values().sum();
        let (cause, seconds) = causes.into_iter().max_by(|a, b| a.1.total_cmp(&b.1))?;
        (lost > 0.0 && seconds > 0.0).then(|| (cause, seconds / lost.max(sum)))
    }
}

/// The ratio of flexcomm's run with a seed in a cell that failed before enough was known to tell it.
fn of_failed(record: &Record, seed: u64) -> Option<f64> {
    let without_result = record.flexcomm.iter().any(|run| run.seed == seed && run.error.is_some());
    (record.error.is_some() && without_result).then_some(UNREACHED)
}

/// The strategy of a label in a cell.
pub(crate) fn of_label(record: &Record, label: &str) -> Option<String> {
    record.baselines.settings().into_iter().find(|setting| fixed::label(setting) == label).map(str::to_owned)
}

pub(crate) fn families(records: &[&Record], ratios: impl Fn(&Record) -> Vec<f64>) -> Families {
    let mut families: BTreeMap<&str, Vec<CellRatios>> = BTreeMap::new();
    for record in records {
        let Cell { model, momentum, world, .. } = record.cell;
        let cell = CellRatios { job: format!("{model:?} {momentum} {world}"), ratios: ratios(record) };
        families.entry(&record.cell.family).or_default().push(cell);
    }
    families.into_values().collect()
}

pub(crate) fn prediction_errors<'a>(runs: impl Iterator<Item = &'a Adapted>) -> Vec<f64> {
    let predictions = runs.flat_map(|run| &run.predictions).filter(|p| p.true_s > 0.0 && p.predicted_s > 0.0);
    predictions.map(|p| score::apart(p.predicted_s, p.true_s)).collect()
}

/// Labels of the fixed settings that ran in all of these cells, in the order of the first.
fn labels(records: &[&Record]) -> Vec<String> {
    let Some(first) = records.first() else { return Vec::new() };
    let all = first.baselines.settings().into_iter().map(fixed::label);
    all.filter(|label| records.iter().all(|record| of_label(record, label).is_some())).collect()
}

/// One setting for all cells: the least time over dense's, of those whose final accuracy is within half a point of dense's in the mean.
pub(crate) fn best_average(records: &[Record]) -> Option<String> {
    let whole: Vec<&Record> = records.iter().filter(|record| record.error.is_none()).collect();
    let time = |label: &str| {
        let ratios = |record: &Record| {
            let Some(setting) = of_label(record, label) else { return Vec::new() };
            let baselines = &record.baselines;
            let seconds = |setting: &str, seed| baselines.fixed_seconds(setting, seed);
            let ratio = |seed: &u64| Some(seconds(&setting, *seed)? / seconds(DENSE, *seed)?);
            baselines.seeds.iter().filter_map(ratio).collect()
        };
        score::mean_of_families(&families(&whole, ratios))
    };
    let accurate = |label: &String| {
        let differences =
            whole.iter().filter_map(|record| record.baselines.accuracy_over_dense(&of_label(record, label)?));
        differences.clone().sum::<f64>() >= -crate::baselines::ACCURACY_POINTS * differences.count() as f64
    };
    let timed = labels(&whole).into_iter().filter(accurate).filter_map(|label| Some((time(&label)?, label)));
    timed.min_by(|a, b| a.0.total_cmp(&b.0)).map(|(_, label)| label)
}
