//! The API in words for machines. Written by hand; a test holds it against the router.

use axum::http::header::CONTENT_TYPE;
use axum::response::IntoResponse;

const TEXT: &str = include_str!("openapi.json");

pub(super) async fn document() -> impl IntoResponse {
    ([(CONTENT_TYPE, "application/vnd.oai.openapi+json;version=3.1")], TEXT)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::BTreeSet;

    /// (method, path) of every route, on however many lines it stands.
    fn routed() -> BTreeSet<(String, String)> {
        let route = |text: &str| {
            let (path, rest) = text.trim_start().strip_prefix('"')?.split_once("\",")?;
            Some((rest.trim_start().split_once('(')?.0.to_owned(), path.to_owned()))
        };
        include_str!("mod.rs").split(".route(").skip(1).filter_map(route).collect()
    }

    #[test]
    fn the_document_lists_what_the_router_serves() {
        let document: serde_json::Value = serde_json::from_str(TEXT).unwrap();
        let mut listed = BTreeSet::new();
        for (path, methods) in document["paths"].as_object().unwrap() {
            for (method, operation) in methods.as_object().unwrap() {
                assert!(operation["summary"].as_str().is_some_and(|s| !s.is_empty()), "{method} {path}");
                listed.insert((method.clone(), path.clone()));
            }
        }
        let routed = routed();
        assert!(routed.len() > 20);
        assert_eq!(listed, routed);
    }
}
