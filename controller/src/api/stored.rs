//! Endpoints that answer what a query of the store gives, as it is: a line of the router is all they need.

use axum::Json;
use axum::extract::State;
use flexcomm_domain::JobId;
use serde::Serialize;
use std::pin::Pin;
use std::sync::Arc;

use super::jobs::{Page, find};
use super::problem::{ApiError, Path, Query};
use crate::app::App;
use crate::limits::PAGE_MOST;
use crate::store::{Store, StoreError};

type Running<'a, T, E> = Pin<Box<dyn Future<Output = Result<T, E>> + Send + 'a>>;
type Answer<T> = Running<'static, Json<T>, ApiError>;

/// The answer to a query.
pub(super) fn stored<T: Serialize + 'static>(
    query: for<'a> fn(&'a Store) -> Running<'a, T, StoreError>,
) -> impl Fn(State<Arc<App>>) -> Answer<T> + Clone {
    move |State(app)| Box::pin(async move { Ok(Json(query(&app.store).await?)) })
}

/// The answer to a query about a job that is known, of at most `?limit=` rows.
pub(super) fn of_job<T: Serialize + 'static>(
    query: for<'a> fn(&'a Store, &'a JobId, u32) -> Running<'a, T, StoreError>,
) -> impl Fn(State<Arc<App>>, Path<JobId>, Query<Page>) -> Answer<T> + Clone {
    move |State(app), Path(job), Query(page)| {
        Box::pin(async move {
            find(&app, &job).await?;
            Ok(Json(query(&app.store, &job, page.limit(PAGE_MOST)).await?))
        })
    }
}
