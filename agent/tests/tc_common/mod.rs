//! What the tc tests share: a namespace of their own, the tree as `tc` shows it, and helper processes.
#![allow(dead_code, clippy::print_stdout, clippy::unwrap_used, missing_docs)]

#[path = "../../../tests/skipped.rs"]
mod skipped;
pub use skipped::skipped;

mod helper;
#[allow(unused_imports)]
pub use helper::{IFACE, NETEM, ROLE, SHAPE, STATE, shape};

use flexcomm_agent::tc::TcConfig;
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use std::io::{BufRead, BufReader};
use std::path::Path;
use std::process::{Child, ChildStdout, Command, ExitStatus, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};
use std::sync::mpsc;
use std::time::{Duration, Instant};

/// The program of helper processes and of guardians.
pub const HELPER: &str = env!("CARGO_BIN_EXE_tc_test_helper");
/// What the product promises.
pub const WITHIN: Duration = Duration::from_secs(1);
/// What is no promise, only sure to come.
pub const TIMEOUT: Duration = Duration::from_secs(60);

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
    pub fn helper(&self, role: &str, env: &[(&str, &str)]) -> Helper {
        let child = Command::new("ip")
            .args(["netns", "exec", &self.name])
            .arg(HELPER)
            .env(ROLE, role)
            .env(STATE, self.state.path())
            .env(IFACE, "v0")
            .envs(env.iter().copied())
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        Helper::new(child)
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

pub fn config(state: &Path, iface: &str) -> TcConfig {
    helper::config(Path::new(HELPER), state, iface)
}

/// A helper process and what it is doing, by its own words. Killed when dropped.
pub struct Helper {
    pub child: Child,
    words: mpsc::Receiver<String>,
}

impl Helper {
    fn new(mut child: Child) -> Self {
        let words = read_lines(child.stdout.take().unwrap());
        Self { child, words }
    }

    pub fn pid(&self) -> Pid {
        Pid::from_raw(self.child.id() as i32)
    }

    /// Waits for a word.
    pub fn wait_for(&self, word: &str) {
        let start = Instant::now();
        while let Ok(line) = self.words.recv_timeout(TIMEOUT.saturating_sub(start.elapsed())) {
            if line == word {
                return;
            }
        }
        panic!("the helper never came to {word:?}");
    }

    /// SIGKILL; returns how it ended.
    pub fn kill(&mut self) -> ExitStatus {
        self.child.kill().unwrap();
        self.child.wait().unwrap()
    }

    /// Ends it and its guardians: stopped first, so that it starts no others in between.
    pub fn kill_with_guardians(&mut self) {
        kill(self.pid(), Signal::SIGSTOP).unwrap();
        for guardian in self.guardians() {
            let _ = kill(guardian, Signal::SIGKILL);
        }
        self.kill();
    }

    /// The last word of one that was killed.
    pub fn last_word(&self) -> Option<String> {
        let mut last = None;
        while let Ok(line) = self.words.recv_timeout(TIMEOUT) {
            last = Some(line);
        }
        last
    }

    /// Its guardians: it has no other children.
    pub fn guardians(&self) -> Vec<Pid> {
        children(self.child.id())
    }
}

impl Drop for Helper {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// The lines of a process until it ends, read by a thread so that a test can stop waiting for the next one.
fn read_lines(stdout: ChildStdout) -> mpsc::Receiver<String> {
    let (send, lines) = mpsc::channel();
    std::thread::spawn(move || {
        for line in BufReader::new(stdout).lines().map_while(Result::ok) {
            if send.send(line).is_err() {
                return;
            }
        }
    });
    lines
}

/// Child processes of a process.
pub fn children(parent: u32) -> Vec<Pid> {
    let tasks = std::fs::read_dir(format!("/proc/{parent}/task")).unwrap().flatten();
    let lists = tasks.filter_map(|task| std::fs::read_to_string(task.path().join("children")).ok());
    lists
        .flat_map(|list| list.split_whitespace().map(|p| Pid::from_raw(p.parse().unwrap())).collect::<Vec<_>>())
        .collect()
}
