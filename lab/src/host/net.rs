//! The unnamed network namespace on the host in which the inside runs.

use crate::inside::sh;
use anyhow::{Result, anyhow};
use nix::sched::CloneFlags;

/// Moves the calling thread into a new network namespace; children it starts are born there.
pub(crate) fn enter_new_namespace() -> Result<()> {
    nix::sched::unshare(CloneFlags::CLONE_NEWNET)
        .map_err(|errno| anyhow!("this kernel refused a new network namespace: {}", errno.desc()))?;
    sh("ip", &["link", "set", "lo", "up"])
}

/// Whether this kernel has netem: tried on a dummy device of the calling thread's (new) namespace.
pub(crate) fn kernel_has_netem() -> bool {
    let tried = sh("ip", &["link", "add", "probe0", "type", "veth", "peer", "name", "probe1"])
        .and_then(|()| sh("tc", &["qdisc", "add", "dev", "probe0", "root", "netem", "delay", "1ms"]));
    // The namespace is about to be used: leave it as it was.
    if let Err(error) = sh("ip", &["link", "del", "probe0"]) {
        tracing::debug!(%error, "no probe device to remove");
    }
    tried.is_ok()
}

/// Makes the tap device through which user-mode Linux is reached.
pub(crate) fn add_tap() -> Result<()> {
    let addr = format!("{}/30", crate::plan::TAP_ADDR);
    sh("ip", &["tuntap", "add", "dev", "tap0", "mode", "tap"])?;
    sh("ip", &["addr", "add", &addr, "dev", "tap0"])?;
    sh("ip", &["link", "set", "tap0", "up"])
}
