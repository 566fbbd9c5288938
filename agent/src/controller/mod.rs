//! The connection to the controller: register, then heartbeats, orders and deliveries at the same time until one of
//! them finds that the registration is no longer worth anything; then again, for ever. Every try looks anew.

mod backoff;
mod client;
pub mod pace;
mod sse;

use crate::clock::now_us;
use crate::config::Config;
use crate::instance::Instance;
use crate::metrics::Metrics;
use crate::probing::lock;
use crate::probing::pings::Hosts;
use crate::reconciler::Reconciler;
use crate::reports::ReportLog;
use crate::spool::format::Record;
use backoff::Backoff;
use client::{CallError, Client};
use flexcomm_wire::{Heartbeat, MAX_BATCH, PROTOCOL, Register};
use rand::SeedableRng;
use rand::rngs::StdRng;
use reqwest::StatusCode;
use std::net::{IpAddr, SocketAddr, ToSocketAddrs, UdpSocket};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};
use tokio::sync::watch;

/// Most bytes of reports in one batch; the controller reads at most 16 MiB.
const BATCH_BYTES: usize = 4 * 1024 * 1024;
/// What is still spooled when the agent ends is delivered if that takes no longer than this.
const LAST_DELIVERY: Duration = Duration::from_secs(1);

pub(crate) use client::{CallError as ControllerError, causes};

/// What the connection works with.
pub(crate) struct Link {
    client: Client,
    config: Config,
    ports: (u16, u16),
    instance: Arc<Instance>,
    reconciler: Arc<Reconciler>,
    hosts: Arc<Mutex<Hosts>>,
    reports: Arc<ReportLog>,
    /// When the newest delivery began that the controller took.
    delivered: Mutex<Option<Instant>>,
    metrics: Metrics,
}

/// Why a registration is no longer worth anything.
enum Lost {
    /// No answer, or one that makes no sense.
    Away(CallError),
    /// The controller does not know this registration.
    Unknown(CallError),
}

fn lost(error: CallError) -> Lost {
    match error.status() {
        Some(StatusCode::NOT_FOUND | StatusCode::CONFLICT) => Lost::Unknown(error),
        _ => Lost::Away(error),
    }
}

/// What a controller that is there holds against this agent, with the remedy. Waiting does not mend it: a wrong token,
/// a name that another agent holds, a protocol of another version.
fn refusal(error: &CallError) -> Option<String> {
    let CallError::Refused { status, detail, .. } = error else { return None };
    let passing = [StatusCode::REQUEST_TIMEOUT, StatusCode::TOO_MANY_REQUESTS];
    if !status.is_client_error() || passing.contains(status) {
        return None;
    }
    let remedy = match *status {
        StatusCode::UNAUTHORIZED => " (check --token-file)",
        StatusCode::CONFLICT => " (check --node)",
        StatusCode::NOT_FOUND => " (check --controller)",
        _ => "",
    };
    Some(format!("{status}: {detail}{remedy}"))
}

/// Logs a state once, however often it is seen.
#[derive(Default)]
struct State {
    logged: Option<String>,
}

impl State {
    fn up(&mut self, controller: &str) {
        if self.logged.take().is_some() {
            tracing::info!(controller, "connected");
        }
    }

    fn down(&mut self, error: &CallError) {
        // The kind of failure, not its every word: ports and times change from try to try.
        let kind = match error {
            CallError::Unreachable { .. } => "unreachable".to_owned(),
            CallError::Garbled { .. } => "garbled".to_owned(),
            CallError::Refused { status, .. } => status.to_string(),
        };
        if self.logged.as_ref() == Some(&kind) {
            return;
        }
        match refusal(error) {
            Some(why) => tracing::error!("the controller refuses this agent, reports are kept and tries go on: {why}"),
            None => tracing::warn!("the controller is away, reports are kept and tries go on: failed to {error}"),
        }
        self.logged = Some(kind);
    }
}

impl Link {
    pub(crate) fn new(
        config: &Config,
        (ports, hosts, instance): ((u16, u16), Arc<Mutex<Hosts>>, Instance),
        reconciler: Arc<Reconciler>,
        reports: Arc<ReportLog>,
        metrics: Metrics,
    ) -> Result<Self, CallError> {
        let (client, instance) = (Client::new(config)?, Arc::new(instance));
        Ok(Self {
            client,
            config: config.clone(),
            ports,
            instance,
            reconciler,
            hosts,
            reports,
            delivered: Mutex::default(),
            metrics,
        })
    }

    /// Keeps the connection until `stop`.
    pub(crate) async fn run(self, mut stop: watch::Receiver<bool>) {
        tokio::select! {
            _ = stop.changed() => {}
            () = self.keep() => {}
        }
        if self.metrics.controller_connected.get() == 1 {
            let _ = tokio::time::timeout(LAST_DELIVERY, self.deliver_waiting(MAX_BATCH)).await;
        }
        self.metrics.controller_connected.set(0);
    }

    async fn keep(&self) {
        let (mut backoff, mut rng) = (Backoff::default(), StdRng::from_os_rng());
        let mut state = State { logged: Some(String::new()) };
        loop {
            let error = match self.register().await {
                Ok(heartbeat) => {
                    state.up(self.config.controller.as_str());
                    self.metrics.controller_connected.set(1);
                    let lost = self.registered(heartbeat, &mut backoff).await;
                    self.metrics.controller_connected.set(0);
                    match lost {
                        Lost::Away(error) => error,
                        Lost::Unknown(error) => {
                            tracing::info!("registering again: {error}");
                            tokio::time::sleep(backoff.next(&mut rng)).await;
                            continue;
                        }
                    }
                }
                Err(error) => error,
            };
            match refusal(&error) {
                Some(_) => self.metrics.controller_refusals_total.inc(),
                None => self.metrics.controller_errors_total.inc(),
            }
            self.reconciler.controller_away();
            state.down(&error);
            tokio::time::sleep(backoff.next(&mut rng)).await;
        }
    }

    async fn register(&self) -> Result<Duration, CallError> {
        let unreachable = |why| CallError::Unreachable { what: "register", why };
        let addr = self.own_address().await.map_err(unreachable)?;
        let register = Register {
            protocol: PROTOCOL,
            node: self.config.node.clone(),
            instance: self.instance.number,
            previous: self.instance.previous.clone(),
            addr,
            echo_port: self.ports.0,
            throughput_port: self.ports.1,
            may_shape: self.config.shaping.allow,
            software: env!("CARGO_PKG_VERSION").to_owned(),
        };
        let registered = self.client.register(&register).await?;
        self.confirm().await;
        // The disk; a moment, and nothing can be delivered before it is done.
        self.reports.registered(registered.acked_seq).map_err(|error| unreachable(error.to_string()))?;
        self.metrics.registrations_total.inc();
        self.reconciler.registered();
        Ok(pace::heartbeat(&registered))
    }

    async fn confirm(&self) {
        let instance = self.instance.clone();
        match tokio::task::spawn_blocking(move || instance.confirm()).await {
            Ok(Ok(())) => {}
            Ok(Err(error)) => tracing::warn!("failed to note that this instance registered: {error}"),
            Err(error) => tracing::warn!("failed to note that this instance registered: {error}"),
        }
    }

    /// Where peers reach this node: as configured, else the address that packets to the controller leave from.
    async fn own_address(&self) -> Result<IpAddr, String> {
        if let Some(addr) = self.config.advertise {
            return Ok(addr);
        }
        if !self.config.listen.is_unspecified() {
            return Ok(self.config.listen);
        }
        let controller = self.config.controller.clone();
        let found = tokio::task::spawn_blocking(move || {
            let to = resolve(&controller)?;
            let any: SocketAddr = if to.is_ipv6() { ([0u16; 8], 0).into() } else { ([0u8; 4], 0).into() };
            // Connecting a UDP socket sends nothing; the kernel only looks up the route.
            let socket = UdpSocket::bind(any).and_then(|socket| socket.connect(to).map(|()| socket));
            socket.and_then(|socket| socket.local_addr()).map_err(|error| format!("no route to {to}: {error}"))
        });
        found.await.map_err(|error| error.to_string())?.map(|addr| addr.ip())
    }

    async fn registered(&self, heartbeat: Duration, backoff: &mut Backoff) -> Lost {
        tokio::select! {
            lost = self.beat(heartbeat, backoff) => lost,
            lost = self.follow_orders() => lost,
            lost = self.deliver() => lost,
        }
    }

    async fn beat(&self, every: Duration, backoff: &mut Backoff) -> Lost {
        let mut tick = tokio::time::interval(every);
        tick.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
        let mut beaten = None::<Instant>;
        loop {
            tick.tick().await;
            let since = |at: Instant| at.elapsed();
            if !pace::is_beat_due(beaten.map(since), lock(&self.delivered).map(since), every) {
                continue;
            }
            beaten = Some(Instant::now());
            let beat = Heartbeat {
                instance: self.instance.number,
                now_us: now_us(),
                orders_epoch: self.reconciler.epoch(),
                spooled: self.reports.waiting(),
                hosts: lock(&self.hosts).seen(),
            };
            match self.client.heartbeat(&beat).await {
                Ok(()) => backoff.reset(),
                Err(error) => return lost(error),
            }
        }
    }

    /// The stream, and polling while there is none.
    async fn follow_orders(&self) -> Lost {
        let (mut backoff, mut rng) = (Backoff::default(), StdRng::from_os_rng());
        loop {
            let error = match self.client.stream().await {
                Ok(mut stream) => {
                    self.metrics.stream_connects_total.inc();
                    loop {
                        match stream.next().await {
                            Ok(orders) => {
                                backoff.reset();
                                self.reconciler.orders(orders);
                            }
                            Err(error) => break error,
                        }
                    }
                }
                Err(error) => error,
            };
            self.count_garbled(&error);
            tracing::debug!("failed to {error}");
            if error.status() == Some(StatusCode::NOT_FOUND) {
                return Lost::Unknown(error);
            }
            match self.client.orders().await {
                Ok(orders) => {
                    self.metrics.orders_polled_total.inc();
                    self.reconciler.orders(orders);
                }
                Err(error) => self.count_garbled(&error),
            }
            tokio::time::sleep(backoff.next(&mut rng)).await;
        }
    }

    fn count_garbled(&self, error: &CallError) {
        if matches!(error, CallError::Garbled { .. }) {
            self.metrics.orders_invalid_total.inc();
            tracing::warn!("orders were rejected: failed to {error}");
        }
    }

    async fn deliver(&self) -> Lost {
        let (mut backoff, mut rng) = (Backoff::default(), StdRng::from_os_rng());
        let mut most = MAX_BATCH;
        loop {
            match self.deliver_waiting(most).await {
                Ok(()) => {
                    let delivered = Instant::now();
                    backoff.reset();
                    most = MAX_BATCH;
                    self.reports.new.notified().await;
                    tokio::time::sleep(pace::gather(delivered.elapsed())).await;
                }
                Err(Undelivered::TooMuch) => most = (most / 2).max(1),
                Err(Undelivered::Call(error)) => match lost(error) {
                    Lost::Unknown(error) => return Lost::Unknown(error),
                    // The heartbeat finds out whether the controller is away.
                    Lost::Away(error) => {
                        tracing::debug!("failed to {error}");
                        tokio::time::sleep(backoff.next(&mut rng)).await;
                    }
                },
            }
        }
    }

    /// Delivers, in order, until nothing waits.
    async fn deliver_waiting(&self, most: usize) -> Result<(), Undelivered> {
        loop {
            let batch = self.reports.batch(most, BATCH_BYTES).map_err(spool_error)?;
            if batch.is_empty() {
                return Ok(());
            }
            self.deliver_batch(&batch).await?;
        }
    }

    async fn deliver_batch(&self, batch: &[Record]) -> Result<(), Undelivered> {
        let payloads: Vec<&[u8]> = batch.iter().map(|record| record.payload.as_slice()).collect();
        let (first, last) = (batch[0].seq, batch[batch.len() - 1].seq);
        let began = Instant::now();
        match self.client.reports(self.instance.number, &payloads).await {
            Ok(ack) if ack.acked_seq >= first => {
                *lock(&self.delivered) = Some(began);
                self.metrics.reports_rejected_total.inc_by(ack.rejected);
                // Why a run is refused is logged where its trainers are.
                ack.refused.into_iter().for_each(|run| self.reconciler.refuse_run(run));
                if let Some(reason) = ack.first_reason {
                    tracing::warn!(count = ack.rejected, reason, "the controller rejected reports");
                }
                let stored = ack.acked_seq.min(last);
                let delivered = batch.iter().filter(|record| record.seq <= stored).count() as u64;
                self.metrics.reports_delivered_total.inc_by(delivered.saturating_sub(ack.rejected));
                self.reports.ack(stored).map_err(spool_error)
            }
            Ok(ack) => {
                let why = format!("it acknowledges report {}, the oldest sent was {first}", ack.acked_seq);
                Err(Undelivered::Call(CallError::Garbled { what: "deliver reports", why }))
            }
            Err(error) if is_the_batchs_fault(&error) => {
                if batch.len() > 1 {
                    return Err(Undelivered::TooMuch);
                }
                // One report that the controller cannot even read must not hold up all others for ever.
                tracing::error!(seq = first, "a report was rejected: failed to {error}");
                self.metrics.reports_rejected_total.inc();
                self.reports.ack(first).map_err(spool_error)
            }
            Err(error) => Err(Undelivered::Call(error)),
        }
    }
}

enum Undelivered {
    Call(CallError),
    /// The controller refuses the batch as such: a smaller one tells which report it is.
    TooMuch,
}

fn spool_error(error: crate::spool::SpoolError) -> Undelivered {
    Undelivered::Call(CallError::Garbled { what: "deliver reports", why: error.to_string() })
}

fn is_the_batchs_fault(error: &CallError) -> bool {
    let faults = [StatusCode::BAD_REQUEST, StatusCode::PAYLOAD_TOO_LARGE, StatusCode::UNPROCESSABLE_ENTITY];
    error.status().is_some_and(|status| faults.contains(&status))
}

/// The controller's address, for the route to it and to keep it out of a shaped class. Blocks on the name service.
pub(crate) fn resolve(controller: &reqwest::Url) -> Result<SocketAddr, String> {
    let host = controller.host_str().unwrap_or_default().trim_matches(['[', ']']);
    let port = controller.port_or_known_default().unwrap_or(80);
    let mut found = (host, port).to_socket_addrs().map_err(|error| format!("look up {host}: {error}"))?;
    found.next().ok_or_else(|| format!("look up {host}: it has no address"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_refusal_is_told_from_absence_with_its_remedy() {
        let what = "register";
        let refused = |status: u16| {
            let status = StatusCode::from_u16(status).unwrap();
            refusal(&CallError::Refused { what, status, detail: "because".to_owned() })
        };
        assert_eq!(refused(401).unwrap(), "401 Unauthorized: because (check --token-file)");
        assert_eq!(refused(409).unwrap(), "409 Conflict: because (check --node)");
        assert_eq!(refused(422).unwrap(), "422 Unprocessable Entity: because");
        for away in [408, 429, 500, 502, 503] {
            assert_eq!(refused(away), None, "{away}");
        }
        assert_eq!(refusal(&CallError::Unreachable { what, why: "no route".to_owned() }), None);
        assert_eq!(refusal(&CallError::Garbled { what, why: "not JSON".to_owned() }), None);
    }
}
