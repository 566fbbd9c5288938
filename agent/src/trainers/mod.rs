//! The trainers of this node: a Unix socket for what they report and for what they should know.
//! A trainer never waits for anything here but the welcome.

pub(crate) mod jobs;
mod lines;
pub(crate) mod merge;
mod names;
pub(crate) mod protocol;
mod refused;
mod registry;
mod roster;

use crate::config::Config;
use crate::metrics::Metrics;
use crate::reports::ReportLog;
use flexcomm_domain::{JobId, NodeName};
use flexcomm_wire::{Hello, JobOrders, MAX_LINE, PROTOCOL, RefusedRun, ReportBody, ToTrainer};
use jobs::{Jobs, OrdersLine};
use lines::{LineError, read_line};
use names::Names;
use nix::sys::socket::{Shutdown, shutdown};
use protocol::{Event, Session};
use refused::{MAX_REFUSED, Refused};
use registry::{Peer, Registry, Slots, has_ended};
use roster::{Rank, Ranks, Roster};
use std::convert::Infallible;
use std::os::fd::{AsFd, AsRawFd};
use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};
use tokio::io::{AsyncWrite, AsyncWriteExt, BufReader};
use tokio::net::unix::{OwnedReadHalf, OwnedWriteHalf};
use tokio::net::{UnixListener, UnixStream};
use tokio::sync::{broadcast, watch};

/// A trainer that has not said hello by then is refused.
const HELLO_WITHIN: Duration = Duration::from_secs(10);
/// A rank that was here before this agent started and is not back by then has left.
const BACK_WITHIN: Duration = Duration::from_secs(30);
/// Longest wait for a trainer to take an answer, and for what trainers had sent when the agent ends.
const ANSWER_WITHIN: Duration = Duration::from_secs(2);

/// Where what trainers say goes.
pub(crate) struct Sinks {
    pub(crate) reports: Arc<ReportLog>,
    pub(crate) metrics: Metrics,
}

/// What connections share.
pub(crate) struct Trainers {
    node: NodeName,
    reports: Arc<ReportLog>,
    metrics: Metrics,
    jobs: Mutex<Jobs>,
    registry: Mutex<Registry>,
    roster: Roster,
    /// Ranks of an earlier agent, until they are back or given up.
    missing: Mutex<Ranks>,
    began: Instant,
    /// Whether the spool had no room for the last announcement.
    unannounced: AtomicBool,
    /// Job names that users brought.
    names: Mutex<Names>,
    /// Runs that the controller refuses.
    refused: Mutex<Refused>,
    /// The same, for the connections of their ranks.
    refusals: broadcast::Sender<RefusedRun>,
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Trainers {
    /// Serves nobody yet. The ranks of an earlier agent have some time to come back.
    pub(crate) fn new(config: &Config, sinks: Sinks, jobs: Jobs) -> Arc<Self> {
        let Sinks { reports, metrics } = sinks;
        let node = config.node.clone();
        let (jobs, registry) = (Mutex::new(jobs), Mutex::new(Registry::default()));
        let (roster, missing) = Roster::open(&config.state_dir);
        let (missing, began) = (Mutex::new(missing), Instant::now());
        Arc::new(Self {
            node,
            reports,
            metrics,
            jobs,
            registry,
            roster,
            missing,
            began,
            unannounced: AtomicBool::new(false),
            names: Mutex::default(),
            refused: Mutex::default(),
            refusals: broadcast::Sender::new(MAX_REFUSED),
        })
    }

    /// Tells the controller again who is here: one with an empty store would know nobody.
    pub(crate) fn announce(&self) {
        // Under the lock: after a rank's leave nothing may say that it is here.
        let registry = lock(&self.registry);
        let spooled = registry.seen().all(|seen| self.reports.offer(ReportBody::JobSeen(seen.clone())).is_ok());
        self.unannounced.store(!spooled, Ordering::Relaxed);
    }

    /// New orders of a job go to its trainers.
    pub(crate) fn orders(&self, orders: &JobOrders) {
        if let Err(error) = lock(&self.jobs).update(orders) {
            self.metrics.job_errors_total.inc();
            tracing::error!(job = %orders.job, "failed to {error}");
        }
    }

    /// The controller no longer names a job.
    pub(crate) fn gone(&self, job: &JobId) {
        lock(&self.jobs).gone(job, Instant::now());
    }

    /// Forgets jobs and ranks that are gone.
    pub(crate) fn tick(&self) {
        {
            // Under the lock: a job is not forgotten while a trainer joins it.
            let registry = lock(&self.registry);
            lock(&self.jobs).tick(Instant::now(), &registry.jobs());
        }
        if self.unannounced.load(Ordering::Relaxed) {
            self.announce();
        }
        if self.began.elapsed() >= BACK_WITHIN {
            self.give_up_missing();
        }
    }

    fn give_up_missing(&self) {
        let registry = lock(&self.registry);
        let missing = std::mem::take(&mut *lock(&self.missing));
        if missing.is_empty() {
            return;
        }
        for Rank { job, rank, run } in missing.into_iter().filter(|rank| !registry.is_here(rank)) {
            tracing::info!(%job, rank, "trainer did not come back");
            self.reports.push(ReportBody::JobLeft { job, rank, run, connection_lost: true });
        }
        drop(registry);
        self.note_ranks();
    }

    /// Who is here, or may come back, to disk.
    fn note_ranks(&self) {
        let registry = lock(&self.registry);
        let mut missing = lock(&self.missing);
        missing.retain(|rank| !registry.is_here(rank));
        let ranks: Ranks = registry.ranks().chain(missing.iter().cloned()).collect();
        drop(registry);
        // With the other lock: the newest list is written last.
        self.roster.write(&ranks);
    }

    /// Another run may not take the name of one whose ranks may come back: the controller takes them for here.
    fn check_missing(&self, seen: &Hello) -> Result<(), String> {
        let missing = lock(&self.missing);
        let mut others = missing.iter().filter(|other| other.job == seen.job && other.run != seen.run);
        match others.find_map(|other| other.run) {
            None => Ok(()),
            Some(run) => Err(format!(
                "another run ({run}) trained under the name {} on this node when its agent ended, and has {} s from the \
                 agent's start to come back: give each training a name of its own, by FLEXCOMM_JOB or attach(job=...)",
                seen.job,
                BACK_WITHIN.as_secs()
            )),
        }
    }

    /// Registers a rank, with its report to the controller if that finds room.
    fn join(&self, seen: &Hello, peer: Peer, stream: &UnixStream) -> Result<Joined, String> {
        let socket =
            stream.as_fd().try_clone_to_owned().map_err(|error| format!("failed to keep the socket: {error}"))?;
        let mut registry = lock(&self.registry);
        registry.check(seen, peer)?;
        self.check_missing(seen)?;
        let is_here = registry.seen().any(|other| (&other.job, other.run) == (&seen.job, seen.run));
        lock(&self.refused).check(seen, is_here, Instant::now())?;
        let jobs = registry.jobs();
        if !jobs.contains(&seen.job) {
            lock(&self.names).take(peer.uid, &seen.job, Instant::now())?;
        }
        let orders = lock(&self.jobs).subscribe(&seen.job, peer.uid, &jobs);
        let orders = orders.map_err(|error| format!("failed to {error}"))?;
        let announced = self.reports.offer(ReportBody::JobSeen(seen.clone())).is_ok();
        let id = registry.join(seen, peer, socket);
        drop(registry);
        self.note_ranks();
        Ok(Joined { id, orders, announced })
    }

    /// A rank's connection has ended. At the agent's own end the rank stays where it was: it comes back to the next agent.
    fn leave(&self, seen: &Hello, id: u64, end: &End) {
        if matches!(end, End::Stopped) {
            return;
        }
        let mut registry = lock(&self.registry);
        if !registry.leave(seen, id) {
            return;
        }
        tracing::info!(job = %seen.job, rank = seen.rank, "trainer left");
        // The controller knows no rank of a run that it refuses.
        if !matches!(end, End::RunRefused(_)) {
            let (job, rank, run) = (seen.job.clone(), seen.rank, seen.run);
            let connection_lost = !matches!(end, End::Goodbye);
            self.reports.push(ReportBody::JobLeft { job, rank, run, connection_lost });
        }
        drop(registry);
        self.note_ranks();
    }

    /// The controller refuses a run: connections of its ranks end with the reason.
    pub(crate) fn refuse_run(&self, run: RefusedRun) {
        lock(&self.refused).add(run.clone(), Instant::now());
        // Without receivers the run's trainers are gone already.
        let _ = self.refusals.send(run);
    }

    /// What a line of the connection `id` asks, after its hello.
    async fn handle(&self, event: Event, from: Option<&Hello>, id: u64, is_last: impl Fn() -> bool) {
        match event {
            Event::Joined(seen) => {
                let is_news = lock(&self.registry).update(&seen, id);
                if is_news {
                    self.reports.keep(ReportBody::JobSeen(seen), is_last).await;
                }
            }
            Event::Report(body) => self.reports.keep(body, is_last).await,
            Event::Rejected(why) => {
                self.metrics.trainer_reports_rejected_total.inc();
                let (job, rank) = named(from);
                tracing::warn!(job, rank, why, "a trainer's report was rejected");
            }
            Event::Left => {}
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
                    let stop = stop.clone();
                    sessions.spawn(async move {
                        match taken {
                            Ok((peer, _slot)) => session(stream, peer, &trainers, stop).await,
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
    // Those that wait for room end by the room for events.
    trainers.reports.wake();
    let all_end = async { while sessions.join_next().await.is_some() {} };
    let _ = tokio::time::timeout(ANSWER_WITHIN, all_end).await;
    sessions.shutdown().await;
}

/// The job and the rank of a trainer, as fields of a line of the log.
fn named(seen: Option<&Hello>) -> (Option<&str>, Option<u32>) {
    (seen.map(|seen| seen.job.as_str()), seen.map(|seen| seen.rank))
}

async fn refuse(mut stream: impl AsyncWrite + Unpin, trainers: &Trainers, seen: Option<&Hello>, reason: String) {
    trainers.metrics.trainers_refused_total.inc();
    let (job, rank) = named(seen);
    tracing::warn!(job, rank, reason, "trainer refused");
    // A peer that is gone or does not read loses its answer.
    let _ = answer(&mut stream, &ToTrainer::Refused { reason }).await;
}

async fn answer(stream: &mut (impl AsyncWrite + Unpin), message: &ToTrainer) -> std::io::Result<()> {
    tokio::time::timeout(ANSWER_WITHIN, stream.write_all(&to_line(message))).await?
}

fn to_line(message: &ToTrainer) -> Vec<u8> {
    let mut line = serde_json::to_vec(message).unwrap_or_default();
    line.push(b'\n');
    line
}

/// Sends a job's orders, at first and whenever they change; a trainer that is slow to read gets the newest. Never ends:
/// that the trainer is gone is seen where its lines are read, once all of them are.
async fn send_orders(stream: &mut OwnedWriteHalf, mut orders: watch::Receiver<OrdersLine>) -> Infallible {
    orders.mark_changed();
    while orders.changed().await.is_ok() {
        let line = orders.borrow_and_update().clone();
        if stream.write_all(&line).await.is_err() {
            break;
        }
    }
    std::future::pending().await
}

async fn session(stream: UnixStream, peer: Peer, trainers: &Trainers, mut stop: watch::Receiver<bool>) {
    let (lines, mut answers) = stream.into_split();
    let mut lines = BufReader::new(lines);
    let mut session = Session::default();
    let greeted = tokio::select! {
        greeted = tokio::time::timeout(HELLO_WITHIN, hello(&mut lines, &mut session)) => greeted,
        () = stopped(&mut stop) => return,
    };
    let seen = match greeted {
        Ok(Ok(Some(seen))) => seen,
        Ok(Ok(None)) => return,
        Ok(Err(reason)) => return refuse(answers, trainers, None, reason).await,
        Err(_) => {
            return refuse(answers, trainers, None, format!("no hello within {HELLO_WITHIN:?}")).await;
        }
    };
    let mut refusals = trainers.refusals.subscribe();
    let Joined { id, orders, announced } = match trainers.join(&seen, peer, socket(&lines)) {
        Ok(joined) => joined,
        Err(reason) => return refuse(answers, trainers, Some(&seen), reason).await,
    };
    trainers.metrics.trainers.inc();
    tracing::info!(job = %seen.job, rank = seen.rank, world = seen.world, trainer = %peer, "trainer joined");
    let welcome = ToTrainer::Welcome { protocol: PROTOCOL, node: trainers.node.clone(), takes_buckets: true };
    let followed = async {
        if !announced {
            // Before all else of this rank: the controller rejects what comes from one it does not know.
            let is_last = || *stop.borrow() || has_ended(socket(&lines).as_fd());
            trainers.reports.keep(ReportBody::JobSeen(seen.clone()), is_last).await;
        }
        follow(&mut lines, &mut session, (trainers, id), stop).await.unwrap_or_else(End::Refused)
    };
    let end = match answer(&mut answers, &welcome).await {
        Err(error) => End::Refused(format!("the welcome could not be sent: {error}")),
        Ok(()) => tokio::select! {
            end = followed => end,
            reason = refusal(&mut refusals, &seen) => End::RunRefused(reason),
            never = send_orders(&mut answers, orders) => match never {},
        },
    };
    trainers.metrics.trainers.dec();
    trainers.leave(&seen, id, &end);
    if let End::Refused(reason) | End::RunRefused(reason) = end {
        refuse(answers, trainers, Some(&seen), reason).await;
    }
}

fn socket(lines: &BufReader<OwnedReadHalf>) -> &UnixStream {
    lines.get_ref().as_ref()
}

/// A rank that was registered.
struct Joined {
    id: u64,
    orders: watch::Receiver<OrdersLine>,
    /// Whether the spool had room for its report to the controller.
    announced: bool,
}

/// How a connection ended.
#[derive(Debug, Clone, PartialEq, Eq)]
enum End {
    Goodbye,
    Lost,
    /// The agent ends.
    Stopped,
    /// For this reason of the agent's.
    Refused(String),
    /// The controller refuses the run, for this reason.
    RunRefused(String),
}

async fn stopped(stop: &mut watch::Receiver<bool>) {
    // Without a sender the agent has ended.
    let _ = stop.wait_for(|stop| *stop).await;
}

/// Waits until the controller refuses this rank's run.
async fn refusal(refusals: &mut broadcast::Receiver<RefusedRun>, seen: &Hello) -> String {
    loop {
        match refusals.recv().await {
            Ok(run) if run.job == seen.job && Some(run.run) == seen.run => return run.reason,
            Ok(_) | Err(broadcast::error::RecvError::Lagged(_)) => {}
            Err(broadcast::error::RecvError::Closed) => std::future::pending().await,
        }
    }
}

/// See [`read_line`].
async fn next_line(stream: &mut BufReader<OwnedReadHalf>, line: &mut Vec<u8>) -> Result<bool, String> {
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

async fn hello(stream: &mut BufReader<OwnedReadHalf>, session: &mut Session) -> Result<Option<Hello>, String> {
    let mut line = Vec::new();
    if !next_line(stream, &mut line).await? {
        return Ok(None);
    }
    session.line(&line)?;
    Ok(session.seen().cloned())
}

async fn follow(
    stream: &mut BufReader<OwnedReadHalf>,
    session: &mut Session,
    (trainers, id): (&Trainers, u64),
    mut stop: watch::Receiver<bool>,
) -> Result<End, String> {
    let mut line = Vec::new();
    let mut stops = false;
    loop {
        let more = tokio::select! {
            more = next_line(stream, &mut line) => more?,
            () = stopped(&mut stop), if !stops => {
                stops = true;
                // What the trainer has sent is read to its end; it keeps what it can no longer send.
                let _ = shutdown(socket(stream).as_raw_fd(), Shutdown::Read);
                continue;
            }
        };
        if !more {
            return Ok(if stops { End::Stopped } else { End::Lost });
        }
        let event = session.line(&line)?;
        line.clear();
        if event == Event::Left {
            return Ok(End::Goodbye);
        }
        let is_last = || *stop.borrow() || has_ended(socket(stream).as_fd());
        trainers.handle(event, session.seen(), id, is_last).await;
    }
}

#[cfg(test)]
pub(super) mod tests {
    use super::*;
    use flexcomm_wire::FromTrainer;

    pub(super) fn seen(rank: u32, world: u32) -> Hello {
        Hello { world, collectives: vec![], ..protocol::tests::hello("j", rank) }
    }

    fn start(folder: &Path) -> Arc<Trainers> {
        let overrides = crate::Overrides { token: Some("a-test-token".into()), ..Default::default() };
        let mut config = Config::parse("", overrides).unwrap();
        config.state_dir = folder.to_owned();
        let metrics = Metrics::new().unwrap();
        let spool = crate::spool::Spool::open(&folder.join("spool"), 1 << 16).unwrap();
        let reports = ReportLog::new(spool, metrics.clone());
        let jobs = Jobs::open(folder, metrics.clone()).unwrap();
        Trainers::new(&config, Sinks { reports, metrics }, jobs)
    }

    #[tokio::test]
    async fn ranks_that_do_not_come_back_have_left() {
        let dir = tempfile::tempdir().unwrap();
        let trainers = start(dir.path());
        let (stream, _theirs) = UnixStream::pair().unwrap();
        let peer = Peer::of(&stream).unwrap();
        trainers.join(&seen(0, 4), peer, &stream).unwrap();
        trainers.join(&seen(1, 4), peer, &stream).unwrap();
        drop(trainers);
        let trainers = start(dir.path());
        trainers.join(&seen(1, 4), peer, &stream).unwrap();
        trainers.tick();
        let left = || {
            let all = trainers.reports.batch(9, usize::MAX).unwrap();
            let bodies = all.iter().map(|r| serde_json::from_slice::<flexcomm_wire::Report>(&r.payload).unwrap().body);
            bodies.filter(|body| matches!(body, ReportBody::JobLeft { .. })).collect::<Vec<_>>()
        };
        assert_eq!(left(), [], "rank 0 may still come back");
        trainers.give_up_missing();
        let job = "j".parse().unwrap();
        assert_eq!(left(), [ReportBody::JobLeft { job, rank: 0, run: None, connection_lost: true }]);
        drop(trainers);
        assert_eq!(Roster::open(dir.path()).1, [Rank::from(&seen(1, 4))].into());
    }

    #[tokio::test]
    async fn one_user_brings_the_controller_only_so_many_names_an_hour() {
        let dir = tempfile::tempdir().unwrap();
        let trainers = start(dir.path());
        let (stream, _theirs) = UnixStream::pair().unwrap();
        let peer = Peer::of(&stream).unwrap();
        let of = |job: String, rank| Hello { job: job.parse().unwrap(), ..seen(rank, 4) };
        trainers.join(&seen(0, 4), peer, &stream).unwrap();
        let mut refused = Vec::new();
        for i in 0..300 {
            let seen = of(format!("job{i}"), 0);
            match trainers.join(&seen, peer, &stream) {
                Ok(Joined { id, .. }) => trainers.leave(&seen, id, &End::Goodbye),
                Err(reason) => refused.push(reason),
            }
        }
        assert_eq!(refused.len(), 45, "{refused:#?}");
        assert!(refused[0].contains("new job names"), "{refused:#?}");
        trainers.join(&of("job0".into(), 0), peer, &stream).expect("a name that was used");
        trainers.join(&seen(1, 4), peer, &stream).expect("a rank of a job that is here");
    }

    fn of_run(number: u64, rank: u32) -> Hello {
        Hello { run: Some(flexcomm_domain::RunId(number)), ..seen(rank, 4) }
    }

    #[tokio::test]
    async fn after_a_restart_a_run_keeps_its_name_until_its_ranks_had_time_to_come_back() {
        let dir = tempfile::tempdir().unwrap();
        let (stream, _theirs) = UnixStream::pair().unwrap();
        let peer = Peer::of(&stream).unwrap();
        let trainers = start(dir.path());
        for rank in [0, 1] {
            trainers.join(&of_run(1, rank), peer, &stream).unwrap();
        }
        drop(trainers);
        let trainers = start(dir.path());
        let refused = trainers.join(&of_run(2, 0), peer, &stream).map(|_| ()).unwrap_err();
        assert!(refused.contains("another run (0000000000000001)") && refused.contains("FLEXCOMM_JOB"), "{refused}");
        trainers.join(&of_run(1, 0), peer, &stream).unwrap();
        drop(trainers);
        let trainers = start(dir.path());
        trainers.give_up_missing();
        trainers.join(&of_run(2, 0), peer, &stream).unwrap();
        let all = trainers.reports.batch(9, usize::MAX).unwrap();
        let bodies = all.iter().map(|r| serde_json::from_slice::<flexcomm_wire::Report>(&r.payload).unwrap().body);
        let runs: Vec<_> = bodies
            .filter_map(|body| if let ReportBody::JobLeft { rank, run, .. } = body { Some((rank, run)) } else { None })
            .collect();
        assert_eq!(runs, [(0, of_run(1, 0).run), (1, of_run(1, 1).run)]);
    }

    fn bodies(trainers: &Trainers) -> Vec<ReportBody> {
        let all = trainers.reports.batch(usize::MAX, usize::MAX).unwrap();
        all.iter().map(|r| serde_json::from_slice::<flexcomm_wire::Report>(&r.payload).unwrap().body).collect()
    }

    async fn say(stream: &mut UnixStream, message: &FromTrainer) {
        let line = [serde_json::to_vec(message).unwrap(), b"\n".to_vec()].concat();
        stream.write_all(&line).await.unwrap();
    }

    /// A trainer that says hello on a connection of its own.
    async fn connect(
        trainers: &Arc<Trainers>,
        seen: &Hello,
        stop: &watch::Sender<bool>,
    ) -> (BufReader<UnixStream>, tokio::task::JoinHandle<()>) {
        let (ours, mut theirs) = UnixStream::pair().unwrap();
        let peer = Peer::of(&ours).unwrap();
        let (trainers, stop) = (trainers.clone(), stop.subscribe());
        let serving = tokio::spawn(async move { session(ours, peer, &trainers, stop).await });
        let hello = Hello { run: seen.run, ..protocol::tests::hello("j", seen.rank) };
        say(&mut theirs, &FromTrainer::Hello { protocol: PROTOCOL, hello }).await;
        (BufReader::new(theirs), serving)
    }

    async fn answered(trainer: &mut BufReader<UnixStream>) -> ToTrainer {
        let mut line = Vec::new();
        let read = tokio::time::timeout(Duration::from_secs(60), read_line(trainer, &mut line)).await;
        assert!(read.expect("no answer within a minute").unwrap());
        serde_json::from_slice(&line).unwrap()
    }

    /// The version behind the welcome, or the next one.
    async fn ordered(trainer: &mut BufReader<UnixStream>) -> Option<u64> {
        match answered(trainer).await {
            ToTrainer::Orders(orders) => orders.decision.map(|decision| decision.version),
            other => panic!("{other:?}"),
        }
    }

    #[tokio::test]
    async fn a_refused_run_asks_the_controller_once_however_often_its_ranks_try() {
        let dir = tempfile::tempdir().unwrap();
        let trainers = start(dir.path());
        let stop = watch::Sender::new(false);
        let (mut first, serving) = connect(&trainers, &of_run(2, 0), &stop).await;
        assert!(matches!(answered(&mut first).await, ToTrainer::Welcome { .. }));
        assert_eq!(ordered(&mut first).await, None);
        let reason = "another run trains under the name j".to_owned();
        let run = flexcomm_domain::RunId(2);
        trainers.refuse_run(RefusedRun { job: "j".parse().unwrap(), run, reason: reason.clone() });
        assert_eq!(answered(&mut first).await, ToTrainer::Refused { reason: reason.clone() });
        serving.await.unwrap();
        for rank in (0..4).cycle().take(20) {
            let (mut again, serving) = connect(&trainers, &of_run(2, rank), &stop).await;
            assert_eq!(answered(&mut again).await, ToTrainer::Refused { reason: reason.clone() });
            serving.await.unwrap();
        }
        let bodies = bodies(&trainers);
        assert!(matches!(&bodies[..], [ReportBody::JobSeen(_)]), "neither asked again nor left: {bodies:?}");
    }

    fn applied(step: u64) -> FromTrainer {
        let job = "j".parse().unwrap();
        FromTrainer::Applied(flexcomm_wire::AppliedReport { job, rank: 0, version: 1, digest: 1, step })
    }

    #[tokio::test]
    async fn buckets_said_after_the_hello_are_reported_once_and_announced() {
        let dir = tempfile::tempdir().unwrap();
        let trainers = start(dir.path());
        let stop = watch::Sender::new(false);
        let (mut theirs, serving) = connect(&trainers, &seen(0, 4), &stop).await;
        let takes = answered(&mut theirs).await;
        assert!(matches!(takes, ToTrainer::Welcome { takes_buckets: true, .. }), "{takes:?}");
        for values in [vec![400, 600], vec![400, 600], vec![1], vec![600, 400]] {
            say(theirs.get_mut(), &FromTrainer::Buckets { job: "j".parse().unwrap(), rank: 0, values }).await;
        }
        say(theirs.get_mut(), &applied(1)).await;
        drop(theirs.get_mut().shutdown().await);
        let began = Instant::now();
        let reported = loop {
            let reported = bodies(&trainers);
            if reported.iter().any(|body| matches!(body, ReportBody::Applied(_))) {
                break reported;
            }
            assert!(began.elapsed() < Duration::from_secs(20), "{reported:?}");
            tokio::time::sleep(Duration::from_millis(1)).await;
        };
        let buckets =
            |body: &ReportBody| if let ReportBody::JobSeen(seen) = body { Some(seen.buckets.clone()) } else { None };
        let of = |bodies: &[ReportBody]| bodies.iter().filter_map(buckets).collect::<Vec<_>>();
        assert_eq!(of(&reported), [vec![], vec![400, 600], vec![600, 400]]);
        assert_eq!(trainers.metrics.trainer_reports_rejected_total.get(), 1);
        serving.await.unwrap();
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
        let own = Hello { run: Some(flexcomm_domain::RunId(2)), ..seen(0, 4) };
        assert_eq!(refusal(&mut receiver, &own).await, "reason 2");
    }

    /// Four times what the spool takes, while the controller stores nothing; then it stores what comes.
    #[tokio::test]
    async fn a_full_spool_loses_no_result_since_the_trainer_keeps_them() {
        const RESULTS: u64 = 4000;
        let dir = tempfile::tempdir().unwrap();
        let trainers = start(dir.path());
        let stop = watch::Sender::new(false);
        let (mut theirs, serving) = connect(&trainers, &seen(0, 4), &stop).await;
        let writing = tokio::spawn(async move {
            for step in 0..RESULTS {
                say(theirs.get_mut(), &applied(step)).await;
            }
            theirs
        });
        let began = Instant::now();
        until_waits(&trainers, 1).await;
        let lost = trainers.metrics.spool_refused_total.get();
        assert!(lost == 0 && !writing.is_finished(), "the trainer was read though there is no room: {lost} are lost");
        // A trainer that comes now is welcome, too.
        let (mut second, serving_second) = connect(&trainers, &seen(1, 4), &stop).await;
        assert!(matches!(answered(&mut second).await, ToTrainer::Welcome { .. }));
        until_waits(&trainers, 2).await;
        assert_eq!(ordered(&mut second).await, None);
        let decision = Some(merge::tests::decision(1, "topk@0.01/allgather"));
        trainers.orders(&JobOrders { job: "j".parse().unwrap(), decision, trial: None });
        assert_eq!(ordered(&mut second).await, Some(1), "orders do not wait for room");
        let (mut stored, mut announced) = (Vec::new(), 0);
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
                ReportBody::JobSeen(seen) => {
                    announced += u32::from(seen.rank == 1);
                    None
                }
                _ => None,
            }));
        }
        assert_eq!((stored, announced), ((0..RESULTS).collect::<Vec<_>>(), 1));
        assert_eq!(trainers.metrics.spool_refused_total.get(), 0);
        assert_eq!(trainers.metrics.spool_waits_total.get(), 2, "waits, not tries");
        drop((writing.await.unwrap(), second));
        serving.await.unwrap();
        serving_second.await.unwrap();
    }

    async fn until_waits(trainers: &Trainers, count: u64) {
        let began = Instant::now();
        while trainers.metrics.spool_waits_total.get() < count {
            assert!(began.elapsed() < Duration::from_secs(20), "nobody waits");
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
    }

    /// Results that a trainer has handed over to a session that waits for room: by the agent's end, or the trainer's.
    #[tokio::test]
    async fn what_was_sent_before_an_end_is_kept_though_the_spool_is_full() {
        for by_agent in [true, false] {
            let dir = tempfile::tempdir().unwrap();
            let trainers = start(dir.path());
            let stop = watch::Sender::new(false);
            let (mut theirs, serving) = connect(&trainers, &seen(0, 4), &stop).await;
            while trainers.reports.offer(ReportBody::JobSeen(seen(0, 4))).is_ok() {}
            for step in 0..50 {
                say(theirs.get_mut(), &applied(step)).await;
            }
            until_waits(&trainers, 1).await;
            if by_agent {
                stop.send_replace(true);
                trainers.reports.wake();
            } else {
                drop(theirs);
            }
            tokio::time::timeout(Duration::from_secs(20), serving).await.expect("the session goes on").unwrap();
            let bodies = bodies(&trainers);
            let steps =
                |body: &ReportBody| if let ReportBody::Applied(applied) = body { Some(applied.step) } else { None };
            assert_eq!(bodies.iter().filter_map(steps).collect::<Vec<_>>(), (0..50).collect::<Vec<_>>());
            let left = bodies.iter().filter(|body| matches!(body, ReportBody::JobLeft { .. })).count();
            assert_eq!(left, usize::from(!by_agent), "a trainer comes back to the next agent");
        }
    }
}
