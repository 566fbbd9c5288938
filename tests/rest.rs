//! A port, and what is asked of a controller there; included by the tests that start the binary.

use std::io::{Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::time::Duration;

use serde_json::Value;

pub fn free_address() -> SocketAddr {
    let listener = TcpListener::bind("127.0.0.1:0").expect("a free port");
    listener.local_addr().expect("its address")
}

/// Status and body of the answer. `rest` is what follows the host: headers, an empty line, a body.
pub fn ask(to: SocketAddr, what: &str, rest: &str) -> std::io::Result<(u16, String)> {
    let mut stream = TcpStream::connect(to)?;
    stream.set_read_timeout(Some(Duration::from_secs(20)))?;
    write!(stream, "{what} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n{rest}")?;
    let mut answer = String::new();
    stream.read_to_string(&mut answer)?;
    let (head, body) = answer.split_once("\r\n\r\n").expect("head and body");
    let status = head.split_whitespace().nth(1).and_then(|status| status.parse().ok());
    Ok((status.unwrap_or_else(|| panic!("{what}: {head}")), body.to_owned()))
}

pub fn get(to: SocketAddr, path: &str) -> Value {
    let (status, body) = ask(to, &format!("GET {path}"), "\r\n").expect("REST is reachable on loopback");
    assert_eq!(status, 200, "GET {path}: {body}");
    serde_json::from_str(&body).unwrap_or_else(|e| panic!("GET {path}: {e}: {body}"))
}
