//! The configuration as written: strings and numbers, nothing checked but the names of the keys.

use super::{Config, ConfigError};
use flexcomm_domain::nearest;
use serde::{Deserialize, Serialize};
use toml::de::{DeTable, DeValue};

/// The file as written.
#[derive(Debug, Clone, Default, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Raw {
    pub(crate) node: Option<String>,
    pub(crate) controller: Option<String>,
    pub(crate) token: Option<String>,
    pub(crate) token_file: Option<String>,
    pub(crate) listen: Option<String>,
    pub(crate) advertise: Option<String>,
    pub(crate) echo_port: Option<u16>,
    pub(crate) throughput_port: Option<u16>,
    pub(crate) run_dir: Option<String>,
    pub(crate) socket_mode: Option<String>,
    pub(crate) state_dir: Option<String>,
    pub(crate) probe_share: Option<f64>,
    pub(crate) ping_hosts: Option<Vec<String>>,
    pub(crate) spool_limit_bytes: Option<u64>,
    pub(crate) report_interval: Option<String>,
    pub(crate) log: Option<String>,
    pub(crate) metrics_listen: Option<String>,
    pub(crate) shaping: Option<RawShaping>,
}

/// The `[shaping]` section as written.
#[derive(Debug, Clone, Default, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct RawShaping {
    pub(crate) allow: Option<bool>,
    pub(crate) interfaces: Option<Vec<String>>,
    pub(crate) allow_default_route: Option<bool>,
    pub(crate) lease: Option<String>,
    pub(crate) controller_away: Option<String>,
}

/// The keys of a section, as serde names them.
pub(crate) fn keys<T: Default + Serialize>() -> Vec<String> {
    match serde_json::to_value(T::default()) {
        Ok(serde_json::Value::Object(keys)) => keys.into_iter().map(|(key, _)| key).collect(),
        _ => Vec::new(),
    }
}

impl Raw {
    /// Reads TOML. An unknown key is named with its line and the nearest valid key.
    pub(crate) fn parse(text: &str) -> Result<Self, ConfigError> {
        let syntax = |error: toml::de::Error| ConfigError::Syntax { text: error.to_string().trim_end().to_owned() };
        let table = DeTable::parse(text).map_err(syntax)?;
        refuse_unknown(text, table.get_ref(), &keys::<Self>())?;
        if let Some(DeValue::Table(shaping)) = table.get_ref().get("shaping").map(|value| value.get_ref()) {
            refuse_unknown(text, shaping, &keys::<RawShaping>())?;
        }
        toml::from_str(text).map_err(syntax)
    }
}

/// Every key as it is used; the token stays out.
impl From<&Config> for Raw {
    fn from(config: &Config) -> Self {
        let seconds = |time: std::time::Duration| Some(format!("{}s", time.as_secs_f64()));
        let path = |path: &std::path::Path| Some(path.to_string_lossy().into_owned());
        Self {
            node: Some(config.node.to_string()),
            controller: Some(config.controller.as_str().trim_end_matches('/').to_owned()),
            token: None,
            token_file: None,
            listen: Some(config.listen.to_string()),
            advertise: config.advertise.map(|addr| addr.to_string()),
            echo_port: Some(config.echo_port),
            throughput_port: Some(config.throughput_port),
            run_dir: path(&config.run_dir),
            socket_mode: Some(format!("{:04o}", config.socket_mode)),
            state_dir: path(&config.state_dir),
            probe_share: Some(config.probe_share),
            ping_hosts: Some(config.ping_hosts.clone()),
            spool_limit_bytes: Some(config.spool_limit),
            report_interval: seconds(config.report_interval),
            log: Some(config.log.to_string().to_lowercase()),
            metrics_listen: config.metrics_listen.map(|addr| addr.to_string()),
            shaping: Some(RawShaping {
                allow: Some(config.shaping.allow),
                interfaces: Some(config.shaping.interface.iter().cloned().collect()),
                allow_default_route: Some(config.shaping.allow_default_route),
                lease: seconds(config.shaping.lease),
                controller_away: seconds(config.shaping.controller_away),
            }),
        }
    }
}

fn refuse_unknown(text: &str, table: &DeTable<'_>, known: &[String]) -> Result<(), ConfigError> {
    let known: Vec<&str> = known.iter().map(String::as_str).collect();
    let Some(key) = table.keys().find(|key| !known.contains(&&**key.get_ref())) else { return Ok(()) };
    Err(ConfigError::UnknownKey {
        line: text[..key.span().start.min(text.len())].matches('\n').count() + 1,
        key: key.get_ref().chars().take(80).collect(),
        nearest: nearest(key.get_ref(), &known).map(str::to_owned),
        known: known.join(", "),
    })
}
