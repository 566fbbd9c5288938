//! REST under `/api/v1`, metrics, health and the page. The router is the table of contents, by audience.

pub(crate) mod agents;
pub mod auth;
mod body;
pub(crate) mod health;
pub mod host;
mod jobs;
mod network;
mod openapi;
mod page;
mod problem;
mod scenario;
mod scrape;
mod stream;
mod views;

pub use problem::ApiError;

use axum::extract::{Request, State};
use axum::http::{HeaderName, HeaderValue, header};
use axum::middleware::{Next, from_fn, from_fn_with_state};
use axum::response::{IntoResponse, Response};
use axum::routing::{delete, get, post, put};
use axum::{Json, Router};
use jobs::{Job, Page};
use problem::Query;
use std::sync::Arc;
use tower_http::set_header::SetResponseHeaderLayer;

use crate::app::App;
use crate::limits::{PAGE_MOST, REQUEST_TIMEOUT};
use crate::store::StoreError;

/// What the page may load: only what comes from here.
const CONTENT_POLICY: &str = "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; \
    connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'";

/// What every handler is given.
type Shared = State<Arc<App>>;

/// What most of them answer.
type Answer<T> = Result<Json<T>, ApiError>;

/// Answers what a query of the store gives, as it is: then a line of the router is all that an endpoint needs.
fn answer<T>(found: Result<T, StoreError>) -> Answer<T> {
    Ok(Json(found?))
}

/// Everything that is served.
pub fn router(app: Arc<App>) -> Router {
    let token = || from_fn_with_state(app.clone(), auth::require);

    // Agents, with the cluster's token.
    let agents = Router::new()
        .route("/api/v1/agents/register", post(agents::register))
        .route("/api/v1/agents/{node}/heartbeat", post(agents::heartbeat))
        .route("/api/v1/agents/{node}/reports", post(agents::reports))
        .route("/api/v1/agents/{node}/orders", get(agents::orders))
        .route_layer(token());

    // Operators and the lab, with the cluster's token.
    let operators = Router::new()
        .route("/api/v1/jobs/{job}/trials", post(jobs::ask_trial))
        .route("/api/v1/jobs/{job}", delete(jobs::delete))
        .route("/api/v1/jobs/{job}/policy", put(jobs::set_policy))
        .route("/api/v1/jobs/{job}/policy", delete(jobs::reset_policy))
        .route("/api/v1/scenario", put(scenario::set))
        .route("/api/v1/scenario", delete(scenario::end))
        .route("/api/v1/nodes/{node}", delete(network::forget))
        .route_layer(token());

    // People and tools that only look.
    let readers = Router::new()
        .route("/api/v1/nodes", get(network::nodes))
        .route("/api/v1/links", get(network::links))
        .route("/api/v1/links/{from}/{to}/history", get(network::link_history))
        .route("/api/v1/paths", get(|State(app): Shared| async move { answer(app.store.paths().await) }))
        .route("/api/v1/jobs", get(jobs::list))
        .route("/api/v1/jobs/{job}", get(jobs::one))
        .route("/api/v1/jobs/{job}/policy", get(jobs::policy))
        .route("/api/v1/jobs/{job}/decision", get(jobs::decision))
        .route("/api/v1/jobs/{job}/history", get(jobs::history))
        .route("/api/v1/jobs/{job}/snapshots", get(jobs::snapshots))
        .route("/api/v1/jobs/{job}/runs", get(jobs::runs))
        .route("/api/v1/jobs/{job}/report", get(jobs::report))
        .route("/api/v1/jobs/{job}/trials", get(jobs::trials))
        .route("/api/v1/jobs/{job}/experiments", get(jobs::experiments))
        .route("/api/v1/jobs/{job}/intervals", get(jobs::intervals))
        .route(
            "/api/v1/jobs/{job}/progress",
            get(|State(app): Shared, Query(page): Query<Page>, Job(row): Job| async move {
                answer(app.store.progress(&row.job, page.limit(PAGE_MOST)).await)
            }),
        )
        .route("/api/v1/scenario", get(scenario::get))
        .route("/api/v1/rejected-reports", get(|State(app): Shared| async move { answer(app.store.rejected().await) }))
        .route("/api/v1/openapi.json", get(openapi::document));

    // Machines that watch over the service, and the page.
    let watchers = Router::new()
        .route("/metrics", get(scrape::metrics))
        .route("/healthz", get(health::live))
        .route("/readyz", get(health::ready))
        .route("/", get(page::html))
        .route("/page.css", get(page::css))
        .route("/page.js", get(page::script))
        .route("/charts.js", get(page::charts));

    let quick = agents.merge(operators).merge(readers).merge(watchers).layer(from_fn(in_time));

    // A stream takes as long as it likes.
    let stream = Router::new().route("/api/v1/agents/{node}/stream", get(stream::orders)).route_layer(token());

    quick
        .merge(stream)
        .method_not_allowed_fallback(|| async { ApiError::Method })
        .fallback(|request: Request| async move {
            ApiError::NotFound(format!("nothing is served at {}; see GET /api/v1/openapi.json", request.uri().path()))
        })
        .layer(from_fn_with_state(app.clone(), host::known))
        .layer(from_fn_with_state(app.clone(), count_refused))
        .layer(header_layer(header::CONTENT_SECURITY_POLICY, CONTENT_POLICY))
        .layer(header_layer(header::X_CONTENT_TYPE_OPTIONS, "nosniff"))
        .layer(header_layer(header::CACHE_CONTROL, "no-store"))
        .with_state(app)
}

fn header_layer(name: HeaderName, value: &'static str) -> SetResponseHeaderLayer<HeaderValue> {
    SetResponseHeaderLayer::if_not_present(name, HeaderValue::from_static(value))
}

async fn count_refused(State(app): State<Arc<App>>, request: Request, next: Next) -> Response {
    let response = next.run(request).await;
    if let Some(problem::Kind(kind)) = response.extensions().get() {
        app.counters.refused_requests.with_label_values(&[kind]).inc();
    }
    response
}

async fn in_time(request: Request, next: Next) -> Response {
    let limit = REQUEST_TIMEOUT.as_secs();
    tokio::time::timeout(REQUEST_TIMEOUT, next.run(request))
        .await
        .unwrap_or_else(|_| ApiError::Unavailable(format!("the answer took longer than {limit} s")).into_response())
}
