//! Connections: accepted within limits, served until they are idle, ended in order.
//!
//! A connection that sends nothing, half a head, or takes nothing of its answer ends after its timeout (`limits`). No
//! source has more than half of all connections, so that another is still answered. A body has the time of its
//! request (`api`).

use axum::Router;
use axum::body::Body;
use hyper::server::conn::http1;
use hyper_util::rt::{TokioIo, TokioTimer};
use hyper_util::server::graceful::GracefulShutdown;
use hyper_util::service::TowerToHyperService;
use nix::sys::resource::{Resource, getrlimit, setrlimit};
use parking_lot::Mutex;
use prometheus::IntCounterVec;
use socket2::{SockRef, TcpKeepalive};
use std::collections::HashMap;
use std::net::{IpAddr, Ipv6Addr};
use std::sync::Arc;
use std::time::{Duration, Instant};
use tokio::net::{TcpListener, TcpStream};
use tower::ServiceExt;

use crate::limits::{DESCRIPTORS, HEADER_BYTES, HEADER_TIMEOUT, OTHER_DESCRIPTORS, UNREAD_TIMEOUT};

/// After an error of accept, as without descriptors: it would fail again at once.
const ACCEPT_AGAIN: Duration = Duration::from_millis(100);

/// Connections that are refused are logged this often.
const LOG_EVERY: Duration = Duration::from_secs(60);

/// Serves until `stop` is ready, and then until the last answer is sent; the caller bounds that.
pub(crate) async fn serve(listener: TcpListener, router: Router, refused: &IntCounterVec, stop: impl Future) {
    let limit = Limit::of_descriptors(raise_descriptors());
    let open = Arc::new(Open::default());
    let graceful = GracefulShutdown::new();
    let mut log = Log::default();
    let mut stop = std::pin::pin!(stop);
    loop {
        let accepted = tokio::select! {
            accepted = listener.accept() => accepted,
            _ = &mut stop => break,
        };
        match accepted {
            Ok((stream, peer)) => match Place::take(&open, source(peer.ip()), limit) {
                Ok(place) => drop(tokio::spawn(connection(stream, router.clone(), place, graceful.watcher()))),
                Err(full) => {
                    refused.with_label_values(&[full.as_str()]).inc();
                    log.refused(full, peer.ip(), limit);
                }
            },
            Err(error) => {
                tracing::warn!(%error, "a connection was not accepted; more open descriptors (LimitNOFILE) may help");
                tokio::time::sleep(ACCEPT_AGAIN).await;
            }
        }
    }
    drop(listener);
    graceful.shutdown().await;
}

async fn connection(stream: TcpStream, router: Router, _place: Place, watcher: hyper_util::server::graceful::Watcher) {
    if let Err(error) = prepare(&stream) {
        tracing::debug!(%error, "a connection's options");
    }
    let service = TowerToHyperService::new(router.map_request(|request: hyper::Request<_>| request.map(Body::new)));
    let mut http = http1::Builder::new();
    // Runs from the end of the last answer on, so that it bounds idleness as well.
    http.timer(TokioTimer::new()).header_read_timeout(HEADER_TIMEOUT).max_buf_size(HEADER_BYTES);
    if let Err(error) = watcher.watch(http.serve_connection(TokioIo::new(stream), service)).await {
        tracing::debug!(%error, "a connection ended");
    }
}

/// A peer that takes nothing, dead or not, is given up by the kernel. Answers are small: none waits for the next.
fn prepare(stream: &TcpStream) -> std::io::Result<()> {
    stream.set_nodelay(true)?;
    let socket = SockRef::from(stream);
    socket.set_tcp_keepalive(&TcpKeepalive::new().with_time(UNREAD_TIMEOUT))?;
    socket.set_tcp_user_timeout(Some(UNREAD_TIMEOUT))
}

/// Raises the soft limit of descriptors as far as this user may; how many there are then.
fn raise_descriptors() -> u64 {
    let raised = getrlimit(Resource::RLIMIT_NOFILE).and_then(|(soft, hard)| {
        let wanted = soft.max(hard.min(DESCRIPTORS));
        setrlimit(Resource::RLIMIT_NOFILE, wanted, hard).map(|()| wanted)
    });
    raised.unwrap_or_else(|error| {
        tracing::warn!(%error, "the limit of open descriptors was not raised");
        getrlimit(Resource::RLIMIT_NOFILE).map_or(1024, |(soft, _)| soft)
    })
}

/// Most connections.
#[derive(Debug, Clone, Copy, PartialEq)]
struct Limit {
    overall: usize,
    /// A source may be a whole cluster behind one address, or a lab on one machine, so it is as large as it can be
    /// while another source is still answered.
    per_source: usize,
}

impl Limit {
    fn of_descriptors(descriptors: u64) -> Self {
        let overall = usize::try_from(descriptors.min(DESCRIPTORS).saturating_sub(OTHER_DESCRIPTORS)).unwrap_or(0);
        let overall = overall.max(2);
        Self { overall, per_source: overall / 2 }
    }
}

/// What a connection is counted under: of IPv6 the /64, which one host has to itself.
fn source(ip: IpAddr) -> IpAddr {
    match ip.to_canonical() {
        IpAddr::V6(v6) => Ipv6Addr::from_bits(v6.to_bits() >> 64 << 64).into(),
        v4 => v4,
    }
}

/// Open connections by source.
#[derive(Debug, Default)]
struct Open(Mutex<HashMap<IpAddr, usize>>);

flexcomm_domain::words! {
    /// Which limit a connection is beyond.
    enum Full {
        Source = "source",
        Overall = "overall",
    }
}

/// A connection among the open ones, until dropped.
#[derive(Debug)]
struct Place {
    open: Arc<Open>,
    source: IpAddr,
}

impl Place {
    fn take(open: &Arc<Open>, source: IpAddr, limit: Limit) -> Result<Self, Full> {
        let mut counts = open.0.lock();
        if counts.get(&source).is_some_and(|n| *n >= limit.per_source) {
            return Err(Full::Source);
        }
        if counts.values().sum::<usize>() >= limit.overall {
            return Err(Full::Overall);
        }
        *counts.entry(source).or_default() += 1;
        Ok(Self { open: open.clone(), source })
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        let mut counts = self.open.0.lock();
        if let Some(count) = counts.get_mut(&self.source) {
            *count -= 1;
            if *count == 0 {
                counts.remove(&self.source);
            }
        }
    }
}

/// When a refusal was last logged.
#[derive(Debug, Default)]
struct Log(Option<Instant>);

impl Log {
    fn refused(&mut self, full: Full, source: IpAddr, limit: Limit) {
        if self.0.is_some_and(|last| last.elapsed() < LOG_EVERY) {
            return;
        }
        self.0 = Some(Instant::now());
        let Limit { overall, per_source } = limit;
        let which = full.as_str();
        tracing::warn!(%source, which, overall, per_source, "too many connections: some are closed at once");
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_source_leaves_room_for_another_and_gives_it_back() {
        let limit = Limit::of_descriptors(OTHER_DESCRIPTORS + 6);
        assert_eq!(limit, Limit { overall: 6, per_source: 3 });
        let open = Arc::new(Open::default());
        let take = |ip: &str| Place::take(&open, source(ip.parse().unwrap()), limit);
        let mut greedy: Vec<_> = (0..3).map(|_| take("127.0.0.1").unwrap()).collect();
        assert_eq!(take("::ffff:127.0.0.1").unwrap_err(), Full::Source);
        let _one_host = [take("2001:db8::1").unwrap(), take("2001:db8::2").unwrap(), take("2001:db8::3").unwrap()];
        assert_eq!(take("2001:db8::4").unwrap_err(), Full::Source);
        assert_eq!(take("10.0.0.1").unwrap_err(), Full::Overall);
        greedy.pop();
        drop(take("10.0.0.1").unwrap());
        greedy.clear();
        assert_eq!(open.0.lock().len(), 1, "sources without connections are forgotten");
    }

    #[test]
    fn few_descriptors_are_still_some_connections() {
        assert_eq!(Limit::of_descriptors(0), Limit { overall: 2, per_source: 1 });
        let most = Limit::of_descriptors(u64::MAX);
        assert_eq!(most, Limit::of_descriptors(DESCRIPTORS));
    }
}
