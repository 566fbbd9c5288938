//! What a call saw, what it chose, what the alternatives would cost, and why.

use crate::memory::{Blocked, LinkSummary};
use crate::{LeftOut, Measured, Trigger};
use flexcomm_domain::{
    Collective, CompressionRatio, Decision, Family, Gain, JobId, Seconds, Strategy, Timestamp, Version,
};
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
    /// The links are too old or too uncertain to act on.
    UntrustedLinks,
    /// The first decision waits for the first step reports: the step time is not known.
    NoCompute,
    /// The first decision waits for the first trial.
    AwaitingTrial,
    /// Nothing moved since the last look.
    NothingMoved,
    /// The strategy in force is the best.
    AlreadyBest,
    /// A better one exists, by less than the margin.
    Hysteresis,
    /// A better one exists, but the switch costs more than it brings.
    SwitchCost,
    /// A better one exists; the one in force has not been there for long enough.
    Dwell,
    /// A better one exists; the newest decision is not in force on every rank yet.
    NotApplied,
    /// A better one exists; the links were still moving a moment ago.
    LinksMoving,
    /// A better one exists by what the links claim now, but the newest steps tell of another network.
    LinksContradicted,
    /// It is slower than predicted, but nothing known is better.
    NothingBetter,
}

impl Keep {
    /// The name in metrics and on the wire.
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::InvalidSnapshot => "invalid-snapshot",
            Self::NoLinks => "no-links",
            Self::UntrustedLinks => "untrusted-links",
            Self::NoCompute => "no-compute",
            Self::AwaitingTrial => "awaiting-trial",
            Self::NothingMoved => "nothing-moved",
            Self::AlreadyBest => "already-best",
            Self::Hysteresis => "hysteresis",
            Self::SwitchCost => "switch-cost",
            Self::Dwell => "dwell",
            Self::NotApplied => "not-applied",
            Self::LinksMoving => "links-moving",
            Self::LinksContradicted => "links-contradicted",
            Self::NothingBetter => "nothing-better",
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
    /// What made the planner look again; empty when nothing moved.
    pub triggers: Vec<Trigger>,
    /// The strategy in force when the call was made, as it is believed to cost now.
    pub in_force: Option<Alternative>,
    /// The step that the links claim for the strategy in force where its newest steps tell of another network, seconds.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub contradicted_s: Option<f64>,
    /// The best one, whether chosen or deferred.
    pub best: Option<Alternative>,
    /// The strategy that runs from here on.
    pub chosen: Strategy,
    /// The policy that ranks.
    pub policy: String,
    /// Every candidate, best first.
    pub alternatives: Vec<Alternative>,
    /// What the job offers and is no candidate, each with the reason.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub left_out: Vec<(Family, LeftOut)>,
    /// The candidates on the Pareto front of (t_comp, t_sync, 1/gain).
    pub front: Vec<Strategy>,
    /// Strategies not to return to for a while.
    pub blocked: Vec<Blocked>,
    /// Whether this is a rollback by the guard.
    pub rollback: bool,
    /// The trial that is asked for or awaited, in words.
    pub trial: Option<String>,
    /// With several buckets, and when everything was solved: the best ratio for each. Advice so far, since a decision
    /// has one ratio.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub buckets: Option<BucketReport>,
}

/// A ratio per bucket, with what it would cost if each bucket is sent by itself.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct BucketReport {
    /// How it was found.
    pub solver: Solver,
    /// Seed of the search; without effect where every plan was listed.
    pub seed: u64,
    /// Points of the front.
    pub front: usize,
    /// What the values are selected by; `none` when dense.
    pub compressor: Family,
    /// How they travel.
    pub collective: Collective,
    /// A ratio per bucket, in the snapshot's order.
    pub crs: Vec<CompressionRatio>,
    /// Compress and decompress, seconds.
    pub t_comp_s: f64,
    /// The collectives of all buckets one after the other, seconds.
    pub t_sync_s: f64,
    /// The whole step, seconds.
    pub t_step_s: f64,
    /// Predicted gain of the whole gradient.
    pub gain: Gain,
    /// What the policy minimises; absent when it does not admit the plan.
    pub score: Option<f64>,
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
    /// The links that were last solved for.
    pub links_before: Option<LinkSummary>,
    /// Age of the newest sample of the link that was heard of last, seconds.
    pub links_age_s: Option<f64>,
    /// Age of the oldest newest sample, latency and bandwidth apart, seconds.
    pub links_oldest_s: Option<f64>,
    /// Least confidence, 0 to 1.
    pub links_confidence: Option<f64>,
    /// What a step takes besides compressing and communicating, seconds.
    pub compute_s: Option<f64>,
    /// What the steps under the decision in force cost.
    pub measured: Option<Measured>,
    /// The gain predicted for the strategy in force is that of the last trial to this power, because settled steps
    /// keep more or less than the trial said; other ratios follow it.
    pub gain_correction: Option<f64>,
    /// Whether gain and compression time come from trials (else from the prior).
    pub profile_measured: bool,
}

/// One candidate with everything that is predicted of it.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Alternative {
    /// Which.
    pub strategy: Strategy,
    /// Compress and decompress, seconds.
    pub t_comp_s: f64,
    /// The collective, seconds: by the model, calibrated by what the job has measured itself.
    pub t_sync_s: f64,
    /// The collective by the model alone, seconds.
    pub model_sync_s: f64,
    /// The whole step, seconds.
    pub t_step_s: f64,
    /// Predicted gain.
    pub gain: Gain,
    /// The relative variance that an unbiased compressor without error feedback adds to the mean, ω/N; else 0.
    #[serde(default)]
    pub variance: f64,
    /// What the policy minimises; absent when it does not admit the candidate (gain below the floor).
    pub score: Option<f64>,
    /// Whether it is on the Pareto front.
    pub on_front: bool,
    /// Whether a rollback keeps it from being chosen.
    pub blocked: bool,
    /// The latency and bandwidth terms behind `t_sync_s`, before the fitted coefficients.
    pub terms: Terms,
}
