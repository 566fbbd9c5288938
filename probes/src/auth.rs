//! The cluster's token as keys. The token itself never travels: both sides show that they know it by keyed
//! BLAKE3 hashes over what they send, with a key of its own for each purpose.

use std::fmt;

/// Shortest token in bytes: anything shorter is guessed from one recorded packet.
pub const MIN_TOKEN: usize = 8;
/// Longest token in bytes: a file that is longer is not a token.
pub const MAX_TOKEN: usize = 1024;

/// Key for echo packets.
const ECHO_CONTEXT: &str = "flexcomm 2026 probe echo v1";
/// Key for throughput sessions.
const THROUGHPUT_CONTEXT: &str = "flexcomm 2026 probe throughput v1";

/// The cluster's shared secret. Its `Debug` shows nothing of it.
#[derive(Clone)]
pub struct Token(Vec<u8>);

/// A text that cannot be a token.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum TokenError {
    /// Too short or too long.
    #[error("the token has {0} bytes, allowed is {MIN_TOKEN} to {MAX_TOKEN}")]
    Length(usize),
}

impl Token {
    /// Takes a token as read from a file or an environment variable; white space around it is left out.
    pub fn new(text: &str) -> Result<Self, TokenError> {
        let text = text.trim();
        if (MIN_TOKEN..=MAX_TOKEN).contains(&text.len()) {
            Ok(Self(text.as_bytes().to_vec()))
        } else {
            Err(TokenError::Length(text.len()))
        }
    }

    /// The key that signs echo packets.
    pub fn echo_key(&self) -> Key {
        Key(blake3::derive_key(ECHO_CONTEXT, &self.0))
    }

    /// The key that signs throughput handshakes.
    pub fn throughput_key(&self) -> Key {
        Key(blake3::derive_key(THROUGHPUT_CONTEXT, &self.0))
    }
}

impl Drop for Token {
    /// Overwrites the secret, as far as safe code can promise it.
    fn drop(&mut self) {
        self.0.fill(0);
        std::hint::black_box(&self.0);
    }
}

impl fmt::Debug for Token {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Token(..)")
    }
}

/// A key for keyed hashes, made from the token for one purpose.
#[derive(Clone)]
pub struct Key([u8; 32]);

impl fmt::Debug for Key {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Key(..)")
    }
}

impl Key {
    /// A key from random bytes that only this process knows.
    pub fn from_random(bytes: [u8; 32]) -> Self {
        Self(bytes)
    }

    /// Keyed hash over the parts; each is framed by its length, so no two lists of parts collide.
    pub fn mac(&self, parts: &[&[u8]]) -> [u8; 32] {
        let mut hasher = blake3::Hasher::new_keyed(&self.0);
        for part in parts {
            hasher.update(&(part.len() as u64).to_le_bytes());
            hasher.update(part);
        }
        *hasher.finalize().as_bytes()
    }
}

/// Compares without telling by its time where the first difference lies. Different lengths are different.
pub fn same(a: &[u8], b: &[u8]) -> bool {
    if a.len() != b.len() {
        return false;
    }
    let difference = a.iter().zip(b).fold(0u8, |sum, (x, y)| sum | (x ^ y));
    std::hint::black_box(difference) == 0
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tokens_have_a_length() {
        assert_eq!(Token::new("short").unwrap_err(), TokenError::Length(5));
        assert!(Token::new(&"x".repeat(1025)).is_err());
        assert!(Token::new("  long enough \n").is_ok());
        assert_eq!(format!("{:?}", Token::new("very secret").unwrap()), "Token(..)");
    }

    #[test]
    fn macs_depend_on_key_purpose_and_framing() {
        let (a, b) = (Token::new("token one").unwrap(), Token::new("token two").unwrap());
        assert_ne!(a.echo_key().mac(&[b"x"]), b.echo_key().mac(&[b"x"]));
        assert_ne!(a.echo_key().mac(&[b"x"]), a.throughput_key().mac(&[b"x"]));
        assert_ne!(a.echo_key().mac(&[b"ab", b"c"]), a.echo_key().mac(&[b"a", b"bc"]));
        assert_eq!(a.echo_key().mac(&[b"x"]), Token::new(" token one\n").unwrap().echo_key().mac(&[b"x"]));
    }

    #[test]
    fn comparison_is_exact() {
        assert!(same(b"abc", b"abc"));
        assert!(!same(b"abc", b"abd"));
        assert!(!same(b"abc", b"ab"));
        assert!(same(b"", b""));
    }
}
