//! The cluster's token: agents and whoever changes something show it as `Authorization: Bearer TOKEN`.

use axum::extract::{Request, State};
use axum::http::header::AUTHORIZATION;
use axum::middleware::Next;
use axum::response::{IntoResponse, Response};
use std::io::Write;
use std::path::Path;
use std::sync::Arc;

use super::problem::ApiError;
use crate::app::App;

/// Shortest token that is accepted: 8 characters stop nobody who can try often, but keep out accidents; the
/// one that is made has 64.
const SHORTEST: usize = 8;

/// A token, kept as its hash.
#[derive(Clone)]
pub struct Token(blake3::Hash);

impl std::fmt::Debug for Token {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Token(..)")
    }
}

impl Token {
    /// Of a text; white space around it does not count.
    pub fn new(text: &str) -> std::io::Result<Self> {
        let text = text.trim();
        if text.len() < SHORTEST {
            return Err(std::io::Error::other(format!("a token has at least {SHORTEST} characters")));
        }
        Ok(Self(blake3::hash(text.as_bytes())))
    }

    /// Of a file; `None` when it does not exist.
    pub fn read(path: &Path) -> std::io::Result<Option<Self>> {
        match std::fs::read_to_string(path) {
            Ok(text) => Self::new(&text).map(Some),
            Err(e) if e.kind() == std::io::ErrorKind::NotFound => Ok(None),
            Err(e) => Err(e),
        }
    }

    /// Of a file, which is made with a random token (mode 0600) when it does not exist.
    pub fn read_or_make(path: &Path) -> std::io::Result<Self> {
        Self::read(path)?.map_or_else(|| Self::new(&make(path)?), Ok)
    }

    /// Whether a text is this token; takes the same time wherever they differ.
    pub fn matches(&self, shown: &str) -> bool {
        // blake3's comparison of hashes is constant in time.
        blake3::hash(shown.as_bytes()) == self.0
    }
}

fn make(path: &Path) -> std::io::Result<String> {
    use std::os::unix::fs::OpenOptionsExt;
    let token = blake3::hash(&rand::random::<[u8; 32]>()).to_hex().to_string();
    let mut file = std::fs::OpenOptions::new().write(true).create_new(true).mode(0o600).open(path)?;
    file.write_all(token.as_bytes())?;
    file.sync_all()?;
    tracing::info!(path = %path.display(), "made a token for this cluster; agents need a copy");
    Ok(token)
}

/// Lets only requests with the token pass.
pub async fn require(State(app): State<Arc<App>>, request: Request, next: Next) -> Response {
    let shown =
        request.headers().get(AUTHORIZATION).and_then(|v| v.to_str().ok()).and_then(|v| v.strip_prefix("Bearer "));
    match shown {
        Some(shown) if app.token.matches(shown.trim()) => next.run(request).await,
        Some(_) => ApiError::Unauthorized("the token is not this cluster's").into_response(),
        None => ApiError::Unauthorized("send the cluster's token as \"Authorization: Bearer TOKEN\"").into_response(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tokens_are_made_once_and_kept() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("token");
        assert!(Token::read(&path).unwrap().is_none() && !path.exists());
        let made = Token::read_or_make(&path).unwrap();
        let text = std::fs::read_to_string(&path).unwrap();
        assert!(made.matches(&text) && !made.matches("wrong"));
        assert!(Token::read_or_make(&path).unwrap().matches(&text));
        assert!(Token::new(" short ").is_err());
        assert_eq!(format!("{made:?}"), "Token(..)");
    }
}
