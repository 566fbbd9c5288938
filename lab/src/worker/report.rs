//! Telemetry: gathers steps, and hands them to the agent's client a few at a time.

use super::state::StepOutcome;
use flexcomm_compression::{Layers, Sizes};
use flexcomm_domain::spec::CompressorSpec;
use flexcomm_domain::{Collective, JobId, Rank, Strategy, Version, default_compressors};
use flexcomm_trainer::{Client, InForce, Tick};
use flexcomm_wire::{
    AppliedReport, CodecInfo, FromTrainer, Hello, MAX_STEPS, PROTOCOL, StepRecord, StepsReport, TrialReport,
};
use std::collections::BTreeMap;
use std::net::IpAddr;
use std::path::Path;
use std::time::{Duration, Instant};

/// What moves the bytes: coefficients of the cost model are fitted per backend.
pub const BACKEND: &str = "lab-tcp";

/// Steps wait for at most this long before they are handed on.
const FLUSH: Duration = Duration::from_millis(200);

/// How long the end of the job waits for the agent to take the last reports.
const LAST_WORDS: Duration = Duration::from_secs(1);

/// Least gain in a report: gain is a share above 0, and a rank whose own part was empty still reports.
pub(super) const LEAST_GAIN: f64 = 1e-9;

/// A rank's reports. Without an agent they go nowhere.
pub struct Reporter {
    client: Option<Client>,
    job: JobId,
    rank: Rank,
    pending: Vec<StepRecord>,
    running: Option<(Version, Strategy)>,
    last_flush: Instant,
}

/// What this worker is, for its agent.
pub fn hello(job: &JobId, rank: Rank, world: usize, layers: &Layers) -> Hello {
    let families = std::iter::once(CompressorSpec::NONE.into()).chain(default_compressors());
    Hello {
        protocol: PROTOCOL,
        job: job.clone(),
        run: None,
        rank: rank.0,
        world: world as u32,
        gradient_values: layers.values() as u64,
        backend: BACKEND.into(),
        codecs: families.map(|family| CodecInfo::new(family, Sizes::codec(family, layers))).collect(),
        collectives: Collective::ALL.iter().map(ToString::to_string).collect(),
    }
}

impl Reporter {
    /// To the agent behind `socket`, when there is one.
    pub fn new(socket: Option<&Path>, hello: Hello) -> std::io::Result<Self> {
        let (job, rank) = (hello.job.clone(), Rank(hello.rank));
        let client = socket.map(|socket| Client::start(socket, hello)).transpose()?;
        Ok(Self { client, job, rank, pending: Vec::new(), running: None, last_flush: Instant::now() })
    }

    /// The agent's client.
    pub fn client(&self) -> Option<&Client> {
        self.client.as_ref()
    }

    fn send(&self, message: FromTrainer) {
        if let Some(client) = &self.client {
            client.send(message);
        }
    }

    /// Takes a step in.
    pub fn step(&mut self, tick: &Tick, outcome: &StepOutcome, accuracy: Option<f64>) {
        let running = Some((tick.version, tick.strategy));
        if self.running != running || self.pending.len() >= MAX_STEPS {
            self.flush();
            self.running = running;
        }
        let us = |d: Duration| d.as_secs_f64() * 1e6;
        let loss = f64::from(outcome.loss);
        self.pending.push(StepRecord {
            step: tick.step,
            compute_us: us(outcome.compute),
            comp_us: us(outcome.cost.comp),
            sync_us: us(outcome.cost.sync),
            wait_us: outcome.cost.wait.map(us),
            step_us: us(outcome.step),
            bytes_sent: outcome.cost.bytes,
            gain: outcome.cost.energy.gain().clamp(LEAST_GAIN, 1.0),
            loss: loss.is_finite().then_some(loss),
            accuracy,
        });
        if self.last_flush.elapsed() >= FLUSH {
            self.flush();
        }
    }

    /// Hands on what has gathered.
    pub fn flush(&mut self) {
        self.last_flush = Instant::now();
        let steps = std::mem::take(&mut self.pending);
        if let Some((version, strategy)) = self.running
            && !steps.is_empty()
        {
            let (job, rank, strategy) = (self.job.clone(), self.rank.0, strategy.into());
            self.send(FromTrainer::Steps(StepsReport { job, rank, version: version.0, strategy, steps }));
        }
    }

    /// Passive samples of links.
    pub fn transfers(&self, samples: BTreeMap<IpAddr, Vec<(u64, f64)>>) {
        for (peer, samples) in samples {
            self.send(FromTrainer::Transfers { peer, samples });
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

    /// A trial ended.
    pub fn trial(&self, report: TrialReport) {
        self.send(FromTrainer::Trial(report));
    }

    /// Says goodbye, without waiting for long.
    pub fn finish(mut self) {
        self.flush();
        if let Some(client) = self.client.take() {
            client.finish(LAST_WORDS);
        }
    }
}
