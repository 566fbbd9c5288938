//! Buckets of several ranks and the exchange between them, on the host and on a device (the kernels' emulator).
#![allow(clippy::unwrap_used, reason = "helpers of tests are tests")]

mod device;
mod host;
mod ranks;
