//! A controller that does as it is told, an agent in this process, a trainer.
#![allow(dead_code, clippy::unwrap_used)]

use axum::extract::{Path, State};
use axum::http::StatusCode;
use axum::response::sse::{Event, KeepAlive, Sse};
use axum::response::{IntoResponse, Response};
use axum::routing::{get, post};
use axum::{Json, Router};
use flexcomm_agent::{Config, Overrides};
use flexcomm_wire::{
    EchoPeer, FromTrainer, Hello, JobOrders, Orders, PROTOCOL, ProbePlan, Register, Registered, Report, ReportAck,
    ReportBatch, ReportBody, StepRecord, StepsReport, ToTrainer,
};
use std::collections::BTreeMap;
use std::convert::Infallible;
use std::net::{Ipv4Addr, SocketAddr};
use std::path::{Path as FilePath, PathBuf};
use std::sync::atomic::{AtomicU8, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};
use tokio::io::{AsyncBufReadExt, AsyncWriteExt, BufReader};
use tokio::net::UnixStream;
use tokio::sync::{oneshot, watch};
use tokio::task::JoinHandle;

/// No state of a test takes longer than this to be reached.
pub const DEADLINE: Duration = Duration::from_secs(120);

/// Looks again until `found` has something.
pub async fn wait_for<T>(what: &str, mut found: impl FnMut() -> Option<T>) -> T {
    let began = Instant::now();
    loop {
        if let Some(found) = found() {
            return found;
        }
        assert!(began.elapsed() < DEADLINE, "never seen: {what}");
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
}

/// How the controller behaves now.
#[derive(Clone, Default)]
pub struct Mood {
    /// Registrations are refused with this status.
    pub refuse_register: Option<u16>,
    /// The stream is not there.
    pub no_stream: bool,
    /// Every second batch is stored but its answer is lost.
    pub lose_acks: bool,
    /// Batches that hold this report cannot be read at all.
    pub choke_on: Option<u64>,
}

#[derive(Default)]
pub struct Node {
    pub registers: Vec<Register>,
    pub reports: BTreeMap<u64, Report>,
    pub batches: Vec<Vec<u64>>,
    pub heartbeats: u64,
    acked: u64,
}

pub struct Shared {
    pub mood: Mutex<Mood>,
    pub nodes: Mutex<BTreeMap<String, Node>>,
    orders: watch::Sender<Orders>,
}

/// A controller that keeps what it stored when it is stopped and started again.
pub struct Controller {
    pub shared: Arc<Shared>,
    pub addr: SocketAddr,
    task: Option<(JoinHandle<()>, oneshot::Sender<()>)>,
}

pub fn no_orders() -> Orders {
    let probes = ProbePlan { echo_interval_ms: 20, trace_interval_s: 0, peers: vec![] };
    Orders { epoch: 1, probes, grants: vec![], jobs: vec![], shape: None }
}

/// A loopback address that nobody else uses: a port there that is given back and taken again is still free.
pub fn own_address() -> Ipv4Addr {
    static COUNT: AtomicU8 = AtomicU8::new(1);
    let [_, _, high, low] = std::process::id().to_be_bytes();
    Ipv4Addr::new(127, COUNT.fetch_add(1, Ordering::Relaxed).max(1), high, low.clamp(1, 254))
}

impl Controller {
    pub async fn start() -> Self {
        let shared =
            Arc::new(Shared { mood: Mutex::default(), nodes: Mutex::default(), orders: watch::channel(no_orders()).0 });
        let mut controller = Self { shared, addr: (own_address(), 0).into(), task: None };
        controller.up().await;
        controller
    }

    /// Listens (again) at its address.
    pub async fn up(&mut self) {
        let listener = wait_for("the address to be free", || {
            let socket = tokio::net::TcpSocket::new_v4().unwrap();
            socket.set_reuseaddr(true).unwrap();
            socket.bind(self.addr).and_then(|()| socket.listen(128)).ok()
        });
        let listener = listener.await;
        self.addr = listener.local_addr().unwrap();
        let router = Router::new()
            .route("/api/v1/agents/register", post(register))
            .route("/api/v1/agents/{node}/heartbeat", post(heartbeat))
            .route("/api/v1/agents/{node}/reports", post(reports))
            .route("/api/v1/agents/{node}/orders", get(orders))
            .route("/api/v1/agents/{node}/stream", get(stream))
            .with_state(self.shared.clone());
        let (kill, killed) = oneshot::channel();
        // Serving in a runtime of its own that is shut down: connections die with it, as in a SIGKILL.
        let std_listener = listener.into_std().unwrap();
        let task = tokio::task::spawn_blocking(move || {
            let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build().unwrap();
            runtime.spawn(async move {
                let listener = tokio::net::TcpListener::from_std(std_listener).unwrap();
                axum::serve(listener, router).await.unwrap();
            });
            let _ = runtime.block_on(killed);
            runtime.shutdown_timeout(Duration::from_secs(5));
        });
        self.task = Some((task, kill));
    }

    /// Dies at once, open connections too.
    pub async fn down(&mut self) {
        if let Some((task, kill)) = self.task.take() {
            let _ = kill.send(());
            task.await.unwrap();
        }
    }

    pub fn mood(&self, change: impl FnOnce(&mut Mood)) {
        change(&mut self.shared.mood.lock().unwrap());
    }

    pub fn order(&self, change: impl FnOnce(&mut Orders)) {
        self.shared.orders.send_modify(|orders| {
            orders.epoch += 1;
            change(orders);
        });
    }

    /// What was stored of a node, in order.
    pub fn bodies(&self, node: &str) -> Vec<ReportBody> {
        let nodes = self.shared.nodes.lock().unwrap();
        nodes.get(node).map_or(vec![], |n| n.reports.values().map(|r| r.body.clone()).collect())
    }

    /// The step numbers stored, in order.
    pub fn steps(&self, node: &str) -> Vec<u64> {
        let steps = |body| match body {
            ReportBody::Steps(report) => report.steps.iter().map(|s: &StepRecord| s.step).collect(),
            _ => vec![],
        };
        self.bodies(node).into_iter().flat_map(steps).collect()
    }

    pub fn node<T>(&self, node: &str, look: impl FnOnce(&Node) -> T) -> T {
        look(self.shared.nodes.lock().unwrap().entry(node.to_owned()).or_default())
    }

    pub async fn registered(&self, node: &str) -> Register {
        wait_for("registration", || self.node(node, |n| n.registers.last().cloned())).await
    }
}

impl Drop for Controller {
    fn drop(&mut self) {
        if let Some((_, kill)) = self.task.take() {
            let _ = kill.send(());
        }
    }
}

async fn register(State(shared): State<Arc<Shared>>, Json(register): Json<Register>) -> Response {
    if let Some(status) = shared.mood.lock().unwrap().refuse_register {
        return StatusCode::from_u16(status).unwrap().into_response();
    }
    let mut nodes = shared.nodes.lock().unwrap();
    let node = nodes.entry(register.node.to_string()).or_default();
    node.registers.push(register);
    Json(Registered { heartbeat_ms: 100, acked_seq: node.acked }).into_response()
}

async fn heartbeat(State(shared): State<Arc<Shared>>, Path(node): Path<String>) -> StatusCode {
    let mut nodes = shared.nodes.lock().unwrap();
    match nodes.get_mut(&node).filter(|n| !n.registers.is_empty()) {
        Some(node) => {
            node.heartbeats += 1;
            StatusCode::NO_CONTENT
        }
        None => StatusCode::NOT_FOUND,
    }
}

async fn reports(
    State(shared): State<Arc<Shared>>,
    Path(node): Path<String>,
    Json(batch): Json<ReportBatch>,
) -> Response {
    let mood = shared.mood.lock().unwrap().clone();
    if batch.reports.iter().any(|r| Some(r.seq) == mood.choke_on) {
        return StatusCode::BAD_REQUEST.into_response();
    }
    let mut nodes = shared.nodes.lock().unwrap();
    let node = nodes.entry(node).or_default();
    let seqs: Vec<u64> = batch.reports.iter().map(|r| r.seq).collect();
    assert!(seqs.is_sorted_by(|a, b| a < b), "out of order: {seqs:?}");
    node.batches.push(seqs);
    for report in batch.reports {
        if report.seq > node.acked {
            node.acked = report.seq;
            node.reports.insert(report.seq, report);
        }
    }
    if mood.lose_acks && node.batches.len() % 2 == 1 {
        return StatusCode::INTERNAL_SERVER_ERROR.into_response();
    }
    Json(ReportAck { acked_seq: node.acked, rejected: 0, first_reason: None, refused: vec![] }).into_response()
}

async fn orders(State(shared): State<Arc<Shared>>) -> Json<Orders> {
    Json(shared.orders.borrow().clone())
}

async fn stream(State(shared): State<Arc<Shared>>) -> Response {
    if shared.mood.lock().unwrap().no_stream {
        return StatusCode::SERVICE_UNAVAILABLE.into_response();
    }
    let mut newest = shared.orders.subscribe();
    newest.mark_changed();
    let events = futures_util::stream::unfold(newest, |mut newest| async move {
        newest.changed().await.ok()?;
        let data = serde_json::to_string(&*newest.borrow_and_update()).unwrap();
        Some((Ok::<_, Infallible>(Event::default().event("orders").data(data)), newest))
    });
    Sse::new(events).keep_alive(KeepAlive::new().interval(Duration::from_millis(500))).into_response()
}

/// An agent in this process.
pub struct Agent {
    pub folder: Arc<tempfile::TempDir>,
    pub config: Config,
    stop: Option<oneshot::Sender<()>>,
    task: JoinHandle<Result<(), flexcomm_agent::AgentError>>,
}

pub fn config(controller: &Controller, name: &str, folder: &FilePath) -> Config {
    let overrides = Overrides {
        node: Some(name.into()),
        controller: Some(format!("http://{}", controller.addr)),
        token: Some("test-token".into()),
        listen: Some("127.0.0.1".into()),
        run_dir: Some(folder.join("run").to_string_lossy().into()),
        state_dir: Some(folder.join("state").to_string_lossy().into()),
        ..Overrides::default()
    };
    let mut config = Config::parse("report_interval = \"100ms\"", overrides).unwrap();
    // Any free ports: the file does not allow it, several agents in one process need it.
    (config.echo_port, config.throughput_port) = (0, 0);
    config
}

impl Agent {
    pub fn start(controller: &Controller, name: &str) -> Self {
        let folder = Arc::new(tempfile::tempdir().unwrap());
        let config = config(controller, name, folder.path());
        Self::with(config, folder)
    }

    pub fn with(config: Config, folder: Arc<tempfile::TempDir>) -> Self {
        let (stop, stopped) = oneshot::channel::<()>();
        let running = config.clone();
        let task = tokio::spawn(async move {
            let shutdown = async {
                let _ = stopped.await;
            };
            flexcomm_agent::run(running, shutdown).await
        });
        Self { folder, config, stop: Some(stop), task }
    }

    pub fn socket(&self) -> PathBuf {
        self.config.run_dir.join("agent.sock")
    }

    /// Ends it in order and gives back what a next one needs.
    pub async fn end(mut self) -> (Config, Arc<tempfile::TempDir>) {
        let _ = self.stop.take().unwrap().send(());
        self.task.await.unwrap().unwrap();
        (self.config, self.folder)
    }

    /// The error with which it did not start.
    pub async fn error(self) -> String {
        let _keep = self.stop;
        self.task.await.unwrap().unwrap_err().to_string()
    }
}

/// A trainer's connection.
pub struct Trainer {
    pub stream: BufReader<UnixStream>,
    /// What it got behind its welcome.
    pub orders: JobOrders,
    job: String,
    rank: u32,
}

pub fn hello(job: &str, rank: u32) -> FromTrainer {
    let collectives = vec!["dense-ring".into()];
    let hello = Hello { collectives, ..Hello::new(job.parse().unwrap(), (rank, 2), 1000, "test") };
    FromTrainer::Hello { protocol: PROTOCOL, hello }
}

impl Trainer {
    pub async fn connect(agent: &Agent) -> BufReader<UnixStream> {
        Self::connect_at(&agent.socket()).await
    }

    async fn connect_at(socket: &FilePath) -> BufReader<UnixStream> {
        let began = Instant::now();
        loop {
            match UnixStream::connect(socket).await {
                Ok(stream) => return BufReader::new(stream),
                Err(error) => assert!(began.elapsed() < DEADLINE, "{error}"),
            }
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
    }

    pub async fn join(agent: &Agent, job: &str, rank: u32) -> Self {
        Self::join_at(&agent.socket(), job, rank).await
    }

    pub async fn join_at(socket: &FilePath, job: &str, rank: u32) -> Self {
        let stream = Self::connect_at(socket).await;
        let orders = JobOrders { job: job.parse().unwrap(), decision: None, trial: None };
        let mut trainer = Self { stream, orders, job: job.into(), rank };
        trainer.say(&hello(job, rank)).await;
        let welcome = answer(&mut trainer.stream).await;
        assert!(matches!(welcome, Some(ToTrainer::Welcome { .. })), "{welcome:?}");
        trainer.orders = trainer.ordered().await;
        trainer
    }

    /// The next message, which is orders.
    pub async fn ordered(&mut self) -> JobOrders {
        match answer(&mut self.stream).await {
            Some(ToTrainer::Orders(orders)) => orders,
            other => panic!("{other:?}"),
        }
    }

    pub async fn say(&mut self, message: &FromTrainer) {
        let mut line = serde_json::to_vec(message).unwrap();
        line.push(b'\n');
        self.stream.get_mut().write_all(&line).await.unwrap();
    }

    pub async fn steps(&mut self, steps: std::ops::Range<u64>) {
        for step in steps {
            let record = StepRecord {
                step,
                compute_us: 1.0,
                comp_us: 1.0,
                sync_us: 1.0,
                step_us: 3.0,
                bytes_sent: 1,
                gain: 1.0,
                ..StepRecord::default()
            };
            let strategy = flexcomm_domain::Strategy::DENSE_RING.into();
            let (job, rank) = (self.job.parse().unwrap(), self.rank);
            self.say(&FromTrainer::Steps(StepsReport { job, rank, version: 0, strategy, steps: vec![record] })).await;
        }
    }
}

pub async fn answer(stream: &mut BufReader<UnixStream>) -> Option<ToTrainer> {
    let mut line = String::new();
    let read = tokio::time::timeout(DEADLINE, stream.read_line(&mut line)).await.expect("no answer").ok()?;
    (read > 0).then(|| serde_json::from_str(&line).unwrap())
}

/// A registered agent as a peer of others.
pub fn peer(register: &Register) -> EchoPeer {
    EchoPeer {
        node: register.node.clone(),
        addr: register.addr,
        echo_port: register.echo_port,
        throughput_port: register.throughput_port,
    }
}
