//! Who may run a throughput test now. Pure: time and links are arguments.
//!
//! - No node is in two tests at once: the tests that run are a matching of the nodes.
//! - Each node has an account in seconds' worth of the share of its capacity that tests may use: it grows by a
//!   second each second, and a test costs both ends what its bytes take at the link's bandwidth, over the share.
//!   Only a first measurement and a suspect link may overdraw, by a bounded debt that later tests wait for: the
//!   share holds on average. What a test did not use is paid back.
//! - The pair that waited longest goes first. When it cannot pay yet, its nodes save up for it: pairs that are
//!   cheaper do not starve it.

use flexcomm_domain::{NodeName, Timestamp};
use flexcomm_wire::ThroughputGrant;
use std::collections::{BTreeMap, BTreeSet};

use crate::config::RawProbes;

/// How long an agent may take to begin and end a test.
const VALID_MS: u64 = 10_000;

/// After this long without a report the test is over for us, whatever happened.
const EXPIRY_S: f64 = 15.0;

/// Most that an account holds, in seconds' worth: an idle night does not allow a burst in the morning.
const MOST_S: f64 = 60.0;

/// How deep it may be overdrawn, in seconds' worth. Agents refuse on their own at 300.
const DEEPEST_S: f64 = 240.0;

/// A suspect link is not tested again within this time, in seconds: a test and its report need a second.
const SUSPECT_RETEST_S: f64 = 3.0;

/// A link without a measurement whose test failed is tried again after this time, in seconds.
const FAILED_RETEST_S: f64 = 10.0;

/// What a link without a measurement is taken for when its test is paid, bit/s.
const UNKNOWN_BPS: f64 = 100e6;

/// A test has to last several round trips to leave slow start.
const ROUND_TRIPS: f64 = 10.0;

/// The lower name first.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub struct Pair(NodeName, NodeName);

impl Pair {
    /// Of two different nodes, in any order.
    pub fn new(a: &NodeName, b: &NodeName) -> Self {
        if a <= b { Self(a.clone(), b.clone()) } else { Self(b.clone(), a.clone()) }
    }
}

/// What is known of the links between two nodes.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub struct Known {
    /// The larger of both directions.
    pub bandwidth_bps: Option<f64>,
    /// The larger of both directions.
    pub latency_s: f64,
    /// Something says that it changed since the last test.
    pub suspect: bool,
}

#[derive(Debug, Clone)]
struct Active {
    grant: ThroughputGrant,
    from: NodeName,
    since: Timestamp,
    cost_s: f64,
}

#[derive(Debug, Clone, Copy, Default)]
struct Past {
    at: Timestamp,
    count: u64,
}

#[derive(Debug, Clone, Copy)]
struct Account {
    level_s: f64,
    at: Timestamp,
}

/// The tests that run, the budgets, and who was tested when.
#[derive(Debug)]
pub struct Scheduler {
    config: RawProbes,
    next_id: u64,
    active: Vec<Active>,
    past: BTreeMap<Pair, Past>,
    accounts: BTreeMap<NodeName, Account>,
}

impl Scheduler {
    /// Nothing runs; ids start after `first_id`, which must grow from start to start.
    pub fn new(config: RawProbes, first_id: u64) -> Self {
        Self { config, next_id: first_id, active: Vec::new(), past: BTreeMap::new(), accounts: BTreeMap::new() }
    }

    /// Takes note of a test that was stored before the start.
    pub fn seed(&mut self, pair: Pair, at: Timestamp) {
        let past = self.past.entry(pair).or_default();
        past.at = past.at.max(at);
        past.count += 1;
    }

    /// A test has ended after so many bytes, both directions together.
    pub fn finished(&mut self, id: u64, bytes: u64) {
        let Some(index) = self.active.iter().position(|a| a.grant.id == id) else { return };
        let Active { grant, from, cost_s, .. } = self.active.swap_remove(index);
        let unused = 1.0 - (bytes as f64 / grant.budget_bytes as f64).min(1.0);
        for node in [&from, &grant.peer] {
            if let Some(account) = self.accounts.get_mut(node) {
                account.level_s += cost_s * unused;
            }
        }
    }

    /// The grants of one node.
    pub fn of(&self, node: &NodeName) -> Vec<ThroughputGrant> {
        self.active.iter().filter(|a| a.from == *node).map(|a| a.grant.clone()).collect()
    }

    /// When a pair was tested last.
    pub fn tested(&self, pair: &Pair) -> Option<Timestamp> {
        self.past.get(pair).map(|p| p.at)
    }

    /// Ends what has expired or lost an end, and grants what is due.
    pub fn tick(&mut self, now: Timestamp, live: &[NodeName], known: &BTreeMap<Pair, Known>) {
        let alive: BTreeSet<&NodeName> = live.iter().collect();
        self.active.retain(|a| {
            alive.contains(&a.from) && alive.contains(&a.grant.peer) && now.since(a.since).get() < EXPIRY_S
        });
        self.past.retain(|pair, _| alive.contains(&pair.0) && alive.contains(&pair.1));
        self.accounts.retain(|node, _| alive.contains(node));
        live.iter().for_each(|node| self.fill(node, now));
        let busy = self.active.iter().flat_map(|a| [a.from.clone(), a.grant.peer.clone()]);
        let mut taken: BTreeSet<NodeName> = busy.collect();
        for (pair, link) in self.due(now, live, known) {
            if taken.contains(&pair.0) || taken.contains(&pair.1) {
                continue;
            }
            taken.extend([pair.0.clone(), pair.1.clone()]);
            let bytes = self.budget(&link);
            let cost_s = self.cost_s(bytes, &link);
            if self.may_pay(&pair, cost_s, &link) {
                self.grant(pair, (bytes, cost_s), now);
            }
        }
    }

    fn fill(&mut self, node: &NodeName, now: Timestamp) {
        let account = self.accounts.entry(node.clone()).or_insert(Account { level_s: MOST_S, at: now });
        account.level_s = (account.level_s + now.since(account.at).get()).min(MOST_S);
        account.at = now;
    }

    /// Pairs that should be tested, suspect ones first, then those that waited longest.
    fn due(&self, now: Timestamp, live: &[NodeName], known: &BTreeMap<Pair, Known>) -> Vec<(Pair, Known)> {
        let pairs = live.iter().enumerate().flat_map(|(i, a)| live[i + 1..].iter().map(move |b| Pair::new(a, b)));
        let mut due: Vec<_> = pairs
            .filter_map(|pair| {
                let link = known.get(&pair).copied().unwrap_or_default();
                let last = self.past.get(&pair);
                let wait = match link {
                    Known { suspect: true, .. } => SUSPECT_RETEST_S,
                    Known { bandwidth_bps: None, .. } => FAILED_RETEST_S,
                    _ => self.config.retest_s as f64,
                };
                let due = last.is_none_or(|p| now.since(p.at).get() >= wait);
                due.then(|| (!link.suspect, last.map(|p| p.at), pair, link))
            })
            .collect();
        due.sort_by(|a, b| (a.0, a.1, &a.2).cmp(&(b.0, b.1, &b.2)));
        due.into_iter().map(|(_, _, pair, link)| (pair, link)).collect()
    }

    /// Bytes of a test, both directions together: enough for some time and for several round trips.
    fn budget(&self, link: &Known) -> u64 {
        let (least, most) = (self.config.min_bytes, self.config.max_bytes);
        let Some(bps) = link.bandwidth_bps else { return least.saturating_mul(4).min(most) };
        let seconds = (self.config.test_ms as f64 * 1e-3).max(ROUND_TRIPS * 2.0 * link.latency_s);
        ((2.0 * bps / 8.0 * seconds) as u64).clamp(least, most)
    }

    /// What a test costs each end, in seconds' worth of the share: each direction counts by itself.
    fn cost_s(&self, bytes: u64, link: &Known) -> f64 {
        let bps = link.bandwidth_bps.unwrap_or(UNKNOWN_BPS);
        // No test costs more than an account can ever hold.
        (bytes as f64 / 2.0 * 8.0 / bps / self.config.budget_share).min(MOST_S)
    }

    fn may_pay(&self, pair: &Pair, cost_s: f64, link: &Known) -> bool {
        let urgent = link.suspect || link.bandwidth_bps.is_none();
        let least = if urgent { -DEEPEST_S } else { 0.0 };
        let can = |node| self.accounts.get(node).is_some_and(|a| a.level_s - cost_s >= least);
        can(&pair.0) && can(&pair.1)
    }

    fn grant(&mut self, pair: Pair, (bytes, cost_s): (u64, f64), now: Timestamp) {
        for node in [&pair.0, &pair.1] {
            if let Some(account) = self.accounts.get_mut(node) {
                account.level_s -= cost_s;
            }
        }
        let past = self.past.entry(pair.clone()).or_default();
        // Both ends take turns, so that both learn.
        let (from, peer) = if past.count.is_multiple_of(2) { (pair.0, pair.1) } else { (pair.1, pair.0) };
        *past = Past { at: now, count: past.count + 1 };
        self.next_id += 1;
        let grant = ThroughputGrant { id: self.next_id, peer, budget_bytes: bytes, valid_ms: VALID_MS };
        self.active.push(Active { grant, from, since: now, cost_s });
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::{prop_assert, prop_assert_eq, proptest};

    fn names(n: usize) -> Vec<NodeName> {
        (0..n).map(|i| NodeName::new(&format!("n{i}")).unwrap()).collect()
    }

    fn all(live: &[NodeName], link: Known) -> BTreeMap<Pair, Known> {
        let pairs = live.iter().enumerate().flat_map(|(i, a)| live[i + 1..].iter().map(move |b| Pair::new(a, b)));
        pairs.map(|p| (p, link)).collect()
    }

    fn at(ms: u64) -> Timestamp {
        Timestamp(1_000_000_000 + ms * 1000)
    }

    fn link(bps: f64) -> Known {
        Known { bandwidth_bps: Some(bps), latency_s: 0.001, suspect: false }
    }

    fn assert_matching(s: &Scheduler) -> Result<(), proptest::test_runner::TestCaseError> {
        let mut ends: Vec<&NodeName> = s.active.iter().flat_map(|a| [&a.from, &a.grant.peer]).collect();
        let all = ends.len();
        ends.sort();
        ends.dedup();
        prop_assert_eq!(ends.len(), all, "a node is in two tests");
        Ok(())
    }

    proptest! {
        #[test]
        fn no_node_is_in_two_tests_every_pair_is_visited_and_the_budget_holds(
            n in 2usize..7, bps in 1e7..1e11f64, finish in 1usize..5, used in 0.3..1.0f64
        ) {
            let live = names(n);
            let known = all(&live, link(bps));
            let mut s = Scheduler::new(RawProbes::default(), 7);
            let (mut spent, mut visits) = (BTreeMap::new(), BTreeMap::new());
            let seconds = 7200;
            for second in 0..seconds {
                let before: BTreeSet<u64> = s.active.iter().map(|a| a.grant.id).collect();
                s.tick(at(second * 1000), &live, &known);
                assert_matching(&s)?;
                for a in s.active.iter().filter(|a| !before.contains(&a.grant.id)) {
                    *visits.entry(Pair::new(&a.from, &a.grant.peer)).or_insert(0u64) += 1;
                    for node in [&a.from, &a.grant.peer] {
                        *spent.entry(node.clone()).or_insert(0.0) += used * a.grant.budget_bytes as f64 / 2.0;
                    }
                }
                let done: Vec<(u64, u64)> = s.active.iter().take(finish).map(|a| (a.grant.id, a.grant.budget_bytes)).collect();
                done.into_iter().for_each(|(id, bytes)| s.finished(id, (used * bytes as f64) as u64));
            }
            let allowed = 0.01 * bps / 8.0 * (seconds as f64 + 2.0 * MOST_S);
            for bytes in spent.values() {
                prop_assert!(*bytes <= allowed, "{} B of {} B", bytes, allowed);
            }
            prop_assert_eq!(visits.len(), n * (n - 1) / 2, "a pair was never tested");
            let (least, most) = (visits.values().min().unwrap(), visits.values().max().unwrap());
            // The oldest pair that is free goes first: with an odd number of nodes some wait for two rounds.
            prop_assert!(*most <= 2 * least + 4, "{visits:?}");
        }
    }

    #[test]
    fn first_measurements_do_not_wait_for_a_budget() {
        let live = names(4);
        let mut s = Scheduler::new(RawProbes::default(), 0);
        let mut tested = BTreeSet::new();
        for second in 0..8 {
            s.tick(at(second * 1000), &live, &BTreeMap::new());
            for a in s.active.clone() {
                tested.insert(Pair::new(&a.from, &a.grant.peer));
                s.finished(a.grant.id, a.grant.budget_bytes);
            }
        }
        assert_eq!(tested.len(), 6, "{tested:?}");
    }

    #[test]
    fn suspect_links_go_first_and_soon_and_debt_is_bounded() {
        let live = names(4);
        let mut known = all(&live, link(1e9));
        let mut s = Scheduler::new(RawProbes::default(), 0);
        known.keys().cloned().collect::<Vec<_>>().into_iter().for_each(|p| s.seed(p, at(0)));
        s.tick(at(3000), &live, &known);
        assert!(s.active.is_empty(), "nothing is due");
        let pair = Pair::new(&live[2], &live[3]);
        known.get_mut(&pair).unwrap().suspect = true;
        s.tick(at(4000), &live, &known);
        assert_eq!(s.active.len(), 1);
        assert_eq!(Pair::new(&s.active[0].from, &s.active[0].grant.peer), pair);
        let mut bytes = 0;
        for second in 5..3600 {
            s.active.clone().iter().for_each(|a| s.finished(a.grant.id, a.grant.budget_bytes));
            s.tick(at(second * 1000), &live, &known);
            bytes += s.active.iter().map(|a| a.grant.budget_bytes).sum::<u64>();
        }
        // Both ends and both directions: twice the share of one node each way, and the debt.
        let allowed = 2.0 * 0.01 * 1e9 / 8.0 * (3600.0 + MOST_S + DEEPEST_S) * 2.0;
        assert!((bytes as f64) < allowed, "{bytes} B against {allowed} B");
        assert!((bytes as f64) > allowed / 4.0, "a suspect link is tested as often as the budget allows");
    }

    #[test]
    fn grants_of_the_dead_expire_and_turns_are_taken() {
        let live = names(2);
        let mut s = Scheduler::new(RawProbes::default(), 41);
        s.tick(at(0), &live, &BTreeMap::new());
        assert_eq!(s.of(&live[0])[0].id, 42);
        assert_eq!(s.of(&live[0])[0].peer, live[1]);
        s.tick(at(1000), &live[..1], &BTreeMap::new());
        assert!(s.of(&live[0]).is_empty());
        s.tick(at(2000), &live, &BTreeMap::new());
        s.tick(at(16_999), &live, &BTreeMap::new());
        assert_eq!(s.of(&live[0]).len(), 1);
        s.tick(at(17_000), &live, &BTreeMap::new());
        assert!(s.of(&live[0]).is_empty() && s.of(&live[1])[0].peer == live[0]);
    }
}
