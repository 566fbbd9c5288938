//! The page: static files in the binary, nothing from elsewhere.

use axum::http::header::CONTENT_TYPE;
use axum::response::IntoResponse;

type File = ([(axum::http::HeaderName, &'static str); 1], &'static str);

const fn file(kind: &'static str, text: &'static str) -> File {
    ([(CONTENT_TYPE, kind)], text)
}

pub(super) async fn html() -> impl IntoResponse {
    file("text/html; charset=utf-8", include_str!("../page/index.html"))
}

pub(super) async fn css() -> impl IntoResponse {
    file("text/css; charset=utf-8", include_str!("../page/page.css"))
}

pub(super) async fn script() -> impl IntoResponse {
    file("text/javascript; charset=utf-8", include_str!("../page/page.js"))
}

pub(super) async fn charts() -> impl IntoResponse {
    file("text/javascript; charset=utf-8", include_str!("../page/charts.js"))
}
