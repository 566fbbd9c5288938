//! Shaping of links with tc: htb for the rate, netem for delay, jitter and loss. Only this module changes qdiscs.
//!
//! The tree under an interface (`fc01:` is ours, see [`plan`]):
//!
//! ```text
//! root htb fc01: default 10
//! ├─ fc01:1   rate R                         the shaped link
//! │  ├─ fc01:10  rate 15/16 R ceil R prio 1  everything else     netem fc10: delay jitter loss
//! │  └─ fc01:30  rate  1/16 R ceil R prio 0  echo packets        netem fc30: delay jitter loss
//! └─ fc01:20  1 Tbit/s, prio 0               to and from the controller, ARP and neighbour discovery: unshaped
//! ```
//!
//! Safety: what stood there before is journaled and fsynced before the first change; two guardian processes of
//! sessions of their own put it back when the agent dies or stops renewing its lease, and one that was killed is
//! replaced; [`recover`] does so at the next start when all of them died. Only a root qdisc with our handle that a journal names is ever deleted, and the kernel
//! checks the handle again in the delete message itself. Everything that belongs together travels in one
//! `sendmsg`, which the kernel carries out within that one system call: a SIGKILL falls before or after it.

mod codec;
mod error;
pub mod guardian;
mod journal;
mod kernel;
mod plan;
mod restore;
mod shape;
mod shaper;
#[cfg(test)]
mod tests;
mod trial;

pub use error::ShapeError;
pub use restore::{Recovered, recover};
pub use shape::{MAX_DELAY_S, MAX_LOSS, MAX_RATE_BPS, MIN_RATE_BPS, Shape};
pub use shaper::Shaper;
pub use trial::{KernelSupport, try_kernel};

use std::net::SocketAddr;
use std::path::PathBuf;
use std::time::Duration;

/// The lease when the configuration names none.
pub const DEFAULT_LEASE: Duration = Duration::from_secs(10);

/// What may be shaped, and where the journal is.
#[derive(Debug, Clone)]
pub struct TcConfig {
    /// Whether shaping is allowed at all.
    pub allow: bool,
    /// Interfaces that may be shaped.
    pub interfaces: Vec<String>,
    /// Whether a listed interface may be one that carries a default route.
    pub allow_default_route: bool,
    /// The link is put back when no [`Shaper::renew`] came for so long; 200 ms to 1 h. Renew at a third of it.
    pub lease: Duration,
    /// Where `tc-journal-IFACE.json` lies.
    pub state_dir: PathBuf,
    /// The controller, whose traffic is not shaped.
    pub controller: Option<SocketAddr>,
    /// UDP port of echo packets, which do not queue behind the job's traffic.
    pub echo_port: u16,
    /// How the guardian is started.
    pub guardian: GuardianCommand,
}

/// How to start a guardian: a program that calls [`guardian::main`] with its stdin, stdout and environment left as
/// they are.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct GuardianCommand {
    /// The program.
    pub program: PathBuf,
    /// Its arguments.
    pub args: Vec<String>,
    /// Added to its environment.
    pub env: Vec<(String, String)>,
}

impl Default for GuardianCommand {
    /// This very binary with the hidden sub-command `tc-guardian`.
    fn default() -> Self {
        Self { program: "/proc/self/exe".into(), args: vec!["tc-guardian".into()], env: Vec::new() }
    }
}
