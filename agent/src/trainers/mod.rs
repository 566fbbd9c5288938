//! The trainers of this node: a Unix socket for what they report, a shared page per job for what they should know.
//! A trainer never waits for anything here but the welcome.

mod lines;
pub(crate) mod merge;
pub(crate) mod pages;
pub(crate) mod protocol;
mod registry;
mod roster;

use crate::config::Config;
use crate::metrics::Metrics;
use crate::probing::Passive;
use crate::reports::ReportLog;
use flexcomm_domain::{JobId, NodeName};
use flexcomm_wire::{JobOrders, JobSeen, MAX_LINE, PROTOCOL, ReportBody, ToTrainer};
use lines::{LineError, read_line};
use pages::Pages;
use protocol::{Event, Session};
use registry::{Peer, Registry, Slots};
use roster::{Ranks, Roster};
use std::os::fd::AsFd;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};
use tokio::io::{AsyncWriteExt, BufReader};
use tokio::net::{UnixListener, UnixStream};
use tokio::sync::watch;

/// A trainer that has not said hello by then is refused.
const HELLO_WITHIN: Duration = Duration::from_secs(10);
/// A rank that was here before this agent started and is not back by then has left.
const BACK_WITHIN: Duration = Duration::from_secs(30);
/// Longest wait for a trainer to take an answer.
const ANSWER_WITHIN: Duration = Duration::from_secs(2);

/// Where what trainers say goes.
pub(crate) struct Sinks {
    pub(crate) reports: Arc<ReportLog>,
    pub(crate) passive: Passive,
    pub(crate) metrics: Metrics,
}

/// What connections share.
pub(crate) struct Trainers {
    node: NodeName,
    reports: Arc<ReportLog>,
    passive: Passive,
    metrics: Metrics,
    pages: Mutex<Pages>,
    registry: Mutex<Registry>,
    roster: Roster,
    /// Ranks of an earlier agent, until they are back or given up.
    missing: Mutex<Ranks>,
    began: Instant,
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Trainers {
    /// Serves nobody yet. The ranks of an earlier agent have some time to come back.
    pub(crate) fn new(config: &Config, sinks: Sinks, pages: Pages) -> Arc<Self> {
        let Sinks { reports, passive, metrics } = sinks;
        let node = config.node.clone();
        let (pages, registry) = (Mutex::new(pages), Mutex::new(Registry::default()));
        let (roster, missing) = Roster::open(&config.state_dir);
        let (missing, began) = (Mutex::new(missing), Instant::now());
        Arc::new(Self { node, reports, passive, metrics, pages, registry, roster, missing, began })
    }

    /// Tells the controller again who is here: one with an empty store would know nobody.
    pub(crate) fn announce(&self) {
        let live: Vec<JobSeen> = lock(&self.registry).seen().cloned().collect();
        live.into_iter().for_each(|seen| self.reports.push(ReportBody::JobSeen(seen)));
    }

    /// New orders of a job go to its page.
    pub(crate) fn orders(&self, orders: &JobOrders) {
        if let Err(error) = lock(&self.pages).update(orders) {
            self.metrics.page_errors_total.inc();
            tracing::error!(job = %orders.job, "failed to {error}");
        }
    }

    /// The controller no longer speaks of a job.
    pub(crate) fn gone(&self, job: &JobId) {
        lock(&self.pages).gone(job, Instant::now());
    }

    /// Signs of life, and forgetting of jobs that are gone.
    pub(crate) fn tick(&self) {
        let live = lock(&self.registry).jobs();
        lock(&self.pages).tick(Instant::now(), &live);
        if self.began.elapsed() >= BACK_WITHIN {
            self.give_up_missing();
        }
    }

    fn give_up_missing(&self) {
        let missing = std::mem::take(&mut *lock(&self.missing));
        if missing.is_empty() {
            return;
        }
        self.note_ranks();
        for (job, rank) in missing {
            tracing::info!(%job, rank, "trainer did not come back");
            self.reports.push(ReportBody::JobLeft { job, rank });
        }
    }

    /// Who is here, or may come back, to disk.
    fn note_ranks(&self) {
        let live = lock(&self.registry).ranks().cloned().collect::<Ranks>();
        let mut missing = lock(&self.missing);
        missing.retain(|rank| !live.contains(rank));
        self.roster.write(&live.union(&missing).cloned().collect());
    }

    fn welcome(&self, seen: &JobSeen, peer: Peer, stream: &UnixStream) -> Result<(u64, ToTrainer), String> {
        let socket =
            stream.as_fd().try_clone_to_owned().map_err(|error| format!("failed to keep the socket: {error}"))?;
        let (id, live) = {
            let mut registry = lock(&self.registry);
            (registry.join(seen, peer, socket)?, registry.jobs())
        };
        let page = lock(&self.pages).path(&seen.job, peer.uid, &live).map_err(|error| {
            lock(&self.registry).leave(seen, id);
            format!("failed to {error}")
        })?;
        self.note_ranks();
        let page = page.to_string_lossy().into_owned();
        Ok((id, ToTrainer::Welcome { protocol: PROTOCOL, node: self.node.clone(), page }))
    }

    fn handle(&self, event: Event) {
        match event {
            Event::Report(body) => self.reports.push(body),
            Event::Transfers { peer, samples } => self.passive.take(peer, &samples),
            Event::SetAside(why) => {
                self.metrics.trainer_reports_set_aside_total.inc();
                tracing::warn!(why, "a trainer's report was set aside");
            }
            Event::Joined(_) | Event::Left => {}
        }
    }
}

/// Binds the socket. The caller holds the lock of the run directory, so a socket that is there is a dead one.
pub(crate) fn bind(path: &Path, mode: u32) -> std::io::Result<UnixListener> {
    match std::fs::remove_file(path) {
        Err(error) if error.kind() != std::io::ErrorKind::NotFound => return Err(error),
        _ => {}
    }
    let listener = UnixListener::bind(path)?;
    std::fs::set_permissions(path, std::fs::Permissions::from_mode(mode))?;
    Ok(listener)
}

/// Serves trainers until `stop`.
pub(crate) async fn serve(listener: UnixListener, trainers: Arc<Trainers>, mut stop: watch::Receiver<bool>) {
    let slots = Slots::default();
    let mut tick = tokio::time::interval(Duration::from_secs(1));
    let mut sessions = tokio::task::JoinSet::new();
    loop {
        tokio::select! {
            _ = stop.changed() => break,
            _ = tick.tick() => trainers.tick(),
            Some(_) = sessions.join_next() => {}
            accepted = listener.accept() => match accepted {
                Ok((stream, _)) => {
                    let trainers = trainers.clone();
                    let taken = Peer::of(&stream)
                        .map_err(|error| format!("failed to ask the kernel who connects: {error}"))
                        .and_then(|peer| Ok((peer, slots.take(peer.uid)?)));
                    sessions.spawn(async move {
                        match taken {
                            Ok((peer, _slot)) => session(stream, peer, &trainers).await,
                            Err(reason) => refuse(stream, &trainers, reason).await,
                        }
                    });
                }
                // Out of descriptors, most likely: look again when some are free.
                Err(error) => {
                    tracing::warn!("failed to accept a trainer: {error}");
                    tokio::time::sleep(Duration::from_millis(100)).await;
                }
            },
        }
    }
    // Dropped sessions leave no JobLeft: the trainers live on and come back to the next agent.
    sessions.shutdown().await;
}

async fn refuse(mut stream: UnixStream, trainers: &Trainers, reason: String) {
    trainers.metrics.trainers_refused_total.inc();
    tracing::warn!(reason, "trainer refused");
    // A peer that is gone or does not read loses its answer.
    let _ = answer(&mut stream, &ToTrainer::Refused { reason }).await;
}

async fn answer(stream: &mut UnixStream, message: &ToTrainer) -> std::io::Result<()> {
    let mut line = serde_json::to_vec(message)?;
    line.push(b'\n');
    tokio::time::timeout(ANSWER_WITHIN, stream.write_all(&line)).await?
}

async fn session(stream: UnixStream, peer: Peer, trainers: &Trainers) {
    let mut stream = BufReader::new(stream);
    let mut session = Session::default();
    let greeted = tokio::time::timeout(HELLO_WITHIN, hello(&mut stream, &mut session)).await;
    let seen = match greeted {
        Ok(Ok(Some(seen))) => seen,
        Ok(Ok(None)) => return,
        Ok(Err(reason)) => return refuse(stream.into_inner(), trainers, reason).await,
        Err(_) => return refuse(stream.into_inner(), trainers, format!("no hello within {HELLO_WITHIN:?}")).await,
    };
    let (id, welcome) = match trainers.welcome(&seen, peer, stream.get_ref()) {
        Ok(welcome) => welcome,
        Err(reason) => return refuse(stream.into_inner(), trainers, reason).await,
    };
    trainers.metrics.trainers.inc();
    tracing::info!(job = %seen.job, rank = seen.rank, world = seen.world, %peer, "trainer joined");
    trainers.reports.push(ReportBody::JobSeen(seen.clone()));
    let end = match answer(stream.get_mut(), &welcome).await {
        Ok(()) => follow(&mut stream, &mut session, trainers).await,
        Err(error) => Err(format!("the welcome could not be sent: {error}")),
    };
    trainers.metrics.trainers.dec();
    if lock(&trainers.registry).leave(&seen, id) {
        tracing::info!(job = %seen.job, rank = seen.rank, "trainer left");
        trainers.note_ranks();
        trainers.reports.push(ReportBody::JobLeft { job: seen.job, rank: seen.rank });
    }
    if let Err(reason) = end {
        refuse(stream.into_inner(), trainers, reason).await;
    }
}

async fn next_line(stream: &mut BufReader<UnixStream>, line: &mut Vec<u8>) -> Result<bool, String> {
    line.clear();
    match read_line(stream, line).await {
        Ok(more) => Ok(more),
        Err(LineError::TooLong) => Err(format!("a line is longer than {MAX_LINE} bytes")),
        // The trainer died; there is nobody to tell.
        Err(LineError::Io(error)) => {
            tracing::debug!("a trainer's connection broke: {error}");
            Ok(false)
        }
    }
}

async fn hello(stream: &mut BufReader<UnixStream>, session: &mut Session) -> Result<Option<JobSeen>, String> {
    let mut line = Vec::new();
    if !next_line(stream, &mut line).await? {
        return Ok(None);
    }
    session.line(&line)?;
    Ok(session.seen().cloned())
}

async fn follow(stream: &mut BufReader<UnixStream>, session: &mut Session, trainers: &Trainers) -> Result<(), String> {
    let mut line = Vec::new();
    while next_line(stream, &mut line).await? {
        match session.line(&line)? {
            Event::Left => break,
            event => trainers.handle(event),
        }
    }
    Ok(())
}

#[cfg(test)]
pub(super) mod tests {
    use super::*;

    pub(super) fn seen(rank: u32, world: u32) -> JobSeen {
        let hello = protocol::tests::hello("j", rank);
        JobSeen {
            job: hello.job,
            rank,
            world,
            gradient_values: 1000,
            backend: hello.backend,
            codecs: vec![],
            collectives: vec![],
        }
    }

    #[tokio::test]
    async fn ranks_that_do_not_come_back_have_left() {
        let dir = tempfile::tempdir().unwrap();
        let (run_dir, state_dir) = (dir.path().join("run"), dir.path().to_owned());
        let start = || {
            let overrides = crate::Overrides { token: Some("a-test-token".into()), ..Default::default() };
            let mut config = Config::parse("", overrides).unwrap();
            config.state_dir = state_dir.clone();
            let metrics = Metrics::new().unwrap();
            let spool = crate::spool::Spool::open(&state_dir.join("spool"), 1 << 20).unwrap();
            let reports = ReportLog::new(spool, metrics.clone());
            let pages = Pages::open(&run_dir, &state_dir, metrics.clone()).unwrap();
            let passive = Passive::detached(metrics.clone());
            Trainers::new(&config, Sinks { reports, passive, metrics }, pages)
        };
        let trainers = start();
        let (stream, _theirs) = UnixStream::pair().unwrap();
        let peer = Peer::of(&stream).unwrap();
        trainers.welcome(&seen(0, 4), peer, &stream).unwrap();
        trainers.welcome(&seen(1, 4), peer, &stream).unwrap();
        drop(trainers);
        let trainers = start();
        trainers.welcome(&seen(1, 4), peer, &stream).unwrap();
        trainers.tick();
        assert_eq!(trainers.reports.waiting(), 0, "rank 0 may still come back");
        trainers.give_up_missing();
        let left = trainers.reports.batch(9, usize::MAX).unwrap();
        let left: Vec<flexcomm_wire::Report> =
            left.iter().map(|r| serde_json::from_slice(&r.payload).unwrap()).collect();
        assert_eq!(left.len(), 1);
        assert_eq!(left[0].body, ReportBody::JobLeft { job: "j".parse().unwrap(), rank: 0 });
        drop(trainers);
        assert_eq!(Roster::open(&state_dir).1, [("j".parse().unwrap(), 1)].into());
    }
}
