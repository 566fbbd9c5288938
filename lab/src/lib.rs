//! An emulated cluster on one machine: real namespaces, real netem and htb, real TCP, real training.
//!
//! [`host`] starts the [`inside`] on a kernel with netem (this one, or user-mode Linux) and relays its
//! output; the inside builds nodes and starts the same controller and agents that run in production, with a
//! [`worker`] on each node that trains on real images.

pub mod host;
pub mod inside;
pub mod plan;
pub mod worker;
