//! Recorded decisions, decided again by this build from what was stored with them, and what differs.

use flexcomm_domain::{Plan, Timestamp};
use flexcomm_planner::{Config, Snapshot};
use flexcomm_wire::api::{Recording, SnapshotEntry};
use serde::{Deserialize, Serialize};
use serde_json::Value;
use std::collections::BTreeSet;

use crate::clock::rfc3339;
use crate::cycle::seeded;

/// Numbers that differ by less count as equal: logarithms and powers differ in their last bits from one C library to the next.
const TOLERANCE: f64 = 1e-9;

/// Differences that are listed of one decision.
const MOST_LISTED: usize = 3;

/// Settings of the planner that a decision is decided again under, in the place of those recorded.
pub type Settings = serde_json::Map<String, Value>;

/// Reads settings as `KEY=VALUE`, KEY as in the configuration or without its `planner.`, VALUE as JSON or as a text; of several for a key the last counts. An error names the argument, or
/// those that do not go together, and what is wrong.
pub fn settings(arguments: &[String]) -> Result<Settings, String> {
    let mut settings = Settings::new();
    for argument in arguments {
        let (key, value) = argument.split_once('=').ok_or_else(|| format!("{argument}: expected KEY=VALUE"))?;
        let key = key.strip_prefix("planner.").unwrap_or(key);
        if let Some(replacement) = Config::replacement(key) {
            return Err(format!("{argument}: {key} is no longer used; in its place: {replacement}"));
        }
        let value = serde_json::from_str(value).unwrap_or_else(|_| Value::String(value.to_owned()));
        // Alone, so that what cannot be read is of this argument.
        let alone = Settings::from_iter([(key.to_owned(), value.clone())]);
        with(&Config::default(), &alone).map_err(|why| format!("{argument}: {why}"))?;
        settings.insert(key.to_owned(), value);
    }
    // Together: what is allowed of one depends on others.
    let config = with(&Config::default(), &settings)?;
    config.check().map_err(|error| {
        let why = error.to_string();
        format!("{}: {why}", concerned(arguments, &why).join(", "))
    })?;
    Ok(settings)
}

/// The arguments whose keys an error names; all of them where it names none.
fn concerned<'a>(arguments: &'a [String], why: &str) -> Vec<&'a str> {
    let words = why.split(|c: char| !c.is_ascii_alphanumeric() && c != '_');
    let key = |argument: &str| argument.split('=').next().map(str::to_owned);
    let all = || arguments.iter().map(String::as_str);
    let named: Vec<&str> =
        all().filter(|argument| words.clone().any(|word| key(argument).as_deref() == Some(word))).collect();
    if named.is_empty() { all().collect() } else { named }
}

/// A configuration with settings in the place of its own.
fn with(config: &Config, settings: &Settings) -> Result<Config, String> {
    let mut config = json(config)?;
    config.as_object_mut().into_iter().for_each(|config| config.extend(settings.clone()));
    serde_json::from_value(config).map_err(|error| error.to_string())
}

/// A decision that was decided again.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Replayed {
    /// Of the decision; of a look that decided nothing, the version in force.
    pub version: u64,
    /// How the two compare.
    pub comparison: Comparison,
    /// When it was decided, RFC 3339.
    pub at: Option<String>,
    /// The version of flexcomm that decided.
    pub software: Option<String>,
    /// What it decided.
    pub recorded: Option<Choice>,
    /// What this build decides.
    pub now: Option<Choice>,
    /// What differs first: what has changed, candidates, predictions, else fields of the report.
    pub differences: Vec<String>,
    /// How the recorded snapshot's form differs from this build's.
    pub form: Vec<String>,
    /// Why it could not be decided again.
    pub missing: Option<String>,
}

/// How a recorded decision compares with the one made again.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Comparison {
    /// The whole report is the same.
    Same,
    /// The same strategy, by another report.
    SameStrategy,
    /// Another strategy.
    Different,
    /// It could not be decided again.
    NotReplayed,
}

/// A strategy with what was predicted of it.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Choice {
    /// `change`, or why nothing changed.
    pub verdict: String,
    /// What runs from there on.
    pub strategy: String,
    /// Compress and decompress, seconds; absent where nothing was predicted.
    pub t_comp_s: Option<f64>,
    /// The collective, seconds.
    pub t_sync_s: Option<f64>,
    /// Gain.
    pub gain: Option<f64>,
}

impl Choice {
    fn of(report: &Value) -> Self {
        let strategy = canonical(&report["chosen"]);
        let priced = alternatives(report).chain([&report["in_force"]]).find(|a| canonical(&a["strategy"]) == strategy);
        let number = |key: &str| priced.and_then(|alternative| alternative[key].as_f64());
        Self {
            verdict: text(&report["verdict"]),
            t_comp_s: number("t_comp_s"),
            t_sync_s: number("t_sync_s"),
            gain: number("gain"),
            strategy,
        }
    }
}

/// Decides again what an entry records.
pub fn replay(entry: &SnapshotEntry, settings: &Settings) -> Replayed {
    let Some(recording) = &entry.recorded else {
        let why = entry.missing.clone().unwrap_or_else(|| "nothing is recorded of it".to_owned());
        return Replayed { missing: Some(why), ..nothing(entry.version) };
    };
    let at = recording.report["at"].as_u64().map(Timestamp);
    let known = Replayed {
        at: at.map(rfc3339),
        software: Some(recording.software.clone()),
        recorded: Some(Choice::of(&recording.report)),
        ..nothing(entry.version)
    };
    match again(recording, at, settings) {
        Ok((report, form)) => compare(known, &recording.report, &report, form),
        Err(why) => Replayed { missing: Some(why), ..known },
    }
}

fn nothing(version: u64) -> Replayed {
    Replayed {
        version,
        comparison: Comparison::NotReplayed,
        at: None,
        software: None,
        recorded: None,
        now: None,
        differences: Vec::new(),
        form: Vec::new(),
        missing: None,
    }
}

/// The report of now, and how the snapshot's form differs.
fn again(recording: &Recording, at: Option<Timestamp>, settings: &Settings) -> Result<(Value, Vec<String>), String> {
    let at = at.ok_or("its report has no time")?;
    let recorded: Value =
        serde_json::from_str(recording.snapshot.get()).map_err(|error| format!("its snapshot is no JSON: {error}"))?;
    let unread = |error| {
        let software = &recording.software;
        format!("its snapshot was recorded by flexcomm {software} and is none of this version: {error}")
    };
    let mut snapshot = Snapshot::deserialize(&recorded).map_err(unread)?;
    let read = as_text(&snapshot)?;
    let form = differences(&recorded, &read).iter().map(Difference::of_form).collect();
    snapshot.config = with(&snapshot.config, settings)?;
    Ok((json(&seeded(&snapshot, at, recording.seed).report)?, form))
}

/// As it would be stored: numbers of single precision by their few digits.
fn as_text(snapshot: &Snapshot) -> Result<Value, String> {
    let text = serde_json::to_string(snapshot).map_err(|error| error.to_string())?;
    serde_json::from_str(&text).map_err(|error| error.to_string())
}

fn json(value: &impl Serialize) -> Result<Value, String> {
    serde_json::to_value(value).map_err(|error| error.to_string())
}

fn compare(known: Replayed, recorded: &Value, now: &Value, form: Vec<String>) -> Replayed {
    let all = differences(recorded, now);
    let (before, choice) = (known.recorded.as_ref().map(|c| &c.strategy), Choice::of(now));
    let comparison = match before == Some(&choice.strategy) {
        true if all.is_empty() => Comparison::Same,
        true => Comparison::SameStrategy,
        false => Comparison::Different,
    };
    let mut listed = main_differences(recorded, now);
    if listed.is_empty() {
        listed = all.iter().map(Difference::words).collect();
    }
    listed.truncate(MOST_LISTED);
    Replayed { comparison, now: Some(choice), differences: listed, form, ..known }
}

/// What explains another choice: what has changed for the planner, between which candidates it chose, and what it predicted of them.
fn main_differences<'a>(recorded: &'a Value, now: &'a Value) -> Vec<String> {
    let mut listed = Vec::new();
    let changed = |report: &Value| report["changed"].as_str().map_or_else(|| "nothing".to_owned(), str::to_owned);
    let (before, after) = (changed(recorded), changed(now));
    if before != after {
        listed.push(format!("changed: {before} -> {after}"));
    }
    let ranked = |report: &Value| -> Vec<String> { alternatives(report).map(|a| canonical(&a["strategy"])).collect() };
    let (before, after) = (ranked(recorded), ranked(now));
    let sets = [&before, &after].map(|list| list.iter().collect::<BTreeSet<_>>());
    if sets[0] != sets[1] {
        let only = |i: usize| sets[i].difference(&sets[1 - i]).next().map_or("none", |s| s.as_str());
        let (was, is) = (before.len(), after.len());
        listed.push(format!("candidates: {was} -> {is}; only then: {}, only now: {}", only(0), only(1)));
    } else if let Some(i) = (0..before.len()).find(|i| before[*i] != after.get(*i).map_or("", |s| s)) {
        listed.push(format!("rank {}: {} -> {}", i + 1, before[i], after[i]));
    }
    let pair = |a: &'a Value| {
        alternatives(now).find(|b| canonical(&b["strategy"]) == canonical(&a["strategy"])).map(|b| (a, b))
    };
    let predicted = alternatives(recorded).filter_map(pair).find_map(|(a, b)| {
        let differ = |key: &&str| !differences(&a[*key], &b[*key]).is_empty();
        let key = ["t_comp_s", "t_sync_s", "gain", "t_step_s", "score"].into_iter().find(differ)?;
        Some(format!("{key} of {}: {} -> {}", canonical(&a["strategy"]), a[key], b[key]))
    });
    listed.extend(predicted);
    listed
}

fn alternatives(report: &Value) -> impl Iterator<Item = &Value> {
    report["alternatives"].as_array().into_iter().flatten()
}

/// A strategy as this build writes it.
fn canonical(value: &Value) -> String {
    Plan::deserialize(value).map_or_else(|_| text(value), |strategy| strategy.to_string())
}

fn text(value: &Value) -> String {
    value.as_str().map_or_else(|| value.to_string(), str::to_owned)
}

/// Where two values differ.
#[derive(Debug, PartialEq)]
struct Difference<'a> {
    /// Keys and positions from the top.
    at: String,
    recorded: Option<&'a Value>,
    now: Option<&'a Value>,
}

impl Difference<'_> {
    fn words(&self) -> String {
        let shown = |value: Option<&Value>| value.map_or("absent".to_owned(), ToString::to_string);
        format!("{}: {} -> {}", self.at, shown(self.recorded), shown(self.now))
    }

    /// Of a snapshot as it was recorded and as this build reads it.
    fn of_form(&self) -> String {
        match (self.recorded, self.now) {
            (Some(_), None) => format!("recorded by another version: this one does not know {}", self.at),
            (None, Some(now)) => format!("recorded by another version: {} is missing, {now} is assumed", self.at),
            _ => format!("recorded by another version: {}", self.words()),
        }
    }
}

fn differences<'a>(recorded: &'a Value, now: &'a Value) -> Vec<Difference<'a>> {
    let mut found = Vec::new();
    differ(String::new(), Some(recorded), Some(now), &mut found);
    found
}

fn differ<'a>(at: String, recorded: Option<&'a Value>, now: Option<&'a Value>, found: &mut Vec<Difference<'a>>) {
    let below = |key: &dyn std::fmt::Display| if at.is_empty() { key.to_string() } else { format!("{at}.{key}") };
    match (recorded, now) {
        (Some(Value::Object(a)), Some(Value::Object(b))) => {
            let keys: BTreeSet<&String> = a.keys().chain(b.keys()).collect();
            keys.into_iter().for_each(|key| differ(below(key), a.get(key), b.get(key), found));
        }
        (Some(Value::Array(a)), Some(Value::Array(b))) => {
            (0..a.len().max(b.len())).for_each(|i| differ(below(&i), a.get(i), b.get(i), found));
        }
        (Some(Value::Number(a)), Some(Value::Number(b))) if close(a, b) => {}
        (a, b) if a == b => {}
        _ => found.push(Difference { at, recorded, now }),
    }
}

fn close(a: &serde_json::Number, b: &serde_json::Number) -> bool {
    let (Some(x), Some(y)) = (a.as_f64(), b.as_f64()) else { return a == b };
    // Times and versions are integers.
    a == b || (a.is_f64() || b.is_f64()) && (x - y).abs() <= TOLERANCE * x.abs().max(y.abs())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cycle::seed;
    use flexcomm_domain::{Decision, JobId, Link, LinkMatrix, Seconds, Version};
    use flexcomm_planner::{InForce, Links};
    use serde_json::json;
    use serde_json::value::RawValue;

    const NOW: Timestamp = Timestamp(1_790_000_000_000_000);

    /// Eight ranks with nothing but dense, at high latency: the tree's few rounds are best for few values.
    fn snapshot() -> Snapshot {
        let job: JobId = "j".parse().unwrap();
        let mut snapshot = Snapshot::new(job, 8, 1000);
        let matrix = LinkMatrix::uniform(8, Link::new(0.01, 1e9).unwrap()).unwrap();
        let age = Seconds::new(0.1).unwrap();
        snapshot.links = Some(Links { matrix, age, oldest: age, confidence: 0.9, tests: Vec::new() });
        snapshot.compute = Some(age);
        snapshot.offer.codecs.clear();
        snapshot
    }

    /// The same ten seconds after the ring was decided.
    fn under_the_ring() -> Snapshot {
        let snapshot = snapshot();
        let decision = Decision {
            job: snapshot.job.clone(),
            version: Version(1),
            parent: Version(0),
            plan: Plan::DENSE_RING,
            decided_at: Timestamp(NOW.0 - 10_000_000),
            reason: String::new(),
        };
        Snapshot { in_force: Some(InForce { decision, applied_at_step: Some(1) }), ..snapshot }
    }

    /// What would be recorded of it; `change` is made to the snapshot afterwards.
    fn entry(change: impl FnOnce(&mut Value)) -> SnapshotEntry {
        entry_of(&snapshot(), change)
    }

    fn entry_of(snapshot: &Snapshot, change: impl FnOnce(&mut Value)) -> SnapshotEntry {
        let seed = seed(&snapshot.job, snapshot.version());
        let report = serde_json::to_value(seeded(snapshot, NOW, seed).report).unwrap();
        assert_eq!(report["verdict"], "change", "{report:#}");
        let mut text = serde_json::to_value(snapshot).unwrap();
        change(&mut text);
        let snapshot = RawValue::from_string(text.to_string()).unwrap();
        let recorded = Recording { software: "0.0.9".into(), seed, report, snapshot };
        SnapshotEntry { version: Version(1).0, recorded: Some(recorded), missing: None }
    }

    fn again(entry: &SnapshotEntry) -> Replayed {
        replay(entry, &Settings::new())
    }

    #[test]
    fn a_decision_is_made_again_with_what_was_predicted() {
        let same = again(&entry(|_| ()));
        assert_eq!(same.comparison, Comparison::Same, "{same:#?}");
        assert_eq!((same.recorded.clone(), &same.differences, &same.form), (same.now.clone(), &vec![], &vec![]));
        let choice = same.now.unwrap();
        assert_eq!((choice.verdict.as_str(), choice.strategy.as_str()), ("change", "none/dense-tree"));
        assert!(choice.t_sync_s.is_some_and(|s| s > 0.0) && choice.gain == Some(1.0) && choice.t_comp_s == Some(0.0));
        assert_eq!((same.at.as_deref(), same.software.as_deref()), (Some(&*rfc3339(NOW)), Some("0.0.9")));
    }

    #[test]
    fn a_changed_snapshot_is_decided_otherwise_and_the_main_reason_is_named() {
        let large = again(&entry(|s| s["gradient_values"] = json!(100_000_000)));
        assert_eq!(large.comparison, Comparison::Different, "{large:#?}");
        assert_eq!(large.now.unwrap().strategy, "none/dense-ring");
        assert!(large.differences[0].starts_with("rank 1: none/dense-tree -> "), "{:?}", large.differences);
        assert!(large.differences[1].starts_with("t_sync_s of none/dense-tree: "), "{:?}", large.differences);

        let offered = again(&entry(|s| s["offer"]["collectives"] = json!(["dense-ring"])));
        assert_eq!(offered.comparison, Comparison::Different, "{offered:#?}");
        assert!(offered.differences[0].contains("only then: none/dense-tree, only now: none"), "{offered:#?}");

        // Nothing of the choice, but of the account.
        let aged = again(&entry(|s| s["links"]["age"] = json!(0.2)));
        assert_eq!(aged.comparison, Comparison::SameStrategy, "{aged:#?}");
        assert_eq!(aged.differences, ["seen.links_age_s: 0.1 -> 0.2"]);

        let blind = again(&entry(|s| s["links"] = Value::Null));
        let now = blind.now.unwrap();
        assert_eq!((blind.comparison, now.verdict.as_str()), (Comparison::Different, "no-links"));
    }

    #[test]
    fn snapshots_of_other_versions_are_named() {
        let lacks = again(&entry(|s| drop(s.as_object_mut().unwrap().remove("ranks"))));
        assert_eq!(lacks.comparison, Comparison::NotReplayed);
        let said = lacks.missing.unwrap();
        assert!(said.contains("recorded by flexcomm 0.0.9") && said.contains("missing field `ranks`"), "{said}");
        assert!(lacks.recorded.is_some(), "what is known of it is shown");

        let assumed = again(&entry(|s| drop(s.as_object_mut().unwrap().remove("earlier"))));
        assert_eq!(assumed.form, ["recorded by another version: earlier is missing, 0 is assumed"]);
        let more = again(&entry(|s| s["links"]["later"] = json!(1)));
        assert_eq!(more.form, ["recorded by another version: this one does not know links.later"]);
        assert_eq!((assumed.comparison, more.comparison), (Comparison::Same, Comparison::Same));

        let missing = SnapshotEntry { version: 1, recorded: None, missing: Some("it is damaged".into()) };
        let missing = again(&missing);
        assert_eq!((missing.comparison, missing.missing.as_deref()), (Comparison::NotReplayed, Some("it is damaged")));
        let mut timeless = entry(|_| ());
        timeless.recorded.as_mut().unwrap().report = json!({});
        assert_eq!(again(&timeless).missing.as_deref(), Some("its report has no time"));
    }

    #[test]
    fn settings_take_the_place_of_those_recorded_and_nonsense_is_named() {
        let read = |argument: &str| settings(&[argument.to_owned()]);
        let strict = replay(&entry_of(&under_the_ring(), |_| ()), &read("dwell_s=1000").unwrap());
        assert_eq!(strict.now.unwrap().verdict, "dwell");
        assert!(strict.form.is_empty(), "a setting is no other form");
        assert_eq!(read("policy=knee").unwrap()["policy"], "knee");
        for (argument, said) in [
            ("confidence", "expected KEY=VALUE"),
            ("confidense=0.9", "unknown field"),
            ("confidence=\"a\"", "invalid type"),
            ("confidence=0.1", "allowed is 0.5 to 0.999"),
            ("hysteresis=0.1", "no longer used; in its place: planner.confidence"),
            ("planner.hysteresis=0.1", "no longer used; in its place: planner.confidence"),
        ] {
            let error = read(argument).unwrap_err();
            assert!(error.starts_with(argument) && error.contains(said), "{error}");
        }
    }

    #[test]
    fn settings_are_checked_together_whatever_their_order() {
        let read = |arguments: &[&str]| settings(&arguments.iter().map(|&a| a.to_owned()).collect::<Vec<_>>());
        let (lossy, admitted) = ("compressors=[\"topk(k=*)\"]", "biased_without_memory=true");
        assert!(read(&[lossy]).unwrap_err().starts_with(&format!("{lossy}: ")), "alone it is not admitted");
        assert_eq!(read(&[lossy, admitted]), read(&[admitted, lossy]));
        assert_eq!(read(&[lossy, admitted]).unwrap().len(), 2);
        let together = read(&["confidence=0.9", lossy, "biased_without_memory=false"]).unwrap_err();
        assert!(together.starts_with(&format!("{lossy}, biased_without_memory=false: ")), "{together}");
        assert_eq!(read(&["confidence=7", "confidence=0.9"]).unwrap()["confidence"], 0.9, "the last counts");
    }

    #[test]
    fn what_has_changed_is_compared_first() {
        let moved = again(&entry_of(&under_the_ring(), |s| {
            s["memory"]["links"] = json!({
                "alpha_mean_s": 0.01, "alpha_worst_s": 0.01, "bandwidth_mean_bps": 1e8, "bandwidth_worst_bps": 1e8
            });
            s["memory"]["links_at"] = json!(1);
            s["memory"]["beliefs"]["changes"]["last"] = json!(2);
            s["memory"]["beliefs"]["exchange"]["cause"] = json!({ "Network": { "before": 0.0, "same": [] } });
        }));
        assert_eq!(moved.differences[0], "changed: nothing -> steps show that the network has changed");
    }

    /// A last bit of a number is no difference, a microsecond of a time is one.
    #[test]
    fn numbers_of_another_library_are_the_same_and_times_are_exact() {
        let found = |a: Value, b: Value| differences(&a, &b).len();
        assert_eq!(found(json!({ "a": 0.1 + 0.2, "b": [1.0] }), json!({ "a": 0.3, "b": [1] })), 0);
        assert_eq!(found(json!(0.3), json!(0.300_001)), 1);
        assert_eq!(found(json!(NOW.0), json!(NOW.0 + 1)), 1);
        assert_eq!(found(json!([1, 2]), json!([1])), 1);
    }
}
