//! Prometheus text over HTTP, for whoever connects: no routes, no keep-alive.

use crate::metrics::Metrics;
use std::collections::VecDeque;
use std::net::SocketAddr;
use std::time::Duration;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::watch;
use tokio::task::{AbortHandle, JoinSet};

/// Longest request head.
const MAX_HEAD: usize = 8 * 1024;
/// Most connections at once; a newer one ends the oldest, so that those that send nothing keep no scraper out.
const MOST: usize = 32;
/// Longest time for one scrape.
const WITHIN: Duration = Duration::from_secs(5);

/// Serves until `stop`.
pub(crate) async fn serve(listener: TcpListener, metrics: Metrics, mut stop: watch::Receiver<bool>) {
    let mut open = JoinSet::new();
    let mut oldest = VecDeque::new();
    loop {
        tokio::select! {
            _ = stop.changed() => return,
            Some(_) = open.join_next() => oldest.retain(|scrape: &AbortHandle| !scrape.is_finished()),
            accepted = listener.accept() => match accepted {
                Ok((stream, _)) => {
                    if oldest.len() >= MOST {
                        oldest.pop_front().iter().for_each(AbortHandle::abort);
                    }
                    let metrics = metrics.clone();
                    oldest.push_back(open.spawn(tokio::time::timeout(WITHIN, async move { answer(stream, &metrics).await })));
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

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn connections_that_send_nothing_keep_no_scraper_out() {
        let listener = bind("127.0.0.1:0".parse().unwrap()).await.unwrap();
        let addr = listener.local_addr().unwrap();
        let (_stop, stopped) = watch::channel(false);
        let server = tokio::spawn(serve(listener, Metrics::new().unwrap(), stopped));
        let mut idle = Vec::new();
        for _ in 0..3 * MOST {
            idle.push(TcpStream::connect(addr).await.unwrap());
        }
        let scrape = async {
            let mut stream = TcpStream::connect(addr).await.unwrap();
            stream.write_all(b"GET /metrics HTTP/1.1\r\n\r\n").await.unwrap();
            let mut text = String::new();
            stream.read_to_string(&mut text).await.unwrap();
            text
        };
        // Less than what one connection may take: none is waited for.
        let text = tokio::time::timeout(WITHIN, scrape).await.unwrap();
        assert!(text.starts_with("HTTP/1.1 200 OK") && text.contains("flexcomm_agent_trainers 0"), "{text}");
        // The oldest were ended at once, the newest in their time.
        for mut stream in idle {
            let end = tokio::time::timeout(4 * WITHIN, stream.read(&mut [0])).await.unwrap();
            assert!(!matches!(end, Ok(1..)), "nothing was asked for");
        }
        server.abort();
    }
}
