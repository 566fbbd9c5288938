//! A live trial: snapshot, run each candidate for some iterations, restore, next. No clock: time is given.

use crate::agreement::TrialTick;
use crate::message::{AbortCause, TrialPlan};
use crate::report::LEAST_GAIN;
use flexcomm_domain::{Energy, JobId, Rank};
use flexcomm_wire::{TrialOutcome, TrialReport};
use std::time::Duration;

/// Everything that training depends on: parameters, optimizer, error feedback, data position, generators of
/// random numbers. After `restore` the training must go on bit for bit as if nothing had happened.
pub trait Snapshot {
    /// The copy.
    type Saved;
    /// Why copying failed.
    type Error;

    /// Copies everything.
    fn save(&mut self) -> Result<Self::Saved, Self::Error>;

    /// Puts everything back. Called once per candidate with the same copy.
    fn restore(&mut self, saved: &Self::Saved) -> Result<(), Self::Error>;
}

/// What one iteration of a candidate showed on this rank.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Measured {
    /// Of this rank's gradient.
    pub energy: Energy,
    /// Compress and decompress, in microseconds.
    pub comp_us: f64,
    /// The collective, in microseconds.
    pub sync_us: f64,
}

/// A trial under way on one rank. Which iteration runs and when it ends is the agreement's business; this
/// keeps the copy and the averages.
#[derive(Debug)]
pub struct Trial<S: Snapshot> {
    plan: TrialPlan,
    saved: S::Saved,
    started: Duration,
    sums: Vec<Sum>,
}

#[derive(Debug, Clone, Copy, Default)]
struct Sum {
    iterations: u32,
    gain: f64,
    energy: f64,
    comp_us: f64,
    sync_us: f64,
}

impl<S: Snapshot> Trial<S> {
    /// Takes the snapshot. `now` on any steady clock.
    pub fn start(plan: TrialPlan, training: &mut S, now: Duration) -> Result<Self, S::Error> {
        let sums = vec![Sum::default(); plan.candidates.len()];
        Ok(Self { saved: training.save()?, plan, started: now, sums })
    }

    /// Whether the time budget is used up. Rank 0 then asks the agreement to abort; other ranks do nothing.
    pub fn over_budget(&self, now: Duration) -> bool {
        now.saturating_sub(self.started) > Duration::from_millis(self.plan.budget_ms)
    }

    /// Takes in an iteration; restores when it was its candidate's last, so that the next one starts equal.
    pub fn record(&mut self, training: &mut S, tick: TrialTick, measured: Measured) -> Result<(), S::Error> {
        if let Some(sum) = self.sums.get_mut(tick.candidate) {
            sum.iterations += 1;
            sum.gain += measured.energy.gain().clamp(LEAST_GAIN, 1.0);
            sum.energy += measured.energy.compensated;
            sum.comp_us += measured.comp_us;
            sum.sync_us += measured.sync_us;
        }
        if tick.within + 1 == self.plan.iterations {
            training.restore(&self.saved)?;
        }
        Ok(())
    }

    /// Restores and reports the averages of the candidates that ran at least once.
    pub fn finish(
        self,
        training: &mut S,
        who: (&JobId, Rank),
        aborted: Option<AbortCause>,
        now: Duration,
    ) -> Result<TrialReport, S::Error> {
        training.restore(&self.saved)?;
        let ran = self.plan.candidates.iter().zip(&self.sums).filter(|(_, sum)| sum.iterations > 0);
        let mean = |total: f64, sum: &Sum| total / f64::from(sum.iterations);
        let outcomes = ran.map(|(strategy, sum)| TrialOutcome {
            strategy: (*strategy).into(),
            gain: mean(sum.gain, sum),
            energy: Some(mean(sum.energy, sum)).filter(|energy| energy.is_finite()),
            shadow_gain: None,
            shadow_energy: None,
            comp_us: mean(sum.comp_us, sum),
            sync_us: mean(sum.sync_us, sum),
            iterations: sum.iterations,
        });
        Ok(TrialReport {
            job: who.0.clone(),
            rank: who.1.0,
            id: self.plan.id,
            outcomes: outcomes.collect(),
            aborted: aborted.map(|cause| cause.as_str().to_owned()),
            cost_us: now.saturating_sub(self.started).as_secs_f64() * 1e6,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use flexcomm_domain::Strategy;

    struct Counter(u64);

    impl Snapshot for Counter {
        type Saved = u64;
        type Error = std::convert::Infallible;
        fn save(&mut self) -> Result<u64, Self::Error> {
            Ok(self.0)
        }
        fn restore(&mut self, saved: &u64) -> Result<(), Self::Error> {
            self.0 = *saved;
            Ok(())
        }
    }

    fn plan() -> TrialPlan {
        let candidates = ["topk@0.1/allgather", "topk@0.01/allgather", "none@1/dense-tree"];
        let candidates = candidates.iter().map(|s| s.parse::<Strategy>().unwrap()).collect();
        TrialPlan::new(9, candidates, 2, 50).unwrap()
    }

    fn run(ticks: u32) -> (Trial<Counter>, Counter) {
        let mut training = Counter(41);
        let mut trial = Trial::start(plan(), &mut training, Duration::from_secs(1)).unwrap();
        for i in 0..ticks {
            if i % 2 == 0 {
                assert_eq!(training.0, 41, "each candidate starts from the snapshot");
            }
            training.0 += 1;
            let energy = Energy { sent: 1.0 + f64::from(i), compensated: 2.0 + 2.0 * f64::from(i) };
            let measured = Measured { energy, comp_us: f64::from(i), sync_us: 10.0 };
            trial
                .record(&mut training, TrialTick { candidate: (i / 2) as usize, iteration: i, within: i % 2 }, measured)
                .unwrap();
        }
        (trial, training)
    }

    #[test]
    fn averages_per_candidate_and_restores() {
        let (trial, mut training) = run(6);
        let who = JobId::new("j").unwrap();
        let report = trial.finish(&mut training, (&who, Rank(2)), None, Duration::from_millis(1030)).unwrap();
        assert_eq!(training.0, 41);
        assert_eq!((report.id, report.rank, report.aborted, report.cost_us), (9, 2, None, 30_000.0));
        let comp: Vec<_> = report.outcomes.iter().map(|o| (o.comp_us, o.gain, o.energy, o.iterations)).collect();
        assert_eq!(comp, [(0.5, 0.5, Some(3.0), 2), (2.5, 0.5, Some(7.0), 2), (4.5, 0.5, Some(11.0), 2)]);
    }

    #[test]
    fn an_aborted_trial_reports_what_ran_and_restores() {
        let (trial, mut training) = run(3);
        assert!(!trial.over_budget(Duration::from_millis(1050)));
        assert!(trial.over_budget(Duration::from_millis(1051)));
        assert_ne!(training.0, 41);
        let who = JobId::new("j").unwrap();
        let now = Duration::from_millis(1051);
        let report = trial.finish(&mut training, (&who, Rank(0)), Some(AbortCause::Budget), now).unwrap();
        assert_eq!(training.0, 41);
        assert_eq!(report.outcomes.iter().map(|o| o.iterations).collect::<Vec<_>>(), [2, 1]);
        assert!(report.aborted.unwrap().contains("budget"));
    }
}
