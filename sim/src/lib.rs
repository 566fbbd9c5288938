//! Seeded simulation that drives the real planner through network traces.
//!
//! [`schedule`] holds network traces over epochs as data (C1, C2, or a file); [`trace`] draws random ones.
//! [`world`] is a job on a network with hidden costs, drifting gains and noisy measurements; [`loss`] is what its
//! training loss does; [`run`] plays a schedule on it with [`flexcomm_planner::decide`] in charge and
//! [`flexcomm_planner::check`] on every answer. [`scenario`] reads all of that, with what is expected to come of it,
//! from a TOML file: a new case is a new file in `sim/scenarios/`.

pub mod loss;
pub mod model;
mod policy;
pub mod run;
pub mod scenario;
pub mod schedule;
pub mod trace;
pub mod world;
