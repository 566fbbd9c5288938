//! Which names the controller answers to. A page of another site can make its own name resolve to this address (DNS
//! rebinding) and then read what is served without a token; its requests still bear that site's name as their host.

use axum::extract::{Request, State};
use axum::http::header;
use axum::http::uri::Authority;
use axum::middleware::Next;
use axum::response::{IntoResponse, Response};
use std::collections::BTreeSet;
use std::net::IpAddr;
use std::sync::Arc;

use super::problem::ApiError;
use crate::app::App;

/// Names besides addresses and localhost, in lower case and without a dot at the end.
#[derive(Debug, Clone, Default)]
pub struct Hosts(BTreeSet<String>);

impl Hosts {
    /// The configured names, and this machine's own.
    pub fn new(configured: &[String]) -> Self {
        let own = std::fs::read_to_string("/proc/sys/kernel/hostname").unwrap_or_default();
        let own = own.trim();
        let names = configured.iter().map(String::as_str).chain((!own.is_empty()).then_some(own));
        Self(names.map(canonical).collect())
    }

    /// Whether a request may name this host; with or without a port.
    fn allows(&self, host: &str) -> bool {
        let Ok(authority) = host.parse::<Authority>() else { return false };
        let name = canonical(authority.host());
        let address = name.strip_prefix('[').and_then(|rest| rest.strip_suffix(']')).unwrap_or(&name);
        address.parse::<IpAddr>().is_ok() || name == "localhost" || self.0.contains(&name)
    }
}

/// Whether it is a host's name or address alone.
pub fn is_name(text: &str) -> bool {
    text.parse::<Authority>().is_ok_and(|authority| authority.host() == text)
}

fn canonical(name: &str) -> String {
    name.strip_suffix('.').unwrap_or(name).to_ascii_lowercase()
}

/// Refuses a request under another name. One without a name comes from no browser.
pub(super) async fn known(State(app): State<Arc<App>>, request: Request, next: Next) -> Response {
    let named = |value: &axum::http::HeaderValue| String::from_utf8_lossy(value.as_bytes()).into_owned();
    let given = request.headers().get_all(header::HOST).iter().map(named);
    let target = request.uri().authority().map(ToString::to_string);
    match given.chain(target).find(|host| !app.hosts.allows(host)) {
        Some(host) => ApiError::Host(host).into_response(),
        None => next.run(request).await,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn addresses_localhost_and_known_names_are_allowed() {
        let hosts = Hosts::new(&["Controller.Example.org.".to_owned()]);
        for host in [
            "127.0.0.1",
            "10.0.0.1:7070",
            "[::1]",
            "[fd00::1]:7070",
            "localhost",
            "LOCALHOST:7070",
            "localhost.",
            "controller.example.org",
            "Controller.Example.ORG.:7070",
        ] {
            assert!(hosts.allows(host), "{host}");
        }
        for host in [
            "evil.example",
            "evil.example:7070",
            "localhost.evil.example",
            "127.0.0.1.evil.example",
            "example.org",
            "",
            "controller",
            "10.0.0.1 evil",
            "[::1",
            "a@b@c",
        ] {
            assert!(!hosts.allows(host), "{host}");
        }
        assert!(["flexcomm.example.org", "node-1", "fd"].iter().all(|name| is_name(name)));
        assert!(["http://a", "a:7070", "a/b", "", "a b", "u@a"].iter().all(|name| !is_name(name)));
        let own = std::fs::read_to_string("/proc/sys/kernel/hostname").unwrap();
        assert!(own.trim().is_empty() || hosts.allows(&format!("{}:7070", own.trim())), "{own}");
    }
}
