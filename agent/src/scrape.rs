//! Prometheus text over HTTP, for whoever connects: no routes, no keep-alive.

use crate::metrics::Metrics;
use std::net::SocketAddr;
use std::time::Duration;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::watch;

/// Longest request head.
const MAX_HEAD: usize = 8 * 1024;
/// Longest time for one scrape.
const WITHIN: Duration = Duration::from_secs(5);

/// Serves until `stop`.
pub(crate) async fn serve(listener: TcpListener, metrics: Metrics, mut stop: watch::Receiver<bool>) {
    loop {
        tokio::select! {
            _ = stop.changed() => return,
            accepted = listener.accept() => match accepted {
                // One after the other: scrapes are rare and short.
                Ok((stream, peer)) => {
                    let done = tokio::time::timeout(WITHIN, answer(stream, &metrics)).await;
                    if !matches!(done, Ok(Ok(()))) {
                        tracing::debug!(%peer, "a scrape was cut short");
                    }
                }
                Err(error) => {
                    tracing::warn!("failed to accept a scrape: {error}");
                    tokio::time::sleep(Duration::from_millis(100)).await;
                }
            },
        }
    }
}

/// Binds the listener.
pub(crate) async fn bind(addr: SocketAddr) -> std::io::Result<TcpListener> {
    TcpListener::bind(addr).await
}

async fn answer(mut stream: TcpStream, metrics: &Metrics) -> std::io::Result<()> {
    let mut head = Vec::new();
    while !head.windows(4).any(|w| w == b"\r\n\r\n") {
        let mut buffer = [0; 1024];
        let read = stream.read(&mut buffer).await?;
        if read == 0 || head.len() + read > MAX_HEAD {
            return Ok(());
        }
        head.extend_from_slice(&buffer[..read]);
    }
    let wanted = head.starts_with(b"GET /metrics ");
    let (status, body) = match wanted {
        true => ("200 OK", metrics.encode().map_err(std::io::Error::other)?),
        false => ("404 Not Found", "only GET /metrics is served here\n".to_owned()),
    };
    let text = format!(
        "HTTP/1.1 {status}\r\ncontent-type: text/plain; version=0.0.4\r\ncontent-length: {}\r\nconnection: close\r\n\r\n{body}",
        body.len()
    );
    stream.write_all(text.as_bytes()).await?;
    stream.shutdown().await
}
