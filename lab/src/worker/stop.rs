//! Ctrl-C and SIGTERM as a flag.

use anyhow::{Context, Result};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use tokio::signal::unix::{SignalKind, signal};

/// Exit status after a second Ctrl-C: 128 + SIGINT, as shells have it.
const INTERRUPTED: i32 = 130;

/// The flag is set by the first SIGINT or SIGTERM; the second ends the process at once.
pub fn on_signal() -> Result<Arc<AtomicBool>> {
    let stop = Arc::new(AtomicBool::new(false));
    let flag = Arc::clone(&stop);
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().context("watch for Ctrl-C")?;
    let (mut interrupt, mut terminate) = {
        let _inside = runtime.enter();
        (signal(SignalKind::interrupt())?, signal(SignalKind::terminate())?)
    };
    let watch = async move {
        loop {
            tokio::select! {
                _ = interrupt.recv() => {}
                _ = terminate.recv() => {}
            }
            if flag.swap(true, Ordering::SeqCst) {
                std::process::exit(INTERRUPTED);
            }
        }
    };
    let thread = std::thread::Builder::new().name("signals".into());
    thread.spawn(move || runtime.block_on(watch)).context("watch for Ctrl-C")?;
    Ok(stop)
}
