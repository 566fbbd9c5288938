//! Every threshold of the planner: unit, default and reason.

use crate::{Allowed, NOT_EMPTY};
use flexcomm_domain::{CompressionRatio, Seconds, Selection, nearest};
use flexcomm_optimizer::{DEFAULT_CRS, PolicyConfig};
use serde::de::{self, Deserializer, MapAccess, Visitor};
use serde::{Deserialize, Serialize};
use std::borrow::Cow;
use std::fmt;

/// Most candidate ratios: with the default compressors, every collective and both worker selections some 400 strategies.
pub const MAX_CRS: usize = 32;

/// What the planner is told by its operator. Shares are fractions (0.1 = 10 %), durations seconds.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Config {
    /// How a point of the Pareto front is picked. Default: time-to-quality, the least time for the
    /// progress of a dense step: what the user waits for. A name alone has its default settings.
    #[serde(deserialize_with = "policy")]
    pub policy: PolicyConfig,
    /// Candidate ratios besides dense. Default: the paper's 0.1 divided by 3 down to 0.001.
    pub crs: Vec<CompressionRatio>,
    /// Compressors that may be chosen: `topk`, `fp16`, `powersgd` with any parameters and memory, or one without its ratio,
    /// `topk(k=*)+ef(vanilla)`, `powersgd(rank=2)+ef(vanilla)` (ratios are `crs`); absent: all that the job offers.
    pub compressors: Option<Vec<Allowed>>,
    /// Whether biased compressors without error feedback (`topk(k=*)`) are candidates where the job offers them. Default false:
    /// what they leave out of a step never arrives, and training may end elsewhere. Casts to half precision are not meant.
    pub biased_without_memory: bool,
    /// How AR-Topk may pick the rank whose indices count; of several each is a candidate. Default: star and var. The paper
    /// found star both faster and fairer at N = 8; var keeps more where the ranks' gradients differ.
    pub selections: Vec<Selection>,

    /// Links are looked at again when latency or bandwidth (mean or worst) changed by this share. Default
    /// 0.25: two estimates that are each 10 % off differ by 22 % at most, so noise alone never reaches it.
    pub link_change: f64,
    /// Changes of latency below this many seconds do not count. Default 50 µs: no collective of a
    /// training step can feel less, and a rack's latencies jitter by that much.
    pub latency_floor_s: Seconds,
    /// The gain in force moved by this share since it was last taken as reference: new trials. Default 0.10,
    /// the paper's gain threshold.
    pub gain_change: f64,
    /// What is not in force must keep more than the policy's gain floor by this share, of the odds gain/(1 - gain); what
    /// is in force stays until it falls below the floor. Default 0.25: a trial and the steps that are each 10 % off
    /// differ by 22 % at most, so noise alone never leads to a ratio and back.
    pub gain_floor_margin: f64,
    /// Everything is solved again at least this often, whatever did or did not change. Default 60 s: catches
    /// slow drift of fitted coefficients that no other trigger sees; it costs under a millisecond.
    pub review_s: Seconds,

    /// A new strategy must be predicted better by this share when links or fitted costs moved. Default 0.10:
    /// the accuracy of the fitted model (10 % median error) is the smallest win that can be told from none.
    pub hysteresis: f64,
    /// ... and by this share when only the ratio changes: what is wrong with links, fit and compressor is wrong on both
    /// sides of the comparison. Default 0.04.
    pub hysteresis_ratio: f64,
    /// When they did not move, this many times the noise of links and gain comes on top: the mean change
    /// between two estimates in a row, and the spread of the measured gain. Default 1.5: two equals differ by
    /// more only once in many hundred looks.
    pub noise_weight: f64,
    /// ... but not that of the links, when it was better each of this many times in a row
    /// that everything was solved. Default 8: noise on the links is drawn anew each time, a real lead stays.
    pub persistence: u32,
    /// Links must be steady for this long before a change, unless they go on moving for five times as long. Default 2 s:
    /// estimates follow a change of the network one after the other, and half of them show a network that never was.
    pub links_settle_s: Seconds,
    /// A strategy stays at least this long. Default 10 s: long enough to measure it, short against changes of the network.
    pub dwell_s: Seconds,
    /// What a switch costs. Default 0.5 s: one step at the old pace, refilled error feedback, cold buffers.
    pub switch_cost_s: Seconds,
    /// How far ahead a win counts when the job does not say how long it still runs. Default 300 s: a network
    /// rarely holds longer.
    pub horizon_s: Seconds,
    /// An announced decision that is not seen in force for this long no longer holds up the next. Default
    /// 30 s: a rank whose agent is gone never reports.
    #[serde(alias = "apply_patience_s")]
    pub apply_timeout_s: Seconds,

    /// Links with a confidence below this are not acted on, 0 to 1, but for a first decision after a trial within
    /// `max_link_age_s`. Default 0.5.
    pub least_confidence: f64,
    /// Links whose newest sample, of latency or bandwidth, is older are not acted on. Default 120 s: not even echoes came.
    pub max_link_age_s: Seconds,

    /// Measured step time above predicted by this share rolls back. Default 0.5: three to five times the
    /// model's error, so that only a real failure of the model triggers it.
    pub guard_margin: f64,
    /// ... and by at least this much. Default 2 ms: below it scheduling noise is larger.
    pub guard_floor_s: Seconds,
    /// Measured cost above that of dense by this share rolls back too. Default 0.2: twice the model's error.
    pub guard_dense_margin: f64,
    /// ... and both only when it has been so for this long, and every link has been measured anew since it
    /// began. Default 10 s: when the network changes, steps show it before the probes do, and rolling back on
    /// links of yesterday makes it worse. After `max_link_age_s` the guard no longer waits for that. Three
    /// times as long where the way back sends more. Nor does it act while links move (`links_settle_s`). On links that
    /// cannot be trusted, a change to the next larger ratio, whose cost the steps in force bound, waits for nothing else.
    #[serde(alias = "guard_patience_s")]
    pub guard_timeout_s: Seconds,
    /// Medians over fewer steps than this are not used, neither by the guard nor for the gain. Default 10.
    pub least_steps: u64,
    /// A gain in force is believed after 1/CR steps, when the residual has settled, but after so many at most. Default
    /// 250: smaller ratios settle later still, but by then most of it has happened.
    pub settle_steps: u64,
    /// A strategy that was rolled back is not chosen for this long, doubled for each earlier time, or until the links
    /// have moved by a factor of two. One time is forgotten when, after the end of a block, as long again has passed without
    /// another. Default 300 s.
    pub block_s: Seconds,
    /// ... up to this long. Default 3600 s: the cause may be gone by then.
    pub block_max_s: Seconds,

    /// Iterations per candidate of a trial. Default 10, as in the paper.
    pub trial_iterations: u32,
    /// Trials are not asked for more often than this. Default 60 s.
    pub trial_interval_s: Seconds,
    /// ... and take at most this share of the job's time, by their predicted cost. Default 0.015:
    /// between trials predictions follow the gain in force.
    pub trial_share: f64,
    /// A trial that has not answered is given up after this long, and the first decision no longer waits
    /// for it. Default 60 s.
    pub trial_timeout_s: Seconds,
    /// A profile older than this is measured again. Default 1800 s.
    pub trial_review_s: Seconds,
    /// ... while dense runs, older than this, if compressing would win provided that it lost nothing: no gain in force
    /// shows that the profile has aged. Default 120 s: gains rise fast at the start of training.
    pub trial_review_dense_s: Seconds,
    /// Most time one trial may take. Default 30 s.
    pub trial_budget_s: Seconds,
}

/// A policy's name, or a table of its name and settings.
fn policy<'de, D: Deserializer<'de>>(from: D) -> Result<PolicyConfig, D::Error> {
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
            link_change: 0.25,
            latency_floor_s: seconds(50e-6),
            gain_change: 0.10,
            gain_floor_margin: 0.25,
            review_s: seconds(60.0),
            hysteresis: 0.10,
            hysteresis_ratio: 0.04,
            noise_weight: 1.5,
            persistence: 8,
            links_settle_s: seconds(2.0),
            dwell_s: seconds(10.0),
            switch_cost_s: seconds(0.5),
            horizon_s: seconds(300.0),
            apply_timeout_s: seconds(30.0),
            least_confidence: 0.5,
            max_link_age_s: seconds(120.0),
            guard_margin: 0.5,
            guard_floor_s: seconds(0.002),
            guard_dense_margin: 0.2,
            guard_timeout_s: seconds(10.0),
            least_steps: 10,
            settle_steps: 250,
            block_s: seconds(300.0),
            block_max_s: seconds(3600.0),
            trial_iterations: 10,
            trial_interval_s: seconds(60.0),
            trial_share: 0.015,
            trial_timeout_s: seconds(60.0),
            trial_review_s: seconds(1800.0),
            trial_review_dense_s: seconds(120.0),
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

impl Config {
    /// Keys as earlier builds called them, which are still read.
    pub const FORMER_KEYS: [&str; 2] = ["apply_patience_s", "guard_patience_s"];

    /// Names the first value out of range.
    pub fn check(&self) -> Result<(), ConfigError> {
        let share = |key, value: f64, least: f64, most: f64, allowed: &'static str| {
            let ok = value.is_finite() && (least..=most).contains(&value);
            if ok {
                Ok(())
            } else {
                Err(ConfigError { key, value: value.to_string(), allowed: Cow::Borrowed(allowed) })
            }
        };
        share("link_change", self.link_change, 0.01, 10.0, "0.01 to 10")?;
        share("gain_change", self.gain_change, 0.01, 10.0, "0.01 to 10")?;
        share("gain_floor_margin", self.gain_floor_margin, 0.0, 10.0, "0 to 10")?;
        share("hysteresis", self.hysteresis, 0.0, 0.9, "0 to 0.9")?;
        share("hysteresis_ratio", self.hysteresis_ratio, 0.0, 0.9, "0 to 0.9")?;
        share("noise_weight", self.noise_weight, 0.0, 10.0, "0 to 10")?;
        share("least_confidence", self.least_confidence, 0.0, 1.0, "0 to 1")?;
        share("guard_margin", self.guard_margin, 0.05, 100.0, "0.05 to 100")?;
        share("guard_dense_margin", self.guard_dense_margin, 0.05, 100.0, "0.05 to 100")?;
        share("least_steps", self.least_steps as f64, 1.0, 1e6, "1 to 1,000,000")?;
        share("settle_steps", self.settle_steps as f64, 0.0, 1e6, "0 to 1,000,000")?;
        share("links_settle_s", self.links_settle_s.get(), 0.0, 3600.0, "0 to 3600")?;
        share("horizon_s", self.horizon_s.get(), 1.0, 31_536_000.0, "1 to 31,536,000")?;
        share("review_s", self.review_s.get(), 1.0, 31_536_000.0, "1 to 31,536,000")?;
        share("block_s", self.block_s.get(), 1.0, self.block_max_s.get(), "1 to block_max_s")?;
        share("persistence", f64::from(self.persistence), 1.0, 1e6, "1 to 1,000,000")?;
        share("trial_share", self.trial_share, 0.0001, 1.0, "0.0001 to 1")?;
        share("trial_iterations", f64::from(self.trial_iterations), 1.0, 1000.0, "1 to 1000")?;
        if let PolicyConfig::TimeToQuality(policy) = &self.policy {
            share("policy.gain_floor", policy.gain_floor, 0.0, 1.0, "0 to 1")?;
            share("policy.exponent", policy.exponent(), 0.0, 1.0, "0 to 1")?;
        }
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

#[cfg(test)]
mod tests {
    use super::*;
    use flexcomm_optimizer::policy::TimeToQuality;

    #[test]
    fn defaults_are_valid_and_typos_are_named() {
        Config::default().check().unwrap();
        let typo = serde_json::from_str::<Config>("{\"dwel_s\": 3}").unwrap_err().to_string();
        assert!(typo.contains("dwel_s") && typo.contains("dwell_s"), "{typo}");
        assert!(serde_json::from_str::<Config>("{\"dwell_s\": -3}").is_err());
        for former in Config::FORMER_KEYS {
            let config = serde_json::from_str::<Config>(&format!("{{\"{former}\": 77.0}}")).unwrap();
            assert!(config.apply_timeout_s.get() == 77.0 || config.guard_timeout_s.get() == 77.0, "{former}");
        }
    }

    #[test]
    fn nonsense_is_refused_by_name() {
        let lost = |p| PolicyConfig::TimeToQuality(TimeToQuality { exponent: Some(p), ..TimeToQuality::default() });
        let only = |text: &str| Config { compressors: Some(vec![text.parse().unwrap()]), ..Config::default() };
        for (key, config) in [
            ("hysteresis", Config { hysteresis: f64::NAN, ..Config::default() }),
            ("gain_floor_margin", Config { gain_floor_margin: f64::NAN, ..Config::default() }),
            ("link_change", Config { link_change: 0.0, ..Config::default() }),
            ("crs", Config { crs: vec![], ..Config::default() }),
            ("crs", Config { crs: vec![CompressionRatio::DENSE], ..Config::default() }),
            ("policy.exponent", Config { policy: lost(1.5), ..Config::default() }),
            ("policy.exponent", Config { policy: lost(f64::NAN), ..Config::default() }),
            ("least_steps", Config { least_steps: 0, ..Config::default() }),
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
