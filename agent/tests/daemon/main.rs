//! Whole agents in this process.
#![allow(clippy::unwrap_used)]

mod outages;
#[path = "../support/mod.rs"]
mod support;
#[path = "../tc_common/mod.rs"]
mod tc_common;
