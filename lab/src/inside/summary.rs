//! What a run showed: its rows, its decisions, how well times were predicted.

use anyhow::{Context, Result};
use flexcomm_wire::api::{HistoryEntry, IntervalView};
use serde::Serialize;

use super::view;
use crate::plan::LabPlan;

/// Collected while the lab runs; written to `summary.json` at its end.
#[derive(Debug, Default, Serialize)]
pub(crate) struct Summary {
    rows: Vec<String>,
    decisions: Vec<HistoryEntry>,
    intervals: Vec<IntervalView>,
    trials: serde_json::Value,
    cpu_s: Vec<(String, f64)>,
}

/// Error of predicted against measured t_sync.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub(crate) struct PredictionError {
    /// Intervals with a prediction.
    pub count: usize,
    /// Median of |predicted - measured| / measured.
    pub median: f64,
    /// 95th percentile of the same.
    pub p95: f64,
}

/// `None` without an interval that has a prediction by `of`.
pub(crate) fn prediction_error<'a>(
    intervals: impl IntoIterator<Item = &'a IntervalView>,
    of: fn(&IntervalView) -> Option<f64>,
) -> Option<PredictionError> {
    let relative = |i: &IntervalView| {
        let predicted = of(i).filter(|_| i.measured_sync_us > 0.0)?;
        Some((predicted - i.measured_sync_us).abs() / i.measured_sync_us)
    };
    let mut errors: Vec<f64> = intervals.into_iter().filter_map(relative).collect();
    errors.sort_by(f64::total_cmp);
    let at = |q: f64| errors.get(((errors.len() - 1) as f64 * q).round() as usize).copied();
    if errors.is_empty() {
        return None;
    }
    Some(PredictionError { count: errors.len(), median: at(0.5)?, p95: at(0.95)? })
}

impl Summary {
    /// Keeps a row of the table.
    pub(crate) fn row(&mut self, row: String) {
        self.rows.push(row);
    }

    /// Takes in the CPU time of each process.
    pub(crate) fn cpu(&mut self, cpu_s: Vec<(String, f64)>) {
        self.cpu_s = cpu_s;
    }

    /// Takes in what the controller kept.
    pub(crate) fn finish(
        &mut self,
        decisions: Vec<HistoryEntry>,
        intervals: Vec<IntervalView>,
        trials: serde_json::Value,
    ) {
        self.trials = trials;
        self.decisions = decisions;
        self.decisions.sort_by_key(|d| d.decision.version);
        self.intervals = intervals;
    }

    /// Which intervals, by what prediction, and how far it was off.
    fn errors(&self) -> [(&'static str, Option<PredictionError>); 3] {
        let settled = || self.intervals.iter().filter(|i| i.settled);
        [
            ("all intervals, by the cost model", prediction_error(&self.intervals, |i| i.model_sync_us)),
            // Without those in which the links had just moved, as far as the controller found out by itself.
            ("settled intervals, by the cost model", prediction_error(settled(), |i| i.model_sync_us)),
            (
                "all intervals, by what the strategy took before",
                prediction_error(&self.intervals, |i| i.predicted_sync_us),
            ),
        ]
    }

    /// The closing words.
    pub(crate) fn text(&self, plan: &LabPlan) -> String {
        let mut text = format!("\n{} decisions\n", self.decisions.len());
        for entry in &self.decisions {
            text += &format!("  {}\n", view::decision(&entry.decision).trim_start_matches(">> "));
        }
        text += "t_sync predicted against measured:\n";
        for (which, error) in self.errors() {
            text += &match error {
                Some(e) => format!(
                    "  {which} ({}): median error {:.1} %, p95 {:.1} %\n",
                    e.count,
                    e.median * 100.0,
                    e.p95 * 100.0
                ),
                None => format!("  {which}: none with a prediction\n"),
            };
        }
        text += &format!("logs, history and summary: {}", plan.out.display());
        text
    }

    /// Writes `summary.json`.
    pub(crate) fn write(&self, plan: &LabPlan) -> Result<()> {
        let path = plan.out.join("summary.json");
        let [all, settled, recent] = self.errors().map(|(_, error)| error);
        let body = serde_json::json!({
            "plan": plan,
            "prediction_error": { "all": all, "settled": settled, "recent": recent },
            "rows": self.rows,
            "decisions": self.decisions,
            "intervals": self.intervals,
            "trials": self.trials,
            "cpu_s": self.cpu_s,
        });
        std::fs::write(&path, serde_json::to_string_pretty(&body)?).with_context(|| path.display().to_string())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use flexcomm_domain::Strategy;

    fn interval(predicted: Option<f64>, measured: f64, settled: bool) -> IntervalView {
        IntervalView {
            version: 1,
            strategy: Strategy::DENSE_RING.into(),
            from_step: 0,
            to_step: 9,
            at_us: 0,
            predicted_sync_us: predicted.map(|us| us / 2.0),
            model_sync_us: predicted,
            measured_sync_us: measured,
            measured_comp_us: None,
            bytes_sent: None,
            gain: None,
            predicted_step_us: None,
            measured_step_us: measured,
            settled,
        }
    }

    #[test]
    fn errors_are_relative_to_what_was_measured() {
        assert_eq!(prediction_error(&[interval(None, 1.0, true)], |i| i.predicted_sync_us), None);
        let some = [
            interval(Some(110.0), 100.0, true),
            interval(Some(95.0), 100.0, true),
            interval(Some(400.0), 100.0, false),
        ];
        let summary = Summary { intervals: some.to_vec(), ..Summary::default() };
        let [all, settled, recent] = summary.errors().map(|(_, error)| error.unwrap());
        assert_eq!((all.count, settled.count), (3, 2));
        assert!((all.median - 0.1).abs() < 1e-9 && (all.p95 - 3.0).abs() < 1e-9);
        assert!((settled.p95 - 0.1).abs() < 1e-9);
        assert!((recent.median - 0.525).abs() < 1e-9);
    }
}
