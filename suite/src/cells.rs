//! A cell: one job on one network, as a file. What its keys mean stands in README.md.

use crate::files;
use crate::ranks::{Model, Recipe};
use crate::steps::{self, Compute, Stragglers};
use anyhow::{Context, Result, bail, ensure};
use flexcomm_domain::{Digest, Family};
use flexcomm_truth::coefficients::Coefficients;
use flexcomm_truth::job::{Mesh, Token};
use flexcomm_truth::network::{Burst, ConnectionId, Network, Port, PortId};
use flexcomm_truth::trace::{Step, Trace};
use rand::SeedableRng;
use rand_chacha::ChaCha8Rng;
use serde::{Deserialize, Serialize};
use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;

/// A job and its network.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Cell {
    /// Of the file, without its end.
    #[serde(skip)]
    pub name: String,
    /// Cells of one family count as one.
    pub family: String,
    /// Seconds between changes of the network.
    pub phase_s: f64,
    /// N.
    pub world: usize,
    /// What is trained.
    pub model: Model,
    /// Of SGD.
    pub momentum: f32,
    /// At the start; falls linearly to a tenth.
    pub learning_rate: f64,
    /// Images of all ranks in a step.
    pub batch: usize,
    /// Of a run, at most.
    pub steps: u64,
    /// One run each.
    pub seeds: Vec<u64>,
    /// Forward and backward of a step on a rank.
    pub compute_s: f64,
    /// Each value of the gradient stands for so many.
    pub values_factor: f64,
    /// Times of compression over those of the truth's table.
    pub codec_factor: f64,
    /// The same of single compressors, by name, on top of that.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub codec_factors: BTreeMap<String, f64>,
    /// A dense step's transfers over its computing, without overlap, in the mean of the phases.
    pub communication_ratio: f64,
    /// Ranks of a node, which share its NIC and its agent.
    #[serde(default = "one")]
    pub ranks_per_nic: usize,
    /// Of every NIC, each way: megabytes of credit that go at [`Self::burst_mbit`] where that is faster than its bandwidth. The credit
    /// is full at first, and comes back with what bandwidth is left.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub burst_mbytes: Option<f64>,
    /// Its bandwidth while it has credit.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub burst_mbit: Option<f64>,
    /// How ranks differ from step to step.
    pub stragglers: Stragglers,
    /// One after the other, then again from the first.
    #[serde(rename = "phase")]
    pub phases: Vec<Phase>,
}

fn one() -> usize {
    1
}

/// What is left to chance in a cell; each has numbers of its own.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Chance {
    /// Losses.
    Network = 1,
    /// How long ranks compute in a step of training, whatever it runs: all settings of a seed meet the same stragglers.
    Steps = 2,
    /// The same in iterations of trials.
    Trials = 3,
    /// What the random control chooses.
    Control = 4,
}

/// Some time in which the network stays as it is.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Phase {
    /// How long.
    pub seconds: f64,
    /// One way, between any two NICs.
    pub latency_ms: f64,
    /// Of every NIC, out.
    pub up_mbit: f64,
    /// Of every NIC, in.
    pub down_mbit: f64,
    /// NICs that differ.
    #[serde(default, rename = "nic", skip_serializing_if = "Vec::is_empty")]
    pub nics: Vec<NicOverride>,
}

/// A NIC that differs from the others.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct NicOverride {
    /// Which, from 0.
    pub nic: usize,
    /// Its bandwidth over the others'.
    #[serde(default = "whole")]
    pub bandwidth_factor: f64,
    /// Its latency over the others'.
    #[serde(default = "whole")]
    pub latency_factor: f64,
    /// Long-lived flows of others that share it, each way.
    #[serde(default)]
    pub competitors: u32,
}

fn whole() -> f64 {
    1.0
}

impl Cell {
    /// Reads a file.
    pub fn read(path: &Path) -> Result<Self> {
        let text = std::fs::read_to_string(path).with_context(|| format!("failed to read cell {}", path.display()))?;
        let mut cell: Self =
            toml::from_str(&text).with_context(|| format!("failed to read cell {}", path.display()))?;
        cell.name = path.file_stem().map(|name| name.to_string_lossy().into_owned()).unwrap_or_default();
        cell.check().with_context(|| format!("failed to use cell {}", path.display()))?;
        Ok(cell)
    }

    /// All cells of a folder, by name.
    pub fn read_all(folder: &Path) -> Result<Vec<Self>> {
        let paths = files::in_folder(folder, |name| name.ends_with(".toml"))?;
        ensure!(!paths.is_empty(), "{} has no cells (files NAME.toml)", folder.display());
        paths.iter().map(|path| Self::read(path)).collect()
    }

    /// Random numbers of a run: other ones in each cell.
    pub fn rng(&self, seed: u64, of: Chance) -> ChaCha8Rng {
        let mut rng = ChaCha8Rng::seed_from_u64(Digest::of(&format!("{}/{seed}", self.name)).0);
        rng.set_stream(of as u64);
        rng
    }

    fn check(&self) -> Result<()> {
        let within = |what: &str, value: f64, low: f64, high: f64| {
            ensure!((low..=high).contains(&value), "{what} is {value}, allowed is {low} to {high}");
            Ok(())
        };
        within("world", self.world as f64, 2.0, 64.0)?;
        within("steps", self.steps as f64, 1.0, 1_500.0)?;
        within("batch", self.batch as f64, self.world as f64, 4096.0)?;
        within("momentum", f64::from(self.momentum), 0.0, 0.999)?;
        within("learning_rate", self.learning_rate, 1e-6, 10.0)?;
        within("compute_s", self.compute_s, 1e-4, 1e3)?;
        within("values_factor", self.values_factor, 1e-3, 1e6)?;
        within("codec_factor", self.codec_factor, 0.0, 1e4)?;
        for (name, factor) in &self.codec_factors {
            let family = Family::named(name);
            ensure!(family.is_ok(), "codec_factors.{name} is of no compressor that there is");
            within(&format!("codec_factors.{name}"), *factor, 0.0, 1e4)?;
        }
        within("communication_ratio", self.communication_ratio, 0.0, 1e6)?;
        within("phase_s", self.phase_s, 0.1, 1e6)?;
        within("ranks_per_nic", self.ranks_per_nic as f64, 1.0, self.world as f64)?;
        within("stragglers.spread", self.stragglers.spread, 0.0, 2.0)?;
        within("stragglers.pause_share", self.stragglers.pause_share, 0.0, 1.0)?;
        within("stragglers.pause", self.stragglers.pause, 0.0, 1e4)?;
        if self.seeds.is_empty() || self.phases.is_empty() {
            bail!("it has {} seeds and {} phases, each at least one", self.seeds.len(), self.phases.len());
        }
        ensure!(
            self.seeds.iter().collect::<BTreeSet<_>>().len() == self.seeds.len(),
            "seeds {:?} are not unique",
            self.seeds
        );
        for (number, phase) in (1..).zip(&self.phases) {
            let within = |what: &str, value, low, high| {
                within(what, value, low, high).with_context(|| format!("phase {number}"))
            };
            within("seconds", phase.seconds, 0.1, 1e6)?;
            within("latency_ms", phase.latency_ms, 0.0, 1e4)?;
            within("up_mbit", phase.up_mbit, 1e-3, 1e7)?;
            within("down_mbit", phase.down_mbit, 1e-3, 1e7)?;
            let nics: BTreeSet<usize> = phase.nics.iter().map(|odd| odd.nic).collect();
            ensure!(nics.len() == phase.nics.len(), "phase {number}: a nic is there twice");
            for odd in &phase.nics {
                within("nic", odd.nic as f64, 0.0, (self.nics() - 1) as f64)?;
                within("bandwidth_factor", odd.bandwidth_factor, 1e-4, 1e4)?;
                within("latency_factor", odd.latency_factor, 0.0, 1e4)?;
                within("competitors", f64::from(odd.competitors), 0.0, 1000.0)?;
            }
        }
        match (self.burst_mbytes, self.burst_mbit) {
            (None, None) => Ok(()),
            (Some(mbytes), Some(mbit)) => {
                within("burst_mbytes", mbytes, 1e-3, 1e9)?;
                let rates = self.phases.iter().flat_map(|phase| [phase.up_mbit, phase.down_mbit]);
                within("burst_mbit", mbit, rates.fold(f64::INFINITY, f64::min), 1e7)
                    .context("a burst must be as fast as the least up_mbit or down_mbit")
            }
            _ => bail!("it has one of burst_mbytes and burst_mbit, and needs both or none"),
        }
    }

    /// NICs of the job.
    pub fn nics(&self) -> usize {
        self.world.div_ceil(self.ranks_per_nic)
    }

    /// The NIC of a rank.
    pub fn nic(&self, rank: usize) -> usize {
        rank / self.ranks_per_nic
    }

    /// How it trains.
    pub fn recipe(&self, seed: u64) -> Recipe {
        let Self { model, world, momentum, learning_rate, batch, steps, .. } = *self;
        Recipe { model, world, momentum, learning_rate, batch, steps, seed }
    }

    /// What a step takes besides its transfers.
    pub fn compute(&self) -> Compute {
        Compute { seconds: self.compute_s, values_factor: self.values_factor }
    }

    fn burst(&self) -> Option<Burst> {
        Some(Burst { bytes: self.burst_mbytes? * 1e6, peak: self.burst_mbit? * 1e6 / 8.0 })
    }

    /// When phases begin in the first cycle, and which.
    fn phases(&self) -> impl Iterator<Item = (f64, &Phase)> {
        let begin = |at: &mut f64, phase: &'_ Phase| {
            let begins = *at;
            *at += phase.seconds;
            Some(begins)
        };
        self.phases.iter().scan(0.0, begin).zip(&self.phases)
    }

    /// Seconds of all phases.
    fn cycle_s(&self) -> f64 {
        self.phases.iter().fold(0.0, |seconds, phase| seconds + phase.seconds)
    }

    /// The phase of a moment, in seconds since the start, by its place in the cell.
    pub(crate) fn phase_at(&self, seconds: f64) -> usize {
        let within = seconds % self.cycle_s();
        self.phases().take_while(|(begins, _)| *begins <= within).count().saturating_sub(1)
    }

    /// When the network changes, up to a moment, in seconds since the start.
    pub fn changes(&self, until: f64) -> Vec<f64> {
        let cycle_s = self.cycle_s();
        let cycle = |number: u32| self.phases().map(move |(at, _)| f64::from(number) * cycle_s + at);
        (0..).flat_map(cycle).skip(1).take_while(|at| *at <= until).collect()
    }

    fn trace(&self, value: impl Fn(&Phase) -> f64) -> Trace {
        let mut steps: Vec<Step> = Vec::new();
        for (from, phase) in self.phases() {
            let value = value(phase);
            if steps.last().is_none_or(|last| last.value != value) {
                steps.push(Step { from, value });
            }
        }
        Trace::cyclic(steps, self.cycle_s()).unwrap_or_else(|| Trace::constant(0.0))
    }
}

impl Phase {
    fn nic_override(&self, nic: usize) -> Option<&NicOverride> {
        self.nics.iter().find(|odd| odd.nic == nic)
    }

    fn factor(&self, nic: usize) -> f64 {
        self.nic_override(nic).map_or(1.0, |odd| odd.bandwidth_factor)
    }

    fn latency(&self, from: usize, to: usize) -> f64 {
        let factor = |nic| self.nic_override(nic).map_or(1.0, |odd| odd.latency_factor);
        self.latency_ms * 1e-3 * f64::max(factor(from), factor(to))
    }
}

/// A cell's network, with a connection from every rank to every other.
pub struct Net<T> {
    /// Under its clock.
    pub network: Network<Token<T>>,
    /// The job's connections.
    pub mesh: Mesh,
    up: Vec<PortId>,
    down: Vec<PortId>,
}

impl<T: Copy> Net<T> {
    /// At the start of the first phase. `seed`: of losses.
    pub fn new(cell: &Cell, truth: &Coefficients, seed: u64) -> Self {
        Self::beginning_at(0.0, cell, truth, seed)
    }

    /// At another moment, in seconds: before 0 it is as in the first phase.
    pub fn beginning_at(begins: f64, cell: &Cell, truth: &Coefficients, seed: u64) -> Self {
        let nics = cell.nics();
        let port = |nic: usize, mbit: fn(&Phase) -> f64| Port {
            rate: cell.trace(|phase| mbit(phase) * phase.factor(nic) * 1e6 / 8.0),
            competitors: cell.trace(|phase| phase.nic_override(nic).map_or(0.0, |odd| f64::from(odd.competitors))),
            buffer: truth.buffer_bytes,
            burst: cell.burst(),
        };
        let ups = (0..nics).map(|nic| port(nic, |phase| phase.up_mbit));
        let downs = (0..nics).map(|nic| port(nic, |phase| phase.down_mbit));
        let rng = cell.rng(seed, Chance::Network);
        let network = Network::beginning_at(begins, truth.tcp, ups.chain(downs).collect(), rng);
        let mut net =
            Self { network, mesh: Mesh::default(), up: (0..nics).collect(), down: (nics..2 * nics).collect() };
        let between = |net: &mut Self, from: usize, to: usize| {
            (from != to).then(|| net.connect(cell, cell.nic(from), cell.nic(to)))
        };
        for _group in [steps::JOB, steps::CONTROL] {
            let ranks = 0..cell.world;
            let each = ranks.clone().map(|from| ranks.clone().map(|to| between(&mut net, from, to)).collect());
            let group = each.collect();
            net.mesh.groups.push(group);
        }
        net
    }

    /// One more connection from NIC to NIC; within one NIC no port is in its way.
    pub fn connect(&mut self, cell: &Cell, from: usize, to: usize) -> ConnectionId {
        let way = |from: usize, to: usize| {
            if from == to { Trace::constant(0.0) } else { cell.trace(|phase| phase.latency(from, to)) }
        };
        let path = if from == to { Vec::new() } else { vec![self.up[from], self.down[to]] };
        self.network.connect(path, way(from, to), way(to, from))
    }
}
