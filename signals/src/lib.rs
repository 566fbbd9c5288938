//! Ctrl-C and SIGTERM as a flag, for commands that end in an orderly way.

use signal_hook::consts::{SIGINT, SIGTERM};
use signal_hook::flag;
use std::io::Result;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;

/// Exit status of a process that Ctrl-C ends, as shells have it: 128 + SIGINT.
pub const INTERRUPTED: i32 = 128 + SIGINT;

/// Signals that ask for the end, each with the exit status of a process that it ends.
const ENDING: [(i32, i32); 2] = [(SIGINT, INTERRUPTED), (SIGTERM, 128 + SIGTERM)];

/// A flag that Ctrl-C and SIGTERM set.
///
/// # Errors
/// The system refuses a signal's handler.
pub fn stop() -> Result<Arc<AtomicBool>> {
    set(Arc::default())
}

/// A flag that the first Ctrl-C or SIGTERM sets; the second one ends the process at once.
///
/// # Errors
/// The system refuses a signal's handler.
pub fn stop_or_end() -> Result<Arc<AtomicBool>> {
    let stop = Arc::<AtomicBool>::default();
    // Before the flag is set by the same signal.
    for (signal, status) in ENDING {
        flag::register_conditional_shutdown(signal, status, stop.clone())?;
    }
    set(stop)
}

fn set(stop: Arc<AtomicBool>) -> Result<Arc<AtomicBool>> {
    for (signal, _) in ENDING {
        flag::register(signal, stop.clone())?;
    }
    Ok(stop)
}
