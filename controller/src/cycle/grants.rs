//! Which links look as if they had changed, and whom to test now.

use flexcomm_domain::NodeName;
use flexcomm_wire::api::LinkView;
use std::collections::{BTreeMap, BTreeSet};

use super::CycleError;
use crate::app::App;
use crate::echoes;
use crate::grants::{Known, Pair};
use crate::links::{LinkMap, TEST_CONFIDENCE, agreed, contradicted, merge, weighed};
use crate::store::TestRow;

/// Changes of latency below this many microseconds are no sign of another network.
const LATENCY_FLOOR_US: f64 = 100.0;

/// A link whose bandwidth is known with less confidence than this tells a decision too little: what is believed of it has become wide.
const LEAST_CONFIDENCE: f64 = 0.5;

/// A link of a job is stale from so many times that on: a test takes its time to be granted and seen.
const STALE: f64 = 1.1;

// A test that ran from the other side makes no link stale at once.
const _: () = assert!(STALE * LEAST_CONFIDENCE < 0.9 * TEST_CONFIDENCE);

/// Pairs of nodes that run ranks of the same job.
#[derive(Debug, Default)]
struct Shared {
    all: BTreeSet<Pair>,
    /// Of jobs that take another time than predicted: tested as often as the budget allows until it no longer is so, since
    /// an estimator needs several tests to believe a change.
    deviating: BTreeSet<Pair>,
}

/// Hands out and takes back grants. What they may cost is stored before anybody can see them.
pub async fn tick(app: &App) -> Result<(), CycleError> {
    let now = app.clock.now();
    let live = app.presence.live(now);
    let links = app.store.links().await?;
    let tests = weighed(app.store.link_tests().await?.to_vec(), &links, now);
    let links = agreed(merge(&links, &tests, now, app.time_constant_s()));
    let known = known(app.config.probes.suspect_change, &links, &tests, &shared(app).await?);
    let echoes = echoes::plan(&app.config.probes, &live, &known);
    *app.echoes.lock() = echoes;
    let moved = {
        let mut scheduler = app.scheduler.lock();
        scheduler.tick(now, &live, &known, echoes.other_probes);
        scheduler.take_moved()
    };
    Ok(app.store.put_probe_accounts(&moved, now).await?)
}

/// What the links look like, by pair of nodes.
fn known(suspect_change: f64, links: &LinkMap, tests: &[TestRow], shared: &Shared) -> BTreeMap<Pair, Known> {
    let tests: BTreeMap<_, &TestRow> = tests.iter().map(|t| ((&t.src, &t.dst), t)).collect();
    let mut known: BTreeMap<Pair, Known> = BTreeMap::new();
    for ((from, to), link) in links {
        let pair = Pair::new(from, to);
        let test = tests.get(&(from, to));
        let then = test.and_then(|test| test.latency_us);
        let moved = then.is_some_and(|then| latency_moved(link, then, suspect_change))
            || test.is_some_and(|test| contradicted(test, link));
        let off = shared.deviating.contains(&pair);
        let stale = link.bandwidth_confidence < STALE * LEAST_CONFIDENCE && shared.all.contains(&pair);
        let entry = known.entry(pair).or_default();
        let both = entry.bandwidth_bps.into_iter().chain(link.bandwidth_bps);
        entry.bandwidth_bps = both.reduce(f64::max);
        let carried = test.filter(|test| !test.is_lower_bound).map(|test| test.bandwidth_bps);
        let tested = entry.tested_bps.into_iter().chain(carried);
        entry.tested_bps = tested.reduce(f64::min);
        entry.latency_s = entry.latency_s.max(link.latency_us * 1e-6);
        entry.suspect |= moved || off;
        entry.stale |= stale;
    }
    known
}

fn latency_moved(link: &LinkView, then_us: f64, share: f64) -> bool {
    let change = (link.latency_us - then_us).abs();
    change > LATENCY_FLOOR_US && change > share * then_us.min(link.latency_us)
}

async fn shared(app: &App) -> Result<Shared, CycleError> {
    let jobs: Vec<_> = app.statuses.lock().iter().map(|(job, status)| (job.clone(), status.deviates)).collect();
    let mut shared = Shared::default();
    for (job, deviates) in jobs {
        let ranks = app.store.ranks(&job).await?;
        let nodes: BTreeSet<NodeName> = ranks.iter().filter(|r| r.left.is_none()).map(|r| r.node.clone()).collect();
        let nodes: Vec<NodeName> = nodes.into_iter().collect();
        if deviates {
            shared.deviating.extend(Pair::among(&nodes));
        }
        shared.all.extend(Pair::among(&nodes));
    }
    Ok(shared)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::links::tests::{node, row, test};
    use flexcomm_domain::Timestamp;

    #[test]
    fn only_unsure_links_of_a_job_are_stale_and_the_last_test_is_known() {
        let rows = [row("a", "b", Some(1e9), 0), row("b", "a", Some(1e9), 0)];
        let test = |bandwidth_bps| test(bandwidth_bps, None, Some(1e9));
        let pair = Pair::new(&node("a"), &node("b"));
        let look = |tests: &[TestRow], shared: &Shared| {
            known(0.3, &merge(&rows, tests, Timestamp(0), 120.0), tests, shared)[&pair]
        };
        let job = Shared { all: [pair.clone()].into(), deviating: BTreeSet::new() };
        let sure = look(&[], &job);
        assert!(!sure.stale && sure.tested_bps.is_none() && !sure.suspect, "{sure:?}");
        let fallen = look(&[test(1e8)], &job);
        assert!(fallen.stale && fallen.suspect, "{fallen:?}");
        assert_eq!((fallen.bandwidth_bps, fallen.tested_bps), (Some(1e9), Some(1e8)));
        assert!(!look(&[test(1e8)], &Shared::default()).stale, "no decision rests on it");
    }
}
