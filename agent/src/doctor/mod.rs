//! What is missing on this machine, with the command that mends it. Facts are gathered at the edge ([`examine`]);
//! what they mean is decided by functions that take them as arguments.

mod controller;
mod facts;

use crate::tc::KernelSupport;
use facts::Facts;
use serde::Serialize;
use std::path::PathBuf;

/// What needs a thing.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Group {
    /// Every agent.
    Agent,
    /// An agent that shapes its link.
    Shaping,
    /// The emulated cluster on one machine.
    Lab,
}

impl Group {
    /// All, in the order they are shown.
    pub const ALL: [Self; 3] = [Self::Agent, Self::Shaping, Self::Lab];

    /// As on the command line.
    pub fn name(self) -> &'static str {
        match self {
            Self::Agent => "agent",
            Self::Shaping => "shaping",
            Self::Lab => "lab",
        }
    }
}

/// How it stands.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum State {
    /// There.
    Ok,
    /// Its group works without it, with less.
    Warning,
    /// Its group does not work without it.
    Missing,
}

/// One thing looked at.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Check {
    /// What needs it.
    pub group: Group,
    /// Its name.
    pub name: &'static str,
    /// How it stands.
    pub state: State,
    /// What was found.
    pub found: String,
    /// The command or step that mends it; absent when there is nothing to mend.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub mend: Option<String>,
}

/// What to look at.
#[derive(Debug, Clone)]
pub struct Options {
    /// Groups to look at.
    pub groups: Vec<Group>,
    /// The agent's state directory.
    pub state_dir: PathBuf,
    /// The agent's run directory.
    pub run_dir: PathBuf,
    /// Folder of the lab's images.
    pub data: PathBuf,
    /// URL of a controller that must answer.
    pub controller: Option<String>,
}

/// Looks at this machine. Changes nothing on it but what trying a qdisc loads: kernel modules.
pub fn examine(options: &Options) -> Vec<Check> {
    let facts = facts::gather(&options.groups);
    let mut checks = vec![clock(&facts), icmp(&facts)];
    checks.push(writable("state directory", &options.state_dir));
    checks.push(writable("run directory", &options.run_dir));
    checks.extend(options.controller.iter().map(|url| controller::check(url)));
    checks.push(net_admin(&facts));
    checks.extend(kernel(&facts));
    checks.extend(lab(&facts, options));
    checks.retain(|check| options.groups.contains(&check.group));
    checks
}

/// Whether nothing that is needed is missing.
pub fn is_well(checks: &[Check]) -> bool {
    checks.iter().all(|check| check.state != State::Missing)
}

/// For people: by group, with what mends each.
pub fn text(checks: &[Check]) -> String {
    let mut out = String::new();
    for group in Group::ALL {
        let mut of_group = checks.iter().filter(|check| check.group == group).peekable();
        if of_group.peek().is_some() {
            out += &format!("{}\n", group.name());
        }
        for check in of_group {
            let state = match check.state {
                State::Ok => "ok",
                State::Warning => "warning",
                State::Missing => "MISSING",
            };
            out += &format!("  {state:<8} {:<16} {}\n", check.name, check.found);
            if let Some(mend) = &check.mend {
                out += &format!("  {:<8} {:<16} mend: {mend}\n", "", "");
            }
        }
    }
    let count = |state| checks.iter().filter(|check| check.state == state).count();
    let (missing, warnings) = (count(State::Missing), count(State::Warning));
    let verdict = if missing == 0 { "all that is needed is here".to_owned() } else { format!("{missing} missing") };
    out + &format!("{verdict}, {warnings} {}\n", if warnings == 1 { "warning" } else { "warnings" })
}

impl Check {
    fn ok(group: Group, name: &'static str, found: impl Into<String>) -> Self {
        Self { group, name, state: State::Ok, found: found.into(), mend: None }
    }

    fn warning(group: Group, name: &'static str, found: impl Into<String>, mend: impl Into<String>) -> Self {
        Self { state: State::Warning, mend: Some(mend.into()), ..Self::ok(group, name, found) }
    }

    fn missing(group: Group, name: &'static str, found: impl Into<String>, mend: impl Into<String>) -> Self {
        Self { state: State::Missing, ..Self::warning(group, name, found, mend) }
    }
}

/// The first of January 2025: flexcomm is younger, so a clock that shows less was never set.
const BORN: u64 = 1_735_689_600;
/// Echo times are microseconds; a clock that ticks slower than this blurs them.
const COARSE_NS: u64 = 1_000;

fn clock(facts: &Facts) -> Check {
    let found = format!("resolution {} ns, source {}", facts.clock_resolution_ns, facts.clock_source);
    if facts.unix_s < BORN {
        let found = format!("the wall clock shows {} s since 1970", facts.unix_s);
        return Check::missing(Group::Agent, "clock", found, "timedatectl set-ntp true (or: date -s '...')");
    }
    if facts.clock_resolution_ns > COARSE_NS {
        let mend = "boot with a kernel that has high resolution timers (CONFIG_HIGH_RES_TIMERS, clocksource=tsc)";
        return Check::warning(Group::Agent, "clock", found, mend);
    }
    Check::ok(Group::Agent, "clock", found)
}

const CAP_NET_ADMIN: u32 = 12;
const CAP_NET_RAW: u32 = 13;
const SETCAP: &str = "setcap cap_net_admin,cap_net_raw+ep $(command -v flexcomm) \
                      (or AmbientCapabilities= in the agent's unit, or run it as root)";

fn has(capabilities: u64, bit: u32) -> bool {
    capabilities >> bit & 1 == 1
}

/// Echo probes need nothing; ping and traceroute need one of these.
fn icmp(facts: &Facts) -> Check {
    let allowed = facts.ping_groups.is_some_and(|(low, high)| low <= facts.group && facts.group <= high);
    if allowed {
        return Check::ok(Group::Agent, "ping", "unprivileged ICMP sockets are allowed to this group");
    }
    if has(facts.capabilities, CAP_NET_RAW) {
        return Check::ok(Group::Agent, "ping", "CAP_NET_RAW");
    }
    let found = format!("no CAP_NET_RAW, and net.ipv4.ping_group_range leaves out group {}", facts.group);
    let mend = format!("sysctl -w net.ipv4.ping_group_range='0 2147483647' (or: {SETCAP})");
    Check::warning(Group::Agent, "ping", found + "; echo probes work all the same", mend)
}

fn writable(name: &'static str, folder: &std::path::Path) -> Check {
    let shown = folder.display();
    match facts::can_write(folder) {
        Ok(()) => Check::ok(Group::Agent, name, format!("{shown} can be written")),
        Err(error) => {
            let user = facts::user();
            let mend = format!("sudo install -d -o {user} {shown}, or name another folder in the agent's config");
            Check::missing(Group::Agent, name, format!("{shown}: {error}"), mend)
        }
    }
}

fn net_admin(facts: &Facts) -> Check {
    match has(facts.capabilities, CAP_NET_ADMIN) {
        true => Check::ok(Group::Shaping, "CAP_NET_ADMIN", "held"),
        false => Check::missing(Group::Shaping, "CAP_NET_ADMIN", "not held", SETCAP),
    }
}

/// htb and u32 are needed for any shape; netem for delay, jitter and loss.
fn kernel(facts: &Facts) -> Vec<Check> {
    let modules = format!("apt-get install linux-modules-extra-{} (where the kernel is packaged so)", facts.release);
    let support = match &facts.kernel {
        Ok(support) => *support,
        Err(error) => {
            let found = format!("could not be tried: {error}");
            return vec![Check::missing(Group::Shaping, "htb, netem", found, "run as root: sudo flexcomm doctor")];
        }
    };
    let KernelSupport { htb, u32, netem } = support;
    let need = |name, module, there| match there {
        true => Check::ok(Group::Shaping, name, "works (tried in a namespace of its own)"),
        false => Check::missing(
            Group::Shaping,
            name,
            format!("this kernel ({}) has no {module}", facts.release),
            format!("modprobe {module}, or {modules}"),
        ),
    };
    let mut checks = vec![need("htb", "sch_htb", htb)];
    if htb {
        checks.push(need("u32", "cls_u32", u32));
    }
    checks.push(match netem {
        true => need("netem", "sch_netem", true),
        false => Check::warning(
            Group::Shaping,
            "netem",
            format!("this kernel ({}) has no sch_netem: rates can be set, delay, jitter and loss not", facts.release),
            format!("modprobe sch_netem, or {modules}; the lab runs in user-mode Linux instead"),
        ),
    });
    checks
}

fn lab(facts: &Facts, options: &Options) -> Vec<Check> {
    let program = |name: &'static str, package: &str| match facts::find(name) {
        Some(path) => Check::ok(Group::Lab, name, path.display().to_string()),
        None => Check::missing(Group::Lab, name, "not found", format!("apt-get install {package}")),
    };
    let mut checks = vec![program("ip", "iproute2"), program("tc", "iproute2")];
    let netem = matches!(facts.kernel, Ok(KernelSupport { netem: true, htb: true, u32: true }));
    checks.push(match &facts.namespace {
        Ok(()) => Check::ok(Group::Lab, "namespaces", "can be made"),
        Err(error) => Check::missing(Group::Lab, "namespaces", error.clone(), "run as root: sudo flexcomm lab up ..."),
    });
    if netem {
        checks.push(Check::ok(Group::Lab, "emulated links", "this kernel has netem and htb"));
    } else {
        checks.extend(user_mode_linux());
    }
    checks.push(data(&options.data));
    checks.push(match facts.cores {
        cores @ 0..=1 => {
            let found = format!("{cores}: controller, agents and workers take turns, and times are blurred");
            Check::warning(Group::Lab, "cores", found, "use a machine with two cores or more")
        }
        cores => Check::ok(Group::Lab, "cores", cores.to_string()),
    });
    checks
}

/// What the lab needs when this kernel has no netem.
fn user_mode_linux() -> Vec<Check> {
    const INSTALL: &str = "apt-get install user-mode-linux kmod";
    let linux = match (facts::find("linux.uml"), facts::is_folder("/usr/lib/uml/modules")) {
        (Some(path), true) => Check::ok(Group::Lab, "user-mode-linux", format!("{} (netem inside)", path.display())),
        (Some(_), false) => {
            Check::missing(Group::Lab, "user-mode-linux", "its modules are not in /usr/lib/uml/modules", INSTALL)
        }
        (None, _) => Check::missing(Group::Lab, "user-mode-linux", "not found, and this kernel has no netem", INSTALL),
    };
    let modprobe = match facts::find("modprobe") {
        Some(path) => Check::ok(Group::Lab, "modprobe", path.display().to_string()),
        None => Check::missing(Group::Lab, "modprobe", "not found", "apt-get install kmod"),
    };
    let tun = match facts::can_open("/dev/net/tun") {
        Ok(()) => Check::ok(Group::Lab, "/dev/net/tun", "can be opened"),
        Err(error) => {
            let mend = "modprobe tun; mkdir -p /dev/net; mknod /dev/net/tun c 10 200";
            Check::missing(Group::Lab, "/dev/net/tun", error.to_string(), mend)
        }
    };
    vec![linux, modprobe, tun]
}

const IMAGES: [&str; 4] = [
    "train-images-idx3-ubyte.gz",
    "train-labels-idx1-ubyte.gz",
    "t10k-images-idx3-ubyte.gz",
    "t10k-labels-idx1-ubyte.gz",
];

fn data(folder: &std::path::Path) -> Check {
    let absent: Vec<&str> = IMAGES.into_iter().filter(|name| !folder.join(name).is_file()).collect();
    match absent.is_empty() {
        true => Check::ok(Group::Lab, "images", folder.display().to_string()),
        false => Check::missing(
            Group::Lab,
            "images",
            format!("{} lacks {}", folder.display(), absent.join(", ")),
            "apt-get install dataset-fashion-mnist",
        ),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn facts() -> Facts {
        Facts {
            unix_s: BORN + 1,
            clock_resolution_ns: 1,
            clock_source: "tsc".into(),
            capabilities: 0,
            group: 1000,
            ping_groups: Some((1, 0)),
            release: "6.1".into(),
            kernel: Ok(KernelSupport { htb: true, u32: true, netem: true }),
            namespace: Ok(()),
            cores: 2,
        }
    }

    #[test]
    fn ping_needs_the_group_or_the_capability() {
        assert_eq!(icmp(&facts()).state, State::Warning);
        assert!(icmp(&facts()).mend.unwrap().starts_with("sysctl -w net.ipv4.ping_group_range"));
        assert_eq!(icmp(&Facts { ping_groups: Some((0, 1000)), ..facts() }).state, State::Ok);
        assert_eq!(icmp(&Facts { capabilities: 1 << 13, ..facts() }).state, State::Ok);
        assert_eq!(icmp(&Facts { capabilities: !(1 << 13), ..facts() }).state, State::Warning);
    }

    #[test]
    fn capabilities_are_told_apart() {
        assert_eq!(net_admin(&facts()).state, State::Missing);
        assert_eq!(net_admin(&Facts { capabilities: 1 << 12, ..facts() }).state, State::Ok);
    }

    #[test]
    fn each_missing_module_is_named_with_its_remedy() {
        let states = |htb, u32, netem| {
            let checks = kernel(&Facts { kernel: Ok(KernelSupport { htb, u32, netem }), ..facts() });
            assert!(
                checks.iter().all(|c| c.state == State::Ok || c.mend.as_ref().is_some_and(|m| m.contains("modprobe")))
            );
            (is_well(&checks), checks.iter().map(|c| c.state).collect::<Vec<_>>())
        };
        assert_eq!(states(true, true, true), (true, vec![State::Ok; 3]));
        assert_eq!(states(true, true, false), (true, vec![State::Ok, State::Ok, State::Warning]));
        assert_eq!(states(true, false, true), (false, vec![State::Ok, State::Missing, State::Ok]));
        assert_eq!(states(false, false, false), (false, vec![State::Missing, State::Warning]));
        let untried = kernel(&Facts { kernel: Err("EPERM".into()), ..facts() });
        assert!(!is_well(&untried) && untried[0].mend.as_ref().unwrap().contains("sudo"));
    }

    #[test]
    fn clocks_that_were_never_set_or_tick_coarsely_are_told() {
        assert_eq!(clock(&facts()).state, State::Ok);
        assert_eq!(clock(&Facts { unix_s: 100, ..facts() }).state, State::Missing);
        assert_eq!(clock(&Facts { clock_resolution_ns: 4_000_000, ..facts() }).state, State::Warning);
    }

    #[test]
    fn absent_images_are_named() {
        let folder = tempfile::tempdir().unwrap();
        for name in &IMAGES[1..] {
            std::fs::write(folder.path().join(name), "").unwrap();
        }
        let check = data(folder.path());
        assert_eq!(check.state, State::Missing);
        assert!(check.found.ends_with("lacks train-images-idx3-ubyte.gz"), "{}", check.found);
        std::fs::write(folder.path().join(IMAGES[0]), "").unwrap();
        assert_eq!(data(folder.path()).state, State::Ok);
    }

    #[test]
    fn text_shows_groups_states_and_remedies() {
        let checks = [net_admin(&facts()), clock(&facts())];
        let text = text(&checks);
        let lines: Vec<&str> = text.lines().collect();
        assert_eq!(lines[0], "agent");
        assert!(lines[1].starts_with("  ok       clock"));
        assert_eq!(lines[2], "shaping");
        assert!(lines[3].starts_with("  MISSING  CAP_NET_ADMIN") && lines[4].contains("mend: setcap"));
        assert_eq!(lines[5], "1 missing, 0 warnings");
    }
}
