//! What the tc tests share: a namespace of their own, the tree as `tc` shows it, and helper processes, which are
//! this test binary run again with a role in its environment.
#![allow(dead_code, clippy::print_stdout, clippy::unwrap_used, missing_docs)]

#[path = "../../../tests/skipped.rs"]
mod skipped;
pub use skipped::skipped;

use flexcomm_agent::tc::{self, GuardianCommand, Shape, Shaper, TcConfig};
use flexcomm_domain::{Bandwidth, Seconds};
use nix::unistd::Pid;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};
use std::time::{Duration, Instant};

pub const ROLE: &str = "FLEXCOMM_TC_ROLE";
pub const STATE: &str = "FLEXCOMM_TC_STATE";
pub const IFACE: &str = "FLEXCOMM_TC_IFACE";
pub const NETEM: &str = "FLEXCOMM_TC_NETEM";
pub const SHAPE: &str = "FLEXCOMM_TC_SHAPE";
/// The test that is no test but the entry of helper processes.
pub const ENTRY: &str = "helper_entry";
/// What the product promises.
pub const WITHIN: Duration = Duration::from_secs(1);
/// What is no promise, only sure to come.
pub const PATIENCE: Duration = Duration::from_secs(60);

/// Runs a program and returns its stdout; panics with its stderr when it fails.
pub fn sh(program: &str, args: &[&str]) -> String {
    let output = Command::new(program).args(args).output().unwrap_or_else(|e| panic!("{program}: {e}"));
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
    assert!(output.status.success(), "{program} {args:?}: {}", text(&output.stderr));
    text(&output.stdout)
}

/// Whether this machine lets us make namespaces; says why not otherwise.
pub fn can_make_namespaces() -> bool {
    let fine = nix::unistd::geteuid().is_root() && Command::new("tc").arg("-V").output().is_ok();
    if !fine {
        skipped("needs root and iproute2");
    }
    fine
}

/// A pair of namespaces with a veth between `v0` (10.99.0.1) and `v1` (10.99.0.2); gone when dropped.
pub struct Net {
    pub name: String,
    pub peer: String,
    pub state: tempfile::TempDir,
}

impl Net {
    pub fn new() -> Self {
        static COUNT: AtomicU32 = AtomicU32::new(0);
        let id = format!("fctc{}x{}", std::process::id(), COUNT.fetch_add(1, Ordering::Relaxed));
        let net = Self { name: format!("{id}a"), peer: format!("{id}b"), state: tempfile::tempdir().unwrap() };
        sh("ip", &["netns", "add", &net.name]);
        sh("ip", &["netns", "add", &net.peer]);
        sh("ip", &["-n", &net.name, "link", "add", "v0", "type", "veth", "peer", "name", "v1", "netns", &net.peer]);
        sh("ip", &["-n", &net.name, "addr", "add", "10.99.0.1/24", "dev", "v0"]);
        sh("ip", &["-n", &net.name, "link", "set", "v0", "up"]);
        sh("ip", &["-n", &net.name, "link", "set", "lo", "up"]);
        sh("ip", &["-n", &net.peer, "addr", "add", "10.99.0.2/24", "dev", "v1"]);
        sh("ip", &["-n", &net.peer, "link", "set", "v1", "up"]);
        net
    }

    pub fn tc(&self, args: &[&str]) -> String {
        sh("tc", &[&["-n", &self.name], args].concat())
    }

    /// Qdiscs, classes and filters of `v0` as tc shows them, without the one counter it shows unasked.
    pub fn tree(&self) -> String {
        let wanted = "qdisc show dev v0\nclass show dev v0\nfilter show dev v0\n";
        let file = self.state.path().join("show");
        std::fs::write(&file, wanted).unwrap();
        let all = self.tc(&["-j", "-batch", file.to_str().unwrap()]);
        let mut parts = all.split("\"direct_packets_stat\":");
        let first = parts.next().unwrap_or_default().to_owned();
        parts.fold(first, |tree, part| tree + part.trim_start_matches(|c: char| c.is_ascii_digit()))
    }

    /// Waits until the tree is as it was; how long that took, or `None` when the promise was broken. The time that
    /// this machine did not let anybody run is no time of the guardian's.
    pub fn back_within(&self, before: &str) -> Option<Duration> {
        let (start, stalls) = (Instant::now(), Stalls::watch());
        loop {
            // When tc was asked, not when it answered: starting it takes its own time.
            let asked = start.elapsed();
            if self.tree() == before {
                return Some(start.elapsed());
            }
            if asked > WITHIN + stalls.so_far() {
                return None;
            }
            std::thread::sleep(Duration::from_millis(5));
        }
    }

    pub fn journals(&self) -> usize {
        journals(self.state.path())
    }

    /// A helper process in this namespace.
    pub fn helper(&self, role: &str, env: &[(&str, &str)]) -> Child {
        Command::new("ip")
            .args(["netns", "exec", &self.name])
            .arg(std::env::current_exe().unwrap())
            .args(["--exact", ENTRY, "--nocapture"])
            .env(ROLE, role)
            .env(STATE, self.state.path())
            .env(IFACE, "v0")
            .envs(env.iter().copied())
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap()
    }

    /// Runs a closure on a thread that lives in this namespace.
    pub fn within<T: Send>(&self, work: impl FnOnce() -> T + Send) -> T {
        Self::in_namespace(&self.name, work)
    }

    /// Runs a closure on a thread that lives in the peer's namespace.
    pub fn within_peer<T: Send>(&self, work: impl FnOnce() -> T + Send) -> T {
        Self::in_namespace(&self.peer, work)
    }

    fn in_namespace<T: Send>(name: &str, work: impl FnOnce() -> T + Send) -> T {
        let file = std::fs::File::open(format!("/run/netns/{name}")).unwrap();
        std::thread::scope(|scope| {
            let thread = scope.spawn(move || {
                nix::sched::setns(file, nix::sched::CloneFlags::CLONE_NEWNET).unwrap();
                work()
            });
            thread.join().unwrap()
        })
    }

    pub fn config(&self) -> TcConfig {
        config(self.state.path(), "v0")
    }
}

/// Adds up by how much a thread that only sleeps wakes too late: stalls of the machine, or of the emulated one.
struct Stalls {
    micros: Arc<AtomicU64>,
    done: Arc<AtomicBool>,
}

impl Stalls {
    fn watch() -> Self {
        let stalls = Self { micros: Arc::default(), done: Arc::default() };
        let (micros, done) = (stalls.micros.clone(), stalls.done.clone());
        std::thread::spawn(move || {
            let nap = Duration::from_millis(5);
            while !done.load(Ordering::Relaxed) {
                let start = Instant::now();
                std::thread::sleep(nap);
                // A tick or two of a slow timer is no stall.
                let late = start.elapsed().saturating_sub(4 * nap);
                micros.fetch_add(late.as_micros() as u64, Ordering::Relaxed);
            }
        });
        stalls
    }

    fn so_far(&self) -> Duration {
        Duration::from_micros(self.micros.load(Ordering::Relaxed))
    }
}

impl Drop for Stalls {
    fn drop(&mut self) {
        self.done.store(true, Ordering::Relaxed);
    }
}

impl Drop for Net {
    fn drop(&mut self) {
        for name in [&self.name, &self.peer] {
            let _ = Command::new("ip").args(["netns", "del", name]).status();
        }
    }
}

pub fn journals(state: &Path) -> usize {
    let entries = std::fs::read_dir(state).unwrap();
    entries.flatten().filter(|e| e.file_name().to_string_lossy().starts_with("tc-journal-")).count()
}

/// The guardian is this test binary again.
pub fn guardian_command() -> GuardianCommand {
    GuardianCommand {
        program: std::env::current_exe().unwrap(),
        args: vec!["--exact".into(), ENTRY.into(), "--nocapture".into()],
        env: vec![(ROLE.into(), "guardian".into())],
    }
}

pub fn config(state: &Path, iface: &str) -> TcConfig {
    TcConfig {
        allow: true,
        interfaces: vec![iface.into()],
        allow_default_route: false,
        lease: Duration::from_secs(10),
        state_dir: state.into(),
        controller: Some(([10, 99, 0, 2], 7070).into()),
        echo_port: 7071,
        guardian: guardian_command(),
    }
}

pub fn shape(delay_ms: f64, jitter_ms: f64, loss: f64, mbit: f64) -> Shape {
    Shape {
        delay: Seconds::new(delay_ms * 1e-3).unwrap(),
        jitter: Seconds::new(jitter_ms * 1e-3).unwrap(),
        loss,
        rate: Bandwidth::new(mbit * 1e6).unwrap(),
    }
}

/// What a helper process does; returns at once in the test run itself.
pub fn helper_main() {
    let Ok(role) = std::env::var(ROLE) else { return };
    let state = PathBuf::from(std::env::var_os(STATE).unwrap_or_default());
    let iface = std::env::var(IFACE).unwrap_or_default();
    let status = match role.as_str() {
        "guardian" => tc::guardian::main(),
        "loop" => churn(&state, &iface),
        "hold" => hold(&state, &iface),
        other => panic!("unknown role {other}"),
    };
    std::process::exit(status);
}

/// Tells the parent what is being done, past the test harness's capture.
fn say(what: &str) {
    let _ = writeln!(std::io::stdout(), "{what}");
}

/// Applies, changes, renews and restores until it is killed.
fn churn(state: &Path, iface: &str) -> i32 {
    let netem = std::env::var_os(NETEM).is_some();
    let one = if netem { shape(5.0, 1.0, 0.01, 100.0) } else { shape(0.0, 0.0, 0.0, 100.0) };
    let other = if netem { shape(50.0, 0.0, 0.0, 10.0) } else { shape(0.0, 0.0, 0.0, 10.0) };
    let mut shaper = Shaper::new(config(state, iface)).unwrap();
    loop {
        for shape in [one, other] {
            say("apply");
            shaper.apply(iface, &shape).unwrap();
            for _ in 0..2000 {
                say("renew");
                shaper.renew().unwrap();
            }
        }
        say("restore");
        shaper.restore().unwrap();
        say("idle");
    }
}

/// Applies the shape named in the environment (`delay_ms jitter_ms loss mbit`) and renews until it is killed.
fn hold(state: &Path, iface: &str) -> i32 {
    let text = std::env::var(SHAPE).unwrap_or_else(|_| "0 0 0 50".into());
    let numbers: Vec<f64> = text.split(' ').map(|n| n.parse().unwrap()).collect();
    let mut shaper = Shaper::new(config(state, iface)).unwrap();
    shaper.apply(iface, &shape(numbers[0], numbers[1], numbers[2], numbers[3])).unwrap();
    say("held");
    loop {
        std::thread::sleep(Duration::from_millis(200));
        if shaper.renew().is_err() {
            say("lost");
        }
    }
}

/// Child processes of a process.
pub fn children(parent: u32) -> Vec<Pid> {
    let tasks = std::fs::read_dir(format!("/proc/{parent}/task")).unwrap().flatten();
    let lists = tasks.filter_map(|task| std::fs::read_to_string(task.path().join("children")).ok());
    lists
        .flat_map(|list| list.split_whitespace().map(|p| Pid::from_raw(p.parse().unwrap())).collect::<Vec<_>>())
        .collect()
}
