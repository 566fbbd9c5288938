//! A small client of the controller's REST API, as a user's script would be.

use anyhow::{Context, Result, bail};
use flexcomm_wire::api::{
    DecisionView, HistoryEntry, IntervalView, JobView, LinkView, NodeView, ScenarioSet, ScenarioView,
};
use reqwest::{RequestBuilder, StatusCode};
use serde::de::DeserializeOwned;
use std::time::{Duration, Instant};

use super::say;
use crate::plan::{CONTROLLER_PORT, JOB};

/// Longest wait for an answer: the controller shares one CPU with the training.
const TIMEOUT: Duration = Duration::from_secs(10);

/// After so long without an answer the controller counts as hanging. A single wait or a broken connection says little: the
/// emulated machine stands still, its clock goes on, while the host is busy.
const HANGS: Duration = Duration::from_secs(60);

/// Between two attempts.
const PAUSE: Duration = Duration::from_millis(200);

/// The controller as seen from the hub.
pub(crate) struct Rest {
    client: reqwest::Client,
    token: String,
}

impl Rest {
    /// A client with the cluster's token.
    pub(crate) fn new(token: &str) -> Result<Self> {
        let client = reqwest::Client::builder().timeout(TIMEOUT).no_proxy().build()?;
        Ok(Self { client, token: token.to_owned() })
    }

    fn url(path: &str) -> String {
        format!("http://127.0.0.1:{CONTROLLER_PORT}{path}")
    }

    /// `None` on 404: not there yet.
    pub(crate) async fn get<T: DeserializeOwned>(&self, path: &str) -> Result<Option<T>> {
        let what = format!("GET {path}");
        let (status, body) = answer(&what, self.client.get(Self::url(path))).await?;
        if status == StatusCode::NOT_FOUND {
            return Ok(None);
        }
        parse(&what, status, &body).map(Some)
    }

    /// Whether the controller is ready.
    pub(crate) async fn ready(&self) -> bool {
        let answer = self.client.get(Self::url("/readyz")).send().await;
        answer.is_ok_and(|a| a.status().is_success())
    }

    /// Live nodes.
    pub(crate) async fn live_nodes(&self) -> Result<usize> {
        let nodes: Option<Vec<NodeView>> = self.get("/api/v1/nodes").await?;
        Ok(nodes.unwrap_or_default().iter().filter(|n| n.live).count())
    }

    /// All links.
    pub(crate) async fn links(&self) -> Result<Vec<LinkView>> {
        Ok(self.get("/api/v1/links").await?.unwrap_or_default())
    }

    /// The lab's job.
    pub(crate) async fn job(&self) -> Result<Option<JobView>> {
        self.get(&format!("/api/v1/jobs/{JOB}")).await
    }

    /// Its decision in force.
    pub(crate) async fn decision(&self) -> Result<Option<DecisionView>> {
        self.get(&format!("/api/v1/jobs/{JOB}/decision")).await
    }

    /// All its decisions with their reports.
    pub(crate) async fn history(&self) -> Result<Vec<HistoryEntry>> {
        Ok(self.get(&format!("/api/v1/jobs/{JOB}/history")).await?.unwrap_or_default())
    }

    /// Its trials, as the API answers them.
    pub(crate) async fn trials(&self) -> Result<serde_json::Value> {
        Ok(self.get(&format!("/api/v1/jobs/{JOB}/trials")).await?.unwrap_or_default())
    }

    /// Predicted and measured times of its intervals.
    pub(crate) async fn intervals(&self) -> Result<Vec<IntervalView>> {
        Ok(self.get(&format!("/api/v1/jobs/{JOB}/intervals")).await?.unwrap_or_default())
    }

    /// Sets the links of all shaping nodes.
    pub(crate) async fn set_scenario(&self, set: &ScenarioSet) -> Result<ScenarioView> {
        let what = "PUT /api/v1/scenario";
        let request = self.client.put(Self::url("/api/v1/scenario")).bearer_auth(&self.token).json(set);
        let (status, body) = answer(what, request).await?;
        parse(what, status, &body)
    }

    /// What was asked for and who follows.
    pub(crate) async fn scenario(&self) -> Result<Option<ScenarioView>> {
        self.get("/api/v1/scenario").await
    }
}

fn parse<T: DeserializeOwned>(what: &str, status: StatusCode, body: &str) -> Result<T> {
    if !status.is_success() {
        bail!("{what}: {status}: {body}");
    }
    serde_json::from_str(body).with_context(|| format!("{what}: the answer is not as expected"))
}

/// The status and the body; asks again where no answer came in time or the connection broke. All may be repeated: a
/// scenario that is set twice is the same one.
async fn answer(what: &str, request: RequestBuilder) -> Result<(StatusCode, String)> {
    let since = Instant::now();
    loop {
        let attempt = request.try_clone().with_context(|| format!("{what}: not a request"))?;
        let answer = async {
            let answer = attempt.send().await?;
            Ok((answer.status(), answer.text().await?))
        };
        match answer.await {
            Err(error) if may_pass(&error) && since.elapsed() < HANGS => {
                let why = if error.is_timeout() { "in time" } else { "on this connection" };
                say(&format!("{what}: no answer from the controller {why}; asking again"));
                tokio::time::sleep(PAUSE).await;
            }
            answer => return answer.with_context(|| what.to_owned()),
        }
    }
}

/// Whether asking again is of use. Nobody listens where a connection is refused: the controller has ended.
fn may_pass(error: &reqwest::Error) -> bool {
    error.is_timeout() || !error.is_connect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use tokio::io::{AsyncReadExt, AsyncWriteExt};
    use tokio::net::TcpListener;

    #[tokio::test]
    async fn a_request_without_an_answer_is_repeated() {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let url = format!("http://{}/", listener.local_addr().unwrap());
        let server = tokio::spawn(async move {
            let (_silent, _) = listener.accept().await.unwrap();
            let (breaks, _) = listener.accept().await.unwrap();
            // Closing with a request unread resets the connection.
            breaks.readable().await.unwrap();
            drop(breaks);
            loop {
                let (mut next, _) = listener.accept().await.unwrap();
                assert!(next.read(&mut [0; 1024]).await.unwrap() > 0);
                // On a busy machine the client may have given up.
                _ = next.write_all(b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\nconnection: close\r\n\r\n42").await;
            }
        });
        let client = reqwest::Client::builder().timeout(Duration::from_millis(200)).no_proxy().build().unwrap();
        let (status, body) = answer("GET /", client.get(&url)).await.unwrap();
        assert_eq!(parse::<u32>("GET /", status, &body).unwrap(), 42);
        server.abort();
        assert!(server.await.unwrap_err().is_cancelled());
        // A refused connection is not repeated.
        let error = format!("{:#}", answer("GET /", client.get(&url)).await.unwrap_err());
        assert!(error.starts_with("GET /: "), "{error}");
    }
}
