//! A network and a job as they really are: what decisions are measured against.
//!
//! [`network`] moves bytes: ports with rates that change, connections that share them, TCP's windows, losses and timeouts.
//! [`job`] runs a step of training on it: ranks that compute, and collectives as the transfers that they consist of. No closed
//! form says how long a collective takes, and nothing here is known to what decides: this crate uses no other of the workspace.

pub mod coefficients;
pub mod job;
pub mod network;
#[allow(
    clippy::declare_interior_mutable_const,
    reason = "every trace begins with a copy of its own of what is remembered"
)]
pub mod trace;
