//! Two ranks, each with NCCL's stand-in in a process of its own, around changes of the decision. The orders as a client
//! hands them on and the agreement are the real ones; only the network between the ranks is a copy of bytes.
#![allow(clippy::unwrap_used)]

mod common;

use common::{Built, COSTS, Host, RING, TREE, built};
use flexcomm_domain::{Collective, Decision, JobId, Rank, Strategy, Timestamp, Version};
use flexcomm_trainer::{Agreement, Control, OrdersSlot};
use flexcomm_wire::{DecisionOrder, JobOrders};
use std::time::Duration;

const STEPS: u64 = 120;
const BUCKETS: u32 = 3;
const STEP: Duration = Duration::from_millis(5);

/// What a node's agent has sent to its rank.
struct Announced {
    orders: OrdersSlot,
    version: u64,
}

impl Announced {
    fn new() -> Self {
        Self { orders: OrdersSlot::new(JobId::new("j").unwrap(), None), version: 0 }
    }

    /// The next decision: tree, ring, tree, ...
    fn publish(&mut self) {
        self.version += 1;
        let text = if self.version % 2 == 1 { "none@1/dense-tree" } else { "none@1/dense-ring" };
        let job = JobId::new("j").unwrap();
        let decision = Decision {
            job: job.clone(),
            version: Version(self.version),
            parent: Version(self.version - 1),
            plan: text.parse().unwrap(),
            decided_at: Timestamp(0),
            reason: String::new(),
        };
        let orders = JobOrders { job, decision: Some(DecisionOrder::from(&decision)), trial: None };
        self.orders.put(&orders);
    }
}

/// One rank: its part in the agreement, its process.
struct Member {
    control: Control,
    host: Host,
    received: Strategy,
    picks: Vec<i32>,
}

impl Member {
    fn new(built: &Built, rank: u32, version: u32) -> Self {
        let agreement = Agreement::new(Rank(rank), Strategy::DENSE_RING, 0);
        let mut control = Control::new(agreement, Rank(rank));
        control.steer(true);
        Self { control, host: Host::ready(built, version), received: Strategy::DENSE_RING, picks: Vec::new() }
    }

    /// Looks at its node's orders; the agreement takes from rank 0 only.
    fn look(&mut self, orders: &OrdersSlot) {
        let Some(decision) = orders.poll().and_then(|news| news.decision) else { return };
        self.received = *decision.plan.last();
        self.control.agreement().offer_decision(decision.version, decision.plan);
    }

    /// Enqueues a bucket's allreduce as the hook does: preferred around it and not beyond.
    fn enqueue(&mut self, bucket: u32, strategy: Strategy, step: u64) {
        let algorithm = if strategy.collective() == Collective::DenseTree { TREE } else { RING };
        self.host.prefer(0, algorithm, step);
        // What NCCL would choose by itself differs between buckets.
        let costs = if bucket == 1 { COSTS.replace("80 30 35", "80 60 55") } else { COSTS.into() };
        let (picked, _) = self.host.allreduce(&costs);
        self.host.prefer(0, -1, 0);
        self.picks.push(picked);
    }
}

/// What a rank goes by.
#[derive(Clone, Copy, PartialEq)]
enum Follow {
    /// The strategy of the step, as agreed.
    Agreed,
    /// The newest decision that its node's agent has sent, which is what must not be done.
    Announced,
}

/// Trains; `turns` says how both ranks and the announcements interleave. The ranks' picks, and how often the decision
/// in force changed.
fn train(built: &Built, version: u32, follow: Follow, mut turns: impl FnMut() -> u64) -> ([Vec<i32>; 2], usize) {
    let mut nodes = [Announced::new(), Announced::new()];
    let mut ranks = [0, 1].map(|rank| Member::new(built, rank, version));
    let (mut changes, mut message) = (0, Vec::new());
    for step in 0..STEPS {
        let mut ticks = Vec::new();
        let turn = turns();
        // Each node's agent hears of a decision when it does, before or after its rank has looked.
        for (rank, member) in ranks.iter_mut().enumerate() {
            let behind = nodes[rank].version < nodes[1 - rank].version;
            let early = turn >> rank & 1 == 1 && (behind || step % 8 == rank as u64);
            if early {
                nodes[rank].publish();
            }
            member.look(&nodes[rank].orders);
            ticks.push(member.control.begin());
        }
        for (node, other) in [(0, 1), (1, 0)] {
            if turn >> (2 + node) & 1 == 1 && nodes[node].version < nodes[other].version {
                nodes[node].publish();
            }
        }
        let order = if turn >> 4 & 1 == 1 { [1, 0] } else { [0, 1] };
        for bucket in 0..BUCKETS {
            for rank in order {
                let strategy = if follow == Follow::Agreed { *ticks[rank].strategy(0) } else { ranks[rank].received };
                ranks[rank].enqueue(bucket, strategy, step);
            }
        }
        broadcast(&mut ranks, &mut message);
        let ended = ranks.each_mut().map(|member| member.control.finish(STEP, &[]));
        assert_eq!(ended[0], ended[1]);
        changes += usize::from(ended[0] != flexcomm_trainer::Change::None);
    }
    let picks = ranks.map(|mut member| {
        let picks = std::mem::take(&mut member.picks);
        member.host.end();
        picks
    });
    (picks, changes)
}

/// Carries rank 0's control message to both ranks, where there is one.
fn broadcast(ranks: &mut [Member; 2], message: &mut Vec<u8>) {
    if ranks[0].control.announces() {
        *message = ranks[0].control.message();
    }
    for member in ranks.iter_mut().filter(|member| member.control.is_due()) {
        member.control.accept(message).unwrap();
    }
}

/// The first allreduce in which the ranks differ: there, NCCL would wait for ever.
fn first_difference(picks: &[Vec<i32>; 2]) -> Option<usize> {
    assert_eq!(picks[0].len(), picks[1].len());
    (0..picks[0].len()).find(|at| picks[0][*at] != picks[1][*at])
}

/// splitmix64: the turns of a run by its seed.
fn turns(seed: u64) -> impl FnMut() -> u64 {
    let mut state = seed;
    move || {
        state = state.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = state;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }
}

#[test]
fn two_ranks_never_differ_around_a_switch() {
    let Some(built) = built() else { return };
    // Every version of the interface, each with another interleaving.
    for version in common::VERSIONS {
        let (picks, changes) = train(built, version, Follow::Agreed, turns(u64::from(version)));
        assert_eq!(first_difference(&picks), None, "interface {version}");
        assert!(changes >= 4, "{changes} changes are enough to see something");
        let switches = picks[0].windows(2).filter(|pair| pair[0] != pair[1]).count();
        assert_eq!(switches, changes, "every allreduce of a step alike, whatever NCCL would choose");
        assert!(picks[0].chunks(BUCKETS as usize).all(|step| step.iter().all(|pick| *pick == step[0])));
    }
}

/// The same run going by what each node's agent announces: the comparison above can fail.
#[test]
fn ranks_that_followed_their_agents_at_once_would_differ() {
    let Some(built) = built() else { return };
    let (picks, _) = train(built, 5, Follow::Announced, turns(5));
    assert!(first_difference(&picks).is_some());
}
