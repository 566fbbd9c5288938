//! The training process's side of flexcomm.
//!
//! [`Control`] makes all ranks of a job change at the same step. [`Client`] holds the agent's socket by threads of its own: it
//! carries reports, and puts what the agent orders into an [`OrdersSlot`]. [`Telemetry`] gathers a rank's steps, switches and trials
//! into those reports, and [`Reporter`] sends them. [`Trial`] averages what candidates show that are tried on the live job. Nothing
//! here ever makes a training step wait for agent or controller.

mod agreement;
mod answer;
mod client;
mod control;
mod costs;
mod machine;
mod message;
mod orders;
mod pace;
mod report;
mod telemetry;
mod trial;

pub use agreement::{Agreement, Change, Disagreement, InForce, Offer, Tick, TrialTick};
pub use answer::{ANSWER_BYTES, Answer, Verdict};
pub use client::{Client, MAX_QUEUED};
pub use control::{Control, ControlError};
pub use costs::{Costs, squared_norm, takes_energies, weighted};
pub use machine::{name as machine_name, processor};
pub use message::{AbortCause, Announced, ControlMessage, MAX_ITERATIONS, MESSAGE_BYTES, MessageError, TrialPlan};
pub use orders::{News, OrdersSlot};
pub use report::Reporter;
pub use telemetry::{LEAST_GAIN, Telemetry};
pub use trial::{Clocks, Measured, Trial};
