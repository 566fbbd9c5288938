//! The controller as its users see it: over HTTP, in this process or as one of its own.
#![allow(clippy::unwrap_used, missing_docs)]

mod bad_input;
mod common;
mod connections;
mod contradicted;
mod embedded;
mod experiments;
mod full_disk;
mod missing;
mod modes;
mod openapi;
mod policy;
mod restart;
mod runs;
mod story;
mod stream;
