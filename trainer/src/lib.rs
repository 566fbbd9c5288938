//! The training process's side of flexcomm.
//!
//! [`Agreement`] makes all ranks of a job change at the same step, by [`ControlWord`]s that ride on frames
//! which travel anyway. [`Client`] holds the agent's socket by threads of its own: it reports, and puts what the agent
//! orders into an [`OrdersSlot`]. [`Trial`] tries candidates on the live job and puts everything back. Nothing here ever
//! makes a training step wait for agent or controller.

mod agreement;
mod client;
mod orders;
mod pace;
mod riding;
mod trial;
mod word;

pub use agreement::{Agreement, Change, Disagreement, InForce, Offer, Tick, TrialTick};
pub use client::{Client, MAX_QUEUED};
pub use orders::{News, OrdersSlot};
pub use pace::Pace;
pub use riding::{HEAD_BYTES, Heard, NOT_FINITE, ROOM_BYTES, Riding, RidingError, STATUS_AT, Status, WORD_BITS};
pub use trial::{Measured, Snapshot, Trial};
pub use word::{AbortCause, ControlWord, MAX_ITERATIONS, Plan, TrialPlan, WORD_BASE, WORD_MAX, WordError};
