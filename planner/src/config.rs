//! Every setting of the planner: unit, default and reason.

use crate::{Allowed, NOT_EMPTY};
use flexcomm_domain::{CompressionRatio, Seconds, Selection, nearest};
use flexcomm_optimizer::{DEFAULT_CRS, PolicyConfig};
use serde::de::{self, Deserializer, MapAccess, Visitor};
use serde::{Deserialize, Serialize};
use std::borrow::Cow;
use std::fmt;

/// Most candidate ratios: with the default compressors, every collective and both worker selections some 400 strategies.
pub const MAX_CRS: usize = 32;

/// The operator's settings. Shares are fractions (0.1 = 10 %), durations seconds.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Config {
    /// How a point of the Pareto front is picked. Default: time-to-quality, the least time for the
    /// progress of a dense step: what the user waits for. A name alone has its default settings.
    #[serde(deserialize_with = "policy")]
    pub policy: PolicyConfig,
    /// Candidate ratios besides dense. Default: 0.1 divided by 3 down to 0.001, as in the paper: what two neighbours cost differs by more
    /// than is believed with certainty, and plans by bucket may have the ratios between them.
    pub crs: Vec<CompressionRatio>,
    /// Compressors that may be chosen: `topk`, `fp16`, `powersgd` with any parameters and memory, or one without its ratio,
    /// `topk(k=*)+ef(vanilla)`, `powersgd(rank=2)+ef(vanilla)` (ratios are `crs`); absent: all that the job offers, since what they cost and
    /// keep is believed of each.
    pub compressors: Option<Vec<Allowed>>,
    /// Whether biased compressors without error feedback (`topk(k=*)`) are candidates where the job offers them. Default false:
    /// what they leave out of a step never arrives, and training may end elsewhere. Casts to half precision are not meant.
    pub biased_without_memory: bool,
    /// How AR-Topk may pick the rank whose indices count; of several each is a candidate. Default: star and var. The paper
    /// found star both faster and fairer at N = 8; var keeps more where the ranks' gradients differ.
    pub selections: Vec<Selection>,

    /// A change must be better in this share of the samples of what is believed. Default 0.85: with less, noise switches back and
    /// forth; with more, savings are waited for that are real.
    pub confidence: f64,
    /// A strategy stays at least this long. Default 3 s: a few steps, in which it is measured, short against changes of the network.
    pub dwell_s: Seconds,
    /// What a switch costs. Default 0.5 s: one step at the old pace, refilled error feedback, cold buffers.
    pub switch_cost_s: Seconds,
    /// An announced decision that is not seen in force for this long no longer holds up the next. Default
    /// 30 s: a rank whose agent is gone never reports.
    pub apply_timeout_s: Seconds,
    /// Most time one trial may take; 0: none is asked for. Default 30 s.
    pub trial_budget_s: Seconds,
}

/// A policy's name, or a table of its name and settings.
pub(crate) fn policy<'de, D: Deserializer<'de>>(from: D) -> Result<PolicyConfig, D::Error> {
    from.deserialize_any(PolicyVisitor)
}

struct PolicyVisitor;

impl<'de> Visitor<'de> for PolicyVisitor {
    type Value = PolicyConfig;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "a policy's name, one of {}, or a table of its name and settings", PolicyConfig::NAMES.join(", "))
    }

    fn visit_str<E: de::Error>(self, name: &str) -> Result<PolicyConfig, E> {
        PolicyConfig::by_name(name).map_err(|error| match nearest(name, &PolicyConfig::NAMES) {
            Some(nearest) => E::custom(format!("{error}; did you mean {nearest}?")),
            None => E::custom(error),
        })
    }

    fn visit_map<A: MapAccess<'de>>(self, table: A) -> Result<PolicyConfig, A::Error> {
        PolicyConfig::deserialize(de::value::MapAccessDeserializer::new(table))
    }
}

impl Default for Config {
    fn default() -> Self {
        let seconds = |s: f64| Seconds::new(s).unwrap_or(Seconds::ZERO);
        Self {
            policy: PolicyConfig::default(),
            crs: DEFAULT_CRS.iter().filter_map(|&c| CompressionRatio::new(c).ok()).collect(),
            compressors: None,
            biased_without_memory: false,
            selections: Selection::ALL.to_vec(),
            confidence: 0.85,
            dwell_s: seconds(3.0),
            switch_cost_s: seconds(0.5),
            apply_timeout_s: seconds(30.0),
            trial_budget_s: seconds(30.0),
        }
    }
}

/// A value of [`Config`] that makes no sense. Completes "failed to use the planner's config: ...".
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
#[error("planner.{key} is {value}, allowed is {allowed}")]
pub struct ConfigError {
    /// The key.
    pub key: &'static str,
    /// As given.
    pub value: String,
    /// What would be accepted.
    pub allowed: Cow<'static, str>,
}

/// Keys of earlier builds, with what takes their place.
const REPLACED: &[(&[&str], &str)] = &[
    (
        &["link_change", "latency_floor_s", "gain_change", "noise_weight", "persistence", "links_settle_s", "review_s"],
        "nothing: what moves is weighed by its probability, see planner.confidence",
    ),
    (
        &["hysteresis", "hysteresis_ratio", "gain_floor_margin"],
        "planner.confidence, the probability that a change is better",
    ),
    (&["horizon_s"], "nothing: the time to the next change of the network is learnt"),
    (&["apply_patience_s"], "planner.apply_timeout_s"),
    (&["selection"], "planner.selections, of which each is a candidate"),
    (&["least_confidence", "max_link_age_s"], "nothing: estimates lose certainty as they age"),
    (
        &[
            "guard_margin",
            "guard_floor_s",
            "guard_dense_margin",
            "guard_timeout_s",
            "guard_patience_s",
            "least_steps",
            "settle_steps",
            "block_s",
            "block_max_s",
        ],
        "nothing: what steps take and keep is believed as it is measured, and a slower strategy is left for it",
    ),
    (
        &[
            "trial_iterations",
            "trial_interval_s",
            "trial_share",
            "trial_timeout_s",
            "trial_review_s",
            "trial_review_dense_s",
        ],
        "planner.trial_budget_s: a trial runs when what it tells is worth more than it takes",
    ),
];

impl Config {
    /// What takes the place of a key that earlier builds had; none for a key that never was.
    pub fn replacement(key: &str) -> Option<&'static str> {
        let found = REPLACED.iter().find(|(keys, _)| keys.contains(&key));
        found.map(|(_, replacement)| *replacement)
    }

    /// Names the first value out of range.
    pub fn check(&self) -> Result<(), ConfigError> {
        share("confidence", self.confidence, 0.5, 0.999, "0.5 to 0.999")?;
        share("dwell_s", self.dwell_s.get(), 0.0, 86_400.0, "0 to 86,400")?;
        share("switch_cost_s", self.switch_cost_s.get(), 0.0, 86_400.0, "0 to 86,400")?;
        share("apply_timeout_s", self.apply_timeout_s.get(), 1.0, 86_400.0, "1 to 86,400")?;
        share("trial_budget_s", self.trial_budget_s.get(), 0.0, 3600.0, "0 to 3600")?;
        check_policy(&self.policy)?;
        if self.selections.is_empty() {
            let (value, allowed) = ("an empty list".to_owned(), "star, var, or both");
            return Err(ConfigError { key: "selections", value, allowed: allowed.into() });
        }
        self.check_compressors()?;
        self.check_crs()
    }

    fn check_compressors(&self) -> Result<(), ConfigError> {
        let refuse =
            |value: String, allowed: Cow<'static, str>| Err(ConfigError { key: "compressors", value, allowed });
        let Some(compressors) = &self.compressors else { return Ok(()) };
        if compressors.is_empty() {
            return refuse("an empty list".to_owned(), NOT_EMPTY.into());
        }
        let never = |x: &&Allowed| matches!(x, Allowed::Family(family) if family.name() == "none");
        if let Some(none) = compressors.iter().find(never) {
            let allowed = "none by its name alone: it is dense, leaves nothing out, and nothing else goes with it";
            return refuse(none.to_string(), allowed.into());
        }
        let not_offered = |x: &Allowed| match x {
            Allowed::Kind(kind) => Some((*kind, kind.not_offered()?)),
            Allowed::Family(_) => None,
        };
        let unusable: Option<Vec<_>> = compressors.iter().map(not_offered).collect();
        if let Some((kind, why)) = unusable.and_then(|all| all.first().copied()) {
            let allowed = format!(
                "{kind} with its parameters, here and in attach(candidates=[...]), or beside others: no trainer offers it \
                 by itself, since {why}, and dense alone would be left, which is [\"none\"]"
            );
            return refuse(kind.to_string(), allowed.into());
        }
        let lossy = |x: &&Allowed| matches!(x, Allowed::Family(family) if family.any().is_biased_without_memory());
        match compressors.iter().find(lossy).filter(|_| !self.biased_without_memory) {
            Some(lossy) => refuse(
                lossy.to_string(),
                "only with biased_without_memory = true, since what it leaves out is lost: add +ef(vanilla)".into(),
            ),
            None => Ok(()),
        }
    }

    fn check_crs(&self) -> Result<(), ConfigError> {
        let refuse =
            |value: String, allowed: &'static str| Err(ConfigError { key: "crs", value, allowed: allowed.into() });
        if self.crs.is_empty() || self.crs.len() > MAX_CRS {
            return refuse(format!("a list of {}", self.crs.len()), "1 to 32 ratios");
        }
        match self.crs.iter().find(|c| c.is_dense()) {
            Some(dense) => refuse(dense.to_string(), "below 1: dense is always a candidate"),
            None => Ok(()),
        }
    }
}

fn share(key: &'static str, value: f64, least: f64, most: f64, allowed: &'static str) -> Result<(), ConfigError> {
    let ok = value.is_finite() && (least..=most).contains(&value);
    if ok { Ok(()) } else { Err(ConfigError { key, value: value.to_string(), allowed: Cow::Borrowed(allowed) }) }
}

/// Names the first setting of a policy out of range.
pub(crate) fn check_policy(policy: &PolicyConfig) -> Result<(), ConfigError> {
    match policy {
        PolicyConfig::TimeToQuality(p) => {
            share("policy.gain_floor", p.gain_floor, 0.0, 1.0, "0 to 1")?;
            share("policy.exponent", p.exponent.unwrap_or_default(), 0.0, 1.0, "0 to 1")?;
            share("policy.momentum", p.momentum.unwrap_or_default(), 0.0, 1f64.next_down(), "at least 0 and below 1")?;
            share("policy.steps", p.steps.unwrap_or(1.0), 1.0, 1e9, "1 to 1e9")
        }
        PolicyConfig::Weights(w) => {
            share("policy.comp", w.comp, 0.0, 1e9, "0 to 1e9")?;
            share("policy.sync", w.sync, 0.0, 1e9, "0 to 1e9")?;
            share("policy.inverse_gain_s", w.inverse_gain_s, 0.0, 1e9, "0 to 1e9")?;
            // All strategies would be worth the same.
            let most = w.comp.max(w.sync).max(w.inverse_gain_s);
            share("policy.comp, sync and inverse_gain_s", most, f64::MIN_POSITIVE, 1e9, "one of them above 0")
        }
        PolicyConfig::Knee(k) => {
            share("policy.unit_s", k.unit_s, 0.0, 1e9, "0 to 1e9, where 0 is what computing takes")
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use flexcomm_optimizer::policy::{Knee, TimeToQuality, Weights};

    #[test]
    fn defaults_are_valid_and_typos_are_named() {
        Config::default().check().unwrap();
        let typo = serde_json::from_str::<Config>("{\"dwel_s\": 3}").unwrap_err().to_string();
        assert!(typo.contains("dwel_s") && typo.contains("dwell_s"), "{typo}");
        assert!(serde_json::from_str::<Config>("{\"dwell_s\": -3}").is_err());
        assert!(Config::replacement("hysteresis").is_some_and(|now| now.contains("planner.confidence")));
        assert_eq!(Config::replacement("dwell_s"), None);
        let known = serde_json::to_value(Config { compressors: Some(vec![]), ..Config::default() }).unwrap();
        let known: Vec<&String> = known.as_object().unwrap().keys().collect();
        assert_eq!(known.len(), 10, "{known:?}");
        assert!(known.iter().all(|key| Config::replacement(key).is_none()));
        for (keys, replacement) in REPLACED {
            let named = |key: &&String| replacement.contains(&format!("planner.{key}"));
            let is_valid = replacement.starts_with("nothing: ") || known.iter().any(named);
            assert!(is_valid, "{keys:?} are replaced by {replacement}, which is no key");
        }
    }

    #[test]
    fn nonsense_is_refused_by_name() {
        let lost = |p| PolicyConfig::TimeToQuality(TimeToQuality { exponent: Some(p), ..TimeToQuality::default() });
        let of_steps = |n| PolicyConfig::TimeToQuality(TimeToQuality { steps: Some(n), ..TimeToQuality::default() });
        let negative = PolicyConfig::Weights(Weights { comp: -1.0, ..Weights::default() });
        let nothing = PolicyConfig::Weights(Weights { comp: 0.0, sync: 0.0, inverse_gain_s: 0.0 });
        let only = |text: &str| Config { compressors: Some(vec![text.parse().unwrap()]), ..Config::default() };
        for (key, config) in [
            ("confidence", Config { confidence: f64::NAN, ..Config::default() }),
            ("confidence", Config { confidence: 0.4, ..Config::default() }),
            ("dwell_s", Config { dwell_s: Seconds::new(1e6).unwrap(), ..Config::default() }),
            ("crs", Config { crs: vec![], ..Config::default() }),
            ("crs", Config { crs: vec![CompressionRatio::DENSE], ..Config::default() }),
            ("policy.comp", Config { policy: negative, ..Config::default() }),
            ("policy.comp, sync and inverse_gain_s", Config { policy: nothing, ..Config::default() }),
            ("policy.unit_s", Config { policy: PolicyConfig::Knee(Knee { unit_s: -3.0 }), ..Config::default() }),
            ("policy.exponent", Config { policy: lost(1.5), ..Config::default() }),
            ("policy.exponent", Config { policy: lost(f64::NAN), ..Config::default() }),
            ("policy.steps", Config { policy: of_steps(0.0), ..Config::default() }),
            ("policy.steps", Config { policy: of_steps(f64::NAN), ..Config::default() }),
            ("compressors", Config { compressors: Some(vec![]), ..Config::default() }),
            ("compressors", only("topk(k=*)")),
        ] {
            assert_eq!(config.check().unwrap_err().key, key);
        }
    }

    #[test]
    fn a_policy_is_its_name_or_a_table() {
        let read = |policy: &str| serde_json::from_str::<Config>(&format!("{{\"policy\": {policy}}}"));
        for name in PolicyConfig::NAMES {
            let by_name = PolicyConfig::by_name(name).unwrap();
            assert_eq!(read(&format!("{name:?}")).unwrap().policy, by_name);
            assert_eq!(read(&format!("{{\"name\": {name:?}}}")).unwrap().policy, by_name);
        }
        let said = |policy: &str| read(policy).unwrap_err().to_string();
        let (typo, table, number) = (said(r#""kneee""#), said(r#"{"name": "kneee"}"#), said("5"));
        assert!(typo.contains("did you mean knee?"), "{typo}");
        for error in [typo, table, number, said(r#""xyzzy""#)] {
            assert!(PolicyConfig::NAMES.iter().all(|name| error.contains(name)), "{error}");
        }
        assert!(said(r#"{"name": "knee", "nonsense": 1}"#).contains("nonsense"));
    }

    #[test]
    fn compressors_are_kinds_or_families_and_none_is_dense_alone() {
        let read = |text: &str| serde_json::from_str::<Config>(&format!("{{\"compressors\": {text}}}"));
        let config = read(r#"["none", "powersgd", "u8bit", "topk(k=*)+ef(vanilla)"]"#).unwrap();
        config.check().unwrap();
        assert_eq!(serde_json::from_value::<Config>(serde_json::to_value(&config).unwrap()).unwrap(), config);
        let covers = |text: &str| config.compressors.iter().flatten().any(|x| x.covers(&text.parse().unwrap()));
        for text in ["none", "powersgd(rank=3)+ef(vanilla)", "eightbit+ef(vanilla)", "topk(k=0.1)+ef(vanilla)"] {
            assert!(covers(text), "{text}");
        }
        assert!(!covers("topk(k=*)") && !covers("fp16"));
        let typo = read(r#"["topkk"]"#).unwrap_err().to_string();
        assert!(typo.contains("did you mean topk?"), "{typo}");
        for (written, now) in [("topk(k=0.01)+ef(vanilla)", "topk(k=*)+ef(vanilla)"), ("topk(0.01)", "topk(k=*)")] {
            let ratio = read(&format!("[{written:?}]")).unwrap_err().to_string();
            assert!(ratio.contains(&format!("planner.crs for every compressor, so write {now} here")), "{ratio}");
        }
        for text in ["topk+ef(vanilla)", "topk(k=5)+ef(vanilla)", "gradzip(rank=4)+ef(vanilla)"] {
            read(&format!("[{text:?}]")).unwrap().check().unwrap();
        }
        let refused = |text: &str| read(text).unwrap().check().unwrap_err().to_string();
        let threshold = refused(r#"["threshold"]"#);
        assert!(threshold.starts_with("planner.compressors is threshold, "), "{threshold}");
        assert!(threshold.contains("since its threshold v has the gradient's unit"), "{threshold}");
        assert!(refused(r#"["topk", "none+ef(vanilla)"]"#).contains("none by its name alone"));
        for fine in [r#"["threshold", "topk"]"#, r#"["threshold(v=0.01)+ef(vanilla)"]"#, r#"["threshold", "none"]"#] {
            read(fine).unwrap().check().unwrap();
        }
        let lossy = Config { compressors: Some(vec!["topk(k=*)".parse().unwrap()]), ..Config::default() };
        assert!(lossy.check().unwrap_err().to_string().contains("+ef(vanilla)"));
        Config { biased_without_memory: true, ..lossy }.check().unwrap();
        let empty = Config { compressors: Some(vec![]), ..Config::default() }.check().unwrap_err().to_string();
        assert!(empty.contains("[\"none\"] is dense alone"), "{empty}");
    }
}
