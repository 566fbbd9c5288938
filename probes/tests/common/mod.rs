//! Two network namespaces joined by a veth pair, deleted when dropped.
#![allow(dead_code, clippy::print_stdout, clippy::print_stderr, clippy::unwrap_used)]

#[path = "../../../tests/skipped.rs"]
mod skipped;
pub use skipped::skipped;

use flexcomm_probes::edge::MeasureError;
use flexcomm_probes::throughput::{Refusal, ThroughputResult};
use std::process::{Child, Command, Stdio};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

/// Says that a test's IPv6 part did not run. Not a skip that could be forbidden: no package brings IPv6 to a machine.
fn without_ipv6(why: &str) {
    eprintln!("without IPv6: {why}");
}

/// Whether the loopback interface speaks IPv6; says so when not.
pub fn has_ipv6() -> bool {
    let has = std::net::UdpSocket::bind("[::1]:0").is_ok();
    if !has {
        without_ipv6("this machine has no IPv6 loopback");
    }
    has
}

/// Held by tests that compare rates or times: two of them at once measure each other.
pub fn alone() -> MutexGuard<'static, ()> {
    static ONE: Mutex<()> = Mutex::new(());
    ONE.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Measurements of which a comparison takes the median. Errors are signed, so what is always too much or too little is
/// seen, and what load does to either side is not.
const PAIRS: usize = 5;

/// How often a comparison is made until it holds once: a host that holds this machine up for a moment spoils some, what is
/// wrong in the code is wrong again.
const ATTEMPTS: usize = 3;

/// Asserts that the medians of columns of [`PAIRS`] measurements hold in one of [`ATTEMPTS`]; prints all of them.
pub fn assert_medians<const N: usize>(
    what: &str,
    mut measure: impl FnMut() -> [f64; N],
    holds: impl Fn(&[f64; N]) -> bool,
) {
    let mut tried = Vec::new();
    for _ in 0..ATTEMPTS {
        let rows: Vec<[f64; N]> = (0..PAIRS).map(|_| measure()).collect();
        let middle = |i| flexcomm_probes::stats::median(&rows.iter().map(|row| row[i]).collect::<Vec<f64>>()).unwrap();
        let middle: [f64; N] = std::array::from_fn(middle);
        println!("{what}: {rows:.5?}, median {middle:.5?}");
        if holds(&middle) {
            return;
        }
        tried.push(middle);
    }
    panic!("{what}: the medians of all attempts are beyond what is allowed: {tried:.5?}");
}

/// The error of a median ping in units of what is allowed: 5 % of the system's, or 50 us where that is more.
pub fn ping_error(ours: f64, system: f64) -> f64 {
    (ours - system) / (0.05 * system).max(50e-6)
}

/// Both at the same time, so that whatever else runs here meets both.
pub fn side_by_side<A: Send, B>(one: impl FnOnce() -> A + Send, other: impl FnOnce() -> B) -> (A, B) {
    std::thread::scope(|scope| {
        let one = scope.spawn(one);
        let other = other();
        (one.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic)), other)
    })
}

/// Measures again while the server is busy: a session that has just ended is taken down a little later.
pub fn unless_busy(measure: impl Fn() -> Result<ThroughputResult, MeasureError>) -> ThroughputResult {
    let begin = Instant::now();
    loop {
        match measure() {
            Err(MeasureError::Refused(Refusal::Busy(_))) if begin.elapsed() < Duration::from_secs(30) => {
                std::thread::sleep(Duration::from_millis(20));
            }
            outcome => return outcome.unwrap(),
        }
    }
}

/// Whether namespaces can be made here; says why not.
pub fn able(programs: &[&str]) -> bool {
    if !nix::unistd::geteuid().is_root() {
        skipped("needs root to make network namespaces");
        return false;
    }
    for program in ["ip", "tc"].iter().chain(programs) {
        let found = Command::new("sh").args(["-c", &format!("command -v {program}")]).stdout(Stdio::null()).status();
        if !found.is_ok_and(|status| status.success()) {
            skipped(&format!("{program} is not installed"));
            return false;
        }
    }
    // Root without the capability, as in many containers.
    if let Some(why) = no_namespaces() {
        skipped(&format!("network namespaces cannot be made here ({why})"));
        return false;
    }
    true
}

fn no_namespaces() -> Option<String> {
    let name = format!("fcprobe-{}-try-{:?}", std::process::id(), std::thread::current().id());
    let name = name.replace(['(', ')'], "");
    let made = Command::new("ip").args(["netns", "add", &name]).output().ok()?;
    let pair =
        Command::new("ip").args(["-n", &name, "link", "add", "try0", "type", "veth", "peer", "name", "try1"]).output();
    let _ = Command::new("ip").args(["netns", "del", &name]).output();
    let failed = [Some(made), pair.ok()].into_iter().flatten().find(|out| !out.status.success())?;
    Some(String::from_utf8_lossy(&failed.stderr).trim().to_owned())
}

/// Runs a command given as words; panics with its output when it fails.
pub fn sh(line: &str) -> String {
    let words: Vec<&str> = line.split_whitespace().collect();
    let out = Command::new(words[0]).args(&words[1..]).output().unwrap_or_else(|e| panic!("{line}: {e}"));
    assert!(out.status.success(), "{line}: {}", String::from_utf8_lossy(&out.stderr));
    String::from_utf8_lossy(&out.stdout).into_owned()
}

/// Namespaces `a` and `b`; each has `veth0`.
pub struct Pair {
    pub a: String,
    pub b: String,
    /// Whether both ends have IPv6 addresses.
    pub v6: bool,
}

pub const A: &str = "10.99.0.1";
pub const B: &str = "10.99.0.2";
pub const A6: &str = "fd99::1";
pub const B6: &str = "fd99::2";

impl Pair {
    pub fn new(tag: &str) -> Self {
        let name = |end: &str| format!("fcprobe-{}-{tag}-{end}", std::process::id());
        let mut pair = Self { a: name("a"), b: name("b"), v6: true };
        sh(&format!("ip netns add {}", pair.a));
        sh(&format!("ip netns add {}", pair.b));
        sh(&format!("ip link add veth0 netns {} type veth peer name veth0 netns {}", pair.a, pair.b));
        for (ns, v4, v6) in [(pair.a.clone(), A, A6), (pair.b.clone(), B, B6)] {
            sh(&format!("ip -n {ns} addr add {v4}/24 dev veth0"));
            // Systems without IPv6 still run the rest.
            let add = ["-n", &ns, "addr", "add", &format!("{v6}/64"), "dev", "veth0", "nodad"];
            pair.v6 &= Command::new("ip").args(add).output().is_ok_and(|out| out.status.success());
            sh(&format!("ip -n {ns} link set veth0 up"));
            sh(&format!("ip -n {ns} link set lo up"));
        }
        if !pair.v6 {
            without_ipv6("no IPv6 address can be set here");
        }
        pair
    }

    /// Shapes both ends.
    pub fn htb(&self, mbit: u32) {
        for ns in [&self.a, &self.b] {
            // The first time there is nothing to delete.
            let _ = Command::new("tc").args(["-n", ns, "qdisc", "del", "dev", "veth0", "root"]).output();
            sh(&format!("tc -n {ns} qdisc add dev veth0 root handle 1: htb default 1"));
            sh(&format!("tc -n {ns} class add dev veth0 parent 1: classid 1:1 htb rate {mbit}mbit quantum 60000"));
        }
    }

    /// Starts a program inside a namespace.
    pub fn start(&self, ns: &str, line: &str) -> Running {
        let mut command = Command::new("ip");
        command.args(["netns", "exec", ns]).args(line.split_whitespace());
        let child = command.stdout(Stdio::null()).stderr(Stdio::null()).spawn().expect("start a program");
        Running(child)
    }

    /// Runs a program inside a namespace.
    pub fn run(&self, ns: &str, line: &str) -> String {
        sh(&format!("ip netns exec {ns} {line}"))
    }
}

impl Drop for Pair {
    fn drop(&mut self) {
        for ns in [&self.a, &self.b] {
            let _ = Command::new("ip").args(["netns", "del", ns]).output();
        }
    }
}

/// A program that ends with its handle.
pub struct Running(Child);

impl Drop for Running {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// Runs `f` on a thread inside a namespace; threads and sockets that it makes stay there.
pub fn inside<T: Send>(ns: &str, f: impl FnOnce() -> T + Send) -> T {
    std::thread::scope(|scope| {
        let body = || {
            let file = std::fs::File::open(format!("/run/netns/{ns}")).expect("open the namespace");
            nix::sched::setns(file, nix::sched::CloneFlags::CLONE_NEWNET).expect("enter the namespace");
            f()
        };
        scope.spawn(body).join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))
    })
}
