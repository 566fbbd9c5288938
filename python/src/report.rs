//! Telemetry: gathers steps, and hands them to the agent's client a few at a time.

use crate::meter::Costs;
use flexcomm_domain::{JobId, Rank, Strategy, Version};
use flexcomm_trainer::{Client, InForce, Pace};
use flexcomm_wire::{AppliedReport, FromTrainer, MAX_STEPS, StepRecord, StepsReport};
use std::time::{Duration, Instant};

/// How long the end of the job waits for the agent to take the last reports.
const FLUSH_TIMEOUT: Duration = Duration::from_secs(1);

/// Least gain in a report: gain is a share above 0, and a rank whose own part was empty still reports.
pub const LEAST_GAIN: f64 = 1e-9;

/// A rank's reports. Without an agent they go nowhere.
#[derive(Debug)]
pub struct Reporter {
    client: Option<Client>,
    job: JobId,
    rank: Rank,
    pending: Vec<StepRecord>,
    running: Option<(Version, Strategy)>,
    pace: Pace,
    last_flush: Instant,
}

impl Reporter {
    /// Not connected yet.
    pub fn new(job: JobId, rank: Rank) -> Self {
        Self {
            client: None,
            job,
            rank,
            pending: Vec::new(),
            running: None,
            pace: Pace::default(),
            last_flush: Instant::now(),
        }
    }

    /// From now on to this agent.
    pub fn connect(&mut self, client: Client) {
        self.client = Some(client);
    }

    /// The agent's client.
    pub fn client(&self) -> Option<&Client> {
        self.client.as_ref()
    }

    /// Sends one message.
    pub fn send(&self, message: FromTrainer) {
        if let Some(client) = &self.client {
            client.send(message);
        }
    }

    /// Takes in a step that ran this strategy.
    pub fn step(&mut self, (step, version, ran): (u64, Version, Strategy), costs: &Costs, loss: Option<f64>) {
        if self.client.is_none() {
            return;
        }
        let running = Some((version, ran));
        if self.running != running || self.pending.len() >= MAX_STEPS {
            self.flush();
        }
        if self.running != running {
            (self.running, self.pace) = (running, Pace::default());
        }
        let us = |d: Duration| d.as_secs_f64() * 1e6;
        self.pending.push(StepRecord {
            step,
            compute_us: us(costs.compute),
            comp_us: us(costs.comp),
            sync_us: us(costs.sync),
            wait_us: None,
            step_us: us(costs.step),
            bytes_sent: costs.bytes,
            gain: costs.energy.gain().clamp(LEAST_GAIN, 1.0),
            loss: loss.filter(|l| l.is_finite()),
            accuracy: None,
        });
        if self.pace.is_due(self.last_flush.elapsed(), &self.pending) {
            self.flush();
        }
    }

    /// Hands on what has gathered.
    pub fn flush(&mut self) {
        self.last_flush = Instant::now();
        let steps = std::mem::take(&mut self.pending);
        if let Some((version, ran)) = self.running
            && !steps.is_empty()
        {
            self.pace.reported(&steps);
            let (job, rank, version, strategy) = (self.job.clone(), self.rank.0, version.0, ran.into());
            self.send(FromTrainer::Steps(StepsReport { job, rank, version, strategy, steps }));
        }
    }

    /// A decision is in force.
    pub fn applied(&mut self, in_force: &InForce) {
        self.flush();
        self.send(FromTrainer::Applied(AppliedReport {
            job: self.job.clone(),
            rank: self.rank.0,
            version: in_force.version.0,
            digest: in_force.strategy.digest().0,
            step: in_force.since_step,
        }));
    }

    /// Says goodbye, without waiting for long.
    pub fn finish(&mut self) {
        self.flush();
        if let Some(client) = self.client.take() {
            client.finish(FLUSH_TIMEOUT);
        }
    }
}
