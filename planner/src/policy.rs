//! What is set for one job, by its operator or its training script: which strategies may be decided, and whether any is.

use crate::config::{check_policy, policy};
use crate::{NOT_EMPTY, PolicyConfig, Snapshot};
use flexcomm_domain::spec::{SpecError, is_name_alone};
use flexcomm_domain::{CompressorKind, Plan, Strategy, Timestamp, nearest};
use serde::{Deserialize, Deserializer, Serialize, Serializer};
use serde_json::Value;
use std::collections::BTreeSet;

/// Settings of one job. What is absent is the default; dense always may be decided.
#[derive(Debug, Clone, PartialEq, Default, Serialize)]
pub struct JobPolicy {
    /// Kinds of compressors that decisions and trials may use; absent: all.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub kinds: Option<BTreeSet<CompressorKind>>,
    /// How candidates are ranked; absent: as the controller's `planner.policy` has it. Who makes a snapshot puts it into
    /// [`crate::Config::policy`], which is what decisions are made by.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub objective: Option<PolicyConfig>,
    /// Least effective gain of what is decided, 0 to 1; see [`flexcomm_estimation::Quality::effective_gain`].
    #[serde(skip_serializing_if = "Option::is_none")]
    pub least_gain: Option<f64>,
    /// Largest share of a step's time that compressing may take, 0 or more.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub most_overhead: Option<f64>,
    /// Whether it is only reported what would be decided: nothing changes, and no trial is asked for.
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    pub observe: bool,
    /// What is in force whatever is expected of it.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub pin: Option<Pin>,
}

/// A plan that is in force until a time.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Pin {
    /// Which; by bucket or the same for all.
    #[serde(rename = "strategy")]
    pub plan: Plan,
    /// From then on it has no effect; absent: until the policy is changed.
    #[serde(serialize_with = "as_text")]
    pub until: Option<Timestamp>,
}

/// A policy that is not taken.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
pub enum JobPolicyError {
    /// It is no JSON object.
    #[error("a policy is an object with any of the keys {}, such as {{\"kinds\": [\"topk\"]}}", KEYS.join(", "))]
    NoObject,
    /// A key that does not exist.
    #[error("unknown key {key:?}, {}", hint(*.nearest, .known))]
    Key {
        /// As written.
        key: String,
        /// The nearest that exists.
        nearest: Option<&'static str>,
        /// All that exist there.
        known: &'static [&'static str],
    },
    /// A key that the controller's configuration has for what another key sets here.
    #[error("unknown key {key:?}; in its place: {replacement}")]
    Replaced {
        /// As written.
        key: String,
        /// The key of a policy.
        replacement: &'static str,
    },
    /// A value of the wrong type or that cannot be read.
    #[error("{key}: {why}")]
    Value {
        /// Of which key.
        key: &'static str,
        /// What is wrong with it.
        why: String,
    },
    /// A number out of its range.
    #[error("{key} is {value}, allowed is {allowed}")]
    Range {
        /// Of which key.
        key: String,
        /// As written.
        value: String,
        /// In words.
        allowed: String,
    },
    /// A kind that is not known, with the nearest one that is.
    #[error("kinds: failed to {0}")]
    Kind(#[from] SpecError),
    /// A kind with parameters or parts.
    #[error("kinds has {text:?}: kinds are names without parameters, allowed is {name:?}")]
    Parameters {
        /// As written.
        text: String,
        /// Its compressor.
        name: &'static str,
    },
    /// It would allow nothing.
    #[error("kinds is an empty list, allowed is {NOT_EMPTY}, and null is all")]
    NoKind,
    /// Two settings of which one undoes the other.
    #[error("observe and pin do not go together: a policy that observes applies nothing, so nothing would be pinned")]
    ObservedPin,
}

const KEYS: &[&str] = &["kinds", "objective", "least_gain", "most_overhead", "observe", "pin"];
const PIN_KEYS: &[&str] = &["strategy", "until"];

/// Keys of the controller's `[planner]` and `[planner.policy]`, with those that set the same for one job.
const REPLACED: &[(&str, &str)] = &[("compressors", "kinds"), ("policy", "objective"), ("gain_floor", "least_gain")];

fn hint(nearest: Option<&str>, known: &[&str]) -> String {
    nearest.map_or_else(|| format!("the keys are {}", known.join(", ")), |key| format!("did you mean {key}?"))
}

type Read<T> = Result<T, JobPolicyError>;

impl JobPolicy {
    /// Reads what an operator or a script wrote. A key that is null or absent has its default.
    ///
    /// # Errors
    /// The first key that does not exist or whose value is not allowed.
    pub fn read(written: &Value) -> Read<Self> {
        let mut policy = Self::default();
        for (key, value) in written.as_object().ok_or(JobPolicyError::NoObject)? {
            policy.set(key, value)?;
        }
        if policy.observe && policy.pin.is_some() {
            return Err(JobPolicyError::ObservedPin);
        }
        Ok(policy)
    }

    fn set(&mut self, key: &str, value: &Value) -> Read<()> {
        let key = known(key, KEYS)?;
        match key {
            _ if value.is_null() => {}
            "kinds" => self.kinds = Some(kinds(key, value)?),
            "objective" => self.objective = Some(objective(key, value)?),
            "least_gain" => self.least_gain = Some(number(key, value, 1.0, "0 to 1")?),
            "most_overhead" => self.most_overhead = Some(number(key, value, f64::MAX, "0 or more")?),
            "observe" => self.observe = value.as_bool().ok_or_else(|| expected(key, "true or false", value))?,
            _ => self.pin = Some(pin(value)?),
        }
        Ok(())
    }

    /// What was stored, maybe by another release: what cannot be read here counts as absent, and a kind that this release does not have
    /// allows nothing, while the others of its list still count. Snapshots of before there was more than kinds have only their list.
    fn stored(written: &Value) -> Self {
        let kinds = |list: &Vec<Value>| {
            Some(list.iter().filter_map(|kind| kind.as_str()?.parse().ok()).collect::<BTreeSet<CompressorKind>>())
        };
        if let Value::Array(list) = written {
            return Self { kinds: kinds(list), ..Self::default() };
        }
        let mut policy = Self::default();
        for (key, value) in written.as_object().into_iter().flatten() {
            match value {
                Value::Array(list) if key == "kinds" => policy.kinds = kinds(list),
                // What this release cannot read is as if it were not set.
                _ => policy.set(key, value).unwrap_or(()),
            }
        }
        policy
    }

    /// Whether nothing is set.
    pub fn is_default(&self) -> bool {
        *self == Self::default()
    }

    /// Without a pin that has ended.
    #[must_use]
    pub fn at(self, now: Timestamp) -> Self {
        Self { pin: self.pin_at(now).cloned(), ..self }
    }

    /// The pin, where it has not ended.
    pub fn pin_at(&self, now: Timestamp) -> Option<&Pin> {
        self.pin.as_ref().filter(|pin| pin.until.is_none_or(|until| now < until))
    }

    /// Whether something that compresses may be decided, of this effective gain and these seconds of compressing and of the step.
    pub(crate) fn admits(&self, effective_gain: f64, [t_comp_s, t_step_s]: [f64; 2]) -> bool {
        self.least_gain.is_none_or(|least| effective_gain >= least)
            && self.most_overhead.is_none_or(|most| t_comp_s <= most * t_step_s)
    }
}

impl<'de> Deserialize<'de> for JobPolicy {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        Value::deserialize(deserializer).map(|written| Self::stored(&written))
    }
}

impl Pin {
    /// Until when it is in force, in words.
    pub fn ends(&self) -> String {
        self.until.map_or_else(|| "until its policy is changed".to_owned(), |until| format!("until {}", rfc3339(until)))
    }
}

fn known(key: &str, known: &'static [&'static str]) -> Read<&'static str> {
    let unknown = || {
        let (of_config, key) = (REPLACED.iter().find(|(of_config, _)| *of_config == key), key.to_owned());
        match of_config.filter(|(_, replacement)| known.contains(replacement)) {
            Some(&(_, replacement)) => JobPolicyError::Replaced { key, replacement },
            None => JobPolicyError::Key { nearest: nearest(&key, known), key, known },
        }
    };
    known.iter().copied().find(|known| *known == key).ok_or_else(unknown)
}

fn wrong(key: &'static str, why: impl ToString) -> JobPolicyError {
    JobPolicyError::Value { key, why: why.to_string() }
}

fn expected(key: &'static str, what: &str, value: &Value) -> JobPolicyError {
    wrong(key, format!("expected {what}, found {value}"))
}

fn number(key: &'static str, value: &Value, most: f64, allowed: &str) -> Read<f64> {
    let number = value.as_f64().ok_or_else(|| expected(key, &format!("a number, {allowed}"), value))?;
    if (0.0..=most).contains(&number) {
        return Ok(number);
    }
    Err(JobPolicyError::Range { key: key.to_owned(), value: number.to_string(), allowed: allowed.to_owned() })
}

fn kinds(key: &'static str, value: &Value) -> Read<BTreeSet<CompressorKind>> {
    let form = || expected(key, "a list of names such as [\"topk\"]", value);
    let names = value.as_array().ok_or_else(form)?;
    if names.is_empty() {
        return Err(JobPolicyError::NoKind);
    }
    names.iter().map(|name| kind(name.as_str().ok_or_else(form)?)).collect()
}

fn kind(text: &str) -> Read<CompressorKind> {
    let kind: CompressorKind = text.split(['(', '+']).next().unwrap_or_default().parse()?;
    if is_name_alone(text) {
        return Ok(kind);
    }
    Err(JobPolicyError::Parameters { text: text.to_owned(), name: kind.name() })
}

fn objective(key: &'static str, value: &Value) -> Read<PolicyConfig> {
    let objective = policy(value).map_err(|why| wrong(key, why))?;
    check_policy(&objective).map_err(|error| JobPolicyError::Range {
        key: error.key.replace("policy", key),
        value: error.value,
        allowed: error.allowed.into_owned(),
    })?;
    Ok(objective)
}

fn pin(value: &Value) -> Read<Pin> {
    let keys = value.as_object().ok_or_else(|| wrong("pin", "expected an object with the keys strategy and until"))?;
    for key in keys.keys() {
        known(key, PIN_KEYS)?;
    }
    let form = "expected the text of a strategy or of a plan by bucket, such as \"topk(k=0.01)+ef(vanilla)/allgather\"";
    let text = keys.get("strategy").and_then(Value::as_str).ok_or_else(|| wrong("pin.strategy", form))?;
    let plan = text.parse().map_err(|why| wrong("pin.strategy", why))?;
    let until = keys.get("until").filter(|until| !until.is_null());
    Ok(Pin { plan, until: until.map(time).transpose()? })
}

fn time(value: &Value) -> Read<Timestamp> {
    let form = "a time with its zone, from 1970 to 9999-12-30, as in RFC 3339, such as 2026-11-21T08:30:00Z";
    let time = value.as_str().and_then(|text| text.parse().ok());
    let time = time.and_then(|time: jiff::Timestamp| u64::try_from(time.as_microsecond()).ok());
    time.map(Timestamp).ok_or_else(|| expected("pin.until", form, value))
}

/// A time as a policy has it: RFC 3339 in UTC.
pub fn rfc3339(at: Timestamp) -> String {
    let time = i64::try_from(at.0).ok().and_then(|us| jiff::Timestamp::from_microsecond(us).ok());
    time.unwrap_or(jiff::Timestamp::MAX).to_string()
}

fn as_text<S: Serializer>(until: &Option<Timestamp>, serializer: S) -> Result<S::Ok, S::Error> {
    until.map(rfc3339).serialize(serializer)
}

impl Snapshot {
    /// Why the job cannot run a plan, whatever policy and settings allow; none where it can.
    pub fn cannot_run(&self, plan: &Plan) -> Option<String> {
        let (named, buckets) = (plan.strategies().len(), self.buckets.len().max(1));
        if named > 1 && self.buckets.is_empty() {
            return Some("the buckets of the job's gradient are not known".to_owned());
        }
        if named > buckets {
            return Some(format!("it is of {named} buckets, and the job's gradient has {buckets}"));
        }
        if plan.mixes_momentum() {
            return Some("some buckets have an optimizer's momentum of their own, and others none".to_owned());
        }
        plan.strategies().iter().find_map(|strategy| self.lacks(strategy))
    }

    fn lacks(&self, strategy: &Strategy) -> Option<String> {
        let (family, collective) = (strategy.family(), strategy.collective());
        if !strategy.is_dense() && self.ranks < 2 {
            return Some("a single rank sends nothing that could be compressed".to_owned());
        }
        if !strategy.is_dense() && !self.offer.codecs.contains_key(&family) {
            let kind = CompressorKind::from(&family);
            let alike = self.offer.codecs.keys().find(|offered| CompressorKind::from(*offered) == kind);
            let alike = alike.map_or_else(String::new, |x| format!("; they offer {x}"));
            return Some(format!("no trainer of the job offers {family}{alike}"));
        }
        // What names no collective for dense gradients has the ring.
        let ring = strategy == &Strategy::DENSE_RING && !self.offer.collectives.iter().any(|c| c.is_allreduce());
        let runs = ring || self.offer.collectives.contains(&collective);
        let others = || self.offer.collectives.iter().map(|x| x.as_str()).collect::<Vec<_>>().join(", ");
        (!runs).then(|| format!("the trainers of the job do not run {collective}; they run {}", others()))
    }
}

#[cfg(test)]
mod tests;
