//! The facts about this machine that the checks are made of.

use super::Group;
use crate::tc::{self, KernelSupport};
use std::fs::{self, File};
use std::io;
use std::path::{Path, PathBuf};

/// Gathered once.
#[derive(Debug, Clone)]
pub(super) struct Facts {
    pub(super) unix_s: u64,
    pub(super) clock_resolution_ns: u64,
    pub(super) clock_source: String,
    /// The effective set, one bit each.
    pub(super) capabilities: u64,
    pub(super) group: u64,
    /// Lowest and highest group that may open ICMP sockets; lowest above highest means none.
    pub(super) ping_groups: Option<(u64, u64)>,
    /// The kernel's.
    pub(super) release: String,
    pub(super) kernel: Result<KernelSupport, String>,
    /// Whether a network namespace can be made.
    pub(super) namespace: Result<(), String>,
    pub(super) cores: usize,
}

/// Tries the kernel only when a group is asked for that needs it.
pub(super) fn gather(groups: &[Group]) -> Facts {
    let kernel = match groups.iter().any(|group| *group != Group::Agent) {
        true => tc::try_kernel().map_err(|error| format!("failed to {error}")),
        false => Err("not asked for".to_owned()),
    };
    let since_1970 = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH);
    Facts {
        unix_s: since_1970.map_or(0, |d| d.as_secs()),
        clock_resolution_ns: clock_resolution_ns(),
        clock_source: read("/sys/devices/system/clocksource/clocksource0/current_clocksource", "unknown"),
        capabilities: capabilities(&read("/proc/thread-self/status", "")),
        group: nix::unistd::getegid().as_raw().into(),
        ping_groups: range(&read("/proc/sys/net/ipv4/ping_group_range", "")),
        release: read("/proc/sys/kernel/osrelease", "unknown"),
        namespace: namespace(),
        kernel,
        cores: std::thread::available_parallelism().map_or(1, |n| n.get()),
    }
}

fn read(path: &str, otherwise: &str) -> String {
    fs::read_to_string(path).map_or_else(|_| otherwise.to_owned(), |text| text.trim().to_owned())
}

fn clock_resolution_ns() -> u64 {
    use nix::time::{ClockId, clock_getres};
    clock_getres(ClockId::CLOCK_MONOTONIC)
        .map_or(u64::MAX, |r| (r.tv_sec() as u64).saturating_mul(1_000_000_000).saturating_add(r.tv_nsec() as u64))
}

fn capabilities(status: &str) -> u64 {
    let line = status.lines().find_map(|line| line.strip_prefix("CapEff:"));
    line.and_then(|hex| u64::from_str_radix(hex.trim(), 16).ok()).unwrap_or(0)
}

fn range(text: &str) -> Option<(u64, u64)> {
    let mut numbers = text.split_whitespace().map(str::parse);
    Some((numbers.next()?.ok()?, numbers.next()?.ok()?))
}

/// On a thread that ends with it.
fn namespace() -> Result<(), String> {
    let thread = std::thread::Builder::new().spawn(|| nix::sched::unshare(nix::sched::CloneFlags::CLONE_NEWNET));
    match thread.map(std::thread::JoinHandle::join) {
        Ok(Ok(Ok(()))) => Ok(()),
        Ok(Ok(Err(errno))) => Err(format!("failed to make a network namespace: {errno}")),
        Ok(Err(_)) | Err(_) => Err("failed to try a network namespace on a thread".to_owned()),
    }
}

/// Whether a file can be made in the folder, or the folder itself by its nearest ancestor that exists.
pub(super) fn can_write(folder: &Path) -> io::Result<()> {
    let existing = folder.ancestors().find(|ancestor| ancestor.exists()).unwrap_or(Path::new("/"));
    tempfile::tempfile_in(existing).map(drop)
}

/// Who runs this, as a number.
pub(super) fn user() -> u32 {
    nix::unistd::geteuid().as_raw()
}

/// Whether a device can be opened for reading and writing.
pub(super) fn can_open(path: &str) -> io::Result<()> {
    File::options().read(true).write(true).open(path).map(drop)
}

pub(super) fn is_folder(path: &str) -> bool {
    Path::new(path).is_dir()
}

/// Where a program is, in PATH and where the system's own tools lie.
pub(super) fn find(program: &str) -> Option<PathBuf> {
    let path = std::env::var_os("PATH").unwrap_or_default();
    let usual = ["/usr/sbin", "/sbin", "/usr/bin", "/bin", "/usr/local/bin"].map(PathBuf::from);
    std::env::split_paths(&path).chain(usual).map(|folder| folder.join(program)).find(|file| file.is_file())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reads_the_kernels_text() {
        assert_eq!(capabilities("Name:\tx\nCapInh:\t0\nCapEff:\t000001fffeffffff\n"), 0x1ff_feff_ffff);
        assert_eq!(capabilities("nonsense"), 0);
        assert_eq!(range("1\t0"), Some((1, 0)));
        assert_eq!(range("1"), None);
        assert_eq!(range("a b"), None);
    }

    #[test]
    fn folders_that_do_not_exist_are_judged_by_where_they_would_be() {
        let folder = tempfile::tempdir().unwrap();
        assert!(can_write(&folder.path().join("a/b/c")).is_ok());
        assert!(can_write(Path::new("/proc/flexcomm")).is_err());
        assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 0, "nothing is left behind");
    }
}
