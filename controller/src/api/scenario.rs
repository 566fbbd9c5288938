//! What the network should look like: for the lab, and only when the configuration allows it.

use axum::Json;
use axum::extract::State;
use axum::http::StatusCode;
use flexcomm_domain::NodeName;
use flexcomm_wire::api::{ScenarioSet, ScenarioView};

use super::body::Body;
use super::problem::ApiError;
use super::{Answer, Shared};
use crate::app::App;
use crate::limits::{MAX_NODES, MAX_TEXT};
use crate::publish::{publish, shape_order};

fn allowed(app: &App) -> Result<(), ApiError> {
    if app.config.scenario {
        return Ok(());
    }
    let remedy = "the controller's configuration has scenario = false: it does not order agents to shape links";
    Err(ApiError::Conflict(remedy.to_owned()))
}

fn check(set: &ScenarioSet) -> Result<(), ApiError> {
    shape_order(0, set).check().map_err(|e| ApiError::Unprocessable(e.to_string()))?;
    if set.label.chars().count() > MAX_TEXT {
        return Err(ApiError::Unprocessable(format!("the label has more than {MAX_TEXT} characters")));
    }
    if set.nodes.as_ref().is_some_and(|n| n.len() > MAX_NODES) {
        return Err(ApiError::Unprocessable(format!("more than {MAX_NODES} nodes")));
    }
    Ok(())
}

/// Whether anybody is there to follow: every node that is named is known, and one of those asked may shape.
async fn followed(app: &App, set: &ScenarioSet) -> Result<(), ApiError> {
    let known = app.store.nodes().await?;
    let named = |node: &NodeName| set.nodes.as_ref().is_none_or(|nodes| nodes.contains(node));
    let unknown: Vec<&str> =
        set.nodes.iter().flatten().filter(|n| known.iter().all(|k| k.node != **n)).map(NodeName::as_str).collect();
    if !unknown.is_empty() {
        return Err(ApiError::Unprocessable(format!("nodes that never registered: {}", unknown.join(", "))));
    }
    if known.iter().any(|k| k.may_shape && named(&k.node)) {
        return Ok(());
    }
    let whom = if set.nodes.is_some() { "none of these nodes" } else { "no registered node" };
    let remedy = "an agent's configuration needs allow = true in [shaping]";
    Err(ApiError::Conflict(format!("{whom} may shape its links: {remedy}")))
}

async fn view(app: &App) -> Result<ScenarioView, ApiError> {
    let Some(row) = app.store.scenario().await? else {
        return Ok(ScenarioView { id: 0, set: None, in_force: Vec::new(), refused: Vec::new() });
    };
    let (mut in_force, mut refused) = (Vec::new(), Vec::new());
    for report in app.store.shape_reports().await?.into_iter().filter(|r| r.id == row.id) {
        match report.error {
            None => in_force.push(report.node),
            Some(why) => refused.push((report.node, why)),
        }
    }
    Ok(ScenarioView { id: row.id, set: row.wanted, in_force, refused })
}

pub(super) async fn get(State(app): Shared) -> Answer<ScenarioView> {
    Ok(Json(view(&app).await?))
}

pub(super) async fn set(State(app): Shared, Body(set): Body<ScenarioSet>) -> Answer<ScenarioView> {
    allowed(&app)?;
    check(&set)?;
    followed(&app, &set).await?;
    let id = app.store.put_scenario(Some(&set), app.clock.now()).await?;
    tracing::info!(id, label = set.label, "scenario set");
    publish(&app).await?;
    app.wake.notify_one();
    Ok(Json(view(&app).await?))
}

pub(super) async fn end(State(app): Shared) -> Result<StatusCode, ApiError> {
    allowed(&app)?;
    app.store.put_scenario(None, app.clock.now()).await?;
    publish(&app).await?;
    app.wake.notify_one();
    Ok(StatusCode::NO_CONTENT)
}
