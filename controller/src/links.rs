//! The link matrix as the controller sees it: latencies as agents estimate them, bandwidths as throughput tests found them. Pure.

use flexcomm_domain::{Bandwidth, Link, LinkMatrix, NodeName, Seconds, Timestamp};
use flexcomm_planner::{LinkTest, Links};
use flexcomm_wire::api::LinkView;
use std::collections::{BTreeMap, BTreeSet};

use crate::store::{LinkRow, TestRow};

/// Below this a latency costs a step nothing, and a job that saturates the link disturbs its measurement the most: how
/// sure it is does not matter.
const NEGLIGIBLE_LATENCY_US: f64 = 50.0;

/// Links by (from, to).
pub type LinkMap = BTreeMap<(NodeName, NodeName), LinkView>;

/// A test shares the link with the job: of two ends' tests within so many seconds the faster counts,
const SAME_TIME_S: f64 = 30.0;
/// where they differ by less than this factor: beyond it the link has changed, or one end is wrong.
const TESTS_DIFFER: f64 = 4.0;

/// What tests found of one direction.
#[derive(Debug, Clone, Copy, PartialEq)]
struct Found {
    bandwidth_bps: f64,
    at: Timestamp,
}

/// Tests by link.
fn by_link(tests: &[TestRow]) -> BTreeMap<(&NodeName, &NodeName), Vec<&TestRow>> {
    let mut by_link: BTreeMap<_, Vec<&TestRow>> = BTreeMap::new();
    tests.iter().for_each(|test| by_link.entry((&test.src, &test.dst)).or_default().push(test));
    by_link
}

/// Puts latencies and tests together. Ages grow with the controller's clock since the report arrived.
pub fn merge(links: &[LinkRow], tests: &[TestRow], now: Timestamp) -> LinkMap {
    let by_link = by_link(tests);
    let view = |row: &LinkRow| {
        let waited_ms = now.since(row.received).get() * 1e3;
        let found = by_link.get(&(&row.src, &row.dst)).and_then(|tests| found(tests));
        let view = LinkView {
            from: row.src.clone(),
            to: row.dst.clone(),
            latency_us: row.report.latency_us,
            bandwidth_bps: found.map(|found| found.bandwidth_bps),
            jitter_us: row.report.jitter_us,
            loss_out: row.report.loss_out,
            loss_back: row.report.loss_back,
            by_icmp: row.report.by_icmp,
            latency_confidence: row.report.latency_confidence,
            latency_age_ms: row.report.latency_age_ms + waited_ms,
            bandwidth_age_ms: found.map(|found| now.since(found.at).get() * 1e3),
        };
        ((row.src.clone(), row.dst.clone()), view)
    };
    links.iter().map(view).collect()
}

/// The bandwidth of a direction: the newest test's, whichever end made it, or that of the other end about the same time where that is
/// somewhat faster. A lower bound counts where nothing else is known, and where it is newer and above; a short test where nothing else is
/// known, and where it is newer and below.
fn found(tests: &[&TestRow]) -> Option<Found> {
    let of = |test: &&TestRow| Found { bandwidth_bps: test.bandwidth_bps, at: test.received };
    let exact = || tests.iter().filter(|test| !test.is_lower_bound && !test.is_short);
    let newest = exact().max_by_key(|test| test.received);
    let is_near = |test: &&&TestRow| {
        newest.is_some_and(|newest| {
            let faster = test.bandwidth_bps / newest.bandwidth_bps;
            newest.received.since(test.received).get() < SAME_TIME_S && (1.0..TESTS_DIFFER).contains(&faster)
        })
    };
    let faster = exact().filter(is_near).max_by(|a, b| a.bandwidth_bps.total_cmp(&b.bandwidth_bps));
    let known = newest.zip(faster).map(|(newest, faster)| Found { at: newest.received, ..of(faster) });
    let bounds = tests.iter().filter(|test| test.is_lower_bound && (!test.is_short || known.is_none())).map(of);
    let above = bounds
        .filter(|bound| known.is_none_or(|known| bound.at > known.at && bound.bandwidth_bps > known.bandwidth_bps));
    let short = tests.iter().filter(|test| test.is_short && !test.is_lower_bound).map(of);
    let below = short
        .filter(|short| known.is_none_or(|known| short.at > known.at && short.bandwidth_bps < known.bandwidth_bps));
    let above = above.max_by(|a, b| a.bandwidth_bps.total_cmp(&b.bandwidth_bps));
    above.or(below.max_by_key(|short| short.at)).or(known)
}

/// Both ends of a link measure the same round trip. Where they differ by more than this factor one of them is wrong.
const ENDS_DIFFER: f64 = 4.0;

/// ... and by at least this much, in microseconds.
const ENDS_FLOOR_US: f64 = 1000.0;

/// Whether a latency is longer than another by more than noise of its measurement.
fn is_longer(longer_us: f64, shorter_us: f64) -> bool {
    longer_us > ENDS_DIFFER * shorter_us && longer_us - shorter_us > ENDS_FLOOR_US
}

/// Of two ends that differ, one whose newest sample is older is wrong for want of news.
const ENDS_AGE_MS: f64 = 10_000.0;

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
        is_longer(longer_us, shorter_us).then(|| (from.clone(), to.clone()))
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

/// A shaper's token bucket makes a short test find at most so many times what a link carries.
const MOST_FASTER: f64 = 100.0;

fn differ(a: f64, b: f64) -> bool {
    a > TESTS_DIFFER * b || b > TESTS_DIFFER * a
}

/// Whether two ends' tests of one direction cannot both be right.
fn are_apart(a: &TestRow, b: &TestRow) -> bool {
    match (a.is_short, b.is_short) {
        (false, false) => differ(a.bandwidth_bps, b.bandwidth_bps),
        (true, false) => a.bandwidth_bps > MOST_FASTER * TESTS_DIFFER * b.bandwidth_bps,
        (false, true) => are_apart(b, a),
        (true, true) => false,
    }
}

/// Of a job's nodes, those whose latencies or tests differ from what their peers found of the same links, the one that differs from most
/// peers first; at most two, as on a job of two nodes either may be wrong. Networks change between two tests: this alone makes nobody
/// wrong.
pub fn differing(links: &LinkMap, tests: &[TestRow], nodes: &[NodeName]) -> Vec<NodeName> {
    let of_job: BTreeSet<&NodeName> = nodes.iter().collect();
    let mut against: BTreeSet<(&NodeName, &NodeName)> = BTreeSet::new();
    for ((from, to), there) in links.iter().filter(|((from, to), _)| of_job.contains(from) && of_job.contains(to)) {
        let back = links.get(&(to.clone(), from.clone()));
        if back.is_some_and(|back| differ(there.latency_us, back.latency_us)) {
            against.insert((from, to));
        }
    }
    for ((src, dst), tests) in by_link(tests) {
        let by = |end: &&NodeName| {
            tests.iter().filter(|t| t.reporter == **end && !t.is_lower_bound).max_by_key(|t| t.received)
        };
        let [a, b] = [by(&src), by(&dst)];
        let apart = a.zip(b).is_some_and(|(a, b)| are_apart(a, b));
        if apart && of_job.contains(src) && of_job.contains(dst) {
            against.extend([(src, dst), (dst, src)]);
        }
    }
    let mut peers: BTreeMap<&NodeName, usize> = BTreeMap::new();
    against.into_iter().for_each(|(node, _)| *peers.entry(node).or_default() += 1);
    let mut found: Vec<(&NodeName, usize)> = peers.into_iter().collect();
    found.sort_by_key(|(_, peers)| std::cmp::Reverse(*peers));
    found.into_iter().take(2).map(|(node, _)| node.clone()).collect()
}

/// The latencies without what one node says of them: as its peers report the other direction.
pub fn without_claims_of(links: &[LinkRow], node: &NodeName) -> Vec<LinkRow> {
    let to_node = links.iter().filter(|row| row.dst == *node);
    let back: BTreeMap<&NodeName, &LinkRow> = to_node.map(|row| (&row.src, row)).collect();
    let mirrored = |row: &LinkRow| match back.get(&row.dst).filter(|_| row.src == *node) {
        Some(back) => LinkRow { src: row.src.clone(), dst: row.dst.clone(), ..(*back).clone() },
        None => row.clone(),
    };
    links.iter().map(mirrored).collect()
}

/// What a job's nodes have been found to send and to receive over links like one that no test was made on.
struct Nics<'a>(Vec<&'a LinkView>);

impl<'a> Nics<'a> {
    fn of(links: &'a LinkMap, nodes: &[NodeName]) -> Self {
        let is_of_job = |view: &&LinkView| nodes.contains(&view.from) && nodes.contains(&view.to);
        Self(links.values().filter(|view| view.bandwidth_bps.is_some()).filter(is_of_job).collect())
    }

    /// The bandwidth of a link, where tests were made on other links of both of its ends that have about its latency: what is far away is
    /// reached over another bottleneck.
    fn bandwidth_bps(&self, of: &LinkView) -> Option<f64> {
        let send = self.most(|view| view.from == of.from, of.latency_us)?;
        Some(send.min(self.most(|view| view.to == of.to, of.latency_us)?))
    }

    /// A link has the less of what its two ends have: of the newest tests of a node's links the most is the node's own.
    fn most(&self, is_of_node: impl Fn(&LinkView) -> bool, latency_us: f64) -> Option<f64> {
        let is_alike =
            |view: &LinkView| !is_longer(view.latency_us, latency_us) && !is_longer(latency_us, view.latency_us);
        let age_ms = |view: &LinkView| view.bandwidth_age_ms.unwrap_or(f64::INFINITY);
        let alike = || self.0.iter().filter(|view| is_of_node(view) && is_alike(view));
        let newest_ms = alike().map(|view| age_ms(view)).reduce(f64::min)?;
        let of_now = alike().filter(|view| age_ms(view) <= newest_ms + SAME_TIME_S * 1e3);
        of_now.filter_map(|view| view.bandwidth_bps).reduce(f64::max)
    }
}

/// The matrix between the ranks that run on `nodes`, or what is missing, in words. A link without a test of its own has what tests of its
/// ends found over links like it: so the tests that are waited for grow with the nodes and not with their pairs.
pub fn matrix(links: &LinkMap, nodes: &[NodeName]) -> Result<Links, String> {
    let mut age_ms = 0.0_f64;
    let mut oldest_ms = 0.0_f64;
    let mut confidence = 1.0_f64;
    let mut missing = Vec::new();
    let none = Link::new(0.0, 1e9).map_err(|e| e.to_string())?;
    let nics = Nics::of(links, nodes);
    let mut get = |from: &NodeName, to: &NodeName| {
        let view = links.get(&(from.clone(), to.clone()));
        let bandwidth_bps = |view: &LinkView| view.bandwidth_bps.or_else(|| nics.bandwidth_bps(view));
        let link = view.and_then(|view| Link::new(view.latency_us * 1e-6, bandwidth_bps(view)?).ok());
        match (view, link) {
            (Some(view), Some(link)) => {
                age_ms = age_ms.max(view.latency_age_ms.min(view.bandwidth_age_ms.unwrap_or(f64::INFINITY)));
                oldest_ms = oldest_ms.max(view.latency_age_ms);
                if view.latency_us >= NEGLIGIBLE_LATENCY_US {
                    confidence = confidence.min(view.latency_confidence);
                }
                link
            }
            (None, _) => {
                missing.push(format!("no latency from {from} to {to}"));
                none
            }
            (Some(_), None) => {
                missing.push(format!("no throughput test from {from} to {to}"));
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
    Err(format!("{}{more}", missing.join(", ")))
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

/// Adds the newest tests between the nodes, in the order of their times.
pub fn with_tests(mut links: Links, nodes: &[NodeName], tests: &[TestRow]) -> Links {
    let numbers = numbers(nodes);
    let test = |row: &TestRow| {
        let (from, to) = (*numbers.get(&row.src)?, *numbers.get(&row.dst)?);
        let (bandwidth, is_lower_bound) = (Bandwidth::new(row.bandwidth_bps).ok()?, row.is_lower_bound);
        Some(LinkTest { from, to, bandwidth, is_lower_bound, is_short: row.is_short, at: row.received })
    };
    links.tests = tests.iter().filter_map(test).collect();
    links.tests.sort_by_key(|test| test.at);
    links
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;
    use flexcomm_wire::LinkReport;

    pub(crate) fn node(name: &str) -> NodeName {
        NodeName::new(name).unwrap()
    }

    /// Of 1 ms, at the time 0.
    pub(crate) fn row(src: &str, dst: &str) -> LinkRow {
        LinkRow {
            src: node(src),
            dst: node(dst),
            report: LinkReport {
                peer: node(dst),
                latency_us: 1000.0,
                latency_confidence: 0.9,
                latency_age_ms: 5.0,
                jitter_us: 1.0,
                loss_out: 0.0,
                loss_back: 0.0,
                by_icmp: false,
            },
            received: Timestamp(0),
        }
    }

    /// Of a direction by its first end, at the time 0, when its latency was 1 ms.
    pub(crate) fn test(src: &str, dst: &str, bandwidth_bps: f64) -> TestRow {
        let (src, dst, received) = (node(src), node(dst), Timestamp(0));
        let (reporter, is_lower_bound, is_short, latency_us) = (src.clone(), false, false, Some(1000.0));
        TestRow { src, dst, reporter, bandwidth_bps, is_lower_bound, is_short, received, latency_us }
    }

    fn by(reporter: &str, test: TestRow) -> TestRow {
        TestRow { reporter: node(reporter), ..test }
    }

    /// Between every two of these nodes 1 ms and 1 Gbit/s, as both ends found.
    fn full(names: &[&str]) -> (Vec<LinkRow>, Vec<TestRow>) {
        let pairs = || names.iter().flat_map(|a| names.iter().filter(move |b| *b != a).map(move |b| (*a, *b)));
        let tests = pairs().flat_map(|(a, b)| [test(a, b, 1e9), by(b, test(a, b, 1e9))]);
        (pairs().map(|(a, b)| row(a, b)).collect(), tests.collect())
    }

    fn merged(rows: &[LinkRow]) -> LinkMap {
        merge(rows, &[], Timestamp(0))
    }

    #[test]
    fn a_short_test_counts_where_it_is_slower_or_nothing_else_is_known() {
        let of = |short_bps, second: u64| {
            let whole = test("a", "b", 40e6);
            let received = Timestamp(second * 1_000_000);
            let short = TestRow { is_short: true, received, ..test("a", "b", short_bps) };
            (found(&[&whole, &short]).unwrap().bandwidth_bps, found(&[&short]).unwrap().bandwidth_bps)
        };
        assert_eq!(of(638e6, 5), (40e6, 638e6), "a token bucket may have let it pass");
        assert_eq!(of(10e6, 5), (10e6, 10e6));
        let later = TestRow { received: Timestamp(9_000_000), ..test("a", "b", 40e6) };
        let short = TestRow { is_short: true, ..test("a", "b", 10e6) };
        assert_eq!(found(&[&later, &short]).unwrap().bandwidth_bps, 40e6, "it is older");
    }

    #[test]
    fn the_newest_test_counts_whoever_made_it_and_the_faster_of_two_at_the_same_time() {
        let at = |second: u64, test| TestRow { received: Timestamp(second * 1_000_000), ..test };
        let bound = |test| TestRow { is_lower_bound: true, ..test };
        let shown = |tests: &[TestRow]| {
            let view = merge(&[row("a", "b")], tests, Timestamp(100_000_000)).remove(&(node("a"), node("b"))).unwrap();
            assert_eq!(view.latency_age_ms, 100_005.0);
            view.bandwidth_bps.zip(view.bandwidth_age_ms)
        };
        let (own, other) = (|bps| test("a", "b", bps), |bps| by("b", test("a", "b", bps)));
        assert_eq!(shown(&[]), None);
        assert_eq!(shown(&[test("b", "a", 1e9)]), None, "of the other direction");
        assert_eq!(shown(&[at(50, own(1e9)), at(10, other(5e8))]), Some((1e9, 50_000.0)));
        assert_eq!(shown(&[at(10, own(1e9)), at(50, other(5e8))]), Some((5e8, 50_000.0)));
        assert_eq!(shown(&[at(40, own(1e9)), at(50, other(5e8))]), Some((1e9, 50_000.0)), "it had the link for itself");
        assert_eq!(shown(&[at(40, own(1e9)), at(50, other(5e7))]), Some((5e7, 50_000.0)), "it has changed");
        assert_eq!(shown(&[at(10, own(1e9)), at(60, bound(own(3e8)))]), Some((1e9, 90_000.0)), "it is at least that");
        assert_eq!(shown(&[at(10, own(1e9)), at(60, bound(own(3e9)))]), Some((3e9, 40_000.0)));
        assert_eq!(shown(&[at(10, bound(own(3e9))), at(60, other(1e9))]), Some((1e9, 40_000.0)), "it fell since");
        assert_eq!(shown(&[bound(own(3e8)), bound(other(2e8))]), Some((3e8, 100_000.0)));
    }

    #[test]
    fn where_two_ends_differ_on_a_round_trip_one_of_them_counts() {
        let shown = |claimed_us: f64, age_ms: f64| {
            let (mut rows, _) = full(&["a", "b"]);
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
            let (mut rows, _) = full(&["a", "b", "c"]);
            rows.iter_mut().for_each(|r| r.report.latency_us = 50_000.0);
            rows.iter_mut().filter(|r| r.src == node("c")).for_each(|r| r.report.latency_us = claimed_us);
            let found = disagreements(&merged(&rows));
            assert!(found.len() == 2 && found.iter().all(|d| d.wrong == node("c") && d.fresh), "{found:?}");
            assert!(found[0].words().starts_with("node c reports a latency of"), "{}", found[0].words());
            assert!(agreed(merged(&rows)).values().all(|v| v.latency_us == 50_000.0));
        }
    }

    #[test]
    fn a_nodes_tests_are_left_out_by_what_its_peers_found() {
        let nodes = [node("a"), node("b"), node("c")];
        let (rows, mut tests) = full(&["a", "b", "c", "d"]);
        assert!(differing(&merged(&rows), &tests, &nodes).is_empty());
        tests.iter_mut().filter(|t| t.reporter == node("c")).for_each(|t| t.bandwidth_bps = 1e5);
        tests.iter_mut().filter(|t| t.reporter == node("d")).for_each(|t| t.bandwidth_bps = 1e2);
        let found = differing(&merged(&rows), &tests, &nodes);
        assert_eq!(found, [node("c"), node("a")], "d is not of the job, and two of its nodes are against c");
        tests.iter_mut().filter(|t| t.reporter == node("c")).for_each(|t| t.received = Timestamp(1));
        let among = |tests: &[TestRow]| matrix(&merge(&rows, tests, Timestamp(1)), &nodes).unwrap().matrix.worst();
        let link = |bps| Link::new(1e-3, bps).unwrap();
        assert_eq!(among(&tests), link(1e5));
        tests.retain(|test| test.reporter != node("c"));
        assert_eq!(among(&tests), link(1e9));
    }

    #[test]
    fn a_nodes_latencies_are_left_out_by_what_its_peers_report() {
        let (mut rows, _) = full(&["a", "b", "c"]);
        rows.iter_mut().filter(|r| r.src == node("c")).for_each(|r| r.report.latency_us = 9e6);
        assert_eq!(differing(&merged(&rows), &[], &["a", "b", "c"].map(node))[0], node("c"));
        let without = without_claims_of(&rows, &node("c"));
        assert!(without.len() == rows.len() && without.iter().all(|row| row.report.latency_us == 1000.0));
        assert!(without.iter().zip(&rows).all(|(a, b)| (&a.src, &a.dst) == (&b.src, &b.dst)));
    }

    #[test]
    fn the_matrix_waits_for_what_every_link_is_known_by_and_says_so() {
        let (rows, mut tests) = full(&["a", "b"]);
        tests.iter_mut().filter(|test| test.src == node("b")).for_each(|test| test.bandwidth_bps = 2e9);
        tests.push(test("b", "c", 1e9));
        let nodes = ["a", "a", "b"].map(node);
        let links = matrix(&merge(&rows, &tests, Timestamp(0)), &nodes).unwrap();
        assert_eq!(links.matrix.ranks(), 3);
        assert_eq!([0, 1, 2].map(|rank| links.matrix.node(rank)), [0, 0, 1], "ranks of one node share its NIC");
        assert_eq!(links.matrix.get(2, 0).bandwidth.get(), 2e9);
        assert_eq!(links.matrix.get(0, 1).alpha.get(), 20e-6);
        assert_eq!(links.confidence, 0.9);
        tests[0].received = Timestamp(9);
        let tests = with_tests(links, &nodes, &tests).tests;
        let pairs: Vec<_> = tests.iter().map(|test| (test.from, test.to)).collect();
        assert_eq!(pairs, [(0, 1), (1, 0), (1, 0), (0, 1)], "by nodes, not by ranks, and by their times");
        let ends = ["a", "b"].map(node);
        let missing =
            |rows: &[LinkRow], tests: &[TestRow]| matrix(&merge(rows, tests, Timestamp(0)), &ends).unwrap_err();
        assert_eq!(missing(&rows[..1], &[test("a", "b", 1e9)]), "no latency from b to a");
        assert_eq!(missing(&rows, &[test("b", "a", 1e9)]), "no throughput test from a to b");
    }

    #[test]
    fn a_link_without_a_test_has_what_its_ends_were_found_to_have() {
        let (rows, tests) = full(&["a", "b", "c", "d"]);
        let nodes = ["a", "b", "c", "d"].map(node);
        let slow = |test: &TestRow| if test.src == node("d") { 1e8 } else { 1e9 };
        let among = |pairs: &[(&str, &str)]| -> Vec<TestRow> {
            let of = |t: &&TestRow| pairs.iter().any(|(a, b)| t.src == node(a) && t.dst == node(b));
            tests.iter().filter(of).map(|t| TestRow { bandwidth_bps: slow(t), ..t.clone() }).collect()
        };
        let of = |tests: &[TestRow]| matrix(&merge(&rows, tests, Timestamp(0)), &nodes);
        let links = |pairs| of(&among(pairs)).unwrap().matrix;
        let pairs = [("a", "b"), ("b", "a"), ("c", "d"), ("d", "c"), ("b", "c")];
        let bandwidths = |links: LinkMatrix| [(3, 0), (2, 3), (0, 2)].map(|(i, j)| links.get(i, j).bandwidth.get());
        // As long as nothing but d has sent to c, either may be what is slow.
        assert_eq!(bandwidths(links(&pairs[..4])), [1e8, 1e9, 1e8]);
        assert_eq!(bandwidths(links(&pairs)), [1e8, 1e9, 1e9]);
        // What is slower now is so for links without a test, too.
        let mut changed = among(&pairs);
        changed.iter_mut().filter(|t| t.src == node("a")).for_each(|t| t.bandwidth_bps = 1e7);
        changed.iter_mut().filter(|t| t.src == node("a")).for_each(|t| t.received = Timestamp(60_000_000));
        assert_eq!(bandwidths(of(&changed).unwrap().matrix)[2], 1e7);
        // Two sites, each tested inside.
        let mut far = rows.clone();
        let site = |name: &NodeName| *name < node("c");
        far.iter_mut().filter(|r| site(&r.src) != site(&r.dst)).for_each(|r| r.report.latency_us = 2e4);
        let inside = among(&[("a", "b"), ("b", "a"), ("c", "d"), ("d", "c")]);
        let waits = matrix(&merge(&far, &inside, Timestamp(0)), &nodes).unwrap_err();
        assert!(waits.starts_with("no throughput test from a to c, no throughput test from a to d, "), "{waits}");
        let without = of(&among(&[("a", "b"), ("b", "c"), ("c", "a")])).unwrap_err();
        assert!(without.starts_with("no throughput test from a to d, no throughput test from b to d, "), "{without}");
    }
}
