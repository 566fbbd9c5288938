//! What new orders change: pure. Orders are whole states; the difference to the last ones is what must be done.

use flexcomm_domain::{JobId, NodeName};
use flexcomm_wire::{JobOrders, Orders, ProbePlan, ShapeOrder, ThroughputGrant};
use std::collections::{BTreeSet, VecDeque};

/// Most peers that are probed: a full mesh of a large rack row; more needs a plan that leaves some out.
pub(crate) const MAX_PEERS: usize = 1024;
/// Most jobs with trainers on one node.
pub(crate) const MAX_JOBS: usize = 64;
/// Most grants at a time: they run one after the other.
pub const MAX_GRANTS: usize = 64;
/// Grants remembered as used.
const GRANTS_REMEMBERED: usize = 4096;
/// Echo intervals are held within these, in ms: faster is a load, slower is no measurement.
const ECHO_MS: (u64, u64) = (10, 60_000);
/// Trace intervals are held within these, in s, unless 0 (never).
const TRACE_S: (u64, u64) = (5, 86_400);

/// One thing to do.
#[derive(Debug, Clone, PartialEq)]
pub enum Action {
    /// Probe by this plan from now on.
    Probe(ProbePlan),
    /// Run this throughput test.
    Grant(ThroughputGrant),
    /// This job's orders are new.
    Job(JobOrders),
    /// The controller no longer names this job.
    JobGone(JobId),
    /// Shape like this, or no longer.
    Shape(Option<ShapeOrder>),
}

/// Why orders were not followed.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum Refusal {
    /// Older than what is in force.
    #[error("follow orders of epoch {epoch}: epoch {in_force} is in force")]
    Stale {
        /// Of the orders.
        epoch: u64,
        /// What is.
        in_force: u64,
    },
    /// Over a limit.
    #[error("follow orders of epoch {epoch}: {count} {what}, at most {most} are followed")]
    TooMany {
        /// Of the orders.
        epoch: u64,
        /// Of which there are too many.
        what: &'static str,
        /// As many.
        count: usize,
        /// As are followed.
        most: usize,
    },
}

/// Follows the orders of one controller.
#[derive(Debug)]
pub struct Follower {
    node: NodeName,
    /// Least epoch that is accepted; none right after a registration.
    floor: Option<u64>,
    current: Option<Orders>,
    used: BTreeSet<u64>,
    used_in_order: VecDeque<u64>,
}

impl Follower {
    /// Before the first orders.
    pub fn new(node: NodeName) -> Self {
        Self { node, floor: None, current: None, used: BTreeSet::new(), used_in_order: VecDeque::new() }
    }

    /// A registration was answered: this controller's epochs count from here, also lower ones.
    pub fn registered(&mut self) {
        self.floor = None;
    }

    /// The epoch in force; 0 before the first orders.
    pub fn epoch(&self) -> u64 {
        self.current.as_ref().map_or(0, |orders| orders.epoch)
    }

    /// Takes orders over and says what they change. The same orders again change nothing.
    pub fn accept(&mut self, mut orders: Orders) -> Result<Vec<Action>, Refusal> {
        if let Some(in_force) = self.floor
            && orders.epoch < in_force
        {
            return Err(Refusal::Stale { epoch: orders.epoch, in_force });
        }
        check(&orders)?;
        self.tidy(&mut orders.probes);
        let mut actions = Vec::new();
        let old = self.current.as_ref();
        if old.is_none_or(|old| old.probes != orders.probes) {
            actions.push(Action::Probe(orders.probes.clone()));
        }
        if old.and_then(|old| old.shape.as_ref()) != orders.shape.as_ref() || old.is_none() {
            actions.push(Action::Shape(orders.shape.clone()));
        }
        actions.extend(job_actions(old.map_or(&[], |old| &old.jobs), &orders.jobs));
        for grant in &orders.grants {
            if self.first_use(grant.id) {
                actions.push(Action::Grant(grant.clone()));
            }
        }
        self.floor = Some(orders.epoch);
        self.current = Some(orders);
        Ok(actions)
    }

    /// Intervals within bounds; this node itself and doubles are no peers.
    fn tidy(&self, plan: &mut ProbePlan) {
        plan.echo_interval_ms = plan.echo_interval_ms.clamp(ECHO_MS.0, ECHO_MS.1);
        if plan.trace_interval_s != 0 {
            plan.trace_interval_s = plan.trace_interval_s.clamp(TRACE_S.0, TRACE_S.1);
        }
        let mut seen = BTreeSet::new();
        plan.peers.retain(|peer| peer.node != self.node && seen.insert(peer.node.clone()));
    }

    fn first_use(&mut self, id: u64) -> bool {
        if !self.used.insert(id) {
            return false;
        }
        self.used_in_order.push_back(id);
        if self.used_in_order.len() > GRANTS_REMEMBERED
            && let Some(oldest) = self.used_in_order.pop_front()
        {
            self.used.remove(&oldest);
        }
        true
    }
}

fn check(orders: &Orders) -> Result<(), Refusal> {
    for (what, count, most) in [
        ("peers", orders.probes.peers.len(), MAX_PEERS),
        ("jobs", orders.jobs.len(), MAX_JOBS),
        ("grants", orders.grants.len(), MAX_GRANTS),
    ] {
        if count > most {
            return Err(Refusal::TooMany { epoch: orders.epoch, what, count, most });
        }
    }
    Ok(())
}

fn job_actions(old: &[JobOrders], new: &[JobOrders]) -> Vec<Action> {
    let changed = new.iter().filter(|job| !old.contains(job)).map(|job| Action::Job(job.clone()));
    let gone = old.iter().filter(|old| new.iter().all(|new| new.job != old.job));
    changed.chain(gone.map(|old| Action::JobGone(old.job.clone()))).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use flexcomm_wire::EchoPeer;
    use proptest::prelude::*;

    fn peer(name: &str) -> EchoPeer {
        EchoPeer { node: name.parse().unwrap(), addr: [127, 0, 0, 1].into(), echo_port: 1, throughput_port: 2 }
    }

    fn orders(epoch: u64) -> Orders {
        let probes = ProbePlan { echo_interval_ms: 100, trace_interval_s: 0, peers: vec![peer("b")] };
        Orders { epoch, probes, grants: vec![], jobs: vec![], shape: None }
    }

    fn grant(id: u64) -> ThroughputGrant {
        ThroughputGrant { id, peer: "b".parse().unwrap(), budget_bytes: 1, valid_ms: 1 }
    }

    fn job(name: &str) -> JobOrders {
        JobOrders { job: name.parse().unwrap(), decision: None, trial: None }
    }

    fn shape(id: u64) -> ShapeOrder {
        ShapeOrder { id, latency_us: 1.0, jitter_us: 0.0, loss: 0.0, bandwidth_bps: 1e6 }
    }

    fn follower() -> Follower {
        Follower::new("a".parse().unwrap())
    }

    #[test]
    fn only_what_changed_is_done() {
        let mut follower = follower();
        let mut first = orders(1);
        first.grants = vec![grant(1)];
        first.jobs = vec![job("j"), job("k")];
        let actions = follower.accept(first.clone()).unwrap();
        assert_eq!(actions.len(), 5, "{actions:?}");
        assert_eq!(follower.accept(first.clone()), Ok(vec![]));
        let mut second = first.clone();
        second.epoch = 2;
        second.jobs.remove(0);
        second.shape = Some(shape(1));
        let expected = vec![Action::Shape(Some(shape(1))), Action::JobGone("j".parse().unwrap())];
        assert_eq!(follower.accept(second), Ok(expected));
        first.epoch = 3;
        assert_eq!(follower.accept(first), Ok(vec![Action::Shape(None), Action::Job(job("j"))]));
    }

    #[test]
    fn the_first_orders_say_that_nothing_is_shaped() {
        assert!(follower().accept(orders(1)).unwrap().contains(&Action::Shape(None)));
    }

    #[test]
    fn older_epochs_are_refused_until_the_next_registration() {
        let mut follower = follower();
        follower.accept(orders(5)).unwrap();
        assert_eq!(follower.accept(orders(4)), Err(Refusal::Stale { epoch: 4, in_force: 5 }));
        assert_eq!(follower.epoch(), 5);
        follower.registered();
        follower.accept(orders(4)).unwrap();
        assert_eq!(follower.epoch(), 4);
    }

    #[test]
    fn plans_are_tidied_and_bounded() {
        let mut follower = follower();
        let mut wild = orders(1);
        wild.probes.echo_interval_ms = 0;
        wild.probes.trace_interval_s = 1;
        wild.probes.peers = vec![peer("a"), peer("b"), peer("b")];
        let actions = follower.accept(wild.clone()).unwrap();
        let Action::Probe(plan) = &actions[0] else { panic!("{actions:?}") };
        assert_eq!((plan.echo_interval_ms, plan.trace_interval_s, plan.peers.len()), (10, 5, 1));
        wild.epoch = 2;
        wild.grants = (0..100).map(grant).collect();
        assert!(follower.accept(wild).unwrap_err().to_string().contains("100 grants, at most 64"));
        assert_eq!(follower.epoch(), 1);
    }

    proptest! {
        #[test]
        fn a_grant_is_used_once(rounds in prop::collection::vec(prop::collection::vec(0u64..20, 0..10), 1..20)) {
            let mut follower = follower();
            let mut used = BTreeSet::new();
            for (epoch, ids) in rounds.into_iter().enumerate() {
                let mut next = orders(epoch as u64);
                next.grants = ids.into_iter().map(grant).collect();
                for action in follower.accept(next).unwrap() {
                    if let Action::Grant(grant) = action {
                        prop_assert!(used.insert(grant.id), "grant {} twice", grant.id);
                    }
                }
            }
        }
    }
}
