//! Configuration in two steps: [`RawConfig`] as written, [`Config`] as used.

use flexcomm_domain::nearest;
use flexcomm_estimation::Times;
use flexcomm_optimizer::PolicyConfig;
use serde::{Deserialize, Serialize};
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::time::Duration;

/// The commented sample; a test reads it and compares it with the defaults.
pub const SAMPLE: &str = include_str!("config_sample.toml");

/// As written: units in names, nothing checked yet.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct RawConfig {
    /// Address and port of API and page.
    pub listen: SocketAddr,
    /// SQLite file.
    pub db: PathBuf,
    /// File with the cluster's token; made when absent.
    pub token_file: PathBuf,
    /// Names that requests may be for, besides addresses, localhost and this machine's name.
    pub allowed_hosts: Vec<String>,
    /// Whether the scenario may be set.
    pub scenario: bool,
    /// What `flexcomm bench compressors --json` printed on the job's kind of machine; unset: the table that ships.
    pub compressor_times: Option<PathBuf>,
    /// The decision loop's times.
    #[serde(rename = "loop")]
    pub cycle: RawLoop,
    /// Heartbeats.
    pub agents: RawAgents,
    /// Probing.
    pub probes: RawProbes,
    /// The planner's settings.
    pub planner: flexcomm_planner::Config,
}

/// `[loop]`.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct RawLoop {
    /// Longest time between two looks at a job, ms.
    pub tick_ms: u64,
    /// Shortest time between two looks: reports that arrive within it are looked at together, ms.
    pub debounce_ms: u64,
}

/// `[agents]`.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct RawAgents {
    /// How often agents send a heartbeat, ms; while they deliver reports, every fourth of them.
    pub heartbeat_ms: u64,
    /// Without a heartbeat or reports for this long an agent counts as dead, ms.
    pub dead_after_ms: u64,
}

/// `[probes]`.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct RawProbes {
    /// Time between two echoes to the same peer, ms.
    pub echo_interval_ms: u64,
    /// Time between two traceroutes to the same peer, s; 0 = never.
    pub trace_interval_s: u64,
    /// Share of a node's link capacity that throughput tests may use on average.
    pub budget_share: f64,
    /// Least bytes of one test, both directions together.
    pub min_bytes: u64,
    /// Most bytes of one test, both directions together.
    pub max_bytes: u64,
    /// About how long a test lasts in each direction, ms.
    pub test_ms: u64,
    /// A pair is not tested again within this time when nothing changed, s.
    pub retest_s: u64,
    /// A link is suspect when latency or sync time moved by this share.
    pub suspect_change: f64,
}

impl Default for RawConfig {
    fn default() -> Self {
        Self {
            listen: SocketAddr::from(([127, 0, 0, 1], 7070)),
            db: "flexcomm.db".into(),
            token_file: "flexcomm.token".into(),
            allowed_hosts: Vec::new(),
            scenario: false,
            compressor_times: None,
            cycle: RawLoop::default(),
            agents: RawAgents::default(),
            probes: RawProbes::default(),
            planner: flexcomm_planner::Config::default(),
        }
    }
}

impl Default for RawLoop {
    fn default() -> Self {
        Self { tick_ms: 1500, debounce_ms: 400 }
    }
}

impl Default for RawAgents {
    fn default() -> Self {
        Self { heartbeat_ms: 1000, dead_after_ms: 5000 }
    }
}

impl Default for RawProbes {
    fn default() -> Self {
        Self {
            echo_interval_ms: 200,
            trace_interval_s: 60,
            budget_share: 0.01,
            min_bytes: 128 << 10,
            max_bytes: 128 << 20,
            test_ms: 200,
            retest_s: 20,
            suspect_change: 0.3,
        }
    }
}

/// Valid, with units as types.
#[derive(Debug, Clone)]
pub struct Config {
    /// Address and port of API and page.
    pub listen: SocketAddr,
    /// SQLite file.
    pub db: PathBuf,
    /// File with the cluster's token; made when the service starts and it does not exist.
    pub token_file: PathBuf,
    /// Names that requests may be for, besides addresses, localhost and this machine's name.
    pub allowed_hosts: Vec<String>,
    /// Whether the scenario may be set.
    pub scenario: bool,
    /// Longest time between two looks.
    pub tick: Duration,
    /// Shortest time between two looks: reports that arrive within it are looked at together.
    pub debounce: Duration,
    /// How often agents send a heartbeat.
    pub heartbeat: Duration,
    /// Without a heartbeat or reports for this long an agent counts as dead.
    pub dead_after: Duration,
    /// Probing.
    pub probes: RawProbes,
    /// The planner's settings.
    pub planner: flexcomm_planner::Config,
    /// What compressing takes until a job has shown it.
    pub times: Times,
}

/// Why a configuration cannot be used. Completes "failed to read the configuration: ...". Causes stand in the text
/// and not behind it, so that no reader of the chain prints them twice.
#[derive(Debug, thiserror::Error)]
pub enum ConfigError {
    /// The file cannot be read.
    #[error("{path}: {why}")]
    File {
        /// Which.
        path: PathBuf,
        /// Why.
        why: std::io::Error,
    },
    /// One of the others, in a file.
    #[error("{path}: {why}")]
    Inside {
        /// Which.
        path: PathBuf,
        /// What is wrong in it.
        why: Box<ConfigError>,
    },
    /// Not TOML, or a value of the wrong type.
    #[error("{0}")]
    Syntax(String),
    /// A key that does not exist.
    #[error("unknown key `{key}`{}", hint(.nearest, .known))]
    UnknownKey {
        /// With its section.
        key: String,
        /// The nearest valid key, with its section.
        nearest: Option<String>,
        /// All valid keys of the section.
        known: String,
    },
    /// A key of earlier builds.
    #[error("key `{key}` is no longer used; in its place: {replacement}")]
    Replaced {
        /// With its section.
        key: String,
        /// What takes its place, or why nothing does.
        replacement: &'static str,
    },
    /// A setting of another policy than the one that is named.
    #[error("`{key}` belongs to {owner}, not to {name}")]
    OtherPolicy {
        /// With its section.
        key: String,
        /// Whose setting it is.
        owner: &'static str,
        /// The policy that is named.
        name: &'static str,
    },
    /// A value out of its range.
    #[error("`{key}` is {value}, allowed is {allowed}")]
    Range {
        /// With its section.
        key: &'static str,
        /// As given.
        value: String,
        /// In words.
        allowed: &'static str,
    },
    /// The planner's settings make no sense.
    #[error(transparent)]
    Planner(#[from] flexcomm_planner::ConfigError),
    /// The table of times tells none.
    #[error("compressor_times {path}: {why}")]
    Times {
        /// Which file.
        path: PathBuf,
        /// What is wrong with it.
        why: String,
    },
    /// The token file cannot be read or made, or holds no token.
    #[error("token file {path}: {why}")]
    Token {
        /// Which.
        path: PathBuf,
        /// Why.
        why: String,
    },
}

impl ConfigError {
    /// Says that the values come from this file; what names a file of its own is left as it is.
    pub fn inside(self, path: &Path) -> Self {
        match self {
            Self::File { .. } | Self::Inside { .. } | Self::Token { .. } | Self::Times { .. } => self,
            why => Self::Inside { path: path.to_owned(), why: Box::new(why) },
        }
    }
}

fn syntax(error: impl std::fmt::Display) -> ConfigError {
    ConfigError::Syntax(error.to_string().trim_end().to_owned())
}

fn hint(nearest: &Option<String>, known: &str) -> String {
    match nearest {
        Some(key) => format!(", did you mean `{key}`?"),
        None => format!("; the keys are {known}"),
    }
}

/// What an absent key means: TOML has no word for nothing.
const UNSET: [(&str, &str); 5] = [
    ("compressor_times", "\"times.json\"  # unset: times that were measured on a server CPU"),
    ("planner.compressors", "[\"topk\", \"lwtopk\", \"mstopk\"]  # unset: all that the job offers"),
    ("planner.policy.exponent", "0.24  # unset: by the law of the job's momentum"),
    ("planner.policy.momentum", "0.9  # unset: that of the job's optimizer"),
    ("planner.policy.steps", "20000  # unset: as many are expected to come as were taken, at least 500"),
];

impl RawConfig {
    /// Reads TOML; an unknown key is named with the nearest valid one.
    pub fn parse(text: &str) -> Result<Self, ConfigError> {
        let table: toml::Table = text.parse().map_err(|e: toml::de::Error| syntax(e))?;
        let given = serde_json::to_value(&table).map_err(syntax)?;
        let known = serde_json::to_value(Self::default()).map_err(syntax)?;
        unknown_key(&given, &known, "")?;
        toml::from_str(text).map_err(syntax)
    }

    /// Reads a file.
    pub fn read(path: &Path) -> Result<Self, ConfigError> {
        let text = std::fs::read_to_string(path).map_err(|why| ConfigError::File { path: path.to_owned(), why })?;
        Self::parse(&text).map_err(|why| why.inside(path))
    }

    /// All keys with their values as TOML; keys that are unset stand there as comments.
    pub fn to_toml(&self) -> Result<String, ConfigError> {
        let mut text = toml::to_string(self).map_err(syntax)?;
        let all = serde_json::to_value(self).map_err(syntax)?;
        for (key, meaning) in UNSET {
            // What is not there at all belongs to another policy.
            if all.pointer(&format!("/{}", key.replace('.', "/"))).is_none_or(|value| !value.is_null()) {
                continue;
            }
            match key.rsplit_once('.') {
                None => text = format!("# {key} = {meaning}\n{text}"),
                Some((section, name)) => {
                    let header = format!("[{section}]\n");
                    text = text.replacen(&header, &format!("{header}# {name} = {meaning}\n"), 1);
                }
            }
        }
        Ok(text)
    }

    /// Checks every value, and the token where its file exists.
    pub fn validate(self) -> Result<Config, ConfigError> {
        self.check()?;
        crate::api::auth::Token::read(&self.token_file)
            .map_err(|e| ConfigError::Token { path: self.token_file.clone(), why: e.to_string() })?;
        let times = self.compressor_times.as_deref().map(read_times).transpose()?.unwrap_or_default();
        Ok(Config {
            listen: self.listen,
            db: self.db,
            token_file: self.token_file,
            allowed_hosts: self.allowed_hosts,
            scenario: self.scenario,
            tick: Duration::from_millis(self.cycle.tick_ms),
            debounce: Duration::from_millis(self.cycle.debounce_ms),
            heartbeat: Duration::from_millis(self.agents.heartbeat_ms),
            dead_after: Duration::from_millis(self.agents.dead_after_ms),
            probes: self.probes,
            planner: self.planner,
            times,
        })
    }

    /// Names the first value out of range; touches no file.
    pub fn check(&self) -> Result<(), ConfigError> {
        if let Some(name) = self.allowed_hosts.iter().find(|name| !crate::api::host::is_name(name)) {
            let allowed = "names without scheme, port or path, such as flexcomm.example.org";
            return Err(ConfigError::Range { key: "allowed_hosts", value: format!("{name:?}"), allowed });
        }
        let (agents, probes) = (&self.agents, &self.probes);
        within("loop.tick_ms", self.cycle.tick_ms, 10..=60_000, "10 to 60000")?;
        within("loop.debounce_ms", self.cycle.debounce_ms, 0..=10_000, "0 to 10000")?;
        within("agents.heartbeat_ms", agents.heartbeat_ms, 50..=60_000, "50 to 60000")?;
        let twice = 2 * agents.heartbeat_ms;
        within(
            "agents.dead_after_ms",
            agents.dead_after_ms,
            twice..=3_600_000,
            "twice agents.heartbeat_ms to 3600000",
        )?;
        within("probes.echo_interval_ms", probes.echo_interval_ms, 1..=60_000, "1 to 60000")?;
        within("probes.trace_interval_s", probes.trace_interval_s, 0..=86_400, "0 to 86400")?;
        within("probes.budget_share", probes.budget_share, 0.0001..=0.5, "0.0001 to 0.5")?;
        within("probes.min_bytes", probes.min_bytes, 16_384..=1 << 30, "16384 to 1073741824")?;
        within("probes.max_bytes", probes.max_bytes, probes.min_bytes..=1 << 34, "probes.min_bytes to 17179869184")?;
        within("probes.test_ms", probes.test_ms, 1..=10_000, "1 to 10000")?;
        within("probes.retest_s", probes.retest_s, 1..=86_400, "1 to 86400")?;
        within("probes.suspect_change", probes.suspect_change, 0.01..=10.0, "0.01 to 10")?;
        Ok(self.planner.check()?)
    }
}

fn within<T: PartialOrd + ToString>(
    key: &'static str,
    value: T,
    range: std::ops::RangeInclusive<T>,
    allowed: &'static str,
) -> Result<(), ConfigError> {
    let ok = range.contains(&value);
    if ok { Ok(()) } else { Err(ConfigError::Range { key, value: value.to_string(), allowed }) }
}

fn read_times(path: &Path) -> Result<Times, ConfigError> {
    let refuse = |why: String| ConfigError::Times { path: path.to_owned(), why };
    let text = std::fs::read_to_string(path).map_err(|error| refuse(error.to_string()))?;
    Times::read(&text).map_err(|error| refuse(error.to_string()))
}

/// What takes the place of a key that earlier builds had in a section.
fn replaced(path: &str, key: &str) -> Option<&'static str> {
    flexcomm_planner::Config::replacement(key).filter(|_| path == "planner.")
}

/// A policy's keys depend on its name.
const POLICY: &str = "planner.policy";

/// Checks a policy's keys by its name; a name that is none is left to who reads the policy.
fn unknown_setting(given: &serde_json::Value) -> Result<(), ConfigError> {
    let settings = |name: &str| serde_json::to_value(PolicyConfig::by_name(name).ok()).unwrap_or_default();
    let written = given.get("name").and_then(serde_json::Value::as_str);
    let name = PolicyConfig::NAMES.into_iter().find(|name| written == Some(*name));
    let (Some(name), Some(fields)) = (name, given.as_object()) else { return Ok(()) };
    let known = settings(name);
    for key in fields.keys().filter(|key| known.get(key.as_str()).is_none()) {
        if let Some(owner) = PolicyConfig::NAMES.into_iter().find(|other| settings(other).get(key).is_some()) {
            return Err(ConfigError::OtherPolicy { key: format!("{POLICY}.{key}"), owner, name });
        }
    }
    unknown_key(given, &known, &format!("{POLICY}."))
}

fn unknown_key(given: &serde_json::Value, known: &serde_json::Value, path: &str) -> Result<(), ConfigError> {
    let (Some(given), Some(known)) = (given.as_object(), known.as_object()) else { return Ok(()) };
    for (key, value) in given {
        let full = format!("{path}{key}");
        match known.get(key) {
            Some(_) if full == POLICY => unknown_setting(value)?,
            Some(inner) => unknown_key(value, inner, &format!("{full}."))?,
            None => {
                if let Some(replacement) = replaced(path, key) {
                    return Err(ConfigError::Replaced { key: full, replacement });
                }
                let keys: Vec<&str> = known.keys().map(String::as_str).collect();
                let nearest = nearest(key, &keys).map(|nearest| format!("{path}{nearest}"));
                return Err(ConfigError::UnknownKey { key: full, nearest, known: keys.join(", ") });
            }
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_sample_is_the_default() {
        assert_eq!(RawConfig::parse(SAMPLE).unwrap(), RawConfig::default());
        assert_eq!(RawConfig::parse("").unwrap(), RawConfig::default());
    }

    /// `key =` at the start of a line or behind `# `, by section.
    fn named_in(sample: &str) -> std::collections::BTreeSet<String> {
        let mut section = String::new();
        let mut names = std::collections::BTreeSet::new();
        for line in sample.lines().map(str::trim) {
            if let Some(name) = line.strip_prefix('[').and_then(|l| l.strip_suffix(']')) {
                section = format!("{name}.");
            }
            let written = line.strip_prefix("# ").unwrap_or(line);
            if let Some((name, _)) = written.split_once(" = ").filter(|(n, _)| !n.contains([' ', '`'])) {
                names.insert(format!("{section}{name}"));
            }
        }
        names
    }

    #[test]
    fn the_sample_names_every_key() {
        fn keys(value: &serde_json::Value, path: &str) -> Vec<String> {
            let Some(fields) = value.as_object() else { return vec![path.to_owned()] };
            let full = |key: &String| if path.is_empty() { key.clone() } else { format!("{path}.{key}") };
            fields.iter().flat_map(|(key, value)| keys(value, &full(key))).collect()
        }
        let all = serde_json::to_value(RawConfig::default()).unwrap();
        assert_eq!(named_in(SAMPLE), keys(&all, "").into_iter().collect());
    }

    #[test]
    fn all_keys_can_be_printed_and_read_back() {
        let text = RawConfig::default().to_toml().unwrap();
        assert_eq!(RawConfig::parse(&text).unwrap(), RawConfig::default());
    }

    #[test]
    fn typos_are_named_with_the_nearest_key() {
        for (text, said) in [
            ("lisen = \"127.0.0.1:1\"", "unknown key `lisen`, did you mean `listen`?"),
            ("[planner]\ndwel_s = 3", "unknown key `planner.dwel_s`, did you mean `planner.dwell_s`?"),
            ("[probes]\nbudgetshare = 0.1", "unknown key `probes.budgetshare`, did you mean `probes.budget_share`?"),
            ("[lop]\ntick_ms = 5", "unknown key `lop`, did you mean `loop`?"),
            ("[agents]\nxyzzy = 5", "unknown key `agents.xyzzy`; the keys are dead_after_ms, heartbeat_ms"),
        ] {
            assert_eq!(RawConfig::parse(text).unwrap_err().to_string(), said);
        }
        let policy_of = |text: &str| RawConfig::parse(&format!("[planner.policy]\n{text}")).unwrap_err().to_string();
        assert_eq!(
            policy_of("name = \"knee\"\nnonsense = 1"),
            "unknown key `planner.policy.nonsense`; the keys are name, unit_s"
        );
        let typo = policy_of("name = \"time-to-quality\"\ngain_flor = 0.1");
        assert_eq!(typo, "unknown key `planner.policy.gain_flor`, did you mean `planner.policy.gain_floor`?");
        let other = policy_of("name = \"knee\"\ngain_floor = 0.1");
        assert_eq!(other, "`planner.policy.gain_floor` belongs to time-to-quality, not to knee");
        let policy = |text: &str| RawConfig::parse(text).map(|config| config.planner.policy);
        let knee = policy("[planner]\npolicy = \"knee\"").unwrap();
        assert_eq!(knee, policy("[planner.policy]\nname = \"knee\"").unwrap());
        let typo = policy("[planner]\npolicy = \"kneee\"").unwrap_err().to_string();
        assert!(typo.contains("did you mean knee?"), "{typo}");
    }

    #[test]
    fn keys_of_earlier_builds_are_refused_with_what_takes_their_place() {
        let refused = |text: &str| RawConfig::parse(text).unwrap_err().to_string();
        assert_eq!(
            refused("[planner]\nhysteresis = 0.1"),
            "key `planner.hysteresis` is no longer used; in its place: planner.confidence, the probability that a change is better"
        );
        let patience = refused("[planner]\napply_patience_s = 7.0");
        assert!(patience.ends_with("in its place: planner.apply_timeout_s"), "{patience}");
        // Elsewhere it never was a key.
        assert!(refused("hysteresis = 0.1").starts_with("unknown key `hysteresis`"));
        let gone = refused("[planner.policy]\nname = \"time-to-quality\"\nuncompensated = 0.1");
        assert!(gone.contains("uncompensated") && gone.contains("exponent"), "{gone}");
    }

    #[test]
    fn what_is_wrong_in_a_file_is_named_with_it_once() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("c.toml");
        for text in ["lisen = 1", "not toml", "[loop]\ntick_ms = \"x\""] {
            std::fs::write(&path, text).unwrap();
            let error = RawConfig::read(&path).unwrap_err().inside(&path).to_string();
            assert!(error.starts_with(&format!("{}: ", path.display())), "{error}");
            assert_eq!(error.matches("c.toml").count(), 1, "{error}");
        }
        let absent = RawConfig::read(Path::new("/none.toml")).unwrap_err().inside(&path).to_string();
        assert!(absent.starts_with("/none.toml: No such file"), "{absent}");
    }

    #[test]
    fn every_unset_key_is_printed_and_its_example_is_valid() {
        fn unset(value: &serde_json::Value, path: &str) -> Vec<String> {
            match value {
                serde_json::Value::Null => vec![path.to_owned()],
                serde_json::Value::Object(fields) => {
                    let inner =
                        |(k, v)| unset(v, &if path.is_empty() { String::clone(k) } else { format!("{path}.{k}") });
                    fields.iter().flat_map(inner).collect()
                }
                _ => vec![],
            }
        }
        let all = serde_json::to_value(RawConfig::default()).unwrap();
        assert_eq!(unset(&all, ""), UNSET.map(|(key, _)| key));
        let text = RawConfig::default().to_toml().unwrap();
        assert!(text.contains("\n# compressors = "), "{text}");
        let set = RawConfig::parse(&text.replace("# compressor", "compressor")).unwrap();
        assert_eq!(set.compressor_times, Some("times.json".into()));
        assert!(set.planner.compressors.is_some_and(|c| c.len() == 3));
    }

    #[test]
    fn a_table_of_times_is_read_or_named() {
        let folder = tempfile::tempdir().unwrap();
        let (path, token_file) = (folder.path().join("times.json"), folder.path().join("token"));
        let with = || RawConfig {
            compressor_times: Some(path.clone()),
            token_file: token_file.clone(),
            ..RawConfig::default()
        };
        let refused = || with().validate().unwrap_err().to_string();
        assert!(refused().starts_with(&format!("compressor_times {}: No such file", path.display())), "{}", refused());
        std::fs::write(&path, "[]").unwrap();
        assert!(refused().ends_with("no row has times"), "{}", refused());
        std::fs::write(&path, r#"[{"method":"fp16","n":10,"compress_s":1e-6,"decompress_s":0}]"#).unwrap();
        let (own, shipped) = (with().validate().unwrap().times, Times::default());
        assert!(own != shipped && own.knows("fp16".parse().unwrap()));
    }

    #[test]
    fn values_are_checked_by_name() {
        for (text, key) in [
            ("[loop]\ntick_ms = 1", "loop.tick_ms"),
            ("[agents]\ndead_after_ms = 100", "agents.dead_after_ms"),
            ("[probes]\nbudget_share = nan", "probes.budget_share"),
            ("[probes]\nmax_bytes = 17000", "probes.max_bytes"),
            ("[planner]\nconfidence = 7.0", "planner.confidence"),
        ] {
            let error = RawConfig::parse(text).unwrap().validate().unwrap_err().to_string();
            assert!(error.trim_start_matches('`').starts_with(key), "{text}: {error}");
        }
        assert!(RawConfig::parse("listen = 5").is_err());
    }
}
