//! Ranks as threads on loopback, and an agent that does what the test says.
#![allow(dead_code, clippy::unwrap_used, reason = "each test file uses its part; a test that cannot go on has failed")]

use clap::Parser;
use flexcomm_domain::{Decision, JobId, NodeName, Timestamp, Version};
use flexcomm_lab::worker::{Args, Data, Ended, Images, Surroundings, train};
use flexcomm_wire::{AppliedReport, DecisionOrder, FromTrainer, JobOrders, PROTOCOL, ToTrainer, TrialOrder};
use std::io::{BufRead, BufReader, Write};
use std::net::TcpListener;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

/// No test waits for longer than this, and none waits for it unless it fails.
pub const DEADLINE: Duration = Duration::from_secs(120);

pub const JOB: &str = "test";

#[derive(Parser)]
struct Cli {
    #[command(flatten)]
    args: Args,
}

/// Waits until `done` holds; fails naming `what` after [`DEADLINE`].
pub fn wait_for(what: &str, mut done: impl FnMut() -> bool) {
    let end = Instant::now() + DEADLINE;
    while !done() {
        assert!(Instant::now() < end, "waited too long until {what}");
        std::thread::sleep(Duration::from_millis(2));
    }
}

/// Calls a function with each line.
struct Watcher {
    line: Vec<u8>,
    watch: Box<dyn FnMut(&str) + Send>,
}

impl Write for Watcher {
    fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
        self.line.extend_from_slice(bytes);
        Ok(bytes.len())
    }

    fn flush(&mut self) -> std::io::Result<()> {
        let line = std::mem::take(&mut self.line);
        (self.watch)(std::str::from_utf8(&line).unwrap());
        Ok(())
    }
}

/// Ranks of one job as threads of this process.
pub struct Ranks {
    pub folder: tempfile::TempDir,
    stop: Vec<Arc<AtomicBool>>,
    threads: Vec<JoinHandle<anyhow::Result<Ended>>>,
}

impl Ranks {
    /// Starts `world` ranks with common arguments, on a small network and made-up images.
    pub fn start(world: usize, args: &[&str]) -> Self {
        Self::start_with(world, |_| args.iter().map(ToString::to_string).collect(), tempfile::tempdir().unwrap())
    }

    /// With arguments of their own.
    pub fn start_with(world: usize, args: impl Fn(usize) -> Vec<String>, folder: tempfile::TempDir) -> Self {
        Self::start_watched(world, args, folder, Box::new(|_| {}))
    }

    /// `watch` is called by rank 0 with each line of progress, and holds the job up while it runs.
    pub fn start_watched(
        world: usize,
        args: impl Fn(usize) -> Vec<String>,
        folder: tempfile::TempDir,
        watch: Box<dyn FnMut(&str) + Send>,
    ) -> Self {
        Self::start_spoiled(world, args, folder, watch, |_| |_: &mut Vec<f32>| {})
    }

    /// `spoil` gives what changes a rank's gradients before they are exchanged.
    pub fn start_spoiled<S: FnMut(&mut Vec<f32>) + Send + 'static>(
        world: usize,
        args: impl Fn(usize) -> Vec<String>,
        folder: tempfile::TempDir,
        watch: Box<dyn FnMut(&str) + Send>,
        spoil: impl Fn(usize) -> S,
    ) -> Self {
        let mut watch = Some(watch);
        let listeners: Vec<_> = (0..world).map(|_| TcpListener::bind("127.0.0.1:0").unwrap()).collect();
        let peers: Vec<_> = listeners.iter().map(|l| l.local_addr().unwrap().to_string()).collect();
        let mut ranks = Self { folder, stop: Vec::new(), threads: Vec::new() };
        for (rank, listener) in listeners.into_iter().enumerate() {
            let log = ranks.log(rank);
            let mut words = vec!["worker".to_owned(), format!("--rank={rank}"), format!("--peers={}", peers.join(","))];
            words.extend([format!("--hash-log={}", log.display()), format!("--job={JOB}")]);
            words.extend(["--hidden=12", "--batch=8", "--timeout=60s"].map(String::from));
            words.extend(args(rank));
            let args = Cli::try_parse_from(words).unwrap().args;
            let stop = Arc::new(AtomicBool::new(false));
            let held_out = if rank == 0 { Images::synthetic(200, 99) } else { Images::default() };
            let data = Data { shard: Images::synthetic(160, 7 + rank as u64), total: 160 * world, held_out };
            let progress: Box<dyn Write + Send> = match watch.take() {
                Some(watch) => Box::new(Watcher { line: Vec::new(), watch }),
                None => Box::new(std::io::sink()),
            };
            let spoil = Box::new(spoil(rank));
            let surroundings = Surroundings { listener, data, stop: Arc::clone(&stop), progress, spoil };
            ranks.stop.push(stop);
            ranks.threads.push(std::thread::spawn(move || train(args, surroundings)));
        }
        ranks
    }

    pub fn log(&self, rank: usize) -> PathBuf {
        self.folder.path().join(format!("hash-{rank}.csv"))
    }

    /// Asks one rank to stop.
    pub fn stop(&self, rank: usize) {
        self.stop[rank].store(true, Ordering::Relaxed);
    }

    /// Waits for all ranks; each must end well, with the same log. Answers ends and log lines.
    pub fn join(self) -> (Vec<Ended>, Vec<String>) {
        let (ends, folder) = self.results();
        let ends: Vec<Ended> = ends.into_iter().map(|end| end.unwrap()).collect();
        let logs: Vec<_> = (0..ends.len()).map(|r| read_log(&folder.path().join(format!("hash-{r}.csv")))).collect();
        for (rank, log) in logs.iter().enumerate() {
            let differ = logs[0].iter().zip(log).find(|(a, b)| a != b);
            assert_eq!((differ, log.len()), (None, logs[0].len()), "ranks 0 and {rank} ran apart");
        }
        (ends, logs.into_iter().next().unwrap())
    }

    /// Waits for all ranks, however they end; of one that was killed that is an error, too.
    pub fn results(self) -> (Vec<anyhow::Result<Ended>>, tempfile::TempDir) {
        wait_for("all ranks have ended", || self.threads.iter().all(JoinHandle::is_finished));
        let end = |thread: JoinHandle<_>| thread.join().unwrap_or_else(|_| Err(anyhow::anyhow!("killed")));
        let ends = self.threads.into_iter().map(end).collect();
        (ends, self.folder)
    }
}

/// The lines `step,version,hash` of a log.
pub fn read_log(path: &Path) -> Vec<String> {
    let text = std::fs::read_to_string(path).unwrap();
    let mut lines = text.lines().map(str::to_owned);
    assert_eq!(lines.next().as_deref(), Some("step,version,hash"));
    lines.collect()
}

/// The versions in a log, each with its first step.
pub fn versions(log: &[String]) -> Vec<(u64, u64)> {
    let mut seen: Vec<(u64, u64)> = Vec::new();
    for line in log {
        let mut fields = line.split(',').map(|field| field.parse::<u64>());
        let (step, version) = (fields.next().unwrap().unwrap(), fields.next().unwrap().unwrap());
        if seen.last().is_none_or(|(_, last)| *last != version) {
            seen.push((step, version));
        }
    }
    seen
}

/// An agent for one rank: welcomes it and keeps what it says; publishes what the test says.
pub struct FakeAgent {
    socket: PathBuf,
    received: Arc<Mutex<Vec<FromTrainer>>>,
    published: Arc<Mutex<Published>>,
}

/// What its trainers are sent.
#[derive(Default)]
struct Published {
    /// The newest orders as a line.
    orders: String,
    /// The connections that were welcomed.
    to: Vec<UnixStream>,
    ended: bool,
}

impl Published {
    /// Sends a line to all that are connected.
    fn send(&self, line: &str) {
        self.to.iter().for_each(|mut stream| drop(stream.write_all(line.as_bytes())));
    }
}

impl FakeAgent {
    /// Its socket is `folder/NAME.sock`.
    pub fn start(folder: &Path, name: &str) -> Self {
        let socket = folder.join(format!("{name}.sock"));
        let _ = std::fs::remove_file(&socket);
        let listener = UnixListener::bind(&socket).unwrap();
        let agent = Self { socket, received: Arc::default(), published: Arc::default() };
        let (received, published) = (Arc::clone(&agent.received), Arc::clone(&agent.published));
        std::thread::spawn(move || {
            for stream in listener.incoming().map_while(Result::ok) {
                if published.lock().unwrap().ended {
                    return;
                }
                let (received, published) = (Arc::clone(&received), Arc::clone(&published));
                std::thread::spawn(move || serve(stream, &received, &published));
            }
        });
        agent
    }

    pub fn path(folder: &Path, name: &str) -> String {
        folder.join(format!("{name}.sock")).display().to_string()
    }

    pub fn received(&self) -> Vec<FromTrainer> {
        self.received.lock().unwrap().clone()
    }

    /// The newest step reported.
    pub fn step(&self) -> u64 {
        let steps = self.received().into_iter().filter_map(|m| match m {
            FromTrainer::Steps(report) => report.steps.last().map(|s| s.step),
            _ => None,
        });
        steps.max().unwrap_or(0)
    }

    /// What was reported as applied, once each.
    pub fn applied(&self) -> Vec<AppliedReport> {
        let received = self.received().into_iter();
        let mut applied: Vec<_> =
            received.filter_map(|m| if let FromTrainer::Applied(report) = m { Some(report) } else { None }).collect();
        applied.dedup();
        applied
    }

    /// The reports of trials.
    pub fn trials(&self) -> Vec<flexcomm_wire::TrialReport> {
        let received = self.received().into_iter();
        received.filter_map(|m| if let FromTrainer::Trial(t) = m { Some(t) } else { None }).collect()
    }

    pub fn publish(&mut self, orders: &JobOrders) {
        let mut published = self.published.lock().unwrap();
        published.orders = serde_json::to_string(&ToTrainer::Orders(orders.clone())).unwrap() + "\n";
        published.send(&published.orders);
    }

    /// Something that is no JSON.
    pub fn send_garbage(&mut self) {
        self.published.lock().unwrap().send("{\"job\": \n");
    }

    pub fn decide(&mut self, version: u64, strategy: &str) {
        self.publish(&orders(version, strategy, None));
    }

    /// As if it had been killed: the socket breaks.
    pub fn kill(self) {
        drop(self);
    }
}

impl Drop for FakeAgent {
    fn drop(&mut self) {
        let mut published = self.published.lock().unwrap();
        published.ended = true;
        for connection in published.to.drain(..) {
            let _ = connection.shutdown(std::net::Shutdown::Both);
        }
        drop(published);
        // Wakes the accepting thread.
        let _ = UnixStream::connect(&self.socket);
        let _ = std::fs::remove_file(&self.socket);
    }
}

fn serve(stream: UnixStream, received: &Mutex<Vec<FromTrainer>>, published: &Mutex<Published>) {
    let mut writer = stream.try_clone().unwrap();
    for line in BufReader::new(stream).lines().map_while(Result::ok) {
        let message: FromTrainer = serde_json::from_str(&line).unwrap();
        if matches!(message, FromTrainer::Hello { .. }) {
            let node = NodeName::new("n1").unwrap();
            let welcome = ToTrainer::Welcome { protocol: PROTOCOL, node, takes_buckets: true };
            let mut published = published.lock().unwrap();
            if published.ended {
                return;
            }
            let _ = write!(writer, "{}\n{}", serde_json::to_string(&welcome).unwrap(), published.orders);
            published.to.push(writer.try_clone().unwrap());
        }
        received.lock().unwrap().push(message);
    }
}

pub fn orders(version: u64, strategy: &str, trial: Option<TrialOrder>) -> JobOrders {
    let job = JobId::new(JOB).unwrap();
    let decision = (version > 0).then(|| {
        DecisionOrder::from(&Decision {
            job: job.clone(),
            version: Version(version),
            parent: Version(0),
            plan: strategy.parse().unwrap(),
            decided_at: Timestamp(0),
            reason: "the test says so".into(),
        })
    });
    JobOrders { job, decision, trial }
}

pub fn trial(id: u64, candidates: &[&str], iterations: u32, budget_ms: u64) -> TrialOrder {
    let candidates = candidates.iter().map(|c| c.parse::<flexcomm_domain::Strategy>().unwrap().into()).collect();
    TrialOrder { run: None, id, candidates, iterations, budget_ms }
}
