//! Following the probe plan: echo to every peer, ICMP where that gets no answer, granted throughput tests one at a time, traces.

pub(crate) mod budget;
mod due;
pub mod grant;
pub(crate) mod links;
pub(crate) mod pings;

use crate::config::{Config, Secret};
use crate::metrics::Metrics;
use crate::reports::ReportLog;
use budget::Budget;
use flexcomm_probes::Token;
use flexcomm_probes::edge::{
    EchoEvent, EchoProber, EchoResponder, EchoSettings, MeasureError, SpawnError, ThroughputServer,
    measure_throughput_until, monotonic, trace_route,
};
use flexcomm_probes::throughput::{Plan, ThroughputResult};
use flexcomm_probes::trace::TracePlan;
use flexcomm_wire::{EchoPeer, PathReport, ProbePlan, ReportBody, ThroughputGrant, ThroughputReport};
use grant::{Failed, Prepared, Took};
use links::{Links, echo_addr};
use nix::time::{ClockId, clock_gettime};
use pings::Hosts;
use std::net::SocketAddr;
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};
use tokio::sync::{mpsc, watch};

/// How often it is looked whether a link's report is due.
pub const LOOK_EVERY: Duration = Duration::from_millis(200);
/// Grants that wait for their turn; the controller gives one per node at a time.
const MAX_WAITING: usize = 64;

/// Why probing could not start.
#[derive(Debug, thiserror::Error)]
pub enum ProbingError {
    /// The token is no token.
    #[error("use the token: {0}")]
    Token(#[from] flexcomm_probes::auth::TokenError),
    /// A probe's sockets.
    #[error("start {what}: {source}")]
    Spawn {
        /// Which.
        what: &'static str,
        /// Why.
        source: SpawnError,
    },
}

pub(crate) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Where the reconciler leaves the desired probes.
#[derive(Clone)]
pub(crate) struct DesiredProbes {
    links: Arc<Mutex<Links>>,
    plan: watch::Sender<ProbePlan>,
    grants: mpsc::Sender<(Instant, ThroughputGrant)>,
    metrics: Metrics,
}

impl DesiredProbes {
    pub(crate) fn plan(&self, plan: ProbePlan) {
        // Here and not where the plan is followed: a grant of the same orders names a peer of this plan.
        let echo_interval = Duration::from_millis(plan.echo_interval_ms);
        lock(&self.links).set_peers((&plan.peers, echo_interval), Instant::now());
        self.plan.send_replace(plan);
    }

    pub(crate) fn grant(&self, grant: ThroughputGrant) {
        if self.grants.try_send((Instant::now(), grant)).is_err() {
            self.metrics.grants_unused_total.inc();
        }
    }
}

/// All probing of one node.
pub(crate) struct Probing {
    links: Arc<Mutex<Links>>,
    responder: EchoResponder,
    server: ThroughputServer,
    prober: EchoProber,
    events: mpsc::Receiver<EchoEvent>,
    plan: watch::Receiver<ProbePlan>,
    grants: mpsc::Receiver<(Instant, ThroughputGrant)>,
    desired: DesiredProbes,
    hosts: Arc<Mutex<Hosts>>,
    token: Token,
    reports: Arc<ReportLog>,
    metrics: Metrics,
    share: f64,
    budget_file: PathBuf,
    interval: Duration,
}

fn token(secret: &Secret) -> Result<Token, ProbingError> {
    Ok(Token::new(secret.reveal())?)
}

impl Probing {
    /// Binds the responder and the server.
    pub(crate) fn start(config: &Config, reports: Arc<ReportLog>, metrics: Metrics) -> Result<Self, ProbingError> {
        let token = token(&config.token)?;
        let spawn = |what| move |source| ProbingError::Spawn { what, source };
        let echo = SocketAddr::new(config.listen, config.echo_port);
        let responder = EchoResponder::spawn(echo, &token).map_err(spawn("the echo responder"))?;
        let tcp = SocketAddr::new(config.listen, config.throughput_port);
        let server = ThroughputServer::spawn(tcp, &token).map_err(spawn("the throughput server"))?;
        let (prober, events) = EchoProber::spawn(&token, EchoSettings::default()).map_err(spawn("the echo prober"))?;
        let nobody = ProbePlan { echo_interval_ms: 1000, trace_interval_s: 0, peers: Vec::new() };
        let (plan_in, plan) = watch::channel(nobody);
        let (grants_in, grants) = mpsc::channel(MAX_WAITING);
        let links = Arc::new(Mutex::new(Links::new(Instant::now())));
        let desired =
            DesiredProbes { links: links.clone(), plan: plan_in, grants: grants_in, metrics: metrics.clone() };
        Ok(Self {
            links,
            responder,
            server,
            prober,
            events,
            plan,
            grants,
            desired,
            hosts: Arc::new(Mutex::new(Hosts::of(config))),
            token,
            reports,
            metrics,
            share: config.probe_share,
            budget_file: config.state_dir.join("probe-budget"),
            interval: config.report_interval,
        })
    }

    /// The ports that were bound: UDP, TCP.
    pub(crate) fn ports(&self) -> (u16, u16) {
        (self.responder.local_addr().port(), self.server.local_addr().port())
    }

    pub(crate) fn desired(&self) -> DesiredProbes {
        self.desired.clone()
    }

    /// Hosts that are no nodes.
    pub(crate) fn hosts(&self) -> Arc<Mutex<Hosts>> {
        self.hosts.clone()
    }

    /// Probes until `stop`.
    pub(crate) async fn run(self, mut stop: watch::Receiver<bool>) {
        let Self { links, responder, server, prober, events, plan, grants, hosts, token, reports, metrics, .. } = self;
        let quit = Arc::new(AtomicBool::new(false));
        let tests = Tests {
            links: links.clone(),
            token,
            reports: reports.clone(),
            metrics: metrics.clone(),
            budget: Budget::open(self.budget_file, self.share, 0.0),
            began: Instant::now(),
            quit: quit.clone(),
        };
        let tests = tokio::spawn(tests.run(grants));
        let pings = (links.clone(), metrics.clone(), quit.clone());
        let watch = move || pings::watch(&pings.0, &hosts, &pings.1, &pings.2);
        let thread = std::thread::Builder::new().name("flexcomm-ping".into()).spawn(watch);
        let why = |error: &std::io::Error| tracing::warn!("nothing is pinged: failed to start a thread: {error}");
        let pings = Pings { quit: quit.clone(), thread: thread.inspect_err(why).ok() };
        let traces = tokio::spawn(trace(links.clone(), plan.clone(), reports.clone(), metrics.clone(), quit.clone()));
        let mut echo = Echo { links, prober, events, plan, reports, metrics, interval: self.interval };
        echo.follow();
        let mut look = tokio::time::interval(LOOK_EVERY);
        look.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
        loop {
            tokio::select! {
                _ = stop.changed() => break,
                _ = look.tick() => echo.look(),
                changed = echo.plan.changed() => match changed {
                    Ok(()) => echo.follow(),
                    Err(_) => break,
                },
            }
        }
        quit.store(true, Ordering::Relaxed);
        tests.abort();
        traces.abort();
        let _ = tokio::task::spawn_blocking(move || drop(pings)).await;
        drop((responder, server));
    }
}

/// The thread that pings; ends when it goes, also when the task that holds it panics: it would outlive all.
struct Pings {
    quit: Arc<AtomicBool>,
    thread: Option<std::thread::JoinHandle<()>>,
}

impl Drop for Pings {
    fn drop(&mut self) {
        self.quit.store(true, Ordering::Relaxed);
        if let Some(thread) = self.thread.take() {
            thread.thread().unpark();
            // A panic there was reported when it happened.
            let _ = thread.join();
        }
    }
}

struct Echo {
    links: Arc<Mutex<Links>>,
    prober: EchoProber,
    events: mpsc::Receiver<EchoEvent>,
    plan: watch::Receiver<ProbePlan>,
    reports: Arc<ReportLog>,
    metrics: Metrics,
    interval: Duration,
}

impl Echo {
    fn follow(&mut self) {
        let plan = self.plan.borrow_and_update().clone();
        self.prober.set_interval(plan.echo_interval_ms as f64 * 1e-3);
        self.prober.set_peers(&plan.peers.iter().map(echo_addr).collect::<Vec<_>>());
    }

    /// Takes in what came since the last look, and reports what is due. To be woken by every echo would cost more than all else that
    /// an idle agent does.
    fn look(&mut self) {
        let (losses, now, clock) = (self.prober.losses(), Instant::now(), monotonic());
        let mut links = lock(&self.links);
        while let Ok(event) = self.events.try_recv() {
            match event.sample {
                Some(sample) => {
                    self.metrics.echo_answered_total.inc();
                    let age = Duration::from_secs_f64(clock.since(event.at).max(0.0));
                    links.echo(event.peer, sample.rtt_s, now.checked_sub(age).unwrap_or(now));
                }
                None => self.metrics.echo_lost_total.inc(),
            }
        }
        let due = links.reports(&losses, now, self.interval);
        drop(links);
        due.into_iter().for_each(|report| self.reports.push(ReportBody::Link(report)));
    }
}

/// Runs granted tests, one after the other.
struct Tests {
    links: Arc<Mutex<Links>>,
    token: Token,
    reports: Arc<ReportLog>,
    metrics: Metrics,
    budget: Budget,
    began: Instant,
    quit: Arc<AtomicBool>,
}

/// Processor time of this thread; none where the system does not tell.
fn thread_cpu() -> Duration {
    clock_gettime(ClockId::CLOCK_THREAD_CPUTIME_ID).map_or(Duration::ZERO, Duration::from)
}

/// Without a connection that knows the token nothing was sent; else anything may have been.
fn failed(error: MeasureError, budget_bytes: u64) -> Failed {
    let none = matches!(error, MeasureError::Connect { .. } | MeasureError::Refused(_) | MeasureError::Impostor);
    Failed { why: error.to_string(), bytes: if none { 0 } else { budget_bytes } }
}

impl Tests {
    async fn run(mut self, mut grants: mpsc::Receiver<(Instant, ThroughputGrant)>) {
        while let Some((received, grant)) = grants.recv().await {
            let report = match self.prepare(received, &grant) {
                Ok(Prepared { peer, plan, held }) => {
                    self.store().await;
                    let (outcome, took) = self.measure(peer, plan).await;
                    let report = grant::report(&grant, &outcome, took);
                    grant::settle(&report, held, &mut lock(&self.links), &mut self.budget.account);
                    self.store().await;
                    report
                }
                Err(failed) => {
                    self.metrics.grants_unused_total.inc();
                    grant::report(&grant, &Err(failed), None)
                }
            };
            self.finish_test(report);
        }
    }

    /// Whether and how a grant is used.
    fn prepare(&mut self, received: Instant, grant: &ThroughputGrant) -> Result<Prepared, Failed> {
        let now_s = self.began.elapsed().as_secs_f64();
        grant::prepare(grant, received.elapsed(), &lock(&self.links), &mut self.budget.account, now_s)
    }

    async fn measure(&self, peer: EchoPeer, plan: Plan) -> (Result<ThroughputResult, Failed>, Option<Took>) {
        let (token, quit) = (self.token.clone(), self.quit.clone());
        let addr = SocketAddr::new(peer.addr, peer.throughput_port);
        let measure = move || {
            let (began, cpu) = (Instant::now(), thread_cpu());
            let measured = measure_throughput_until(addr, &token, &plan, &quit);
            (measured, Took { wall: began.elapsed(), cpu: thread_cpu().saturating_sub(cpu) })
        };
        match tokio::task::spawn_blocking(measure).await {
            Ok((measured, took)) => (measured.map_err(|error| failed(error, plan.budget_bytes())), Some(took)),
            Err(error) => (Err(Failed { why: error.to_string(), bytes: plan.budget_bytes() }), None),
        }
    }

    fn finish_test(&self, report: ThroughputReport) {
        match &report.error {
            None => self.metrics.throughput_done_total.inc(),
            Some(error) => {
                self.metrics.throughput_failed_total.inc();
                tracing::debug!(peer = %report.peer, error, "throughput test failed");
            }
        }
        self.metrics.probe_bytes_total.inc_by(report.bytes);
        self.reports.push(ReportBody::Throughput(report));
    }

    /// Some milliseconds, and once in many seconds: the test waits for it on purpose.
    async fn store(&self) {
        let budget = self.budget.clone();
        match tokio::task::spawn_blocking(move || budget.store()).await {
            Ok(Ok(())) => {}
            Ok(Err(error)) => tracing::warn!("failed to store the account of probing: {error}"),
            Err(error) => tracing::warn!("failed to store the account of probing: {error}"),
        }
    }
}

/// Traces the peers one after the other, each once per interval.
async fn trace(
    links: Arc<Mutex<Links>>,
    mut plan: watch::Receiver<ProbePlan>,
    reports: Arc<ReportLog>,
    metrics: Metrics,
    quit: Arc<AtomicBool>,
) {
    loop {
        let interval_s = plan.borrow_and_update().trace_interval_s;
        let peers = lock(&links).peers();
        if interval_s == 0 || peers.is_empty() {
            if plan.changed().await.is_err() {
                return;
            }
            continue;
        }
        let pause = Duration::from_secs(interval_s) / peers.len() as u32;
        for peer in peers {
            let (addr, quit) = (peer.addr, quit.clone());
            let traced = tokio::task::spawn_blocking(move || trace_route(addr, &TracePlan::default(), &quit)).await;
            match traced {
                Ok(Ok(path)) if path.reached => {
                    if let Some(hops) = lock(&links).path(&peer.node, path.addresses()) {
                        reports.push(ReportBody::Path(PathReport { peer: peer.node, hops }));
                    }
                }
                Ok(Ok(_)) | Err(_) => metrics.trace_errors_total.inc(),
                Ok(Err(error)) => {
                    metrics.trace_errors_total.inc();
                    tracing::debug!(peer = %peer.node, "failed to trace: {error}");
                }
            }
            tokio::select! {
                () = tokio::time::sleep(pause) => {}
                changed = plan.changed() => match changed {
                    Ok(()) => break,
                    Err(_) => return,
                },
            }
        }
    }
}

#[cfg(test)]
mod tests;
