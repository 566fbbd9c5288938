//! Ranks as threads of this process, over TCP.
#![allow(clippy::unwrap_used, reason = "a test that cannot go on has failed")]

mod common;
mod decisions;
mod strategies;
mod suite;
mod trials;
