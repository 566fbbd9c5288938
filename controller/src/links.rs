//! The link matrix as the controller sees it: agents' estimates and active tests put together. Pure.

use flexcomm_domain::{BANDWIDTH_CONFIDENCE_AGE_S, Bandwidth, Link, LinkMatrix, NodeName, Seconds, Timestamp};
use flexcomm_planner::{LinkTest, Links};
use flexcomm_wire::api::LinkView;
use std::collections::{BTreeMap, BTreeSet};

use crate::store::{LinkRow, TestRow};

/// How far a single active test is trusted that the agent's estimator has not seen (it ran from the other side).
const TEST_CONFIDENCE: f64 = 0.7;

/// A test counts only when it is newer by this than the estimator's newest sample: what an agent tests itself is in
/// its next estimate a moment later.
const CLEARLY_NEWER_MS: f64 = 2000.0;

/// Two tests in a row, by whichever end, that are so many times slower or faster than an estimate outweigh it: its agent
/// made half of the tests at most, and needs three to believe a change. A job that shares the link takes a part of it, not
/// almost all; and of a rise that latency hides no step ever tells.
const FAR_OFF: f64 = 6.0;

/// Estimates that differ by less than this factor agree.
const AGREE: f64 = 2.0;

/// For so long a test stands against what the estimates of both ends agree on, in seconds: long enough for the two more that
/// a suspect link has by then.
const STANDS_S: f64 = 30.0;

/// Below this a latency costs a step nothing, and a job that saturates the link disturbs its measurement the most: how
/// sure it is does not matter.
const NEGLIGIBLE_LATENCY_US: f64 = 50.0;

/// Links by (from, to).
pub type LinkMap = BTreeMap<(NodeName, NodeName), LinkView>;

/// Outdated tests count as if they had found what is estimated now: those against which both ends' estimates agree, by
/// samples taken after the test. No end can find a link faster than it is, so a slow test is outdated then, or wrong. A fast
/// one may find what the job's short messages do not show: it is outdated only when the estimate has fallen since.
pub fn weighed(mut tests: Vec<TestRow>, links: &[LinkRow], now: Timestamp) -> Vec<TestRow> {
    let links: BTreeMap<_, _> = links.iter().map(|row| ((&row.src, &row.dst), row)).collect();
    let sampled_since = |test: &TestRow, src: &NodeName, dst: &NodeName| {
        let row = links.get(&(src, dst))?;
        let age_s = row.report.bandwidth_age_ms * 1e-3 + now.since(row.received).get();
        row.report.bandwidth_bps.filter(|_| age_s < now.since(test.received).get())
    };
    for test in tests.iter_mut().filter(|test| now.since(test.received).get() >= STANDS_S) {
        let ends = sampled_since(test, &test.src, &test.dst).zip(sampled_since(test, &test.dst, &test.src));
        let Some((there, back)) = ends else { continue };
        let agree = there <= AGREE * back && back <= AGREE * there;
        if agree && far(test, there) && (test.bandwidth_bps < there || fell_since(test, there)) {
            (test.bandwidth_bps, test.is_lower_bound, test.previous_bps) = (there, false, None);
        }
    }
    tests
}

/// Whether an estimate is lower than it was when the test was made.
fn fell_since(test: &TestRow, estimate_bps: f64) -> bool {
    test.estimate_bps.is_none_or(|then| estimate_bps * AGREE < then)
}

fn far(test: &TestRow, estimate_bps: f64) -> bool {
    let slower = test.bandwidth_bps * FAR_OFF < estimate_bps && !test.is_lower_bound;
    slower || test.bandwidth_bps > FAR_OFF * estimate_bps
}

/// Puts estimates and tests together: a test that the estimator cannot know of counts (it ran from the other side). Ages grow with the
/// controller's clock since the report arrived, and confidence in bandwidths falls with them as it does in agents.
pub fn merge(links: &[LinkRow], tests: &[TestRow], now: Timestamp) -> LinkMap {
    let tests = weighed(tests.to_vec(), links, now);
    let tests: BTreeMap<_, _> = tests.iter().map(|t| ((&t.src, &t.dst), t)).collect();
    let view = |row: &LinkRow| {
        let waited_ms = now.since(row.received).get() * 1e3;
        let mut view = LinkView {
            from: row.src.clone(),
            to: row.dst.clone(),
            latency_us: row.report.latency_us,
            bandwidth_bps: row.report.bandwidth_bps,
            jitter_us: row.report.jitter_us,
            loss_out: row.report.loss_out,
            loss_back: row.report.loss_back,
            by_icmp: row.report.by_icmp,
            latency_confidence: row.report.latency_confidence,
            bandwidth_confidence: row.report.bandwidth_confidence * aged(waited_ms),
            latency_age_ms: row.report.latency_age_ms + waited_ms,
            bandwidth_age_ms: row.report.bandwidth_age_ms + waited_ms,
        };
        if let Some(test) = tests.get(&(&row.src, &row.dst)) {
            let test_age_ms = now.since(test.received).get() * 1e3;
            let confidence = TEST_CONFIDENCE * aged(test_age_ms);
            // A lower bound confirms what it is near to, and says nothing where more is known.
            let says = !test.is_lower_bound || view.bandwidth_bps.is_some_and(|bps| bps < AGREE * test.bandwidth_bps);
            let is_newer = test_age_ms + CLEARLY_NEWER_MS < view.bandwidth_age_ms;
            if view.bandwidth_bps.is_none() || is_newer && says {
                let known = view.bandwidth_bps.or(test.previous_bps);
                let least = known.filter(|_| test.is_lower_bound).unwrap_or_default();
                view.bandwidth_bps = Some(test.bandwidth_bps.max(least));
                view.bandwidth_age_ms = test_age_ms;
                view.bandwidth_confidence = confidence;
            } else if let Some(found) = far_off(test, view.bandwidth_bps) {
                view.bandwidth_bps = Some(found);
                view.bandwidth_age_ms = test_age_ms;
                view.bandwidth_confidence = confidence;
            }
        }
        ((row.src.clone(), row.dst.clone()), view)
    };
    links.iter().map(view).collect()
}

/// Both ends of a link measure the same round trip. Where they differ by more than this factor one of them is wrong.
const ENDS_DIFFER: f64 = 4.0;

/// ... and by at least this much, in microseconds.
const ENDS_FLOOR_US: f64 = 1000.0;

/// Of two ends that differ, one whose newest sample is older is wrong for want of news.
const ENDS_AGE_MS: f64 = 10_000.0;

/// Claims of two ends about the two directions of a link are asymmetric when they differ by more than this factor. Links are,
/// too: this alone makes nobody wrong.
const ASYMMETRIC: f64 = 4.0;

/// A node whose claims about a link count as another's.
#[derive(Debug, Clone, PartialEq)]
pub struct Disagreement {
    /// The end that is not believed.
    pub wrong: NodeName,
    /// The end that is.
    pub right: NodeName,
    /// What the first one says, microseconds.
    pub claimed_us: f64,
    /// What the other says, microseconds.
    pub believed_us: f64,
    /// Whether the first one has news, and contradicts.
    pub fresh: bool,
}

impl Disagreement {
    /// As a sentence that names both.
    pub fn words(&self) -> String {
        let ms = |us: f64| us * 1e-3;
        let Self { wrong, right, .. } = self;
        let (claimed, believed) = (ms(self.claimed_us), ms(self.believed_us));
        format!(
            "node {wrong} reports a latency of {claimed:.3} ms to {right}, which reports {believed:.3} ms back: that of {right} counts"
        )
    }
}

/// Where the two ends of a link differ on its latency, each link once. Of the two, the one without news is wrong; else the one
/// that differs from more of its peers; else the one that says more, since queues and mistakes make a round trip longer.
pub fn disagreements(links: &LinkMap) -> Vec<Disagreement> {
    let ends = |((from, to), there): (&(NodeName, NodeName), &LinkView)| {
        let back = links.get(&(to.clone(), from.clone()))?;
        let (longer_us, shorter_us) = (there.latency_us, back.latency_us);
        let differ = longer_us > ENDS_DIFFER * shorter_us && longer_us - shorter_us > ENDS_FLOOR_US;
        differ.then(|| (from.clone(), to.clone()))
    };
    let differing: Vec<(NodeName, NodeName)> = links.iter().filter_map(ends).collect();
    let mut peers: BTreeMap<&NodeName, usize> = BTreeMap::new();
    for node in differing.iter().flat_map(|(longer, shorter)| [longer, shorter]) {
        *peers.entry(node).or_default() += 1;
    }
    let judged = |(longer, shorter): &(NodeName, NodeName)| {
        let view = |from: &NodeName, to: &NodeName| links.get(&(from.clone(), to.clone()));
        let stale = |from, to| view(from, to).is_none_or(|v| v.latency_age_ms > ENDS_AGE_MS);
        let (longer_stale, shorter_stale) = (stale(longer, shorter), stale(shorter, longer));
        let believe_longer =
            if longer_stale != shorter_stale { shorter_stale } else { peers.get(shorter) > peers.get(longer) };
        let (wrong, right) = if believe_longer { (shorter, longer) } else { (longer, shorter) };
        Some(Disagreement {
            wrong: wrong.clone(),
            right: right.clone(),
            claimed_us: view(wrong, right)?.latency_us,
            believed_us: view(right, wrong)?.latency_us,
            fresh: !stale(wrong, right),
        })
    };
    differing.iter().filter_map(judged).collect()
}

/// Takes the latency of the end that is believed where two ends differ.
pub fn agreed(mut links: LinkMap) -> LinkMap {
    for ends in disagreements(&links) {
        let Some(right) = links.get(&(ends.right.clone(), ends.wrong.clone())).cloned() else { continue };
        if let Some(view) = links.get_mut(&(ends.wrong, ends.right)) {
            view.latency_us = right.latency_us;
            view.latency_age_ms = right.latency_age_ms;
            view.latency_confidence = right.latency_confidence;
        }
    }
    links
}

/// Of a job's nodes, those whose claims about links stand against their peers', the one against most first; at most two, as
/// on a job of two nodes either may be wrong.
pub fn asymmetric(links: &LinkMap, nodes: &[NodeName]) -> Vec<NodeName> {
    let differ = |a: f64, b: f64| a > ASYMMETRIC * b || b > ASYMMETRIC * a;
    let of_job: BTreeSet<&NodeName> = nodes.iter().collect();
    let mut against: BTreeMap<&NodeName, usize> = BTreeMap::new();
    for ((from, to), there) in links.iter().filter(|((from, to), _)| of_job.contains(from) && of_job.contains(to)) {
        let Some(back) = links.get(&(to.clone(), from.clone())) else { continue };
        let bandwidth = there.bandwidth_bps.zip(back.bandwidth_bps).is_some_and(|(a, b)| differ(a, b));
        if bandwidth || differ(there.latency_us, back.latency_us) {
            *against.entry(from).or_default() += 1;
        }
    }
    let mut found: Vec<(&NodeName, usize)> = against.into_iter().collect();
    found.sort_by_key(|(_, peers)| std::cmp::Reverse(*peers));
    found.into_iter().take(2).map(|(node, _)| node.clone()).collect()
}

/// The links without what one node says of them: as its peers report the other direction.
pub fn without_claims_of(links: &LinkMap, node: &NodeName) -> LinkMap {
    let mirrored = |((from, to), view): (&(NodeName, NodeName), &LinkView)| {
        let back = links.get(&(to.clone(), from.clone())).filter(|_| from == node);
        let view =
            back.map_or_else(|| view.clone(), |back| LinkView { from: from.clone(), to: to.clone(), ..back.clone() });
        ((from.clone(), to.clone()), view)
    };
    links.iter().map(mirrored).collect()
}

/// What is left of a confidence after so long.
fn aged(ms: f64) -> f64 {
    (-ms * 1e-3 / BANDWIDTH_CONFIDENCE_AGE_S).exp()
}

/// Whether the newest test is far from the estimate: the link has changed, or the job took almost all of it.
pub fn contradicted(test: &TestRow, link: &LinkView) -> bool {
    link.bandwidth_bps.is_some_and(|estimate| far(test, estimate))
}

/// What the last two tests agree on, when both are far slower or both far faster than the estimate: of slow ones the
/// faster, which the job disturbed less, of fast ones the slower. An estimate that has fallen since the tests knows more
/// than they do.
fn far_off(test: &TestRow, estimate_bps: Option<f64>) -> Option<f64> {
    let (estimate, last, previous) = (estimate_bps?, test.bandwidth_bps, test.previous_bps?);
    let (slower, faster) = (last.min(previous), last.max(previous));
    let fell = (faster * FAR_OFF < estimate && !test.is_lower_bound).then_some(faster);
    let was_low = test.estimate_bps.is_some_and(|then| slower > FAR_OFF * then) && !fell_since(test, estimate);
    fell.or((was_low && slower > FAR_OFF * estimate).then_some(slower))
}

/// The matrix between the ranks that run on `nodes`, or what is missing, in words.
pub fn matrix(links: &LinkMap, nodes: &[NodeName]) -> Result<Links, String> {
    let mut age_ms = 0.0_f64;
    let mut oldest_ms = 0.0_f64;
    let mut confidence = 1.0_f64;
    let mut missing = Vec::new();
    let none = Link::new(0.0, 1e9).map_err(|e| e.to_string())?;
    let mut get = |from: &NodeName, to: &NodeName| {
        let view = links.get(&(from.clone(), to.clone()));
        let link = view.and_then(|v| Link::new(v.latency_us * 1e-6, v.bandwidth_bps?).ok());
        match (view, link) {
            (Some(view), Some(link)) => {
                age_ms = age_ms.max(view.latency_age_ms.min(view.bandwidth_age_ms));
                oldest_ms = oldest_ms.max(view.latency_age_ms).max(view.bandwidth_age_ms);
                confidence = confidence.min(view.bandwidth_confidence);
                if view.latency_us >= NEGLIGIBLE_LATENCY_US {
                    confidence = confidence.min(view.latency_confidence);
                }
                link
            }
            _ => {
                missing.push(format!("{from} to {to}"));
                none
            }
        }
    };
    let numbers = numbers(nodes);
    let mut by_number: Vec<&NodeName> = numbers.keys().copied().collect();
    by_number.sort_by_key(|node| numbers[node]);
    let mut between = Vec::with_capacity(by_number.len() * by_number.len());
    for from in &by_number {
        between.extend(by_number.iter().map(|to| if from == to { none } else { get(from, to) }));
    }
    let on_nodes: Vec<u32> = nodes.iter().map(|node| numbers[node]).collect();
    let link = |from: usize, to: usize| between[on_nodes[from] as usize * by_number.len() + on_nodes[to] as usize];
    let matrix = LinkMatrix::from_fn(nodes.len(), link).map_err(|e| e.to_string())?;
    if missing.is_empty() {
        let age = Seconds::new(age_ms * 1e-3).map_err(|e| e.to_string())?;
        let oldest = Seconds::new(oldest_ms * 1e-3).map_err(|e| e.to_string())?;
        let matrix = matrix.on_nodes(on_nodes).map_err(|e| e.to_string())?.with_local_links();
        return Ok(Links { matrix, age, oldest, confidence: confidence.clamp(0.0, 1.0), tests: Vec::new() });
    }
    missing.sort();
    let more = if missing.len() > 3 { format!(" and {} more", missing.len() - 3) } else { String::new() };
    missing.truncate(3);
    Err(format!("no estimate of the link {}{more}", missing.join(", ")))
}

/// Nodes are numbered in the order of their first ranks.
fn numbers(nodes: &[NodeName]) -> BTreeMap<&NodeName, u32> {
    let mut numbers = BTreeMap::new();
    for node in nodes {
        let next = numbers.len() as u32;
        numbers.entry(node).or_insert(next);
    }
    numbers
}

/// Adds the newest tests between the nodes.
pub fn with_tests(mut links: Links, nodes: &[NodeName], tests: &[TestRow]) -> Links {
    let numbers = numbers(nodes);
    let test = |row: &TestRow| {
        let (from, to) = (*numbers.get(&row.src)?, *numbers.get(&row.dst)?);
        let (bandwidth, is_lower_bound) = (Bandwidth::new(row.bandwidth_bps).ok()?, row.is_lower_bound);
        Some(LinkTest { from, to, bandwidth, is_lower_bound, at: row.received })
    };
    links.tests = tests.iter().filter_map(test).collect();
    links
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;
    use flexcomm_wire::LinkReport;

    pub(crate) fn node(name: &str) -> NodeName {
        NodeName::new(name).unwrap()
    }

    pub(crate) fn row(src: &str, dst: &str, bandwidth_bps: Option<f64>, received: u64) -> LinkRow {
        LinkRow {
            src: node(src),
            dst: node(dst),
            report: LinkReport {
                peer: node(dst),
                latency_us: 1000.0,
                latency_confidence: 0.9,
                latency_age_ms: 5.0,
                bandwidth_bps,
                bandwidth_confidence: if bandwidth_bps.is_some() { 0.8 } else { 0.0 },
                bandwidth_age_ms: 100.0,
                jitter_us: 1.0,
                loss_out: 0.0,
                loss_back: 0.0,
                by_icmp: false,
            },
            received: Timestamp(received),
        }
    }

    /// Of a to b, at the time 0.
    pub(crate) fn test(bandwidth_bps: f64, previous_bps: Option<f64>, estimate_bps: Option<f64>) -> TestRow {
        let (src, dst, received) = (node("a"), node("b"), Timestamp(0));
        let (is_lower_bound, latency_us) = (false, Some(1000.0));
        TestRow { src, dst, bandwidth_bps, is_lower_bound, previous_bps, received, latency_us, estimate_bps }
    }

    #[test]
    fn ages_grow_and_the_newer_bandwidth_counts() {
        let rows = [row("a", "b", Some(1e9), 1_000_000), row("b", "a", None, 1_000_000)];
        let test = |src: &str, dst: &str, received| TestRow {
            src: node(src),
            dst: node(dst),
            received: Timestamp(received),
            ..test(5e8, None, None)
        };
        let map = merge(&rows, &[test("a", "b", 500_000), test("b", "a", 500_000)], Timestamp(2_000_000));
        let ab = &map[&(node("a"), node("b"))];
        assert_eq!((ab.latency_age_ms, ab.bandwidth_age_ms, ab.bandwidth_bps), (1005.0, 1100.0, Some(1e9)));
        let ba = &map[&(node("b"), node("a"))];
        assert_eq!((ba.bandwidth_age_ms, ba.bandwidth_bps), (1500.0, Some(5e8)));
        let bandwidth = |map: LinkMap| map[&(node("a"), node("b"))].bandwidth_bps;
        let own = merge(&rows, &[test("a", "b", 1_000_000)], Timestamp(5_000_000));
        assert_eq!(bandwidth(own), Some(1e9), "the estimate has it in");
        let other = merge(&rows, &[test("a", "b", 4_950_000)], Timestamp(5_000_000));
        assert_eq!(bandwidth(other), Some(5e8));
    }

    /// Between every two of these nodes 1 ms and 1 Gbit/s.
    fn full(names: &[&str]) -> Vec<LinkRow> {
        let pairs = names.iter().flat_map(|a| names.iter().filter(move |b| *b != a).map(move |b| (*a, *b)));
        pairs.map(|(a, b)| row(a, b, Some(1e9), 0)).collect()
    }

    fn merged(rows: &[LinkRow]) -> LinkMap {
        merge(rows, &[], Timestamp(0))
    }

    #[test]
    fn where_two_ends_differ_on_a_round_trip_one_of_them_counts() {
        let shown = |claimed_us: f64, age_ms: f64| {
            let mut rows = full(&["a", "b"]);
            (rows[0].report.latency_us, rows[0].report.latency_age_ms) = (claimed_us, age_ms);
            let map = agreed(merged(&rows));
            (map[&(node("a"), node("b"))].latency_us, map[&(node("b"), node("a"))].latency_us)
        };
        assert_eq!(shown(3.0e7, 5.0), (1000.0, 1000.0), "half a minute, by one end alone");
        assert_eq!(shown(1800.0, 5.0), (1800.0, 1000.0), "estimates of one network differ a little");
        assert_eq!(shown(50_000.0, 60_000.0), (1000.0, 1000.0), "of a minute ago, and the other has news");
        assert_eq!(shown(10.0, 60_000.0), (10.0, 1000.0), "less than a millisecond apart");
    }

    #[test]
    fn one_node_against_all_others_is_not_believed_whether_it_says_more_or_less() {
        for claimed_us in [1.0, 3.0e6] {
            let mut rows = full(&["a", "b", "c"]);
            rows.iter_mut().for_each(|r| r.report.latency_us = 50_000.0);
            rows.iter_mut().filter(|r| r.src == node("c")).for_each(|r| r.report.latency_us = claimed_us);
            let found = disagreements(&merged(&rows));
            assert!(found.len() == 2 && found.iter().all(|d| d.wrong == node("c") && d.fresh), "{found:?}");
            assert!(found[0].words().starts_with("node c reports a latency of"), "{}", found[0].words());
            assert!(agreed(merged(&rows)).values().all(|v| v.latency_us == 50_000.0));
        }
    }

    #[test]
    fn a_nodes_claims_are_left_out_by_what_its_peers_say() {
        let nodes = [node("a"), node("b"), node("c")];
        let mut rows = full(&["a", "b", "c", "d"]);
        assert!(asymmetric(&merged(&rows), &nodes).is_empty());
        rows.iter_mut().filter(|r| r.src == node("c")).for_each(|r| r.report.bandwidth_bps = Some(1e5));
        rows.iter_mut().filter(|r| r.src == node("d")).for_each(|r| r.report.bandwidth_bps = Some(1e2));
        let map = merged(&rows);
        assert_eq!(asymmetric(&map, &nodes)[0], node("c"), "d is not of the job");
        let without = without_claims_of(&map, &node("c"));
        let among = |map: &LinkMap| matrix(map, &nodes).unwrap().matrix.worst();
        let link = |bps| Link::new(1e-3, bps).unwrap();
        assert_eq!((among(&map), among(&without)), (link(1e5), link(1e9)));
        assert_eq!(without[&(node("d"), node("a"))], map[&(node("d"), node("a"))]);
    }

    #[test]
    fn two_far_slower_tests_outweigh_an_estimate_and_one_does_not() {
        let rows = [row("a", "b", Some(9.5e7), 1_000_000)];
        let shown = |bandwidth_bps, previous_bps| {
            let test = test(bandwidth_bps, previous_bps, Some(9.5e7));
            merge(&rows, &[test], Timestamp(1_500_000))[&(node("a"), node("b"))].bandwidth_bps
        };
        assert_eq!(shown(3.6e6, Some(2.9e6)), Some(3.6e6));
        assert_eq!(shown(3.6e6, None), Some(9.5e7));
        assert_eq!(shown(3.6e6, Some(9.2e7)), Some(9.5e7));
        let test = test(3.6e6, None, Some(9.5e7));
        let doubted = &merge(&rows, std::slice::from_ref(&test), Timestamp(1_500_000))[&(node("a"), node("b"))];
        assert!(contradicted(&test, doubted));
        assert_eq!(shown(3e7, Some(3e7)), Some(9.5e7), "a job may take two thirds of the link from a test");
    }

    #[test]
    fn two_far_faster_tests_outweigh_an_estimate_that_was_low_already() {
        let rows = [row("a", "b", Some(3.6e6), 1_000_000)];
        let shown = |bandwidth_bps, previous_bps, then_bps| {
            let test = test(bandwidth_bps, previous_bps, Some(then_bps));
            let map = merge(&rows, std::slice::from_ref(&test), Timestamp(1_500_000));
            let link = &map[&(node("a"), node("b"))];
            (link.bandwidth_bps, contradicted(&test, link))
        };
        assert_eq!(shown(9.2e7, Some(8.1e7), 3.6e6), (Some(8.1e7), false));
        assert_eq!(shown(9.2e7, Some(3.5e6), 3.6e6), (Some(3.6e6), true), "one makes it suspect");
        assert_eq!(shown(9.2e7, None, 3.6e6), (Some(3.6e6), true));
        assert_eq!(shown(9.2e7, Some(8.1e7), 9e7), (Some(3.6e6), true), "it has fallen since, and is tested again");
        assert_eq!(shown(1e7, Some(1e7), 3.6e6), (Some(3.6e6), false), "the agent's estimator is the better judge");
    }

    /// Two nodes whose agents estimate this at `now_s`, from samples of a moment ago, and what is believed of a to b after
    /// a test at second 0.
    fn believed(there_bps: f64, back_bps: f64, now_s: u64, test: &TestRow) -> (Option<f64>, f64, bool) {
        let rows = [("a", "b", there_bps), ("b", "a", back_bps)];
        let rows = rows.map(|(src, dst, bps)| row(src, dst, Some(bps), now_s * 1_000_000));
        let tests = weighed(vec![test.clone()], &rows, Timestamp(now_s * 1_000_000));
        let map = merge(&rows, &tests, Timestamp(now_s * 1_000_000));
        let link = &map[&(node("a"), node("b"))];
        (link.bandwidth_bps, link.bandwidth_confidence, contradicted(&tests[0], link))
    }

    #[test]
    fn a_lower_bound_contradicts_only_what_is_slower() {
        let link = |test: &TestRow| {
            let rows = [row("a", "b", Some(1e9), 1_000_000)];
            let map = merge(&rows, std::slice::from_ref(test), Timestamp(7_000_000));
            let view = map[&(node("a"), node("b"))].clone();
            (contradicted(test, &view), view.bandwidth_bps)
        };
        let slow = TestRow { received: Timestamp(1_500_000), ..test(1e7, None, Some(1e9)) };
        assert!(link(&slow).0);
        assert_eq!(link(&TestRow { is_lower_bound: true, ..slow }), (false, Some(1e9)));
        let fast = TestRow { is_lower_bound: true, received: Timestamp(1_500_000), ..test(1e11, None, Some(1e9)) };
        assert!(link(&fast).0);
        // Five seconds newer than the estimate.
        let newer = |bound: TestRow| link(&TestRow { received: Timestamp(6_000_000), ..bound }).1;
        let bound = |bps| TestRow { is_lower_bound: true, ..test(bps, None, Some(1e9)) };
        assert_eq!([1e8, 9e8, 3e9].map(|bps| newer(bound(bps))), [Some(1e9), Some(1e9), Some(3e9)]);
    }

    /// A job whose messages were short for the link had its agents estimate a part of it; then the link fell far below
    /// that, and no test could be paid for.
    #[test]
    fn tests_from_before_a_fall_do_not_outweigh_what_both_ends_see_since() {
        let before = test(3.1e10, Some(2.48e10), Some(3.1e8));
        assert_eq!(believed(3.1e8, 2.9e8, 2, &before).0, Some(2.48e10), "they know of no change");
        let fell = |now_s| believed(4.7e7, 4.75e7, now_s, &before);
        assert_eq!(fell(2), (Some(4.7e7), 0.8, true), "at once, but it is to be tested");
        assert_eq!(fell(31), (Some(4.7e7), 0.8, false), "a test that cannot be had is not waited for");
        assert_eq!(believed(4.7e7, 3.1e8, 31, &before), (Some(4.7e7), 0.8, true), "one end alone");
        // A job that compresses since sends too little to sample the link: what was sampled after the test holds all the same.
        let later = |age_ms: f64| {
            let mut rows = [row("a", "b", Some(4.7e7), 0), row("b", "a", Some(4.7e7), 0)];
            rows.iter_mut().for_each(|row| row.report.bandwidth_age_ms = age_ms);
            rows.iter_mut().for_each(|row| row.received = Timestamp(100_000_000));
            weighed(vec![before.clone()], &rows, Timestamp(100_000_000))[0].bandwidth_bps
        };
        assert_eq!((later(80_000.0), later(101_000.0)), (4.7e7, 3.1e10), "and what was sampled before it does not");
    }

    #[test]
    fn what_tests_say_grows_old() {
        let confidence = |now_s| believed(3.1e8, 3.1e8, now_s, &test(3.1e10, Some(2.48e10), Some(3.1e8))).1;
        let old = TEST_CONFIDENCE * (-100.0 / BANDWIDTH_CONFIDENCE_AGE_S).exp();
        assert!(confidence(0) == TEST_CONFIDENCE && (confidence(100) - old).abs() < 1e-9, "{}", confidence(100));
    }

    /// One end claims for a while that its link is slow, by tests of both directions.
    #[test]
    fn a_slow_test_has_no_say_for_long_against_two_ends_that_see_more() {
        for previous in [Some(4.7e7), Some(1e4)] {
            let claimed = test(1e4, previous, Some(4.7e7));
            let as_estimated = (Some(4.7e7), 0.8, false);
            assert_ne!(believed(4.7e7, 4.6e7, 5, &claimed), as_estimated, "it may be right");
            assert_eq!(believed(4.7e7, 4.6e7, 31, &claimed), as_estimated);
            assert_ne!(believed(4.7e7, 1e4, 31, &claimed), as_estimated, "the other end says so, too");
        }
    }

    #[test]
    fn the_matrix_waits_for_every_link_and_says_so() {
        let both = [row("a", "b", Some(1e9), 0), row("b", "a", Some(2e9), 0)];
        let map = merge(&both, &[], Timestamp(0));
        let links = matrix(&map, &[node("a"), node("a"), node("b")]).unwrap();
        assert_eq!(links.matrix.ranks(), 3);
        assert_eq!([0, 1, 2].map(|rank| links.matrix.node(rank)), [0, 0, 1], "ranks of one node share its NIC");
        assert_eq!(links.matrix.get(2, 0).bandwidth.get(), 2e9);
        assert_eq!(links.matrix.get(0, 1).alpha.get(), 20e-6);
        assert_eq!(links.confidence, 0.8);
        let tests = [test(1e9, None, None), TestRow { src: node("b"), dst: node("c"), ..test(1e9, None, None) }];
        let tests = with_tests(links, &[node("a"), node("a"), node("b")], &tests).tests;
        assert_eq!(
            tests.iter().map(|test| (test.from, test.to)).collect::<Vec<_>>(),
            [(0, 1)],
            "by nodes, not by ranks"
        );
        let one = merge(&both[..1], &[], Timestamp(0));
        assert_eq!(matrix(&one, &[node("a"), node("b")]).unwrap_err(), "no estimate of the link b to a");
    }

    #[test]
    fn confidence_falls_with_age() {
        let shown = |estimate_bps: Option<f64>, tests: &[TestRow], now_s: u64| {
            let map = merge(&[row("a", "b", estimate_bps, 0)], tests, Timestamp(now_s * 1_000_000));
            map[&(node("a"), node("b"))].bandwidth_confidence
        };
        let near = |a: f64, b: f64| assert!((a - b).abs() < 1e-9, "{a} instead of {b}");
        near(shown(Some(1e9), &[], 240), 0.8 * (-2.0f64).exp());
        near(shown(None, &[test(9e8, None, None)], 60), TEST_CONFIDENCE * (-0.5f64).exp());
    }
}
