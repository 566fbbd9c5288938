//! The trainer side of all ranks of a job in one process, under the clock of the network: agreement, live trials, shadow trials and
//! telemetry are those of `flexcomm_trainer` and `flexcomm_exchange`, in the order in which the lab's worker calls them. What a step
//! costs is measured as the hook for torch does it, whose buckets are exchanged while backward goes on.
//!
//! All ranks' parts of the agreement follow from rank 0's messages and from the answers that all have, so rank 0's stands for all;
//! that they are alike is tested in `flexcomm_trainer`. The control group's messages and answers go over connections of their own,
//! as Gloo carries them for the hook. A message that may take two ticks is waited for in the first; a step's own collectives have at
//! least as many rounds. Where a script orders strategies, the agreement is free. Left out are samples of gradients for AR-Topk's
//! shadows, the copies that a trial takes and puts back, and shadows of AR-Topk, which look at some thousand values.

use crate::adaptive::ControlPlane;
use crate::cells::{Cell, Chance, Net};
use crate::fixed::bucket_values;
use crate::ranks::{Carried, Data, Ranks, Saved, Stepped, Test, buckets};
use crate::steps::{self, CONTROL, Plan, StepOf, Timeline};
use anyhow::{Context, Result};
use flexcomm_domain::spec::CompressorSpec;
use flexcomm_domain::{Family, JobId, Rank, RunId, Strategy};
use flexcomm_exchange::{How, LeaderShadows, Param, Shadows};
use flexcomm_trainer::{
    ANSWER_BYTES, AbortCause, Agreement, Answer, Change, Clocks, Control, Costs, InForce, MESSAGE_BYTES, OrdersSlot,
    Telemetry, Tick, Trial, TrialPlan, Verdict, squared_norm, takes_energies,
};
use flexcomm_truth::coefficients::{CodecSeconds, Coefficients};
use flexcomm_truth::job::{self, Do, RankTimes};
use flexcomm_wire::{CodecInfo, FromTrainer, Hello};
use rand_chacha::ChaCha8Rng;
use std::sync::Arc;
use std::time::Duration;

/// What moves the bytes.
pub const BACKEND: &str = "suite";

/// What the hook for torch offers on Gloo, whose allreduce is a ring.
const COLLECTIVES: [&str; 3] = ["dense-ring", "allgather", "art-ring"];

/// The job's name.
const JOB_NAME: &str = "suite";

/// The network, and what runs beside the job on it.
pub struct JobContext<'a, B: ControlPlane> {
    /// With its clock.
    pub net: &'a mut Net<B::Token>,
    /// Who gets what trainers report.
    pub control_plane: &'a mut B,
}

impl<B: ControlPlane> JobContext<'_, B> {
    fn send(&mut self, rank: usize, messages: impl IntoIterator<Item = FromTrainer>) {
        messages.into_iter().for_each(|message| self.control_plane.report(&mut self.net.network, rank, message));
    }
}

/// What one rank has for itself.
struct Trainer {
    telemetry: Telemetry,
    shadows: Shadows,
    leader_shadows: LeaderShadows,
}

/// A trial under way.
struct Running {
    /// Of before it.
    saved: Saved,
    /// By rank.
    averages: Vec<Trial>,
    /// By rank: whether the last iteration's loss was.
    finite: Vec<bool>,
}

/// All of them.
pub struct Trainers<'a> {
    cell: &'a Cell,
    truth: &'a Coefficients,
    job: JobId,
    run: RunId,
    model: Vec<Param>,
    ranks: Ranks,
    timeline: Timeline,
    /// Rank 0's, and the orders that only it follows.
    control: Control,
    orders: OrdersSlot,
    /// The message that was broadcast last, until it is due.
    message: Vec<u8>,
    /// Whether the hook is registered, as that for torch is from the first step on that is not dense.
    hooked: bool,
    each: Vec<Trainer>,
    trial: Option<Running>,
    /// Whether shadows look at the gradients of the next step.
    watching: bool,
    /// When each rank's next tick begins.
    starts: Vec<f64>,
    step_rng: ChaCha8Rng,
    trial_rng: ChaCha8Rng,
    problems: Vec<String>,
}

/// What a tick was.
#[derive(Debug, Clone, PartialEq)]
pub struct Ticked {
    /// The step, or the iteration of a trial.
    pub tick: Tick,
    /// When it ended on the last rank.
    pub ended: f64,
    /// By rank.
    pub costs: Vec<Costs>,
    /// Seconds that each rank's core spent on shadow trials.
    pub shadows_s: f64,
    /// What is in force from the next step on, where that has changed.
    pub switched: Option<InForce>,
}

impl Ticked {
    /// Seconds of synchronisation: on the rank that came last and waited for none, the shortest.
    pub fn sync_s(&self) -> f64 {
        self.costs.iter().map(|costs| costs.sync.as_secs_f64()).reduce(f64::min).unwrap_or_default()
    }
}

impl<'a> Trainers<'a> {
    /// Before the first step, with `initial` in force.
    pub fn new(
        cell: &'a Cell,
        truth: &'a Coefficients,
        data: &Arc<Data>,
        seed: u64,
        initial: Strategy,
    ) -> Result<Self> {
        let (world, recipe) = (cell.world, cell.recipe(seed));
        let mut model: Vec<Param> =
            buckets(&cell.model.network()).into_iter().flat_map(|layout| layout.params).collect();
        model.sort_by_key(|param| param.id);
        let (job, run) = (JobId::new(JOB_NAME).context("name the job")?, RunId(seed + 1));
        let trainer = |rank| Trainer {
            telemetry: Telemetry::new(job.clone(), Rank(rank)),
            shadows: Shadows::new(Shadows::SHARE, seed),
            leader_shadows: LeaderShadows::new(&model),
        };
        let mut control = Control::new(Agreement::new(Rank(0), initial, 0), Rank(0));
        control.steer(true);
        Ok(Self {
            cell,
            truth,
            hooked: false,
            each: (0..world as u32).map(trainer).collect(),
            orders: OrdersSlot::new(job.clone(), Some(run)),
            job,
            run,
            ranks: Ranks::new(recipe, data.clone())?,
            timeline: Timeline::new(world, bucket_values(cell.model), cell.compute(), cell.stragglers, truth.gather),
            control,
            message: Vec::new(),
            trial: None,
            watching: false,
            starts: vec![0.0; world],
            step_rng: cell.rng(seed, Chance::Steps),
            trial_rng: cell.rng(seed, Chance::Trials),
            problems: Vec::new(),
            model,
        })
    }

    /// The step that comes next.
    pub fn step(&self) -> u64 {
        self.control.look().step()
    }

    /// Over all images that are held out.
    pub fn test(&mut self) -> Test {
        self.ranks.test()
    }

    /// Orders that could not be followed.
    pub fn problems(&self) -> Vec<String> {
        let invalid = self.orders.rejected();
        let invalid = (invalid > 0).then(|| format!("{invalid} orders were not valid"));
        self.problems.iter().cloned().chain(invalid).collect()
    }

    /// The training, to look at.
    pub fn ranks(&self) -> &Ranks {
        &self.ranks
    }

    /// What each rank says of itself: the lab's hello, of as many values as the model stands for. Headers are as long as they are.
    /// Compressors that the truth does not know are left out.
    pub fn hellos(&self) -> Result<Vec<Hello>> {
        let layers = flexcomm_exchange::layers(&self.model).context("lay out the model's parameters")?;
        let factor = self.cell.values_factor;
        let is_known = |codec: &CodecInfo| {
            codec.compressor.parse().is_ok_and(|family: Family| self.codec_seconds(&family.any()).is_ok())
        };
        let hello = |rank| {
            let lab = flexcomm_lab::worker::hello(&self.job, Rank(rank), self.cell.world, &layers);
            let gradient_values = (lab.gradient_values as f64 * factor).round() as u64;
            Hello {
                run: Some(self.run),
                gradient_values,
                buckets: scaled(&bucket_values(self.cell.model), factor, gradient_values),
                momentum: Some(self.cell.momentum.into()),
                machine: None,
                backend: BACKEND.to_owned(),
                codecs: lab.codecs.into_iter().filter(is_known).collect(),
                collectives: COLLECTIVES.map(Into::into).to_vec(),
                ..lab
            }
        };
        Ok((0..self.cell.world as u32).map(hello).collect())
    }

    fn codec_seconds(&self, spec: &CompressorSpec) -> Result<CodecSeconds> {
        steps::codec(self.truth, self.cell, spec)
    }

    /// One step of training, or one iteration of a trial. None where training has ended: the ranks refused what is not finite.
    pub fn tick<B: ControlPlane>(&mut self, context: &mut JobContext<'_, B>) -> Result<Option<Ticked>> {
        self.take_orders(context.control_plane);
        let tick = self.control.begin();
        let verdicts = self.verdicts();
        if self.control.announces() {
            self.message = self.control.message();
        }
        let agreement = if B::EVERY_STEP { Vec::new() } else { self.agreement() };
        let samples = self.samples();
        let stepped = match self.ranks.tick(&tick) {
            Err(_) if tick.step > 0 && self.ranks.has_refused() => return Ok(None),
            stepped => stepped.with_context(|| format!("train step {} under {}", tick.step, tick.plan))?,
        };
        let exchanged = &stepped.buckets[..];
        let codecs = (0..exchanged.len()).map(|bucket| self.codec_seconds(tick.strategy(bucket).spec()));
        let codecs = codecs.collect::<Result<Vec<_>>>()?;
        let shadows = self.shadow_seconds(&tick, exchanged.len())?;
        let of = StepOf { plan: &tick.plan, exchanged, codecs: &codecs, besides: &shadows, control: &agreement };
        // Steps of training meet the same stragglers, however many trials come between them.
        let rng = if tick.trial.is_some() { &mut self.trial_rng } else { &mut self.step_rng };
        let plan = self.timeline.step(&of, rng)?;
        let JobContext { net, control_plane } = context;
        let mut others = |network: &mut _, what| control_plane.handle(network, what);
        let times = job::run(&mut net.network, &net.mesh, self.truth.software, &plan.step, &self.starts, &mut others)?;
        self.hooked |= !tick.plan.is_dense() || tick.trial.is_some();
        let costs = |rank| Costs {
            bucket_energies: self.bucket_energies(&tick, rank),
            ..costs(&plan, &times.ranks[rank], &stepped, rank)
        };
        let costs: Vec<Costs> = (0..self.each.len()).map(costs).collect();
        let took = if B::EVERY_STEP { 1.0 } else { times.ranks[0].ended - self.starts[0] };
        self.starts = times.ranks.iter().map(|rank| rank.ended).collect();
        match (tick.trial, &mut self.trial) {
            (Some(at), Some(trial)) => {
                let ranks = trial.averages.iter_mut().zip(&costs);
                ranks.for_each(|(averages, costs)| averages.record(at, costs.measured()));
                trial.finite = stepped.losses.iter().map(|loss| loss.is_finite()).collect();
                if at.last {
                    self.ranks.restore(&trial.saved);
                }
            }
            _ => self.after_step(&tick, &costs, &stepped, context)?,
        }
        let answers = self.collect(&verdicts)?;
        self.take_samples(&samples, context)?;
        let change = self.control.finish(Duration::from_secs_f64(took), &answers);
        let switched = self.change(change, context);
        let ended = self.starts.iter().copied().fold(0.0, f64::max);
        Ok(Some(Ticked { tick, ended, costs, shadows_s: shadows.iter().sum(), switched }))
    }

    /// What the hook for torch reports of the buckets' gradients.
    fn bucket_energies(&self, tick: &Tick, rank: usize) -> Vec<f64> {
        if !takes_energies(tick.step) || !self.hooked {
            return Vec::new();
        }
        self.ranks.buckets(rank).map(|(_, gradient)| squared_norm(gradient)).collect()
    }

    /// What arrived from the agents since the last tick; only rank 0's counts.
    fn take_orders(&mut self, control_plane: &mut impl ControlPlane) {
        for rank in 0..self.each.len() {
            if let Some(orders) = control_plane.orders(rank).filter(|_| rank == 0) {
                self.orders.put(&orders);
            }
        }
        let (truth, cell) = (self.truth, self.cell);
        let runs = |strategy: &Strategy| {
            let offered = COLLECTIVES.contains(&strategy.collective().as_str());
            offered && strategy.spec().trainable().is_ok() && steps::codec(truth, cell, strategy.spec()).is_ok()
        };
        if let Some(refused) = self.orders.offer(self.control.agreement(), true, runs) {
            self.problems.push(format!("decision {} orders {}, which cannot run here", refused.version, refused.plan));
        }
    }

    /// What the control group carries in the tick that has begun.
    fn agreement(&self) -> Vec<Carried> {
        let message = self.control.announces().then_some((How::Broadcast(0), MESSAGE_BYTES));
        let answers = self.control.gathers().then_some((How::Gather, ANSWER_BYTES));
        message.into_iter().chain(answers).map(|(how, bytes)| Carried { how, bytes, fixed: bytes }).collect()
    }

    /// What each rank says of the trial under way.
    fn verdicts(&self) -> Vec<Verdict> {
        let verdict = |rank: usize| match &self.trial {
            Some(trial) if !trial.finite[rank] => Verdict::Diverged,
            Some(trial) if rank == 0 && trial.averages[0].over_budget(self.now(0)) => Verdict::Budget,
            _ => Verdict::GoOn,
        };
        (0..self.each.len()).map(verdict).collect()
    }

    /// When a rank's last tick ended.
    fn now(&self, rank: usize) -> Duration {
        Duration::from_secs_f64(self.starts[rank])
    }

    /// By bucket: what shadow trials take of each rank's core.
    fn shadow_seconds(&self, tick: &Tick, buckets: usize) -> Result<Vec<f64>> {
        let shadows = &self.each[0].shadows;
        let mut seconds = vec![0.0; buckets];
        if tick.trial.is_some() || !self.watching || !shadows.under_way() {
            return Ok(seconds);
        }
        for (strategy, _) in shadows.gains() {
            let codec = self.codec_seconds(strategy.spec())?;
            for (bucket, seconds) in seconds.iter_mut().enumerate() {
                *seconds += codec.compress(Shadows::SHARE * self.timeline.values(bucket), strategy.cr().get());
            }
        }
        Ok(seconds)
    }

    fn after_step<B: ControlPlane>(
        &mut self,
        tick: &Tick,
        costs: &[Costs],
        stepped: &Stepped,
        context: &mut JobContext<'_, B>,
    ) -> Result<()> {
        let is_sampled = self.control.is_sampled();
        for (rank, costs) in costs.iter().enumerate() {
            let now = self.now(rank);
            let Trainer { telemetry, shadows, leader_shadows } = &mut self.each[rank];
            let record = costs.record(tick.step, Some(f64::from(stepped.losses[rank])), None);
            let mut messages = telemetry.step((tick.version, tick.plan.clone()), record, now);
            for (index, (bucket, gradient)) in self.ranks.buckets(rank).enumerate() {
                if is_sampled {
                    leader_shadows.observe(bucket.params(), gradient);
                }
                if !shadows.begin(index, bucket)? {
                    shadows.observe(index, bucket, gradient)?;
                }
            }
            messages.extend(shadows.end_step().and_then(|gains| telemetry.shadows(&gains)));
            context.send(rank, messages);
        }
        self.watching = true;
        Ok(())
    }

    /// By rank: its sample for AR-Topk's shadows of the tick that begins, where the ranks send any.
    fn samples(&mut self) -> Vec<Vec<u8>> {
        if self.control.sample().is_none() {
            return Vec::new();
        }
        let (begins, ranks) = (self.control.begins_sampling(), &self.ranks);
        let sample = |(rank, own): (usize, &mut Trainer)| {
            own.leader_shadows.sample(begins, ranks.buckets(rank).map(|(bucket, _)| bucket))
        };
        self.each.iter_mut().enumerate().map(sample).collect()
    }

    /// On rank 0.
    fn take_samples<B: ControlPlane>(&mut self, samples: &[Vec<u8>], context: &mut JobContext<'_, B>) -> Result<()> {
        if samples.is_empty() {
            return Ok(());
        }
        let Trainer { telemetry, leader_shadows, .. } = &mut self.each[0];
        leader_shadows.receive(samples, self.ranks.buckets(0).map(|(bucket, _)| bucket))?;
        if self.control.reports_samples() {
            context.send(0, telemetry.shadows(&leader_shadows.gains()));
        }
        Ok(())
    }

    /// What the control group has sent by the end of a tick: the message that is due, and all ranks' answers.
    fn collect(&mut self, verdicts: &[Verdict]) -> Result<Vec<Answer>> {
        if self.control.is_due() {
            self.control.accept(&std::mem::take(&mut self.message)).context("agree on what rank 0 announces")?;
        }
        if !self.control.gathers() {
            return Ok(Vec::new());
        }
        let answer = |verdict: &Verdict| Answer::decode(&Answer::of(*verdict).encode());
        verdicts.iter().map(answer).collect::<Option<_>>().context("read what a rank says of a trial")
    }

    fn change<B: ControlPlane>(&mut self, change: Change, context: &mut JobContext<'_, B>) -> Option<InForce> {
        match change {
            Change::Switched(in_force) => {
                for rank in 0..self.each.len() {
                    let now = self.now(rank);
                    context.send(rank, self.each[rank].telemetry.applied(&in_force, now));
                }
                return Some(*in_force);
            }
            Change::TrialStarts(plan) => self.start_trial(&plan),
            Change::TrialEnds(cause) => self.end_trial(cause, context),
            // No rank refuses a trial or leaves one, and nobody ends the job before its last step.
            Change::None | Change::TrialRefused(..) | Change::TrialLeft | Change::Stop => {}
        }
        None
    }

    fn start_trial(&mut self, plan: &TrialPlan) {
        self.watching = false;
        for Trainer { shadows, leader_shadows, .. } in &mut self.each {
            shadows.watch(&plan.candidates);
            leader_shadows.watch(&plan.candidates);
        }
        let averages =
            (0..self.each.len()).map(|rank| Trial::start(plan.clone(), Clocks::simulated(self.now(rank)))).collect();
        self.trial = Some(Running { saved: self.ranks.save(), averages, finite: vec![true; self.each.len()] });
    }

    fn end_trial<B: ControlPlane>(&mut self, cause: Option<AbortCause>, context: &mut JobContext<'_, B>) {
        let Some(Running { saved, averages, .. }) = self.trial.take() else { return };
        self.ranks.restore(&saved);
        for (rank, averages) in averages.into_iter().enumerate() {
            let report = averages.finish((&self.job, Rank(rank as u32)), cause, Clocks::simulated(self.now(rank)));
            context.send(rank, [self.each[rank].telemetry.trial(report)]);
        }
    }
}

/// The values of each bucket where a gradient of `all` values stands for them, `factor` times as many: none is empty, and the last takes
/// what rounding leaves.
fn scaled(buckets: &[usize], factor: f64, all: u64) -> Vec<u64> {
    let (mut left, count) = (all, buckets.len() as u64);
    let scaled = |(values, number): (&usize, u64)| {
        let behind = count - number;
        let most = left.saturating_sub(behind).max(1);
        let own = if behind == 0 { left } else { ((*values as f64 * factor).round() as u64).clamp(1, most) };
        left = left.saturating_sub(own);
        own
    };
    buckets.iter().zip(1..).map(scaled).collect()
}

/// What a rank measures of a step, as the hook for torch does it (`python/src/meter.rs`): synchronisation is what backward waited for, and
/// what came after its last bucket. Ranks of several nodes share no clock by which to tell how long they waited for the last one.
fn costs(plan: &Plan, times: &RankTimes, stepped: &Stepped, rank: usize) -> Costs {
    let (script, began) = (&plan.step.ranks[rank], times.began);
    let (mut last_launch, mut blocked, mut bytes) = (began, 0.0, 0.0);
    for (number, (what, &done)) in script.iter().zip(&times.done).enumerate() {
        match what {
            Do::Launch(collective) | Do::Wait(collective) if plan.step.collectives[*collective].group == CONTROL => {}
            Do::Launch(collective) => {
                let rounds = &plan.step.collectives[*collective].program.ranks[rank];
                bytes += rounds.iter().flat_map(|round| &round.sends).map(|send| send.bytes).sum::<f64>();
                last_launch = done;
            }
            Do::Wait(_) => {
                if let Some(Do::Launch(_)) = script.get(number + 1) {
                    blocked += done - last_launch;
                }
            }
            Do::Compute(_) => {}
        }
    }
    let tail = times.done[plan.exchanged] - last_launch;
    let step = times.ended - began;
    let energies = stepped.buckets.iter().filter_map(|bucket| bucket.energies.get(rank).copied());
    let seconds = |seconds: f64| Duration::from_secs_f64(seconds.max(0.0));
    Costs {
        compute: seconds(step - plan.compress - blocked - tail),
        comp: seconds(plan.compress + plan.decompress),
        sync: seconds(blocked + tail - plan.decompress),
        wait: None,
        step: seconds(step),
        bytes: bytes.round() as u64,
        energy: energies.fold(Default::default(), |sum, energy| sum + energy),
        bucket_energies: Vec::new(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ranks::Exchanged;
    use flexcomm_compression::Energy;
    use flexcomm_truth::job::{Collective, Program, Round, Send, Step};

    fn step(scripts: &[Do], collectives: usize) -> Step {
        let round =
            Round { index: 0, sends: vec![Send { to: 1, bytes: 100.0 }], senders: vec![0], received_bytes: 100.0 };
        let program = Arc::new(Program { ranks: vec![vec![round.clone()], vec![round]], segmented: false });
        let collective = Collective { group: 0, program };
        Step { ranks: vec![scripts.to_vec(); 2], collectives: vec![collective; collectives] }
    }

    #[test]
    fn scaled_buckets_make_up_the_gradient() {
        assert_eq!(scaled(&[10, 20, 31], 1.0, 61), [10, 20, 31]);
        assert_eq!(scaled(&[3, 3, 3], 0.5, 5), [2, 2, 1], "two roundings up, and the rest");
        assert_eq!(scaled(&[100, 1, 1], 0.1, 10), [8, 1, 1], "none is empty");
        let (buckets, factor) = (bucket_values(crate::ranks::Model::Convolutional), 37.3);
        let all = (buckets.iter().sum::<usize>() as f64 * factor).round() as u64;
        let scaled = scaled(&buckets, factor, all);
        assert_eq!(scaled.iter().sum::<u64>(), all);
        assert!(
            scaled
                .iter()
                .zip(&buckets)
                .all(|(n, of)| n.abs_diff((*of as f64 * factor).round() as u64) <= buckets.len() as u64),
            "{scaled:?}"
        );
    }

    /// Two buckets, handed over at 4 and 6 s; the first is waited for until 7 s and decompressed until 7.5 s, the second until 9 and 9.5 s.
    #[test]
    fn a_step_is_measured_as_the_hook_does() {
        let work = Do::Compute(0.0);
        let first = [work, Do::Launch(0), work, Do::Launch(1)];
        let script = [&first[..], &[Do::Wait(0), work, Do::Wait(1), work, work]].concat();
        let plan = Plan { step: step(&script, 2), compress: 1.0, decompress: 1.0, exchanged: 7 };
        let done = vec![4.0, 4.0, 6.0, 6.0, 7.0, 7.5, 9.0, 9.5, 9.75];
        let times = RankTimes { began: 1.0, done, collectives: Vec::new(), ended: 9.75 };
        let energy = Energy { sent: 1.0, compensated: 2.0 };
        let bucket = Exchanged { rounds: Vec::new(), energies: vec![energy; 2] };
        let stepped = Stepped { losses: vec![0.5; 2], buckets: vec![bucket.clone(), bucket] };
        let seconds = Duration::from_secs_f64;
        let expected = Costs {
            // Of 8.75 s, 3.5 s waited behind backward, and one compressed.
            compute: seconds(4.25),
            comp: seconds(2.0),
            sync: seconds(2.5),
            wait: None,
            step: seconds(8.75),
            bytes: 200,
            energy: Energy { sent: 2.0, compensated: 4.0 },
            bucket_energies: Vec::new(),
        };
        assert_eq!(costs(&plan, &times, &stepped, 1), expected);
    }

    /// One bucket with two rounds: the second is launched when the first has been waited for.
    #[test]
    fn what_a_later_round_waits_for_is_not_computing() {
        let work = Do::Compute(0.0);
        let script = [work, Do::Launch(0), Do::Wait(0), Do::Launch(1), Do::Wait(1), work, work];
        let plan = Plan { step: step(&script, 2), compress: 0.5, decompress: 0.5, exchanged: 5 };
        let done = vec![2.0, 2.0, 5.0, 5.0, 7.0, 7.5, 8.0];
        let times = RankTimes { began: 0.0, done, collectives: Vec::new(), ended: 8.0 };
        let bucket = Exchanged { rounds: Vec::new(), energies: Vec::new() };
        let costs = costs(&plan, &times, &Stepped { losses: Vec::new(), buckets: vec![bucket] }, 0);
        let seconds = Duration::from_secs_f64;
        // Of 8 s, 3 s waited for the first round, 2.5 s for and after the second, and half a second compressed.
        assert_eq!((costs.sync, costs.compute, costs.comp), (seconds(5.0), seconds(2.0), seconds(1.0)));
    }
}
