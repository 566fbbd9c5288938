//! Hands what new orders change to the parts that do it.

use crate::metrics::Metrics;
use crate::orders::{Action, Follower, Refusal};
use crate::probing::DesiredProbes;
use crate::shaping::DesiredShape;
use crate::trainers::Trainers;
use flexcomm_wire::Orders;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Instant;
use tokio::sync::watch;

/// Follows the controller's orders.
pub(crate) struct Reconciler {
    follower: Mutex<Follower>,
    probes: DesiredProbes,
    trainers: Arc<Trainers>,
    shape: watch::Sender<DesiredShape>,
    metrics: Metrics,
}

impl Reconciler {
    pub(crate) fn new(
        follower: Follower,
        probes: DesiredProbes,
        trainers: Arc<Trainers>,
        shape: watch::Sender<DesiredShape>,
        metrics: Metrics,
    ) -> Arc<Self> {
        Arc::new(Self { follower: Mutex::new(follower), probes, trainers, shape, metrics })
    }

    fn follower(&self) -> MutexGuard<'_, Follower> {
        self.follower.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// A registration was answered.
    pub(crate) fn registered(&self) {
        self.follower().registered();
        self.shape.send_modify(|desired| desired.away_since = None);
        self.trainers.announce();
    }

    /// The controller does not answer.
    pub(crate) fn controller_away(&self) {
        self.shape.send_modify(|desired| {
            desired.away_since.get_or_insert_with(Instant::now);
        });
    }

    /// The epoch in force.
    pub(crate) fn epoch(&self) -> u64 {
        self.follower().epoch()
    }

    /// The controller refuses a run of a job.
    pub(crate) fn refuse_run(&self, run: flexcomm_wire::RefusedRun) {
        self.trainers.refuse_run(run);
    }

    /// Follows orders, or counts why not.
    pub(crate) fn orders(&self, orders: Orders) {
        let accepted = self.follower().accept(orders);
        match accepted {
            Ok(actions) => {
                if !actions.is_empty() {
                    self.metrics.orders_accepted_total.inc();
                }
                self.metrics.orders_epoch.set(i64::try_from(self.epoch()).unwrap_or(i64::MAX));
                actions.into_iter().for_each(|action| self.act(action));
            }
            Err(refusal) => {
                match refusal {
                    Refusal::Stale { .. } => self.metrics.orders_stale_total.inc(),
                    Refusal::TooMany { .. } => self.metrics.orders_invalid_total.inc(),
                }
                tracing::warn!("failed to {refusal}");
            }
        }
    }

    fn act(&self, action: Action) {
        match action {
            Action::Probe(plan) => self.probes.plan(plan),
            Action::Grant(grant) => self.probes.grant(grant),
            Action::Job(orders) => self.trainers.orders(&orders),
            Action::JobGone(job) => self.trainers.gone(&job),
            Action::Shape(order) => self.shape.send_modify(|desired| desired.order = order),
        }
    }
}
