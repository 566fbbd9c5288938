//! From what is stored to what the API answers. Pure.

use flexcomm_domain::{Decision, Timestamp};
use flexcomm_planner::Measured;
use flexcomm_wire::TrialOutcome;
use flexcomm_wire::api::{
    DecisionView, DoubtView, EndedView, ExperimentView, HistoryEntry, JobView, MissingView, NodeView, Recording,
    RunView, SnapshotEntry, TrialView,
};
use serde_json::Value;
use serde_json::value::RawValue;
use std::collections::BTreeMap;

use crate::app::JobStatus;
use crate::clock::rfc3339;
use crate::cycle;
use crate::doubts::Doubt;
use crate::missing::Missing;
use crate::policy;
use crate::presence::Seen;
use crate::store::{
    DecisionRow, End, ExperimentRow, HistoryRow, JobRow, NodeRow, RankRow, Recorded, RunRow, SnapshotRow,
    TrialReportRow, TrialRow,
};

pub(super) fn node(row: NodeRow, seen: Option<(Seen, bool)>, now: Timestamp) -> NodeView {
    let unseen = || (row.registered, false, 0, Vec::new());
    let (last, live, spooled, hosts) = seen.map_or_else(unseen, |(s, live)| (s.last, live, s.spooled, s.hosts));
    NodeView {
        node: row.node,
        addr: row.addr,
        live,
        heartbeat_age_ms: (now.since(last).get() * 1e3) as u64,
        may_shape: row.may_shape,
        software: row.software,
        spooled,
        hosts,
    }
}

/// What a job's view is made of besides its row.
pub(super) struct JobParts<'a> {
    pub ranks: &'a [RankRow],
    pub live: &'a [flexcomm_domain::NodeName],
    pub step: u64,
    pub measured: Option<Measured>,
    pub compute_us: Option<f64>,
    pub status: Option<JobStatus>,
    pub missing: &'a [Missing],
    pub now: Timestamp,
}

fn ended(at: Timestamp, how: Option<End>) -> EndedView {
    let how = how.map_or("unknown", End::as_str).to_owned();
    EndedView { at: rfc3339(at), at_us: at.0, how }
}

pub(super) fn run(row: RunRow) -> RunView {
    RunView {
        run: row.run,
        world: row.world,
        began: rfc3339(row.began),
        ended: ended(row.ended, row.how),
        step: row.step,
        version: row.version.0,
        loss: row.loss,
        accuracy: row.accuracy,
    }
}

fn missing(missing: &Missing) -> MissingView {
    MissingView {
        node: missing.node.clone(),
        ranks: missing.ranks.clone(),
        since: rfc3339(missing.since),
        since_us: missing.since.0,
        meaning: missing.meaning(),
    }
}

fn doubted(doubt: &Doubt) -> DoubtView {
    DoubtView { node: doubt.node.clone(), what: doubt.what.clone() }
}

pub(super) fn job(row: JobRow, parts: &JobParts<'_>) -> JobView {
    let here: BTreeMap<u32, &RankRow> = parts.ranks.iter().filter(|r| r.left.is_none()).map(|r| (r.rank, r)).collect();
    let connected = here.values().filter(|r| parts.live.binary_search(&r.node).is_ok()).count();
    let measured = parts.measured.as_ref();
    let status = parts.status.as_ref();
    let (policy, source) = policy::in_force(&row, parts.ranks, parts.now);
    JobView {
        job: row.job,
        run: row.run,
        world: row.world,
        nodes: (0..row.world).map(|rank| parts.ranks.iter().find(|r| r.rank == rank).map(|r| r.node.clone())).collect(),
        gradient_values: row.gradient_values,
        backend: row.backend,
        live_ranks: u32::try_from(connected).unwrap_or(u32::MAX),
        step: parts.step,
        loss: row.loss,
        accuracy: row.accuracy,
        compute_us: parts.compute_us,
        comp_us: measured.map(|m| m.t_comp.get() * 1e6),
        sync_us: measured.map(|m| m.t_sync.get() * 1e6),
        step_us: measured.map(|m| m.t_step.get() * 1e6),
        predicted_sync_us: status.and_then(|b| b.predicted_sync_us),
        predicted_step_us: status.and_then(|b| b.predicted_step_us),
        gain: measured.map(|m| m.gain.get()),
        ended: row.ended.map(|at| ended(at, row.how)),
        policy: policy::shown(&policy),
        policy_source: source.as_str().to_owned(),
        missing: parts.missing.iter().map(missing).collect(),
        doubted: status.map_or_else(Vec::new, |b| b.doubts.iter().map(doubted).collect()),
    }
}

pub(super) fn decision(row: &DecisionRow) -> DecisionView {
    let d: &Decision = &row.decision;
    DecisionView {
        job: d.job.clone(),
        version: d.version.0,
        parent: d.parent.0,
        strategy: d.plan.to_string(),
        cr: d.plan.last().cr().get(),
        collective: d.plan.last().collective().to_string(),
        compressor: d.plan.last().spec().compressor().name.to_owned(),
        selection: d.plan.last().selection().map(|s| s.to_string()),
        since: rfc3339(d.decided_at),
        since_us: d.decided_at.0,
        applied_at_step: row.applied_at_step,
        reason: d.reason.clone(),
    }
}

pub(super) fn history(entry: &HistoryRow) -> HistoryEntry {
    let HistoryRow { row, seed, report } = entry;
    // A report that does not read back is shown as the text it is.
    let mut report = serde_json::from_str(report).unwrap_or_else(|_| serde_json::Value::String(report.clone()));
    if let Some(fields) = report.as_object_mut() {
        fields.insert("seed".to_owned(), (*seed).into());
    }
    HistoryEntry { decision: decision(row), report }
}

fn recording(software: &str, seed: u64, report: Value, snapshot: String) -> serde_json::Result<Recording> {
    Ok(Recording { software: software.to_owned(), seed, report, snapshot: RawValue::from_string(snapshot)? })
}

fn entry(version: u64, recorded: Result<Recording, String>) -> SnapshotEntry {
    match recorded {
        Ok(recording) => SnapshotEntry { version, recorded: Some(recording), missing: None },
        Err(why) => SnapshotEntry { version, recorded: None, missing: Some(why) },
    }
}

pub(super) fn snapshot(row: SnapshotRow) -> SnapshotEntry {
    let recorded = row.kept.and_then(|Recorded { entry, software, snapshot }| {
        let report = serde_json::from_str(&entry.report);
        let recording = report.and_then(|report| recording(&software, entry.seed, report, snapshot));
        recording.map_err(|error| format!("what is stored is no JSON: {error}"))
    });
    entry(row.version.0, recorded)
}

/// The newest look, where it decided nothing.
pub(super) fn look(status: &JobStatus) -> Option<SnapshotEntry> {
    let snapshot = status.undecided.as_deref()?;
    let seed = cycle::seed(&snapshot.job, snapshot.version());
    let text = serde_json::to_string(snapshot);
    let recorded = text.and_then(|text| {
        let report = serde_json::to_value(&status.report)?;
        recording(env!("CARGO_PKG_VERSION"), seed, report, text)
    });
    Some(entry(snapshot.version().0, recorded.map_err(|error| error.to_string())))
}

/// What experiments took of a run on so many nodes that has lasted for so long. A test occupies two of the nodes, and others
/// are tested at the same time.
pub(super) fn experiment(row: ExperimentRow, run_s: f64, nodes: usize) -> ExperimentView {
    let occupied = if row.kind == "throughput-test" { 2.0 / nodes.max(2) as f64 } else { 1.0 };
    let share = if run_s > 0.0 { row.seconds * occupied / run_s } else { 0.0 };
    let ExperimentRow { kind, count, seconds, bytes, cpu_s } = row;
    ExperimentView { kind, count, seconds, share, bytes, cpu_s }
}

pub(super) fn trial(row: &TrialRow, reports: &[TrialReportRow]) -> TrialView {
    let leader = reports.iter().find(|r| r.id == row.id && r.rank == 0);
    let outcomes: Vec<TrialOutcome> = leader.map(|r| r.outcomes.clone()).unwrap_or_default();
    TrialView {
        id: row.id,
        asked_at: rfc3339(row.asked),
        state: row.state.clone(),
        candidates: row.candidates.iter().copied().map(Into::into).collect(),
        outcomes,
        aborted: row.aborted.clone().or_else(|| leader.and_then(|r| r.aborted.clone())),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_test_occupies_two_of_the_nodes() {
        let share = |kind: &str, run_s, nodes| {
            let row = ExperimentRow { kind: kind.to_owned(), count: 1, seconds: 250.0, bytes: None, cpu_s: None };
            experiment(row, run_s, nodes).share
        };
        assert_eq!(share("throughput-test", 250.0, 4), 0.5);
        assert_eq!(share("throughput-test", 250.0, 1), 1.0);
        assert_eq!(share("live-trial", 250.0, 4), 1.0);
        assert_eq!(share("live-trial", 0.0, 4), 0.0);
    }
}
