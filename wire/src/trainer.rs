//! Trainer and agent on one node: JSON lines over a Unix socket. The orders travel the other way by the
//! shared page, whose path the agent's welcome names.

use flexcomm_domain::{JobId, NodeName, RunId};
use serde::{Deserialize, Serialize};

use crate::{AppliedReport, StepsReport, TrialReport};

/// A trainer's first line.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Hello {
    /// Must equal [`crate::PROTOCOL`].
    pub protocol: u32,
    /// Which job.
    pub job: JobId,
    /// Which run of the job; absent from trainers older than run ids.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub run: Option<RunId>,
    /// This trainer's rank.
    pub rank: u32,
    /// N.
    pub world: u32,
    /// Values in the fused gradient.
    pub gradient_values: u64,
    /// What moves the bytes.
    pub backend: String,
    /// The compressors it has.
    pub codecs: Vec<CodecInfo>,
    /// The collectives it can run.
    pub collectives: Vec<String>,
}

/// A compressor a trainer has and what its messages weigh in a step: with k of n values (all, where it leaves none out) they
/// have `header_bytes + k * (index_bytes + value_bytes)` bytes; AR-Topk broadcasts `header_bytes + k * index_bytes` and
/// reduces `k * value_bytes`.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct CodecInfo {
    /// Without its ratio: `topk(k=*)+ef(vanilla)`, `fp16`, `powersgd(rank=2)+ef(vanilla)`.
    pub compressor: String,
    /// Fixed part of a message.
    pub header_bytes: u64,
    /// Per kept value.
    pub index_bytes: f64,
    /// Per kept value.
    pub value_bytes: f64,
    /// Collectives in a step that together move these bytes, one after the other.
    #[serde(default = "one")]
    pub rounds: u32,
}

fn one() -> u32 {
    1
}

/// Trainer to agent.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(tag = "kind", rename_all = "kebab-case")]
pub enum FromTrainer {
    /// First line.
    Hello(Hello),
    /// Step telemetry.
    Steps(StepsReport),
    /// A decision is in force.
    Applied(AppliedReport),
    /// A trial ended.
    Trial(TrialReport),
    /// Bytes and seconds of pieces of real streams between here and a peer's address, timed from the end of the piece
    /// before, so that no latency is in them: passive samples of the link.
    Transfers {
        /// The peer's IP address.
        peer: std::net::IpAddr,
        /// Per piece: bytes, seconds.
        samples: Vec<(u64, f64)>,
    },
    /// The trainer ends in an orderly way.
    Bye,
}

/// Agent to trainer.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(tag = "kind", rename_all = "kebab-case")]
pub enum ToTrainer {
    /// Answer to a valid hello.
    Welcome {
        /// The agent's protocol.
        protocol: u32,
        /// The node's name.
        node: NodeName,
        /// The file that holds this job's [`crate::JobOrders`] as JSON in a shared page.
        page: String,
    },
    /// Answer to anything else, or to a run that the controller refuses, then also after the welcome; the connection
    /// closes after it.
    Refused {
        /// What was wrong with which value.
        reason: String,
    },
}
