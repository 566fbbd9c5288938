//! The daemon on a node: probe plan, tc, spool, trainers' socket. It never decides.
//!
//! ```text
//! controller ──orders──▶ controller/ ─▶ orders.rs (what changed) ─▶ reconciler ─▶ probing/  shaping  trainers/jobs
//! controller ◀─reports── controller/ ◀─ spool/ ◀──────────────────── reports ◀─ probing/  shaping  trainers/
//! ```
//!
//! Pure: [`config`]'s checks, `orders`, `trainers/protocol`, `trainers/merge`, `spool/format`, `controller/sse`,
//! `controller/backoff`, `probing/due`, `probing/budget` (but for its file). Only [`tc`] changes qdiscs.

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
mod spool;
pub mod tc;
mod trainers;

pub use config::{Config, ConfigError, Overrides, SAMPLE};
pub use daemon::{AgentError, run};
