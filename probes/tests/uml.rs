//! alpha and beta while a TCP flow saturates the link, on real netem and htb inside user-mode Linux: the kernels of
//! build machines often lack netem.
//!
//! `the_estimates_hold_while_the_link_is_saturated` starts user-mode Linux on this same test binary; inside, the
//! test `inside_user_mode_linux` does the work and its lines are checked outside.
#![allow(clippy::unwrap_used, clippy::print_stdout)]

mod common;

use common::{Pair, able, inside, sh};
use flexcomm_domain::Timestamp;
use flexcomm_probes::Token;
use flexcomm_probes::edge::{
    EchoEvent, EchoProber, EchoResponder, EchoSettings, ThroughputServer, measure_throughput, monotonic,
};
use flexcomm_probes::estimate::{EstimatorConfig, LinkEstimator};
use flexcomm_probes::throughput::{Direction, Plan};
use std::io::{Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::time::Duration;

/// Set inside user-mode Linux.
const INSIDE: &str = "FLEXCOMM_PROBES_UML";
/// (one-way seconds, Mbit/s) in the order in which the link changes.
const POINTS: [(f64, u32); 4] = [(0.001, 250), (0.001, 10), (0.05, 10), (0.05, 250)];
/// Longest time for the estimates to settle after a change, seconds.
const PATIENCE_S: f64 = 25.0;
/// Least time after a change, seconds: what held before must have left the window.
const SETTLE_S: f64 = 5.0;

#[test]
fn the_estimates_hold_while_the_link_is_saturated() {
    if std::env::var_os(INSIDE).is_some() || !able(&["linux.uml"]) {
        return;
    }
    let folder = tempfile::tempdir().unwrap();
    let script = folder.path().join("init.sh");
    let binary = std::env::current_exe().unwrap();
    let init = format!(
        "#!/bin/sh\nexport PATH=/usr/sbin:/usr/bin:/sbin:/bin HOME=/root {INSIDE}=1\n\
         mount -t proc proc /proc; mount -t sysfs sys /sys; mount -t tmpfs tmp /run; mkdir -p /run/netns /run/r/lib\n\
         ln -s /usr/lib/uml/modules /run/r/lib/modules\n\
         for m in veth sch_netem sch_htb cls_u32; do modprobe -d /run/r $m; done\n\
         {} --exact inside_user_mode_linux --nocapture --test-threads 1\n\
         /sbin/poweroff -f || echo o > /proc/sysrq-trigger\n",
        binary.display()
    );
    std::fs::write(&script, init).unwrap();
    sh(&format!("chmod 755 {}", script.display()));
    let memory = if std::path::Path::new("/dev/shm").is_dir() { "/dev/shm" } else { "/tmp" };
    let out = std::process::Command::new("timeout")
        .args(["--kill-after=5", "280", "linux.uml", "mem=768M", "root=/dev/root", "rootfstype=hostfs", "rootflags=/"])
        .args(["rw", &format!("init={}", script.display()), "con=null", "con0=fd:0,fd:1", "quiet"])
        .env("TMPDIR", memory)
        .stdin(std::process::Stdio::null())
        .output()
        .unwrap();
    let text = String::from_utf8_lossy(&out.stdout).replace('\r', "");
    for line in text.lines().filter(|line| line.contains("POINT") || line.contains("TABLE")) {
        println!("{line}");
    }
    assert_eq!(text.matches("POINT good").count(), 2 * POINTS.len(), "{text}");
}

/// What the job's transfers look like.
#[derive(Clone, Copy, PartialEq, Debug)]
enum Job {
    /// One flow without a pause; echo packets have a class of their own, as the agent's shaping gives them.
    Endless,
    /// Transfers with idle times between them, as training steps have; echo packets queue with the rest.
    Steps,
}

#[test]
fn inside_user_mode_linux() {
    if std::env::var_os(INSIDE).is_none() {
        println!("skipped: runs inside user-mode Linux, started by the other test");
        return;
    }
    println!("TABLE job, set alpha ms, Mbit/s, measured alpha ms, Mbit/s, after s");
    for job in [Job::Endless, Job::Steps] {
        let pair = Pair::new("uml");
        let _ = follow(&pair, job);
    }
}

fn shape(ns: &str, job: Job, (alpha, mbit): (f64, u32), first: bool) {
    let verb = if first { "add" } else { "change" };
    let delay = format!("{}us", (alpha * 1e6).round());
    if first {
        sh(&format!("tc -n {ns} qdisc add dev veth0 root handle 1: htb default 20"));
    }
    let class = |parent: &str, id: &str, rate: f64, prio: u32| {
        let (rate, ceil) = ((rate * 1e3).round(), mbit);
        sh(&format!(
            "tc -n {ns} class {verb} dev veth0 parent {parent} classid {id} htb rate {rate}kbit ceil {ceil}mbit prio {prio} quantum 10000"
        ));
    };
    let mbit = f64::from(mbit);
    class("1:", "1:1", mbit, 0);
    class("1:1", "1:20", mbit * 15.0 / 16.0, 1);
    class("1:1", "1:30", mbit / 16.0, 0);
    for id in [20, 30] {
        sh(&format!("tc -n {ns} qdisc {verb} dev veth0 parent 1:{id} handle {id}: netem delay {delay} limit 20000"));
    }
    if first && job == Job::Endless {
        sh(&format!("tc -n {ns} filter add dev veth0 parent 1: protocol ip u32 match ip tos 0xb8 0xff flowid 1:30"));
    }
}

/// Runs the job over all points with one estimator.
fn follow(pair: &Pair, job: Job) -> LinkEstimator {
    let token = Token::new("the token of the tests").unwrap();
    let any: SocketAddr = format!("{}:0", common::B).parse().unwrap();
    for ns in [&pair.a, &pair.b] {
        shape(ns, job, POINTS[0], true);
    }
    let responder = inside(&pair.b, || EchoResponder::spawn(any, &token).unwrap());
    let server = inside(&pair.b, || ThroughputServer::spawn(any, &token).unwrap());
    let (prober, mut echoes) = inside(&pair.a, || EchoProber::spawn(&token, EchoSettings::default()).unwrap());
    prober.set_peers(&[responder.local_addr()]);
    let (transfers, mut estimator) = (Flow::start(pair, job, any), LinkEstimator::new(EstimatorConfig::default()));
    for (i, point) in POINTS.iter().enumerate() {
        if i > 0 {
            for ns in [&pair.a, &pair.b] {
                shape(ns, job, *point, false);
            }
        }
        transfers.rate.store(u64::from(point.1) * 125_000, Ordering::Relaxed);
        let begin = monotonic();
        let mut tests = 0u32;
        let mut told = 0.0;
        loop {
            drain(&mut estimator, &mut echoes, &transfers.samples);
            let t = monotonic().since(begin);
            if t > 2.0 + 3.0 * f64::from(tests) {
                // One per cent of the link over the time between two tests, but enough to tell.
                let plan = Plan::new(4, (u64::from(point.1) * 4_000).max(150_000), 2.0, Direction::Out).unwrap();
                let found = inside(&pair.a, || measure_throughput(server.local_addr(), &token, &plan));
                if let Ok(found) = found {
                    println!("TABLE   at {t:.1} s a test found {:.1} Mbit/s", found.out_bps().unwrap() / 1e6);
                    estimator.throughput(now(), found.out_bps().unwrap()).unwrap();
                }
                tests += 1;
            }
            let (good, line) = judge(&estimator, job, *point);
            if t > told + 1.0 {
                told = t;
                println!("TABLE   at {t:.1} s {line}");
            }
            if good && t > SETTLE_S || t > PATIENCE_S {
                println!("POINT {} {job:?} {line} after {t:.1} s", if good { "good" } else { "BAD" });
                break;
            }
            std::thread::sleep(Duration::from_millis(100));
        }
    }
    estimator
}

fn now() -> Timestamp {
    Timestamp(monotonic().0 / 1000)
}

fn drain(
    estimator: &mut LinkEstimator,
    echoes: &mut tokio::sync::mpsc::Receiver<EchoEvent>,
    transfers: &Receiver<[f64; 3]>,
) {
    while let Ok(event) = echoes.try_recv() {
        if let Some(sample) = event.sample {
            estimator.echo(now(), sample.rtt_s).unwrap();
        }
    }
    while let Ok([bytes, seconds, rounds]) = transfers.try_recv() {
        estimator.transfer_rounds(now(), bytes, seconds, rounds).unwrap();
    }
}

/// TCP that starts slowly after every pause never has 250 Mbit/s on a path of 100 ms: there the job with pauses shows
/// only the latency.
fn judge(estimator: &LinkEstimator, job: Job, (alpha, mbit): (f64, u32)) -> (bool, String) {
    let filled = job == Job::Endless || alpha * f64::from(mbit) < 1.0;
    let found = estimator.estimate(now());
    let (a, b) = (found.alpha.map_or(0.0, |a| a.get()), found.bandwidth.map_or(0.0, |b| b.get() / 1e6));
    let close = |value: f64, truth: f64| (value / truth - 1.0).abs() <= 0.15;
    let line = format!("set {:.1} ms {mbit} Mbit/s, measured {:.3} ms {b:.2} Mbit/s", alpha * 1e3, a * 1e3);
    (close(a, alpha) && (!filled || close(b, f64::from(mbit))), line)
}

/// The job's traffic from a to b. `samples` are (bytes, seconds, rounds) as the job itself sees them.
struct Flow {
    samples: Receiver<[f64; 3]>,
    /// The link's bytes per second, so that the job's transfers last a sensible time.
    rate: Arc<std::sync::atomic::AtomicU64>,
    stop: Arc<AtomicBool>,
}

impl Drop for Flow {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Relaxed);
    }
}

impl Flow {
    fn start(pair: &Pair, job: Job, any: SocketAddr) -> Self {
        let (sender, samples) = channel();
        let listener = inside(&pair.b, || TcpListener::bind(any).unwrap());
        let addr = listener.local_addr().unwrap();
        let flow = Self { samples, rate: Arc::new((31_250_000).into()), stop: Arc::new(AtomicBool::new(false)) };
        let (rate, stop, received) = (Arc::clone(&flow.rate), Arc::clone(&flow.stop), sender.clone());
        std::thread::spawn(move || receive(&listener.accept().unwrap().0, job, &rate, &received));
        let socket = inside(&pair.a, || TcpStream::connect(addr).unwrap());
        let rate = Arc::clone(&flow.rate);
        std::thread::spawn(move || send(socket, job, &rate, &stop, &sender));
        flow
    }
}

/// Endless: sends for ever. Steps: 0.5 s worth of bytes, waits for the answer, then is idle for 0.4 s.
fn send(
    mut socket: TcpStream,
    job: Job,
    rate: &std::sync::atomic::AtomicU64,
    stop: &AtomicBool,
    samples: &Sender<[f64; 3]>,
) {
    let data = vec![1; 64 << 10];
    let mut answer = [0];
    while !stop.load(Ordering::Relaxed) {
        let bytes = if job == Job::Endless { u64::MAX } else { rate.load(Ordering::Relaxed) / 2 };
        let begin = monotonic();
        if job == Job::Steps && socket.write_all(&bytes.to_le_bytes()).is_err() {
            return;
        }
        let mut left = bytes;
        while left > 0 && !stop.load(Ordering::Relaxed) {
            match socket.write(&data[..data.len().min(left as usize)]) {
                Ok(n) => left -= n as u64,
                Err(_) => return,
            }
        }
        if job == Job::Steps {
            if socket.read_exact(&mut answer).is_err() {
                return;
            }
            // The data's way out and the answer's way back.
            let _ = samples.send([bytes as f64, monotonic().since(begin), 2.0]);
            std::thread::sleep(Duration::from_millis(400));
        }
    }
}

fn receive(mut socket: &TcpStream, job: Job, rate: &std::sync::atomic::AtomicU64, samples: &Sender<[f64; 3]>) {
    let mut buffer = vec![0; 256 << 10];
    let (mut since, mut got) = (monotonic(), 0);
    loop {
        if job == Job::Endless {
            let Ok(n @ 1..) = socket.read(&mut buffer) else { return };
            got += n as u64;
            // A piece in the midst of the stream: a quarter of a second of the link.
            if got >= rate.load(Ordering::Relaxed) / 4 {
                let _ = samples.send([got as f64, monotonic().since(since), 0.0]);
                (since, got) = (monotonic(), 0);
            }
            continue;
        }
        let mut length = [0; 8];
        if socket.read_exact(&mut length).is_err() {
            return;
        }
        let mut left = u64::from_le_bytes(length);
        while left > 0 {
            let room = buffer.len().min(left as usize);
            let Ok(n @ 1..) = socket.read(&mut buffer[..room]) else { return };
            left -= n as u64;
        }
        if socket.write_all(&[1]).is_err() {
            return;
        }
    }
}
