//! Sockets, threads and clocks. Everything here drives a pure state machine of this crate.
//!
//! Latency is measured on threads of their own with the kernel's receive stamps: on a busy async runtime the
//! moment at which a task gets to run is off by a millisecond and more.

mod clock;
mod echo;
mod fd;
mod ping;
mod tcp;
mod throughput;
mod trace;
mod udp;
mod wake;

pub use clock::monotonic;
pub use echo::{EchoEvent, EchoProber, EchoResponder, EchoSettings, PeerSummary, SpawnError};
pub use ping::{PingBackend, PingError, PingReport, PingSettings, SocketKind, ping_many, ping_many_surge};
pub use throughput::{MeasureError, ThroughputServer, measure_throughput, measure_throughput_until};
pub use trace::{TraceError, trace_route};

/// Something that the system refused.
#[derive(Debug, thiserror::Error)]
#[error("{what}: {cause}")]
pub struct SystemError {
    /// What was tried.
    pub what: &'static str,
    /// The system's reason.
    pub cause: std::io::Error,
}

fn system(what: &'static str) -> impl Fn(std::io::Error) -> SystemError {
    move |cause| SystemError { what, cause }
}
