//! The training process's side of flexcomm.
//!
//! [`Agreement`] makes all ranks of a job change at the same step: by [`Control`] messages over a process group of their own, or by
//! [`ControlWord`]s on frames that travel anyway. [`OrdersReader`] reads what the agent publishes, [`Client`] reports to it from a
//! thread of its own, [`Trial`] tries candidates on the live job and puts everything back. Nothing here ever
//! makes a training step wait for agent or controller.

mod agreement;
mod client;
mod control;
mod orders;
mod pace;
mod trial;
mod word;

pub use agreement::{Agreement, Change, Disagreement, InForce, Offer, Tick, TrialTick};
pub use client::{Client, MAX_QUEUED};
pub use control::{Control, ControlError, MESSAGE_BYTES};
pub use orders::{News, OrdersReader};
pub use pace::Pace;
pub use trial::{Measured, Snapshot, Trial};
pub use word::{AbortCause, ControlWord, MAX_ITERATIONS, Plan, TrialPlan, WORD_BASE, WORD_MAX, WordError};
