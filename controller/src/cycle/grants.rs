//! Which links look as if they had changed, and whom to test now.

use flexcomm_domain::NodeName;
use flexcomm_wire::api::LinkView;
use std::collections::{BTreeMap, BTreeSet};

use super::CycleError;
use crate::app::App;
use crate::echoes;
use crate::grants::{Known, Pair};
use crate::links::{LinkMap, contradicted, merge};
use crate::store::TestRow;

/// Changes of latency below this many microseconds are no sign of another network.
const LATENCY_FLOOR_US: f64 = 100.0;

/// Hands out and takes back grants. What they may cost is stored before anybody can see them.
pub async fn tick(app: &App) -> Result<(), CycleError> {
    let now = app.clock.now();
    let live = app.presence.live(now);
    let tests = app.store.link_tests().await?;
    let links = merge(&app.store.links().await?, &tests, now);
    let known = known(app, &links, &tests, &deviating(app).await?);
    let echoes = echoes::plan(&app.config.probes, &live, &known);
    *app.echoes() = echoes;
    let moved = {
        let mut scheduler = app.scheduler();
        scheduler.tick(now, &live, &known, echoes.elsewhere);
        scheduler.to_store()
    };
    Ok(app.store.put_probe_accounts(&moved, now).await?)
}

/// What the links look like, by pair of nodes.
fn known(app: &App, links: &LinkMap, tests: &[TestRow], deviating: &BTreeSet<Pair>) -> BTreeMap<Pair, Known> {
    let tests: BTreeMap<_, &TestRow> = tests.iter().map(|t| ((&t.src, &t.dst), t)).collect();
    let mut known: BTreeMap<Pair, Known> = BTreeMap::new();
    for ((from, to), link) in links {
        let pair = Pair::new(from, to);
        let test = tests.get(&(from, to));
        let then = test.and_then(|test| test.latency_us);
        let moved = then.is_some_and(|then| latency_moved(link, then, app.config.probes.suspect_change))
            || test.is_some_and(|test| contradicted(test, link));
        let off = deviating.contains(&pair);
        let entry = known.entry(pair).or_default();
        let both = entry.bandwidth_bps.into_iter().chain(link.bandwidth_bps);
        entry.bandwidth_bps = both.reduce(f64::max);
        entry.latency_s = entry.latency_s.max(link.latency_us * 1e-6);
        entry.suspect |= moved || off;
    }
    known
}

fn latency_moved(link: &LinkView, then_us: f64, share: f64) -> bool {
    let change = (link.latency_us - then_us).abs();
    change > LATENCY_FLOOR_US && change > share * then_us.min(link.latency_us)
}

/// Pairs of nodes whose job takes another time than predicted: tested as often as the budget allows until it no
/// longer does, since an estimator needs several tests to believe a change.
async fn deviating(app: &App) -> Result<BTreeSet<Pair>, CycleError> {
    let off: Vec<_> = app.boards().iter().filter(|(_, board)| board.deviates).map(|(job, _)| job.clone()).collect();
    let mut pairs = BTreeSet::new();
    for job in off {
        let ranks = app.store.ranks(&job).await?;
        let nodes: BTreeSet<NodeName> = ranks.into_iter().filter(|r| r.left.is_none()).map(|r| r.node).collect();
        let nodes: Vec<NodeName> = nodes.into_iter().collect();
        for (i, a) in nodes.iter().enumerate() {
            pairs.extend(nodes[i + 1..].iter().map(|b| Pair::new(a, b)));
        }
    }
    Ok(pairs)
}
