//! What travels between controller, agent and trainer: JSON messages of protocol version [`PROTOCOL`].
//!
//! Field names carry their unit (`latency_us`, `bandwidth_bps`). Messages are plain data and may hold
//! anything a peer wrote; `TryFrom` into domain types is where values are checked. Unknown fields are
//! ignored, so that a newer peer can add some; a newer [`PROTOCOL`] is refused at registration.

pub mod api;
mod check;
mod orders;
mod reports;
mod strategy;
mod trainer;

pub use check::{BadValue, MAX_NAME, check_buckets};
pub use orders::{DecisionOrder, EchoPeer, JobOrders, Orders, ProbePlan, ShapeOrder, ThroughputGrant, TrialOrder};
pub use reports::{
    AppliedReport, Heartbeat, Hello, HostSeen, LinkReport, PathReport, RefusedRun, Register, Registered, Report,
    ReportAck, ReportBatch, ReportBody, ShapeReport, StepRecord, StepsReport, ThroughputReport, TrialOutcome,
    TrialReport,
};
pub use strategy::StrategyWire;
pub use trainer::{CodecInfo, CodecTimes, FromTrainer, ToTrainer};

/// Version of everything in this crate. A peer with another version is refused with both numbers named.
pub const PROTOCOL: u32 = 3;

/// Most reports in one batch: bounds the controller's transaction.
pub const MAX_BATCH: usize = 512;

/// Most step records in one report: four seconds of steps at 16 ms each.
pub const MAX_STEPS: usize = 256;

/// Longest line on the trainer's socket, in bytes.
pub const MAX_LINE: usize = 256 * 1024;

/// Longest time that one direction of a granted throughput test may take, in seconds: what a test can cost at most.
pub const MAX_TEST_S: f64 = 4.0;

/// Most earlier instances that a registration names.
pub const MAX_PREVIOUS: usize = 16;

/// Most characters of a version's name.
pub const MAX_SOFTWARE: usize = 100;

/// Largest step from one report's number to the next: more than an agent numbers in years. What an agent drops
/// leaves smaller gaps.
pub const MAX_SEQ_STEP: u64 = 1 << 36;

/// Largest energy of a gradient in a report: squares of as many float32 values as any tensor has, 1e77 each, are less.
pub const MAX_ENERGY: f64 = 1e93;
/// Largest loss of a report, by its amount: trainers report what is beyond as this.
pub const MAX_LOSS: f64 = 1e12;

/// Most candidates in one trial.
pub const MAX_CANDIDATES: usize = 16;

/// Most hosts in a heartbeat.
pub const MAX_HOSTS: usize = 8;

/// Longest text of a report, in characters.
pub const MAX_TEXT: usize = 400;

/// Largest integer that every JSON reader keeps exactly.
pub const MAX_INTEGER: u64 = 1 << 53;
