//! What `decide` answers, and what the checker holds against it.
#![allow(clippy::unwrap_used, missing_docs)]

mod checker;
mod choices;
mod common;
mod compressors;
mod decisions;
mod policy;
mod properties;
mod trials;
