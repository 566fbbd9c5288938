//! Agent to controller.

use flexcomm_domain::{JobId, NodeName, RunId};
use serde::{Deserialize, Serialize};
use std::net::IpAddr;

use crate::{CodecInfo, StrategyWire};

/// `POST /api/v1/agents/register`.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Register {
    /// Must equal [`crate::PROTOCOL`].
    pub protocol: u32,
    /// The node's name; two live agents may not share one.
    pub node: NodeName,
    /// Random per process start: tells a restarted agent from a second one with the same name.
    pub instance: u64,
    /// Instances that this agent was before, as it remembers them on disk: shows that it is the owner of the name
    /// come back, which need not wait until the dead one has been silent for long. At most [`crate::MAX_PREVIOUS`].
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub previous: Vec<u64>,
    /// Where its peers reach it.
    pub addr: IpAddr,
    /// UDP port of its echo responder.
    pub echo_port: u16,
    /// TCP port of its throughput server.
    pub throughput_port: u16,
    /// Whether its configuration allows shaping.
    pub may_shape: bool,
    /// flexcomm's version, for people; at most [`crate::MAX_SOFTWARE`] characters.
    pub software: String,
}

/// Answer to [`Register`].
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Registered {
    /// Send a heartbeat this often, but for at most three in a row while reports are delivered.
    pub heartbeat_ms: u64,
    /// Reports up to and including this sequence number are stored already (0: none).
    pub acked_seq: u64,
}

/// `POST /api/v1/agents/{node}/heartbeat`.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Heartbeat {
    /// As registered.
    pub instance: u64,
    /// The agent's clock.
    pub now_us: u64,
    /// Epoch of the orders it follows.
    pub orders_epoch: u64,
    /// Reports waiting in its spool.
    pub spooled: u64,
    /// Hosts that its operator named and the gateway; at most [`crate::MAX_HOSTS`].
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub hosts: Vec<HostSeen>,
}

/// What ICMP echoes showed of a host that is no node.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct HostSeen {
    /// As its operator named it; `gateway`: that of the default route.
    pub host: String,
    /// Its address, where that is known.
    pub addr: Option<IpAddr>,
    /// Round trip of the newest echo; absent where it was not answered.
    pub round_trip_us: Option<f64>,
    /// Share of the newest echoes that were not answered; absent before the first.
    pub loss: Option<f64>,
}

/// `POST /api/v1/agents/{node}/reports`. Stored in order, each once: `(node, seq)` is the key.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct ReportBatch {
    /// As registered.
    pub instance: u64,
    /// Ascending by `seq`; at most [`crate::MAX_BATCH`].
    pub reports: Vec<Report>,
}

/// Answer to [`ReportBatch`]: what is on disk now.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct ReportAck {
    /// Everything up to here is stored or was rejected as invalid; never send it again.
    pub acked_seq: u64,
    /// How many of this batch were rejected.
    pub rejected: u64,
    /// The first reason that is no refusal of a run: those are in `refused`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub first_reason: Option<String>,
    /// Runs of this batch that are refused, each once: the agent refuses their trainers.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub refused: Vec<RefusedRun>,
}

/// A run that may not join, since another one is alive under its job's name.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct RefusedRun {
    /// Which job.
    pub job: JobId,
    /// Which run of it.
    pub run: RunId,
    /// Why, and what helps.
    pub reason: String,
}

/// One thing an agent observed.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Report {
    /// Per node, ascending from 1, kept in the spool across restarts of the agent.
    pub seq: u64,
    /// When, by the agent's clock.
    pub at_us: u64,
    /// What.
    pub body: ReportBody,
}

/// The kinds of report.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(tag = "kind", rename_all = "kebab-case")]
pub enum ReportBody {
    /// The estimate of a link from this node to a peer.
    Link(LinkReport),
    /// The result of a granted throughput test.
    Throughput(ThroughputReport),
    /// The hops to a peer changed.
    Path(PathReport),
    /// A trainer said hello.
    JobSeen(Hello),
    /// A trainer left.
    JobLeft {
        /// Which job.
        job: JobId,
        /// Which rank.
        rank: u32,
        /// Which run of the job it was in; absent from agents that do not know.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        run: Option<RunId>,
        /// Whether its connection ended without a goodbye: the trainer crashed, or was killed.
        #[serde(default, skip_serializing_if = "std::ops::Not::not")]
        connection_lost: bool,
    },
    /// What training steps cost.
    Steps(StepsReport),
    /// A rank switched.
    Applied(AppliedReport),
    /// What a trial found.
    Trial(TrialReport),
    /// What tc now does.
    Shape(ShapeReport),
}

/// Estimate of the latency from the reporting node to `peer`, and of losses.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct LinkReport {
    /// The other end.
    pub peer: NodeName,
    /// alpha: one-way latency (half the robust round trip).
    pub latency_us: f64,
    /// 0 (a guess) to 1.
    pub latency_confidence: f64,
    /// Age of the newest latency sample.
    pub latency_age_ms: f64,
    /// Mean absolute difference of successive round trips.
    pub jitter_us: f64,
    /// Share of echoes lost on the way out.
    pub loss_out: f64,
    /// Share of answers lost on the way back.
    pub loss_back: f64,
    /// Whether latency and losses are those of ICMP, since the peer answers no UDP echo.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub by_icmp: bool,
}

/// A relative change above this is looked at at once.
const LINK_CHANGE: f64 = 0.15;

/// Changes of latency below this are noise at any size of the latency, in µs.
const LEAST_LATENCY_CHANGE_US: f64 = 100.0;

impl LinkReport {
    /// Whether this says so much else than `last` that it is to be reported and looked at at once.
    pub fn is_news_after(&self, last: &LinkReport) -> bool {
        let moved = (self.latency_us - last.latency_us).abs();
        let latency = moved > LEAST_LATENCY_CHANGE_US && moved > LINK_CHANGE * last.latency_us;
        let loss = (self.loss_out - last.loss_out).abs().max((self.loss_back - last.loss_back).abs()) > LINK_CHANGE;
        latency || loss
    }
}

/// Result of one granted throughput test.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct ThroughputReport {
    /// The grant it used.
    pub grant: u64,
    /// The other end.
    pub peer: NodeName,
    /// From this node to the peer; absent when it failed.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub out_bps: Option<f64>,
    /// From the peer to this node.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub back_bps: Option<f64>,
    /// Whether the link to the peer may be faster than that: windows bounded the test, or it was over within a few round trips.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub out_is_lower_bound: bool,
    /// The same of the link from the peer.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub back_is_lower_bound: bool,
    /// Payload bytes spent, both directions together; of a test that failed, at most so many.
    pub bytes: u64,
    /// The part of them from this node to the peer, when known.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub out_bytes: Option<u64>,
    /// How long it took; absent from older agents and where it did not begin.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub took_us: Option<f64>,
    /// Processor time that it took here; likewise.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub cpu_us: Option<f64>,
    /// Why it failed.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub error: Option<String>,
}

impl ThroughputReport {
    /// Payload from this node to the peer, and back; of older agents half of it each.
    pub fn bytes_of_ways(&self) -> [u64; 2] {
        let out = self.out_bytes.unwrap_or(self.bytes / 2).min(self.bytes);
        [out, self.bytes - out]
    }
}

/// The hops to a peer.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct PathReport {
    /// The other end.
    pub peer: NodeName,
    /// Hop by hop; absent where a hop did not answer.
    pub hops: Vec<Option<IpAddr>>,
}

/// What a trainer says of its rank before all else, and its agent passes on.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Hello {
    /// Which job.
    pub job: JobId,
    /// Which run of the job; absent from trainers older than run ids.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub run: Option<RunId>,
    /// The trainer's rank.
    pub rank: u32,
    /// N.
    pub world: u32,
    /// Values in the fused gradient; M is 4 times that for fp32.
    pub gradient_values: u64,
    /// Values in each of the buckets that the gradient is sent in, in the order in which backward has them ready; empty where the trainer
    /// does not tell, or not yet: [`crate::FromTrainer::Buckets`]. Then the gradient counts as fused.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub buckets: Vec<u64>,
    /// Momentum of the optimizer, at least 0 and below 1 (of Adam the first moment's decay): what a gradient that arrives late costs
    /// hangs on it. Absent where the trainer cannot tell, and from older trainers.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub momentum: Option<f64>,
    /// What the training script set for the job, as `PUT /api/v1/jobs/{id}/policy` takes it ([`crate::api::JobPolicy`]); absent where it
    /// set nothing, and from older trainers. Agents hand it on as it is.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub policy: Option<serde_json::Value>,
    /// What it computes on, for example `NVIDIA H200`: a GPU's name, else the processor's. Absent where it is not known, and from older
    /// trainers.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub machine: Option<String>,
    /// What moves the bytes, for example `lab-tcp`, `gloo`, `nccl`: collective times learned in a job are the prior of later jobs with the same backend.
    pub backend: String,
    /// The compressors it has, with their real wire sizes.
    pub codecs: Vec<CodecInfo>,
    /// The collectives it can run.
    pub collectives: Vec<String>,
}

impl Hello {
    /// Of rank r of N, with a gradient of so many values in one bucket, that neither compresses nor exchanges anything.
    pub fn new(job: JobId, (rank, world): (u32, u32), gradient_values: u64, backend: impl Into<String>) -> Self {
        Self {
            job,
            run: None,
            rank,
            world,
            gradient_values,
            buckets: Vec::new(),
            momentum: None,
            policy: None,
            machine: None,
            backend: backend.into(),
            codecs: Vec::new(),
            collectives: Vec::new(),
        }
    }
}

/// What one training step cost on one rank.
#[derive(Debug, Clone, PartialEq, Default, Serialize, Deserialize)]
pub struct StepRecord {
    /// Step number within the job.
    pub step: u64,
    /// Forward and backward.
    pub compute_us: f64,
    /// Compress and decompress.
    pub comp_us: f64,
    /// In which this rank had nothing to do but wait for collectives, late ranks included: what they take behind backward does not
    /// count.
    pub sync_us: f64,
    /// The part of `sync_us` before the last rank entered, where ranks can tell; the largest difference over
    /// the ranks of one step is the time of the collective proper.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub wait_us: Option<f64>,
    /// The whole step.
    pub step_us: f64,
    /// Bytes this rank sent.
    pub bytes_sent: u64,
    /// ‖g_c‖²/‖g_e‖² of this rank's gradient; 1 when dense, 1/(1 + ω) of an unbiased compressor without error feedback, whose
    /// ‖g_c‖²/‖g_e‖² is 1 + ω.
    pub gain: f64,
    /// ‖g_e‖², by which the gains of the ranks are weighted; 0 where nothing was compressed. At most [`crate::MAX_ENERGY`]. Absent
    /// from older trainers.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub energy: Option<f64>,
    /// ‖g_b‖² of this rank's gradient before error feedback in each bucket, as [`Hello::buckets`] lists them, at some of the steps;
    /// each at most [`crate::MAX_ENERGY`]. Empty at the others, where they are not known, and from older trainers.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub bucket_energies: Vec<f64>,
    /// Training loss, when known.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub loss: Option<f64>,
    /// Held-out accuracy, 0 to 1, at the steps where it was measured.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub accuracy: Option<f64>,
}

/// A run of steps under one decision.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct StepsReport {
    /// Which job.
    pub job: JobId,
    /// Which rank.
    pub rank: u32,
    /// The decision in force during all of them; 0 before the first.
    pub version: u64,
    /// What ran (also says what "0" was).
    pub strategy: StrategyWire,
    /// Ascending; at most [`crate::MAX_STEPS`].
    pub steps: Vec<StepRecord>,
}

/// A rank switched to a decision.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct AppliedReport {
    /// Which job.
    pub job: JobId,
    /// Which rank.
    pub rank: u32,
    /// The decision.
    pub version: u64,
    /// Digest of its strategy.
    pub digest: u64,
    /// The first step under it.
    pub step: u64,
}

/// What a trial found. It comes again when shadow trials have found more; the newest of a rank counts.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct TrialReport {
    /// Which job.
    pub job: JobId,
    /// Which rank.
    pub rank: u32,
    /// Which trial.
    pub id: u64,
    /// One per candidate that ran, in order, then one per candidate that only had a shadow.
    pub outcomes: Vec<TrialOutcome>,
    /// Why it did not run all of them.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub aborted: Option<String>,
    /// Snapshot, iterations and restore together.
    pub cost_us: f64,
    /// Bytes that this rank sent in its iterations. Absent from older trainers.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub bytes: Option<u64>,
    /// Processor time of this rank's process from the snapshot to the restore. Absent from older trainers and where it is not known.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub cpu_us: Option<f64>,
    /// What its shadows took of steps so far, on the rank's processors: waiting for a GPU is not in it. Absent from older trainers and where
    /// none looked at gradients here.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub shadow_us: Option<f64>,
}

/// Averages over a candidate's iterations.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct TrialOutcome {
    /// What ran.
    pub strategy: StrategyWire,
    /// Mean gain over the iterations. They start from the residual of whatever ran before, so this is not yet what
    /// the candidate would keep in the long run. The shadow's where none ran.
    pub gain: f64,
    /// Mean ‖g_e‖² over the iterations, of the shadow where none ran, by which the gains of the ranks are weighted. At most
    /// [`crate::MAX_ENERGY`]. Absent from older trainers.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub energy: Option<f64>,
    /// Gain in a shadow trial that has run longer than this one: error feedback of its own, over a subset of the
    /// coordinates, on every step's gradient. Absent from trainers without shadows.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub shadow_gain: Option<f64>,
    /// ‖g_e‖² of the shadow, summed over steps of which the newest count most. At most [`crate::MAX_ENERGY`]. Absent from older
    /// trainers.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub shadow_energy: Option<f64>,
    /// Mean time to compress and decompress; 0 where no iteration ran.
    pub comp_us: f64,
    /// Mean time in the collective, without waiting for late ranks where the rank can tell; 0 where no iteration ran.
    pub sync_us: f64,
    /// Iterations that ran; 0: only a shadow saw it.
    pub iterations: u32,
}

/// What tc now does on the agent's interface.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct ShapeReport {
    /// The order's id.
    pub id: u64,
    /// Why it was refused; absent when it is in force.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub error: Option<String>,
}
