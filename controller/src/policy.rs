//! What is set for a job, and by whom.

use flexcomm_domain::{CompressorKind, Strategy, Timestamp, words};
use flexcomm_planner::{Allowed, Config, JobPolicy, JobPolicyError, Pin, Snapshot, rfc3339};
use flexcomm_wire::api::{self, NotOffered, PolicySet, PolicyView};
use std::collections::BTreeSet;

use crate::store::{JobRow, RankRow};

words! {
    /// Who set the policy that counts.
    pub enum Source {
        /// An operator, over REST.
        Operator = "operator",
        /// Its training script; of several ranks that set one, the lowest.
        Script = "script",
        /// Nothing is set for the job: the controller's settings alone.
        Controller = "controller",
    }
}

/// A policy that is not taken. Its text is the whole answer.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
pub enum PolicyError {
    /// It cannot be read.
    #[error(transparent)]
    Invalid(#[from] JobPolicyError),
    /// Nothing that its kinds list can be decided.
    #[error("nothing of the list can be used and dense alone would be left; list \"none\" where that is meant: {0}")]
    Unusable(String),
    /// What it pins cannot be run.
    #[error("pin.strategy {plan}: {why}{offered}")]
    Pin {
        /// What is pinned.
        plan: String,
        /// Why the job cannot run it.
        why: String,
        /// What its trainers have, where the reason names nothing near to what is pinned.
        offered: String,
    },
    /// Its pin is over.
    #[error("pin.until is {until}, allowed is a time after now, which is {now}")]
    Past {
        /// As given.
        until: String,
        /// The controller's time.
        now: String,
    },
}

/// What counts for a job of these ranks now, and who set it: all of it the operator, or else the script.
pub fn in_force(job: &JobRow, ranks: &[RankRow], now: Timestamp) -> (JobPolicy, Source) {
    let (policy, source) = match (&job.policy, in_script(ranks).next()) {
        (Some(policy), _) => (policy.clone(), Source::Operator),
        (None, Some((_, policy))) => (policy.clone(), Source::Script),
        (None, None) => (JobPolicy::default(), Source::Controller),
    };
    (policy.at(now), source)
}

/// What scripts set, by rank.
fn in_script(ranks: &[RankRow]) -> impl Iterator<Item = (u32, &JobPolicy)> {
    ranks.iter().filter_map(|row| Some((row.rank, row.policy.as_ref()?)))
}

/// That the ranks' scripts set different policies, as a sentence.
pub fn differ(ranks: &[RankRow]) -> Option<String> {
    let (counts, policy) = in_script(ranks).next()?;
    let (other, _) = in_script(ranks).find(|(_, other)| *other != policy)?;
    Some(format!("the scripts of ranks {counts} and {other} set different policies: that of rank {counts} counts"))
}

/// Checks a policy against what the job's trainers offer, and answers what counts from now on.
///
/// # Errors
/// [`PolicyError::Unusable`], [`PolicyError::Pin`], [`PolicyError::Past`].
pub fn check_against(policy: &JobPolicy, snapshot: Snapshot, now: Timestamp) -> Result<PolicySet, PolicyError> {
    if let Some(Pin { until: Some(until), .. }) = policy.pin.as_ref().filter(|_| policy.pin_at(now).is_none()) {
        return Err(PolicyError::Past { until: rfc3339(*until), now: rfc3339(now) });
    }
    let all: Vec<CompressorKind> = policy.kinds.iter().flatten().copied().collect();
    let pin = policy.pin.as_ref().map(|pin| &pin.plan);
    let needs_offer = all.iter().any(|kind| kind.name() != "none") || pin.is_some_and(|plan| !plan.is_dense());
    if snapshot.offer.codecs.is_empty() && needs_offer {
        let note = "no trainer of the job is attached: nothing is known yet of what they offer".to_owned();
        return Ok(PolicySet { policy: shown(policy), not_offered: Vec::new(), note: Some(note) });
    }
    if snapshot.buckets.is_empty() && pin.is_some_and(|plan| plan.strategies().len() > 1) {
        let note = "the buckets of the job's gradient are not known yet: whether it can run what is pinned, neither"
            .to_owned();
        return Ok(PolicySet { policy: shown(policy), not_offered: Vec::new(), note: Some(note) });
    }
    if let Some((plan, why)) = pin.and_then(|plan| Some((plan, snapshot.cannot_run(plan)?))) {
        let kinds: BTreeSet<CompressorKind> = snapshot.offer.codecs.keys().map(CompressorKind::from).collect();
        let has_kind = |x: &Strategy| x.is_dense() || kinds.contains(&CompressorKind::from(&x.family()));
        let all_near = plan.strategies().iter().all(has_kind);
        let offered = if all_near { String::new() } else { format!("; offered are {}", offered(&snapshot)) };
        return Err(PolicyError::Pin { plan: plan.to_string(), why, offered });
    }
    let snapshot = Snapshot { policy: policy.clone(), ..snapshot };
    let left_out =
        |kind: &CompressorKind| Some(NotOffered { kind: kind.to_string(), why: snapshot.kind_left_out(*kind)? });
    let not_offered: Vec<NotOffered> = all.iter().filter_map(left_out).collect();
    if !all.is_empty() && not_offered.len() == all.len() {
        let each = not_offered.iter().map(|NotOffered { kind, why }| format!("{kind}: {why}"));
        return Err(PolicyError::Unusable(each.collect::<Vec<_>>().join("; ")));
    }
    Ok(PolicySet { policy: shown(policy), not_offered, note: None })
}

/// What a job's trainers have: compressors by collectives.
pub fn offered(snapshot: &Snapshot) -> String {
    let codecs: Vec<String> = snapshot.offer.codecs.keys().map(ToString::to_string).collect();
    let collectives: Vec<&str> = snapshot.offer.collectives.iter().map(|x| x.as_str()).collect();
    format!("{} by {}", codecs.join(", "), collectives.join(", "))
}

/// As it is shown.
pub fn shown(policy: &JobPolicy) -> api::JobPolicy {
    let JobPolicy { kinds, objective, least_gain, most_overhead, observe, pin } = policy;
    api::JobPolicy {
        kinds: kinds.as_ref().map(|kinds| kinds.iter().map(ToString::to_string).collect()),
        objective: objective.as_ref().and_then(|objective| serde_json::to_value(objective).ok()),
        least_gain: *least_gain,
        most_overhead: *most_overhead,
        observe: *observe,
        pin: pin.as_ref().map(|pin| api::Pin { strategy: (&pin.plan).into(), until: pin.until.map(rfc3339) }),
    }
}

/// What is set for a job and what counts, as it is answered.
pub fn view(job: &JobRow, ranks: &[RankRow], now: Timestamp, config: &Config) -> PolicyView {
    let (policy, source) = in_force(job, ranks, now);
    let in_force = completed(&policy, config);
    PolicyView { policy: shown(&policy), source: source.as_str().to_owned(), in_force }
}

/// What decisions are made by: the policy, and the configuration in what it leaves open.
fn completed(policy: &JobPolicy, config: &Config) -> api::InForce {
    let objective = policy.objective.as_ref().unwrap_or(&config.policy);
    let has_kind = |allowed: &&Allowed| {
        let kind = match allowed {
            Allowed::Kind(kind) => *kind,
            Allowed::Family(family) => CompressorKind::from(&**family),
        };
        policy.kinds.as_ref().is_none_or(|kinds| kinds.contains(&kind))
    };
    let compressors = match (&config.compressors, &policy.kinds) {
        (Some(only), _) => Some(only.iter().filter(has_kind).map(ToString::to_string).collect()),
        (None, Some(kinds)) => Some(kinds.iter().map(ToString::to_string).collect()),
        (None, None) => None,
    };
    api::InForce {
        objective: serde_json::to_value(objective).unwrap_or_default(),
        compressors,
        least_gain: policy.least_gain.unwrap_or_default().max(objective.gain_floor()),
        confidence: config.confidence,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn a_policy_counts_before_the_configuration() {
        let only: Vec<Allowed> = vec!["topk".parse().unwrap(), "powersgd(rank=2)+ef(vanilla)".parse().unwrap()];
        let config = Config { compressors: Some(only), ..Config::default() };
        let of = |policy: serde_json::Value| completed(&JobPolicy::read(&policy).unwrap(), &config);
        let default = of(json!({}));
        assert_eq!(default.compressors, Some(vec!["topk".into(), "powersgd(rank=2)+ef(vanilla)".into()]));
        assert_eq!((default.least_gain, default.confidence), (0.0, config.confidence));
        assert_eq!(default.objective["name"], "time-to-quality");
        let floor = json!({ "name": "time-to-quality", "gain_floor": 0.5 });
        let set = of(json!({ "kinds": ["powersgd", "fp16"], "least_gain": 0.2, "objective": floor }));
        assert_eq!(set.compressors, Some(vec!["powersgd(rank=2)+ef(vanilla)".into()]), "both allow it");
        assert_eq!((set.least_gain, &set.objective["gain_floor"]), (0.5, &json!(0.5)));
        let (kinds, all) = (JobPolicy::read(&json!({ "kinds": ["topk"] })).unwrap(), Config::default());
        assert_eq!(completed(&kinds, &all).compressors, Some(vec!["topk".into()]));
        assert_eq!(completed(&JobPolicy::default(), &all).compressors, None);
    }
}
