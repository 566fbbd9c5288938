//! Latency and throughput tests while a TCP flow saturates the link, and ping against the system's, on real netem and htb inside
//! user-mode Linux: the kernels of build machines often lack netem.
//!
//! `timed::the_estimates_hold_while_the_link_is_saturated` starts user-mode Linux on this same test binary, once for
//! each job. Inside, the test `inside_user_mode_linux` does the work; what it says of each comparison is read outside.
#![allow(clippy::unwrap_used, clippy::print_stdout, clippy::print_stderr)]

mod common;
#[path = "../../tests/uml.rs"]
mod uml;

use common::{Pair, able, assert_medians, inside, ping_error, sh, side_by_side};
use flexcomm_domain::Timestamp;
use flexcomm_probes::Token;
use flexcomm_probes::edge::{
    EchoEvent, EchoProber, EchoResponder, EchoSettings, MeasureError, PingSettings, ThroughputServer,
    measure_throughput, monotonic, ping_many,
};
use flexcomm_probes::estimate::LatencyEstimator;
use flexcomm_probes::ping::PingPlan;
use flexcomm_probes::stats::{median, nearest_rank};
use flexcomm_probes::throughput::{Direction, Plan, ThroughputResult};
use std::collections::{BTreeSet, VecDeque};
use std::io::{Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread::JoinHandle;
use std::time::Duration;

/// Set inside user-mode Linux, to the number of the job.
const INSIDE: &str = "FLEXCOMM_PROBES_UML";
/// (one-way seconds, Mbit/s) in the order in which the link changes: the four networks that the lab sets on C1. Faster
/// ones are more than emulated machines on a busy host can fill, and then the job is slow and not the link.
const POINTS: [(f64, u32); 4] = [(0.001, 100), (0.001, 4), (0.05, 4), (0.05, 100)];
/// Time to settle after a change, seconds, whatever the estimates say meanwhile.
const SETTLE_S: f64 = 30.0;
/// The estimates count by their median over this time, after that, seconds.
const HOLD_S: f64 = 5.0;
/// What the link carried counts by windows of this length, seconds, and by this quantile of them: most of the job's
/// transfers are longer, and some windows lie between them.
const CARRIED_S: f64 = 0.25;
const CARRIED_QUANTILE: f64 = 0.8;
/// Beside a job that pauses, tests find this part of the link at least, by the median of a point's. Beside a flow that never pauses they are over
/// before they have a fair part of it: nothing is claimed of that.
const SHARE: f64 = 0.5;
/// Payload in a full frame: 1448 of 1514 bytes are the job's own, and the lab sets the rate of whole frames.
const PAYLOAD: f64 = 1448.0 / 1514.0;
/// What tests may use after a change, in seconds of the link: the share of one per cent over five minutes, which is
/// how far the controller lets a suspect link overdraw.
const TESTS_S: f64 = 3.0;

/// How often a job is followed until each of its comparisons has held once. A host that holds the emulated machine up for a
/// tenth of a second moves its clock, and with it what a test of a second finds; what is wrong in the code is wrong again.
const ATTEMPTS: usize = 3;

/// What is compared while a job is followed.
fn comparisons(job: Job) -> BTreeSet<String> {
    let of = |compared: Compared, points: &[(f64, u32)]| -> Vec<String> {
        points.iter().map(|point| compared.name(*point)).collect()
    };
    let mut all = of(Compared::Latency, &POINTS);
    if job == Job::Steps {
        all.extend(of(Compared::Tests, &POINTS));
        all.extend(of(Compared::Ping, &PINGED));
    }
    all.into_iter().collect()
}

#[derive(Clone, Copy, Debug)]
enum Compared {
    Latency,
    Tests,
    Ping,
}

impl Compared {
    fn name(self, (alpha, mbit): (f64, u32)) -> String {
        format!("{self:?} at {:.1} ms {mbit} Mbit/s", alpha * 1e3)
    }

    /// Says how a comparison went, for the test outside.
    fn judge(self, point: (f64, u32), holds: bool, found: &str) {
        println!("{} {}: {found}", if holds { "HOLDS" } else { "FAILS" }, self.name(point));
    }
}

/// The processor of a machine: each has one of its own, as far as there are so many. `lab/uml/preload.c` says why only one.
fn processor(job: usize) -> String {
    let may = nix::sched::sched_getaffinity(nix::unistd::Pid::from_raw(0)).unwrap();
    let all: Vec<usize> = (0..nix::sched::CpuSet::count()).filter(|number| may.is_set(*number).unwrap()).collect();
    all[job % all.len()].to_string()
}

/// What a machine printed that did the work for one job.
fn user_mode_linux(job: usize) -> String {
    let folder = tempfile::tempdir().unwrap();
    let script = folder.path().join("init.sh");
    let binary = std::env::current_exe().unwrap();
    let init = format!(
        "#!/bin/sh\nexport PATH=/usr/sbin:/usr/bin:/sbin:/bin HOME=/root {INSIDE}={job}\n\
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
    let out = std::process::Command::new("taskset")
        .args(["--cpu-list", &processor(job), "timeout", "--kill-after=5", "480"])
        .args(["linux.uml", "mem=768M", "root=/dev/root", "rootfstype=hostfs", "rootflags=/"])
        .args(["rw", &format!("init={}", script.display()), "con=null", "con0=fd:0,fd:1", "quiet"])
        .arg(format!("uml_dir={}/uml/", folder.path().display()))
        .env("TMPDIR", memory)
        .env("LD_PRELOAD", uml::preload(folder.path()))
        .stdin(std::process::Stdio::null())
        .output()
        .unwrap();
    String::from_utf8_lossy(&out.stdout).replace('\r', "")
}

/// What the job's transfers look like.
#[derive(Clone, Copy, PartialEq, Debug)]
enum Job {
    /// One flow without a pause; echo packets and handshakes have a class of their own, as the agent's shaping gives
    /// them.
    Endless,
    /// Transfers with idle times between them, as training steps have; echo packets queue with the rest.
    Steps,
}

const JOBS: [Job; 2] = [Job::Endless, Job::Steps];

/// Where ping is compared with the system's.
const PINGED: [(f64, u32); 2] = [POINTS[0], POINTS[2]];

#[test]
fn inside_user_mode_linux() {
    let Ok(number) = std::env::var(INSIDE) else {
        // Nothing is skipped: timed::the_estimates_hold_while_the_link_is_saturated runs this inside.
        return;
    };
    let job = JOBS[number.parse::<usize>().unwrap()];
    println!("TABLE job, set alpha ms, Mbit/s, measured alpha ms, Mbit/s, after s");
    follow(&Pair::new("uml"), job);
    if job != Job::Steps {
        return;
    }
    let pair = Pair::new("ping");
    for (i, point) in PINGED.into_iter().enumerate() {
        for ns in [&pair.a, &pair.b] {
            shape(ns, Job::Steps, point, i == 0);
        }
        ping_agrees(&pair, point);
    }
}

/// The median of ping is within 5 % or 50 µs of the system's.
fn ping_agrees(pair: &Pair, point: (f64, u32)) {
    let target = [common::B.parse().unwrap()];
    let settings = PingSettings { plan: PingPlan { count: 40, interval_s: 0.02, timeout_s: 2.0 }, payload: 56 };
    let ours = || {
        let report = inside(&pair.a, || ping_many(&target, &settings, &AtomicBool::new(false), &mut |_| {})).unwrap();
        report.targets[0].rtt.unwrap().median_s
    };
    let measure = || {
        let (ours, system) = side_by_side(ours, || system_ping(pair));
        [ours, system, ping_error(ours, system)]
    };
    let what = format!("netem {point:?}, our median in s, the system's, error in units of what is allowed");
    assert_medians(&what, measure, |[_, _, error]| error.abs() <= 1.0);
    Compared::Ping.judge(point, true, "the medians agree");
}

/// Median round trip in seconds of the system's ping.
fn system_ping(pair: &Pair) -> f64 {
    let out = pair.run(&pair.a, &format!("ping -c 40 -i 0.02 {}", common::B));
    let times = out.lines().filter_map(|line| line.split("time=").nth(1)?.split(' ').next()?.parse::<f64>().ok());
    median(&times.collect::<Vec<f64>>()).unwrap() * 1e-3
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
    // Echoes need far less than a 64th.
    class("1:1", "1:20", mbit * 63.0 / 64.0, 1);
    class("1:1", "1:30", mbit / 64.0, 0);
    for id in [20, 30] {
        sh(&format!("tc -n {ns} qdisc {verb} dev veth0 parent 1:{id} handle {id}: netem delay {delay} limit 20000"));
    }
    if first && job == Job::Endless {
        for tos in [flexcomm_probes::ECHO_TOS, flexcomm_probes::CONTROL_TOS] {
            sh(&format!(
                "tc -n {ns} filter add dev veth0 parent 1: protocol ip u32 match ip tos {tos:#x} 0xff flowid 1:30"
            ));
        }
    }
}

/// Runs the job over all points with one estimator.
fn follow(pair: &Pair, job: Job) {
    let token = Token::new("the token of the tests").unwrap();
    let any: SocketAddr = format!("{}:0", common::B).parse().unwrap();
    for ns in [&pair.a, &pair.b] {
        shape(ns, job, POINTS[0], true);
    }
    // What the emulated machine itself takes one way: the system's ping on the link, which is idle still, tells.
    let machine_s = (system_ping(pair) / 2.0 - POINTS[0].0).max(0.0);
    println!("the machine's own latency: {:.3} ms", machine_s * 1e3);
    assert!(
        machine_s < 0.5 * POINTS[0].0,
        "{machine_s} s of its own: no latency of {} s can be measured here",
        POINTS[0].0
    );
    let responder = inside(&pair.b, || EchoResponder::spawn(any, &token).unwrap());
    let server = inside(&pair.b, || ThroughputServer::spawn(any, &token).unwrap());
    let (prober, mut echoes) = inside(&pair.a, || EchoProber::spawn(&token, EchoSettings::default()).unwrap());
    prober.set_peers(&[responder.local_addr()]);
    let (transfers, mut estimator) = (Flow::start(pair, job, any), LatencyEstimator::default());
    let mut tests = Tests { point: POINTS[0], spent_s: 0.0, next_s: 0.0, running: None };
    for (i, point) in POINTS.iter().enumerate() {
        if i > 0 {
            for ns in [&pair.a, &pair.b] {
                shape(ns, job, *point, false);
            }
        }
        transfers.rate.store(u64::from(point.1) * 125_000, Ordering::Relaxed);
        let begin = monotonic();
        // A test that still runs goes on over the change: what it finds is of no point.
        let mut of_before = tests.running.is_some();
        tests = Tests { point: *point, spent_s: 0.0, next_s: 2.0, running: tests.running };
        let mut recent = Recent { machine_s, ..Recent::default() };
        loop {
            drain(&mut estimator, &mut echoes);
            let t = monotonic().since(begin);
            let (ns, addr, token) = (pair.a.clone(), server.local_addr(), token.clone());
            if let Some(found) = tests.due(t, move |plan| inside(&ns, || measure_throughput(addr, &token, &plan))) {
                let is_of_before = std::mem::take(&mut of_before);
                recent.tested.extend(found.filter(|_| !is_of_before));
            }
            recent.push(t, &estimator, carried_bytes(pair));
            if recent.judged(t, *point) {
                break;
            }
            std::thread::sleep(Duration::from_millis(100));
        }
    }
}

/// Throughput tests as the agents' of a link that is suspected to have changed, with the controller's budgets.
struct Tests {
    point: (f64, u32),
    spent_s: f64,
    next_s: f64,
    /// As in the agent, everything else goes on meanwhile.
    running: Option<JoinHandle<Result<ThroughputResult, MeasureError>>>,
}

impl Tests {
    /// Looks whether one has ended, and answers what it found in bit/s; begins one when it is time.
    fn due(
        &mut self,
        t: f64,
        measure: impl FnOnce(Plan) -> Result<ThroughputResult, MeasureError> + Send + 'static,
    ) -> Option<Option<f64>> {
        let rate = f64::from(self.point.1) * 125_000.0;
        if let Some(test) = self.running.take_if(|test| test.is_finished()) {
            return Some(self.ended(t, rate, test.join().unwrap()));
        }
        let bytes = (rate * (20.0 * self.point.0).max(0.2)).max(500_000.0);
        if self.running.is_none() && t >= self.next_s && self.spent_s + bytes / rate <= TESTS_S {
            self.next_s = t + 3.0;
            let plan = Plan::new(4, bytes as u64, 4.0, Direction::Out).unwrap();
            self.running = Some(std::thread::spawn(move || measure(plan)));
        }
        None
    }

    fn ended(&mut self, t: f64, rate: f64, outcome: Result<ThroughputResult, MeasureError>) -> Option<f64> {
        let found = match outcome {
            Ok(found) => found,
            Err(error) => {
                println!("TABLE   at {t:.1} s a test failed: {error}");
                return None;
            }
        };
        self.spent_s += found.bytes() as f64 / rate;
        let (bps, spent) = (found.out_bps()?, found.bytes() as f64 / 1e6);
        let sure = if found.out?.rate.steady { "steady" } else { "not steady" };
        println!("TABLE   at {t:.1} s a test found {:.1} Mbit/s ({sure}) with {spent:.2} MB", bps / 1e6);
        Some(bps)
    }
}

/// The estimates of the last seconds, and what was tested at a point.
#[derive(Default)]
struct Recent {
    /// The emulated machine's own one-way latency, seconds.
    machine_s: f64,
    /// When, alpha.
    seen: VecDeque<(f64, f64)>,
    /// What tests found, bit/s.
    tested: Vec<f64>,
    told: f64,
    /// When, and the link's counter of bytes, at the begin of a window; and what the windows before carried in Mbit/s.
    window: Option<(f64, u64)>,
    carried: Vec<f64>,
}

/// Bytes that the link has carried from a to b.
fn carried_bytes(pair: &Pair) -> u64 {
    let table = inside(&pair.a, || std::fs::read_to_string("/proc/thread-self/net/dev").unwrap());
    let counters = table.lines().find_map(|line| line.trim().strip_prefix("veth0:")).unwrap();
    counters.split_whitespace().nth(8).unwrap().parse().unwrap()
}

impl Recent {
    fn push(&mut self, t: f64, estimator: &LatencyEstimator, carried: u64) {
        match self.window {
            Some((begun, before)) if t - begun >= CARRIED_S => {
                self.carried.push((carried - before) as f64 * 8e-6 / (t - begun));
                self.window = Some((t, carried));
            }
            None => self.window = Some((t, carried)),
            Some(_) => {}
        }
        self.seen.push_back((t, estimator.estimate(now()).map_or(0.0, |found| found.alpha.get())));
        while self.seen.front().is_some_and(|(at, ..)| t - at > HOLD_S) {
            self.seen.pop_front();
        }
    }

    /// Mbit/s that the link has carried when it was full.
    fn carried(&self, set: f64) -> f64 {
        nearest_rank(&sorted(&self.carried), CARRIED_QUANTILE).unwrap_or(set).min(set)
    }

    /// Whether the time of the point is over; says then how well it was followed.
    fn judged(&mut self, t: f64, (alpha, mbit): (f64, u32)) -> bool {
        let a = median(&self.seen.iter().map(|(_, alpha)| *alpha).collect::<Vec<f64>>()).unwrap();
        let b = median(&self.tested).unwrap_or(0.0) / 1e6;
        let set = f64::from(mbit);
        // A host that is busy with other things slows the emulated machine down until that, and not htb, limits the
        // link: then the truth is what it did carry.
        let carried = self.carried(set);
        let latency = (a - self.machine_s - alpha).abs() <= 0.15 * alpha;
        let bandwidth = b >= SHARE * carried * PAYLOAD && b <= 1.15 * set * PAYLOAD;
        let line = format!(
            "set {:.1} ms {mbit} Mbit/s, carried {carried:.2}, estimated {:.3} ms, tests found {b:.2} Mbit/s",
            alpha * 1e3,
            a * 1e3
        );
        if t > self.told + 1.0 {
            self.told = t;
            println!("TABLE   at {t:.1} s {line}");
        }
        // One window, fixed before: the first moment at which all is well would hide that it passes.
        let done = t >= SETTLE_S + HOLD_S;
        if done {
            let found = format!("{line} (latency: median of {SETTLE_S} to {:.0} s)", SETTLE_S + HOLD_S);
            Compared::Latency.judge((alpha, mbit), latency, &found);
            Compared::Tests.judge((alpha, mbit), bandwidth, &found);
        }
        done
    }
}

/// Ends a thread when it goes.
#[derive(Default)]
struct StopOnDrop(Arc<AtomicBool>);

impl Drop for StopOnDrop {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
    }
}

fn sorted(values: &[f64]) -> Vec<f64> {
    let mut values = values.to_vec();
    values.sort_by(f64::total_cmp);
    values
}

fn now() -> Timestamp {
    Timestamp(monotonic().0 / 1000)
}

fn drain(estimator: &mut LatencyEstimator, echoes: &mut tokio::sync::mpsc::Receiver<EchoEvent>) {
    while let Ok(event) = echoes.try_recv() {
        if let Some(sample) = event.sample {
            estimator.echo(now(), sample.rtt_s).unwrap();
        }
    }
}

/// The job's traffic from a to b.
struct Flow {
    /// The link's bytes per second, so that the job's transfers last a sensible time.
    rate: Arc<AtomicU64>,
    stop: StopOnDrop,
}

impl Flow {
    fn start(pair: &Pair, job: Job, any: SocketAddr) -> Self {
        let listener = inside(&pair.b, || TcpListener::bind(any).unwrap());
        let addr = listener.local_addr().unwrap();
        let flow = Self { rate: Arc::new((31_250_000).into()), stop: StopOnDrop::default() };
        std::thread::spawn(move || receive(&listener.accept().unwrap().0, job));
        let socket = inside(&pair.a, || TcpStream::connect(addr).unwrap());
        let (rate, stop) = (Arc::clone(&flow.rate), Arc::clone(&flow.stop.0));
        std::thread::spawn(move || send(socket, job, &rate, &stop));
        flow
    }
}

/// Endless: sends for ever. Steps: 0.5 s worth of bytes, waits for the answer, then is idle for 0.4 s.
fn send(mut socket: TcpStream, job: Job, rate: &AtomicU64, stop: &AtomicBool) {
    let data = vec![1; 64 << 10];
    let mut answer = [0];
    while !stop.load(Ordering::Relaxed) {
        let bytes = if job == Job::Endless { u64::MAX } else { rate.load(Ordering::Relaxed) / 2 };
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
            std::thread::sleep(Duration::from_millis(400));
        }
    }
}

fn receive(mut socket: &TcpStream, job: Job) {
    let mut buffer = vec![0; 256 << 10];
    loop {
        let mut length = [0; 8];
        if job == Job::Steps && socket.read_exact(&mut length).is_err() {
            return;
        }
        let mut left = if job == Job::Steps { u64::from_le_bytes(length) } else { u64::MAX };
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

/// Tests of this name compare times and rates: `./dev test` runs them with nothing beside.
mod timed {
    use super::*;

    #[test]
    fn the_estimates_hold_while_the_link_is_saturated() {
        if std::env::var_os(INSIDE).is_some() || !able(&["linux.uml", "taskset", "ping"]) {
            return;
        }
        let mut open: [BTreeSet<String>; JOBS.len()] = JOBS.map(comparisons);
        for attempt in 1..=ATTEMPTS {
            std::thread::scope(|scope| {
                // Side by side: most of the time is waiting.
                for (job, open) in open.iter_mut().enumerate().filter(|(_, open)| !open.is_empty()) {
                    scope.spawn(move || {
                        let text = user_mode_linux(job);
                        open.retain(|what| !text.contains(&format!("HOLDS {what}: ")));
                        println!("attempt {attempt}, {:?}:\n{text}", JOBS[job]);
                    });
                }
            });
            println!("attempt {attempt}: has not held yet: {open:?}");
            if open.iter().all(BTreeSet::is_empty) {
                return;
            }
        }
        panic!("never held in {ATTEMPTS} attempts: {open:#?}");
    }
}
