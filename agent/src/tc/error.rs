//! Why a link was not shaped, or not put back. Every text completes "failed to ...".

use flexcomm_domain::Invalid;
use std::io;
use std::path::PathBuf;

/// What can go wrong when a link is shaped, renewed or put back.
#[derive(Debug, thiserror::Error)]
pub enum ShapeError {
    /// The configuration does not allow it.
    #[error("shape {iface}: shaping is not allowed here; set `allow = true` in the agent's [shaping] section")]
    NotAllowed {
        /// The interface asked for.
        iface: String,
    },
    /// The interface is not on the list.
    #[error("shape {iface}: it is not on the list of interfaces that may be shaped ({})", listed(.allowed))]
    NotListed {
        /// The interface asked for.
        iface: String,
        /// The configured list.
        allowed: Vec<String>,
    },
    /// No such interface in this network namespace.
    #[error("shape {iface}: there is no such interface in this network namespace (`ip link` lists them)")]
    UnknownInterface {
        /// The interface asked for.
        iface: String,
    },
    /// It carries the default route.
    #[error(
        "shape {iface}: it carries the default route, and a mistake there cuts this machine off; \
         set `allow_default_route = true` to shape it all the same"
    )]
    DefaultRoute {
        /// The interface asked for.
        iface: String,
    },
    /// Not permitted by the kernel.
    #[error(
        "shape {iface}: this process lacks CAP_NET_ADMIN; run the agent as root, with \
         `AmbientCapabilities=CAP_NET_ADMIN` in its unit, or after `setcap cap_net_admin,cap_net_raw+ep` on its binary"
    )]
    MissingCapability {
        /// The interface asked for.
        iface: String,
    },
    /// The kernel has no such qdisc or classifier.
    #[error(
        "shape {iface}: this kernel has no {module}; try `modprobe {module}`, or install the package with the \
         kernel's extra modules, or use a kernel that has it (Debian's user-mode-linux does, the lab uses it by itself)"
    )]
    MissingModule {
        /// The interface asked for.
        iface: String,
        /// The kernel module, for example `sch_netem`.
        module: &'static str,
    },
    /// A root qdisc stands there that this agent did not make and could not put back as it was.
    #[error(
        "shape {iface}: its root qdisc `{kind} {handle}` was put there by someone else and cannot be put back exactly \
         as it was; take it away with `tc qdisc del dev {iface} root` if it is not needed"
    )]
    ForeignQdisc {
        /// The interface asked for.
        iface: String,
        /// Its root qdisc.
        kind: String,
        /// In tc's notation.
        handle: String,
    },
    /// A value out of the range tc can express.
    #[error("shape {iface}: {source}")]
    Range {
        /// The interface asked for.
        iface: String,
        /// The value.
        source: Invalid,
    },
    /// Another live agent works with the same state directory.
    #[error("take over {}: another agent that is running shapes from there; give each its own state directory",
        .state_dir.display())]
    Owned {
        /// Where its journal is.
        state_dir: PathBuf,
    },
    /// A journal from earlier that cannot be used.
    #[error("read the tc journal {}: {why}", .path.display())]
    Journal {
        /// The file.
        path: PathBuf,
        /// What is wrong with it, and the remedy.
        why: String,
    },
    /// The lease ran out (or the guardian was told to stop) and the link was put back; apply the shape again.
    #[error("renew the lease: it ran out and the guardian put back {}; apply the shape again", .ifaces.join(", "))]
    LeaseLost {
        /// Interfaces that are unshaped now.
        ifaces: Vec<String>,
    },
    /// The guardian process could not be started or does not answer.
    #[error("start the guardian process `{program}`: {why}")]
    Guardian {
        /// What was run.
        program: String,
        /// What happened.
        why: String,
    },
    /// The kernel refused a message.
    #[error("{operation}: the kernel says {source}{}", extra(.words))]
    Kernel {
        /// Which step, with the interface.
        operation: String,
        /// The errno.
        source: io::Error,
        /// The kernel's own words, when it gave any.
        words: String,
    },
    /// The lease is out of range.
    #[error("use a lease of {} ms: allowed is 200 ms to 1 h", .lease.as_millis())]
    Lease {
        /// What was configured.
        lease: std::time::Duration,
    },
    /// Files or sockets.
    #[error("{operation}: {source}")]
    Io {
        /// Which step, with its object.
        operation: String,
        /// The cause.
        source: io::Error,
    },
}

impl ShapeError {
    pub(crate) fn io(operation: impl Into<String>) -> impl FnOnce(io::Error) -> Self {
        let operation = operation.into();
        move |source| Self::Io { operation, source }
    }
}

fn listed(names: &[String]) -> String {
    if names.is_empty() { "the list is empty".to_owned() } else { names.join(", ") }
}

fn extra(words: &str) -> String {
    if words.is_empty() { String::new() } else { format!(": {words}") }
}
