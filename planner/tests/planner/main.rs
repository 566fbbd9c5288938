//! What `decide` answers, and what the checker holds against it.
#![allow(clippy::unwrap_used, missing_docs)]

mod benefit_bound;
mod calibration;
mod checker;
mod common;
mod compressors;
mod decisions;
mod floor;
mod guard;
mod long_run;
mod properties;
