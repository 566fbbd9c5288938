//! What a call saw, what it chose, what the alternatives would cost, and why.

use crate::memory::LinkSummary;
use crate::{LeftOut, LossWatch, Losses, Measured};
use flexcomm_domain::{Decision, Family, Gain, JobId, Plan, Seconds, Strategy, Timestamp, Version};
use flexcomm_optimizer::{Solver, Terms};
use serde::{Deserialize, Serialize};

/// What [`crate::decide`] answers.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Outcome {
    /// A new decision, or why the one in force stays.
    pub verdict: Verdict,
    /// The whole account.
    pub report: Report,
    /// To be handed back with the next snapshot.
    pub memory: crate::Memory,
    /// A trial that should run now.
    pub trial: Option<TrialRequest>,
}

impl Outcome {
    /// The new decision, if there is one.
    pub fn decision(&self) -> Option<&Decision> {
        match &self.verdict {
            Verdict::Change(decision) => Some(decision),
            Verdict::Keep(_) => None,
        }
    }
}

/// Change or keep. No change is a decision too, with its reason.
#[expect(clippy::large_enum_variant, reason = "there is one per call")]
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Verdict {
    /// To be checked, stored and published.
    Change(Decision),
    /// Nothing changes.
    Keep(Keep),
}

/// Why nothing changes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Keep {
    /// The snapshot's parts do not fit together.
    InvalidSnapshot,
    /// No estimate covers all links of the job.
    NoLinks,
    /// The first decision waits for the first steps: until they are reported nothing is surely better.
    NoCompute,
    /// The first decision waits for the first trial.
    AwaitingTrial,
    /// Nothing is expected to be better than the strategy in force.
    AlreadyBest,
    /// Something is expected to be better, but not surely enough, or it saves less than the switch costs.
    NotSure,
    /// A better one exists; the one in force has not been there for long enough.
    Dwell,
    /// A better one exists; the newest decision is not in force on every rank yet.
    NotApplied,
    /// The job's policy has pinned what is in force.
    Pinned,
    /// There is something to change to, and the job's policy only observes.
    Observing,
    /// The loss rose while gradients were compressed, and has not come back yet.
    LossRose,
    /// The loss did not fall while gradients were compressed, and dense steps are tested.
    LossFlat,
}

impl Keep {
    /// All of them.
    pub const ALL: [Self; 12] = [
        Self::InvalidSnapshot,
        Self::NoLinks,
        Self::NoCompute,
        Self::AwaitingTrial,
        Self::AlreadyBest,
        Self::NotSure,
        Self::Dwell,
        Self::NotApplied,
        Self::Pinned,
        Self::Observing,
        Self::LossRose,
        Self::LossFlat,
    ];

    /// The name in metrics and on the wire.
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::InvalidSnapshot => "invalid-snapshot",
            Self::NoLinks => "no-links",
            Self::NoCompute => "no-compute",
            Self::AwaitingTrial => "awaiting-trial",
            Self::AlreadyBest => "already-best",
            Self::NotSure => "not-sure",
            Self::Dwell => "dwell",
            Self::NotApplied => "not-applied",
            Self::Pinned => "pinned",
            Self::Observing => "observing",
            Self::LossRose => "loss-rose",
            Self::LossFlat => "loss-flat",
        }
    }
}

/// A trial that the caller should order: snapshot, run each candidate, restore.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct TrialRequest {
    /// One per selector and ratio, by the collective that is cheapest for it; at most [`crate::MAX_TRIAL_CANDIDATES`].
    pub candidates: Vec<Strategy>,
    /// Iterations per candidate.
    pub iterations: u32,
    /// The trial stops after this long, with what it has.
    pub budget: Seconds,
    /// One sentence why.
    pub why: String,
}

/// What a call saw, what it chose, what the alternatives would cost, and why.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Report {
    /// Which job.
    pub job: JobId,
    /// The caller's time.
    pub at: Timestamp,
    /// `change` or the [`Keep`]'s name.
    pub verdict: String,
    /// One sentence why, in plain words with numbers.
    pub why: String,
    /// What was seen.
    pub seen: Observed,
    /// What changed since the last decision, in words; absent when the links did not.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub changed: Option<String>,
    /// The strategy in force when the call was made, as it is believed to cost now.
    pub in_force: Option<Alternative>,
    /// The step that the links claim for the strategy in force where its newest steps show a network that is far faster, seconds.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub contradicted_s: Option<f64>,
    /// The best one as expected, whether chosen or not.
    pub best: Option<Alternative>,
    /// The plan that runs from here on.
    pub chosen: Plan,
    /// What it would change to, where the job's policy only observes.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub proposed: Option<Plan>,
    /// Who found the plan that runs: the list of candidates, or the search by bucket.
    #[serde(default = "listed")]
    pub solver: Solver,
    /// The policy that ranks.
    pub policy: String,
    /// Every candidate, best first.
    pub alternatives: Vec<Alternative>,
    /// What the job offers and is no candidate, each with the reason.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub left_out: Vec<(Family, LeftOut)>,
    /// The candidates on the Pareto front of (t_comp, t_sync, 1/gain).
    pub front: Vec<Plan>,
    /// The trial that is asked for or awaited, in words.
    pub trial: Option<String>,
    /// For how long a saving counts, seconds: the time to the next change of the network as expected, at least 20 s and 20 steps, or to the job's
    /// end.
    #[serde(default)]
    pub horizon_s: f64,
    /// Seconds that one more throughput test is expected to save within the horizon, at most 156 s of it. 0 where nothing is compared, what
    /// runs is pinned, the policy only observes, or dense runs since the loss rose.
    #[serde(default)]
    pub test_worth_s: f64,
}

/// Of reports before there was a search.
fn listed() -> Solver {
    Solver::Enumeration
}

/// The inputs in short.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Observed {
    /// N.
    pub ranks: u32,
    /// Values in the fused gradient.
    pub gradient_values: u64,
    /// What moves the bytes.
    pub backend: String,
    /// The version in force.
    pub version: Version,
    /// The links now.
    pub links: Option<LinkSummary>,
    /// The links at the last decision.
    pub links_before: Option<LinkSummary>,
    /// Age of the newest sample of the link that was heard of last, seconds.
    pub links_age_s: Option<f64>,
    /// Age of the oldest newest sample of a latency, seconds.
    pub links_oldest_s: Option<f64>,
    /// Least confidence, 0 to 1.
    pub links_confidence: Option<f64>,
    /// What a step takes besides compressing and communicating, seconds.
    pub compute_s: Option<f64>,
    /// What the steps under the decision in force cost.
    pub measured: Option<Measured>,
    /// What training lost in the newest steps, and before the decision in force.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub losses: Option<Losses>,
    /// Dense stays until the loss is as low as this.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub loss_limit: Option<f64>,
    /// Whether the loss falls at all since the run began.
    #[serde(default)]
    pub loss_watch: LossWatch,
    /// Whether trials have measured gains and compression times.
    pub profile_measured: bool,
}

/// One candidate with everything that is predicted of it.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Alternative {
    /// Which.
    #[serde(rename = "strategy")]
    pub plan: Plan,
    /// Compress and decompress, seconds.
    pub t_comp_s: f64,
    /// What a step waits for the collective, seconds, as expected of all that was measured: the median of the samples.
    pub t_sync_s: f64,
    /// The whole step, seconds.
    pub t_step_s: f64,
    /// Predicted gain.
    pub gain: Gain,
    /// 1/gain as policies compare it and limits are held against it: over buckets the mean in logarithms, of AR-Topk by what it makes of the
    /// gain. Absent from reports of earlier releases.
    #[serde(default)]
    pub inverse_gain: Option<f64>,
    /// The relative variance that an unbiased compressor without error feedback adds to the mean, ω/N; else 0.
    #[serde(default)]
    pub variance: f64,
    /// What the policy minimises, in the mean of the samples; absent when it does not admit the candidate.
    pub score: Option<f64>,
    /// Whether it is on the Pareto front.
    pub on_front: bool,
    /// The share of what is in force that it saves, as expected; negative where it costs more. Absent where policy or settings do not
    /// admit one of the two.
    #[serde(default)]
    pub saves: Option<f64>,
    /// The probability that it is better than what is in force; likewise.
    #[serde(default)]
    pub sure: Option<f64>,
    /// The latency and bandwidth terms of its collective over the links as believed; of a plan by bucket the last bucket's.
    pub terms: Terms,
}
