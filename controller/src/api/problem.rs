//! Every error of the API as RFC 9457 problem JSON.

use axum::Json;
use axum::extract::FromRequestParts;
use axum::extract::path::ErrorKind;
use axum::extract::rejection::{JsonRejection, PathRejection, QueryRejection};
use axum::http::{HeaderValue, StatusCode, header};
use axum::response::{IntoResponse, Response};
use flexcomm_wire::api::Problem;
use std::error::Error;

use crate::store::StoreError;

/// Longest detail: what was sent may be quoted in it.
const MAX_DETAIL: usize = 2000;

/// Beside a response that is a problem: its kind, for the metric.
#[derive(Debug, Clone, Copy)]
pub struct Kind(pub &'static str);

/// Why a request was refused.
#[derive(Debug)]
pub enum ApiError {
    /// 400: not what the endpoint reads.
    BadRequest(String),
    /// 401.
    Unauthorized(&'static str),
    /// 404: no such thing.
    NotFound(String),
    /// 405.
    Method,
    /// 409: at odds with what is there.
    Conflict(String),
    /// 421: the request names a host that this controller is not known as.
    Host(String),
    /// 413: above this many bytes.
    TooLarge(usize),
    /// 415.
    MediaType(String),
    /// 422: well-formed, but a value makes no sense.
    Unprocessable(String),
    /// 503: later, please. The detail says why.
    Unavailable(String),
    /// 500: a fault of ours.
    Internal(String),
}

impl From<StoreError> for ApiError {
    fn from(error: StoreError) -> Self {
        tracing::warn!(%error, "store");
        match error {
            StoreError::Sql { .. } => Self::Unavailable(error.to_string()),
            StoreError::Replaced { .. } => Self::Conflict(error.to_string()),
            StoreError::Stored { .. }
            | StoreError::Damaged { .. }
            | StoreError::Fenced { .. }
            | StoreError::Unusable { .. }
            | StoreError::Held { .. }
            | StoreError::Lock { .. } => Self::Internal(error.to_string()),
        }
    }
}

/// What a problem is made of.
struct Parts {
    status: StatusCode,
    kind: &'static str,
    title: &'static str,
    detail: String,
}

impl Parts {
    fn new(status: StatusCode, kind: &'static str, title: &'static str, detail: String) -> Self {
        Self { status, kind, title, detail }
    }
}

impl ApiError {
    /// For a caller without HTTP.
    pub fn words(self) -> String {
        let Parts { title, detail, .. } = self.parts();
        format!("{title}: {detail}")
    }

    fn parts(self) -> Parts {
        match self {
            Self::BadRequest(d) => Parts::new(StatusCode::BAD_REQUEST, "bad-request", "The request cannot be read", d),
            Self::Unauthorized(d) => {
                Parts::new(StatusCode::UNAUTHORIZED, "unauthorized", "The cluster's token is needed", d.to_owned())
            }
            Self::NotFound(d) => Parts::new(StatusCode::NOT_FOUND, "not-found", "There is no such thing", d),
            Self::Method => Parts::new(
                StatusCode::METHOD_NOT_ALLOWED,
                "method-not-allowed",
                "This address takes another method",
                "see GET /api/v1/openapi.json".to_owned(),
            ),
            Self::Conflict(d) => {
                Parts::new(StatusCode::CONFLICT, "conflict", "The request is at odds with what is there", d)
            }
            Self::Host(host) => Parts::new(
                StatusCode::MISDIRECTED_REQUEST,
                "host",
                "The controller is not known by this name",
                format!(
                    "the request is for the host {host:?}; name the controller by its IP address, or add that name to \
                     allowed_hosts in its configuration (names that nobody configured may be another site's, which \
                     would read what is served here)"
                ),
            ),
            Self::TooLarge(most) => Parts::new(
                StatusCode::PAYLOAD_TOO_LARGE,
                "too-large",
                "The body is too large",
                format!("a body here has at most {most} bytes; send less at once"),
            ),
            Self::MediaType(d) => Parts::new(StatusCode::UNSUPPORTED_MEDIA_TYPE, "media-type", "Not JSON", d),
            Self::Unprocessable(d) => {
                Parts::new(StatusCode::UNPROCESSABLE_ENTITY, "invalid", "A value is not valid", d)
            }
            Self::Unavailable(d) => {
                Parts::new(StatusCode::SERVICE_UNAVAILABLE, "unavailable", "Try again in a moment", d)
            }
            Self::Internal(d) => {
                Parts::new(StatusCode::INTERNAL_SERVER_ERROR, "internal", "A fault of the controller", d)
            }
        }
    }
}

impl IntoResponse for ApiError {
    fn into_response(self) -> Response {
        let Parts { status, kind, title, detail } = self.parts();
        let detail: String = detail.chars().take(MAX_DETAIL).collect();
        let problem = Problem {
            kind: format!("urn:flexcomm:problem:{kind}"),
            title: title.to_owned(),
            status: status.as_u16(),
            detail,
        };
        let mut response = (status, Json(problem)).into_response();
        response.extensions_mut().insert(Kind(kind));
        let headers = response.headers_mut();
        headers.insert(header::CONTENT_TYPE, HeaderValue::from_static("application/problem+json"));
        if status == StatusCode::SERVICE_UNAVAILABLE {
            headers.insert(header::RETRY_AFTER, HeaderValue::from_static("1"));
        }
        if status == StatusCode::UNAUTHORIZED {
            headers.insert(header::WWW_AUTHENTICATE, HeaderValue::from_static("Bearer"));
        }
        response
    }
}

/// What a rejection was caused by, without axum's own words around it.
fn cause(rejection: &dyn Error) -> String {
    rejection.source().unwrap_or(rejection).to_string()
}

impl From<JsonRejection> for ApiError {
    fn from(rejection: JsonRejection) -> Self {
        let why = cause(&rejection);
        match rejection {
            JsonRejection::JsonDataError(_) => Self::Unprocessable(format!("the body is not what is read here: {why}")),
            _ => Self::BadRequest(format!("the body is not JSON: {why}")),
        }
    }
}

impl From<PathRejection> for ApiError {
    fn from(rejection: PathRejection) -> Self {
        let why = match &rejection {
            PathRejection::FailedToDeserializePathParams(failed) => match failed.kind() {
                ErrorKind::DeserializeError { key, value, message } => format!("{key} {value:?}: {message}"),
                ErrorKind::InvalidUtf8InPathParam { key } => format!("{key} is not UTF-8"),
                other => other.to_string(),
            },
            other => cause(other),
        };
        Self::NotFound(format!("the address names nothing here: {why}"))
    }
}

impl From<QueryRejection> for ApiError {
    fn from(rejection: QueryRejection) -> Self {
        Self::BadRequest(format!("what stands behind \"?\" is not what is read here: {}", cause(&rejection)))
    }
}

/// `axum::extract::Path` whose rejection is a problem.
#[derive(FromRequestParts)]
#[from_request(via(axum::extract::Path), rejection(ApiError))]
pub struct Path<T>(pub T);

/// `axum::extract::Query` whose rejection is a problem.
#[derive(FromRequestParts)]
#[from_request(via(axum::extract::Query), rejection(ApiError))]
pub struct Query<T>(pub T);
