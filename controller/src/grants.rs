//! Who may run a throughput test now. Pure: time and links are arguments.
//!
//! - No node is in two tests at once: the tests that run are a matching of the nodes.
//! - Each node has an account of the share of its capacity that probing may take ([`ShareAccount`]). A test is
//!   charged to both ends with the most that it can cost before it is granted, and with what its bytes took at the
//!   measured rate when its report is there. A test whose report never comes stays charged in full.
//! - Accounts outlive silence of their nodes and, stored, restarts of the controller.
//! - Tests of links that changed, and those that are expected to save a job twice what they take, may overdraw. So may now and then, for at
//!   most half of the share, tests of nodes of a job that have not been tested for long.
//! - The pair that waited longest goes first. When it cannot pay yet, its nodes save up for it: pairs that are
//!   cheaper do not starve it.

use flexcomm_domain::{Need, NodeName, ShareAccount, ShareRules, Timestamp};
use flexcomm_wire::{MAX_TEST_S, ThroughputGrant, ThroughputReport};
use std::collections::{BTreeMap, BTreeSet};

use crate::config::RawProbes;

/// How long an agent may take to begin and end a test.
const VALID_MS: u64 = 10_000;

/// After this long without a report the test is over for us, whatever happened.
const EXPIRY_S: f64 = 15.0;

/// Tests that are over without a report and are remembered, should it still come.
const OVERDUE: usize = 1024;

/// A suspect link is not tested again within this time, in seconds: a test and its report need a second.
const SUSPECT_RETEST_S: f64 = 3.0;

/// So many tests in a row are as dense as that: a job that shares the link may take half of it from each. Then
/// each waits twice as long as the one before, since the tests themselves slow the job down that is the suspicion.
const SUSPECT_TESTS: u32 = 4;

/// Most doublings: about every three minutes.
const SUSPECT_DOUBLINGS: u32 = 6;

/// A link that has not been suspect for this long is as good as one that never was, in seconds.
const TRUST_AFTER_S: f64 = 20.0;

/// A link without a measurement whose test failed is tried again after this time, in seconds.
const FAILED_RETEST_S: f64 = 10.0;

/// Bytes of a link's first test, both directions together: it says how large the next may be.
const SCOUT_BYTES: u64 = 256 << 10;

/// A link whose last test had less than this part of the bytes that fit its bandwidth is not well known yet.
const APPROXIMATE: u64 = 4;

/// The first test of a suspect link is sized to last this long on what is known of it, in seconds, or some round trips: after
/// a fall a whole one would last as long as a test may, and leave a debt that lets no other follow for minutes.
const FIRST_LOOK_S: f64 = 0.002;

/// A test has to last several round trips to leave slow start.
const ROUND_TRIPS: f64 = 10.0;

/// What is read from a report costs at most so many times the dearest test: bytes may queue on the way when the
/// time is over, but a report may also be nonsense.
const BELIEVED: f64 = 2.0;

/// What a test is expected to save is at least so many times what it takes, seconds of both NICs.
const WORTH: f64 = 2.0;

/// Nodes of a job that have not been tested for so long, seconds, may overdraw: a job whose messages are small sees nothing of a network that
/// has become faster.
const OLDEST_S: f64 = 25.0;

/// And for so many times as long as accounts take to pay for it.
const OLDEST_PAID: f64 = 2.0;

/// A test after a short one has at most so many times its bytes: what that found may be a shaper's token bucket.
const GROWTH: u64 = 16;

/// An account is stored again when it has moved by this much, in seconds' worth.
const STORE_AFTER_S: f64 = 30.0;

/// The lower name first.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub struct Pair(NodeName, NodeName);

impl Pair {
    /// Of two different nodes, in any order.
    pub fn new(a: &NodeName, b: &NodeName) -> Self {
        if a <= b { Self(a.clone(), b.clone()) } else { Self(b.clone(), a.clone()) }
    }

    /// Every two of these nodes.
    pub fn among(nodes: &[NodeName]) -> impl Iterator<Item = Self> {
        nodes.iter().enumerate().flat_map(|(i, a)| nodes[i + 1..].iter().map(move |b| Self::new(a, b)))
    }

    /// Whether a node is one of them.
    pub fn has(&self, node: &NodeName) -> bool {
        self.0 == *node || self.1 == *node
    }
}

/// What is known of the links between two nodes.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub struct Known {
    /// What the last tests found, the smaller of both directions.
    pub bandwidth_bps: Option<f64>,
    /// The larger of both directions.
    pub latency_s: f64,
    /// Something says that it changed since the last test.
    pub suspect: bool,
    /// What a test is expected to save the job that runs over it, seconds: the most of several jobs.
    pub worth_s: f64,
    /// Whether ranks of a job run on both nodes.
    pub of_job: bool,
    /// Whether the newest test by one of the ends was over so soon that it tells little.
    pub is_short: bool,
}

/// What a test spent.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Spent {
    /// The grant it used.
    pub grant: u64,
    /// Payload bytes and measured bit/s of each direction; no rate when the test failed.
    pub ways: [(u64, Option<f64>); 2],
}

impl From<&ThroughputReport> for Spent {
    fn from(r: &ThroughputReport) -> Self {
        let [out, back] = r.bytes_of_ways();
        Self { grant: r.grant, ways: [(out, r.out_bps), (back, r.back_bps)] }
    }
}

#[derive(Debug, Clone)]
struct Active {
    grant: ThroughputGrant,
    from: NodeName,
    since: Timestamp,
    held_s: f64,
}

#[derive(Debug, Clone, Copy, Default)]
struct Past {
    at: Timestamp,
    count: u64,
    /// Of the last test; none when it was before the start.
    bytes: Option<u64>,
    /// Tests for suspicion, since the link began to be suspect.
    suspected: u32,
    /// When it was suspect last.
    suspect_at: Timestamp,
}

#[derive(Debug, Clone, Copy)]
struct Account {
    account: ShareAccount,
    /// The level that is on disk.
    stored_s: Option<f64>,
    /// Tests in a row that were worth what they take, and when the last one was.
    worth_it: u32,
    worth_it_at: Timestamp,
}

/// When a node was tested last.
#[derive(Debug, Clone, Copy, Default)]
struct Tested {
    at: Timestamp,
    /// When one followed a short test that may overdraw for that.
    followed_at: Timestamp,
}

impl Account {
    fn new(account: ShareAccount, stored_s: Option<f64>) -> Self {
        Self { account, stored_s, worth_it: 0, worth_it_at: Timestamp::default() }
    }
}

/// The tests that run, the budgets, and who was tested when.
#[derive(Debug)]
pub struct Scheduler {
    config: RawProbes,
    rules: ShareRules,
    next_id: u64,
    active: Vec<Active>,
    overdue: BTreeMap<u64, Active>,
    past: BTreeMap<Pair, Past>,
    tested: BTreeMap<NodeName, Tested>,
    /// The part of the share, 0 to 1, that echoes and traces take.
    other_probes: f64,
    accounts: BTreeMap<NodeName, Account>,
}

impl Scheduler {
    /// Nothing runs; ids start after `first_id`, which must grow from start to start.
    pub fn new(config: RawProbes, first_id: u64) -> Self {
        let rules = ShareRules::new(config.budget_share, MAX_TEST_S);
        let (active, overdue, past, tested, other_probes, accounts) = Default::default();
        Self { config, rules, next_id: first_id, active, overdue, past, tested, other_probes, accounts }
    }

    /// Takes note of a test that was stored before the start.
    pub fn seed(&mut self, pair: Pair, at: Timestamp) {
        for node in [&pair.0, &pair.1] {
            let tested = self.tested.entry(node.clone()).or_default();
            tested.at = tested.at.max(at);
        }
        let past = self.past.entry(pair).or_default();
        past.at = past.at.max(at);
        past.count += 1;
    }

    /// Takes up an account that was stored before the start.
    pub fn restore(&mut self, node: NodeName, level_s: f64, now: Timestamp) {
        let account = ShareAccount::restored(level_s, now.seconds());
        self.accounts.insert(node, Account::new(account, Some(level_s)));
    }

    /// Accounts that have to be stored before a grant of theirs may be published.
    pub fn moved(&self) -> Vec<(NodeName, f64)> {
        let moved = |(node, entry): (&NodeName, &Account)| {
            let level_s = entry.account.level_s();
            let is_moved = entry.stored_s.is_none_or(|stored| level_s < stored || level_s >= stored + STORE_AFTER_S);
            is_moved.then(|| (node.clone(), level_s))
        };
        self.accounts.iter().filter_map(moved).collect()
    }

    /// These are on disk.
    pub fn stored(&mut self, moved: &[(NodeName, f64)]) {
        for (node, level_s) in moved {
            if let Some(entry) = self.accounts.get_mut(node) {
                entry.stored_s = Some(*level_s);
            }
        }
    }

    /// A node was forgotten: its tests are no history of a new node of that name. Its debt is.
    pub fn forget(&mut self, node: &NodeName) {
        self.past.retain(|pair, _| !pair.has(node));
        self.tested.remove(node);
    }

    /// A test has ended, as the node says that ran it. The other end pays for no more than it can have cost: what was held
    /// for it, and what fills a link from the grant until now.
    pub fn finished(&mut self, by: &NodeName, spent: &Spent, now: Timestamp) {
        let own = |a: &Active| a.grant.id == spent.grant && a.from == *by;
        let index = self.active.iter().position(own);
        let overdue = || self.overdue.extract_if(spent.grant..=spent.grant, |_, a| own(a)).next().map(|(_, a)| a);
        let active = index.map(|i| self.active.swap_remove(i)).or_else(overdue);
        let Some(Active { grant, from, held_s, since }) = active else { return };
        let cost_s = self.spent_s(spent, held_s);
        let passed_s = self.rules.fills_s(now.since(since).get());
        for (node, cost_s) in [(&from, cost_s), (&grant.peer, cost_s.min(held_s).min(passed_s))] {
            if let Some(entry) = self.accounts.get_mut(node) {
                entry.account.charge(cost_s - held_s);
            }
        }
    }

    /// What a test really cost: each direction counts by itself, the dearer one is paid. Bytes without a rate cost
    /// all that was reserved for them.
    fn spent_s(&self, spent: &Spent, held_s: f64) -> f64 {
        let cost = |(bytes, bps): (u64, Option<f64>)| match bps {
            _ if bytes == 0 => 0.0,
            Some(bps) => self.rules.cost_s(bytes as f64, bps).min(BELIEVED * self.rules.dearest_s()),
            None => held_s,
        };
        spent.ways.map(cost).into_iter().fold(0.0, f64::max)
    }

    /// The grants of one node.
    pub fn of(&self, node: &NodeName) -> Vec<ThroughputGrant> {
        self.active.iter().filter(|a| a.from == *node).map(|a| a.grant.clone()).collect()
    }

    /// Ends what has expired or lost an end, and grants what is due. `other_probes` is the part of the share, 0 to 1,
    /// that echoes and traces take.
    pub fn tick(&mut self, now: Timestamp, live: &[NodeName], known: &BTreeMap<Pair, Known>, other_probes: f64) {
        self.other_probes = other_probes;
        self.end_overdue(now, &live.iter().collect());
        self.grow(now, live, other_probes);
        self.trust(now, known);
        self.begin_anew(known);
        let busy = self.active.iter().flat_map(|a| [a.from.clone(), a.grant.peer.clone()]);
        let mut taken: BTreeSet<NodeName> = busy.collect();
        for (pair, link, need) in self.due(now, live, known) {
            if taken.contains(&pair.0) || taken.contains(&pair.1) {
                continue;
            }
            let bytes = self.next_budget(&pair, &link, now);
            let cost = self.cost_s(bytes, &link);
            let pays = self.may_pay(&pair, cost, need);
            // No node saves up for a test that is only overdue.
            if !pays && need == Need::Pressing && !self.is_worth_it(&link) {
                continue;
            }
            taken.extend([pair.0.clone(), pair.1.clone()]);
            if pays {
                self.grant((pair, &link, need), (bytes, cost.1), now);
            }
        }
    }

    fn end_overdue(&mut self, now: Timestamp, alive: &BTreeSet<&NodeName>) {
        let over = |a: &mut Active| {
            let there = alive.contains(&a.from) && alive.contains(&a.grant.peer);
            !there || now.since(a.since).get() >= EXPIRY_S
        };
        self.overdue.extend(self.active.extract_if(.., over).map(|a| (a.grant.id, a)));
        while self.overdue.len() > OVERDUE {
            self.overdue.pop_first();
        }
    }

    /// Every account grows, also of nodes that are silent; of these a full one says nothing and is forgotten.
    fn grow(&mut self, now: Timestamp, live: &[NodeName], other_probes: f64) {
        let (rules, now_s) = (self.rules, now.seconds());
        self.accounts.values_mut().for_each(|entry| entry.account.grow(&rules, now_s, other_probes));
        self.accounts.retain(|node, entry| !entry.account.is_full() || live.contains(node));
        for node in live {
            let full = || Account::new(ShareAccount::full(now_s), None);
            self.accounts.entry(node.clone()).or_insert_with(full);
        }
    }

    /// Pairs that should be tested: newly suspect ones first, then what may overdraw, since the nodes of the first that cannot
    /// pay save up for it; of each kind those that waited longest.
    fn due(&self, now: Timestamp, live: &[NodeName], known: &BTreeMap<Pair, Known>) -> Vec<(Pair, Known, Need)> {
        let mut due: Vec<_> = Pair::among(live)
            .filter_map(|pair| {
                let link = known.get(&pair).copied().unwrap_or_default();
                let last = self.past.get(&pair);
                let need = self.need(&pair, &link, now);
                let due = last.is_none_or(|p| now.since(p.at).get() >= self.wait_s(p, &link, need));
                let order = (!self.is_urgent(&pair, &link), need == Need::Routine);
                due.then(|| (order, last.map(|p| p.at), pair, link, need))
            })
            .collect();
        due.sort_by(|a, b| (a.0, a.1, &a.2).cmp(&(b.0, b.1, &b.2)));
        due.into_iter().map(|(_, _, pair, link, need)| (pair, link, need)).collect()
    }

    /// Suspect, and not tested for that so often that more tests would hardly explain it.
    fn is_urgent(&self, pair: &Pair, link: &Known) -> bool {
        link.suspect && self.past.get(pair).is_none_or(|p| p.suspected < SUSPECT_TESTS)
    }

    /// Whether the last test was too small to know the link well.
    fn is_approximate(&self, last: &Past, link: &Known) -> bool {
        link.is_short || last.bytes.is_some_and(|bytes| bytes.saturating_mul(APPROXIMATE) < self.budget(link))
    }

    /// How long after its last test a link is due again, in seconds.
    fn wait_s(&self, last: &Past, link: &Known, need: Need) -> f64 {
        match link {
            // Suspicion never makes a link wait longer than trust would: it would grow old while its job is in trouble.
            Known { suspect: true, .. } => wait_after_s(last.suspected).min(self.config.retest_s as f64),
            Known { bandwidth_bps: None, .. } => FAILED_RETEST_S,
            _ if self.is_approximate(last, link) || need == Need::Pressing => SUSPECT_RETEST_S,
            _ => self.config.retest_s as f64,
        }
    }

    /// Suspicions that are over for a while are forgotten. Not at once: a test that slows the job down makes it suspect
    /// again.
    fn trust(&mut self, now: Timestamp, known: &BTreeMap<Pair, Known>) {
        for (pair, past) in &mut self.past {
            if known.get(pair).is_some_and(|link| link.suspect) {
                past.suspect_at = now;
            } else if now.since(past.suspect_at).get() >= TRUST_AFTER_S {
                past.suspected = 0;
            }
        }
    }

    /// Nodes of which no link is worth a test begin anew.
    fn begin_anew(&mut self, known: &BTreeMap<Pair, Known>) {
        let worth_it = known.iter().filter(|(_, link)| self.is_worth_it(link));
        let worth_it: BTreeSet<&NodeName> = worth_it.flat_map(|(pair, _)| [&pair.0, &pair.1]).collect();
        let others = self.accounts.iter_mut().filter(|(node, _)| !worth_it.contains(node));
        others.for_each(|(_, entry)| entry.worth_it = 0);
    }

    /// Bytes of a test, both directions together: enough for some time and for several round trips.
    fn budget(&self, link: &Known) -> u64 {
        self.budget_of(link, self.config.test_ms as f64 * 1e-3)
    }

    fn budget_of(&self, link: &Known, seconds: f64) -> u64 {
        let (least, most) = (self.config.min_bytes, self.config.max_bytes);
        let Some(bps) = link.bandwidth_bps else { return SCOUT_BYTES.max(least / APPROXIMATE).min(most) };
        let seconds = seconds.max(ROUND_TRIPS * 2.0 * link.latency_s);
        ((2.0 * bps / 8.0 * seconds) as u64).clamp(least, most)
    }

    /// Bytes of the next test of a pair.
    fn next_budget(&self, pair: &Pair, link: &Known, now: Timestamp) -> u64 {
        let past = self.past.get(pair);
        if link.suspect && past.is_some_and(|past| past.suspected == 0) {
            return self.budget_of(link, FIRST_LOOK_S.min(self.config.test_ms as f64 * 1e-3));
        }
        if let Some(last) = past.and_then(|past| past.bytes).filter(|_| link.is_short) {
            return last.saturating_mul(GROWTH).clamp(self.config.min_bytes, self.config.max_bytes);
        }
        let is_overlooked = !self.is_worth_it(link) && self.is_overlooked(pair, link, now);
        if is_overlooked { self.least_budget(link) } else { self.budget(link) }
    }

    /// The fewest bytes that do not leave a link known approximately.
    fn least_budget(&self, link: &Known) -> u64 {
        self.budget(link).div_ceil(APPROXIMATE).max(self.config.min_bytes)
    }

    /// What a test should cost each end and what it may cost at most, in seconds' worth of the share.
    fn cost_s(&self, bytes: u64, link: &Known) -> (f64, f64) {
        let most_s = self.rules.most_s(bytes as f64 / 2.0);
        let planned = link.bandwidth_bps.map(|bps| self.rules.cost_s(bytes as f64 / 2.0, bps));
        (planned.unwrap_or(most_s).min(most_s), most_s)
    }

    fn may_pay(&self, pair: &Pair, cost: (f64, f64), need: Need) -> bool {
        let can = |node| self.accounts.get(node).is_some_and(|e| e.account.may_pay(&self.rules, cost, need));
        can(&pair.0) && can(&pair.1)
    }

    fn need(&self, pair: &Pair, link: &Known, now: Timestamp) -> Need {
        match link {
            _ if self.is_urgent(pair, link) || link.bandwidth_bps.is_none() => Need::Urgent,
            _ if self.is_worth_it(link) && self.has_waited(pair, now) => Need::Pressing,
            _ if self.is_overlooked(pair, link, now) || self.is_to_be_followed(pair, link, now) => Need::Pressing,
            _ => Need::Routine,
        }
    }

    /// Whether a job runs on two nodes that have not been tested for long.
    fn is_overlooked(&self, pair: &Pair, link: &Known, now: Timestamp) -> bool {
        let (cost_s, _) = self.cost_s(self.least_budget(link), link);
        let paid_s = cost_s / (self.rules.growth() - self.other_probes).max(0.0);
        let oldest_s = OLDEST_S.max(self.config.retest_s as f64).max(OLDEST_PAID * paid_s);
        let is_old = |node| self.tested.get(node).is_none_or(|tested| now.since(tested.at).get() >= oldest_s);
        link.of_job && is_old(&pair.0) && is_old(&pair.1)
    }

    /// Whether a job runs on two nodes whose test was too short: one that follows may overdraw as seldom.
    fn is_to_be_followed(&self, pair: &Pair, link: &Known, now: Timestamp) -> bool {
        let is_old = |node| self.tested.get(node).is_none_or(|tested| now.since(tested.followed_at).get() >= OLDEST_S);
        link.of_job && link.is_short && is_old(&pair.0) && is_old(&pair.1)
    }

    /// Whether a test is expected to save more than it takes.
    fn is_worth_it(&self, link: &Known) -> bool {
        let (cost_s, _) = self.cost_s(self.budget(link), link);
        link.worth_s > WORTH * self.config.budget_share * cost_s
    }

    /// Whether the last tests of its nodes that were worth it are long enough ago. After a few what is believed depends on something else:
    /// more would not make it surer.
    fn has_waited(&self, pair: &Pair, now: Timestamp) -> bool {
        let wait_s = |e: &Account| wait_after_s(e.worth_it).min(self.config.retest_s as f64);
        let has_waited = |e: &Account| now.since(e.worth_it_at).get() >= wait_s(e);
        [&pair.0, &pair.1].iter().all(|node| self.accounts.get(*node).is_none_or(has_waited))
    }

    fn grant(&mut self, (pair, link, need): (Pair, &Known, Need), (bytes, held_s): (u64, f64), now: Timestamp) {
        let is_worth_it = need == Need::Pressing && self.is_worth_it(link);
        for node in [&pair.0, &pair.1] {
            let tested = self.tested.entry(node.clone()).or_default();
            tested.at = now;
            if need == Need::Pressing && link.is_short {
                tested.followed_at = now;
            }
            let Some(entry) = self.accounts.get_mut(node) else { continue };
            entry.account.charge(held_s);
            if is_worth_it {
                (entry.worth_it, entry.worth_it_at) = (entry.worth_it.saturating_add(1), now);
            }
        }
        let past = self.past.entry(pair.clone()).or_default();
        past.count += 1;
        past.at = now;
        past.bytes = Some(bytes);
        past.suspected = past.suspected.saturating_add(u32::from(link.suspect));
        // Both ends take turns, so that both learn.
        let (from, peer) = if past.count.is_multiple_of(2) { (pair.1, pair.0) } else { (pair.0, pair.1) };
        self.next_id += 1;
        let grant = ThroughputGrant { id: self.next_id, peer, budget_bytes: bytes, valid_ms: VALID_MS };
        self.active.push(Active { grant, from, since: now, held_s });
    }
}

fn wait_after_s(tests: u32) -> f64 {
    SUSPECT_RETEST_S * f64::from(1_u32 << tests.saturating_sub(SUSPECT_TESTS - 1).min(SUSPECT_DOUBLINGS))
}

#[cfg(test)]
mod tests;
