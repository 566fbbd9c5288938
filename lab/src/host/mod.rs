//! The host's side: finds a kernel with netem, starts the inside on it, relays its output, makes the
//! controller reachable on loopback, and sees to it that nothing is left behind.
//!
//! The inside lives in a network namespace and a PID namespace of its own (or in user-mode Linux, itself a
//! process in such namespaces). Both are unnamed: whatever way this process ends, SIGKILL included, the
//! kernel ends every process in there and removes every device with them.

mod forward;
mod launch;
mod net;

pub use launch::{Backend, HostOptions, Ready, prepare};
