//! Runs whose strategy changes while they train: real training, real agreement of the ranks, and whoever decides beside the job,
//! all under the clock of one network.

use crate::cells::{Cell, Net};
use crate::fixed::{self, TEST_EVERY};
use crate::ranks::Data;
use crate::trainers::{Around, Ticked, Trainers};
use anyhow::Result;
use flexcomm_domain::{Decision, JobId, Strategy, Timestamp, Version};
use flexcomm_trainer::InForce;
use flexcomm_truth::coefficients::Coefficients;
use flexcomm_truth::job::Token;
use flexcomm_truth::network::{Happened, Network};
use flexcomm_wire::{DecisionOrder, FromTrainer, Hello, JobOrders};
use serde::{Deserialize, Serialize};
use std::sync::Arc;

/// What runs beside the job: agents and controller, nothing, or a script. Its clock is that of the network.
pub trait Beside {
    /// Of its timers and messages, see [`Token::Other`].
    type Token: Copy;

    /// Whether the ranks agree anew in every step, as they do where a step takes a second, and not every 20 ms: what is ordered during
    /// a step is then in force two steps after it. Nothing is sent for it.
    const EVERY_STEP: bool = false;

    /// When it begins, in seconds of the job's clock: at most 0, when the job does. Until then it has the network for itself.
    fn begins_at(&self) -> f64 {
        0.0
    }

    /// At that moment.
    fn begin(&mut self, net: &mut Net<Self::Token>);

    /// Before the first step, at time 0: one [`Hello`] for each rank, in order.
    fn join(&mut self, network: &mut Network<Token<Self::Token>>, hellos: Vec<Hello>);

    /// A timer or a message of its own, at `network.now()`.
    fn happened(&mut self, network: &mut Network<Token<Self::Token>>, what: Happened<Self::Token>);

    /// A rank's trainer says something to the agent of its node, at `network.now()`. Never [`FromTrainer::Hello`].
    fn says(&mut self, network: &mut Network<Token<Self::Token>>, rank: usize, message: FromTrainer);

    /// What a rank's agent has sent to the trainer since the last call: the newest only, as the trainer keeps it.
    fn orders(&mut self, rank: usize) -> Option<JobOrders>;

    /// Bytes of throughput tests since the job began.
    fn bytes(&self) -> f64 {
        0.0
    }

    /// What the decisions so far promised.
    fn promised(&self) -> Vec<Promise> {
        Vec::new()
    }
}

/// What a decision says that its strategy takes.
#[derive(Debug, Clone, PartialEq)]
pub struct Promise {
    /// Of the decision.
    pub version: u64,
    /// When it was made, seconds since the job's start.
    pub at_s: f64,
    /// Its strategy.
    pub strategy: Strategy,
    /// Seconds of synchronisation in a step (t_sync).
    pub sync_s: f64,
}

/// What a run showed, whoever decided.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct Ran {
    /// When each step of training ended on the last rank, seconds since the start; the time of trials is within.
    pub ends: Vec<f64>,
    /// Test losses every [`crate::fixed::TEST_EVERY`] steps, the first before any.
    pub losses: Vec<f64>,
    /// At the end.
    pub accuracy: f64,
    /// Whether training ended early: values that are not finite.
    pub diverged: bool,
    /// Strategies that came into force, in order, the first with the first step.
    pub switches: Vec<Switch>,
    /// What was spent to find out.
    pub experiments: Experiments,
    /// What decisions promised against what came.
    pub predictions: Vec<Prediction>,
    /// Requests, reports and parts of orders that were refused, with the reasons.
    pub problems: Vec<String>,
}

/// A strategy that came into force.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Switch {
    /// The first step under it.
    pub step: u64,
    /// When the step before it ended, seconds since the start.
    pub at_s: f64,
    /// Of its decision; 0 of what was in force at first.
    pub version: u64,
    /// What.
    pub strategy: String,
}

/// What was spent on experiments.
#[derive(Debug, Clone, Copy, Default, PartialEq, Serialize, Deserialize)]
pub struct Experiments {
    /// Of live trials, in which nothing was learned.
    pub seconds: f64,
    /// That all ranks sent in trials, and agents in throughput tests.
    pub bytes: f64,
    /// Of all ranks' cores, for trials and for shadow trials.
    pub cpu_seconds: f64,
}

/// A decision's promise and the truth.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Prediction {
    /// When it was made, seconds since the start.
    pub at_s: f64,
    /// Its strategy.
    pub strategy: String,
    /// Seconds of synchronisation in a step (t_sync), as predicted.
    pub predicted_s: f64,
    /// And in the mean over the steps until the next switch or the next change of the network.
    pub true_s: f64,
}

/// A cell's network at the job's first step, with what runs beside it.
pub fn begin<B: Beside>(
    cell: &Cell,
    truth: &Coefficients,
    seed: u64,
    hellos: Vec<Hello>,
    beside: &mut B,
) -> Net<B::Token> {
    let mut net = Net::beginning_at(beside.begins_at(), cell, truth, seed);
    beside.begin(&mut net);
    idle(&mut net.network, beside, 0.0);
    beside.join(&mut net.network, hellos);
    net
}

/// Lets what runs beside the job go on until a moment, while the job has nothing under way.
pub fn idle<B: Beside>(network: &mut Network<Token<B::Token>>, beside: &mut B, until: f64) {
    while let Some(what) = network.advance_before(until) {
        let what = match what {
            Happened::Delivered(Token::Other(token)) => Happened::Delivered(token),
            Happened::Timer(Token::Other(token)) => Happened::Timer(token),
            _ => continue,
        };
        beside.happened(network, what);
    }
}

/// Trains a cell's job with `initial` in force at first, and with what is decided beside it.
pub fn run<B: Beside>(
    cell: &Cell,
    truth: &Coefficients,
    data: &Arc<Data>,
    seed: u64,
    initial: Strategy,
    beside: &mut B,
) -> Result<Ran> {
    let mut trainers = Trainers::new(cell, truth, data, seed, initial)?;
    let mut net = begin(cell, truth, seed, trainers.hellos()?, beside);
    let mut around = Around { net: &mut net, beside };
    let first = Switch { step: 0, at_s: 0.0, version: 0, strategy: initial.to_string() };
    let losses = vec![trainers.test().loss];
    let mut ran = Ran { switches: vec![first], losses, ..Ran::default() };
    let (mut now, mut syncs) = (0.0, Vec::new());
    while trainers.step() < cell.steps {
        let Some(ticked) = trainers.tick(&mut around)? else {
            ran.diverged = true;
            break;
        };
        ran.spend(&ticked, ticked.ended - now);
        now = ticked.ended;
        if ticked.tick.trial.is_none() {
            ran.ends.push(now);
            syncs.push(ticked.sync_s());
            if trainers.step().is_multiple_of(TEST_EVERY) {
                ran.losses.push(trainers.test().loss);
            }
        }
        let switch = |new: InForce| {
            let strategy = new.strategy.to_string();
            Switch { step: new.since_step, at_s: now, version: new.version.0, strategy }
        };
        ran.switches.extend(ticked.switched.map(switch));
    }
    ran.losses.iter_mut().for_each(|loss| *loss = fixed::finite(*loss));
    ran.accuracy = trainers.test().accuracy;
    ran.experiments.bytes += beside.bytes();
    ran.predictions = ran.kept(&beside.promised(), &syncs, &cell.changes(now));
    Ok(ran)
}

impl Ran {
    fn spend(&mut self, ticked: &Ticked, seconds: f64) {
        let spent = &mut self.experiments;
        spent.cpu_seconds += ticked.shadows_s * ticked.costs.len() as f64;
        if ticked.tick.trial.is_some() {
            spent.seconds += seconds;
            spent.bytes += ticked.costs.iter().map(|costs| costs.bytes as f64).sum::<f64>();
            spent.cpu_seconds +=
                ticked.costs.iter().map(|costs| (costs.compute + costs.comp).as_secs_f64()).sum::<f64>();
        }
    }

    /// Promises of decisions that came into force, each with the mean of `syncs`, a value for each step, over the steps until another
    /// one does or the network changes.
    fn kept(&self, promises: &[Promise], syncs: &[f64], changes: &[f64]) -> Vec<Prediction> {
        let predicted = |promise: &Promise| {
            let at = self.switches.iter().position(|switch| switch.version == promise.version)?;
            let Switch { step, at_s, ref strategy, .. } = self.switches[at];
            let last = self.switches.get(at + 1).map_or(u64::MAX, |next| next.step);
            let change = changes.iter().copied().find(|change| *change > at_s).unwrap_or(f64::INFINITY);
            let steps =
                (step as usize..syncs.len()).take_while(|step| (*step as u64) < last && self.ends[*step] <= change);
            let (count, sum) = steps.fold((0, 0.0), |(count, sum), step| (count + 1, sum + syncs[step]));
            let true_s = (count > 0).then(|| sum / f64::from(count))?;
            Some(Prediction { at_s: promise.at_s, strategy: strategy.clone(), predicted_s: promise.sync_s, true_s })
        };
        promises.iter().filter_map(predicted).collect()
    }
}

/// Orders strategies at given times, each in force two steps after the one that was under way.
#[derive(Debug)]
pub struct Script {
    changes: Vec<Change>,
    job: Option<JobId>,
    /// How many were ordered; and whether the trainer has the last of them.
    ordered: usize,
    taken: usize,
}

/// A strategy that is ordered at a time.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Change {
    /// Seconds since the start.
    pub at_s: f64,
    /// What.
    pub strategy: Strategy,
}

impl Script {
    /// In order of time.
    pub fn new(changes: Vec<Change>) -> Self {
        Self { changes, job: None, ordered: 0, taken: 0 }
    }
}

impl Beside for Script {
    type Token = ();
    const EVERY_STEP: bool = true;

    fn begin(&mut self, net: &mut Net<()>) {
        self.changes.iter().for_each(|change| net.network.timer(change.at_s, Token::Other(())));
    }

    fn join(&mut self, _: &mut Network<Token<()>>, hellos: Vec<Hello>) {
        self.job = hellos.into_iter().next().map(|hello| hello.job);
    }

    fn happened(&mut self, _: &mut Network<Token<()>>, _: Happened<()>) {
        self.ordered += 1;
    }

    fn says(&mut self, _: &mut Network<Token<()>>, _: usize, _: FromTrainer) {}

    fn orders(&mut self, rank: usize) -> Option<JobOrders> {
        if rank > 0 || self.taken == self.ordered {
            return None;
        }
        self.taken = self.ordered;
        let (job, version) = (self.job.clone()?, self.ordered as u64);
        let Change { at_s, strategy } = self.changes[self.ordered - 1];
        let decision = Decision {
            job: job.clone(),
            version: Version(version),
            parent: Version(version - 1),
            strategy,
            decided_at: Timestamp((at_s * 1e6) as u64),
            reason: String::new(),
        };
        Some(JobOrders { job, decision: Some(DecisionOrder::from(&decision)), trial: None })
    }
}
