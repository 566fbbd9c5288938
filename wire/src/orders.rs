//! Controller to agent: everything the agent should know now, whole, so that a lost message costs nothing.

use flexcomm_domain::{Decision, Digest, Invalid, JobId, NodeName, Plan, RunId, Seconds, Timestamp, Version};
use serde::{Deserialize, Serialize};

use crate::StrategyWire;

/// The whole of what one agent is asked to do. A later `epoch` replaces an earlier one entirely.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Orders {
    /// Only grows, also across restarts of the controller.
    pub epoch: u64,
    /// Whom to probe and how often.
    pub probes: ProbePlan,
    /// Throughput tests this agent may run now, each once. The controller never lets two overlap on a NIC.
    #[serde(default)]
    pub grants: Vec<ThroughputGrant>,
    /// The jobs that have trainers on this node.
    #[serde(default)]
    pub jobs: Vec<JobOrders>,
    /// How to shape the link (lab only); absent: leave it alone, and restore what an earlier order shaped.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub shape: Option<ShapeOrder>,
}

/// Latency probing: sent all the time, costs almost nothing.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct ProbePlan {
    /// Time between two echoes to the same peer.
    pub echo_interval_ms: u64,
    /// Time between two traceroutes to the same peer; 0 = never.
    pub trace_interval_s: u64,
    /// Whom.
    pub peers: Vec<EchoPeer>,
}

/// Another agent, as a target of probes.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct EchoPeer {
    /// Its name.
    pub node: NodeName,
    /// Its IP address.
    pub addr: std::net::IpAddr,
    /// UDP port of its echo responder.
    pub echo_port: u16,
    /// TCP port of its throughput server.
    pub throughput_port: u16,
}

/// Permission to run one throughput test. The controller sees to it that no NIC is in two at once.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct ThroughputGrant {
    /// Unique; named in the report.
    pub id: u64,
    /// Towards whom.
    pub peer: NodeName,
    /// Most bytes to send, both directions together.
    pub budget_bytes: u64,
    /// How long the grant holds after it was received.
    pub valid_ms: u64,
}

/// What a job's trainers on this node should know.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct JobOrders {
    /// Which job.
    pub job: JobId,
    /// The decision in force; absent before the first.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub decision: Option<DecisionOrder>,
    /// A trial that should run now.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub trial: Option<TrialOrder>,
}

/// A decision on its way to the trainers.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct DecisionOrder {
    /// The run of the job that it is for: a later run under the same name does not follow it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub run: Option<RunId>,
    /// Only grows within the job.
    pub version: u64,
    /// The version it replaced.
    pub parent: u64,
    /// What to do: a plan's text.
    pub strategy: StrategyWire,
    /// Digest of the plan's canonical text; checked on arrival.
    pub digest: u64,
    /// When it was made.
    pub decided_at_us: u64,
    /// One sentence why.
    pub reason: String,
}

impl From<&Decision> for DecisionOrder {
    fn from(d: &Decision) -> Self {
        Self {
            run: None,
            version: d.version.0,
            parent: d.parent.0,
            strategy: (&d.plan).into(),
            digest: d.digest().0,
            decided_at_us: d.decided_at.0,
            reason: d.reason.clone(),
        }
    }
}

impl DecisionOrder {
    /// Checks plan and digest and names the job it is for.
    pub fn to_decision(&self, job: &JobId) -> Result<Decision, Invalid> {
        let plan = Plan::try_from(&self.strategy)?;
        if plan.digest() != Digest(self.digest) {
            return Err(Invalid::Combination(format!(
                "decision {} of job {job}: digest {:014x} does not belong to {plan}",
                self.version, self.digest
            )));
        }
        Ok(Decision {
            job: job.clone(),
            version: Version(self.version),
            parent: Version(self.parent),
            plan,
            decided_at: Timestamp(self.decided_at_us),
            reason: self.reason.clone(),
        })
    }
}

/// A live trial: snapshot, run each candidate for some iterations, restore.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct TrialOrder {
    /// The run of the job that it is for: a later run under the same name does not follow it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub run: Option<RunId>,
    /// Only grows within the job.
    pub id: u64,
    /// At most [`crate::MAX_CANDIDATES`].
    pub candidates: Vec<StrategyWire>,
    /// Iterations per candidate (the paper: 10).
    pub iterations: u32,
    /// The trial stops after this much time, with what it has.
    pub budget_ms: u64,
}

/// netem and htb on the agent's interface, for the lab.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct ShapeOrder {
    /// Only grows; a later order replaces an earlier one.
    pub id: u64,
    /// One-way delay added on egress.
    pub latency_us: f64,
    /// Its standard deviation.
    #[serde(default)]
    pub jitter_us: f64,
    /// Share of packets dropped, 0 to 1.
    #[serde(default)]
    pub loss: f64,
    /// Egress rate.
    pub bandwidth_bps: f64,
}

impl ShapeOrder {
    /// Names the first value that is out of range.
    pub fn check(&self) -> Result<(), Invalid> {
        Seconds::new(self.latency_us * 1e-6)?;
        Seconds::new(self.jitter_us * 1e-6)?;
        flexcomm_domain::Bandwidth::new(self.bandwidth_bps)?;
        if !(0.0..1.0).contains(&self.loss) {
            return Err(Invalid::Range { what: "loss", value: self.loss, allowed: "0 to below 1".into() });
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn decisions_survive_the_wire_and_forgeries_do_not() {
        let job = JobId::new("j").unwrap();
        let decision = Decision {
            job: job.clone(),
            version: Version(7),
            parent: Version(6),
            plan: "none/dense-ring | topk@0.0123456789/art-tree:var".parse().unwrap(),
            decided_at: Timestamp(9),
            reason: "because".into(),
        };
        let json = serde_json::to_string(&DecisionOrder::from(&decision)).unwrap();
        let mut order: DecisionOrder = serde_json::from_str(&json).unwrap();
        assert_eq!(order.to_decision(&job).unwrap(), decision);
        order.strategy.0 = "topk(k=0.5)+ef(vanilla)/art-tree:var".into();
        assert!(order.to_decision(&job).unwrap_err().to_string().contains("digest"));
        order.strategy.0 = "topk(k=NaN)+ef(vanilla)/art-tree:var".into();
        assert!(order.to_decision(&job).is_err());
    }
}
