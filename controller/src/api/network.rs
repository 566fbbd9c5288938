//! Nodes, links, paths, fitted coefficients, and what was rejected.

use axum::Json;
use axum::extract::State;
use axum::http::StatusCode;
use flexcomm_domain::NodeName;
use flexcomm_wire::api::{LinkView, NodeView};
use serde::Deserialize;
use std::sync::Arc;

use super::problem::{ApiError, Path, Query};
use super::views;
use crate::app::App;
use crate::limits::PAGE_MOST;
use crate::links::merge;
use crate::store::LinkPoint;

/// Every node as the API shows it.
pub(super) async fn all_nodes(app: &App) -> Result<Vec<NodeView>, ApiError> {
    let now = app.clock.now();
    let rows = app.store.nodes().await?;
    Ok(rows
        .into_iter()
        .map(|row| (app.presence.get(&row.node, now), row))
        .map(|(s, row)| views::node(row, s, now))
        .collect())
}

/// Every link as the API shows it.
pub(super) async fn all_links(app: &App) -> Result<Vec<LinkView>, ApiError> {
    let merged =
        merge(&app.store.links().await?, &app.store.link_tests().await?, app.clock.now(), app.time_constant_s());
    Ok(merged.into_values().collect())
}

pub(super) async fn nodes(State(app): State<Arc<App>>) -> Result<Json<Vec<NodeView>>, ApiError> {
    Ok(Json(all_nodes(&app).await?))
}

pub(super) async fn links(State(app): State<Arc<App>>) -> Result<Json<Vec<LinkView>>, ApiError> {
    Ok(Json(all_links(&app).await?))
}

/// `?limit=`.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Limit {
    limit: Option<u32>,
}

pub(super) async fn link_history(
    State(app): State<Arc<App>>,
    Path((from, to)): Path<(NodeName, NodeName)>,
    Query(page): Query<Limit>,
) -> Result<Json<Vec<LinkPoint>>, ApiError> {
    for node in [&from, &to] {
        if app.store.node(node).await?.is_none() {
            return Err(ApiError::NotFound(format!("node {node} never registered")));
        }
    }
    Ok(Json(app.store.link_history(&from, &to, page.limit.unwrap_or(PAGE_MOST).clamp(1, PAGE_MOST)).await?))
}

pub(super) async fn coefficients(State(app): State<Arc<App>>) -> Result<Json<serde_json::Value>, ApiError> {
    let book = app.store.coefficients().await?;
    let entry = |(backend, collective, fit): (&str, flexcomm_domain::Collective, &flexcomm_optimizer::Fit)| {
        let c = fit.coefficients();
        serde_json::json!({
            "backend": backend, "collective": collective, "fixed_s": c.fixed_s, "a": c.a, "b": c.b,
            "beta_seen_s": c.beta_seen_s,
            "confidence": c.confidence, "median_error": c.median_error, "samples": c.samples,
        })
    };
    Ok(Json(book.entries().map(entry).collect()))
}

/// Forgets a node that is gone, with its links.
pub(super) async fn forget(State(app): State<Arc<App>>, Path(node): Path<NodeName>) -> Result<StatusCode, ApiError> {
    if app.presence.get(&node, app.clock.now()).is_some_and(|(_, live)| live) {
        return Err(ApiError::Conflict(format!("the agent of node {node} is alive; stop it first")));
    }
    if !app.store.forget_node(&node).await? {
        return Err(ApiError::NotFound(format!("node {node} never registered")));
    }
    app.presence.forget(&node);
    app.scheduler().forget(&node);
    app.publisher.forget(&node);
    app.wake.notify_one();
    Ok(StatusCode::NO_CONTENT)
}
