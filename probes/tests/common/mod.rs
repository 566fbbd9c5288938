//! Two network namespaces joined by a veth pair, deleted when dropped.
#![allow(dead_code, clippy::print_stdout)]

use std::process::{Child, Command, Stdio};

/// Whether namespaces can be made here; says why not.
pub fn able(programs: &[&str]) -> bool {
    if !nix::unistd::geteuid().is_root() {
        println!("skipped: needs root to make network namespaces");
        return false;
    }
    for program in ["ip", "tc"].iter().chain(programs) {
        let found = Command::new("sh").args(["-c", &format!("command -v {program}")]).stdout(Stdio::null()).status();
        if !found.is_ok_and(|status| status.success()) {
            println!("skipped: {program} is not installed");
            return false;
        }
    }
    true
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
}

pub const A: &str = "10.99.0.1";
pub const B: &str = "10.99.0.2";
pub const A6: &str = "fd99::1";
pub const B6: &str = "fd99::2";

impl Pair {
    pub fn new(tag: &str) -> Self {
        let name = |end: &str| format!("fcprobe-{}-{tag}-{end}", std::process::id());
        let pair = Self { a: name("a"), b: name("b") };
        sh(&format!("ip netns add {}", pair.a));
        sh(&format!("ip netns add {}", pair.b));
        sh(&format!("ip link add veth0 netns {} type veth peer name veth0 netns {}", pair.a, pair.b));
        for (ns, v4, v6) in [(&pair.a, A, A6), (&pair.b, B, B6)] {
            sh(&format!("ip -n {ns} addr add {v4}/24 dev veth0"));
            // Systems without IPv6 still run the rest.
            let _ = Command::new("ip")
                .args(["-n", ns, "addr", "add", &format!("{v6}/64"), "dev", "veth0", "nodad"])
                .output();
            sh(&format!("ip -n {ns} link set veth0 up"));
            sh(&format!("ip -n {ns} link set lo up"));
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
