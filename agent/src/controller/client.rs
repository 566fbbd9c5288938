//! HTTP to the controller.

use super::sse::{BadStream, MAX_EVENT, Parser};
use crate::config::Config;
use flexcomm_domain::NodeName;
use flexcomm_wire::api::Problem;
use flexcomm_wire::{Heartbeat, Orders, Register, Registered, ReportAck};
use reqwest::{Response, StatusCode};
use std::time::Duration;

/// Longest time to connect.
const CONNECT_WITHIN: Duration = Duration::from_secs(3);
/// Longest time for a whole request; the controller's own limit is 20 s.
const ANSWER_WITHIN: Duration = Duration::from_secs(15);
/// The stream pings every 5 s: silence beyond this means that nobody is there.
const STREAM_SILENCE: Duration = Duration::from_secs(15);
/// Longest answer that is read.
const MAX_ANSWER: usize = MAX_EVENT;

/// Why a call brought nothing.
#[derive(Debug, thiserror::Error)]
pub(crate) enum CallError {
    /// No answer.
    #[error("{what}: {why}")]
    Unreachable { what: &'static str, why: String },
    /// An answer that says no.
    #[error("{what}: the controller answers {status}: {detail}")]
    Refused { what: &'static str, status: StatusCode, detail: String },
    /// An answer that cannot be understood.
    #[error("{what}: {why}")]
    Garbled { what: &'static str, why: String },
}

impl CallError {
    pub(crate) fn status(&self) -> Option<StatusCode> {
        match self {
            Self::Refused { status, .. } => Some(*status),
            _ => None,
        }
    }
}

/// The causes behind an error, which reqwest leaves out of its own text.
pub(crate) fn causes(error: &reqwest::Error) -> String {
    let mut text = error.to_string();
    let mut cause = std::error::Error::source(error);
    while let Some(inner) = cause {
        let inner_text = inner.to_string();
        if !text.contains(&inner_text) {
            text = format!("{text}: {inner_text}");
        }
        cause = inner.source();
    }
    text
}

/// One controller, one node.
#[derive(Debug, Clone)]
pub(crate) struct Client {
    http: reqwest::Client,
    base: String,
    token: String,
    node: NodeName,
}

impl Client {
    pub(crate) fn new(config: &Config) -> Result<Self, CallError> {
        let what = "set up HTTP";
        // A proxy from the environment would take the controller's address for one on the internet.
        let http = reqwest::Client::builder().no_proxy().connect_timeout(CONNECT_WITHIN).build();
        let http = http.map_err(|error| CallError::Unreachable { what, why: causes(&error) })?;
        let base = format!("{}/api/v1/agents", config.controller.as_str().trim_end_matches('/'));
        Ok(Self { http, base, token: config.token.reveal().to_owned(), node: config.node.clone() })
    }

    fn at(&self, path: &str) -> String {
        format!("{}/{}/{path}", self.base, self.node)
    }

    async fn post(&self, what: &'static str, url: String, body: Vec<u8>) -> Result<Response, CallError> {
        let request = self.http.post(url).timeout(ANSWER_WITHIN).header("content-type", "application/json").body(body);
        self.send(what, request).await
    }

    async fn send(&self, what: &'static str, request: reqwest::RequestBuilder) -> Result<Response, CallError> {
        let sent = request.bearer_auth(&self.token).send().await;
        let response = sent.map_err(|error| CallError::Unreachable { what, why: causes(&error) })?;
        let status = response.status();
        if status.is_success() {
            return Ok(response);
        }
        let body = bounded(what, response, 64 * 1024).await.unwrap_or_default();
        let detail = match serde_json::from_slice::<Problem>(&body) {
            Ok(problem) => problem.detail,
            Err(_) => String::from_utf8_lossy(&body).chars().take(200).collect(),
        };
        Err(CallError::Refused { what, status, detail })
    }

    /// Names this agent to the controller.
    pub(crate) async fn register(&self, register: &Register) -> Result<Registered, CallError> {
        let what = "register";
        let response = self.post(what, format!("{}/register", self.base), json(register)).await?;
        read(what, response).await
    }

    /// Says that this agent lives.
    pub(crate) async fn heartbeat(&self, beat: &Heartbeat) -> Result<(), CallError> {
        self.post("send a heartbeat", self.at("heartbeat"), json(beat)).await.map(drop)
    }

    /// Delivers reports that are JSON already.
    pub(crate) async fn reports(&self, instance: u64, reports: &[&[u8]]) -> Result<ReportAck, CallError> {
        let what = "deliver reports";
        let mut body = format!("{{\"instance\":{instance},\"reports\":[").into_bytes();
        body.extend(reports.join(&b','));
        body.extend(b"]}");
        let response = self.post(what, self.at("reports"), body).await?;
        read(what, response).await
    }

    /// Asks for the orders once.
    pub(crate) async fn orders(&self) -> Result<Orders, CallError> {
        let what = "poll the orders";
        let response = self.send(what, self.http.get(self.at("orders")).timeout(ANSWER_WITHIN)).await?;
        read(what, response).await
    }

    /// Opens the stream of orders.
    pub(crate) async fn stream(&self) -> Result<OrderStream, CallError> {
        let request = self.http.get(self.at("stream")).header("accept", "text/event-stream");
        let opened = tokio::time::timeout(ANSWER_WITHIN, self.send(STREAM, request)).await;
        let response = opened.map_err(|_| silent(ANSWER_WITHIN))??;
        Ok(OrderStream { response, parser: Parser::default(), waiting: Vec::new() })
    }
}

const STREAM: &str = "follow the stream of orders";

fn silent(time: Duration) -> CallError {
    CallError::Unreachable { what: STREAM, why: format!("silence for {} s", time.as_secs()) }
}

fn json(body: &impl serde::Serialize) -> Vec<u8> {
    // Plain data with string keys: there is nothing in it that JSON cannot hold.
    serde_json::to_vec(body).unwrap_or_default()
}

async fn bounded(what: &'static str, mut response: Response, most: usize) -> Result<Vec<u8>, CallError> {
    let mut bytes = Vec::new();
    loop {
        let chunk = response.chunk().await.map_err(|error| CallError::Unreachable { what, why: causes(&error) })?;
        let Some(chunk) = chunk else { return Ok(bytes) };
        if bytes.len() + chunk.len() > most {
            return Err(CallError::Garbled { what, why: format!("the answer is longer than {most} bytes") });
        }
        bytes.extend_from_slice(&chunk);
    }
}

async fn read<T: serde::de::DeserializeOwned>(what: &'static str, response: Response) -> Result<T, CallError> {
    let bytes = bounded(what, response, MAX_ANSWER).await?;
    serde_json::from_slice(&bytes).map_err(|error| CallError::Garbled { what, why: error.to_string() })
}

/// An open stream.
pub(crate) struct OrderStream {
    response: Response,
    parser: Parser,
    waiting: Vec<Orders>,
}

impl OrderStream {
    /// The next orders. An error ends the stream.
    pub(crate) async fn next(&mut self) -> Result<Orders, CallError> {
        loop {
            if !self.waiting.is_empty() {
                return Ok(self.waiting.remove(0));
            }
            let chunk = tokio::time::timeout(STREAM_SILENCE, self.response.chunk()).await;
            let chunk = chunk.map_err(|_| silent(STREAM_SILENCE))?;
            let chunk = chunk.map_err(|error| CallError::Unreachable { what: STREAM, why: causes(&error) })?;
            let ended = || CallError::Unreachable { what: STREAM, why: "the controller ended it".to_owned() };
            let bad = |error: BadStream| CallError::Garbled { what: STREAM, why: error.to_string() };
            for event in self.parser.feed(&chunk.ok_or_else(ended)?).map_err(bad)? {
                if event.name == "orders" {
                    let orders = serde_json::from_str(&event.data);
                    self.waiting.push(orders.map_err(|e| CallError::Garbled { what: STREAM, why: e.to_string() })?);
                }
            }
        }
    }
}
