//! Bodies of requests: bounded each by itself and all together, read off the tasks that answer others.

use axum::Json;
use axum::extract::rejection::JsonRejection;
use axum::extract::{FromRequest, Request};
use axum::http::{HeaderMap, header};
use futures_util::StreamExt;
use serde::Deserialize;
use serde::de::DeserializeOwned;
use std::sync::Arc;
use tokio::sync::{OwnedSemaphorePermit, Semaphore};

use super::problem::ApiError;
use crate::app::App;
use crate::limits::{BODY_BUDGET, MAX_SMALL_BODY};

/// A body that has arrived, with its share of the budget.
pub(super) struct Held {
    bytes: Vec<u8>,
    budget: Option<OwnedSemaphorePermit>,
}

/// Reads a JSON body of at most `most` bytes. What it has above [`MAX_SMALL_BODY`] is taken from the budget as it arrives,
/// not as it is announced.
pub(super) async fn read(app: &App, request: Request, most: usize) -> Result<Held, ApiError> {
    if !is_json(request.headers()) {
        return Err(ApiError::MediaType("expected the header Content-Type: application/json".to_owned()));
    }
    let announced = request.headers().get(header::CONTENT_LENGTH).and_then(|value| value.to_str().ok()?.parse().ok());
    if announced.is_some_and(|bytes: usize| bytes > most) {
        return Err(ApiError::TooLarge(most));
    }
    let mut chunks = request.into_body().into_data_stream();
    let mut held = Held { bytes: Vec::new(), budget: None };
    while let Some(chunk) = chunks.next().await {
        let chunk = chunk.map_err(|e| ApiError::BadRequest(format!("the body broke off: {e}")))?;
        if held.bytes.len() + chunk.len() > most {
            return Err(ApiError::TooLarge(most));
        }
        held.take(&app.bodies, &chunk)?;
    }
    Ok(held)
}

fn is_json(headers: &HeaderMap) -> bool {
    let kind = headers.get(header::CONTENT_TYPE).and_then(|value| value.to_str().ok()).unwrap_or_default();
    let kind = kind.split(';').next().unwrap_or_default().trim().to_ascii_lowercase();
    kind == "application/json" || kind.starts_with("application/") && kind.ends_with("+json")
}

impl Held {
    fn take(&mut self, bodies: &Arc<Semaphore>, chunk: &[u8]) -> Result<(), ApiError> {
        let charged = |bytes: usize| bytes.saturating_sub(MAX_SMALL_BODY);
        let more = charged(self.bytes.len() + chunk.len()) - charged(self.bytes.len());
        if more > 0 {
            let more = u32::try_from(more).unwrap_or(u32::MAX);
            let full = |_| {
                let why = "large requests in arrival hold all of the";
                ApiError::Unavailable(format!("{why} {BODY_BUDGET} bytes there are for their bodies; send it again"))
            };
            let permit = bodies.clone().try_acquire_many_owned(more).map_err(full)?;
            match &mut self.budget {
                Some(budget) => budget.merge(permit),
                None => self.budget = Some(permit),
            }
        }
        self.bytes.extend_from_slice(chunk);
        Ok(())
    }

    /// Reads it where it keeps no other request waiting.
    pub(super) async fn decode<T: Send + 'static>(
        self,
        read: impl FnOnce(&[u8]) -> Result<T, ApiError> + Send + 'static,
    ) -> Result<T, ApiError> {
        if self.bytes.len() <= MAX_SMALL_BODY {
            return read(&self.bytes);
        }
        let read = move || {
            let Self { bytes, budget } = self;
            let outcome = read(&bytes);
            drop((bytes, budget));
            outcome
        };
        let done = tokio::task::spawn_blocking(read).await;
        done.unwrap_or_else(|e| Err(ApiError::Internal(format!("reading the body ended early: {e}"))))
    }
}

/// Values that borrow from the body.
pub(super) fn json<'a, T: Deserialize<'a>>(bytes: &'a [u8]) -> Result<T, ApiError> {
    serde_json::from_slice(bytes).map_err(|e| match e.classify() {
        serde_json::error::Category::Data => ApiError::Unprocessable(format!("the body is not what is read here: {e}")),
        _ => ApiError::BadRequest(format!("the body is not JSON: {e}")),
    })
}

/// A small JSON body; what it is refused for is a problem.
pub struct Body<T>(pub T);

impl<T: DeserializeOwned> FromRequest<Arc<App>> for Body<T> {
    type Rejection = ApiError;

    async fn from_request(request: Request, app: &Arc<App>) -> Result<Self, ApiError> {
        let held = read(app, request, MAX_SMALL_BODY).await?;
        let read: Result<Json<T>, JsonRejection> = Json::from_bytes(&held.bytes);
        Ok(Self(read?.0))
    }
}
