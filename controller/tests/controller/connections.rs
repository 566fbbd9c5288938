//! Connections that send nothing, half a head or half a body, or take no answer: others are answered while they stay,
//! and they do not stay for long.

use crate::common::process::Process;
use crate::common::{Agent, Api, TIMEOUT, TOKEN};
use futures_util::StreamExt;
use nix::sys::resource::{Resource, getrlimit, setrlimit};
use std::net::{IpAddr, SocketAddr};
use std::time::{Duration, Instant};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpSocket, TcpStream};

/// Longest wait of a client that is not to blame. The controller's own timeouts are 20 s: it is answered before them.
const ANSWER: Duration = Duration::from_secs(10);

/// The API as another host would use it.
fn from_address(api: &Api, ip: [u8; 4]) -> Api {
    let client = reqwest::Client::builder().no_proxy().timeout(ANSWER).local_address(Some(IpAddr::from(ip)));
    Api { client: client.build().unwrap(), url: api.url.clone() }
}

async fn open(server: SocketAddr, sent: &[u8]) -> TcpStream {
    let socket = TcpSocket::new_v4().unwrap();
    socket.set_recv_buffer_size(4096).unwrap();
    let mut stream = socket.connect(server).await.unwrap();
    // The server may have closed it at once.
    let _ = stream.write_all(sent).await;
    stream
}

/// Waits until the server has closed it.
async fn closed(mut stream: TcpStream) {
    let mut rest = Vec::new();
    let end = tokio::time::timeout(TIMEOUT, stream.read_to_end(&mut rest)).await;
    assert!(end.is_ok(), "still open after {TIMEOUT:?}");
}

/// A server with the 1,024 descriptors that most systems give.
async fn server(dir: &std::path::Path) -> (Process, Api, SocketAddr) {
    let (_, hard) = getrlimit(Resource::RLIMIT_NOFILE).unwrap();
    setrlimit(Resource::RLIMIT_NOFILE, hard.min(8192), hard).unwrap();
    let (process, api) = Process::spawn(Process::behind("ulimit -n 1024", dir), dir).await;
    let addr = api.url.trim_start_matches("http://").parse().unwrap();
    (process, api, addr)
}

#[tokio::test]
async fn connections_that_do_nothing_silence_nobody() {
    let dir = tempfile::tempdir().unwrap();
    let (_process, api, addr) = server(dir.path()).await;
    let mut agent = Agent::new("a", 0);
    assert_eq!(agent.register(&api).await.status(), 200);
    // An agent that was there before, from a third source.
    let mut orders = from_address(&api, [127, 0, 0, 3]);
    orders.client = reqwest::Client::builder().no_proxy().local_address(Some([127, 0, 0, 3].into())).build().unwrap();
    let url = format!("{}/api/v1/agents/a/stream", api.url);
    let stream = orders.client.get(url).bearer_auth(TOKEN).send().await.unwrap();
    assert_eq!(stream.status(), 200);
    let mut stream = stream.bytes_stream();
    assert!(stream.next().await.unwrap().unwrap().starts_with(b"event: orders"));

    let mut idle = Vec::new();
    for number in 0..1240 {
        let head: &[u8] = match number {
            0..40 => {
                b"POST /api/v1/agents/register HTTP/1.1\r\nhost: localhost\r\nauthorization: Bearer a-token-for-tests\r\n\
                   content-type: application/json\r\ncontent-length: 1000\r\n\r\n{\"half"
            }
            40..640 => b"GET /healthz HTTP/1.1\r\nhost: localhost\r\nx-half-a-he",
            _ => b"",
        };
        idle.push(open(addr, head).await);
    }
    let other = from_address(&api, [127, 0, 0, 2]);
    for path in ["/healthz", "/readyz", "/metrics", "/api/v1/nodes"] {
        assert_eq!(other.get(path).await.status(), 200, "GET {path} from another source");
    }
    let metrics = other.get("/metrics").await.text().await.unwrap();
    assert!(metrics.contains("flexcomm_refused_connections_total{limit=\"source\"}"), "{metrics}");
    for stream in idle {
        closed(stream).await;
    }
    assert_eq!(api.get("/healthz").await.status(), 200, "their source has room again");
    // Older than every timeout, and still there.
    let ping = tokio::time::timeout(TIMEOUT, stream.next()).await.unwrap().unwrap().unwrap();
    assert!(ping.starts_with(b": ping") || ping.starts_with(b":ping") || ping.starts_with(b"event"), "{ping:?}");
}

/// Clients of the test below.
const CLIENTS: usize = 20;

/// Sockets that the server has open.
fn sockets(server: &Process) -> usize {
    let descriptors = std::fs::read_dir(format!("/proc/{}/fd", server.0.id())).unwrap();
    let targets = descriptors.filter_map(|entry| std::fs::read_link(entry.unwrap().path()).ok());
    targets.filter(|target| target.to_string_lossy().starts_with("socket:")).count()
}

async fn until(holds: impl Fn() -> bool, what: &str) {
    let since = Instant::now();
    while !holds() {
        assert!(since.elapsed() < TIMEOUT, "not within {TIMEOUT:?}: {what}");
        tokio::time::sleep(Duration::from_millis(200)).await;
    }
}

/// Answers that are larger than what the kernel keeps, to a client that reads none of it.
#[tokio::test]
async fn a_client_that_does_not_read_is_given_up() {
    let dir = tempfile::tempdir().unwrap();
    let (process, api, addr) = server(dir.path()).await;
    let asked = "GET /api/v1/openapi.json HTTP/1.1\r\nhost: localhost\r\n\r\n".repeat(400);
    let mut greedy = Vec::new();
    for _ in 0..CLIENTS {
        greedy.push(open(addr, asked.as_bytes()).await);
    }
    until(|| sockets(&process) > CLIENTS, "the server took all connections").await;
    until(|| sockets(&process) < CLIENTS, "the server gave them up").await;
    drop(greedy);
    assert_eq!(api.get("/healthz").await.status(), 200);
}
