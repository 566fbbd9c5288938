//! What a rank reports, and when: gathers steps into a few reports, and completes a trial's report by its shadow trials. Pure: time
//! is given.

use crate::agreement::InForce;
use crate::pace::Pace;
use flexcomm_domain::{Energy, JobId, Plan, Rank, Strategy, Version};
use flexcomm_wire::{
    AppliedReport, FromTrainer, MAX_LOSS, MAX_STEPS, MAX_TEXT, StepRecord, StepsReport, StrategyWire, TrialOutcome,
    TrialReport,
};
use std::time::Duration;

/// Least gain in a report: gain is a share above 0, and a rank whose own part was empty still reports.
pub const LEAST_GAIN: f64 = 1e-9;

/// A rank's messages to its agent. `now` is on any steady clock that begins at 0.
#[derive(Debug)]
pub struct Telemetry {
    job: JobId,
    rank: Rank,
    pending: Vec<StepRecord>,
    running: Option<(Version, Plan)>,
    pace: Pace,
    last_flush: Duration,
    /// The newest trial's, which its shadows complete.
    trial: Option<TrialReport>,
}

/// Of more buckets energies are not reported: a report has to fit into a line.
const MOST_ENERGIES: usize = 256;

impl Telemetry {
    /// With nothing to say.
    pub fn new(job: JobId, rank: Rank) -> Self {
        let (pending, running, pace) = Default::default();
        Self { job, rank, pending, running, pace, last_flush: Duration::ZERO, trial: None }
    }

    /// Takes in a step that ran this plan under this version; what is to be sent now, at most two messages.
    pub fn step(&mut self, running: (Version, Plan), mut record: StepRecord, now: Duration) -> Vec<FromTrainer> {
        let running = Some(running);
        let ended = self.running != running || self.pending.len() >= MAX_STEPS;
        let before = if ended { self.flush(now) } else { None };
        if self.running != running {
            (self.running, self.pace) = (running, Pace::default());
        }
        record.gain = record.gain.clamp(LEAST_GAIN, 1.0);
        record.energy = record.energy.filter(|energy| energy.is_finite());
        let energies = &record.bucket_energies;
        if energies.len() > MOST_ENERGIES || !energies.iter().all(|energy| energy.is_finite()) {
            record.bucket_energies.clear();
        }
        // A report with a larger loss is refused, and the loss shows that training diverges.
        record.loss = record.loss.filter(|loss| loss.is_finite()).map(|loss| loss.clamp(-MAX_LOSS, MAX_LOSS));
        self.pending.push(record);
        let due = self.pace.is_due(now.saturating_sub(self.last_flush), &self.pending);
        let own = if due { self.flush(now) } else { None };
        before.into_iter().chain(own).collect()
    }

    /// The steps that have gathered.
    pub fn flush(&mut self, now: Duration) -> Option<FromTrainer> {
        let waited = now.saturating_sub(std::mem::replace(&mut self.last_flush, now));
        let steps = std::mem::take(&mut self.pending);
        let (version, plan) = self.running.as_ref().filter(|_| !steps.is_empty())?;
        self.pace.reported(waited, &steps);
        let (job, rank, version, strategy) = (self.job.clone(), self.rank.0, version.0, plan.into());
        Some(FromTrainer::Steps(StepsReport { job, rank, version, strategy, steps }))
    }

    /// A decision is in force: the steps before it, and that.
    pub fn applied(&mut self, in_force: &InForce, now: Duration) -> Vec<FromTrainer> {
        let applied = FromTrainer::Applied(AppliedReport {
            job: self.job.clone(),
            rank: self.rank.0,
            version: in_force.version.0,
            digest: in_force.plan.digest().0,
            step: in_force.since_step,
        });
        self.flush(now).into_iter().chain([applied]).collect()
    }

    /// A live trial ended.
    pub fn trial(&mut self, report: TrialReport) -> FromTrainer {
        self.trial = Some(report.clone());
        FromTrainer::Trial(report)
    }

    /// The ranks cannot run this trial; its shadows may still tell something. Of a reason longer than a report may have, which
    /// the agent would drop, the beginning is sent.
    pub fn trial_refused(&mut self, id: u64, why: &str) -> FromTrainer {
        let (job, rank, aborted) = (self.job.clone(), self.rank.0, Some(why.chars().take(MAX_TEXT).collect()));
        let (bytes, cpu_us, shadow_us) = Default::default();
        self.trial(TrialReport { job, rank, id, outcomes: Vec::new(), aborted, cost_us: 0.0, bytes, cpu_us, shadow_us })
    }

    /// The shadows that begin are not those of the newest trial's candidates.
    pub fn forget_trial(&mut self) {
        self.trial = None;
    }

    /// The newest trial's shadows took so long in a step.
    pub fn shadows_took(&mut self, took: Duration) {
        if let Some(report) = &mut self.trial {
            *report.shadow_us.get_or_insert_default() += took.as_secs_f64() * 1e6;
        }
    }

    /// The newest trial's report again, with what its shadows show by now: of candidates that ran, and of those that only had a
    /// shadow.
    pub fn shadows(&mut self, energies: &[(Strategy, Energy)]) -> Option<FromTrainer> {
        let report = self.trial.as_mut().filter(|_| !energies.is_empty())?;
        for (strategy, energy) in energies {
            let (strategy, gain) = (StrategyWire::from(*strategy), energy.gain().clamp(LEAST_GAIN, 1.0));
            let energy = Some(energy.compensated);
            match report.outcomes.iter_mut().find(|outcome| outcome.strategy == strategy) {
                Some(outcome) => {
                    (outcome.shadow_gain, outcome.shadow_energy) = (Some(gain), energy);
                    if outcome.iterations == 0 {
                        (outcome.gain, outcome.energy) = (gain, energy);
                    }
                }
                None => report.outcomes.push(TrialOutcome {
                    strategy,
                    gain,
                    energy,
                    shadow_gain: Some(gain),
                    shadow_energy: energy,
                    comp_us: 0.0,
                    sync_us: 0.0,
                    iterations: 0,
                }),
            }
        }
        Some(FromTrainer::Trial(report.clone()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::pace::tests::record;

    /// The first steps of what runs are reported every 200 ms, by the time that is given, counted from the first one.
    #[test]
    fn steps_gather_until_they_are_due() {
        let mut telemetry = Telemetry::new(JobId::new("j").unwrap(), Rank(0));
        let mut counts = Vec::new();
        for step in 0..10 {
            let now = Duration::from_millis(70 * (step + 1));
            let messages = telemetry.step((Version(0), Plan::DENSE_RING), record(step), now);
            counts.extend(messages.iter().map(|message| match message {
                FromTrainer::Steps(report) => (step, report.steps.len()),
                other => panic!("{other:?}"),
            }));
        }
        assert_eq!(counts, [(3, 4), (6, 3), (9, 3)]);
    }
}
