//! Configuration in two steps: as written ([`raw`]), then valid with units and defaults ([`Config`]).

mod raw;

use flexcomm_domain::{Invalid, NodeName, Seconds};
use flexcomm_probes::auth::{MAX_TOKEN, MIN_TOKEN};
use flexcomm_wire::{MAX_HOSTS, MAX_TEXT};
use raw::{Raw, RawShaping};
use std::net::{IpAddr, SocketAddr};
use std::path::PathBuf;
use std::time::Duration;

/// A commented file with every key; parsed by a test.
pub const SAMPLE: &str = include_str!("sample.toml");

/// Share of the link's capacity that throughput tests may take, unless configured.
pub const PROBE_SHARE: f64 = 0.01;
/// How often a link is reported that does not change, unless configured.
pub const REPORT_INTERVAL: Duration = Duration::from_secs(2);
/// Longest configuration file, in bytes.
const MAX_FILE: u64 = 256 * 1024;
/// Least spool: a few seconds of telemetry of one rank.
const MIN_SPOOL: u64 = 64 * 1024;
/// Largest spool: more than a year of telemetry of one rank.
const MAX_SPOOL: u64 = 64 * 1024 * 1024 * 1024;

/// Why there is no valid configuration. Completes "failed to read the configuration: ...".
#[derive(Debug, thiserror::Error)]
pub enum ConfigError {
    /// One of the others, and the file or the flag that it comes from.
    #[error("{place}: {why}")]
    Placed {
        /// A path, or the names of flag and variable.
        place: String,
        /// What is wrong there.
        why: Box<ConfigError>,
    },
    /// The file cannot be read.
    #[error("{what} {path}: {why}")]
    Read {
        /// Which file it was to be.
        what: &'static str,
        /// Its path.
        path: PathBuf,
        /// Why.
        why: std::io::Error,
    },
    /// Not TOML, or a value of another type.
    #[error("{text}")]
    Syntax {
        /// The parser's words, with line and column.
        text: String,
    },
    /// A key that does not exist.
    #[error("line {line}: unknown key `{key}`{}", hint(.nearest, .known))]
    UnknownKey {
        /// From 1.
        line: usize,
        /// As written.
        key: String,
        /// The nearest valid key.
        nearest: Option<String>,
        /// All valid keys.
        known: String,
    },
    /// A value that is not allowed.
    #[error("`{key}` is {value}, allowed is {allowed}")]
    Value {
        /// Which key.
        key: &'static str,
        /// As written; never the token.
        value: String,
        /// What would be accepted.
        allowed: String,
    },
    /// Values that are valid alone but not together, or one that is missing.
    #[error("{0}")]
    Together(&'static str),
}

impl ConfigError {
    /// The key whose value it is about.
    fn key(&self) -> Option<&'static str> {
        match self {
            Self::Value { key, .. } => Some(key),
            Self::Read { .. } => Some("token_file"),
            _ => None,
        }
    }
}

fn hint(nearest: &Option<String>, known: &str) -> String {
    match nearest {
        Some(key) => format!(", did you mean `{key}`?"),
        None => format!("; the keys are {known}"),
    }
}

fn value(key: &'static str, value: impl std::fmt::Debug, allowed: impl ToString) -> ConfigError {
    let value = format!("{value:?}").chars().take(120).collect();
    ConfigError::Value { key, value, allowed: allowed.to_string() }
}

/// What a type of the domain would accept.
fn allowed(why: Invalid) -> String {
    match why {
        Invalid::Range { allowed, .. } | Invalid::Text { allowed, .. } => allowed,
        Invalid::Combination(text) => text,
    }
}

/// What flags and the environment say; each beats the file. Used by the command line as it is.
#[derive(Debug, Clone, Default, clap::Args, serde::Serialize)]
pub struct Overrides {
    /// This node's name in the cluster [default: the host's name].
    #[arg(long, env = "FLEXCOMM_NODE", value_name = "NAME", alias = "name")]
    pub node: Option<String>,
    /// Where the controller is [default: http://127.0.0.1:7070].
    #[arg(long, env = "FLEXCOMM_CONTROLLER", value_name = "URL")]
    pub controller: Option<String>,
    /// The cluster's token. Prefer --token-file: other users see arguments in the process list.
    #[arg(long, env = "FLEXCOMM_TOKEN", value_name = "TOKEN", hide_env_values = true, conflicts_with = "token_file")]
    pub token: Option<String>,
    /// File that holds the cluster's token.
    #[arg(long, env = "FLEXCOMM_TOKEN_FILE", value_name = "FILE")]
    pub token_file: Option<String>,
    /// Address on which echo and throughput probes are answered [default: 0.0.0.0].
    #[arg(long, env = "FLEXCOMM_AGENT_LISTEN", value_name = "ADDR")]
    pub listen: Option<String>,
    /// Address at which the other agents reach this node [default: the one that reaches the controller].
    #[arg(long, env = "FLEXCOMM_ADVERTISE", value_name = "ADDR")]
    pub advertise: Option<String>,
    /// UDP port that answers echo probes [default: 7071].
    #[arg(long, env = "FLEXCOMM_ECHO_PORT", value_name = "PORT")]
    pub echo_port: Option<u16>,
    /// TCP port that answers throughput probes [default: 7072].
    #[arg(long, env = "FLEXCOMM_THROUGHPUT_PORT", value_name = "PORT")]
    pub throughput_port: Option<u16>,
    /// Holds the trainers' socket, a tmpfs [default: /run/flexcomm].
    #[arg(long, env = "FLEXCOMM_RUN_DIR", value_name = "DIR")]
    pub run_dir: Option<String>,
    /// Holds spool, last decisions and tc's journal [default: /var/lib/flexcomm].
    #[arg(long, env = "FLEXCOMM_STATE_DIR", value_name = "DIR")]
    pub state_dir: Option<String>,
    /// error, warn, info, debug or trace [default: info].
    #[arg(long, env = "FLEXCOMM_LOG", value_name = "LEVEL")]
    pub log: Option<String>,
    /// Serve Prometheus metrics over HTTP here, for example 127.0.0.1:7073 [default: off].
    #[arg(long, env = "FLEXCOMM_METRICS_LISTEN", value_name = "ADDR:PORT")]
    pub metrics_listen: Option<String>,
}

impl Overrides {
    /// How a key is spelled on the command line and in the environment, when it is given there.
    fn spelled(&self, key: &str) -> Option<String> {
        serde_json::to_value(self).ok()?.get(key).filter(|given| !given.is_null())?;
        let command = <Self as clap::Args>::augment_args(clap::Command::new("agent"));
        let arg = command.get_arguments().find(|arg| arg.get_id() == key)?;
        Some(format!("--{} or {}", arg.get_long()?, arg.get_env()?.to_string_lossy()))
    }

    fn over(self, raw: &mut Raw) {
        // A token given one way replaces a token given the other way in the file.
        if self.token.is_some() || self.token_file.is_some() {
            (raw.token, raw.token_file) = (self.token, self.token_file);
        }
        macro_rules! beat {
            ($($key:ident),+) => { $(if self.$key.is_some() { raw.$key = self.$key; })+ };
        }
        beat!(node, controller, listen, advertise, echo_port, throughput_port, run_dir, state_dir, log, metrics_listen);
    }
}

/// A secret that does not show itself in logs.
#[derive(Clone, PartialEq, Eq)]
pub struct Secret(String);

impl Secret {
    /// The token itself.
    pub fn reveal(&self) -> &str {
        &self.0
    }
}

impl std::fmt::Debug for Secret {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Secret(..)")
    }
}

/// A valid configuration.
#[derive(Debug, Clone)]
pub struct Config {
    /// This node's name.
    pub node: NodeName,
    /// Without a slash at the end.
    pub controller: reqwest::Url,
    /// The cluster's token.
    pub token: Secret,
    /// Where probes are answered.
    pub listen: IpAddr,
    /// Where peers reach this node; absent: found out from the route to the controller.
    pub advertise: Option<IpAddr>,
    /// UDP.
    pub echo_port: u16,
    /// TCP.
    pub throughput_port: u16,
    /// Holds the socket.
    pub run_dir: PathBuf,
    /// Of the socket.
    pub socket_mode: u32,
    /// Spool, decisions, tc's journal.
    pub state_dir: PathBuf,
    /// Of a link's capacity.
    pub probe_share: f64,
    /// Hosts that are no nodes, by name or address; `gateway` is that of the default route.
    pub ping_hosts: Vec<String>,
    /// On disk.
    pub spool_limit: u64,
    /// Least time between two reports of a link that changed little.
    pub report_interval: Duration,
    /// Of the log.
    pub log: tracing::Level,
    /// Prometheus text over HTTP.
    pub metrics_listen: Option<SocketAddr>,
    /// tc.
    pub shaping: Shaping,
}

/// The valid `[shaping]` section.
#[derive(Debug, Clone)]
pub struct Shaping {
    /// Whether at all.
    pub allow: bool,
    /// The interface that is shaped, when shaping is allowed.
    pub interface: Option<String>,
    /// Even when it carries the default route.
    pub allow_default_route: bool,
    /// Renewed at a third of it.
    pub lease: Duration,
    /// Restored after so long without the controller.
    pub controller_away: Duration,
}

impl Config {
    /// Reads the file, when there is one, lets the overrides win and checks the whole.
    pub fn load(file: Option<&std::path::Path>, overrides: Overrides) -> Result<Self, ConfigError> {
        let text = file.map_or_else(|| Ok(String::new()), |path| read_bounded("the file", path))?;
        let spelled = overrides.clone();
        Self::parse(&text, overrides).map_err(|why| {
            let given = why.key().and_then(|key| spelled.spelled(key));
            let place = given.or_else(|| file.map(|path| path.display().to_string()));
            match place {
                Some(place) => ConfigError::Placed { place, why: Box::new(why) },
                None => why,
            }
        })
    }

    /// The same from a text.
    pub fn parse(text: &str, overrides: Overrides) -> Result<Self, ConfigError> {
        let mut raw = Raw::parse(text)?;
        overrides.over(&mut raw);
        Self::check(raw)
    }

    /// Every key that is set, as TOML; of the token only that it is there.
    pub fn to_toml(&self) -> Result<String, ConfigError> {
        let text =
            toml::to_string(&Raw::from(self)).map_err(|error| ConfigError::Syntax { text: error.to_string() })?;
        Ok(format!("# The token is given and not shown.\n{text}"))
    }

    /// Whether peers reach this node on a loopback address: as configured, else as it reaches the controller.
    pub(crate) fn is_on_loopback(&self) -> bool {
        let host = self.controller.host_str().unwrap_or_default().trim_matches(['[', ']']);
        let own = self.advertise.or(Some(self.listen).filter(|addr| !addr.is_unspecified()));
        let addr = own.or_else(|| host.parse().ok());
        addr.map_or(host == "localhost", |addr| addr.to_canonical().is_loopback())
    }

    fn check(raw: Raw) -> Result<Self, ConfigError> {
        let port = |key, port: Option<u16>, default| match port {
            Some(0) => Err(value(key, 0, "a port from 1 to 65535")),
            other => Ok(other.unwrap_or(default)),
        };
        Ok(Self {
            node: node(raw.node)?,
            controller: controller(raw.controller)?,
            token: token(raw.token, raw.token_file)?,
            listen: address("listen", raw.listen)?.unwrap_or(IpAddr::from([0, 0, 0, 0])),
            advertise: advertise(raw.advertise)?,
            echo_port: port("echo_port", raw.echo_port, flexcomm_probes::ECHO_PORT)?,
            throughput_port: port("throughput_port", raw.throughput_port, flexcomm_probes::THROUGHPUT_PORT)?,
            run_dir: folder("run_dir", raw.run_dir, "/run/flexcomm")?,
            socket_mode: mode(raw.socket_mode)?,
            state_dir: folder("state_dir", raw.state_dir, "/var/lib/flexcomm")?,
            probe_share: range("probe_share", raw.probe_share.unwrap_or(PROBE_SHARE), 0.0001, 0.2)?,
            ping_hosts: ping_hosts(raw.ping_hosts)?,
            spool_limit: spool_limit(raw.spool_limit_bytes)?,
            report_interval: duration("report_interval", raw.report_interval, REPORT_INTERVAL, (0.05, 60.0))?,
            log: level(raw.log)?,
            metrics_listen: metrics(raw.metrics_listen)?,
            shaping: shaping(raw.shaping.unwrap_or_default())?,
        })
    }
}

fn ping_hosts(given: Option<Vec<String>>) -> Result<Vec<String>, ConfigError> {
    let hosts = given.unwrap_or_else(|| vec![crate::probing::pings::GATEWAY.to_owned()]);
    let is_host = |host: &String| {
        let fits = |c: char| c.is_ascii_alphanumeric() || ".-_:".contains(c);
        (1..=MAX_TEXT).contains(&host.len()) && host.chars().all(fits)
    };
    if let Some(wrong) = hosts.iter().find(|host| !is_host(host)) {
        return Err(value("ping_hosts", wrong, "the name or address of a host, or gateway"));
    }
    if hosts.len() > MAX_HOSTS {
        return Err(value("ping_hosts", format!("a list of {}", hosts.len()), format!("at most {MAX_HOSTS} hosts")));
    }
    Ok(hosts)
}

fn read_bounded(what: &'static str, path: &std::path::Path) -> Result<String, ConfigError> {
    let read = |why| ConfigError::Read { what, path: path.to_owned(), why };
    let length = std::fs::metadata(path).map_err(read)?.len();
    if length > MAX_FILE {
        let text = format!("{length} bytes, at most {MAX_FILE} are read");
        return Err(read(std::io::Error::new(std::io::ErrorKind::FileTooLarge, text)));
    }
    std::fs::read_to_string(path).map_err(read)
}

fn node(name: Option<String>) -> Result<NodeName, ConfigError> {
    let name = match name {
        Some(name) => name,
        None => host_name(),
    };
    NodeName::new(&name).map_err(|why| value("node", &name, allowed(why)))
}

fn host_name() -> String {
    nix::unistd::gethostname().ok().and_then(|name| name.into_string().ok()).unwrap_or_default()
}

fn controller(url: Option<String>) -> Result<reqwest::Url, ConfigError> {
    let text = url.unwrap_or_else(|| "http://127.0.0.1:7070".to_owned());
    let bad = |why: &str| value("controller", &text, why);
    let example = |why| format!("an address such as http://10.0.0.1:7070 ({why})");
    let url = reqwest::Url::parse(text.trim_end_matches('/')).map_err(|why| bad(&example(why)))?;
    if url.scheme() != "http" {
        return Err(bad("an address that begins with http:// (TLS is left to a tunnel)"));
    }
    if url.host_str().is_none() || url.query().is_some() || url.fragment().is_some() || !url.username().is_empty() {
        return Err(bad("host and port only, for example http://10.0.0.1:7070"));
    }
    Ok(url)
}

fn token(token: Option<String>, file: Option<String>) -> Result<Secret, ConfigError> {
    let (key, text) = match (token, file) {
        (Some(_), Some(_)) => return Err(ConfigError::Together("give `token` or `token_file`, not both")),
        (Some(token), None) => ("token", token),
        (None, Some(file)) => ("token_file", read_bounded("the token file", file.as_ref())?),
        (None, None) => {
            return Err(ConfigError::Together(
                "the cluster's token is missing: give --token-file, FLEXCOMM_TOKEN_FILE or `token_file`",
            ));
        }
    };
    let text = text.trim();
    // Never the value itself: errors end in logs.
    if !(MIN_TOKEN..=MAX_TOKEN).contains(&text.len()) || !text.bytes().all(|b| b.is_ascii_graphic()) {
        let has = format!("a text of {} bytes that is not shown", text.len());
        let allowed = format!("{MIN_TOKEN} to {MAX_TOKEN} printable ASCII characters without spaces");
        return Err(ConfigError::Value { key, value: has, allowed });
    }
    Ok(Secret(text.to_owned()))
}

fn address(key: &'static str, text: Option<String>) -> Result<Option<IpAddr>, ConfigError> {
    let parse = |text: String| text.parse().map_err(|_| value(key, &text, "an IP address, for example 10.0.0.1"));
    text.map(parse).transpose()
}

fn advertise(text: Option<String>) -> Result<Option<IpAddr>, ConfigError> {
    match address("advertise", text)? {
        Some(addr) if addr.is_unspecified() || addr.is_multicast() => {
            Err(value("advertise", addr, "the one address at which peers reach this node"))
        }
        other => Ok(other),
    }
}

fn folder(key: &'static str, text: Option<String>, default: &str) -> Result<PathBuf, ConfigError> {
    let text = text.unwrap_or_else(|| default.to_owned());
    if text.is_empty() || text.contains('\0') {
        return Err(value(key, &text, "a directory"));
    }
    Ok(PathBuf::from(text))
}

fn mode(text: Option<String>) -> Result<u32, ConfigError> {
    let text = text.unwrap_or_else(|| "0660".to_owned());
    u32::from_str_radix(&text, 8)
        .ok()
        .filter(|mode| *mode <= 0o777)
        .ok_or_else(|| value("socket_mode", &text, "octal permission bits, for example \"0660\""))
}

fn range(key: &'static str, number: f64, least: f64, most: f64) -> Result<f64, ConfigError> {
    if (least..=most).contains(&number) { Ok(number) } else { Err(value(key, number, format!("{least} to {most}"))) }
}

fn spool_limit(bytes: Option<u64>) -> Result<u64, ConfigError> {
    match bytes.unwrap_or(64 * 1024 * 1024) {
        n if (MIN_SPOOL..=MAX_SPOOL).contains(&n) => Ok(n),
        n => Err(value("spool_limit_bytes", n, format!("{MIN_SPOOL} to {MAX_SPOOL} bytes"))),
    }
}

fn duration(
    key: &'static str,
    text: Option<String>,
    default: Duration,
    bounds: (f64, f64),
) -> Result<Duration, ConfigError> {
    let Some(text) = text else { return Ok(default) };
    let seconds: Seconds = text.parse().map_err(|why: Invalid| value(key, &text, allowed(why)))?;
    range(key, seconds.get(), bounds.0, bounds.1).map(Duration::from_secs_f64)
}

fn level(text: Option<String>) -> Result<tracing::Level, ConfigError> {
    let text = text.unwrap_or_else(|| "info".to_owned());
    text.parse().map_err(|_| value("log", &text, "one of error, warn, info, debug, trace"))
}

fn metrics(text: Option<String>) -> Result<Option<SocketAddr>, ConfigError> {
    let parse = |text: String| {
        text.parse().map_err(|_| value("metrics_listen", &text, "address and port, for example 127.0.0.1:7073"))
    };
    text.map(parse).transpose()
}

fn shaping(raw: RawShaping) -> Result<Shaping, ConfigError> {
    let interfaces = raw.interfaces.unwrap_or_default();
    let good = |name: &String| (1..=15).contains(&name.len()) && !name.contains(['/', ' ', '\0']);
    if let Some(bad) = interfaces.iter().find(|name| !good(name)) {
        return Err(value("shaping.interfaces", bad, "names of interfaces, 1 to 15 characters (`ip link` lists them)"));
    }
    let allow = raw.allow.unwrap_or(false);
    if interfaces.len() > 1 || (allow && interfaces.is_empty()) {
        return Err(value("shaping.interfaces", interfaces, "exactly one interface when `allow = true`"));
    }
    Ok(Shaping {
        allow,
        interface: interfaces.into_iter().next(),
        allow_default_route: raw.allow_default_route.unwrap_or(false),
        lease: duration("shaping.lease", raw.lease, Duration::from_secs(10), (0.2, 3600.0))?,
        controller_away: duration(
            "shaping.controller_away",
            raw.controller_away,
            Duration::from_secs(60),
            (1.0, 86400.0),
        )?,
    })
}

#[cfg(test)]
mod tests;
