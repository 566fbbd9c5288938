//! The trainers of this node: a Unix socket for what they report, a shared page per job for what they should know.
//! A trainer never waits for anything here but the welcome.

mod lines;
pub(crate) mod merge;
pub(crate) mod pages;
pub(crate) mod protocol;
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
use roster::{Ranks, Roster};
use std::collections::{BTreeMap, BTreeSet};
use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};
use tokio::io::{AsyncWriteExt, BufReader};
use tokio::net::{UnixListener, UnixStream};
use tokio::sync::{Semaphore, broadcast, watch};

/// Most trainers connected at once: eight accelerators in each of a few jobs, with room.
const MAX_TRAINERS: usize = 256;
/// Refusals that connections have not looked at, and reasons that are remembered: a few jobs' worth.
const MAX_REFUSED: usize = 64;
/// A trainer that has not said hello by then is refused.
const HELLO_WITHIN: Duration = Duration::from_secs(10);
/// A rank that was here before this agent started and is not back by then has left.
const BACK_WITHIN: Duration = Duration::from_secs(30);
/// Longest wait for a trainer to take an answer.
const ANSWER_WITHIN: Duration = Duration::from_secs(2);

/// Who is connected. The newest connection of a rank counts.
#[derive(Debug, Default)]
struct Registry {
    next: u64,
    live: BTreeMap<(JobId, u32), (u64, JobSeen)>,
}

impl Registry {
    /// Refuses a world that contradicts the job's other ranks here.
    fn join(&mut self, seen: &JobSeen) -> Result<u64, String> {
        let others = self.live.values().map(|(_, other)| other).filter(|o| o.job == seen.job && o.rank != seen.rank);
        for other in others {
            if other.run != seen.run {
                return Err(another_run(&seen.job));
            }
            if (other.world, other.gradient_values) != (seen.world, seen.gradient_values) {
                return Err(format!(
                    "rank {} of job {} says {} ranks and {} values, rank {} says {} and {}",
                    seen.rank,
                    seen.job,
                    seen.world,
                    seen.gradient_values,
                    other.rank,
                    other.world,
                    other.gradient_values
                ));
            }
        }
        self.next += 1;
        self.live.insert((seen.job.clone(), seen.rank), (self.next, seen.clone()));
        Ok(self.next)
    }

    fn jobs(&self) -> BTreeSet<JobId> {
        self.live.keys().map(|(job, _)| job.clone()).collect()
    }

    /// Whether the rank is gone with this connection; false when a newer one has taken its place.
    fn leave(&mut self, seen: &JobSeen, id: u64) -> bool {
        let key = (seen.job.clone(), seen.rank);
        let mine = self.live.get(&key).is_some_and(|(live, _)| *live == id);
        mine && self.live.remove(&key).is_some()
    }
}

/// Why a run of a job waits until another one has left this node.
fn another_run(job: &JobId) -> String {
    format!(
        "another run trains under the name {job} on this node already: give each training a name of its own, by FLEXCOMM_JOB \
         or attach(job=...)"
    )
}

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
    /// Runs that the controller refuses, for the connections of their ranks.
    refused: broadcast::Sender<RefusedRun>,
    /// Reasons of refusals that were logged: a trainer asks again every few seconds.
    logged: Mutex<BTreeSet<String>>,
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
            refused: broadcast::Sender::new(MAX_REFUSED),
            logged: Mutex::default(),
        })
    }

    /// Tells the controller again who is here: one with an empty store would know nobody.
    pub(crate) fn announce(&self) {
        let live: Vec<JobSeen> = lock(&self.registry).live.values().map(|(_, seen)| seen.clone()).collect();
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
            self.reports.push(ReportBody::JobLeft { job, rank, connection_lost: true });
        }
    }

    /// Who is here, or may come back, to disk.
    fn note_ranks(&self) {
        let live = lock(&self.registry).live.keys().cloned().collect::<Ranks>();
        let mut missing = lock(&self.missing);
        missing.retain(|rank| !live.contains(rank));
        self.roster.write(&live.union(&missing).cloned().collect());
    }

    fn welcome(&self, seen: &JobSeen) -> Result<(u64, ToTrainer), String> {
        let (id, live) = {
            let mut registry = lock(&self.registry);
            (registry.join(seen)?, registry.jobs())
        };
        let page = lock(&self.pages).path(&seen.job, &live).map_err(|error| {
            lock(&self.registry).leave(seen, id);
            format!("failed to {error}")
        })?;
        self.note_ranks();
        let page = page.to_string_lossy().into_owned();
        Ok((id, ToTrainer::Welcome { protocol: PROTOCOL, node: self.node.clone(), page }))
    }

    /// The controller refuses a run: connections of its ranks end with the reason.
    pub(crate) fn refuse_run(&self, run: RefusedRun) {
        // Without receivers the run's trainers are gone already.
        let _ = self.refused.send(run);
    }

    fn log_refusal(&self, reason: &str) {
        let mut logged = lock(&self.logged);
        if logged.len() >= MAX_REFUSED {
            logged.clear();
        }
        if logged.insert(reason.to_owned()) {
            tracing::warn!(reason, "trainer refused");
        }
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
    let room = Arc::new(Semaphore::new(MAX_TRAINERS));
    let mut tick = tokio::time::interval(Duration::from_secs(1));
    let mut sessions = tokio::task::JoinSet::new();
    loop {
        tokio::select! {
            _ = stop.changed() => break,
            _ = tick.tick() => trainers.tick(),
            Some(_) = sessions.join_next() => {}
            accepted = listener.accept() => match accepted {
                Ok((stream, _)) => {
                    let permit = room.clone().try_acquire_owned();
                    let trainers = trainers.clone();
                    sessions.spawn(async move {
                        match permit {
                            Ok(_permit) => session(stream, &trainers).await,
                            Err(_) => refuse(stream, &trainers, format!("{MAX_TRAINERS} trainers are connected already")).await,
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
    trainers.log_refusal(&reason);
    // A peer that is gone or does not read loses its answer.
    let _ = answer(&mut stream, &ToTrainer::Refused { reason }).await;
}

async fn answer(stream: &mut UnixStream, message: &ToTrainer) -> std::io::Result<()> {
    let mut line = serde_json::to_vec(message)?;
    line.push(b'\n');
    tokio::time::timeout(ANSWER_WITHIN, stream.write_all(&line)).await?
}

async fn session(stream: UnixStream, trainers: &Trainers) {
    let mut stream = BufReader::new(stream);
    let mut session = Session::default();
    let greeted = tokio::time::timeout(HELLO_WITHIN, hello(&mut stream, &mut session)).await;
    let seen = match greeted {
        Ok(Ok(Some(seen))) => seen,
        Ok(Ok(None)) => return,
        Ok(Err(reason)) => return refuse(stream.into_inner(), trainers, reason).await,
        Err(_) => return refuse(stream.into_inner(), trainers, format!("no hello within {HELLO_WITHIN:?}")).await,
    };
    let mut refused = trainers.refused.subscribe();
    let (id, welcome) = match trainers.welcome(&seen) {
        Ok(welcome) => welcome,
        Err(reason) => return refuse(stream.into_inner(), trainers, reason).await,
    };
    trainers.metrics.trainers.inc();
    tracing::info!(job = %seen.job, rank = seen.rank, world = seen.world, "trainer joined");
    trainers.reports.push(ReportBody::JobSeen(seen.clone()));
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
        refuse(stream.into_inner(), trainers, reason).await;
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
            event => trainers.handle(event),
        }
    }
    Ok(End::Lost)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn seen(rank: u32, world: u32) -> JobSeen {
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

    #[test]
    fn the_newest_connection_of_a_rank_counts() {
        let mut registry = Registry::default();
        let old = registry.join(&seen(0, 4)).unwrap();
        let new = registry.join(&seen(0, 4)).unwrap();
        assert!(!registry.leave(&seen(0, 4), old), "the rank is still there");
        assert!(registry.leave(&seen(0, 4), new));
        assert!(!registry.leave(&seen(0, 4), new));
    }

    #[test]
    fn ranks_that_do_not_come_back_have_left() {
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
        trainers.welcome(&seen(0, 4)).unwrap();
        trainers.welcome(&seen(1, 4)).unwrap();
        drop(trainers);
        let trainers = start();
        trainers.welcome(&seen(1, 4)).unwrap();
        trainers.tick();
        assert_eq!(trainers.reports.waiting(), 0, "rank 0 may still come back");
        trainers.give_up_missing();
        let left = trainers.reports.batch(9, usize::MAX).unwrap();
        let left: Vec<flexcomm_wire::Report> =
            left.iter().map(|r| serde_json::from_slice(&r.payload).unwrap()).collect();
        assert_eq!(left.len(), 1);
        assert_eq!(left[0].body, ReportBody::JobLeft { job: "j".parse().unwrap(), rank: 0, connection_lost: true });
        drop(trainers);
        assert_eq!(Roster::open(&state_dir).1, [("j".parse().unwrap(), 1)].into());
    }

    #[test]
    fn another_run_of_a_job_waits_until_the_first_has_left() {
        let of = |run, rank| JobSeen { run: Some(flexcomm_domain::RunId(run)), ..seen(rank, 4) };
        let mut registry = Registry::default();
        let first = registry.join(&of(1, 0)).unwrap();
        registry.join(&of(1, 1)).unwrap();
        let refused = registry.join(&of(2, 2)).unwrap_err();
        assert!(
            refused.contains("another run trains under the name j") && refused.contains("FLEXCOMM_JOB"),
            "{refused}"
        );
        registry.leave(&of(1, 0), first);
        assert!(registry.join(&of(2, 0)).is_err(), "rank 1 of the first is there");
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

    #[test]
    fn ranks_that_contradict_each_other_are_refused() {
        let mut registry = Registry::default();
        registry.join(&seen(0, 4)).unwrap();
        assert!(registry.join(&seen(1, 8)).unwrap_err().contains("says 8 ranks"));
        registry.join(&seen(0, 8)).unwrap();
        registry.join(&seen(1, 8)).unwrap();
    }
}
