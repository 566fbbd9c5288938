//! Readiness: the store can be read and written. Liveness: a restart would not help. Where nothing can be written
//! because the disk is full or another process has the lock, the controller is not ready, but alive.

use axum::extract::State;
use std::sync::Arc;
use std::time::Duration;

use super::Shared;
use super::problem::ApiError;
use crate::app::App;

/// How often a writer whose last write failed is looked at.
const LOOK_EVERY: Duration = Duration::from_secs(1);

/// Keeps what [`live`] answers, until the app stops.
pub(crate) async fn watch(app: Arc<App>) {
    let mut stopping = app.stopping.subscribe();
    loop {
        tokio::select! {
            () = tokio::time::sleep(LOOK_EVERY) => app.store.look().await,
            _ = stopping.changed() => return,
        }
    }
}

pub(super) async fn live(State(app): Shared) -> Result<&'static str, ApiError> {
    if app.store.is_stuck() {
        let stuck = "writes fail although a fresh connection to the database could write; restart the controller";
        return Err(ApiError::Unavailable(stuck.to_owned()));
    }
    Ok("ok\n")
}

pub(super) async fn ready(State(app): Shared) -> Result<&'static str, ApiError> {
    app.store.ready().await.map_err(|e| ApiError::Unavailable(format!("the store is not ready: failed to {e}")))?;
    Ok("ready\n")
}
