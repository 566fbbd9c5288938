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

    /// (method, path) of every line of the router.
    fn routed() -> BTreeSet<(String, String)> {
        let source = include_str!("mod.rs");
        let line = |text: &str| {
            let rest = text.trim().split_once(".route(\"")?.1;
            let (path, rest) = rest.split_once("\", ")?;
            Some((rest.split_once('(')?.0.to_owned(), path.to_owned()))
        };
        source.lines().filter_map(line).collect()
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
