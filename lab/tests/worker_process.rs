//! Ranks as real processes: signals, sudden death, bad input.
#![allow(clippy::unwrap_used, reason = "a test that cannot go on has failed")]

use flate2::{Compression, write::GzEncoder};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use std::io::{BufRead, BufReader, Read, Write};
use std::net::{Ipv4Addr, SocketAddr, TcpListener, TcpStream};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

const DEADLINE: Duration = Duration::from_secs(120);

/// The example that cargo builds beside the tests.
fn program() -> PathBuf {
    let own = std::env::current_exe().unwrap();
    own.parent().unwrap().parent().unwrap().join("examples/worker")
}

fn idx(folder: &Path, name: &str, words: &[u32], items: &[u8]) {
    let mut gz = GzEncoder::new(std::fs::File::create(folder.join(name)).unwrap(), Compression::fast());
    words.iter().for_each(|w| gz.write_all(&w.to_be_bytes()).unwrap());
    gz.write_all(items).unwrap();
    gz.finish().unwrap();
}

/// Made-up images in Fashion-MNIST's files.
fn data() -> tempfile::TempDir {
    let folder = tempfile::tempdir().unwrap();
    for set in ["train", "t10k"] {
        let pixels: Vec<u8> = (0..40 * 784u32).map(|i| (i.wrapping_mul(2_654_435_761) >> 24) as u8).collect();
        let labels: Vec<u8> = (0..40).map(|i| i % 10).collect();
        idx(folder.path(), &format!("{set}-images-idx3-ubyte.gz"), &[0x803, 40, 28, 28], &pixels);
        idx(folder.path(), &format!("{set}-labels-idx1-ubyte.gz"), &[0x801, 40], &labels);
    }
    folder
}

/// Addresses of this test process alone: each picks its own 127.x.y.z, so that ports cannot be taken meanwhile.
fn peers(world: u16, case: u8) -> Vec<SocketAddr> {
    let pid = std::process::id();
    let ip = Ipv4Addr::new(127, 100 + case, (pid >> 8) as u8, (pid as u8).max(1));
    (0..world).map(|rank| SocketAddr::from((ip, 7080 + rank))).collect()
}

/// Processes that do not outlive the test.
struct Ranks(Vec<Child>);

impl Drop for Ranks {
    fn drop(&mut self) {
        for child in &mut self.0 {
            let _ = child.kill();
            let _ = child.wait();
        }
    }
}

impl Ranks {
    fn start(peers: &[SocketAddr], data: &Path, extra: &[&str]) -> Self {
        let list = peers.iter().map(ToString::to_string).collect::<Vec<_>>().join(",");
        let start = |rank: usize| {
            let mut command = Command::new(program());
            if !extra.contains(&"--peers") {
                command.args(["--rank", &rank.to_string(), "--peers", &list]);
            }
            command.args(["--hidden", "8", "--batch", "4"]);
            command.arg("--data").arg(data).args(extra).env_remove("FLEXCOMM_SOCKET");
            command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap()
        };
        Self((0..peers.len()).map(start).collect())
    }

    /// Waits for rank 0's first line of progress.
    fn wait_for_progress(&mut self) {
        let mut lines = BufReader::new(self.0[0].stdout.take().unwrap()).lines();
        let (send, first) = std::sync::mpsc::channel();
        std::thread::spawn(move || {
            let _ = send.send(lines.next());
            // The rest has to go somewhere, or the pipe fills and the job stands still.
            lines.for_each(drop);
        });
        let line = first.recv_timeout(DEADLINE).expect("no line of progress");
        let line = line.expect("the rank ended").unwrap();
        assert!(line.starts_with("epoch 0: step"), "{line:?}");
    }

    fn signal(&self, rank: usize, signal: Signal) {
        kill(Pid::from_raw(self.0[rank].id() as i32), signal).unwrap();
    }

    /// Whether a rank ended well, and what it said.
    fn end(&mut self, rank: usize) -> (bool, String) {
        let child = &mut self.0[rank];
        let end = Instant::now() + DEADLINE;
        let status = loop {
            if let Some(status) = child.try_wait().unwrap() {
                break status;
            }
            assert!(Instant::now() < end, "rank {rank} hangs");
            std::thread::sleep(Duration::from_millis(5));
        };
        let mut text = String::new();
        child.stderr.take().unwrap().read_to_string(&mut text).unwrap();
        (status.success(), text)
    }
}

#[test]
fn a_killed_rank_is_named_by_all_others() {
    let data = data();
    let mut ranks = Ranks::start(&peers(4, 0), data.path(), &["--steps", "100000000", "--steps-per-epoch", "5"]);
    ranks.wait_for_progress();
    ranks.signal(2, Signal::SIGKILL);
    for rank in [0, 1, 3] {
        let (well, text) = ranks.end(rank);
        assert!(!well);
        assert!(text.contains("rank 2"), "rank {rank} says: {text}");
    }
}

#[test]
fn a_rank_that_is_alive_but_silent_is_named_after_the_timeout() {
    let data = data();
    let extra = ["--steps", "100000000", "--steps-per-epoch", "5", "--timeout", "5s"];
    let mut ranks = Ranks::start(&peers(2, 1), data.path(), &extra);
    ranks.wait_for_progress();
    ranks.signal(1, Signal::SIGSTOP);
    let (well, text) = ranks.end(0);
    assert!(!well && text.contains("rank 1") && text.contains("for 5 s"), "{text}");
}

#[test]
fn ctrl_c_on_one_rank_ends_all_in_an_orderly_way() {
    for (case, signal) in [(2, Signal::SIGINT), (3, Signal::SIGTERM)] {
        let data = data();
        let mut ranks = Ranks::start(&peers(3, case), data.path(), &["--steps", "100000000", "--steps-per-epoch", "5"]);
        ranks.wait_for_progress();
        ranks.signal(1, signal);
        for rank in 0..3 {
            let (well, text) = ranks.end(rank);
            assert!(well, "{text}");
        }
    }
}

#[test]
fn strangers_at_the_door_disturb_nothing() {
    let data = data();
    let peers = peers(2, 4);
    let list = format!("{},{}", peers[0], peers[1]);
    let mut ranks = Ranks::start(&peers[..1], data.path(), &["--peers", &list, "--steps", "3"]);
    let end = Instant::now() + DEADLINE;
    let mut stranger = loop {
        match TcpStream::connect(peers[0]) {
            Ok(stream) => break stream,
            Err(error) => assert!(Instant::now() < end, "rank 0 does not listen: {error}"),
        }
        std::thread::sleep(Duration::from_millis(5));
    };
    stranger.write_all(b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n").unwrap();
    let mut answer = Vec::new();
    // It is sent away; whether by a close or a reset does not matter.
    let _ = stranger.read_to_end(&mut answer);
    assert!(answer.is_empty());
    let extra = ["--rank", "1", "--peers", &list, "--steps", "3"];
    let mut second = Ranks::start(&peers[1..], data.path(), &extra);
    assert!(ranks.end(0).0);
    assert!(second.end(0).0);
}

#[test]
fn bad_input_is_named() {
    let data = data();
    let own = peers(1, 5);
    let busy = TcpListener::bind(peers(1, 6)[0]).unwrap();
    let busy = busy.local_addr().unwrap().to_string();
    let twice = format!("{0},{0}", own[0]);
    let missing = format!("{},{}", own[0], peers(2, 7)[1]);
    let cases: [(&[&str], &str); 17] = [
        (&["--rank", "3"], "--rank 3 is none of the 1 ranks"),
        (&["--peers", &busy], "in use"),
        (&["--peers", "localhost:80"], "expected IP:PORT of each rank, for example 10.0.0.1:7080"),
        (&["--peers", &twice], "same address"),
        (&["--peers", "127.0.0.1:0"], "port 0"),
        (&["--batch", "0"], "--batch 0"),
        (&["--lr", "nan"], "--lr NaN"),
        (&["--lr", "-1"], "--lr"),
        (&["--momentum", "1"], "--momentum 1"),
        (&["--hidden", "0"], "--hidden [0]"),
        (&["--strategy", "topk@2/allgather"], "compression ratio is 2"),
        (&["--strategy", "variance(alpha=2)/allgather"], "without error feedback"),
        (&["--steps-per-epoch", "0"], "--steps-per-epoch 0"),
        (&["--steps", "0"], "--steps 0: allowed are 1 to 1099511627776"),
        (&["--epochs", "0"], "--epochs 0: allowed are 1 or more"),
        (&["--data", "/nowhere"], "dataset-fashion-mnist"),
        (&["--peers", &missing, "--timeout", "1s"], "rank 1"),
    ];
    for (extra, expected) in cases {
        let mut command = Command::new(program());
        // Later options win where clap lets them; lists would add up.
        let has = |option: &str| extra.contains(&option);
        if !has("--peers") {
            command.args(["--peers", &own[0].to_string()]);
        }
        if !has("--data") {
            command.arg("--data").arg(data.path());
        }
        if !has("--steps") && !has("--epochs") {
            command.args(["--steps", "1"]);
        }
        let output = command.args(extra).output().unwrap();
        let text = String::from_utf8_lossy(&output.stderr);
        assert!(!output.status.success() && text.contains(expected), "{extra:?}: {text}");
    }
}

#[test]
fn divergence_is_an_error_and_not_a_wrong_result() {
    let data = data();
    let mut ranks = Ranks::start(&peers(1, 8), data.path(), &["--steps", "100000", "--lr", "1e30"]);
    let (well, text) = ranks.end(0);
    assert!(!well && text.contains("diverged") || text.contains("not finite"), "{text}");
}
