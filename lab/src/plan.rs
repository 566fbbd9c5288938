//! What a lab run is: written by the host side as JSON, read by the inside.

use flexcomm_sim::schedule::Schedule;
use serde::{Deserialize, Serialize};
use std::path::PathBuf;

/// Most nodes: the address plan gives each one host number in a /24, and one CPU carries them all.
pub const MAX_NODES: usize = 32;

/// Everything the inside needs to know.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct LabPlan {
    /// Nodes, with one agent and one worker each.
    pub nodes: usize,
    /// The network trace over epochs, with rates as they are set (scaled already).
    pub schedule: Schedule,
    /// Training steps in an epoch.
    pub steps_per_epoch: u64,
    /// Seeds data order, initial parameters and the planner.
    pub seed: u64,
    /// Samples per worker and step.
    pub batch: usize,
    /// Hidden layers of the network.
    pub hidden: Vec<usize>,
    /// Learning rate.
    pub lr: f64,
    /// Share of the last update that is kept.
    pub momentum: f64,
    /// Forward and backward take at least this long, seconds.
    pub least_compute_s: f64,
    /// A strategy to hold for the whole run instead of following decisions, for comparisons.
    pub fixed: Option<String>,
    /// End after this many seconds, finished or not.
    pub for_s: Option<f64>,
    /// Stay up when the training is over, until told to stop.
    pub stay: bool,
    /// Where logs, history and summary go; visible from inside.
    pub out: PathBuf,
    /// Whether the inside is user-mode Linux (and must mount, load modules and power off by itself).
    pub uml: bool,
}

/// The controller's port inside.
pub const CONTROLLER_PORT: u16 = 7070;

/// Address of the controller and bridge on the emulated network.
pub const HUB: std::net::Ipv4Addr = std::net::Ipv4Addr::new(10, 77, 0, 254);

/// Address of user-mode Linux on the tap device, and of the tap device itself.
pub const UML_ADDR: std::net::Ipv4Addr = std::net::Ipv4Addr::new(10, 78, 0, 2);
/// The host's end of the tap device.
pub const TAP_ADDR: std::net::Ipv4Addr = std::net::Ipv4Addr::new(10, 78, 0, 1);

/// Lines from inside with this prefix are the lab's own; others come from the kernel.
pub const LINE: &str = "flexlab| ";

/// File below `out` with the cluster's token, for who sets something by REST.
pub const TOKEN_FILE: &str = "token";

/// The job's name in the lab.
pub const JOB: &str = "lab";

/// Address of node `i`, counted from 0.
pub fn node_addr(i: usize) -> std::net::Ipv4Addr {
    std::net::Ipv4Addr::new(10, 77, 0, (i + 1) as u8)
}

/// Name of node `i`, counted from 0; also of its network namespace.
pub fn node_name(i: usize) -> String {
    format!("n{}", i + 1)
}
