//! Orders on their way to agents: one watch channel per node, whole orders, an epoch that only grows.

use flexcomm_domain::NodeName;
use flexcomm_wire::api::ScenarioSet;
use flexcomm_wire::{DecisionOrder, EchoPeer, JobOrders, Orders, ProbePlan, ShapeOrder};
use parking_lot::Mutex;
use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use tokio::sync::watch;

use crate::app::App;
use crate::store::{NodeRow, Result};

/// By how much the stored epoch grows at a start: more than one life of the controller ever publishes.
pub const EPOCH_STEP: u64 = 1 << 32;

/// Orders as they were published, also as JSON.
#[derive(Debug)]
pub struct Published {
    /// The orders.
    pub orders: Orders,
    /// The same.
    pub json: String,
}

/// The newest orders of every node.
#[derive(Debug)]
pub struct Publisher {
    epoch: AtomicU64,
    nodes: Mutex<BTreeMap<NodeName, watch::Sender<Option<Arc<Published>>>>>,
    /// Held from reading the store to publishing what was read, so that nothing older is published after
    /// something newer.
    turn: tokio::sync::Mutex<()>,
}

impl Publisher {
    /// Epochs start after `epoch`.
    pub fn new(epoch: u64) -> Self {
        Self { epoch: AtomicU64::new(epoch), nodes: Mutex::default(), turn: tokio::sync::Mutex::default() }
    }

    fn put(&self, node: &NodeName, mut orders: Orders) {
        let mut nodes = self.nodes.lock();
        let sender = nodes.entry(node.clone()).or_insert_with(|| watch::Sender::new(None));
        let same = sender.borrow().as_ref().is_some_and(|p| {
            orders.epoch = p.orders.epoch;
            p.orders == orders
        });
        if same {
            return;
        }
        orders.epoch = self.epoch.fetch_add(1, Ordering::Relaxed) + 1;
        match serde_json::to_string(&orders) {
            Ok(json) => drop(sender.send_replace(Some(Arc::new(Published { orders, json })))),
            Err(error) => tracing::error!(%node, %error, "orders cannot be written as JSON"),
        }
    }

    /// Follows a node's orders.
    pub fn follow(&self, node: &NodeName) -> watch::Receiver<Option<Arc<Published>>> {
        let mut nodes = self.nodes.lock();
        nodes.entry(node.clone()).or_insert_with(|| watch::Sender::new(None)).subscribe()
    }

    /// Forgets a node; its streams end.
    pub fn forget(&self, node: &NodeName) {
        self.nodes.lock().remove(node);
    }
}

/// Publishes to every node what the store says now. Decisions are read from the store and only from there:
/// what is not stored is not published.
pub async fn publish(app: &App) -> Result<()> {
    let _turn = app.publisher.turn.lock().await;
    let now = app.clock.now();
    let nodes = app.store.nodes_as_registered().await?;
    let live = app.presence.live(now);
    let jobs = job_orders(app).await?;
    let shape = shape(app).await?;
    for node in &*nodes {
        let orders = Orders {
            epoch: 0,
            probes: probes(app, node, &nodes, &live),
            grants: app.scheduler.lock().of(&node.node),
            jobs: jobs.get(&node.node).cloned().unwrap_or_default(),
            shape: shape
                .as_ref()
                .filter(|(_, only)| node.may_shape && only.as_ref().is_none_or(|o| o.contains(&node.node)))
                .map(|(order, _)| order.clone()),
        };
        app.publisher.put(&node.node, orders);
    }
    Ok(())
}

fn probes(app: &App, node: &NodeRow, nodes: &[NodeRow], live: &[NodeName]) -> ProbePlan {
    let others = nodes.iter().filter(|n| n.node != node.node && live.binary_search(&n.node).is_ok());
    let peer = |n: &NodeRow| EchoPeer {
        node: n.node.clone(),
        addr: n.addr,
        echo_port: n.echo_port,
        throughput_port: n.throughput_port,
    };
    let echoes = *app.echoes.lock();
    ProbePlan {
        echo_interval_ms: echoes.interval_ms,
        trace_interval_s: echoes.trace_s,
        peers: others.map(peer).collect(),
    }
}

/// The orders of every running job, by node that has ranks of it.
async fn job_orders(app: &App) -> Result<BTreeMap<NodeName, Vec<JobOrders>>> {
    let mut all: BTreeMap<NodeName, Vec<JobOrders>> = BTreeMap::new();
    for job in app.store.running_jobs().await?.iter() {
        // A damaged one is not published; the job's agents keep what they have.
        let decision = app.store.decision(&job.job).await?;
        let trials = app.store.trials(&job.job, 1).await?;
        let trial = trials.iter().find(|t| t.state == "pending");
        let orders = JobOrders {
            job: job.job.clone(),
            decision: decision.map(|row| DecisionOrder { run: job.run, ..(&row.decision).into() }),
            trial: trial.map(|t| flexcomm_wire::TrialOrder {
                run: job.run,
                id: t.id,
                candidates: t.candidates.iter().copied().map(Into::into).collect(),
                iterations: t.iterations,
                budget_ms: t.budget_ms,
            }),
        };
        let mut nodes: Vec<NodeName> =
            app.store.ranks(&job.job).await?.iter().filter(|r| r.left.is_none()).map(|r| r.node.clone()).collect();
        nodes.sort();
        nodes.dedup();
        nodes.into_iter().for_each(|node| all.entry(node).or_default().push(orders.clone()));
    }
    all.values_mut().for_each(|jobs| jobs.sort_by(|a, b| a.job.cmp(&b.job)));
    Ok(all)
}

type Shape = (ShapeOrder, Option<Vec<NodeName>>);

async fn shape(app: &App) -> Result<Option<Shape>> {
    if !app.config.scenario {
        return Ok(None);
    }
    let Some(row) = app.store.scenario().await? else { return Ok(None) };
    Ok(row.wanted.map(|set| (shape_order(row.id, &set), set.nodes)))
}

/// What a scenario asks of each agent.
pub fn shape_order(id: u64, set: &ScenarioSet) -> ShapeOrder {
    let ScenarioSet { latency_us, jitter_us, loss, bandwidth_bps, .. } = *set;
    ShapeOrder { id, latency_us, jitter_us, loss, bandwidth_bps }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn orders(interval: u64) -> Orders {
        Orders {
            epoch: 0,
            probes: ProbePlan { echo_interval_ms: interval, trace_interval_s: 0, peers: vec![] },
            grants: vec![],
            jobs: vec![],
            shape: None,
        }
    }

    #[test]
    fn the_epoch_grows_with_every_change_and_only_then() {
        let publisher = Publisher::new(100);
        let node = NodeName::new("a").unwrap();
        let follower = publisher.follow(&node);
        let epoch = || follower.borrow().as_ref().map(|p| p.orders.epoch);
        assert_eq!(epoch(), None);
        publisher.put(&node, orders(1));
        assert_eq!(epoch(), Some(101));
        publisher.put(&node, orders(1));
        assert_eq!(epoch(), Some(101));
        publisher.put(&node, orders(2));
        assert_eq!(epoch(), Some(102));
        assert!(follower.borrow().as_ref().unwrap().json.contains("\"epoch\":102"));
        publisher.forget(&node);
        assert!(follower.has_changed().is_err());
    }
}
