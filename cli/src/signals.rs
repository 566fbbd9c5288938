//! Ctrl-C and SIGTERM as a flag.

use anyhow::{Context, Result};
use signal_hook::consts::{SIGINT, SIGTERM};
use signal_hook::flag;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;

/// Signals that ask for the end, each with the exit status of a process that it kills, as shells have it.
const ENDING: [(i32, i32); 2] = [(SIGINT, 130), (SIGTERM, 143)];

/// A flag that Ctrl-C and SIGTERM set.
pub(crate) fn stop() -> Result<Arc<AtomicBool>> {
    set(Arc::default())
}

/// A flag that the first Ctrl-C or SIGTERM sets; the second one ends the process at once.
pub(crate) fn stop_or_end() -> Result<Arc<AtomicBool>> {
    let stop = Arc::<AtomicBool>::default();
    // Before the flag is set by the same signal.
    for (signal, status) in ENDING {
        flag::register_conditional_shutdown(signal, status, stop.clone()).context("watch for Ctrl-C")?;
    }
    set(stop)
}

fn set(stop: Arc<AtomicBool>) -> Result<Arc<AtomicBool>> {
    for (signal, _) in ENDING {
        flag::register(signal, stop.clone()).context("watch for Ctrl-C")?;
    }
    Ok(stop)
}
