//! A small client of the controller's REST API, as a user's script would be.

use anyhow::{Context, Result, bail};
use flexcomm_wire::api::{
    DecisionView, HistoryEntry, IntervalView, JobView, LinkView, NodeView, ScenarioSet, ScenarioView,
};
use serde::de::DeserializeOwned;
use std::time::Duration;

use crate::plan::{CONTROLLER_PORT, JOB};

/// Longest a request may take: the controller shares one CPU with the training.
const TIMEOUT: Duration = Duration::from_secs(10);

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
        let answer = self.client.get(Self::url(path)).send().await.with_context(|| format!("GET {path}"))?;
        if answer.status() == reqwest::StatusCode::NOT_FOUND {
            return Ok(None);
        }
        if !answer.status().is_success() {
            bail!("GET {path}: {}: {}", answer.status(), answer.text().await.unwrap_or_default());
        }
        Ok(Some(answer.json().await.with_context(|| format!("GET {path}"))?))
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
        let request = self.client.put(Self::url("/api/v1/scenario")).bearer_auth(&self.token).json(set);
        let answer = request.send().await.context("PUT /api/v1/scenario")?;
        if !answer.status().is_success() {
            bail!("PUT /api/v1/scenario: {}: {}", answer.status(), answer.text().await.unwrap_or_default());
        }
        answer.json().await.context("PUT /api/v1/scenario")
    }

    /// What was asked for and who follows.
    pub(crate) async fn scenario(&self) -> Result<Option<ScenarioView>> {
        self.get("/api/v1/scenario").await
    }
}
