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
use flexcomm_wire::{JobOrders, JobSeen, MAX_LINE, PROTOCOL, RefusedRun, ReportBody, ToTrainer};
use lines::{LineError, read_line};
use pages::Pages;
use protocol::{Event, Session};
use registry::{Peer, Registry, Slots};
use roster::{Ranks, Roster};
use std::os::fd::AsFd;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};
use tokio::io::{AsyncWriteExt, BufReader};
use tokio::net::{UnixListener, UnixStream};
use tokio::sync::{broadcast, watch};

/// Refusals that connections have not looked at: a few jobs' worth.
const MAX_REFUSED: usize = 64;
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
    /// Whether the spool had no room for the last announcement.
    unannounced: AtomicBool,
    /// Runs that the controller refuses, for the connections of their ranks.
    refused: broadcast::Sender<RefusedRun>,
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
        Arc::new(Self {
            node,
            reports,
            passive,
            metrics,
            pages,
            registry,
            roster,
            missing,
            began,
            unannounced: AtomicBool::new(false),
            refused: broadcast::Sender::new(MAX_REFUSED),
        })
    }

    /// Tells the controller again who is here: one with an empty store would know nobody.
    pub(crate) fn announce(&self) {
        let live: Vec<JobSeen> = lock(&self.registry).seen().cloned().collect();
        let spooled = live.into_iter().all(|seen| self.reports.offer(ReportBody::JobSeen(seen)).is_ok());
        self.unannounced.store(!spooled, Ordering::Relaxed);
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
        if self.unannounced.load(Ordering::Relaxed) {
            self.announce();
        }
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
            self.reports.push(ReportBody::JobLeft { job, rank, connection_lost: true });
        }
    }

    /// Who is here, or may come back, to disk.
    fn note_ranks(&self) {
        let live = lock(&self.registry).ranks().cloned().collect::<Ranks>();
        let mut missing = lock(&self.missing);
        missing.retain(|rank| !live.contains(rank));
        self.roster.write(&live.union(&missing).cloned().collect());
    }

    /// Takes a rank in, with its report to the controller: where that finds no room, those that follow would not either.
    fn welcome(&self, seen: &JobSeen, peer: Peer, stream: &UnixStream) -> Result<(u64, ToTrainer), String> {
        let socket =
            stream.as_fd().try_clone_to_owned().map_err(|error| format!("failed to keep the socket: {error}"))?;
        let mut registry = lock(&self.registry);
        registry.check(seen, peer)?;
        let page = lock(&self.pages).path(&seen.job, peer.uid, &registry.jobs());
        let page = page.map_err(|error| format!("failed to {error}"))?.to_string_lossy().into_owned();
        let spooled = self.reports.offer(ReportBody::JobSeen(seen.clone()));
        spooled.map_err(|unspooled| format!("failed to {}", unspooled.error))?;
        let id = registry.join(seen, peer, socket);
        drop(registry);
        self.note_ranks();
        Ok((id, ToTrainer::Welcome { protocol: PROTOCOL, node: self.node.clone(), page }))
    }

    /// The controller refuses a run: connections of its ranks end with the reason.
    pub(crate) fn refuse_run(&self, run: RefusedRun) {
        // Without receivers the run's trainers are gone already.
        let _ = self.refused.send(run);
    }

    async fn handle(&self, event: Event, from: Option<&JobSeen>) {
        match event {
            Event::Report(body) => self.reports.keep(body).await,
            Event::Transfers { peer, samples } => self.passive.take(peer, &samples),
            Event::SetAside(why) => {
                self.metrics.trainer_reports_set_aside_total.inc();
                let (job, rank) = named(from);
                tracing::warn!(job, rank, why, "a trainer's report was set aside");
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
                            Err(reason) => refuse(stream, &trainers, None, reason).await,
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

/// The job and the rank of a trainer, as fields of a line of the log.
fn named(seen: Option<&JobSeen>) -> (Option<&str>, Option<u32>) {
    (seen.map(|seen| seen.job.as_str()), seen.map(|seen| seen.rank))
}

async fn refuse(mut stream: UnixStream, trainers: &Trainers, seen: Option<&JobSeen>, reason: String) {
    trainers.metrics.trainers_refused_total.inc();
    let (job, rank) = named(seen);
    tracing::warn!(job, rank, reason, "trainer refused");
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
        Ok(Err(reason)) => return refuse(stream.into_inner(), trainers, None, reason).await,
        Err(_) => {
            return refuse(stream.into_inner(), trainers, None, format!("no hello within {HELLO_WITHIN:?}")).await;
        }
    };
    let mut refused = trainers.refused.subscribe();
    let (id, welcome) = match trainers.welcome(&seen, peer, stream.get_ref()) {
        Ok(welcome) => welcome,
        Err(reason) => return refuse(stream.into_inner(), trainers, Some(&seen), reason).await,
    };
    trainers.metrics.trainers.inc();
    tracing::info!(job = %seen.job, rank = seen.rank, world = seen.world, %peer, "trainer joined");
    let end = match answer(stream.get_mut(), &welcome).await {
        Ok(()) => tokio::select! {
            end = follow(&mut stream, &mut session, trainers) => end,
            reason = refusal(&mut refused, &seen) => Err(reason),
        },
        Err(error) => Err(format!("the welcome could not be sent: {error}")),
    };
    trainers.metrics.trainers.dec();
    if lock(&trainers.registry).leave(&seen, id) {
        tracing::info!(job = %seen.job, rank = seen.rank, "trainer left");
        trainers.note_ranks();
        trainers.reports.push(ReportBody::JobLeft {
            job: seen.job,
            rank: seen.rank,
            connection_lost: !matches!(end, Ok(End::Goodbye)),
        });
    }
    if let Err(reason) = end {
        refuse(stream.into_inner(), trainers, session.seen(), reason).await;
    }
}

/// How a connection ended that was not refused.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum End {
    Goodbye,
    Lost,
}

/// Waits until the controller refuses this rank's run.
async fn refusal(refused: &mut broadcast::Receiver<RefusedRun>, seen: &JobSeen) -> String {
    loop {
        match refused.recv().await {
            Ok(run) if run.job == seen.job && Some(run.run) == seen.run => return run.reason,
            Ok(_) | Err(broadcast::error::RecvError::Lagged(_)) => {}
            Err(broadcast::error::RecvError::Closed) => std::future::pending().await,
        }
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

async fn follow(stream: &mut BufReader<UnixStream>, session: &mut Session, trainers: &Trainers) -> Result<End, String> {
    let mut line = Vec::new();
    while next_line(stream, &mut line).await? {
        match session.line(&line)? {
            Event::Left => return Ok(End::Goodbye),
            event => trainers.handle(event, session.seen()).await,
        }
    }
    Ok(End::Lost)
}

#[cfg(test)]
pub(super) mod tests {
    use super::*;
    use flexcomm_wire::FromTrainer;

    pub(super) fn seen(rank: u32, world: u32) -> JobSeen {
        let hello = protocol::tests::hello("j", rank);
        JobSeen {
            job: hello.job,
            run: None,
            rank,
            world,
            gradient_values: 1000,
            backend: hello.backend,
            codecs: vec![],
            collectives: vec![],
        }
    }

    fn start(folder: &Path) -> Arc<Trainers> {
        let overrides = crate::Overrides { token: Some("a-test-token".into()), ..Default::default() };
        let mut config = Config::parse("", overrides).unwrap();
        config.state_dir = folder.to_owned();
        let metrics = Metrics::new().unwrap();
        let spool = crate::spool::Spool::open(&folder.join("spool"), 1 << 16).unwrap();
        let reports = ReportLog::new(spool, metrics.clone());
        let pages = Pages::open(&folder.join("run"), folder, metrics.clone()).unwrap();
        let passive = Passive::detached(metrics.clone());
        Trainers::new(&config, Sinks { reports, passive, metrics }, pages)
    }

    #[tokio::test]
    async fn ranks_that_do_not_come_back_have_left() {
        let dir = tempfile::tempdir().unwrap();
        let trainers = start(dir.path());
        let (stream, _theirs) = UnixStream::pair().unwrap();
        let peer = Peer::of(&stream).unwrap();
        trainers.welcome(&seen(0, 4), peer, &stream).unwrap();
        trainers.welcome(&seen(1, 4), peer, &stream).unwrap();
        drop(trainers);
        let trainers = start(dir.path());
        trainers.welcome(&seen(1, 4), peer, &stream).unwrap();
        trainers.tick();
        let left = || {
            let all = trainers.reports.batch(9, usize::MAX).unwrap();
            let bodies = all.iter().map(|r| serde_json::from_slice::<flexcomm_wire::Report>(&r.payload).unwrap().body);
            bodies.filter(|body| matches!(body, ReportBody::JobLeft { .. })).collect::<Vec<_>>()
        };
        assert_eq!(left(), [], "rank 0 may still come back");
        trainers.give_up_missing();
        assert_eq!(left(), [ReportBody::JobLeft { job: "j".parse().unwrap(), rank: 0, connection_lost: true }]);
        drop(trainers);
        assert_eq!(Roster::open(dir.path()).1, [("j".parse().unwrap(), 1)].into());
    }
    fn applied(step: u64) -> FromTrainer {
        let job = "j".parse().unwrap();
        FromTrainer::Applied(flexcomm_wire::AppliedReport { job, rank: 0, version: 1, digest: 1, step })
    }

    /// What the controller answers reaches the connections of that run, and no other.
    #[tokio::test]
    async fn the_controllers_refusal_reaches_the_trainers_of_that_run() {
        let sender = broadcast::Sender::new(4);
        let mut receiver = sender.subscribe();
        let run = |number| RefusedRun {
            job: "j".parse().unwrap(),
            run: flexcomm_domain::RunId(number),
            reason: format!("reason {number}"),
        };
        for number in [1, 2] {
            sender.send(run(number)).unwrap();
        }
        let own = JobSeen { run: Some(flexcomm_domain::RunId(2)), ..seen(0, 4) };
        assert_eq!(refusal(&mut receiver, &own).await, "reason 2");
    }

    /// Four times what the spool takes, while the controller stores nothing; then it stores what comes.
    #[tokio::test]
    async fn a_full_spool_loses_no_result_since_the_trainer_keeps_them() {
        const RESULTS: u64 = 4000;
        let dir = tempfile::tempdir().unwrap();
        let trainers = start(dir.path());
        let (ours, mut theirs) = UnixStream::pair().unwrap();
        let peer = Peer::of(&ours).unwrap();
        let serving = tokio::spawn({
            let trainers = trainers.clone();
            async move { session(ours, peer, &trainers).await }
        });
        let writing = tokio::spawn(async move {
            let hello = FromTrainer::Hello(protocol::tests::hello("j", 0));
            for message in std::iter::once(hello).chain((0..RESULTS).map(applied)) {
                let line = [serde_json::to_vec(&message).unwrap(), b"\n".to_vec()].concat();
                theirs.write_all(&line).await.unwrap();
            }
            theirs
        });
        let began = Instant::now();
        while trainers.metrics.spool_waits_total.get() == 0 && began.elapsed() < Duration::from_secs(20) {
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
        let lost = trainers.metrics.spool_refused_total.get();
        assert!(lost == 0 && !writing.is_finished(), "the trainer was read though there is no room: {lost} are lost");
        assert!(trainers.welcome(&seen(1, 4), peer, &UnixStream::pair().unwrap().0).unwrap_err().contains("the limit"));
        let mut stored = Vec::new();
        while (stored.len() as u64) < RESULTS {
            assert!(began.elapsed() < Duration::from_secs(60), "{} of {RESULTS} came", stored.len());
            let batch = trainers.reports.batch(100, usize::MAX).unwrap();
            let Some(last) = batch.last() else {
                tokio::time::sleep(Duration::from_millis(1)).await;
                continue;
            };
            trainers.reports.ack(last.seq).unwrap();
            let reports = batch.iter().map(|r| serde_json::from_slice::<flexcomm_wire::Report>(&r.payload).unwrap());
            stored.extend(reports.filter_map(|report| match report.body {
                ReportBody::Applied(applied) => Some(applied.step),
                _ => None,
            }));
        }
        assert_eq!(stored, (0..RESULTS).collect::<Vec<_>>());
        assert_eq!(trainers.metrics.spool_refused_total.get(), 0);
        drop(writing.await.unwrap());
        serving.await.unwrap();
    }
}
