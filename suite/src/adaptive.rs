//! Runs whose strategy changes while they train: real training, real agreement of the ranks, and whoever decides beside the job,
//! all under the clock of one network.

use crate::cells::{Cell, Net};
use crate::fixed::{self, TEST_EVERY};
use crate::ranks::Data;
use crate::score;
use crate::trainers::{JobContext, Ticked, Trainers};
use anyhow::Result;
use flexcomm_domain::{Decision, JobId, Plan, Strategy, Timestamp, Version};
use flexcomm_trainer::InForce;
use flexcomm_truth::coefficients::Coefficients;
use flexcomm_truth::job::Token;
use flexcomm_truth::network::{Network, NetworkEvent};
use flexcomm_wire::{DecisionOrder, FromTrainer, Hello, JobOrders};
use serde::{Deserialize, Serialize};
use std::iter::Sum;
use std::sync::Arc;

/// What runs beside the job: agents and controller, nothing, or a script. Its clock is that of the network.
pub trait ControlPlane {
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
    fn handle(&mut self, network: &mut Network<Token<Self::Token>>, what: NetworkEvent<Self::Token>);

    /// A rank's trainer says something to the agent of its node, at `network.now()`. Never [`FromTrainer::Hello`].
    fn report(&mut self, network: &mut Network<Token<Self::Token>>, rank: usize, message: FromTrainer);

    /// What a rank's agent has sent to the trainer since the last call: the newest only, as the trainer keeps it.
    fn orders(&mut self, rank: usize) -> Option<JobOrders>;

    /// Bytes of throughput tests since the job began.
    fn bytes(&self) -> f64 {
        0.0
    }

    /// What decisions promised so far, and what looks that kept the strategy in force predicted of it, each oldest first.
    fn predictions(&self) -> Vec<Prediction> {
        Vec::new()
    }
}

/// What a decision says that its strategy takes, or a look that the one in force does.
#[derive(Debug, Clone, PartialEq)]
pub struct Prediction {
    /// Of the decision; none of a look.
    pub version: Option<u64>,
    /// When it was made, seconds since the job's start.
    pub at_s: f64,
    /// Its plan.
    pub plan: Plan,
    /// Seconds of synchronisation in a step (t_sync).
    pub sync_s: f64,
}

/// What a run showed, whoever decided.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct AdaptiveRun {
    /// When each step of training ended on the last rank, seconds since the start; the time of trials is within.
    pub ends: Vec<f64>,
    /// Test losses every [`crate::fixed::TEST_EVERY`] steps, the first before any, as far as they are of use.
    pub losses: Vec<f64>,
    /// At the end of training, where it came there.
    pub accuracy: Option<f64>,
    /// Whether training ended early: values that are not finite.
    pub diverged: bool,
    /// Strategies that came into force, in order, the first with the first step.
    pub switches: Vec<Switch>,
    /// What was spent to find out, and when.
    pub spent: Vec<Spent>,
    /// What was predicted against what came: of each decision, and of the strategy in force after each change of the network.
    pub predictions: Vec<RatedPrediction>,
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
    /// By which shadow trials made steps longer, if nothing else was waited for meanwhile.
    #[serde(default)]
    pub shadow_seconds: f64,
    /// That all ranks sent in trials, and agents in throughput tests.
    pub bytes: f64,
    /// Of all ranks' cores, for trials and for shadow trials.
    pub cpu_seconds: f64,
}

impl Sum for Experiments {
    fn sum<I: Iterator<Item = Self>>(all: I) -> Self {
        all.fold(Self::default(), |sum, one| Self {
            seconds: sum.seconds + one.seconds,
            shadow_seconds: sum.shadow_seconds + one.shadow_seconds,
            bytes: sum.bytes + one.bytes,
            cpu_seconds: sum.cpu_seconds + one.cpu_seconds,
        })
    }
}

/// What a step, or an iteration of a live trial, had of experiments.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct Spent {
    /// When it ended, seconds since the start.
    pub at_s: f64,
    /// What.
    pub on: Experiments,
}

/// What was predicted and the truth.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct RatedPrediction {
    /// When it was made, seconds since the start.
    pub at_s: f64,
    /// Of which strategy.
    pub strategy: String,
    /// Seconds of synchronisation in a step (t_sync), as predicted.
    pub predicted_s: f64,
    /// And in the mean over the steps from then on, until the next switch or the next change of the network.
    pub true_s: f64,
}

/// A cell's network at the job's first step, with what runs beside it.
pub fn begin<B: ControlPlane>(
    cell: &Cell,
    truth: &Coefficients,
    seed: u64,
    hellos: Vec<Hello>,
    control_plane: &mut B,
) -> Net<B::Token> {
    let mut net = Net::beginning_at(control_plane.begins_at(), cell, truth, seed);
    control_plane.begin(&mut net);
    idle(&mut net.network, control_plane, 0.0);
    control_plane.join(&mut net.network, hellos);
    net
}

/// Lets what runs beside the job go on until a moment, while the job has nothing under way.
pub fn idle<B: ControlPlane>(network: &mut Network<Token<B::Token>>, control_plane: &mut B, until: f64) {
    while let Some(what) = network.advance_before(until) {
        let what = match what {
            NetworkEvent::Delivered(Token::Other(token)) => NetworkEvent::Delivered(token),
            NetworkEvent::Timer(Token::Other(token)) => NetworkEvent::Timer(token),
            _ => continue,
        };
        control_plane.handle(network, what);
    }
}

/// How far a run is of use.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct RunUntil {
    /// Once the smoothed curve of test losses has reached this, no more are taken.
    pub target: f64,
    /// Nor after so many seconds.
    pub late_s: f64,
    /// Whether it trains on to its last step, for the final accuracy.
    pub is_whole: bool,
}

impl RunUntil {
    /// Everything of a run is of use.
    pub const WHOLE: Self = Self { target: f64::NEG_INFINITY, late_s: f64::INFINITY, is_whole: true };

    /// Whether later losses could change nothing: smoothing looks one ahead.
    fn is_reached(&self, losses: &[f64]) -> bool {
        let smooth = score::smooth(&fixed::points(losses));
        score::steps_to(&smooth[..smooth.len().saturating_sub(1)], self.target).is_some()
    }
}

/// Trains a cell's job with `initial` in force at first, and with what is decided beside it.
pub fn run<B: ControlPlane>(
    cell: &Cell,
    truth: &Coefficients,
    data: &Arc<Data>,
    seed: u64,
    initial: Strategy,
    control_plane: &mut B,
    goal: RunUntil,
) -> Result<AdaptiveRun> {
    let mut trainers = Trainers::new(cell, truth, data, seed, initial)?;
    let mut net = begin(cell, truth, seed, trainers.hellos()?, control_plane);
    let mut context = JobContext { net: &mut net, control_plane };
    let first = Switch { step: 0, at_s: 0.0, version: 0, strategy: initial.to_string() };
    // As curves of fixed settings are recorded.
    let loss = |trainers: &mut Trainers<'_>| fixed::rounded(fixed::finite(trainers.test().loss));
    let losses = vec![loss(&mut trainers)];
    let mut ran = AdaptiveRun { switches: vec![first], losses, ..AdaptiveRun::default() };
    let (mut now, mut tested, mut syncs, mut is_seen) = (0.0, 0.0, Vec::new(), false);
    while trainers.step() < cell.steps && (goal.is_whole || !is_seen) {
        let Some(ticked) = trainers.tick(&mut context)? else {
            ran.diverged = true;
            break;
        };
        ran.spend(&ticked, ticked.ended - now, context.control_plane.bytes() - tested);
        tested = context.control_plane.bytes();
        now = ticked.ended;
        if ticked.tick.trial.is_none() {
            ran.ends.push(now);
            syncs.push(ticked.sync_s());
            if trainers.step().is_multiple_of(TEST_EVERY) && !is_seen {
                ran.losses.push(loss(&mut trainers));
                is_seen = goal.is_reached(&ran.losses) || now > goal.late_s;
            }
        }
        let switch = |new: InForce| {
            let strategy = new.plan.to_string();
            Switch { step: new.since_step, at_s: now, version: new.version.0, strategy }
        };
        ran.switches.extend(ticked.switched.map(switch));
    }
    if trainers.step() >= cell.steps || ran.diverged {
        ran.accuracy = Some(trainers.test().accuracy);
    }
    ran.problems = trainers.problems();
    let (predicted, changes) = (control_plane.predictions(), cell.changes(now));
    ran.predictions = ran.rate_decisions(&predicted, &syncs, &changes);
    ran.predictions.extend(ran.rate_looks(&predicted, &syncs, &changes));
    Ok(ran)
}

impl AdaptiveRun {
    /// The part of it that was over at a time, without what was learned.
    pub(crate) fn until(&self, at_s: f64) -> Self {
        let ends = self.ends[..self.ends.partition_point(|end| *end <= at_s)].to_vec();
        let spent = self.spent.iter().copied().filter(|spent| spent.at_s <= at_s).collect();
        Self { ends, spent, switches: self.switches.clone(), ..Self::default() }
    }

    fn spend(&mut self, ticked: &Ticked, seconds: f64, test_bytes: f64) {
        let ranks = ticked.costs.len() as f64;
        let mut on = Experiments {
            shadow_seconds: ticked.shadows_s,
            bytes: test_bytes,
            cpu_seconds: ranks * ticked.shadows_s,
            ..Experiments::default()
        };
        if ticked.tick.trial.is_some() {
            on.seconds = seconds;
            on.bytes += ticked.costs.iter().map(|costs| costs.bytes as f64).sum::<f64>();
            on.cpu_seconds += ticked.costs.iter().map(|costs| (costs.compute + costs.comp).as_secs_f64()).sum::<f64>();
        }
        self.spent.extend((on != Experiments::default()).then_some(Spent { at_s: ticked.ended, on }));
    }

    /// Promises of decisions that came into force, each with the mean of `syncs`, a value for each step, over the steps until another
    /// one does or the network changes.
    fn rate_decisions(&self, predictions: &[Prediction], syncs: &[f64], changes: &[f64]) -> Vec<RatedPrediction> {
        let predicted = |prediction: &Prediction| {
            let at = self.switches.iter().position(|switch| Some(switch.version) == prediction.version)?;
            let Switch { step, at_s, ref strategy, .. } = self.switches[at];
            let last = self.switches.get(at + 1).map_or(u64::MAX, |next| next.step);
            let change = changes.iter().copied().find(|change| *change > at_s).unwrap_or(f64::INFINITY);
            let steps =
                (step as usize..syncs.len()).take_while(|step| (*step as u64) < last && self.ends[*step] <= change);
            let (count, sum) = steps.fold((0, 0.0), |(count, sum), step| (count + 1, sum + syncs[step]));
            let true_s = (count > 0).then(|| sum / f64::from(count))?;
            Some(RatedPrediction {
                at_s: prediction.at_s,
                strategy: strategy.clone(),
                predicted_s: prediction.sync_s,
                true_s,
            })
        };
        predictions.iter().filter_map(predicted).collect()
    }

    /// Of each time from a change of the network to the next one or to a switch: what the newest look of its first half predicted of the
    /// strategy in force, with the mean of `syncs` over the steps of its second half.
    fn rate_looks(&self, predictions: &[Prediction], syncs: &[f64], changes: &[f64]) -> Vec<RatedPrediction> {
        let end = self.ends.last().copied().unwrap_or(0.0);
        let predicted = |(at, from): (usize, &f64)| {
            let in_force = self.switches.iter().rfind(|switch| switch.at_s <= *from)?;
            let switched = self.switches.iter().map(|switch| switch.at_s).find(|switch| switch > from);
            let until = [changes.get(at + 1).copied(), switched].into_iter().flatten().fold(end, f64::min);
            let half = (from + until) / 2.0;
            let is_of = |look: &&Prediction| (*from..=half).contains(&look.at_s) && look.version.is_none();
            let newest = predictions.iter().rfind(is_of);
            let look = newest.filter(|look| look.plan.to_string() == in_force.strategy)?;
            let first = 1 + self.ends.partition_point(|ended| *ended < half);
            let steps = syncs.get(first..self.ends.partition_point(|ended| *ended <= until))?;
            let true_s = (!steps.is_empty()).then(|| steps.iter().sum::<f64>() / steps.len() as f64)?;
            let strategy = in_force.strategy.clone();
            Some(RatedPrediction { at_s: look.at_s, strategy, predicted_s: look.sync_s, true_s })
        };
        changes.iter().enumerate().take_while(|(_, from)| **from < end).filter_map(predicted).collect()
    }
}

/// Orders strategies at given times, each in force two steps after the one that was under way.
#[derive(Debug)]
pub struct Script {
    changes: Vec<TimedOrder>,
    job: Option<JobId>,
    /// How many were ordered; and whether the trainer has the last of them.
    ordered: usize,
    taken: usize,
}

/// A strategy that is ordered at a time.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct TimedOrder {
    /// Seconds since the start.
    pub at_s: f64,
    /// What.
    pub strategy: Strategy,
}

impl Script {
    /// In order of time.
    pub fn new(changes: Vec<TimedOrder>) -> Self {
        Self { changes, job: None, ordered: 0, taken: 0 }
    }
}

impl ControlPlane for Script {
    type Token = ();
    const EVERY_STEP: bool = true;

    fn begin(&mut self, net: &mut Net<()>) {
        self.changes.iter().for_each(|change| net.network.timer(change.at_s, Token::Other(())));
    }

    fn join(&mut self, _: &mut Network<Token<()>>, hellos: Vec<Hello>) {
        self.job = hellos.into_iter().next().map(|hello| hello.job);
    }

    fn handle(&mut self, _: &mut Network<Token<()>>, _: NetworkEvent<()>) {
        self.ordered += 1;
    }

    fn report(&mut self, _: &mut Network<Token<()>>, _: usize, _: FromTrainer) {}

    fn orders(&mut self, rank: usize) -> Option<JobOrders> {
        if rank > 0 || self.taken == self.ordered {
            return None;
        }
        self.taken = self.ordered;
        let (job, version) = (self.job.clone()?, self.ordered as u64);
        let TimedOrder { at_s, strategy } = self.changes[self.ordered - 1];
        let decision = Decision {
            job: job.clone(),
            version: Version(version),
            parent: Version(version - 1),
            plan: strategy.into(),
            decided_at: Timestamp((at_s * 1e6) as u64),
            reason: String::new(),
        };
        Some(JobOrders { job, decision: Some(DecisionOrder::from(&decision)), trial: None })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Steps of 1 s; the network changes at 10, 20 and 30 s, the run ends at 34 s, and there is a switch at 16 s.
    #[test]
    fn what_is_in_force_after_a_change_is_rated() {
        let (other, dense) = ("fp16/dense-ring".parse().unwrap(), Strategy::DENSE_RING);
        let switch = |step: u64, strategy: Strategy| Switch {
            step,
            at_s: step as f64,
            version: step,
            strategy: strategy.to_string(),
        };
        let ends = (1..=34).map(f64::from).collect();
        let ran = AdaptiveRun { ends, switches: vec![switch(0, dense), switch(16, other)], ..AdaptiveRun::default() };
        let look = |at_s, strategy: Strategy, sync_s| Prediction { version: None, at_s, plan: strategy.into(), sync_s };
        let decision = Prediction { version: Some(16), ..look(14.0, other, 7.0) };
        let looks = [
            look(9.9, dense, 9.0),
            look(11.0, dense, 1.0),
            look(12.5, dense, 2.0),
            decision,
            look(13.5, dense, 3.0),
            // Of what is no longer in force.
            look(25.0, dense, 4.0),
            look(31.0, other, 5.0),
        ];
        let syncs: Vec<f64> = (0..34).map(f64::from).collect();
        let rated = ran.rate_looks(&looks, &syncs, &[10.0, 20.0, 30.0, 40.0]);
        let rated: Vec<_> = rated.iter().map(|p| (p.at_s, p.predicted_s, p.true_s)).collect();
        // Halves at 13 and 32 s: steps 13 to 15 (that from 13 to 14 s is number 13), and 32 and 33.
        assert_eq!(rated, [(12.5, 2.0, 14.0), (31.0, 5.0, 32.5)]);
        assert_eq!(ran.rate_decisions(&looks, &syncs, &[10.0, 20.0, 30.0, 40.0]).len(), 1, "the decision");
    }
}
