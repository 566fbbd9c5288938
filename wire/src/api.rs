//! What the REST API under `/api/v1` answers to people and tools.

use flexcomm_domain::{JobId, NodeName, RunId};
use serde::{Deserialize, Serialize};
use serde_json::value::RawValue;

use crate::{HostSeen, StrategyWire, TrialOutcome};

/// RFC 9457 problem details, `application/problem+json`.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Problem {
    /// `about:blank` or a stable name of the kind of problem.
    #[serde(rename = "type")]
    pub kind: String,
    /// Short, the same for every occurrence of the kind.
    pub title: String,
    /// HTTP status.
    pub status: u16,
    /// What was wrong with which value here, and the remedy.
    pub detail: String,
}

/// A node, `GET /api/v1/nodes`.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct NodeView {
    /// Its name.
    pub node: NodeName,
    /// Where its peers reach it.
    pub addr: std::net::IpAddr,
    /// Whether its last heartbeat or report is fresh.
    pub live: bool,
    /// Time since its last heartbeat or report.
    pub heartbeat_age_ms: u64,
    /// Whether its configuration allows shaping.
    pub may_shape: bool,
    /// flexcomm's version there.
    pub software: String,
    /// Reports waiting in its spool.
    pub spooled: u64,
    /// What it sees of its gateway and of the hosts that its operator named.
    #[serde(default)]
    pub hosts: Vec<HostSeen>,
}

/// A directed link, `GET /api/v1/links`.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct LinkView {
    /// From this node
    pub from: NodeName,
    /// to this node.
    pub to: NodeName,
    /// alpha.
    pub latency_us: f64,
    /// As the newest throughput test found it; null before the first.
    pub bandwidth_bps: Option<f64>,
    /// Mean absolute difference of successive round trips.
    pub jitter_us: f64,
    /// Shares lost out and back.
    pub loss_out: f64,
    /// Shares lost out and back.
    pub loss_back: f64,
    /// Whether latency and losses are those of ICMP, since the node answers no UDP echo.
    #[serde(default)]
    pub by_icmp: bool,
    /// 0 to 1.
    pub latency_confidence: f64,
    /// Age of the newest latency sample, at the time of the answer.
    pub latency_age_ms: f64,
    /// Age of that test, at the time of the answer; null before the first.
    pub bandwidth_age_ms: Option<f64>,
}

/// A job, `GET /api/v1/jobs` and `GET /api/v1/jobs/{id}`.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct JobView {
    /// Its name.
    pub job: JobId,
    /// Which run has the job's name now; null where its trainers have no run ids.
    #[serde(default)]
    pub run: Option<RunId>,
    /// N.
    pub world: u32,
    /// Node of each rank, as far as known.
    pub nodes: Vec<Option<NodeName>>,
    /// Values in the fused gradient.
    pub gradient_values: u64,
    /// What moves the bytes.
    pub backend: String,
    /// Ranks whose trainers are connected.
    pub live_ranks: u32,
    /// Newest step seen.
    pub step: u64,
    /// Newest training loss.
    pub loss: Option<f64>,
    /// Newest held-out accuracy.
    pub accuracy: Option<f64>,
    /// Medians over the newest steps under the decision in force. Forward and backward.
    pub compute_us: Option<f64>,
    /// Compress and decompress.
    pub comp_us: Option<f64>,
    /// The collective, from the last rank's entry to the last rank's end: median over steps.
    pub sync_us: Option<f64>,
    /// The whole step.
    pub step_us: Option<f64>,
    /// What was predicted of the collective before the steps of the interval that is open.
    pub predicted_sync_us: Option<f64>,
    /// The same of the step.
    pub predicted_step_us: Option<f64>,
    /// Gain over all ranks: median over the newest steps.
    pub gain: Option<f64>,
    /// When and how it ended; null while it runs.
    #[serde(default)]
    pub ended: Option<EndedView>,
    /// What is set for it.
    #[serde(default)]
    pub policy: JobPolicy,
    /// Who set that; see [`PolicyView::source`].
    #[serde(default)]
    pub policy_source: String,
    /// Nodes whose agents are silent, and ranks that no agent has announced. Steps count that the other ranks reported.
    #[serde(default)]
    pub missing: Vec<MissingView>,
    /// Nodes whose reports are contradicted by the others' or by measured steps, and therefore not counted.
    #[serde(default)]
    pub doubted: Vec<DoubtView>,
}

/// What is set for a job: `PUT /api/v1/jobs/{id}/policy`, and part of the job's view. What is absent is the default. Of a policy
/// that is set, keys and values are checked by the controller.
#[derive(Debug, Clone, PartialEq, Default, Serialize, Deserialize)]
#[serde(default)]
pub struct JobPolicy {
    /// Kinds of compressors that decisions and trials may use, such as `topk`, `fp16`, `powersgd`, with any parameters; null: all,
    /// `["none"]`: dense alone, which is always allowed.
    pub kinds: Option<Vec<String>>,
    /// How candidates are ranked: a policy's name, or a table of its name and settings, as `planner.policy` of the configuration takes
    /// it; absent: that of the configuration.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub objective: Option<serde_json::Value>,
    /// Least effective gain of what is decided, 0 to 1; dense keeps 1.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub least_gain: Option<f64>,
    /// Largest share of a step's time that compressing may take, 0 or more; dense takes none.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub most_overhead: Option<f64>,
    /// Whether it is only reported what would be decided: nothing is changed or tried.
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    pub observe: bool,
    /// What is in force whatever is expected of it.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub pin: Option<Pin>,
}

/// A plan that is in force until a time.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Pin {
    /// Of all buckets, or of each.
    pub strategy: StrategyWire,
    /// RFC 3339; from then on the pin has no effect. Null: until the policy is changed.
    #[serde(default)]
    pub until: Option<String>,
}

/// What is set for a job, by whom, and what decisions are made by: `GET /api/v1/jobs/{id}/policy`, and the answer to `DELETE`.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct PolicyView {
    /// What is set.
    pub policy: JobPolicy,
    /// `operator`: over REST. `script`: in the training script. `controller`: nothing is set for the job, and the controller's
    /// configuration counts alone.
    pub source: String,
    /// What decisions are made by.
    pub in_force: InForce,
}

/// What decisions of a job are made by: its policy, and the controller's configuration in what the policy leaves open.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct InForce {
    /// How candidates are ranked: the name of a policy and its settings. Null where a setting follows from the job: `exponent`,
    /// `momentum` and `steps`.
    pub objective: serde_json::Value,
    /// Compressors that may be decided where the trainers offer them, besides dense: names with any parameters, or with those that they
    /// have here. Null: all that the trainers offer as candidates.
    pub compressors: Option<Vec<String>>,
    /// Least effective gain of what is decided.
    pub least_gain: f64,
    /// The probability of being better that is asked of a change.
    pub confidence: f64,
}

/// Answer to `PUT /api/v1/jobs/{id}/policy`.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct PolicySet {
    /// What counts from now on, compressors by the names that they have here.
    #[serde(flatten)]
    pub policy: JobPolicy,
    /// Kinds that are listed and no candidates as things are.
    pub not_offered: Vec<NotOffered>,
    /// What cannot be said yet, as a sentence.
    pub note: Option<String>,
}

/// A kind of compressors that a job's policy lists and that cannot be decided.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct NotOffered {
    /// Which.
    pub kind: String,
    /// Why not, and what to do, as a sentence.
    pub why: String,
}

/// A node whose reports on one matter are not counted.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct DoubtView {
    /// Which; null where no agent has announced the rank.
    pub node: Option<NodeName>,
    /// What it reports, against what, as a sentence.
    pub what: String,
}

/// The end of a run.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct EndedView {
    /// When, RFC 3339.
    pub at: String,
    /// The same in microseconds since the epoch.
    pub at_us: u64,
    /// `left`: every rank said goodbye. `connection-lost`: a trainer's connection ended without one. `agents-silent`: its
    /// agents were silent for too long. `replaced`: another run began under its name. `unknown`: it ended under a release
    /// that did not keep this.
    pub how: String,
}

/// One entry of `GET /api/v1/jobs/{id}/runs`: a run before the one that has the job's name now.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct RunView {
    /// Its id; null where its trainers had none.
    pub run: Option<RunId>,
    /// N.
    pub world: u32,
    /// When its first rank was seen, RFC 3339.
    pub began: String,
    /// How it ended.
    pub ended: EndedView,
    /// Its newest step.
    pub step: Option<u64>,
    /// Its newest decision's version; that of the run before where it had none.
    pub version: u64,
    /// Its newest training loss.
    pub loss: Option<f64>,
    /// Its newest held-out accuracy.
    pub accuracy: Option<f64>,
}

/// A part of a job that no agent shows.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct MissingView {
    /// Which node; null where no agent has announced the ranks.
    pub node: Option<NodeName>,
    /// Its ranks of the job.
    pub ranks: Vec<u32>,
    /// When its agent sent something last, RFC 3339.
    pub since: String,
    /// The same in microseconds since the epoch.
    pub since_us: u64,
    /// What it means for the job, as a sentence.
    pub meaning: String,
}

/// The decision in force, `GET /api/v1/jobs/{id}/decision`.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct DecisionView {
    /// Which job.
    pub job: JobId,
    /// Only grows.
    pub version: u64,
    /// The version it replaced.
    pub parent: u64,
    /// The canonical text of what was decided: of one strategy for all buckets, as `attach(strategy=...)` and `flexcomm lab worker
    /// --strategy` take it; by bucket as `2x none/dense-ring | topk(k=0.01)+ef(vanilla)/allgather`. What follows is of the last bucket.
    #[serde(default)]
    pub strategy: String,
    /// Kept share of values; 1 where none are left out: dense, halves, quantizers, low rank.
    pub cr: f64,
    /// How values travel.
    pub collective: String,
    /// How they are selected.
    pub compressor: String,
    /// `star` or `var`, for the art collectives.
    pub selection: Option<String>,
    /// When it was made, RFC 3339.
    pub since: String,
    /// The same in microseconds since the epoch.
    pub since_us: u64,
    /// First step under it; null until every rank has reported it.
    pub applied_at_step: Option<u64>,
    /// One sentence why.
    pub reason: String,
}

/// One entry of `GET /api/v1/jobs/{id}/history`.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct HistoryEntry {
    /// The decision.
    #[serde(flatten)]
    pub decision: DecisionView,
    /// The planner's report: inputs, model terms, front, alternatives.
    pub report: serde_json::Value,
}

/// One entry of `GET /api/v1/jobs/{id}/snapshots`: a decision, or the newest look at a running job that decided nothing.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct SnapshotEntry {
    /// Of the decision; of a look, the version in force.
    pub version: u64,
    /// Everything that it was made from, and what came of it; absent where that is not known.
    pub recorded: Option<Recording>,
    /// Why that is not known, as a sentence.
    pub missing: Option<String>,
}

/// What a decision was made from and what came of it: enough to decide again.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct Recording {
    /// The version of flexcomm that decided.
    pub software: String,
    /// Of the planner's randomness.
    pub seed: u64,
    /// The planner's report, with the time of the decision.
    pub report: serde_json::Value,
    /// The planner's input; its form belongs to the version that decided.
    pub snapshot: Box<RawValue>,
}

/// One entry of `GET /api/v1/jobs/{id}/trials`.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct TrialView {
    /// Only grows within the job.
    pub id: u64,
    /// When it was asked for, RFC 3339.
    pub asked_at: String,
    /// `pending`, `done` or `aborted`.
    pub state: String,
    /// What was to be tried.
    pub candidates: Vec<StrategyWire>,
    /// What it found (rank 0's averages).
    pub outcomes: Vec<TrialOutcome>,
    /// Why it did not run all of them.
    pub aborted: Option<String>,
}

/// One entry of `GET /api/v1/jobs/{id}/experiments`: what all experiments of one kind took since the run began.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct ExperimentView {
    /// `throughput-test` (between two nodes of the job, whichever job asked for it), `live-trial` or `shadow-trial`.
    pub kind: String,
    /// How many.
    pub count: u64,
    /// Seconds: of tests those that they lasted, while training went on; of live trials those in which nothing was trained; of shadow
    /// trials those of rank 0's steps, on its processors.
    pub seconds: f64,
    /// The same over the seconds of the run; of tests times 2/n for n nodes of the job, since a test occupies two of them and several
    /// run at once.
    pub share: f64,
    /// Bytes that tests sent, both directions together, and that rank 0 sent in live trials; null of shadow trials, which send next to
    /// nothing, and where a trainer does not report it.
    pub bytes: Option<u64>,
    /// Processor time, seconds: of tests at the end that began them, of trials of rank 0; null where a trainer does not report it.
    pub cpu_s: Option<f64>,
}

/// `PUT /api/v1/scenario`: what every shaping agent's link should look like now (lab only).
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ScenarioSet {
    /// A label for people, for example `C1 epoch 13`.
    pub label: String,
    /// One-way delay on egress.
    pub latency_us: f64,
    /// Its standard deviation.
    #[serde(default)]
    pub jitter_us: f64,
    /// Share of packets dropped.
    #[serde(default)]
    pub loss: f64,
    /// Egress rate.
    pub bandwidth_bps: f64,
    /// Only these nodes; absent: all that may shape.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub nodes: Option<Vec<NodeName>>,
}

/// `GET /api/v1/scenario`: what was asked for and who follows.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct ScenarioView {
    /// The order's id; 0 when nothing was asked.
    pub id: u64,
    /// What was asked.
    pub set: Option<ScenarioSet>,
    /// Nodes that reported it in force.
    pub in_force: Vec<NodeName>,
    /// Nodes that refused, with their reason.
    pub refused: Vec<(NodeName, String)>,
}

/// One entry of `GET /api/v1/jobs/{id}/intervals`: a run of steps under one decision, with what the model
/// predicted for it from what was known when it began, and what was measured.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct IntervalView {
    /// The decision in force during all of it; 0 before the first.
    pub version: u64,
    /// What ran.
    pub strategy: StrategyWire,
    /// First and last step.
    pub from_step: u64,
    /// First and last step.
    pub to_step: u64,
    /// When its last step was stored.
    pub at_us: u64,
    /// The collective, as expected before the interval began of all that was measured until then; null where nothing was expected.
    pub predicted_sync_us: Option<f64>,
    /// The collective, from the last rank's entry to the last rank's end: median over steps.
    pub measured_sync_us: f64,
    /// Compress and decompress, of the rank that came last: median over steps.
    #[serde(default)]
    pub measured_comp_us: Option<f64>,
    /// Bytes that a rank sent per step: mean over ranks, median over steps.
    #[serde(default)]
    pub bytes_sent: Option<f64>,
    /// Share of the gradient's energy that was sent: over all ranks, median over steps.
    #[serde(default)]
    pub gain: Option<f64>,
    /// The step, predicted.
    pub predicted_step_us: Option<f64>,
    /// The step: median.
    pub measured_step_us: f64,
}
