//! The same code against real netem: where this machine's kernel has none, in user-mode Linux (a normal process
//! that boots in a second or two). What is measured: delay, rate, the controller's path, echo packets under load,
//! and SIGKILL at random moments with delay and loss in force.
#![allow(clippy::print_stdout, clippy::unwrap_used, missing_docs)]

mod tc_common;
#[path = "../../tests/uml.rs"]
mod uml;

use flexcomm_agent::tc::Shaper;
use rand::{Rng, SeedableRng};
use std::io::{Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream, UdpSocket};
use std::os::unix::process::CommandExt;
use std::process::{Command, Stdio};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};
use tc_common::{Net, shape};

const INSIDE: &str = "FLEXCOMM_TC_UML";
/// Boot, all measurements and the kills take about a minute on two cores.
const LONGEST: Duration = Duration::from_secs(600);
/// tc_kill has the 200; a kill takes most of a second on the one emulated CPU. (200 of 200 held here, too, in three
/// minutes.)
const MOMENTS: u32 = 60;
/// A machine that is busy with other things spoils a measurement, never the other way round: so often it is made.
const TRIES: u32 = 6;
const BOUND: &str = "10.99.0.2";

/// Boots, runs the test named `inside` there, and returns what the console said.
fn boot(linux: &str) -> String {
    let folder = tempfile::tempdir().unwrap();
    let init = folder.path().join("init.sh");
    let me = std::env::current_exe().unwrap();
    let script = format!(
        "#!/bin/sh\nexport PATH=/usr/sbin:/usr/bin:/sbin:/bin TMPDIR=/run {INSIDE}=1\n\
         mount -t proc proc /proc; mount -t sysfs sys /sys; mount -t tmpfs tmp /run; mkdir -p /run/netns /run/r/lib\n\
         ln -s /usr/lib/uml/modules /run/r/lib/modules\n\
         for m in veth sch_netem sch_htb cls_u32; do modprobe -d /run/r $m; done\n\
         ip link set lo up\n\
         {} --exact inside --nocapture --test-threads=1 2>&1\n\
         echo UML-STATUS $?\n\
         /sbin/poweroff -f || echo o > /proc/sysrq-trigger\n",
        me.display()
    );
    std::fs::write(&init, script).unwrap();
    std::fs::set_permissions(&init, std::os::unix::fs::PermissionsExt::from_mode(0o755)).unwrap();
    let memory = if std::path::Path::new("/dev/shm").is_dir() { "/dev/shm" } else { "/tmp" };
    let mut child = Command::new(linux)
        .args(["mem=512M", "root=/dev/root", "rootfstype=hostfs", "rootflags=/", "rw"])
        .arg(format!("init={}", init.display()))
        .arg(format!("uml_dir={}/uml/", folder.path().display()))
        .args(["con=null", "con0=fd:0,fd:1", "quiet"])
        .env("TMPDIR", memory)
        .env("LD_PRELOAD", uml::preload(folder.path()))
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::null())
        .process_group(0)
        .spawn()
        .unwrap();
    let group = nix::unistd::Pid::from_raw(child.id() as i32);
    let mut stdout = child.stdout.take().unwrap();
    let done = AtomicBool::new(false);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            let start = Instant::now();
            while !done.load(Ordering::Relaxed) && start.elapsed() < LONGEST {
                std::thread::sleep(Duration::from_millis(50));
            }
            // Its processes are one group of its own; the reader below ends with them.
            let _ = nix::sys::signal::killpg(group, nix::sys::signal::Signal::SIGKILL);
        });
        let mut said = Vec::new();
        let mut buffer = [0; 4096];
        while let Ok(count @ 1..) = stdout.read(&mut buffer) {
            said.extend_from_slice(&buffer[..count]);
            if String::from_utf8_lossy(&said).contains("UML-STATUS ") {
                break;
            }
        }
        done.store(true, Ordering::Relaxed);
        let _ = child.wait();
        String::from_utf8_lossy(&said).replace('\r', "")
    })
}

/// Runs inside user-mode Linux (or on a kernel with netem, when asked to by the environment).
#[test]
fn inside() {
    if std::env::var_os(INSIDE).is_none() {
        return;
    }
    let all = flexcomm_agent::tc::KernelSupport { htb: true, u32: true, netem: true };
    assert_eq!(flexcomm_agent::tc::try_kernel().unwrap(), all);
    values_are_those_that_tc_shows();
    delay_is_seen_by_ping();
    rate_is_seen_by_tcp();
    the_controller_is_not_delayed();
    echo_does_not_queue_behind_bulk();
    sigkill_with_netem();
}

/// Makes a measurement until it is good, at most [`TRIES`] times.
fn one_of_some<T: std::fmt::Debug>(mut measure: impl FnMut() -> T, good: impl Fn(&T) -> bool) -> T {
    let mut seen = Vec::new();
    for _ in 0..TRIES {
        let measured = measure();
        if good(&measured) {
            return measured;
        }
        seen.push(measured);
    }
    panic!("none of these is good: {seen:?}");
}

fn values_are_those_that_tc_shows() {
    let net = Net::new();
    let before = net.tree();
    net.within(|| {
        let mut shaper = Shaper::new(net.config()).unwrap();
        for (delay, jitter, loss, mbit) in
            [(10.0, 1.0, 0.02, 100.0), (0.25, 0.0, 0.0, 40_000.0), (5000.0, 0.0, 0.5, 0.001)]
        {
            shaper.apply("v0", &shape(delay, jitter, loss, mbit)).unwrap();
            let qdiscs: serde_json::Value =
                serde_json::from_str(&net.tc(&["-j", "qdisc", "show", "dev", "v0"])).unwrap();
            for (handle, parent) in [("fc10:", "fc01:10"), ("fc30:", "fc01:30")] {
                let leaf = qdiscs.as_array().unwrap().iter().find(|q| q["handle"] == handle).unwrap();
                assert_eq!((&leaf["kind"], &leaf["parent"]), (&"netem".into(), &parent.into()));
                let close = |what: &serde_json::Value, wanted: f64| {
                    let got = what.as_f64().unwrap_or(0.0);
                    assert!((got - wanted).abs() <= wanted * 1e-5 + 1e-6, "tc shows {leaf}, wanted {wanted}");
                };
                close(&leaf["options"]["delay"]["delay"], delay * 1e-3);
                close(&leaf["options"]["delay"]["jitter"], jitter * 1e-3 * 3f64.sqrt());
                close(&leaf["options"]["loss-random"]["loss"], loss);
            }
        }
        shaper.restore().unwrap();
    });
    assert_eq!(net.tree(), before);
    println!("values: as tc shows them");
}

/// Median round trip of `ping` in ms.
fn ping(net: &Net, count: &str) -> f64 {
    let args = ["netns", "exec", &net.name, "ping", "-c", count, "-i", "0.05", BOUND];
    let text = tc_common::sh("ip", &args);
    let times = text.lines().filter_map(|l| l.split_once("time=")?.1.split(' ').next()?.parse().ok());
    median(times.collect())
}

fn median(mut values: Vec<f64>) -> f64 {
    values.sort_by(f64::total_cmp);
    values[values.len() / 2]
}

fn delay_is_seen_by_ping() {
    let net = Net::new();
    let bare = ping(&net, "5");
    let other = tempfile::tempdir_in(net.state.path()).unwrap();
    let near = net.within(|| {
        let mut shaper = Shaper::new(net.config()).unwrap();
        shaper.apply("v0", &shape(20.0, 0.0, 0.0, 1000.0)).unwrap();
        shaper
    });
    let far = net.within_peer(|| {
        let mut shaper = Shaper::new(tc_common::config(other.path(), "v1")).unwrap();
        shaper.apply("v1", &shape(20.0, 0.0, 0.0, 1000.0)).unwrap();
        shaper
    });
    let shaped = one_of_some(|| ping(&net, "10"), |ms| *ms < 50.0);
    println!("delay: 20 ms set each way; ping {bare:.3} ms before, {shaped:.3} ms shaped");
    assert!(shaped >= 40.0, "{shaped}");
    net.within(|| drop(near));
    net.within_peer(|| drop(far));
    one_of_some(|| ping(&net, "5"), |ms| *ms < 20.0);
}

/// A sink and an echo in the peer's namespace, a sender in ours.
struct Traffic<'a> {
    net: &'a Net,
    received: AtomicU64,
    stop: AtomicBool,
}

impl Traffic<'_> {
    /// Sends in bulk over TCP for as long as `work` takes; returns what it returns and the rate received in bit/s
    /// over the last two thirds of that time.
    fn during<T: Send>(&self, work: impl FnOnce() -> T + Send) -> (T, f64) {
        let listener = self.net.within_peer(|| TcpListener::bind("0.0.0.0:5555").unwrap());
        std::thread::scope(|scope| {
            scope.spawn(|| {
                let (mut stream, _) = listener.accept().unwrap();
                let mut buffer = vec![0; 1 << 16];
                while let Ok(count @ 1..) = stream.read(&mut buffer) {
                    self.received.fetch_add(count as u64, Ordering::Relaxed);
                }
            });
            scope.spawn(|| {
                let mut stream = self.net.within(|| TcpStream::connect((BOUND, 5555)).unwrap());
                stream.set_write_timeout(Some(Duration::from_millis(500))).unwrap();
                let bytes = vec![0; 1 << 16];
                while !self.stop.load(Ordering::Relaxed) {
                    let _ = stream.write(&bytes);
                }
                // What is still queued would keep the sink waiting.
                let _ = socket_reset(&stream);
            });
            std::thread::sleep(Duration::from_secs(1));
            let (start, bytes) = (Instant::now(), self.received.load(Ordering::Relaxed));
            let result = work();
            let bytes = self.received.load(Ordering::Relaxed) - bytes;
            let rate = bytes as f64 * 8.0 / start.elapsed().as_secs_f64();
            self.stop.store(true, Ordering::Relaxed);
            (result, rate)
        })
    }
}

fn socket_reset(stream: &TcpStream) -> std::io::Result<()> {
    stream.shutdown(std::net::Shutdown::Both)
}

fn rate_is_seen_by_tcp() {
    for mbit in [10.0, 100.0, 200.0] {
        let net = Net::new();
        net.within(|| {
            let mut shaper = Shaper::new(net.config()).unwrap();
            shaper.apply("v0", &shape(0.5, 0.0, 0.0, mbit)).unwrap();
            let measure = || {
                let traffic = Traffic { net: &net, received: AtomicU64::new(0), stop: AtomicBool::new(false) };
                traffic.during(|| std::thread::sleep(Duration::from_secs(2))).1 / 1e6
            };
            // Headers take 3 to 5 % of it; one CPU carries both ends.
            let goodput = one_of_some(measure, |goodput| *goodput >= 0.8 * mbit);
            println!("rate: {mbit} Mbit/s set, {goodput:.1} Mbit/s of TCP payload received");
            assert!(goodput <= mbit, "{goodput} of {mbit}");
        });
    }
}

fn the_controller_is_not_delayed() {
    let net = Net::new();
    let listener = net.within_peer(|| TcpListener::bind("0.0.0.0:7070").unwrap());
    let other = net.within_peer(|| TcpListener::bind("0.0.0.0:7999").unwrap());
    net.within(|| {
        let mut shaper = Shaper::new(net.config()).unwrap();
        shaper.apply("v0", &shape(300.0, 0.0, 0.0, 1.0)).unwrap();
        let connect = |port| {
            let start = Instant::now();
            TcpStream::connect_timeout(&SocketAddr::from(([10, 99, 0, 2], port)), Duration::from_secs(5)).unwrap();
            start.elapsed()
        };
        let controller = one_of_some(|| connect(7070), |took| *took < Duration::from_millis(150));
        let anyone = connect(7999);
        println!("controller: 300 ms set; connecting takes {controller:?} to it, {anyone:?} to another port");
        assert!(anyone > Duration::from_millis(290));
    });
    drop((listener, other));
}

fn echo_does_not_queue_behind_bulk() {
    let net = Net::new();
    let server = net.within_peer(|| UdpSocket::bind("0.0.0.0:7071").unwrap());
    let client = net.within(|| UdpSocket::bind("0.0.0.0:0").unwrap());
    server.set_read_timeout(Some(Duration::from_secs(1))).unwrap();
    client.set_read_timeout(Some(Duration::from_secs(1))).unwrap();
    let stop = AtomicBool::new(false);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            let mut buffer = [0; 64];
            while !stop.load(Ordering::Relaxed) {
                if let Ok((count, from)) = server.recv_from(&mut buffer) {
                    server.send_to(&buffer[..count], from).unwrap();
                }
            }
        });
        net.within(|| {
            let mut shaper = Shaper::new(net.config()).unwrap();
            shaper.apply("v0", &shape(40.0, 0.0, 0.0, 10.0)).unwrap();
            let measure = || {
                let traffic = Traffic { net: &net, received: AtomicU64::new(0), stop: AtomicBool::new(false) };
                let ((echo, ping), rate) = traffic.during(|| (echo_times(&client), ping(&net, "20")));
                (echo, ping, rate / 1e6)
            };
            let good = |(echo, ping, rate): &(f64, f64, f64)| *echo < 46.0 && *rate > 5.0 && *ping > 1.5 * echo;
            // The link is full, ping stands behind a queue, and echo is within 15 % of what was set.
            let (echo, ping, rate) = one_of_some(measure, good);
            println!(
                "echo: 40 ms, 10 Mbit/s set, {rate:.1} Mbit/s of bulk flowing: echo {echo:.2} ms, ping behind bulk {ping:.2} ms"
            );
            assert!(echo >= 40.0, "{echo}");
        });
        stop.store(true, Ordering::Relaxed);
    });
}

/// Median of 30 round trips to the echo port in ms.
fn echo_times(client: &UdpSocket) -> f64 {
    let mut buffer = [0; 64];
    let times = (0..30u8).filter_map(|i| {
        let start = Instant::now();
        client.send_to(&[i; 32], (BOUND, 7071)).unwrap();
        let answer = client.recv_from(&mut buffer).ok();
        let took = start.elapsed().as_secs_f64() * 1e3;
        std::thread::sleep(Duration::from_millis(30));
        answer.map(|_| took)
    });
    median(times.collect())
}

fn sigkill_with_netem() {
    let net = Net::new();
    let before = net.tree();
    let mut random = rand::rngs::StdRng::seed_from_u64(7);
    let mut slowest = Duration::ZERO;
    for moment in 0..MOMENTS {
        let mut helper = net.helper("loop", &[(tc_common::NETEM, "1")]);
        helper.wait_for("apply");
        std::thread::sleep(random.random_range(Duration::ZERO..Duration::from_millis(150)));
        helper.kill();
        match net.back_within(&before) {
            Some(took) => slowest = slowest.max(took),
            None => panic!("moment {moment}: the tree is\n{}\nnot\n{before}", net.tree()),
        }
    }
    println!("{MOMENTS} kills with netem in force or being set; slowest return {slowest:?}");
}

/// Tests of this name compare times and rates: `./dev test` runs them with nothing beside.
mod timed {
    use super::*;

    #[test]
    fn real_netem_in_user_mode_linux() {
        if std::env::var_os(INSIDE).is_some() {
            return;
        }
        let Some(linux) =
            ["/usr/bin/linux.uml", "/usr/bin/linux"].into_iter().find(|p| std::path::Path::new(p).exists())
        else {
            tc_common::skipped("no user-mode Linux here (`apt-get install user-mode-linux`); netem is not tested");
            return;
        };
        if !nix::unistd::geteuid().is_root() {
            tc_common::skipped("user-mode Linux mounts the root file system as root; netem is not tested");
            return;
        }
        let said = boot(linux);
        print!("{said}");
        assert!(said.contains("test result: ok. 1 passed"), "the run inside failed");
        assert!(said.contains("UML-STATUS 0"), "the run inside did not end well");
    }
}
