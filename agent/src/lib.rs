//! The daemon on a node: probe plan, tc, spool, trainers' socket. It never decides.
//!
//! ```text
//! controller ──orders──▶ controller/ ─▶ orders.rs (what changed) ─▶ reconciler ─▶ probing/  shaping  trainers/jobs
//! controller ◀─reports── controller/ ◀─ spool/ ◀──────────────────── reports ◀─ probing/  shaping  trainers/
//! ```
//!
//! Pure: [`config`]'s checks, `orders`, `trainers/protocol`, `trainers/merge`, `spool/format`, `controller/sse`,
//! `controller/backoff`, `controller/pace`, `probing/due`, `probing/links`, `probing/grant`, `probing/budget` (but for its file). [`parts`] shows what simulations need of them. Only [`tc`] changes qdiscs.

mod clock;
pub mod config;
mod controller;
mod daemon;
pub mod doctor;
mod files;
mod instance;
mod lock;
pub mod metrics;
mod orders;
mod probing;
mod reconciler;
mod reports;
mod scrape;
mod shaping;
#[cfg(test)]
#[path = "../../tests/skipped.rs"]
mod skipped;
mod spool;
pub mod tc;
mod trainers;

/// What decides without IO and without a clock of its own what an agent does and when: for simulations.
pub mod parts {
    pub use crate::config::{PROBE_SHARE, REPORT_INTERVAL};
    pub use crate::controller::pace;
    pub use crate::orders::{Action, Follower, MAX_GRANTS, Refusal};
    pub use crate::probing::LOOK_EVERY;
    pub use crate::probing::budget::{Account, Held};
    pub use crate::probing::grant::{self, Failed, Prepared};
    pub use crate::probing::links::{Links, echo_addr};
    pub use crate::trainers::merge::{Rejected, merge};
    pub use crate::trainers::protocol::{Event, Session};
}

pub use config::{Config, ConfigError, Overrides, SAMPLE};
pub use daemon::{AgentError, run};
