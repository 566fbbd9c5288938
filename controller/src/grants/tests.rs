#![allow(clippy::print_stdout)]

use super::*;
use crate::echoes;
use proptest::prelude::{ProptestConfig, prop_assert, prop_assert_eq, proptest};
use rand::{Rng, SeedableRng};
use rand_chacha::ChaCha8Rng;

fn names(n: usize) -> Vec<NodeName> {
    (0..n).map(|i| NodeName::new(&format!("n{i}")).unwrap()).collect()
}

fn all(live: &[NodeName], link: Known) -> BTreeMap<Pair, Known> {
    Pair::among(live).map(|p| (p, link)).collect()
}

/// On a clock of these days: `Timestamp` counts from 1970.
fn at(ms: u64) -> Timestamp {
    Timestamp(1_795_000_000_000_000 + ms * 1000)
}

fn link(bps: f64) -> Known {
    Known { bandwidth_bps: Some(bps), latency_s: 0.001, ..Known::default() }
}

fn scheduler() -> Scheduler {
    Scheduler::new(RawProbes::default(), 0)
}

/// What a test of a grant spends when the link has `bps`: it ends after its time.
fn spent(grant: &ThroughputGrant, bps: f64) -> Spent {
    let bytes = (grant.budget_bytes / 2).min((bps / 8.0 * MAX_TEST_S) as u64);
    Spent { grant: grant.id, ways: [(bytes, Some(bps)); 2] }
}

/// When a test ends whose directions go one after the other.
fn end(active: &Active, spent: &Spent) -> Timestamp {
    let busy_s: f64 =
        spent.ways.iter().map(|(bytes, bps)| bps.map_or(MAX_TEST_S, |bps| *bytes as f64 * 8.0 / bps)).sum();
    Timestamp(active.since.0 + (busy_s * 1e6) as u64)
}

fn end_all(s: &mut Scheduler, bps: f64) {
    for active in s.active.clone() {
        let spent = spent(&active.grant, bps);
        s.finished(&active.from, &spent, end(&active, &spent));
    }
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
    // Each is three hours of a scheduler.
    #![proptest_config(ProptestConfig::with_cases(32))]
    #[test]
    fn no_node_is_in_two_tests_and_every_pair_is_visited(n in 2usize..7, bps in 1e7..1e11f64, finish in 1usize..5) {
        let live = names(n);
        let known = all(&live, link(bps));
        let mut s = scheduler();
        let mut visits = BTreeMap::new();
        for second in 0..10_800 {
            let before: BTreeSet<u64> = s.active.iter().map(|a| a.grant.id).collect();
            s.tick(at(second * 1000), &live, &known, 0.0);
            assert_matching(&s)?;
            for a in s.active.iter().filter(|a| !before.contains(&a.grant.id)) {
                *visits.entry(Pair::new(&a.from, &a.grant.peer)).or_insert(0u64) += 1;
            }
            let done: Vec<_> = s.active.iter().take(finish).map(|a| (a.clone(), spent(&a.grant, bps))).collect();
            done.iter().for_each(|(active, spent)| s.finished(&active.from, spent, end(active, spent)));
        }
        prop_assert_eq!(visits.len(), n * (n - 1) / 2, "a pair was never tested");
        let (least, most) = (visits.values().min().unwrap(), visits.values().max().unwrap());
        // The oldest pair that is free goes first: with an odd number of nodes some wait for two rounds.
        prop_assert!(*most <= 2 * least + 4, "{visits:?}");
    }
}

/// Nodes with one NIC each behind a switch, agents and a controller that come and go.
struct World {
    scheduler: Scheduler,
    nodes: Vec<NodeName>,
    bps: f64,
    known: BTreeMap<Pair, Known>,
    /// Second until which a node is silent.
    silent: BTreeMap<NodeName, u64>,
    disk: BTreeMap<NodeName, f64>,
    /// Bits that each node sent and received per second, the larger of both.
    wire: BTreeMap<NodeName, Vec<f64>>,
    tests: u64,
    random: ChaCha8Rng,
}

/// TCP's headers and acknowledgements, and frames.
const WIRE: f64 = 1538.0 / 1448.0 + 0.03;

impl World {
    fn new(nodes: usize, bps: f64, seed: u64) -> Self {
        Self {
            scheduler: Scheduler::new(RawProbes::default(), 1),
            nodes: names(nodes),
            bps,
            known: BTreeMap::new(),
            silent: BTreeMap::new(),
            disk: BTreeMap::new(),
            wire: BTreeMap::new(),
            tests: 0,
            random: ChaCha8Rng::seed_from_u64(seed),
        }
    }

    fn carry(&mut self, node: &NodeName, second: u64, bits: f64) {
        let of_node = self.wire.entry(node.clone()).or_default();
        of_node.resize(of_node.len().max(second as usize + 1), 0.0);
        of_node[second as usize] += bits;
    }

    fn live(&self, second: u64) -> Vec<NodeName> {
        self.nodes.iter().filter(|n| self.silent.get(*n).is_none_or(|until| *until <= second)).cloned().collect()
    }

    fn second(&mut self, second: u64) {
        if self.random.random_bool(0.002) {
            self.restart(second);
        }
        for node in self.nodes.clone() {
            if self.random.random_bool(0.004) {
                let until = second + self.random.random_range(1..120);
                self.silent.insert(node, until);
            }
        }
        let live = self.live(second);
        let echoes = echoes::plan(&self.scheduler.config, &live, &self.known);
        for node in &live {
            // Requests and answers to every other node: 88 bytes in UDP in IPv4 in a frame.
            let packets = 2.0 * (live.len() - 1) as f64 / (echoes.interval_ms as f64 * 1e-3);
            self.carry(node, second, packets * f64::from(88 + 8 + 20 + 38) * 8.0);
        }
        let before: BTreeSet<u64> = self.scheduler.active.iter().map(|a| a.grant.id).collect();
        self.scheduler.tick(at(second * 1000), &live, &self.known, echoes.other_probes);
        let moved = self.scheduler.moved();
        self.scheduler.stored(&moved);
        self.disk.extend(moved);
        let begun: Vec<Active> =
            self.scheduler.active.iter().filter(|a| !before.contains(&a.grant.id)).cloned().collect();
        begun.into_iter().for_each(|active| self.test(&active, second));
    }

    /// The controller is killed: only what is on disk is left.
    fn restart(&mut self, second: u64) {
        let next = self.scheduler.next_id + 1000;
        self.scheduler = Scheduler::new(RawProbes::default(), next);
        for (node, level_s) in &self.disk {
            self.scheduler.restore(node.clone(), *level_s, at(second * 1000));
        }
    }

    /// Some fail in the middle, some reports are lost, some links look changed afterwards.
    fn test(&mut self, active: &Active, second: u64) {
        self.tests += 1;
        let done = spent(&active.grant, self.bps);
        let part = if self.random.random_bool(0.1) { self.random.random_range(0.0..1.0) } else { 1.0 };
        let bits = part * done.ways[0].0 as f64 * 8.0 * WIRE;
        for node in [&active.from, &active.grant.peer] {
            self.carry(node, second, bits);
        }
        let pair = Pair::new(&active.from, &active.grant.peer);
        if part < 1.0 {
            let failed = Spent { ways: [(active.grant.budget_bytes / 2, None); 2], ..done };
            self.scheduler.finished(&active.from, &failed, end(active, &done));
        } else if self.random.random_bool(0.95) {
            self.scheduler.finished(&active.from, &done, end(active, &done));
            // A short test does not see all of a fast link.
            let seen = self.bps * self.random.random_range(0.2..1.0);
            let (suspect, of_job) = (self.random.random_bool(0.3), pair.has(&self.nodes[0]));
            self.known.insert(pair, Known { suspect, of_job, ..link(seen) });
        }
    }

    /// The largest share of its capacity that any node used in any hour.
    fn most_in_an_hour(&self) -> f64 {
        let of_node = |bits: &Vec<f64>| {
            let mut sum = 0.0;
            let rolling = bits.iter().enumerate().map(|(i, new)| {
                sum += new - if i >= 3600 { bits[i - 3600] } else { 0.0 };
                sum
            });
            rolling.fold(0.0, f64::max)
        };
        self.wire.values().map(of_node).fold(0.0, f64::max) / (3600.0 * self.bps)
    }
}

/// The default budget: in every hour, from the first on, no NIC carries more than 1 % of its capacity for probes,
/// headers and echoes included, whatever restarts, fails, is silent or looks changed.
#[test]
fn every_nic_carries_less_than_a_percent_in_every_hour() {
    for (i, bps) in [1e6, 1e7, 1e8, 1e9, 1e10].into_iter().enumerate() {
        for nodes in [2, 4, 9] {
            let mut world = World::new(nodes, bps, i as u64 * 10 + nodes as u64);
            (0..3 * 3600).for_each(|second| world.second(second));
            let most = world.most_in_an_hour();
            println!("{nodes} nodes at {bps:e} bit/s: {:.3} % in the worst hour, {} tests", most * 100.0, world.tests);
            assert!(most <= 0.01, "{nodes} nodes at {bps} bit/s: {:.3} %", most * 100.0);
            assert!(world.tests > 10, "{nodes} nodes at {bps} bit/s: {} tests", world.tests);
            let pairs = nodes * (nodes - 1) / 2;
            assert!(bps < 1e7 || world.known.len() == pairs, "{nodes} nodes at {bps} bit/s: a pair was never tested");
        }
    }
}

#[test]
fn first_measurements_do_not_wait_for_a_budget_and_rough_ones_are_followed_up() {
    let live = names(4);
    let mut s = scheduler();
    let mut tested = BTreeSet::new();
    for second in 0..8 {
        s.tick(at(second * 1000), &live, &BTreeMap::new(), 0.0);
        tested.extend(s.active.iter().map(|a| Pair::new(&a.from, &a.grant.peer)));
        end_all(&mut s, 1e8);
    }
    assert_eq!(tested.len(), 6, "{tested:?}");
    let known = all(&live, link(1e9));
    s.tick(at(12_000), &live, &known, 0.0);
    assert_eq!(s.active.len(), 2, "256 kB say little about 1 Gbit/s");
    assert!(s.active.iter().all(|a| a.grant.budget_bytes == 50_000_000), "{:?}", s.active);
}

#[test]
fn suspect_links_go_first_and_soon_and_debt_is_bounded() {
    let live = names(4);
    let mut known = all(&live, link(1e9));
    let mut s = scheduler();
    known.keys().cloned().collect::<Vec<_>>().into_iter().for_each(|p| s.seed(p, at(0)));
    s.tick(at(3000), &live, &known, 0.0);
    assert!(s.active.is_empty(), "nothing is due");
    let pair = Pair::new(&live[2], &live[3]);
    known.get_mut(&pair).unwrap().suspect = true;
    s.tick(at(4000), &live, &known, 0.0);
    assert_eq!(s.active.len(), 1);
    assert_eq!(Pair::new(&s.active[0].from, &s.active[0].grant.peer), pair);
    let mut tests: Vec<u64> = Vec::new();
    for second in 5..3600 {
        end_all(&mut s, 1e9);
        s.tick(at(second * 1000), &live, &known, 0.0);
        tests.extend(s.active.iter().filter(|a| Pair::new(&a.from, &a.grant.peer) == pair).map(|_| second));
    }
    let soon = tests.iter().filter(|second| **second < 60).count();
    assert!((2..=6).contains(&soon), "as soon as the budget allows: {tests:?}");
    assert!((40..=185).contains(&tests.len()), "then as others, while that explains nothing: {tests:?}");
    known.get_mut(&pair).unwrap().suspect = false;
    s.tick(at(3_610_000), &live, &known, 0.0);
    assert!(s.past[&pair].suspected > 0, "the test itself may have made it look better");
    s.tick(at(3_625_000), &live, &known, 0.0);
    assert_eq!(s.past[&pair].suspected, 0, "trusted again");
}

/// A job that goes on deviating for a reason of its own must not make its links grow old.
#[test]
fn a_link_under_lasting_suspicion_is_tested_as_often_as_a_trusted_one() {
    let tests = |suspect: bool| {
        let (live, config) = (names(2), RawProbes { retest_s: 60, ..RawProbes::default() });
        let known = all(&live, Known { suspect, ..link(1e9) });
        let mut s = Scheduler::new(config, 0);
        let mut tests = 0;
        for second in 0..3600 {
            s.tick(at(second * 1000), &live, &known, 0.0);
            tests += s.active.len();
            end_all(&mut s, 1e9);
        }
        tests
    };
    let (suspect, trusted) = (tests(true), tests(false));
    assert!(trusted > 20 && suspect >= trusted, "{suspect} tests of a suspect link, {trusted} of a trusted one");
}

/// Routine tests that cannot be paid make their nodes save up: not before what a job's decisions rest on.
#[test]
fn what_is_worth_it_goes_before_routine_that_waited_longer() {
    let live = names(3);
    let mut s = scheduler();
    let known: BTreeMap<Pair, Known> = all(&live, link(1e9))
        .into_iter()
        .map(|(p, link)| (p.clone(), Known { worth_s: if p.has(&live[0]) { 1.0 } else { 0.0 }, ..link }))
        .collect();
    s.tick(at(0), &live, &known, 0.0);
    let routine = Pair::new(&live[1], &live[2]);
    s.active.clear();
    known.keys().cloned().collect::<Vec<_>>().into_iter().for_each(|p| {
        let ago = if p == routine { 1000 } else { 500 };
        s.past.insert(p, Past { at: at(1_000_000 - ago * 1000), ..Past::default() });
    });
    s.accounts.values_mut().for_each(|entry| entry.account = ShareAccount::restored(-100.0, at(1_000_000).seconds()));
    s.tick(at(1_000_000), &live, &known, 0.0);
    assert_eq!(s.active.len(), 1, "{:?}", s.active);
    assert!(Pair::new(&s.active[0].from, &s.active[0].grant.peer).has(&live[0]), "{:?}", s.active);
}

/// A test that is worth what it takes, 0.2 s in each direction at once, follows as soon as the one before can have been seen; a link whose
/// tests do not make it surer is tested as seldom as all others in the end.
#[test]
fn tests_that_are_worth_it_follow_soon_but_not_for_ever() {
    let live = names(2);
    let tested_s = |worth_s: f64| {
        let mut s = scheduler();
        let known = all(&live, Known { worth_s, ..link(1e9) });
        let mut tested = Vec::new();
        for second in 0..120 {
            s.tick(at(second * 1000), &live, &known, 0.0);
            if !s.active.is_empty() {
                tested.push(second);
            }
            s.accounts
                .values_mut()
                .for_each(|entry| entry.account = ShareAccount::restored(60.0, at(second * 1000).seconds()));
            end_all(&mut s, 1e9);
        }
        tested
    };
    assert_eq!(tested_s(0.5), [0, 3, 6, 9, 15, 27, 47, 67, 87, 107]);
    assert_eq!(tested_s(0.3), [0, 20, 40, 60, 80, 100]);
}

/// One test tells of all links what they have in common: what it is worth is no reason to test each of them four times.
#[test]
fn a_node_with_many_peers_is_not_tested_more_often() {
    let tests = |nodes: usize| {
        let (live, mut s) = (names(nodes), scheduler());
        let known = all(&live, Known { worth_s: 0.5, ..link(1e9) });
        let mut of_first = 0;
        for second in 0..120 {
            let full = ShareAccount::restored(60.0, at(second * 1000).seconds());
            s.past.values_mut().for_each(|past| past.at = at(0));
            s.accounts.values_mut().for_each(|entry| entry.account = full);
            s.tick(at(second * 1000), &live, &known, 0.0);
            let pressing = |a: &&Active| s.accounts[&a.from].worth_it_at == at(second * 1000);
            of_first +=
                s.active.iter().filter(pressing).filter(|a| a.from == live[0] || a.grant.peer == live[0]).count();
            end_all(&mut s, 1e9);
        }
        of_first
    };
    let (two, nine) = (tests(2), tests(9));
    assert!(two >= 4 && nine <= two + 1, "{two} of two nodes, {nine} of nine");
}

/// A peer outside the job that cannot be measured is tried every ten seconds: the job's own link is tested as seldom as without it.
#[test]
fn tests_with_other_nodes_do_not_count_for_a_job() {
    let tests = |nodes: usize| {
        let (live, mut s) = (names(nodes), scheduler());
        let own = Pair::new(&live[0], &live[1]);
        let mut known = all(&live, Known { bandwidth_bps: None, ..link(1e9) });
        known.insert(own.clone(), Known { worth_s: 0.5, ..link(1e9) });
        let mut of_job = 0;
        for second in 0..120 {
            let full = ShareAccount::restored(60.0, at(second * 1000).seconds());
            s.accounts.values_mut().for_each(|entry| entry.account = full);
            s.tick(at(second * 1000), &live, &known, 0.0);
            of_job += s.active.iter().filter(|a| Pair::new(&a.from, &a.grant.peer) == own).count();
            end_all(&mut s, 1e9);
        }
        of_job
    };
    let (alone, beside) = (tests(2), tests(3));
    assert!(alone >= 8 && beside <= alone, "{alone} alone, {beside} beside another node");
}

/// A burst of urgent tests leaves a debt that takes minutes to pay. What a job's decisions rest on does not wait for that.
#[test]
fn what_is_worth_it_does_not_wait_for_the_debts_of_suspect_links() {
    let live = names(4);
    let tests = |worth_s: f64| {
        let config = RawProbes { budget_share: 0.3, retest_s: 10, ..RawProbes::default() };
        let mut s = Scheduler::new(config, 0);
        let mut tests = 0;
        for second in 0..120 {
            let fell = (10..30).contains(&second);
            let known = all(&live, Known { suspect: fell, worth_s, ..link(1e8) });
            s.tick(at(second * 1000), &live, &known, 0.0);
            tests += if second >= 40 { s.active.len() } else { 0 };
            // What was planned for a faster link lasts as long as a test may.
            let bps = if fell { 1e5 } else { 1e8 };
            end_all(&mut s, bps);
        }
        tests
    };
    let (pressing, routine) = (tests(1.0), tests(0.0));
    assert!(pressing >= 12 && routine < pressing / 2, "{pressing} tests that are worth it, {routine} others");
}

/// After a fall the accounts are in debt, and messages are too small to show that the network has become faster again.
#[test]
fn nodes_of_a_job_are_tested_now_and_then_whatever_they_owe_and_leave_room_for_what_is_worth_it() {
    let live = names(4);
    for bps in [1e6, 6e6, 1e9] {
        let run = |of_job: bool| {
            let (mut s, mut last) = (scheduler(), vec![0u64; live.len()]);
            let (mut longest_s, mut tests, known) = (0, 0, all(&live, Known { of_job, ..link(bps) }));
            for second in 0..7200 {
                s.tick(at(1000 * second), &live, &known, 0.4);
                if second == 0 {
                    s.accounts.values_mut().for_each(|entry| entry.account.charge(150.0));
                }
                for (node, last) in live.iter().zip(&mut last) {
                    if s.active.iter().any(|a| Pair::new(&a.from, &a.grant.peer).has(node)) {
                        *last = second;
                        tests += 1;
                    }
                    longest_s = longest_s.max(second - *last);
                }
                end_all(&mut s, bps);
            }
            let level_s = s.accounts.values().map(|entry| entry.account.level_s()).fold(f64::INFINITY, f64::min);
            // Another network, about which a test is worth much.
            let known = all(&live, Known { of_job, worth_s: 10.0, ..link(bps) });
            s.tick(at(7_200_000), &live, &known, 0.4);
            (longest_s, tests, level_s, s.active.len())
        };
        let [of_job, other] = [true, false].map(run);
        let cost_s = scheduler().rules.cost_s(scheduler().least_budget(&link(bps)) as f64 / 2.0, bps);
        let most_s = OLDEST_S.max(OLDEST_PAID * cost_s / (scheduler().rules.growth() - 0.4)) + 5.0;
        assert!(of_job.0 as f64 <= most_s && other.0 > 150, "{bps}: {of_job:?} and {other:?}");
        assert!(of_job.2 > -60.0, "{bps}: they pay for themselves: {of_job:?}");
        assert_eq!(of_job.3, 2, "{bps}: two tests that are worth it run: {of_job:?}");
    }
}

/// What passed at once may have passed through a shaper's token bucket.
#[test]
fn a_short_test_is_followed_by_one_that_is_some_times_as_large() {
    let live = names(2);
    let mut s = scheduler();
    s.tick(at(0), &live, &all(&live, Known::default()), 0.0);
    let scout = s.active[0].grant.budget_bytes;
    end_all(&mut s, 1e10);
    let short = all(&live, Known { of_job: true, is_short: true, ..link(1e10) });
    s.accounts.values_mut().for_each(|entry| entry.account.charge(100.0));
    s.tick(at(4000), &live, &short, 0.0);
    assert_eq!(s.active[0].grant.budget_bytes, GROWTH * scout);
    end_all(&mut s, 1e10);
    s.tick(at(8000), &live, &short, 0.0);
    assert!(s.active.is_empty(), "it may overdraw for that every {OLDEST_S} s");
    s.tick(at(32_000), &live, &short, 0.0);
    assert_eq!(s.active[0].grant.budget_bytes, RawProbes::default().max_bytes.min(GROWTH * GROWTH * scout));
}

/// A network falls to a fraction of what a test of it was sized for, and no agent sees it by itself.
#[test]
fn a_fall_is_measured_more_than_once_before_the_accounts_are_in_debt() {
    let live = names(2);
    let mut s = scheduler();
    let pair = Pair::new(&live[0], &live[1]);
    let mut known = all(&live, Known { latency_s: 1e-4, ..link(2.4e10) });
    s.seed(pair.clone(), at(0));
    s.tick(at(3000), &live, &known, 0.0);
    let mut tests = Vec::new();
    for second in 4..30 {
        known.get_mut(&pair).unwrap().suspect = true;
        s.tick(at(second * 1000), &live, &known, 0.0);
        if let Some(active) = s.active.first() {
            tests.push((second, active.grant.budget_bytes));
            known.get_mut(&pair).unwrap().bandwidth_bps = Some(5e7);
        }
        end_all(&mut s, 5e7);
    }
    assert!(tests.len() >= 4, "{tests:?}");
    assert!(tests[0].1 <= (128 << 20) / 8 && s.accounts[&live[0]].account.level_s() > -200.0, "{tests:?} {s:?}");
}

/// One end of a test says how long it lasted. What the other end pays is no more than the test can have cost until then.
#[test]
fn a_report_charges_the_other_end_for_no_more_than_the_time_that_passed() {
    let live = names(2);
    let level = |s: &Scheduler, node: &NodeName| s.accounts[node].account.level_s();
    let after = |by: usize, ways, ms| {
        let mut s = scheduler();
        s.tick(at(0), &live, &all(&live, link(1e9)), 0.0);
        let grant = s.of(&live[0])[0].clone();
        s.finished(&live[by], &Spent { grant: grant.id, ways }, at(ms));
        [&live[0], &live[1]].map(|node| level(&s, node).round())
    };
    let honest = [(25_000_000, Some(1e9)); 2];
    assert_eq!(after(0, honest, 500), [38.0, 38.0], "0.2 s of either direction");
    let lie = [(25_000_000, Some(1e4)); 2];
    assert_eq!(after(0, lie, 500), [-740.0, 10.0], "half a second is all that it can have taken");
    assert_eq!(after(0, lie, 60_000), [-740.0, -340.0], "and never more than what was granted");
    assert_eq!(after(1, [(0, None); 2], 500), [-340.0, -340.0], "the grant was the other's");
}

#[test]
fn grants_of_the_dead_expire_and_turns_are_taken() {
    let live = names(2);
    let mut s = Scheduler::new(RawProbes::default(), 41);
    let tick = |s: &mut Scheduler, ms, live: &[NodeName]| s.tick(at(ms), live, &BTreeMap::new(), 0.0);
    tick(&mut s, 0, &live);
    assert_eq!(s.of(&live[0])[0].id, 42);
    assert_eq!(s.of(&live[0])[0].peer, live[1]);
    tick(&mut s, 1000, &live[..1]);
    assert!(s.of(&live[0]).is_empty());
    tick(&mut s, 2000, &live);
    assert!(s.of(&live[1]).is_empty(), "a node that was silent for a moment has been tested all the same");
    tick(&mut s, 10_000, &live);
    tick(&mut s, 24_999, &live);
    assert_eq!(s.of(&live[1]).len(), 1);
    tick(&mut s, 25_000, &live);
    assert!(s.of(&live[1]).is_empty() && s.of(&live[0])[0].peer == live[1]);
}

#[test]
fn debts_survive_silence_and_restarts_and_late_reports_are_settled() {
    let live = names(2);
    let mut s = scheduler();
    let level = |s: &Scheduler, node: &NodeName| s.accounts[node].account.level_s();
    s.tick(at(0), &live, &BTreeMap::new(), 0.0);
    let grant = s.of(&live[0])[0].clone();
    let held = level(&s, &live[0]);
    assert!((-60.0..-50.0).contains(&held), "256 kB at 1 Mbit/s, both ends: {held}");
    let moved = s.moved();
    assert_eq!(s.moved(), moved, "until they are stored");
    s.stored(&moved);
    let stored: BTreeMap<NodeName, f64> = moved.into_iter().collect();
    assert_eq!(stored[&live[1]], held);
    assert!(s.moved().is_empty(), "nothing moved");
    s.tick(at(5000), &live[..1], &BTreeMap::new(), 0.0);
    assert!(level(&s, &live[1]) < held + 5.0, "silence pays no debt");
    s.finished(&live[0], &spent(&grant, 1e8), at(5000));
    assert!(level(&s, &live[0]) > 55.0, "the report came late, but it came");
    let mut later = scheduler();
    later.restore(live[0].clone(), stored[&live[0]], at(10_000));
    later.tick(at(10_000), &live, &BTreeMap::new(), 0.0);
    assert!(level(&later, &live[0]) < 2.0 * held + 60.0, "a restart pays no debt");
}

#[test]
fn what_a_test_cost_is_read_from_its_dearer_direction() {
    let s = scheduler();
    let cost = |ways| s.spent_s(&Spent { grant: 1, ways }, 77.0);
    assert_eq!(cost([(0, None), (0, None)]), 0.0);
    assert_eq!(cost([(1, None), (0, None)]), 77.0);
    let slow_back = cost([(125_000, Some(1e9)), (125_000, Some(1e6))]);
    assert!((slow_back - 110.0).abs() < 1e-9, "{slow_back}");
    assert_eq!(cost([(1 << 40, Some(1.0)), (0, None)]), 800.0, "nonsense is bounded");
    let report = |out_bytes| ThroughputReport {
        grant: 1,
        peer: names(1)[0].clone(),
        out_bps: None,
        back_bps: None,
        out_is_lower_bound: false,
        back_is_lower_bound: false,
        bytes: 10,
        out_bytes,
        took_us: None,
        cpu_us: None,
        error: None,
    };
    assert_eq!(Spent::from(&report(Some(99))).ways.map(|w| w.0), [10, 0]);
    assert_eq!(Spent::from(&report(None)).ways.map(|w| w.0), [5, 5]);
}
