//! Which links look as if they had changed, and whom to test now.

use flexcomm_domain::{NodeName, Timestamp};
use flexcomm_wire::api::LinkView;
use std::collections::{BTreeMap, BTreeSet};

use super::CycleError;
use crate::app::{App, JobStatus};
use crate::echoes;
use crate::grants::{Known, Pair};
use crate::links::{LinkMap, agreed, merge};
use crate::store::TestRow;

/// Changes of latency below this many microseconds are no sign of another network.
const LATENCY_FLOOR_US: f64 = 100.0;

/// What a report says tests are worth counts for so long, seconds: looks come about once a second, where they do not fail.
const REPORT_COUNTS_S: f64 = 15.0;

/// Pairs of nodes that run ranks of the same job.
#[derive(Debug, Default)]
struct Shared {
    /// The numbers of the jobs that run on a node.
    jobs: BTreeMap<NodeName, Vec<usize>>,
    /// What a test between them is expected to save, seconds: of several jobs the most.
    worth_s: BTreeMap<Pair, f64>,
    /// Of jobs that take another time than predicted: tested as often as the budget allows until it no longer is so, since
    /// an estimator needs several tests to believe a change.
    deviating: BTreeSet<Pair>,
}

/// Hands out and takes back grants. What they may cost is stored before anybody can see them.
pub async fn tick(app: &App) -> Result<(), CycleError> {
    let now = app.clock.now();
    let live = app.presence.live(now);
    let links = app.store.links().await?;
    let tests = app.store.link_tests().await?;
    let links = agreed(merge(&links, &tests, now));
    let known = known(app.config.probes.suspect_change, &links, &tests, &shared(app, now).await?);
    let echoes = echoes::plan(&app.config.probes, &live, &known);
    *app.echoes.lock() = echoes;
    let moved = {
        let mut scheduler = app.scheduler.lock();
        scheduler.tick(now, &live, &known, echoes.other_probes);
        scheduler.moved()
    };
    app.store.put_probe_accounts(&moved, now).await?;
    app.scheduler.lock().stored(&moved);
    Ok(())
}

/// What the links look like, by pair of nodes.
fn known(suspect_change: f64, links: &LinkMap, tests: &[TestRow], shared: &Shared) -> BTreeMap<Pair, Known> {
    let newest = newest_by(tests, |test| (&test.src, &test.dst));
    let short = short(tests);
    let mut known: BTreeMap<Pair, Known> = BTreeMap::new();
    for ((from, to), link) in links {
        let pair = Pair::new(from, to);
        let then = newest.get(&(from, to)).and_then(|test| test.latency_us);
        let moved = then.is_some_and(|then| latency_moved(link, then, suspect_change));
        let deviates = shared.deviating.contains(&pair);
        let worth_s = shared.worth_s.get(&pair).copied().unwrap_or_default();
        let of_job = shared.runs_over(from, to);
        let is_short = short.contains(&pair);
        let entry = known.entry(pair).or_default();
        let both = entry.bandwidth_bps.into_iter().chain(link.bandwidth_bps);
        entry.bandwidth_bps = both.reduce(f64::min);
        entry.latency_s = entry.latency_s.max(link.latency_us * 1e-6);
        entry.suspect |= moved || deviates;
        entry.worth_s = worth_s;
        entry.of_job = of_job;
        entry.is_short = is_short;
    }
    known
}

/// The newest test of each key.
fn newest_by<'a, K: Ord>(tests: &'a [TestRow], key: impl Fn(&'a TestRow) -> K) -> BTreeMap<K, &'a TestRow> {
    let mut newest = BTreeMap::new();
    for test in tests {
        let known = newest.entry(key(test)).or_insert(test);
        *known = if test.received > known.received { test } else { known };
    }
    newest
}

/// Pairs of which the newest test by one of the ends was short, whatever the other end found.
fn short(tests: &[TestRow]) -> BTreeSet<Pair> {
    let newest = newest_by(tests, |test| (Pair::new(&test.src, &test.dst), &test.reporter));
    newest.into_iter().filter(|(_, test)| test.is_short).map(|((pair, _), _)| pair).collect()
}

fn latency_moved(link: &LinkView, then_us: f64, share: f64) -> bool {
    let change = (link.latency_us - then_us).abs();
    change > LATENCY_FLOOR_US && change > share * then_us.min(link.latency_us)
}

async fn shared(app: &App, now: Timestamp) -> Result<Shared, CycleError> {
    let worth_s = |status: &JobStatus| {
        let report = status.report.as_ref().filter(|_| now.since(status.at).get() < REPORT_COUNTS_S);
        report.map_or(0.0, |report| report.test_worth_s)
    };
    let jobs: Vec<_> = {
        let statuses = app.statuses.lock();
        statuses.iter().map(|(job, status)| (job.clone(), status.deviates, worth_s(status))).collect()
    };
    let mut shared = Shared::default();
    for (number, (job, deviates, worth_s)) in jobs.into_iter().enumerate() {
        let ranks = app.store.ranks(&job).await?;
        let nodes: BTreeSet<NodeName> = ranks.iter().filter(|r| r.left.is_none()).map(|r| r.node.clone()).collect();
        nodes.iter().for_each(|node| shared.jobs.entry(node.clone()).or_default().push(number));
        shared.add(&nodes.into_iter().collect::<Vec<_>>(), deviates, worth_s);
    }
    Ok(shared)
}

impl Shared {
    /// Whether ranks of one job run on both nodes.
    fn runs_over(&self, a: &NodeName, b: &NodeName) -> bool {
        let of = |node| self.jobs.get(node).map(Vec::as_slice).unwrap_or_default();
        of(a).iter().any(|job| of(b).contains(job))
    }

    fn add(&mut self, nodes: &[NodeName], deviates: bool, worth_s: f64) {
        if !deviates && worth_s <= 0.0 {
            return;
        }
        for pair in Pair::among(nodes) {
            if deviates {
                self.deviating.insert(pair.clone());
            }
            if worth_s > 0.0 {
                let most_s = self.worth_s.entry(pair).or_default();
                *most_s = most_s.max(worth_s);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::links::tests::{node, row, test};
    use crate::store::LinkRow;

    #[test]
    fn of_several_jobs_the_most_counts() {
        let mut shared = Shared::default();
        let [ab, bc] = [["a", "b"], ["b", "c"]].map(|pair| Pair::new(&node(pair[0]), &node(pair[1])));
        shared.add(&["a", "b"].map(node), false, 2.0);
        shared.add(&["a", "b", "c"].map(node), true, 1.0);
        assert_eq!([&ab, &bc].map(|pair| shared.worth_s[pair]), [2.0, 1.0]);
        assert_eq!(shared.deviating.len(), 3);
    }

    #[test]
    fn a_link_is_worth_what_its_job_says_and_suspect_where_its_latency_moved() {
        let mut rows = [row("a", "b"), row("b", "a")];
        let pair = Pair::new(&node("a"), &node("b"));
        let look = |rows: &[LinkRow], tests: &[TestRow], shared: &Shared| {
            known(0.3, &merge(rows, tests, Timestamp(0)), tests, shared)[&pair]
        };
        let job = Shared { worth_s: [(pair.clone(), 2.5)].into(), ..Shared::default() };
        let sure = look(&rows, &[], &job);
        assert!(sure.worth_s == 2.5 && sure.bandwidth_bps.is_none() && !sure.suspect, "{sure:?}");
        let tests = [test("a", "b", 1e9), test("b", "a", 1e8)];
        let tested = look(&rows, &tests, &Shared::default());
        assert!(tested.worth_s == 0.0 && !tested.suspect && tested.bandwidth_bps == Some(1e8), "{tested:?}");
        rows[0].report.latency_us *= 2.0;
        assert!(look(&rows, &tests, &Shared::default()).suspect);
        let deviating = Shared { deviating: [pair.clone()].into(), ..Shared::default() };
        assert!(look(&rows[1..], &tests, &deviating).suspect && !look(&rows[1..], &tests, &Shared::default()).suspect);
    }
}
