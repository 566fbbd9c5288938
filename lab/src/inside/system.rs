//! The inside as a system of its own: mounts, kernel modules, the way out.

use anyhow::{Context, Result, bail};
use std::process::Command;

/// Runs a command; its error text becomes the error.
pub(crate) fn sh(program: &str, args: &[&str]) -> Result<()> {
    let shown = format!("{program} {}", args.join(" "));
    let output = Command::new(program).args(args).output().with_context(|| shown.clone())?;
    if !output.status.success() {
        bail!("`{shown}` failed: {}", String::from_utf8_lossy(&output.stderr).trim());
    }
    Ok(())
}

/// Runs a command line given as one text.
pub(crate) fn sh_line(line: &str) -> Result<()> {
    let mut words = line.split_whitespace();
    let program = words.next().context("an empty command line")?;
    sh(program, &words.collect::<Vec<_>>())
}

/// What the lab uses beyond what the kernel has built in.
const MODULES: [&str; 6] = ["bridge", "veth", "sch_htb", "sch_netem", "cls_u32", "dummy"];

/// Private mounts and, in user-mode Linux, everything an init does first.
pub(crate) fn prepare(uml: bool) -> Result<()> {
    if uml {
        // The kernel gives init no search path.
        sh("/bin/mount", &["-t", "proc", "proc", "/proc"])?;
        sh("/bin/mount", &["-t", "sysfs", "sys", "/sys"])?;
    } else {
        sh("mount", &["--make-rprivate", "/"])?;
    }
    sh("/bin/mount", &["-t", "tmpfs", "-o", "mode=755", "run", "/run"])?;
    for folder in ["/run/netns", "/run/tmp", "/run/flexlab"] {
        std::fs::create_dir_all(folder).with_context(|| folder.to_owned())?;
    }
    if uml {
        load_modules()?;
    }
    sh_line("ip link set lo up")
}

fn load_modules() -> Result<()> {
    // modprobe looks below lib/modules; user-mode Linux keeps its modules elsewhere.
    std::fs::create_dir_all("/run/r/lib")?;
    std::os::unix::fs::symlink("/usr/lib/uml/modules", "/run/r/lib/modules")?;
    for module in MODULES {
        sh("/sbin/modprobe", &["-d", "/run/r", module])
            .with_context(|| format!("user-mode Linux needs its module {module} (package user-mode-linux)"))?;
    }
    Ok(())
}

/// Ends user-mode Linux; returns only when that failed.
pub(crate) fn power_off() {
    nix::unistd::sync();
    let Err(errno) = nix::sys::reboot::reboot(nix::sys::reboot::RebootMode::RB_POWER_OFF);
    tracing::error!(error = errno.desc(), "cannot power off");
}
