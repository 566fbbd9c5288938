//! Phase 1: everything a decision needs, from the store.

use flexcomm_domain::{CodecBytes, CodecCost, Collective, Family, NodeName, Plan, Seconds, Strategy, Timestamp};
use flexcomm_planner::{InForce, Links, Losses, Memory, Offer, Snapshot, TrialWaits};
use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use super::profiles::profiles;
use crate::app::App;
use crate::doubts::Doubt;
use crate::limits::PROFILE_TRIALS;
use crate::links::{LinkMap, agreed, disagreements, matrix, merge, with_tests, without_claims_of};
use crate::measure::{self, Doubted, RecentSteps, WholeStep};
use crate::policy;
use crate::store::{JobRow, Likeness, LinkRow, RankRow, Result, TestRow, TrialReportRow, TrialRow};

/// One job at one moment.
#[derive(Debug, Clone)]
pub struct Gathered {
    /// The job.
    pub job: JobRow,
    /// For the planner.
    pub snapshot: Arc<Snapshot>,
    /// What its links are of: latencies as agents report them, and throughput tests.
    pub claims: Claims,
    /// The node of each rank; empty while not all ranks are there.
    pub nodes: Vec<NodeName>,
    /// The newest steps.
    pub recent: Arc<RecentSteps>,
    /// What the job waits for.
    pub waiting: Vec<String>,
    /// Nodes whose reports are not counted.
    pub doubts: Vec<Doubt>,
    /// Now.
    pub now: Timestamp,
}

/// What nodes say of links.
#[derive(Debug, Clone)]
pub struct Claims {
    /// Latencies.
    pub links: Arc<Vec<LinkRow>>,
    /// Throughput tests.
    pub tests: Arc<Vec<TestRow>>,
}

impl Claims {
    /// The links of now, where both ends of one differ as the end says that is believed.
    pub fn merged(&self, now: Timestamp) -> LinkMap {
        agreed(merge(&self.links, &self.tests, now))
    }

    /// The matrix between the ranks on these nodes over these links of theirs, with its tests, or what is missing, in words.
    pub fn matrix(&self, merged: &LinkMap, nodes: &[NodeName]) -> std::result::Result<Links, String> {
        Ok(with_tests(matrix(merged, nodes)?, nodes, &self.tests))
    }

    /// Those of the other nodes.
    pub fn without(&self, node: &NodeName) -> Self {
        let tests = self.tests.iter().filter(|test| test.reporter != *node).cloned().collect();
        Self { links: Arc::new(without_claims_of(&self.links, node)), tests: Arc::new(tests) }
    }
}

/// Reads everything else about a job with these ranks.
pub async fn gather(app: &App, job: &JobRow, ranks: &[RankRow]) -> Result<Gathered> {
    let now = app.clock.now();
    let mut waiting = Vec::new();
    let claims = Claims { links: app.store.links().await?, tests: app.store.link_tests().await? };
    let merged = merge(&claims.links, &claims.tests, now);
    let differ = disagreements(&merged);
    let here = |node: &NodeName| ranks.iter().any(|r| r.node == *node && r.left.is_none());
    let differ = differ.into_iter().filter(|d| d.fresh && here(&d.wrong) && here(&d.right));
    let mut doubts: Vec<Doubt> = differ.map(|d| Doubt { what: d.words(), node: Some(d.wrong) }).collect();
    let nodes = placed(job, ranks);
    let links = nodes.as_ref().map_err(Clone::clone).and_then(|nodes| claims.matrix(&agreed(merged), nodes));
    let links = links.map_err(|why| waiting.push(why)).ok();
    let recent = app.store.recent_steps(&job.job, &app.sight(job, ranks).expected).await?;
    doubts.extend(recent.doubted.iter().map(|wrong| doubt(wrong, ranks)));
    let in_force = app.store.decision(&job.job).await?;
    let in_force = in_force.map(|row| InForce { decision: row.decision, applied_at_step: row.applied_at_step });
    let earlier = app.store.newest_version(&job.job).await?;
    if in_force.is_none() && earlier > job.earlier {
        waiting.push(format!("decision {earlier} is damaged on disk: without it, the next one is decided anew"));
    }
    let trials = app.store.trials(&job.job, PROFILE_TRIALS).await?;
    let reports = app.store.trial_reports(&job.job, PROFILE_TRIALS).await?;
    let kept = app.memories.lock().get(job).cloned();
    let memory = match kept {
        Some(memory) => memory,
        None => stored_memory(app, job).await?,
    };
    let version = in_force.as_ref().map(|f| f.decision.version).unwrap_or_default();
    let offer = offer(ranks, job.gradient_values, &mut waiting);
    // Of what no trainer offers the sizes of messages are not known.
    let is_known =
        |plan: &Plan| plan.strategies().iter().all(|x| x.is_dense() || offer.codecs.contains_key(&x.family()));
    let newest = recent.whole.last().filter(|step| in_force.is_none() && step.version == version);
    let begun_with = newest.map(|step| step.ran.clone()).filter(is_known);
    let decided = in_force.as_ref().map(|f| &f.decision.plan).or(begun_with.as_ref());
    let now_decided = decided.map(|plan| (version, plan));
    let as_decided: Vec<&WholeStep> = recent.whole.iter().filter(|s| s.is_as_decided(now_decided)).collect();
    let measured = measure::measured(&as_decided, version, now);
    let steps_taken = recent.newest.map_or(0, |step| step + 1);
    let applied = in_force.as_ref().and_then(|f| Some((f.decision.version, f.applied_at_step?)));
    let losses = match applied {
        Some((version, from)) => {
            let points = app.store.losses(&job.job).await?;
            Losses::of(&points, version, from).filter(|losses| losses.is_of_now(steps_taken))
        }
        None => None,
    };
    // Of a plan by bucket it is not known which strategy takes which part.
    let alike = decided.map_or(Some(Strategy::DENSE_RING), |plan| plan.alike().copied());
    let steps_now = alike.zip(measured.as_ref().map(|m| m.t_comp.get()));
    let size = (job.gradient_values, job.world as usize);
    let table = app.config.times.clone().with(costs(ranks));
    let (profiles, times) = profiles(&trials, &reports, (&table, size, steps_now));
    waiting.extend(policy::differ(ranks));
    let (policy, _) = policy::in_force(job, ranks, now);
    let snapshot = Arc::new(Snapshot {
        begun: job.created,
        backend: job.backend.clone(),
        offer,
        links,
        profiles,
        times,
        energies: measure::bucket_energies(&recent.whole, job.buckets.len()),
        buckets: job.buckets.clone(),
        compute: measure::compute(&recent.whole),
        measured,
        trial: ended(&trials, &reports),
        losses,
        earlier,
        steps_taken,
        begun_with,
        in_force,
        memory,
        config: flexcomm_planner::Config {
            policy: policy.objective.as_ref().unwrap_or(&app.config.planner.policy).of_momentum(job.momentum),
            ..app.config.planner.clone()
        },
        policy,
        ..Snapshot::new(job.job.clone(), job.world, job.gradient_values)
    });
    let nodes = nodes.unwrap_or_default();
    Ok(Gathered { job: job.clone(), snapshot, claims, nodes, recent, waiting, doubts, now })
}

/// What the planner remembers of a job, or of one like it, from before this process looked at it. A memory of another version of the planner
/// is as good as none.
async fn stored_memory(app: &App, job: &JobRow) -> Result<Memory> {
    let read = |text: &str| serde_json::from_str::<Memory>(text).ok();
    let memory = match app.store.planner_memory(&job.job).await? {
        Some(text) => read(&text),
        None => app.store.memory_of_another(job).await?.and_then(|(text, likeness)| match likeness {
            Likeness::Same => read(&text),
            other => Some(read(&text)?.of_another_job(job.created, other == Likeness::SameMachine)),
        }),
    };
    Ok(memory.unwrap_or_default())
}

fn doubt(wrong: &Doubted, ranks: &[RankRow]) -> Doubt {
    let node = ranks.iter().find(|r| r.rank == wrong.rank).map(|r| r.node.clone());
    let place = node.as_ref().map_or(String::new(), |node| format!(" on node {node}"));
    Doubt { what: format!("rank {}{place} {}: its steps are not counted", wrong.rank, wrong.why), node }
}

/// The node of each rank, or which ranks are missing.
fn placed(job: &JobRow, ranks: &[RankRow]) -> std::result::Result<Vec<NodeName>, String> {
    let here: BTreeMap<u32, &NodeName> = ranks.iter().filter(|r| r.left.is_none()).map(|r| (r.rank, &r.node)).collect();
    let missing = (0..job.world).filter(|rank| !here.contains_key(rank)).count();
    if missing > 0 {
        return Err(format!("{missing} of {} ranks have not said hello", job.world));
    }
    Ok(here.into_values().cloned().collect())
}

/// Message sizes are compared where one in so many values is kept: in the middle of the usual ratios.
const TYPICAL_SHARE: u64 = 100;

/// Message sizes of the compressors that a rank has, as far as they are known here.
fn sizes(rank: &RankRow) -> BTreeMap<Family, CodecBytes> {
    rank.codecs.iter().filter_map(|codec| Some((codec.family, codec.bytes?))).collect()
}

/// What compressing takes on rank 0's device, which is the one that is measured.
fn costs(ranks: &[RankRow]) -> impl Iterator<Item = (Family, [CodecCost; 2])> {
    let of_first = ranks.iter().filter(|rank| rank.rank == 0).flat_map(|rank| &rank.codecs);
    of_first.filter_map(|codec| Some((codec.family, codec.costs?)))
}

/// What all ranks can do. Message sizes that differ between ranks count with their largest, of a gradient of n values.
fn offer(ranks: &[RankRow], n: u64, waiting: &mut Vec<String>) -> Offer {
    let here: Vec<&RankRow> = ranks.iter().filter(|r| r.left.is_none()).collect();
    let mut codecs: BTreeMap<Family, CodecBytes> = BTreeMap::new();
    let each: Vec<BTreeMap<Family, CodecBytes>> = here.iter().map(|rank| sizes(rank)).collect();
    for family in each.first().into_iter().flat_map(BTreeMap::keys).filter(|family| !family.is_none()) {
        let sizes: Option<Vec<CodecBytes>> = each.iter().map(|known| known.get(family).copied()).collect();
        let bytes = |codec: &CodecBytes| codec.pairs(n, n.div_ceil(TYPICAL_SHARE));
        let largest = sizes.unwrap_or_default().into_iter().max_by(|a, b| bytes(a).total_cmp(&bytes(b)));
        codecs.extend(largest.map(|bytes| (*family, bytes)));
    }
    let all = here.iter().flat_map(|rank| &rank.codecs);
    let by_default: BTreeSet<Family> = all.filter(|codec| !codec.on_request).map(|codec| codec.family).collect();
    let on_request = codecs.keys().copied().filter(|family| !by_default.contains(family)).collect();
    let all_can = |c: &&Collective| here.iter().all(|r| r.collectives.iter().any(|name| name == c.as_str()));
    let collectives: Vec<Collective> = Collective::ALL.iter().filter(all_can).copied().collect();
    if collectives.is_empty() && !here.is_empty() {
        waiting.push("its ranks have no collective in common that is known here".to_owned());
    }
    Offer { codecs, collectives, on_request }
}

fn ended(trials: &[TrialRow], reports: &[TrialReportRow]) -> Option<TrialWaits> {
    let newest = trials.iter().filter(|t| t.state != "pending").max_by_key(|t| t.id)?;
    let TrialRow { id, asked, iterations, .. } = *newest;
    let mut sync: Vec<(Strategy, Seconds)> = Vec::new();
    for outcome in reports.iter().filter(|r| r.id == id).flat_map(|r| &r.outcomes).filter(|o| o.iterations > 0) {
        let Ok(strategy) = Strategy::try_from(&outcome.strategy) else { continue };
        let Ok(seconds) = Seconds::new(outcome.sync_us * 1e-6) else { continue };
        match sync.iter_mut().find(|(known, _)| *known == strategy) {
            Some((_, longest)) if *longest >= seconds => {}
            Some((_, longest)) => *longest = seconds,
            None => sync.push((strategy, seconds)),
        }
    }
    let cost_us = reports.iter().filter(|r| r.id == id).map(|r| r.cost_us).fold(0.0, f64::max);
    let cost = Seconds::new(cost_us * 1e-6).ok().filter(|cost| cost.get() > 0.0);
    Some(TrialWaits { id, asked, ended: newest.ended?, cost, iterations, sync })
}

#[cfg(test)]
pub mod tests {
    use super::*;
    use crate::store::RankCodec;
    use flexcomm_domain::IndexBytes;
    use flexcomm_wire::{CodecInfo, TrialOutcome};

    fn rank(rank: u32, node: &str, codecs: &[(&str, f64)], collectives: &[&str]) -> RankRow {
        let info = |(name, index): &(&str, f64)| CodecInfo {
            compressor: (*name).to_owned(),
            header_bytes: 0,
            index_bytes: *index,
            index_coding: None,
            value_bytes: 4.0,
            rounds: 1,
            times: None,
            on_request: false,
        };
        RankRow {
            rank,
            node: node.parse().unwrap(),
            codecs: codecs.iter().map(info).filter_map(|info| RankCodec::of(&info)).collect(),
            collectives: collectives.iter().map(|c| (*c).to_owned()).collect(),
            policy: None,
            seen: Timestamp(0),
            left: None,
        }
    }

    #[test]
    fn the_offer_is_what_all_ranks_can() {
        let ranks = [
            rank(0, "a", &[("topk", 4.0), ("mstopk", 4.0), ("later-one", 1.0)], &["dense-ring", "allgather"]),
            rank(1, "b", &[("topk", 8.0)], &["allgather", "dense-ring", "art-ring"]),
        ];
        let mut waiting = Vec::new();
        let offer = offer(&ranks, 1_000_000, &mut waiting);
        assert_eq!(
            offer.codecs.into_iter().map(|(c, b)| (c, b.indices)).collect::<Vec<_>>(),
            [("topk".parse().unwrap(), IndexBytes::Each(8.0))]
        );
        assert_eq!(offer.collectives, [Collective::DenseRing, Collective::Allgather]);
        assert!(waiting.is_empty());
    }

    #[test]
    fn what_no_rank_has_as_a_candidate_is_there_on_request() {
        let mut ranks = [0, 1].map(|i| rank(i, "a", &[("topk", 4.0), ("terngrad", 4.0)], &["allgather"]));
        ranks.iter_mut().for_each(|rank| rank.codecs[1].on_request = true);
        let requested = |ranks: &[RankRow]| offer(ranks, 1_000_000, &mut Vec::new()).on_request;
        assert_eq!(requested(&ranks), ["terngrad".parse().unwrap()].into());
        ranks[1].codecs[1].on_request = false;
        assert!(requested(&ranks).is_empty());
    }

    /// While trainers of two releases are in one job, messages are charged as the larger ones.
    #[test]
    fn sizes_that_differ_count_with_their_largest() {
        let mut ranks = [0, 1].map(|i| rank(i, "a", &[("topk", 4.0)], &["allgather"]));
        let indices = |ranks: &[RankRow]| {
            offer(ranks, 1_000_000, &mut Vec::new()).codecs.into_values().map(|codec| codec.indices).collect::<Vec<_>>()
        };
        let least = |rank: &mut RankRow| {
            rank.codecs[0].bytes = rank.codecs[0].bytes.map(|bytes| CodecBytes { indices: IndexBytes::Least, ..bytes });
        };
        least(&mut ranks[0]);
        assert_eq!(indices(&ranks), [IndexBytes::Each(4.0)]);
        least(&mut ranks[1]);
        assert_eq!(indices(&ranks), [IndexBytes::Least]);
    }

    pub fn trial(id: u64, state: &str) -> TrialRow {
        TrialRow {
            id,
            asked: Timestamp(id),
            why: String::new(),
            state: state.to_owned(),
            candidates: vec![],
            iterations: 10,
            budget_ms: 1,
            ended: (state != "pending").then_some(Timestamp(id * 10)),
            aborted: None,
        }
    }

    pub fn report(id: u64, rank: u32, gain: f64) -> TrialReportRow {
        let outcome = |text: &str| TrialOutcome {
            strategy: text.parse::<Strategy>().unwrap().into(),
            gain,
            energy: None,
            shadow_gain: None,
            shadow_energy: None,
            comp_us: 1000.0 * gain,
            sync_us: 1.0,
            iterations: 10,
        };
        let outcomes = vec![outcome("topk@0.1/allgather"), outcome("none@1/dense-ring")];
        TrialReportRow { id, rank, outcomes, aborted: None, cost_us: 0.0, received: Timestamp(0) }
    }

    #[test]
    fn a_trials_collectives_take_as_long_as_their_last_rank() {
        let mut reports = [report(2, 0, 0.4), report(2, 1, 0.6), report(1, 0, 0.9), report(3, 0, 0.1)];
        reports[1].outcomes[0].sync_us = 2500.0;
        let found = ended(&[trial(3, "pending"), trial(2, "done"), trial(1, "done")], &reports).unwrap();
        let topk = "topk@0.1/allgather".parse().unwrap();
        let seconds = |s| Seconds::new(s).unwrap();
        assert_eq!((found.id, found.sync), (2, vec![(topk, seconds(2.5e-3)), (Strategy::DENSE_RING, seconds(1e-6))]));
        assert_eq!(ended(&[trial(3, "pending")], &reports), None);
    }
}
