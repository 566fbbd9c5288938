//! Liveness: the process answers. Readiness: the store can be read and written.

use axum::extract::State;
use std::sync::Arc;

use super::problem::ApiError;
use crate::app::App;

pub(super) async fn live() -> &'static str {
    "ok\n"
}

pub(super) async fn ready(State(app): State<Arc<App>>) -> Result<&'static str, ApiError> {
    app.store.ready().await.map_err(|e| ApiError::Unavailable(format!("the store is not ready: failed to {e}")))?;
    Ok("ready\n")
}
