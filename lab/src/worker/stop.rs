//! Ctrl-C and SIGTERM as a flag.

use anyhow::{Context, Result};
use signal_hook::consts::{SIGINT, SIGTERM};
use signal_hook::flag;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;

/// Exit status after a second Ctrl-C: 128 + SIGINT, as shells have it.
const INTERRUPTED: i32 = 130;

/// The flag is set by the first SIGINT or SIGTERM; the second ends the process at once.
pub fn on_signal() -> Result<Arc<AtomicBool>> {
    let stop = Arc::<AtomicBool>::default();
    for signal in [SIGINT, SIGTERM] {
        flag::register_conditional_shutdown(signal, INTERRUPTED, stop.clone()).context("watch for Ctrl-C")?;
        flag::register(signal, stop.clone()).context("watch for Ctrl-C")?;
    }
    Ok(stop)
}
