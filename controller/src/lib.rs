//! The service: API, store, gather-decide-check-apply-record, metrics, page.
//!
//! [`serve`] runs it until told to stop. The store is the truth: handlers write what agents report, the loop
//! (`cycle`) reads it, decides and writes again, `publish` tells agents what the store says. Whatever is in
//! memory is filled again within a second of a restart, so being killed is the normal case. [`Embedded`] is the same
//! without sockets, under a clock that its caller moves.

mod api;
mod app;
mod clock;
pub mod config;
mod cycle;
mod doubts;
mod echoes;
mod embedded;
mod grants;
mod intervals;
mod limits;
mod links;
mod measure;
mod memories;
mod metrics;
mod missing;
mod policy;
mod presence;
mod publish;
pub mod replay;
mod reported;
mod reports;
mod server;
mod store;

pub use config::{Config, ConfigError, RawConfig};
pub use cycle::CycleError;
pub use embedded::{AskedTrial, Embedded, Look, MadeDecision, Predicted};
pub use publish::Published;
pub use store::StoreError;

use app::App;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;
use tokio::net::TcpListener;

/// How long open requests may take when the process ends.
const FLUSH_TIME: Duration = Duration::from_secs(5);

/// Why the service ended. Completes "failed to ...".
#[derive(Debug, thiserror::Error)]
pub enum ServeError {
    /// The store cannot be opened.
    #[error(transparent)]
    Store(#[from] StoreError),
    /// The token's file cannot be made.
    #[error("read the configuration: {0}")]
    Config(#[from] ConfigError),
    /// The address cannot be had.
    #[error("listen on {addr}: {source}; see --listen")]
    Listen {
        /// Which.
        addr: SocketAddr,
        /// Why.
        source: std::io::Error,
    },
    /// The socket does not tell its address.
    #[error("read the listening address: {0}")]
    Address(std::io::Error),
    /// No thread that the store's futures run on.
    #[error("start the runtime: {0}")]
    Runtime(std::io::Error),
    /// The first pass of the decision loop.
    #[error(transparent)]
    Cycle(#[from] CycleError),
}

/// Opens the store, listens, and serves until `shutdown` is ready.
pub async fn serve(config: Config, shutdown: impl Future<Output = ()> + Send + 'static) -> Result<(), ServeError> {
    let addr = config.listen;
    let listener = TcpListener::bind(addr).await.map_err(|source| ServeError::Listen { addr, source })?;
    serve_on(listener, config, shutdown).await
}

/// Like [`serve`], on a socket that listens already (a port of the system's choice, in tests).
pub async fn serve_on(
    listener: TcpListener,
    config: Config,
    shutdown: impl Future<Output = ()> + Send + 'static,
) -> Result<(), ServeError> {
    let app = Arc::new(App::open(config).await?);
    let addr = listener.local_addr().map_err(ServeError::Address)?;
    tracing::info!(%addr, db = %app.config.db.display(), scenario = app.config.scenario, "the controller is up");
    let cycle = tokio::spawn(cycle::run(app.clone()));
    let health = tokio::spawn(api::health::watch(app.clone()));
    let stop = app.clone();
    let mut stopping = app.stopping.subscribe();
    let stopped = async move {
        shutdown.await;
        let _ = stop.stopping.send(true);
    };
    let server = server::serve(listener, api::router(app.clone()), &app.counters.refused_connections, stopped);
    let late = async {
        let _ = stopping.wait_for(|stop| *stop).await;
        tokio::time::sleep(FLUSH_TIME).await;
    };
    tokio::select! {
        () = server => {}
        () = late => {}
    }
    let _ = app.stopping.send(true);
    let _ = cycle.await;
    let _ = health.await;
    app.store.close().await;
    tracing::info!("the controller has stopped; what it decided and learned is stored");
    Ok(())
}
