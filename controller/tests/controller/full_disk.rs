//! The disk refuses to write, and writes again: the controller goes on by itself, and its health says which is which.

use crate::common::process::Process;
use crate::common::{Agent, Api, Network, problem};
use flexcomm_wire::ReportBatch;
use reqwest::StatusCode;
use std::io::Write;
use std::path::Path;
use std::process::Command;
use std::time::{Duration, Instant};

/// How long the controller may take after space has returned.
const RECOVERY: Duration = Duration::from_secs(10);

/// Most batches until one finds the disk full: the write-ahead log is written in circles of 4 MB.
const BATCHES: u32 = 2000;

/// Reports of one agent that are sent again until they are stored, as an agent does.
struct Sender<'a> {
    api: &'a Api,
    agent: Agent,
}

impl<'a> Sender<'a> {
    async fn new(api: &'a Api) -> Self {
        let mut agent = Agent::new("a", 0);
        assert_eq!(agent.register(api).await.status(), 200);
        assert_eq!(Agent::new("b", 1).register(api).await.status(), 200);
        Self { api, agent }
    }

    async fn post(&self, batch: &ReportBatch) -> StatusCode {
        self.api.post("/api/v1/agents/a/reports", batch).await.status()
    }

    fn batch(&mut self) -> ReportBatch {
        let link = self.agent.link("b", Network { latency_us: 200.0, bandwidth_bps: 1e9 });
        self.agent.batch(vec![link; 100])
    }

    /// Sends until the store refuses; what it refused.
    async fn until_refused(&mut self) -> ReportBatch {
        for _ in 0..BATCHES {
            let batch = self.batch();
            match self.post(&batch).await {
                StatusCode::OK => {}
                refused => {
                    assert_eq!(refused, 503);
                    return batch;
                }
            }
        }
        panic!("{BATCHES} batches were stored on a full disk");
    }

    /// With the disk refusing, for longer than the controller takes to find a writer stuck: what was refused stays
    /// refused, what is stored can be read, and the process is alive.
    async fn refused_but_alive(&self, refused: &ReportBatch) {
        let since = Instant::now();
        while since.elapsed() < Duration::from_secs(5) {
            assert_eq!(self.post(refused).await, 503);
            assert_eq!(self.api.get("/api/v1/links").await.status(), 200);
            assert_eq!(self.api.get("/healthz").await.status(), 200, "a restart would not help");
            tokio::time::sleep(Duration::from_millis(200)).await;
        }
    }

    /// With the disk writing again.
    async fn recovered(&mut self, refused: &ReportBatch) {
        let since = Instant::now();
        while self.post(refused).await != StatusCode::OK {
            assert!(since.elapsed() < RECOVERY, "still refused {RECOVERY:?} after the disk writes again");
            tokio::time::sleep(Duration::from_millis(100)).await;
        }
        assert_eq!(self.api.get("/readyz").await.status(), 200);
        assert_eq!(self.api.get("/healthz").await.status(), 200);
        for _ in 0..20 {
            let batch = self.batch();
            assert_eq!(self.post(&batch).await, 200);
        }
    }
}

/// Writes until nothing fits.
fn fill(path: &Path) {
    let mut file = std::fs::File::create(path).unwrap();
    let mut piece = vec![1; 1 << 16];
    while !piece.is_empty() {
        if file.write_all(&piece).is_err() {
            piece.truncate(piece.len() / 2);
        }
    }
}

#[tokio::test]
async fn a_full_disk_ends_nothing_for_good() {
    let dir = tempfile::tempdir().unwrap();
    let namespace = ["unshare", "-m", "--propagation", "private"];
    if !Command::new(namespace[0]).args(&namespace[1..]).arg("true").status().is_ok_and(|s| s.success()) {
        eprintln!("skipped: this user may not mount");
        return;
    }
    let mut command = Command::new(namespace[0]);
    command.args(&namespace[1..]);
    let server = Process::behind("mount -t tmpfs -o size=8m tmpfs \"$0\"", dir.path());
    command.arg(server.get_program()).args(server.get_args());
    command.envs(server.get_envs().filter_map(|(name, value)| Some((name, value?))));
    let (process, api) = Process::spawn(command, dir.path()).await;
    let mut sender = Sender::new(&api).await;
    let filler = process.path(&dir.path().join("filler"));
    for _ in 0..2 {
        fill(&filler);
        let refused = sender.until_refused().await;
        sender.refused_but_alive(&refused).await;
        std::fs::remove_file(&filler).unwrap();
        sender.recovered(&refused).await;
    }
}

/// Files may not grow: SQLite calls it an input/output error, not a full disk.
#[tokio::test]
async fn an_io_error_ends_nothing_for_good() {
    let dir = tempfile::tempdir().unwrap();
    let server = Process::behind("trap '' XFSZ", dir.path());
    let (process, api) = Process::spawn(server, dir.path()).await;
    let limit = |soft: &str| {
        let pid = process.0.id().to_string();
        let set = Command::new("prlimit").args(["--pid", &pid, &format!("--fsize={soft}:unlimited")]).status();
        assert!(set.unwrap().success());
    };
    let mut sender = Sender::new(&api).await;
    for _ in 0..2 {
        limit("4096");
        let refused = sender.until_refused().await;
        problem(api.get("/readyz").await, 503).await;
        sender.refused_but_alive(&refused).await;
        limit("unlimited");
        sender.recovered(&refused).await;
    }
}
