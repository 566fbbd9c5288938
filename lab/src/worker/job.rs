//! The loop of a rank: orders, agreement, steps, trials, reports.

use super::data::Images;
use super::hashes::HashLog;
use super::state::{Saved, StepOutcome, Training};
use anyhow::{Context, Result};
use flexcomm_domain::{JobId, Rank, Strategy};
use flexcomm_exchange::{LeaderShadows, Shadows};
use flexcomm_trainer::{AbortCause, Answer, Change, Clocks, Control, Reporter, Tick, Trial, TrialPlan, Verdict};
use std::io::Write;
use std::time::{Duration, Instant};

/// How long to train.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Length {
    /// Steps of the whole job.
    pub steps: u64,
    /// Steps of an epoch.
    pub steps_per_epoch: u64,
}

/// A rank at work.
pub struct Job {
    /// Its name.
    pub name: JobId,
    /// This rank.
    pub rank: Rank,
    /// How long.
    pub length: Length,
    /// Whether decisions of the orders are followed; trials always are.
    pub follow: bool,
    /// The agreement with the other ranks.
    pub control: Control,
    /// The training.
    pub training: Training,
    /// Held-out images; empty on all ranks but 0.
    pub held_out: Images,
    /// Telemetry.
    pub reporter: Reporter,
    /// What other candidates would keep.
    pub shadows: Shadows,
    /// The same of AR-Topk, over all ranks; rank 0 knows it.
    pub leader_shadows: LeaderShadows,
    /// Parameter hashes.
    pub hashes: HashLog,
    /// N.
    pub world: u32,
    /// On rank 0: the message that was broadcast last, until it is due.
    pub message: Vec<u8>,
    /// On rank 0: its own sample for AR-Topk's shadows, until the others' are there.
    pub sample: Vec<u8>,
    /// Where progress goes, a line an epoch; rank 0 only.
    pub progress: Box<dyn Write + Send>,
}

/// How a job ended.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Ended {
    /// Steps that were done.
    pub steps: u64,
    /// Whether it was told to end before its time.
    pub stopped: bool,
    /// Last held-out accuracy, on rank 0.
    pub accuracy: Option<f64>,
    /// Loss of the last batch.
    pub loss: f32,
}

/// A trial under way.
struct Running {
    averages: Trial,
    /// Of before it.
    saved: Saved,
    /// Whether the last iteration's loss was.
    finite: bool,
}

#[derive(Default)]
struct Epoch {
    step_s: f64,
    sync_s: f64,
    loss: f64,
    steps: u32,
}

impl Job {
    /// Trains to the end, or until told to stop.
    pub fn run(mut self) -> Result<Ended> {
        let mut ended = Ended { steps: 0, stopped: false, accuracy: None, loss: f32::NAN };
        let done = self.train(&mut ended);
        // Also after an error: what was reached is worth knowing.
        let flushed = self.hashes.flush();
        self.reporter.finish();
        done?;
        flushed?;
        Ok(ended)
    }

    fn train(&mut self, ended: &mut Ended) -> Result<()> {
        let clock = Instant::now();
        let mut trial: Option<Running> = None;
        let mut epoch = Epoch::default();
        while self.control.look().step() < self.length.steps {
            self.poll_orders();
            let began = Instant::now();
            let tick = self.control.begin();
            let verdict = match &trial {
                Some(trial) if !trial.finite => Verdict::Diverged,
                Some(trial) if self.rank == Rank(0) && trial.averages.over_budget(clock.elapsed()) => Verdict::Budget,
                _ => Verdict::GoOn,
            };
            self.post(verdict);
            let outcome = self.tick(&tick)?;
            match (tick.trial, &mut trial) {
                (Some(at), Some(trial)) => {
                    trial.finite = outcome.loss.is_finite();
                    trial.averages.record(at, outcome.costs.measured());
                    if at.last {
                        self.training.restore(&trial.saved);
                    }
                }
                _ => self.after_step(&tick, &outcome, &mut epoch, ended)?,
            }
            let answers = self.collect(verdict).context("agree with the other ranks")?;
            self.collect_samples().context("gather samples of the gradients")?;
            match self.control.finish(began.elapsed(), &answers) {
                Change::None => {}
                Change::Switched(in_force) => {
                    tracing::info!(version = %in_force.version, plan = %in_force.plan,
                        step = in_force.since_step, "in force");
                    self.reporter.applied(&in_force);
                }
                Change::TrialStarts(plan) => trial = Some(self.start_trial(plan, clock.elapsed())),
                Change::TrialEnds(cause) => self.end_trial(trial.take(), cause, clock.elapsed()),
                // Every rank of the lab can run trials, and none leaves one.
                Change::TrialRefused(..) | Change::TrialLeft => {}
                Change::Stop => {
                    ended.stopped = true;
                    return Ok(());
                }
            }
        }
        Ok(())
    }

    /// Sends what the control group has to send in the tick that has begun.
    fn post(&mut self, verdict: Verdict) {
        let mesh = self.training.sync().exchanger().mesh_mut();
        if self.control.gathers() {
            mesh.post(&Answer::of(verdict).encode());
        }
        if self.rank == Rank(0) && self.control.announces() {
            self.message = self.control.message();
            mesh.post(&self.message);
        }
        self.post_sample();
    }

    fn post_sample(&mut self) {
        if self.control.sample().is_none() {
            return;
        }
        let sample = self.leader_shadows.sample(self.control.begins_sampling(), [self.training.exchanged().1]);
        match self.rank {
            Rank(0) => self.sample = sample,
            _ => self.training.sync().exchanger().mesh_mut().post_to(Rank(0), sample),
        }
    }

    /// On rank 0: all ranks' samples of this tick, where they send any.
    fn collect_samples(&mut self) -> Result<()> {
        if self.rank != Rank(0) || self.control.sample().is_none() {
            return Ok(());
        }
        let mut rows = vec![std::mem::take(&mut self.sample)];
        let mesh = self.training.sync().exchanger().mesh_mut();
        for rank in 1..self.world {
            rows.push(mesh.collect(Rank(rank))?);
        }
        if let Err(error) = self.leader_shadows.receive(&rows, [self.training.exchanged().1]) {
            tracing::warn!(%error, "the shadow trials of AR-Topk are dropped");
        }
        if self.control.reports_samples() {
            self.reporter.shadows(&self.leader_shadows.gains());
        }
        Ok(())
    }

    /// Takes in what the control group has sent by the end of a tick: the message that is due (rank 0 has its own), and all ranks'
    /// answers, where they were gathered.
    fn collect(&mut self, verdict: Verdict) -> Result<Vec<Answer>> {
        let mesh = self.training.sync().exchanger().mesh_mut();
        if self.control.is_due() {
            let leads = self.rank == Rank(0);
            let message = if leads { std::mem::take(&mut self.message) } else { mesh.collect(Rank(0))? };
            self.control.accept(&message)?;
        }
        if !self.control.gathers() {
            return Ok(Vec::new());
        }
        let answer = |rank| match rank == self.rank {
            true => Ok(Answer::of(verdict)),
            false => {
                Answer::decode(&mesh.collect(rank)?).with_context(|| format!("read what rank {rank} says of a trial"))
            }
        };
        (0..self.world).map(Rank).map(answer).collect()
    }

    fn tick(&mut self, tick: &Tick) -> Result<StepOutcome> {
        let check = self.control.check(0, 0);
        let done = self.training.step(check, tick);
        done.with_context(|| format!("step {} under version {} ({})", tick.step, tick.version, tick.plan))
    }

    /// What arrived from outside since the last tick. Never waits.
    fn poll_orders(&mut self) {
        if self.rank == Rank(0) && self.training.sync().exchanger().mesh().told_to_stop() {
            self.control.agreement().request_stop();
        }
        let name = &self.name;
        // Training by others does not move; they were not offered to the controller.
        let runs = |strategy: &Strategy| match strategy.spec().trainable() {
            Ok(_) => true,
            Err(error) => {
                tracing::warn!(job = %name, "failed to {error}; training goes on with the strategy in force");
                false
            }
        };
        if let Some(orders) = self.reporter.orders() {
            orders.offer(self.control.agreement(), self.follow, runs);
        }
    }

    fn after_step(&mut self, tick: &Tick, outcome: &StepOutcome, epoch: &mut Epoch, ended: &mut Ended) -> Result<()> {
        let done = tick.step + 1;
        let accuracy = self.end_of_epoch(done).then(|| self.training.accuracy(&self.held_out));
        (ended.steps, ended.loss) = (done, outcome.loss);
        ended.accuracy = accuracy.or(ended.accuracy);
        let record = outcome.costs.record(tick.step, Some(f64::from(outcome.loss)), accuracy);
        self.reporter.step((tick.version, tick.plan.clone()), record);
        self.observe_shadows();
        if self.hashes.wanted() {
            self.hashes.step(tick.step, tick.version, self.training.hash())?;
        }
        epoch.step_s += outcome.costs.step.as_secs_f64();
        epoch.sync_s += outcome.costs.sync.as_secs_f64();
        epoch.loss += f64::from(outcome.loss);
        epoch.steps += 1;
        if let Some(accuracy) = accuracy {
            self.reporter.flush();
            self.report_epoch(tick, &std::mem::take(epoch), accuracy)?;
        }
        Ok(())
    }

    /// After a step's exchange: they begin with the residual that it left, and the next gradient is the first that they see.
    fn observe_shadows(&mut self) {
        let (gradient, bucket) = self.training.exchanged();
        let began = Instant::now();
        if self.control.is_sampled() {
            self.leader_shadows.observe(bucket.params(), gradient);
        }
        let begun = match self.shadows.begin(0, bucket) {
            Ok(false) => self.shadows.observe(0, bucket, gradient).map(|()| false),
            begun => begun,
        };
        if let Err(error) = &begun {
            tracing::warn!(%error, "the shadow trial is dropped");
        }
        // In the step in which they begin they see no gradient yet.
        let gains = if matches!(begun, Ok(true)) { None } else { self.shadows.end_step() };
        self.reporter.shadows_took(began.elapsed());
        if let Some(gains) = gains {
            self.reporter.shadows(&gains);
        }
    }

    /// True on rank 0 after the last step of an epoch or of the job.
    fn end_of_epoch(&self, done: u64) -> bool {
        self.rank == Rank(0) && (done.is_multiple_of(self.length.steps_per_epoch) || done == self.length.steps)
    }

    fn report_epoch(&mut self, tick: &Tick, epoch: &Epoch, accuracy: f64) -> Result<()> {
        self.hashes.flush()?;
        let steps = f64::from(epoch.steps.max(1));
        let number = tick.step / self.length.steps_per_epoch;
        let written = writeln!(
            self.progress,
            "epoch {number}: step {}, loss {:.4}, accuracy {:.1} %, {} (version {}), step {:.1} ms of which sync {:.1} ms",
            tick.step + 1,
            epoch.loss / steps,
            accuracy * 100.0,
            tick.plan,
            tick.version,
            epoch.step_s / steps * 1e3,
            epoch.sync_s / steps * 1e3,
        )
        .and_then(|()| self.progress.flush());
        // A closed pipe is no reason to stop training.
        if let Err(error) = written {
            tracing::debug!(%error, "nobody reads the progress");
        }
        Ok(())
    }

    fn start_trial(&mut self, plan: TrialPlan, now: Duration) -> Running {
        tracing::info!(trial = plan.id, candidates = plan.candidates.len(), "live trial");
        self.shadows.watch(&plan.candidates);
        self.leader_shadows.watch(&plan.candidates);
        Running { averages: Trial::start(plan, Clocks::read(now)), saved: self.training.save(), finite: true }
    }

    fn end_trial(&mut self, trial: Option<Running>, cause: Option<AbortCause>, now: Duration) {
        let Some(Running { averages, saved, .. }) = trial else { return };
        self.training.restore(&saved);
        self.reporter.trial(averages.finish((&self.name, self.rank), cause, Clocks::read(now)));
    }
}
