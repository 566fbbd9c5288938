//! The agent as a whole: what is started in which order, and ended in the reverse.

use crate::config::Config;
use crate::controller::{ControllerError, Link, resolve};
use crate::instance::Instance;
use crate::lock::Lock;
use crate::metrics::Metrics;
use crate::orders::Follower;
use crate::probing::{Probing, ProbingError};
use crate::reconciler::Reconciler;
use crate::reports::ReportLog;
use crate::spool::{SYNC_EVERY, Spool, SpoolError};
use crate::tc::ShapeError;
use crate::trainers::jobs::Jobs;
use crate::trainers::{self, Trainers};
use crate::{files, scrape, shaping};
use std::fs::TryLockError;
use std::future::Future;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use tokio::sync::watch;
use tokio::task::JoinSet;

/// Why an agent could not start. The text completes "failed to ...".
#[derive(Debug, thiserror::Error)]
pub enum AgentError {
    /// A folder, file or socket.
    #[error("{operation} {path}: {why}")]
    Io {
        /// What was tried.
        operation: &'static str,
        /// On what.
        path: PathBuf,
        /// Why.
        why: io::Error,
    },
    /// Another agent works in the same folder.
    #[error("use {path}: another agent that is running uses it (give each its own run_dir and state_dir)")]
    InUse {
        /// The folder.
        path: PathBuf,
    },
    /// The spool.
    #[error(transparent)]
    Spool(#[from] SpoolError),
    /// The probes.
    #[error(transparent)]
    Probing(#[from] ProbingError),
    /// tc.
    #[error(transparent)]
    Shape(#[from] ShapeError),
    /// HTTP.
    #[error("{0}")]
    Http(String),
    /// A part of the agent ended by itself, which is a fault of ours: the supervisor should start it anew.
    #[error("keep running: {part} ended by itself{why}")]
    Ended {
        /// Which part.
        part: &'static str,
        /// Its panic, if it was one.
        why: String,
    },
    /// The metrics' table.
    #[error("register the metrics: {0}")]
    Metrics(#[from] prometheus::Error),
}

impl From<ControllerError> for AgentError {
    fn from(error: ControllerError) -> Self {
        Self::Http(error.to_string())
    }
}

fn io(operation: &'static str, path: &Path) -> impl FnOnce(io::Error) -> AgentError {
    let path = path.to_owned();
    move |why| AgentError::Io { operation, path, why }
}

/// Makes a folder, of this mode when it is not there, and takes its lock.
fn claim(folder: &Path, mode: u32) -> Result<Lock, AgentError> {
    files::make_folder(folder, mode).map_err(io("make", folder))?;
    let path = folder.join("agent.lock");
    Lock::try_take(&path).map_err(|error| match error {
        TryLockError::WouldBlock => AgentError::InUse { path: folder.to_owned() },
        TryLockError::Error(error) => io("lock", &path)(error),
    })
}

/// Runs an agent until `shutdown` completes: the link is put back, the spool brought to disk, the socket removed.
/// Needs a tokio runtime with IO and time; several agents may run in one process.
pub async fn run(config: Config, shutdown: impl Future<Output = ()>) -> Result<(), AgentError> {
    let _locks = (claim(&config.run_dir, files::SHARED)?, claim(&config.state_dir, files::PRIVATE)?);
    recover_links(&config).await;
    let metrics = Metrics::new()?;
    let spool = Spool::open(&config.state_dir.join("spool"), config.spool_limit)?;
    let reports = ReportLog::new(spool, metrics.clone());
    let probing = Probing::start(&config, reports.clone(), metrics.clone())?;
    let jobs =
        Jobs::open(&config.state_dir, metrics.clone()).map_err(io("read the decisions in", &config.state_dir))?;
    let sinks = trainers::Sinks { reports: reports.clone(), metrics: metrics.clone() };
    let trainers = Trainers::new(&config, sinks, jobs);
    let (shape, desired) = watch::channel(shaping::DesiredShape::default());
    let follower = Follower::new(config.node.clone());
    let reconciler = Reconciler::new(follower, probing.desired(), trainers.clone(), shape, metrics.clone());
    let number = config.state_dir.join("instance");
    let instance = Instance::begin(number);
    let own = (probing.ports(), probing.hosts(), instance);
    let link = Link::new(&config, own, reconciler, reports.clone(), metrics.clone())?;
    let tc = shaping::OneInterface::new(&config, controller_address(&config).await)?;
    let socket = config.run_dir.join("agent.sock");
    let listener = trainers::bind(&socket, config.socket_mode).map_err(io("listen on", &socket))?;
    reports.fill_reserve();
    let (stop_in, stop) = watch::channel(false);
    let mut tasks = Tasks::default();
    if let Some(addr) = config.metrics_listen {
        let listener = scrape::bind(addr).await.map_err(io("serve metrics on", Path::new(&addr.to_string())))?;
        tasks.spawn("the metrics' server", scrape::serve(listener, metrics.clone(), stop.clone()));
    }
    tasks.spawn("the trainers' socket", trainers::serve(listener, trainers, stop.clone()));
    tasks.spawn("probing", probing.run(stop.clone()));
    tasks.spawn("the connection to the controller", link.run(stop.clone()));
    tasks.spawn("the spool", sync(reports.clone(), stop.clone()));
    let settings = (config.shaping.lease, config.shaping.controller_away);
    let sinks = shaping::Sinks { reports: reports.clone(), metrics };
    tasks.spawn("shaping", shaping::run(tc, settings, sinks, desired, stop));
    tracing::info!(node = %config.node, socket = %socket.display(), controller = %config.controller, "agent runs");
    let outcome = tokio::select! {
        () = shutdown => Ok(()),
        error = tasks.first_end() => Err(error),
    };
    tracing::info!("agent ends");
    stop_in.send_replace(true);
    tasks.all_ends().await;
    let _ = tokio::task::spawn_blocking(move || reports.sync()).await;
    std::fs::remove_file(&socket).map_err(io("remove", &socket))?;
    outcome
}

/// The parts that run at the same time.
#[derive(Default)]
struct Tasks(JoinSet<&'static str>);

impl Tasks {
    fn spawn(&mut self, part: &'static str, task: impl Future<Output = ()> + Send + 'static) {
        self.0.spawn(async move {
            task.await;
            part
        });
    }

    /// None of them should end before it is told to.
    async fn first_end(&mut self) -> AgentError {
        match self.0.join_next().await {
            Some(Ok(part)) => AgentError::Ended { part, why: String::new() },
            Some(Err(error)) => AgentError::Ended { part: "a part", why: format!(" ({error})") },
            None => std::future::pending().await,
        }
    }

    async fn all_ends(&mut self) {
        while self.0.join_next().await.is_some() {}
    }
}

/// Puts back what an agent that died left behind, also when shaping is no longer allowed.
async fn recover_links(config: &Config) {
    let state_dir = config.state_dir.clone();
    match tokio::task::spawn_blocking(move || crate::tc::recover(&state_dir)).await {
        Ok(Ok(found)) => {
            for interface in found.restored {
                tracing::warn!(interface, "a link that an earlier agent had shaped was put back");
            }
            for reason in found.rejected {
                tracing::warn!(reason, "a journal of tc was rejected");
            }
        }
        // Shaping will say so again when it is asked for; all else works without.
        Ok(Err(error)) => tracing::error!("failed to {error}"),
        Err(error) => tracing::error!("failed to look for shaped links: {error}"),
    }
}

async fn controller_address(config: &Config) -> Option<std::net::SocketAddr> {
    if !config.shaping.allow {
        return None;
    }
    let url = config.controller.clone();
    match tokio::task::spawn_blocking(move || resolve(&url)).await {
        Ok(Ok(addr)) => Some(addr),
        Ok(Err(error)) => {
            tracing::warn!("shaping will not spare the path to the controller: failed to {error}");
            None
        }
        Err(_) => None,
    }
}

/// Brings the spool to disk now and then.
async fn sync(reports: Arc<ReportLog>, mut stop: watch::Receiver<bool>) {
    let mut tick = tokio::time::interval(SYNC_EVERY);
    tick.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
    loop {
        tokio::select! {
            _ = stop.changed() => return,
            _ = tick.tick() => {}
        }
        if reports.is_unsynced() {
            let reports = reports.clone();
            let _ = tokio::task::spawn_blocking(move || reports.sync()).await;
        }
    }
}
