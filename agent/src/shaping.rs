//! Following shape orders: when to apply, renew and put back. tc itself is in [`crate::tc`].

use crate::config::Config;
use crate::metrics::Metrics;
use crate::reports::ReportLog;
use crate::tc::{Shape, ShapeError, Shaper, TcConfig};
use flexcomm_domain::{Bandwidth, Invalid, Seconds};
use flexcomm_wire::{ReportBody, ShapeOrder, ShapeReport};
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::{Duration, Instant};
use tokio::sync::watch;

/// How often a link that is shaped is looked at: a guardian that was killed is replaced within this time, in which
/// only the other one watches.
const LOOK: Duration = Duration::from_millis(100);

/// What the controller wants, and whether it is there.
#[derive(Debug, Clone, Default, PartialEq)]
pub(crate) struct DesiredShape {
    pub(crate) order: Option<ShapeOrder>,
    /// Since when the controller does not answer.
    pub(crate) away_since: Option<Instant>,
}

/// What to do next.
#[derive(Debug, Clone, PartialEq)]
enum Step {
    Nothing,
    Apply(ShapeOrder),
    Renew,
    Restore,
}

/// What was done.
#[derive(Debug, Default)]
struct Follower {
    /// The order in force.
    in_force: Option<ShapeOrder>,
    /// An order that was refused; it is not tried again until it changes.
    refused: Option<ShapeOrder>,
}

impl Follower {
    fn next(&self, desired: &DesiredShape, now: Instant, away_most: Duration) -> Step {
        let away = desired.away_since.is_some_and(|since| now.duration_since(since) >= away_most);
        let wanted = desired.order.as_ref().filter(|_| !away);
        match (&self.in_force, wanted) {
            (Some(_), None) => Step::Restore,
            (None, None) => Step::Nothing,
            (in_force, Some(order)) => match in_force {
                _ if self.refused.as_ref() == Some(order) => match in_force {
                    Some(_) => Step::Restore,
                    None => Step::Nothing,
                },
                Some(same) if same == order => Step::Renew,
                _ => Step::Apply(order.clone()),
            },
        }
    }
}

/// What the shaper is asked to do; a seam for tests, since tc needs root and modules.
pub(crate) trait Tc: Send + 'static {
    fn apply(&mut self, shape: &Shape) -> Result<(), ShapeError>;
    fn renew(&mut self) -> Result<(), ShapeError>;
    fn restore(&mut self) -> Result<(), ShapeError>;
}

/// The real one, on the one configured interface.
pub(crate) struct OneInterface {
    shaper: Shaper,
    interface: Option<String>,
}

impl OneInterface {
    pub(crate) fn new(config: &Config, controller: Option<SocketAddr>) -> Result<Self, ShapeError> {
        let shaping = &config.shaping;
        let shaper = Shaper::new(TcConfig {
            allow: shaping.allow,
            interfaces: shaping.interface.iter().cloned().collect(),
            allow_default_route: shaping.allow_default_route,
            lease: shaping.lease,
            state_dir: config.state_dir.clone(),
            controller,
            echo_port: config.echo_port,
            guardian: crate::tc::GuardianCommand::default(),
        })?;
        Ok(Self { shaper, interface: shaping.interface.clone() })
    }
}

impl Tc for OneInterface {
    fn apply(&mut self, shape: &Shape) -> Result<(), ShapeError> {
        // Without an interface the shaper refuses with the remedy.
        self.shaper.apply(self.interface.as_deref().unwrap_or("no interface"), shape)
    }
    fn renew(&mut self) -> Result<(), ShapeError> {
        self.shaper.renew()
    }
    fn restore(&mut self) -> Result<(), ShapeError> {
        self.shaper.restore()
    }
}

fn shape(order: &ShapeOrder) -> Result<Shape, Invalid> {
    order.check()?;
    Ok(Shape {
        delay: Seconds::new(order.latency_us * 1e-6)?,
        jitter: Seconds::new(order.jitter_us * 1e-6)?,
        loss: order.loss,
        rate: Bandwidth::new(order.bandwidth_bps)?,
    })
}

/// Runs on a thread of its own and follows the desired shape.
struct Worker<T> {
    tc: T,
    follower: Follower,
    reports: Arc<ReportLog>,
    metrics: Metrics,
    away_most: Duration,
}

impl<T: Tc> Worker<T> {
    /// Whether there is more to do before the desired shape changes.
    fn step(&mut self, desired: &DesiredShape, now: Instant) -> bool {
        let step = self.follower.next(desired, now, self.away_most);
        let busy = step != Step::Nothing;
        match step {
            Step::Nothing => {}
            Step::Apply(order) => self.apply(order),
            Step::Renew => self.renew(),
            Step::Restore => {
                if desired.order.is_some() && self.follower.refused.is_none() {
                    tracing::warn!("the controller is away: the link is put back");
                    self.metrics.shape_restores_total.inc();
                }
                self.restore();
            }
        }
        self.metrics.shape_in_force.set(i64::from(self.follower.in_force.is_some()));
        busy
    }

    fn apply(&mut self, order: ShapeOrder) {
        let outcome = match shape(&order) {
            Ok(shape) => self.tc.apply(&shape).map_err(|error| format!("failed to {error}")),
            Err(error) => Err(error.to_string()),
        };
        let error = outcome.err();
        self.reports.push(ReportBody::Shape(ShapeReport { id: order.id, error: error.clone() }));
        match error {
            None => {
                tracing::info!(
                    id = order.id,
                    bandwidth_bps = order.bandwidth_bps,
                    latency_us = order.latency_us,
                    "shaped"
                );
                (self.follower.in_force, self.follower.refused) = (Some(order), None);
            }
            Some(error) => {
                self.metrics.shape_errors_total.inc();
                tracing::error!(id = order.id, "shape refused: {error}");
                // What was in force before is no longer wanted; the next step puts the link back.
                self.follower.refused = Some(order);
            }
        }
    }

    fn renew(&mut self) {
        match self.tc.renew() {
            Ok(()) => {}
            Err(error @ ShapeError::LeaseLost { .. }) => {
                self.metrics.shape_restores_total.inc();
                tracing::warn!("failed to {error}");
                // The order stands: the next step applies it again.
                self.follower.in_force = None;
            }
            Err(error) => {
                self.metrics.shape_errors_total.inc();
                tracing::error!("failed to {error}");
            }
        }
    }

    fn restore(&mut self) {
        match self.tc.restore() {
            Ok(()) => self.follower.in_force = None,
            Err(error) => {
                // The guardian goes on trying, and so does the next step.
                self.metrics.shape_errors_total.inc();
                tracing::error!("failed to {error}");
            }
        }
    }
}

/// Where the outcome goes.
pub(crate) struct Sinks {
    pub(crate) reports: Arc<ReportLog>,
    pub(crate) metrics: Metrics,
}

/// Follows `changes` of the desired shape until `stop`, then puts the link back. The settings are the lease and how long
/// the controller may be away.
pub(crate) async fn run(
    tc: impl Tc,
    (lease, away_most): (Duration, Duration),
    Sinks { reports, metrics }: Sinks,
    mut changes: watch::Receiver<DesiredShape>,
    mut stop: watch::Receiver<bool>,
) {
    let mut worker = Worker { tc, follower: Follower::default(), reports, metrics, away_most };
    let mut tick = tokio::time::interval((lease / 3).min(LOOK));
    tick.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
    let (mut open, mut busy) = (true, true);
    while open {
        tokio::select! {
            _ = stop.changed() => open = false,
            _ = tick.tick(), if busy => {}
            changed = changes.changed() => open = changed.is_ok(),
        }
        let desired = changes.borrow_and_update().clone();
        let stepped = tokio::task::spawn_blocking(move || {
            let busy = open && worker.step(&desired, Instant::now());
            if !open {
                worker.restore();
            }
            (worker, busy)
        });
        match stepped.await {
            Ok(back) => (worker, busy) = back,
            Err(error) => {
                // The shaper was dropped with the panic, and that has put the link back.
                tracing::error!("shaping ended: {error}");
                return;
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn order(id: u64) -> ShapeOrder {
        ShapeOrder { id, latency_us: 1000.0, jitter_us: 0.0, loss: 0.0, bandwidth_bps: 1e7 }
    }

    #[derive(Default)]
    struct Fake {
        calls: Vec<&'static str>,
        lose_lease: bool,
        refuse: bool,
    }

    impl Tc for Fake {
        fn apply(&mut self, _: &Shape) -> Result<(), ShapeError> {
            self.calls.push("apply");
            if self.refuse { Err(ShapeError::NotAllowed { iface: "eth9".into() }) } else { Ok(()) }
        }
        fn renew(&mut self) -> Result<(), ShapeError> {
            self.calls.push("renew");
            if std::mem::take(&mut self.lose_lease) { Err(ShapeError::LeaseLost { ifaces: vec![] }) } else { Ok(()) }
        }
        fn restore(&mut self) -> Result<(), ShapeError> {
            self.calls.push("restore");
            Ok(())
        }
    }

    fn worker(dir: &tempfile::TempDir) -> Worker<Fake> {
        let metrics = Metrics::new().unwrap();
        let spool = crate::spool::Spool::open(dir.path(), 1 << 20).unwrap();
        let reports = ReportLog::new(spool, metrics.clone());
        let away_most = Duration::from_secs(60);
        Worker { tc: Fake::default(), follower: Follower::default(), reports, metrics, away_most }
    }

    fn shape_reports(worker: &Worker<Fake>) -> Vec<ShapeReport> {
        let batch = worker.reports.batch(100, usize::MAX).unwrap();
        let body = |r: &crate::spool::format::Record| {
            serde_json::from_slice::<flexcomm_wire::Report>(&r.payload).unwrap().body
        };
        let shapes = batch.iter().map(body).filter_map(|body| match body {
            ReportBody::Shape(shape) => Some(shape),
            _ => None,
        });
        shapes.collect()
    }

    #[test]
    fn orders_are_applied_renewed_and_put_back() {
        let dir = tempfile::tempdir().unwrap();
        let (mut worker, now) = (worker(&dir), Instant::now());
        let mut desired = DesiredShape::default();
        assert!(!worker.step(&desired, now), "nothing is shaped: the next change of the desired shape is early enough");
        desired.order = Some(order(1));
        worker.step(&desired, now);
        assert!(worker.step(&desired, now), "to be renewed again");
        desired.order = Some(order(2));
        worker.step(&desired, now);
        desired.order = None;
        worker.step(&desired, now);
        assert!(!worker.step(&desired, now));
        assert_eq!(worker.tc.calls, ["apply", "renew", "apply", "restore"]);
        let expected: Vec<_> = [1, 2].map(|id| ShapeReport { id, error: None }).into();
        assert_eq!(shape_reports(&worker), expected);
    }

    #[test]
    fn a_controller_that_stays_away_takes_its_shape_along() {
        let dir = tempfile::tempdir().unwrap();
        let (mut worker, now) = (worker(&dir), Instant::now());
        let mut desired = DesiredShape { order: Some(order(1)), away_since: Some(now) };
        worker.step(&desired, now + Duration::from_secs(59));
        worker.step(&desired, now + Duration::from_secs(60));
        worker.step(&desired, now + Duration::from_secs(61));
        assert_eq!(worker.metrics.shape_restores_total.get(), 1);
        desired.away_since = None;
        worker.step(&desired, now + Duration::from_secs(62));
        assert_eq!(worker.tc.calls, ["apply", "restore", "apply"]);
    }

    #[test]
    fn a_lost_lease_is_taken_again() {
        let dir = tempfile::tempdir().unwrap();
        let (mut worker, now) = (worker(&dir), Instant::now());
        let desired = DesiredShape { order: Some(order(1)), away_since: None };
        worker.step(&desired, now);
        worker.tc.lose_lease = true;
        worker.step(&desired, now);
        worker.step(&desired, now);
        assert_eq!(worker.tc.calls, ["apply", "renew", "apply"]);
    }

    #[test]
    fn refusals_are_reported_once_and_leave_nothing_behind() {
        let dir = tempfile::tempdir().unwrap();
        let (mut worker, now) = (worker(&dir), Instant::now());
        worker.step(&DesiredShape { order: Some(order(1)), away_since: None }, now);
        let mut bad = order(2);
        bad.bandwidth_bps = f64::NAN;
        for _ in 0..3 {
            // NaN is not equal to itself, so the order stands for any that does not compare.
            worker.step(
                &DesiredShape { order: Some(ShapeOrder { bandwidth_bps: -1.0, ..bad.clone() }), away_since: None },
                now,
            );
        }
        assert_eq!(worker.tc.calls, ["apply", "restore"]);
        worker.tc.refuse = true;
        worker.step(&DesiredShape { order: Some(order(3)), away_since: None }, now);
        let reports = shape_reports(&worker);
        assert_eq!(reports.len(), 3);
        assert!(reports[1].error.as_ref().unwrap().contains("-1"));
        assert!(reports[2].error.as_ref().unwrap().contains("not allowed here"));
    }
}
