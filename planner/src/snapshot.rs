//! Everything a decision needs, gathered by the caller; plain data that can be stored and replayed.

use crate::{Config, JobPolicy, Memory};
use flexcomm_domain::{
    Bandwidth, CodecBytes, Collective, Decision, Family, Gain, Invalid, JobId, LinkMatrix, Plan, Seconds, Selector,
    Strategy, Timestamp, Version,
};
use flexcomm_estimation::{DELAY_STEPS, Delay, Profile, TestKind, Times};
use flexcomm_optimizer::Problem;
use serde::{Deserialize, Serialize};
use std::collections::{BTreeMap, BTreeSet};

/// Most buckets that a job may send its gradient in.
const MAX_BUCKETS: usize = 4096;

/// The state of one job and of its network at one moment.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Snapshot {
    /// Which job.
    pub job: JobId,
    /// When its run began. A memory of another run is one of an earlier run, or of a job that was like this one.
    #[serde(default)]
    pub begun: Timestamp,
    /// N, ranks of the job.
    pub ranks: u32,
    /// Values in the fused gradient; M is 4 times that in bytes.
    pub gradient_values: u64,
    /// Values in each bucket of the gradient, in the order in which backward has them ready; empty: it is fused.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub buckets: Vec<u64>,
    /// The share of each of these buckets in the energy ‖g‖² of the gradient before error feedback, as the newest steps show it. Where it
    /// has not as many numbers as there are buckets, it is that of their values.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub energies: Vec<f32>,
    /// What moves the bytes; what earlier jobs have shown of collectives counts where theirs was the same.
    pub backend: String,
    /// Exponent of the overlap of computation and communication, 1 (none) to 10; see [`Problem::overlap`].
    pub overlap: f64,
    /// What the job's trainers can do.
    pub offer: Offer,
    /// What is set for this job. Under the name `kinds` earlier releases stored all that there was of it.
    #[serde(default, alias = "kinds", skip_serializing_if = "JobPolicy::is_default")]
    pub policy: JobPolicy,
    /// The links between its ranks; absent while one of them has no latency or no throughput test.
    pub links: Option<Links>,
    /// gain(c) and t_comp(c) as far as measured.
    pub profiles: Profiles,
    /// What compressing takes on the job's machines where no profile tells it.
    #[serde(default)]
    pub times: Times,
    /// Median of what a step takes besides compressing and communicating: forward, backward, optimizer,
    /// waiting for data and for late ranks. Absent before the first steps were reported.
    pub compute: Option<Seconds>,
    /// The newest version that earlier runs under the job's name had; 0 when there were none. Versions go on from it.
    #[serde(default)]
    pub earlier: Version,
    /// What the job runs before its first decision, as its steps say: what its user named, else [`Strategy::DENSE_RING`], which counts
    /// until a step was reported, too.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub begun_with: Option<Plan>,
    /// The newest decision; absent before the first.
    pub in_force: Option<InForce>,
    /// What the newest steps under the decision in force cost.
    pub measured: Option<Measured>,
    /// What iterations of the newest live trial that has ended waited for their collectives.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub trial: Option<TrialWaits>,
    /// The training loss before and since the newest decision.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub losses: Option<Losses>,
    /// How many steps it has taken.
    #[serde(default)]
    pub steps_taken: u64,
    /// What the last call returned; default for the first.
    pub memory: Memory,
    /// The operator's settings.
    pub config: Config,
}

/// What the job's trainers can do: the intersection over its ranks.
#[derive(Debug, Clone, PartialEq, Default, Serialize, Deserialize)]
pub struct Offer {
    /// Compressors with the bytes they really send.
    pub codecs: BTreeMap<Family, CodecBytes>,
    /// Collectives.
    pub collectives: Vec<Collective>,
    /// Those of the compressors that are candidates only where the job's policy or the settings name them.
    #[serde(default, skip_serializing_if = "BTreeSet::is_empty")]
    pub on_request: BTreeSet<Family>,
}

/// The job's part of the link matrix, and how far it can be trusted.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(try_from = "StoredLinks")]
pub struct Links {
    /// alpha and bandwidth between every two ranks, and on which node each is.
    pub matrix: LinkMatrix,
    /// Age of the newest sample of any kind of the link of which none came for longest: whether the view is alive.
    pub age: Seconds,
    /// Age of the oldest newest sample of a latency: since when all have been measured anew.
    pub oldest: Seconds,
    /// Least confidence over the latencies of all links, 0 to 1.
    pub confidence: f64,
    /// The newest throughput tests between nodes, by each of their ends, in the order of their times.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub tests: Vec<LinkTest>,
}

/// Links as they are stored: earlier releases stored the nodes of ranks beside their matrix.
#[derive(Deserialize)]
struct StoredLinks {
    matrix: LinkMatrix,
    age: Seconds,
    oldest: Seconds,
    confidence: f64,
    #[serde(default)]
    nodes: Vec<u32>,
    #[serde(default)]
    tests: Vec<LinkTest>,
}

impl TryFrom<StoredLinks> for Links {
    type Error = Invalid;

    fn try_from(stored: StoredLinks) -> Result<Self, Invalid> {
        let StoredLinks { matrix, age, oldest, confidence, nodes, tests } = stored;
        let matrix = if nodes.is_empty() { matrix } else { matrix.on_nodes(nodes)? };
        Ok(Self { matrix, age, oldest, confidence, tests })
    }
}

/// What a throughput test between two nodes found.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct LinkTest {
    /// From this node,
    pub from: u32,
    /// to this one.
    pub to: u32,
    /// What arrived, bit/s.
    pub bandwidth: Bandwidth,
    /// Whether the link may be faster.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub is_lower_bound: bool,
    /// Whether it was over so soon that a shaper's token bucket may have let all of it pass.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub is_short: bool,
    /// When it was reported.
    pub at: Timestamp,
}

impl LinkTest {
    /// None where it tells nothing: the link may be faster, and slower.
    pub(crate) fn kind(&self) -> Option<TestKind> {
        match (self.is_short, self.is_lower_bound) {
            (true, true) => None,
            (true, false) => Some(TestKind::Short),
            (false, true) => Some(TestKind::LowerBound),
            (false, false) => Some(TestKind::Whole),
        }
    }
}

/// Profiles per selector. Without any, the optimizer's prior predicts.
#[derive(Debug, Clone, PartialEq, Default, Serialize, Deserialize)]
pub struct Profiles {
    /// As measured by trials.
    pub by_selector: BTreeMap<Selector, Profile>,
    /// When the newest trial ended or its shadows reported it; absent while nothing is measured. A new time means a new
    /// profile.
    pub measured_at: Option<Timestamp>,
    /// When the newest trial ended that ran something live and timed it; absent where shadows alone were asked.
    pub tried_at: Option<Timestamp>,
    /// When the newest trial ended that reported anything, live or by shadows. Its shadows report more later, also while a newer
    /// one runs; that is no answer of the newer one.
    pub ended_at: Option<Timestamp>,
    /// Whether its gains are of residuals that have grown (shadow trials), not of a live trial's few iterations.
    #[serde(default)]
    pub long_run: bool,
}

/// The newest decision and how far it has got.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct InForce {
    /// As published.
    pub decision: Decision,
    /// The first step under it, once every rank has reported that.
    pub applied_at_step: Option<u64>,
}

/// Medians over the newest steps under the decision in force.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct Measured {
    /// The decision they ran under; 0 before the first. Measurements of another version are ignored.
    pub version: Version,
    /// How many steps.
    pub steps: u64,
    /// The whole step.
    pub t_step: Seconds,
    /// Compress and decompress.
    pub t_comp: Seconds,
    /// The collective proper.
    pub t_sync: Seconds,
    /// Gain; 1 when dense.
    pub gain: Gain,
    /// Relative half-width of the noise of `gain`, for example its median absolute deviation over its median;
    /// 0 when unknown.
    #[serde(default)]
    pub gain_spread: f64,
    /// Between which times the steps lie; absent when only medians are known.
    pub scatter: Option<Scatter>,
}

/// What iterations of a live trial waited for their collectives.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct TrialWaits {
    /// Its number; they grow.
    pub id: u64,
    /// When it was asked for.
    pub asked: Timestamp,
    /// When it ended.
    pub ended: Timestamp,
    /// What it took of training: snapshot, iterations and restoring together, of the rank that took longest.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub cost: Option<Seconds>,
    /// Of each strategy that ran so many, at most.
    pub iterations: u32,
    /// Of each strategy that ran, the mean over the iterations until the last rank was done.
    pub sync: Vec<(Strategy, Seconds)>,
}

/// The training loss of the newest steps, and of those before the newest decision came into force.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct Losses {
    /// The decision. Losses of another version are ignored.
    pub version: Version,
    /// The first of the run, while it is at its beginning.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub began: Option<f64>,
    /// The lowest of the last 256 reported before it; absent where too few of these reported a loss.
    pub before: Option<MeanLoss>,
    /// Of the newest steps.
    pub newest: MeanLoss,
}

/// A mean over some steps and ranks.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct MeanLoss {
    /// Its value.
    pub mean: f64,
    /// Its standard error.
    pub sd: f64,
    /// The first of these steps; 0 in snapshots of earlier builds.
    #[serde(default)]
    pub first_step: u64,
    /// The last one.
    #[serde(default)]
    pub last_step: u64,
}

/// Between which times the newest steps lie, but for one in twenty at either end.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct Scatter {
    /// The least whole step.
    pub step_low: Seconds,
    /// The longest whole step.
    pub step_high: Seconds,
    /// The least collective.
    pub sync_low: Seconds,
    /// The longest collective.
    pub sync_high: Seconds,
}

impl Scatter {
    /// By how much the median over so many steps is off, as a logarithm: nine of ten collectives lie between these times.
    pub(crate) fn of_sync_median(&self, steps: u64) -> f64 {
        /// Standard deviations of a normal distribution between which nine tenths lie.
        const NINE_TENTHS: f64 = 3.29;
        /// The standard error of a median over that of a mean.
        const MEDIAN: f64 = 1.25;
        /// What varies by less is no scatter, seconds.
        const GRAIN_S: f64 = 1e-4;
        let ratio = (self.sync_high.get() + GRAIN_S) / (self.sync_low.get() + GRAIN_S);
        MEDIAN * ratio.ln().max(0.0) / NINE_TENTHS / (steps.max(1) as f64).sqrt()
    }
}

/// A snapshot whose parts do not fit together. Completes "failed to decide: ...".
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
pub enum SnapshotError {
    /// The matrix is not the job's.
    #[error("the link matrix spans {matrix} ranks, the job has {ranks}")]
    Matrix {
        /// Ranks of the matrix.
        matrix: usize,
        /// Ranks of the job.
        ranks: u32,
    },
    /// A number outside its range.
    #[error("{what} is {value}, allowed is {allowed}")]
    Range {
        /// Which.
        what: &'static str,
        /// As given.
        value: f64,
        /// The allowed range.
        allowed: &'static str,
    },
    /// The decision in force belongs to another job.
    #[error("the decision in force is of job {found}, the snapshot of job {expected}")]
    Job {
        /// Of the decision.
        found: JobId,
        /// Of the snapshot.
        expected: JobId,
    },
    /// The settings make no sense.
    #[error(transparent)]
    Config(#[from] crate::ConfigError),
}

impl Snapshot {
    /// A job of which only its size is known: everything offered that the optimizer's default space holds.
    pub fn new(job: JobId, ranks: u32, gradient_values: u64) -> Self {
        Self {
            job,
            begun: Timestamp::default(),
            ranks,
            gradient_values,
            buckets: Vec::new(),
            energies: Vec::new(),
            backend: String::new(),
            overlap: 1.0,
            offer: Offer {
                codecs: "topk".parse().into_iter().map(|topk| (topk, CodecBytes::PAPER)).collect(),
                collectives: Collective::ALL.to_vec(),
                ..Offer::default()
            },
            policy: JobPolicy::default(),
            links: None,
            profiles: Profiles::default(),
            times: Times::default(),
            compute: None,
            earlier: Version(0),
            begun_with: None,
            in_force: None,
            measured: None,
            trial: None,
            losses: None,
            steps_taken: 0,
            memory: Memory::default(),
            config: Config::default(),
        }
    }

    /// What the ranks run now.
    pub fn plan(&self) -> &Plan {
        let decided = self.in_force.as_ref().map(|f| &f.decision.plan);
        decided.or(self.begun_with.as_ref()).unwrap_or(&Plan::DENSE_RING)
    }

    /// The version in force; 0 before the first decision.
    pub fn version(&self) -> Version {
        self.in_force.as_ref().map_or(Version(0), |f| f.decision.version)
    }

    /// The version that the next decision is made from.
    pub fn newest_version(&self) -> Version {
        self.version().max(self.earlier)
    }

    /// The measurements that belong to the decision in force.
    pub fn measured_now(&self) -> Option<&Measured> {
        self.measured.as_ref().filter(|m| m.version == self.version() && m.steps > 0)
    }

    /// Steps that the training still has, where its policy says how many it has in all and it has not taken more.
    pub fn steps_left(&self) -> Option<f64> {
        let left = self.config.policy.time_to_quality().steps.map(|steps| steps - self.steps_taken as f64);
        left.filter(|left| *left > 0.0)
    }

    /// What delay costs in the steps to come. Where their number is not known as many are expected as were taken, at least those
    /// that the law was fitted to.
    pub fn delay(&self) -> Delay {
        let to_come = self.steps_left().unwrap_or(DELAY_STEPS.max(self.steps_taken as f64));
        self.config.policy.time_to_quality().delay_in(Some(to_come))
    }

    /// The losses around the decision in force.
    pub fn losses_now(&self) -> Option<&Losses> {
        self.losses.as_ref().filter(|losses| losses.version == self.version())
    }

    /// Names the first thing that does not fit.
    pub fn check(&self) -> Result<(), SnapshotError> {
        self.config.check()?;
        let range = |what, value: f64, ok: bool, allowed| {
            if ok { Ok(()) } else { Err(SnapshotError::Range { what, value, allowed }) }
        };
        range("number of ranks", f64::from(self.ranks), self.ranks >= 1, "1 or more")?;
        range("number of gradient values", self.gradient_values as f64, self.gradient_values >= 1, "1 or more")?;
        range("overlap exponent", self.overlap, (1.0..=10.0).contains(&self.overlap), "1 to 10")?;
        self.check_buckets()?;
        if let Some(links) = &self.links {
            if links.matrix.ranks() != self.ranks as usize {
                return Err(SnapshotError::Matrix { matrix: links.matrix.ranks(), ranks: self.ranks });
            }
            let confidence = links.confidence;
            range("confidence of the links", confidence, (0.0..=1.0).contains(&confidence), "0 to 1")?;
        }
        if let Some(m) = &self.measured {
            range("spread of the gain", m.gain_spread, (0.0..=10.0).contains(&m.gain_spread), "0 to 10")?;
            if let Some(x) = &m.scatter {
                let ordered = x.step_low <= x.step_high && x.sync_low <= x.sync_high;
                range("least of the newest steps' times", x.step_low.get(), ordered, "at most their longest")?;
            }
        }
        if let Some(losses) = &self.losses {
            let means = losses.before.iter().chain([&losses.newest]);
            let bad = means.flat_map(|loss| [loss.mean, loss.sd]).find(|value| !value.is_finite());
            bad.map_or(Ok(()), |value| Err(SnapshotError::Range { what: "loss", value, allowed: "a number" }))?;
        }
        match &self.in_force {
            Some(f) if f.decision.job != self.job => {
                Err(SnapshotError::Job { found: f.decision.job.clone(), expected: self.job.clone() })
            }
            _ => Ok(()),
        }
    }

    fn check_buckets(&self) -> Result<(), SnapshotError> {
        let refuse = |what, value, allowed| Err(SnapshotError::Range { what, value, allowed });
        if self.buckets.is_empty() {
            return Ok(());
        }
        if self.buckets.len() > MAX_BUCKETS {
            return refuse("number of buckets", self.buckets.len() as f64, "at most 4096");
        }
        let values = self.buckets.iter().fold(0u64, |sum, n| sum.saturating_add(*n));
        if values != self.gradient_values || self.buckets.contains(&0) {
            return refuse("sum of the buckets' values", values as f64, "that of the gradient, none of them empty");
        }
        let bad = self.energies.iter().find(|share| !(0.0..=1.0).contains(*share));
        bad.map_or(Ok(()), |share| refuse("share of a bucket in the energy", f64::from(*share), "0 to 1"))
    }

    /// The optimizer's problem on these links, with these profiles. An unknown compute time counts as 0.
    pub fn problem(&self, links: &LinkMatrix, profiles: BTreeMap<Selector, Profile>) -> Problem {
        Problem {
            values: self.gradient_values,
            links: links.clone(),
            compute: self.compute.unwrap_or(Seconds::ZERO),
            overlap: self.overlap,
            backend: self.backend.clone(),
            codecs: self.offer.codecs.clone(),
            profiles,
            times: self.times.clone(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use flexcomm_domain::Link;

    #[test]
    fn the_median_of_few_steps_that_scatter_is_off_by_much() {
        let scatter = |low: f64, high: f64| {
            let [step_low, step_high, sync_low, sync_high] = [low, high, low, high].map(|s| Seconds::new(s).unwrap());
            Scatter { step_low, step_high, sync_low, sync_high }
        };
        assert!(scatter(0.1, 0.1).of_sync_median(20) < 1e-9);
        assert!((scatter(7e-3, 277e-3).of_sync_median(7) - 0.526).abs() < 0.01);
        assert!(scatter(7e-3, 277e-3).of_sync_median(50) < 0.2);
        assert!(scatter(0.0, 50e-6).of_sync_median(20) < 0.05, "both are nothing");
    }

    #[test]
    fn nodes_that_were_stored_beside_the_matrix_are_read() {
        let matrix = LinkMatrix::uniform(3, Link::new(1e-3, 1e9).unwrap()).unwrap();
        let zero = Seconds::ZERO;
        let links = Links { matrix, age: zero, oldest: zero, confidence: 0.9, tests: Vec::new() };
        let mut stored = serde_json::to_value(&links).unwrap();
        stored["nodes"] = serde_json::json!([0, 0, 1]);
        let read: Links = serde_json::from_value(stored.clone()).unwrap();
        assert_eq!([0, 1, 2].map(|rank| read.matrix.node(rank)), [0, 0, 1]);
        stored["nodes"] = serde_json::json!([0, 0, 3]);
        let error = serde_json::from_value::<Links>(stored).unwrap_err().to_string();
        assert!(error.contains("node of a rank"), "{error}");
    }
}
