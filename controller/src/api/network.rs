//! Nodes, links, paths, and what was rejected.

use axum::Json;
use axum::extract::State;
use axum::http::StatusCode;
use flexcomm_domain::NodeName;
use flexcomm_wire::api::{LinkView, NodeView};
use serde::Deserialize;

use super::problem::{ApiError, Path, Query};
use super::{Answer, Shared, views};
use crate::app::App;
use crate::limits::PAGE_MOST;
use crate::links::merge;
use crate::store::LinkPoint;

/// Every node as the API shows it.
pub(super) async fn all_nodes(app: &App) -> Result<Vec<NodeView>, ApiError> {
    let now = app.clock.now();
    let rows = app.store.nodes().await?.into_iter();
    Ok(rows.map(|row| (app.presence.get(&row.node, now), row)).map(|(s, row)| views::node(row, s, now)).collect())
}

/// Every link as the API shows it.
pub(super) async fn all_links(app: &App) -> Result<Vec<LinkView>, ApiError> {
    let merged = merge(&app.store.links().await?, &app.store.link_tests().await?, app.clock.now());
    Ok(merged.into_values().collect())
}

pub(super) async fn nodes(State(app): Shared) -> Answer<Vec<NodeView>> {
    Ok(Json(all_nodes(&app).await?))
}

pub(super) async fn links(State(app): Shared) -> Answer<Vec<LinkView>> {
    Ok(Json(all_links(&app).await?))
}

/// `?limit=`.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Limit {
    #[serde(default, deserialize_with = "super::jobs::entries")]
    limit: Option<u32>,
}

fn never_registered(node: &NodeName) -> ApiError {
    ApiError::NotFound(format!("node {node} never registered"))
}

/// Refuses a node that never registered.
pub(super) async fn known(app: &App, node: &NodeName) -> Result<(), ApiError> {
    app.store.node(node).await?.map(|_| ()).ok_or_else(|| never_registered(node))
}

pub(super) async fn link_history(
    State(app): Shared,
    Path((from, to)): Path<(NodeName, NodeName)>,
    Query(page): Query<Limit>,
) -> Answer<Vec<LinkPoint>> {
    known(&app, &from).await?;
    known(&app, &to).await?;
    Ok(Json(app.store.link_history(&from, &to, page.limit.unwrap_or(PAGE_MOST).min(PAGE_MOST)).await?))
}

/// Forgets a node that is gone, with its links.
pub(super) async fn forget(State(app): Shared, Path(node): Path<NodeName>) -> Result<StatusCode, ApiError> {
    if app.presence.get(&node, app.clock.now()).is_some_and(|(_, live)| live) {
        return Err(ApiError::Conflict(format!("the agent of node {node} is alive; stop it first")));
    }
    if !app.store.forget_node(&node).await? {
        return Err(never_registered(&node));
    }
    app.presence.forget(&node);
    app.scheduler.lock().forget(&node);
    app.publisher.forget(&node);
    app.wake.notify_one();
    Ok(StatusCode::NO_CONTENT)
}
