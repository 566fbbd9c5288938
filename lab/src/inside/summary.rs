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

/// `None` without an interval that has a prediction.
pub(crate) fn prediction_error(intervals: &[IntervalView]) -> Option<PredictionError> {
    let relative = |i: &IntervalView| {
        let predicted = i.predicted_sync_us.filter(|_| i.measured_sync_us > 0.0)?;
        Some((predicted - i.measured_sync_us).abs() / i.measured_sync_us)
    };
    let mut errors: Vec<f64> = intervals.iter().filter_map(relative).collect();
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

    /// The closing words.
    pub(crate) fn text(&self, plan: &LabPlan) -> String {
        let mut text = format!("\n{} decisions\n", self.decisions.len());
        for entry in &self.decisions {
            text += &format!("  {}\n", view::decision(&entry.decision).trim_start_matches(">> "));
        }
        text += &match prediction_error(&self.intervals) {
            Some(PredictionError { count, median, p95 }) => format!(
                "t_sync, expected against measured, in {count} intervals: median error {:.1} %, p95 {:.1} %\n",
                median * 100.0,
                p95 * 100.0
            ),
            None => "t_sync: nothing was expected of any interval\n".to_owned(),
        };
        text += &format!("logs, history and summary: {}", plan.out.display());
        text
    }

    /// Writes `summary.json`.
    pub(crate) fn write(&self, plan: &LabPlan) -> Result<()> {
        let path = plan.out.join("summary.json");
        let body = serde_json::json!({
            "plan": plan,
            "prediction_error": prediction_error(&self.intervals),
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

    fn interval(predicted: Option<f64>, measured: f64) -> IntervalView {
        IntervalView {
            version: 1,
            strategy: Strategy::DENSE_RING.into(),
            from_step: 0,
            to_step: 9,
            at_us: 0,
            predicted_sync_us: predicted,
            measured_sync_us: measured,
            measured_comp_us: None,
            bytes_sent: None,
            gain: None,
            predicted_step_us: None,
            measured_step_us: measured,
        }
    }

    #[test]
    fn errors_are_relative_to_what_was_measured() {
        assert_eq!(prediction_error(&[interval(None, 1.0)]), None);
        let some = [110.0, 95.0, 400.0].map(|predicted| interval(Some(predicted), 100.0));
        let error = prediction_error(&some).unwrap();
        assert!(error.count == 3 && (error.median - 0.1).abs() < 1e-9 && (error.p95 - 3.0).abs() < 1e-9);
    }
}
